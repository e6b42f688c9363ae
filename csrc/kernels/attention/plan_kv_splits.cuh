// The KV splits of a step's decoding sequences, which blocks of the decode kernel take.
#pragma once

#include "attention.cuh"

namespace llmc::kernels {

// Query heads of a decode block at most, and keys of an mma tile.
constexpr int kDecodeHeads = 8, kDecodeKeys = 16;

// Decode blocks that read the same KV split: one per group of query heads of a KV head.
int decode_columns(const AttentionParams& p);

// Maximum number of KV splits of a step.
int max_kv_splits(const AttentionParams& p);

// Writes max_kv_splits() KvSplits; those without a sequence are unused.
cudaError_t plan_kv_splits(const AttentionParams& p, cudaStream_t stream);

}  // namespace llmc::kernels
