// Rows in place of token embeddings, or added to hidden states. Bound by memory: reads and writes
// each row once.
#include <algorithm>

#include "../common/device.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

// One block per token.
template <typename T, int kWidth>
__global__ void add_embeds_kernel(InputEmbedsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int id = p.ids[blockIdx.x];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.hidden;
  const T* x = static_cast<const T*>(p.x) + row;
  const T* added = static_cast<const T*>(p.embeds) + static_cast<int64_t>(max(id, 0)) * p.hidden;
  T* y = static_cast<T*>(p.y) + row;
  for (int i = threadIdx.x * kWidth; i < p.hidden; i += blockDim.x * kWidth) {
    auto sum = load<T, kWidth>(x + i);
    if (id >= 0) {
      const auto more = load<T, kWidth>(added + i);
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        sum.data[k] = from_float<T>(to_float(sum.data[k]) + to_float(more.data[k]));
    }
    store(y + i, sum);
  }
}

template <typename T, int kWidth>
__global__ void input_embeds_kernel(InputEmbedsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int id = p.ids[blockIdx.x];
  const auto row = static_cast<int64_t>(id < 0 ? blockIdx.x : id) * p.hidden;
  const T* from = static_cast<const T*>(id < 0 ? p.x : p.embeds) + row;
  T* to = static_cast<T*>(p.y) + static_cast<int64_t>(blockIdx.x) * p.hidden;
  for (int i = threadIdx.x * kWidth; i < p.hidden; i += blockDim.x * kWidth)
    store(to + i, load<T, kWidth>(from + i));
}

template <typename T>
__global__ void round_kernel(T* y, const float* x, int64_t count) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step)
    y[i] = from_float<T>(x[i]);
}

}  // namespace

cudaError_t input_embeds(DType dtype, const InputEmbedsParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = kVec<T>;
    if (p.hidden % kWidth == 0)
      return launch(input_embeds_kernel<T, kWidth>, p.num_tokens, 128, 0, stream, p);
    return launch(input_embeds_kernel<T, 1>, p.num_tokens, 128, 0, stream, p);
  });
}

cudaError_t add_embeds(DType dtype, const InputEmbedsParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = kVec<T>;
    if (p.hidden % kWidth == 0)
      return launch(add_embeds_kernel<T, kWidth>, p.num_tokens, 128, 0, stream, p);
    return launch(add_embeds_kernel<T, 1>, p.num_tokens, 128, 0, stream, p);
  });
}

cudaError_t round_to(DType dtype, void* y, const float* x, int64_t count, cudaStream_t stream) {
  constexpr int kThreads = 256, kMaxBlocks = 1024;
  const auto blocks =
      static_cast<int>(std::min<int64_t>((count + kThreads - 1) / kThreads, kMaxBlocks));
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(round_kernel<T>, blocks, kThreads, 0, stream, static_cast<T*>(y), x, count);
  });
}

}  // namespace llmc::kernels
