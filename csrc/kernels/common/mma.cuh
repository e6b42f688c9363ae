// mma.sync m16n8k16 and helpers for its operands.
#pragma once

#include "device.cuh"

namespace llmc::device {

// c [16, 8] += a [16, 16] * b [16, 8], accumulated in float32.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 matrices from shared memory (ldmatrix). Lanes 8 i to 8 i + 7 address the rows of
// matrix i; r[i] is a lane's fragment of it.
template <bool kTranspose>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* p) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  if constexpr (kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

// Transposes an 8 x 8 matrix of 16-bit elements, two per lane (movmatrix).
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t pair) {
  uint32_t turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// Two values as a 16-bit register pair.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float x, float y) {
  Vec<T, 2> v{{from_float<T>(x), from_float<T>(y)}};
  return *reinterpret_cast<uint32_t*>(&v);
}

// sum += weights * x for a chunk of kUnroll steps. A thread's fragments of two weight rows are
// 16-byte vectors kThreads apart, from `from` on; x has kTiles groups of 8 rows.
template <typename T, int kThreads, int kUnroll, int kTiles>
__device__ __forceinline__ void mma_chunk(float (&sum)[kTiles][4], const uint4* from,
                                          const uint4 (&x)[kUnroll][kTiles]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint4 low = from[2 * u * kThreads], high = from[(2 * u + 1) * kThreads];
    const uint32_t even[4] = {low.x, high.x, low.y, high.y};
    const uint32_t odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      mma_m16n8k16<T>(sum[n], even, x[u][n].x, x[u][n].y);
      mma_m16n8k16<T>(sum[n], odd, x[u][n].z, x[u][n].w);
    }
  }
}

}  // namespace llmc::device
