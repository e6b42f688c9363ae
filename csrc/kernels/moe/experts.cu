// Mixture of experts without the tensor core GEMMs: sorting pairs by expert, the weighted sum over
// a token's experts, quantization of activations, and a fallback GEMM for any size and dtype.
//
// No result depends on the order of atomics: what a block writes depends on its index only, so the
// same inputs give the same sums.
#include <algorithm>

#include "../rowwise/params.h"
#include "experts.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kSortThreads = 256, kSortRounds = 4, kSortPairs = kSortThreads * kSortRounds;

// Histogram: pairs per expert among the kSortPairs of a block, to counts[block][expert].
__global__ void __launch_bounds__(kSortThreads) count_experts_kernel(ExpertsParams p, Pairs pairs) {
  __shared__ int counts[kMaxExperts];
  for (int expert = threadIdx.x; expert < p.num_experts; expert += kSortThreads) counts[expert] = 0;
  pdl_wait();
  pdl_launch_dependents();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSortRounds; ++i) {
    const int pair = blockIdx.x * kSortPairs + i * kSortThreads + threadIdx.x;
    const int expert = pair < p.num_tokens * p.top_k ? expert_of(p, pair) : -1;
    if (expert >= 0) atomicAdd(counts + expert, 1);
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < p.num_experts; expert += kSortThreads)
    pairs.counts[blockIdx.x * p.num_experts + expert] = counts[expert];
}

// Stable counting sort: assigns positions to the kSortPairs of a block. A warp takes adjacent
// pairs, 32 at a time. A single block needs no counts. Reads the counts of all blocks, from L2.
__global__ void __launch_bounds__(kSortThreads) sort_pairs_kernel(ExpertsParams p, Pairs pairs) {
  constexpr int kWarps = kSortThreads / 32, kEach = kMaxExperts / kSortThreads;
  __shared__ int own[kWarps][kMaxExperts];  // pairs of a warp, then their first position
  __shared__ int totals[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kWarps * kMaxExperts; i += kSortThreads)
    own[i / kMaxExperts][i % kMaxExperts] = 0;
  pdl_wait();
  pdl_launch_dependents();
  const int first = blockIdx.x * kSortPairs + warp * 32 * kSortRounds + lane;
  int expert[kSortRounds], rank[kSortRounds];
#pragma unroll
  for (int i = 0; i < kSortRounds; ++i)
    expert[i] = first + 32 * i < p.num_tokens * p.top_k ? expert_of(p, first + 32 * i) : -1;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSortRounds; ++i) {
    const uint32_t same = __match_any_sync(~0u, expert[i]), lower = same & ((1u << lane) - 1);
    rank[i] = (expert[i] >= 0 ? own[warp][expert[i]] : 0) + __popc(lower);
    __syncwarp();
    if (expert[i] >= 0 && lower == 0) own[warp][expert[i]] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  // A thread's experts are adjacent, so a scan over threads gives the first position of each
  // expert.
  const int each = (p.num_experts + kSortThreads - 1) / kSortThreads;
  int before[kEach] = {}, all[kEach] = {}, sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int of = threadIdx.x * each + i;
    if (i >= each || of >= p.num_experts) continue;
    if (gridDim.x == 1) {
      for (int w = 0; w < kWarps; ++w) all[i] += own[w][of];
    } else {
#pragma unroll 8
      for (int block = 0; block < static_cast<int>(gridDim.x); ++block) {
        const int count = pairs.counts[block * p.num_experts + of];
        all[i] += count;
        if (block < static_cast<int>(blockIdx.x)) before[i] += count;
      }
    }
    sum += all[i];
  }
  int at = warp_scan(sum);
  if (lane == 31) totals[warp] = at;
  __syncthreads();
  at -= sum;
  for (int w = 0; w < warp; ++w) at += totals[w];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int of = threadIdx.x * each + i;
    if (i >= each || of >= p.num_experts) continue;
    if (blockIdx.x == 0) {
      pairs.starts[of] = at;
      if (of == p.num_experts - 1) pairs.starts[of + 1] = at + all[i];
    }
    int position = at + before[i];
    for (int w = 0; w < kWarps; ++w) {
      const int count = own[w][of];
      own[w][of] = position;
      position += count;
    }
    at += all[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSortRounds; ++i) {
    const int pair = first + 32 * i,
              position = expert[i] >= 0 ? own[warp][expert[i]] + rank[i] : -1;
    if (position >= 0) pairs.order[position] = pair;
    if (pair < p.num_tokens * p.top_k) pairs.positions[pair] = position;
  }
}

