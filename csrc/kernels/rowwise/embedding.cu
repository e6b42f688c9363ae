// Embedding lookup. Bound by memory: reads a table row and perhaps a position row per token, writes
// y.
#include "../common/dequantize.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

__device__ int64_t id_at(const void* ids, int index, bool narrow) {
  return narrow ? static_cast<const int32_t*>(ids)[index] : static_cast<const int64_t*>(ids)[index];
}

// One block per token, kWidth elements per thread and iteration. Reads a table row and perhaps a
// position row, writes hidden elements of y.
template <typename T, int kWidth, CodeType kCodeType>
__global__ void embedding_kernel(EmbeddingParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t row = id_at(p.ids, blockIdx.x, p.narrow_ids) - p.vocab_start;
  const bool mine = row >= 0 && row < p.rows;
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

}  // namespace

cudaError_t embedding(DType dtype, const EmbeddingParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = kVec<T>;
    if (p.quant.code_type != CodeType::kNone)
      return dispatch_code_type(p.quant.code_type, [&](auto codes) {
        return launch(embedding_kernel<T, 1, codes.value>, p.num_tokens, 128, 0, stream, p);
      });
    if (p.hidden % kWidth == 0)
      return launch(embedding_kernel<T, kWidth, CodeType::kNone>, p.num_tokens, 128, 0, stream, p);
    return launch(embedding_kernel<T, 1, CodeType::kNone>, p.num_tokens, 128, 0, stream, p);
  });
}

}  // namespace llmc::kernels
