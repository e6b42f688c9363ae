// packed_gemm() by wgmma: warp-specialized, with cluster split-K and stream-K.
//
// A tile is kOut<kTokens> weight rows (gated: half as many gates and their ups) for kTokens rows of
// x. kGroups consumer warpgroups dequantize codes to 16-bit values in registers, the A operand of
// the next wgmma, while the last one runs; B is x in shared memory. Rows 0 to 7 of every 16 of an
// operand are from the low half of the tile and the others from the high half, so that a thread has
// gates and their ups. The producer warpgroup has a warp that copies weights by TMA, one that
// copies x, and kPermuteWarps that permute x in shared memory to the column order of the codes
// (common/dequantize.cuh), a stage each. Thread t has a quarter of a stage's columns.
// Eight adjacent ones are two wgmma steps, in pairs; wgmma expects one pair of every eight. For
// more than 128 rows a separate kernel permutes x once.
//
// A whole tile goes from registers to y. If tiles are few, the blocks of a cluster split K of a
// tile, and each reduces some of its outputs over distributed shared memory. If neither fills the
// SMs, up to 128 rows of x use stream-K: every block that has a part of a tile reduces a part of
// its outputs when all have written their sums. Sums are always added in the order of the columns,
// so the same x gives the same y. Reads the weight once per kTokens rows of x, and x once per tile,
// from L2.
#include <algorithm>
#include <array>

#include "../common/output_writer.cuh"
#include "../common/wgmma_sm90.cuh"
#include "packed_gemm.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using namespace sm90;

constexpr int kRowBytes = 64;                      // of a weight row in a stage
constexpr int kOperandRows = 32;                   // rows of either half in an operand of 64 rows
constexpr int kLine = 64;                          // columns of a row of x in shared memory
constexpr int kEpilogueStride = kOperandRows + 4;  // floats between rows of x in the epilogue
constexpr uint32_t kMaxSmem = 232448;              // bytes
constexpr int kMaxClusterSize = 8;                 // blocks that split K of a tile
constexpr int kScaledSumTokens =
    32;  // up to this number of rows of x, sums of a stage are scaled instead of weights
constexpr int kPermuteWarps = 2;  // warps that permute x
// Costs in stages: of reducing a tile in a cluster, of a stream-K reduction through memory, and for
// many rows of each wave of clusters.
constexpr int kClusterReduceCost = 3, kStreamKReduceCost = 16, kClusterWaveCost = 10;

// Whether a separate kernel permutes x: with more rows it takes too long between wgmma.
template <int kTokens>
constexpr bool kPermutedInput = kTokens > 128;
// Weight rows of a tile, consumer warpgroups, and operands of a warpgroup. More accumulators leave
// registers for fewer threads.
template <int kTokens>
constexpr int kOut = kTokens > 128 ? 128 : 256;
template <int kTokens>
constexpr int kGroups = kTokens > 64 ? 2 : 4;
template <int kTokens>
constexpr int kOperandTiles = kOut<kTokens> / 2 / kOperandRows / kGroups<kTokens>;
template <int kTokens>
constexpr int kTmaRows = kPermutedInput<kTokens> ? 64 : kTokens;  // rows of x per TMA box
template <int kTokens>
constexpr int kEpilogueRows =
    kTokens > 128 ? 8 : std::min(kTokens, 16);  // rows of x per step of the epilogue
template <int kTokens>
constexpr int kClusterStride =
    kOut<kTokens> + 4;  // floats between rows of x in a cluster reduction
template <int kTokens>
constexpr int kThreads = (1 + kGroups<kTokens>)*128;
template <CodeType kCodeType>
constexpr int kColumns = kRowBytes * 8 / kBits<kCodeType>;  // of a stage

// Shared memory, aligned to 1,024 bytes. kStageGroups: groups are whole stages and have no minima.
// Otherwise groups have 32 columns or more, and a stage has the scales, then the minima, for every
// 32 of its columns.
template <CodeType kCodeType, int kTokens, bool kStageGroups>
struct SharedStorage {
  static constexpr int kOut = kernels::kOut<kTokens>,
                       kGroups = kStageGroups ? 1 : kColumns<kCodeType> / 32;
  static constexpr uint32_t kWeightBytes = kOut * kRowBytes,
                            kXBytes = kTokens * kColumns<kCodeType> * 2;
  static constexpr uint32_t kScalesAt = kWeightBytes + kXBytes, kScaleBytes = kGroups * kOut * 4;
  static constexpr uint32_t kStageBytes =
      (kScalesAt + (kStageGroups ? 1 : 2) * kScaleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kSumBytes =
                                kOut / kOperandRows * kEpilogueRows<kTokens> * kEpilogueStride * 4,
                            kTailBytes = kSumBytes + 256 + 1024;
  static constexpr int kStages = std::min(10u, (kMaxSmem - kTailBytes) / kStageBytes);
  static constexpr uint32_t kSumsAt = kStages * kStageBytes, kBarriersAt = kSumsAt + kSumBytes;
  static constexpr uint32_t kBytes = kSumsAt + kTailBytes;
  static_assert(kStages >= (kPermutedInput<kTokens> ? 2 : 3) && kStageBytes % 1024 == 0 &&
                24 * kStages <= 256);

  uint8_t* bytes;
  uint32_t base = smem_address(bytes);

  __device__ uint8_t* stage(int slot) const { return bytes + slot * kStageBytes; }
  __device__ uint32_t weights(int slot) const { return base + slot * kStageBytes; }
  __device__ uint32_t x(int slot) const { return base + slot * kStageBytes + kWeightBytes; }
  __device__ uint32_t scales(int slot) const { return base + slot * kStageBytes + kScalesAt; }
  __device__ Mbarrier full_barrier(int slot) const { return {base + kBarriersAt + 8 * slot}; }
  __device__ Mbarrier empty_barrier(int slot) const {
    return {base + kBarriersAt + 8 * (kStages + slot)};
  }
  __device__ Mbarrier x_full_barrier(int slot) const {
    return {base + kBarriersAt + 8 * (2 * kStages + slot)};
  }  // x before it is permuted
};

// A position in the stages of all tiles. The token_tiles of the same weight rows are adjacent.
struct TileCursor {
  int stage, token_tile, out_tile;

