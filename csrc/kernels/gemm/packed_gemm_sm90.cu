// packed_gemm() on Hopper's tensor cores. A tile is kOut<kTokens> rows of the weight (gated: half as many gates and their ups)
// for kTokens rows of x. kGroups warpgroups multiply: codes become numbers of 16 bits in registers, as the tensor core's first
// operand, while it multiplies those before; x is its second, from shared memory. Of 16 rows of an operand the first 8 are
// from the low half of the tile and the others from the high half, so that a thread has gates and their ups. One warp copies
// weights, one x, and two, a stage each, bring what has come of x into the order in which codes give their columns
// (packed.cuh): of a stage's columns thread t has a quarter, of which it takes eight that follow one another for two
// products, in pairs, where the tensor core wants one pair of every eight. Of more than 128 rows x is brought into it once, by
// a kernel before.
//
// Tiles that one block has whole go from the registers to y. Where there are few, the blocks of a cluster share a tile's
// columns, and each sums up some of its outputs from what all have in shared memory. Where tiles do not fill all
// multiprocessors either way, of up to 128 rows of x every block that had a part sums up a part, when all have left what they
// have. It is always in the order of the columns, so that the same x gives the same y. Reads the weight
// once for each kTokens rows of x, and x once for each tile, from the cache.
#include <algorithm>
#include <array>

#include "../common/output_writer.cuh"
#include "../common/wgmma_sm90.cuh"
#include "packed_gemm.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using namespace sm90a;

constexpr int kRowBytes = 64;                         // of a row of the weight in a stage
constexpr int kOperandRows = 32;                      // of either half, that an operand of 64 rows has
constexpr int kLine = 64;                             // columns that a row of x has in shared memory
constexpr int kPitch = kOperandRows + 4;              // floats from one row of x to the next, of sums that leave
constexpr uint32_t kMost = 232448;                    // bytes of shared memory
constexpr int kMostParts = 8;                         // of a tile, in a cluster
constexpr int kFewTokens = 32;  // for which it is sums of a stage that are scaled, in place of numbers
constexpr int kArranging = 2;   // warps that bring x into its order
// What it costs in stages that a cluster adds up its parts, and that blocks do which leave them in memory; of many rows that
// each round of clusters does.
constexpr int kClusterCost = 3, kSharesCost = 16, kManyClusterCost = 10;

// Whether x comes as it is to lie, made so by a kernel before: of so many rows there is no time for it between the products.
template <int kTokens>
constexpr bool kComesArranged = kTokens > 128;
// Rows of the weight in a tile; warpgroups that multiply, and operands that each has of it: more sums leave room for fewer
// threads.
template <int kTokens>
constexpr int kOut = kTokens > 128 ? 128 : 256;
template <int kTokens>
constexpr int kGroups = kTokens > 64 ? 2 : 4;
template <int kTokens>
constexpr int kOperands = kOut<kTokens> / 2 / kOperandRows / kGroups<kTokens>;
template <int kTokens>
constexpr int kBox = kComesArranged<kTokens> ? 64 : kTokens;  // rows of x that are copied at once
template <int kTokens>
constexpr int kPart = kTokens > 128 ? 8 : std::min(kTokens, 16);  // rows of x that leave at once
template <int kTokens>
constexpr int kClusterPitch = kOut<kTokens> + 4;  // floats from one row of x to the next, of sums that a cluster adds up
template <int kTokens>
constexpr int kThreads = (1 + kGroups<kTokens>) * 128;
template <Codes kCodes>
constexpr int kColumns = kRowBytes * 8 / kBits<kCodes>;  // of a stage

// Where in shared memory things lie, in bytes from a multiple of 1,024 on. kWhole: groups are of whole stages and have no
// minima; otherwise of 32 columns or more, and a stage has their scales and then their minima for every 32 of its columns.
template <Codes kCodes, int kTokens, bool kWhole>
struct Place {
  static constexpr int kOut = kernels::kOut<kTokens>, kGroups = kWhole ? 1 : kColumns<kCodes> / 32;
  static constexpr uint32_t kWeightBytes = kOut * kRowBytes, kXBytes = kTokens * kColumns<kCodes> * 2;
  static constexpr uint32_t kScalesAt = kWeightBytes + kXBytes, kScaleBytes = kGroups * kOut * 4;
  static constexpr uint32_t kStageBytes = (kScalesAt + (kWhole ? 1 : 2) * kScaleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kSumBytes = kOut / kOperandRows * kPart<kTokens> * kPitch * 4, kRest = kSumBytes + 256 + 1024;
  static constexpr int kStages = std::min(10u, (kMost - kRest) / kStageBytes);
  static constexpr uint32_t kSumsAt = kStages * kStageBytes, kBarriersAt = kSumsAt + kSumBytes;
  static constexpr uint32_t kBytes = kSumsAt + kRest;
  static_assert(kStages >= (kComesArranged<kTokens> ? 2 : 3) && kStageBytes % 1024 == 0 && 24 * kStages <= 256);

  uint8_t* bytes;
  uint32_t base = shared_address(bytes);

  __device__ uint8_t* stage(int slot) const { return bytes + slot * kStageBytes; }
  __device__ uint32_t weights(int slot) const { return base + slot * kStageBytes; }
  __device__ uint32_t x(int slot) const { return base + slot * kStageBytes + kWeightBytes; }
  __device__ uint32_t scales(int slot) const { return base + slot * kStageBytes + kScalesAt; }
  __device__ Barrier there(int slot) const { return {base + kBarriersAt + 8 * slot}; }
  __device__ Barrier read(int slot) const { return {base + kBarriersAt + 8 * (kStages + slot)}; }
  __device__ Barrier x_there(int slot) const { return {base + kBarriersAt + 8 * (2 * kStages + slot)}; }  // as it comes
};

// A place in the stages of all tiles, one after the other; the token_tiles of the same rows of the weight follow one another.
struct Cursor {
  int stage, token_tile, out_tile;

