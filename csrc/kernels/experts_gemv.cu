// The products of experts for few tokens, where reading the weights of those that were chosen is all the work.
//
// A tile is 16 rows of one expert's weight, for a group of its pairs: all of them where tokens are no more than a group
// takes, as a token's choices differ. As many blocks as fit take tiles in turn. A block's warps divide the inner
// dimension; the weights of a warp's next kStages chunks, whichever tile they are of, are under way to shared memory all
// the time, past L1, where x stays. What a thread copies is what it reads back, as the tensor core wants it: of weights of
// 16 bits 16 bytes of rows g and g + 8, of packed ones a vector of the tile (experts.cuh), with which the scales of the
// chunk come. A gate and what it gates are rows that follow one another, so the same tile. The tensor core sums up a step
// of at most one group of columns; the group's scale multiplies that sum, in float32, so nothing is rounded but x and y. Where x
// is rounded to FP8 a block makes codes of its rows for itself, in shared memory, while weights are under way; and both become
// float16, in which they are exact, by an instruction for a pair.
//
// Which experts were chosen each block finds out by itself: it counts all pairs in shared memory and lists the groups. So
// nothing runs before these two kernels, and of the second product weights are under way before the first has ended.
// Reads the weights of every expert that was chosen once for each group.
//
// Of 16 bits and few pairs the second product may be another kernel, which sums up a token's choices too: summed_kernel.
#include <algorithm>
#include <utility>

#include "experts.cuh"
#include "gemv.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kUnroll = 4;  // steps in a chunk
constexpr int kStages = 2;  // chunks under way
constexpr int kRarePairs = 4;      // of an expert on average: groups of 8 are enough
constexpr int kFewestPairs = 128;  // that take little shared memory
constexpr int kRoundedPairs = 4;   // of a group, where a block makes codes of x
constexpr int kSummedPairs = 32, kSummedWarps = 16;  // of summed_kernel: at most; in a block

// A group in a word: its expert, its first place in the order of pairs, and how many they are.
constexpr int kPlaceBits = 12, kCountBits = 5;
static_assert(kMostExperts <= 1 << (32 - kPlaceBits - kCountBits) && kFewExpertPairs <= 1 << kPlaceBits);
__device__ __forceinline__ uint32_t word_of(const Group& group) {
  return group.expert << (kPlaceBits + kCountBits) | group.first << kCountBits | group.count;
}
__device__ __forceinline__ Group group_of(uint32_t word) {
  return {static_cast<int>(word >> (kPlaceBits + kCountBits)),
          static_cast<int>(word >> kCountBits & ((1u << kPlaceBits) - 1)), static_cast<int>(word & ((1u << kCountBits) - 1))};
}

