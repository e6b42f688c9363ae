// Grouped GEMMs on Hopper by wgmma: warp-specialized, persistent.
//
// A tile is kRows weight rows of an expert (the A operand) for a group of its pairs (B): the cost
// of a group grows in steps of 16 pairs, and an expert's pairs are divided evenly into groups.
// kConsumerGroups warpgroups multiply 2 x 64 rows each; a thread has gates and their ups. The
// producer warp copies 64 columns per stage by TMA, x in the order of pairs. The groups of an
// expert with the same weight rows are adjacent tiles, so weights are read from memory once, and
// then from L2.
//
// Quantized weights are tiled (experts.cuh): a thread's codes of 16 rows are one vector. They are
// dequantized and scaled to the register operand of the next wgmma. x is permuted to the column
// order of the codes, and gates and ups are adjacent rows.
//
// FP8 weights with FP8 x: 128 columns per stage, codes are the operand as they are, and both scales
// multiply the sum of each stage.
#include <algorithm>

#include "../common/mma.cuh"
#include "../common/wgmma_sm90.cuh"
#include "experts.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using namespace sm90;

constexpr uint32_t kRowBytes = 128;  // of a row of x in a stage
template <bool kRounded>
constexpr int kColumns = kRounded ? 128 : 64;  // of a stage
constexpr int kEpiloguePairs = 16;             // pairs per step of the epilogue
constexpr int kEpilogueStride =
    9;  // vectors between pairs: 64 rows, and padding against bank conflicts

template <CodeType kCodeType>
constexpr bool kPacked = kCodeType != CodeType::kNone;

// Shared memory, aligned to 1,024 bytes. With quantized weights a stage has the codes of 16 rows
// side by side, and the scales of one or two groups; with FP8 x of one group, and the scales of x.
template <CodeType kCodeType, bool kRounded, int kConsumerGroups, int kPairs, int kStages>
struct SharedStorage {
  static constexpr int kRows = kConsumerGroups * 128, kThreads = (1 + kConsumerGroups) * 128,
                       kTiles = kRows / kExpertTileRows;
  static constexpr uint32_t kTileBytes =
      kExpertTileRows *
      (kPacked<kCodeType> ? kColumns<kRounded> * kBits<kCodeType> / 8 : kRowBytes);
  static constexpr uint32_t kWeightBytes = kTiles * kTileBytes;
  static constexpr uint32_t kScalesAt = kWeightBytes + kPairs * kRowBytes;
  static constexpr uint32_t kXScalesAt = kScalesAt + kTiles * kTileScaleBytes<kCodeType>,
                            kXScales = kPairs + 4;  // starts at a multiple of four
  static constexpr uint32_t kXScaleBytes = kRounded ? kXScales * 4 : 0;
  static constexpr uint32_t kScaleBytes =
      !kPacked<kCodeType>
          ? 0
          : (kTiles * kTileScaleBytes<kCodeType> * (kRounded ? 1 : 2) + kXScaleBytes + 1023) /
                1024 * 1024;
  static constexpr uint32_t kStageBytes = kScalesAt + kScaleBytes;
  static constexpr uint32_t kOutAt = kStages * kStageBytes,
                            kOutBytes = 4 * kEpiloguePairs * kEpilogueStride * 16;
  static constexpr uint32_t kPairsAt = kOutAt + kConsumerGroups * kOutBytes,
                            kBarriersAt = kPairsAt + kConsumerGroups * kPairs * 4;
  static constexpr uint32_t kBytes = kBarriersAt + 16 * kStages + 1024;
  static_assert(kPairs % kEpiloguePairs == 0 && kPairs <= 256 && kStageBytes % 1024 == 0);

  uint8_t* bytes;
  uint32_t base = smem_address(bytes);

  __device__ uint32_t weights(int slot) const { return base + slot * kStageBytes; }
  __device__ uint32_t x(int slot) const { return weights(slot) + kWeightBytes; }
  // Quantized weights: a warp's 16 rows, and their scales by group.
  __device__ const uint4* codes(int slot, int tile) const {
    return reinterpret_cast<const uint4*>(bytes + slot * kStageBytes + tile * kTileBytes);
  }
  __device__ const uint8_t* scales(int slot, int tile, int groups) const {
    return bytes + slot * kStageBytes + kScalesAt + tile * groups * kTileScaleBytes<kCodeType>;
  }
  __device__ uint32_t x_scales(int slot) const { return weights(slot) + kXScalesAt; }
  // [2 steps][2 operands][kEpiloguePairs][kEpilogueStride].
  __device__ uint4* out(int group) const {
    return reinterpret_cast<uint4*>(bytes + kOutAt + group * kOutBytes);
  }
  __device__ int* pairs(int group) const {
    return reinterpret_cast<int*>(bytes + kPairsAt) + group * kPairs;
  }
  __device__ Mbarrier full_barrier(int slot) const { return {base + kBarriersAt + 8 * slot}; }
  __device__ Mbarrier empty_barrier(int slot) const {
    return {base + kBarriersAt + 8 * (kStages + slot)};
  }
};