  __device__ __forceinline__ void next_tile(int token_tiles) {
    stage = 0;
    if (++token_tile < token_tiles) return;
    token_tile = 0;
    ++out_tile;
  }
};

// The stages of a block.
struct WorkRange {
  int count, stages, token_tiles;
  TileCursor start;

  __device__ WorkRange(const StreamKSchedule& schedule)
      : stages(schedule.stages), token_tiles(schedule.tiles / schedule.out_tiles) {
    const uint32_t first = schedule.begin(blockIdx.x, gridDim.x), tile = first / stages;
    count = schedule.begin(blockIdx.x + 1, gridDim.x) - first;
    start = {static_cast<int>(first - tile * stages), 0, static_cast<int>(tile)};
    if (token_tiles > 1) start.token_tile = tile % token_tiles, start.out_tile = tile / token_tiles;
  }
};

// Epilogue of four outputs of a row of x: bias, activation, gate, residual.
template <typename T>
__device__ __forceinline__ void store_outputs(const GemvParams& p, int row, int output, float4 sums,
                                              float4 ups) {
  float of[4] = {sums.x, sums.y, sums.z, sums.w}, up[4] = {ups.x, ups.y, ups.z, ups.w};
  if (p.bias != nullptr) {
    const auto bias = load<T, 4>(static_cast<const T*>(p.bias) + output);
#pragma unroll
    for (int k = 0; k < 4; ++k) of[k] += to_float(bias.data[k]);
  }
  device::activate(of, p.activation);
  if (p.gated) {
    Vec<T, 4> bias{};
    if (p.bias != nullptr) bias = load<T, 4>(static_cast<const T*>(p.bias) + p.out + output);
#pragma unroll
    for (int k = 0; k < 4; ++k) of[k] *= up[k] + to_float(bias.data[k]);
  }
  const int64_t at = static_cast<int64_t>(row) * p.out + output;
  if (p.residual != nullptr) {
    const auto residual = load<T, 4>(static_cast<const T*>(p.residual) + at);
#pragma unroll
    for (int k = 0; k < 4; ++k) of[k] += to_float(residual.data[k]);
  }
  OutputWriter<T>(p.y, p.y_scale_inverse).write(at, of);
}

struct TensorMaps {
  CUtensorMap weights, x;
};

// Producer loop: calls copy(slot, cursor) for each stage, when its slot is empty.
template <typename P, typename Copy>
__device__ __forceinline__ void for_each_stage(const P& smem, const WorkRange& range, Copy&& copy) {
  TileCursor at = range.start;
#pragma unroll 1
  for (int i = 0; i < range.count; ++i) {
    const int slot = i % P::kStages;
    if (i >= P::kStages) smem.empty_barrier(slot).wait(i / P::kStages - 1 & 1);
    copy(slot, at);
    if (++at.stage == range.stages) at.next_tile(range.token_tiles);
  }
}

template <CodeType kCodeType, int kTokens, bool kStageGroups>
__device__ __forceinline__ void produce_weights(
    const SharedStorage<kCodeType, kTokens, kStageGroups>& smem, const TensorMaps& maps,
    const GemvParams& p, const WorkRange& range) {
  using P = SharedStorage<kCodeType, kTokens, kStageGroups>;
  const int groups = p.in / p.quant.group_size, all_rows = p.gated ? 2 * p.out : p.out;
  const int tile_out = p.gated ? P::kOut / 2 : P::kOut;
  const float per_group = 1.f / p.quant.group_size;
  const bool has_minima = !kStageGroups && p.quant.minimum != nullptr;
  for_each_stage(smem, range, [&](int slot, const TileCursor& at) {
    const Mbarrier full = smem.full_barrier(slot);
    const uint32_t to = smem.weights(slot), scales = smem.scales(slot);
    const int low = at.out_tile * tile_out, of_low = min(tile_out, p.out - low);
    full.arrive_expect_tx(P::kWeightBytes +
                          4 * (1 + p.gated) * of_low * P::kGroups * (1 + has_minima));
    tma_load(to, maps.weights, full, at.stage * kRowBytes, low);
    if (p.gated)
      tma_load(to + P::kWeightBytes / 2, maps.weights, full, at.stage * kRowBytes, p.out + low);
#pragma unroll
    for (int k = 0; k < P::kGroups; ++k) {
      const float column = at.stage * kColumns<kCodeType> + 32 * k + 0.5f;
      const int64_t first =
          static_cast<int64_t>(min(static_cast<int>(column * per_group), groups - 1)) * all_rows;
      auto copy_rows = [&](const float* from, uint32_t target) {
        bulk_copy(target, from + first + low, 4 * of_low, full);
        if (p.gated)
          bulk_copy(target + P::kOut / 2 * 4, from + first + p.out + low, 4 * of_low, full);
      };
      copy_rows(p.quant.scale, scales + k * P::kOut * 4);
      if (has_minima) copy_rows(p.quant.minimum, scales + P::kScaleBytes + k * P::kOut * 4);
    }
  });
}

template <CodeType kCodeType, int kTokens, bool kStageGroups>
__device__ __forceinline__ void produce_x(
    const SharedStorage<kCodeType, kTokens, kStageGroups>& smem, const TensorMaps& maps,
    const WorkRange& range, int rows) {
  using P = SharedStorage<kCodeType, kTokens, kStageGroups>;
  pdl_wait();  // x depends on the previous kernel, weights do not
  for_each_stage(smem, range, [&](int slot, const TileCursor& at) {
    const Mbarrier full =
        kPermutedInput<kTokens> ? smem.full_barrier(slot) : smem.x_full_barrier(slot);
    constexpr int kLines = kColumns<kCodeType> / kLine, kBoxRows = kTmaRows<kTokens>;
    // Rows after the last box with any are left as they are: filling them with zeros takes longer
    // than copying.
    const int first = at.token_tile * kTokens,
              boxes = min(kTokens, rows - first + kBoxRows - 1) / kBoxRows;
    full.arrive_expect_tx(kLines * boxes * kBoxRows * kLine * 2);
#pragma unroll
    for (int line = 0; line < kLines; ++line)
#pragma unroll
      for (int box = 0; box < kTokens / kBoxRows; ++box)
        if (box < boxes)
          tma_load(smem.x(slot) + (line * kTokens + box * kBoxRows) * kLine * 2, maps.x, full,
                   at.stage * kColumns<kCodeType> + line * kLine, first + box * kBoxRows);
  });
}

// Permutes a stage of x: first the first words of all four quarters of the columns, then the second
// ones and so on. A warp takes every kPermuteWarps-th slot, so that it observes each phase of a
// barrier, and four rows at a time. A lane has vectors of row lane / 8, quarter t.
template <CodeType kCodeType, int kTokens, bool kStageGroups>
__device__ __forceinline__ void permute_x(
    const SharedStorage<kCodeType, kTokens, kStageGroups>& smem, const WorkRange& range, int warp) {
  using P = SharedStorage<kCodeType, kTokens, kStageGroups>;
  constexpr int kLines = kColumns<kCodeType> / kLine, kPieces = kTokens / 4;
  constexpr int kAtOnce = kPieces < 8 / kLines ? kPieces : 8 / kLines;
  constexpr uint32_t kLineBytes = kTokens * kLine * 2;
  const int lane = threadIdx.x % 32, t = lane % 4, b = lane / 4 % 2, row = lane / 8;
  // Where a vector is read and its words are written, in the first line. Half of the lanes start
  // with the other line, against bank conflicts.
  const int line = kLines == 1 ? 0 : t / 2, vector = (t * kLines + line) * 2 + b;
  const uint32_t from = vector / 8 * kLineBytes + row * 128 + 16 * (vector % 8 ^ row);
  const int other = static_cast<int>(kLineBytes) * (1 - 2 * line);
  uint32_t to[4];
#pragma unroll
  for (int word = 0; word < 4; ++word)
    to[word] = line * kLineBytes + row * 128 + 16 * (4 * b + word ^ row) + 4 * t;
  auto permute_stage = [&](uint8_t* x) {
    auto packed_column = [&](int piece, uint32_t within) {
      return x + 512 * piece + (within ^ piece % 2 * 64);
    };  // half of 8 rows
#pragma unroll
    for (int first = 0; first < kPieces; first += kAtOnce) {
      uint4 vectors[kAtOnce][kLines];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int h = 0; h < kLines; ++h)
          vectors[k][h] = *reinterpret_cast<const uint4*>(packed_column(first + k, from ^ 32 * h));
      __syncwarp();
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int h = 0; h < kLines; ++h) {
          const uint4& v = vectors[k][h];
          const uint32_t words[] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int word = 0; word < 4; ++word)
            *reinterpret_cast<uint32_t*>(packed_column(first + k, to[word]) + h * other) =
                words[word];
        }
    }
  };
  for (int begun = 0, parity = 0; begun < range.count; begun += P::kStages, parity ^= 1)
    for (int slot = warp; slot < min(P::kStages, range.count - begun); slot += kPermuteWarps) {
      smem.x_full_barrier(slot).wait(parity);
      permute_stage(smem.stage(slot) + P::kWeightBytes);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) smem.full_barrier(slot).arrive();
    }
}

