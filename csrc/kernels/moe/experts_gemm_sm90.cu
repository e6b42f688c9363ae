// The products of experts for many tokens on Hopper's tensor cores. A tile is kRows rows of an expert's weight, the tensor
// core's first operand, for as many of its pairs as the group has, the second: so a group's size costs in steps of 16, and
// an expert's pairs are divided evenly. kGroups warpgroups multiply 2 × 64 rows each, gates and their ups in one thread.
// One warp copies, 64 columns a stage, of x in the order of pairs. As many blocks as fit take tiles in turn, an expert's
// groups of the same rows one after the other, so weights come from memory once and from the cache after that.
//
// Packed weights come as they lie (experts.cuh), a thread's codes of 16 rows as one vector: they become numbers of 16 bits in
// registers, times their scale, and are the first operand from there while the tensor core multiplies those before. x then
// lies in the order in which codes give their columns, and gates and their ups are rows that follow one another.
//
// Codes of FP8 are the first operand as they lie where x is rounded, codes too: 128 columns a stage, whose sums are multiplied by
// both scales before they are added to the others.
#include <algorithm>

#include "../common/mma.cuh"
#include "../common/wgmma_sm90.cuh"
#include "experts.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using namespace sm90a;

constexpr uint32_t kLineBytes = 128;  // of a row of x, in a stage
template <bool kRounded>
constexpr int kColumns = kRounded ? 128 : 64;  // of a stage
constexpr int kPart = 16;  // pairs that leave at once
constexpr int kPitch = 9;  // vectors from one to the next: 64 rows' numbers, and what keeps banks apart

template <Codes kCodes>
constexpr bool kPacked = kCodes != Codes::kNone;

// Where in shared memory things lie, in bytes from a multiple of 1,024 on. Of packed weights a stage has 16 rows' codes side
// by side, and their scales, of one or two groups; where x is rounded, of one, and the scales of x.
template <Codes kCodes, bool kRounded, int kGroups, int kPairs, int kStages>
struct Place {
  static constexpr int kRows = kGroups * 128, kThreads = (1 + kGroups) * 128, kTiles = kRows / kExpertsRows;
  static constexpr uint32_t kTileBytes =
      kExpertsRows * (kPacked<kCodes> ? kColumns<kRounded> * kBits<kCodes> / 8 : kLineBytes);
  static constexpr uint32_t kWeightBytes = kTiles * kTileBytes;
  static constexpr uint32_t kScalesAt = kWeightBytes + kPairs * kLineBytes;
  static constexpr uint32_t kXScalesAt = kScalesAt + kTiles * kScaleRow<kCodes>, kXScales = kPairs + 4;  // from a whole four on
  static constexpr uint32_t kXScaleBytes = kRounded ? kXScales * 4 : 0;
  static constexpr uint32_t kScaleBytes =
      !kPacked<kCodes> ? 0 : (kTiles * kScaleRow<kCodes> * (kRounded ? 1 : 2) + kXScaleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kStageBytes = kScalesAt + kScaleBytes;
  static constexpr uint32_t kOutAt = kStages * kStageBytes, kOutBytes = 4 * kPart * kPitch * 16;
  static constexpr uint32_t kPairsAt = kOutAt + kGroups * kOutBytes, kBarriersAt = kPairsAt + kGroups * kPairs * 4;
  static constexpr uint32_t kBytes = kBarriersAt + 16 * kStages + 1024;
  static_assert(kPairs % kPart == 0 && kPairs <= 256 && kStageBytes % 1024 == 0);

  uint8_t* bytes;
  uint32_t base = shared_address(bytes);

  __device__ uint32_t weights(int slot) const { return base + slot * kStageBytes; }
  __device__ uint32_t x(int slot) const { return weights(slot) + kWeightBytes; }
  // Of packed weights, a warp's 16 rows; their scales, by group.
  __device__ const uint4* codes(int slot, int tile) const {
    return reinterpret_cast<const uint4*>(bytes + slot * kStageBytes + tile * kTileBytes);
  }
  __device__ const uint8_t* scales(int slot, int tile, int groups) const {
    return bytes + slot * kStageBytes + kScalesAt + tile * groups * kScaleRow<kCodes>;
  }
  __device__ uint32_t x_scales(int slot) const { return weights(slot) + kXScalesAt; }
  // [2 parts][2 operands][kPart][kPitch]: what leaves.
  __device__ uint4* out(int group) const { return reinterpret_cast<uint4*>(bytes + kOutAt + group * kOutBytes); }
  __device__ int* pairs(int group) const { return reinterpret_cast<int*>(bytes + kPairsAt) + group * kPairs; }
  __device__ Barrier there(int slot) const { return {base + kBarriersAt + 8 * slot}; }
  __device__ Barrier read(int slot) const { return {base + kBarriersAt + 8 * (kStages + slot)}; }
};

// A slot of the ring, and how often it has come round.
template <int kStages>
struct Turn {
  int slot = 0;
  uint32_t round = 0;

