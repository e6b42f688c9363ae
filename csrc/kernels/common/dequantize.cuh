// Dequantization of 4-bit and 8-bit codes to 16-bit types; quantization to FP8. See
// csrc/plugins/quantization.py for the layouts.
#pragma once

#include "mma.cuh"
#include "quantization.h"

namespace llmc::device {

using kernels::CodeType;
using kernels::QuantParams;

// Position of a column's code in a repacked row. Rows of whole units of 8 codes have the even
// columns of each unit first, so that two columns of a register pair are extracted at once.
// repack() permutes to this order.
__host__ __device__ constexpr int packed_column(int column, int in) {
  return in % 8 == 0 ? column / 8 * 8 + column % 8 / 2 + column % 2 * 4 : column;
}

template <CodeType kCodeType>
constexpr int kBits = kCodeType == CodeType::kInt4 || kCodeType == CodeType::kMxfp4 ? 4 : 8;

// (x & mask) | set
__device__ __forceinline__ uint32_t lop3_and_or(uint32_t x, uint32_t mask, uint32_t set) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(x), "r"(mask), "r"(set));
  return y;
}

template <typename T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <typename T>
__device__ __forceinline__ uint32_t hsub2(uint32_t a, uint32_t b) {
  const Pair<T> difference =
      __hsub2(*reinterpret_cast<const Pair<T>*>(&a), *reinterpret_cast<const Pair<T>*>(&b));
  return *reinterpret_cast<const uint32_t*>(&difference);
}
template <typename T>
__device__ __forceinline__ uint32_t hmul2(uint32_t a, uint32_t b) {
  const Pair<T> result =
      __hmul2(*reinterpret_cast<const Pair<T>*>(&a), *reinterpret_cast<const Pair<T>*>(&b));
  return *reinterpret_cast<const uint32_t*>(&result);
}

template <typename T>
__device__ __forceinline__ uint32_t hfma2(uint32_t a, uint32_t b, uint32_t c) {
  const Pair<T> result =
      __hfma2(*reinterpret_cast<const Pair<T>*>(&a), *reinterpret_cast<const Pair<T>*>(&b),
              *reinterpret_cast<const Pair<T>*>(&c));
  return *reinterpret_cast<const uint32_t*>(&result);
}

// The offset of dequantize_unit(). A code is placed in the low mantissa bits of a float so large
// that it counts by one; the offset, that float plus the zero, is subtracted.
template <typename T, CodeType kCodeType>
__device__ __forceinline__ uint32_t dequant_offset(int zero) {
  if constexpr (kCodeType == CodeType::kMxfp4) return 0x7e807e80;  // twice 2^126
  if constexpr (kCodeType == CodeType::kInt8 && std::is_same_v<T, __nv_bfloat16>)
    return __float_as_uint(8388608.f + zero);
  const float base = (std::is_same_v<T, __half> ? 1024.f : 128.f) + zero;
  return pack2<T>(base, base);
}

// Bit position of one bit of code `place` in a unit of 8 MXFP4 codes. The second four codes are 16
// bits further, modulo 32. With this permutation one mask moves all bits of three pairs of codes to
// where bfloat16 has its mantissa, exponent and sign.
__host__ __device__ constexpr int mxfp4_bit(int place, int bit) {
  constexpr int kBitsOf[4][4] = {{6, 7, 8, 15}, {12, 13, 14, 21}, {2, 3, 4, 11}, {0, 1, 10, 9}};
  return (kBitsOf[place % 4][bit] + place / 4 * 16) % 32;
}

// Permutes a unit of MXFP4 nibbles to that bit order, and extracts one code from it.
__host__ __device__ __forceinline__ uint32_t scatter_mxfp4_bits(uint32_t nibbles) {
  uint32_t made = 0;
  for (int i = 0; i < 32; ++i) made |= (nibbles >> i & 1) << mxfp4_bit(i / 4, i % 4);
  return made;
}
__device__ __forceinline__ uint32_t gather_mxfp4_bits(uint32_t word, int place) {
  uint32_t code = 0;
  for (int bit = 0; bit < 4; ++bit) code |= (word >> mxfp4_bit(place, bit) & 1) << bit;
  return code;
}