// Transposes 4 x 4 words over four adjacent lanes: word q of lane t goes to word t of lane q.
__device__ __forceinline__ void transpose_4x4(uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    const uint32_t came = __shfl_xor_sync(~0u, odd ? x[k] : x[k + 1], 1);
    (odd ? x[k] : x[k + 1]) = came;
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t came = __shfl_xor_sync(~0u, upper ? x[k] : x[k + 2], 2);
    (upper ? x[k] : x[k + 2]) = came;
  }
}

// Epilogue of a whole tile of many rows of x, from registers to y. `output` is the first of a
// warp's eight outputs in the low half. If a residual is added later, a sum is kept as two values
// of T: the rounded sum and the remainder.
template <typename T, int kTokens>
__device__ __forceinline__ void store_tile(const GemvParams& p, float (&sum)[kTokens / 2],
                                           int first_token, int output, int next_half) {
  constexpr float kMaxSmem = std::is_same_v<T, __half> ? 65504.f : 0x1.fep127f;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float bias[2] = {};
  if (p.bias != nullptr)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      bias[r] = to_float(
          static_cast<const T*>(p.bias)[min(output + g + (p.gated ? 0 : r * next_half), p.out - 1) +
                                        (p.gated ? r * p.out : 0)]);
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) sum[i] += bias[i / 2 % 2];
  if (p.gated) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; i += 4) {
      float gates[] = {sum[i], sum[i + 1]};
      if (p.activation == Activation::kSilu) activate_as<Activation::kSilu>(gates);
      else activate_as<Activation::kGeluTanh>(gates);
      sum[i] = gates[0] * sum[i + 2], sum[i + 1] = gates[1] * sum[i + 3];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r == 1 && p.gated) return;
    const int column = output + r * next_half;
