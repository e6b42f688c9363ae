// How a quantized weight is stored: see csrc/plugins/quantization.py for the layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace llmc::kernels {

enum class CodeType : int32_t { kNone, kInt4, kInt8, kFloat8, kMxfp4 };

// Columns of a group of FP8 activations, and rows and columns of a block of an FP8 weight.
constexpr int kQuantBlock = 128;
// Floats from one row of block scales to the next, for a weight of `in` columns.
__host__ __device__ constexpr int block_scale_stride(int in) {
  return (in / kQuantBlock + 3) / 4 * 4;
}
// Floats from one group of FP8 activation scales to the next: the scales are [in / kQuantBlock,
// group_scale_stride(rows)].
__host__ __device__ constexpr int group_scale_stride(int rows) { return (rows + 3) / 4 * 4; }

// Quantization parameters of a weight [out, in]. An element is (code - zero) * scale, or code *
// scale + minimum, with one scale per row and group of group_size columns.
struct QuantParams {
  CodeType code_type = CodeType::kNone;
  const float* scale = nullptr;
  const uint8_t* zero = nullptr;  // null: 8 for kInt4, 128 for kInt8, and 0 with a minimum
  const float* minimum = nullptr;
  int group_size = 0;
  const float* blocks = nullptr;  // block scales of kFloat8, one per kQuantBlock x kQuantBlock,
                                  // block_scale_stride() apart; or null
};

}  // namespace llmc::kernels
