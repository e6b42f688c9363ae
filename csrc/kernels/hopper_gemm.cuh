// hopper_gemm() of weights in fewer bits, which have a file of their own.
#pragma once

#include "launch.h"

namespace llmc::kernels {

inline bool lies_at(const void* from, uintptr_t multiple) { return reinterpret_cast<uintptr_t>(from) % multiple == 0; }

bool has_packed_rows_gemm(const GemvParams& p);
template <typename T>
cudaError_t packed_rows_gemm(const GemvParams& p, cudaStream_t stream);

}  // namespace llmc::kernels