// Index of the ring's slot, and how often it has been used.
template <int kStages>
struct PipelineState {
  int slot = 0;
  uint32_t phase_count = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kStages) slot = 0, ++phase_count;
  }
};

struct Tile {
  int expert, out_tile, first, count;
};

// All tiles: an expert's weight rows, and for the same rows its groups of pairs, equal in size but
// for the last.
struct TileScheduler {
  const Pairs& pairs;
  const int* before;  // number of groups before an expert's
  const int out_tiles;
  int expert = 0;

  // Tile number `tile`, which must not decrease between calls.
  __device__ Tile next(int tile) {
    while (before[expert + 1] * out_tiles <= tile) ++expert;
    const int rest = tile - before[expert] * out_tiles,
              groups = before[expert + 1] - before[expert];
    const int start = pairs.starts[expert], size = pairs.starts[expert + 1] - start;
    const int each = ((size + groups - 1) / groups + kEpiloguePairs - 1) / kEpiloguePairs *
                     kEpiloguePairs,
              skipped = rest % groups * each;
    return {expert, rest / groups, start + skipped, min(each, size - skipped)};
  }
};

struct TensorMaps {
  CUtensorMap weights, x, scales, x_scales;
};

// Groups whose scales a stage has; x is not quantized, or has groups of the same size.
__host__ __device__ __forceinline__ int groups_per_stage(const ExpertsQuantParams& quant) {
  return quant.group_size < kColumns<false> ? 2 : 1;
}

template <bool kDown, CodeType kCodeType, bool kRounded, int kConsumerGroups, int kPairs,
          int kStages>
__device__ __forceinline__ void produce(
    const SharedStorage<kCodeType, kRounded, kConsumerGroups, kPairs, kStages>& smem,
    const TensorMaps& maps, const ExpertsParams& p, TileScheduler scheduler, int count,
    int stages) {
  using P = SharedStorage<kCodeType, kRounded, kConsumerGroups, kPairs, kStages>;
  constexpr int kStageColumns = kColumns<kRounded>;
  const int lane = threadIdx.x % 32;
  auto copy_weights = [&](const Tile& tile, int slot, int stage) {
    const Mbarrier full = smem.full_barrier(slot);
    const int rows = (tile.count + kEpiloguePairs - 1) / kEpiloguePairs * kEpiloguePairs;
    if constexpr (kPacked<kCodeType>) {
      const ExpertsQuantParams& quant = kDown ? p.down_quant : p.gate_up_quant;
      const int own_tiles = (kDown ? p.hidden : p.gated ? 2 * p.inner : p.inner) / kExpertTileRows;
      const int first = tile.expert * own_tiles + tile.out_tile * P::kTiles;
      const int scales = P::kTiles * groups_per_stage(quant) * kTileScaleBytes<kCodeType>;
      full.arrive_expect_tx(P::kWeightBytes + rows * kRowBytes + scales + P::kXScaleBytes);
      tma_load(smem.weights(slot), maps.weights, full, stage * (P::kTileBytes / 8), first);
      tma_load(smem.weights(slot) + P::kScalesAt, maps.scales, full,
               stage * kStageColumns / quant.group_size * kExpertTileRows, first);
      return;
    }
    full.arrive_expect_tx(P::kWeightBytes + rows * kRowBytes);
    const bool paired = !kDown && p.gated;
    const int first = tile.out_tile * (paired ? P::kRows / 2 : P::kRows);
    tma_load(smem.weights(slot), maps.weights, full, stage * kStageColumns, 0, first, tile.expert);
    tma_load(smem.weights(slot) + P::kWeightBytes / 2, maps.weights, full, stage * kStageColumns,
             paired ? 1 : 0, paired ? first : first + P::kRows / 2, tile.expert);
  };
  int ahead = 0;  // weight stages in flight before pdl_wait()
  if (kDown) {
    if (static_cast<int>(blockIdx.x) < count) {
      const Tile tile = TileScheduler(scheduler).next(blockIdx.x);
      ahead = min(kStages, stages);
      if (lane == 0)
        for (int stage = 0; stage < ahead; ++stage) copy_weights(tile, stage, stage);
    }
    pdl_wait();
    pdl_launch_dependents();
  }
  PipelineState<kStages> state;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Tile tile = scheduler.next(i);
    for (int stage = 0; stage < stages; ++stage, state.advance()) {
      const Mbarrier full = smem.full_barrier(state.slot);
      if (state.phase_count > 0) smem.empty_barrier(state.slot).wait(state.phase_count - 1 & 1);
      if (ahead > 0) --ahead;
      else if (lane == 0) copy_weights(tile, state.slot, stage);
      __syncwarp();
      const uint32_t to = smem.x(state.slot);
      if (lane * kEpiloguePairs < tile.count)
        tma_load(to + lane * kEpiloguePairs * kRowBytes, maps.x, full, stage * kStageColumns,
                 tile.first + lane * kEpiloguePairs);
      if (kRounded && lane == 31)  // with one scale per row, all stages have the same scales
        tma_load(smem.x_scales(state.slot), maps.x_scales, full, tile.first & ~3,
                 p.quant_group == 0 ? 0 : stage);
    }
  }
}

