// y = act(x * weight^T + bias) + residual, for weights of 16 bits and quantized ones. See
// rowwise/params.h for the conventions of launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/counters.h"
#include "../common/dtype.h"
#include "../common/quantization.h"

namespace llmc::kernels {

// x is T [rows, in], weight T [out, in]; bias [out] and residual [rows, out] are T or null. With
// `gated`, weight is [2 * out, in] and y = act(gate) * up. T has 16 bits and `in` is a multiple
// of 8.
//
// With `norm`, x is normalized first, without weight and bias; with row_sums (float32, the sum of
// each weight row) its mean is subtracted. Only integer_gemv(), float8_gemv() and float16_gemv()
// take a norm_weight, the latter two without row_sums.
struct GemvParams {
  void* y;
  const void* x;
  const void* weight;
  const void* bias;
  const void* residual;
  int rows, in, out;
  Activation activation;
  bool gated;
  bool norm = false;
  const float* row_sums = nullptr;
  float epsilon = 0;
  const float* norm_weight = nullptr;  // float32 [in]
  QuantParams quant = {};
  const float* x_scale = nullptr;  // scales of an FP8 x, [rows]
  float static_scale =
      0;  // static scale for activations quantized here; 0: one dynamic scale per row
  bool grouped = false;       // activation scales are per group of kQuantBlock columns
  float y_scale_inverse = 0;  // reciprocal of the FP8 output scale; 0: y is T
};

// 16-bit weights, at most kGemvRows rows.
constexpr int kGemvRows = 16;
cudaError_t gemv(DType dtype, const GemvParams& params, cudaStream_t stream);

// Quantized weights, at most kGemvRows rows, groups of a multiple of 32 columns. Dispatches to
// integer_gemv() and float16_gemv() where these are available.
cudaError_t packed_gemv(DType dtype, const GemvParams& params, cudaStream_t stream);

// Quantized weights by integer tensor cores: groups of whole 64-byte vectors of codes.
constexpr int kIntegerRows = 4;
bool has_integer_gemv(const GemvParams& params);
cudaError_t integer_gemv(DType dtype, const GemvParams& params, cudaStream_t stream);

// FP8 weights with a scale per row, or with `grouped` per block. x is FP8 as norm() quantizes it:
// codes [rows, in] and x_scale. `in` is a multiple of 64; compute capability 8.9 or later. Without
// x_scale, where has_quantizing_gemv(), x is T and the kernel normalizes (with `norm`) and
// quantizes it.
constexpr int kFloat8GemvRows = 32;
bool has_quantizing_gemv(const GemvParams& params);
cudaError_t float8_gemv(DType dtype, const GemvParams& params, cudaStream_t stream);
// FP8 weights, x in T that is not quantized: Hopper, few rows, with `norm` or without.
bool has_float16_gemv(const GemvParams& params);
cudaError_t float16_gemv(DType dtype, const GemvParams& params, cudaStream_t stream);

// wgmma GEMM for few rows: 16-bit weights, FP8 weights with FP8 x, or 4-bit weights. The last takes
// a norm_weight but no row_sums. Maximum numbers of rows:
constexpr int kSmallGemmRows = 24, kSmallGemmFloat8Rows = 32, kSmallGemmPackedRows = 16;
bool has_small_gemm_sm90(DType dtype, const GemvParams& params);
cudaError_t small_gemm_sm90(DType dtype, const GemvParams& params, cudaStream_t stream);

// Quantized weights for more rows, without norm: up to 256 rows; on Hopper up to kPackedGemmRows
// rows where y has whole vectors and the activation is SiLU or tanh GELU with `gated`, none
// without. Scratch: packed_gemm_scratch() bytes. Counters: kPackedGemmBlocks, zero before and
// after.
constexpr int kPackedGemmRows = 1024;
bool has_packed_gemm(DType dtype, const GemvParams& params);
int64_t packed_gemm_scratch(int rows, int in);
cudaError_t packed_gemm(DType dtype, const GemvParams& params, void* scratch, int32_t* counters,
                        cudaStream_t stream);

// Permutes `count` codes, in rows of `in`, from the order of csrc/plugins/quantization.py to that
// of the kernels, in place. Call once.
cudaError_t repack(void* weight, CodeType codes, int64_t count, int in, cudaStream_t stream);
// to [columns, rows] = from [rows, columns]^T
cudaError_t transpose(float* to, const float* from, int rows, int columns, cudaStream_t stream);
// Dequantizes a repacked weight to T [out, in], rounded to T. Takes any `in` that has whole groups.
cudaError_t dequantize(DType dtype, void* y, const void* weight, const QuantParams& quant, int out,
                       int in, cudaStream_t stream);

}  // namespace llmc::kernels
