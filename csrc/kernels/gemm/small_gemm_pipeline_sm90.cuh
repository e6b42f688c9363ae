// Pipeline, tile schedule and epilogue of Hopper's GEMMs for few rows of x. A tile is 64 weight
// rows, or 64 gates and their ups, for all rows of x. Two blocks per SM are resident, so that
// memory is read during the epilogue of one. A block's copies run ahead by as many stages as fit,
// and those of the weight start before the previous kernel has ended (PDL).
//
// Blocks take tiles in turn. If tiles are few, the blocks of a cluster split K of a tile, and each
// reduces some of its outputs over distributed shared memory, in the order of the columns, so that
// the same x gives the same y.
#pragma once

#include <algorithm>

#include "../common/wgmma_sm90.cuh"
#include "gemv.cuh"

namespace llmc::sm90 {

using device::load;
using device::Vec;
using kernels::GemvParams;

constexpr int kRows = 64;       // weight rows of a tile: gates, and as many ups
constexpr int kRowBytes = 128;  // contiguous bytes of a row of x in shared memory
constexpr int kMinBlocks = 2;   // per SM
constexpr int kMaxClusterSize =
    4;  // blocks that split K of a tile: larger clusters wait until all blocks fit at once
constexpr int kClusterReduceCost = 3;  // cost of a cluster reduction, in stages
constexpr uint32_t kMaxSmem = 115712;  // bytes: half of an SM's
constexpr int kSumStride = kRows + 4;  // floats between rows of x, in sums
constexpr int kInitBarrier = 3;        // named barrier
constexpr int kMaxInFlight =
    2;  // weight stages in flight once the ring is full: with more, other reads wait

// Shared memory, aligned to 1,024 bytes. kWarps consumer warps are followed by a producer warp for
// the weight and one for x.
template <int kOperands, int kTokens, uint32_t kStageBytes, int kWarps>
struct SharedStorage {
  static constexpr int kConsumerThreads = kWarps * 32, kThreads = kConsumerThreads + 64;
  static constexpr uint32_t kStage = kStageBytes;
  static constexpr uint32_t kSumBytes = kOperands * kTokens * kSumStride * 4,
                            kMeasuredBytes = kTokens * 16;
  static constexpr uint32_t kTailBytes = kSumBytes + kMeasuredBytes + 256 + 1024;
  static constexpr int kStages = std::min(10u, (kMaxSmem - kTailBytes) / kStageBytes);
  static constexpr uint32_t kSumsAt = kStages * kStageBytes, kMeasuredAt = kSumsAt + kSumBytes;
  static constexpr uint32_t kBarriersAt = kMeasuredAt + kMeasuredBytes,
                            kBytes = kSumsAt + kTailBytes;
  static_assert(kStages >= 3 && kStageBytes % 1024 == 0 && kBarriersAt % 8 == 0 &&
                16 * kStages <= 256);

  uint8_t* bytes;
  uint32_t base = smem_address(bytes);

  __device__ uint32_t stage(int slot) const { return base + slot * kStageBytes; }
  __device__ float* sums() const {
    return reinterpret_cast<float*>(bytes + kSumsAt);
  }  // [kOperands, kTokens, kSumStride]
  // Sum and sum of squares of each row of x, by both twin warps, or zeros.
  __device__ float4* moments() const { return reinterpret_cast<float4*>(bytes + kMeasuredAt); }
  __device__ Mbarrier full_barrier(int slot) const { return {base + kBarriersAt + 8 * slot}; }
  __device__ Mbarrier empty_barrier(int slot) const {
    return {base + kBarriersAt + 8 * (kStages + slot)};
  }

