// y = act(norm(x) * weight^T + bias) + residual for few rows of x and quantized weights: gemv.cu
// with less to read and more to compute.
//
// A warp takes kM tiles at once, each 16 weight rows. A thread has rows g and g + 8. A
// vector is 64 bytes of a row, a quarter of them each thread's; a step is two mma for 8 columns of
// each thread. Codes become 16-bit pairs in registers. The tensor core sums a group of columns, and
// the group's scale multiplies the sum in float32. Integer codes are taken four bits at a time,
// plus a bias of 128 (bias_nibbles()). The bias, and the zeros or minima of groups, are corrected
// with the sum of x over the group, which an mma with ones computes. So nothing but x and y is
// rounded.
//
// kStages chunks of kVectors vectors per warp are always in flight to shared memory, past L1.
// Groups of whole vectors use a vector's columns as the threads hold them. For smaller groups a
// step has 32 adjacent columns, and threads read each other's words from a swizzled layout without
// bank conflicts. Reads out * in codes once, and a 4-byte scale per group (6 % more for 128 columns
// of 4 bits); writes y.
#include "../common/dequantize.cuh"
#include "gemv.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kVectors = 2;  // vectors of a chunk
constexpr int kStages = 3;   // chunks in flight
constexpr int kRowBytes = kVectors * 64;
constexpr unsigned kManyPairs = 2;  // minimum tile pairs per SM
template <int kWarps, int kM>
constexpr size_t kRing = sizeof(uint4) * kStages * kVectors * 2 * kM * kWarps * 32;

struct GroupParams {
  float scale, minimum;
  int zero;
};