  __device__ __forceinline__ void go_on() {
    if (++slot == kStages) slot = 0, ++round;
  }
};

struct Tile {
  int expert, out_tile, first, count;
};

// All tiles: an expert's by rows of the weight, and of the same rows by groups, which are alike but for the last.
struct Tiles {
  const Pairs& pairs;
  const int* before;  // groups that come before an expert's
  const int out_tiles;
  int expert = 0;

  // A tile that is not before the one that was asked for last.
  __device__ Tile next(int tile) {
    while (before[expert + 1] * out_tiles <= tile) ++expert;
    const int rest = tile - before[expert] * out_tiles, groups = before[expert + 1] - before[expert];
    const int start = pairs.starts[expert], size = pairs.starts[expert + 1] - start;
    const int each = ((size + groups - 1) / groups + kPart - 1) / kPart * kPart, skipped = rest % groups * each;
    return {expert, rest / groups, start + skipped, min(each, size - skipped)};
  }
};

struct Maps {
  CUtensorMap weights, x, scales, x_scales;
};

// Groups of columns whose scales a stage has, where x is not rounded or groups have as many columns.
__host__ __device__ __forceinline__ int groups_of_stage(const ExpertsPacking& packing) {
  return packing.group_size < kColumns<false> ? 2 : 1;
}

template <bool kDown, Codes kCodes, bool kRounded, int kGroups, int kPairs, int kStages>
__device__ __forceinline__ void copy_all(const Place<kCodes, kRounded, kGroups, kPairs, kStages>& place, const Maps& maps,
                                         const ExpertsParams& p, Tiles tiles, int count, int stages) {
  using P = Place<kCodes, kRounded, kGroups, kPairs, kStages>;
  constexpr int kLine = kColumns<kRounded>;
  const int lane = threadIdx.x % 32;
  auto copy_weights = [&](const Tile& tile, int slot, int stage) {
    const Barrier there = place.there(slot);
    const int rows = (tile.count + kPart - 1) / kPart * kPart;
    if constexpr (kPacked<kCodes>) {
      const ExpertsPacking& packing = kDown ? p.down_packing : p.gate_up_packing;
      const int own_tiles = (kDown ? p.hidden : p.gated ? 2 * p.inner : p.inner) / kExpertsRows;
      const int first = tile.expert * own_tiles + tile.out_tile * P::kTiles;
      const int scales = P::kTiles * groups_of_stage(packing) * kScaleRow<kCodes>;
      there.expect(P::kWeightBytes + rows * kLineBytes + scales + P::kXScaleBytes);
      copy_box(place.weights(slot), maps.weights, there, stage * (P::kTileBytes / 8), first);
      copy_box(place.weights(slot) + P::kScalesAt, maps.scales, there,
               stage * kLine / packing.group_size * kExpertsRows, first);
      return;
    }
    there.expect(P::kWeightBytes + rows * kLineBytes);
    const bool paired = !kDown && p.gated;
    const int first = tile.out_tile * (paired ? P::kRows / 2 : P::kRows);
    copy_box(place.weights(slot), maps.weights, there, stage * kLine, 0, first, tile.expert);
    copy_box(place.weights(slot) + P::kWeightBytes / 2, maps.weights, there, stage * kLine, paired ? 1 : 0,
             paired ? first : first + P::kRows / 2, tile.expert);
  };
  int ahead = 0;  // stages of which the weights are on their way: these do not depend on the kernel before
  if (kDown) {
    if (static_cast<int>(blockIdx.x) < count) {
      const Tile tile = Tiles(tiles).next(blockIdx.x);
      ahead = min(kStages, stages);
      if (lane == 0)
        for (int stage = 0; stage < ahead; ++stage) copy_weights(tile, stage, stage);
    }
    wait_for_inputs();
    let_next_start();
  }
  Turn<kStages> turn;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Tile tile = tiles.next(i);
    for (int stage = 0; stage < stages; ++stage, turn.go_on()) {
      const Barrier there = place.there(turn.slot);
      if (turn.round > 0) place.read(turn.slot).wait(turn.round - 1 & 1);
      if (ahead > 0) --ahead;
      else if (lane == 0) copy_weights(tile, turn.slot, stage);
      __syncwarp();
      const uint32_t to = place.x(turn.slot);
      if (lane * kPart < tile.count)
        copy_box(to + lane * kPart * kLineBytes, maps.x, there, stage * kLine, tile.first + lane * kPart);
      if (kRounded && lane == 31)  // of whole rows all stages have the same scales
        copy_box(place.x_scales(turn.slot), maps.x_scales, there, tile.first & ~3, p.rounded_group == 0 ? 0 : stage);
    }
  }
}

