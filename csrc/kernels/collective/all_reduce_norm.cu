// One-shot all-reduce, residual and RMSNorm in one kernel. Reads x, residual and weight once from
// memory and writes y, sum and normed once; over the links it sends what the one-shot all-reduce
// does. Bound by latency.
#include "launch.cuh"

namespace llmc::kernels {
namespace {

using namespace peer;

// One row per block at a time, its elements in registers between sum and norm: kTurns vectors per
// thread. A thread writes what is at an address only after the block has read it, so normed may be
// x. y and the norm are rounded as by two kernels.
template <typename T, int kMost, int kTurns>
__global__ void __launch_bounds__(kPeerThreads)
    all_reduce_norm_kernel(__grid_constant__ const PeerGroup peers,
                           __grid_constant__ const AllReduceNormParams p) {
  constexpr int kWidth = device::kVec<T>;
  using Row = device::Vec<T, kWidth>;
  __shared__ float partial[kPeerThreads / 32];
  device::pdl_wait();
  device::pdl_launch_dependents();
  const DeviceCta cta;
  const Collective<DeviceCta> collective(peers, cta);
  const int width = p.hidden / kWidth;
  const int64_t count = int64_t{p.rows} * width;
  const auto* x = static_cast<const Words*>(p.x);
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x)
    for (int i = threadIdx.x; i < width; i += kPeerThreads)
      collective.send_packets(x[int64_t{row} * width + i], int64_t{row} * width + i, count);
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t start = int64_t{row} * width;
    float value[kTurns][kWidth];
    float squares = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int i = turn * kPeerThreads + threadIdx.x;
      if (i >= width) continue;
      Words words[kMost];
      const Words own = x[start + i];
#pragma unroll
      for (int rank = 0; rank < kMost; ++rank)
        if (rank == peers.rank) words[rank] = own;
      collective.receive_packets(words, start + i, count);
      const Words sum = sum_words<SumOf<T>>(words, peers.size);
      static_cast<Words*>(p.y)[start + i] = sum;
      const auto& reduced = reinterpret_cast<const Row&>(sum);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) value[turn][k] = device::to_float(reduced.data[k]);
      if (p.residual != nullptr) {
        const Row more = static_cast<const Row*>(p.residual)[start + i];
        Row total;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          value[turn][k] += device::to_float(more.data[k]);
          total.data[k] = device::from_float<T>(value[turn][k]);
        }
        static_cast<Row*>(p.sum)[start + i] = total;
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k) squares += value[turn][k] * value[turn][k];
    }
    const float scale =
        rsqrtf(device::block_sum<kPeerThreads>(squares, partial) / p.hidden + p.epsilon);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int i = turn * kPeerThreads + threadIdx.x;
      if (i >= width) continue;
      Row out;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float gain = p.weight != nullptr ? p.weight[i * kWidth + k] : 1.f;
        out.data[k] = device::from_float<T>(value[turn][k] * scale * gain);
      }
      static_cast<Row*>(p.normed)[start + i] = out;
    }
  }
  collective.finish();
}

template <typename T, typename F>
cudaError_t dispatch_turns(int hidden, F&& f) {
  const int turns = (hidden / device::kVec<T> + kPeerThreads - 1) / kPeerThreads;
  if (turns <= 1) return f(std::integral_constant<int, 1>());
  if (turns <= 2) return f(std::integral_constant<int, 2>());
  return f(std::integral_constant<int, kMaxReducedTurns>());
}

}  // namespace

cudaError_t all_reduce_norm(DType dtype, const PeerGroup& peers, const AllReduceNormParams& p,
                            cudaStream_t stream) {
  return device::dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = device::kVec<T>;
    if (p.hidden < kWidth || p.hidden % kWidth != 0 ||
        p.hidden > kMaxReducedTurns * kPeerThreads * kWidth ||
        int64_t{p.rows} * p.hidden * static_cast<int64_t>(sizeof(T)) > peers.layout.packet_bytes ||
        !is_aligned(p.y, p.x) || !is_aligned(p.normed, p.residual) ||
        !device::is_aligned(p.sum, 16))
      return cudaErrorInvalidValue;
    if (p.rows == 0) return cudaSuccess;
    return dispatch_size(peers.size, [&](auto most) {
      return dispatch_turns<T>(p.hidden, [&](auto turns) {
        return device::launch(all_reduce_norm_kernel<T, most.value, turns.value>,
                              p.rows < kPeerBlocks ? p.rows : kPeerBlocks, kPeerThreads, 0, stream,
                              peers, p);
      });
    });
  });
}

cudaError_t load_all_reduce_norm(int size) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
    for (int turns = 1; turns <= kMaxReducedTurns; turns *= 2) {
      const cudaError_t status = device::dispatch_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        return dispatch_size(size, [&](auto most) {
          return dispatch_turns<T>(turns * kPeerThreads * device::kVec<T>, [&](auto bound) {
            return load_kernel(all_reduce_norm_kernel<T, most.value, bound.value>);
          });
        });
      });
      if (status != cudaSuccess) return status;
    }
  return cudaSuccess;
}

}  // namespace llmc::kernels
