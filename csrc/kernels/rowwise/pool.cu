// Pooling of packed tokens: the first or last token of each sequence, or the mean of all.
#include "../common/device.cuh"
#include "pool.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kThreads = 256, kLanes = 8, kGroups = kThreads / kLanes;

// A block takes one sequence and kLanes vectors of columns. Reads these columns of the pooled rows
// once, writes one row. Each of kGroups groups sums every kGroups-th row; the order of the sum
// depends on the length only.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) pool_kernel(PoolParams p) {
  __shared__ float sums[kGroups][kLanes * kWidth];
  pdl_wait();
  pdl_launch_dependents();
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int column = (blockIdx.x * kLanes + lane) * kWidth;
  int begin = p.cu_seqlens[blockIdx.y], end = p.cu_seqlens[blockIdx.y + 1];
  if (p.kind == PoolKind::kCls) end = min(end, begin + 1);
  if (p.kind == PoolKind::kLast) begin = max(begin, end - 1);
  float sum[kWidth] = {};
  for (int row = begin + group; row < end && column < p.hidden; row += kGroups) {
    const auto x =
        load<T, kWidth>(static_cast<const T*>(p.x) + static_cast<int64_t>(row) * p.hidden + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] += to_float(x.data[i]);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[group][lane * kWidth + i] = sum[i];
  __syncthreads();
  const int own = blockIdx.x * kLanes * kWidth + threadIdx.x;
  if (threadIdx.x >= kLanes * kWidth || own >= p.hidden) return;
  float total = 0;
  for (int g = 0; g < min(kGroups, end - begin); ++g) total += sums[g][threadIdx.x];
  static_cast<T*>(p.y)[static_cast<int64_t>(blockIdx.y) * p.hidden + own] =
      from_float<T>(total / max(1, end - begin));
}

}  // namespace

cudaError_t pool(DType dtype, const PoolParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto run = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      return launch(pool_kernel<T, kWidth>, dim3(ceil_div(p.hidden, kLanes * kWidth), p.batch),
                    kThreads, 0, stream, p);
    };
    if (has_aligned_rows<T>(p.x, p.hidden)) return run(std::integral_constant<int, kVec<T>>());
    return run(std::integral_constant<int, 1>());
  });
}

}  // namespace llmc::kernels
