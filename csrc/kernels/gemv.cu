// y = act(norm(x) · weightᵀ + bias) + residual for few rows of x, where reading the weight is all the work.
//
// A block makes 16 outputs (gated: 8 gates and their 8 ups) for all rows. Its warps divide the inner
// dimension among them in chunks of 128, each chunk loaded straight into the registers that the tensor
// core wants: thread (g, t) of a warp reads 16 bytes of weight rows g and g + 8 at column 8 t, four threads
// covering 64 bytes of a row. The order of the inner dimension does not matter to a sum of products, so x
// is read with the same permutation. Reads out · in weights once, x once per block (from L2), writes y.
//
// Where that makes too few blocks to fill the device, a block makes 8 outputs for up to 4 rows of x: rows 8
// to 15 of the tensor core's tile are the same weights half a chunk further, and columns 4 to 7 the x that
// belongs there; two quarters of the product are then what is wanted.
//
// A norm costs nothing: its weight is part of the matrix, and norm(x) · w = (x · w − mean(x) · sum(w)) /
// deviation(x), where mean and deviation come from the x that the warps read anyway.
#include "tensor_core.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kUnroll = 4;  // steps in flight

__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Adds a vector's elements, and their squares, to sum[0] and sum[1].
template <typename T>
__device__ __forceinline__ void measure(float (&sum)[2], const uint4& vector) {
  const T* x = reinterpret_cast<const T*>(&vector);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float value = to_float(x[i]);
    sum[0] += value;
    sum[1] = fmaf(value, value, sum[1]);
  }
}

enum class Tile { kWide, kGated, kNarrow };

// kTiles: groups of 8 rows of x.
template <typename T, int kWarps, int kTiles, Tile kTile, bool kNorm>
__global__ void __launch_bounds__(kWarps * 32) gemv_kernel(GemvParams p) {
  static_assert(kTile != Tile::kNarrow || kTiles == 1);
  constexpr int kOut = kTile == Tile::kWide ? 16 : 8;
  constexpr bool kNarrow = kTile == Tile::kNarrow;
  constexpr int kStep = kNarrow ? 64 : 32;  // columns that a warp takes at once
  constexpr int kChunk = kStep * kUnroll;
  __shared__ float partial[kWarps][16][kTiles * 8 + 1];
  __shared__ float measured[kWarps][kTiles * 8][2];
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int first = blockIdx.x * kOut;
  // Rows beyond the last repeat it; their sums are not written.
  const int low = min(first + g, p.out - 1);
  const int high = kTile == Tile::kGated ? p.out + low : kNarrow ? low : min(first + 8 + g, p.out - 1);
  const T* weight = static_cast<const T*>(p.weight);
  const T* weight_low = weight + static_cast<int64_t>(low) * p.in;
  const T* weight_high = weight + static_cast<int64_t>(high) * p.in;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  uint4 a[kUnroll][2];
  auto load_weights = [&](int column) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = column + u * kStep + 8 * t, later = at + (kNarrow ? 32 : 0);
      a[u][0] = at < p.in ? load_once(weight_low + at) : zero;
      a[u][1] = later < p.in ? load_once(weight_high + later) : zero;
    }
  };
  load_weights(warp * kChunk);  // weights do not depend on the kernel before
  wait_for_inputs();
  let_next_start();
  const T* x = static_cast<const T*>(p.x);
  float sum[kTiles][4] = {}, of_x[kTiles][2] = {};
  for (int column = warp * kChunk; column < p.in; column += kWarps * kChunk) {
    uint4 b[kUnroll][kTiles];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int row = kNarrow ? g % 4 : n * 8 + g;
        const int at = column + u * kStep + 8 * t + (kNarrow ? g / 4 * 32 : 0);
        b[u][n] = row < p.rows && at < p.in
            ? *reinterpret_cast<const uint4*>(x + static_cast<int64_t>(row) * p.in + at) : zero;
        if constexpr (kNorm) measure<T>(of_x[n], b[u][n]);
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
    if constexpr (kNorm) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        of_x[n][k] += __shfl_xor_sync(~0u, of_x[n][k], 1);
        of_x[n][k] += __shfl_xor_sync(~0u, of_x[n][k], 2);
        if (kNarrow) of_x[n][k] += __shfl_xor_sync(~0u, of_x[n][k], 16);
        if (t == 0) measured[warp][n * 8 + g][k] = of_x[n][k];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kOut * p.rows; i += kWarps * 32) {
    const int column = i % kOut, row = i / kOut, output = first + column;
    if (output >= p.out) continue;
    float value = 0, up = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      value += partial[w][column][row];
      if (kNarrow) value += partial[w][column + 8][row + 4];
      if (kTile == Tile::kGated) up += partial[w][column + 8][row];
    }
    if constexpr (kNorm) {
      float total = 0, squares = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += measured[w][row][0], squares += measured[w][row][1];
      const float mean = p.row_sums != nullptr ? total / p.in : 0.f;
      const float scale = rsqrtf(fmaxf(squares / p.in - mean * mean, 0.f) + p.epsilon);
      if (p.row_sums != nullptr) {
        value -= mean * p.row_sums[output];
        if (kTile == Tile::kGated) up -= mean * p.row_sums[p.out + output];
      }
      value *= scale;
      up *= scale;
    }
    if (p.bias != nullptr) {
      value += to_float(static_cast<const T*>(p.bias)[output]);
      if (kTile == Tile::kGated) up += to_float(static_cast<const T*>(p.bias)[p.out + output]);
    }
    value = device::activate(value, p.activation);
    if (kTile == Tile::kGated) value *= up;
    const int64_t place = static_cast<int64_t>(row) * p.out + output;
    if (p.residual != nullptr) value += to_float(static_cast<const T*>(p.residual)[place]);
    static_cast<T*>(p.y)[place] = from_float<T>(value);
  }
}

