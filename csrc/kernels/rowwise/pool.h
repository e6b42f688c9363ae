// Pooling of packed tokens; see csrc/plugins/pool/op.py for the contract.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/dtype.h"

namespace llmc::kernels {

enum class PoolKind : int32_t { kCls, kMean, kLast };
struct PoolParams {
  void* y;                    // T [batch, hidden]
  const void* x;              // T [num_tokens, hidden]
  const int32_t* cu_seqlens;  // [batch + 1]
  int batch, hidden;
  PoolKind kind;
};
cudaError_t pool(DType dtype, const PoolParams& params, cudaStream_t stream);

}  // namespace llmc::kernels