  __device__ __forceinline__ void next_tile(int token_tiles) {
    stage = 0;
    if (++token_tile < token_tiles) return;
    token_tile = 0;
    ++out_tile;
  }
};

// A block's part of them.
struct Part {
  int count, stages, token_tiles;
  Cursor start;

  __device__ Part(const Shares& shares) : stages(shares.stages), token_tiles(shares.tiles / shares.out_tiles) {
    const uint32_t first = shares.begin(blockIdx.x, gridDim.x), tile = first / stages;
    count = shares.begin(blockIdx.x + 1, gridDim.x) - first;
    start = {static_cast<int>(first - tile * stages), 0, static_cast<int>(tile)};
    if (token_tiles > 1) start.token_tile = tile % token_tiles, start.out_tile = tile / token_tiles;
  }
};

// Four outputs of a row of x from their sums, and those of their ups.
template <typename T>
__device__ __forceinline__ void finish(const GemvParams& p, int row, int output, float4 sums, float4 ups) {
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
  Made<T>(p.y, p.y_inverse).put(at, of);
}

struct Maps {
  CUtensorMap weights, x;
};

// A block's copies, one stage after the other, as places for them come free.
template <typename P, typename Copy>
__device__ __forceinline__ void copy_all(const P& place, const Part& part, Copy&& copy) {
  Cursor at = part.start;
#pragma unroll 1
  for (int i = 0; i < part.count; ++i) {
    const int slot = i % P::kStages;
    if (i >= P::kStages) place.read(slot).wait(i / P::kStages - 1 & 1);
    copy(slot, at);
    if (++at.stage == part.stages) at.next_tile(part.token_tiles);
  }
}

template <Codes kCodes, int kTokens, bool kWhole>
__device__ __forceinline__ void copy_weights(const Place<kCodes, kTokens, kWhole>& place, const Maps& maps, const GemvParams& p,
                                             const Part& part) {
  using P = Place<kCodes, kTokens, kWhole>;
  const int groups = p.in / p.packing.group_size, all_rows = p.gated ? 2 * p.out : p.out;
  const int tile_out = p.gated ? P::kOut / 2 : P::kOut;
  const float per_group = 1.f / p.packing.group_size;
  const bool has_minima = !kWhole && p.packing.minimum != nullptr;
  copy_all(place, part, [&](int slot, const Cursor& at) {
    const Barrier there = place.there(slot);
    const uint32_t to = place.weights(slot), scales = place.scales(slot);
    const int low = at.out_tile * tile_out, of_low = min(tile_out, p.out - low);
    there.expect(P::kWeightBytes + 4 * (1 + p.gated) * of_low * P::kGroups * (1 + has_minima));
    copy_box(to, maps.weights, there, at.stage * kRowBytes, low);
    if (p.gated) copy_box(to + P::kWeightBytes / 2, maps.weights, there, at.stage * kRowBytes, p.out + low);
#pragma unroll
    for (int k = 0; k < P::kGroups; ++k) {
      const float column = at.stage * kColumns<kCodes> + 32 * k + 0.5f;
      const int64_t first = static_cast<int64_t>(min(static_cast<int>(column * per_group), groups - 1)) * all_rows;
      auto copy_rows = [&](const float* from, uint32_t target) {
        copy_bytes(target, from + first + low, 4 * of_low, there);
        if (p.gated) copy_bytes(target + P::kOut / 2 * 4, from + first + p.out + low, 4 * of_low, there);
      };
      copy_rows(p.packing.scale, scales + k * P::kOut * 4);
      if (has_minima) copy_rows(p.packing.minimum, scales + P::kScaleBytes + k * P::kOut * 4);
    }
  });
}

template <Codes kCodes, int kTokens, bool kWhole>
__device__ __forceinline__ void copy_x(const Place<kCodes, kTokens, kWhole>& place, const Maps& maps, const Part& part,
                                       int rows) {
  using P = Place<kCodes, kTokens, kWhole>;
  wait_for_inputs();  // of which weights are none
  copy_all(place, part, [&](int slot, const Cursor& at) {
    const Barrier there = kComesArranged<kTokens> ? place.there(slot) : place.x_there(slot);
    constexpr int kLines = kColumns<kCodes> / kLine, kBoxRows = kBox<kTokens>;
    // Rows behind the last box that has any are left as they are: to fill them with zeros takes longer than to copy them.
    const int first = at.token_tile * kTokens, boxes = min(kTokens, rows - first + kBoxRows - 1) / kBoxRows;
    there.expect(kLines * boxes * kBoxRows * kLine * 2);
#pragma unroll
    for (int line = 0; line < kLines; ++line)
#pragma unroll
      for (int box = 0; box < kTokens / kBoxRows; ++box)
        if (box < boxes)
          copy_box(place.x(slot) + (line * kTokens + box * kBoxRows) * kLine * 2, maps.x, there,
                   at.stage * kColumns<kCodes> + line * kLine, first + box * kBoxRows);
  });
}

// Of a stage's columns of x the first words of all four quarters, then the second ones and so on. A warp takes every
// kArranging-th place for a stage, so that it sees each phase of a barrier, and four rows at a time; of row lane / 8 a lane
// has vectors of quarter t.
template <Codes kCodes, int kTokens, bool kWhole>
__device__ __forceinline__ void arrange_all(const Place<kCodes, kTokens, kWhole>& place, const Part& part, int warp) {
  using P = Place<kCodes, kTokens, kWhole>;
  constexpr int kLines = kColumns<kCodes> / kLine, kPieces = kTokens / 4;
  constexpr int kAtOnce = kPieces < 8 / kLines ? kPieces : 8 / kLines;
  constexpr uint32_t kLineBytes = kTokens * kLine * 2;
  const int lane = threadIdx.x % 32, t = lane % 4, b = lane / 4 % 2, row = lane / 8;
  // Where a vector of a row lies and where its words go, for the first line; banks are told apart by taking another line first.
  const int line = kLines == 1 ? 0 : t / 2, vector = (t * kLines + line) * 2 + b;
  const uint32_t from = vector / 8 * kLineBytes + row * 128 + 16 * (vector % 8 ^ row);
  const int other = static_cast<int>(kLineBytes) * (1 - 2 * line);
  uint32_t to[4];
#pragma unroll
  for (int word = 0; word < 4; ++word) to[word] = line * kLineBytes + row * 128 + 16 * (4 * b + word ^ row) + 4 * t;
  auto arrange = [&](uint8_t* x) {
    auto place_of = [&](int piece, uint32_t within) { return x + 512 * piece + (within ^ piece % 2 * 64); };  // half of 8 rows
#pragma unroll
    for (int first = 0; first < kPieces; first += kAtOnce) {
      uint4 vectors[kAtOnce][kLines];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int h = 0; h < kLines; ++h) vectors[k][h] = *reinterpret_cast<const uint4*>(place_of(first + k, from ^ 32 * h));
      __syncwarp();
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int h = 0; h < kLines; ++h) {
          const uint4& v = vectors[k][h];
          const uint32_t words[] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int word = 0; word < 4; ++word)
            *reinterpret_cast<uint32_t*>(place_of(first + k, to[word]) + h * other) = words[word];
        }
    }
  };
  for (int begun = 0, parity = 0; begun < part.count; begun += P::kStages, parity ^= 1)
    for (int slot = warp; slot < min(P::kStages, part.count - begun); slot += kArranging) {
      place.x_there(slot).wait(parity);
      arrange(place.stage(slot) + P::kWeightBytes);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) place.there(slot).arrive();
    }
}