// kM: tiles at once. kTiles: groups of 8 rows of x. kShift: groups are 1 << shift vectors;
// otherwise they are whole steps. kUneven: groups have zeros or minima.
template <typename T, CodeType kCodeType, int kWarps, int kM, int kTiles, bool kShift, bool kUneven>
__global__ void __launch_bounds__(kWarps * 32, (kM * kTiles == 1 && kShift ? 24 : 16) / kWarps)
    packed_gemv_kernel(GemvParams p, int shift) {
  constexpr bool kInteger = kCodeType != CodeType::kFloat8;
  constexpr int kThreads = kWarps * 32, kBit = kBits<kCodeType>,
                kSteps = kBit == 4 ? 4 : 2;  // steps of a vector
  constexpr int kColumns = kSteps * 32, kChunk = kVectors * kColumns, kGroups = kShift ? 1 : kSteps;
  constexpr int kPlanes = kCodeType == CodeType::kInt8 ? 2 : 1;  // planes of four bits
  constexpr int kRows = 2 * kM;                                  // weight rows of a thread
  extern __shared__ uint4 ring[];  // [kStages][kVectors][kRows][kThreads]
  __shared__ float partial[kM][kWarps][16][kTiles * 8 + 1];
  __shared__ float moments[kWarps][kTiles * 8][2];
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int height = p.gated ? 8 : 16, tiles = (p.out + height * kM - 1) / (height * kM);
  const int chunks = chunks_per_warp<kWarps, kChunk>(p.in);
  const int begin = warp * chunks * kChunk;
  const int64_t row_bytes = static_cast<int64_t>(p.in) * kBit / 8;
  // Swizzle of the thread's vector: without it rows g and g + 2 share banks.
  const int swizzle = kShift ? 0 : kBit == 4 ? g / 2 % 4 : g / 2 % 2 * 2;
  // Rows beyond the last repeat it; their sums are not written.
  auto row_of = [&](int tile, int row) {
    const int low = (tile * kM + row / 2) * height + g;
    return row % 2 == 0 ? min(low, p.out - 1)
           : p.gated    ? p.out + min(low, p.out - 1)
                        : min(low + 8, p.out - 1);
  };

  const QuantParams& quant = p.quant;
  const int groups = p.in / quant.group_size, all_rows = p.gated ? 2 * p.out : p.out;
  const float per_group = 1.f / quant.group_size;
  const bool has_minima = kUneven && quant.minimum != nullptr;
  auto group_of = [&](int column) {
    return min(kShift ? column / kColumns >> shift : static_cast<int>((column + 0.5f) * per_group),
               groups - 1);
  };

  // Producer cursor: cp.async copies run ahead of the mma, over tiles and chunks.
  struct {
    int tile, chunk, slot;
    const uint8_t* rows[kRows];
  } ahead{static_cast<int>(blockIdx.x), 0, 0, {}};
  auto find_rows = [&] {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      ahead.rows[row] =
          static_cast<const uint8_t*>(p.weight) + row_of(ahead.tile, row) * row_bytes + 16 * t;
  };
  auto copy_chunk = [&] {
    if (ahead.tile < tiles) {
      const int column = begin + ahead.chunk * kChunk;
      const int64_t first = static_cast<int64_t>(column) * kBit / 8;
      uint4* to =
          ring + ahead.slot * kVectors * kRows * kThreads + warp * 32 + g * 4 + (t ^ swizzle);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const bool there = first + 64 * v + 16 * t < row_bytes;
        const int64_t at = there ? first + 64 * v : -16 * t;
#pragma unroll
        for (int row = 0; row < kRows; ++row)
          cp_async(to + (kRows * v + row) * kThreads, ahead.rows[row] + at, there);
      }
      if (t < kRows && g == 0) {  // prefetch scales and minima to L2
        const int row = row_of(ahead.tile, t), group = group_of(column);
        prefetch_l2(quant.scale + group * all_rows + row);
        if (has_minima) prefetch_l2(quant.minimum + group * all_rows + row);
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

  GroupParams next[kGroups][kRows];  // of the next vector
  int rows[kRows];
  auto begin_tile = [&](int tile) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) rows[row] = row_of(tile, row);
  };
  auto load_next = [&](int column) {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      const int group = group_of(column + k * 32), first = group * all_rows;
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        next[k][row] = {__ldg(quant.scale + first + rows[row]),
                        has_minima ? __ldg(quant.minimum + first + rows[row]) : 0.f,
                        kUneven ? load_zero<kCodeType>(quant, rows[row], group, groups)
                                : kDefaultZero<kCodeType>};
    }
  };
  begin_tile(blockIdx.x);
  load_next(begin);
  pdl_wait();
  pdl_launch_dependents();

  // Rows of x beyond the last repeat it, and lead to columns that are not written.
  const T* of_row[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    of_row[n] = static_cast<const T*>(p.x) +
                static_cast<int64_t>(min(n * 8 + g, p.rows - 1)) * p.in +
                (kShift ? kSteps : 1) * 8 * t;
  const uint32_t one = pack2<T>(1.f, 1.f), ones[4] = {one, one, one, one};
  int slot = 0, turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    float total[kM][kTiles][4] = {}, squares[kTiles][4] = {}, of_x[kTiles][4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int column = begin + chunk * kChunk;
      cp_async_wait<kStages - 1>();
      if (!kShift) __syncwarp();
      const uint4* from = ring + slot * kVectors * kRows * kThreads + warp * 32 + g * 4;
      slot = slot + 1 == kStages ? 0 : slot + 1;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int vector = column + v * kColumns;
        GroupParams now[kGroups][kRows];
#pragma unroll
        for (int k = 0; k < kGroups; ++k)
#pragma unroll
          for (int row = 0; row < kRows; ++row) now[k][row] = next[k][row];
        if (v + 1 == kVectors && chunk + 1 == chunks && tile + gridDim.x < tiles)
          begin_tile(tile + gridDim.x);
        load_next(v + 1 < kVectors     ? vector + kColumns
                  : chunk + 1 < chunks ? column + kChunk
                                       : begin);
        if (vector >= p.in) continue;

        uint4 b[kSteps][kTiles];
#pragma unroll
        for (int j = 0; j < kSteps; ++j)
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const int at = vector + j * (kShift ? 8 : 32);
            b[j][n] = kShift || at < p.in ? *reinterpret_cast<const uint4*>(of_row[n] + at)
                                          : make_uint4(0, 0, 0, 0);
          }
        if (p.norm && turn == 0)
#pragma unroll
          for (int j = 0; j < kSteps; ++j)
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              const uint4& x = b[j][n];  // with itself: squares on the diagonal; with ones: the sum
              const uint32_t low[4] = {x.x, 0, x.y, 0}, high[4] = {x.z, 0, x.w, 0};
              mma_m16n8k16<T>(squares[n], low, x.x, x.y);
              mma_m16n8k16<T>(squares[n], high, x.z, x.w);
              if (p.row_sums != nullptr) {
                mma_m16n8k16<T>(of_x[n], ones, x.x, x.y);
                mma_m16n8k16<T>(of_x[n], ones, x.z, x.w);
              }
            }
        uint32_t own[kRows][4] = {};
        if constexpr (kShift)
