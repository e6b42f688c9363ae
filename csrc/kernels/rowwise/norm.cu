// RMSNorm and LayerNorm with residual, gate or FP8 quantization. Bound by memory: reads each input
// once.
#include "../common/dequantize.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

enum class NormKind { kRows, kRounded, kGated };

// The activation of a gate element, branch-free for the activations that a norm supports.
__device__ __forceinline__ float gate_of(float x, Activation activation) {
  const float sigmoid = 1.f / (1.f + __expf(-x));
  return activation == Activation::kNone   ? x
         : activation == Activation::kSilu ? x * sigmoid
                                           : sigmoid;
}

// One row per kThreads threads, in registers between the passes: kTurns vectors of kWidth elements
// per thread. With kThreads 32 each warp has a row. Reads x, residual, gate and weights once,
// writes y and sum once; quantization adds no pass over memory.
template <typename T, int kThreads, int kWidth, int kTurns, NormKind kOf>
__global__ void __launch_bounds__(kThreads < 128 ? 128 : kThreads) norm_kernel(NormParams p) {
  constexpr bool kRounded = kOf == NormKind::kRounded, kGated = kOf == NormKind::kGated;
  __shared__ float partial[kThreads / 32];
  __shared__ float2 pairs[kThreads / 32];
  const int rows_per_block = blockDim.x / kThreads;
  const int row = blockIdx.x * rows_per_block + threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  if (row >= p.rows) return;  // whole warps only, with no block barrier below
  const int64_t start = static_cast<int64_t>(row) * p.hidden;
  const T* x = static_cast<const T*>(p.x) + start;
  const float* weight = p.groups > 1 ? p.weight + row % p.groups * p.hidden : p.weight;
  const T* gate = nullptr;
  if constexpr (kGated)
    gate = static_cast<const T*>(p.gate) + row / p.groups * p.gate_stride +
           static_cast<int64_t>(row % p.groups) * p.hidden;
  float value[kTurns][kWidth];
  Vec<T, kWidth> gates[kGated ? kTurns : 1];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int i = (turn * kThreads + thread) * kWidth;
    if (i < p.hidden && weight != nullptr) prefetch_l1(weight + i);
    if (i < p.hidden && p.bias != nullptr) prefetch_l1(p.bias + i);
  }
  pdl_wait();
  pdl_launch_dependents();
  float total = 0;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int i = (turn * kThreads + thread) * kWidth;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) value[turn][k] = 0;
    if (i >= p.hidden) continue;
    const auto in = load<T, kWidth>(x + i);
    if constexpr (kGated) gates[turn] = load<T, kWidth>(gate + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) value[turn][k] = to_float(in.data[k]);
    if constexpr (kGated) {
      if (p.gate_first) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k)
          value[turn][k] *= gate_of(to_float(gates[turn].data[k]), p.gate_activation);
      }
    }
    if (p.residual != nullptr) {
      const auto more = load<T, kWidth>(static_cast<const T*>(p.residual) + start + i);
      Vec<T, kWidth> sum;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        value[turn][k] += to_float(more.data[k]);
        sum.data[k] = from_float<T>(value[turn][k]);
      }
      store(static_cast<T*>(p.sum) + start + i, sum);
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) total += value[turn][k];
  }
  float mean = 0;
  if (p.centred) mean = block_sum<kThreads>(total, partial) / p.hidden;
  float squares = 0;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if ((turn * kThreads + thread) * kWidth >= p.hidden) continue;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      value[turn][k] -= mean;
      squares += value[turn][k] * value[turn][k];
    }
  }
  if constexpr (!kRounded) {
    const float scale = rsqrtf(block_sum<kThreads>(squares, partial) / p.hidden + p.epsilon);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int i = (turn * kThreads + thread) * kWidth;
      if (i >= p.hidden) continue;
      Vec<T, kWidth> out;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        float y = value[turn][k] * scale;
        if (weight != nullptr) y *= weight[i + k];
        if (p.bias != nullptr) y += p.bias[i + k];
        if constexpr (kGated) {
          if (!p.gate_first) y *= gate_of(to_float(gates[turn].data[k]), p.gate_activation);
        }
        out.data[k] = from_float<T>(y);
      }
      store(static_cast<T*>(p.y) + start + i, out);
    }
  } else {
    // The row's maximum is reduced together with its squares, unless a bias is added to the scaled
    // values.
    auto change = [&](const float* by, auto&& f) {
      float most = 0;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int i = (turn * kThreads + thread) * kWidth;
        if (i >= p.hidden) continue;
        Vec<float, kWidth> own;
        if (by != nullptr) own = load<float, kWidth>(by + i);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          if (by != nullptr) value[turn][k] = f(value[turn][k], own.data[k]);
          most = fmaxf(most, fabsf(value[turn][k]));
        }
      }
      return most;
    };
    const float own = change(weight, [](float x, float gain) { return x * gain; });
    float2 measured = block_sum_and_max<kThreads>(squares, own, pairs);
    float scale = p.plain ? 1.f : rsqrtf(measured.x / p.hidden + p.epsilon);
    if (p.bias != nullptr) {
      const float biased =
          change(p.bias, [scale](float x, float bias) { return fmaf(x, scale, bias); });
      measured = block_sum_and_max<kThreads>(0, biased, pairs);
      scale = 1;
    }
    auto step_of = [&](float most) { return fp8_scale(most * scale); };
    float step = p.static_scale > 0 ? p.static_scale : step_of(measured.y), inverse = scale / step;
    if (p.scale != nullptr && p.quant_group == 0 && thread == 0) p.scale[row] = step;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int i = (turn * kThreads + thread) * kWidth;
      if (p.quant_group > 0) {  // a group belongs to adjacent threads
        float most = 0;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) most = fmaxf(most, fabsf(value[turn][k]));
        for (int mask = 1; mask < p.quant_group / kWidth; mask *= 2)
          most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
        step = step_of(most), inverse = scale / step;
        if (p.scale != nullptr && i < p.hidden && i % p.quant_group == 0)
          p.scale[i / p.quant_group * group_scale_stride(p.rows) + row] = step;
      }
      if (i >= p.hidden) continue;
      Vec<T, kWidth> numbers;
      Vec<uint8_t, kWidth> codes;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const Float8 code(value[turn][k] * inverse);
        numbers.data[k] = from_float<T>(to_float(code) * step);
        codes.data[kWidth == 8 ? packed_column(k, 8) : k] = code.__x;
      }
      if (p.codes != nullptr) store(p.codes + start + i, codes);
      else store(static_cast<T*>(p.y) + start + i, numbers);
    }
  }
}

