// Device code of the GEMVs: tile shapes, moments of x for norms, and the epilogue.
#pragma once

#include <algorithm>

#include "../common/cp_async.cuh"
#include "../common/output_writer.cuh"
#include "params.h"

namespace llmc::device {

using kernels::GemvParams;

// Adds a vector's elements to sum[0] and their squares to sum[1].
template <typename T>
__device__ __forceinline__ void accumulate_moments(float (&sum)[2], const uint4& vector) {
  const T* x = reinterpret_cast<const T*>(&vector);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float value = to_float(x[i]);
    sum[0] += value;
    sum[1] = fmaf(value, value, sum[1]);
  }
}

// Chunks of K for each of kWarps warps.
template <int kWarps, int kChunk>
__host__ __device__ constexpr int chunks_per_warp(int in) {
  return (in + kWarps * kChunk - 1) / (kWarps * kChunk);
}

// The 16 weight rows of a tile. kWide: 16 outputs. kGated: 8 gates and their 8 ups. kNarrow: 8
// outputs, whose rows 8 to 15 are the same weights half a step further.
enum class TileShape { kWide, kGated, kNarrow };

// Applies norm, FP8 scales and bias to an accumulator, and to that of the up projection where
// `gated`. mean and square are the moments of the row of x.
template <typename T>
__device__ __forceinline__ void scale_accumulator(const GemvParams& p, float& value, float& up,
                                                  float mean, float square, int row, int output,
                                                  bool gated, bool norm) {
  if (norm) {
    if (p.row_sums == nullptr) mean = 0;
    const float scale = rsqrtf(fmaxf(square - mean * mean, 0.f) + p.epsilon);
    if (p.row_sums != nullptr) {
      value -= mean * p.row_sums[output];
      if (gated) up -= mean * p.row_sums[p.out + output];
    }
    value *= scale;
    up *= scale;
  }
  if (p.x_scale != nullptr && !p.grouped) {
    value *= p.x_scale[row] * p.quant.scale[output];
    if (gated) up *= p.x_scale[row] * p.quant.scale[p.out + output];
  }
  if (p.bias != nullptr) {
    value += to_float(static_cast<const T*>(p.bias)[output]);
    if (gated) up += to_float(static_cast<const T*>(p.bias)[p.out + output]);
  }
}

// Epilogue of one output. total and squares are the sum and the sum of squares of the row of x.
template <typename T>
__device__ __forceinline__ float epilogue(const GemvParams& p, float value, float up, float total,
                                          float squares, int row, int output, bool gated,
                                          bool norm) {
  const float per_column = 1.f / p.in;
  scale_accumulator<T>(p, value, up, total * per_column, squares * per_column, row, output, gated,
                       norm);
  value = activate(value, p.activation);
  return gated ? value * up : value;
}

// Reduces a tile over warps and writes its outputs. partial is [warp][row of the tile][row of x],
// moments [warp][row of x]. `turn` counts the block's tiles.
template <typename T, int kWarps, int kPitch, int kMeasured>
__device__ __forceinline__ void store_tile(const GemvParams& p,
                                           const float (&partial)[kWarps][16][kPitch],
                                           const float (&moments)[kWarps][kMeasured][2], int tile,
                                           int turn, TileShape kind, bool norm) {
  constexpr int kThreads = kWarps * 32;
  const int out = kind == TileShape::kWide ? 16 : 8;
  // Another warp comes first in each tile.
  for (int i = (threadIdx.x + turn * 32) % kThreads; i < out * p.rows; i += kThreads) {
    const int column = i % out, row = i / out, output = tile * out + column;
    if (output >= p.out) continue;
    float value = 0, up = 0, total = 0, squares = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      value += partial[w][column][row];
      if (kind == TileShape::kNarrow) value += partial[w][column + 8][row + 4];
      if (kind == TileShape::kGated) up += partial[w][column + 8][row];
    }
    if (norm)
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += moments[w][row][0], squares += moments[w][row][1];
    value = epilogue<T>(p, value, up, total, squares, row, output, kind == TileShape::kGated, norm);
    const int64_t place = static_cast<int64_t>(row) * p.out + output;
    if (p.residual != nullptr) value += to_float(static_cast<const T*>(p.residual)[place]);
    OutputWriter<T>(p.y, p.y_scale_inverse).write(place, value);
  }
}

}  // namespace llmc::device
