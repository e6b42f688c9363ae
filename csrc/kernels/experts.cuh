// What the kernels of experts share. A pair is one choice of one token, number token * top_k + choice. Pairs are sorted by
// expert, so that all of an expert's lie side by side, in groups of as many as a kernel takes at once; a pair's place
// among the sorted is where its row between the two products is. Which experts were chosen only the device knows: what a
// kernel works on it finds from `starts`.
#pragma once

#include "device.cuh"

namespace llmc::device {

using kernels::ExpertsParams;

constexpr int kMostExperts = 1024;

// In scratch.
struct Pairs {
  int32_t* order;   // [num_tokens * top_k]: the pair at each place
  int32_t* starts;  // [num_experts + 1]: the place where each expert's begin
  int32_t* counts;  // [blocks that sort, num_experts], where these are more than one
  void* inner;      // T [num_tokens * top_k, inner], by place
  void* made;       // T [num_tokens * top_k, hidden], by pair; what no expert here makes is not written
};

// Which of the experts that are here a pair goes to; -1: none.
__device__ __forceinline__ int expert_of(const ExpertsParams& p, int pair) {
  const int64_t wanted = (p.narrow ? static_cast<const int32_t*>(p.experts)[pair]
                                   : static_cast<const int64_t*>(p.experts)[pair]) - p.first_expert;
  return wanted >= 0 && wanted < p.num_experts ? static_cast<int>(wanted) : -1;
}

// Some pairs of one expert, from a place on.
struct Group {
  int expert, first, count;
};

// All groups of `per` pairs at most. A single token's pairs are sorted as they are: each of its choices is a group.
class Groups {
 public:
  // `before` is shared, [kMostExperts + 1].
  __device__ Groups(const ExpertsParams& p, const Pairs& pairs, int* before, int per)
      : p_(p), pairs_(pairs), before_(before), per_(per) {}

  // How many there are. All threads of the block call it once.
  template <int kThreads>
  __device__ int count() {
    __shared__ int totals[kThreads / 32];
    const int each = (slots() + kThreads - 1) / kThreads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int begin = min(static_cast<int>(threadIdx.x) * each, slots()), end = min(begin + each, slots());
    int own = 0;
    for (int slot = begin; slot < end; ++slot) own += groups_of(slot);
    int at = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int lower = __shfl_up_sync(~0u, at, distance);
      if (lane >= distance) at += lower;
    }
    if (lane == 31) totals[warp] = at;
    __syncthreads();
    at -= own;
    for (int w = 0; w < warp; ++w) at += totals[w];
    for (int slot = begin; slot < end; ++slot) before_[slot] = at, at += groups_of(slot);
    if (threadIdx.x == kThreads - 1) before_[slots()] = at;
    __syncthreads();
    return before_[slots()];
  }

  // A group that is not before the one that was asked for last.
  __device__ Group next(int group) {
    while (before_[slot_ + 1] <= group) ++slot_;
    const int skipped = (group - before_[slot_]) * per_;
    return {single() ? expert_of(p_, slot_) : slot_, first_of(slot_) + skipped, min(per_, size_of(slot_) - skipped)};
  }
  // The pair at a place.
  __device__ int pair(int place) const { return single() ? place : pairs_.order[place]; }

 private:
  __device__ bool single() const { return p_.num_tokens == 1; }
  __device__ int slots() const { return single() ? p_.top_k : p_.num_experts; }
  __device__ int first_of(int slot) const { return single() ? slot : pairs_.starts[slot]; }
  __device__ int size_of(int slot) const {
    return single() ? expert_of(p_, slot) >= 0 : pairs_.starts[slot + 1] - pairs_.starts[slot];
  }
  __device__ int groups_of(int slot) const { return (size_of(slot) + per_ - 1) / per_; }

  const ExpertsParams& p_;
  const Pairs& pairs_;
  int* before_;  // groups that come before a slot's
  const int per_;
  int slot_ = 0;
};