// Of four lanes that follow one another, word q of lane t to word t of lane q.
__device__ __forceinline__ void turn(uint32_t (&x)[4]) {
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

// A whole tile of many rows of x from the registers to y; `output`: the first of the eight of a warp, in the low half. Where
// they wait for a residual sums are two numbers of T, the first as near as T has one.
template <typename T, int kTokens>
__device__ __forceinline__ void put_tile(const GemvParams& p, float (&sum)[kTokens / 2], int first_token, int output,
                                         int next_half) {
  constexpr float kMost = std::is_same_v<T, __half> ? 65504.f : 0x1.fep127f;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float bias[2] = {};
  if (p.bias != nullptr)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      bias[r] = to_float(static_cast<const T*>(p.bias)[min(output + g + (p.gated ? 0 : r * next_half), p.out - 1) +
                                                       (p.gated ? r * p.out : 0)]);
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) sum[i] += bias[i / 2 % 2];
  if (p.gated) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; i += 4) {
      float gates[] = {sum[i], sum[i + 1]};
      if (p.activation == Activation::kSilu) activate_by<Activation::kSilu>(gates);
      else activate_by<Activation::kGeluTanh>(gates);
      sum[i] = gates[0] * sum[i + 2], sum[i + 1] = gates[1] * sum[i + 3];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r == 1 && p.gated) return;
    const int column = output + r * next_half;