// Of four 8 × 8 matrices, of which a thread has two neighbours each, the columns to rows of shared memory: a lane's is
// that of column lane % 8 of matrix lane / 8.
__device__ __forceinline__ void store_turned(uint4* to, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(to)), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// Of 32 columns, in four vectors, the first words of all, then the second ones and so on: so the tensor core has them where
// packed codes have theirs.
__device__ __forceinline__ uint4 turned_vector(const uint4* row, int vector) {
  const auto* words = reinterpret_cast<const uint32_t*>(row + vector / 4 * 4) + vector % 4;
  return make_uint4(words[0], words[4], words[8], words[12]);
}

// What lies between the products, of sums with their biases: gated sums[0] of gates in sums[0] and ups in sums[1].
__device__ __forceinline__ void finish_columns(const ExpertsParams& p, float (&sums)[2][8]) {
  if (p.gated && p.activation == Activation::kSilu) {  // as it mostly is; all eight at once
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
    sums[0][i] = inner_of(p, sums[0][i], sums[1][i]);
    if (!p.gated) sums[1][i] = inner_of(p, sums[1][i], 0.f);
  }
}

// How the scale of a row's group multiplies its codes' numbers: as two of T.
template <typename T, Codes kCodes>
__device__ __forceinline__ uint32_t scale_of(const uint8_t* scales, int row) {
  const float scale = kCodes == Codes::kMxfp4 ? power_of(scales[row]) : reinterpret_cast<const float*>(scales)[row];
  return pack<T>(scale, scale);
}

// Codes of 32 columns of two rows as the first operands of two products.
template <typename T, Codes kCodes>
__device__ __forceinline__ void operands_of(uint32_t (&made)[8], const uint4& codes, int part, const uint32_t (&scales)[2],
                                            const uint32_t (&offsets)[2]) {
  constexpr bool kFour = kBits<kCodes> == 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint2 words = r == 0 ? make_uint2(codes.x, codes.y) : make_uint2(codes.z, codes.w);
    if (kFour && part == 1) words.x = words.y;
    uint32_t numbers[4];
    numbers_of<T, kCodes>(numbers, words, offsets[r]);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kCodes == Codes::kMxfp4 && std::is_same_v<T, __half>)
        numbers[k] = product<T>(numbers[k], pack<T>(kMxfp4Scale<T>, kMxfp4Scale<T>));
      made[2 * k + r] = product<T>(numbers[k], scales[r]);
    }
  }
}

