// The products of experts for few tokens, of packed weights: see experts_few.cuh, and experts.cuh for how these lie.
//
// A tile of a weight is one stretch of memory, and so are its scales. Chunks of tiles, some steps for each warp, are under way
// to shared memory all the time, as stretches on Hopper, by 16 bytes a thread elsewhere; what has been multiplied makes room
// for what comes kSlots later. The tensor core sums up a step of at most one group of columns; the group's scale multiplies
// that sum, in float32, so nothing is rounded but x and y. Where x is rounded to FP8 a block makes codes of its rows for itself,
// in shared memory, while weights are under way; and both become float16, in which they are exact, by an instruction for a pair.
#include <algorithm>

#include "cluster.cuh"
#include "experts_few.cuh"
#include "gemv.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kSlots = 2;         // chunks under way
constexpr int kSteps = 6;         // of a warp in a chunk, at most
constexpr int kRoundedPairs = 4;  // of a group, where a block makes codes of x
constexpr int kMultiplying = 1;   // the barrier of warps that multiply

// How groups of columns are: of 32; with zeros; of kBlock, for x that is rounded.
enum class Grouping { kPlain, kSmall, kZeros, kSmallAndZeros, kRounded };
template <Grouping kGrouping>
constexpr bool kIsSmall = kGrouping == Grouping::kSmall || kGrouping == Grouping::kSmallAndZeros;

// Bytes of a chunk: its vectors, and behind them the scales of its groups.
template <Codes kCodes, int kWarps, Grouping kGrouping>
struct Slot {
  static constexpr int kMost = kWarps * kSteps;  // steps
  static constexpr int kVectors = kMost * 512;
  static constexpr int kGroups = kMost * (kIsSmall<kGrouping> ? kExpertsStep<kCodes> / 32 : 1);
  static constexpr int kBytes = kVectors + kGroups * kScaleRow<kCodes>;
};

// In bfloat16, which reaches as far, the exponent of a group of MXFP4 goes with what makes its codes numbers, less 2^63 times, so
// that all from 2^-63 to 2^64 have room, greater ones being infinite; sums make up for that.
constexpr float kUnfolded = 0x1p63f;
__device__ __forceinline__ uint32_t folded(uint8_t exponent) { return min(exponent + 63u, 255u) * 0x00800080u; }

// Stretches of memory into slots of shared memory, in turn, by one warp; others read them.
template <int kReaders, int kSlotBytes>
class Stretches {
 public:
  // `at` has kSlotBytes for each slot, `barriers` two.
  __device__ __forceinline__ Stretches(char* at, uint64_t* barriers) : at_(at), barriers_(shared_address(barriers)) {}
  // By one thread, before any calls what follows.
  __device__ __forceinline__ void init() const {
#if __CUDA_ARCH__ >= 900
    constexpr int kCopying = 1;  // lanes
#else
    constexpr int kCopying = 32;
#endif
    for (int slot = 0; slot < kSlots; ++slot) there(slot).init(kCopying), read(slot).init(kReaders);
  }
  // The next chunk, by the warp that copies: two stretches, of multiples of 16 bytes, once the one before in its slot was read.
  __device__ __forceinline__ void copy(int turn, const char* vectors, int bytes, const char* behind, int place, int more) const {
    const int lane = threadIdx.x % 32;
    char* to = at_ + turn % kSlots * kSlotBytes;
    if (turn >= kSlots) read(turn).wait((turn / kSlots - 1) & 1);
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      there(turn).expect(bytes + more);
      copy_bytes(shared_address(to), vectors, bytes, there(turn));
      copy_bytes(shared_address(to + place), behind, more, there(turn));
    }
#else
    for (int i = lane * 16; i < bytes; i += 512) start_copy(reinterpret_cast<uint4*>(to + i), vectors + i, true);
    for (int i = lane * 16; i < more; i += 512) start_copy(reinterpret_cast<uint4*>(to + place + i), behind + i, true);
    there(turn).arrive_behind_copies();
#endif
    __syncwarp();
  }
  // What was copied in this turn, once it is there; and that this warp has read it.
  __device__ __forceinline__ const char* wait(int turn) const {
    there(turn).wait(turn / kSlots & 1);
    return at_ + turn % kSlots * kSlotBytes;
  }
  __device__ __forceinline__ void release(int turn) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) read(turn).arrive();
  }

 private:
  __device__ __forceinline__ Barrier there(int turn) const { return {barriers_ + turn % kSlots * 8}; }
  __device__ __forceinline__ Barrier read(int turn) const { return {barriers_ + (kSlots + turn % kSlots) * 8}; }
  char* at_;
  uint32_t barriers_;
};

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

  // By all threads that multiply; who reads it waits for them.
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
      meet(kMultiplying, kThreads);
      for (float other : of_warps) whole = fmaxf(whole, other);
      meet(kMultiplying, kThreads);  // before the next row's
    }
    for (int unit = threadIdx.x; unit < width / kUnit; unit += kThreads) {
      const float own = measure(unit), step = step_of_codes(group == 0 ? whole : most_of_half_warp(own));
      if (group == 0 ? unit == 0 : unit % kHalf == 0) scale(row, unit / kHalf) = step;
      *reinterpret_cast<uint2*>(this->row(row) + unit * kUnit) = unit_of_codes(numbers, 1 / step);
    }
  }
};