// The groups of `per` pairs of one expert at most, and pairs in their order: how many groups there are. `counts` is shared,
// two for each expert; so are list and order, one for each pair.
template <int kThreads>
__device__ __forceinline__ int list_groups(const ExpertsParams& p, int per, uint32_t* list, uint16_t* order, uint32_t* counts) {
  __shared__ uint32_t totals[kThreads / 32];
  const int all = p.num_tokens * p.top_k, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (all <= 32) {  // a lane for each pair, of which an expert's first has the group
    if (warp == 0) {
      const int expert = lane < all ? expert_of(p, lane) : -1;
      const uint32_t alike = __match_any_sync(~0u, expert), lower = (1u << lane) - 1;
      const int count = __popc(alike), leader = __ffs(alike) - 1;
      const bool leads = expert >= 0 && leader == lane;
      const uint32_t leaders = __ballot_sync(~0u, leads);
      int first = leads ? count : 0;  // pairs of groups up to this one
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(~0u, first, distance);
        if (lane >= distance) first += before;
      }
      first = __shfl_sync(~0u, first, leader) - count;
      if (leads) list[__popc(leaders & lower)] = word_of({expert, first, count});
      if (expert >= 0) order[first + __popc(alike & lower)] = static_cast<uint16_t>(lane);
      const bool fits = __all_sync(~0u, expert < 0 || count <= per);
      if (lane == 0) totals[0] = fits ? __popc(leaders) : ~0u;
    }
    __syncthreads();
    if (totals[0] != ~0u) return static_cast<int>(totals[0]);
  }
  for (int expert = threadIdx.x; expert < p.num_experts; expert += kThreads) counts[expert] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < all; pair += kThreads) {
    const int expert = expert_of(p, pair);
    if (expert >= 0) list[pair] = atomicAdd(counts + expert, 1u);  // its place among the expert's
  }
  __syncthreads();
  uint32_t* before = counts + p.num_experts;
  bool more = false;
  for (int expert = threadIdx.x; expert < p.num_experts; expert += kThreads)
    more |= counts[expert] > static_cast<uint32_t>(per), before[expert] = 0;
  if (__syncthreads_or(more)) {  // not any order: blocks must agree on which pairs are in which of an expert's groups
    for (int begin = 0; warp == 0 && begin < all; begin += 32) {
      const int pair = begin + lane, expert = pair < all ? expert_of(p, pair) : -1;
      const uint32_t alike = __match_any_sync(~0u, expert);
      const int lower = __popc(alike & ((1u << lane) - 1));
      if (expert >= 0) list[pair] = before[expert] + lower;
      __syncwarp();
      if (expert >= 0 && lower == 0) before[expert] += __popc(alike);
      __syncwarp();
    }
    __syncthreads();
  }
  // What comes before: pairs, and groups in the upper half.
  const int each = (p.num_experts + kThreads - 1) / kThreads, begin = min(static_cast<int>(threadIdx.x) * each, p.num_experts);
  const int end = min(begin + each, p.num_experts);
  auto worth = [&](uint32_t pairs) { return pairs | (pairs + per - 1) / per << 16; };
  uint32_t own = 0;
  for (int expert = begin; expert < end; ++expert) own += worth(counts[expert]);
  uint32_t at = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t lower = __shfl_up_sync(~0u, at, distance);
    if (lane >= distance) at += lower;
  }
  if (lane == 31) totals[warp] = at;
  __syncthreads();
  at -= own;
  uint32_t total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w == warp) at += total;
    total += totals[w];
  }
  for (int expert = begin; expert < end; ++expert) before[expert] = at, at += worth(counts[expert]);
  __syncthreads();
  for (int pair = threadIdx.x; pair < all; pair += kThreads) {
    const int expert = expert_of(p, pair);
    if (expert >= 0) order[(before[expert] & 0xffff) + list[pair]] = static_cast<uint16_t>(pair);
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < p.num_experts; expert += kThreads) {
    const int first = before[expert] & 0xffff, count = counts[expert];
    for (int skipped = 0; skipped < count; skipped += per)
      list[(before[expert] >> 16) + skipped / per] = word_of({expert, first + skipped, min(per, count - skipped)});
  }
  __syncthreads();
  return static_cast<int>(total >> 16);
}

// Of a chunk of a warp's, in bytes: its vectors, and behind them the scales of its groups.
template <Codes kCodes>
constexpr int kVectors = kCodes == Codes::kNone ? 2 : 1;  // of a thread in a step
template <Codes kCodes>
constexpr int kScaleBytes = kCodes == Codes::kNone ? 0 : kCodes == Codes::kMxfp4 ? 128 : kBits<kCodes> == 4 ? 512 : 256;
template <Codes kCodes>
constexpr int kSlotBytes = kUnroll * kVectors<kCodes> * 512 + kScaleBytes<kCodes>;

// How groups of packed weights are: of 32 columns; with zeros; of kBlock, for x that is rounded.
enum class Grouping { kPlain, kSmall, kZeros, kSmallAndZeros, kRounded };

// Bytes of the list of groups and of the order of pairs; these, of few, have as much room as of many.
__host__ __device__ __forceinline__ int order_bytes(int pairs) {
  return 6 * (pairs <= kFewestPairs ? kFewestPairs : kFewExpertPairs);
}

// Rows of x of a group as codes, whose columns lie as those of packed codes, and their scales: in shared memory.
template <typename T, int kWarps>
struct RoundedX {
  static constexpr int kPad = 32;  // bytes between rows, which then share no banks
  uint8_t* at;                     // scales [width / kBlock][kRoundedPairs], then rows of codes
  int width, group;

  __host__ __device__ static constexpr int bytes(int rows, int width) {
    return width / kBlock * kRoundedPairs * 4 + rows * (width + kPad);
  }
  __device__ uint8_t* row(int row) const { return at + bytes(row, width); }
  __device__ float& scale(int row, int group) const {
    return reinterpret_cast<float*>(at)[(this->group == 0 ? 0 : group) * kRoundedPairs + row];
  }

