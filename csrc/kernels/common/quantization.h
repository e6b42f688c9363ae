// How a quantized weight is stored: see csrc/plugins/quantization.py for the layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace llmc::kernels {

enum class Codes : int32_t { kNone, kFour, kEight, kFloat8, kMxfp4 };

// Columns of a group of FP8 activations, and rows and columns of a block of an FP8 weight.
constexpr int kBlock = 128;
// Floats from one row of block scales to the next, for a weight of `in` columns.
__host__ __device__ constexpr int blocks_pitch(int in) { return (in / kBlock + 3) / 4 * 4; }
// Floats from one group of FP8 activation scales to the next: the scales are [in / kBlock, scale_pitch(rows)].
__host__ __device__ constexpr int scale_pitch(int rows) { return (rows + 3) / 4 * 4; }

// Quantization parameters of a weight [out, in]. An element is (code - zero) * scale, or code * scale + minimum,
// with one scale per row and group of group_size columns.
struct Packing {
  Codes codes = Codes::kNone;
  const float* scale = nullptr;
  const uint8_t* zero = nullptr;     // null: 8 for kFour, 128 for kEight, and 0 with a minimum
  const float* minimum = nullptr;
  int group_size = 0;
  const float* blocks = nullptr;  // block scales of kFloat8, one per kBlock x kBlock, blocks_pitch() apart; or null
};

}  // namespace llmc::kernels