// One of the two products: y [rows, out] = x [rows, in] · weight [num_experts, out, in]ᵀ.
template <typename T>
struct Product {
  const T *x, *weight, *bias;
  int in, out;

  __device__ __forceinline__ Product(const ExpertsParams& p, const Pairs& pairs, bool down)
      : x(static_cast<const T*>(down ? pairs.inner : p.x)), weight(static_cast<const T*>(down ? p.down : p.gate_up)),
        bias(static_cast<const T*>(down ? p.down_bias : p.gate_up_bias)), in(down ? p.inner : p.hidden),
        out(down ? p.hidden : p.gated ? 2 * p.inner : p.inner) {}

  __device__ __forceinline__ const T* row_of_weight(int expert, int row) const {
    return weight + (static_cast<int64_t>(expert) * out + min(row, out - 1)) * in;
  }
  __device__ __forceinline__ float bias_of(int expert, int row) const {
    return bias == nullptr ? 0.f : to_float(bias[static_cast<int64_t>(expert) * out + row]);
  }
};

// A pair's row of x, or of what lies between the products.
template <typename T>
__device__ __forceinline__ const T* row_of(const Product<T>& product, const ExpertsParams& p, const Groups& groups,
                                           int place, bool down) {
  return product.x + static_cast<int64_t>(down ? place : groups.pair(place) / p.top_k) * product.in;
}

// What lies between the products, of the first one's sums of a column with their biases.
__device__ __forceinline__ float inner_of(const ExpertsParams& p, float value, float up) {
  if (p.gated && p.limit != 0) value = fminf(value, p.limit);
  value = p.activation == Activation::kSilu ? value / (1.f + __expf(-p.alpha * value)) : activate(value, p.activation);
  if (!p.gated) return value;
  if (p.limit != 0) up = fminf(fmaxf(up, -p.limit), p.limit);
  return value * (up + p.up_offset);
}

// What the first product's sums of one column become: `sum` and, where they are gated, `up` of the row that follows.
template <typename T>
__device__ __forceinline__ void finish_inner(const ExpertsParams& p, const Pairs& pairs, const Groups& groups,
                                             const Product<T>& product, int expert, int place, int column, float sum,
                                             float up) {
  const float score = p.scale_input ? p.scores[groups.pair(place)] : 1.f;
  const int row = p.gated ? 2 * column : column;
  const float value = sum * score + product.bias_of(expert, row);
  if (p.gated) up = up * score + product.bias_of(expert, row + 1);
  static_cast<T*>(pairs.inner)[static_cast<int64_t>(place) * p.inner + column] =
      from_float<T>(inner_of(p, value, up));
}

// What the second product's sum of one row becomes.
template <typename T>
__device__ __forceinline__ void finish_made(const ExpertsParams& p, const Pairs& pairs, const Groups& groups,
                                            const Product<T>& product, int expert, int place, int row, float sum) {
  static_cast<T*>(pairs.made)[static_cast<int64_t>(groups.pair(place)) * p.hidden + row] =
      from_float<T>(sum + product.bias_of(expert, row));
}

}  // namespace llmc::device

namespace llmc::kernels {

// Both products for pairs that are sorted, on tensor cores: for few pairs of an expert, and for many.
cudaError_t few_experts(DType dtype, const ExpertsParams& params, const device::Pairs& pairs, cudaStream_t stream);
cudaError_t many_experts(DType dtype, const ExpertsParams& params, const device::Pairs& pairs, cudaStream_t stream);

// many_experts() by instructions that Hopper alone has; and whether they are there, for tokens that have been sorted.
cudaError_t many_experts_on_hopper(DType dtype, const ExpertsParams& params, const device::Pairs& pairs,
                                   cudaStream_t stream);
bool serves_experts_on_hopper(const ExpertsParams& params);

}  // namespace llmc::kernels
