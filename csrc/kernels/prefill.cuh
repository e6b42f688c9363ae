#pragma once

#include "launch.h"

namespace llmc::kernels {

// Whether prefill() serves this type and head_dim.
bool can_prefill(DType dtype, int head_dim);

// Attention of p.queries over the caches, both already written.
cudaError_t prefill(DType dtype, const AttentionParams& p, cudaStream_t stream);

}  // namespace llmc::kernels
