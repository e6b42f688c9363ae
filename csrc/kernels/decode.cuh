#pragma once

#include "launch.h"

namespace llmc::kernels {

// Attention where every sequence has one new token; float16 and bfloat16.
cudaError_t decode(DType dtype, const AttentionParams& p, cudaStream_t stream);

}  // namespace llmc::kernels