#pragma unroll
    for (int q = 0; q < kTokens / 32; ++q) {
      uint32_t words[4], lacking[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float x = sum[4 * (4 * q + k) + 2 * r], y = sum[4 * (4 * q + k) + 2 * r + 1];
        if (p.y_inverse != 0) {
          words[k] = transposed(Float8(x * p.y_inverse).__x | Float8(y * p.y_inverse).__x << 16);
        } else if (p.residual == nullptr) {
          words[k] = transposed(pack<T>(x, y));
        } else {
          const uint32_t pair = pack<T>(fminf(fmaxf(x, -kMost), kMost), fminf(fmaxf(y, -kMost), kMost));
          const auto kept = *reinterpret_cast<const Vec<T, 2>*>(&pair);
          words[k] = transposed(pair);
          lacking[k] = transposed(pack<T>(x - to_float(kept.data[0]), y - to_float(kept.data[1])));
        }
      }
      turn(words);
      if (p.residual != nullptr) turn(lacking);
      const int token = first_token + 32 * q + 8 * t + g;
      if (token >= p.rows || column >= p.out) continue;
      const int64_t at = static_cast<int64_t>(token) * p.out + column;
      if (p.y_inverse != 0) {  // even columns first
        const uint32_t a = words[0] | words[1] << 8, b = words[2] | words[3] << 8;
        store(reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.y) + at),
              Vec<uint32_t, 2>{{__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)}});
        continue;
      }
      auto& made = reinterpret_cast<Vec<T, 8>&>(words);
      if (p.residual != nullptr) {
        const auto& more = reinterpret_cast<const Vec<T, 8>&>(lacking);
        const auto residual = load<T, 8>(static_cast<const T*>(p.residual) + at);
#pragma unroll
        for (int k = 0; k < 8; ++k)
          made.data[k] = from_float<T>(to_float(made.data[k]) + to_float(more.data[k]) + to_float(residual.data[k]));
      }
      store(static_cast<T*>(p.y) + at, made);
    }
  }
}

