// Kernels that work on rows or elements alone. All are bound by memory: each reads its inputs once.
#include <algorithm>

#include "made.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

__device__ int64_t id_at(const void* ids, int index, bool narrow) {
  return narrow ? static_cast<const int32_t*>(ids)[index] : static_cast<const int64_t*>(ids)[index];
}

// A block per token, kWidth elements per thread and turn. Reads a table row and perhaps a position row.
template <typename T, int kWidth, Codes kCodes>
__global__ void embedding_kernel(EmbeddingParams p) {
  wait_for_inputs();
  let_next_start();
  const int64_t row = id_at(p.ids, blockIdx.x, p.narrow_ids) - p.vocab_start;
  const bool mine = row >= 0 && row < p.rows;
  auto read = [&](int i) {
    if constexpr (kCodes == Codes::kNone) {
      return load<T, kWidth>(static_cast<const T*>(p.table) + (mine ? row : 0) * p.hidden + i);
    } else {
      Vec<float, kWidth> numbers;
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        numbers.data[k] = number_at<kCodes>(p.packing, static_cast<const uint8_t*>(p.table), mine ? row : 0, i + k, p.rows, p.hidden);
      return numbers;
    }
  };
  const int64_t place_of = p.positions == nullptr ? -1 : id_at(p.position_ids, blockIdx.x, p.narrow_ids);
  const T* position = place_of < 0 || place_of >= p.position_rows
      ? nullptr
      : static_cast<const T*>(p.positions) + place_of * p.hidden;
  T* y = static_cast<T*>(p.y) + static_cast<int64_t>(blockIdx.x) * p.hidden;
  for (int i = threadIdx.x * kWidth; i < p.hidden; i += blockDim.x * kWidth) {
    const auto word = read(i);
    Vec<T, kWidth> place, out;
    if (position != nullptr) place = load<T, kWidth>(position + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      float value = mine ? to_float(word.data[k]) * p.scale : 0.f;
      if (position != nullptr) value += to_float(place.data[k]);
      out.data[k] = from_float<T>(value);
    }
    store(y + i, out);
  }
}

enum class NormOf { kRows, kRounded, kGated };

// A gate's element; of the activations that a norm's has, without a branch.
__device__ __forceinline__ float gate_of(float x, Activation activation) {
  const float sigmoid = 1.f / (1.f + __expf(-x));
  return activation == Activation::kNone ? x : activation == Activation::kSilu ? x * sigmoid : sigmoid;
}

