// Expert GEMVs for quantized weights: see experts_few.cuh, and experts.cuh for the layout.
//
// A tile of a weight is one contiguous range, and so are its scales. A block takes kRowTiles
// adjacent tiles, which share the reads of x and the overhead. Chunks of some steps per warp are
// always in flight to shared memory: bulk copies on Hopper, 16 bytes per thread elsewhere; a ring
// has kSlots chunks. The tensor core sums at most one group of columns per step, and the group's
// scale multiplies the sum in float32, so nothing but x and y is rounded. If x is quantized to FP8,
// a block quantizes its rows to shared memory while weights are in flight; both operands are then
// converted to float16, exactly, by one instruction per pair.
#include <algorithm>

#include "../rowwise/params.h"
#include "bulk_pipeline.cuh"
#include "experts_few.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kWarps = 4;  // consumer warps
constexpr int kRowTiles = 2;
constexpr int kSlots = 2;            // chunks in flight
constexpr int kSteps = 24;           // maximum steps of a tile per chunk
constexpr int kQuantizedPairs = 4;   // maximum pairs of a group if the block quantizes x
constexpr int kConsumerBarrier = 1;  // named barrier of the consumer warps

// Groups of columns: of 32; with zeros; of kQuantBlock with quantized x.
enum class Grouping { kPlain, kSmall, kZeros, kSmallAndZeros, kRounded };
template <Grouping kGrouping>
constexpr bool kIsSmall = kGrouping == Grouping::kSmall || kGrouping == Grouping::kSmallAndZeros;

// Bytes of a chunk: the vectors of its tiles, then the scales of their groups.
template <CodeType kCodeType, Grouping kGrouping>
struct SlotLayout {
  static constexpr int kVectors = kSteps * 512;  // of a tile
  static constexpr int kScales = kSteps *
                                 (kIsSmall<kGrouping> ? kExpertTileColumns<kCodeType> / 32 : 1) *
                                 kTileScaleBytes<kCodeType>;
  static constexpr int kBytes = kRowTiles * (kVectors + kScales);
};

// MXFP4 codes are multiplied as bit patterns of small values (mxfp4_bits()), and the sum is
// corrected. In bfloat16 they are so small that x is scaled up: values of x above 2^64 become
// infinite, and products with a group's exponent below 2^-63 lose bits.
template <typename T>
constexpr float kMxfp4Correction = std::is_same_v<T, __half> ? 0x1p14f : 0x1p63f;
__device__ __forceinline__ uint4 scale_up(const uint4& x) {
  auto lift = [](uint32_t pair) { return hmul2<__nv_bfloat16>(pair, 0x5f005f00); };  // twice 2^63
  return make_uint4(lift(x.x), lift(x.y), lift(x.z), lift(x.w));
}

// FP8 rows of x of a group in shared memory, in the column order of quantized weights, and their
// scales.
template <typename T>
struct QuantizedX {
  static constexpr int kPad = 32;  // bytes between rows, against bank conflicts
  uint8_t* at;  // scales [width / kQuantBlock][kQuantizedPairs], then rows of codes
  int width, group;

  __host__ __device__ static constexpr int bytes(int rows, int width) {
    return width / kQuantBlock * kQuantizedPairs * 4 + rows * (width + kPad);
  }
  __device__ uint8_t* row(int row) const { return at + bytes(row, width); }
  __device__ float& scale(int row, int group) const {
    return reinterpret_cast<float*>(at)[(this->group == 0 ? 0 : group) * kQuantizedPairs + row];
  }

  // Call from all consumer threads; readers must synchronize.
  __device__ __forceinline__ void make(int row, const T* x) const {
    constexpr int kThreads = kWarps * 32, kUnit = 8, kHalf = kQuantBlock / kUnit;
    __shared__ float of_warps[kWarps];
    float numbers[kUnit];
    auto measure = [&](int unit) {
      const auto own = load<T, kUnit>(x + unit * kUnit);
#pragma unroll
      for (int k = 0; k < kUnit; ++k) numbers[k] = to_float(own.data[k]);
      return abs_max(numbers);
    };
    float whole = 0;
    if (group == 0) {
      for (int unit = threadIdx.x; unit < width / kUnit; unit += kThreads)
        whole = fmaxf(whole, measure(unit));
      whole = warp_abs_max(whole);
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = whole;
      named_barrier_sync(kConsumerBarrier, kThreads);
      for (float other : of_warps) whole = fmaxf(whole, other);
      named_barrier_sync(kConsumerBarrier, kThreads);  // before the next row
    }
    for (int unit = threadIdx.x; unit < width / kUnit; unit += kThreads) {
      const float own = measure(unit), step = fp8_scale(group == 0 ? whole : half_warp_max(own));
      if (group == 0 ? unit == 0 : unit % kHalf == 0) scale(row, unit / kHalf) = step;
      *reinterpret_cast<uint2*>(this->row(row) + unit * kUnit) = quantize_unit(numbers, 1 / step);
    }
  }
};

