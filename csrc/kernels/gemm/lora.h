// LoRA adapters of a linear layer: z += (x * down^T) * up^T, with the matrices of each row's
// adapter. See rowwise/params.h for the conventions of launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/dtype.h"

namespace llmc::kernels {

// Rows order[first] to order[first + count - 1] of x, which have the adapter of one slot.
struct LoraTile {
  int32_t slot, first, count;
};

// x is T [rows, in], down T [parts, slots, rank, in], up T [slots, out, rank], z T [rows, out].
// Output o multiplies the hidden values of part[o]. Slot s uses the first ranks[s] rows of each
// part; both `rank` and these are multiples of 8. ids[r] is the slot of row r's adapter, -1: none.
//
// With `experts`, there is one part, and each of slots / experts adapters has matrices for each
// expert: slot e * adapters + a is expert e of adapter a, in down T [experts, adapters, rank, in],
// up T [adapters, experts, out, rank] and ranks [adapters].
struct LoraParams {
  const void *x, *down, *up;
  const int32_t *ranks, *ids;  // [slots], [rows]
  const int32_t* part;         // [out]; null: one part
  float* hidden;               // [splits, rows, parts * rank]
  void* z;
  int rows, in, out, parts, slots, rank, experts;
  // Row r is of row x_rows[r] of x, and is added to row z_rows[r] of z; null: both r. Its hidden
  // values are multiplied by row_scale[r]; null: 1.
  const int32_t *x_rows, *z_rows;
  const float* row_scale;
  bool waits;  // whether the previous kernel in the stream makes x; otherwise an older one
  // Of shrink_rows(): x is normalized first, and multiplied by `gain` and added to `shift`.
  bool norm, centred;
  float epsilon;
  const float *gain, *shift;  // [in], or null
  // Of expand_rows(): y = act(z), or with `gated` act(gate) * up of the halves of z; in FP8 with a
  // y_scale_inverse. y may be z, unless `gated`.
  void* y;
  Activation activation;
  bool gated;
  float y_scale_inverse;
  // Of the kernels for many rows.
  const int32_t* order;
  const LoraTile* tiles;
};

// Up to this many rows take the kernels for few rows.
constexpr int kLoraFewRows = 32;
constexpr int kLoraTileRows = 16;
constexpr int kMaxLoraSlots = 4096;
// Blocks that split the columns of x in the kernel for many rows, where tiles are too few to occupy
// the device; each keeps its own hidden values.
constexpr int kLoraSplitRows = 512, kMaxLoraSplits = 8;
constexpr int lora_splits(int rows, int in) {
  const int splits = in / 2048;
  return rows > kLoraSplitRows || splits < 1 ? 1
         : splits < kMaxLoraSplits           ? splits
                                             : kMaxLoraSplits;
}

// For few rows, and for any number of float32 rows and of rows that are no whole vectors.
cudaError_t lora_shrink_rows(DType dtype, const LoraParams& params, cudaStream_t stream);
cudaError_t lora_expand_rows(DType dtype, const LoraParams& params, cudaStream_t stream);

// Number of tiles that plan_lora_tiles() writes.
constexpr int lora_tiles(int rows, int slots) {
  return (rows + kLoraTileRows - 1) / kLoraTileRows + (rows < slots ? rows : slots);
}
// Sorts rows by slot. Unused tiles have no rows.
cudaError_t plan_lora_tiles(const int32_t* ids, int rows, int slots, int32_t* order,
                            LoraTile* tiles, cudaStream_t stream);
// For many rows of 16-bit types, with `in` a multiple of 8.
cudaError_t lora_shrink_tiles(DType dtype, const LoraParams& params, cudaStream_t stream);
cudaError_t lora_expand_tiles(DType dtype, const LoraParams& params, cudaStream_t stream);

}  // namespace llmc::kernels
