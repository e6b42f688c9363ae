#pragma once

#include "launch.h"

namespace llmc::kernels {

// Where fewer blocks than this would run, cached positions are divided into parts, so there are never twice
// as many blocks; a part has at least kDecodeKeys positions.
constexpr int kPartedBlocks = 264, kMaxParts = 32, kDecodeKeys = 256;

// Attention where every sequence has one new token; float16 and bfloat16.
cudaError_t decode(DType dtype, const AttentionParams& p, cudaStream_t stream);

}  // namespace llmc::kernels
