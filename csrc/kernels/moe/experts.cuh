// What the kernels of experts share. A pair is one choice of one token, number token * top_k + choice. Pairs are sorted by
// expert, so that all of an expert's lie side by side, in groups of as many as a kernel takes at once; a pair's layout_scratch
// among the sorted is where its row between the two products is. Which experts were chosen only the device knows: what a
// kernel works on it finds from `starts`.
#pragma once

#include "../common/dequantize.cuh"
#include "params.h"

namespace llmc::device {

using kernels::ExpertsQuantParams;
using kernels::ExpertsParams;
using kernels::kExpertsGemvPairs;

constexpr int kMaxExperts = 1024;

// Packed weights lie in tiles of kExpertTileRows rows, one behind the other; a tile in steps of columns, kExpertTileColumns each; a step
// in vectors of 16 bytes, those of thread 4 g + t at g and t: codes of rows g and g + 8, of 8 columns from 8 t on (of four
// bits also of those from 32 + 8 t on), in the order of a unit (packed.cuh). So what a thread of the tensor core wants is one
// vector, and a tile is one stretch of memory. Its scales lie group by group, those of its rows side by side.
constexpr int kExpertTileRows = 16;
template <CodeType kCodeType>
constexpr int kExpertTileColumns = kCodeType == CodeType::kNone || kBits<kCodeType> == 8 ? 32 : 64;
template <CodeType kCodeType>
constexpr int kTileScaleBytes = kCodeType == CodeType::kMxfp4 ? kExpertTileRows : kExpertTileRows * 4;  // bytes of a group's

// Calls f with a constant of CodeType.
template <typename F>
cudaError_t dispatch_expert_code_type(CodeType codes, F&& f) {
  if (codes == CodeType::kMxfp4) return f(std::integral_constant<CodeType, CodeType::kMxfp4>());
  return dispatch_code_type(codes, std::forward<F>(f));
}

// What a vector's codes bias_nibbles for of rows g and g + 8; of four bits, of the columns from 32 · part on.
template <typename T, CodeType kCodeType>
__device__ __forceinline__ void dequantize_rows(uint32_t (&low)[4], uint32_t (&high)[4], const uint4& codes, int part,
                                                uint32_t low_offset, uint32_t high_offset) {
  const bool second = kBits<kCodeType> == 4 && part == 1;
  dequantize_unit<T, kCodeType>(low, {second ? codes.y : codes.x, codes.y}, low_offset);
  dequantize_unit<T, kCodeType>(high, {second ? codes.w : codes.z, codes.w}, high_offset);
}

// The zero of a row's group.
template <CodeType kCodeType>
__device__ __forceinline__ int load_expert_zero(const uint8_t* zeros, int64_t row, int group, int groups) {
  if constexpr (kCodeType == CodeType::kInt4) return __ldg(zeros + row * ((groups + 1) / 2) + group / 2) >> group % 2 * 4 & 15;
  return __ldg(zeros + row * groups + group);
}

// In scratch.
struct Pairs {
  int32_t* order;   // [num_tokens * top_k]: the pair at each layout_scratch
  int32_t* places;  // [num_tokens * top_k]: the layout_scratch of each pair; -1: none, its expert is not here
  int32_t* starts;  // [num_experts + 1]: the layout_scratch where each expert's begin
  int32_t* counts;  // [blocks that sort, num_experts], where these are more than one
  void* inner;      // T [num_tokens * top_k, inner], by layout_scratch
  void* outputs;       // T [num_tokens * top_k, hidden], by pair; what no expert here makes is not written
  void* quantized;    // of x and then of `inner`, where it is rounded: T, or QuantizedRows
};

// Rows of codes of FP8. Of 32 columns the first words of their four units come first, then the second ones, as packed codes
// have them. Scales [groups, pitch]: of each kQuantBlock columns of a row, or where there is one group of each row.
struct QuantizedRows {
  uint8_t* codes;
  float* scales;
  int pitch, groups;

