// wgmma, TMA and shared memory descriptors for Hopper. Tiles in shared memory are [columns /
// 64][rows][64] of 16-bit elements, in the 128-byte swizzle, aligned to 1,024 bytes.
#pragma once

#include <cuda.h>

#include <array>

#include "cluster.cuh"

namespace llmc::sm90 {

using device::fence_async_proxy;
using device::Mbarrier;
using device::named_barrier_sync;
using device::smem_address;

// Loads kWords words from an address in shared memory.
template <int kWords>
__device__ __forceinline__ device::Vec<uint32_t, kWords> load_smem(uint32_t at) {
  device::Vec<uint32_t, kWords> words;
  auto& x = words.data;
  if constexpr (kWords == 1) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x[0]) : "r"(at));
  else if constexpr (kWords == 2)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at));
  else
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at));
  return words;
}

// Copies a box of a tensor map to shared memory; `barrier` counts its bytes. Small boxes are faster
// with two dimensions than with four.
__device__ __forceinline__ void tma_load(uint32_t target, const CUtensorMap& map, Mbarrier barrier,
                                         int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(target),
      "l"(&map), "r"(x), "r"(y), "r"(barrier.at)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t target, const CUtensorMap& map, Mbarrier barrier,
                                         int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];" ::"r"(target),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier.at)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t target, const CUtensorMap& map, Mbarrier barrier,
                                         int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4, %5}], [%6];" ::"r"(target),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier.at)
      : "memory");
}

// Prefetches a tensor map descriptor.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Arrives at a named barrier without waiting.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Clusters of 2 .. kMost blocks that can be resident at once, by cluster size; 0 for smaller sizes.
template <size_t kMost, typename Kernel>
std::array<int, kMost + 1> max_active_clusters(Kernel kernel, int threads, uint32_t bytes) {
  std::array<int, kMost + 1> found{};
  for (size_t blocks = 2; blocks <= kMost; ++blocks) {
    const device::Launch all(blocks, threads, bytes, nullptr, blocks);
    if (cudaOccupancyMaxActiveClusters(&found[blocks], kernel, all.config()) != cudaSuccess)
      found[blocks] = 0;
  }
  return found;
}

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

// cuTensorMapEncodeTiled of the driver, or null.
inline TensorMapEncoder tensor_map_encoder() {
  static const TensorMapEncoder found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const bool there = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                        cudaEnableDefault, &result) == cudaSuccess;
    return there && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<TensorMapEncoder>(function)
               : nullptr;
  }();
  return found;
}

// Encodes a tensor map. Sizes and box are in elements of `width` bytes, innermost dimension first.
// Strides are in bytes, for all dimensions but the innermost, and default to a dense tensor. L2
// promotion is 128 bytes, as in cp_async().
template <int kRank>
bool make_tensor_map(CUtensorMap& made, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                     const void* data, const cuuint64_t (&sizes)[kRank],
                     const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  const cuuint32_t steps[] = {1, 1, 1, 1};
  return tensor_map_encoder()(&made, type, kRank, const_cast<void*>(data), sizes, strides, box,
                              steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
template <int kRank>
bool make_tensor_map(CUtensorMap& made, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                     const void* data, const cuuint64_t (&sizes)[kRank], int width,
                     const cuuint32_t (&box)[kRank]) {
  cuuint64_t strides[kRank - 1] = {sizes[0] * width};
  for (int i = 1; i < kRank - 1; ++i) strides[i] = strides[i - 1] * sizes[i];
  return make_tensor_map(made, type, swizzle, data, sizes, strides, box);
}
template <typename T>
constexpr auto kTensorMapType =
    std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Shared memory descriptors of a tile at `address`: K-major (k along rows), or MN-major (k across
// rows), where the next 64 columns are next_columns bytes further.
__device__ __forceinline__ uint64_t make_smem_desc_k_major(uint32_t address) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 16 |
         (address & 0x3ffff) >> 4;
}
__device__ __forceinline__ uint64_t make_smem_desc_mn_major(uint32_t address,
                                                            uint32_t next_columns) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 |
         static_cast<uint64_t>(next_columns >> 4) << 16 | (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the kNewest newest wgmma groups are outstanding.
template <int kNewest>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}

// wgmma of one warpgroup with a float32 accumulator c [64, N]. Thread t holds c[4 j + 2 r + i]: row
// t / 32 * 16 + t % 32 / 4 + 8 r, column 8 j + t % 4 * 2 + i.
//
// ss: c = a * b^T, or += with `adds`. a [64, 16] and b [N, 16] are K-major in shared memory; with
// FP8 [64, 32] and [N, 32].
// rs: c += a * b. A thread holds of a [64, 16] the fragment of 16 columns of c, in pairs: pair 2 h
// + r is row r, half h of the columns. b in shared memory is [16, N] MN-major, or [N, 16] K-major.
// With FP8 a fragment holds fours of 32 columns, and c = or += a * b^T.
template <typename T, int N>
struct Wgmma;

// clang-format off
// Register lists of the asm strings, eight at a time, and their operands.
#define R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TEXT_8 "%0, %1, %2, %3"
#define R8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define R16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define R24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define R32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define R40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define R48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define R56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define R64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define R72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define R80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define R88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define R96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define R104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define R112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define R120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define C8(i) C4(i), C4(i + 4)
#define TEXT_16 R0
#define TEXT_32 TEXT_16 ", " R8
#define TEXT_48 TEXT_32 ", " R16
#define TEXT_64 TEXT_48 ", " R24
#define TEXT_80 TEXT_64 ", " R32
#define TEXT_96 TEXT_80 ", " R40
#define TEXT_112 TEXT_96 ", " R48
#define TEXT_128 TEXT_112 ", " R56
#define TEXT_144 TEXT_128 ", " R64
#define TEXT_160 TEXT_144 ", " R72
#define TEXT_176 TEXT_160 ", " R80
#define TEXT_192 TEXT_176 ", " R88
#define TEXT_256 TEXT_192 ", " R96 ", " R104 ", " R112 ", " R120
#define OPERANDS_8 C4(0)
#define OPERANDS_16 C8(0)
#define OPERANDS_32 OPERANDS_16, C8(8)
#define OPERANDS_48 OPERANDS_32, C8(16)
#define OPERANDS_64 OPERANDS_48, C8(24)
#define OPERANDS_80 OPERANDS_64, C8(32)
#define OPERANDS_96 OPERANDS_80, C8(40)
#define OPERANDS_112 OPERANDS_96, C8(48)
#define OPERANDS_128 OPERANDS_112, C8(56)
#define OPERANDS_144 OPERANDS_128, C8(64)
#define OPERANDS_160 OPERANDS_144, C8(72)
#define OPERANDS_176 OPERANDS_160, C8(80)
#define OPERANDS_192 OPERANDS_176, C8(88)
#define OPERANDS_256 OPERANDS_192, C8(96), C8(104), C8(112), C8(120)

#define WGMMA(T, NAME, N, I0, I1, I2, I3, I4, I5)                                                                \
  template <>                                                                                                      \
  struct Wgmma<T, N> {                                                                                           \
    static __device__ __forceinline__ void ss(float (&c)[N / 2], uint64_t a, uint64_t b, int adds) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " I2 ", 0;\n"                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" TEXT_##N "}, "             \
                   I0 ", " I1 ", p, 1, 1, 0, 0;\n}"                                                               \
                   : OPERANDS_##N : "l"(a), "l"(b), "r"(adds));                                                    \
    }                                                                                                              \
    template <bool kByColumns = true>                                                                              \
    static __device__ __forceinline__ void rs(float (&c)[N / 2], const uint32_t* a, uint64_t b) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" TEXT_##N "}, {"            \
                   I0 ", " I1 ", " I2 ", " I3 "}, " I4 ", p, 1, 1, " I5 ";\n}"                                     \
                   : OPERANDS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kByColumns}));     \
    }                                                                                                              \
  };