// Producer: copies the chunks of the block's tiles in turn. Refers to variables of the kernel, like
// a lambda: copies of them are other machine code.
template <CodeType kCodeType, bool kDown, Grouping kGrouping, typename ScaleGroup>
struct Producer {
  using Layout = SlotLayout<kCodeType, kGrouping>;
  static constexpr bool kSmall = kIsSmall<kGrouping>;
  static constexpr int kParts = kExpertTileColumns<kCodeType> / 32;

  __device__ __forceinline__ void copy_chunk() const {
    if (ahead.group >= num_groups) return;
    const int first_tile = ahead.tile * kRowTiles;
    const int64_t tile =
        static_cast<int64_t>(unpack_group(list[ahead.group]).expert) * tiles + first_tile;
    const int first = ahead_chunk * of_chunk, last = min(first + of_chunk, steps);
    const int from = scale_group(first), to = scale_group(last - 1) + (kSmall ? kParts : 1);
    auto pieces = [&](const void* all, int of_tile, int begin, int end, int each, int room) {
      return StridedSpans{static_cast<const char*>(all) + (tile * of_tile + begin) * each,
                          static_cast<int64_t>(of_tile) * each, (end - begin) * each, room};
    };
    stretches.copy(
        chunk_turn++, min(kRowTiles, tiles - first_tile),
        pieces(kDown ? p.down : p.gate_up, steps, first, last, 512, Layout::kVectors),
        pieces(quant.scale, groups, from, to, kTileScaleBytes<kCodeType>, Layout::kScales));
    if (++ahead_chunk == chunks) ahead_chunk = 0, ahead.advance(gridDim.x);
  }

  GroupTileCursor& ahead;
  const int &num_groups, &tiles;
  uint32_t* const& list;
  int& ahead_chunk;
  const int &of_chunk, &steps;
  const ScaleGroup& scale_group;
  const BulkPipeline<Layout::kBytes, kSlots, kWarps, kRowTiles>& stretches;
  int& chunk_turn;
  const ExpertsParams& p;
  const ExpertsQuantParams& quant;
  const int &groups, &chunks;
};

// Codes of rows g and g + 8 of a tile as mma operands.
template <typename T, CodeType kCodeType, Grouping kGrouping>
__device__ __forceinline__ void dequantize(uint32_t (&low)[4], uint32_t (&high)[4],
                                           const uint4& codes, int part,
                                           const ExpertsQuantParams& quant, const int& expert,
                                           const int& tiles, int tile_index, const int& g,
                                           int of_group, const int& groups) {
  constexpr bool kRounded = kGrouping == Grouping::kRounded,
                 kAsBits = kCodeType == CodeType::kMxfp4;
  constexpr bool kZeros = kGrouping == Grouping::kZeros || kGrouping == Grouping::kSmallAndZeros;
  if constexpr (kRounded) {
    fp8x4_to_half2(low[0], low[1], codes.x), fp8x4_to_half2(low[2], low[3], codes.y);
    fp8x4_to_half2(high[0], high[1], codes.z), fp8x4_to_half2(high[2], high[3], codes.w);
  } else if constexpr (kAsBits) {
    mxfp4_bits<T>(low, part == 1 ? codes.y : codes.x);
    mxfp4_bits<T>(high, part == 1 ? codes.w : codes.z);
  } else {
    uint32_t low_offset = dequant_offset<T, kCodeType>(kDefaultZero<kCodeType>),
             high_offset = low_offset;
    if constexpr (kZeros) {
      const int64_t tile = static_cast<int64_t>(expert) * tiles + min(tile_index, tiles - 1);
      const int64_t row = tile * kExpertTileRows + g;
      low_offset = dequant_offset<T, kCodeType>(
          load_expert_zero<kCodeType>(quant.zero, row, of_group, groups));
      high_offset = dequant_offset<T, kCodeType>(
          load_expert_zero<kCodeType>(quant.zero, row + 8, of_group, groups));
    }
    dequantize_rows<T, kCodeType>(low, high, codes, part, low_offset, high_offset);
  }
}