#pragma unroll
    for (int q = 0; q < kTokens / 32; ++q) {
      uint32_t words[4], remainder[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float x = sum[4 * (4 * q + k) + 2 * r], y = sum[4 * (4 * q + k) + 2 * r + 1];
        if (p.y_scale_inverse != 0) {
          words[k] = movmatrix_trans(Float8(x * p.y_scale_inverse).__x |
                                     Float8(y * p.y_scale_inverse).__x << 16);
        } else if (p.residual == nullptr) {
          words[k] = movmatrix_trans(pack2<T>(x, y));
        } else {
          const uint32_t pair =
              pack2<T>(fminf(fmaxf(x, -kMaxSmem), kMaxSmem), fminf(fmaxf(y, -kMaxSmem), kMaxSmem));
          const auto kept = *reinterpret_cast<const Vec<T, 2>*>(&pair);
          words[k] = movmatrix_trans(pair);
          remainder[k] =
              movmatrix_trans(pack2<T>(x - to_float(kept.data[0]), y - to_float(kept.data[1])));
        }
      }
      transpose_4x4(words);
      if (p.residual != nullptr) transpose_4x4(remainder);
      const int token = first_token + 32 * q + 8 * t + g;
      if (token >= p.rows || column >= p.out) continue;
      const int64_t at = static_cast<int64_t>(token) * p.out + column;
      if (p.y_scale_inverse != 0) {  // even columns first
        const uint32_t a = words[0] | words[1] << 8, b = words[2] | words[3] << 8;
        store(reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.y) + at),
              Vec<uint32_t, 2>{{__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)}});
        continue;
      }
      auto& made = reinterpret_cast<Vec<T, 8>&>(words);
      if (p.residual != nullptr) {
        const auto& more = reinterpret_cast<const Vec<T, 8>&>(remainder);
        const auto residual = load<T, 8>(static_cast<const T*>(p.residual) + at);
#pragma unroll
        for (int k = 0; k < 8; ++k)
          made.data[k] = from_float<T>(to_float(made.data[k]) + to_float(more.data[k]) +
                                       to_float(residual.data[k]));
      }
      store(static_cast<T*>(p.y) + at, made);
    }
  }
}

// One consumer warpgroup. Of 64 rows of an operand, the first half of every 16 is from the low half
// of the tile and the other from the high half, so that a thread has gates and their ups.
template <typename T, CodeType kCodeType, int kTokens, bool kStageGroups>
struct Consumer {
  using P = SharedStorage<kCodeType, kTokens, kStageGroups>;
  static constexpr int kChunks = kColumns<kCodeType> / 32,
                       kWords = kBits<kCodeType> / 4;  // kWords: words of eight codes
  static constexpr bool kScalesSums = kStageGroups && kTokens <= kScaledSumTokens;
  static constexpr int kOut = P::kOut, kReduceStride = kClusterStride<kTokens>;
  static constexpr int kOwn = kOperandTiles<kTokens>, kAll = kGroups<kTokens> * 128;
  // Register operands in flight: few rows of x have the products of a whole stage in flight at
  // once.
  static constexpr int kBuffers = kScalesSums && kTokens <= 8 ? kChunks : 2;

  const P& smem;
  const GemvParams& p;
  const StreamKSchedule& schedule;
  const WorkRange& range;
  const int warpgroup;
  const int thread = threadIdx.x % 128, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  const int tile_out = p.gated ? kOut / 2 : kOut;
  const int own_row = warpgroup * kOwn * kOperandRows + warp * 8 +
                      g;  // of either half of a tile, and of each operand
  // Addresses of the thread's codes and scales in a stage. They stay in registers: the compiler
  // cannot recompute a shuffle.
  const uint32_t base = __shfl_sync(~0u, smem.base, 0);
  const uint32_t codes_at =
      base + own_row * kRowBytes + 16 * (t ^ g / 2 % 4);  // TMA swizzles vectors
  const uint32_t scales_at = base + P::kScalesAt + (t * P::kGroups / 4 * kOut + own_row) * 4;

  __device__ __forceinline__ void release(int i) const {
    if (thread % 32 == 0) smem.empty_barrier(i % P::kStages).arrive();
  }

