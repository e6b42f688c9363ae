// Linear layers: y = act(x * weight^T + bias) + residual, gated or not. Chooses between llmc's
// kernels and cuBLASLt.
#pragma once

#include <algorithm>

#include "../../kernels/gemm/params.h"
#include "norm.h"
#include "quantized.h"

namespace llmc {

struct Linear {
  const Tensor& x;
  const Tensor& weight;
  const kernels::QuantParams& quant;  // of the weight
  int out;                            // weight rows
  const Tensor* bias;
  const Tensor* residual;
  const Tensor& y;
  Activation activation;
  bool gated;
  float y_scale_inverse =
      0;  // with `gated`: reciprocal of the FP8 output scale; 0: y is not quantized
};

// Transformation of x before the GEMM: a norm, with or without weight and bias; quantization to
// FP8.
struct InputTransform {
  bool normed = false, centred = false, rounded = false;
  float epsilon = 0;
  const float* weight = nullptr;
  const float* bias = nullptr;
  float static_scale = 0;  // 0: one dynamic scale per row, or per group
  int quant_group = 0;     // columns of a quantization group; 0: the row
};

// Whether x suits the GEMVs: 16-bit types, few rows, rows of whole 16-byte vectors.
inline bool can_gemv(const Tensor& x) {
  return x.dtype != DType::kFloat32 && x.shape[0] <= kernels::kGemvRows && x.shape[1] % 8 == 0;
}

inline int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Bytes for gates and ups before they are combined.
inline int64_t gates_workspace(const Tensor& x, int64_t out, bool gated) {
  return gated ? aligned(x.shape[0] * out * width(x.dtype)) : 0;
}

// Bytes for a transformed x; bytes for its scales.
inline int64_t rows_workspace(const Tensor& x) { return aligned(x.size() * width(x.dtype)); }
inline int64_t scales_workspace(const Tensor& x) {
  return aligned(x.shape[0] * static_cast<int64_t>(sizeof(float)));
}

// x with its rows padded to a multiple of four, as scales per group require.
inline Tensor in_fours(const Tensor& x) {
  Tensor more = x;
  more.shape[0] = kernels::group_scale_stride(static_cast<int>(x.shape[0]));
  return more;
}
inline int64_t group_scales_workspace(const Tensor& x) {
  return aligned(in_fours(x).size() / kernels::kQuantBlock * static_cast<int64_t>(sizeof(float)));
}

// Maximum number of rows whose FP8 sums may be scaled by rescale() instead of cuBLASLt.
constexpr int kRescaledRows = 256;

// Workspace of a linear layer: gates and ups; a dequantized weight, or the scratch of
// packed_gemm(); before them a quantized x, and in their place FP8 sums. `like`: an input of y's
// dtype, or null.
inline int64_t linear_workspace(const Tensor& x, const Tensor& weight, const Quantized& quantized,
                                bool gated, const Tensor* like = nullptr) {
  if (x.dtype == DType::kFloat8) {  // dequantized on GPUs that cannot multiply FP8
    Tensor numbers = x;
    numbers.dtype = like != nullptr ? like->dtype : DType::kFloat32;
    return linear_workspace(numbers, weight, quantized, gated);
  }
  const int64_t out = quantized ? quantized.out() : weight.shape[0];
  const auto rows = static_cast<int>(std::min<int64_t>(x.shape[0], kernels::kPackedGemmRows));
  const int64_t packed =
      quantized ? std::max(out * quantized.in() * width(x.dtype),
                           kernels::packed_gemm_scratch(rows, static_cast<int>(quantized.in())))
                : 0;
  const int64_t needed = gates_workspace(x, out, gated) + packed;
  if (!quantized.rounds()) return needed;
  if (quantized.activation_group() != 0) {
    const Tensor fours = in_fours(x);
    const int64_t made = aligned(fours.shape[0] * out * width(x.dtype));
    return rows_workspace(fours) + group_scales_workspace(x) + std::max(needed, made);
  }
  const int64_t sums =
      std::min<int64_t>(x.shape[0], kRescaledRows) * out * static_cast<int64_t>(sizeof(float));
  return rows_workspace(x) + scales_workspace(x) + std::max(needed, sums);
}

// The shape of y. Throws Error unless x and the weight are matrices, and all inputs fit together.
inline Dims linear_shape(const Dims& x, const Dims& weight, bool gated, const Dims* bias = nullptr,
                         const Dims* residual = nullptr) {
  if (x.size() != 2 || weight.size() != 2)
    throw Error("a GEMM's x and weight have " + std::to_string(x.size()) + " and " +
                std::to_string(weight.size()) + " dimensions, expected 2 each");
  expect("a GEMM's weight", weight, {weight[0], x[1]});
  if (gated && weight[0].known() && weight[0].number() % 2 != 0)
    throw Error("a gated GEMM's weight has " + std::to_string(weight[0].number()) +
                " rows, expected an even number: gate rows and up rows");
  const Dims y{x[0], gated ? weight[0] / 2 : weight[0]};
  if (bias != nullptr) expect("a GEMM's bias", *bias, {weight[0]});
  if (residual != nullptr) expect("a GEMM's residual", *residual, y);
  return y;
}

// The shape of a gated y, which may be quantized: rows of whole units of 8 then.
inline Dims rounded_shape(const Dims& y, float inverse) {
  if (inverse > 0 && y[1].known() && y[1].number() % 8 != 0)
    throw Error("a gated GEMM supports out_scale for multiples of 8 columns only, not " +
                std::to_string(y[1].number()));
  return y;
}

inline kernels::GemvParams gemv_params(const Linear& l) {
  kernels::GemvParams p{l.y.data,
                        l.x.data,
                        l.weight.data,
                        l.bias != nullptr ? l.bias->data : nullptr,
                        l.residual != nullptr ? l.residual->data : nullptr,
                        static_cast<int>(l.x.shape[0]),
                        static_cast<int>(l.x.shape[1]),
                        l.gated ? l.out / 2 : l.out,
                        l.activation,
                        l.gated};
  p.quant = l.quant;
  p.y_scale_inverse = l.y_scale_inverse;
  return p;
}

// Combines the gates and ups of a GEMM, [rows, 2 * out], to y.
inline void gate_halves(const Linear& l, const void* both, const Context& context) {
  kernels::GateParams p{};
  p.y = l.y.data;
  p.gate = both;
  p.x = static_cast<const char*>(both) + l.y.shape.back() * width(l.x.dtype);
  p.x_stride = p.gate_stride = 2 * l.y.shape.back();
  p.width = static_cast<int>(l.y.shape.back());
  p.rows = static_cast<int>(l.y.size() / p.width);
  p.activation = l.activation;
  p.y_scale_inverse = l.y_scale_inverse;
  check(kernels::gate(l.x.dtype, p, context.stream), "a gate");
}

// By cuBLASLt; a quantized weight is dequantized first.
inline void gemm(const Linear& l, void* workspace, const Context& context) {
  kernels::GemvParams p = gemv_params(l);
  const DType dtype = l.x.dtype;
  if (p.quant.code_type != kernels::CodeType::kNone) {
    void* numbers = static_cast<char*>(workspace) + gates_workspace(l.x, l.out, l.gated);
    check(kernels::dequantize(dtype, numbers, p.weight, p.quant, l.out, p.in, context.stream),
          "dequantizing a weight");
    p.weight = numbers;
  }
  if (l.gated) {
    context.gemm->run({dtype, workspace, p.x, p.weight, p.bias, nullptr, p.rows, p.in, 2 * p.out,
                       Activation::kNone},
                      context.stream);
    gate_halves(l, workspace, context);
  } else if (!context.gemm->run(
                 {dtype, p.y, p.x, p.weight, p.bias, p.residual, p.rows, p.in, p.out, l.activation},
                 context.stream)) {
    check(kernels::activate(dtype, p.y, l.y.size(), l.activation, context.stream), "an activation");
  }
}

// Whether kernels support the group size of a quantized weight.
inline bool has_steps(const Tensor& x, const kernels::QuantParams& quant) {
  return x.shape[1] % 32 == 0 && quant.group_size % 32 == 0;
}

// Whether a GEMV supports x and this weight.
inline bool has_gemv(const Tensor& x, const kernels::QuantParams& quant) {
  return can_gemv(x) && (quant.code_type == kernels::CodeType::kNone || has_steps(x, quant));
}

// Timed choices between two implementations. kFewRows: a kernel for few rows, or one for many.
// kSmallGemm: a GEMV, or the wgmma GEMM for few rows. kQuantizing: a GEMV that quantizes x, or a
// separate kernel. kPacked: packed_gemm(), or dequantization and cuBLASLt. kScales: scaling in
// cuBLASLt, or afterwards. kCodes: FP8 GEMM, or dequantized operands.
enum class Choice : int64_t {
  kPacked = 8,
  kScales = 128,
  kFewRows = 256,
  kSmallGemm = 1024,
  kQuantizing = 2048,
  kCodes = 4096
};

// The key of a choice.
inline std::vector<int64_t> way_shape(DType dtype, const kernels::GemvParams& p, Choice choice) {
  const int64_t kind = p.gated + 2 * p.norm + 4 * (p.residual != nullptr) +
                       static_cast<int64_t>(choice) + 16 * static_cast<int64_t>(p.quant.code_type) +
                       512 * (p.norm_weight != nullptr) + 8192 * p.grouped;
  return {static_cast<int64_t>(dtype), p.in, p.out, kind, p.rows};
}

// By cuBLASLt, or for a quantized weight by packed_gemm(): the faster one.
inline void gemm_of_many(const Linear& l, void* workspace, const Context& context) {
  const auto otherwise = [&] { gemm(l, workspace, context); };
  const kernels::GemvParams p = gemv_params(l);
  if (l.quant.code_type == kernels::CodeType::kNone || l.x.dtype == DType::kFloat32 ||
      !has_steps(l.x, l.quant) || !kernels::has_packed_gemm(l.x.dtype, p))
    return otherwise();
  void* scratch = static_cast<char*>(workspace) + gates_workspace(l.x, l.out, l.gated);
  context.gemm->choose(
      way_shape(l.x.dtype, p, Choice::kPacked), context.stream,
      [&] {
        check(kernels::packed_gemm(l.x.dtype, p, scratch, context.counters, context.stream),
              "a GEMM with a quantized weight");
      },
      otherwise);
}

// Fraction of the time of an integer GEMV of up to two rows that the wgmma GEMM must save. In
// isolation both may be equally fast, but consecutive integer GEMVs take 7 to 12 % less for a Llama
// layer (H200).
constexpr float kSavedOfIntegers = 0.2f;

// By a GEMV (if supported), the wgmma GEMM for few rows, or `otherwise`, a path for many rows: the
// fastest one.
inline void choose_few(DType dtype, const kernels::GemvParams& p, bool has_gemv,
                       const Context& context, const Gemm::Way& otherwise) {
  auto* kernel =
      p.quant.code_type == kernels::CodeType::kNone ? kernels::gemv : kernels::packed_gemv;
  if (p.x_scale != nullptr) kernel = kernels::float8_gemv;
  const bool on_hopper = kernels::has_small_gemm_sm90(dtype, p);
  const auto gemv = [&] { check(kernel(dtype, p, context.stream), "a GEMV"); };
  const auto gemm = [&] {
    check(kernels::small_gemm_sm90(dtype, p, context.stream), "a GEMM with few rows");
  };
  const auto few = [&] {
    if (!on_hopper) gemv();
    else if (!has_gemv) gemm();
    else
      context.gemm->choose(way_shape(dtype, p, Choice::kSmallGemm), context.stream, gemv, gemm,
                           p.rows <= 2 && kernels::has_integer_gemv(p) ? kSavedOfIntegers : 0.f);
  };
  if (has_gemv || on_hopper)
    context.gemm->choose(way_shape(dtype, p, Choice::kFewRows), context.stream, few, otherwise);
  else otherwise();
}

// Launches the kernel that transforms rows of x to y, or to codes and scales.
inline void make_rows(const Tensor& x, const InputTransform& rows, void* y, uint8_t* codes,
                      float* scale, const Context& context) {
  kernels::NormParams p{};
  p.y = y;
  p.x = x.data;
  p.weight = rows.weight;
  p.bias = rows.bias;
  p.rows = static_cast<int>(x.shape[0]);
  p.hidden = static_cast<int>(x.shape[1]);
  p.epsilon = rows.epsilon;
  p.centred = rows.centred;
  p.plain = !rows.normed;
  p.rounded = rows.rounded;
  p.codes = codes;
  p.scale = scale;
  p.static_scale = rows.static_scale;
  p.quant_group = rows.quant_group;
  norm(x.dtype, p, "rows of activations", context.stream);
}

// The same layer with another x.
inline Linear with_rows(const Linear& l, const Tensor& x) {
  return {x,          l.weight, l.quant,      l.out,   l.bias,
          l.residual, l.y,      l.activation, l.gated, l.y_scale_inverse};
}

inline void norm_then_gemm(const Linear& l, const InputTransform& rows, void* workspace,
                           const Context& context) {
  Tensor made = l.x;
  made.data = workspace;
  make_rows(l.x, rows, made.data, nullptr, nullptr, context);
  gemm_of_many(with_rows(l, made), static_cast<char*>(workspace) + rows_workspace(l.x), context);
}

inline void linear(const Linear& l, void* workspace, const Context& context) {
  choose_few(l.x.dtype, gemv_params(l), has_gemv(l.x, l.quant), context,
             [&] { gemm_of_many(l, workspace, context); });
}

// With a separate kernel for the transformation of x, for any number of rows.
inline void linear_of_made(const Linear& l, const InputTransform& rows, void* workspace,
                           const Context& context) {
  Tensor made = l.x;
  made.data = workspace;
  make_rows(l.x, rows, made.data, nullptr, nullptr, context);
  linear(with_rows(l, made), static_cast<char*>(workspace) + rows_workspace(l.x), context);
}

// Whether the GPU and cuBLASLt support FP8 operands, with a scale per row of both, or per group and
// block.
inline bool can_multiply_codes(const Linear& l, bool grouped = false) {
  static const int major = [] {  // all devices of a process are alike
    int device = 0, found = 0;
    check(cudaGetDevice(&device), "querying the device");
    check(cudaDeviceGetAttribute(&found, cudaDevAttrComputeCapabilityMajor, device),
          "querying the compute capability");
    return found;
  }();
  const bool has_scales = grouped ? l.quant.blocks != nullptr
                                  : l.quant.group_size == l.x.shape[1] && l.x.shape[1] % 16 == 0;
  return major == 9 && l.x.dtype != DType::kFloat32 && has_scales && l.out % 8 == 0;
}

// FP8 GEMM by cuBLASLt; false if it has none. It has few kernels that apply scales, and none of
// these with split-K, so for few rows rescale() may apply them.
inline bool codes_gemm(const Linear& l, const uint8_t* codes, const float* scale, void* workspace,
                       const Context& context) {
  const kernels::GemvParams p = gemv_params(l);
  const Float8Scales scales{scale, p.quant.scale}, none;
  const Activation activation = l.gated ? Activation::kNone : l.activation;
  const GemmProblem whole{l.x.dtype, l.gated ? workspace : p.y,
                          codes,     p.weight,
                          p.bias,    p.residual,
                          p.rows,    p.in,
                          l.out,     activation,
                          &scales};
  const GemmProblem plain{DType::kFloat32, workspace, codes, p.weight,          nullptr, nullptr,
                          p.rows,          p.in,      l.out, Activation::kNone, &none};
  const auto scaled = [&] {
    const bool activated = context.gemm->run(whole, context.stream);
    if (l.gated) gate_halves(l, workspace, context);
    else if (!activated)
      check(kernels::activate(l.x.dtype, p.y, l.y.size(), l.activation, context.stream),
            "an activation");
  };
  const auto sums = [&] {
    context.gemm->run(plain, context.stream);
    check(kernels::rescale(l.x.dtype,
                           {p.y, static_cast<const float*>(workspace), scale, p.quant.scale, p.bias,
                            p.residual, p.rows, p.out, l.activation, l.gated, l.y_scale_inverse},
                           context.stream),
          "scales");
  };
  const bool has_whole = context.gemm->has(whole, context.stream);
  if (p.rows > kRescaledRows || !context.gemm->has(plain, context.stream)) {
    if (has_whole) scaled();
    return has_whole;
  }
  if (has_whole)
    context.gemm->choose(way_shape(l.x.dtype, p, Choice::kScales), context.stream, scaled, sums);
  else sums();
  return true;
}

// The same with scales per group and block. cuBLASLt takes a multiple of four rows. For other
// numbers of rows y is computed in the workspace, and the residual added afterwards.
inline bool blocks_gemm(const Linear& l, const uint8_t* codes, const float* scale, void* workspace,
                        const Context& context) {
  const kernels::GemvParams p = gemv_params(l);
  const Float8Scales scales{scale, p.quant.blocks, true};
  const int rows = kernels::group_scale_stride(p.rows);
  const bool elsewhere = l.gated || rows != p.rows;
  const GemmProblem product{l.x.dtype, elsewhere ? workspace : p.y,
                            codes,     p.weight,
                            p.bias,    elsewhere ? nullptr : p.residual,
                            rows,      p.in,
                            l.out,     l.gated ? Activation::kNone : l.activation,
                            &scales};
  if (!context.gemm->has(product, context.stream)) return false;
  const bool activated = context.gemm->run(product, context.stream);
  if (l.gated) {
    gate_halves(l, workspace, context);
    return true;
  }
  if (!activated)
    check(kernels::activate(l.x.dtype, product.y, l.y.size(), l.activation, context.stream),
          "an activation");
  if (elsewhere)
    check(kernels::elementwise(l.x.dtype, kernels::Elementwise::kAdd, p.y,
                               {{workspace, p.residual}, {}}, l.y.size(), l.out, context.stream),
          "rows of y");
  return true;
}

// FP8 operands: by kernels for few rows, by cuBLASLt, or `otherwise` if that has no such GEMM.
inline void linear_of_codes(const Linear& l, const uint8_t* codes, const float* scale, bool grouped,
                            void* workspace, const Context& context, const Gemm::Way& otherwise) {
  kernels::GemvParams p = gemv_params(l);
  p.x = codes;
  p.x_scale = scale;
  p.grouped = grouped;
  choose_few(l.x.dtype, p, l.x.shape[0] <= kernels::kFloat8GemvRows && l.x.shape[1] % 64 == 0,
             context, [&] {
               const auto gemm = grouped ? blocks_gemm : codes_gemm;
               if (!gemm(l, codes, scale, workspace, context)) otherwise();
             });
}

// Quantizes x: to codes on GPUs that multiply FP8, otherwise quantized and dequantized. If
// supported, a GEMV quantizes x itself: for one and two rows of 576 to 14,336 columns and 512 to
// 8,192 outputs this took less time than norm kernel and GEMV, or 1 % more, and so did a Llama step
// of up to four rows (H100).
inline void linear_of_rounded(const Linear& l, const InputTransform& rows, void* workspace,
                              const Context& context) {
  const bool grouped = rows.quant_group != 0;
  const auto of_numbers = [&] { linear_of_made(l, rows, workspace, context); };
  if (!can_multiply_codes(l, grouped)) return of_numbers();
  auto* codes = static_cast<uint8_t*>(workspace);
  auto* scale = reinterpret_cast<float*>(codes + rows_workspace(grouped ? in_fours(l.x) : l.x));
  void* rest = reinterpret_cast<char*>(scale) +
               (grouped ? group_scales_workspace(l.x) : scales_workspace(l.x));
  kernels::GemvParams p = gemv_params(l);
  p.norm = rows.normed;
  p.epsilon = rows.epsilon;
  p.norm_weight = rows.weight;
  p.static_scale = rows.static_scale;
  p.grouped = grouped;
  const auto of_made = [&] {
    make_rows(l.x, rows, nullptr, codes, scale, context);
    linear_of_codes(l, codes, scale, grouped, rest, context, of_numbers);
  };
  if (grouped && p.rows > kernels::kFloat8GemvRows && p.rows <= kernels::kPackedGemmRows)
    return context.gemm->choose(way_shape(l.x.dtype, p, Choice::kCodes), context.stream, of_made,
                                of_numbers);
  if (rows.centred || rows.bias != nullptr || !kernels::has_quantizing_gemv(p)) return of_made();
  context.gemm->choose(
      way_shape(l.x.dtype, p, Choice::kQuantizing), context.stream,
      [&] { check(kernels::float8_gemv(l.x.dtype, p, context.stream), "an FP8 GEMV"); }, of_made);
}

// x quantized by the previous op: as FP8 operand, or dequantized.
inline void linear_of_given(const Linear& l, float scale, void* workspace, const Context& context) {
  const auto* codes = static_cast<const uint8_t*>(l.x.data);
  const int rows = static_cast<int>(l.x.shape[0]), in = static_cast<int>(l.x.shape[1]);
  const float* scales = context.gemm->repeated(scale, rows, context.stream);
  const auto of_numbers = [&] {  // the layout of rows of codes is that of a weight
    kernels::QuantParams quant{kernels::CodeType::kFloat8, scales};
    quant.group_size = in;
    check(kernels::dequantize(l.x.dtype, workspace, codes, quant, rows, in, context.stream),
          "dequantizing codes");
    Tensor numbers = l.x;
    numbers.data = workspace;
    linear(with_rows(l, numbers), static_cast<char*>(workspace) + rows_workspace(l.x), context);
  };
  if (!can_multiply_codes(l)) return of_numbers();
  linear_of_codes(l, codes, scales, false, static_cast<char*>(workspace) + rows_workspace(l.x),
                  context, of_numbers);
}

// A linear layer whose x may be quantized, here or by the previous op.
inline void linear(const Linear& l, const Quantized& quantized, void* workspace,
                   const Context& context) {
  if (!quantized.rounds()) return linear(l, workspace, context);
  if (l.x.dtype == DType::kFloat8) {
    Tensor x = l.x;
    x.dtype = l.y.dtype;
    return linear_of_given(with_rows(l, x), quantized.activation_scale(), workspace, context);
  }
  InputTransform rows;
  rows.rounded = true;
  rows.static_scale = quantized.activation_scale();
  rows.quant_group = quantized.activation_group();
  linear_of_rounded(l, rows, workspace, context);
}

}  // namespace llmc