// A block's last warp copies, and makes outputs of what others summed up; so these wait for weights alone. kTiles: 8 pairs each
// in a group.
template <typename T, Codes kCodes, int kWarps, int kTiles, bool kDown, Grouping kGrouping>
__global__ void __launch_bounds__((kWarps + 1) * 32, (kTiles == 1 ? 27 : 18) / (kWarps + 1))
    experts_packed_gemv_kernel(const __grid_constant__ ExpertsParams p, const __grid_constant__ Pairs pairs) {
  constexpr bool kRounded = kGrouping == Grouping::kRounded, kSmall = kIsSmall<kGrouping>;
  constexpr bool kZeros = kGrouping == Grouping::kZeros || kGrouping == Grouping::kSmallAndZeros;
  constexpr bool kFolded = kCodes == Codes::kMxfp4 && std::is_same_v<T, __nv_bfloat16>;
  using Number = std::conditional_t<kRounded, __half, T>;  // of both operands
  using Slot = Slot<kCodes, kWarps, kGrouping>;
  constexpr int kThreads = (kWarps + 1) * 32, kPairs = kRounded ? kRoundedPairs : kTiles * 8, kRows = kExpertsRows;
  constexpr int kStep = kExpertsStep<kCodes>, kParts = kStep / 32;  // columns
  // The slots; then the list of groups, and the order of pairs; then x, where it is rounded.
  extern __shared__ uint4 shared[];
  __shared__ float partial[2][kWarps][kRows][kTiles * 8 + 1];  // of a tile and of the next
  __shared__ uint64_t barriers[2 * kSlots + 4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Stretches<kWarps, Slot::kBytes> stretches(reinterpret_cast<char*>(shared), barriers);
  auto summed = [&](int tiles) { return Barrier{shared_address(barriers + 2 * kSlots + tiles % 2)}; };
  auto finished = [&](int tiles) { return Barrier{shared_address(barriers + 2 * kSlots + 2 + tiles % 2)}; };
  auto* list = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(shared) + kSlots * Slot::kBytes);
  auto* order = reinterpret_cast<uint16_t*>(list + p.num_tokens * p.top_k);
  if (!kDown) {
    wait_for_inputs();
    let_next_start();
  }
  if (threadIdx.x == 0) {
    stretches.init();
    for (int buffer = 0; buffer < 2; ++buffer) summed(buffer).init(kWarps), finished(buffer).init(1);
    let_copies_see_barriers();
  }
  const Product<T> product(p, pairs, kDown);
  const ExpertsPacking& packing = kDown ? p.down_packing : p.gate_up_packing;
  const int out_tiles = (product.out + kRows - 1) / kRows;
  const int num_groups = list_groups<kThreads>(p, kPairs, list, order, reinterpret_cast<uint32_t*>(shared));
  fence_async_proxy();
  __syncthreads();
  // The steps of a tile, of a chunk, and of a warp in a chunk.
  const int steps = product.in / kStep, chunks = (steps + Slot::kMost - 1) / Slot::kMost;
  const int of_chunk = (steps + chunks - 1) / chunks, share = (of_chunk + kWarps - 1) / kWarps;
  const int groups = product.in / packing.group_size, shift = kSmall ? 5 : 31 - __clz(packing.group_size);
  auto scale_group = [&](int step) { return kSmall ? step * kParts : step * kStep >> shift; };

  int turn = 0, tiles = 0;
  TileOfGroup at(blockIdx.x, out_tiles);
  if (warp == kWarps) {
    TileOfGroup ahead = at;
    int ahead_turn = 0, ahead_chunk = 0;
    auto copy_chunk = [&] {
      if (ahead.group >= num_groups) return;
      const int64_t tile = static_cast<int64_t>(group_of(list[ahead.group]).expert) * out_tiles + ahead.tile;
      const int first = ahead_chunk * of_chunk, last = min(first + of_chunk, steps);
      const int from = scale_group(first), to = scale_group(last - 1) + (kSmall ? kParts : 1);
      stretches.copy(ahead_turn++, static_cast<const char*>(kDown ? p.down : p.gate_up) + (tile * steps + first) * 512,
                     (last - first) * 512, static_cast<const char*>(packing.scale) + (tile * groups + from) * kScaleRow<kCodes>,
                     Slot::kVectors, (to - from) * kScaleRow<kCodes>);
      if (++ahead_chunk == chunks) ahead_chunk = 0, ahead.advance(gridDim.x);
    };
    for (int slot = 0; slot < kSlots; ++slot) copy_chunk();
    if (kDown) {
      wait_for_inputs();
      let_next_start();
    }
    for (; at.group < num_groups; at.advance(gridDim.x), ++tiles) {
      const Group group = group_of(list[at.group]);
      const int first_row = at.tile * kRows, bias_row = first_row + lane % kRows;  // wanted at the end
      if (product.bias != nullptr && bias_row < product.out)
        bring(product.bias + static_cast<int64_t>(group.expert) * product.out + bias_row);
      for (int chunk = 0; chunk < chunks; ++chunk) copy_chunk();
      summed(tiles).wait(tiles / 2 & 1);
      finish_outputs<kDown>(p, pairs, product, group, order, first_row, partial[tiles % 2], lane, 32);
      __syncwarp();
      if (lane == 0) finished(tiles).arrive();
    }
    return;
  }

  if (kDown) {
    wait_for_inputs();
    let_next_start();
  }
  const RoundedX<T, kWarps> rounded{
      reinterpret_cast<uint8_t*>(shared) + kSlots * Slot::kBytes + order_bytes(p.num_tokens * p.top_k),
      kDown ? p.inner : p.hidden, p.rounded_group};
  for (; at.group < num_groups; at.advance(gridDim.x), ++tiles) {
    const Group group = group_of(list[at.group]);
    const int last_row = group.count - 1;
    // Pairs behind the last repeat it, and lead to columns that are not written.
    auto row_of_x = [&](int of_group) {
      const int pair = order[group.first + min(of_group, last_row)];
      return kDown ? pair : pair / p.top_k;
    };
    const T* x[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      x[n] = product.x + static_cast<int64_t>(row_of_x(n * 8 + g)) * product.in + 8 * t;
    if constexpr (kRounded) {
      meet(kMultiplying, kWarps * 32);  // the rows before may still be read
      if (kDown || p.num_tokens > 1 || tiles == 0)
        for (int row = 0; row < group.count; ++row)
          rounded.make(row, product.x + static_cast<int64_t>(row_of_x(row)) * product.in);
      meet(kMultiplying, kWarps * 32);
    }
    float sum[kTiles][4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk, ++turn) {
      const int first = chunk * of_chunk, begin = first + warp * share, end = min(min(begin + share, first + of_chunk), steps);
      const int first_group = scale_group(first);
      using X = std::conditional_t<kRounded, uint2, uint4>;
      auto read_x = [&](X (&to)[kParts][kTiles], int step) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const int column = step * kStep + part * 32;
            if constexpr (kRounded) to[part][n] = *reinterpret_cast<const X*>(rounded.row(min(g, last_row)) + column + 8 * t);
            else to[part][n] = *reinterpret_cast<const X*>(x[n] + column);
          }
      };
      X next_x[kParts][kTiles];
      if (begin < end) read_x(next_x, begin);
      const char* slot = stretches.wait(turn);
      const uint4* vectors = reinterpret_cast<const uint4*>(slot) + lane - first * 32;
      uint4 next_codes{};
      if (begin < end) next_codes = vectors[begin * 32];
#pragma unroll 2
      for (int step = begin; step < end; ++step) {
        const uint4 codes = next_codes;
        X here[kParts][kTiles];
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
          for (int n = 0; n < kTiles; ++n) here[part][n] = next_x[part][n];
        const int next = min(step + 1, end - 1);  // without a condition: what that brings needs registers of its own
        read_x(next_x, next), next_codes = vectors[next * 32];
        float own[kTiles][4] = {};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int of_group = scale_group(step) + (kSmall ? part : 0);
          const char* scale = slot + Slot::kVectors + (of_group - first_group) * kScaleRow<kCodes>;
          uint32_t low[4], high[4], low_offset = offset_of<T, kCodes>(kMiddle<kCodes>), high_offset = low_offset;
          if constexpr (kFolded) {
            low_offset = folded(reinterpret_cast<const uint8_t*>(scale)[g]);
            high_offset = folded(reinterpret_cast<const uint8_t*>(scale)[g + 8]);
          }
          if constexpr (kZeros) {
            const int64_t row = static_cast<int64_t>(group.expert) * product.out + at.tile * kRows + g;
            low_offset = offset_of<T, kCodes>(zero_at<kCodes>(packing.zero, row, of_group, groups));
            high_offset = offset_of<T, kCodes>(zero_at<kCodes>(packing.zero, row + 8, of_group, groups));
          }
          if constexpr (kRounded) {
            widen_float8(low[0], low[1], codes.x), widen_float8(low[2], low[3], codes.y);
            widen_float8(high[0], high[1], codes.z), widen_float8(high[2], high[3], codes.w);
          } else {
            numbers_of_rows<T, kCodes>(low, high, codes, part, low_offset, high_offset);
          }
          const uint32_t even[4] = {low[0], high[0], low[1], high[1]}, odd[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            uint4 numbers{};
            if constexpr (kRounded) {
              widen_float8(numbers.x, numbers.y, here[part][n].x), widen_float8(numbers.z, numbers.w, here[part][n].y);
            } else {
              numbers = here[part][n];
            }
            auto& made = kFolded ? sum[n] : own[n];
            multiply<Number>(made, even, numbers.x, numbers.y);
            multiply<Number>(made, odd, numbers.z, numbers.w);
          }
          if (kFolded || (!kSmall && part + 1 < kParts)) continue;
          float scales[2];
          if constexpr (kCodes == Codes::kMxfp4) {
            scales[0] = power_of(reinterpret_cast<const uint8_t*>(scale)[g]) * kMxfp4Scale<T>;
            scales[1] = power_of(reinterpret_cast<const uint8_t*>(scale)[g + 8]) * kMxfp4Scale<T>;
          } else {
            scales[0] = reinterpret_cast<const float*>(scale)[g], scales[1] = reinterpret_cast<const float*>(scale)[g + 8];
          }
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            float of_x[2] = {1, 1};
            if constexpr (kRounded)
#pragma unroll
              for (int i = 0; i < 2; ++i) of_x[i] = rounded.scale(min(2 * t + i, last_row), of_group);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const float factor = kRounded ? scales[c / 2] * of_x[c % 2] : scales[c / 2];
              sum[n][c] = fmaf(own[n][c], factor, sum[n][c]), own[n][c] = 0;
            }
          }
        }
      }
      stretches.release(turn);
    }
    finished(tiles).wait((tiles / 2 + 1) & 1);  // the tile before the last

    auto& mine = partial[tiles % 2][warp];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      if (n * 8 + 2 * t <= last_row)