// Stores four 8 x 8 matrices transposed (stmatrix): a lane addresses column lane % 8 of matrix lane
// / 8.
__device__ __forceinline__ void stmatrix_x4_trans(uint4* to, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   smem_address(to)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Permutes 32 columns, four vectors: the first words of all, then the second ones, and so on, as
// quantized weights have them.
__device__ __forceinline__ uint4 permute_vector(const uint4* row, int vector) {
  const auto* words = reinterpret_cast<const uint32_t*>(row + vector / 4 * 4) + vector % 4;
  return make_uint4(words[0], words[4], words[8], words[12]);
}

// The function between the GEMMs: if gated, gates are in sums[0], ups in sums[1], and the result in
// sums[0].
__device__ __forceinline__ void activate_columns(const ExpertsParams& p, float (&sums)[2][8]) {
  if (p.gated && p.activation == Activation::kSilu) {  // the common case, for all eight at once
    const float most = p.limit != 0 ? p.limit : INFINITY;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float gate = fminf(sums[0][i], most), up = fminf(fmaxf(sums[1][i], -most), most);
      sums[0][i] = __fdividef(gate, 1.f + __expf(-p.alpha * gate)) * (up + p.up_offset);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sums[0][i] = activate_inner(p, sums[0][i], sums[1][i]);
    if (!p.gated) sums[1][i] = activate_inner(p, sums[1][i], 0.f);
  }
}

// The scale of a row's group as a pair of T.
template <typename T, CodeType kCodeType>
__device__ __forceinline__ uint32_t load_scale(const uint8_t* scales, int row) {
  const float scale = kCodeType == CodeType::kMxfp4 ? exponent_to_float(scales[row])
                                                    : reinterpret_cast<const float*>(scales)[row];
  return pack2<T>(scale, scale);
}

// Dequantizes 32 columns of two rows to the A operands of two wgmma.
template <typename T, CodeType kCodeType>
__device__ __forceinline__ void dequantize_operands(uint32_t (&made)[8], const uint4& codes,
                                                    int part, const uint32_t (&scales)[2],
                                                    const uint32_t (&offsets)[2]) {
  constexpr bool kFour = kBits<kCodeType> == 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint2 words = r == 0 ? make_uint2(codes.x, codes.y) : make_uint2(codes.z, codes.w);
    if (kFour && part == 1) words.x = words.y;
    uint32_t numbers[4];
    dequantize_unit<T, kCodeType>(numbers, words, offsets[r]);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kCodeType == CodeType::kMxfp4 && std::is_same_v<T, __half>)
        numbers[k] = hmul2<T>(numbers[k], pack2<T>(kMxfp4Scale<T>, kMxfp4Scale<T>));
      made[2 * k + r] = hmul2<T>(numbers[k], scales[r]);
    }
  }
}

// Mainloop for 16-bit weights: both operands from shared memory.
template <int kWidth, typename T, CodeType kCodeType, bool kRounded, int kConsumerGroups,
          int kPairs, int kStages>
__device__ __forceinline__ void mainloop_16bit(
    float (&c)[2][kPairs / 2], PipelineState<kStages>& state,
    const SharedStorage<kCodeType, kRounded, kConsumerGroups, kPairs, kStages>& smem, int stages,
    int group) {
  constexpr int kStageColumns = kColumns<kRounded>;
  const int thread = threadIdx.x % 128;
  PipelineState<kStages> last = state;
  for (int stage = 0; stage < stages; ++stage) {
    smem.full_barrier(state.slot).wait(state.phase_count & 1);
    const uint64_t weights =
        make_smem_desc_k_major(smem.weights(state.slot) + group * 64 * kRowBytes);
    const uint64_t x = make_smem_desc_k_major(smem.x(state.slot));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStageColumns / 16; ++k)
#pragma unroll
      for (int m = 0; m < 2; ++m)
        sm90::Wgmma<T, kWidth>::ss(reinterpret_cast<float (&)[kWidth / 2]>(c[m]),
                                   weights + (m * kConsumerGroups * 64 * kRowBytes + k * 32) / 16,
                                   x + k * 32 / 16, stage > 0 || k > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (stage > 0 && thread % 32 == 0) smem.empty_barrier(last.slot).arrive();
    last = state;
    state.advance();
  }
  wgmma_wait<0>();
  if (thread % 32 == 0) smem.empty_barrier(last.slot).arrive();
}

