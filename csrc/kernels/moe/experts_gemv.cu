// Expert GEMVs for 16-bit weights: see experts_few.cuh.
//
// A ring of kStages chunks per warp in shared memory is always in flight across tiles, past L1. A
// thread reads back what it copied, as an mma fragment: 16 bytes of rows g and g + 8.
//
// For few pairs, down_combine_kernel computes the second GEMM together with the sum over a token's
// experts.
#include <algorithm>

#include "../common/cp_async.cuh"
#include "experts_few.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kUnroll = 4;  // steps of a chunk
constexpr int kStages = 2;  // chunks in flight
constexpr int kSlotBytes = kUnroll * 2 * 512;
constexpr int kCombinePairs = 32,
              kCombineWarps =
                  16;  // of down_combine_kernel: maximum number of pairs; warps of a block

// kTiles: groups of 8 pairs.
template <typename T, int kWarps, int kTiles, bool kDown>
__global__ void __launch_bounds__(kWarps * 32, (kTiles == 1 ? 24 : 16) / kWarps)
    experts_gemv_kernel(const __grid_constant__ ExpertsParams p,
                        const __grid_constant__ Pairs pairs) {
  constexpr int kThreads = kWarps * 32, kPairs = kTiles * 8, kRows = kExpertTileRows,
                kStep = kExpertTileColumns<CodeType::kNone>;
  // Rings of kStages slots per warp; then the list of groups, and the order of pairs.
  extern __shared__ uint4 shared[];
  __shared__ float partial[2][kWarps][kRows][kPairs + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  char* ring = reinterpret_cast<char*>(shared) + warp * kStages * kSlotBytes;
  auto* list =
      reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(shared) + kWarps * kStages * kSlotBytes);
  auto* order = reinterpret_cast<uint16_t*>(list + p.num_tokens * p.top_k);
  if (!kDown) {
    pdl_wait();
    pdl_launch_dependents();
  }
  const ExpertGemm<T> gemm(p, pairs, kDown);
  const int out_tiles = (gemm.out + kRows - 1) / kRows;
  const int num_groups =
      list_pair_groups<kThreads>(p, kPairs, list, order, reinterpret_cast<uint32_t*>(shared));
  // Steps of this warp.
  const int steps = (gemm.in + kStep - 1) / kStep, share = (steps + kWarps - 1) / kWarps;
  const int begin = warp * share, end = min(begin + share, steps),
            chunks = (share + kUnroll - 1) / kUnroll;

  // Producer cursor: copies run ahead of the mma, over tiles and chunks.
  struct {
    GroupTileCursor at;
    int chunk, slot;
    const char *low, *high;
  } ahead{{static_cast<int>(blockIdx.x), out_tiles}, 0, 0, nullptr, nullptr};
  auto find_rows = [&] {
    if (ahead.at.group >= num_groups) return;
    const int expert = unpack_group(list[ahead.at.group]).expert, row = ahead.at.tile * kRows + g;
    ahead.low = reinterpret_cast<const char*>(gemm.row_of_weight(expert, row) + 8 * t);
    ahead.high = reinterpret_cast<const char*>(gemm.row_of_weight(expert, row + 8) + 8 * t);
  };
  auto copy_chunk = [&] {
    if (ahead.at.group < num_groups) {
      const int first = begin + ahead.chunk * kUnroll;
      uint4* to = reinterpret_cast<uint4*>(ring + ahead.slot) + lane;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int step = first + u;
        const bool there = step < end && step * kStep + 8 * t < gemm.in;
        const int at = there ? step * kStep * static_cast<int>(sizeof(T)) : 0;
        cp_async(to + 2 * u * 32, ahead.low + at, there);
        cp_async(to + (2 * u + 1) * 32, ahead.high + at, there);
      }
      ahead.slot = ahead.slot + kSlotBytes == kStages * kSlotBytes ? 0 : ahead.slot + kSlotBytes;
      if (++ahead.chunk == chunks) {
        ahead.chunk = 0;
        ahead.at.advance(gridDim.x);
        find_rows();
      }
    }
    cp_async_commit();
  };
  find_rows();
  for (int i = 0; i < kStages; ++i) copy_chunk();
  if (kDown) {
    pdl_wait();
    pdl_launch_dependents();
  }

  const uint4 zero = make_uint4(0, 0, 0, 0);
  int slot = 0, turn = 0;
  for (GroupTileCursor at(blockIdx.x, out_tiles); at.group < num_groups;
       at.advance(gridDim.x), ++turn) {
    const PairGroup group = unpack_group(list[at.group]);
    const int first_row = at.tile * kRows;
    // Pairs after the last repeat it, and lead to columns that are not written.
    const T* x[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int pair = order[group.first + min(n * 8 + g, group.count - 1)];
      x[n] = gemm.x + static_cast<int64_t>(kDown ? pair : pair / p.top_k) * gemm.in + 8 * t;
    }
    float sum[kTiles][4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int first = begin + chunk * kUnroll;
      uint4 b[kUnroll][kTiles];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int column = (first + u) * kStep;
          b[u][n] = first + u < end && column + 8 * t < gemm.in
                        ? *reinterpret_cast<const uint4*>(x[n] + column)
                        : zero;
        }
      cp_async_wait<kStages - 1>();
      mma_chunk<T, 32>(sum, reinterpret_cast<const uint4*>(ring + slot) + lane, b);
      slot = slot + kSlotBytes == kStages * kSlotBytes ? 0 : slot + kSlotBytes;
      copy_chunk();
    }
    auto& mine = partial[turn % 2];  // the previous one may still be read
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) mine[warp][g + c / 2 * 8][n * 8 + 2 * t + c % 2] = sum[n][c];
    __syncthreads();
    // Another warp comes first in each tile.
    store_outputs<kDown>(p, pairs, gemm, group, order, first_row, mine,
                         (threadIdx.x + turn * 32) % kThreads, kThreads);
  }
}