template <typename T, bool kDown, Codes kCodes, bool kRounded, int kGroups, int kPairs, int kStages>
__device__ __forceinline__ void multiply_all(const Place<kCodes, kRounded, kGroups, kPairs, kStages>& place,
                                             const ExpertsParams& p, const Pairs& pairs, Tiles tiles, int count, int stages,
                                             int group) {
  using P = Place<kCodes, kRounded, kGroups, kPairs, kStages>;
  constexpr int kLine = kColumns<kRounded>;
  const device::Product<T> product(p, pairs, kDown);
  const int thread = threadIdx.x % 128, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  const bool paired = !kDown && p.gated;
  auto meet = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
  uint4* staged = place.out(group);
  int* own_pairs = place.pairs(group);
  Turn<kStages> turn;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Tile tile = tiles.next(i);
    int own[(kPairs + 127) / 128];
#pragma unroll
    for (int k = 0; k < (kPairs + 127) / 128; ++k)
      if (k * 128 + thread < tile.count) own[k] = pairs.order[tile.first + k * 128 + thread];
    float c[2][kPairs / 2] = {};
    auto multiply = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      Turn<kStages> last = turn;
      for (int stage = 0; stage < stages; ++stage) {
        place.there(turn.slot).wait(turn.round & 1);
        const uint64_t weights = by_rows(place.weights(turn.slot) + group * 64 * kLineBytes);
        const uint64_t x = by_rows(place.x(turn.slot));
        begin_products();
#pragma unroll
        for (int k = 0; k < kLine / 16; ++k)
#pragma unroll
          for (int m = 0; m < 2; ++m)
            sm90a::Product<T, kWidth>::of_shared(reinterpret_cast<float(&)[kWidth / 2]>(c[m]),
                                                 weights + (m * kGroups * 64 * kLineBytes + k * 32) / 16,
                                                 x + k * 32 / 16, stage > 0 || k > 0);
        end_products();
        wait_for_products<1>();
        if (stage > 0 && thread % 32 == 0) place.read(last.slot).arrive();
        last = turn;
        turn.go_on();
      }
      wait_for_products<0>();
      if (thread % 32 == 0) place.read(last.slot).arrive();
    };
    auto multiply_packed = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const ExpertsPacking& packing = kDown ? p.down_packing : p.gate_up_packing;
      const int groups = groups_of_stage(packing), all_groups = product.in / packing.group_size;
      const int lane = thread % 32, own_tile = group * 4 + warp;
      constexpr bool kHasZeros = kCodes == Codes::kFour || kCodes == Codes::kEight;
      int zeros[2][2][2];  // of the stage's halves, both operands and both rows
      auto load_zeros = [&](int stage) {
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int row = min(tile.out_tile * P::kRows + (m * kGroups * 4 + own_tile) * kExpertsRows + g + 8 * r,
                                  product.out - 1);
              zeros[part][m][r] = zero_at<kCodes>(packing.zero, int64_t{tile.expert} * product.out + row,
                                                  (stage * kLine + part * 32) / packing.group_size, all_groups);
            }
      };
      [[maybe_unused]] const bool has_zeros = kHasZeros && packing.zero != nullptr;
      if constexpr (kHasZeros)
        if (has_zeros) load_zeros(0);
      uint32_t operands[2][8];  // of these columns and those before
      Turn<kStages> last = turn;
      for (int stage = 0; stage < stages; ++stage) {
        place.there(turn.slot).wait(turn.round & 1);
        constexpr int kVectors = P::kTileBytes / 512;
        uint4 codes[2][kVectors];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int v = 0; v < kVectors; ++v) codes[m][v] = place.codes(turn.slot, m * kGroups * 4 + own_tile)[v * 32 + lane];
        const uint64_t x = by_rows(place.x(turn.slot));
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const uint8_t* scales = place.scales(turn.slot, m * kGroups * 4 + own_tile, groups) +
                                    (part < groups ? part : 0) * kScaleRow<kCodes>;
            uint32_t offsets[2] = {offset_of<T, kCodes>(kMiddle<kCodes>), offset_of<T, kCodes>(kMiddle<kCodes>)};
            if constexpr (kHasZeros)