// Mainloop for quantized weights: codes are dequantized to the register operand of the next wgmma
// while the last one runs.
template <int kWidth, typename T, bool kDown, CodeType kCodeType, bool kRounded,
          int kConsumerGroups, int kPairs, int kStages>
__device__ __forceinline__ void mainloop_dequantize(
    float (&c)[2][kPairs / 2], PipelineState<kStages>& state,
    const SharedStorage<kCodeType, kRounded, kConsumerGroups, kPairs, kStages>& smem,
    const ExpertsParams& p, const device::ExpertGemm<T>& gemm, const Tile& tile, int stages,
    int group) {
  using P = SharedStorage<kCodeType, kRounded, kConsumerGroups, kPairs, kStages>;
  constexpr int kStageColumns = kColumns<kRounded>;
  const int thread = threadIdx.x % 128, warp = thread / 32, g = thread % 32 / 4;
  const ExpertsQuantParams& quant = kDown ? p.down_quant : p.gate_up_quant;
  const int groups = groups_per_stage(quant), all_groups = gemm.in / quant.group_size;
  const int lane = thread % 32, own_tile = group * 4 + warp;
  constexpr bool kHasZeros = kCodeType == CodeType::kInt4 || kCodeType == CodeType::kInt8;
  int zeros[2][2][2];  // [half of the stage][operand][row]
  auto load_zeros = [&](int stage) {
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row =
              min(tile.out_tile * P::kRows +
                      (m * kConsumerGroups * 4 + own_tile) * kExpertTileRows + g + 8 * r,
                  gemm.out - 1);
          zeros[part][m][r] = load_expert_zero<kCodeType>(
              quant.zero, int64_t{tile.expert} * gemm.out + row,
              (stage * kStageColumns + part * 32) / quant.group_size, all_groups);
        }
  };
  [[maybe_unused]] const bool has_zeros = kHasZeros && quant.zero != nullptr;
  if constexpr (kHasZeros)
    if (has_zeros) load_zeros(0);
  uint32_t operands[2][8];  // of this step and the previous one
  PipelineState<kStages> last = state;
  for (int stage = 0; stage < stages; ++stage) {
    smem.full_barrier(state.slot).wait(state.phase_count & 1);
    constexpr int kVectors = P::kTileBytes / 512;
    uint4 codes[2][kVectors];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        codes[m][v] = smem.codes(state.slot, m * kConsumerGroups * 4 + own_tile)[v * 32 + lane];
    const uint64_t x = make_smem_desc_k_major(smem.x(state.slot));
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint8_t* scales =
            smem.scales(state.slot, m * kConsumerGroups * 4 + own_tile, groups) +
            (part < groups ? part : 0) * kTileScaleBytes<kCodeType>;
        uint32_t offsets[2] = {dequant_offset<T, kCodeType>(kDefaultZero<kCodeType>),
                               dequant_offset<T, kCodeType>(kDefaultZero<kCodeType>)};
        if constexpr (kHasZeros)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            offsets[r] = dequant_offset<T, kCodeType>(has_zeros ? zeros[part][m][r]
                                                                : kDefaultZero<kCodeType>);
        dequantize_operands<T, kCodeType>(
            operands[m], codes[m][kVectors == 2 ? part : 0], part,
            {load_scale<T, kCodeType>(scales, g), load_scale<T, kCodeType>(scales, g + 8)},
            offsets);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step)
          sm90::Wgmma<T, kWidth>::template rs<false>(reinterpret_cast<float (&)[kWidth / 2]>(c[m]),
                                                     operands[m] + 4 * step,
                                                     x + (part * 64 + step * 32) / 16);
        wgmma_commit();
        wgmma_wait<1>();
        if (part == 0 && m == 0 && stage > 0 && lane == 0) smem.empty_barrier(last.slot).arrive();
      }
    if constexpr (kHasZeros)
      if (has_zeros && stage + 1 < stages) load_zeros(stage + 1);
    last = state;
    state.advance();
  }
  wgmma_wait<0>();
  if (lane == 0) smem.empty_barrier(last.slot).arrive();
}

// Mainloop for FP8 weights and activations: the sum of each group of columns is scaled in float32.
template <int kWidth, CodeType kCodeType, bool kRounded, int kConsumerGroups, int kPairs,
          int kStages>
