// What hosts must allocate for GEMM kernels.
#pragma once

namespace llmc::kernels {

constexpr int kPackedGemmBlocks = 512;  // maximum grid of packed_gemm(), one counter each

}  // namespace llmc::kernels