constexpr int kNarrowRows = 4;

template <typename T, int kWarps, int kTiles, Tile kTile>
cudaError_t run_tile(const GemvParams& p, cudaStream_t stream) {
  const unsigned blocks = blocks_for(p.out, kTile == Tile::kWide ? 16 : 8);
  if (!p.norm) return launch(gemv_kernel<T, kWarps, kTiles, kTile, false>, blocks, kWarps * 32, 0, stream, p);
  return launch(gemv_kernel<T, kWarps, kTiles, kTile, true>, blocks, kWarps * 32, 0, stream, p);
}

template <typename T, int kWarps>
cudaError_t run_warps(const GemvParams& p, cudaStream_t stream) {
  if (p.rows > 8)
    return p.gated ? run_tile<T, kWarps, 2, Tile::kGated>(p, stream)
                   : run_tile<T, kWarps, 2, Tile::kWide>(p, stream);
  return p.gated ? run_tile<T, kWarps, 1, Tile::kGated>(p, stream)
                 : run_tile<T, kWarps, 1, Tile::kWide>(p, stream);
}

// As many warps as have a chunk to read at once, so that a small weight is under way as a whole before the
// kernel ahead has ended.
template <typename T>
cudaError_t run_type(const GemvParams& p, cudaStream_t stream) {
  if (!p.gated && p.rows <= kNarrowRows && blocks_for(p.out, 16) < multiprocessors()) {
    if (p.in <= 512) return run_tile<T, 2, 1, Tile::kNarrow>(p, stream);
    if (p.in <= 1024) return run_tile<T, 4, 1, Tile::kNarrow>(p, stream);
    if (p.in <= 2048) return run_tile<T, 8, 1, Tile::kNarrow>(p, stream);
    return run_tile<T, 16, 1, Tile::kNarrow>(p, stream);
  }
  if (p.in <= 256) return run_warps<T, 2>(p, stream);
  if (p.in <= 512) return run_warps<T, 4>(p, stream);
  return run_warps<T, 8>(p, stream);
}

}  // namespace

cudaError_t gemv(DType dtype, const GemvParams& p, cudaStream_t stream) {
  if (p.rows > kGemvRows || p.in % 8 != 0) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