  __host__ __device__ QuantizedRows(void* at, int rows, int width, int group)
      : codes(static_cast<uint8_t*>(at)), scales(reinterpret_cast<float*>(codes + int64_t{rows} * width)),
        pitch(kernels::group_scale_stride(rows)), groups(group == 0 ? 1 : width / group) {}
};

// What a gemm multiplies, by layout_scratch, where that is codes.
__host__ __device__ inline QuantizedRows quantized_rows(const ExpertsParams& p, const Pairs& pairs, bool down) {
  return {down ? pairs.quantized : pairs.outputs, p.num_tokens * p.top_k, down ? p.inner : p.hidden, p.quant_group};
}

// Which of the experts that are here a pair goes to; -1: none.
__device__ __forceinline__ int expert_of(const ExpertsParams& p, int pair) {
  const int64_t wanted = (p.narrow ? static_cast<const int32_t*>(p.experts)[pair]
                                   : static_cast<const int64_t*>(p.experts)[pair]) - p.first_expert;
  return wanted >= 0 && wanted < p.num_experts ? static_cast<int>(wanted) : -1;
}

// Some pairs of one expert, from a layout_scratch on.
struct PairGroup {
  int expert, first, count;
};

// All groups of `per` pairs at most. A single token's pairs are sorted as they are: each of its choices is a group.
class PairGroups {
 public:
  // `before` is shared, [kMaxExperts + 1].
  __device__ PairGroups(const ExpertsParams& p, const Pairs& pairs, int* before, int per)
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
  __device__ PairGroup next(int group) {
    while (before_[slot_ + 1] <= group) ++slot_;
    const int skipped = (group - before_[slot_]) * per_;
    return {single() ? expert_of(p_, slot_) : slot_, first_of(slot_) + skipped, min(per_, size_of(slot_) - skipped)};
  }
  // The pair at a layout_scratch.
  __device__ int pair(int layout_scratch) const { return single() ? layout_scratch : pairs_.order[layout_scratch]; }

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
struct ExpertGemm {
  const T *x, *weight, *bias;
  int in, out;