// One row per group of kThreads threads, kept in registers between the passes: kTurns vectors of kWidth
// elements per thread. kThreads 32 puts one row on each warp of the block. Rounding takes no pass over memory.
template <typename T, int kThreads, int kWidth, int kTurns, NormOf kOf>
__global__ void __launch_bounds__(kThreads < 128 ? 128 : kThreads) norm_kernel(NormParams p) {
  constexpr bool kRounded = kOf == NormOf::kRounded, kGated = kOf == NormOf::kGated;
  __shared__ float partial[kThreads / 32];
  __shared__ float2 pairs[kThreads / 32];
  const int rows_per_block = blockDim.x / kThreads;
  const int row = blockIdx.x * rows_per_block + threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  if (row >= p.rows) return;  // whole warps only, and never with a barrier ahead
  const int64_t start = static_cast<int64_t>(row) * p.hidden;
  const T* x = static_cast<const T*>(p.x) + start;
  const float* weight = p.groups > 1 ? p.weight + row % p.groups * p.hidden : p.weight;
  const T* gate = nullptr;
  if constexpr (kGated)
    gate = static_cast<const T*>(p.gate) + row / p.groups * p.gate_pitch + static_cast<int64_t>(row % p.groups) * p.hidden;
  float value[kTurns][kWidth];
  Vec<T, kWidth> gates[kGated ? kTurns : 1];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int i = (turn * kThreads + thread) * kWidth;
    if (i < p.hidden && weight != nullptr) bring(weight + i);
    if (i < p.hidden && p.bias != nullptr) bring(p.bias + i);
  }
  wait_for_inputs();
  let_next_start();
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
        for (int k = 0; k < kWidth; ++k) value[turn][k] *= gate_of(to_float(gates[turn].data[k]), p.gate_activation);
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
    // The largest of a row comes with its squares, unless a bias is added to what these scale.
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
      const float biased = change(p.bias, [scale](float x, float bias) { return fmaf(x, scale, bias); });
      measured = block_sum_and_max<kThreads>(0, biased, pairs);
      scale = 1;
    }
    auto step_of = [&](float most) { return step_of_codes(most * scale); };
    float step = p.fixed_scale > 0 ? p.fixed_scale : step_of(measured.y), inverse = scale / step;
    if (p.scale != nullptr && p.rounded_group == 0 && thread == 0) p.scale[row] = step;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int i = (turn * kThreads + thread) * kWidth;
      if (p.rounded_group > 0) {  // the work of threads side by side
        float most = 0;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) most = fmaxf(most, fabsf(value[turn][k]));
        for (int mask = 1; mask < p.rounded_group / kWidth; mask *= 2)
          most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
        step = step_of(most), inverse = scale / step;
        if (p.scale != nullptr && i < p.hidden && i % p.rounded_group == 0)
          p.scale[i / p.rounded_group * scale_pitch(p.rows) + row] = step;
      }
      if (i >= p.hidden) continue;
      Vec<T, kWidth> numbers;
      Vec<uint8_t, kWidth> codes;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const Float8 code(value[turn][k] * inverse);
        numbers.data[k] = from_float<T>(to_float(code) * step);
        codes.data[kWidth == 8 ? place_of(k, 8) : k] = code.__x;
      }
      if (p.codes != nullptr) store(p.codes + start + i, codes);
      else store(static_cast<T*>(p.y) + start + i, numbers);
    }
  }
}

template <typename T, int kWidth, NormOf kOf>
cudaError_t norm_of_width(const NormParams& p, cudaStream_t stream) {
  constexpr int kWarps = 4;
  if (p.hidden <= 1024)
    return launch(norm_kernel<T, 32, kWidth, 32 / kWidth, kOf>, blocks_for(p.rows, kWarps), 32 * kWarps, 0, stream, p);
  if (p.hidden <= 256 * 16)
    return launch(norm_kernel<T, 256, kWidth, 16 / kWidth, kOf>, p.rows, 256, 0, stream, p);
  if (p.hidden <= 512 * 16)
    return launch(norm_kernel<T, 512, kWidth, 16 / kWidth, kOf>, p.rows, 512, 0, stream, p);
  if (p.hidden <= 512 * 32)
    return launch(norm_kernel<T, 512, kWidth, 32 / kWidth, kOf>, p.rows, 512, 0, stream, p);
  if (p.hidden <= kNormHidden)
    return launch(norm_kernel<T, 512, kWidth, kNormHidden / 512 / kWidth, kOf>, p.rows, 512, 0, stream, p);
  return cudaErrorInvalidValue;
}

template <typename T, int kWidth>
__global__ void gate_kernel(GateParams p) {
  wait_for_inputs();
  let_next_start();
  const int64_t row = blockIdx.y;
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
  if (i >= p.width) return;
  const auto gates = load<T, kWidth>(static_cast<const T*>(p.gate) + row * p.gate_pitch + i);
  const auto x = load<T, kWidth>(static_cast<const T*>(p.x) + row * p.x_pitch + i);
  float out[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) out[k] = device::activate(to_float(gates.data[k]), p.activation) * to_float(x.data[k]);
  Made<T>(p.y, p.y_inverse).put(row * p.width + i, out);
}