#pragma unroll
              for (int r = 0; r < 2; ++r) offsets[r] = offset_of<T, kCodes>(has_zeros ? zeros[part][m][r] : kMiddle<kCodes>);
            operands_of<T, kCodes>(operands[m], codes[m][kVectors == 2 ? part : 0], part,
                                   {scale_of<T, kCodes>(scales, g), scale_of<T, kCodes>(scales, g + 8)}, offsets);
            begin_products();
#pragma unroll
            for (int step = 0; step < 2; ++step)
              sm90a::Product<T, kWidth>::template of_registers<false>(reinterpret_cast<float(&)[kWidth / 2]>(c[m]),
                                                                      operands[m] + 4 * step,
                                                                      x + (part * 64 + step * 32) / 16);
            end_products();
            wait_for_products<1>();
            if (part == 0 && m == 0 && stage > 0 && lane == 0) place.read(last.slot).arrive();
          }
        if constexpr (kHasZeros)
          if (has_zeros && stage + 1 < stages) load_zeros(stage + 1);
        last = turn;
        turn.go_on();
      }
      wait_for_products<0>();
      if (lane == 0) place.read(last.slot).arrive();
    };
    auto multiply_codes = [&](auto width) {
      constexpr int kWidth = decltype(width)::value, kAtOnce = kWidth <= 64 ? 2 : 1;  // operands whose sums a thread has room for
      const int lane = thread % 32, own_tile = group * 4 + warp;
      for (int stage = 0; stage < stages; ++stage, turn.go_on()) {
        place.there(turn.slot).wait(turn.round & 1);
        const uint64_t x = by_rows(place.x(turn.slot));
        const uint32_t x_scales = place.x_scales(turn.slot) + (tile.first % 4 + 2 * t) * 4;
#pragma unroll
        for (int first = 0; first < 2; first += kAtOnce) {
          uint4 codes[kAtOnce][kLine / 32];
          float sum[kAtOnce][kWidth / 2], scales[kAtOnce][2];
#pragma unroll
          for (int m = 0; m < kAtOnce; ++m) {
            const int of = (first + m) * kGroups * 4 + own_tile;
#pragma unroll
            for (int v = 0; v < kLine / 32; ++v) codes[m][v] = place.codes(turn.slot, of)[v * 32 + lane];
#pragma unroll
            for (int r = 0; r < 2; ++r) scales[m][r] = reinterpret_cast<const float*>(place.scales(turn.slot, of, 1))[g + 8 * r];
          }
          begin_products();
#pragma unroll
          for (int m = 0; m < kAtOnce; ++m)
#pragma unroll
            for (int v = 0; v < kLine / 32; ++v)
              sm90a::Product<Float8, kWidth>::of_registers(
                  sum[m], {codes[m][v].x, codes[m][v].z, codes[m][v].y, codes[m][v].w}, x + v * 32 / 16, v > 0);
          end_products();
          wait_for_products<0>();
#pragma unroll
          for (int j = 0; j < kWidth / 8; ++j) {
            float of_x[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
              of_x[i] = __uint_as_float(load_shared<1>(x_scales + (8 * j + i) * 4).data[0]);
#pragma unroll
            for (int m = 0; m < kAtOnce; ++m)
#pragma unroll
              for (int i = 0; i < 4; ++i)
                c[first + m][4 * j + i] = fmaf(sum[m][4 * j + i], scales[m][i / 2] * of_x[i % 2],
                                               c[first + m][4 * j + i]);
          }
        }
        if (lane == 0) place.read(turn.slot).arrive();
      }
    };
    const int parts = (tile.count + kPart - 1) / kPart;
    auto choose = [&](auto self, auto width) {
      constexpr int kWidth = decltype(width)::value;
      if (kWidth == kPairs || parts * kPart <= kWidth) {
        if constexpr (kRounded) multiply_codes(width);
        else if constexpr (kPacked<kCodes>) multiply_packed(width);
        else multiply(width);
        return;
      }
      constexpr int kNext = !kPacked<kCodes> ? kWidth + kPart : 2 * kWidth < kPairs ? 2 * kWidth : kPairs;
      if constexpr (kWidth < kPairs) self(self, std::integral_constant<int, kNext>());
    };
    choose(choose, std::integral_constant<int, kPart>());

    // What a warp's rows become leaves by shared memory, kPart pairs at a time, where it is turned.
    const bool apart = paired && !kPacked<kCodes>;  // gates and ups are operands of their own
    const int row = tile.out_tile * (apart ? P::kRows / 2 : P::kRows) + group * 64;  // the first of these 64
    const int width = paired ? product.out / 2 : product.out;                        // of what is written
    float bias[2][2] = {};
    if (product.bias != nullptr) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int own_row = row + warp * 16 + 8 * r + g, of = apart ? 2 * own_row + m : own_row + m * P::kRows / 2;
          bias[m][r] = product.bias_of(tile.expert, min(of, product.out - 1));
        }
    }
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      float own_sums[2][8];
#pragma unroll
      for (int k = 0; k < kPairs / kPart; ++k)
        if (k == part)
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 8; ++i) own_sums[m][i] = c[m][8 * k + i];
      if (part == 0) {
#pragma unroll
        for (int k = 0; k < (kPairs + 127) / 128; ++k)
          if (k * 128 + thread < tile.count) own_pairs[k * 128 + thread] = own[k];
      }
      if (!kDown && p.scale_input) {
        if (part == 0) meet();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int token = part * kPart + i / 4 * 8 + 2 * t + i % 2;
          const float score = token < tile.count ? p.scores[own_pairs[token]] : 0.f;
          own_sums[0][i] *= score, own_sums[1][i] *= score;
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 8; ++i) own_sums[m][i] += bias[m][i / 2 % 2];
      if (paired && !apart) {  // of two neighbours one has the gates and ups of a row each, the other those of a later one
        float turned[2][8];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float first = own_sums[m][i / 2 * 4 + i % 2], second = own_sums[m][i / 2 * 4 + 2 + i % 2];
            const float other = __shfl_xor_sync(~0u, g % 2 ? first : second, 4);
            turned[0][4 * m + i] = g % 2 ? other : first, turned[1][4 * m + i] = g % 2 ? second : other;
          }
