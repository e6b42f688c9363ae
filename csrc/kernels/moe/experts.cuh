// What the kernels of experts share. A pair is one choice of one token, number token * top_k + choice. Pairs are sorted by
// expert, so that all of an expert's lie side by side, in groups of as many as a kernel takes at once; a pair's place
// among the sorted is where its row between the two products is. Which experts were chosen only the device knows: what a
// kernel works on it finds from `starts`.
#pragma once

#include "../common/dequantize.cuh"
#include "params.h"

namespace llmc::device {

using kernels::ExpertsPacking;
using kernels::ExpertsParams;
using kernels::kFewExpertPairs;

constexpr int kMostExperts = 1024;

// Packed weights lie in tiles of kExpertsRows rows, one behind the other; a tile in steps of columns, kExpertsStep each; a step
// in vectors of 16 bytes, those of thread 4 g + t at g and t: codes of rows g and g + 8, of 8 columns from 8 t on (of four
// bits also of those from 32 + 8 t on), in the order of a unit (packed.cuh). So what a thread of the tensor core wants is one
// vector, and a tile is one stretch of memory. Its scales lie group by group, those of its rows side by side.
constexpr int kExpertsRows = 16;
template <Codes kCodes>
constexpr int kExpertsStep = kCodes == Codes::kNone || kBits<kCodes> == 8 ? 32 : 64;
template <Codes kCodes>
constexpr int kScaleRow = kCodes == Codes::kMxfp4 ? kExpertsRows : kExpertsRows * 4;  // bytes of a group's

// Calls f with a constant of Codes.
template <typename F>
cudaError_t with_expert_codes(Codes codes, F&& f) {
  if (codes == Codes::kMxfp4) return f(std::integral_constant<Codes, Codes::kMxfp4>());
  return with_codes(codes, std::forward<F>(f));
}

// What a vector's codes stand for of rows g and g + 8; of four bits, of the columns from 32 · part on.
template <typename T, Codes kCodes>
__device__ __forceinline__ void numbers_of_rows(uint32_t (&low)[4], uint32_t (&high)[4], const uint4& codes, int part,
                                                uint32_t low_offset, uint32_t high_offset) {
  const bool second = kBits<kCodes> == 4 && part == 1;
  numbers_of<T, kCodes>(low, {second ? codes.y : codes.x, codes.y}, low_offset);
  numbers_of<T, kCodes>(high, {second ? codes.w : codes.z, codes.w}, high_offset);
}

// The zero of a row's group.
template <Codes kCodes>
__device__ __forceinline__ int zero_at(const uint8_t* zeros, int64_t row, int group, int groups) {
  if constexpr (kCodes == Codes::kFour) return __ldg(zeros + row * ((groups + 1) / 2) + group / 2) >> group % 2 * 4 & 15;
  return __ldg(zeros + row * groups + group);
}

// In scratch.
struct Pairs {
  int32_t* order;   // [num_tokens * top_k]: the pair at each place
  int32_t* places;  // [num_tokens * top_k]: the place of each pair; -1: none, its expert is not here
  int32_t* starts;  // [num_experts + 1]: the place where each expert's begin
  int32_t* counts;  // [blocks that sort, num_experts], where these are more than one
  void* inner;      // T [num_tokens * top_k, inner], by place
  void* made;       // T [num_tokens * top_k, hidden], by pair; what no expert here makes is not written
  void* rounded;    // of x and then of `inner`, where it is rounded: T, or RoundedRows
};

// Rows of codes of FP8. Of 32 columns the first words of their four units come first, then the second ones, as packed codes
// have them. Scales [groups, pitch]: of each kBlock columns of a row, or where there is one group of each row.
struct RoundedRows {
  uint8_t* codes;
  float* scales;
  int pitch, groups;