// y[token] = residual + sum of score * output over the token's experts, in their order. One vector
// per thread. Reads each output once, kAtOnce rows at a time, including rows of experts that are
// elsewhere, which are ignored.
template <typename T, int kWidth>
__global__ void combine_kernel(ExpertsParams p, Pairs pairs) {
  constexpr int kAtOnce = 8;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth, first = blockIdx.x * p.top_k;
  const T* from = static_cast<const T*>(pairs.outputs) + static_cast<int64_t>(first) * p.hidden + i;
  const int64_t position = static_cast<int64_t>(blockIdx.x) * p.hidden + i;
  Vec<T, kWidth> residual{};
  if (p.residual != nullptr && i < p.hidden)
    residual = load<T, kWidth>(static_cast<const T*>(p.residual) + position);
  float sum[kWidth] = {};
  for (int begin = 0; begin < p.top_k; begin += kAtOnce) {
    float score[kAtOnce];
    bool here[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int choice = min(begin + k, p.top_k - 1);
      score[k] = p.scale_input ? 1.f : p.scores[first + choice];
      here[k] = begin + k < p.top_k && expert_of(p, first + choice) >= 0;
    }
    if (begin == 0) {  // all reads above are of data older than the GEMMs
      pdl_wait();
      pdl_launch_dependents();
      if (i >= p.hidden) return;
    }
    Vec<T, kWidth> made[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      made[k] =
          load<T, kWidth>(from + static_cast<int64_t>(min(begin + k, p.top_k - 1)) * p.hidden);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
      for (int c = 0; c < kWidth; ++c)
        sum[c] = here[k] ? fmaf(score[k], to_float(made[k].data[c]), sum[c]) : sum[c];
  }
  if (p.residual != nullptr)
#pragma unroll
    for (int c = 0; c < kWidth; ++c) sum[c] += to_float(residual.data[c]);
  store_floats(static_cast<T*>(p.y) + position, sum);
}

// Quantizes rows of x to FP8 codes. With positions, each row is written to those of `copies` pairs.
// `end` bounds the number of rows. Half a warp takes a group of columns, or a block a whole row.
// Reads x once, or twice for whole rows.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(128)
    quantize_rows_kernel(QuantizedRows to, const T* x, const int32_t* positions, const int32_t* end,
                         int rows, int width, int copies) {
  constexpr int kUnit = 8, kHalf = kQuantBlock / kUnit;
  __shared__ float partial[4];
  pdl_wait();
  pdl_launch_dependents();
  const int64_t part =
      kWhole ? blockIdx.x : int64_t{blockIdx.x} * (128 / kHalf) + threadIdx.x / kHalf;
  const int row = static_cast<int>(part / to.groups), group = static_cast<int>(part % to.groups);
  if (row >= (end != nullptr ? *end : rows)) return;
  const T* from = x + int64_t{row} * width;
  float numbers[kUnit];
  // Calls f with each output row of this row.
  auto for_each = [&](auto&& f) {
    if (positions == nullptr) return f(row);
    for (int i = 0; i < copies; ++i) {
      const int position = positions[row * copies + i];
      if (position >= 0) f(position);
    }
  };
  auto measure = [&](int unit) {
    const auto own = load<T, kUnit>(from + unit * kUnit);
#pragma unroll
    for (int k = 0; k < kUnit; ++k) numbers[k] = to_float(own.data[k]);
    return abs_max(numbers);
  };
  auto put = [&](int unit, float inverse) {
    const uint2 codes = quantize_unit(numbers, inverse);
    for_each([&](int position) {
      auto* words = reinterpret_cast<uint32_t*>(to.codes + int64_t{position} * width) +
                    unit / 4 * 8 + unit % 4;
      words[0] = codes.x, words[4] = codes.y;
    });
  };
  if constexpr (kWhole) {
    float most = 0;
    for (int unit = threadIdx.x; unit < width / kUnit; unit += 128)
      most = fmaxf(most, measure(unit));
    most = warp_abs_max(most);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = most;
    __syncthreads();
    const float step =
        fp8_scale(fmaxf(fmaxf(partial[0], partial[1]), fmaxf(partial[2], partial[3])));
    if (threadIdx.x == 0) for_each([&](int position) { to.scales[position] = step; });
    for (int unit = threadIdx.x; unit < width / kUnit; unit += 128)
      measure(unit), put(unit, 1 / step);
  } else {
    const int unit = group * kHalf + threadIdx.x % kHalf;
    const float step = fp8_scale(half_warp_max(measure(unit)));
    if (threadIdx.x % kHalf == 0)
      for_each([&](int position) { to.scales[int64_t{group} * to.pitch + position] = step; });
    put(unit, 1 / step);
  }
}

template <typename T>
cudaError_t quantize_to_codes(const ExpertsParams& p, const Pairs& pairs, bool down,
                              cudaStream_t stream) {
  const int made = p.num_tokens * p.top_k, rows = down ? made : p.num_tokens,
            width = down ? p.inner : p.hidden;
  const QuantizedRows to = quantized_rows(p, pairs, down);
  const int32_t *positions = down ? nullptr : pairs.positions,
                *end = down ? pairs.starts + p.num_experts : nullptr;
  const bool whole = p.quant_group == 0;
  const unsigned blocks =
      whole ? rows : ceil_div(int64_t{rows} * to.groups, 128 / (kQuantBlock / 8));
  return launch(whole ? quantize_rows_kernel<T, true> : quantize_rows_kernel<T, false>, blocks, 128,
                0, stream, to, static_cast<const T*>(down ? pairs.inner : p.x), positions, end,
                rows, width, p.top_k);
}

// Quantizes and dequantizes to T, for any width.
cudaError_t quantize_dequantize(DType dtype, const ExpertsParams& p, const Pairs& pairs, bool down,
                                cudaStream_t stream) {
  NormParams norm{};
  norm.y = down ? pairs.inner : pairs.quantized, norm.x = down ? pairs.inner : p.x;
  norm.rows = down ? p.num_tokens * p.top_k : p.num_tokens, norm.hidden = down ? p.inner : p.hidden;
  norm.plain = norm.rounded = true;
  norm.quant_group = p.quant_group;
  return kernels::norm(dtype, norm, stream);
}

cudaError_t round(DType dtype, const ExpertsParams& p, const Pairs& pairs, ActivationQuant rounding,
                  bool down, cudaStream_t stream) {
  if (!p.rounded || rounding == ActivationQuant::kInKernel) return cudaSuccess;
  if (rounding == ActivationQuant::kDequantized)
    return quantize_dequantize(dtype, p, pairs, down, stream);
  return dtype == DType::kFloat16 ? quantize_to_codes<__half>(p, pairs, down, stream)
                                  : quantize_to_codes<__nv_bfloat16>(p, pairs, down, stream);
}

constexpr int kFallbackPairs = 32, kFallbackOut = 32, kFallbackIn = 32;

// Fallback GEMM without tensor cores. A tile is kFallbackOut weight rows for kFallbackPairs pairs,
// 2 x 2 outputs per thread; blocks take tiles in turn. Reads the weight once per kFallbackPairs
// pairs.
template <typename T, bool kDown>
__global__ void __launch_bounds__(256) fallback_kernel(ExpertsParams p, Pairs pairs, bool tiled) {
  __shared__ int before[kMaxExperts + 1];
  __shared__ float weights[kFallbackIn][kFallbackOut + 1], x[kFallbackIn][kFallbackPairs + 1];
  pdl_wait();
  pdl_launch_dependents();
  const ExpertGemm<T> gemm(p, pairs, kDown);
  const ExpertsQuantParams& quant = kDown ? p.down_quant : p.gate_up_quant;
  PairGroups groups(p, pairs, before, kFallbackPairs);
  const int out_tiles = (gemm.out + kFallbackOut - 1) / kFallbackOut,
            tiles = groups.count<256>() * out_tiles;
  const int column = 2 * (threadIdx.x % 16), row = 2 * (threadIdx.x / 16);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const PairGroup group = groups.next(tile / out_tiles);
    const int first_out = tile % out_tiles * kFallbackOut;
    float sum[2][2] = {};  // [pair][weight row]
    for (int begin = 0; begin < gemm.in; begin += kFallbackIn) {
      __syncthreads();
      for (int i = threadIdx.x; i < kFallbackIn * kFallbackOut; i += 256) {
        const int at = begin + i % kFallbackIn, of = i / kFallbackIn;
        const bool there = at < gemm.in;
        weights[i % kFallbackIn][of] =
            there ? dequantize_at(gemm, quant, tiled, group.expert, first_out + of, at) : 0.f;
        x[i % kFallbackIn][of] =
            there && of < group.count
                ? to_float(row_of(gemm, p, groups, group.first + of, kDown)[at])
                : 0.f;
      }
      __syncthreads();
#pragma unroll 8
      for (int i = 0; i < kFallbackIn; ++i)
#pragma unroll
        for (int a = 0; a < 2; ++a)
#pragma unroll
          for (int b = 0; b < 2; ++b) sum[a][b] += x[i][row + a] * weights[i][column + b];
    }
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const int position = group.first + row + a, out = first_out + column;
      if (row + a >= group.count) continue;
      if (!kDown && p.gated) {
        if (out < gemm.out)
          store_inner(p, pairs, groups, gemm, group.expert, position, out / 2, sum[a][0],
                      sum[a][1]);
        continue;
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (out + b >= gemm.out) continue;
        if (kDown)
          store_expert_output(p, pairs, groups, gemm, group.expert, position, out + b, sum[a][b]);
        else store_inner(p, pairs, groups, gemm, group.expert, position, out + b, sum[a][b], 0.f);
      }
    }
  }
}
static_assert(kFallbackPairs == kFallbackOut);

