// y = act(x · weightᵀ + bias) + residual, gated or not, by the kernels for few rows or by cuBLASLt.
#pragma once

#include <algorithm>

#include "quantized.h"

namespace llmc {

struct Linear {
  const Tensor& x;
  const Tensor& weight;
  const kernels::Packing& packing;  // of the weight
  int out;                          // rows of the weight
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
inline int64_t gates_workspace(const Tensor& x, int64_t out, bool gated) {
  return gated ? (x.shape[0] * out * width(x.dtype) + 255) / 256 * 256 : 0;
}

// Rows for which a weight in fewer bits may be multiplied as it is; there are many enough for it to be made numbers beyond.
constexpr int kPackedRows = 256;

// Bytes for those, and for a weight in fewer bits as numbers, or for the kernel that takes it as it is.
inline int64_t linear_workspace(const Tensor& x, const Tensor& weight, const Quantized& quantized, bool gated) {
  const int64_t out = quantized ? quantized.out() : weight.shape[0];
  const int64_t packed = quantized ? std::max(out * quantized.in() * width(x.dtype),
                                              kernels::packed_gemm_scratch(kPackedRows)) : 0;
  return gates_workspace(x, out, gated) + packed;
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
  kernels::GemvParams p{l.y.data, l.x.data, l.weight.data, l.bias != nullptr ? l.bias->data : nullptr,
                        l.residual != nullptr ? l.residual->data : nullptr, static_cast<int>(l.x.shape[0]),
                        static_cast<int>(l.x.shape[1]), l.gated ? l.out / 2 : l.out, l.activation, l.gated};
  p.packing = l.packing;
  return p;
}

// By cuBLASLt; a weight in fewer bits is made numbers first.
inline void gemm(const Linear& l, void* workspace, const Context& context) {
  kernels::GemvParams p = gemv_params(l);
  const DType dtype = l.x.dtype;
  if (p.packing.codes != kernels::Codes::kNone) {
    void* numbers = static_cast<char*>(workspace) + gates_workspace(l.x, l.out, l.gated);
    check(kernels::unpack(dtype, numbers, p.weight, p.packing, l.out, p.in, context.stream), "a weight in fewer bits");
    p.weight = numbers;
  }
  if (l.gated) {
    context.gemm->run(dtype, workspace, p.x, p.weight, p.bias, nullptr, p.rows, p.in, 2 * p.out,
                      Activation::kNone, context.stream);
    check(kernels::gate(dtype, p.y, workspace, p.rows, p.out, l.activation, context.stream), "a gate");
  } else if (!context.gemm->run(dtype, p.y, p.x, p.weight, p.bias, p.residual, p.rows, p.in, p.out,
                                l.activation, context.stream)) {
    check(kernels::activate(dtype, p.y, l.y.size(), l.activation, context.stream), "an activation");
  }
}

// Whether kernels can serve such a weight as it is.
inline bool has_steps(const Tensor& x, const kernels::Packing& packing) {
  return x.shape[1] % 32 == 0 && packing.group_size % 32 == 0;
}

// Whether the kernels for few rows can serve x and such a weight.
inline bool has_few_rows(const Tensor& x, const kernels::Packing& packing) {
  return can_gemv(x) && (packing.codes == kernels::Codes::kNone || has_steps(x, packing));
}

// What a choice between two ways depends on.
inline std::vector<int64_t> way_shape(DType dtype, const kernels::GemvParams& p, bool many) {
  const int64_t kind = p.gated + 2 * p.norm + 4 * (p.residual != nullptr) + 8 * many +
                       16 * static_cast<int64_t>(p.packing.codes);
  return {static_cast<int64_t>(dtype), p.in, p.out, kind, p.rows};
}

// By cuBLASLt, or of a weight in fewer bits as it is: whichever is the faster.
inline void gemm_of_many(const Linear& l, void* workspace, const Context& context) {
  const auto otherwise = [&] { gemm(l, workspace, context); };
  if (l.packing.codes == kernels::Codes::kNone || l.x.dtype == DType::kFloat32 || l.x.shape[0] > kPackedRows ||
      !has_steps(l.x, l.packing))
    return otherwise();
  const kernels::GemvParams p = gemv_params(l);
  void* scratch = static_cast<char*>(workspace) + gates_workspace(l.x, l.out, l.gated);
  context.gemm->choose(way_shape(l.x.dtype, p, true), context.stream, [&] {
    check(kernels::packed_gemm(l.x.dtype, p, scratch, context.counters, context.stream), "a GEMM of a weight in fewer bits");
  }, otherwise);
}

// By the kernel for few rows, or otherwise, which is one for many and what else it needs: whichever is the faster.
inline void choose_gemv(DType dtype, const kernels::GemvParams& p, const Context& context, const Gemm::Way& otherwise) {
  const auto kernel = p.packing.codes == kernels::Codes::kNone ? kernels::gemv : kernels::packed_gemv;
  context.gemm->choose(way_shape(dtype, p, false), context.stream, [&] { check(kernel(dtype, p, context.stream), "a GEMV"); },
                       otherwise);
}

inline void linear(const Linear& l, void* workspace, const Context& context) {
  if (!has_few_rows(l.x, l.packing)) return gemm_of_many(l, workspace, context);
  choose_gemv(l.x.dtype, gemv_params(l), context, [&] { gemm_of_many(l, workspace, context); });
}

}  // namespace llmc