template <typename T, int kWidth, NormKind kOf>
cudaError_t norm_of_width(const NormParams& p, cudaStream_t stream) {
  constexpr int kWarps = 4;
  if (p.hidden <= 1024)
    return launch(norm_kernel<T, 32, kWidth, 32 / kWidth, kOf>, ceil_div(p.rows, kWarps),
                  32 * kWarps, 0, stream, p);
  if (p.hidden <= 256 * 16)
    return launch(norm_kernel<T, 256, kWidth, 16 / kWidth, kOf>, p.rows, 256, 0, stream, p);
  if (p.hidden <= 512 * 16)
    return launch(norm_kernel<T, 512, kWidth, 16 / kWidth, kOf>, p.rows, 512, 0, stream, p);
  if (p.hidden <= 512 * 32)
    return launch(norm_kernel<T, 512, kWidth, 32 / kWidth, kOf>, p.rows, 512, 0, stream, p);
  if (p.hidden <= kMaxNormHidden)
    return launch(norm_kernel<T, 512, kWidth, kMaxNormHidden / 512 / kWidth, kOf>, p.rows, 512, 0,
                  stream, p);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t norm(DType dtype, const NormParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto run = [&](auto of) {
      return p.hidden % kVec<T> == 0 && has_aligned_rows<T>(p.gate, p.gate_stride)
                 ? norm_of_width<T, kVec<T>, of.value>(p, stream)
                 : norm_of_width<T, 1, of.value>(p, stream);
    };
    if (p.codes != nullptr && (kVec<T> != 8 || p.hidden % 8 != 0)) return cudaErrorInvalidValue;
    const int group = p.quant_group;
    if (group != 0 &&
        (group < 32 || group > kQuantBlock || (group & (group - 1)) != 0 || p.hidden % group != 0))
      return cudaErrorInvalidValue;
    if (p.gate != nullptr) {
      if (p.rounded) return cudaErrorInvalidValue;
      return run(std::integral_constant<NormKind, NormKind::kGated>());
    }
    return p.rounded ? run(std::integral_constant<NormKind, NormKind::kRounded>())
                     : run(std::integral_constant<NormKind, NormKind::kRows>());
  });
}

}  // namespace llmc::kernels