// Second GEMM for 16-bit weights and few pairs, with the sum over a token's experts. A tile is 16
// columns of y for one token: 16 weight rows of each of its local experts. The warps split the
// chunks of all of them; a warp multiplies its sum for an expert by the score. Chunks are in flight
// as above. Tokens that share an expert read it from L2. Reads `inner`, writes y.
template <typename T>
__global__ void __launch_bounds__(kCombineWarps * 32, 1)
    down_combine_kernel(const __grid_constant__ ExpertsParams p,
                        const __grid_constant__ Pairs pairs) {
  constexpr int kWarps = kCombineWarps, kStep = kExpertTileColumns<CodeType::kNone>,
                kRows = kExpertTileRows;
  extern __shared__ uint4 shared[];  // rings of kStages slots per warp
  __shared__ float partial[2][kWarps][kRows];
  __shared__ int expert_at[kCombinePairs], choice_at[kCombinePairs],
      count_of[kCombinePairs];  // from top_k * token on
  __shared__ float score_at[kCombinePairs];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  char* ring = reinterpret_cast<char*>(shared) + warp * kStages * kSlotBytes;
  if (warp == 0) {  // local experts, in order
    static_assert(kCombinePairs == 32);
    const int expert = lane < p.num_tokens * p.top_k ? expert_of(p, lane) : -1,
              first = lane / p.top_k * p.top_k;
    const uint32_t here =
        __ballot_sync(~0u, expert >= 0) >> first & (p.top_k < 32 ? (1u << p.top_k) - 1 : ~0u);
    if (lane % p.top_k == 0) count_of[lane / p.top_k] = __popc(here);
    if (expert >= 0) {
      const int at = first + __popc(here & ((1u << lane % p.top_k) - 1));
      expert_at[at] = expert, choice_at[at] = lane,
      score_at[at] = p.scale_input ? 1.f : p.scores[lane];
    }
  }
  __syncthreads();
  const ExpertGemm<T> gemm(p, pairs, true);
  const int tiles = (gemm.out + kRows - 1) / kRows * p.num_tokens;
  const int of_choice =
      ((gemm.in + kStep - 1) / kStep + kUnroll - 1) / kUnroll;  // chunks of an expert
  auto share_of = [&](int token) {
    const int all = count_of[token] * of_choice, each = (all + kWarps - 1) / kWarps;
    return make_int2(min(warp * each, all), min(warp * each + each, all));
  };

  // Producer cursor: copies run ahead of the mma, over tiles and chunks.
  struct {
    int tile, chunk, end, slot, step, choice;
    const char *low, *high;
  } ahead{static_cast<int>(blockIdx.x), 0, 0, 0, 0, 0, nullptr, nullptr};
  auto find_rows = [&] {
    const int expert = expert_at[ahead.tile % p.num_tokens * p.top_k + ahead.choice];
    const int row = ahead.tile / p.num_tokens * kRows + g;
    ahead.low = reinterpret_cast<const char*>(gemm.row_of_weight(expert, row) + 8 * t);
    ahead.high = reinterpret_cast<const char*>(gemm.row_of_weight(expert, row + 8) + 8 * t);
  };
  auto find_tile = [&] {
    for (; ahead.tile < tiles; ahead.tile += gridDim.x) {
      const int2 share = share_of(ahead.tile % p.num_tokens);
      if (share.x == share.y) continue;
      ahead.chunk = share.x, ahead.end = share.y;
      ahead.choice = share.x / of_choice;
      ahead.step = share.x % of_choice * kUnroll;
      return find_rows();
    }
  };
  auto copy_chunk = [&] {
    if (ahead.tile < tiles) {
      uint4* to = reinterpret_cast<uint4*>(ring + ahead.slot) + lane;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const bool there = (ahead.step + u) * kStep + 8 * t < gemm.in;
        const int at = there ? (ahead.step + u) * kStep * static_cast<int>(sizeof(T)) : 0;
        cp_async(to + 2 * u * 32, ahead.low + at, there);
        cp_async(to + (2 * u + 1) * 32, ahead.high + at, there);
      }
      ahead.slot = ahead.slot + kSlotBytes == kStages * kSlotBytes ? 0 : ahead.slot + kSlotBytes;
      ahead.step += kUnroll;
      if (++ahead.chunk == ahead.end) {
        ahead.tile += gridDim.x;
        find_tile();
      } else if (ahead.step >= of_choice * kUnroll) {
        ahead.step = 0, ++ahead.choice;
        find_rows();
      }
    }
    cp_async_commit();
  };
  find_tile();
  for (int i = 0; i < kStages; ++i) copy_chunk();
  pdl_wait();
  pdl_launch_dependents();

  const uint4 zero = make_uint4(0, 0, 0, 0);
  int slot = 0, turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    const int token = tile % p.num_tokens, first_pair = token * p.top_k,
              row = tile / p.num_tokens * kRows + lane;
    const int64_t position = static_cast<int64_t>(token) * p.hidden + row;
    const bool finishes = warp == turn % kWarps;
    if (finishes && gemm.bias != nullptr && lane < count_of[token])  // for the epilogue
      prefetch_l1(gemm.bias + static_cast<int64_t>(expert_at[first_pair + lane]) * gemm.out + row -
                  lane);
    if (finishes && p.residual != nullptr && lane == 0)
      prefetch_l1(static_cast<const T*>(p.residual) + position);
    float total[2] = {};
    const int2 share = share_of(token);
    for (int chunk = share.x; chunk < share.y;) {
      const int choice = chunk / of_choice, end = min(share.y, (choice + 1) * of_choice);
      const T* x = gemm.x + static_cast<int64_t>(choice_at[first_pair + choice]) * gemm.in + 8 * t;
      float sum[1][4] = {};
      for (; chunk < end; ++chunk) {
        const int first = (chunk - choice * of_choice) * kUnroll * kStep;
        uint4 b[kUnroll][1];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          b[u][0] = first + u * kStep + 8 * t < gemm.in
                        ? *reinterpret_cast<const uint4*>(x + first + u * kStep)
                        : zero;
        cp_async_wait<kStages - 1>();
        mma_chunk<T, 32>(sum, reinterpret_cast<const uint4*>(ring + slot) + lane, b);
        slot = slot + kSlotBytes == kStages * kSlotBytes ? 0 : slot + kSlotBytes;
        copy_chunk();
      }
      const float score = score_at[first_pair + choice];
      total[0] = fmaf(score, sum[0][0], total[0]), total[1] = fmaf(score, sum[0][2], total[1]);
    }
    auto& mine = partial[turn % 2];  // the previous one may still be read
    if (t == 0) mine[warp][g] = total[0], mine[warp][g + 8] = total[1];
    __syncthreads();
    if (!finishes || lane >= kRows || row >= gemm.out) continue;
    float value = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += mine[w][lane];
    if (gemm.bias != nullptr)
