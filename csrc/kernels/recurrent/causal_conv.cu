// Depthwise causal convolution. A thread has kWidth adjacent channels and iterates over tokens,
// with the last kTaps values in registers. Reads each input once per run of kRun tokens, plus the
// overlap; writes y and the states.
#include "../common/device.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kThreads = 128, kRun = 16;  // tokens of a thread

__device__ __forceinline__ int state_row(const CausalConvParams& p, int sequence) {
  return p.state_slots != nullptr ? p.state_slots[sequence] : sequence;
}

__device__ __forceinline__ int sequence_of_token(const CausalConvParams& p, int token) {
  int low = 0, high = p.batch - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.cu_seqlens[middle] <= token) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Filter coefficients of a channel, that of the current token last. Those beyond kernel_size
// are zero and come first.
template <typename T, int kTaps, int kWidth>
struct FilterTaps {
  float factor[kWidth][kTaps], bias[kWidth];

  __device__ FilterTaps(const CausalConvParams& p, int channel) {
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      const T* own =
          static_cast<const T*>(p.weight) + static_cast<int64_t>(channel + w) * p.kernel_size;
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        const int tap = k - (kTaps - p.kernel_size);
        factor[w][k] = tap >= 0 ? to_float(own[tap]) : 0.f;
      }
      bias[w] = p.bias != nullptr ? to_float(static_cast<const T*>(p.bias)[channel + w]) : 0.f;
    }
  }

  // y of a token; `window` has its value and those of the tokens before it.
  __device__ void apply(const CausalConvParams& p, const float (&window)[kTaps][kWidth],
                        int64_t token, int channel) const {
    Vec<T, kWidth> out;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      float sum = 0;
#pragma unroll
      for (int k = 0; k < kTaps; ++k) sum = fmaf(factor[w][k], window[k][w], sum);
      out.data[w] = from_float<T>(device::activate(sum + bias[w], p.activation));
    }
    store(static_cast<T*>(p.y) + token * p.channels + channel, out);
  }
};

template <typename T, int kWidth>
__device__ __forceinline__ void read(float (&into)[kWidth], const T* from) {
  const auto vector = load<T, kWidth>(from);
#pragma unroll
  for (int w = 0; w < kWidth; ++w) into[w] = to_float(vector.data[w]);
}

template <int kWidth>
__device__ __forceinline__ void clear(float (&numbers)[kWidth]) {
#pragma unroll
  for (int w = 0; w < kWidth; ++w) numbers[w] = 0;
}

// y of kRun tokens, of any sequences. Reads states; conv_state_kernel writes them afterwards.
template <typename T, int kTaps, int kWidth>
__global__ void __launch_bounds__(kThreads) conv_kernel(CausalConvParams p) {
  const int channel = (blockIdx.x * kThreads + threadIdx.x) * kWidth;
  pdl_wait();
  pdl_launch_dependents();
  if (channel >= p.channels) return;
  const FilterTaps<T, kTaps, kWidth> taps(p, channel);
  const int first = blockIdx.y * kRun, end = min(first + kRun, p.num_tokens),
            kept = p.kernel_size - 1;
  const T* hidden = static_cast<const T*>(p.hidden) + channel;
  float window[kTaps][kWidth];
  int sequence = sequence_of_token(p, first);
  // The values before token `offset` of the sequence.
  auto begin = [&](int token, int offset) {
    const float* state =
        p.state + static_cast<int64_t>(state_row(p, sequence)) * kept * p.channels + channel;
    const bool has_state = p.past_lens[sequence] > 0;
#pragma unroll
    for (int back = 1; back < kTaps; ++back) {
      float (&into)[kWidth] = window[kTaps - 1 - back];
      clear(into);
      if (back > kept) continue;
      if (offset >= back) read(into, hidden + (token - back) * p.pitch);
      else if (has_state)
        read(into, state + static_cast<int64_t>(kept + offset - back) * p.channels);
    }
  };
  begin(first, first - p.cu_seqlens[sequence]);
  for (int token = first; token < end; ++token) {
    if (token == p.cu_seqlens[sequence + 1]) {
      while (p.cu_seqlens[sequence + 1] == token) ++sequence;  // some sequences may have no token
      begin(token, 0);
    }
    read(window[kTaps - 1], hidden + token * p.pitch);
    taps.apply(p, window, token, channel);
#pragma unroll
    for (int k = 0; k + 1 < kTaps; ++k)
#pragma unroll
      for (int w = 0; w < kWidth; ++w) window[k][w] = window[k + 1][w];
  }
}

// One channel group of a sequence: its place in `hidden` and in the states.
template <typename T, int kTaps, int kWidth>
struct SequenceChannels {
  int first, count, commit, kept, channels;
  bool has_state;
  const T* hidden;  // of the first new token
  float* state;

