// small_gemm_sm90() for 4-bit weights in groups of 128 columns, a multiple of 256, or whole rows.
//
// A stage has 256 columns of 64 weight rows, or of 64 gates and their ups: codes, scales, x, and
// the norm's weights. A warp takes half of the columns and half of the rows. Codes become 16-bit
// values in registers, the A operand of mma; x is B, in its own order: thread t of four has a
// quarter of 128 columns of both, since the order of K does not matter. The values have a bias
// (bias_nibbles()), which is corrected with the sum of x, computed by an mma with ones; sums are
// scaled in float32. Reads the weight once, and x once per tile, from L2.
//
// A norm is fused: the mma of x with itself has the squares on its diagonal. Two warps have the
// same x, and each squares half of it.
//
// A warp has as many independent mma in flight as accumulators, and scales each once per half
// stage; hence four consumer warps, not eight. A stage has no branches, since the compiler moves no
// load across one.
#include "../common/dequantize.cuh"
#include "small_gemm_pipeline_sm90.cuh"
#include "small_gemm_sm90.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using namespace sm90;

constexpr int kWarps = 4, kConsumerThreads = kWarps * 32;
constexpr int kColumns = 256, kHalf = kColumns / 2;   // of a stage; groups are whole halves
constexpr int kCodeBytes = kColumns / 2;              // of a row in a stage
constexpr uint32_t kBlockBytes = kRows * kCodeBytes;  // of 64 rows
constexpr int kUnits = 2,
              kAllUnits = 4;  // units of 8 columns that a thread has at once, and per stage

// Keeps x in a register; otherwise the compiler recomputes it in each stage.
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }

template <int kTokens, bool kGated, bool kNorm>
struct StageLayout {
  static constexpr int kOperands = kGated ? 2 : 1, kLines = 4, kTiles = kTokens / 8;
  static constexpr int kM = 2 * kOperands;  // tiles of 16 rows of a warp
  static constexpr uint32_t kXBytes = kTokens * kRowBytes, kXAt = kOperands * kBlockBytes;
  static constexpr uint32_t kScalesAt = kXAt + kLines * kXBytes;  // [2, kOperands, kRows]
  static constexpr uint32_t kScaleBytes = 2 * kOperands * kRows * 4;
  static constexpr uint32_t kNormAt = kScalesAt + kScaleBytes;
  using Storage = SharedStorage<kOperands, kTokens,
                                (kNormAt + kNorm * kColumns * 4 + 1023) / 1024 * 1024, kWarps>;
};

struct TensorMaps {
  CUtensorMap weights, x, scales, norm;
};

// Groups of a half stage, or of whole stages; and the number of groups in a stage.
struct StageGroups {
  bool halves;
  int stages, in_stage;

  __host__ __device__ explicit StageGroups(const GemvParams& p)
      : halves(p.quant.group_size == kHalf),
        stages((p.quant.group_size + kColumns - 1) / kColumns),
        in_stage(halves ? 2 : 1) {}

  __device__ int of(int stage, int half) const {
    return halves ? 2 * stage + half : stage / stages;
  }
};

template <typename T, int kTokens, bool kGated, bool kNorm>
__device__ __forceinline__ void produce_weights(
    const typename StageLayout<kTokens, kGated, kNorm>::Storage& smem, const TensorMaps& maps,
    const GemvParams& p, const TileRange& range) {
  using S = StageLayout<kTokens, kGated, kNorm>;
  const StageGroups groups(p);
  const uint32_t bytes =
      S::kXAt + groups.in_stage * S::kOperands * kRows * 4 + (kNorm ? kColumns * 4 : 0);
  int group = 0, left = 0;
  produce</*kOfWeight=*/true>(smem, range, [&](int slot, int tile, int stage) {
    const Mbarrier full = smem.full_barrier(slot);
    const uint32_t to = smem.stage(slot);
    const int row = tile * kRows;
    full.arrive_expect_tx(bytes);
    tma_load(to, maps.weights, full, stage * kCodeBytes, row, 0);
    if (stage == range.begin)
      group = groups.of(stage, 0), left = groups.stages - stage % groups.stages;
    tma_load(to + S::kScalesAt, maps.scales, full, row, 0, group);
    if (kNorm) tma_load(to + S::kNormAt, maps.norm, full, stage * kColumns, 0);
    if (groups.halves) group += 2;
    else if (--left == 0) ++group, left = groups.stages;
  });
}