#pragma unroll 4
      for (int choice = 0; choice < count_of[token]; ++choice)
        value = fmaf(score_at[first_pair + choice],
                     gemm.bias_of(expert_at[first_pair + choice], row), value);
    if (p.residual != nullptr) value += to_float(static_cast<const T*>(p.residual)[position]);
    static_cast<T*>(p.y)[position] = from_float<T>(value);
  }
}

// As many warps as have steps to take, limited by shared memory for their rings.
template <typename T, int kTiles, bool kDown>
cudaError_t run_warps(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  constexpr int kRest = 32 << 10, kRing = kStages * kSlotBytes;  // per warp
  static_assert(4 * kRing >= 8 * kMaxExperts);
  const bool room =
      device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= 8 * kRing + kRest;
  const int out = ExpertGemm<T>(p, pairs, kDown).out;
  if (ceil_div(kDown ? p.inner : p.hidden, kExpertTileColumns<CodeType::kNone>) > 16 && room)
    return run_resident<experts_gemv_kernel<T, 8, kTiles, kDown>, 256>(
        p, pairs, out, kExpertTileRows, 8 * kRing, 0, 0, stream);
  return run_resident<experts_gemv_kernel<T, 4, kTiles, kDown>, 128>(p, pairs, out, kExpertTileRows,
                                                                     4 * kRing, 0, 0, stream);
}