// Such a unit as pairs of T: the values divided by 2^14 in float16, by 2^126 in bfloat16.
template <typename T>
__device__ __forceinline__ void mxfp4_bits(uint32_t (&pairs)[4], uint32_t word) {
  const uint32_t round = __funnelshift_r(word, word, 6);
  if constexpr (std::is_same_v<T, __half>) {
    constexpr uint32_t kSigns = 0x80008000, kRest = 0x0e000e00;
    pairs[0] = lop3_and_or(word, kSigns, word << 3 & kRest);
    pairs[1] = lop3_and_or(round, kSigns, word >> 3 & kRest);
    pairs[2] = lop3_and_or(word << 4, kSigns, word << 7 & kRest);
    pairs[3] =
        lop3_and_or(word << 6, kSigns, lop3_and_or(word << 1, 0x08000800, word << 9 & 0x06000600));
  } else {
    constexpr uint32_t kAll = 0x81c081c0;
    pairs[0] = word & kAll;
    pairs[1] = round & kAll;
    pairs[2] = word << 4 & kAll;
    pairs[3] = lop3_and_or(word >> 2, 0x01000100, word << 6 & 0x80c080c0);
  }
}

// A unit of 8 codes (4 bits: in the first word) as pairs of T: columns (0, 1), (2, 3), (4, 5) and
// (6, 7), minus the zero, exact in T. FP8 codes become their values. MXFP4 codes become their
// values divided by kMxfp4Scale<T>; in bfloat16 they are multiplied by `offset`.
template <typename T>
constexpr float kMxfp4Scale = std::is_same_v<T, __half> ? 16384.f : 1.f;
template <typename T, CodeType kCodeType>
__device__ __forceinline__ void dequantize_unit(uint32_t (&pairs)[4], uint2 words,
                                                uint32_t offset) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (kCodeType == CodeType::kMxfp4) mxfp4_bits<T>(pairs, words.x);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (kCodeType == CodeType::kInt4) {
      pairs[k] = hsub2<T>(
          lop3_and_or(words.x >> 4 * k, 0x000f000f, kHalf ? 0x64006400 : 0x43004300), offset);
    } else if constexpr (kCodeType == CodeType::kMxfp4) {
      if constexpr (!kHalf) pairs[k] = hmul2<T>(pairs[k], offset);
    } else if constexpr (kCodeType == CodeType::kFloat8) {
      // The byte becomes the high byte of 16 bits, exponent and mantissa are shifted to T's
      // positions, and a multiplication corrects the exponent bias.
      const uint32_t high = __byte_perm(words.x, words.y, k << 4 | (k + 4) << 12) & 0xff00ff00;
      const uint32_t small = kHalf ? high >> 1 & 0x3f803f80 : high >> 4 & 0x07f007f0;
      pairs[k] = hmul2<T>(lop3_and_or(high, 0x80008000, small), kHalf ? 0x5c005c00 : 0x7b807b80);
    } else if constexpr (kHalf) {
      pairs[k] = hsub2<T>(
          lop3_and_or(__byte_perm(words.x, words.y, k | (k + 4) << 8), 0x00ff00ff, 0x64006400),
          offset);
    } else {
      // bfloat16 has too few mantissa bits for that. float32 has enough, and its upper half is
      // exact.
      const float low = __uint_as_float(lop3_and_or(words.x >> 8 * k, 0xff, 0x4b000000)) -
                        __uint_as_float(offset);
      const float high = __uint_as_float(lop3_and_or(words.y >> 8 * k, 0xff, 0x4b000000)) -
                         __uint_as_float(offset);
      pairs[k] = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
    }
  }
}

// Nibbles at bits `from` and `from` + 16 of a word as a pair of T, plus kNibbleBias: they are
// placed in the mantissa of 128 (float16: of 64), where they count by one.
template <typename T>
constexpr float kNibbleBias = std::is_same_v<T, __half> ? 64.f : 128.f;
template <typename T>
__device__ __forceinline__ uint32_t bias_nibbles(uint32_t word, int from) {
  if constexpr (std::is_same_v<T, __half>)
    return lop3_and_or(from < 4 ? word << (4 - from) : word >> (from - 4), 0x00f000f0, 0x54005400);
  else return lop3_and_or(word >> from, 0x000f000f, 0x43004300);
}

// A unit of 8 codes as such pairs. 8-bit codes become two planes, of low and high nibbles.
template <typename T, CodeType kCodeType, int kPlanes>
__device__ __forceinline__ void unpack_unit(uint32_t (&pairs)[kPlanes][4], uint2 words) {
  if constexpr (kCodeType == CodeType::kFloat8) {
    dequantize_unit<T, kCodeType>(pairs[0], words, 0);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kCodeType == CodeType::kInt4) {
        pairs[0][k] = bias_nibbles<T>(words.x, 4 * k);
      } else {
        const uint32_t both = __byte_perm(words.x, words.y, k | (k + 4) << 8);
        pairs[0][k] = bias_nibbles<T>(both, 0);
        pairs[1][k] = bias_nibbles<T>(both, 4);
      }
    }
  }
}

// Four FP8 values as two pairs of float16.
__device__ __forceinline__ void fp8x4_to_half2(uint32_t& low, uint32_t& high, uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  low = high = codes;  // never executed: launchers check the compute capability
#endif
}

