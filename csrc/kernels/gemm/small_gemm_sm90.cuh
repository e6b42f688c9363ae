// small_gemm_sm90() for 4-bit weights (packed_small_gemm_sm90.cu).
#pragma once

#include "params.h"

namespace llmc::kernels {

bool has_packed_small_gemm_sm90(const GemvParams& p);
template <typename T>
cudaError_t packed_small_gemm_sm90(const GemvParams& p, cudaStream_t stream);

}  // namespace llmc::kernels