#pragma unroll
        for (int i = 0; i < 8; ++i) own_sums[0][i] = turned[0][i], own_sums[1][i] = turned[1][i];
      }
      if (!kDown) finish_columns(p, own_sums);
      uint4* to = staged + part % 2 * 2 * kPart * kPitch;
      if (paired && !apart) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int m = i / 4, token = i / 2 % 2 * 8 + 2 * t + i % 2, column = warp * 8 + g / 2 + g % 2 * 4;
          reinterpret_cast<T*>(to + (m * kPart + token) * kPitch)[column] = from_float<T>(own_sums[0][i]);
        }
      } else {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (m == 1 && paired) break;
          uint32_t words[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) words[k] = pack<T>(own_sums[m][2 * k], own_sums[m][2 * k + 1]);
          const int lane = thread % 32;
          store_turned(to + (m * kPart + lane / 16 * 8 + lane % 8) * kPitch + warp * 2 + lane / 8 % 2, words);
        }
      }
      meet();
      const int vector = thread % 8, pair = part * kPart + thread / 8;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int first_row = row + m * P::kRows / 2, column = (paired && !apart ? first_row / 2 : first_row) + 8 * vector;
        if ((m == 1 && apart) || (paired && !apart && vector >= 4) || pair >= tile.count || column >= width) continue;
        T* target = kDown ? static_cast<T*>(pairs.made) + static_cast<int64_t>(own_pairs[pair]) * p.hidden
                          : static_cast<T*>(pairs.inner) + static_cast<int64_t>(tile.first + pair) * p.inner;
        const uint4* from = to + (m * kPart + thread / 8) * kPitch;
        constexpr bool kTurned = !kDown && kPacked<kCodes> && !kRounded;
        *reinterpret_cast<uint4*>(target + column) = kTurned ? turned_vector(from, vector) : from[vector];
      }
    }
    meet();  // before what leaves next
  }
}