// Four columns a thread, a row of blocks for each row.
template <typename T>
__global__ void __launch_bounds__(128) rescale_kernel(RescaleParams p) {
  constexpr int kWidth = 4;
  wait_for_inputs();
  let_next_start();
  const int i = (blockIdx.x * 128 + threadIdx.x) * kWidth;
  if (i >= p.out) return;
  const int64_t row = blockIdx.y;
  const int width = p.gated ? 2 * p.out : p.out;
  const float x_scale = p.x_scale[row];
  auto scaled = [&](int first) {
    auto numbers = load<float, kWidth>(p.sums + row * width + first);
    const auto weight_scale = load<float, kWidth>(p.weight_scale + first);
    Vec<T, kWidth> bias;
    if (p.bias != nullptr) bias = load<T, kWidth>(static_cast<const T*>(p.bias) + first);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      numbers.data[k] *= x_scale * weight_scale.data[k];
      if (p.bias != nullptr) numbers.data[k] += to_float(bias.data[k]);
    }
    return numbers;
  };
  const auto value = scaled(i);
  Vec<float, kWidth> up;
  if (p.gated) up = scaled(p.out + i);
  Vec<T, kWidth> residual;
  float out[kWidth];
  if (p.residual != nullptr) residual = load<T, kWidth>(static_cast<const T*>(p.residual) + row * p.out + i);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    out[k] = device::activate(value.data[k], p.activation);
    if (p.gated) out[k] *= up.data[k];
    if (p.residual != nullptr) out[k] += to_float(residual.data[k]);
  }
  Made<T>(p.y, p.y_inverse).put(row * p.out + i, out);
}

template <typename T>
__global__ void activate_kernel(T* x, int64_t count, Activation activation) {
  wait_for_inputs();
  let_next_start();
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    x[i] = from_float<T>(device::activate(to_float(x[i]), activation));
}

// kWidth elements a thread and turn, of one row.
template <typename T, int kWidth>
__global__ void __launch_bounds__(256) elementwise_kernel(Elementwise op, T* y, Operands operands, int64_t count, int width) {
  wait_for_inputs();
  let_next_start();
  for (int64_t i = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) * kWidth; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x * kWidth) {
    float x[3][kWidth] = {};
#pragma unroll
    for (int which = 0; which < 3; ++which) {
      const void* from = operands.data[which];
      const Operand is = operands.is[which];
      if (from == nullptr) continue;
      if (is == Operand::kRow) {
        const auto own = load<float, kWidth>(static_cast<const float*>(from) + i % width);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[which][k] = own.data[k];
      } else if (is == Operand::kWhole) {
        const auto own = load<T, kWidth>(static_cast<const T*>(from) + i);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[which][k] = to_float(own.data[k]);
      } else {
        const float own = is == Operand::kNumber ? *static_cast<const float*>(from)
                                                 : to_float(static_cast<const T*>(from)[i / width]);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[which][k] = own;
      }
    }
    Vec<T, kWidth> out;
    auto each = [&](auto&& f) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) out.data[k] = from_float<T>(f(x[0][k], x[1][k], x[2][k]));
    };
    switch (op) {
      case Elementwise::kAdd: each([](float a, float b, float) { return a + b; }); break;
      case Elementwise::kSub: each([](float a, float b, float) { return a - b; }); break;
      case Elementwise::kMul: each([](float a, float b, float) { return a * b; }); break;
      case Elementwise::kDiv: each([](float a, float b, float) { return a / b; }); break;
      case Elementwise::kMin: each([](float a, float b, float) { return fminf(a, b); }); break;
      case Elementwise::kMax: each([](float a, float b, float) { return fmaxf(a, b); }); break;
      case Elementwise::kTanh: each([](float a, float, float) { return tanhf(a); }); break;
      case Elementwise::kExp: each([](float a, float, float) { return expf(a); }); break;
      case Elementwise::kSigmoid: each([](float a, float, float) { return 1.f / (1.f + expf(-a)); }); break;
      case Elementwise::kNeg: each([](float a, float, float) { return -a; }); break;
      case Elementwise::kSoftplus: each([](float a, float, float) { return device::softplus(a); }); break;
      case Elementwise::kElu: each([](float a, float, float) { return a > 0 ? a : expm1f(a); }); break;
      case Elementwise::kGreater: each([](float a, float b, float) { return a > b ? 1.f : 0.f; }); break;
      case Elementwise::kLess: each([](float a, float b, float) { return a < b ? 1.f : 0.f; }); break;
      case Elementwise::kWhere: each([](float a, float b, float c) { return a != 0 ? b : c; }); break;
      case Elementwise::kGelu: each([](float a, float, float) { return device::activate(a, Activation::kGelu); }); break;
      case Elementwise::kGeluTanh: each([](float a, float, float) { return device::activate(a, Activation::kGeluTanh); }); break;
    }
    store(y + i, out);
  }
}