__device__ __forceinline__ void mainloop_float8(
    float (&c)[2][kPairs / 2], PipelineState<kStages>& state,
    const SharedStorage<kCodeType, kRounded, kConsumerGroups, kPairs, kStages>& smem,
    const Tile& tile, int stages, int group) {
  constexpr int kStageColumns = kColumns<kRounded>;
  const int thread = threadIdx.x % 128, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  constexpr int kAtOnce = kWidth <= 64 ? 2 : 1;  // operands whose sums fit in registers
  const int lane = thread % 32, own_tile = group * 4 + warp;
  for (int stage = 0; stage < stages; ++stage, state.advance()) {
    smem.full_barrier(state.slot).wait(state.phase_count & 1);
    const uint64_t x = make_smem_desc_k_major(smem.x(state.slot));
    const uint32_t x_scales = smem.x_scales(state.slot) + (tile.first % 4 + 2 * t) * 4;
#pragma unroll
    for (int first = 0; first < 2; first += kAtOnce) {
      uint4 codes[kAtOnce][kStageColumns / 32];
      float sum[kAtOnce][kWidth / 2], scales[kAtOnce][2];
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
        const int of = (first + m) * kConsumerGroups * 4 + own_tile;
#pragma unroll
        for (int v = 0; v < kStageColumns / 32; ++v)
          codes[m][v] = smem.codes(state.slot, of)[v * 32 + lane];
#pragma unroll
        for (int r = 0; r < 2; ++r)
          scales[m][r] = reinterpret_cast<const float*>(smem.scales(state.slot, of, 1))[g + 8 * r];
      }
      wgmma_fence();
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m)
#pragma unroll
        for (int v = 0; v < kStageColumns / 32; ++v)
          sm90::Wgmma<Float8, kWidth>::rs(
              sum[m], {codes[m][v].x, codes[m][v].z, codes[m][v].y, codes[m][v].w}, x + v * 32 / 16,
              v > 0);
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int j = 0; j < kWidth / 8; ++j) {
        float of_x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          of_x[i] = __uint_as_float(load_smem<1>(x_scales + (8 * j + i) * 4).data[0]);
#pragma unroll
        for (int m = 0; m < kAtOnce; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            c[first + m][4 * j + i] =
                fmaf(sum[m][4 * j + i], scales[m][i / 2] * of_x[i % 2], c[first + m][4 * j + i]);
      }
    }
    if (lane == 0) smem.empty_barrier(state.slot).arrive();
  }
}

// Epilogue of a tile: bias, activation and routing score in registers, then through shared memory,
// kEpiloguePairs pairs at a time, to rows of `inner` or `outputs`. `own` are the pairs that a
// thread has loaded before the mainloop.
template <typename T, bool kDown, CodeType kCodeType, bool kRounded, int kConsumerGroups,
          int kPairs, int kStages>
__device__ __forceinline__ void store_tile(
    const float (&c)[2][kPairs / 2], const int (&own)[(kPairs + 127) / 128],
    const SharedStorage<kCodeType, kRounded, kConsumerGroups, kPairs, kStages>& smem,
    const ExpertsParams& p, const Pairs& pairs, const device::ExpertGemm<T>& gemm, const Tile& tile,
    int group) {
  using P = SharedStorage<kCodeType, kRounded, kConsumerGroups, kPairs, kStages>;
  const int thread = threadIdx.x % 128, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  const int parts = (tile.count + kEpiloguePairs - 1) / kEpiloguePairs;
  const bool paired = !kDown && p.gated;
  auto sync_warpgroup = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
  uint4* staged = smem.out(group);
  int* staged_pairs = smem.pairs(group);
  const bool apart = paired && !kPacked<kCodeType>;  // gates and ups are separate operands
  const int row =
      tile.out_tile * (apart ? P::kRows / 2 : P::kRows) + group * 64;  // the first of these 64 rows
  const int width = paired ? gemm.out / 2 : gemm.out;                  // of the output
  float bias[2][2] = {};
  if (gemm.bias != nullptr) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int own_row = row + warp * 16 + 8 * r + g,
                  of = apart ? 2 * own_row + m : own_row + m * P::kRows / 2;
        bias[m][r] = gemm.bias_of(tile.expert, min(of, gemm.out - 1));
      }
  }
#pragma unroll 1
  for (int part = 0; part < parts; ++part) {
    float own_sums[2][8];
#pragma unroll
    for (int k = 0; k < kPairs / kEpiloguePairs; ++k)
      if (k == part)
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int i = 0; i < 8; ++i) own_sums[m][i] = c[m][8 * k + i];
    if (part == 0) {
#pragma unroll
      for (int k = 0; k < (kPairs + 127) / 128; ++k)
        if (k * 128 + thread < tile.count) staged_pairs[k * 128 + thread] = own[k];
    }
    if (!kDown && p.scale_input) {
      if (part == 0) sync_warpgroup();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int token = part * kEpiloguePairs + i / 4 * 8 + 2 * t + i % 2;
        const float score = token < tile.count ? p.scores[staged_pairs[token]] : 0.f;
        own_sums[0][i] *= score, own_sums[1][i] *= score;
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < 8; ++i) own_sums[m][i] += bias[m][i / 2 % 2];
    if (paired && !apart) {  // adjacent lanes exchange sums, so that one has gates and ups of a
                             // row, and the other those of a later row
      float turned[2][8];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float first = own_sums[m][i / 2 * 4 + i % 2],
                      second = own_sums[m][i / 2 * 4 + 2 + i % 2];
          const float other = __shfl_xor_sync(~0u, g % 2 ? first : second, 4);
          turned[0][4 * m + i] = g % 2 ? other : first,
                            turned[1][4 * m + i] = g % 2 ? second : other;
        }
