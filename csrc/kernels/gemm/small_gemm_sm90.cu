// small_gemm_sm90() for 16-bit weights, or FP8 weights with FP8 x: wgmma with both operands in
// shared memory. A stage is 16 KB of the weight: 128 bytes of 64 gates and their ups, or 256 bytes
// of 64 rows. Reads the weight once, and x once per tile, from L2.
//
// kGrouped: 128 columns are a group of x and a block of the weight. Their sums are scaled before
// they are accumulated. A tile's rows are in one block, and its ups in one.
//
// A norm is fused as in gemv.cu, with moments of the x in shared memory.
#include "small_gemm_pipeline_sm90.cuh"
#include "small_gemm_sm90.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using namespace sm90;

constexpr int kWarps = 4, kConsumerThreads = kWarps * 32;
constexpr int kStepBytes = 32;  // of a row, per wgmma
// FP8 stages between float32 additions: the tensor core accumulates FP8 with reduced precision.
constexpr int kExactStages = 4;

template <typename E, int kTokens, bool kGated>
struct StageLayout {
  static constexpr int kOperands = kGated ? 2 : 1, kLines = kGated ? 1 : 2;
  static constexpr int kColumns = kLines * kRowBytes / static_cast<int>(sizeof(E));
  static constexpr uint32_t kWeightBytes = kRows * kRowBytes,
                            kXBytes = kTokens * kRowBytes;  // of a line
  static constexpr uint32_t kXAt = kOperands * kLines * kWeightBytes;
  using Storage = SharedStorage<kOperands, kTokens, kXAt + kLines * kXBytes, kWarps>;
};

struct TensorMaps {
  CUtensorMap weights, x;
};

// Issues the wgmma of a stage's lines, which add to sums_of(line, operand) or overwrite it.
template <typename E, int kTokens, bool kGated, bool kAdds, typename SumsOf>
__device__ __forceinline__ void issue_stage(
    const typename StageLayout<E, kTokens, kGated>::Storage& smem, int slot, SumsOf&& sums_of) {
  using S = StageLayout<E, kTokens, kGated>;
  const uint64_t weights = make_smem_desc_k_major(smem.stage(slot)),
                 x = make_smem_desc_k_major(smem.stage(slot) + S::kXAt);
  wgmma_fence();
#pragma unroll
  for (int line = 0; line < S::kLines; ++line)
#pragma unroll
    for (int step = 0; step < kRowBytes / kStepBytes; ++step)
#pragma unroll
      for (int m = 0; m < S::kOperands; ++m)
        Wgmma<E, kTokens>::ss(sums_of(line, m),
                              weights + ((line + m) * S::kWeightBytes + step * kStepBytes) / 16,
                              x + (line * S::kXBytes + step * kStepBytes) / 16, kAdds || step > 0);
  wgmma_commit();
}

// Mainloop with scaled groups; the fragment layout is that of Wgmma.
template <int kTokens, bool kGated>
__device__ __forceinline__ void add_scaled_groups(
    const typename StageLayout<Float8, kTokens, kGated>::Storage& smem, const GemvParams& p,
    const TileRange& range, int tile, int& slot, int& parity,
    float (&total)[kGated ? 2 : 1][kTokens / 2]) {
  using S = StageLayout<Float8, kTokens, kGated>;
  const int t = threadIdx.x % 4, pitch = group_scale_stride(p.rows), groups = p.in / kQuantBlock;
  for (int stage = range.begin; stage < range.end; ++stage) {
    float2 of_x[S::kLines][kTokens / 8];
    float of_weight[S::kLines][S::kOperands];
#pragma unroll
    for (int line = 0; line < S::kLines; ++line) {
      const int group = min(stage * S::kLines + line, groups - 1);  // zeros beyond the last
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i)
        of_x[line][i] = *reinterpret_cast<const float2*>(p.x_scale + group * pitch +
                                                         min(i * 8 + 2 * t, pitch - 2));
#pragma unroll
      for (int m = 0; m < S::kOperands; ++m)
        of_weight[line][m] =
            __ldg(p.quant.blocks +
                  (m * p.out + tile * kRows) / kQuantBlock * block_scale_stride(p.in) + group);
    }
    smem.full_barrier(slot).wait(parity);
    float sum[S::kLines][S::kOperands][kTokens / 2];
    issue_stage<Float8, kTokens, kGated, false>(
        smem, slot, [&](int line, int m) -> auto& { return sum[line][m]; });
    wgmma_wait<0>();
    if (threadIdx.x % 32 == 0) smem.empty_barrier(slot).arrive();
#pragma unroll
    for (int line = 0; line < S::kLines; ++line)
#pragma unroll
      for (int m = 0; m < S::kOperands; ++m)
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
          const float2& pair = of_x[line][i / 4];
          total[m][i] = fmaf(sum[line][m][i], of_weight[line][m] * (i % 2 == 0 ? pair.x : pair.y),
                             total[m][i]);
        }
    if (++slot == S::Storage::kStages) slot = 0, parity ^= 1;
  }
}

