// Device code of the expert kernels. A pair is one expert of one token, number token * top_k +
// choice. Pairs are sorted by expert, so that the pairs of an expert are adjacent, and handled in
// groups as large as a kernel's tile. The position of a pair in this order is its row between the
// two GEMMs. Routing is known on the device only: kernels find their tiles from `starts`.
#pragma once

#include <functional>

#include "../common/dequantize.cuh"
#include "params.h"

namespace llmc::device {

using kernels::ExpertsParams;
using kernels::ExpertsQuantParams;
using kernels::kExpertsGemvPairs;

constexpr int kMaxExperts = 1024;

// Layout of quantized expert weights: tiles of kExpertTileRows rows, contiguous; in a tile steps of
// kExpertTileColumns columns; in a step 16-byte vectors. The vector of thread 4 g + t has the codes
// of rows g and g + 8 for 8 columns from 8 t on (4-bit codes: also for those from 32 + 8 t on), in
// the order of a unit (common/dequantize.cuh). So an mma fragment is one vector, and a tile is one
// contiguous range. A tile's scales are group by group, its rows adjacent.
constexpr int kExpertTileRows = 16;
template <CodeType kCodeType>
constexpr int kExpertTileColumns = kCodeType == CodeType::kNone || kBits<kCodeType> == 8 ? 32 : 64;
template <CodeType kCodeType>
constexpr int kTileScaleBytes =
    kCodeType == CodeType::kMxfp4 ? kExpertTileRows : kExpertTileRows * 4;  // bytes per group

// Calls f with the code type as an integral_constant.
template <typename F>
cudaError_t dispatch_expert_code_type(CodeType codes, F&& f) {
  if (codes == CodeType::kMxfp4) return f(std::integral_constant<CodeType, CodeType::kMxfp4>());
  return dispatch_code_type(codes, std::forward<F>(f));
}

// Dequantizes a vector: rows g and g + 8; of 4-bit codes the columns from 32 * part on.
template <typename T, CodeType kCodeType>
__device__ __forceinline__ void dequantize_rows(uint32_t (&low)[4], uint32_t (&high)[4],
                                                const uint4& codes, int part, uint32_t low_offset,
                                                uint32_t high_offset) {
  const bool second = kBits<kCodeType> == 4 && part == 1;
  dequantize_unit<T, kCodeType>(low, {second ? codes.y : codes.x, codes.y}, low_offset);
  dequantize_unit<T, kCodeType>(high, {second ? codes.w : codes.z, codes.w}, high_offset);
}

// The zero of a row's group.
template <CodeType kCodeType>
__device__ __forceinline__ int load_expert_zero(const uint8_t* zeros, int64_t row, int group,
                                                int groups) {
  if constexpr (kCodeType == CodeType::kInt4)
    return __ldg(zeros + row * ((groups + 1) / 2) + group / 2) >> group % 2 * 4 & 15;
  return __ldg(zeros + row * groups + group);
}

// Scratch buffers.
struct Pairs {
  int32_t* order;  // [num_tokens * top_k]: the pair at each position
  int32_t*
      positions;    // [num_tokens * top_k]: the position of each pair; -1: its expert is elsewhere
  int32_t* starts;  // [num_experts + 1]: the first position of each expert
  int32_t* counts;  // [sorting blocks, num_experts], with more than one block
  void* inner;      // T [num_tokens * top_k, inner], by position
  void* outputs;    // T [num_tokens * top_k, hidden], by pair; not written for experts that are
                    // elsewhere
  void* quantized;  // quantized x, then quantized `inner`: T, or QuantizedRows
};

// Rows of FP8 codes. Of 32 columns the first words of their four units come first, then the second
// words, as in quantized weights. Scales are [groups, pitch], per kQuantBlock columns of a row, or
// per row with one group.
struct QuantizedRows {
  uint8_t* codes;
  float* scales;
  int pitch, groups;

