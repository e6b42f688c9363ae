// What Hopper's kernels for few rows of x share. A tile is 64 rows of the weight, or 64 gates and their ups, for all rows of x.
// Two blocks are resident, so that memory is read while one of them ends; a block's copies are ahead of its products by as
// many stages as there is room for, and those of the weight begin before the kernel ahead has ended.
//
// Blocks take tiles in turn. Where there are few, the blocks of a cluster share a tile's columns, and each adds up some of its
// outputs from what all have in shared memory: in the order of the columns, so that the same x gives the same y.
#pragma once

#include <algorithm>

#include "../gemv.cuh"
#include "wgmma.cuh"

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
  // Of each row of x its sum and that of its squares, and nothing.
  __device__ float4* measured() const { return reinterpret_cast<float4*>(bytes + kMeasuredAt); }
  __device__ Barrier there(int slot) const { return {base + kBarriersAt + 8 * slot}; }
  __device__ Barrier read(int slot) const { return {base + kBarriersAt + 8 * (kStages + slot)}; }

  // By one thread, before all meet: two arrive where a stage is there, and a lane of each warp that has read it.
  __device__ void init(int readers = kWarps) const {
    for (int slot = 0; slot < kStages; ++slot) {
      there(slot).init(2);
      read(slot).init(readers);
    }
    device::let_copies_see_barriers();
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
    const int block = blockIdx.x;
    rank = parts > 1 ? block % parts : 0, first = parts > 1 ? block / parts : block;
    step = parts > 1 ? tiles : gridDim.x;
    begin = stages * rank / parts, end = stages * (rank + 1) / parts;
  }
};

// A block's copies, one stage after the other, as places for them come free; and what is done before one is waited for.
template <typename Room, typename Before, typename Copy>
__device__ __forceinline__ void copy_all(const Room& room, const Part& part, Before&& before, Copy&& copy) {
  int slot = 0, parity = 1;  // of an unused place the phase before the first has ended
  for (int tile = part.first; tile < part.tiles; tile += part.step)
    for (int stage = part.begin; stage < part.end; ++stage) {
      before();
      room.read(slot).wait(parity);
      copy(slot, tile, stage);
      if (++slot == Room::kStages) slot = 0, parity ^= 1;
    }
}

template <typename Room, typename Copy>
__device__ __forceinline__ void copy_all(const Room& room, const Part& part, Copy&& copy) {
  copy_all(room, part, [] {}, copy);
}

// A block's share of a tile's outputs. Four outputs of a row of x are a thread's at once.
template <typename T, int kOperands, int kTokens, int kMultiplying>
class Outputs {
 public:
  // Reads the residual, while there is time.
  __device__ Outputs(const GemvParams& p, const Part& part, int tile) : p_(p), part_(part), first_(tile * kRows) {
    const int share = (p.rows * kFours + part.parts - 1) / part.parts;
    begin_ = part.rank * share + threadIdx.x, end_ = min(p.rows * kFours, (part.rank + 1) * share);
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (p.residual != nullptr && has(i))
        residual_[i] = load<T, 4>(static_cast<const T*>(p.residual) + static_cast<int64_t>(token(i)) * p.out + output(i));
  }

  // From the sums that all blocks of the cluster have where this one has them, and what they have measured; to y.
  __device__ void finish(const float* sums, const float4* measured) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (!has(i)) continue;
      const float* from = sums + token(i) * kPitch + output(i) - first_;
      float4 whole{}, ups{}, of_row{};
      auto add = [](float4& to, const float4& more) { to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w; };
      auto add_all = [&](auto&& read) {
        add(whole, read(from));
        if (kOperands > 1) add(ups, read(from + kTokens * kPitch));
        if (p_.norm) add(of_row, read(reinterpret_cast<const float*>(measured + token(i))));
      };
      if (part_.parts == 1)
        add_all([](const float* from) { return *reinterpret_cast<const float4*>(from); });
      else
#pragma unroll 4
        for (int other = 0; other < part_.parts; ++other)
          add_all([&](const float* from) { return device::load_from_rank(from, other); });
      float values[] = {whole.x, whole.y, whole.z, whole.w};
      const float of_up[] = {ups.x, ups.y, ups.z, ups.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        values[k] = device::output_of<T>(p_, values[k], of_up[k], of_row.x, of_row.y, token(i), output(i) + k, kOperands > 1,
                                         p_.norm);
        if (p_.residual != nullptr) values[k] += device::to_float(residual_[i].data[k]);
      }
      device::store_floats(static_cast<T*>(p_.y) + static_cast<int64_t>(token(i)) * p_.out + output(i), values);
    }
  }

 private:
  static constexpr int kFours = kRows / 4, kOwn = (kTokens * kFours + kMultiplying - 1) / kMultiplying;

  __device__ int token(int i) const { return (begin_ + i * kMultiplying) / kFours; }
  __device__ int output(int i) const { return first_ + (begin_ + i * kMultiplying) % kFours * 4; }
  __device__ bool has(int i) const { return begin_ + i * kMultiplying < end_ && output(i) < p_.out; }

  const GemvParams& p_;
  const Part& part_;
  int first_, begin_, end_;
  Vec<T, 4> residual_[kOwn];
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