// The last warp of a block is the producer and writes the epilogue, so consumers wait for weights
// only. kTiles: groups of 8 pairs.
template <typename T, CodeType kCodeType, int kTiles, bool kDown, Grouping kGrouping>
__global__ void __launch_bounds__((kWarps + 1) * 32, 3)
    experts_packed_gemv_kernel(const __grid_constant__ ExpertsParams p,
                               const __grid_constant__ Pairs pairs) {
  constexpr bool kRounded = kGrouping == Grouping::kRounded, kSmall = kIsSmall<kGrouping>;
  constexpr bool kAsBits = kCodeType == CodeType::kMxfp4;
  using Number = std::conditional_t<kRounded, __half, T>;  // of both operands
  using X = std::conditional_t<kRounded, uint2, uint4>;    // x that a thread reads at once
  using SlotLayout = SlotLayout<kCodeType, kGrouping>;
  constexpr int kThreads = (kWarps + 1) * 32, kPairs = kRounded ? kQuantizedPairs : kTiles * 8;
  constexpr int kRows = kRowTiles * kExpertTileRows, kStep = kExpertTileColumns<kCodeType>,
                kParts = kStep / 32;
  // Slots; list of groups; order of pairs; quantized x.
  extern __shared__ uint4 shared[];
  __shared__ float partial[2][kWarps][kRows][kTiles * 8 + 1];  // of these rows and of the next
  __shared__ uint64_t barriers[2 * kSlots + 4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const BulkPipeline<SlotLayout::kBytes, kSlots, kWarps, kRowTiles> stretches(
      reinterpret_cast<char*>(shared), barriers);
  auto summed = [&](int turn) { return Mbarrier{smem_address(barriers + 2 * kSlots + turn % 2)}; };
  auto finished = [&](int turn) {
    return Mbarrier{smem_address(barriers + 2 * kSlots + 2 + turn % 2)};
  };
  auto* list =
      reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(shared) + kSlots * SlotLayout::kBytes);
  auto* order = reinterpret_cast<uint16_t*>(list + p.num_tokens * p.top_k);
  if (!kDown) {
    pdl_wait();
    pdl_launch_dependents();
  }
  if (threadIdx.x == 0) {
    stretches.init();
    for (int buffer = 0; buffer < 2; ++buffer)
      summed(buffer).init(kWarps), finished(buffer).init(1);
    fence_mbarrier_init();
  }
  const ExpertGemm<T> gemm(p, pairs, kDown);
  const ExpertsQuantParams& quant = kDown ? p.down_quant : p.gate_up_quant;
  const int tiles = gemm.out / kExpertTileRows;
  const int num_groups =
      list_pair_groups<kThreads>(p, kPairs, list, order, reinterpret_cast<uint32_t*>(shared));
  fence_async_proxy();
  __syncthreads();
  // Steps of a tile, of a chunk, and of a warp in a chunk.
  const int steps = gemm.in / kStep, chunks = (steps + kSteps - 1) / kSteps;
  const int of_chunk = (steps + chunks - 1) / chunks, share = (of_chunk + kWarps - 1) / kWarps;
  const int groups = gemm.in / quant.group_size, shift = kSmall ? 5 : 31 - __clz(quant.group_size);
  auto scale_group = [&](int step) { return kSmall ? step * kParts : step * kStep >> shift; };

  int chunk_turn = 0, turn = 0;
  GroupTileCursor at(blockIdx.x, (tiles + kRowTiles - 1) / kRowTiles);
  if (warp == kWarps) {
    GroupTileCursor ahead = at;
    int ahead_chunk = 0;
    const Producer<kCodeType, kDown, kGrouping, decltype(scale_group)> producer{
        ahead,       num_groups, tiles,      list, ahead_chunk, of_chunk, steps,
        scale_group, stretches,  chunk_turn, p,    quant,       groups,   chunks};
    for (int slot = 0; slot < kSlots; ++slot) producer.copy_chunk();
    if (kDown) {
      pdl_wait();
      pdl_launch_dependents();
    }
    for (; at.group < num_groups; at.advance(gridDim.x), ++turn) {
      const PairGroup group = unpack_group(list[at.group]);
      const int first_row = at.tile * kRows,
                bias_row = first_row + lane % kRows;  // for the epilogue
      if (gemm.bias != nullptr && bias_row < gemm.out)
        prefetch_l1(gemm.bias + static_cast<int64_t>(group.expert) * gemm.out + bias_row);
      for (int chunk = 0; chunk < chunks; ++chunk) producer.copy_chunk();
      summed(turn).wait(turn / 2 & 1);
      store_outputs<kDown>(p, pairs, gemm, group, order, first_row, partial[turn % 2], lane, 32);
      __syncwarp();
      if (lane == 0) finished(turn).arrive();
    }
    return;
  }

  if (kDown) {
    pdl_wait();
    pdl_launch_dependents();
  }
  const QuantizedX<T> rounded{reinterpret_cast<uint8_t*>(shared) + kSlots * SlotLayout::kBytes +
                                  order_bytes(p.num_tokens * p.top_k),
                              kDown ? p.inner : p.hidden, p.quant_group};
  const uint32_t per_choice = 0xffffffffu / p.top_k + 1;  // 0 if there is one
  for (; at.group < num_groups; at.advance(gridDim.x), ++turn) {
    const PairGroup group = unpack_group(list[at.group]);
    const int last_row = group.count - 1, first_tile = at.tile * kRowTiles;
    // Pairs after the last repeat it, and lead to columns that are not written.
    auto row_of_x = [&](int of_group) -> int {
      const uint32_t pair = order[group.first + min(of_group, last_row)];
      return kDown || per_choice == 0 ? pair : __umulhi(pair, per_choice);
    };
    const char* x[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      x[n] = reinterpret_cast<const char*>(
          gemm.x + static_cast<int64_t>(row_of_x(n * 8 + g)) * gemm.in + 8 * t);
    if constexpr (kRounded) {
      named_barrier_sync(kConsumerBarrier, kWarps * 32);  // the previous rows may still be read
      if (kDown || p.num_tokens > 1 || turn == 0)
        for (int row = 0; row < group.count; ++row)
          rounded.make(row, gemm.x + static_cast<int64_t>(row_of_x(row)) * gemm.in);
      named_barrier_sync(kConsumerBarrier, kWarps * 32);
      x[0] = reinterpret_cast<const char*>(rounded.row(min(g, last_row)) + 8 * t);
    }
    float sum[kRowTiles][kTiles][4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk, ++chunk_turn) {
      const int first = chunk * of_chunk, begin = first + warp * share,
                end = min(min(begin + share, first + of_chunk), steps);
      const int first_group = scale_group(first);
      X next_x[kParts][kTiles];
      auto read_x = [&](int step) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
            next_x[part][n] = *reinterpret_cast<const X*>(
                x[n] + static_cast<uint64_t>(step) * (kStep / 8 * sizeof(X)) +
                part * (4 * sizeof(X)));
      };
      if (begin < end) read_x(begin);
      const char* slot = stretches.wait(chunk_turn);
      const uint4* vectors = reinterpret_cast<const uint4*>(slot) + lane - first * 32;
      uint4 next_codes[kRowTiles]{};
      auto read_codes = [&](int step) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
          next_codes[r] = vectors[step * 32 + r * (SlotLayout::kVectors / 16)];
      };
      if (begin < end) read_codes(begin);
#pragma unroll 2
      for (int step = begin; step < end; ++step) {
        uint4 codes[kRowTiles];
        X here[kParts][kTiles];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) codes[r] = next_codes[r];
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
          for (int n = 0; n < kTiles; ++n) here[part][n] = next_x[part][n];
        const int next =
            min(step + 1, end - 1);  // unconditional: a condition would need more registers
        read_x(next), read_codes(next);
        float own[kRowTiles][kTiles][4] = {};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int of_group = scale_group(step) + (kSmall ? part : 0);
          uint4 numbers[kTiles];
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            if constexpr (kRounded) {
              fp8x4_to_half2(numbers[n].x, numbers[n].y, here[part][n].x);
              fp8x4_to_half2(numbers[n].z, numbers[n].w, here[part][n].y);
            } else {
              numbers[n] = kAsBits && std::is_same_v<T, __nv_bfloat16> ? scale_up(here[part][n])
                                                                       : here[part][n];
            }
          }
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            const char* scale = slot + kRowTiles * SlotLayout::kVectors + r * SlotLayout::kScales +
                                (of_group - first_group) * kTileScaleBytes<kCodeType>;
            uint32_t low[4], high[4];
            dequantize<T, kCodeType, kGrouping>(low, high, codes[r], part, quant, group.expert,
                                                tiles, first_tile + r, g, of_group, groups);
            const uint32_t even[4] = {low[0], high[0], low[1], high[1]},
                           odd[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              mma_m16n8k16<Number>(own[r][n], even, numbers[n].x, numbers[n].y);
              mma_m16n8k16<Number>(own[r][n], odd, numbers[n].z, numbers[n].w);
            }
            if (!kSmall && part + 1 < kParts) continue;
            float scales[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int row = g + half * 8;
              if constexpr (kAsBits)
                scales[half] = __uint_as_float(reinterpret_cast<const uint8_t*>(scale)[row] << 23);
              else scales[half] = reinterpret_cast<const float*>(scale)[row];
            }
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              float of_x[2] = {1, 1};
              if constexpr (kRounded)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                  of_x[i] = rounded.scale(min(2 * t + i, last_row), of_group);
#pragma unroll
              for (int c = 0; c < 4; ++c) {
                const float factor = kRounded ? scales[c / 2] * of_x[c % 2] : scales[c / 2];
                sum[r][n][c] = fmaf(own[r][n][c], factor, sum[r][n][c]), own[r][n][c] = 0;
              }
            }
          }
        }
      }
      stretches.release(chunk_turn);
    }
    finished(turn).wait((turn / 2 + 1) & 1);  // the previous rows

    auto& mine = partial[turn % 2][warp];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      if (n * 8 + 2 * t <= last_row)
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            mine[r * kExpertTileRows + g + c / 2 * 8][n * 8 + 2 * t + c % 2] =
                kAsBits ? sum[r][n][c] * kMxfp4Correction<T> : sum[r][n][c];
    __syncwarp();
    if (lane == 0) summed(turn).arrive();
  }
}