bool has_gate_up_tiles(const ExpertsParams& p) {
  const ExpertsQuantParams& quant = p.gate_up_quant;
  return has_expert_tiles(quant.code_type, quant.group_size, p.gated ? 2 * p.inner : p.inner,
                          p.hidden);
}
bool has_down_tiles(const ExpertsParams& p) {
  return has_expert_tiles(p.down_quant.code_type, p.down_quant.group_size, p.hidden, p.inner);
}

template <typename T>
cudaError_t fallback_experts(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const unsigned blocks = 4 * num_sms();
  return run_gemms(
      p,
      [&] {
        return launch(fallback_kernel<T, false>, blocks, 256, 0, stream, p, pairs,
                      has_gate_up_tiles(p));
      },
      [&] {
        const cudaError_t error =
            quantize_inner(kDType<T>, p, pairs, ActivationQuant::kDequantized, stream);
        return error != cudaSuccess ? error
                                    : launch(fallback_kernel<T, true>, blocks, 256, 0, stream, p,
                                             pairs, has_down_tiles(p));
      });
}

template <typename T>
cudaError_t combine(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  auto run = [&](auto kernel, int width) {
    return launch(kernel, dim3(p.num_tokens, ceil_div(p.hidden, 128 * width)), 128, 0, stream, p,
                  pairs);
  };
  return p.hidden % kVec<T> == 0 ? run(combine_kernel<T, kVec<T>>, kVec<T>)
                                 : run(combine_kernel<T, 1>, 1);
}