  // Sums of stages [i, end) of the tile at `begun`.
  __device__ __forceinline__ void mainloop(float (&total)[kOwn][kTokens / 2],
                                           const TileCursor& begun, int& i, int end) const {
    const int first = i, groups = p.in / p.quant.group_size;
    const float per_group = 1.f / p.quant.group_size;
    const bool has_minima = !kStageGroups && p.quant.minimum != nullptr;
    uint32_t numbers[kBuffers][kOwn][8];  // register operands of this chunk and earlier ones
    float sum[kOwn][kTokens / 2] = {}, exact[kOwn][2] = {};  // exact: scales of the previous stage
    auto add_sums = [&] {                                    // of the previous stage
#pragma unroll
      for (int m = 0; m < kOwn; ++m)
#pragma unroll
        for (int k = 0; k < kTokens / 2; ++k) {
          total[m][k] = fmaf(sum[m][k], exact[m][k / 2 % 2], total[m][k]);
          sum[m][k] = 0;
        }
    };
    int zero[kOwn][2] = {};  // of the next stage
    auto load_zeros = [&](int stage) {
      const int group =
          min(static_cast<int>((stage * kColumns<kCodeType> + 0.5f) * per_group), groups - 1);
#pragma unroll
      for (int m = 0; m < kOwn; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int low = begun.out_tile * tile_out + own_row + m * kOperandRows;
          const int row =
              p.gated ? h * p.out + min(low, p.out - 1) : min(low + h * kOut / 2, p.out - 1);
          zero[m][h] = load_zero<kCodeType>(p.quant, row, group, groups);
        }
    };
    if (kStageGroups && p.quant.zero != nullptr) load_zeros(begun.stage);
    for (; i < end; ++i) {
      const int slot = i % P::kStages;
      const uint32_t stage = slot * P::kStageBytes;
      float own[kOwn][2];
      uint32_t scale[kOwn][2], offset[kOwn][2], minimum[kOwn][2];
      smem.full_barrier(slot).wait(i / P::kStages & 1);
      Vec<uint32_t, 4> codes[kOwn][2];
#pragma unroll
      for (int m = 0; m < kOwn; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          codes[m][h] =
              load_smem<4>(codes_at + stage + (h * kOut / 2 + m * kOperandRows) * kRowBytes);
          const uint32_t at = scales_at + stage + (h * kOut / 2 + m * kOperandRows) * 4;
          own[m][h] = __uint_as_float(load_smem<1>(at).data[0]);
          float of_zero = kDefaultZero<kCodeType>;
          if (has_minima) {  // as a zero and a remainder, so that a rounded scale counts from about
                             // 0
            const float least = __uint_as_float(load_smem<1>(at + P::kScaleBytes).data[0]),
                        size = own[m][h];
            of_zero = size == 0.f ? 0.f
                                  : fminf(fmaxf(rintf(__fdividef(-least, size)), 0.f),
                                          (1 << kBits<kCodeType>)-1);
            const float remainder = fmaf(of_zero, size, least);
            minimum[m][h] = pack2<T>(remainder, remainder);
          }
          scale[m][h] = pack2<T>(own[m][h], own[m][h]);
          offset[m][h] = dequant_offset<T, kCodeType>(static_cast<int>(of_zero));
        }
      if (kStageGroups && p.quant.zero != nullptr) {
#pragma unroll
        for (int m = 0; m < kOwn; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) offset[m][h] = dequant_offset<T, kCodeType>(zero[m][h]);
        if (i + 1 < end) load_zeros(begun.stage + i + 1 - first);
      }
      const uint64_t x = make_smem_desc_k_major(smem.x(slot));
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        auto& now = numbers[chunk % kBuffers];
        if (kScalesSums && chunk == 0) wgmma_wait<kBuffers - 1>();  // of the same registers
#pragma unroll
        for (int m = 0; m < kOwn; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            uint32_t pairs[4];
            const uint32_t* words = codes[m][h].data + chunk * kWords;
            dequantize_unit<T, kCodeType>(pairs, {words[0], words[kWords - 1]}, offset[m][h]);
#pragma unroll
            for (int k = 0; k < 4; ++k)
              now[m][2 * k + h] = kScalesSums  ? pairs[k]
                                  : has_minima ? hfma2<T>(pairs[k], scale[m][h], minimum[m][h])
                                               : hmul2<T>(pairs[k], scale[m][h]);
          }
        if (kScalesSums && chunk == 0) {  // complete by now
          wgmma_wait<0>();
          if (i > first) release(i - 1);
          add_sums();
#pragma unroll
          for (int m = 0; m < kOwn; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) exact[m][h] = own[m][h];
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int m = 0; m < kOwn; ++m)
            Wgmma<T, kTokens>::template rs<false>(
                sum[m], now[m] + 4 * step,
                x + (chunk / 2 * kTokens * kLine * 2 + chunk % 2 * 64 + step * 32) / 16);
        wgmma_commit();
        if (!kScalesSums || kBuffers < kChunks) wgmma_wait<1>();
        if (!kScalesSums && chunk == 0 && i > first) release(i - 1);
      }
    }
    wgmma_wait<0>();
    if constexpr (kScalesSums) {
      add_sums();
    } else {
#pragma unroll
      for (int m = 0; m < kOwn; ++m)
#pragma unroll
        for (int k = 0; k < kTokens / 2; ++k) total[m][k] = sum[m][k];
    }
    release(end - 1);
  }

  // Epilogue of a whole tile: through shared memory, kEpilogueRows rows of x at a time, to y.
  __device__ __forceinline__ void store_whole(const float (&total)[kOwn][kTokens / 2],
                                              int first_token, int first_output, int rows) const {
    auto* staging = reinterpret_cast<float*>(smem.bytes + P::kSumsAt) +
                    warpgroup * kOwn * 2 * kEpilogueRows<kTokens> * kEpilogueStride;
    // One loop, although sums are in registers: unrolled, each piece would fetch the code of
    // store_outputs() again.
    constexpr int kPieces = kTokens / kEpilogueRows<kTokens>;
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      named_barrier_sync(1 + warpgroup, 128);
#pragma unroll
      for (int other = 0; other < kPieces; ++other)
        if (other == piece)
#pragma unroll
          for (int m = 0; m < kOwn; ++m)
#pragma unroll
            for (int j = 0; j < kEpilogueRows<kTokens> / 8; ++j)
#pragma unroll
              for (int c = 0; c < 4; ++c)
                staging[((2 * m + c / 2) * kEpilogueRows<kTokens> + 8 * j + 2 * t + c % 2) *
                            kEpilogueStride +
                        warp * 8 + g] = total[m][4 * (other * kEpilogueRows<kTokens> / 8 + j) + c];
      named_barrier_sync(1 + warpgroup, 128);
      constexpr int kFours = kOperandRows / 4, kUnits = kOwn * kEpilogueRows<kTokens> * kFours;
      constexpr int kUnitsAtOnce = kTokens > 64 ? 2 : 1;
#pragma unroll kUnitsAtOnce
      for (int of = thread; of < (p.gated ? 1 : 2) * kUnits; of += 128) {
        const int half = of / kUnits, m = of % kUnits / (kEpilogueRows<kTokens> * kFours);
        const int four = of % kFours * 4, token = of / kFours % kEpilogueRows<kTokens>;
        const int output =
            first_output + half * kOut / 2 + (warpgroup * kOwn + m) * kOperandRows + four;
        if (piece * kEpilogueRows<kTokens> + token >= rows || output >= p.out) continue;
        const float* sums =
            staging + ((2 * m + half) * kEpilogueRows<kTokens> + token) * kEpilogueStride + four;
        float4 ups{};
        if (p.gated)
          ups = *reinterpret_cast<const float4*>(sums + kEpilogueRows<kTokens> * kEpilogueStride);
        store_outputs<T>(p, first_token + piece * kEpilogueRows<kTokens> + token, output,
                         *reinterpret_cast<const float4*>(sums), ups);
      }
    }
  }

  // Epilogue of a tile that a cluster shares: each block reduces a part of the outputs over
  // distributed shared memory.
  __device__ __forceinline__ void reduce_cluster(const float (&total)[kOwn][kTokens / 2],
                                                 int first_token, int first_output,
                                                 int rows) const {
    auto* sums =
        reinterpret_cast<float*>(smem.bytes);  // in place of the stages, when all have been read
    static_assert(kTokens * kReduceStride * 4 <= P::kSumsAt);
    named_barrier_sync(1 + kGroups<kTokens>, kAll);
#pragma unroll
    for (int m = 0; m < kOwn; ++m)
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          sums[(8 * j + 2 * t + c % 2) * kReduceStride + own_row + c / 2 * (kOut / 2) +
               m * kOperandRows] = total[m][4 * j + c];
    cluster_arrive();
    cluster_wait();
    const int fours = tile_out / 4, consumer_thread = threadIdx.x - 128;
    const int each = (rows * fours + schedule.cluster_size - 1) / schedule.cluster_size,
              rank = cluster_rank();
#pragma unroll 1
    for (int of = rank * each + consumer_thread; of < min(rows * fours, (rank + 1) * each);
         of += kAll) {
      const int token = of / fours, four = of % fours * 4;
      if (first_output + four >= p.out) continue;
      const float* from = sums + token * kReduceStride + four;
      float4 whole{}, ups{};
      auto add = [](float4& to, const float4& more) {
        to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w;
      };
#pragma unroll 4
      for (int other = 0; other < schedule.cluster_size; ++other) {
        add(whole, ld_shared_cluster(from, other));
        if (p.gated) add(ups, ld_shared_cluster(from + kOut / 2, other));
      }
      store_outputs<T>(p, first_token + token, first_output + four, whole, ups);
    }
    cluster_arrive_relaxed();  // peers may still read this block's memory
    cluster_wait();
  }

  // Writes the sums of a part of a tile to schedule.partial.
  __device__ __forceinline__ void store_partial(const float (&total)[kOwn][kTokens / 2],
                                                bool begins, int rows) const {
    float* to = schedule.partial +
                (2 * static_cast<int>(blockIdx.x) + begins) * static_cast<int64_t>(kOut * kTokens) +
                own_row;
#pragma unroll
    for (int m = 0; m < kOwn; ++m)
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int token = 8 * j + 2 * t + c % 2;
          if (token < rows)
            __stcg(to + token * kOut + c / 2 * (kOut / 2) + m * kOperandRows, total[m][4 * j + c]);
        }
  }

  // Stream-K fix-up: waits until all blocks of the block's first and last tile have written their
  // sums, and reduces a part of the outputs of each. A block publishes both before it waits. The
  // order of the sums is that of the columns, so the same x gives the same y.
  __device__ __forceinline__ void reduce_stream_k(int tail_tile, int head_tile) const {
    if (tail_tile < 0 && head_tile < 0) return;
    const int block = blockIdx.x, blocks = gridDim.x;
    __threadfence();
    named_barrier_sync(1 + kGroups<kTokens>, kAll);
    const int consumer_thread = threadIdx.x - 128;
    auto first_of = [&](int tile) { return schedule.owner(tile * schedule.stages, blocks); };
    auto count_of = [&](int tile) {
      return schedule.owner((tile + 1) * schedule.stages - 1, blocks) - first_of(tile) + 1;
    };
    auto publish = [&](int tile) {
      if (tile >= 0 && consumer_thread == 0) atomicAdd(schedule.counters + first_of(tile), 1);
    };
    auto reduce_tile = [&](int tile) {
      if (tile < 0) return;
      const int from = first_of(tile), count = count_of(tile);
      if (consumer_thread == 0) {
        int32_t* counter = schedule.counters + from;
        while (*static_cast<volatile int32_t*>(counter) < count) {
        }
        __threadfence();
        if (atomicAdd(counter, 1) == 2 * count - 1) *counter = 0;  // all blocks have seen it
      }
      named_barrier_sync(1 + kGroups<kTokens>, kAll);
      const int first_token = tile % range.token_tiles * kTokens,
                first_output = tile / range.token_tiles * tile_out;
      const int rows = min(kTokens, p.rows - first_token), fours = tile_out / 4;
#pragma unroll 1
      for (int of = (block - from) * kAll + consumer_thread; of < rows * fours;
           of += count * kAll) {
        const int token = of / fours, four = of % fours * 4;
        if (first_output + four >= p.out) continue;
        float4 sums{}, ups{};
        auto add = [](float4& to, const float* from) {
          const float4 more = __ldcg(reinterpret_cast<const float4*>(from));
          to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w;
        };
#pragma unroll 4
        for (int other = 0; other < count; ++other) {
          const float* at =
              schedule.partial +
              (2 * (from + other) + (other == 0)) * static_cast<int64_t>(kOut * kTokens) +
              token * kOut + four;
          add(sums, at);
          if (p.gated) add(ups, at + kOut / 2);
        }
        store_outputs<T>(p, first_token + token, first_output + four, sums, ups);
      }
    };
    publish(tail_tile), publish(head_tile);
    reduce_tile(tail_tile), reduce_tile(head_tile);
  }
};

