// Tile schedule and epilogue of the expert GEMVs: experts_gemv.cu for 16-bit weights,
// experts_packed_gemv.cu for quantized ones.
//
// A tile is some weight rows of an expert for a group of its pairs: all of them if there are no
// more tokens than a group takes, since a token's experts differ. A persistent grid takes tiles in
// turn. The warps of a block split K. A gate and its up are adjacent rows, in one tile.
//
// Each block derives the groups itself: it counts all pairs in shared memory. So no kernel runs
// before, and the weights of the second GEMM are in flight before the first has ended. Reads the
// weights of each routed expert once per group.
#pragma once

#include <algorithm>

#include "experts.cuh"

namespace llmc::device {

constexpr int kSmallOrderPairs = 128;  // up to which little shared memory is used

// A group in a word: expert, first position, number of pairs.
constexpr int kPlaceBits = 12, kCountBits = 5;
static_assert(kMaxExperts <= 1 << (32 - kPlaceBits - kCountBits) &&
              kExpertsGemvPairs <= 1 << kPlaceBits);
__device__ __forceinline__ uint32_t pack_group(const PairGroup& group) {
  return group.expert << (kPlaceBits + kCountBits) | group.first << kCountBits | group.count;
}
__device__ __forceinline__ PairGroup unpack_group(uint32_t word) {
  return {static_cast<int>(word >> (kPlaceBits + kCountBits)),
          static_cast<int>(word >> kCountBits & ((1u << kPlaceBits) - 1)),
          static_cast<int>(word & ((1u << kCountBits) - 1))};
}

// Lists the groups of at most `per` pairs of an expert, and the order of pairs; returns the number
// of groups. Shared memory: `counts` has two entries per expert, list and order one per pair.
template <int kThreads>
__device__ __forceinline__ int list_pair_groups(const ExpertsParams& p, int per, uint32_t* list,
                                                uint16_t* order, uint32_t* counts) {
  __shared__ uint32_t totals[kThreads / 32];
  const int all = p.num_tokens * p.top_k, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (all <= 32) {  // one lane per pair; the first of an expert has the group
    if (warp == 0) {
      const int expert = lane < all ? expert_of(p, lane) : -1;
      const uint32_t alike = __match_any_sync(~0u, expert), lower = (1u << lane) - 1;
      const int count = __popc(alike), leader = __ffs(alike) - 1;
      const bool leads = expert >= 0 && leader == lane;
      const uint32_t leaders = __ballot_sync(~0u, leads);
      // Pairs of groups up to the leader's.
      const int first = __shfl_sync(~0u, warp_scan(leads ? count : 0), leader) - count;
      if (leads) list[__popc(leaders & lower)] = pack_group({expert, first, count});
      if (expert >= 0) order[first + __popc(alike & lower)] = static_cast<uint16_t>(lane);
      const bool fits = __all_sync(~0u, expert < 0 || count <= per);
      if (lane == 0) totals[0] = fits ? __popc(leaders) : ~0u;
    }
    __syncthreads();
    if (totals[0] != ~0u) return static_cast<int>(totals[0]);
  }
  for (int expert = threadIdx.x; expert < p.num_experts; expert += kThreads) counts[expert] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < all; pair += kThreads) {
    const int expert = expert_of(p, pair);
    if (expert >= 0)
      list[pair] = atomicAdd(counts + expert, 1u);  // its index among the expert's pairs
  }
  __syncthreads();
  uint32_t* before = counts + p.num_experts;
  bool more = false;
  for (int expert = threadIdx.x; expert < p.num_experts; expert += kThreads)
    more |= counts[expert] > static_cast<uint32_t>(per), before[expert] = 0;
  if (__syncthreads_or(
          more)) {  // in a fixed order: blocks must agree which pairs are in which group
    for (int begin = 0; warp == 0 && begin < all; begin += 32) {
      const int pair = begin + lane, expert = pair < all ? expert_of(p, pair) : -1;
      const uint32_t alike = __match_any_sync(~0u, expert);
      const int lower = __popc(alike & ((1u << lane) - 1));
      if (expert >= 0) list[pair] = before[expert] + lower;
      __syncwarp();
      if (expert >= 0 && lower == 0) before[expert] += __popc(alike);
      __syncwarp();
    }
    __syncthreads();
  }
  // Prefix sums of pairs, and of groups in the upper half.
  const int each = (p.num_experts + kThreads - 1) / kThreads,
            begin = min(static_cast<int>(threadIdx.x) * each, p.num_experts);
  const int end = min(begin + each, p.num_experts);
  auto worth = [&](uint32_t pairs) { return pairs | (pairs + per - 1) / per << 16; };
  uint32_t own = 0;
  for (int expert = begin; expert < end; ++expert) own += worth(counts[expert]);
  uint32_t at = warp_scan(own);
  if (lane == 31) totals[warp] = at;
  __syncthreads();
  at -= own;
  uint32_t total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w == warp) at += total;
    total += totals[w];
  }
  for (int expert = begin; expert < end; ++expert) before[expert] = at, at += worth(counts[expert]);
  __syncthreads();
  for (int pair = threadIdx.x; pair < all; pair += kThreads) {
    const int expert = expert_of(p, pair);
    if (expert >= 0) order[(before[expert] & 0xffff) + list[pair]] = static_cast<uint16_t>(pair);
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < p.num_experts; expert += kThreads) {
    const int first = before[expert] & 0xffff, count = counts[expert];
    for (int skipped = 0; skipped < count; skipped += per)
      list[(before[expert] >> 16) + skipped / per] =
          pack_group({expert, first + skipped, min(per, count - skipped)});
  }
  __syncthreads();
  return static_cast<int>(total >> 16);
}