// Lays out the scratch buffer, and returns its size.
int64_t layout_scratch(DType dtype, int num_tokens, int top_k, int num_experts, int hidden,
                       int inner, bool rounded, void* scratch, Pairs* made) {
  const int64_t pairs = static_cast<int64_t>(num_tokens) * top_k;
  int64_t bytes = 0;
  auto take = [&](int64_t count, int width) {
    void* at = static_cast<char*>(scratch) + bytes;
    bytes += (count * width + 255) / 256 * 256;
    return at;
  };
  const int width = dtype == DType::kFloat32 ? 4 : 2;
  auto* order = static_cast<int32_t*>(take(pairs, 4));
  auto* positions = static_cast<int32_t*>(take(pairs, 4));
  auto* starts = static_cast<int32_t*>(take(num_experts + 1, 4));
  auto* counts = static_cast<int32_t*>(
      take(pairs > kSortPairs ? ceil_div(pairs, kSortPairs) * num_experts : 0, 4));
  void* rows = take(pairs * inner, width);
  void* of_pairs = take(pairs * hidden, width);
  const int64_t numbers = int64_t{num_tokens} * hidden * width;
  const int64_t codes = pairs * inner + int64_t{group_scale_stride(static_cast<int>(pairs))} *
                                            (inner / kQuantBlock + 1) * 4;
  *made = {order,
           positions,
           starts,
           counts,
           rows,
           of_pairs,
           take(rounded ? std::max(numbers, codes) : 0, 1)};
  return bytes;
}

}  // namespace