template <typename T>
__global__ void gather_rows_kernel(T* y, const T* x, const int64_t* rows, int64_t x_rows, int width) {
  wait_for_inputs();
  let_next_start();
  const int64_t row = rows[blockIdx.x];
  const bool there = row >= 0 && row < x_rows;
  const T* source = x + (there ? row : 0) * width;
  T* target = y + static_cast<int64_t>(blockIdx.x) * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) target[i] = there ? source[i] : from_float<T>(0.f);
}

// A block per row and 128 columns of it.
template <typename T>
__global__ void gather_columns_kernel(T* y, const T* x, const int32_t* index, int x_width, int width) {
  wait_for_inputs();
  let_next_start();
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= width) return;
  const int column = index[i];
  const bool there = column >= 0 && column < x_width;
  y[static_cast<int64_t>(blockIdx.x) * width + i] =
      there ? x[static_cast<int64_t>(blockIdx.x) * x_width + column] : from_float<T>(0.f);
}

template <typename T>
__global__ void interleave_kernel(T* y, const T* x, int width) {
  wait_for_inputs();
  let_next_start();
  const int64_t parts = gridDim.y, rows = gridDim.x;
  const T* source = x + (blockIdx.y * rows + blockIdx.x) * width;
  T* target = y + (blockIdx.x * parts + blockIdx.y) * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) target[i] = source[i];
}

// A block per row. Widths in vectors.
template <typename V>
__global__ void __launch_bounds__(256) join_kernel(JoinParams p) {
  wait_for_inputs();
  let_next_start();
  int64_t width = 0, at = 0;
  for (int part : p.widths) width += part;
#pragma unroll
  for (int part = 0; part < kJoined; ++part) {
    const V* from = static_cast<const V*>(p.x[part]) + static_cast<int64_t>(blockIdx.x) * p.widths[part];
    V* to = static_cast<V*>(p.y) + blockIdx.x * width + at;
    for (int i = threadIdx.x; i < p.widths[part]; i += blockDim.x) to[i] = from[i];
    at += p.widths[part];
  }
}

// A row of blocks per array.
__global__ void narrow_kernel(NarrowParams p) {
  wait_for_inputs();
  let_next_start();
  const int array = blockIdx.y;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count[array]; i += gridDim.x * blockDim.x)
    p.y[array][i] = static_cast<int32_t>(p.x[array][i]);
}

}  // namespace

cudaError_t embedding(DType dtype, const EmbeddingParams& p, cudaStream_t stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = kVec<T>;
    if (p.packing.codes != Codes::kNone)
      return with_codes(p.packing.codes, [&](auto codes) {
        return launch(embedding_kernel<T, 1, codes.value>, p.num_tokens, 128, 0, stream, p);
      });
    if (p.hidden % kWidth == 0)
      return launch(embedding_kernel<T, kWidth, Codes::kNone>, p.num_tokens, 128, 0, stream, p);
    return launch(embedding_kernel<T, 1, Codes::kNone>, p.num_tokens, 128, 0, stream, p);
  });
}

cudaError_t norm(DType dtype, const NormParams& p, cudaStream_t stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto run = [&](auto of) {
      return p.hidden % kVec<T> == 0 && lies_in_vectors<T>(p.gate, p.gate_pitch)
          ? norm_of_width<T, kVec<T>, of.value>(p, stream)
          : norm_of_width<T, 1, of.value>(p, stream);
    };
    if (p.codes != nullptr && (kVec<T> != 8 || p.hidden % 8 != 0)) return cudaErrorInvalidValue;
    const int group = p.rounded_group;
    if (group != 0 && (group < 32 || group > kBlock || (group & (group - 1)) != 0 || p.hidden % group != 0))
      return cudaErrorInvalidValue;
    if (p.gate != nullptr) {
      if (p.rounded) return cudaErrorInvalidValue;
      return run(std::integral_constant<NormOf, NormOf::kGated>());
    }
    return p.rounded ? run(std::integral_constant<NormOf, NormOf::kRounded>())
                     : run(std::integral_constant<NormOf, NormOf::kRows>());
  });
}

