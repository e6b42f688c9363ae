// y = act(x * weight^T + bias) + residual for few rows of x, both in FP8 with a scale per row:
// packed_gemv.cu without groups, so only whole sums are scaled.
//
// A warp takes kM tiles at once, each 16 weight rows. A thread has rows g and g + 8. A
// vector is 64 bytes of a row, a quarter of them each thread's, and two mma. The mma is float16,
// which represents FP8 exactly; one instruction converts two codes. x is in the column order of a
// repacked weight. kVectors vectors are a chunk; stages() of them per warp are in flight to
// shared memory, past L1. Reads out * in bytes of weights once, and x once per kM tiles; writes y.
//
// Up to kQuantizedRows rows of x in T are quantized by each block itself, while its first weights
// are in flight. No kernel is between this one and the producer of x, so weights are read while
// that still runs. A block reads x once and a norm's weight twice; the codes stay in shared memory.
//
// For as many rows x can stay unquantized: float16 in shared memory, divided by a power of two per
// row or group so that it does not overflow. Values of at least 2^-28 of the maximum keep 11 bits
// or more. A weight-only FP8 layer with x in bfloat16 then takes one instruction per pair instead
// of five.
//
// kGrouped: a chunk is a group of x and a block of the weight. Its sums are scaled before they are
// accumulated. A tile's rows are in one block; in a gated tile, its gates are in one and its ups in
// another.
#include "../common/dequantize.cuh"
#include "gemv.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kVectors = 2;  // vectors of a chunk
__host__ __device__ constexpr int stages(int warps) {
  return warps == 16 ? 4 : 3;
}  // chunks in flight
constexpr int kColumns = 64;  // of a vector
constexpr int kChunk = kVectors * kColumns;
constexpr unsigned kManyPairs = 2;  // minimum tile pairs per SM
constexpr int kQuantizedRows = 4;   // rows of x that blocks quantize
constexpr int kPad = 64;            // bytes between rows of codes, against bank conflicts
template <int kWarps, int kM>
constexpr size_t kRing = sizeof(uint4) * stages(kWarps) * kVectors * 2 * kM * kWarps * 32;

// Eight FP8 values as pairs of float16.
__device__ __forceinline__ void widen_unit(uint32_t (&pairs)[4], const uint4& vector, int unit) {
  fp8x4_to_half2(pairs[0], pairs[1], unit == 0 ? vector.x : vector.z);
  fp8x4_to_half2(pairs[2], pairs[3], unit == 0 ? vector.y : vector.w);
}

// x is given as codes and scales, is quantized here, or is converted to float16 here.
enum class XKind { kCodes, kRounded, kNumbers };
template <XKind kXKind>
constexpr int kWidth = kXKind == XKind::kNumbers ? 2 : 1;  // bytes of an element in shared memory
template <XKind kXKind>
__host__ __device__ __forceinline__ int row_bytes(const GemvParams& p) {
  return p.in * kWidth<kXKind> + kPad;
}

// A power of two, at least 2^-100, that divides values of at most this magnitude to less than 2^15.
__device__ __forceinline__ float power_step(float most) {
  return __uint_as_float(
      max(static_cast<int>(__float_as_uint(most) & 0x7f800000u) - (14 << 23), 27 << 23));
}