  __device__ SequenceChannels(const CausalConvParams& p, int sequence, int channel)
      : first(p.cu_seqlens[sequence]),
        count(p.cu_seqlens[sequence + 1] - first),
        commit(p.commit_lens != nullptr ? p.commit_lens[sequence] : count),
        kept(p.kernel_size - 1),
        channels(p.channels),
        has_state(p.past_lens[sequence] > 0),
        hidden(static_cast<const T*>(p.hidden) + first * p.pitch + channel),
        state(p.state + static_cast<int64_t>(state_row(p, sequence)) * kept * p.channels +
              channel) {}

  // Row of the state for window[k]; negative: none.
  __device__ int place(int k) const { return k - (kTaps - 1 - kept); }
  __device__ void read_state(float (&into)[kWidth], int row) const {
    if (has_state) read(into, state + static_cast<int64_t>(row) * channels);
    else clear(into);
  }
  __device__ void store_state(const float (&window)[kTaps][kWidth]) const {
#pragma unroll
    for (int k = 0; k + 1 < kTaps; ++k) {
      if (place(k) < 0) continue;
      Vec<float, kWidth> out;
#pragma unroll
      for (int w = 0; w < kWidth; ++w) out.data[w] = window[k][w];
      store(state + static_cast<int64_t>(place(k)) * channels, out);
    }
  }
};

// The new state of a sequence: the last tokens to commit, some possibly from the old state.
template <typename T, int kTaps, int kWidth>
__global__ void __launch_bounds__(kThreads) conv_state_kernel(CausalConvParams p) {
  const int channel = (blockIdx.x * kThreads + threadIdx.x) * kWidth;
  pdl_wait();
  pdl_launch_dependents();
  if (channel >= p.channels) return;
  const SequenceChannels<T, kTaps, kWidth> own(p, blockIdx.y, channel);
  if (own.commit == 0 && own.has_state) return;
  float window[kTaps][kWidth];
#pragma unroll
  for (int k = 0; k + 1 < kTaps; ++k) {
    clear(window[k]);
    if (own.place(k) < 0) continue;
    const int offset = own.commit - own.kept + own.place(k);  // of the sequence's new tokens
    if (offset >= 0) read(window[k], own.hidden + offset * p.pitch);
    else own.read_state(window[k], own.kept + offset);
  }
  own.store_state(window);
}

// y of a sequence's tokens, and its new state, for few tokens.
template <typename T, int kTaps, int kWidth>
__global__ void __launch_bounds__(kThreads) conv_few_kernel(CausalConvParams p) {
  const int channel = (blockIdx.x * kThreads + threadIdx.x) * kWidth;
  pdl_wait();
  pdl_launch_dependents();
  if (channel >= p.channels) return;
  const SequenceChannels<T, kTaps, kWidth> own(p, blockIdx.y, channel);
  if (own.count == 0 && own.has_state) return;
  const FilterTaps<T, kTaps, kWidth> taps(p, channel);
  float window[kTaps][kWidth];  // the last `kept` values, and the newest
#pragma unroll
  for (int k = 0; k + 1 < kTaps; ++k) {
    if (own.place(k) < 0) clear(window[k]);
    else own.read_state(window[k], own.place(k));
  }
  if (own.commit == 0) own.store_state(window);
  for (int token = 0; token < own.count; ++token) {
    read(window[kTaps - 1], own.hidden + token * p.pitch);
    taps.apply(p, window, own.first + token, channel);
#pragma unroll
    for (int k = 0; k + 1 < kTaps; ++k)
#pragma unroll
      for (int w = 0; w < kWidth; ++w) window[k][w] = window[k + 1][w];
    if (token + 1 == own.commit) own.store_state(window);
  }
}

template <typename T, int kTaps, int kWidth>
cudaError_t run(const CausalConvParams& p, cudaStream_t stream) {
  const unsigned across = ceil_div(p.channels, kThreads * kWidth);
  if (p.few)
    return launch(conv_few_kernel<T, kTaps, kWidth>, dim3(across, p.batch), kThreads, 0, stream, p);
  const cudaError_t status =
      launch(conv_kernel<T, kTaps, kWidth>, dim3(across, ceil_div(p.num_tokens, kRun)), kThreads, 0,
             stream, p);
  if (status != cudaSuccess) return status;
  return launch(conv_state_kernel<T, kTaps, kWidth>, dim3(across, p.batch), kThreads, 0, stream, p);
}

}  // namespace

cudaError_t causal_conv(DType dtype, const CausalConvParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto of_taps = [&](auto taps) {
      const bool pairs = p.channels % 2 == 0 && has_aligned_rows<T, 2>(p.hidden, p.pitch);
      return pairs ? run<T, taps.value, 2>(p, stream) : run<T, taps.value, 1>(p, stream);
    };
    if (p.kernel_size <= 4) return of_taps(std::integral_constant<int, 4>());
    if (p.kernel_size <= kMaxConvKernel)
      return of_taps(std::integral_constant<int, kMaxConvKernel>());
    return cudaErrorInvalidValue;
  });
}

}  // namespace llmc::kernels