  // By all threads of the block; who reads it waits for them.
  __device__ __forceinline__ void make(int row, const T* x) const {
    constexpr int kThreads = kWarps * 32, kUnit = 8, kHalf = kBlock / kUnit;
    __shared__ float of_warps[kWarps];
    float numbers[kUnit];
    auto measure = [&](int unit) {
      const auto own = load<T, kUnit>(x + unit * kUnit);
#pragma unroll
      for (int k = 0; k < kUnit; ++k) numbers[k] = to_float(own.data[k]);
      return most_of(numbers);
    };
    float whole = 0;
    if (group == 0) {
      for (int unit = threadIdx.x; unit < width / kUnit; unit += kThreads) whole = fmaxf(whole, measure(unit));
      whole = most_of_warp(whole);
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = whole;
      __syncthreads();
      for (float other : of_warps) whole = fmaxf(whole, other);
      __syncthreads();  // before the next row's
    }
    for (int unit = threadIdx.x; unit < width / kUnit; unit += kThreads) {
      const float own = measure(unit), step = step_of_codes(group == 0 ? whole : most_of_half_warp(own));
      if (group == 0 ? unit == 0 : unit % kHalf == 0) scale(row, unit / kHalf) = step;
      *reinterpret_cast<uint2*>(this->row(row) + unit * kUnit) = unit_of_codes(numbers, 1 / step);
    }
  }
};

