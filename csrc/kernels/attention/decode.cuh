#pragma once

#include "params.h"

namespace llmc::kernels {

// Whether decode() serves these heads here: float16 and bfloat16, up to the room that a block has.
bool can_decode(DType dtype, const AttentionParams& p);

// Attention where every sequence has one new token.
cudaError_t decode(DType dtype, const AttentionParams& p, cudaStream_t stream);

}  // namespace llmc::kernels
