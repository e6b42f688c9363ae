// y = act(x · weightᵀ + bias) + residual for few rows of x, both in FP8, each row of either with a scale: packed_gemv.cu
// without groups, so nothing is multiplied by scales but whole sums.
//
// A warp takes kM tiles at once, each 16 rows of the weight, of which a thread has rows g and g + 8; a vector is 64 bytes of
// a row, a quarter of them each thread's, two products of the tensor core. It takes float16, in which every number of FP8 is
// exact: one instruction makes two of it. x lies in the order of a packed weight's columns, so pairs are what lies side by
// side. Chunks of kVectors vectors are under way to shared memory all the time, past L1, kStages of each warp. Reads out · in
// bytes of weights once, and x for each kM tiles; writes y.
#include "gemv.cuh"
#include "packed.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kVectors = 2;  // in a chunk
constexpr int kStages = 3;   // chunks under way
constexpr int kColumns = 64;  // of a vector
constexpr int kChunk = kVectors * kColumns;
constexpr unsigned kManyPairs = 2;  // of tiles, for each multiprocessor
template <int kWarps, int kM>
constexpr size_t kRing = sizeof(uint4) * kStages * kVectors * 2 * kM * kWarps * 32;

// Four numbers of FP8 as two pairs of float16.
__device__ __forceinline__ void widen_float8(uint32_t& low, uint32_t& high, uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
      : "=r"(low), "=r"(high) : "r"(codes));
#else
  low = high = codes;  // where nothing launches it
#endif
}

// A unit of 8 numbers as pairs.
__device__ __forceinline__ void widen_unit(uint32_t (&pairs)[4], const uint4& vector, int unit) {
  widen_float8(pairs[0], pairs[1], unit == 0 ? vector.x : vector.z);
  widen_float8(pairs[2], pairs[3], unit == 0 ? vector.y : vector.w);
}

// kM: tiles at once. kTiles: groups of 8 rows of x.
template <typename T, int kWarps, int kM, int kTiles>
__global__ void __launch_bounds__(kWarps * 32, (kM * kTiles == 1 ? 24 : 16) / kWarps) float8_gemv_kernel(GemvParams p) {
  constexpr int kThreads = kWarps * 32, kRows = 2 * kM;  // of the weight, that a thread has
  constexpr bool kAhead = kTiles < 4;  // there are registers for it
  extern __shared__ uint4 ring[];  // [kStages][kVectors][kRows][kThreads]
  __shared__ float partial[kM][kWarps][16][kTiles * 8 + 1];
  __shared__ float measured[kWarps][kTiles * 8][2];  // nothing: rows are normed already
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int height = p.gated ? 8 : 16, tiles = (p.out + height * kM - 1) / (height * kM);
  const int chunks = chunks_of<kWarps, kChunk>(p.in);
  const int begin = warp * chunks * kChunk;
  // Rows beyond the last repeat it; their sums are not written.
  auto row_of = [&](int tile, int row) {
    const int low = (tile * kM + row / 2) * height + g;
    return row % 2 == 0 ? min(low, p.out - 1) : p.gated ? p.out + min(low, p.out - 1) : min(low + 8, p.out - 1);
  };

  // The copies are ahead of the products: their own place in the sequence of tiles and chunks.
  struct {
    int tile, chunk, slot;
    const uint8_t* rows[kRows];
  } ahead{static_cast<int>(blockIdx.x), 0, 0, {}};
  auto find_rows = [&] {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      ahead.rows[row] = static_cast<const uint8_t*>(p.weight) + static_cast<int64_t>(row_of(ahead.tile, row)) * p.in + 16 * t;
  };
  auto copy_chunk = [&] {
    if (ahead.tile < tiles) {
      const int column = begin + ahead.chunk * kChunk;
      uint4* to = ring + ahead.slot * kVectors * kRows * kThreads + threadIdx.x;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const bool there = column + kColumns * v < p.in;
        const int at = there ? column + kColumns * v : 0;
#pragma unroll
        for (int row = 0; row < kRows; ++row) start_copy(to + (kRows * v + row) * kThreads, ahead.rows[row] + at, there);
      }
      ahead.slot = ahead.slot + 1 == kStages ? 0 : ahead.slot + 1;
      if (++ahead.chunk == chunks) {
        ahead.chunk = 0;
        ahead.tile += gridDim.x;
        find_rows();
      }
    }
    end_group();
  };
  find_rows();
  for (int i = 0; i < kStages; ++i) copy_chunk();  // weights do not depend on the kernel before
  wait_for_inputs();
  let_next_start();

  // Rows of x beyond the last repeat it, and lead to columns that are not written.
  const uint8_t* of_row[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    of_row[n] = static_cast<const uint8_t*>(p.x) + static_cast<int64_t>(min(n * 8 + g, p.rows - 1)) * p.in + 16 * t;
  uint4 next[kVectors][kTiles];  // of x, a chunk ahead
  auto load_next = [&](int column) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        next[v][n] = column + kColumns * v < p.in ? *reinterpret_cast<const uint4*>(of_row[n] + column + kColumns * v)
                                                  : make_uint4(0, 0, 0, 0);
  };
  if (kAhead) load_next(begin);
  int slot = 0, turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    float total[kM][kTiles][4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (!kAhead) load_next(begin + chunk * kChunk);
      uint4 x[kVectors][kTiles];
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int n = 0; n < kTiles; ++n) x[v][n] = next[v][n];
      if (kAhead) load_next(chunk + 1 < chunks ? begin + (chunk + 1) * kChunk : begin);
      wait_for_group<kStages - 1>();
      const uint4* from = ring + slot * kVectors * kRows * kThreads + threadIdx.x;
      slot = slot + 1 == kStages ? 0 : slot + 1;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        uint4 codes[kRows];