// kTiles: 8 pairs each in a group.
template <typename T, Codes kCodes, int kWarps, int kTiles, bool kDown, Grouping kGrouping>
__global__ void __launch_bounds__(kWarps * 32, (kTiles == 1 ? 24 : 16) / kWarps) experts_gemv_kernel(const __grid_constant__ ExpertsParams p,
                                                                   const __grid_constant__ Pairs pairs) {
  constexpr bool kPacked = kCodes != Codes::kNone, kRounded = kGrouping == Grouping::kRounded;
  constexpr bool kSmall = kGrouping == Grouping::kSmall || kGrouping == Grouping::kSmallAndZeros;
  constexpr bool kZeros = kGrouping == Grouping::kZeros || kGrouping == Grouping::kSmallAndZeros;
  using Number = std::conditional_t<kRounded, __half, T>;  // of both operands
  constexpr int kThreads = kWarps * 32, kPairs = kRounded ? kRoundedPairs : kTiles * 8, kRows = kExpertsRows;
  constexpr int kStep = kExpertsStep<kCodes>, kParts = kStep / 32;  // columns
  constexpr int kAhead = kTiles == 1 ? kUnroll : 1;                 // steps whose x is read before their weights are there
  // Rings of kStages slots of each warp; then the list of groups, and the order of pairs; then x, where it is rounded.
  extern __shared__ uint4 shared[];
  __shared__ float partial[2][kWarps][kRows][kTiles * 8 + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  char* ring = reinterpret_cast<char*>(shared) + warp * kStages * kSlotBytes<kCodes>;
  auto* list = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(shared) + kWarps * kStages * kSlotBytes<kCodes>);
  auto* order = reinterpret_cast<uint16_t*>(list + p.num_tokens * p.top_k);
  const RoundedX<T, kWarps> rounded{reinterpret_cast<uint8_t*>(shared) + kWarps * kStages * kSlotBytes<kCodes> +
                                        order_bytes(p.num_tokens * p.top_k),
                                    kDown ? p.inner : p.hidden, p.rounded_group};
  if (!kDown) {
    wait_for_inputs();
    let_next_start();
  }
  const Product<T> product(p, pairs, kDown);
  const ExpertsPacking& packing = kDown ? p.down_packing : p.gate_up_packing;
  const int out_tiles = (product.out + kRows - 1) / kRows;
  const int tiles = list_groups<kThreads>(p, kPairs, list, order, reinterpret_cast<uint32_t*>(shared)) * out_tiles;
  // A warp's steps.
  const int steps = (product.in + kStep - 1) / kStep, share = (steps + kWarps - 1) / kWarps;
  const int begin = warp * share, end = min(begin + share, steps), chunks = (share + kUnroll - 1) / kUnroll;
  const int groups = kPacked ? product.in / packing.group_size : 1;
  const int shift = kSmall ? 5 : kPacked ? 31 - __clz(packing.group_size) : 0;
  auto scale_group = [&](int step) { return kSmall ? step * kParts : step * kStep >> shift; };

  // The copies are ahead of the products: their own place in the sequence of tiles and chunks.
  struct {
    int tile, chunk, slot;
    const char *low, *high, *scales;
  } ahead{static_cast<int>(blockIdx.x), 0, 0, nullptr, nullptr, nullptr};
  auto find_rows = [&] {
    if (ahead.tile >= tiles) return;
    const int expert = group_of(list[ahead.tile / out_tiles]).expert, tile = ahead.tile % out_tiles;
    if constexpr (kPacked) {
      const int64_t of_all = static_cast<int64_t>(expert) * out_tiles + tile;
      ahead.low = static_cast<const char*>(kDown ? p.down : p.gate_up) + of_all * steps * 512 + lane * 16;
      ahead.scales = static_cast<const char*>(packing.scale) + of_all * groups * kScaleRow<kCodes> + lane * 16;
    } else {
      ahead.low = reinterpret_cast<const char*>(product.row_of_weight(expert, tile * kRows + g) + 8 * t);
      ahead.high = reinterpret_cast<const char*>(product.row_of_weight(expert, tile * kRows + g + 8) + 8 * t);
    }
  };
  auto copy_chunk = [&] {
    if (ahead.tile < tiles) {
      const int first = begin + ahead.chunk * kUnroll;
      char* slot = ring + ahead.slot;
      uint4* to = reinterpret_cast<uint4*>(slot) + lane;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int step = first + u;
        if constexpr (kPacked) {
          if (step < end) start_copy(to + u * 32, ahead.low + static_cast<int64_t>(step) * 512, true);
        } else {
          const bool there = step < end && step * kStep + 8 * t < product.in;
          const int at = there ? step * kStep * static_cast<int>(sizeof(T)) : 0;
          start_copy(to + 2 * u * 32, ahead.low + at, there);
          start_copy(to + (2 * u + 1) * 32, ahead.high + at, there);
        }
      }
      if (kPacked && first < end) {
        const int from = scale_group(first), last = scale_group(min(first + kUnroll, end) - 1) + (kSmall ? kParts - 1 : 0);
        if (lane * 16 < (last - from + 1) * kScaleRow<kCodes>)
          start_copy(reinterpret_cast<uint4*>(slot + kUnroll * 512) + lane, ahead.scales + from * kScaleRow<kCodes>, true);
      }
      ahead.slot = ahead.slot + kSlotBytes<kCodes> == kStages * kSlotBytes<kCodes> ? 0 : ahead.slot + kSlotBytes<kCodes>;
      if (++ahead.chunk == chunks) {
        ahead.chunk = 0;
        ahead.tile += gridDim.x;
        find_rows();
      }
    }
    end_group();
  };
  find_rows();
  for (int i = 0; i < kStages; ++i) copy_chunk();
  if (kDown) {
    wait_for_inputs();
    let_next_start();
  }

  const uint4 zero = make_uint4(0, 0, 0, 0);
  int slot = 0, turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    const Group group = group_of(list[tile / out_tiles]);
    const int first_row = tile % out_tiles * kRows;
    // Pairs behind the last repeat it, and lead to columns that are not written.
    auto row_of_x = [&](int of_group) {
      const int pair = order[group.first + min(of_group, group.count - 1)];
      return kDown ? pair : pair / p.top_k;
    };
    const T* x[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      x[n] = product.x + static_cast<int64_t>(row_of_x(n * 8 + g)) * product.in + 8 * t;
    if constexpr (kRounded) {
      if (kDown || p.num_tokens > 1 || turn == 0)
        for (int row = 0; row < group.count; ++row)
          rounded.make(row, product.x + static_cast<int64_t>(row_of_x(row)) * product.in);
      __syncthreads();
    }
    const int last_row = group.count - 1;
    float sum[kTiles][4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int first = begin + chunk * kUnroll;
      auto x_of = [&](int n, int column) {
        if constexpr (kRounded) {
          return *reinterpret_cast<const uint2*>(rounded.row(min(g, last_row)) + column + 8 * t);
        } else {
          return kPacked || column + 8 * t < product.in ? *reinterpret_cast<const uint4*>(x[n] + column) : zero;
        }
      };
      const char* from = ring + slot;
      const uint4* vectors = reinterpret_cast<const uint4*>(from) + lane;
      slot = slot + kSlotBytes<kCodes> == kStages * kSlotBytes<kCodes> ? 0 : slot + kSlotBytes<kCodes>;
      if constexpr (!kPacked) {
        uint4 b[kUnroll][kTiles];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
#pragma unroll
          for (int n = 0; n < kTiles; ++n) b[u][n] = first + u < end ? x_of(n, (first + u) * kStep) : zero;
        wait_for_group<kStages - 1>();
        multiply_chunk<T, 32>(sum, vectors, b);
      } else {
        std::conditional_t<kRounded, uint2, uint4> x_here[kAhead][kParts][kTiles];
        auto read_x = [&](int u) {
#pragma unroll
          for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              x_here[u % kAhead][part][n] = {};
              if (first + u < end) x_here[u % kAhead][part][n] = x_of(n, (first + u) * kStep + part * 32);
            }
        };
#pragma unroll
        for (int u = 0; u < kAhead; ++u) read_x(u);
        wait_for_group<kStages - 1>();
        __syncwarp();  // scales are another thread's copies
        const int first_group = scale_group(first);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int step = first + u;
          if (step >= end) continue;
          if (kAhead < kUnroll && u >= kAhead) read_x(u);
          const auto& b = x_here[u % kAhead];
          const uint4 codes = vectors[u * 32];
          float own[kTiles][4] = {};
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            const int of_group = scale_group(step) + (kSmall ? part : 0);
            uint32_t low[4], high[4], low_offset = 0, high_offset = 0;
            if constexpr (kCodes == Codes::kFour || kCodes == Codes::kEight) {
              int zeros[2] = {kMiddle<kCodes>, kMiddle<kCodes>};
              if constexpr (kZeros) {
                const int64_t row = static_cast<int64_t>(group.expert) * product.out + first_row + g;
                zeros[0] = zero_at<kCodes>(packing.zero, row, of_group, groups);
                zeros[1] = zero_at<kCodes>(packing.zero, row + 8, of_group, groups);
              }
              low_offset = offset_of<T, kCodes>(zeros[0]), high_offset = offset_of<T, kCodes>(zeros[1]);
            }
            if constexpr (kRounded) {
              widen_float8(low[0], low[1], codes.x), widen_float8(low[2], low[3], codes.y);
              widen_float8(high[0], high[1], codes.z), widen_float8(high[2], high[3], codes.w);
            } else if constexpr (kBits<kCodes> == 4) {
              numbers_of<T, kCodes>(low, make_uint2(part == 0 ? codes.x : codes.y, 0), low_offset);
              numbers_of<T, kCodes>(high, make_uint2(part == 0 ? codes.z : codes.w, 0), high_offset);
            } else {
              numbers_of<T, kCodes>(low, make_uint2(codes.x, codes.y), low_offset);
              numbers_of<T, kCodes>(high, make_uint2(codes.z, codes.w), high_offset);
            }
            const uint32_t even[4] = {low[0], high[0], low[1], high[1]}, odd[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              uint4 numbers{};
              if constexpr (kRounded) {
                widen_float8(numbers.x, numbers.y, b[part][n].x), widen_float8(numbers.z, numbers.w, b[part][n].y);
              } else {
                numbers = b[part][n];
              }
              multiply<Number>(own[n], even, numbers.x, numbers.y);
              multiply<Number>(own[n], odd, numbers.z, numbers.w);
            }
            if (!kSmall && part + 1 < kParts) continue;
            const char* row = from + kUnroll * 512 + (of_group - first_group) * kScaleRow<kCodes>;
            float scales[2];
            if constexpr (kCodes == Codes::kMxfp4) {
              scales[0] = power_of(reinterpret_cast<const uint8_t*>(row)[g]) * kMxfp4Scale<T>;
              scales[1] = power_of(reinterpret_cast<const uint8_t*>(row)[g + 8]) * kMxfp4Scale<T>;
            } else {
              scales[0] = reinterpret_cast<const float*>(row)[g], scales[1] = reinterpret_cast<const float*>(row)[g + 8];
            }
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              float of_x[2] = {1, 1};
              if constexpr (kRounded)
#pragma unroll
                for (int i = 0; i < 2; ++i) of_x[i] = rounded.scale(min(2 * t + i, last_row), of_group);
#pragma unroll
              for (int c = 0; c < 4; ++c) {
                const float scale = kRounded ? scales[c / 2] * of_x[c % 2] : scales[c / 2];
                sum[n][c] = fmaf(own[n][c], scale, sum[n][c]), own[n][c] = 0;
              }
            }
          }
        }
        __syncwarp();  // they have been read
      }
      copy_chunk();
    }
    auto& mine = partial[turn % 2];  // the one before may still be read
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) mine[warp][g + c / 2 * 8][n * 8 + 2 * t + c % 2] = sum[n][c];
    __syncthreads();
    auto sum_of = [&](int row, int pair) {
      float value = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) value += mine[w][row][pair];
      return value;
    };
    const int paired = !kDown && p.gated ? 2 : 1, columns = kRows / paired;
    // Each tile's outputs are the work of another warp first.
    for (int i = (threadIdx.x + turn * 32) % kThreads; i < columns * group.count; i += kThreads) {
      const int row = i % columns * paired, of_group = i / columns, pair = order[group.first + of_group];
      if (first_row + row >= product.out) continue;
      const float value = sum_of(row, of_group);
      if (kDown) finish_made(p, pairs, pair, product, group.expert, first_row + row, value);
      else finish_inner(p, pairs, pair, pair, product, group.expert, (first_row + row) / paired, value,
                        p.gated ? sum_of(row + 1, of_group) : 0.f);
    }
  }
}