template <typename T, Codes kCodes, int kTokens, bool kWhole>
__device__ __forceinline__ void multiply_all(const Place<kCodes, kTokens, kWhole>& place, const GemvParams& p,
                                             const Shares& shares, const Part& part, int warpgroup) {
  using P = Place<kCodes, kTokens, kWhole>;
  constexpr int kChunks = kColumns<kCodes> / 32;
  constexpr bool kScalesSums = kWhole && kTokens <= kFewTokens;
  constexpr int kOut = P::kOut, kPitchOfAll = kClusterPitch<kTokens>;
  const int thread = threadIdx.x % 128, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  const int tile_out = p.gated ? kOut / 2 : kOut, block = blockIdx.x, blocks = gridDim.x;
  const int groups = p.in / p.packing.group_size;
  const float per_group = 1.f / p.packing.group_size;
  const bool has_minima = !kWhole && p.packing.minimum != nullptr;
  constexpr int kOwn = kOperands<kTokens>, kAll = kGroups<kTokens> * 128;
  const int own_row = warpgroup * kOwn * kOperandRows + warp * 8 + g;  // of either half of a tile, and for each operand
  auto* staged = reinterpret_cast<float*>(place.bytes + P::kSumsAt) + warpgroup * kOwn * 2 * kPart<kTokens> * kPitch;
  wait_for_inputs();
  let_next_start();

  // Where the thread's codes and scales lie in a stage, kept in registers: nothing tells the compiler how to make them again.
  constexpr int kWords = kBits<kCodes> / 4;  // that eight codes are
  const uint32_t base = __shfl_sync(~0u, place.base, 0);
  const uint32_t codes_at = base + own_row * kRowBytes + 16 * (t ^ g / 2 % 4);  // the copy turns vectors so
  const uint32_t scales_at = base + P::kScalesAt + (t * P::kGroups / 4 * kOut + own_row) * 4;
  auto release = [&](int i) {
    if (thread % 32 == 0) place.read(i % P::kStages).arrive();
  };
  // Of this chunk and those before: of few rows products of a whole stage are under way at once.
  constexpr int kBuffers = kScalesSums && kTokens <= 8 ? kChunks : 2;
  uint32_t numbers[kBuffers][kOwn][8];
  int from_others = -1, to_others = -1;  // tiles that others begin, and that others end
  Cursor begun = part.start;
  for (int i = 0; i < part.count; begun.next_tile(part.token_tiles)) {
    const int first = i, end = min(part.count, i + shares.stages - begun.stage);
    float sum[kOwn][kTokens / 2] = {}, total[kOwn][kTokens / 2] = {};
    float exact[kOwn][2] = {};  // scales
    auto add_sums = [&] {  // of the stage before, whose scales are here
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
      const int group = min(static_cast<int>((stage * kColumns<kCodes> + 0.5f) * per_group), groups - 1);
#pragma unroll
      for (int m = 0; m < kOwn; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int low = begun.out_tile * tile_out + own_row + m * kOperandRows;
          const int row = p.gated ? h * p.out + min(low, p.out - 1) : min(low + h * kOut / 2, p.out - 1);
          zero[m][h] = zero_of<kCodes>(p.packing, row, group, groups);
        }
    };
    if (kWhole && p.packing.zero != nullptr) load_zeros(begun.stage);
    for (; i < end; ++i) {
      const int slot = i % P::kStages;
      const uint32_t stage = slot * P::kStageBytes;
      float own[kOwn][2];
      uint32_t scale[kOwn][2], offset[kOwn][2], minimum[kOwn][2];
      place.there(slot).wait(i / P::kStages & 1);
      Vec<uint32_t, 4> codes[kOwn][2];
#pragma unroll
      for (int m = 0; m < kOwn; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          codes[m][h] = load_shared<4>(codes_at + stage + (h * kOut / 2 + m * kOperandRows) * kRowBytes);
          const uint32_t at = scales_at + stage + (h * kOut / 2 + m * kOperandRows) * 4;
          own[m][h] = __uint_as_float(load_shared<1>(at).data[0]);
          float of_zero = kMiddle<kCodes>;
          if (has_minima) {  // as a zero, and what it lacks: so a rounded scale counts from about 0
            const float least = __uint_as_float(load_shared<1>(at + P::kScaleBytes).data[0]), size = own[m][h];
            of_zero = size == 0.f ? 0.f : fminf(fmaxf(rintf(__fdividef(-least, size)), 0.f), (1 << kBits<kCodes>) - 1);
            const float lacking = fmaf(of_zero, size, least);
            minimum[m][h] = pack<T>(lacking, lacking);
          }
          scale[m][h] = pack<T>(own[m][h], own[m][h]);
          offset[m][h] = offset_of<T, kCodes>(static_cast<int>(of_zero));
        }
      if (kWhole && p.packing.zero != nullptr) {
#pragma unroll
        for (int m = 0; m < kOwn; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) offset[m][h] = offset_of<T, kCodes>(zero[m][h]);
        if (i + 1 < end) load_zeros(begun.stage + i + 1 - first);
      }
      const uint64_t x = by_rows(place.x(slot));
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        auto& now = numbers[chunk % kBuffers];
        if (kScalesSums && chunk == 0) wait_for_products<kBuffers - 1>();  // those of the same numbers
#pragma unroll
        for (int m = 0; m < kOwn; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            uint32_t pairs[4];
            const uint32_t* words = codes[m][h].data + chunk * kWords;
            numbers_of<T, kCodes>(pairs, {words[0], words[kWords - 1]}, offset[m][h]);
#pragma unroll
            for (int k = 0; k < 4; ++k)
              now[m][2 * k + h] = kScalesSums  ? pairs[k]
                                  : has_minima ? product_and_sum<T>(pairs[k], scale[m][h], minimum[m][h])
                                               : product<T>(pairs[k], scale[m][h]);
          }
        if (kScalesSums && chunk == 0) {  // by now they are there
          wait_for_products<0>();
          if (i > first) release(i - 1);
          add_sums();
#pragma unroll
          for (int m = 0; m < kOwn; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) exact[m][h] = own[m][h];
        }
        begin_products();
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int m = 0; m < kOwn; ++m)
            Product<T, kTokens>::template of_registers<false>(
                sum[m], now[m] + 4 * step, x + (chunk / 2 * kTokens * kLine * 2 + chunk % 2 * 64 + step * 32) / 16);
        end_products();
        if (!kScalesSums || kBuffers < kChunks) wait_for_products<1>();
        if (!kScalesSums && chunk == 0 && i > first) release(i - 1);
      }
    }
    wait_for_products<0>();
    if constexpr (kScalesSums) {
      add_sums();
    } else {
#pragma unroll
      for (int m = 0; m < kOwn; ++m)
#pragma unroll
        for (int k = 0; k < kTokens / 2; ++k) total[m][k] = sum[m][k];
    }
    release(end - 1);
    const int first_token = begun.token_tile * kTokens, rows = min(kTokens, p.rows - first_token);
    const int first_output = begun.out_tile * tile_out;
    const bool begins = begun.stage == 0;
    if (kComesArranged<kTokens> && end - first == shares.stages) {
      put_tile<T, kTokens>(p, total[0], first_token, first_output + warpgroup * kOperandRows + warp * 8, kOut / 2);
    } else if (end - first == shares.stages) {
      // One loop, though sums are in registers: what finish() is would be fetched for each piece anew.
      constexpr int kPieces = kTokens / kPart<kTokens>;
#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece) {
        meet(1 + warpgroup, 128);
#pragma unroll
        for (int other = 0; other < kPieces; ++other)
          if (other == piece)
#pragma unroll
            for (int m = 0; m < kOwn; ++m)
#pragma unroll
              for (int j = 0; j < kPart<kTokens> / 8; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                  staged[((2 * m + c / 2) * kPart<kTokens> + 8 * j + 2 * t + c % 2) * kPitch + warp * 8 + g] =
                      total[m][4 * (other * kPart<kTokens> / 8 + j) + c];
        meet(1 + warpgroup, 128);
        constexpr int kFours = kOperandRows / 4, kUnits = kOwn * kPart<kTokens> * kFours;
        constexpr int kUnitsAtOnce = kTokens > 64 ? 2 : 1;
#pragma unroll kUnitsAtOnce
        for (int of = thread; of < (p.gated ? 1 : 2) * kUnits; of += 128) {
          const int half = of / kUnits, m = of % kUnits / (kPart<kTokens> * kFours);
          const int four = of % kFours * 4, token = of / kFours % kPart<kTokens>;
          const int output = first_output + half * kOut / 2 + (warpgroup * kOwn + m) * kOperandRows + four;
          if (piece * kPart<kTokens> + token >= rows || output >= p.out) continue;
          const float* sums = staged + ((2 * m + half) * kPart<kTokens> + token) * kPitch + four;
          float4 ups{};
          if (p.gated) ups = *reinterpret_cast<const float4*>(sums + kPart<kTokens> * kPitch);
          finish<T>(p, first_token + piece * kPart<kTokens> + token, output, *reinterpret_cast<const float4*>(sums), ups);
        }
      }
    } else if (shares.parts > 1) {
      auto* sums = reinterpret_cast<float*>(place.bytes);  // in place of stages, when all have been read
      static_assert(kTokens * kPitchOfAll * 4 <= P::kSumsAt);
      meet(1 + kGroups<kTokens>, kAll);
#pragma unroll
      for (int m = 0; m < kOwn; ++m)
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            sums[(8 * j + 2 * t + c % 2) * kPitchOfAll + own_row + c / 2 * (kOut / 2) + m * kOperandRows] =
                total[m][4 * j + c];
      arrive_at_cluster();
      wait_for_cluster();
      const int fours = tile_out / 4, everybody = threadIdx.x - 128;
      const int each = (rows * fours + shares.parts - 1) / shares.parts, rank = cluster_rank();
#pragma unroll 1
      for (int of = rank * each + everybody; of < min(rows * fours, (rank + 1) * each); of += kAll) {
        const int token = of / fours, four = of % fours * 4;
        if (first_output + four >= p.out) continue;
        const float* from = sums + token * kPitchOfAll + four;
        float4 whole{}, ups{};
        auto add = [](float4& to, const float4& more) { to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w; };
#pragma unroll 4
        for (int other = 0; other < shares.parts; ++other) {
          add(whole, load_from_rank(from, other));
          if (p.gated) add(ups, load_from_rank(from + kOut / 2, other));
        }
        finish<T>(p, first_token + token, first_output + four, whole, ups);
      }
      arrive_only();  // others may still read what is here
      wait_for_cluster();
    } else {
      float* to = shares.partial + (2 * block + begins) * static_cast<int64_t>(kOut * kTokens) + own_row;
#pragma unroll
      for (int m = 0; m < kOwn; ++m)
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int token = 8 * j + 2 * t + c % 2;
            if (token < rows) __stcg(to + token * kOut + c / 2 * (kOut / 2) + m * kOperandRows, total[m][4 * j + c]);
          }
      (begins ? to_others : from_others) = begun.out_tile * part.token_tiles + begun.token_tile;
    }
  }

  // A block leaves all that it has of divided tiles before it waits for others.
  if (from_others < 0 && to_others < 0) return;
  __threadfence();
  meet(1 + kGroups<kTokens>, kAll);
  const int everybody = threadIdx.x - 128;
  auto first_of = [&](int tile) { return shares.owner(tile * shares.stages, blocks); };
  auto count_of = [&](int tile) { return shares.owner((tile + 1) * shares.stages - 1, blocks) - first_of(tile) + 1; };
  auto leave = [&](int tile) {
    if (tile >= 0 && everybody == 0) atomicAdd(shares.counters + first_of(tile), 1);
  };
  auto sum_up = [&](int tile) {
    if (tile < 0) return;
    const int from = first_of(tile), count = count_of(tile);
    if (everybody == 0) {
      int32_t* counter = shares.counters + from;
      while (*static_cast<volatile int32_t*>(counter) < count) {}
      __threadfence();
      if (atomicAdd(counter, 1) == 2 * count - 1) *counter = 0;  // all have seen it
    }
    meet(1 + kGroups<kTokens>, kAll);
    const int first_token = tile % part.token_tiles * kTokens, first_output = tile / part.token_tiles * tile_out;
    const int rows = min(kTokens, p.rows - first_token), fours = tile_out / 4;
#pragma unroll 1
    for (int of = (block - from) * kAll + everybody; of < rows * fours; of += count * kAll) {
      const int token = of / fours, four = of % fours * 4;
      if (first_output + four >= p.out) continue;
      float4 sums{}, ups{};
      auto add = [](float4& to, const float* from) {
        const float4 more = __ldcg(reinterpret_cast<const float4*>(from));
        to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w;
      };
#pragma unroll 4
      for (int other = 0; other < count; ++other) {
        const float* at = shares.partial + (2 * (from + other) + (other == 0)) * static_cast<int64_t>(kOut * kTokens) +
                          token * kOut + four;
        add(sums, at);
        if (p.gated) add(ups, at + kOut / 2);
      }
      finish<T>(p, first_token + token, first_output + four, sums, ups);
    }
  };
  leave(from_others), leave(to_others);
  sum_up(from_others), sum_up(to_others);
}