#pragma unroll
      for (int i = 0; i < 8; ++i) own_sums[0][i] = turned[0][i], own_sums[1][i] = turned[1][i];
    }
    if (!kDown) activate_columns(p, own_sums);
    uint4* to = staged + part % 2 * 2 * kEpiloguePairs * kEpilogueStride;
    if (paired && !apart) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int m = i / 4, token = i / 2 % 2 * 8 + 2 * t + i % 2,
                  column = warp * 8 + g / 2 + g % 2 * 4;
        reinterpret_cast<T*>(to + (m * kEpiloguePairs + token) * kEpilogueStride)[column] =
            from_float<T>(own_sums[0][i]);
      }
    } else {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (m == 1 && paired) break;
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = pack2<T>(own_sums[m][2 * k], own_sums[m][2 * k + 1]);
        const int lane = thread % 32;
        stmatrix_x4_trans(to + (m * kEpiloguePairs + lane / 16 * 8 + lane % 8) * kEpilogueStride +
                              warp * 2 + lane / 8 % 2,
                          words);
      }
    }
    sync_warpgroup();
    const int vector = thread % 8, pair = part * kEpiloguePairs + thread / 8;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int first_row = row + m * P::kRows / 2,
                column = (paired && !apart ? first_row / 2 : first_row) + 8 * vector;
      if ((m == 1 && apart) || (paired && !apart && vector >= 4) || pair >= tile.count ||
          column >= width)
        continue;
      T* target =
          kDown
              ? static_cast<T*>(pairs.outputs) + static_cast<int64_t>(staged_pairs[pair]) * p.hidden
              : static_cast<T*>(pairs.inner) + static_cast<int64_t>(tile.first + pair) * p.inner;
      const uint4* from = to + (m * kEpiloguePairs + thread / 8) * kEpilogueStride;
      constexpr bool kPermuted = !kDown && kPacked<kCodeType> && !kRounded;
      *reinterpret_cast<uint4*>(target + column) =
          kPermuted ? permute_vector(from, vector) : from[vector];
    }
  }
  sync_warpgroup();  // before the next tile is staged
}

// A consumer warpgroup: for each tile of the block the mainloop, of the smallest instruction width
// that has all pairs, and the epilogue.
template <typename T, bool kDown, CodeType kCodeType, bool kRounded, int kConsumerGroups,
          int kPairs, int kStages>
__device__ __forceinline__ void consume(
    const SharedStorage<kCodeType, kRounded, kConsumerGroups, kPairs, kStages>& smem,
    const ExpertsParams& p, const Pairs& pairs, TileScheduler scheduler, int count, int stages,
    int group) {
  const device::ExpertGemm<T> gemm(p, pairs, kDown);
  const int thread = threadIdx.x % 128;
  PipelineState<kStages> state;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Tile tile = scheduler.next(i);
    int own[(kPairs + 127) / 128];
#pragma unroll
    for (int k = 0; k < (kPairs + 127) / 128; ++k)
      if (k * 128 + thread < tile.count) own[k] = pairs.order[tile.first + k * 128 + thread];
    float c[2][kPairs / 2] = {};
    const int parts = (tile.count + kEpiloguePairs - 1) / kEpiloguePairs;
    auto choose = [&](auto self, auto width) {
      constexpr int kWidth = decltype(width)::value;
      if (kWidth == kPairs || parts * kEpiloguePairs <= kWidth) {
        if constexpr (kRounded) mainloop_float8<kWidth>(c, state, smem, tile, stages, group);
        else if constexpr (kPacked<kCodeType>)
          mainloop_dequantize<kWidth, T, kDown>(c, state, smem, p, gemm, tile, stages, group);
        else mainloop_16bit<kWidth, T>(c, state, smem, stages, group);
        return;
      }
      constexpr int kNext = !kPacked<kCodeType>   ? kWidth + kEpiloguePairs
                            : 2 * kWidth < kPairs ? 2 * kWidth
                                                  : kPairs;
      if constexpr (kWidth < kPairs) self(self, std::integral_constant<int, kNext>());
    };
    choose(choose, std::integral_constant<int, kEpiloguePairs>());
    store_tile<T, kDown>(c, own, smem, p, pairs, gemm, tile, group);
  }
}