// The second product of weights of 16 bits for few pairs, and the sum over a token's choices. A tile is 16 rows of y for
// one token: of every expert here that it chose the same 16 rows. A block's warps divide the chunks of all of them, one
// choice's behind the other's, multiply what they have of a choice by its score and add that up; so do at the end the
// warps. Chunks are under way as above. Tokens that share an expert read it from the cache. Reads `inner`, writes y.
template <typename T>
__global__ void __launch_bounds__(kSummedWarps * 32, 1) summed_kernel(const __grid_constant__ ExpertsParams p,
                                                                   const __grid_constant__ Pairs pairs) {
  constexpr int kWarps = kSummedWarps, kStep = kExpertsStep<Codes::kNone>, kRows = kExpertsRows;
  constexpr int kSlot = kSlotBytes<Codes::kNone>;
  extern __shared__ uint4 shared[];  // rings of kStages slots of each warp
  __shared__ float partial[2][kWarps][kRows];
  __shared__ int expert_at[kSummedPairs], choice_at[kSummedPairs], count_of[kSummedPairs];  // from top_k · token on
  __shared__ float score_at[kSummedPairs];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  char* ring = reinterpret_cast<char*>(shared) + warp * kStages * kSlot;
  if (warp == 0) {  // those that are here, in their order
    static_assert(kSummedPairs == 32);
    const int expert = lane < p.num_tokens * p.top_k ? expert_of(p, lane) : -1, first = lane / p.top_k * p.top_k;
    const uint32_t here = __ballot_sync(~0u, expert >= 0) >> first & (p.top_k < 32 ? (1u << p.top_k) - 1 : ~0u);
    if (lane % p.top_k == 0) count_of[lane / p.top_k] = __popc(here);
    if (expert >= 0) {
      const int at = first + __popc(here & ((1u << lane % p.top_k) - 1));
      expert_at[at] = expert, choice_at[at] = lane, score_at[at] = p.scale_input ? 1.f : p.scores[lane];
    }
  }
  __syncthreads();
  const Product<T> product(p, pairs, true);
  const int tiles = (product.out + kRows - 1) / kRows * p.num_tokens;
  const int of_choice = ((product.in + kStep - 1) / kStep + kUnroll - 1) / kUnroll;  // chunks
  auto share_of = [&](int token) {
    const int all = count_of[token] * of_choice, each = (all + kWarps - 1) / kWarps;
    return make_int2(min(warp * each, all), min(warp * each + each, all));
  };

  // The copies are ahead of the products: their own place in the sequence of tiles and chunks.
  struct {
    int tile, chunk, end, slot, step, choice;
    const char *low, *high;
  } ahead{static_cast<int>(blockIdx.x), 0, 0, 0, 0, 0, nullptr, nullptr};
  auto find_rows = [&] {
    const int expert = expert_at[ahead.tile % p.num_tokens * p.top_k + ahead.choice];
    const int row = ahead.tile / p.num_tokens * kRows + g;
    ahead.low = reinterpret_cast<const char*>(product.row_of_weight(expert, row) + 8 * t);
    ahead.high = reinterpret_cast<const char*>(product.row_of_weight(expert, row + 8) + 8 * t);
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
        const bool there = (ahead.step + u) * kStep + 8 * t < product.in;
        const int at = there ? (ahead.step + u) * kStep * static_cast<int>(sizeof(T)) : 0;
        start_copy(to + 2 * u * 32, ahead.low + at, there);
        start_copy(to + (2 * u + 1) * 32, ahead.high + at, there);
      }
      ahead.slot = ahead.slot + kSlot == kStages * kSlot ? 0 : ahead.slot + kSlot;
      ahead.step += kUnroll;
      if (++ahead.chunk == ahead.end) {
        ahead.tile += gridDim.x;
        find_tile();
      } else if (ahead.step >= of_choice * kUnroll) {
        ahead.step = 0, ++ahead.choice;
        find_rows();
      }
    }
    end_group();
  };
  find_tile();
  for (int i = 0; i < kStages; ++i) copy_chunk();
  wait_for_inputs();
  let_next_start();

  const uint4 zero = make_uint4(0, 0, 0, 0);
  int slot = 0, turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    const int token = tile % p.num_tokens, first_pair = token * p.top_k, row = tile / p.num_tokens * kRows + lane;
    const int64_t place = static_cast<int64_t>(token) * p.hidden + row;
    const bool finishes = warp == turn % kWarps;
    if (finishes && product.bias != nullptr && lane < count_of[token])  // which is wanted at the end
      bring(product.bias + static_cast<int64_t>(expert_at[first_pair + lane]) * product.out + row - lane);
    if (finishes && p.residual != nullptr && lane == 0) bring(static_cast<const T*>(p.residual) + place);
    float total[2] = {};
    const int2 share = share_of(token);
    for (int chunk = share.x; chunk < share.y;) {
      const int choice = chunk / of_choice, end = min(share.y, (choice + 1) * of_choice);
      const T* x = product.x + static_cast<int64_t>(choice_at[first_pair + choice]) * product.in + 8 * t;
      float sum[1][4] = {};
      for (; chunk < end; ++chunk) {
        const int first = (chunk - choice * of_choice) * kUnroll * kStep;
        uint4 b[kUnroll][1];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          b[u][0] =
              first + u * kStep + 8 * t < product.in ? *reinterpret_cast<const uint4*>(x + first + u * kStep) : zero;
        wait_for_group<kStages - 1>();
        multiply_chunk<T, 32>(sum, reinterpret_cast<const uint4*>(ring + slot) + lane, b);
        slot = slot + kSlot == kStages * kSlot ? 0 : slot + kSlot;
        copy_chunk();
      }
      const float score = score_at[first_pair + choice];
      total[0] = fmaf(score, sum[0][0], total[0]), total[1] = fmaf(score, sum[0][2], total[1]);
    }
    auto& mine = partial[turn % 2];  // the one before may still be read
    if (t == 0) mine[warp][g] = total[0], mine[warp][g + 8] = total[1];
    __syncthreads();
    if (!finishes || lane >= kRows || row >= product.out) continue;
    float value = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += mine[w][lane];
    if (product.bias != nullptr)
