// Parts of the decode kernel's mainloop: the shared memory, the mma fragments of a round of keys
// and values, and the online softmax.
//
// A warp takes 16 keys at a time, as rows of the mma tile: S = K * Q^T, with K's dimensions
// permuted so that a thread has 8 adjacent elements of a key. The transposed weights (movmatrix)
// times V are the sums; V's rows are paired by byte permutes, and its columns permuted so that a
// thread has 8 adjacent elements of a value. With a head_dim above 256 the sums are V^T times the
// weights, which takes half the registers.
#pragma once

#include "../common/cp_async.cuh"
#include "../common/mma.cuh"
#include "attention.cuh"
#include "plan_kv_splits.cuh"

namespace llmc::device {

using kernels::kDecodeKeys;
using kernels::KvSplit;

// Starts a copy to shared memory; writes zeros unless `there`. (Bypassing L1 and an L2 prefetch of
// 256 bytes were both slower here.)
template <typename V>
__device__ __forceinline__ void cp_async(V* to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "n"(sizeof(V)), "r"(there ? static_cast<int>(sizeof(V)) : 0)
               : "memory");
}

// Eight cache elements as an mma fragment.
template <typename T, typename C>
__device__ __forceinline__ uint4 words_of(const Cached<C>& cached) {
  const Vec<T, 8> wide = convert_cache<T, C>(cached);
  return *reinterpret_cast<const uint4*>(&wide);
}

extern __shared__ uint4 decode_smem[];

// Shared memory of a block: a ring of rounds per warp, the query heads [kHeads][kPitch], the new
// keys and values [kFresh][kPitch] each, and float32 scratch [kDim] per warp. kSteps: head_dim /
// 32, rounded up.
template <typename T, typename C, int kSteps, int kWarps, int kHeads>
struct DecodeSharedStorage {
  static constexpr int kDim = kSteps * 32, kPitch = kDim + 8, kHalves = (kDim + 63) / 64;
  // Rounds of 16 keys and values in flight per warp.
  static constexpr int kRounds = (kWarps > 4 && kDim > 128) || kDim > 256 ? 1 : 2;
  static constexpr bool kTall = kDim > 256;  // sums are V^T * weights
  // Vectors of 8 elements: of a row, of a row in shared memory, of a round.
  static constexpr int kVectors = kDim / 8, kRow = kSteps == 3 ? 16 : kVectors,
                       kRound = 2 * kDecodeKeys * kRow;
  static constexpr int kFresh = kHeads > kDecodeHeads ? kernels::kMaxRows : 1;
  // Vectors of a warp's ring, whose memory its sums reuse.
  static constexpr int kSums = sizeof(float) * kHeads * kDim / sizeof(Cached<C>),
                       kRing = kRounds * kRound > kSums ? kRounds * kRound : kSums;
  static constexpr size_t kBytes = sizeof(Cached<C>) * kWarps * kRing +
                                   sizeof(T) * kHeads * kPitch + sizeof(C) * 2 * kFresh * kPitch +
                                   sizeof(float) * kWarps * kDim;

  // Round i is at i % kRounds * kRound.
  __device__ __forceinline__ static Cached<C>* ring(int warp) {
    return reinterpret_cast<Cached<C>*>(decode_smem) + warp * kRing;
  }
  // After the new values.
  template <typename Values>
  __device__ __forceinline__ static float* scratch(Values* values) {
    return reinterpret_cast<float*>(values + kFresh * kPitch);
  }
  // Element i of a warp's sum for a head, at row warp * kHeads + head. Four adjacent elements of a
  // row are swizzled against bank conflicts.
  __device__ __forceinline__ static float* sum(int row, int i) {
    return reinterpret_cast<float*>(ring(row / kHeads)) + row % kHeads * kDim +
           (i ^ ((i >> 5 & 1) | (row & 1) << 1) << 2);
  }
  // Swizzled position of vector `at` of a row of a round, without bank conflicts.
  __device__ __forceinline__ static int key_at(int row, int at) {
    return row * kRow + (at ^ (row % 4 * 4 & (kRow - 1)));
  }
  __device__ __forceinline__ static int value_at(int row, int at) {
    return (kDecodeKeys + row) * kRow + (at ^ (row & (kTall ? 7 : 6) & (kRow - 1)));
  }
};

// A thread's warp and lane, and its row and column in mma fragments.
struct MmaThread {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
};

// The new key and value in shared memory, in the cache's type: [kPitch]; with several rows, those
// of positions [position, end), one after the other.
template <typename C>
struct NewKv {
  C *key, *value;
  int position, end;
};

