#pragma once

#include "params.h"

namespace llmc::kernels {

// Whether decode() supports these heads: float16 and bfloat16, limited by shared memory.
bool can_decode(DType dtype, const AttentionParams& p);

// Attention of sequences with one new token each.
cudaError_t decode(DType dtype, const AttentionParams& p, cudaStream_t stream);

// The same where rows_per_block() is above 1, with KV splits planned.
cudaError_t decode_rows(DType dtype, const AttentionParams& p, cudaStream_t stream);

}  // namespace llmc::kernels
