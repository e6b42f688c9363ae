// Prompt lookup on the token histories of slots.
#include "lookup.h"

#include <algorithm>

#include "../common/device.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kLookupThreads = 256, kLookupWarps = kLookupThreads / 32;
constexpr int kPositions = 2048;  // of a tile
constexpr int kMaxBlocks = 64;    // of a sequence

// A match: its number of tokens, then the position after it. 0: none.
__device__ __forceinline__ uint64_t make_match(int tokens, int end) {
  return static_cast<uint64_t>(tokens) << 32 | static_cast<uint32_t>(end);
}
__device__ __forceinline__ int tokens_of(uint64_t match) { return static_cast<int>(match >> 32); }
__device__ __forceinline__ int end_of(uint64_t match) {
  return static_cast<int>(match & 0xffffffffu);
}

__device__ __forceinline__ int32_t token_at(const int32_t* history, int position) {
  return history[position] & ~kRepeated;
}

// Number of tokens up to a position that equal the latest ones. `tile` is at that position, and
// `before` positions precede it.
__device__ __forceinline__ int matching(const int32_t* tile, const int32_t* latest, int before) {
  int tokens = 0;
  while (tokens < kMaxMatch && tokens <= before && tile[-tokens] == latest[tokens]) ++tokens;
  return tokens;
}

// The best match of the block's tiles, in thread 0.
__device__ uint64_t find_match(const int32_t* history, int length) {
  __shared__ int32_t tile[kMaxMatch - 1 + kPositions], latest[kMaxMatch];
  __shared__ uint64_t of_warp[kLookupWarps];
  uint64_t best = 0;
  if (threadIdx.x < kMaxMatch)
    latest[threadIdx.x] =
        static_cast<int>(threadIdx.x) < length ? token_at(history, length - 1 - threadIdx.x) : -1;
  for (int first = blockIdx.x * kPositions; first < length - 1; first += gridDim.x * kPositions) {
    __syncthreads();  // the tile before is read
    for (int i = threadIdx.x; i < kMaxMatch - 1 + kPositions; i += kLookupThreads) {
      const int position = first + i - (kMaxMatch - 1);
      tile[i] = position >= 0 && position < length ? token_at(history, position) : -1;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kPositions && first + i < length - 1; i += kLookupThreads) {
      const int tokens = matching(tile + kMaxMatch - 1 + i, latest, first + i);
      if (tokens >= kMinMatch) best = max(best, make_match(tokens, first + i + 1));
    }
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1)
    best = max(best, static_cast<uint64_t>(
                         __shfl_xor_sync(~0u, static_cast<unsigned long long>(best), mask)));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
  __syncthreads();
  for (int warp = 1; warp < kLookupWarps && threadIdx.x == 0; ++warp)
    best = max(best, of_warp[warp]);
  return best;
}

// Combines the matches of a sequence's blocks, by thread 0 of each. Returns whether the block is
// the last one, which gets the best match.
__device__ bool combine(const LookupDraftsParams& p, int blocks, uint64_t& match) {
  if (blocks == 1) return true;
  auto* best = reinterpret_cast<unsigned long long*>(p.longest_matches + blockIdx.y);
  if (match > 0) atomicMax(best, static_cast<unsigned long long>(match));
  __threadfence();
  if (atomicAdd(p.blocks_done + blockIdx.y, 1) < blocks - 1) return false;
  __threadfence();
  match = atomicExch(best, 0ull);
  p.blocks_done[blockIdx.y] = 0;
  return true;
}

// Blocks (tiles, sequences). Reads each history once: 4 bytes per token.
__global__ void __launch_bounds__(kLookupThreads) lookup_drafts_kernel(LookupDraftsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  __shared__ uint64_t found;
  __shared__ bool writes;
  const int64_t slot = p.slots[blockIdx.y];
  const int length = p.states[slot].prompt_lookup ? p.history.lengths[slot] : 0;
  const int32_t* history = p.history.tokens + slot * p.history.room;
  const int tiles = max((length - 1 + kPositions - 1) / kPositions, 1);
  const int blocks = min(tiles, static_cast<int>(gridDim.x));
  if (static_cast<int>(blockIdx.x) >= blocks) return;
  uint64_t match = find_match(history, length);
  if (threadIdx.x == 0) writes = combine(p, blocks, match), found = match;
  __syncthreads();
  const int i = threadIdx.x;
  if (!writes || i >= kMaxProposals) return;
  const int end = end_of(found);
  const bool drafts = found > 0 && i < p.count;
  const int64_t draft = drafts ? token_at(history, end + i % (length - end)) : -1;
  p.drafts[static_cast<int64_t>(blockIdx.y) * kMaxProposals + i] = draft;
  p.slot_drafts[slot * kMaxProposals + i] = draft;
  if (i == 0) p.matches[blockIdx.y] = tokens_of(found);
}

}  // namespace

// Without PDL: the predecessor in the stream may be a copy, not a kernel.
cudaError_t lookup_drafts(const LookupDraftsParams& p, cudaStream_t stream) {
  const int tiles = std::max((p.max_length - 1 + kPositions - 1) / kPositions, 1);
  const dim3 blocks(std::min(tiles, kMaxBlocks), p.sequences);
  lookup_drafts_kernel<<<blocks, kLookupThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace llmc::kernels