#pragma unroll
        for (int c = 0; c < 4; ++c) mine[g + c / 2 * 8][n * 8 + 2 * t + c % 2] = kFolded ? sum[n][c] * kUnfolded : sum[n][c];
    __syncwarp();
    if (lane == 0) summed(tiles).arrive();
  }
}

// As many warps as have steps to take, and no more than have their slots in shared memory beside the rest.
template <typename T, Codes kCodes, int kTiles, bool kDown, Grouping kGrouping>
cudaError_t run_warps(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  constexpr int kRest = 32 << 10;
  const int in = kDown ? p.inner : p.hidden, out = Product<T>(p, pairs, kDown).out;
  auto run = [&](auto warps) {
    constexpr int kWarps = warps.value, kRing = kSlots * Slot<kCodes, kWarps, kGrouping>::kBytes;
    static_assert(kRing >= 8 * kMostExperts);
    using X = RoundedX<T, kWarps>;
    constexpr bool kRounded = kGrouping == Grouping::kRounded;
    return run_resident<experts_packed_gemv_kernel<T, kCodes, kWarps, kTiles, kDown, kGrouping>, (kWarps + 1) * 32>(
        p, pairs, out, kRing, kRounded ? X::bytes(std::min(p.num_tokens, kRoundedPairs), in) : 0,
        kRounded ? X::bytes(kRoundedPairs, kNormHidden) : 0, stream);
  };
  constexpr int kMost = kSlots * Slot<kCodes, 8, kGrouping>::kBytes + kRest;
  const bool room = device_property<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= kMost;
  if (blocks_for(in, kExpertsStep<kCodes>) > 16 && room) return run(std::integral_constant<int, 8>());
  return run(std::integral_constant<int, 4>());
}