// All tiles of a block: the mainloop, and the epilogue of a whole tile or a part of one.
template <typename T, CodeType kCodeType, int kTokens, bool kStageGroups>
__device__ __forceinline__ void consume(const SharedStorage<kCodeType, kTokens, kStageGroups>& smem,
                                        const GemvParams& p, const StreamKSchedule& schedule,
                                        const WorkRange& range, int warpgroup) {
  using C = Consumer<T, kCodeType, kTokens, kStageGroups>;
  pdl_wait();
  pdl_launch_dependents();
  const C consumer{smem, p, schedule, range, warpgroup};
  int tail_tile = -1,
      head_tile = -1;  // tiles that another block begins, and that another block ends
  TileCursor begun = range.start;
  for (int i = 0; i < range.count; begun.next_tile(range.token_tiles)) {
    const int first = i, end = min(range.count, i + schedule.stages - begun.stage);
    float total[C::kOwn][kTokens / 2] = {};
    consumer.mainloop(total, begun, i, end);
    const int first_token = begun.token_tile * kTokens, rows = min(kTokens, p.rows - first_token);
    const int first_output = begun.out_tile * consumer.tile_out;
    const bool begins = begun.stage == 0;
    if (kPermutedInput<kTokens> && end - first == schedule.stages) {
      store_tile<T, kTokens>(p, total[0], first_token,
                             first_output + warpgroup * kOperandRows + consumer.warp * 8,
                             C::kOut / 2);
    } else if (end - first == schedule.stages) {
      consumer.store_whole(total, first_token, first_output, rows);
    } else if (schedule.cluster_size > 1) {
      consumer.reduce_cluster(total, first_token, first_output, rows);
    } else {
      consumer.store_partial(total, begins, rows);
      (begins ? head_tile : tail_tile) = begun.out_tile * range.token_tiles + begun.token_tile;
    }
  }
  consumer.reduce_stream_k(tail_tile, head_tile);
}