// Bytes of the list of groups and the order of pairs, for few pairs or for the maximum.
__host__ __device__ __forceinline__ int order_bytes(int pairs) {
  return 6 * (pairs <= kSmallOrderPairs ? kSmallOrderPairs : kExpertsGemvPairs);
}

// Iterates over the tiles of all groups with a stride.
struct GroupTileCursor {
  int group, tile, of_group;  // of_group: tiles of a group

  __device__ __forceinline__ GroupTileCursor(int first, int of_group)
      : group(0), tile(first), of_group(of_group) {
    settle();
  }
  __device__ __forceinline__ void advance(int tiles) { tile += tiles, settle(); }

 private:
  __device__ __forceinline__ void settle() {
    while (tile >= of_group) tile -= of_group, ++group;
  }
};

// Reduces a tile over warps and writes it: outputs begin, begin + step, .. partial is
// [warp][row][pair of the group].
template <bool kDown, typename T, int kWarps, int kRows, int kPitch>
__device__ __forceinline__ void store_outputs(const ExpertsParams& p, const Pairs& pairs,
                                              const ExpertGemm<T>& gemm, const PairGroup& group,
                                              const uint16_t* order, int first_row,
                                              const float (&partial)[kWarps][kRows][kPitch],
                                              int begin, int step) {
  auto sum_of = [&](int row, int pair) {
    float value = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += partial[w][row][pair];
    return value;
  };
  const int paired = !kDown && p.gated ? 2 : 1, columns = kRows / paired;
  for (int i = begin; i < columns * group.count; i += step) {
    const int row = i % columns * paired, of_group = i / columns,
              pair = order[group.first + of_group];
    if (first_row + row >= gemm.out) continue;
    const float value = sum_of(row, of_group);
    if (kDown) store_expert_output(p, pairs, pair, gemm, group.expert, first_row + row, value);
    else
      store_inner(p, pairs, pair, pair, gemm, group.expert, (first_row + row) / paired, value,
                  p.gated ? sum_of(row + 1, of_group) : 0.f);
  }
}

// Whether groups of 8 suffice.
inline bool are_rare(const ExpertsParams& p) {
  constexpr int kRarePairs = 4;  // pairs per expert on average
  return p.num_tokens <= 8 || p.num_tokens * p.top_k <= kRarePairs * p.num_experts;
}

// Launches a persistent grid whose blocks take `rows` of `out` rows at a time. Dynamic shared
// memory: `ring` bytes, the list of groups, the order of pairs, and `rest` bytes, of at most
// `most`.
template <auto kKernel, int kThreads>
cudaError_t run_resident(const ExpertsParams& p, const Pairs& pairs, int out, int rows, int ring,
                         int rest, int most, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           ring + order_bytes(kExpertsGemvPairs) + most);
  if (error != cudaSuccess) return error;
  auto resident_at = [](int shared) { return int64_t{resident_blocks(kKernel, kThreads, shared)}; };
  // Queried once if the size is constant.
  static const int64_t few = resident_at(ring + order_bytes(kSmallOrderPairs));
  static const int64_t many = resident_at(ring + order_bytes(kExpertsGemvPairs));
  const int pairs_here = p.num_tokens * p.top_k, shared = ring + order_bytes(pairs_here) + rest;
  const int64_t resident = most > 0                         ? resident_at(shared)
                           : pairs_here <= kSmallOrderPairs ? few
                                                            : many;
  const int64_t tiles = static_cast<int64_t>(pairs_here) * ceil_div(out, rows);
  return launch(kKernel, static_cast<unsigned>(std::min(tiles, resident)), kThreads, shared, stream,
                p, pairs);
}

}  // namespace llmc::device

namespace llmc::kernels {

// experts_gemv() for quantized weights.
cudaError_t packed_experts_gemv(DType dtype, const ExpertsParams& params,
                                const device::Pairs& pairs, cudaStream_t stream);

}  // namespace llmc::kernels