#pragma unroll
          for (int row = 0; row < kRows; ++row) {
            const uint4 bytes = from[(kRows * v + row) * kThreads + t];
            own[row][0] = bytes.x, own[row][1] = bytes.y, own[row][2] = bytes.z,
            own[row][3] = bytes.w;
          }
        auto words = [&](int of, int j) {
          const uint4* row = from + (kRows * v + of) * kThreads;
          if constexpr (kBit == 4)
            return make_uint2(
                kShift ? own[of][j] : reinterpret_cast<const uint32_t*>(row + (j ^ swizzle))[t], 0);
          else if constexpr (kShift) return make_uint2(own[of][2 * j], own[of][2 * j + 1]);
          else return reinterpret_cast<const uint2*>(row + ((2 * j + t / 2) ^ swizzle))[t % 2];
        };
        float sum[kM][kPlanes][kTiles][4] = {}, sum_of_x[kTiles][4] = {};
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          uint32_t pairs[kRows][kPlanes][4];
#pragma unroll
          for (int row = 0; row < kRows; ++row)
            unpack_unit<T, kCodeType>(pairs[row], words(row, j));
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
              const uint32_t b0 = k == 0 ? b[j][n].x : b[j][n].z,
                             b1 = k == 0 ? b[j][n].y : b[j][n].w;
#pragma unroll
              for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int plane = 0; plane < kPlanes; ++plane) {
                  const auto &low = pairs[2 * m][plane], &high = pairs[2 * m + 1][plane];
                  const uint32_t a[4] = {low[k], high[k], low[k + 1], high[k + 1]};
                  mma_m16n8k16<T>(sum[m][plane][n], a, b0, b1);
                }
              if (kInteger) mma_m16n8k16<T>(sum_of_x[n], ones, b0, b1);
            }
          if (kShift && j + 1 < kSteps) continue;
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
#pragma unroll
              for (int m = 0; m < kM; ++m) {
                const GroupParams& group = now[kShift ? 0 : j][2 * m + c / 2];
                float own_sum = sum[m][0][n][c];
                if (kPlanes == 2) own_sum = fmaf(sum[m][kPlanes - 1][n][c], 16.f, own_sum);
                float& of_tile = total[m][n][c];
                of_tile = fmaf(own_sum, group.scale, of_tile);
                const float standing = kNibbleBias<T> * (kPlanes == 2 ? 17 : 1) + group.zero;
                if (kInteger)
                  of_tile =
                      fmaf(sum_of_x[n][c], fmaf(-standing, group.scale, group.minimum), of_tile);
                sum[m][0][n][c] = sum[m][kPlanes - 1][n][c] = 0;
              }
              sum_of_x[n][c] = 0;
            }
        }
      }
      if (!kShift) __syncwarp();  // the chunk has been read
      copy_chunk();
    }
    if (turn > 0) __syncthreads();  // partial may still be read
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = n * 8 + 2 * t;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int c = 0; c < 4; ++c) partial[m][warp][g + c / 2 * 8][row + c % 2] = total[m][n][c];
      if (p.norm && turn == 0 && g / 2 == t) {
        moments[warp][n * 8 + g][0] = g % 2 == 0 ? of_x[n][0] : of_x[n][1];
        moments[warp][n * 8 + g][1] = g % 2 == 0 ? squares[n][0] : squares[n][1];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int m = 0; m < kM; ++m)
      store_tile<T>(p, partial[m], moments, tile * kM + m, turn * kM + m,
                    p.gated ? TileShape::kGated : TileShape::kWide, p.norm);
  }
}