// Writes a block's sums of a tile, and the squares of x, to shared memory. The two warps that have
// the same rows add their sums in the order of the columns.
template <int kTokens, bool kGated, bool kNorm>
__device__ __forceinline__ void store_sums(
    const typename StageLayout<kTokens, kGated, kNorm>::Storage& smem,
    const float (&total)[StageLayout<kTokens, kGated, kNorm>::kM][kTokens / 8][4],
    const float (&squares)[kTokens / 8][4], int half, int twin, int first_row) {
  using S = StageLayout<kTokens, kGated, kNorm>;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {  // in the order of the columns
    if (turn == half) {
      if (kNorm && t == g / 2)
#pragma unroll
        for (int n = 0; n < S::kTiles; ++n) {
          float2& of_row = reinterpret_cast<float2*>(smem.moments() + 8 * n + g)[twin];
          const float own = g % 2 == 0 ? squares[n][2 * n] : squares[n][2 * n + 1];
          of_row = make_float2(0, turn == 0 ? own : of_row.y + own);
        }
#pragma unroll
      for (int m = 0; m < S::kM; ++m)
#pragma unroll
        for (int n = 0; n < S::kTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& sum = smem.sums()[(m / 2 * kTokens + 8 * n + 2 * t + i % 2) * kSumStride +
                                     first_row + m % 2 * 16 + i / 2 * 8];
            sum = turn == 0 ? total[m][n][i] : sum + total[m][n][i];
          }
    }
    if (turn == 0) smem.sync_consumers();
  }
}

