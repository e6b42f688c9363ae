// Collectives over peer memory: all-reduce and all-gather by kernels that write the memory of the
// other ranks' devices. protocol.cuh describes how.
//
// All ranks launch the same collectives with the same sizes in the same order. Launchers take raw
// pointers, sizes and a stream and return the launch error. They neither allocate nor synchronize.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/dtype.h"
#include "peer_group.h"

namespace llmc::kernels {

// y = sum of x over ranks, T [count], in float32 in the order of ranks, rounded once: equal bits on
// all ranks and from both. x and y are aligned to 16 bytes.
//
// one_shot_all_reduce: up to packet_bytes; two_shot_all_reduce: see two_shot_bytes().
cudaError_t one_shot_all_reduce(DType dtype, const PeerGroup& peers, void* y, const void* x,
                                int64_t count, cudaStream_t stream);
cudaError_t two_shot_all_reduce(DType dtype, const PeerGroup& peers, void* y, const void* x,
                                int64_t count, cudaStream_t stream);
// Bytes of the buffer that a sum of `bytes` takes.
inline int64_t two_shot_bytes(int64_t bytes, int size) {
  const int64_t words = (bytes + 15) / 16;
  return 2 * size * 16 * ((words + size - 1) / size);
}

// y = sum of x over ranks, as one_shot_all_reduce; sum = y + residual, or y without a residual;
// normed = RMSNorm(sum) * weight. x, y, residual, sum and normed are T [rows, hidden], aligned to
// 16 bytes; weight is float32 [hidden] or null. normed and sum may be x. hidden is a multiple of 16
// bytes, at most max_reduced_hidden().
struct AllReduceNormParams {
  void *y, *sum, *normed;  // sum: null without residual
  const void *x, *residual;
  const float* weight;
  int rows, hidden;
  float epsilon;
};
cudaError_t all_reduce_norm(DType dtype, const PeerGroup& peers, const AllReduceNormParams& params,
                            cudaStream_t stream);
constexpr int kMaxReducedTurns = 4;  // vectors of 16 bytes of a row per thread
constexpr int max_reduced_hidden(int64_t element_bytes) {
  return static_cast<int>(kMaxReducedTurns * kPeerThreads * 16 / element_bytes);
}

// y [rows, size * width] = x [rows, width] of all ranks, in the order of ranks; width in bytes, a
// multiple of 16. x and y are aligned to 16 bytes.
//
// all_gather_packets: up to packet_bytes of x; all_gather_buffers: x times size up to buffer_bytes.
cudaError_t all_gather_packets(const PeerGroup& peers, void* y, const void* x, int rows,
                               int64_t width, cudaStream_t stream);
cudaError_t all_gather_buffers(const PeerGroup& peers, void* y, const void* x, int rows,
                               int64_t width, cudaStream_t stream);

// Loads the kernels for `size` ranks on the current device: a launch that loads its kernel may wait
// for kernels that run, and so for other ranks.
cudaError_t load_collectives(int size);

}  // namespace llmc::kernels
