// Row-wise and element-wise kernels: embedding, normalization, activations, elementwise arithmetic,
// gathers, scatters.
//
// In every params header of this folder: launchers take raw pointers, sizes and a stream and return
// the launch error. They neither allocate nor synchronize. Sizes are in elements. T stands for the
// DType argument.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/dtype.h"
#include "../common/quantization.h"

namespace llmc::kernels {

// y[t] = table[ids[t] - vocab_start] * scale + positions[position_ids[t]]. Rows outside a table are
// zero. table is T [rows, hidden] or quantized; positions is T [position_rows, hidden] or null.
// With `down`, T [slots, rank, rows], and `up`, T [slots, hidden, rank], the product of adapters is
// added to table[…]: token t has that of slot lora_ids[t], with the first ranks[slot] rows of
// `down`, or none if the slot is -1. `rank` and these are multiples of 8.
struct EmbeddingParams {
  void* y;
  const void* ids;  // int64, or int32 with narrow_ids
  const void* table;
  const void* position_ids;
  const void* positions;
  int64_t rows, position_rows, vocab_start;
  int num_tokens, hidden;
  float scale;
  bool narrow_ids;
  QuantParams quant = {};
  const void *down = nullptr, *up = nullptr;
  const int32_t *lora_ids = nullptr, *ranks = nullptr;
  int rank = 0;
};
cudaError_t embedding(DType dtype, const EmbeddingParams& params, cudaStream_t stream);

// y[t] = embeds[ids[t]] where ids[t] >= 0, else x[t]. x, y and embeds are T of rows of `hidden`.
struct InputEmbedsParams {
  void* y;
  const void* x;
  const void* embeds;
  const int32_t* ids;
  int num_tokens, hidden;
};
cudaError_t input_embeds(DType dtype, const InputEmbedsParams& params, cudaStream_t stream);
// The same, but rows of `embeds` are added to those of x.
cudaError_t add_embeds(DType dtype, const InputEmbedsParams& params, cudaStream_t stream);
// Rounds `count` float32 numbers to T.
cudaError_t round_to(DType dtype, void* y, const float* x, int64_t count, cudaStream_t stream);

constexpr int kMaxNormHidden = 32768;  // maximum hidden
// sum = x + residual (with a residual); y = norm(sum) * weight + bias. x, residual, y and sum are T
// [rows, hidden]; weight and bias are float32 [hidden] or null. LayerNorm with `centred`, RMSNorm
// without, no norm with `plain`.
//
// With `rounded`, each row is quantized to FP8 (e4m3) with static_scale, or with a dynamic scale
// max|row| / 448 where static_scale is 0. With quant_group (32, 64 or 128 columns) each group has
// its own scale. y receives the dequantized values. With `codes`, that receives the codes instead,
// uint8 [rows, hidden] in the column order of a quantized weight, and `scale` receives the scales:
// [rows], or [hidden / quant_group, group_scale_stride(rows)], or null. CodeType take 16-bit T and
// a hidden that is a multiple of 8.
//
// With groups > 1, weight is [groups, hidden] and row r uses weight row r % groups. With a gate, T,
// the result is multiplied by activation(gate): row r * groups + g of x belongs to columns [g *
// hidden, (g + 1) * hidden) of gate row r, and gate rows are gate_stride apart. With gate_first, x
// is multiplied before the norm.
struct NormParams {
  void* y;
  void* sum;
  const void* x;
  const void* residual;
  const float* weight;
  const float* bias;
  int rows, hidden;
  float epsilon;
  bool centred;
  bool plain = false, rounded = false;
  uint8_t* codes = nullptr;
  float* scale = nullptr;
  float static_scale = 0;
  int quant_group = 0;
  int groups = 1;
  const void* gate = nullptr;
  int64_t gate_stride = 0;
  Activation gate_activation = Activation::kNone;  // kNone, kSilu or kSigmoid
  bool gate_first = false;
};
cudaError_t norm(DType dtype, const NormParams& params, cudaStream_t stream);

// Epilogue of an FP8 GEMM: y = act(sums * x_scale * weight_scale + bias) + residual. sums is
// float32 [rows, out], x_scale [rows], weight_scale [out]; bias [out] and residual [rows, out] are
// T or null. With `gated`, sums, weight_scale and bias are 2 * out wide and y = act(gate) * up. out
// is a multiple of 4.
struct RescaleParams {
  void* y;
  const float* sums;
  const float* x_scale;
  const float* weight_scale;
  const void* bias;
  const void* residual;
  int rows, out;
  Activation activation;
  bool gated;
  float y_scale_inverse;  // reciprocal of the FP8 output scale; 0: y is T
};
cudaError_t rescale(DType dtype, const RescaleParams& params, cudaStream_t stream);

// y = x * activation(gate), T [rows, width]. Rows of x and of gate are x_stride and gate_stride
// apart.
struct GateParams {
  void* y;
  const void *x, *gate;
  int64_t x_stride, gate_stride;
  int rows, width;
  Activation activation;
  float y_scale_inverse = 0;  // reciprocal of the FP8 output scale; 0: y is T
};
cudaError_t gate(DType dtype, const GateParams& params, cudaStream_t stream);

// x[i] = act(x[i]) in place, T [count].
cudaError_t activate(DType dtype, void* x, int64_t count, Activation activation,
                     cudaStream_t stream);

// y[i] = op(a[i], b[i], c[i]), T [count]. Comparisons yield 1 or 0.
enum class Elementwise : int32_t {
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMin,
  kMax,
  kTanh,
  kExp,
  kSigmoid,
  kNeg,
  kSoftplus,
  kGelu,
  kGeluTanh,
  kElu,
  kGreater,
  kLess,
  kWhere
};
// How an operand is broadcast to y[r, i], T [rows, width]: kWhole x[r, i]; kColumn x[r]; kRow x[i],
// float32; kNumber x[0], float32.
enum class Operand : int32_t { kWhole, kColumn, kRow, kNumber };
struct Operands {
  const void* data[3];  // null for operands that the op does not take
  Operand is[3];
};
cudaError_t elementwise(DType dtype, Elementwise op, void* y, const Operands& operands,
                        int64_t count, int width, cudaStream_t stream);

// y[i] = x[rows[i]], T [count, width]. Rows outside [0, x_rows) are zero.
cudaError_t gather_rows(DType dtype, void* y, const void* x, const int64_t* rows, int count,
                        int64_t x_rows, int width, cudaStream_t stream);

// y[r, i] = x[r, index[i]], T [rows, width]. Columns outside [0, x_width) are zero.
cudaError_t gather_columns(DType dtype, void* y, const void* x, const int32_t* index, int rows,
                           int x_width, int width, cudaStream_t stream);

// y[rows[i]] = x[i], T [count, width]. Rows outside [0, y_rows) are dropped.
cudaError_t scatter_rows(DType dtype, void* y, const void* x, const int64_t* rows, int count,
                         int64_t y_rows, int width, cudaStream_t stream);

// y = concat(x[0], x[1], ..) along columns, T [rows, widths[part]] each. Absent parts have width 0.
constexpr int kMaxConcat = 4;  // maximum number of parts
struct ConcatParams {
  void* y;
  const void* x[kMaxConcat];
  int widths[kMaxConcat];
  int rows;
};
cudaError_t concat(DType dtype, const ConcatParams& params, cudaStream_t stream);

// y[r, part, i] = x[part, r, i]: the columns of an all-gather over `parts` ranks.
cudaError_t interleave(DType dtype, void* y, const void* x, int parts, int rows, int width,
                       cudaStream_t stream);

// y[k][i] = int32(x[k][i]) for up to kMaxNarrow arrays. Absent arrays have count 0.
constexpr int kMaxNarrow = 4;
struct NarrowParams {
  int32_t* y[kMaxNarrow];
  const int64_t* x[kMaxNarrow];
  int count[kMaxNarrow];
};
cudaError_t narrow(const NarrowParams& params, cudaStream_t stream);

}  // namespace llmc::kernels