// Converts x to codes, or float16, in rows row_bytes() apart, with scales [p.rows], or of groups
// [in / kQuantBlock, kQuantizedRows]. Some of the warps handle each row. Codes equal those of
// norm_kernel (rowwise/norm.cu) up to the order of a sum. Calls pdl_wait(). `moments`: shared
// memory, one entry per warp.
template <typename T, int kWarps, XKind kXKind, bool kGrouped>
__device__ __forceinline__ void quantize_x(const GemvParams& p, uint8_t* made, float* scales,
                                           float2* moments) {
  constexpr int kHeld =
      64 / kWarps;  // vectors of x in registers: all of them, up to 16,384 columns
  const int warps = kWarps >> (p.rows > 2 ? 2 : p.rows > 1);  // warps per row
  const int warp = threadIdx.x / 32, row = warp / warps;
  const int own = warp % warps * 32 + threadIdx.x % 32, each = warps * 32;
  const int vectors = row < p.rows ? p.in / 8 : 0,
            batches = (p.in / 8 + each * kHeld - 1) / (each * kHeld);
  const T* x = static_cast<const T*>(p.x) + static_cast<int64_t>(row) * p.in;
  const float* gain = p.norm ? p.norm_weight : nullptr;
  if (gain != nullptr)
    for (int vector = own; vector < vectors; vector += each) prefetch_l1(gain + 8 * vector);
  pdl_wait();
  pdl_launch_dependents();

  uint4 held[kHeld];
  auto hold = [&](int batch) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int vector = (batch * kHeld + i) * each + own;
      held[i] = vector < vectors ? *reinterpret_cast<const uint4*>(x + 8 * vector)
                                 : make_uint4(0, 0, 0, 0);
    }
  };
  // Calls f with the index of each vector of a batch, its values, and these times the norm's
  // weight.
  auto for_each = [&](int batch, auto&& f) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int vector = (batch * kHeld + i) * each + own;
      if (vector >= vectors) break;
      const T* elements = reinterpret_cast<const T*>(&held[i]);
      Vec<float, 8> gains;
      if (gain != nullptr) gains = load<float, 8>(gain + 8 * vector);
      float numbers[8], gained[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        numbers[k] = gained[k] = to_float(elements[k]);
        if (gain != nullptr) gained[k] *= gains.data[k];
      }
      f(vector, numbers, gained);
    }
  };
  float squares = 0, most = 0;
  for (int batch = 0; batch < batches; ++batch) {
    hold(batch);
    for_each(batch, [&](int, const float (&numbers)[8], const float (&gained)[8]) {
#pragma unroll
      for (int k = 0; k < 8; ++k) squares += numbers[k] * numbers[k];
      most = fmaxf(most, abs_max(gained));
    });
  }
  const float2 of_warp{warp_sum(squares), warp_abs_max(most)};
  if (threadIdx.x % 32 == 0) moments[warp] = of_warp;
  __syncthreads();
  float2 all{};
#pragma unroll
  for (int w = 0; w < kWarps; ++w)
    if (w >= row * warps && w < (row + 1) * warps)
      all = {all.x + moments[w].x, fmaxf(all.y, moments[w].y)};
  const float scale = p.norm ? rsqrtf(all.x / p.in + p.epsilon) : 1.f;
  auto step_of = [&](float most) {
    return kXKind == XKind::kNumbers ? power_step(most * scale) : fp8_scale(most * scale);
  };
  const float step = p.static_scale > 0 ? p.static_scale : step_of(all.y);
  float inverse = scale / step;
  if (!kGrouped && own == 0 && row < p.rows) scales[row] = step;
  for (int batch = batches - 1; batch >= 0; --batch) {  // the last batch is still held
    if (batch != batches - 1) hold(batch);
    for_each(batch, [&](int vector, const float (&)[8], const float (&gained)[8]) {
      if constexpr (kGrouped) {  // a group belongs to half a warp
        const float own_step = step_of(half_warp_max(abs_max(gained)));
        inverse = scale / own_step;
        if (vector % (kQuantBlock / 8) == 0)
          scales[vector / (kQuantBlock / 8) * kQuantizedRows + row] = own_step;
      }
      uint8_t* const to =
          made + row * row_bytes<kXKind>(p) + 8 * kWidth<kXKind> * vector;  // see packed_column()
      if constexpr (kXKind == XKind::kNumbers) {
        auto pair_of = [&](int k) {
          return pack2<__half>(gained[k] * inverse, gained[k + 2] * inverse);
        };
        *reinterpret_cast<uint4*>(to) = make_uint4(pair_of(0), pair_of(4), pair_of(1), pair_of(5));
      } else {
        *reinterpret_cast<uint2*>(to) = quantize_unit(gained, inverse);
      }
    });
  }
}