constexpr int kCombineRing = kCombineWarps * kStages * kSlotBytes;

template <typename T>
cudaError_t launch_down_combine(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      down_combine_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kCombineRing);
  if (error != cudaSuccess) return error;
  const unsigned tiles = ceil_div(p.hidden, kExpertTileRows) * p.num_tokens;
  return launch(down_combine_kernel<T>, std::min(tiles, num_sms()), kCombineWarps * 32,
                kCombineRing, stream, p, pairs);
}

template <typename T, int kTiles>
cudaError_t run_both(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  cudaError_t error = run_warps<T, kTiles, false>(p, pairs, stream);
  if (error == cudaSuccess)
    error = quantize_inner(kDType<T>, p, pairs, ActivationQuant::kDequantized, stream);
  if (error != cudaSuccess) return error;
  return combines_choices(p) ? launch_down_combine<T>(p, pairs, stream)
                             : run_warps<T, kTiles, true>(p, pairs, stream);
}

template <typename T>
cudaError_t run_type(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  return are_rare(p) ? run_both<T, 1>(p, pairs, stream) : run_both<T, 2>(p, pairs, stream);
}

}  // namespace

// If tiles fill all SMs evenly, within one in 20, and tokens seldom share an expert.
bool combines_choices(const ExpertsParams& p) {
  constexpr int kRest = 8 << 10, kSeldom = 4;
  const int64_t pairs = static_cast<int64_t>(p.num_tokens) * p.top_k;
  if (p.gate_up_quant.code_type != CodeType::kNone || pairs > kCombinePairs ||
      device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() < kCombineRing + kRest)
    return false;
  const unsigned tiles = ceil_div(p.hidden, kExpertTileRows) * p.num_tokens, positions = num_sms();
  const bool even = 20 * ceil_div(tiles, positions) * positions <= 21 * tiles;
  return even && (p.num_tokens == 1 || kSeldom * pairs <= p.num_experts);
}

cudaError_t experts_gemv(DType dtype, const ExpertsParams& p, const Pairs& pairs,
                         cudaStream_t stream) {
  if (p.hidden % 8 != 0 || p.inner % 8 != 0 ||
      static_cast<int64_t>(p.num_tokens) * p.top_k > kExpertsGemvPairs)
    return cudaErrorInvalidValue;
  if (p.gate_up_quant.code_type != CodeType::kNone)
    return packed_experts_gemv(dtype, p, pairs, stream);
  if (dtype == DType::kFloat16) return run_type<__half>(p, pairs, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