#pragma unroll 4
      for (int choice = 0; choice < count_of[token]; ++choice)
        value = fmaf(score_at[first_pair + choice], product.bias_of(expert_at[first_pair + choice], row), value);
    if (p.residual != nullptr) value += to_float(static_cast<const T*>(p.residual)[place]);
    static_cast<T*>(p.y)[place] = from_float<T>(value);
  }
}

// As many blocks as are resident at once.
template <typename T, Codes kCodes, int kWarps, int kTiles, bool kDown, Grouping kGrouping>
cudaError_t run_tiles(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  constexpr int kRing = kWarps * kStages * kSlotBytes<kCodes>;
  static_assert(kRing >= 8 * kMostExperts);
  const int pairs_here = p.num_tokens * p.top_k;
  auto shared_bytes = [](int pairs, int tokens, int width) {
    const int rounded = kGrouping == Grouping::kRounded ? RoundedX<T, kWarps>::bytes(std::min(tokens, kRoundedPairs), width) : 0;
    return kRing + order_bytes(pairs) + rounded;
  };
  const int shared = shared_bytes(pairs_here, p.num_tokens, kDown ? p.inner : p.hidden);
  auto kernel = experts_gemv_kernel<T, kCodes, kWarps, kTiles, kDown, kGrouping>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 shared_bytes(kFewExpertPairs, kRoundedPairs, kNormHidden));
  if (error != cudaSuccess) return error;
  auto resident_at = [kernel](int shared) {
    int blocks = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kWarps * 32, shared);
    return int64_t{std::max(blocks, 1)} * multiprocessors();
  };
  // Asked for once where no width decides.
  static const int64_t few = resident_at(kRing + order_bytes(kFewestPairs)), many = resident_at(kRing + order_bytes(kFewExpertPairs));
  const int64_t resident = kGrouping == Grouping::kRounded ? resident_at(shared) : pairs_here <= kFewestPairs ? few : many;
  const int64_t tiles = static_cast<int64_t>(p.num_tokens) * p.top_k * blocks_for(Product<T>(p, pairs, kDown).out, kExpertsRows);
  return launch(kernel, static_cast<unsigned>(std::min(tiles, resident)), kWarps * 32, shared, stream, p, pairs);
}

