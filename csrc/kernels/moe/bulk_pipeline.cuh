// A ring of chunks in shared memory, between a producer warp and consumer warps: bulk copies on
// Hopper, 16 bytes per thread elsewhere.
#pragma once

#include "../common/cluster.cuh"
#include "../common/cp_async.cuh"

namespace llmc::device {

// Ranges of memory at a fixed distance, and their room in a slot.
struct StridedSpans {
  const char* from;
  int64_t apart;
  int bytes, room;
};

// A producer warp copies ranges of memory to the slots of a ring in shared memory; consumer warps
// read them.
template <int kSlotBytes, int kSlots, int kConsumerWarps, int kMaxRanges>
class BulkPipeline {
 public:
  // `at` has kSlotBytes per slot, `barriers` two per slot.
  __device__ __forceinline__ BulkPipeline(char* at, uint64_t* barriers)
      : at_(at), barriers_(smem_address(barriers)) {}
  // Call from one thread, before anything else.
  __device__ __forceinline__ void init() const {
#if __CUDA_ARCH__ >= 900
    constexpr int kCopying = 1;  // lanes that arrive
#else
    constexpr int kCopying = 32;
#endif
    for (int slot = 0; slot < kSlots; ++slot)
      there(slot).init(kCopying), read(slot).init(kConsumerWarps);
  }
  // Copies the next chunk, from the producer warp, when the slot is empty: `count` ranges each, at
  // most kMaxRanges, of multiples of 16 bytes.
  __device__ __forceinline__ void copy(int turn, int count, const StridedSpans& vectors,
                                       const StridedSpans& scales) const {
    const int lane = threadIdx.x % 32;
    char* to = at_ + turn % kSlots * kSlotBytes;
    if (turn >= kSlots) read(turn).wait((turn / kSlots - 1) & 1);
    auto each = [&](auto copy) {
#pragma unroll
      for (int i = 0; i < kMaxRanges; ++i)
        if (i < count) {
          copy(to + i * vectors.room, vectors.from + i * vectors.apart, vectors.bytes);
          copy(to + kMaxRanges * vectors.room + i * scales.room, scales.from + i * scales.apart,
               scales.bytes);
        }
    };
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      there(turn).arrive_expect_tx(count * (vectors.bytes + scales.bytes));
      each([&](char* to, const char* from, int bytes) {
        bulk_copy(smem_address(to), from, bytes, there(turn));
      });
    }
#else
    each([&](char* to, const char* from, int bytes) {
      for (int i = lane * 16; i < bytes; i += 512)
        cp_async(reinterpret_cast<uint4*>(to + i), from + i, true);
    });
    there(turn).arrive_after_cp_async();
#endif
    __syncwarp();
  }
  // Waits for the chunk of this turn; releases it for this warp.
  __device__ __forceinline__ const char* wait(int turn) const {
    there(turn).wait(turn / kSlots & 1);
    return at_ + turn % kSlots * kSlotBytes;
  }
  __device__ __forceinline__ void release(int turn) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) read(turn).arrive();
  }

 private:
  __device__ __forceinline__ Mbarrier there(int turn) const {
    return {barriers_ + turn % kSlots * 8};
  }
  __device__ __forceinline__ Mbarrier read(int turn) const {
    return {barriers_ + (kSlots + turn % kSlots) * 8};
  }
  char* at_;
  uint32_t barriers_;
};

}  // namespace llmc::device
