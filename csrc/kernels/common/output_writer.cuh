// Output of activations in T, or quantized to FP8.
#pragma once

#include "dequantize.cuh"

namespace llmc::device {

// Writes rows of T to `data`. With an `inverse`, the reciprocal of a static scale, it writes FP8
// codes in the column order of a repacked weight (packed_column()) instead; rows of codes consist
// of whole units of 8.
template <typename T>
class OutputWriter {
 public:
  __device__ OutputWriter(void* data, float inverse) : data_(data), inverse_(inverse) {}

  // Writes N values from element `at` on, a multiple of N.
  template <int N>
  __device__ __forceinline__ void write(int64_t at, const float (&x)[N]) const {
    if (inverse_ == 0) return store_floats(static_cast<T*>(data_) + at, x);
    uint8_t codes[N];
#pragma unroll
    for (int k = 0; k < N; ++k) codes[k] = Float8(x[k] * inverse_).__x;
    auto* const unit = static_cast<uint8_t*>(data_) + at / 8 * 8;
    const int first = static_cast<int>(at % 8);
    if constexpr (N == 8) {
      Vec<uint8_t, 8> all;
#pragma unroll
      for (int k = 0; k < 8; ++k) all.data[packed_column(k, 8)] = codes[k];
      store(unit, all);
    } else if constexpr (N == 4) {
      store(unit + first / 2, Vec<uint8_t, 2>{{codes[0], codes[2]}});
      store(unit + first / 2 + 4, Vec<uint8_t, 2>{{codes[1], codes[3]}});
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) unit[packed_column(first + k, 8)] = codes[k];
    }
  }
  __device__ __forceinline__ void write(int64_t at, float x) const { write<1>(at, {x}); }

 private:
  void* data_;
  float inverse_;
};

}  // namespace llmc::device