// A persistent grid.
template <typename T, CodeType kCodeType, int kWarps, int kM, int kTiles, bool kShift, bool kUneven>
cudaError_t run_groups(const GemvParams& p, int shift, cudaStream_t stream) {
  constexpr size_t kShared = kRing<kWarps, kM>;
  auto kernel = packed_gemv_kernel<T, kCodeType, kWarps, kM, kTiles, kShift, kUneven>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (error != cudaSuccess) return error;
  static const int resident = resident_blocks(kernel, kWarps * 32, kShared);
  const int tiles = static_cast<int>(ceil_div(p.out, (p.gated ? 8 : 16) * kM));
  return launch(kernel, std::min(tiles, resident), kWarps * 32, kShared, stream, p, shift);
}

// Two tiles at once if there are enough for all SMs, and shared memory for their rings and sums.
template <typename T, CodeType kCodeType, int kWarps, int kTiles, bool kShift, bool kUneven>
cudaError_t run_pairs(const GemvParams& p, int shift, cudaStream_t stream) {
  constexpr int kSums = 20 << 10;
  const bool has_room = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >=
                        static_cast<int>(kRing<8, 2>) + kSums;
  if constexpr (kShift && kWarps == 8)
    if (has_room && ceil_div(p.out, p.gated ? 16 : 32) >= kManyPairs * num_sms())
      return run_groups<T, kCodeType, kWarps, 2, kTiles, kShift, kUneven>(p, shift, stream);
  return run_groups<T, kCodeType, kWarps, 1, kTiles, kShift, kUneven>(p, shift, stream);
}

template <typename T, CodeType kCodeType, int kWarps, int kTiles, bool kShift>
cudaError_t run_zeros(const GemvParams& p, int shift, cudaStream_t stream) {
  if constexpr (kCodeType != CodeType::kFloat8)
    if (p.quant.zero != nullptr || p.quant.minimum != nullptr)
      return run_pairs<T, kCodeType, kWarps, kTiles, kShift, true>(p, shift, stream);
  return run_pairs<T, kCodeType, kWarps, kTiles, kShift, false>(p, shift, stream);
}

template <typename T, CodeType kCodeType, int kWarps, int kTiles>
cudaError_t run_tiles(const GemvParams& p, cudaStream_t stream) {
  constexpr int kVector = 512 / kBits<kCodeType>;
  int shift = 0;
  while (kVector << shift < p.quant.group_size) ++shift;
  return kVector << shift == p.quant.group_size
             ? run_zeros<T, kCodeType, kWarps, kTiles, true>(p, shift, stream)
             : run_zeros<T, kCodeType, kWarps, kTiles, false>(p, 0, stream);
}

template <typename T, CodeType kCodeType, int kWarps>
cudaError_t run_warps(const GemvParams& p, cudaStream_t stream) {
  return p.rows > 8 ? run_tiles<T, kCodeType, kWarps, 2>(p, stream)
                    : run_tiles<T, kCodeType, kWarps, 1>(p, stream);
}

template <typename T, CodeType kCodeType>
cudaError_t run_codes(const GemvParams& p, cudaStream_t stream) {
  return ceil_div(p.in, kRowBytes * 8 / kBits<kCodeType>) > 4
             ? run_warps<T, kCodeType, 8>(p, stream)
             : run_warps<T, kCodeType, 4>(p, stream);
}

template <typename T>
cudaError_t run_type(const GemvParams& p, cudaStream_t stream) {
  return dispatch_code_type(p.quant.code_type,
                            [&](auto codes) { return run_codes<T, codes.value>(p, stream); });
}

}  // namespace

cudaError_t packed_gemv(DType dtype, const GemvParams& p, cudaStream_t stream) {
  if (has_integer_gemv(p)) return integer_gemv(dtype, p, stream);
  if (has_float16_gemv(p)) return float16_gemv(dtype, p, stream);
  const int group = p.quant.group_size;
  if (p.rows > kGemvRows || p.in % 32 != 0 || group < 32 || group % 32 != 0 || p.in % group != 0)
    return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