template <typename T, bool kDown, CodeType kCodeType, bool kRounded, int kConsumerGroups,
          int kPairs, int kStages, int kBlocks>
__global__ void __launch_bounds__((1 + kConsumerGroups) * 128, kBlocks)
    grouped_gemm_kernel(const __grid_constant__ TensorMaps maps,
                        const __grid_constant__ ExpertsParams p,
                        const __grid_constant__ Pairs pairs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using P = SharedStorage<kCodeType, kRounded, kConsumerGroups, kPairs, kStages>;
  extern __shared__ uint8_t raw[];
  __shared__ int before[kMaxExperts + 1];
  const P smem{raw + (-smem_address(raw) & 1023)};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kStages; ++slot) {
      smem.full_barrier(slot).init(1);
      smem.empty_barrier(slot).init(kConsumerGroups * 4);
    }
    fence_mbarrier_init();
  }
  if (!kDown) {
    pdl_wait();
    pdl_launch_dependents();
  }
  const device::ExpertGemm<T> gemm(p, pairs, kDown);
  const int out_tiles = (gemm.out + P::kRows - 1) / P::kRows;
  const int stages = (gemm.in + kColumns<kRounded> - 1) / kColumns<kRounded>;
  const int count = PairGroups(p, pairs, before, kPairs).template count<P::kThreads>() * out_tiles;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform for a warp
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32)
      produce<kDown>(smem, maps, p, TileScheduler{pairs, before, out_tiles}, count, stages);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerGroups == 1 ? 216 : 232));
    if (kDown) {
      pdl_wait();
      pdl_launch_dependents();
    }
    consume<T, kDown>(smem, p, pairs, TileScheduler{pairs, before, out_tiles}, count, stages,
                      group - 1);
  }
#endif
}

// Permutes rows of x to positions, in the `outputs` buffer. One block per token. Reads x once,
// writes top_k copies.
template <bool kPermuted>
__global__ void __launch_bounds__(128) permute_x_kernel(ExpertsParams p, Pairs pairs) {
  pdl_wait();
  pdl_launch_dependents();
  const int vectors = p.hidden / 8, first = blockIdx.x * p.top_k;
  const uint4* from = static_cast<const uint4*>(p.x) + static_cast<int64_t>(blockIdx.x) * vectors;
  for (int i = threadIdx.x; i < vectors; i += 128) {
    const uint4 vector = kPermuted ? permute_vector(from + i / 8 * 8, i % 8) : from[i];
    for (int choice = 0; choice < p.top_k; ++choice) {
      const int position = pairs.positions[first + choice];
      if (position >= 0)
        static_cast<uint4*>(pairs.outputs)[static_cast<int64_t>(position) * vectors + i] = vector;
    }
  }
}

template <typename T, bool kDown, CodeType kCodeType, bool kRounded, int kConsumerGroups,
          int kPairs, int kStages, int kBlocks>
cudaError_t launch_gemm(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  using P = SharedStorage<kCodeType, kRounded, kConsumerGroups, kPairs, kStages>;
  constexpr int kStageColumns = kColumns<kRounded>;
  auto kernel =
      grouped_gemm_kernel<T, kDown, kCodeType, kRounded, kConsumerGroups, kPairs, kStages, kBlocks>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes);
  if (error != cudaSuccess) return error;
  const device::ExpertGemm<T> gemm(p, pairs, kDown);
  const cuuint64_t in = gemm.in, pairs_count = static_cast<cuuint64_t>(p.num_tokens) * p.top_k;
  const cuuint64_t of_each = !kDown && p.gated ? 2 : 1, experts = p.num_experts;
  TensorMaps maps;
  bool made;
  if constexpr (kRounded) {
    const QuantizedRows x = quantized_rows(p, pairs, kDown);
    const auto pitch = static_cast<cuuint64_t>(x.pitch), groups = static_cast<cuuint64_t>(x.groups);
    made = make_tensor_map<2>(maps.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B,
                              x.codes, {in, pairs_count}, 1, {kStageColumns, kEpiloguePairs}) &&
           make_tensor_map<2>(maps.x_scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                              CU_TENSOR_MAP_SWIZZLE_NONE, x.scales, {pitch, groups}, 4,
                              {P::kXScales, 1});
  } else {
    made = make_tensor_map<2>(maps.x, kTensorMapType<T>, CU_TENSOR_MAP_SWIZZLE_128B,
                              kDown ? gemm.x : pairs.outputs, {in, pairs_count}, sizeof(T),
                              {kStageColumns, kEpiloguePairs});
  }
  if constexpr (kPacked<kCodeType>) {
    constexpr cuuint32_t kTiles = P::kTiles;
    const ExpertsQuantParams& quant = kDown ? p.down_quant : p.gate_up_quant;
    const cuuint64_t tiles = experts * (gemm.out / kExpertTileRows), groups = in / quant.group_size;
    const cuuint32_t scales = groups_per_stage(quant) * kExpertTileRows;
    constexpr bool kBytes = kCodeType == CodeType::kMxfp4;
    made =
        made &&
        make_tensor_map<2>(maps.weights, CU_TENSOR_MAP_DATA_TYPE_INT64, CU_TENSOR_MAP_SWIZZLE_NONE,
                           gemm.weight, {in / kStageColumns * (P::kTileBytes / 8), tiles}, 8,
                           {P::kTileBytes / 8, kTiles}) &&
        make_tensor_map<2>(maps.scales,
                           kBytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                           CU_TENSOR_MAP_SWIZZLE_NONE, quant.scale,
                           {groups * kExpertTileRows, tiles}, kBytes ? 1 : 4, {scales, kTiles});
  } else {
    made = made && make_tensor_map<4>(maps.weights, kTensorMapType<T>, CU_TENSOR_MAP_SWIZZLE_128B,
                                      gemm.weight, {in, of_each, gemm.out / of_each, experts},
                                      sizeof(T), {kStageColumns, 1, P::kRows / 2, 1});
  }
  if (!made) return cudaErrorInvalidValue;
  const int64_t groups = std::min<int64_t>(pairs_count, pairs_count / kPairs + p.num_experts);
  const int64_t tiles = groups * ceil_div(gemm.out, P::kRows),
                positions = int64_t{kBlocks} * num_sms();
  return launch(kernel, static_cast<unsigned>(std::min(tiles, positions)), P::kThreads, P::kBytes,
                stream, maps, p, pairs);
}