  __device__ __forceinline__ ExpertGemm(const ExpertsParams& p, const Pairs& pairs, bool down)
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
template <CodeType kCodeType>
__device__ __forceinline__ float dequantize_at(const ExpertsQuantParams& quant, const uint8_t* weight, bool tiled, int64_t row,
                                           int column, int in) {
  constexpr int kBit = kBits<kCodeType>, kStep = kExpertTileColumns<kCodeType>;
  const int groups = in / quant.group_size, group = column / quant.group_size;
  int64_t layout_scratch = row * in + column, scale = row * groups + group;
  if (tiled) {
    const int64_t tile = row / kExpertTileRows, of_tile = row % kExpertTileRows;
    const int64_t vector = (tile * (in / kStep) + column / kStep) * 32 + of_tile % 8 * 4 + column % 32 / 8;
    const int64_t part = of_tile / 8 * (kStep / 32) + column % kStep / 32;
    layout_scratch = vector * (128 / kBit) + part * 8 + packed_column(column % 8, 8);
    scale = (tile * groups + group) * kExpertTileRows + of_tile;
  }
  uint32_t code = kBit == 4 ? weight[layout_scratch / 2] >> layout_scratch % 2 * 4 & 15 : weight[layout_scratch];
  if (kCodeType == CodeType::kMxfp4 && tiled) code = gather_mxfp4_bits(reinterpret_cast<const uint32_t*>(weight)[layout_scratch / 8], layout_scratch % 8);
  if constexpr (kCodeType == CodeType::kMxfp4)
    return decode<kCodeType>(code, 0) * exponent_to_float(static_cast<const uint8_t*>(quant.scale)[scale]);
  int zero = kDefaultZero<kCodeType>;
  if (kCodeType != CodeType::kFloat8 && quant.zero != nullptr) zero = load_expert_zero<kCodeType>(quant.zero, row, group, groups);
  return decode<kCodeType>(code, zero) * static_cast<const float*>(quant.scale)[scale];
}

// One number of a weight, whatever its form; of rows behind the last, the last's.
template <typename T>
__device__ __forceinline__ float dequantize_at(const ExpertGemm<T>& gemm, const ExpertsQuantParams& quant, bool tiled, int expert,
                                           int row, int column) {
  const auto* codes = reinterpret_cast<const uint8_t*>(gemm.weight);
  const int64_t at = static_cast<int64_t>(expert) * gemm.out + min(row, gemm.out - 1);
  switch (quant.code_type) {
    case CodeType::kInt4: return dequantize_at<CodeType::kInt4>(quant, codes, tiled, at, column, gemm.in);
    case CodeType::kInt8: return dequantize_at<CodeType::kInt8>(quant, codes, tiled, at, column, gemm.in);
    case CodeType::kFloat8: return dequantize_at<CodeType::kFloat8>(quant, codes, tiled, at, column, gemm.in);
    case CodeType::kMxfp4: return dequantize_at<CodeType::kMxfp4>(quant, codes, tiled, at, column, gemm.in);
    default: return to_float(gemm.row_of_weight(expert, row)[column]);
  }
}

// A pair's row of x, or of what lies between the products.
template <typename T>
__device__ __forceinline__ const T* row_of(const ExpertGemm<T>& gemm, const ExpertsParams& p, const PairGroups& groups,
                                           int layout_scratch, bool down) {
  return gemm.x + static_cast<int64_t>(down ? layout_scratch : groups.pair(layout_scratch) / p.top_k) * gemm.in;
}

// What lies between the products, of the first one's sums of a column with their biases.
__device__ __forceinline__ float activate_inner(const ExpertsParams& p, float value, float up) {
  if (p.gated && p.limit != 0) value = fminf(value, p.limit);
  value = p.activation == Activation::kSilu ? __fdividef(value, 1.f + __expf(-p.alpha * value)) : activate(value, p.activation);
  if (!p.gated) return value;
  if (p.limit != 0) up = fminf(fmaxf(up, -p.limit), p.limit);
  return value * (up + p.up_offset);
}

// What the first gemm's sums of one column become: `sum` and, where they are gated, `up` of the row that follows.
template <typename T>
__device__ __forceinline__ void store_inner(const ExpertsParams& p, const Pairs& pairs, int pair, int layout_scratch,
                                             const ExpertGemm<T>& gemm, int expert, int column, float sum, float up) {
  const float score = p.scale_input ? p.scores[pair] : 1.f;
  const int row = p.gated ? 2 * column : column;
  const float value = sum * score + gemm.bias_of(expert, row);
  if (p.gated) up = up * score + gemm.bias_of(expert, row + 1);
  static_cast<T*>(pairs.inner)[static_cast<int64_t>(layout_scratch) * p.inner + column] =
      from_float<T>(activate_inner(p, value, up));
}

template <typename T>
__device__ __forceinline__ void store_inner(const ExpertsParams& p, const Pairs& pairs, const PairGroups& groups,
                                             const ExpertGemm<T>& gemm, int expert, int layout_scratch, int column, float sum,
                                             float up) {
  store_inner(p, pairs, groups.pair(layout_scratch), layout_scratch, gemm, expert, column, sum, up);
}

// What the second gemm's sum of one row becomes.
template <typename T>
__device__ __forceinline__ void store_expert_output(const ExpertsParams& p, const Pairs& pairs, int pair, const ExpertGemm<T>& gemm,
                                            int expert, int row, float sum) {
  static_cast<T*>(pairs.outputs)[static_cast<int64_t>(pair) * p.hidden + row] = from_float<T>(sum + gemm.bias_of(expert, row));
}
template <typename T>
__device__ __forceinline__ void store_expert_output(const ExpertsParams& p, const Pairs& pairs, const PairGroups& groups,
                                            const ExpertGemm<T>& gemm, int expert, int layout_scratch, int row, float sum) {
  store_expert_output(p, pairs, groups.pair(layout_scratch), gemm, expert, row, sum);
}

}  // namespace llmc::device

namespace llmc::kernels {

// Whether a Hopper's kernels, those for few tokens and its own for many, multiply codes of FP8 by such.
bool uses_fp8_mma(const ExpertsParams& params);
// Rounds what lies between the products, where that is to be rounded: in layout_scratch to numbers; to codes of pairs that are sorted; or
// not, since the next kernel does.
enum class ActivationQuant { kDequantized, kCodes, kInKernel };
cudaError_t quantize_inner(DType dtype, const ExpertsParams& params, const device::Pairs& pairs, ActivationQuant rounding,
                        cudaStream_t stream);
template <typename T>
constexpr DType kDType = std::is_same_v<T, float>    ? DType::kFloat32
                         : std::is_same_v<T, __half> ? DType::kFloat16
                                                     : DType::kBFloat16;

// Both products for pairs that are sorted, on tensor cores: for few pairs of an expert, and for many.
cudaError_t experts_gemv(DType dtype, const ExpertsParams& params, const device::Pairs& pairs, cudaStream_t stream);
// Whether that makes y, in layout_scratch of rows of each pair that are still to be summed up.
bool combines_choices(const ExpertsParams& params);
cudaError_t experts_gemm(DType dtype, const ExpertsParams& params, const device::Pairs& pairs, cudaStream_t stream);
cudaError_t packed_experts_gemm(DType dtype, const ExpertsParams& params, const device::Pairs& pairs, cudaStream_t stream);

// experts_gemm() by instructions that Hopper alone has, where has_experts_gemm_sm90().
cudaError_t experts_gemm_sm90(DType dtype, const ExpertsParams& params, const device::Pairs& pairs,
                                   cudaStream_t stream);

}  // namespace llmc::kernels
