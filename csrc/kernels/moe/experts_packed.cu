// Grouped GEMMs for quantized weights and many tokens, by mma.
//
// A tile is up to kPairs pairs of one expert for 128 weight rows; each of eight warps takes 16
// rows, a tile of the weight (experts.cuh), for all pairs. A stage is 64 columns of x, which all
// warps read, and of each warp's weight; kStages are in flight to shared memory. Codes are
// dequantized to the A operand in registers; a group's scale multiplies its sums in float32. A
// persistent grid takes tiles in turn, those of a group of pairs one after the other. Reads a
// weight once per kPairs pairs.
#include <algorithm>

#include "../common/cp_async.cuh"
#include "experts.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kPairs = 64, kWarps = 8, kThreads = kWarps * 32, kColumns = 64;
constexpr int kStages = 4, kTiles = kPairs / 8;

template <CodeType kCodeType>
constexpr int kWeights =
    kColumns / kExpertTileColumns<kCodeType> * 32;  // vectors of a warp in a stage
constexpr int kX = kPairs * kColumns / 8;           // vectors of x in a stage

// Swizzled position of a row's vector of x, against bank conflicts.
__device__ __forceinline__ int place_in_x(int row, int vector) {
  return row * (kColumns / 8) + (vector ^ row % 2 * 4);
}

template <typename T, CodeType kCodeType, bool kDown, bool kZeros>
__global__ void __launch_bounds__(kThreads, 2)
    experts_packed_kernel(const __grid_constant__ ExpertsParams p,
                          const __grid_constant__ Pairs pairs) {
  constexpr int kStage = kX + kWarps * kWeights<kCodeType>, kStep = kExpertTileColumns<kCodeType>;
  extern __shared__ uint4 ring[];  // [kStages][kStage]
  __shared__ int before[kMaxExperts + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  pdl_wait();
  pdl_launch_dependents();
  const ExpertGemm<T> gemm(p, pairs, kDown);
  const ExpertsQuantParams& quant = kDown ? p.down_quant : p.gate_up_quant;
  PairGroups groups(p, pairs, before, kPairs);
  const int own_tiles = gemm.out / kExpertTileRows, out_tiles = (own_tiles + kWarps - 1) / kWarps;
  const int steps = gemm.in / kStep, stages = (gemm.in + kColumns - 1) / kColumns;
  const int weight_groups = gemm.in / quant.group_size, shift = 31 - __clz(quant.group_size);
  const bool small = quant.group_size == 32;
  const int tiles = groups.template count<kThreads>() * out_tiles;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const PairGroup group = groups.next(tile / out_tiles);
    const int own_tile =
        tile % out_tiles * kWarps + warp;  // after the last tile a warp only copies x
    const bool has_rows = own_tile < own_tiles;
    const int64_t of_all =
        static_cast<int64_t>(group.expert) * own_tiles + min(own_tile, own_tiles - 1);
    const uint4* weight =
        static_cast<const uint4*>(kDown ? p.down : p.gate_up) + of_all * steps * 32 + lane;
    const char* scale =
        static_cast<const char*>(quant.scale) + of_all * weight_groups * kTileScaleBytes<kCodeType>;
    const T* x[kX / kThreads];  // pairs after the last repeat it; their sums are not written
#pragma unroll
    for (int i = 0; i < kX / kThreads; ++i) {
      const int row = (i * kThreads + threadIdx.x) / (kColumns / 8),
                vector = threadIdx.x % (kColumns / 8);
      x[i] = row_of(gemm, p, groups, group.first + min(row, group.count - 1), kDown) + 8 * vector;
    }
    auto copy = [&](int stage) {
      if (stage < stages) {
        uint4* to = ring + stage % kStages * kStage;
        const int at = stage * kColumns, vector = threadIdx.x % (kColumns / 8);
        const bool there = at + 8 * vector < gemm.in;
#pragma unroll
        for (int i = 0; i < kX / kThreads; ++i)
          cp_async(to + place_in_x((i * kThreads + threadIdx.x) / (kColumns / 8), vector),
                   x[i] + (there ? at : -8 * vector), there);
        to += kX + warp * kWeights<kCodeType> + lane;
#pragma unroll
        for (int i = 0; i < kWeights<kCodeType> / 32; ++i) {
          const int step = stage * (kColumns / kStep) + i;
          cp_async(to + i * 32, weight + (step < steps ? step * 32 : 0), step < steps);
        }
      }
      cp_async_commit();
    };
    for (int stage = 0; stage < kStages - 1; ++stage) copy(stage);
    float sum[kTiles][4] = {}, own[kTiles][4] = {};
    for (int stage = 0; stage < stages; ++stage) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      copy(stage + kStages - 1);
      if (!has_rows) continue;
      const uint4 *of_x = ring + stage % kStages * kStage,
                  *of_weight = of_x + kX + warp * kWeights<kCodeType> + lane;
#pragma unroll
      for (int part = 0; part < kColumns / 32; ++part) {
        const int column = stage * kColumns + part * 32;
        if (column >= gemm.in) break;
        const int of_group = column >> shift;
        uint32_t low[4], high[4],
            low_offset = dequant_offset<T, kCodeType>(kDefaultZero<kCodeType>),
            high_offset = low_offset;
        if constexpr (kZeros) {
          const int64_t row = of_all * kExpertTileRows + g;
          low_offset = dequant_offset<T, kCodeType>(
              load_expert_zero<kCodeType>(quant.zero, row, of_group, weight_groups));
          high_offset = dequant_offset<T, kCodeType>(
              load_expert_zero<kCodeType>(quant.zero, row + 8, of_group, weight_groups));
        }
        const uint4 codes = of_weight[kStep == 32 ? part * 32 : 0];
        dequantize_rows<T, kCodeType>(low, high, codes, part, low_offset, high_offset);
        const uint32_t even[4] = {low[0], high[0], low[1], high[1]},
                       odd[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4 b = of_x[place_in_x(n * 8 + g, part * 4 + t)];
          mma_m16n8k16<T>(own[n], even, b.x, b.y);
          mma_m16n8k16<T>(own[n], odd, b.z, b.w);
        }
        if (!small && part == 0 && column + 32 < gemm.in) continue;
        float scales[2];
        const char* row = scale + of_group * kTileScaleBytes<kCodeType>;
        if constexpr (kCodeType == CodeType::kMxfp4) {
          const auto* bits = reinterpret_cast<const uint8_t*>(row);
          scales[0] = exponent_to_float(__ldg(bits + g)) * kMxfp4Scale<T>,
          scales[1] = exponent_to_float(__ldg(bits + g + 8)) * kMxfp4Scale<T>;
        } else {
          const auto* numbers = reinterpret_cast<const float*>(row);
          scales[0] = __ldg(numbers + g), scales[1] = __ldg(numbers + g + 8);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            sum[n][c] = fmaf(own[n][c], scales[c / 2], sum[n][c]), own[n][c] = 0;
      }
    }
    // A thread has rows g and g + 8 of its tile, of a gate or an up; an adjacent lane has the
    // other.
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float value = sum[n][c], next = __shfl_down_sync(~0u, value, 4);
        const int pair = n * 8 + 2 * t + c % 2, row = own_tile * kExpertTileRows + g + c / 2 * 8;
        if (!has_rows || pair >= group.count) continue;
        if (kDown)
          store_expert_output(p, pairs, groups, gemm, group.expert, group.first + pair, row, value);
        else if (!p.gated)
          store_inner(p, pairs, groups, gemm, group.expert, group.first + pair, row, value, 0.f);
        else if (row % 2 == 0)
          store_inner(p, pairs, groups, gemm, group.expert, group.first + pair, row / 2, value,
                      next);
      }
    __syncthreads();  // before the next tile's first stages
  }
}