template <typename T, Codes kCodes, int kTokens, bool kWhole>
__global__ void __launch_bounds__(kThreads<kTokens>, 1)
    packed_gemm_kernel(const __grid_constant__ Maps maps, GemvParams p, Shares shares) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using P = Place<kCodes, kTokens, kWhole>;
  extern __shared__ uint8_t raw[];
  const P place{raw + (-shared_address(raw) & 1023)};
  if (threadIdx.x == 32) fetch_map(maps.weights), fetch_map(maps.x);
  if (threadIdx.x == 64) {
    for (int slot = 0; slot < P::kStages; ++slot) {
      place.there(slot).init(1 + 1);
      place.x_there(slot).init(1);
      place.read(slot).init(kGroups<kTokens> * 4);
    }
    let_copies_see_barriers();
  }
  const Part part(shares);
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be one for a warp
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kComesArranged<kTokens> ? 40 : kGroups<kTokens> == 2 ? 88 : 64));
    const int warp = threadIdx.x / 32;
    if (warp > 1) {
      if constexpr (!kComesArranged<kTokens>) arrange_all(place, part, warp - 2);
    } else if (threadIdx.x == 0) copy_weights(place, maps, p, part);
    else if (threadIdx.x == 32) copy_x(place, maps, part, p.rows);
  } else {
    constexpr int kRegisters = kComesArranged<kTokens> ? 232 : kGroups<kTokens> == 2 ? 208 : 104;
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
    multiply_all<T>(place, p, shares, part, group - 1);
  }