template <typename T, CodeType kCodeType, int kTokens, bool kStageGroups>
__global__ void __launch_bounds__(kThreads<kTokens>, 1)
    packed_gemm_kernel(const __grid_constant__ TensorMaps maps, GemvParams p,
                       StreamKSchedule schedule) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using P = SharedStorage<kCodeType, kTokens, kStageGroups>;
  extern __shared__ uint8_t raw[];
  const P smem{raw + (-smem_address(raw) & 1023)};
  if (threadIdx.x == 32) prefetch_tensor_map(maps.weights), prefetch_tensor_map(maps.x);
  if (threadIdx.x == 64) {
    for (int slot = 0; slot < P::kStages; ++slot) {
      smem.full_barrier(slot).init(1 + 1);
      smem.x_full_barrier(slot).init(1);
      smem.empty_barrier(slot).init(kGroups<kTokens> * 4);
    }
    fence_mbarrier_init();
  }
  const WorkRange range(schedule);
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform for a warp
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kPermutedInput<kTokens> ? 40
                                                             : kGroups<kTokens> == 2 ? 88
                                                                                     : 64));
    const int warp = threadIdx.x / 32;
    if (warp > 1) {
      if constexpr (!kPermutedInput<kTokens>) permute_x(smem, range, warp - 2);
    } else if (threadIdx.x == 0) produce_weights(smem, maps, p, range);
    else if (threadIdx.x == 32) produce_x(smem, maps, range, p.rows);
  } else {
    constexpr int kRegisters = kPermutedInput<kTokens> ? 232 : kGroups<kTokens> == 2 ? 208 : 104;
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
    consume<T>(smem, p, schedule, range, group - 1);
  }
#endif
}

// Rows of x as permute_x() leaves them in a stage, zero-padded to whole stages. One thread per
// vector.
template <typename T, CodeType kCodeType>
__global__ void __launch_bounds__(256)
    permute_x_kernel(T* to, const T* x, int rows, int in, int pitch) {
  constexpr int kWords = kColumns<kCodeType> / 2;  // of a stage
  pdl_wait();
  pdl_launch_dependents();
  const int vectors = pitch / 8;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int64_t row = at / vectors;
  if (row >= rows) return;
  const int vector = static_cast<int>(at - row * vectors), column = vector * 8,
            first = vector * 4 % kWords;
  Vec<uint32_t, 4> words{};
  if (column < in)
    words = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(x + row * in + column));
  const int t = first / (kWords / 4), chunk = first % (kWords / 4) / 4;
  auto* stage = reinterpret_cast<uint32_t*>(to + row * pitch +
                                            column / kColumns<kCodeType> * kColumns<kCodeType>);
#pragma unroll
  for (int k = 0; k < 4; ++k) stage[(chunk * 2 + k / 2) * 8 + k % 2 * 4 + t] = words.data[k];
}

// How tiles are divided: one block each, a cluster each, or stream-K.
struct TileSchedule {
  int cluster_size;
  bool stream_k;
};

// The schedule with the fewest stages in sequence, including the cost of reductions. clusters[size]
// can be resident at once. kManyRows: more than 128 rows of x, without stream-K, and each wave of
// clusters costs more.
template <bool kManyRows>
TileSchedule choose_schedule(const std::array<int, kMaxClusterSize + 1>& clusters, int tiles,
                             int stages, int places) {
  TileSchedule tile_schedule{1, false};
  int64_t least = int64_t{ceil_div(tiles, places)} * stages;
  auto take = [&](TileSchedule other, int64_t cost) {
    if (cost < least) tile_schedule = other, least = cost;
  };
  if (!kManyRows) take({1, true}, ceil_div(int64_t{tiles} * stages, places) + kStreamKReduceCost);
  for (int size = 2; size <= std::min(kMaxClusterSize, stages); ++size)
    if (clusters[size] > 0) {
      const int64_t rounds = ceil_div(tiles, clusters[size]);
      take({size, false}, rounds * ceil_div(stages, size) +
                              (kManyRows ? rounds * kClusterWaveCost : kClusterReduceCost));
    }
  return tile_schedule;
}