// [kStages][kVectors][kRows][kThreads], then the converted x, then scales of its groups. With the
// ring at 16 bytes beyond a multiple of 32, the size of a memory sector, a step took 11 % longer.
extern __shared__ __align__(32) uint4 ring[];

// Producer cursor: the chunk that a thread copies next.
template <int kRows>
struct ChunkCursor {
  int tile, chunk, slot;
  const uint8_t* rows[kRows];
};

// Producer: cp.async copies run ahead of the mma, over tiles and chunks. Refers to variables of the
// kernel, like a lambda: copies of them are other machine code.
template <int kWarps, int kM, typename RowOf>
struct Producer {
  static constexpr int kThreads = kWarps * 32, kRows = 2 * kM, kStages = stages(kWarps);

  __device__ __forceinline__ void find_rows() const {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      ahead.rows[row] = static_cast<const uint8_t*>(p.weight) +
                        static_cast<int64_t>(row_of(ahead.tile, row)) * p.in + 16 * t;
  }
  __device__ __forceinline__ void copy_chunk() const {
    if (ahead.tile < tiles) {
      const int column = begin + ahead.chunk * kChunk;
      uint4* to = ring + ahead.slot * kVectors * kRows * kThreads + threadIdx.x;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const bool there = column + kColumns * v < p.in;
        const int at = there ? column + kColumns * v : 0;
#pragma unroll
        for (int row = 0; row < kRows; ++row)
          cp_async(to + (kRows * v + row) * kThreads, ahead.rows[row] + at, there);
      }
      ahead.slot = ahead.slot + 1 == kStages ? 0 : ahead.slot + 1;
      if (++ahead.chunk == chunks) {
        ahead.chunk = 0;
        ahead.tile += gridDim.x;
        find_rows();
      }
    }
    cp_async_commit();
  }

  ChunkCursor<kRows>& ahead;
  const GemvParams& p;
  const RowOf& row_of;
  const int &t, &tiles, &begin, &chunks;
};