int64_t experts_scratch(DType dtype, int num_tokens, int top_k, int num_experts, int hidden,
                        int inner, bool rounded) {
  Pairs pairs;
  return layout_scratch(dtype, num_tokens, top_k, num_experts, hidden, inner, rounded, nullptr,
                        &pairs);
}

bool uses_fp8_mma(const ExpertsParams& p) {
  auto whole = [](const ExpertsQuantParams& quant) {
    return quant.code_type == CodeType::kFloat8 && quant.group_size == kQuantBlock;
  };
  return p.rounded && (p.quant_group == 0 || p.quant_group == kQuantBlock) &&
         whole(p.gate_up_quant) && whole(p.down_quant) && has_gate_up_tiles(p) &&
         has_down_tiles(p) && device_attribute<cudaDevAttrComputeCapabilityMajor>() == 9;
}

cudaError_t quantize_inner(DType dtype, const ExpertsParams& p, const Pairs& pairs,
                           ActivationQuant rounding, cudaStream_t stream) {
  return round(dtype, p, pairs, rounding, /*down=*/true, stream);
}

cudaError_t experts(DType dtype, const ExpertsParams& given, ExpertsKernel way, cudaStream_t stream,
                    const ExpertsLoraParams* lora) {
  ExpertsParams p = given;
  const bool packed = p.gate_up_quant.code_type != CodeType::kNone;
  if (p.num_experts > kMaxExperts || (lora != nullptr && way == ExpertsKernel::kGemv) ||
      (packed && way != ExpertsKernel::kFallback && !(has_gate_up_tiles(p) && has_down_tiles(p))))
    return cudaErrorInvalidValue;
  Pairs pairs;
  layout_scratch(dtype, p.num_tokens, p.top_k, p.num_experts, p.hidden, p.inner, p.rounded,
                 p.scratch, &pairs);
  cudaError_t error = cudaSuccess;
  if (p.num_tokens > 1 && way != ExpertsKernel::kGemv) {
    const unsigned blocks = ceil_div(static_cast<int64_t>(p.num_tokens) * p.top_k, kSortPairs);
    if (blocks > 1) error = launch(count_experts_kernel, blocks, kSortThreads, 0, stream, p, pairs);
    if (error == cudaSuccess)
      error = launch(sort_pairs_kernel, blocks, kSortThreads, 0, stream, p, pairs);
    if (error != cudaSuccess) return error;
  }
  const ActivationQuant rounding = way == ExpertsKernel::kFallback || !uses_fp8_mma(p)
                                       ? ActivationQuant::kDequantized
                                   : way == ExpertsKernel::kGemv ? ActivationQuant::kInKernel
                                   : has_experts_gemm_sm90(p)    ? ActivationQuant::kCodes
                                                                 : ActivationQuant::kDequantized;
  error = round(dtype, p, pairs, rounding, /*down=*/false, stream);
  if (error != cudaSuccess) return error;
  if (p.rounded && rounding == ActivationQuant::kDequantized) p.x = pairs.quantized;
  // Of quantized weights, the wgmma version permutes columns between its GEMMs.
  const bool sm90 = has_experts_gemm_sm90(p) && (lora == nullptr || !packed || uses_fp8_mma(p));
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto gemms = [&](const ExpertsParams& own, const Pairs& to) {
      return way == ExpertsKernel::kFallback ? fallback_experts<T>(own, to, stream)
             : way == ExpertsKernel::kGemv   ? experts_gemv(dtype, own, to, stream)
             : sm90                          ? experts_gemm_sm90(dtype, own, to, stream)
             : packed                        ? packed_experts_gemm(dtype, own, to, stream)
                                             : experts_gemm(dtype, own, to, stream);
    };
    error = lora == nullptr ? gemms(p, pairs)
                            : adapted_gemms(dtype, p, given.x, pairs, *lora, stream, gemms);
    if (error != cudaSuccess || (way == ExpertsKernel::kGemv && combines_choices(p))) return error;
    return combine<T>(p, pairs, stream);
  });
}

}  // namespace llmc::kernels
