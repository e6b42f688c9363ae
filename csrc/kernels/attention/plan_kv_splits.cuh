// The KV splits of a step's decoding sequences, which blocks of the decode kernel take.
#pragma once

#include "attention.cuh"

namespace llmc::kernels {

using device::kDecodeHeads;

constexpr int kDecodeKeys = 16;  // of an mma tile

// Query heads of the rows of one sequence, of a decode block at most.
constexpr int kRowHeads = 16;

// Rows of one sequence that a decode block takes at most: they read its keys and values once.
constexpr int kPlannedRows = 4096;  // of a step whose sequences have several rows
__host__ __device__ __forceinline__ int rows_per_block(const AttentionParams& p) {
  const int group = p.num_heads / p.num_kv_heads;
  if (!p.several_rows || p.head_dim > 256 || p.batch > kPlannedRows) return 1;
  return kRowHeads / (group < kDecodeHeads ? group : kDecodeHeads);
}

// Decode blocks that read the same KV split: one per group of query heads of a KV head.
int decode_columns(const AttentionParams& p);

// Maximum number of KV splits of a step.
int max_kv_splits(const AttentionParams& p);

// Writes max_kv_splits() KvSplits; those without a sequence are unused.
cudaError_t plan_kv_splits(const AttentionParams& p, cudaStream_t stream);

}  // namespace llmc::kernels