  // Initializes the barriers: two producers arrive at a full barrier, a lane of each consumer warp
  // at an empty one. The thread that copies the weight does it, and its warp does not wait for the
  // others.
  __device__ void init_barriers() const {
    if (threadIdx.x == kConsumerThreads) {
      for (int slot = 0; slot < kStages; ++slot) {
        full_barrier(slot).init(2);
        empty_barrier(slot).init(kWarps);
      }
      device::fence_mbarrier_init();
    }
    if (threadIdx.x / 32 == kWarps) named_barrier_arrive(kInitBarrier, kThreads);
    else sm90::named_barrier_sync(kInitBarrier, kThreads);
  }
  // Waits for all consumers of the block, or of all blocks of the cluster.
  __device__ static void sync_consumers() { sm90::named_barrier_sync(1, kConsumerThreads); }
  __device__ static void sync_consumers(int cluster_size) {
    if (cluster_size == 1) return sync_consumers();
    device::cluster_arrive();
    device::cluster_wait();
  }
  // Call at the end: peers may still read this block's memory.
  __device__ static void finish(int cluster_size) {
    if (cluster_size == 1) return;
    device::cluster_arrive_relaxed();
    device::cluster_wait();
  }
};

// The stages of a block: all stages of each of its tiles, or its share of one tile in a cluster.
struct TileRange {
  int first, step, tiles;  // of tiles
  int begin, end;          // stages of each tile
  int rank, cluster_size;

  __device__ TileRange(int tiles, int stages, int cluster_size)
      : tiles(tiles), cluster_size(cluster_size) {
    static_assert(kMaxClusterSize == 4);
    const auto share = [&](int ranks) {  // a division by an unknown number takes 0.1 us
      const int all = stages * ranks;
      return cluster_size == 1   ? all
             : cluster_size == 2 ? all / 2
             : cluster_size == 3 ? all / 3
                                 : all / 4;
    };
    rank = cluster_size > 1 ? device::cluster_rank() : 0,
    first = cluster_size > 1 ? device::cluster_id() : blockIdx.x;
    step = cluster_size > 1 ? tiles : gridDim.x;
    begin = share(rank), end = share(rank + 1);
  }
};

// Producer loop: calls copy(slot, tile, stage) for each stage, when its slot is empty. At most
// kMaxInFlight weight stages are in flight.
template <bool kOfWeight, typename SharedStorage, typename Copy>
__device__ __forceinline__ void produce(const SharedStorage& smem, const TileRange& range,
                                        Copy&& copy) {
  int slot = 0, parity = 1;  // the phase before the first has completed
  bool filled = false;
  for (int tile = range.first; tile < range.tiles; tile += range.step)
#pragma unroll 1
    for (int stage = range.begin; stage < range.end; ++stage) {
      smem.empty_barrier(slot).wait(parity);
      if (kOfWeight && filled) {
        const int before = slot < kMaxInFlight ? slot + SharedStorage::kStages - kMaxInFlight
                                               : slot - kMaxInFlight;
        smem.full_barrier(before).wait(before < slot ? parity ^ 1 : parity);
      }
      copy(slot, tile, stage);
      if (++slot == SharedStorage::kStages) slot = 0, parity ^= 1, filled = true;
    }
}

// Epilogue: a block's share of a tile's outputs. A thread has four outputs of a row of x at a time,
// in one short loop: code that runs once per kernel is fetched when it runs.
template <typename T, int kOperands, int kTokens, int kConsumerThreads>
class Epilogue {
 public:
  // Prefetches residual and scales to L1.
  __device__ Epilogue(const GemvParams& p, const TileRange& range, int tile)
      : p_(p), range_(range), first_(tile * kRows) {
    const int share = (p.rows * kFours + range.cluster_size - 1) / range.cluster_size;
    begin_ = range.rank * share + threadIdx.x,
    end_ = min(p.rows * kFours, (range.rank + 1) * share);
    for_each([&](int token, int output) {
      if (p.residual != nullptr)
        device::prefetch_l1(static_cast<const T*>(p.residual) +
                            static_cast<int64_t>(token) * p.out + output);
      if (p.x_scale == nullptr || p.grouped) return;
      device::prefetch_l1(p.x_scale + token);
#pragma unroll
      for (int m = 0; m < kOperands; ++m) device::prefetch_l1(p.quant.scale + m * p.out + output);
    });
  }