template <typename T, Codes kCodes, int kTiles, Grouping kGrouping>
cudaError_t run_both(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  cudaError_t error = run_warps<T, kCodes, kTiles, false, kGrouping>(p, pairs, stream);
  if (error == cudaSuccess)
    error = round_inner(kDType<T>, p, pairs, kGrouping == Grouping::kRounded ? Rounding::kInKernel : Rounding::kNumbers, stream);
  if (error != cudaSuccess) return error;
  return run_warps<T, kCodes, kTiles, true, kGrouping>(p, pairs, stream);
}

template <typename T, Codes kCodes, Grouping kGrouping>
cudaError_t run_pairs(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  return are_rare(p) ? run_both<T, kCodes, 1, kGrouping>(p, pairs, stream) : run_both<T, kCodes, 2, kGrouping>(p, pairs, stream);
}

template <typename T>
cudaError_t run_type(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const ExpertsPacking& packing = p.gate_up_packing;
  if (multiplies_codes(p)) return run_both<T, Codes::kFloat8, 1, Grouping::kRounded>(p, pairs, stream);
  return with_expert_codes(packing.codes, [&](auto codes) {
    constexpr Codes kCodes = codes.value;
    const bool small = packing.group_size == 32;
    if constexpr (kCodes == Codes::kMxfp4) {
      return run_pairs<T, kCodes, Grouping::kSmall>(p, pairs, stream);
    } else {
      if constexpr (kCodes != Codes::kFloat8)
        if (packing.zero != nullptr)
          return small ? run_pairs<T, kCodes, Grouping::kSmallAndZeros>(p, pairs, stream)
                       : run_pairs<T, kCodes, Grouping::kZeros>(p, pairs, stream);
      return small ? run_pairs<T, kCodes, Grouping::kSmall>(p, pairs, stream)
                   : run_pairs<T, kCodes, Grouping::kPlain>(p, pairs, stream);
    }
  });
}

}  // namespace

cudaError_t few_packed_experts(DType dtype, const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  if (dtype == DType::kFloat16) return run_type<__half>(p, pairs, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
