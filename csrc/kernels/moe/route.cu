// Top-k routing. One warp per token: lane l has experts l, l + 32, .., whose scores stay in
// registers after one read of the logits. The top k are found one after the other, ties by lower
// index. For group-limited routing a lane takes every 32nd group, from scores in shared memory.
// Reads num_experts logits per token, writes top_k indices and scores.
#include "../common/device.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kWarps = 4;

__device__ __forceinline__ float warp_float_max(float x) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}

// The experts of a lane; those in `taken` are excluded.
template <int kEach>
struct LaneExperts {
  const int lane, num_experts;
  float score[kEach];
  uint32_t taken = 0;

  __device__ int expert(int k) const { return lane + 32 * k; }
  __device__ bool has(int k) const { return expert(k) < num_experts && !(taken >> k & 1); }
  // The rank (see rank_of()) of the warp's maximum by `of(k)`.
  template <typename Of>
  __device__ uint64_t best(Of&& of) const {
    uint64_t most = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      if (has(k)) most = max(most, rank_of(of(k), expert(k)));
    return warp_max(most);
  }
  // Excludes an expert, and returns its score to every lane.
  __device__ float take(int chosen) {
    float own = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      if (expert(k) == chosen) own = score[k], taken |= 1u << k;
    return __shfl_sync(~0u, own, chosen % 32);
  }
};

// Logits to scores, in place.
template <int kEach>
__device__ void score_logits(LaneExperts<kEach>& own, RouteScore kind) {
  if (kind == RouteScore::kSoftmax) {
    float highest = -INFINITY, total = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      if (own.has(k)) highest = fmaxf(highest, own.score[k]);
    highest = warp_float_max(highest);
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      if (own.has(k)) total += own.score[k] = expf(own.score[k] - highest);
    total = warp_sum(total);
#pragma unroll
    for (int k = 0; k < kEach; ++k) own.score[k] /= total;
    return;
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const float x = own.score[k];
    own.score[k] = kind == RouteScore::kSigmoid ? 1.f / (1.f + expf(-x))
                                                : sqrtf(fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
  }
}

// Sets the choice of every expert outside the top groups to -inf. `choices` [num_experts] and
// `ranks` [groups] are the warp's own.
template <int kEach>
__device__ void mask_groups(const RouteParams& p, const LaneExperts<kEach>& own,
                            float (&choice)[kEach], float* choices, float* ranks) {
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if (own.has(k)) choices[own.expert(k)] = choice[k];
  __syncwarp();
  const int size = p.num_experts / p.groups;
  for (int group = own.lane; group < p.groups; group += 32) {
    float highest = -INFINITY, second = -INFINITY;
    for (int i = 0; i < size; ++i) {
      const float x = choices[group * size + i];
      second = fmaxf(second, fminf(highest, x));
      highest = fmaxf(highest, x);
    }
    ranks[group] = p.top2 ? highest + second : highest;
  }
  uint32_t open = 0;  // of this lane's groups
  for (int n = 0; n < p.top_groups; ++n) {
    uint64_t most = 0;
    for (int k = 0; own.lane + 32 * k < p.groups; ++k)
      if (!(open >> k & 1)) most = max(most, rank_of(ranks[own.lane + 32 * k], own.lane + 32 * k));
    const int best = token_of(warp_max(most));
    if (best % 32 == own.lane) open |= 1u << best / 32;
  }
  for (int k = 0; own.lane + 32 * k < p.groups; ++k)
    ranks[own.lane + 32 * k] = open >> k & 1 ? 0.f : -INFINITY;
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if (own.has(k) && ranks[own.expert(k) / size] != 0) choice[k] = -INFINITY;
}

template <typename T, int kEach>
__global__ void __launch_bounds__(kWarps * 32) route_kernel(RouteParams p) {
  extern __shared__ float shared[];  // per warp [num_experts] and [groups], with groups
  const int warp = threadIdx.x / 32, token = blockIdx.x * kWarps + warp;
  pdl_wait();
  pdl_launch_dependents();
  if (token >= p.num_tokens) return;
  LaneExperts<kEach> own{static_cast<int>(threadIdx.x) % 32, p.num_experts};
  const T* logits = static_cast<const T*>(p.logits) + static_cast<int64_t>(token) * p.num_experts;
  T logit[kEach];  // unconditional loads, so that none waits for another
#pragma unroll
  for (int k = 0; k < kEach; ++k) logit[k] = logits[min(own.expert(k), p.num_experts - 1)];
#pragma unroll
  for (int k = 0; k < kEach; ++k) own.score[k] = to_float(logit[k]);
  const bool mixes = p.score == RouteScore::kSparseMixer;
  float choice[kEach];
  if (!mixes) {
    score_logits(own, p.score);
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      choice[k] =
          own.has(k) && p.bias != nullptr ? own.score[k] + p.bias[own.expert(k)] : own.score[k];
    if (p.groups > 1) {
      float* choices = shared + warp * (p.num_experts + p.groups);
      mask_groups(p, own, choice, choices, choices + p.num_experts);
    }
  }
  int expert = 0;  // lane j has the token's choice j
  float weight = 0, total = 0;
  for (int j = 0; j < p.top_k; ++j) {
    const uint64_t best = own.best([&](int k) { return mixes ? own.score[k] : choice[k]; });
    const float highest = logit_of(best);
    float near = 0;  // sparsemixer: the softmax denominator over experts near the maximum
    if (mixes) {
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const float x = own.score[k];
        const bool far = (highest - x) / fmaxf(fabsf(x), highest) > 2 * p.jitter;
        if (own.has(k) && !far) near += expf(x - highest);
      }
      near = warp_sum(near);
    }
    const float score = own.take(token_of(best)), own_weight = mixes ? 1 / near : score;
    total += own_weight;
    if (own.lane == j) expert = token_of(best), weight = own_weight;
  }
  if (own.lane >= p.top_k) return;
  const int64_t position = static_cast<int64_t>(token) * p.top_k + own.lane;
  if (p.narrow) static_cast<int32_t*>(p.experts)[position] = expert;
  else static_cast<int64_t*>(p.experts)[position] = expert;
  const float scale = p.expert_scale != nullptr ? p.scale * p.expert_scale[expert] : p.scale;
  p.scores[position] = (p.normalize ? weight / (total + p.epsilon) : weight) * scale;
}

template <typename T, int kEach>
cudaError_t run(const RouteParams& p, cudaStream_t stream) {
  const size_t shared = p.groups > 1 ? sizeof(float) * kWarps * (p.num_experts + p.groups) : 0;
  return launch(route_kernel<T, kEach>, ceil_div(p.num_tokens, kWarps), kWarps * 32, shared, stream,
                p);
}

}  // namespace

cudaError_t route(DType dtype, const RouteParams& p, cudaStream_t stream) {
  if (p.num_experts > kRouteExperts || p.top_k > kRouteTopK || p.num_experts % p.groups != 0)
    return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (p.num_experts <= 32) return run<T, 1>(p, stream);
    if (p.num_experts <= 128) return run<T, 4>(p, stream);
    if (p.num_experts <= 256) return run<T, 8>(p, stream);
    return run<T, kRouteExperts / 32>(p, stream);
  });
}

}  // namespace llmc::kernels
