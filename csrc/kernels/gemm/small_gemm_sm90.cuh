// hopper_gemm() of weights in fewer bits, which have a file of their own.
#pragma once

#include "params.h"

namespace llmc::kernels {

bool has_packed_rows_gemm(const GemvParams& p);
template <typename T>
cudaError_t packed_rows_gemm(const GemvParams& p, cudaStream_t stream);

}  // namespace llmc::kernels
