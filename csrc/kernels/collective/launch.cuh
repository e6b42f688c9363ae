// What the kernels of this folder share: a block of threads, sums of elements, grids.
#pragma once

#include "../common/device.cuh"
#include "params.h"
#include "protocol.cuh"

namespace llmc::kernels {

// See load_collectives().
cudaError_t load_all_gather(int size);
cudaError_t load_all_reduce_norm(int size);

}  // namespace llmc::kernels

namespace llmc::kernels::peer {

struct DeviceCta {
  __device__ __forceinline__ int thread() const { return threadIdx.x; }
  __device__ __forceinline__ int threads() const { return blockDim.x; }
  __device__ __forceinline__ int block() const { return blockIdx.x; }
  __device__ __forceinline__ int blocks() const { return gridDim.x; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
};

// Sums of T in float32.
template <typename T>
struct SumOf {
  static constexpr int kWidth = device::kVec<T>;
  struct Total {
    float data[kWidth];
  };
  __device__ __forceinline__ static void add(Total& total, const Words& words) {
    const auto& own = reinterpret_cast<const device::Vec<T, kWidth>&>(words);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) total.data[k] += device::to_float(own.data[k]);
  }
  __device__ __forceinline__ static Words round(const Total& total) {
    Words words;
    auto& own = reinterpret_cast<device::Vec<T, kWidth>&>(words);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) own.data[k] = device::from_float<T>(total.data[k]);
    return words;
  }
};

// Calls f with the smallest compiled bound of the number of ranks.
template <typename F>
cudaError_t dispatch_size(int size, F&& f) {
  if (size < 2 || size > kMaxPeers) return cudaErrorInvalidValue;
  if (size == 2) return f(std::integral_constant<int, 2>());
  if (size <= 4) return f(std::integral_constant<int, 4>());
  return f(std::integral_constant<int, kMaxPeers>());
}

// Blocks for `count` elements of 16 bytes, equal on all ranks.
inline unsigned blocks_of(int64_t count) {
  const int64_t wanted = (count + kPeerThreads - 1) / kPeerThreads;
  return static_cast<unsigned>(wanted < 1 ? 1 : wanted > kPeerBlocks ? kPeerBlocks : wanted);
}

template <typename Kernel>
cudaError_t load_kernel(Kernel kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

inline bool is_aligned(const void* y, const void* x) {
  return device::is_aligned(y, 16) && device::is_aligned(x, 16);
}

}  // namespace llmc::kernels::peer