template <typename T, CodeType kCodeType, int kTiles, bool kDown, Grouping kGrouping>
cudaError_t run_product(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  constexpr int kRing = kSlots * SlotLayout<kCodeType, kGrouping>::kBytes;
  static_assert(kRing >= 8 * kMaxExperts);
  using X = QuantizedX<T>;
  constexpr bool kRounded = kGrouping == Grouping::kRounded;
  const int in = kDown ? p.inner : p.hidden, out = ExpertGemm<T>(p, pairs, kDown).out;
  return run_resident<experts_packed_gemv_kernel<T, kCodeType, kTiles, kDown, kGrouping>,
                      (kWarps + 1) * 32>(
      p, pairs, out, kRowTiles * kExpertTileRows, kRing,
      kRounded ? X::bytes(std::min(p.num_tokens, kQuantizedPairs), in) : 0,
      kRounded ? X::bytes(kQuantizedPairs, kMaxNormHidden) : 0, stream);
}

template <typename T, CodeType kCodeType, int kTiles, Grouping kGrouping>
cudaError_t run_both(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  cudaError_t error = run_product<T, kCodeType, kTiles, false, kGrouping>(p, pairs, stream);
  if (error == cudaSuccess)
    error = quantize_inner(kDType<T>, p, pairs,
                           kGrouping == Grouping::kRounded ? ActivationQuant::kInKernel
                                                           : ActivationQuant::kDequantized,
                           stream);
  if (error != cudaSuccess) return error;
  return run_product<T, kCodeType, kTiles, true, kGrouping>(p, pairs, stream);
}

