// Top-k tokens of each row of logits, for beam search.
//
// segment_topk_kernel: a block has kSegment logits of a row in registers. It writes their maximum,
// the sum of exponentials relative to it, and the `count` largest in order, one block maximum at a
// time. merge_topk_kernel: a warp merges a row's sorted lists. Reads the logits once.
#include "../common/device.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kThreads = 256, kWarps = kThreads / 32, kEach = 16, kSegment = kThreads * kEach;

int parts_of(int vocab) { return (vocab + kSegment - 1) / kSegment; }

struct Partial {
  uint64_t* ranks;  // [rows, parts, count], 0 after the last
  float* peaks;     // [rows, parts]
  float* sums;      // [rows, parts]: sum of exp(logit - peak)
};

Partial partial_of(const CandidatesParams& p) {
  const int64_t lists = static_cast<int64_t>(p.rows) * parts_of(p.vocab);
  auto* ranks = static_cast<uint64_t*>(p.scratch);
  auto* peaks = reinterpret_cast<float*>(ranks + lists * p.count);
  return {ranks, peaks, peaks + lists};
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    segment_topk_kernel(CandidatesParams p, Partial partial) {
  __shared__ uint64_t best_of[2][kWarps];
  __shared__ float sum_of[kWarps];
  pdl_wait();
  pdl_launch_dependents();
  constexpr int kWidth = kVec<T>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t list = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const T* logits = static_cast<const T*>(p.logits) + static_cast<int64_t>(blockIdx.y) * p.stride;
  const int first = blockIdx.x * kSegment + threadIdx.x * kWidth;  // see token()
  auto token = [&](int i) { return first + i / kWidth * kThreads * kWidth + i % kWidth; };

  float held[kEach];
  const bool whole = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
#pragma unroll
  for (int turn = 0; turn < kEach / kWidth; ++turn) {
    const int at = token(turn * kWidth);
    if (whole && at + kWidth <= p.vocab) {
      const auto v = load<T, kWidth>(logits + at);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) held[turn * kWidth + k] = to_float(v.data[k]);
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        held[turn * kWidth + k] = at + k < p.vocab ? to_float(logits[at + k]) : -INFINITY;
    }
  }
  // This thread's largest rank below `limit`.
  auto best_below = [&](uint64_t limit) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint64_t rank = token(i) < p.vocab ? rank_of(held[i], token(i)) : 0;
      if (rank < limit && rank > best) best = rank;
    }
    return best;
  };
  uint64_t best = best_below(~0ull), most = warp_max(best);
  if (lane == 0) best_of[0][warp] = most;
  __syncthreads();

  float peak = -INFINITY;
  for (int i = 0; i < p.count; ++i) {
    uint64_t winner = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) winner = max(winner, best_of[i % 2][w]);
    if (i == 0) peak = logit_of(winner);  // a block has at least one token
    if (threadIdx.x == 0) partial.ranks[list * p.count + i] = winner;
    if (winner == most && winner != 0) {  // it belongs to this warp
      if (winner == best) best = best_below(winner);
      most = warp_max(best);
    }
    if (lane == 0) best_of[(i + 1) % 2][warp] = most;
    __syncthreads();
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (held[i] != -INFINITY) sum += expf(held[i] - peak);
  sum = block_sum<kThreads>(sum, sum_of);
  if (threadIdx.x == 0) partial.peaks[list] = peak, partial.sums[list] = sum;
}

__global__ void __launch_bounds__(32)
    merge_topk_kernel(CandidatesParams p, Partial partial, int parts) {
  extern __shared__ int taken[];  // [parts]: used by the lane that has the list
  pdl_wait();
  pdl_launch_dependents();
  const int lane = threadIdx.x;
  const int64_t first_list = static_cast<int64_t>(blockIdx.x) * parts;
  const uint64_t* lists = partial.ranks + first_list * p.count;
  float peak = -INFINITY;
  for (int part = lane; part < parts; part += 32) {
    peak = fmaxf(peak, partial.peaks[first_list + part]);
    taken[part] = 0;
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, mask));
  double total = 0;
  for (int part = lane; part < parts; part += 32)
    total += static_cast<double>(partial.sums[first_list + part]) *
             exp(partial.peaks[first_list + part] - peak);
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) total += __shfl_xor_sync(~0u, total, mask);
  const float log_total = static_cast<float>(log(total));

  uint64_t best = 0;
  int from = 0;  // the list of `best`
  auto choose = [&] {
    best = 0;
    for (int part = lane; part < parts; part += 32) {
      const uint64_t rank =
          taken[part] < p.count ? lists[static_cast<int64_t>(part) * p.count + taken[part]] : 0;
      if (rank > best) best = rank, from = part;
    }
  };
  choose();
  for (int i = 0; i < p.count; ++i) {
    const uint64_t winner = warp_max(best);
    if (best != winner || winner == 0) continue;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * p.count + i;
    p.tokens[at] = token_of(winner);
    p.log_probs[at] = logit_of(winner) - peak - log_total;
    ++taken[from];
    choose();
  }
}

}  // namespace

int64_t candidates_scratch(int rows, int vocab, int count) {
  return static_cast<int64_t>(rows) * parts_of(vocab) *
         (static_cast<int64_t>(sizeof(uint64_t)) * count + 2 * static_cast<int64_t>(sizeof(float)));
}

cudaError_t candidates(DType dtype, const CandidatesParams& p, cudaStream_t stream) {
  if (p.count < 1 || p.count > p.vocab) return cudaErrorInvalidValue;
  const int parts = parts_of(p.vocab);
  const Partial partial = partial_of(p);
  const cudaError_t error = dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(segment_topk_kernel<T>, dim3(parts, p.rows), kThreads, 0, stream, p, partial);
  });
  if (error != cudaSuccess) return error;
  return launch(merge_topk_kernel, p.rows, 32, parts * sizeof(int), stream, p, partial, parts);
}

}  // namespace llmc::kernels
