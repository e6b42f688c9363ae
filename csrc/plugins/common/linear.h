// y = act(x · weightᵀ + bias) + residual, gated or not, by the kernels for few rows or by cuBLASLt.
#pragma once

#include "plugin.h"

namespace llmc {

struct Linear {
  const Tensor& x;
  const Tensor& weight;
  const Tensor* bias;
  const Tensor* residual;
  const Tensor& y;
  Activation activation;
  bool gated;
};

// Whether the kernels for few rows serve: 16-bit types, rows of whole 16-byte vectors.
inline bool is_gemv(const Tensor& x) {
  return x.dtype != DType::kFloat32 && x.shape[0] <= kernels::kGemvRows && x.shape[1] % 8 == 0;
}

// Bytes for gates and ups side by side, where they are not multiplied at once.
inline int64_t linear_workspace(const Tensor& x, const Tensor& weight, bool gated) {
  return gated && !is_gemv(x) ? x.shape[0] * weight.shape[0] * (x.dtype == DType::kFloat32 ? 4 : 2) : 0;
}

// The shape of y; throws Error where x or the weight is no matrix.
inline Dims linear_shape(const Dims& x, const Dims& weight, bool gated) {
  if (x.size() != 2 || weight.size() != 2)
    throw Error("a GEMM's x and weight have " + std::to_string(x.size()) + " and " +
                std::to_string(weight.size()) + " dimensions; each has 2");
  return {x[0], gated ? weight[0] / 2 : weight[0]};
}

inline kernels::GemvParams gemv_params(const Linear& l) {
  const int out = static_cast<int>(l.weight.shape[0]) / (l.gated ? 2 : 1);
  return {l.y.data, l.x.data, l.weight.data, l.bias != nullptr ? l.bias->data : nullptr,
          l.residual != nullptr ? l.residual->data : nullptr, static_cast<int>(l.x.shape[0]),
          static_cast<int>(l.weight.shape[1]), out, l.activation, l.gated};
}

inline void linear(const Linear& l, void* workspace, const Context& context) {
  const kernels::GemvParams p = gemv_params(l);
  const DType dtype = l.x.dtype;
  if (is_gemv(l.x)) {
    check(kernels::gemv(dtype, p, context.stream), "a GEMV");
  } else if (l.gated) {
    context.gemm->run(dtype, workspace, p.x, p.weight, p.bias, nullptr, p.rows, p.in, 2 * p.out,
                      Activation::kNone, context.stream);
    check(kernels::gate(dtype, p.y, workspace, p.rows, p.out, l.activation, context.stream), "a gate");
  } else if (!context.gemm->run(dtype, p.y, p.x, p.weight, p.bias, p.residual, p.rows, p.in, p.out,
                                l.activation, context.stream)) {
    check(kernels::activate(dtype, p.y, l.y.size(), l.activation, context.stream), "an activation");
  }
}

}  // namespace llmc