template <typename T, typename E, int kTokens, bool kGated, bool kGrouped>
__device__ __forceinline__ void consume(
    const typename StageLayout<E, kTokens, kGated>::Storage& smem, const GemvParams& p,
    const TileRange& range) {
  using S = StageLayout<E, kTokens, kGated>;
  constexpr bool kIsExact = !std::is_same_v<E, Float8>;
  const int thread = threadIdx.x, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  pdl_wait();
  pdl_launch_dependents();

  constexpr int kVectors =
      kTokens * 8 / kConsumerThreads + (kTokens < 16);  // of a line; of row thread / 8 + 16 * i
  float of_x[kVectors][2] = {};
  int slot = 0, parity = 0;
  for (int tile = range.first; tile < range.tiles; tile += range.step) {
    float sum[S::kOperands][kTokens / 2] = {}, total[S::kOperands][kTokens / 2] = {};
    const bool measures = p.norm && tile == range.first;
    const Epilogue<T, S::kOperands, kTokens, kConsumerThreads> epilogue(p, range, tile);
    if constexpr (kGrouped)
      add_scaled_groups<kTokens, kGated>(smem, p, range, tile, slot, parity, total);
    auto add_sums = [&] {
#pragma unroll
      for (int m = 0; m < S::kOperands; ++m)
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) total[m][i] += sum[m][i], sum[m][i] = 0;
    };
    int last = -1;
    for (int stage = kGrouped ? range.end : range.begin; stage < range.end; ++stage) {
      smem.full_barrier(slot).wait(parity);
      issue_stage<E, kTokens, kGated, true>(smem, slot,
                                            [&](int, int m) -> auto& { return sum[m]; });
      if constexpr (kIsExact)
        if (measures && thread < kTokens * 8)
#pragma unroll
          for (int line = 0; line < S::kLines; ++line)
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
              const uint32_t vector = (thread + i * kConsumerThreads) * 16;
              const auto words =
                  load_smem<4>(smem.stage(slot) + S::kXAt + line * S::kXBytes + vector);
              accumulate_moments<E>(of_x[i], *reinterpret_cast<const uint4*>(&words));
            }
      if (!kIsExact && (stage - range.begin) % kExactStages == kExactStages - 1) {
        wgmma_wait<0>();
        add_sums();
      } else {
        wgmma_wait<1>();
      }
      if (last >= 0 && thread % 32 == 0) smem.empty_barrier(last).arrive();
      last = slot;
      if (++slot == S::Storage::kStages) slot = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    if (!kGrouped && thread % 32 == 0) smem.empty_barrier(last).arrive();
    if (!kGrouped) add_sums();
    if (range.cluster_size == 1) smem.sync_consumers();  // sums may still be read
    if (measures) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int mask = 1; mask < 8; mask <<= 1)
            of_x[i][k] += __shfl_xor_sync(~0u, of_x[i][k], mask);
        const int row = thread / 8 + kConsumerThreads / 8 * i;
        if (thread % 8 == 0 && row < kTokens)
          smem.moments()[row] = make_float4(of_x[i][0], of_x[i][1], 0, 0);
      }
    }
#pragma unroll
    for (int m = 0; m < S::kOperands; ++m)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i)
        smem.sums()[(m * kTokens + i / 4 * 8 + 2 * t + i % 2) * kSumStride + warp * 16 + g +
                    i / 2 % 2 * 8] = total[m][i];
    smem.sync_consumers(range.cluster_size);
    epilogue.store(smem.sums(), smem.moments());
  }
  smem.finish(range.cluster_size);
}

template <typename T, typename E, int kTokens, bool kGated, bool kGrouped>
__global__ void __launch_bounds__(kConsumerThreads + 64, kMinBlocks)
    gemm_kernel(const __grid_constant__ TensorMaps maps, GemvParams p, int tiles, int stages,
                int cluster_size) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = StageLayout<E, kTokens, kGated>;
  extern __shared__ uint8_t raw[];
  const typename S::Storage smem{raw + (-smem_address(raw) & 1023)};
  const TileRange range(tiles, stages, cluster_size);
  smem.init_barriers();
  if (threadIdx.x < kConsumerThreads) {
    consume<T, E, kTokens, kGated, kGrouped>(smem, p, range);
  } else if (threadIdx.x == kConsumerThreads) {
    produce</*kOfWeight=*/true>(smem, range, [&](int slot, int tile, int stage) {
      const Mbarrier full = smem.full_barrier(slot);
      const uint32_t to = smem.stage(slot);
      const int column = stage * S::kColumns, row = tile * kRows;
      full.arrive_expect_tx(S::kXAt);
      tma_load(to, maps.weights, full, column, row, 0);
      if (!kGated)
        tma_load(to + S::kWeightBytes, maps.weights, full, column + S::kColumns / 2, row, 0);
    });
  } else if (threadIdx.x == kConsumerThreads + 32) {
    pdl_wait();  // x depends on the previous kernel, weights do not
    produce</*kOfWeight=*/false>(smem, range, [&](int slot, int, int stage) {
      const Mbarrier full = smem.full_barrier(slot);
      full.arrive_expect_tx(S::kLines * S::kXBytes);
#pragma unroll
      for (int line = 0; line < S::kLines; ++line)
        tma_load(smem.stage(slot) + S::kXAt + line * S::kXBytes, maps.x, full,
                 stage * S::kColumns + line * S::kColumns / S::kLines, 0);
    });
  }
