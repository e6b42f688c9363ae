// Log-probabilities of sampled and top tokens.
//
// A block takes a row and reads it once: each thread keeps its maximum and an online sum of
// exponentials. The n-th largest of the threads' maxima is a lower bound of the n-th largest logit,
// and only threads whose maximum reaches it have such logits. Their warps read their tokens again
// and collect what reaches the bound, which is then ranked. Reads vocab logits, writes a Logprobs
// record.
#include "../common/device.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kThreads = 1024, kWarps = kThreads / 32;

// Maximum tokens of a thread: kVec adjacent ones in turn with the other threads of the block.
template <typename T>
__host__ __device__ int per_thread(int vocab) {
  return (vocab + kThreads * kVec<T> - 1) / (kThreads * kVec<T>)*kVec<T>;
}

// kRanked: prompt tokens, with separate counts, and with ranks.
template <typename T, bool kRanked>
__global__ void __launch_bounds__(kThreads) logprobs_kernel(LogprobsParams p) {
  extern __shared__ uint64_t near[];  // [kTopLogprobs * per_thread]
  __shared__ uint64_t of_warp[2][kWarps];
  __shared__ double sums[kWarps];
  __shared__ int found, above;
  pdl_wait();
  pdl_launch_dependents();
  const int r = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
            top = min(kRanked ? p.counts[r] : p.states[p.slots[r]].logprobs, kTopLogprobs);
  if (top < 0) return;
  constexpr int kWidth = kVec<T>, kAhead = 4, kTurn = kThreads * kWidth;
  const T* logits = static_cast<const T*>(p.logits) + static_cast<int64_t>(r) * p.stride;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
  const int first = static_cast<int>(threadIdx.x) * kWidth;

  float best = -INFINITY, sum = 0;
  int index = first, greater = 0;
  const float mark = kRanked ? to_float(logits[p.chosen[r]]) : 0;
  auto take = [&](const T* x, int count, int at) {
    float most = best;
    for (int k = 0; k < count; ++k) most = fmaxf(most, to_float(x[k]));
    if (kRanked)
      for (int k = 0; k < count; ++k) greater += to_float(x[k]) > mark;
    if (most == -INFINITY) return;
    if (most > best) {
      sum *= exp2f((best - most) * kLog2E);
      for (int k = count - 1; k >= 0; --k)
        if (to_float(x[k]) == most) index = at + k;
      best = most;
    }
    for (int k = 0; k < count; ++k) sum += exp2f((to_float(x[k]) - best) * kLog2E);
  };
  for (int start = first; start < p.vocab; start += kAhead * kTurn) {
    Vec<T, kWidth> read[kAhead];
#pragma unroll
    for (int turn = 0; turn < kAhead; ++turn) {
      const int at = start + turn * kTurn;
      if (aligned && at + kWidth <= p.vocab) read[turn] = load<T, kWidth>(logits + at);
    }
#pragma unroll
    for (int turn = 0; turn < kAhead; ++turn) {
      const int at = start + turn * kTurn;
      if (aligned && at + kWidth <= p.vocab) take(read[turn].data, kWidth, at);
      else if (at < p.vocab) take(logits + at, min(kWidth, p.vocab - at), at);
    }
  }

  // The block's maximum, and the sum relative to it.
  const uint64_t mine = first < p.vocab ? rank_of(best, index) : 0;
  uint64_t greatest = warp_max(mine);
  if (lane == 0) of_warp[1][warp] = greatest;
  if (threadIdx.x == 0) found = above = 0;
  __syncthreads();
  const float peak = logit_of(warp_max(of_warp[1][lane]));
  double total = best == -INFINITY ? 0 : static_cast<double>(sum * exp2f((best - peak) * kLog2E));
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) total += __shfl_xor_sync(~0u, total, mask);
  if (lane == 0) sums[warp] = total;
  if (kRanked) {
    greater = __reduce_add_sync(~0u, greater);
    if (lane == 0) atomicAdd(&above, greater);
  }
  __syncthreads();
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[w];
  const double shift = peak + log(total);
  Logprobs& out = p.made[r];
  if (threadIdx.x == 0) {
    const int64_t token = p.chosen[r];
    out.chosen = token < 0 ? -INFINITY : static_cast<float>(to_float(logits[token]) - shift);
    if (kRanked) out.rank = above + 1;
  }

  uint64_t left = mine, bound = 0;
  for (int round = 0; round < top; ++round) {
    greatest = warp_max(left);
    if (lane == 0) of_warp[round % 2][warp] = greatest;
    __syncthreads();
    bound = warp_max(of_warp[round % 2][lane]);
    if (left == bound) left = 0;
  }
  if (top > 0 && __any_sync(~0u, mine != 0 && mine >= bound)) {
    for (int start = first; start < p.vocab; start += kTurn)
      for (int k = 0; k < kWidth && start + k < p.vocab; ++k) {
        // NaN ranks as -inf, as above: otherwise a row of NaN would exceed `near`.
        const float x = to_float(logits[start + k]);
        const uint64_t rank = rank_of(x == x ? x : -INFINITY, start + k);
        if (rank >= bound) near[atomicAdd(&found, 1)] = rank;
      }
  }
  __syncthreads();
  for (int i = threadIdx.x; top > 0 && i < found; i += kThreads) {
    int place = 0;
    for (int other = 0; other < found && place < top; ++other) place += near[other] > near[i];
    if (place >= top) continue;
    out.top[place] = static_cast<float>(logit_of(near[i]) - shift);
    out.tokens[place] = token_of(near[i]);
  }
}

}  // namespace

cudaError_t logprobs(DType dtype, const LogprobsParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const size_t bytes = sizeof(uint64_t) * kTopLogprobs * per_thread<T>(p.vocab);
    const auto kernel = p.counts ? logprobs_kernel<T, true> : logprobs_kernel<T, false>;
    const cudaError_t allowed = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (allowed != cudaSuccess) return allowed;
    return launch(kernel, p.rows, kThreads, bytes, stream, p);
  });
}

}  // namespace llmc::kernels