template <typename T, CodeType kCodeType, Grouping kGrouping>
cudaError_t run_pairs(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  return are_rare(p) ? run_both<T, kCodeType, 1, kGrouping>(p, pairs, stream)
                     : run_both<T, kCodeType, 2, kGrouping>(p, pairs, stream);
}

template <typename T>
cudaError_t run_type(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const ExpertsQuantParams& quant = p.gate_up_quant;
  if (uses_fp8_mma(p))
    return run_both<T, CodeType::kFloat8, 1, Grouping::kRounded>(p, pairs, stream);
  return dispatch_expert_code_type(quant.code_type, [&](auto codes) {
    constexpr CodeType kCodeType = codes.value;
    const bool small = quant.group_size == 32;
    if constexpr (kCodeType == CodeType::kMxfp4) {
      return run_pairs<T, kCodeType, Grouping::kSmall>(p, pairs, stream);
    } else {
      if constexpr (kCodeType != CodeType::kFloat8)
        if (quant.zero != nullptr)
          return small ? run_pairs<T, kCodeType, Grouping::kSmallAndZeros>(p, pairs, stream)
                       : run_pairs<T, kCodeType, Grouping::kZeros>(p, pairs, stream);
      return small ? run_pairs<T, kCodeType, Grouping::kSmall>(p, pairs, stream)
                   : run_pairs<T, kCodeType, Grouping::kPlain>(p, pairs, stream);
    }
  });
}

}  // namespace

cudaError_t packed_experts_gemv(DType dtype, const ExpertsParams& p, const Pairs& pairs,
                                cudaStream_t stream) {
  if (dtype == DType::kFloat16) return run_type<__half>(p, pairs, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