  __host__ __device__ QuantizedRows(void* at, int rows, int width, int group)
      : codes(static_cast<uint8_t*>(at)),
        scales(reinterpret_cast<float*>(codes + int64_t{rows} * width)),
        pitch(kernels::group_scale_stride(rows)),
        groups(group == 0 ? 1 : width / group) {}
};

// The FP8 input of a GEMM, by position.
__host__ __device__ inline QuantizedRows quantized_rows(const ExpertsParams& p, const Pairs& pairs,
                                                        bool down) {
  return {down ? pairs.quantized : pairs.outputs, p.num_tokens * p.top_k, down ? p.inner : p.hidden,
          p.quant_group};
}

// The local expert of a pair; -1: elsewhere.
__device__ __forceinline__ int expert_of(const ExpertsParams& p, int pair) {
  const int64_t wanted = (p.narrow ? static_cast<const int32_t*>(p.experts)[pair]
                                   : static_cast<const int64_t*>(p.experts)[pair]) -
                         p.first_expert;
  return wanted >= 0 && wanted < p.num_experts ? static_cast<int>(wanted) : -1;
}

// Adjacent pairs of one expert, from position `first` on.
struct PairGroup {
  int expert, first, count;
};

// All groups of at most `per` pairs. A single token is not sorted: each of its pairs is a group.
class PairGroups {
 public:
  // `before` is shared memory, [kMaxExperts + 1].
  __device__ PairGroups(const ExpertsParams& p, const Pairs& pairs, int* before, int per)
      : p_(p), pairs_(pairs), before_(before), per_(per) {}

  // Number of groups. Call once, from all threads of the block.
  template <int kThreads>
  __device__ int count() {
    __shared__ int totals[kThreads / 32];
    const int each = (slots() + kThreads - 1) / kThreads, lane = threadIdx.x % 32,
              warp = threadIdx.x / 32;
    const int begin = min(static_cast<int>(threadIdx.x) * each, slots()),
              end = min(begin + each, slots());
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

  // Group number `group`, which must not decrease between calls.
  __device__ PairGroup next(int group) {
    while (before_[slot_ + 1] <= group) ++slot_;
    const int skipped = (group - before_[slot_]) * per_;
    return {single() ? expert_of(p_, slot_) : slot_, first_of(slot_) + skipped,
            min(per_, size_of(slot_) - skipped)};
  }
  // The pair at a position.
  __device__ int pair(int position) const { return single() ? position : pairs_.order[position]; }

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
  int* before_;  // number of groups before a slot's
  const int per_;
  int slot_ = 0;
};

// One of the two GEMMs: y [rows, out] = x [rows, in] * weight [num_experts, out, in]^T.
template <typename T>
struct ExpertGemm {
  const T *x, *weight, *bias;
  int in, out;

  __device__ __forceinline__ ExpertGemm(const ExpertsParams& p, const Pairs& pairs, bool down)
      : x(static_cast<const T*>(down ? pairs.inner : p.x)),
        weight(static_cast<const T*>(down ? p.down : p.gate_up)),
        bias(static_cast<const T*>(down ? p.down_bias : p.gate_up_bias)),
        in(down ? p.inner : p.hidden),
        out(down      ? p.hidden
            : p.gated ? 2 * p.inner
                      : p.inner) {}