template <typename T, bool kDown, Codes kCodes, bool kRounded, int kGroups, int kPairs, int kStages, int kBlocks>
__global__ void __launch_bounds__((1 + kGroups) * 128, kBlocks)
    grouped_kernel(const __grid_constant__ Maps maps, const __grid_constant__ ExpertsParams p,
                   const __grid_constant__ Pairs pairs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using P = Place<kCodes, kRounded, kGroups, kPairs, kStages>;
  extern __shared__ uint8_t raw[];
  __shared__ int before[kMostExperts + 1];
  const P place{raw + (-shared_address(raw) & 1023)};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kStages; ++slot) {
      place.there(slot).init(1);
      place.read(slot).init(kGroups * 4);
    }
    let_copies_see_barriers();
  }
  if (!kDown) {
    wait_for_inputs();
    let_next_start();
  }
  const device::Product<T> product(p, pairs, kDown);
  const int out_tiles = (product.out + P::kRows - 1) / P::kRows;
  const int stages = (product.in + kColumns<kRounded> - 1) / kColumns<kRounded>;
  const int count = Groups(p, pairs, before, kPairs).template count<P::kThreads>() * out_tiles;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be one for a warp
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) copy_all<kDown>(place, maps, p, Tiles{pairs, before, out_tiles}, count, stages);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kGroups == 1 ? 216 : 232));
    if (kDown) {
      wait_for_inputs();
      let_next_start();
    }
    multiply_all<T, kDown>(place, p, pairs, Tiles{pairs, before, out_tiles}, count, stages, group - 1);
  }
#endif
}

// Rows of x by place, where `made` will be: a block for each token.
template <bool kTurned>
__global__ void __launch_bounds__(128) sort_x_kernel(ExpertsParams p, Pairs pairs) {
  wait_for_inputs();
  let_next_start();
  const int vectors = p.hidden / 8, first = blockIdx.x * p.top_k;
  const uint4* from = static_cast<const uint4*>(p.x) + static_cast<int64_t>(blockIdx.x) * vectors;
  for (int i = threadIdx.x; i < vectors; i += 128) {
    const uint4 vector = kTurned ? turned_vector(from + i / 8 * 8, i % 8) : from[i];
    for (int choice = 0; choice < p.top_k; ++choice) {
      const int place = pairs.places[first + choice];
      if (place >= 0) static_cast<uint4*>(pairs.made)[static_cast<int64_t>(place) * vectors + i] = vector;
    }
  }
}

template <typename T, bool kDown, Codes kCodes, bool kRounded, int kGroups, int kPairs, int kStages, int kBlocks>
cudaError_t run_tiles(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  using P = Place<kCodes, kRounded, kGroups, kPairs, kStages>;
  constexpr int kLine = kColumns<kRounded>;
  auto kernel = grouped_kernel<T, kDown, kCodes, kRounded, kGroups, kPairs, kStages, kBlocks>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes);
  if (error != cudaSuccess) return error;
  const device::Product<T> product(p, pairs, kDown);
  const cuuint64_t in = product.in, pairs_count = static_cast<cuuint64_t>(p.num_tokens) * p.top_k;
  const cuuint64_t of_each = !kDown && p.gated ? 2 : 1, experts = p.num_experts;
  Maps maps;
  bool made;
  if constexpr (kRounded) {
    const RoundedRows x = rounded_rows(p, pairs, kDown);
    const auto pitch = static_cast<cuuint64_t>(x.pitch), groups = static_cast<cuuint64_t>(x.groups);
    made = map<2>(maps.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, x.codes, {in, pairs_count}, 1,
                  {kLine, kPart}) &&
           map<2>(maps.x_scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE, x.scales, {pitch, groups}, 4,
                  {P::kXScales, 1});
  } else {
    made = map<2>(maps.x, kMapType<T>, CU_TENSOR_MAP_SWIZZLE_128B, kDown ? product.x : pairs.made, {in, pairs_count}, sizeof(T),
                  {kLine, kPart});
  }
  if constexpr (kPacked<kCodes>) {
    constexpr cuuint32_t kTiles = P::kTiles;
    const ExpertsPacking& packing = kDown ? p.down_packing : p.gate_up_packing;
    const cuuint64_t tiles = experts * (product.out / kExpertsRows), groups = in / packing.group_size;
    const cuuint32_t scales = groups_of_stage(packing) * kExpertsRows;
    constexpr bool kBytes = kCodes == Codes::kMxfp4;
    made = made &&
           map<2>(maps.weights, CU_TENSOR_MAP_DATA_TYPE_INT64, CU_TENSOR_MAP_SWIZZLE_NONE, product.weight,
                  {in / kLine * (P::kTileBytes / 8), tiles}, 8, {P::kTileBytes / 8, kTiles}) &&
           map<2>(maps.scales, kBytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                  CU_TENSOR_MAP_SWIZZLE_NONE, packing.scale, {groups * kExpertsRows, tiles}, kBytes ? 1 : 4, {scales, kTiles});
  } else {
    made = made && map<4>(maps.weights, kMapType<T>, CU_TENSOR_MAP_SWIZZLE_128B, product.weight,
                          {in, of_each, product.out / of_each, experts}, sizeof(T), {kLine, 1, P::kRows / 2, 1});
  }
  if (!made) return cudaErrorInvalidValue;
  const int64_t groups = std::min<int64_t>(pairs_count, pairs_count / kPairs + p.num_experts);
  const int64_t tiles = groups * blocks_for(product.out, P::kRows), places = int64_t{kBlocks} * multiprocessors();
  return launch(kernel, static_cast<unsigned>(std::min(tiles, places)), P::kThreads, P::kBytes, stream, maps, p, pairs);
}

