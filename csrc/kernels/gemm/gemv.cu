// y = act(norm(x) * weight^T + bias) + residual for few rows of x and 16-bit weights. Bound by
// reading the weight.
//
// A tile is 16 outputs (gated: 8 gates and their 8 ups) for all rows of x. A persistent grid takes
// tiles in turn. The warps of a block split K; each warp takes its share in chunks of 128 columns.
// A ring of kStages chunks per warp in shared memory is always in flight across tiles, so reads
// never pause; the first chunks are in flight before the previous kernel has ended (PDL). A thread
// reads back what it copied, as an mma fragment: thread (g, t) of a warp copies 16 bytes of weight
// rows g and g + 8 at column 8 t, so that four threads cover 64 bytes of a row. x is read with the
// same permutation of K. Reads out * in weights once, past L1, and x from L1; writes y.
//
// If that makes fewer tiles than SMs, a tile is 8 outputs for up to 4 rows of x. Rows 8 to 15 of
// the mma tile are then the same weights half a chunk further, and columns 4 to 7 are the x that
// belongs to them; two quadrants of the product are used.
//
// A norm is fused at no cost: its weight is folded into the matrix, and norm(x) * w = (x * w -
// mean(x) * sum(w)) / deviation(x), with moments of the x that the warps read anyway.
#include "gemv.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kUnroll = 4;  // steps of a chunk
constexpr int kStages = 3;  // chunks in flight

// kTiles: groups of 8 rows of x.
template <typename T, int kWarps, int kTiles, TileShape kTile, bool kNorm>
__global__ void __launch_bounds__(kWarps * 32) gemv_kernel(GemvParams p) {
  static_assert(kTile != TileShape::kNarrow || kTiles == 1);
  constexpr int kOut = kTile == TileShape::kWide ? 16 : 8, kThreads = kWarps * 32;
  constexpr bool kNarrow = kTile == TileShape::kNarrow;
  constexpr int kStep = kNarrow ? 64 : 32;  // columns of a step
  constexpr int kChunk = kStep * kUnroll;
  extern __shared__ uint4 ring[];  // [kStages][kUnroll][2][kThreads]
  __shared__ float partial[kWarps][16][kTiles * 8 + 1];
  __shared__ float moments[kWarps][kTiles * 8][2];
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int tiles = (p.out + kOut - 1) / kOut, chunks = chunks_per_warp<kWarps, kChunk>(p.in);
  const int begin = warp * chunks * kChunk;

  // Producer cursor: cp.async copies run ahead of the mma, over tiles and chunks.
  struct {
    int tile, chunk, slot;
    const T *low, *high;
  } ahead{static_cast<int>(blockIdx.x), 0, 0, nullptr, nullptr};
  auto find_rows = [&] {
    // Rows beyond the last repeat it; their sums are not written.
    const int first = ahead.tile * kOut, low = min(first + g, p.out - 1);
    const int high = kTile == TileShape::kGated ? p.out + low
                     : kNarrow                  ? low
                                                : min(first + 8 + g, p.out - 1);
    ahead.low = static_cast<const T*>(p.weight) + static_cast<int64_t>(low) * p.in + 8 * t;
    ahead.high = static_cast<const T*>(p.weight) + static_cast<int64_t>(high) * p.in + 8 * t +
                 (kNarrow ? 32 : 0);
  };
  auto copy_chunk = [&] {
    if (ahead.tile < tiles) {
      const int first = begin + ahead.chunk * kChunk;
      uint4* to = ring + ahead.slot * kUnroll * 2 * kThreads + threadIdx.x;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = first + u * kStep, column = at + 8 * t;
        const bool low = column < p.in, high = column + (kNarrow ? 32 : 0) < p.in;
        cp_async(to + 2 * u * kThreads, ahead.low + (low ? at : 0), low);
        cp_async(to + (2 * u + 1) * kThreads, ahead.high + (high ? at : 0), high);
      }
      ahead.slot = ahead.slot + 1 == kStages ? 0 : ahead.slot + 1;
      if (++ahead.chunk == chunks) {
        ahead.chunk = 0;
        ahead.tile += gridDim.x;
        find_rows();
      }
    }
    cp_async_commit();
  };
  find_rows();
  for (int i = 0; i < kStages; ++i) copy_chunk();  // weights do not depend on the previous kernel
  pdl_wait();
  pdl_launch_dependents();

  const T* x = static_cast<const T*>(p.x);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  int slot = 0, turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    float sum[kTiles][4] = {}, of_x[kTiles][2] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int column = begin + chunk * kChunk;
      uint4 b[kUnroll][kTiles];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int row = kNarrow ? g % 4 : n * 8 + g;
          const int at = column + u * kStep + 8 * t + (kNarrow ? g / 4 * 32 : 0);
          b[u][n] = row < p.rows && at < p.in
                        ? *reinterpret_cast<const uint4*>(x + static_cast<int64_t>(row) * p.in + at)
                        : zero;
        }
      if (kNorm && turn == 0)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