template <typename T, CodeType kCodeType, bool kDown, bool kZeros>
cudaError_t run_tiles(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  constexpr int kShared = sizeof(uint4) * kStages * (kX + kWarps * kWeights<kCodeType>);
  auto kernel = experts_packed_kernel<T, kCodeType, kDown, kZeros>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  static const int resident = resident_blocks(kernel, kThreads, kShared);
  const int64_t tiles = static_cast<int64_t>(p.num_tokens) * p.top_k *
                        ceil_div(ExpertGemm<T>(p, pairs, kDown).out, kExpertTileRows * kWarps);
  return launch(kernel, static_cast<unsigned>(std::min<int64_t>(tiles, resident)), kThreads,
                kShared, stream, p, pairs);
}

template <typename T, CodeType kCodeType, bool kZeros>
cudaError_t run_both(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  return run_gemms(
      p, [&] { return run_tiles<T, kCodeType, false, kZeros>(p, pairs, stream); },
      [&] {
        const cudaError_t error =
            quantize_inner(kDType<T>, p, pairs, ActivationQuant::kDequantized, stream);
        return error != cudaSuccess ? error
                                    : run_tiles<T, kCodeType, true, kZeros>(p, pairs, stream);
      });
}

template <typename T>
cudaError_t run_type(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  return dispatch_expert_code_type(p.gate_up_quant.code_type, [&](auto codes) {
    if constexpr (codes.value == CodeType::kInt4 || codes.value == CodeType::kInt8)
      if (p.gate_up_quant.zero != nullptr) return run_both<T, codes.value, true>(p, pairs, stream);
    return run_both<T, codes.value, false>(p, pairs, stream);
  });
}

}  // namespace

cudaError_t packed_experts_gemm(DType dtype, const ExpertsParams& p, const Pairs& pairs,
                                cudaStream_t stream) {
  if (dtype == DType::kFloat16) return run_type<__half>(p, pairs, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
