// Weight preparation: repacks codes, transposes scales, dequantizes. Bound by memory.
#include "../common/dequantize.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

// One thread per unit of 8 codes (kWords words), in place.
template <int kWords>
__global__ void __launch_bounds__(256) repack_kernel(uint32_t* weight, int64_t units) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (unit >= units) return;
  constexpr int kBit = kWords * 4;
  auto* words = reinterpret_cast<Vec<uint32_t, kWords>*>(weight) + unit;
  const Vec<uint32_t, kWords> natural = *words;
  Vec<uint32_t, kWords> packed{};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int from = i * kBit, to = packed_column(i, 8) * kBit;
    packed.data[to / 32] |= (natural.data[from / 32] >> from % 32 & ((1u << kBit) - 1)) << to % 32;
  }
  *words = packed;
}

__global__ void __launch_bounds__(256)
    transpose_kernel(float* to, const float* from, int rows, int columns) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i < static_cast<int64_t>(rows) * columns) to[i] = from[i % rows * columns + i / rows];
}

// One thread per eight columns. Units that lie in one group take the fast path.
template <typename T, CodeType kCodeType>
__global__ void __launch_bounds__(256)
    dequantize_kernel(T* y, const uint8_t* weight, QuantParams quant, int in) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t row = blockIdx.x;
  const int first = (blockIdx.y * 256 + threadIdx.x) * 8, out = gridDim.x;
  if (first >= in) return;
  if (in % 8 == 0 && quant.group_size % 8 == 0) {
    constexpr int kBit = kBits<kCodeType>;
    const auto words = load<uint32_t, kBit / 4>(
        reinterpret_cast<const uint32_t*>(weight + (row * in + first) / 8 * kBit));
    const int group = first / quant.group_size;
    const int64_t at = static_cast<int64_t>(group) * out + row;
    const float scale = __ldg(quant.scale + at),
                minimum = quant.minimum != nullptr ? __ldg(quant.minimum + at) : 0.f;
    const int zero = load_zero<kCodeType>(quant, row, group, in / quant.group_size);
    float numbers[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int bit = packed_column(i, 8) * kBit;
      const uint32_t code = words.data[bit / 32] >> bit % 32 & ((1u << kBit) - 1);
      numbers[i] = fmaf(decode<kCodeType>(code, zero), scale, minimum);
    }
    if constexpr (sizeof(T) == 4) {
      store_floats(y + row * in + first, reinterpret_cast<const float (&)[4]>(numbers[0]));
      store_floats(y + row * in + first + 4, reinterpret_cast<const float (&)[4]>(numbers[4]));
    } else {
      store_floats(y + row * in + first, numbers);
    }
  } else {
    for (int column = first; column < min(first + 8, in); ++column)
      y[row * in + column] =
          from_float<T>(dequantize_at<kCodeType>(quant, weight, row, column, out, in));
  }
}

}  // namespace

cudaError_t repack(void* weight, CodeType codes, int64_t count, int in, cudaStream_t stream) {
  if (in % 8 != 0) return cudaSuccess;
  const auto blocks = ceil_div(count / 8, 256);
  return codes == CodeType::kInt4 ? launch(repack_kernel<1>, blocks, 256, 0, stream,
                                           static_cast<uint32_t*>(weight), count / 8)
                                  : launch(repack_kernel<2>, blocks, 256, 0, stream,
                                           static_cast<uint32_t*>(weight), count / 8);
}

cudaError_t transpose(float* to, const float* from, int rows, int columns, cudaStream_t stream) {
  return launch(transpose_kernel, ceil_div(static_cast<int64_t>(rows) * columns, 256), 256, 0,
                stream, to, from, rows, columns);
}

cudaError_t dequantize(DType dtype, void* y, const void* weight, const QuantParams& quant, int out,
                       int in, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return dispatch_code_type(quant.code_type, [&](auto codes) {
      return launch(dequantize_kernel<T, codes.value>, dim3(out, ceil_div(in, 2048)), 256, 0,
                    stream, static_cast<T*>(y), static_cast<const uint8_t*>(weight), quant, in);
    });
  });
}

}  // namespace llmc::kernels