template <typename T, Codes kCodes, bool kRounded, int kGroups, int kPairs, int kStages, int kBlocks>
cudaError_t run_both(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if constexpr (!kRounded) error = launch(sort_x_kernel<kPacked<kCodes>>, p.num_tokens, 128, 0, stream, p, pairs);
  if (error == cudaSuccess) error = run_tiles<T, false, kCodes, kRounded, kGroups, kPairs, kStages, kBlocks>(p, pairs, stream);
  if (error == cudaSuccess)
    error = round_inner(kDType<T>, p, pairs, kRounded ? Rounding::kCodes : Rounding::kNumbers, stream);
  return error != cudaSuccess ? error : run_tiles<T, true, kCodes, kRounded, kGroups, kPairs, kStages, kBlocks>(p, pairs, stream);
}

// By how many pairs an expert has on average: a group of its tile, which is multiplied at once, should have room for most.
template <typename T>
cudaError_t run_type(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const int64_t each = static_cast<int64_t>(p.num_tokens) * p.top_k / p.num_experts;
  if (multiplies_codes(p))
    return each <= 32 ? run_both<T, Codes::kFloat8, true, 1, 64, 3, 2>(p, pairs, stream)
                      : run_both<T, Codes::kFloat8, true, 2, 96, 4, 1>(p, pairs, stream);
  if (p.gate_up_packing.codes != Codes::kNone)
    return with_expert_codes(p.gate_up_packing.codes, [&](auto codes) {
      constexpr Codes kCodes = codes.value;
      constexpr bool kFour = kBits<kCodes> == 4;
      return each <= 32 ? run_both<T, kCodes, false, 1, 64, kFour ? 7 : 5, 2>(p, pairs, stream)
                        : run_both<T, kCodes, false, 2, 128, kFour ? 6 : 5, 1>(p, pairs, stream);
    });
  if (each <= 32) return run_both<T, Codes::kNone, false, 1, 64, 4, 2>(p, pairs, stream);
  if (each <= 160) return run_both<T, Codes::kNone, false, 2, 144, 4, 1>(p, pairs, stream);
  return run_both<T, Codes::kNone, false, 2, 128, 4, 1>(p, pairs, stream);
}

}  // namespace

bool serves_experts_on_hopper(const ExpertsParams& p) {
  const bool packed = p.gate_up_packing.codes != Codes::kNone;
  if (packed && (p.hidden % kColumns<false> != 0 || p.inner % kColumns<false> != 0)) return false;
  return p.num_tokens > 1 && device_property<cudaDevAttrComputeCapabilityMajor>() == 9 && encode() != nullptr;
}

cudaError_t many_experts_on_hopper(DType dtype, const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  if (p.hidden % 8 != 0 || p.inner % 8 != 0) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, pairs, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
