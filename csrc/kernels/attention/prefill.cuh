#pragma once

#include "params.h"

namespace llmc::kernels {

// Whether prefill() supports this type and head_dim.
bool can_prefill(DType dtype, int head_dim);

// Attention of p.queries to the caches; append() has written both.
cudaError_t prefill(DType dtype, const AttentionParams& p, cudaStream_t stream);

// The same where has_prefill_sm90(). Values between a sequence's last position and the next
// multiple of kPrefillUnit must be finite.
constexpr int kPrefillUnit = 16;
cudaError_t prefill_sm90(DType dtype, const AttentionParams& p, cudaStream_t stream);

}  // namespace llmc::kernels
