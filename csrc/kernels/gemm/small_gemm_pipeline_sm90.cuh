// What Hopper's kernels for few rows of x share. A tile is 64 rows of the weight, or 64 gates and their ups, for all rows of x.
// Two blocks are resident, so that memory is read while one of them ends; a block's copies are ahead of its products by as
// many stages as there is room for, and those of the weight begin before the kernel ahead has ended.
//
// Blocks take tiles in turn. Where there are few, the blocks of a cluster share a tile's columns, and each adds up some of its
// outputs from what all have in shared memory: in the order of the columns, so that the same x gives the same y.
#pragma once

#include <algorithm>

#include "../common/wgmma_sm90.cuh"
#include "gemv.cuh"

namespace llmc::sm90a {

using device::load;
using device::Vec;
using kernels::GemvParams;

constexpr int kRows = 64;         // of the weight, in a tile: of gates, and as many ups
constexpr int kLineBytes = 128;   // of a row of x that lie side by side in shared memory
constexpr int kResident = 2;      // blocks
constexpr int kMostParts = 4;     // of a tile, in a cluster: larger ones wait for room, all at once
constexpr int kClusterCost = 3;   // what it costs in stages that a cluster adds up its parts
constexpr uint32_t kMost = 115712;  // bytes of shared memory, of which a multiprocessor has twice as many
constexpr int kPitch = kRows + 4;   // floats from one row of x to the next, of sums
constexpr int kBegun = 3;           // a barrier's number
constexpr int kUnderWay = 2;        // stages of a weight, once a block has filled its room: more, and all that others read waits

// Where in shared memory things lie, in bytes from a multiple of 1,024 on, with stages of so many bytes. kWarps multiply;
// behind them is one that copies the weight, and one that copies x.
template <int kOperands, int kTokens, uint32_t kStageBytes, int kWarps>
struct Room {
  static constexpr int kMultiplying = kWarps * 32, kThreads = kMultiplying + 64;
  static constexpr uint32_t kStage = kStageBytes;
  static constexpr uint32_t kSumBytes = kOperands * kTokens * kPitch * 4, kMeasuredBytes = kTokens * 16;
  static constexpr uint32_t kRest = kSumBytes + kMeasuredBytes + 256 + 1024;
  static constexpr int kStages = std::min(10u, (kMost - kRest) / kStageBytes);
  static constexpr uint32_t kSumsAt = kStages * kStageBytes, kMeasuredAt = kSumsAt + kSumBytes;
  static constexpr uint32_t kBarriersAt = kMeasuredAt + kMeasuredBytes, kBytes = kSumsAt + kRest;
  static_assert(kStages >= 3 && kStageBytes % 1024 == 0 && kBarriersAt % 8 == 0 && 16 * kStages <= 256);

  uint8_t* bytes;
  uint32_t base = shared_address(bytes);

  __device__ uint32_t stage(int slot) const { return base + slot * kStageBytes; }
  __device__ float* sums() const { return reinterpret_cast<float*>(bytes + kSumsAt); }  // [kOperands, kTokens, kPitch]
  // Of each row of x its sum and that of its squares; and both of what others measured, or nothing.
  __device__ float4* measured() const { return reinterpret_cast<float4*>(bytes + kMeasuredAt); }
  __device__ Barrier there(int slot) const { return {base + kBarriersAt + 8 * slot}; }
  __device__ Barrier read(int slot) const { return {base + kBarriersAt + 8 * (kStages + slot)}; }

  // Until there are barriers: two arrive where a stage is there, and a lane of each warp that has read it. The thread that copies
  // the weight makes them, and its warp does not wait for others.
  __device__ void begin() const {
    if (threadIdx.x == kMultiplying) {
      for (int slot = 0; slot < kStages; ++slot) {
        there(slot).init(2);
        read(slot).init(kWarps);
      }
      device::let_copies_see_barriers();
    }
    if (threadIdx.x / 32 == kWarps) arrive_at(kBegun, kThreads);
    else sm90a::meet(kBegun, kThreads);
  }
  // Until all threads that multiply are here; with parts, those of all blocks of the cluster.
  __device__ static void meet() { sm90a::meet(1, kMultiplying); }
  __device__ static void meet(int parts) {
    if (parts == 1) return meet();
    device::arrive_at_cluster();
    device::wait_for_cluster();
  }
  // At the end: others may still read what is here.
  __device__ static void leave(int parts) {
    if (parts == 1) return;
    device::arrive_only();
    device::wait_for_cluster();
  }
};

// A block's stages: of each of its tiles all, or in a cluster its part of the stages of one.
struct Part {
  int first, step, tiles;  // tiles
  int begin, end;          // stages of each
  int rank, parts;