  __host__ __device__ RoundedRows(void* at, int rows, int width, int group)
      : codes(static_cast<uint8_t*>(at)), scales(reinterpret_cast<float*>(codes + int64_t{rows} * width)),
        pitch(kernels::scale_pitch(rows)), groups(group == 0 ? 1 : width / group) {}
};

// What a product multiplies, by place, where that is codes.
__host__ __device__ inline RoundedRows rounded_rows(const ExpertsParams& p, const Pairs& pairs, bool down) {
  return {down ? pairs.rounded : pairs.made, p.num_tokens * p.top_k, down ? p.inner : p.hidden, p.rounded_group};
}

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
    int at = warp_scan(own);
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

// One number of a packed weight, in tiles or as it came.
template <Codes kCodes>
__device__ __forceinline__ float number_at(const ExpertsPacking& packing, const uint8_t* weight, bool tiled, int64_t row,
                                           int column, int in) {
  constexpr int kBit = kBits<kCodes>, kStep = kExpertsStep<kCodes>;
  const int groups = in / packing.group_size, group = column / packing.group_size;
  int64_t place = row * in + column, scale = row * groups + group;
  if (tiled) {
    const int64_t tile = row / kExpertsRows, of_tile = row % kExpertsRows;
    const int64_t vector = (tile * (in / kStep) + column / kStep) * 32 + of_tile % 8 * 4 + column % 32 / 8;
    const int64_t part = of_tile / 8 * (kStep / 32) + column % kStep / 32;
    place = vector * (128 / kBit) + part * 8 + place_of(column % 8, 8);
    scale = (tile * groups + group) * kExpertsRows + of_tile;
  }
  uint32_t code = kBit == 4 ? weight[place / 2] >> place % 2 * 4 & 15 : weight[place];
  if (kCodes == Codes::kMxfp4 && tiled) code = gathered(reinterpret_cast<const uint32_t*>(weight)[place / 8], place % 8);
  if constexpr (kCodes == Codes::kMxfp4)
    return number_of<kCodes>(code, 0) * power_of(static_cast<const uint8_t*>(packing.scale)[scale]);
  int zero = kMiddle<kCodes>;
  if (kCodes != Codes::kFloat8 && packing.zero != nullptr) zero = zero_at<kCodes>(packing.zero, row, group, groups);
  return number_of<kCodes>(code, zero) * static_cast<const float*>(packing.scale)[scale];
}

// One number of a weight, whatever its form; of rows behind the last, the last's.
template <typename T>
__device__ __forceinline__ float number_at(const Product<T>& product, const ExpertsPacking& packing, bool tiled, int expert,
                                           int row, int column) {
  const auto* codes = reinterpret_cast<const uint8_t*>(product.weight);
  const int64_t at = static_cast<int64_t>(expert) * product.out + min(row, product.out - 1);
  switch (packing.codes) {
    case Codes::kFour: return number_at<Codes::kFour>(packing, codes, tiled, at, column, product.in);
    case Codes::kEight: return number_at<Codes::kEight>(packing, codes, tiled, at, column, product.in);
    case Codes::kFloat8: return number_at<Codes::kFloat8>(packing, codes, tiled, at, column, product.in);
    case Codes::kMxfp4: return number_at<Codes::kMxfp4>(packing, codes, tiled, at, column, product.in);
    default: return to_float(product.row_of_weight(expert, row)[column]);
  }
}

// A pair's row of x, or of what lies between the products.
template <typename T>
__device__ __forceinline__ const T* row_of(const Product<T>& product, const ExpertsParams& p, const Groups& groups,
                                           int place, bool down) {
  return product.x + static_cast<int64_t>(down ? place : groups.pair(place) / p.top_k) * product.in;
}

// What lies between the products, of the first one's sums of a column with their biases.
__device__ __forceinline__ float inner_of(const ExpertsParams& p, float value, float up) {
  if (p.gated && p.limit != 0) value = fminf(value, p.limit);
  value = p.activation == Activation::kSilu ? __fdividef(value, 1.f + __expf(-p.alpha * value)) : activate(value, p.activation);
  if (!p.gated) return value;
  if (p.limit != 0) up = fminf(fmaxf(up, -p.limit), p.limit);
  return value * (up + p.up_offset);
}

// What the first product's sums of one column become: `sum` and, where they are gated, `up` of the row that follows.
template <typename T>
__device__ __forceinline__ void finish_inner(const ExpertsParams& p, const Pairs& pairs, int pair, int place,
                                             const Product<T>& product, int expert, int column, float sum, float up) {
  const float score = p.scale_input ? p.scores[pair] : 1.f;
  const int row = p.gated ? 2 * column : column;
  const float value = sum * score + product.bias_of(expert, row);
  if (p.gated) up = up * score + product.bias_of(expert, row + 1);
  static_cast<T*>(pairs.inner)[static_cast<int64_t>(place) * p.inner + column] =
      from_float<T>(inner_of(p, value, up));
}

template <typename T>
__device__ __forceinline__ void finish_inner(const ExpertsParams& p, const Pairs& pairs, const Groups& groups,
                                             const Product<T>& product, int expert, int place, int column, float sum,
                                             float up) {
  finish_inner(p, pairs, groups.pair(place), place, product, expert, column, sum, up);
}

// What the second product's sum of one row becomes.
template <typename T>
__device__ __forceinline__ void finish_made(const ExpertsParams& p, const Pairs& pairs, int pair, const Product<T>& product,
                                            int expert, int row, float sum) {
  static_cast<T*>(pairs.made)[static_cast<int64_t>(pair) * p.hidden + row] = from_float<T>(sum + product.bias_of(expert, row));
}
template <typename T>
__device__ __forceinline__ void finish_made(const ExpertsParams& p, const Pairs& pairs, const Groups& groups,
                                            const Product<T>& product, int expert, int place, int row, float sum) {
  finish_made(p, pairs, groups.pair(place), product, expert, row, sum);
}

}  // namespace llmc::device

namespace llmc::kernels {

// Whether a Hopper's kernels, those for few tokens and its own for many, multiply codes of FP8 by such.
bool multiplies_codes(const ExpertsParams& params);
// Rounds what lies between the products, where that is to be rounded: in place to numbers; to codes of pairs that are sorted; or
// not, since the next kernel does.
enum class Rounding { kNumbers, kCodes, kInKernel };
cudaError_t round_inner(DType dtype, const ExpertsParams& params, const device::Pairs& pairs, Rounding rounding,
                        cudaStream_t stream);
template <typename T>
constexpr DType kDType = std::is_same_v<T, float>    ? DType::kFloat32
                         : std::is_same_v<T, __half> ? DType::kFloat16
                                                     : DType::kBFloat16;

// Both products for pairs that are sorted, on tensor cores: for few pairs of an expert, and for many.
cudaError_t few_experts(DType dtype, const ExpertsParams& params, const device::Pairs& pairs, cudaStream_t stream);
// Whether that makes y, in place of rows of each pair that are still to be summed up.
bool sums_choices(const ExpertsParams& params);
cudaError_t many_experts(DType dtype, const ExpertsParams& params, const device::Pairs& pairs, cudaStream_t stream);
cudaError_t many_packed_experts(DType dtype, const ExpertsParams& params, const device::Pairs& pairs, cudaStream_t stream);

// many_experts() by instructions that Hopper alone has, where serves_experts_on_hopper().
cudaError_t many_experts_on_hopper(DType dtype, const ExpertsParams& params, const device::Pairs& pairs,
                                   cudaStream_t stream);

}  // namespace llmc::kernels
