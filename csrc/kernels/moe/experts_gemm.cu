// Grouped GEMMs for 16-bit weights and many tokens, by mma.
//
// A tile is up to kPairs pairs of one expert for kOut weight rows; each of eight warps takes a
// quarter of the rows for half of the pairs. A stage is 64 columns of both; kStages are in flight
// to shared memory, where vectors are swizzled so that ldmatrix has no bank conflicts. A persistent
// grid takes tiles in turn, those of a group of pairs one after the other; each block derives the
// tiles itself. A gate and its up are adjacent columns of a thread. Reads a weight once per kPairs
// pairs.
#include <algorithm>

#include "../common/cp_async.cuh"
#include "experts.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kOut = 128, kColumns = 64, kVectors = kColumns / 8;
constexpr int kStages = 3, kThreads = 256;

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))));
}

// Swizzled position of a row's vector in a stage.
__device__ __forceinline__ int packed_column(int row, int vector) {
  return row * kVectors + (vector ^ row % 8);
}

template <typename T, int kPairs, bool kDown>
__global__ void __launch_bounds__(kThreads, 2)
    experts_gemm_kernel(const __grid_constant__ ExpertsParams p,
                        const __grid_constant__ Pairs pairs) {
  constexpr int kStage = (kPairs + kOut) * kVectors;  // vectors of x, then of the weight
  constexpr int kRowsOfCopy = kThreads / kVectors, kCopiesOfX = kPairs / kRowsOfCopy,
                kCopies = kOut / kRowsOfCopy;
  constexpr int kTilesOfPairs = kPairs / 32,
                kTilesOfOut = kOut / 32;  // of a warp: tiles of 16 pairs and of 8 rows
  extern __shared__ uint4 ring[];         // [kStages][kStage]
  __shared__ int before[kMaxExperts + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_pair = warp / 4 * (kPairs / 2), first_row = warp % 4 * (kOut / 4);
  const int row_of_copy = threadIdx.x / kVectors, vector = threadIdx.x % kVectors;
  pdl_wait();
  pdl_launch_dependents();
  const ExpertGemm<T> gemm(p, pairs, kDown);
  PairGroups groups(p, pairs, before, kPairs);
  const int out_tiles = (gemm.out + kOut - 1) / kOut, stages = (gemm.in + kColumns - 1) / kColumns;
  const int tiles = groups.template count<kThreads>() * out_tiles;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const PairGroup group = groups.next(tile / out_tiles);
    const int first_out = tile % out_tiles * kOut;
    const T *x[kCopiesOfX], *weight[kCopies];
#pragma unroll
    for (int i = 0; i < kCopiesOfX;
         ++i) {  // pairs after the last repeat it; their sums are not written
      const int pair = min(i * kRowsOfCopy + row_of_copy, group.count - 1);
      x[i] = row_of(gemm, p, groups, group.first + pair, kDown) + 8 * vector;
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      weight[i] =
          gemm.row_of_weight(group.expert, first_out + i * kRowsOfCopy + row_of_copy) + 8 * vector;
    auto copy = [&](int stage) {
      if (stage < stages) {
        uint4* to = ring + stage % kStages * kStage;
        const int at = stage * kColumns;
        const bool there = at + 8 * vector < gemm.in;
#pragma unroll
        for (int i = 0; i < kCopiesOfX; ++i)
          cp_async(to + packed_column(i * kRowsOfCopy + row_of_copy, vector),
                   x[i] + (there ? at : -8 * vector), there);
        to += kPairs * kVectors;
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
          cp_async(to + packed_column(i * kRowsOfCopy + row_of_copy, vector),
                   weight[i] + (there ? at : -8 * vector), there);
      }
      cp_async_commit();
    };
    for (int stage = 0; stage < kStages - 1; ++stage) copy(stage);
    float sum[kTilesOfPairs][kTilesOfOut][4] = {};
    for (int stage = 0; stage < stages; ++stage) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      copy(stage + kStages - 1);
      const uint4 *of_x = ring + stage % kStages * kStage, *of_weight = of_x + kPairs * kVectors;
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k) {
        uint32_t a[kTilesOfPairs][4];
#pragma unroll
        for (int m = 0; m < kTilesOfPairs; ++m)
          ldmatrix_x4(a[m],
                      of_x + packed_column(first_pair + m * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < kTilesOfOut; n += 2) {
          uint32_t b[4];  // rows n * 8 to + 7 and + 8 to + 15, each columns k * 16 to + 7 and + 8
                          // to + 15
          ldmatrix_x4(b, of_weight + packed_column(first_row + n * 8 + lane / 16 * 8 + lane % 8,
                                                   2 * k + lane % 16 / 8));
#pragma unroll
          for (int m = 0; m < kTilesOfPairs; ++m) {
            mma_m16n8k16<T>(sum[m][n], a[m], b[0], b[1]);
            mma_m16n8k16<T>(sum[m][n + 1], a[m], b[2], b[3]);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kTilesOfPairs; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int pair = first_pair + m * 16 + g + 8 * r, position = group.first + pair;
        if (pair >= group.count) continue;
#pragma unroll
        for (int n = 0; n < kTilesOfOut; ++n) {
          const int out = first_out + first_row + n * 8 + 2 * t;
          const float low = sum[m][n][2 * r], high = sum[m][n][2 * r + 1];
          if (out >= gemm.out) continue;
          if (kDown) {
            store_expert_output(p, pairs, groups, gemm, group.expert, position, out, low);
            store_expert_output(p, pairs, groups, gemm, group.expert, position, out + 1, high);
          } else if (p.gated) {
            store_inner(p, pairs, groups, gemm, group.expert, position, out / 2, low, high);
          } else {
            store_inner(p, pairs, groups, gemm, group.expert, position, out, low, 0.f);
            store_inner(p, pairs, groups, gemm, group.expert, position, out + 1, high, 0.f);
          }
        }
      }
    __syncthreads();  // before the next tile's first stages
  }
}

template <typename T, int kPairs, bool kDown>
cudaError_t run_tiles(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  constexpr int kShared = sizeof(uint4) * kStages * (kPairs + kOut) * kVectors, kRest = 5 << 10;
  if constexpr (kPairs > 64)
    if (device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() < kShared + kRest)
      return run_tiles<T, 64, kDown>(p, pairs, stream);
  auto kernel = experts_gemm_kernel<T, kPairs, kDown>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  static const int resident = resident_blocks(kernel, kThreads, kShared);
  const int64_t tiles = static_cast<int64_t>(p.num_tokens) * p.top_k *
                        ceil_div(ExpertGemm<T>(p, pairs, kDown).out, kOut);
  return launch(kernel, static_cast<unsigned>(std::min<int64_t>(tiles, resident)), kThreads,
                kShared, stream, p, pairs);
}

template <typename T, int kPairs>
cudaError_t run_both(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  return run_gemms(
      p, [&] { return run_tiles<T, kPairs, false>(p, pairs, stream); },
      [&] { return run_tiles<T, kPairs, true>(p, pairs, stream); });
}

// Tiles of 128 pairs if an expert fills one on average.
template <typename T>
cudaError_t run_type(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const bool fills = static_cast<int64_t>(p.num_tokens) * p.top_k >= 128ll * p.num_experts;
  return fills ? run_both<T, 128>(p, pairs, stream) : run_both<T, 64>(p, pairs, stream);
}

}  // namespace

cudaError_t experts_gemm(DType dtype, const ExpertsParams& p, const Pairs& pairs,
                         cudaStream_t stream) {
  if (p.hidden % 8 != 0 || p.inner % 8 != 0) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, pairs, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