template <typename T, CodeType kCodeType, bool kRounded, int kConsumerGroups, int kPairs,
          int kStages, int kBlocks>
cudaError_t run_both(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  return run_gemms(
      p,
      [&] {
        cudaError_t error = cudaSuccess;
        if constexpr (!kRounded)
          error =
              launch(permute_x_kernel<kPacked<kCodeType>>, p.num_tokens, 128, 0, stream, p, pairs);
        return error != cudaSuccess ? error
                                    : launch_gemm<T, false, kCodeType, kRounded, kConsumerGroups,
                                                  kPairs, kStages, kBlocks>(p, pairs, stream);
      },
      [&] {
        const cudaError_t error = quantize_inner(
            kDType<T>, p, pairs, kRounded ? ActivationQuant::kCodes : ActivationQuant::kDequantized,
            stream);
        return error != cudaSuccess ? error
                                    : launch_gemm<T, true, kCodeType, kRounded, kConsumerGroups,
                                                  kPairs, kStages, kBlocks>(p, pairs, stream);
      });
}

// By the average number of pairs per expert: a tile should have room for most groups.
template <typename T>
cudaError_t run_type(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const int64_t each = static_cast<int64_t>(p.num_tokens) * p.top_k / p.num_experts;
  if (uses_fp8_mma(p))
    return each <= 32 ? run_both<T, CodeType::kFloat8, true, 1, 64, 3, 2>(p, pairs, stream)
                      : run_both<T, CodeType::kFloat8, true, 2, 96, 4, 1>(p, pairs, stream);
  if (p.gate_up_quant.code_type != CodeType::kNone)
    return dispatch_expert_code_type(p.gate_up_quant.code_type, [&](auto codes) {
      constexpr CodeType kCodeType = codes.value;
      constexpr bool kFour = kBits<kCodeType> == 4;
      return each <= 32 ? run_both<T, kCodeType, false, 1, 64, kFour ? 7 : 5, 2>(p, pairs, stream)
                        : run_both<T, kCodeType, false, 2, 128, kFour ? 6 : 5, 1>(p, pairs, stream);
    });
  if (each <= 32) return run_both<T, CodeType::kNone, false, 1, 64, 4, 2>(p, pairs, stream);
  if (each <= 160) return run_both<T, CodeType::kNone, false, 2, 144, 4, 1>(p, pairs, stream);
  return run_both<T, CodeType::kNone, false, 2, 128, 4, 1>(p, pairs, stream);
}

}  // namespace

bool has_experts_gemm_sm90(const ExpertsParams& p) {
  const bool packed = p.gate_up_quant.code_type != CodeType::kNone;
  if (packed && (p.hidden % kColumns<false> != 0 || p.inner % kColumns<false> != 0)) return false;
  return p.num_tokens > 1 && device_attribute<cudaDevAttrComputeCapabilityMajor>() == 9 &&
         tensor_map_encoder() != nullptr;
}

cudaError_t experts_gemm_sm90(DType dtype, const ExpertsParams& p, const Pairs& pairs,
                              cudaStream_t stream) {
  if (p.hidden % 8 != 0 || p.inner % 8 != 0) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, pairs, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