// Largest FP8 (e4m3) value, and the smallest scale, which rows of zeros get.
constexpr float kFloat8Max = 448, kMinScale = 1e-30f;

// Eight values times `inverse` as FP8 codes, in the order of a unit: see packed_column().
__device__ __forceinline__ uint2 quantize_unit(const float (&numbers)[8], float inverse) {
  auto pair_of = [&](int k) -> uint32_t {
    return __nv_cvt_float2_to_fp8x2({numbers[k] * inverse, numbers[k + 2] * inverse},
                                    __NV_SATFINITE, __NV_E4M3);
  };
  return make_uint2(pair_of(0) | pair_of(4) << 16, pair_of(1) | pair_of(5) << 16);
}

// Maximum absolute value.
__device__ __forceinline__ float abs_max(const float (&numbers)[8]) {
  float most = 0;
#pragma unroll
  for (float number : numbers) most = fmaxf(most, fabsf(number));
  return most;
}
// Maximum over a half warp, all of whose threads participate.
__device__ __forceinline__ float half_warp_max(float most) {
#pragma unroll
  for (int mask = 1; mask < 16; mask *= 2)
    most = fmaxf(most, __shfl_xor_sync(0xffffu << (threadIdx.x & 16), most, mask));
  return most;
}
__device__ __forceinline__ float warp_abs_max(float most) {  // not negative
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
}

// The FP8 scale for values of at most this magnitude.
__device__ __forceinline__ float fp8_scale(float most) {
  return fmaxf(most / kFloat8Max, kMinScale);
}

// Prefetches the cache line of p to L2.
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// The zero point of groups without a stored one.
template <CodeType kCodeType>
constexpr int kDefaultZero = kCodeType == CodeType::kInt4   ? 8
                             : kCodeType == CodeType::kInt8 ? 128
                                                            : 0;

// The value of an E8M0 exponent byte (MXFP4).
__device__ __forceinline__ float exponent_to_float(uint8_t bits) {
  return __uint_as_float(max(static_cast<uint32_t>(bits) << 23, 0x00400000u));
}

// The zero of a row's group. Scales and minima are [in / group_size, out].
template <CodeType kCodeType>
__device__ __forceinline__ int load_zero(const QuantParams& p, int64_t row, int group, int groups) {
  if (p.minimum != nullptr || kCodeType == CodeType::kFloat8) return 0;
  if (p.zero == nullptr) return kDefaultZero<kCodeType>;
  if constexpr (kCodeType == CodeType::kInt4)
    return __ldg(p.zero + row * ((groups + 1) / 2) + group / 2) >> group % 2 * 4 & 15;
  return __ldg(p.zero + row * groups + group);
}

// The value of one code minus its zero.
template <CodeType kCodeType>
__device__ __forceinline__ float decode(uint32_t code, int zero) {
  if constexpr (kCodeType == CodeType::kMxfp4) {
    const float size =
        code & 6 ? static_cast<float>(2 + (code & 1)) * static_cast<float>(1 << (code >> 1 & 3)) / 4
                 : (code & 1) / 2.f;
    return code & 8 ? -size : size;
  }
  if constexpr (kCodeType != CodeType::kFloat8)
    return static_cast<float>(static_cast<int>(code) - zero);
  Float8 bits;
  bits.__x = static_cast<uint8_t>(code);
  return to_float(bits);
}

// One dequantized element of a repacked weight [out, in]. Takes groups of any size.
template <CodeType kCodeType>
__device__ __forceinline__ float dequantize_at(const QuantParams& p, const uint8_t* codes,
                                               int64_t row, int column, int out, int in) {
  const int group = column / p.group_size, groups = in / p.group_size;
  const int64_t place = row * in + packed_column(column, in);
  const int code =
      kCodeType == CodeType::kInt4 ? codes[place / 2] >> place % 2 * 4 & 15 : codes[place];
  const float number = decode<kCodeType>(code, load_zero<kCodeType>(p, row, group, groups));
  const int64_t at = static_cast<int64_t>(group) * out + row;
  return fmaf(number, p.scale[at], p.minimum != nullptr ? p.minimum[at] : 0.f);
}

// Calls f with the code type as an integral_constant.
template <typename F>
cudaError_t dispatch_code_type(CodeType codes, F&& f) {
  switch (codes) {
    case CodeType::kInt4: return f(std::integral_constant<CodeType, CodeType::kInt4>());
    case CodeType::kInt8: return f(std::integral_constant<CodeType, CodeType::kInt8>());
    case CodeType::kFloat8: return f(std::integral_constant<CodeType, CodeType::kFloat8>());
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace llmc::device