  // Reduces the sums, and the moments of x, over the blocks of the cluster; writes y.
  __device__ void store(const float* sums, const float4* moments) const {
    for_each([&](int token, int output) {
      const float* from = sums + token * kSumStride + output - first_;
      // Remote loads take a while, so all are issued at once.
      const auto added_up = [&](const float* from) {
        if (range_.cluster_size == 1) return *reinterpret_cast<const float4*>(from);
        float4 of[kMaxClusterSize], all{};
#pragma unroll
        for (int other = 0; other < kMaxClusterSize; ++other)
          of[other] = device::ld_shared_cluster(from, min(other, range_.cluster_size - 1));
#pragma unroll
        for (int other = 0; other < kMaxClusterSize; ++other)
          if (other < range_.cluster_size)
            all.x += of[other].x, all.y += of[other].y, all.z += of[other].z, all.w += of[other].w;
        return all;
      };
      const float4 whole = added_up(from),
                   ups = kOperands > 1 ? added_up(from + kTokens * kSumStride) : float4{};
      const float4 of_row =
          p_.norm ? added_up(reinterpret_cast<const float*>(moments + token)) : float4{};
      float values[] = {whole.x, whole.y, whole.z, whole.w}, of_up[] = {ups.x, ups.y, ups.z, ups.w};
#pragma unroll
      for (int k = 0; k < 4; ++k)
        device::scale_accumulator<T>(p_, values[k], of_up[k], (of_row.x + of_row.z) * per_column_,
                                     (of_row.y + of_row.w) * per_column_, token, output + k,
                                     kOperands > 1, p_.norm);
      device::activate(values, p_.activation);
      const int64_t place = static_cast<int64_t>(token) * p_.out + output;
      Vec<T, 4> residual;
      if (p_.residual != nullptr) residual = load<T, 4>(static_cast<const T*>(p_.residual) + place);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (kOperands > 1) values[k] *= of_up[k];
        if (p_.residual != nullptr) values[k] += device::to_float(residual.data[k]);
      }
      device::OutputWriter<T>(p_.y, p_.y_scale_inverse).write(place, values);
    });
  }

 private:
  static constexpr int kFours = kRows / 4;

  template <typename F>
  __device__ __forceinline__ void for_each(F&& f) const {
#pragma unroll 1
    for (int i = begin_; i < end_; i += kConsumerThreads) {
      const int output = first_ + i % kFours * 4;
      if (output < p_.out) f(i / kFours, output);
    }
  }

  const GemvParams& p_;
  const TileRange& range_;
  int first_, begin_, end_;
  float per_column_ = 1.f / p_.in;
};

// Launches a kernel with `stages` stages per tile, with the cluster size that leaves the fewest
// stages in sequence.
template <auto kKernel, typename SharedStorage, typename TensorMaps>
cudaError_t launch_tiles(int stages, const TensorMaps& maps, const GemvParams& p,
                         cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(SharedStorage::kBytes));
  if (error != cudaSuccess) return error;
  // Clusters that can be resident at once, by size.
  static const auto resident = [] {
    auto found = max_active_clusters<kMaxClusterSize>(kKernel, SharedStorage::kThreads,
                                                      SharedStorage::kBytes);
    found[1] = kMinBlocks * static_cast<int>(device::num_sms());
    return found;
  }();
  const int tiles = static_cast<int>(device::ceil_div(p.out, kRows));
  int cluster_size = 1, least = static_cast<int>(device::ceil_div(tiles, resident[1])) * stages;
  for (int more = 2; more <= std::min(kMaxClusterSize, stages); ++more) {
    if (resident[more] == 0) continue;
    const auto stages_of_block =
        device::ceil_div(tiles, resident[more]) * device::ceil_div(stages, more);
    const int cost = static_cast<int>(stages_of_block) + kClusterReduceCost;
    if (cost < least) cluster_size = more, least = cost;
  }
  const int blocks = cluster_size > 1 ? tiles * cluster_size : std::min(tiles, resident[1]);
  const device::Launch launch(blocks, SharedStorage::kThreads, SharedStorage::kBytes, stream,
                              cluster_size);
  return cudaLaunchKernelEx(launch.config(), kKernel, maps, p, tiles, stages, cluster_size);
}

}  // namespace llmc::sm90