template <typename T, CodeType kCodeType, int kTokens, bool kStageGroups>
cudaError_t run(const GemvParams& p, void* scratch, int32_t* counters, cudaStream_t stream) {
  using P = SharedStorage<kCodeType, kTokens, kStageGroups>;
  auto kernel = packed_gemm_kernel<T, kCodeType, kTokens, kStageGroups>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes);
  if (error != cudaSuccess) return error;
  constexpr int kOut = P::kOut;
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(p.in) * kBits<kCodeType> / 8,
                   rows = p.gated ? 2 * p.out : p.out;
  cuuint64_t in = p.in;
  const void* x = p.x;
  if constexpr (kPermutedInput<kTokens>) {
    const int pitch = static_cast<int>(ceil_div(p.in, kColumns<kCodeType>)) * kColumns<kCodeType>;
    auto* arranged = static_cast<T*>(scratch);
    const unsigned blocks = ceil_div(static_cast<int64_t>(p.rows) * pitch / 8, 256);
    const cudaError_t error = launch(permute_x_kernel<T, kCodeType>, blocks, 256, 0, stream,
                                     arranged, static_cast<const T*>(p.x), p.rows, p.in, pitch);
    if (error != cudaSuccess) return error;
    x = arranged, in = pitch;
  }
  TensorMaps maps;
  if (!make_tensor_map(maps.weights, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_64B,
                       p.weight, {row_bytes, rows}, 1,
                       {kRowBytes, static_cast<cuuint32_t>(p.gated ? kOut / 2 : kOut)}) ||
      !make_tensor_map(maps.x, kTensorMapType<T>, CU_TENSOR_MAP_SWIZZLE_128B, x,
                       {in, static_cast<cuuint64_t>(p.rows)}, 2, {kLine, kTmaRows<kTokens>}))
    return cudaErrorInvalidValue;
  const int out_tiles = static_cast<int>(ceil_div(p.out, p.gated ? kOut / 2 : kOut));
  const int tiles = out_tiles * static_cast<int>(ceil_div(p.rows, kTokens));
  const int stages = static_cast<int>(ceil_div(p.in, kColumns<kCodeType>));
  static const auto clusters =
      max_active_clusters<kMaxClusterSize>(kernel, kThreads<kTokens>, P::kBytes);
  const int places = std::min(static_cast<int>(num_sms()), kPackedGemmBlocks);
  const TileSchedule tile_schedule =
      choose_schedule<kPermutedInput<kTokens>>(clusters, tiles, stages, places);
  const int blocks = tile_schedule.cluster_size > 1
                         ? tiles * tile_schedule.cluster_size
                         : std::min(places, tile_schedule.stream_k ? tiles * stages : tiles);
  const StreamKSchedule schedule{tiles,
                                 out_tiles,
                                 stages,
                                 static_cast<float*>(scratch),
                                 counters,
                                 tile_schedule.stream_k ? 1 : stages,
                                 tile_schedule.cluster_size};
  return cudaLaunchKernelEx(
      Launch(blocks, kThreads<kTokens>, P::kBytes, stream, tile_schedule.cluster_size).config(),
      kernel, maps, p, schedule);
}

template <typename T, CodeType kCodeType, bool kStageGroups>
cudaError_t dispatch_rows(const GemvParams& p, void* scratch, int32_t* counters,
                          cudaStream_t stream) {
  return p.rows <= 8    ? run<T, kCodeType, 8, kStageGroups>(p, scratch, counters, stream)
         : p.rows <= 16 ? run<T, kCodeType, 16, kStageGroups>(p, scratch, counters, stream)
         : p.rows <= 32 ? run<T, kCodeType, 32, kStageGroups>(p, scratch, counters, stream)
         : p.rows <= 64 ? run<T, kCodeType, 64, kStageGroups>(p, scratch, counters, stream)
         : p.rows <= 128 || !has_large_packed_gemm_sm90(p)
             ? run<T, kCodeType, 128, kStageGroups>(p, scratch, counters, stream)
         : 192 * ceil_div(p.rows, 192) < 256 * ceil_div(p.rows, 256)
             ? run<T, kCodeType, 192, kStageGroups>(p, scratch, counters, stream)
             : run<T, kCodeType, 256, kStageGroups>(p, scratch, counters, stream);
}

// Whether groups are whole stages without minima.
template <CodeType kCodeType>
bool has_stage_groups(const GemvParams& p) {
  const int group = p.quant.group_size;
  return (group % kColumns<kCodeType> == 0 || group == p.in) && p.quant.minimum == nullptr;
}

template <typename T>
cudaError_t dispatch_codes(const GemvParams& p, void* scratch, int32_t* counters,
                           cudaStream_t stream) {
  return dispatch_code_type(p.quant.code_type, [&](auto codes) {
    constexpr CodeType kCodeType = codes.value;
    if (has_stage_groups<kCodeType>(p))
      return dispatch_rows<T, kCodeType, true>(p, scratch, counters, stream);
    if constexpr (kCodeType == CodeType::kFloat8) return cudaErrorInvalidValue;
    else return dispatch_rows<T, kCodeType, false>(p, scratch, counters, stream);
  });
}

}  // namespace

bool has_packed_gemm_sm90(DType dtype, const GemvParams& p) {
  bool serves = false;  // small groups have no zeros here
  dispatch_code_type(p.quant.code_type, [&](auto codes) {
    serves = has_stage_groups<codes.value>(p) ||
             (codes.value != CodeType::kFloat8 && p.quant.zero == nullptr);
    return cudaSuccess;
  });
  return serves && (dtype == DType::kFloat16 || dtype == DType::kBFloat16) && p.out % 4 == 0 &&
         p.in % 32 == 0 && p.quant.group_size % 32 == 0 && !p.norm &&
         device_attribute<cudaDevAttrComputeCapabilityMajor>() == 9 &&
         tensor_map_encoder() != nullptr;
}

bool has_large_packed_gemm_sm90(const GemvParams& p) {
  const bool activates =
      p.gated ? p.activation == Activation::kSilu || p.activation == Activation::kGeluTanh
              : p.activation == Activation::kNone;
  return activates && p.out % 8 == 0 && is_aligned(p.x, 16) && is_aligned(p.y, 16) &&
         is_aligned(p.residual, 16);
}

cudaError_t packed_gemm_sm90(DType dtype, const GemvParams& p, void* scratch, int32_t* counters,
                             cudaStream_t stream) {
  return dtype == DType::kFloat16 ? dispatch_codes<__half>(p, scratch, counters, stream)
                                  : dispatch_codes<__nv_bfloat16>(p, scratch, counters, stream);
}

}  // namespace llmc::kernels
