// y = act(x · weightᵀ + bias) + residual, by the kernel for few rows or by cuBLASLt.
#pragma once

#include "plugin.h"

namespace llmc {

// Whether the kernel for few rows serves: 16-bit types, rows of whole 16-byte vectors.
inline bool is_gemv(DType dtype, int64_t rows, int64_t in) {
  return dtype != DType::kFloat32 && rows <= kernels::kGemvRows && in % 8 == 0;
}

inline void linear(const Tensor& x, const Tensor& weight, const Tensor* bias, const Tensor* residual,
                   const Tensor& y, Activation activation, const Context& context) {
  const int in = static_cast<int>(weight.shape[1]), out = static_cast<int>(weight.shape[0]);
  const int rows = static_cast<int>(x.size() / in);
  const void* bias_data = bias != nullptr ? bias->data : nullptr;
  const void* residual_data = residual != nullptr ? residual->data : nullptr;
  if (is_gemv(x.dtype, rows, in)) {
    kernels::GemvParams p{y.data, x.data, weight.data, bias_data, residual_data, rows, in, out,
                          activation, false};
    check(kernels::gemv(x.dtype, p, context.stream), "a GEMV");
  } else if (!context.gemm->run(x.dtype, y.data, x.data, weight.data, bias_data, residual_data, rows, in,
                                out, activation, context.stream)) {
    check(kernels::activate(y.dtype, y.data, y.size(), activation, context.stream), "an activation");
  }
}

// The optional input `index`, or null where it is absent.
inline const Tensor* optional(const std::vector<Tensor>& inputs, size_t index) {
  return index < inputs.size() && inputs[index].data != nullptr ? &inputs[index] : nullptr;
}

}  // namespace llmc