#pragma unroll
          for (int n = 0; n < kTiles; ++n) accumulate_moments<T>(of_x[n], b[u][n]);
      cp_async_wait<kStages - 1>();
      const uint4* from = ring + slot * kUnroll * 2 * kThreads + threadIdx.x;
      slot = slot + 1 == kStages ? 0 : slot + 1;
      mma_chunk<T, kThreads>(sum, from, b);
      copy_chunk();
    }
    if (turn > 0) __syncthreads();  // partial may still be read
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = n * 8 + 2 * t;
      partial[warp][g][row] = sum[n][0], partial[warp][g][row + 1] = sum[n][1];
      partial[warp][g + 8][row] = sum[n][2], partial[warp][g + 8][row + 1] = sum[n][3];
      if (kNorm && turn == 0)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          of_x[n][k] += __shfl_xor_sync(~0u, of_x[n][k], 1);
          of_x[n][k] += __shfl_xor_sync(~0u, of_x[n][k], 2);
          if (kNarrow) of_x[n][k] += __shfl_xor_sync(~0u, of_x[n][k], 16);
          if (t == 0) moments[warp][n * 8 + g][k] = of_x[n][k];
        }
    }
    __syncthreads();
    store_tile<T>(p, partial, moments, tile, turn, kTile, kNorm);
  }
}

constexpr int kNarrowRows = 4;

// A persistent grid; the ring has the chunks of a warp, at most kStages.
template <typename T, int kWarps, int kTiles, TileShape kTile, bool kNorm>
cudaError_t run_norm(const GemvParams& p, cudaStream_t stream) {
  constexpr size_t kStage = sizeof(uint4) * kUnroll * 2 * kWarps * 32;
  constexpr int kChunk = (kTile == TileShape::kNarrow ? 64 : 32) * kUnroll;
  auto kernel = gemv_kernel<T, kWarps, kTiles, kTile, kNorm>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStages * kStage);
  if (error != cudaSuccess) return error;
  static const int resident = resident_blocks(kernel, kWarps * 32, kStages * kStage);
  const int tiles = static_cast<int>(ceil_div(p.out, kTile == TileShape::kWide ? 16 : 8));
  const int blocks = std::min(tiles, resident);
  const int chunks = chunks_per_warp<kWarps, kChunk>(p.in) * ((tiles + blocks - 1) / blocks);
  return launch(kernel, blocks, kWarps * 32, std::min(chunks, kStages) * kStage, stream, p);
}

template <typename T, int kWarps, int kTiles, TileShape kTile>
cudaError_t run_tile(const GemvParams& p, cudaStream_t stream) {
  return p.norm ? run_norm<T, kWarps, kTiles, kTile, true>(p, stream)
                : run_norm<T, kWarps, kTiles, kTile, false>(p, stream);
}

template <typename T, int kWarps>
cudaError_t run_warps(const GemvParams& p, bool narrow, cudaStream_t stream) {
  if (narrow) return run_tile<T, kWarps, 1, TileShape::kNarrow>(p, stream);
  if constexpr (kWarps <= 8) {
    if (p.rows > 8)
      return p.gated ? run_tile<T, kWarps, 2, TileShape::kGated>(p, stream)
                     : run_tile<T, kWarps, 2, TileShape::kWide>(p, stream);
    return p.gated ? run_tile<T, kWarps, 1, TileShape::kGated>(p, stream)
                   : run_tile<T, kWarps, 1, TileShape::kWide>(p, stream);
  }
  return cudaErrorInvalidValue;
}

// As many warps as have a chunk to read at once, so that a small weight is in flight as a whole
// before the previous kernel has ended, limited by the shared memory for rings and sums.
template <typename T>
cudaError_t run_type(const GemvParams& p, cudaStream_t stream) {
  constexpr int kRing = kStages * kUnroll * 2 * 32 * sizeof(uint4), kSums = 12 << 10;
  const int room = (device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() - kSums) / kRing;
  // With long rows in wide tiles many SMs would have one tile less than others.
  const unsigned tiles = ceil_div(p.out, 16), places = num_sms();
  const bool uneven =
      p.rows == 1 && p.in >= 8192 && 5 * ceil_div(tiles, places) * places > 6 * tiles;
  const bool narrow = !p.gated && p.rows <= kNarrowRows && (tiles < places || uneven);
  const unsigned wanted = std::min(ceil_div(p.in, narrow ? 256 : 128), narrow ? 16u : 8u);
  if (wanted > 8 && room >= 16) return run_warps<T, 16>(p, narrow, stream);
  if (wanted > 4 && room >= 8) return run_warps<T, 8>(p, narrow, stream);
  return wanted > 2 ? run_warps<T, 4>(p, narrow, stream) : run_warps<T, 2>(p, narrow, stream);
}

}  // namespace

cudaError_t gemv(DType dtype, const GemvParams& p, cudaStream_t stream) {
  if (p.rows > kGemvRows || p.in % 8 != 0) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