// kM: tiles at once. kTiles: groups of 8 rows of x.
template <typename T, int kWarps, int kM, int kTiles, XKind kXKind, bool kGrouped>
__global__ void __launch_bounds__(kWarps * 32, kXKind != XKind::kCodes
                                                   ? 2
                                                   : (kM * kTiles == 1 ? 24 : 16) / kWarps)
    float8_gemv_kernel(GemvParams p) {
  constexpr bool kQuantizesX = kXKind != XKind::kCodes;
  static_assert(!kQuantizesX || kTiles == 1);
  static_assert(kChunk == kQuantBlock);
  constexpr int kThreads = kWarps * 32, kRows = 2 * kM;  // kRows: weight rows of a thread
  constexpr int kStages = stages(kWarps),
                kSums = kQuantizesX ? kQuantizedRows : kTiles * 8;  // kSums: sums of a weight row
  constexpr bool kAhead = kTiles < 4;                               // registers suffice
  __shared__ float partial[kM][kWarps][16][kSums + 1];
  __shared__ float moments[kWarps][kTiles * 8][2];  // unused: rows are already normalized
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int height = p.gated ? 8 : 16, tiles = (p.out + height * kM - 1) / (height * kM);
  const int chunks = chunks_per_warp<kWarps, kChunk>(p.in);
  const int begin = warp * chunks * kChunk;
  // Rows beyond the last repeat it; their sums are not written.
  auto row_of = [&](int tile, int row) {
    const int low = (tile * kM + row / 2) * height + g;
    return row % 2 == 0 ? min(low, p.out - 1)
           : p.gated    ? p.out + min(low, p.out - 1)
                        : min(low + 8, p.out - 1);
  };

  ChunkCursor<kRows> ahead{static_cast<int>(blockIdx.x), 0, 0, {}};
  const Producer<kWarps, kM, decltype(row_of)> producer{ahead, p, row_of, t, tiles, begin, chunks};
  producer.find_rows();
  for (int i = 0; i < kStages; ++i)
    producer.copy_chunk();  // weights do not depend on the previous kernel

  auto* const made = reinterpret_cast<uint8_t*>(ring + kStages * kVectors * kRows * kThreads);
  // Prefetches the epilogue's scales and residual to L1.
  const int outputs = height * kM;
  auto prefetch_scales = [&](int tile) {
    if (kGrouped) return;
    const int output = tile * outputs + threadIdx.x;
    if (static_cast<int>(threadIdx.x) >= outputs || output >= p.out) return;
    prefetch_l1(p.quant.scale + output);
    if (p.gated) prefetch_l1(p.quant.scale + p.out + output);
  };
  auto prefetch_residual = [&](int tile) {
    const int row = threadIdx.x / outputs, output = tile * outputs + threadIdx.x % outputs;
    if (p.residual != nullptr && row < p.rows && output < p.out)
      prefetch_l1(static_cast<const T*>(p.residual) + static_cast<int64_t>(row) * p.out + output);
  };
  const float* x_scales = p.x_scale;  // of groups
  const int x_stride = kQuantizesX ? kQuantizedRows : group_scale_stride(p.rows);
  if constexpr (kQuantizesX) {
    __shared__ float of_rows[kQuantizedRows];
    __shared__ float2 of_warps[kWarps];
    float* const scales =
        kGrouped ? reinterpret_cast<float*>(made + p.rows * row_bytes<kXKind>(p)) : of_rows;
    prefetch_scales(blockIdx.x);
    quantize_x<T, kWarps, kXKind, kGrouped>(p, made, scales, of_warps);
    if (kGrouped) x_scales = scales;
    else p.x_scale = scales;
    __syncthreads();
  } else {
    pdl_wait();
    pdl_launch_dependents();
  }

  // Rows of x beyond the last repeat it, and lead to columns that are not written.
  const uint8_t* of_row[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    of_row[n] = static_cast<const uint8_t*>(p.x) +
                static_cast<int64_t>(min(n * 8 + g, p.rows - 1)) * p.in + 16 * t;
  const uint8_t* const of_made =
      made + min(g, p.rows - 1) * row_bytes<kXKind>(p) + 16 * kWidth<kXKind> * t;
  uint4 next[kVectors][kTiles];  // x of the next chunk
  auto load_next = [&](int column) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        next[v][n] = column + kColumns * v < p.in
                         ? *reinterpret_cast<const uint4*>(of_row[n] + column + kColumns * v)
                         : make_uint4(0, 0, 0, 0);
  };
  if (kAhead && !kQuantizesX) load_next(begin);
  int slot = 0, turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    float total[kM][kTiles][4] = {}, sums[kM][kTiles][4];
    const float* blocks[kM][2];  // block scales of the rows of both halves of a tile
    if constexpr (kGrouped)
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int low = min((tile * kM + m) * height, p.out - 1);
          blocks[m][half] = p.quant.blocks + (p.gated && half == 1 ? p.out + low : low) /
                                                 kQuantBlock * block_scale_stride(p.in);
        }
    if (kQuantizesX && turn > 0) prefetch_scales(tile);
    if (kQuantizesX) prefetch_residual(tile);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (!kAhead && !kQuantizesX) load_next(begin + chunk * kChunk);
      float of_weight[kM][2], of_x[kTiles][2];
      if constexpr (kGrouped) {
        const int group = min(begin / kQuantBlock + chunk, p.in / kQuantBlock - 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int m = 0; m < kM; ++m) of_weight[m][half] = __ldg(blocks[m][half] + group);
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
            of_x[n][half] = x_scales[group * x_stride + min(n * 8 + 2 * t + half, p.rows - 1)];
        }
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) sums[m][n][c] = 0;
      }
      auto& added = kGrouped ? sums : total;
      uint4 x[kVectors][kTiles][kWidth<kXKind>];
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int column =
              begin + chunk * kChunk + kColumns * v;  // beyond the last column the weights are 0
          const auto* from = reinterpret_cast<const uint4*>(of_made + (column < p.in ? column : 0) *
                                                                          kWidth<kXKind>);