  __device__ __forceinline__ const T* row_of_weight(int expert, int row) const {
    return weight + (static_cast<int64_t>(expert) * out + min(row, out - 1)) * in;
  }
  __device__ __forceinline__ float bias_of(int expert, int row) const {
    return bias == nullptr ? 0.f : to_float(bias[static_cast<int64_t>(expert) * out + row]);
  }
};

// One dequantized element of a weight, tiled or not.
template <CodeType kCodeType>
__device__ __forceinline__ float dequantize_at(const ExpertsQuantParams& quant,
                                               const uint8_t* weight, bool tiled, int64_t row,
                                               int column, int in) {
  constexpr int kBit = kBits<kCodeType>, kStep = kExpertTileColumns<kCodeType>;
  const int groups = in / quant.group_size, group = column / quant.group_size;
  int64_t position = row * in + column, scale = row * groups + group;
  if (tiled) {
    const int64_t tile = row / kExpertTileRows, of_tile = row % kExpertTileRows;
    const int64_t vector =
        (tile * (in / kStep) + column / kStep) * 32 + of_tile % 8 * 4 + column % 32 / 8;
    const int64_t part = of_tile / 8 * (kStep / 32) + column % kStep / 32;
    position = vector * (128 / kBit) + part * 8 + packed_column(column % 8, 8);
    scale = (tile * groups + group) * kExpertTileRows + of_tile;
  }
  uint32_t code = kBit == 4 ? weight[position / 2] >> position % 2 * 4 & 15 : weight[position];
  if (kCodeType == CodeType::kMxfp4 && tiled)
    code = gather_mxfp4_bits(reinterpret_cast<const uint32_t*>(weight)[position / 8], position % 8);
  if constexpr (kCodeType == CodeType::kMxfp4)
    return decode<kCodeType>(code, 0) *
           exponent_to_float(static_cast<const uint8_t*>(quant.scale)[scale]);
  int zero = kDefaultZero<kCodeType>;
  if (kCodeType != CodeType::kFloat8 && quant.zero != nullptr)
    zero = load_expert_zero<kCodeType>(quant.zero, row, group, groups);
  return decode<kCodeType>(code, zero) * static_cast<const float*>(quant.scale)[scale];
}

// One element of a weight of any type; rows after the last repeat it.
template <typename T>
__device__ __forceinline__ float dequantize_at(const ExpertGemm<T>& gemm,
                                               const ExpertsQuantParams& quant, bool tiled,
                                               int expert, int row, int column) {
  const auto* codes = reinterpret_cast<const uint8_t*>(gemm.weight);
  const int64_t at = static_cast<int64_t>(expert) * gemm.out + min(row, gemm.out - 1);
  switch (quant.code_type) {
    case CodeType::kInt4:
      return dequantize_at<CodeType::kInt4>(quant, codes, tiled, at, column, gemm.in);
    case CodeType::kInt8:
      return dequantize_at<CodeType::kInt8>(quant, codes, tiled, at, column, gemm.in);
    case CodeType::kFloat8:
      return dequantize_at<CodeType::kFloat8>(quant, codes, tiled, at, column, gemm.in);
    case CodeType::kMxfp4:
      return dequantize_at<CodeType::kMxfp4>(quant, codes, tiled, at, column, gemm.in);
    default: return to_float(gemm.row_of_weight(expert, row)[column]);
  }
}

// A pair's row of x, or of `inner`.
template <typename T>
__device__ __forceinline__ const T* row_of(const ExpertGemm<T>& gemm, const ExpertsParams& p,
                                           const PairGroups& groups, int position, bool down) {
  return gemm.x + static_cast<int64_t>(down ? position : groups.pair(position) / p.top_k) * gemm.in;
}

// The function between the two GEMMs, of sums with bias.
__device__ __forceinline__ float activate_inner(const ExpertsParams& p, float value, float up) {
  if (p.gated && p.limit != 0) value = fminf(value, p.limit);
  value = p.activation == Activation::kSilu ? __fdividef(value, 1.f + __expf(-p.alpha * value))
                                            : activate(value, p.activation);
  if (!p.gated) return value;
  if (p.limit != 0) up = fminf(fmaxf(up, -p.limit), p.limit);
  return value * (up + p.up_offset);
}

// Epilogue of the first GEMM for one column: `sum` and, if gated, `up` of the next weight row.
template <typename T>
__device__ __forceinline__ void store_inner(const ExpertsParams& p, const Pairs& pairs, int pair,
                                            int position, const ExpertGemm<T>& gemm, int expert,
                                            int column, float sum, float up) {
  const float score = p.scale_input ? p.scores[pair] : 1.f;
  const int row = p.gated ? 2 * column : column;
  const float value = sum * score + gemm.bias_of(expert, row);
  if (p.gated) up = up * score + gemm.bias_of(expert, row + 1);
  static_cast<T*>(pairs.inner)[static_cast<int64_t>(position) * p.inner + column] =
      from_float<T>(activate_inner(p, value, up));
}

template <typename T>
__device__ __forceinline__ void store_inner(const ExpertsParams& p, const Pairs& pairs,
                                            const PairGroups& groups, const ExpertGemm<T>& gemm,
                                            int expert, int position, int column, float sum,
                                            float up) {
  store_inner(p, pairs, groups.pair(position), position, gemm, expert, column, sum, up);
}

// Epilogue of the second GEMM for one row.
template <typename T>
__device__ __forceinline__ void store_expert_output(const ExpertsParams& p, const Pairs& pairs,
                                                    int pair, const ExpertGemm<T>& gemm, int expert,
                                                    int row, float sum) {
  static_cast<T*>(pairs.outputs)[static_cast<int64_t>(pair) * p.hidden + row] =
      from_float<T>(sum + gemm.bias_of(expert, row));
}
template <typename T>
__device__ __forceinline__ void store_expert_output(const ExpertsParams& p, const Pairs& pairs,
                                                    const PairGroups& groups,
                                                    const ExpertGemm<T>& gemm, int expert,
                                                    int position, int row, float sum) {
  store_expert_output(p, pairs, groups.pair(position), gemm, expert, row, sum);
}

}  // namespace llmc::device

namespace llmc::kernels {

// Whether Hopper's expert kernels multiply FP8 codes by FP8 codes.
bool uses_fp8_mma(const ExpertsParams& params);
// Quantizes `inner`: to values of T in place; to codes, for sorted pairs; or not at all, since the
// next kernel does it.
enum class ActivationQuant { kDequantized, kCodes, kInKernel };
cudaError_t quantize_inner(DType dtype, const ExpertsParams& params, const device::Pairs& pairs,
                           ActivationQuant rounding, cudaStream_t stream);
template <typename T>
constexpr DType kDType = std::is_same_v<T, float>    ? DType::kFloat32
                         : std::is_same_v<T, __half> ? DType::kFloat16
                                                     : DType::kBFloat16;

// Runs the GEMMs of params.gemms.
template <typename First, typename Second>
cudaError_t run_gemms(const ExpertsParams& params, First&& first, Second&& second) {
  const cudaError_t error = params.gemms == ExpertsGemms::kSecond ? cudaSuccess : first();
  return error != cudaSuccess || params.gemms == ExpertsGemms::kFirst ? error : second();
}

// Both GEMMs and the products of adapters, by `gemms`, which runs those of its params. `x` is
// params.x before quantization.
cudaError_t adapted_gemms(
    DType dtype, const ExpertsParams& params, const void* x, const device::Pairs& pairs,
    const ExpertsLoraParams& lora, cudaStream_t stream,
    const std::function<cudaError_t(const ExpertsParams&, const device::Pairs&)>& gemms);

// Both GEMMs on tensor cores: for few pairs per expert, and for sorted pairs.
cudaError_t experts_gemv(DType dtype, const ExpertsParams& params, const device::Pairs& pairs,
                         cudaStream_t stream);
// Whether experts_gemv() writes y itself, instead of one row per pair for combine_kernel.
bool combines_choices(const ExpertsParams& params);
cudaError_t experts_gemm(DType dtype, const ExpertsParams& params, const device::Pairs& pairs,
                         cudaStream_t stream);
cudaError_t packed_experts_gemm(DType dtype, const ExpertsParams& params,
                                const device::Pairs& pairs, cudaStream_t stream);

// wgmma version of experts_gemm(), where has_experts_gemm_sm90().
cudaError_t experts_gemm_sm90(DType dtype, const ExpertsParams& params, const device::Pairs& pairs,
                              cudaStream_t stream);

}  // namespace llmc::kernels
