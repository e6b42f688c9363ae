// How many device counters the kernels use, which hosts allocate.
#pragma once

namespace llmc::kernels {

constexpr int kAttentionCounters = 792;  // attention()
constexpr int kPackedGemmBlocks = 512;   // packed_gemm(): its maximum grid

}  // namespace llmc::kernels
