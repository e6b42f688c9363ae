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

// Whether the kernels for few rows can serve: 16-bit types, rows of whole 16-byte vectors.
inline bool can_gemv(const Tensor& x) {
  return x.dtype != DType::kFloat32 && x.shape[0] <= kernels::kGemvRows && x.shape[1] % 8 == 0;
}

// Bytes for gates and ups side by side, where they are not multiplied at once.
inline int64_t linear_workspace(const Tensor& x, const Tensor& weight, bool gated) {
  return gated ? x.shape[0] * weight.shape[0] * (x.dtype == DType::kFloat32 ? 4 : 2) : 0;
}

// The shape of y; throws Error where x or the weight is no matrix, or the inputs do not fit together.
inline Dims linear_shape(const Dims& x, const Dims& weight, bool gated, const Dims* bias = nullptr,
                         const Dims* residual = nullptr) {
  if (x.size() != 2 || weight.size() != 2)
    throw Error("a GEMM's x and weight have " + std::to_string(x.size()) + " and " +
                std::to_string(weight.size()) + " dimensions; each has 2");
  expect("a GEMM's weight", weight, {weight[0], x[1]});
  if (gated && weight[0].known() && weight[0].number() % 2 != 0)
    throw Error("a gated GEMM's weight has " + std::to_string(weight[0].number()) +
                " rows, of which half are gates");
  const Dims y{x[0], gated ? weight[0] / 2 : weight[0]};
  if (bias != nullptr) expect("a GEMM's bias", *bias, {weight[0]});
  if (residual != nullptr) expect("a GEMM's residual", *residual, y);
  return y;
}

inline kernels::GemvParams gemv_params(const Linear& l) {
  const int out = static_cast<int>(l.weight.shape[0]) / (l.gated ? 2 : 1);
  return {l.y.data, l.x.data, l.weight.data, l.bias != nullptr ? l.bias->data : nullptr,
          l.residual != nullptr ? l.residual->data : nullptr, static_cast<int>(l.x.shape[0]),
          static_cast<int>(l.weight.shape[1]), out, l.activation, l.gated};
}

// By cuBLASLt.
inline void gemm(const Linear& l, void* workspace, const Context& context) {
  const kernels::GemvParams p = gemv_params(l);
  const DType dtype = l.x.dtype;
  if (l.gated) {
    context.gemm->run(dtype, workspace, p.x, p.weight, p.bias, nullptr, p.rows, p.in, 2 * p.out,
                      Activation::kNone, context.stream);
    check(kernels::gate(dtype, p.y, workspace, p.rows, p.out, l.activation, context.stream), "a gate");
  } else if (!context.gemm->run(dtype, p.y, p.x, p.weight, p.bias, p.residual, p.rows, p.in, p.out,
                                l.activation, context.stream)) {
    check(kernels::activate(dtype, p.y, l.y.size(), l.activation, context.stream), "an activation");
  }
}

// By the kernel for few rows, or otherwise, which is cuBLASLt and what else it needs: whichever is the faster.
inline void choose_gemv(DType dtype, const kernels::GemvParams& p, const Context& context, const Gemm::Way& otherwise) {
  const int64_t kind = p.gated + 2 * p.norm + 4 * (p.residual != nullptr);
  context.gemm->choose({static_cast<int64_t>(dtype), p.in, p.out, kind, p.rows}, context.stream,
                       [&] { check(kernels::gemv(dtype, p, context.stream), "a GEMV"); }, otherwise);
}

inline void linear(const Linear& l, void* workspace, const Context& context) {
  const Gemm::Way by_library = [&] { gemm(l, workspace, context); };
  if (can_gemv(l.x)) choose_gemv(l.x.dtype, gemv_params(l), context, by_library);
  else by_library();
}

}  // namespace llmc
