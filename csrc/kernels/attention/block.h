// Attention of blocks to all positions of their sequence in the KV cache.
#pragma once

#include "params.h"

namespace llmc::kernels {

// See csrc/plugins/block_attention/op.py for the contract. Call append() first; reads `queries`,
// and uses neither scratch nor counters. A window is visible on both sides of a query.
cudaError_t block_attention(DType dtype, const AttentionParams& params, cudaStream_t stream);

}  // namespace llmc::kernels