// As many warps as have steps to take, and no more than have their rings in shared memory beside the rest.
template <typename T, Codes kCodes, int kTiles, bool kDown, Grouping kGrouping>
cudaError_t run_warps(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  constexpr int kRest = 32 << 10;
  const bool room = device_property<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= 8 * kStages * kSlotBytes<kCodes> + kRest;
  const unsigned steps = blocks_for(kDown ? p.inner : p.hidden, kExpertsStep<kCodes>);
  if (steps > 16 && room) return run_tiles<T, kCodes, 8, kTiles, kDown, kGrouping>(p, pairs, stream);
  return run_tiles<T, kCodes, 4, kTiles, kDown, kGrouping>(p, pairs, stream);
}

constexpr int kSummedRing = kSummedWarps * kStages * kSlotBytes<Codes::kNone>;

template <typename T>
cudaError_t run_summed(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(summed_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSummedRing);
  if (error != cudaSuccess) return error;
  const unsigned tiles = blocks_for(p.hidden, kExpertsRows) * p.num_tokens;
  return launch(summed_kernel<T>, std::min(tiles, multiprocessors()), kSummedWarps * 32, kSummedRing, stream, p, pairs);
}

template <typename T, Codes kCodes, int kTiles, Grouping kGrouping>
cudaError_t run_both(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  cudaError_t error = run_warps<T, kCodes, kTiles, false, kGrouping>(p, pairs, stream);
  if (error == cudaSuccess)
    error = round_inner(kDType<T>, p, pairs, kGrouping == Grouping::kRounded ? Rounding::kInKernel : Rounding::kNumbers, stream);
  if (error != cudaSuccess) return error;
  if (sums_choices(p)) return run_summed<T>(p, pairs, stream);
  return run_warps<T, kCodes, kTiles, true, kGrouping>(p, pairs, stream);
}

