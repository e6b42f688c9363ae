#pragma once

#include "params.h"

namespace llmc::kernels {

// Whether prefill() serves this type and head_dim.
bool can_prefill(DType dtype, int head_dim);

// Attention of p.queries over the caches, both already written.
cudaError_t prefill(DType dtype, const AttentionParams& p, cudaStream_t stream);

// The same where has_prefill_sm90(), over blocks whose values behind a sequence's last, up to the next multiple of
// kPrefillUnit, are numbers.
constexpr int kPrefillUnit = 16;
cudaError_t prefill_sm90(DType dtype, const AttentionParams& p, cudaStream_t stream);

}  // namespace llmc::kernels
