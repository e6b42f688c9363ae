// y = act(x · weightᵀ + bias) + residual for few rows of x, where reading the weight is all the work.
//
// A block makes 16 outputs (gated: 8 gates and their 8 ups) for all rows. Its warps divide the inner
// dimension among them in chunks of 128, each chunk loaded straight into the registers that the tensor
// core wants: thread (g, t) of a warp reads 16 bytes of weight rows g and g + 8 at column 8 t, four threads
// covering 64 bytes of a row. The order of the inner dimension does not matter to a sum of products, so x
// is read with the same permutation. Reads out · in weights once, x once per block (from L2), writes y.
#include "device.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kStep = 32;    // columns that a warp takes at once: two tensor-core steps
constexpr int kUnroll = 4;   // steps in flight
constexpr int kChunk = kStep * kUnroll;
constexpr int kTile = 16;    // weight rows per block

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                        uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// kTiles: groups of 8 rows of x.
template <typename T, int kWarps, int kTiles, bool kGated>
__global__ void __launch_bounds__(kWarps * 32) gemv_kernel(GemvParams p) {
  __shared__ float partial[kWarps][kTile][kTiles * 8 + 1];
  let_next_start();
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int first = blockIdx.x * (kGated ? 8 : kTile);
  // Rows beyond the last repeat it; their sums are not written.
  const int low = min(first + g, p.out - 1);
  const int high = kGated ? p.out + low : min(first + 8 + g, p.out - 1);
  const T* weight = static_cast<const T*>(p.weight);
  const T* weight_low = weight + static_cast<int64_t>(low) * p.in + 8 * t;
  const T* weight_high = weight + static_cast<int64_t>(high) * p.in + 8 * t;
  const T* x = static_cast<const T*>(p.x) + 8 * t;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  uint4 a[kUnroll][2];
  auto load_weights = [&](int column) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = column + u * kStep;
      const bool inside = at + 8 * t < p.in;
      a[u][0] = inside ? load_once(weight_low + at) : zero;
      a[u][1] = inside ? load_once(weight_high + at) : zero;
    }
  };
  load_weights(warp * kChunk);  // weights do not depend on the kernel before
  wait_for_inputs();

  float sum[kTiles][4] = {};
  for (int column = warp * kChunk; column < p.in; column += kWarps * kChunk) {
    uint4 b[kUnroll][kTiles];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int row = n * 8 + g, at = column + u * kStep;
        b[u][n] = row < p.rows && at + 8 * t < p.in
            ? *reinterpret_cast<const uint4*>(x + static_cast<int64_t>(row) * p.in + at) : zero;
      }
    uint4 now[kUnroll][2];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) now[u][0] = a[u][0], now[u][1] = a[u][1];
    if (column + kWarps * kChunk < p.in) load_weights(column + kWarps * kChunk);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t even[4] = {now[u][0].x, now[u][1].x, now[u][0].y, now[u][1].y};
      const uint32_t odd[4] = {now[u][0].z, now[u][1].z, now[u][0].w, now[u][1].w};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        multiply<T>(sum[n], even, b[u][n].x, b[u][n].y);
        multiply<T>(sum[n], odd, b[u][n].z, b[u][n].w);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int row = n * 8 + 2 * t;
    partial[warp][g][row] = sum[n][0], partial[warp][g][row + 1] = sum[n][1];
    partial[warp][g + 8][row] = sum[n][2], partial[warp][g + 8][row + 1] = sum[n][3];
  }
  __syncthreads();
  constexpr int kOut = kGated ? 8 : kTile;
  for (int i = threadIdx.x; i < kOut * p.rows; i += kWarps * 32) {
    const int column = i % kOut, row = i / kOut, output = first + column;
    if (output >= p.out) continue;
    float value = 0, up = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      value += partial[w][column][row];
      if (kGated) up += partial[w][column + 8][row];
    }
    if (p.bias != nullptr) {
      value += to_float(static_cast<const T*>(p.bias)[output]);
      if (kGated) up += to_float(static_cast<const T*>(p.bias)[p.out + output]);
    }
    value = device::activate(value, p.activation);
    if (kGated) value *= up;
    const int64_t place = static_cast<int64_t>(row) * p.out + output;
    if (p.residual != nullptr) value += to_float(static_cast<const T*>(p.residual)[place]);
    static_cast<T*>(p.y)[place] = from_float<T>(value);
  }
}

template <typename T, int kWarps>
cudaError_t gemv_of_warps(const GemvParams& p, cudaStream_t stream) {
  const dim3 grid(blocks_for(p.out, p.gated ? 8 : kTile));
  auto run = [&](auto kernel) { return launch(kernel, grid, kWarps * 32, 0, stream, p); };
  if (p.rows <= 8)
    return p.gated ? run(gemv_kernel<T, kWarps, 1, true>) : run(gemv_kernel<T, kWarps, 1, false>);
  return p.gated ? run(gemv_kernel<T, kWarps, 2, true>) : run(gemv_kernel<T, kWarps, 2, false>);
}

template <typename T>
cudaError_t gemv_of_type(const GemvParams& p, cudaStream_t stream) {
  if (p.in <= 2 * kChunk) return gemv_of_warps<T, 2>(p, stream);
  if (p.in <= 4 * kChunk) return gemv_of_warps<T, 4>(p, stream);
  return gemv_of_warps<T, 8>(p, stream);
}

}  // namespace

cudaError_t gemv(DType dtype, const GemvParams& p, cudaStream_t stream) {
  if (p.rows > kGemvRows || p.in % 8 != 0) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return gemv_of_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return gemv_of_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