template <typename T, int kTokens, bool kGated, bool kNorm, bool kZeros>
__device__ __forceinline__ void consume(
    const typename StageLayout<kTokens, kGated, kNorm>::Storage& smem, const GemvParams& p,
    const TileRange& range) {
  using S = StageLayout<kTokens, kGated, kNorm>;
  const int thread = threadIdx.x, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  const int half = warp % 2, twin = warp / 2;  // halves of the columns and of the rows
  const int turned = g % 4 * 2 + g / 4;  // row of eight, such that half a warp has no bank conflict
  const int first_row = twin * 32 + turned;  // others are m % 2 * 16 and h * 8 further
  const StageGroups groups(p);
  const int all_groups = p.in / p.quant.group_size;
  pdl_wait();
  pdl_launch_dependents();

  // Offsets in a stage, in registers. TMA swizzles vectors. Threads 2 and 3, and the twin warp,
  // start with the other units: against bank conflicts, and because squares are made of the first
  // units.
  const int first_unit = (t / 2 ^ twin) * kUnits;
  uint32_t codes_at = first_row * kCodeBytes + 16 * ((4 * half + t) ^ turned) + 4 * first_unit;
  uint32_t x_at = S::kXAt + (2 * half + t / 2) * S::kXBytes + g * kRowBytes +
                  16 * ((t % 2 * kAllUnits + first_unit) ^ g);
  uint32_t scales_at = S::kScalesAt + (groups.halves * half * S::kOperands * kRows + first_row) * 4;
  uint32_t norm_at = S::kNormAt + (half * kHalf + 32 * t + 8 * first_unit) * 4;
  uint32_t at = smem.stage(0), slot = 0, parity = 0;
  keep(codes_at), keep(x_at), keep(scales_at), keep(norm_at), keep(at);
  uint32_t one = pack2<T>(1.f, 1.f);
  keep(one);
  const uint32_t ones[4] = {one, one, one, one};
  for (int tile = range.first; tile < range.tiles; tile += range.step) {
    float total[S::kM][S::kTiles][4] = {};
    float squares[S::kTiles][4] = {};  // of rows g and g + 8 of x, among other products
    const Epilogue<T, S::kOperands, kTokens, kConsumerThreads> epilogue(p, range, tile);
    for (int stage = range.begin; stage < range.end; ++stage) {
      float zero[kZeros ? S::kM : 1][2] = {};
      if constexpr (kZeros) {
        const int group = min(groups.of(stage, half), all_groups - 1);
#pragma unroll
        for (int m = 0; m < S::kM; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int row = min(tile * kRows + first_row + m % 2 * 16 + 8 * h, p.out - 1);
            zero[m][h] =
                load_zero<CodeType::kInt4>(p.quant, m / 2 * p.out + row, group, all_groups);
          }
      }
      smem.full_barrier(slot).wait(parity);
      float of_x[S::kTiles][4] = {};  // sums of x, the same in every row
      float sum[S::kM][S::kTiles][4] = {};
#pragma unroll
      for (int begin = 0; begin < kAllUnits; begin += kUnits) {
        Vec<uint32_t, 4> x[kUnits][S::kTiles];
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
          for (int n = 0; n < S::kTiles; ++n)
            x[unit][n] = load_smem<4>(at + (x_at ^ 16 * (begin + unit)) + n * 8 * kRowBytes);
        if constexpr (kNorm) {
          if (begin == 0)
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
              for (int k = 0; k < 4; k += 2) {
                uint32_t a[4] = {};
#pragma unroll
                for (int n = 0; n < S::kTiles; ++n)
                  a[n] = x[unit][n].data[k], a[2 + n] = x[unit][n].data[k + 1];
#pragma unroll
                for (int n = 0; n < S::kTiles; ++n)
                  mma_m16n8k16<T>(squares[n], a, x[unit][n].data[k], x[unit][n].data[k + 1]);
              }
#pragma unroll
          for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
              const auto words = load_smem<4>(at + (norm_at ^ 32 * begin) + (8 * unit + 2 * k) * 4);
#pragma unroll
              for (int of = 0; of < 2; ++of) {
                const uint32_t pair = pack2<T>(__uint_as_float(words.data[2 * of]),
                                               __uint_as_float(words.data[2 * of + 1]));
#pragma unroll
                for (int n = 0; n < S::kTiles; ++n)
                  x[unit][n].data[k + of] = hmul2<T>(x[unit][n].data[k + of], pair);
              }
            }
        }
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
          for (int n = 0; n < S::kTiles; ++n)
#pragma unroll
            for (int k = 0; k < 4; k += 2)
              mma_m16n8k16<T>(of_x[n], ones, x[unit][n].data[k], x[unit][n].data[k + 1]);
#pragma unroll
        for (int m = 0; m < S::kM; ++m) {
          Vec<uint32_t, kUnits> codes[2];
#pragma unroll
          for (int h = 0; h < 2; ++h)
            codes[h] = load_smem<kUnits>(at + (codes_at ^ 4 * begin) + m / 2 * kBlockBytes +
                                         (m % 2 * 16 + 8 * h) * kCodeBytes);
#pragma unroll
          for (int unit = 0; unit < kUnits; ++unit) {
            uint32_t pairs[2][4];
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
              for (int k = 0; k < 4; ++k) pairs[h][k] = bias_nibbles<T>(codes[h].data[unit], 4 * k);
#pragma unroll
            for (int n = 0; n < S::kTiles; ++n)
#pragma unroll
              for (int k = 0; k < 4; k += 2) {
                const uint32_t a[4] = {pairs[0][k], pairs[1][k], pairs[0][k + 1], pairs[1][k + 1]};
                mma_m16n8k16<T>(sum[m][n], a, x[unit][n].data[k], x[unit][n].data[k + 1]);
              }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < S::kM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float lacks =
              -kNibbleBias<T> - (kZeros ? zero[kZeros ? m : 0][h] : kDefaultZero<CodeType::kInt4>);
          const float scale = __uint_as_float(
              load_smem<1>(at + scales_at + (m / 2 * kRows + m % 2 * 16 + 8 * h) * 4).data[0]);
#pragma unroll
          for (int n = 0; n < S::kTiles; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              total[m][n][2 * h + i] = fmaf(fmaf(lacks, of_x[n][i], sum[m][n][2 * h + i]), scale,
                                            total[m][n][2 * h + i]);
        }
      __syncwarp();
      if (thread % 32 == 0) smem.empty_barrier(slot).arrive();
      at += S::Storage::kStage;
      if (++slot == S::Storage::kStages) slot = 0, parity ^= 1, at = smem.stage(0);
    }
    if (range.cluster_size == 1) smem.sync_consumers();  // sums may still be read
    store_sums<kTokens, kGated, kNorm>(smem, total, squares, half, twin, first_row);
    smem.sync_consumers(range.cluster_size);
    epilogue.store(smem.sums(), smem.moments());
  }
  smem.finish(range.cluster_size);
}

template <typename T, int kTokens, bool kGated, bool kNorm, bool kZeros>
__global__ void __launch_bounds__(kConsumerThreads + 64, kMinBlocks)
    packed_small_gemm_kernel(const __grid_constant__ TensorMaps maps, GemvParams p, int tiles,
                             int stages, int cluster_size) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = StageLayout<kTokens, kGated, kNorm>;
  extern __shared__ uint8_t raw[];
  const typename S::Storage smem{raw + (-smem_address(raw) & 1023)};
  const TileRange range(tiles, stages, cluster_size);
  smem.init_barriers();
  if (threadIdx.x < kConsumerThreads) {
    consume<T, kTokens, kGated, kNorm, kZeros>(smem, p, range);
  } else if (threadIdx.x == kConsumerThreads) {
    produce_weights<T, kTokens, kGated, kNorm>(smem, maps, p, range);
  } else if (threadIdx.x == kConsumerThreads + 32) {
    pdl_wait();  // x depends on the previous kernel, weights do not
    produce</*kOfWeight=*/false>(smem, range, [&](int slot, int, int stage) {
      const Mbarrier full = smem.full_barrier(slot);
      full.arrive_expect_tx(S::kLines * S::kXBytes);
      tma_load(smem.stage(slot) + S::kXAt, maps.x, full, 0, 0, stage * S::kLines);
    });
  }
#endif
}

template <typename T, int kTokens, bool kGated, bool kNorm, bool kZeros>
cudaError_t run(const GemvParams& p, cudaStream_t stream) {
  using S = StageLayout<kTokens, kGated, kNorm>;
  constexpr auto kPlain = CU_TENSOR_MAP_SWIZZLE_NONE, kTurned = CU_TENSOR_MAP_SWIZZLE_128B;
  constexpr auto kFloat = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const auto in = static_cast<cuuint64_t>(p.in), out = static_cast<cuuint64_t>(p.out),
             tokens = static_cast<cuuint64_t>(p.rows);
  const cuuint64_t groups = in / p.quant.group_size, lines = in * 2 / kRowBytes;
  TensorMaps maps;
  if (!make_tensor_map(maps.weights, CU_TENSOR_MAP_DATA_TYPE_UINT8, kTurned, p.weight,
                       {in / 2, out, S::kOperands}, 1, {kCodeBytes, kRows, S::kOperands}) ||
      !make_tensor_map(maps.x, kTensorMapType<T>, kTurned, p.x, {kRowBytes / 2, tokens, lines},
                       {in * 2, kRowBytes}, {kRowBytes / 2, kTokens, S::kLines}) ||
      !make_tensor_map(maps.scales, kFloat, kPlain, p.quant.scale, {out, S::kOperands, groups}, 4,
                       {kRows, S::kOperands, static_cast<cuuint32_t>(StageGroups(p).in_stage)}) ||
      (kNorm &&
       !make_tensor_map(maps.norm, kFloat, kPlain, p.norm_weight, {in, 1}, 4, {kColumns, 1})))
    return cudaErrorInvalidValue;
  const int stages = static_cast<int>(ceil_div(p.in, kColumns));
  return launch_tiles<packed_small_gemm_kernel<T, kTokens, kGated, kNorm, kZeros>,
                      typename S::Storage>(stages, maps, p, stream);
}

template <typename T, int kTokens, bool kGated, bool kNorm>
cudaError_t of_codes(const GemvParams& p, cudaStream_t stream) {
  return p.quant.zero != nullptr ? run<T, kTokens, kGated, kNorm, true>(p, stream)
                                 : run<T, kTokens, kGated, kNorm, false>(p, stream);
}

template <typename T, int kTokens, bool kGated>
cudaError_t of_kind(const GemvParams& p, cudaStream_t stream) {
  return p.norm ? of_codes<T, kTokens, kGated, true>(p, stream)
                : of_codes<T, kTokens, kGated, false>(p, stream);
}

template <typename T, int kTokens>
cudaError_t of_rows(const GemvParams& p, cudaStream_t stream) {
  return p.gated ? of_kind<T, kTokens, true>(p, stream) : of_kind<T, kTokens, false>(p, stream);
}

}  // namespace

bool has_packed_small_gemm_sm90(const GemvParams& p) {
  const int group = p.quant.group_size;
  return p.quant.code_type == CodeType::kInt4 && p.quant.minimum == nullptr &&
         (group == kHalf || group % kColumns == 0 || group == p.in) &&
         p.in % (kRowBytes / 2) == 0 && p.rows <= kSmallGemmPackedRows && p.row_sums == nullptr &&
         (p.norm_weight != nullptr || !p.norm) && is_aligned(p.quant.scale, 16) &&
         is_aligned(p.norm_weight, 16);
}

template <typename T>
cudaError_t packed_small_gemm_sm90(const GemvParams& p, cudaStream_t stream) {
  return p.rows <= 8 ? of_rows<T, 8>(p, stream) : of_rows<T, 16>(p, stream);
}
template cudaError_t packed_small_gemm_sm90<__half>(const GemvParams& p, cudaStream_t stream);
template cudaError_t packed_small_gemm_sm90<__nv_bfloat16>(const GemvParams& p,
                                                           cudaStream_t stream);

}  // namespace llmc::kernels