#pragma unroll
        for (int row = 0; row < kRows; ++row) codes[row] = from[(kRows * v + row) * kThreads];
#pragma unroll
        for (int unit = 0; unit < 2; ++unit) {
          uint32_t pairs[kRows][4];
#pragma unroll
          for (int row = 0; row < kRows; ++row) widen_unit(pairs[row], codes[row], unit);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            uint32_t b[4];
            widen_unit(b, x[v][n], unit);
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
              for (int k = 0; k < 4; k += 2) {
                const auto &low = pairs[2 * m], &high = pairs[2 * m + 1];
                const uint32_t a[4] = {low[k], high[k], low[k + 1], high[k + 1]};
                multiply<__half>(total[m][n], a, b[k], b[k + 1]);
              }
          }
        }
      }
      copy_chunk();
    }
    if (turn > 0) __syncthreads();  // partial may still be read
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int c = 0; c < 4; ++c) partial[m][warp][g + c / 2 * 8][n * 8 + 2 * t + c % 2] = total[m][n][c];
    __syncthreads();
#pragma unroll 1
    for (int m = 0; m < kM; ++m)
      finish_tile<T>(p, partial[m], measured, tile * kM + m, turn * kM + m, p.gated ? Tile::kGated : Tile::kWide, false);
  }
}

// As many blocks as are resident at once.
template <typename T, int kWarps, int kM, int kTiles>
cudaError_t run_tiles(const GemvParams& p, cudaStream_t stream) {
  constexpr size_t kShared = kRing<kWarps, kM>;
  auto kernel = float8_gemv_kernel<T, kWarps, kM, kTiles>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (error != cudaSuccess) return error;
  static const int resident = [kernel] {
    int blocks = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kWarps * 32, kShared);
    return std::max(blocks, 1) * static_cast<int>(multiprocessors());
  }();
  const int tiles = static_cast<int>(blocks_for(p.out, (p.gated ? 8 : 16) * kM));
  return launch(kernel, std::min(tiles, resident), kWarps * 32, kShared, stream, p);
}

// Two tiles at once where there are enough for all multiprocessors, and room for their sums.
template <typename T, int kTiles>
cudaError_t run_rows(const GemvParams& p, cudaStream_t stream) {
  if (p.in <= 4 * kChunk) return run_tiles<T, 4, 1, kTiles>(p, stream);
  if constexpr (kTiles < 4)
    if (blocks_for(p.out, p.gated ? 16 : 32) >= kManyPairs * multiprocessors()) return run_tiles<T, 8, 2, kTiles>(p, stream);
  return run_tiles<T, 8, 1, kTiles>(p, stream);
}

template <typename T>
cudaError_t run_type(const GemvParams& p, cudaStream_t stream) {
  return p.rows > 16 ? run_rows<T, 4>(p, stream) : p.rows > 8 ? run_rows<T, 2>(p, stream) : run_rows<T, 1>(p, stream);
}

}  // namespace

cudaError_t float8_gemv(DType dtype, const GemvParams& p, cudaStream_t stream) {
  if (p.rows > kFloat8GemvRows || p.in % kColumns != 0 || p.packing.group_size != p.in || p.x_scale == nullptr || p.norm)
    return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