// A round of keys and values in shared memory, as mma fragments. The new position is not in the
// ring. Refers to variables of the kernel, as a lambda does: with copies of them, the compiler
// hoists other parts of addresses.
template <typename T, typename C, int kSteps, int kWarps, int kHeads>
struct KvRound {
  using SharedStorage = DecodeSharedStorage<T, C, kSteps, kWarps, kHeads>;

  const NewKv<C>& fresh;
  const MmaThread& thread;
  const Cached<C>* const& here;
  const int& start;  // its first position

  // Vector j of row r, as mma fragments.
  __device__ __forceinline__ uint4 key(int j, int r) const {
    const int g = thread.g, t = thread.t;
    const int row = g + 8 * r, at = 4 * j + t;
    return words_of<T, C>(is_new(row) ? load_cache(fresh.key + new_at(row) + 8 * at)
                                      : here[SharedStorage::key_at(row, at)]);
  }
  __device__ __forceinline__ uint4 value(int j, int r) const {
    const int g = thread.g, t = thread.t;
    const int row = 2 * t + r % 2 + r / 2 * 8, at = 8 * j + g;
    if (at >= SharedStorage::kVectors) return uint4{};
    return words_of<T, C>(is_new(row) ? load_cache(fresh.value + new_at(row) + 8 * at)
                                      : here[SharedStorage::value_at(row, at)]);
  }
  // 16 elements of the round's values, transposed, from element 16 * j on.
  __device__ __forceinline__ void value_transposed(uint32_t (&a)[4], int j) const {
    const int lane = thread.lane, key = lane % 8 + lane / 16 * 8, at = 2 * j + lane / 8 % 2;
    ldmatrix_x4<true>(a, is_new(key) ? reinterpret_cast<const void*>(fresh.value + 8 * at)
                                     : here + SharedStorage::value_at(key, at));
  }

 private:
  static constexpr bool kRows = kHeads > kDecodeHeads;

  // Whether a row of the round is a new position, and where that is.
  __device__ __forceinline__ bool is_new(int row) const {
    if constexpr (kRows) return start + row >= fresh.position && start + row < fresh.end;
    return start + row == fresh.position;
  }
  __device__ __forceinline__ int new_at(int row) const {
    return kRows ? (start + row - fresh.position) * SharedStorage::kPitch : 0;
  }
};

// First or last visible positions of two heads.
struct HeadBounds {
  int of[2];
};

// The online softmax over the visible positions [seen, end) of a round: turns scores into
// weights, and returns the factors of the earlier sums. A thread has the maxima and totals of heads
// 2t and 2t + 1, with separate bounds if they are of several rows: then a round may have no
// visible key.
template <typename Bound>
__device__ __forceinline__ void update_softmax(const AttentionParams& p, int g, float scale,
                                               int start, Bound seen, Bound end, float (&score)[4],
                                               float (&factor)[2], float (&peak)[2],
                                               float (&total)[2]) {
  constexpr bool kRows = !std::is_same_v<Bound, int>;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float s = score[2 * r + c] * scale;
      if (p.softcap > 0) s = p.softcap * tanhf(s / p.softcap) * kLog2E;
      const int key = start + g + 8 * r;
      bool visible;
      if constexpr (kRows) visible = key < end.of[c] && key >= seen.of[c];
      else visible = key < end && key >= seen;
      score[2 * r + c] = visible ? s : -INFINITY;
    }
    float higher = fmaxf(score[c], score[2 + c]);
#pragma unroll
    for (int mask = 4; mask < 32; mask <<= 1)
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, mask));
    higher = fmaxf(higher, peak[c]);  // finite if a round has a visible key
    const float base = kRows && higher == -INFINITY ? 0.f : higher;
    factor[c] = exp2f(peak[c] - base);
    peak[c] = higher;
    score[c] = exp2f(score[c] - base);
    score[2 + c] = exp2f(score[2 + c] - base);
    total[c] = total[c] * factor[c] + score[c] + score[2 + c];
  }
}

// Adds the weighted values of a round, V^T * weights: columns of the sums are heads, as
// of the scores.
template <typename T, typename C, int kSteps, int kWarps, int kHeads, int kTiles>
__device__ __forceinline__ void add_values_transposed(
    const KvRound<T, C, kSteps, kWarps, kHeads>& round, const float (&score)[4],
    const float (&factor)[2], float (&sum)[kTiles][4]) {
  const uint32_t weights[2] = {movmatrix_trans(pack2<T>(score[0], score[1])),
                               movmatrix_trans(pack2<T>(score[2], score[3]))};
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    uint32_t a[4];
    round.value_transposed(a, j);
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[j][c] *= factor[c % 2];
    mma_m16n8k16<T>(sum[j], a, weights[0], weights[1]);
  }
}

}  // namespace llmc::device
