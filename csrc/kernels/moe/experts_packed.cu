// The products of experts for many tokens, their weights packed.
//
// A tile is up to kPairs pairs of one expert for 128 rows of its weight; each of eight warps takes 16 rows, a tile of the
// weight's own (experts.cuh), for all pairs. 64 columns are a stage: of x, which all warps read, and of each warp's weight;
// kStages of them are under way to shared memory. Codes become numbers in registers and are the tensor core's first operand,
// as in experts_gemv.cu; the scale of a group multiplies its sums, in float32. As many blocks as fit take tiles in turn,
// those of a group of pairs one after the other. Reads a weight once for each kPairs pairs.
#include <algorithm>

#include "../common/cp_async.cuh"
#include "experts.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kPairs = 64, kWarps = 8, kThreads = kWarps * 32, kColumns = 64;
constexpr int kStages = 4, kTiles = kPairs / 8;

template <Codes kCodes>
constexpr int kWeights = kColumns / kExpertsStep<kCodes> * 32;  // vectors of a warp in a stage
constexpr int kX = kPairs * kColumns / 8;                       // vectors of x in a stage

// Where a row's vector of x is: rows that are read at once share no banks.
__device__ __forceinline__ int place_in_x(int row, int vector) { return row * (kColumns / 8) + (vector ^ row % 2 * 4); }

template <typename T, Codes kCodes, bool kDown, bool kZeros>
__global__ void __launch_bounds__(kThreads, 2) experts_packed_kernel(const __grid_constant__ ExpertsParams p,
                                                                     const __grid_constant__ Pairs pairs) {
  constexpr int kStage = kX + kWarps * kWeights<kCodes>, kStep = kExpertsStep<kCodes>;
  extern __shared__ uint4 ring[];  // [kStages][kStage]
  __shared__ int before[kMostExperts + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  wait_for_inputs();
  let_next_start();
  const Product<T> product(p, pairs, kDown);
  const ExpertsPacking& packing = kDown ? p.down_packing : p.gate_up_packing;
  Groups groups(p, pairs, before, kPairs);
  const int own_tiles = product.out / kExpertsRows, out_tiles = (own_tiles + kWarps - 1) / kWarps;
  const int steps = product.in / kStep, stages = (product.in + kColumns - 1) / kColumns;
  const int weight_groups = product.in / packing.group_size, shift = 31 - __clz(packing.group_size);
  const bool small = packing.group_size == 32;
  const int tiles = groups.template count<kThreads>() * out_tiles;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Group group = groups.next(tile / out_tiles);
    const int own_tile = tile % out_tiles * kWarps + warp;  // behind the last there is nothing to do but copy x
    const bool has_rows = own_tile < own_tiles;
    const int64_t of_all = static_cast<int64_t>(group.expert) * own_tiles + min(own_tile, own_tiles - 1);
    const uint4* weight = static_cast<const uint4*>(kDown ? p.down : p.gate_up) + of_all * steps * 32 + lane;
    const char* scale = static_cast<const char*>(packing.scale) + of_all * weight_groups * kScaleRow<kCodes>;
    const T* x[kX / kThreads];  // pairs behind the last repeat it; their sums are not written
#pragma unroll
    for (int i = 0; i < kX / kThreads; ++i) {
      const int row = (i * kThreads + threadIdx.x) / (kColumns / 8), vector = threadIdx.x % (kColumns / 8);
      x[i] = row_of(product, p, groups, group.first + min(row, group.count - 1), kDown) + 8 * vector;
    }
    auto copy = [&](int stage) {
      if (stage < stages) {
        uint4* to = ring + stage % kStages * kStage;
        const int at = stage * kColumns, vector = threadIdx.x % (kColumns / 8);
        const bool there = at + 8 * vector < product.in;
#pragma unroll
        for (int i = 0; i < kX / kThreads; ++i)
          start_copy(to + place_in_x((i * kThreads + threadIdx.x) / (kColumns / 8), vector), x[i] + (there ? at : -8 * vector),
                     there);
        to += kX + warp * kWeights<kCodes> + lane;
#pragma unroll
        for (int i = 0; i < kWeights<kCodes> / 32; ++i) {
          const int step = stage * (kColumns / kStep) + i;
          start_copy(to + i * 32, weight + (step < steps ? step * 32 : 0), step < steps);
        }
      }
      end_group();
    };
    for (int stage = 0; stage < kStages - 1; ++stage) copy(stage);
    float sum[kTiles][4] = {}, own[kTiles][4] = {};
    for (int stage = 0; stage < stages; ++stage) {
      wait_for_group<kStages - 2>();
      __syncthreads();
      copy(stage + kStages - 1);
      if (!has_rows) continue;
      const uint4 *of_x = ring + stage % kStages * kStage, *of_weight = of_x + kX + warp * kWeights<kCodes> + lane;
#pragma unroll
      for (int part = 0; part < kColumns / 32; ++part) {
        const int column = stage * kColumns + part * 32;
        if (column >= product.in) break;
        const int of_group = column >> shift;
        uint32_t low[4], high[4], low_offset = offset_of<T, kCodes>(kMiddle<kCodes>), high_offset = low_offset;
        if constexpr (kZeros) {
          const int64_t row = of_all * kExpertsRows + g;
          low_offset = offset_of<T, kCodes>(zero_at<kCodes>(packing.zero, row, of_group, weight_groups));
          high_offset = offset_of<T, kCodes>(zero_at<kCodes>(packing.zero, row + 8, of_group, weight_groups));
        }
        const uint4 codes = of_weight[kStep == 32 ? part * 32 : 0];
        numbers_of_rows<T, kCodes>(low, high, codes, part, low_offset, high_offset);
        const uint32_t even[4] = {low[0], high[0], low[1], high[1]}, odd[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4 b = of_x[place_in_x(n * 8 + g, part * 4 + t)];
          multiply<T>(own[n], even, b.x, b.y);
          multiply<T>(own[n], odd, b.z, b.w);
        }
        if (!small && part == 0 && column + 32 < product.in) continue;
        float scales[2];
        const char* row = scale + of_group * kScaleRow<kCodes>;
        if constexpr (kCodes == Codes::kMxfp4) {
          const auto* bits = reinterpret_cast<const uint8_t*>(row);
          scales[0] = power_of(__ldg(bits + g)) * kMxfp4Scale<T>, scales[1] = power_of(__ldg(bits + g + 8)) * kMxfp4Scale<T>;
        } else {
          const auto* numbers = reinterpret_cast<const float*>(row);
          scales[0] = __ldg(numbers + g), scales[1] = __ldg(numbers + g + 8);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) sum[n][c] = fmaf(own[n][c], scales[c / 2], sum[n][c]), own[n][c] = 0;
      }
    }
    // A thread has rows g and g + 8 of its tile, of a gate or of what it gates; the other is a neighbour's.
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float value = sum[n][c], next = __shfl_down_sync(~0u, value, 4);
        const int pair = n * 8 + 2 * t + c % 2, row = own_tile * kExpertsRows + g + c / 2 * 8;
        if (!has_rows || pair >= group.count) continue;
        if (kDown) finish_made(p, pairs, groups, product, group.expert, group.first + pair, row, value);
        else if (!p.gated) finish_inner(p, pairs, groups, product, group.expert, group.first + pair, row, value, 0.f);
        else if (row % 2 == 0)
          finish_inner(p, pairs, groups, product, group.expert, group.first + pair, row / 2, value, next);
      }
    __syncthreads();  // before the next tile's first stages
  }
}