  __device__ Part(int tiles, int stages, int parts) : tiles(tiles), parts(parts) {
    static_assert(kMostParts == 4);
    const auto share = [&](int ranks) {  // a division by what the compiler does not know is 0.1 us
      const int all = stages * ranks;
      return parts == 1 ? all : parts == 2 ? all / 2 : parts == 3 ? all / 3 : all / 4;
    };
    rank = parts > 1 ? device::cluster_rank() : 0, first = parts > 1 ? device::cluster_place() : blockIdx.x;
    step = parts > 1 ? tiles : gridDim.x;
    begin = share(rank), end = share(rank + 1);
  }
};

// A block's copies, one stage after the other, as places for them come free; of a weight, no more than kUnderWay at once.
template <bool kOfWeight, typename Room, typename Copy>
__device__ __forceinline__ void copy_all(const Room& room, const Part& part, Copy&& copy) {
  int slot = 0, parity = 1;  // of an unused place the phase before the first has ended
  bool filled = false;
  for (int tile = part.first; tile < part.tiles; tile += part.step)
#pragma unroll 1
    for (int stage = part.begin; stage < part.end; ++stage) {
      room.read(slot).wait(parity);
      if (kOfWeight && filled) {
        const int before = slot < kUnderWay ? slot + Room::kStages - kUnderWay : slot - kUnderWay;
        room.there(before).wait(before < slot ? parity ^ 1 : parity);
      }
      copy(slot, tile, stage);
      if (++slot == Room::kStages) slot = 0, parity ^= 1, filled = true;
    }
}

// A block's share of a tile's outputs. Four outputs of a row of x are a thread's at once, and its turns one loop: code that runs
// once a kernel is fetched when it runs, so there is little.
template <typename T, int kOperands, int kTokens, int kMultiplying>
class Outputs {
 public:
  // Has at hand what sums are multiplied by and added to, while there is time.
  __device__ Outputs(const GemvParams& p, const Part& part, int tile) : p_(p), part_(part), first_(tile * kRows) {
    const int share = (p.rows * kFours + part.parts - 1) / part.parts;
    begin_ = part.rank * share + threadIdx.x, end_ = min(p.rows * kFours, (part.rank + 1) * share);
    for_each([&](int token, int output) {
      if (p.residual != nullptr) device::bring(static_cast<const T*>(p.residual) + static_cast<int64_t>(token) * p.out + output);
      if (p.x_scale == nullptr || p.grouped) return;
      device::bring(p.x_scale + token);
#pragma unroll
      for (int m = 0; m < kOperands; ++m) device::bring(p.packing.scale + m * p.out + output);
    });
  }

  // From the sums that all blocks of the cluster have where this one has them, and what they have measured; to y.
  __device__ void finish(const float* sums, const float4* measured) const {
    for_each([&](int token, int output) {
      const float* from = sums + token * kPitch + output - first_;
      // What other blocks have takes a while, so all of it is asked for at once.
      const auto added_up = [&](const float* from) {
        if (part_.parts == 1) return *reinterpret_cast<const float4*>(from);
        float4 of[kMostParts], all{};
#pragma unroll
        for (int other = 0; other < kMostParts; ++other) of[other] = device::load_from_rank(from, min(other, part_.parts - 1));
#pragma unroll
        for (int other = 0; other < kMostParts; ++other)
          if (other < part_.parts) all.x += of[other].x, all.y += of[other].y, all.z += of[other].z, all.w += of[other].w;
        return all;
      };
      const float4 whole = added_up(from), ups = kOperands > 1 ? added_up(from + kTokens * kPitch) : float4{};
      const float4 of_row = p_.norm ? added_up(reinterpret_cast<const float*>(measured + token)) : float4{};
      float values[] = {whole.x, whole.y, whole.z, whole.w}, of_up[] = {ups.x, ups.y, ups.z, ups.w};
#pragma unroll
      for (int k = 0; k < 4; ++k)
        device::scale_output<T>(p_, values[k], of_up[k], (of_row.x + of_row.z) * per_column_,
                                (of_row.y + of_row.w) * per_column_, token, output + k, kOperands > 1, p_.norm);
      device::activate(values, p_.activation);
      const int64_t place = static_cast<int64_t>(token) * p_.out + output;
      Vec<T, 4> residual;
      if (p_.residual != nullptr) residual = load<T, 4>(static_cast<const T*>(p_.residual) + place);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (kOperands > 1) values[k] *= of_up[k];
        if (p_.residual != nullptr) values[k] += device::to_float(residual.data[k]);
      }
      device::Made<T>(p_.y, p_.y_inverse).put(place, values);
    });
  }

 private:
  static constexpr int kFours = kRows / 4;

  template <typename F>
  __device__ __forceinline__ void for_each(F&& f) const {
#pragma unroll 1
    for (int i = begin_; i < end_; i += kMultiplying) {
      const int output = first_ + i % kFours * 4;
      if (output < p_.out) f(i / kFours, output);
    }
  }

  const GemvParams& p_;
  const Part& part_;
  int first_, begin_, end_;
  float per_column_ = 1.f / p_.in;
};

// Enqueues a kernel of so many stages for each of its tiles, shared out as takes the fewest stages one after the other.
template <auto kKernel, typename Room, typename Maps>
cudaError_t launch_shared(int stages, const Maps& maps, const GemvParams& p, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(Room::kBytes));
  if (error != cudaSuccess) return error;
  // Clusters of so many blocks that are resident at once.
  static const auto resident = [] {
    auto found = resident_clusters<kMostParts>(kKernel, Room::kThreads, Room::kBytes);
    found[1] = kResident * static_cast<int>(device::multiprocessors());
    return found;
  }();
  const int tiles = static_cast<int>(device::blocks_for(p.out, kRows));
  int parts = 1, least = static_cast<int>(device::blocks_for(tiles, resident[1])) * stages;
  for (int more = 2; more <= std::min(kMostParts, stages); ++more) {
    if (resident[more] == 0) continue;
    const auto stages_of_block = device::blocks_for(tiles, resident[more]) * device::blocks_for(stages, more);
    const int cost = static_cast<int>(stages_of_block) + kClusterCost;
    if (cost < least) parts = more, least = cost;
  }
  const int blocks = parts > 1 ? tiles * parts : std::min(tiles, resident[1]);
  const device::Launch launch(blocks, Room::kThreads, Room::kBytes, stream, parts);
  return cudaLaunchKernelEx(launch.config(), kKernel, maps, p, tiles, stages, parts);
}

}  // namespace llmc::sm90a