#endif
}

template <typename T, typename E, int kTokens, bool kGated, bool kGrouped>
cudaError_t run(const GemvParams& p, cudaStream_t stream) {
  using S = StageLayout<E, kTokens, kGated>;
  constexpr int kWidth = sizeof(E);
  constexpr auto kType = kWidth == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : kTensorMapType<T>;
  constexpr auto kTurned = CU_TENSOR_MAP_SWIZZLE_128B;
  const auto in = static_cast<cuuint64_t>(p.in), out = static_cast<cuuint64_t>(p.out);
  TensorMaps maps;
  if (!make_tensor_map(maps.weights, kType, kTurned, p.weight, {in, out, S::kOperands}, kWidth,
                       {kRowBytes / kWidth, kRows, S::kOperands}) ||
      !make_tensor_map(maps.x, kType, kTurned, p.x, {in, static_cast<cuuint64_t>(p.rows)}, kWidth,
                       {kRowBytes / kWidth, kTokens}))
    return cudaErrorInvalidValue;
  const int stages = static_cast<int>(ceil_div(p.in, S::kColumns));
  return launch_tiles<gemm_kernel<T, E, kTokens, kGated, kGrouped>, typename S::Storage>(
      stages, maps, p, stream);
}

template <typename T, typename E, int kTokens, bool kGrouped>
cudaError_t of_rows(const GemvParams& p, cudaStream_t stream) {
  return p.gated ? run<T, E, kTokens, true, kGrouped>(p, stream)
                 : run<T, E, kTokens, false, kGrouped>(p, stream);
}

template <typename T, typename E, bool kGrouped = false>
cudaError_t of_weight(const GemvParams& p, cudaStream_t stream) {
  return p.rows <= 8    ? of_rows<T, E, 8, kGrouped>(p, stream)
         : p.rows <= 16 ? of_rows<T, E, 16, kGrouped>(p, stream)
                        : of_rows<T, E, 32, kGrouped>(p, stream);
}

template <typename T>
cudaError_t of_type(const GemvParams& p, cudaStream_t stream) {
  if (p.quant.code_type == CodeType::kInt4) return packed_small_gemm_sm90<T>(p, stream);
  if (p.x_scale == nullptr) return of_weight<T, T>(p, stream);
  return p.grouped ? of_weight<T, Float8, true>(p, stream) : of_weight<T, Float8>(p, stream);
}

}  // namespace

bool has_small_gemm_sm90(DType dtype, const GemvParams& p) {
  if ((dtype != DType::kFloat16 && dtype != DType::kBFloat16) || p.out % 4 != 0 ||
      !is_aligned(p.x, 16) || !is_aligned(p.weight, 16) || !is_aligned(p.y, 8) ||
      !is_aligned(p.residual, 8) || device_attribute<cudaDevAttrComputeCapabilityMajor>() != 9 ||
      tensor_map_encoder() == nullptr)
    return false;
  switch (p.quant.code_type) {
    case CodeType::kNone:
      return p.rows <= kSmallGemmRows && p.in % 8 == 0 && p.norm_weight == nullptr;
    case CodeType::kFloat8:
      return p.rows <= kSmallGemmFloat8Rows && p.x_scale != nullptr && !p.norm &&
             (p.grouped ? p.quant.blocks != nullptr && p.in % kQuantBlock == 0 &&
                              (!p.gated || p.out % kRows == 0)
                        : p.in % 16 == 0 && p.quant.group_size == p.in);
    case CodeType::kInt4: return has_packed_small_gemm_sm90(p);
    default: return false;
  }
}

cudaError_t small_gemm_sm90(DType dtype, const GemvParams& p, cudaStream_t stream) {
  return dtype == DType::kFloat16 ? of_type<__half>(p, stream) : of_type<__nv_bfloat16>(p, stream);
}

}  // namespace llmc::kernels