template <typename T, Codes kCodes, bool kDown, bool kZeros>
cudaError_t run_tiles(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  constexpr int kShared = sizeof(uint4) * kStages * (kX + kWarps * kWeights<kCodes>);
  auto kernel = experts_packed_kernel<T, kCodes, kDown, kZeros>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  static const int resident = [kernel] {
    int blocks = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, kShared);
    return std::max(blocks, 1) * static_cast<int>(multiprocessors());
  }();
  const int64_t tiles = static_cast<int64_t>(p.num_tokens) * p.top_k *
                        blocks_for(Product<T>(p, pairs, kDown).out, kExpertsRows * kWarps);
  return launch(kernel, static_cast<unsigned>(std::min<int64_t>(tiles, resident)), kThreads, kShared, stream, p, pairs);
}

template <typename T, Codes kCodes, bool kZeros>
cudaError_t run_both(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  cudaError_t error = run_tiles<T, kCodes, false, kZeros>(p, pairs, stream);
  if (error == cudaSuccess) error = round_inner(kDType<T>, p, pairs, Rounding::kNumbers, stream);
  return error != cudaSuccess ? error : run_tiles<T, kCodes, true, kZeros>(p, pairs, stream);
}

template <typename T>
cudaError_t run_type(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  return with_expert_codes(p.gate_up_packing.codes, [&](auto codes) {
    if constexpr (codes.value == Codes::kFour || codes.value == Codes::kEight)
      if (p.gate_up_packing.zero != nullptr) return run_both<T, codes.value, true>(p, pairs, stream);
    return run_both<T, codes.value, false>(p, pairs, stream);
  });
}

}  // namespace

cudaError_t many_packed_experts(DType dtype, const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  if (dtype == DType::kFloat16) return run_type<__half>(p, pairs, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
