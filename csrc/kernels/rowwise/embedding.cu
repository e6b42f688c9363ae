// Embedding lookup. Bound by memory: reads a table row and perhaps a position row per token, writes
// y. With adapters it also reads a token's column of `down`, and the slot's `up`, which the L2
// cache has for tokens of one adapter.
#include "../common/dequantize.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

__device__ int64_t id_at(const void* ids, int index, bool narrow) {
  return narrow ? static_cast<const int32_t*>(ids)[index] : static_cast<const int64_t*>(ids)[index];
}

constexpr int kThreads = 128;

// Copies the used part of a token's column of `down` to shared memory; returns the rank of its
// adapter, 0 for none.
template <typename T>
__device__ int load_hidden(const EmbeddingParams& p, int64_t row, bool mine, float* hidden) {
  const int slot = p.lora_ids[blockIdx.x];
  const int used = slot < 0 || !mine ? 0 : p.ranks[slot];
  const T* down = static_cast<const T*>(p.down) + static_cast<int64_t>(slot) * p.rank * p.rows;
  for (int r = threadIdx.x; r < used; r += kThreads) hidden[r] = to_float(down[r * p.rows + row]);
  __syncthreads();
  return used;
}

// One block per token, kWidth elements per thread and iteration. Reads a table row and perhaps a
// position row, writes hidden elements of y. kLora: p.rank floats of shared memory.
template <typename T, int kWidth, CodeType kCodeType, bool kLora>
__global__ void __launch_bounds__(kThreads) embedding_kernel(EmbeddingParams p) {
  extern __shared__ float hidden[];
  pdl_wait();
  pdl_launch_dependents();
  const int64_t row = id_at(p.ids, blockIdx.x, p.narrow_ids) - p.vocab_start;
  const bool mine = row >= 0 && row < p.rows;
  int used = 0;
  const T* up = nullptr;
  if constexpr (kLora) {
    used = load_hidden<T>(p, row, mine, hidden);
    if (used > 0)
      up = static_cast<const T*>(p.up) +
           static_cast<int64_t>(p.lora_ids[blockIdx.x]) * p.hidden * p.rank;
  }
  auto read = [&](int i) {
    if constexpr (kCodeType == CodeType::kNone) {
      return load<T, kWidth>(static_cast<const T*>(p.table) + (mine ? row : 0) * p.hidden + i);
    } else {
      Vec<float, kWidth> numbers;
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        numbers.data[k] = dequantize_at<kCodeType>(p.quant, static_cast<const uint8_t*>(p.table),
                                                   mine ? row : 0, i + k, p.rows, p.hidden);
      return numbers;
    }
  };
  const int64_t packed_column =
      p.positions == nullptr ? -1 : id_at(p.position_ids, blockIdx.x, p.narrow_ids);
  const T* position = packed_column < 0 || packed_column >= p.position_rows
                          ? nullptr
                          : static_cast<const T*>(p.positions) + packed_column * p.hidden;
  T* y = static_cast<T*>(p.y) + static_cast<int64_t>(blockIdx.x) * p.hidden;
  for (int i = threadIdx.x * kWidth; i < p.hidden; i += kThreads * kWidth) {
    const auto word = read(i);
    Vec<T, kWidth> place, out;
    if (position != nullptr) place = load<T, kWidth>(position + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      float value = mine ? to_float(word.data[k]) : 0.f;
      if constexpr (kLora) {
        for (int r = 0; r < used; r += 8) {
          const auto weights = load<T, 8>(up + static_cast<int64_t>(i + k) * p.rank + r);
#pragma unroll
          for (int j = 0; j < 8; ++j) value = fmaf(to_float(weights.data[j]), hidden[r + j], value);
        }
      }
      value *= p.scale;
      if (position != nullptr) value += to_float(place.data[k]);
      out.data[k] = from_float<T>(value);
    }
    store(y + i, out);
  }
}

template <typename T, int kWidth, CodeType kCodeType>
cudaError_t launch_embedding(const EmbeddingParams& p, cudaStream_t stream) {
  if (p.down == nullptr)
    return launch(embedding_kernel<T, kWidth, kCodeType, false>, p.num_tokens, kThreads, 0, stream,
                  p);
  return launch(embedding_kernel<T, kWidth, kCodeType, true>, p.num_tokens, kThreads,
                p.rank * sizeof(float), stream, p);
}

}  // namespace

cudaError_t embedding(DType dtype, const EmbeddingParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = kVec<T>;
    if (p.quant.code_type != CodeType::kNone)
      return dispatch_code_type(p.quant.code_type, [&](auto codes) {
        return launch_embedding<T, 1, codes.value>(p, stream);
      });
    if (p.hidden % kWidth == 0) return launch_embedding<T, kWidth, CodeType::kNone>(p, stream);
    return launch_embedding<T, 1, CodeType::kNone>(p, stream);
  });
}

}  // namespace llmc::kernels