template <typename T, Codes kCodes, Grouping kGrouping>
cudaError_t run_pairs(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const bool rare = p.num_tokens <= 8 || p.num_tokens * p.top_k <= kRarePairs * p.num_experts;
  return rare ? run_both<T, kCodes, 1, kGrouping>(p, pairs, stream) : run_both<T, kCodes, 2, kGrouping>(p, pairs, stream);
}

template <typename T>
cudaError_t run_type(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const ExpertsPacking& packing = p.gate_up_packing;
  if (packing.codes == Codes::kNone) return run_pairs<T, Codes::kNone, Grouping::kPlain>(p, pairs, stream);
  if (multiplies_codes(p)) return run_both<T, Codes::kFloat8, 1, Grouping::kRounded>(p, pairs, stream);
  return with_expert_codes(packing.codes, [&](auto codes) {
    constexpr Codes kCodes = codes.value;
    const bool small = packing.group_size == 32;
    if constexpr (kCodes == Codes::kMxfp4) return run_pairs<T, kCodes, Grouping::kSmall>(p, pairs, stream);
    if constexpr (kCodes == Codes::kFour || kCodes == Codes::kEight)
      if (packing.zero != nullptr)
        return small ? run_pairs<T, kCodes, Grouping::kSmallAndZeros>(p, pairs, stream)
                     : run_pairs<T, kCodes, Grouping::kZeros>(p, pairs, stream);
    return small ? run_pairs<T, kCodes, Grouping::kSmall>(p, pairs, stream) : run_pairs<T, kCodes, Grouping::kPlain>(p, pairs, stream);
  });
}

}  // namespace

// Where all multiprocessors have as many of its tiles, but for one in 20, and tokens seldom share an expert.
bool sums_choices(const ExpertsParams& p) {
  constexpr int kRest = 8 << 10, kSeldom = 4;
  const int64_t pairs = static_cast<int64_t>(p.num_tokens) * p.top_k;
  if (p.gate_up_packing.codes != Codes::kNone || pairs > kSummedPairs ||
      device_property<cudaDevAttrMaxSharedMemoryPerBlockOptin>() < kSummedRing + kRest)
    return false;
  const unsigned tiles = blocks_for(p.hidden, kExpertsRows) * p.num_tokens, places = multiprocessors();
  const bool even = 20 * blocks_for(tiles, places) * places <= 21 * tiles;
  return even && (p.num_tokens == 1 || kSeldom * pairs <= p.num_experts);
}

cudaError_t few_experts(DType dtype, const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  if (p.hidden % 8 != 0 || p.inner % 8 != 0 || static_cast<int64_t>(p.num_tokens) * p.top_k > kFewExpertPairs)
    return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, pairs, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