cudaError_t gate(DType dtype, const GateParams& p, cudaStream_t stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto run = [&](auto kernel, int per_thread) {
      return launch(kernel, dim3(blocks_for(p.width, 128 * per_thread), p.rows), 128, 0, stream, p);
    };
    const bool vectors = p.width % kVec<T> == 0 && lies_in_vectors<T>(p.x, p.x_pitch) && lies_in_vectors<T>(p.gate, p.gate_pitch);
    return vectors ? run(gate_kernel<T, kVec<T>>, kVec<T>) : run(gate_kernel<T, 1>, 1);
  });
}

cudaError_t rescale(DType dtype, const RescaleParams& p, cudaStream_t stream) {
  if (p.out % 4 != 0) return cudaErrorInvalidValue;
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(rescale_kernel<T>, dim3(blocks_for(p.out, 512), p.rows), 128, 0, stream, p);
  });
}

cudaError_t activate(DType dtype, void* x, int64_t count, Activation activation, cudaStream_t stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(activate_kernel<T>, min(blocks_for(count, 256), 4096u), 256, 0, stream,
                  static_cast<T*>(x), count, activation);
  });
}

cudaError_t elementwise(DType dtype, Elementwise op, void* y, const Operands& operands, int64_t count, int width,
                        cudaStream_t stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    bool whole = width % kVec<T> == 0 && lies_at(y, sizeof(Vec<T, kVec<T>>));
    for (int i = 0; i < 3; ++i) {
      const bool row = operands.is[i] == Operand::kRow;
      if (row || operands.is[i] == Operand::kWhole)
        whole = whole && lies_at(operands.data[i], (row ? sizeof(float) : sizeof(T)) * kVec<T>);
    }
    const auto run = [&](auto kernel, int each) {
      return launch(kernel, min(blocks_for(count / each, 256), 4096u), 256, 0, stream, op, static_cast<T*>(y), operands, count,
                    width);
    };
    return whole ? run(elementwise_kernel<T, kVec<T>>, kVec<T>) : run(elementwise_kernel<T, 1>, 1);
  });
}

cudaError_t gather_rows(DType dtype, void* y, const void* x, const int64_t* rows, int count, int64_t x_rows, int width,
                        cudaStream_t stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(gather_rows_kernel<T>, count, 128, 0, stream, static_cast<T*>(y),
                  static_cast<const T*>(x), rows, x_rows, width);
  });
}

cudaError_t gather_columns(DType dtype, void* y, const void* x, const int32_t* index, int rows, int x_width, int width,
                           cudaStream_t stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(gather_columns_kernel<T>, dim3(rows, blocks_for(width, 128)), 128, 0, stream, static_cast<T*>(y),
                  static_cast<const T*>(x), index, x_width, width);
  });
}

cudaError_t join(DType dtype, const JoinParams& given, cudaStream_t stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    JoinParams p = given;
    if (std::any_of(p.widths, p.widths + kJoined, [](int width) { return width % kVec<T> != 0; }))
      return launch(join_kernel<T>, p.rows, 256, 0, stream, p);
    for (int& width : p.widths) width /= kVec<T>;
    return launch(join_kernel<uint4>, p.rows, 256, 0, stream, p);
  });
}

cudaError_t interleave(DType dtype, void* y, const void* x, int parts, int rows, int width,
                       cudaStream_t stream) {
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(interleave_kernel<T>, dim3(rows, parts), 128, 0, stream, static_cast<T*>(y),
                  static_cast<const T*>(x), width);
  });
}

cudaError_t narrow(const NarrowParams& p, cudaStream_t stream) {
  int most = 1;
  for (int count : p.count) most = max(most, count);
  return launch(narrow_kernel, dim3(min(blocks_for(most, 256), 64u), kNarrowed), 256, 0, stream, p);
}

}  // namespace llmc::kernels