#endif
}

// Rows of x as arrange_all() leaves stages of them, and zeros behind their last column. A thread takes a vector.
template <typename T, Codes kCodes>
__global__ void __launch_bounds__(256) arrange_kernel(T* to, const T* x, int rows, int in, int pitch) {
  constexpr int kWords = kColumns<kCodes> / 2;  // of a stage
  wait_for_inputs();
  let_next_start();
  const int vectors = pitch / 8;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int64_t row = at / vectors;
  if (row >= rows) return;
  const int vector = static_cast<int>(at - row * vectors), column = vector * 8, first = vector * 4 % kWords;
  Vec<uint32_t, 4> words{};
  if (column < in) words = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(x + row * in + column));
  const int t = first / (kWords / 4), chunk = first % (kWords / 4) / 4;
  auto* stage = reinterpret_cast<uint32_t*>(to + row * pitch + column / kColumns<kCodes> * kColumns<kCodes>);
#pragma unroll
  for (int k = 0; k < 4; ++k) stage[(chunk * 2 + k / 2) * 8 + k % 2 * 4 + t] = words.data[k];
}

// How tiles are shared out: as they are, by clusters, or by all blocks evenly.
struct Form {
  int parts;
  bool divides;
};

// That which takes the fewest stages one after the other, those counted that sums cost; clusters[parts] are resident at once.
// kMany: of more than 128 rows of x blocks leave nothing in memory, and each round of clusters costs more.
template <bool kMany>
Form form_of(const std::array<int, kMostParts + 1>& clusters, int tiles, int stages, int places) {
  Form form{1, false};
  int64_t least = int64_t{blocks_for(tiles, places)} * stages;
  auto take = [&](Form other, int64_t cost) {
    if (cost < least) form = other, least = cost;
  };
  if (!kMany) take({1, true}, blocks_for(int64_t{tiles} * stages, places) + kSharesCost);
  for (int parts = 2; parts <= std::min(kMostParts, stages); ++parts)
    if (clusters[parts] > 0) {
      const int64_t rounds = blocks_for(tiles, clusters[parts]);
      take({parts, false}, rounds * blocks_for(stages, parts) + (kMany ? rounds * kManyClusterCost : kClusterCost));
    }
  return form;
}