#pragma unroll
          for (int i = 0; i < kWidth<kXKind>; ++i) x[v][n][i] = kQuantizesX ? from[i] : next[v][n];
        }
      if (kAhead && !kQuantizesX)
        load_next(chunk + 1 < chunks ? begin + (chunk + 1) * kChunk : begin);
      cp_async_wait<kStages - 1>();
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
            if constexpr (kXKind == XKind::kNumbers) {
              const uint4& numbers = x[v][n][unit];
              b[0] = numbers.x, b[1] = numbers.y, b[2] = numbers.z, b[3] = numbers.w;
            } else {
              widen_unit(b, x[v][n][0], unit);
            }
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
              for (int k = 0; k < 4; k += 2) {
                const auto &low = pairs[2 * m], &high = pairs[2 * m + 1];
                const uint32_t a[4] = {low[k], high[k], low[k + 1], high[k + 1]};
                mma_m16n8k16<__half>(added[m][n], a, b[k], b[k + 1]);
              }
          }
        }
      }
      if constexpr (kGrouped)
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c)
              total[m][n][c] =
                  fmaf(sums[m][n][c], of_weight[m][c / 2] * of_x[n][c % 2], total[m][n][c]);
      producer.copy_chunk();
    }
    if (turn > 0) __syncthreads();  // partial may still be read
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (n * 8 + 2 * t < kSums)
            partial[m][warp][g + c / 2 * 8][n * 8 + 2 * t + c % 2] = total[m][n][c];
    __syncthreads();
#pragma unroll 1
    for (int m = 0; m < kM; ++m)
      store_tile<T>(p, partial[m], moments, tile * kM + m, turn * kM + m,
                    p.gated ? TileShape::kGated : TileShape::kWide, false);
  }
}

// Dynamic shared memory of a block.
template <int kWarps, int kM, XKind kXKind>
size_t smem_bytes(const GemvParams& p) {
  if (kXKind == XKind::kCodes) return kRing<kWarps, kM>;
  const size_t scales = p.grouped ? p.in / kQuantBlock * kQuantizedRows * sizeof(float) : 0;
  return kRing<kWarps, kM> + static_cast<size_t>(p.rows) * row_bytes<kXKind>(p) + scales;
}

// A persistent grid.
template <typename T, int kWarps, int kM, int kTiles, XKind kXKind, bool kGrouped>
cudaError_t run_groups(const GemvParams& p, cudaStream_t stream) {
  const size_t shared = smem_bytes<kWarps, kM, kXKind>(p);
  const auto kernel = float8_gemv_kernel<T, kWarps, kM, kTiles, kXKind, kGrouped>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  int blocks = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kWarps * 32, shared);
  if (error != cudaSuccess) return error;
  const int tiles = static_cast<int>(ceil_div(p.out, (p.gated ? 8 : 16) * kM));
  const int resident = std::max(blocks, 1) * static_cast<int>(num_sms());
  return launch(kernel, std::min(tiles, resident), kWarps * 32, shared, stream, p);
}

template <typename T, int kWarps, int kM, int kTiles, XKind kXKind = XKind::kCodes>
cudaError_t run_tiles(const GemvParams& p, cudaStream_t stream) {
  return p.grouped ? run_groups<T, kWarps, kM, kTiles, kXKind, true>(p, stream)
                   : run_groups<T, kWarps, kM, kTiles, kXKind, false>(p, stream);
}