#define WGMMA_FLOAT8(N, I0, I1, I2, I3, I4, I5)                                                                  \
  template <>                                                                                                      \
  struct Wgmma<device::Float8, N> {                                                                              \
    static __device__ __forceinline__ void ss(float (&c)[N / 2], uint64_t a, uint64_t b, int adds) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " I2 ", 0;\n"                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" TEXT_##N "}, " I0 ", " I1          \
                   ", p, 1, 1;\n}"                                                                                 \
                   : OPERANDS_##N : "l"(a), "l"(b), "r"(adds));                                                    \
    }                                                                                                              \
    static __device__ __forceinline__ void rs(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b,     \
                                                        int adds) {                                                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " I5 ", 0;\n"                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" TEXT_##N "}, {" I0 ", " I1 ", " I2  \
                   ", " I3 "}, " I4 ", p, 1, 1;\n}"                                                                \
                   : OPERANDS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));                \
    }                                                                                                              \
  };
#define WGMMA_HALF(N, ...) WGMMA(__half, "f16", N, __VA_ARGS__) WGMMA(__nv_bfloat16, "bf16", N, __VA_ARGS__)
WGMMA_HALF(8, "%4", "%5", "%6", "%7", "%8", "%9")
WGMMA_HALF(16, "%8", "%9", "%10", "%11", "%12", "%13")
WGMMA_HALF(32, "%16", "%17", "%18", "%19", "%20", "%21")
WGMMA_HALF(48, "%24", "%25", "%26", "%27", "%28", "%29")
WGMMA_HALF(64, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA_HALF(80, "%40", "%41", "%42", "%43", "%44", "%45")
WGMMA_HALF(96, "%48", "%49", "%50", "%51", "%52", "%53")
WGMMA_HALF(112, "%56", "%57", "%58", "%59", "%60", "%61")
WGMMA_HALF(128, "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA_HALF(144, "%72", "%73", "%74", "%75", "%76", "%77")
WGMMA_HALF(160, "%80", "%81", "%82", "%83", "%84", "%85")
WGMMA_HALF(176, "%88", "%89", "%90", "%91", "%92", "%93")
WGMMA_HALF(192, "%96", "%97", "%98", "%99", "%100", "%101")
WGMMA_HALF(256, "%128", "%129", "%130", "%131", "%132", "%133")
WGMMA_FLOAT8(8, "%4", "%5", "%6", "%7", "%8", "%9")
WGMMA_FLOAT8(16, "%8", "%9", "%10", "%11", "%12", "%13")
WGMMA_FLOAT8(32, "%16", "%17", "%18", "%19", "%20", "%21")
WGMMA_FLOAT8(64, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA_FLOAT8(96, "%48", "%49", "%50", "%51", "%52", "%53")
// clang-format on

}  // namespace llmc::sm90