template <typename T, Codes kCodes, int kTokens, bool kWhole>
cudaError_t run(const GemvParams& p, void* scratch, int32_t* counters, cudaStream_t stream) {
  using P = Place<kCodes, kTokens, kWhole>;
  auto kernel = packed_gemm_kernel<T, kCodes, kTokens, kWhole>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes);
  if (error != cudaSuccess) return error;
  constexpr int kOut = P::kOut;
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(p.in) * kBits<kCodes> / 8, rows = p.gated ? 2 * p.out : p.out;
  cuuint64_t in = p.in;
  const void* x = p.x;
  if constexpr (kComesArranged<kTokens>) {
    const int pitch = static_cast<int>(blocks_for(p.in, kColumns<kCodes>)) * kColumns<kCodes>;
    auto* arranged = static_cast<T*>(scratch);
    const unsigned blocks = blocks_for(static_cast<int64_t>(p.rows) * pitch / 8, 256);
    const cudaError_t error =
        launch(arrange_kernel<T, kCodes>, blocks, 256, 0, stream, arranged, static_cast<const T*>(p.x), p.rows, p.in, pitch);
    if (error != cudaSuccess) return error;
    x = arranged, in = pitch;
  }
  Maps maps;
  if (!map(maps.weights, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_64B, p.weight, {row_bytes, rows}, 1,
           {kRowBytes, static_cast<cuuint32_t>(p.gated ? kOut / 2 : kOut)}) ||
      !map(maps.x, kMapType<T>, CU_TENSOR_MAP_SWIZZLE_128B, x, {in, static_cast<cuuint64_t>(p.rows)}, 2,
           {kLine, kBox<kTokens>}))
    return cudaErrorInvalidValue;
  const int out_tiles = static_cast<int>(blocks_for(p.out, p.gated ? kOut / 2 : kOut));
  const int tiles = out_tiles * static_cast<int>(blocks_for(p.rows, kTokens));
  const int stages = static_cast<int>(blocks_for(p.in, kColumns<kCodes>));
  static const auto clusters = resident_clusters<kMostParts>(kernel, kThreads<kTokens>, P::kBytes);
  const int places = std::min(static_cast<int>(multiprocessors()), kPackedGemmBlocks);
  const Form form = form_of<kComesArranged<kTokens>>(clusters, tiles, stages, places);
  const int blocks = form.parts > 1 ? tiles * form.parts : std::min(places, form.divides ? tiles * stages : tiles);
  const Shares shares{tiles, out_tiles, stages, static_cast<float*>(scratch), counters, form.divides ? 1 : stages, form.parts};
  return cudaLaunchKernelEx(Launch(blocks, kThreads<kTokens>, P::kBytes, stream, form.parts).config(), kernel, maps, p, shares);
}

template <typename T, Codes kCodes, bool kWhole>
cudaError_t of_codes(const GemvParams& p, void* scratch, int32_t* counters, cudaStream_t stream) {
  return p.rows <= 8    ? run<T, kCodes, 8, kWhole>(p, scratch, counters, stream)
         : p.rows <= 16 ? run<T, kCodes, 16, kWhole>(p, scratch, counters, stream)
         : p.rows <= 32 ? run<T, kCodes, 32, kWhole>(p, scratch, counters, stream)
         : p.rows <= 64 ? run<T, kCodes, 64, kWhole>(p, scratch, counters, stream)
         : p.rows <= 128 || !packs_many_on_hopper(p) ? run<T, kCodes, 128, kWhole>(p, scratch, counters, stream)
         : 192 * blocks_for(p.rows, 192) < 256 * blocks_for(p.rows, 256)
             ? run<T, kCodes, 192, kWhole>(p, scratch, counters, stream)
             : run<T, kCodes, 256, kWhole>(p, scratch, counters, stream);
}

// Whether groups are of whole stages, and have no minima.
template <Codes kCodes>
bool has_whole_groups(const GemvParams& p) {
  const int group = p.packing.group_size;
  return (group % kColumns<kCodes> == 0 || group == p.in) && p.packing.minimum == nullptr;
}

template <typename T>
cudaError_t of_type(const GemvParams& p, void* scratch, int32_t* counters, cudaStream_t stream) {
  return with_codes(p.packing.codes, [&](auto codes) {
    constexpr Codes kCodes = codes.value;
    if (has_whole_groups<kCodes>(p)) return of_codes<T, kCodes, true>(p, scratch, counters, stream);
    if constexpr (kCodes == Codes::kFloat8) return cudaErrorInvalidValue;
    else return of_codes<T, kCodes, false>(p, scratch, counters, stream);
  });
}

}  // namespace

bool packs_on_hopper(DType dtype, const GemvParams& p) {
  bool serves = false;  // small groups have no zeros of their own here
  with_codes(p.packing.codes, [&](auto codes) {
    serves = has_whole_groups<codes.value>(p) || (codes.value != Codes::kFloat8 && p.packing.zero == nullptr);
    return cudaSuccess;
  });
  return serves && (dtype == DType::kFloat16 || dtype == DType::kBFloat16) && p.out % 4 == 0 && p.in % 32 == 0 &&
         p.packing.group_size % 32 == 0 && !p.norm && device_property<cudaDevAttrComputeCapabilityMajor>() == 9 &&
         encode() != nullptr;
}

bool packs_many_on_hopper(const GemvParams& p) {
  const bool activates = p.gated ? p.activation == Activation::kSilu || p.activation == Activation::kGeluTanh
                                 : p.activation == Activation::kNone;
  return activates && p.out % 8 == 0 && lies_at(p.x, 16) && lies_at(p.y, 16) && lies_at(p.residual, 16);
}

cudaError_t packed_gemm_on_hopper(DType dtype, const GemvParams& p, void* scratch, int32_t* counters,
                                  cudaStream_t stream) {
  return dtype == DType::kFloat16 ? of_type<__half>(p, scratch, counters, stream)
                                  : of_type<__nv_bfloat16>(p, scratch, counters, stream);
}

}  // namespace llmc::kernels