// Two tiles at once if there are enough for all SMs, and registers for their sums.
template <typename T, int kTiles>
cudaError_t run_rows(const GemvParams& p, cudaStream_t stream) {
  if (p.in <= 4 * kChunk) return run_tiles<T, 4, 1, kTiles>(p, stream);
  if constexpr (kTiles < 4)
    if (ceil_div(p.out, p.gated ? 16 : 32) >= kManyPairs * num_sms())
      return run_tiles<T, 8, 2, kTiles>(p, stream);
  return run_tiles<T, 8, 1, kTiles>(p, stream);
}

// If blocks quantize x, few large blocks do it less often. For one or two rows and 512 to 8,192
// outputs one tile by 16 warps was fastest with 8,192 and 14,336 columns; two tiles by 8 warps with
// 576 to 4,096, or at most 0.8 us slower (H100).
bool has_long_rows(const GemvParams& p) { return p.in > 6144; }

template <typename T, XKind kXKind>
cudaError_t dispatch_quantizing(const GemvParams& p, cudaStream_t stream) {
  return has_long_rows(p) ? run_tiles<T, 16, 1, 1, kXKind>(p, stream)
                          : run_tiles<T, 8, 2, 1, kXKind>(p, stream);
}

template <typename T>
cudaError_t run_type(const GemvParams& p, cudaStream_t stream) {
  if (p.x_scale == nullptr) return dispatch_quantizing<T, XKind::kRounded>(p, stream);
  return p.rows > 16  ? run_rows<T, 4>(p, stream)
         : p.rows > 8 ? run_rows<T, 2>(p, stream)
                      : run_rows<T, 1>(p, stream);
}

// Whether its scales are per row, or per block with a tile's rows in one block.
bool has_scales(const GemvParams& p) {
  return p.grouped
             ? p.quant.blocks != nullptr && p.in % kQuantBlock == 0 && (!p.gated || p.out % 8 == 0)
             : p.quant.group_size == p.in;
}

template <XKind kXKind>
bool can_quantize(const GemvParams& p) {
  const size_t shared =
                   has_long_rows(p) ? smem_bytes<16, 1, kXKind>(p) : smem_bytes<8, 2, kXKind>(p),
               beside = 8192;
  return p.rows <= kQuantizedRows && p.in % kColumns == 0 &&
         p.quant.code_type == CodeType::kFloat8 && has_scales(p) && p.row_sums == nullptr &&
         is_aligned(p.norm_weight, sizeof(Vec<float, 8>)) &&
         shared + beside <=
             static_cast<size_t>(device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>());
}

// Uses block scales if the weight has them.
GemvParams with_blocks(const GemvParams& p) {
  GemvParams made = p;
  made.grouped = p.quant.blocks != nullptr;
  return made;
}

}  // namespace

bool has_quantizing_gemv(const GemvParams& p) { return can_quantize<XKind::kRounded>(p); }

bool has_float16_gemv(const GemvParams& p) {
  return p.x_scale == nullptr && can_quantize<XKind::kNumbers>(with_blocks(p)) &&
         device_attribute<cudaDevAttrComputeCapabilityMajor>() == 9;
}

cudaError_t float16_gemv(DType dtype, const GemvParams& p, cudaStream_t stream) {
  if (!has_float16_gemv(p)) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16)
    return dispatch_quantizing<__half, XKind::kNumbers>(with_blocks(p), stream);
  if (dtype == DType::kBFloat16)
    return dispatch_quantizing<__nv_bfloat16, XKind::kNumbers>(with_blocks(p), stream);
  return cudaErrorInvalidValue;
}

cudaError_t float8_gemv(DType dtype, const GemvParams& p, cudaStream_t stream) {
  if (p.rows > kFloat8GemvRows || p.in % kColumns != 0 || !has_scales(p))
    return cudaErrorInvalidValue;
  if (p.x_scale == nullptr ? !has_quantizing_gemv(p) : p.norm) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
