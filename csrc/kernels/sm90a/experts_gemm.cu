// The products of experts for many tokens on Hopper's tensor cores. A tile is kRows rows of an expert's weight, the tensor
// core's first operand, for as many of its pairs as the group has, the second: so a group's size costs in steps of 16, and
// an expert's pairs are divided evenly. kGroups warpgroups multiply 2 × 64 rows each, gates and their ups in one thread.
// One warp copies, 64 columns a stage: rows of x from wherever a pair's token is. As many blocks as fit take tiles in turn,
// an expert's groups of the same rows one after the other, so weights come from memory once and from the cache after that.
#include <algorithm>

#include "../experts.cuh"
#include "../tensor_core.cuh"
#include "wgmma.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using namespace sm90a;

constexpr int kLine = 64;  // columns of a stage
constexpr uint32_t kLineBytes = 2 * kLine;
constexpr int kPart = 16;  // pairs that leave at once
constexpr int kPitch = 9;  // vectors from one to the next: 64 rows' numbers, and what keeps banks apart

// Where in shared memory things lie, in bytes from a multiple of 1,024 on.
template <int kGroups, int kPairs, int kStages>
struct Place {
  static constexpr int kRows = kGroups * 128, kThreads = (1 + kGroups) * 128;
  static constexpr uint32_t kWeightBytes = kRows * kLineBytes, kStageBytes = kWeightBytes + kPairs * kLineBytes;
  static constexpr uint32_t kOutAt = kStages * kStageBytes, kOutBytes = 4 * kPart * kPitch * 16;
  static constexpr uint32_t kPairsAt = kOutAt + kGroups * kOutBytes, kBarriersAt = kPairsAt + kGroups * kPairs * 4;
  static constexpr uint32_t kBytes = kBarriersAt + 16 * kStages + 1024;
  static_assert(kPairs % kPart == 0 && kPairs <= 256 && kStageBytes % 1024 == 0);

  uint8_t* bytes;
  uint32_t base = shared_address(bytes);

  __device__ uint32_t weights(int slot) const { return base + slot * kStageBytes; }
  __device__ uint32_t x(int slot) const { return weights(slot) + kWeightBytes; }
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
  CUtensorMap weights, x;
};

template <bool kDown, int kGroups, int kPairs, int kStages>
__device__ __forceinline__ void copy_all(const Place<kGroups, kPairs, kStages>& place, const Maps& maps,
                                         const ExpertsParams& p, const Pairs& pairs, Tiles tiles, int count,
                                         int stages) {
  using P = Place<kGroups, kPairs, kStages>;
  const int lane = threadIdx.x % 32;
  auto copy_weights = [&](const Tile& tile, int slot, int stage) {
    const Barrier there = place.there(slot);
    const int rows = (tile.count + kPart - 1) / kPart * kPart;
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
    }
  }
}

// Of four 8 × 8 matrices, of which a thread has two neighbours each, the columns to rows of shared memory: a lane's is
// that of column lane % 8 of matrix lane / 8.
__device__ __forceinline__ void store_turned(uint4* to, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(to)), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
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

template <typename T, bool kDown, int kGroups, int kPairs, int kStages>
__device__ __forceinline__ void multiply_all(const Place<kGroups, kPairs, kStages>& place, const ExpertsParams& p,
                                             const Pairs& pairs, Tiles tiles, int count, int stages, int group) {
  using P = Place<kGroups, kPairs, kStages>;
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
    const int parts = (tile.count + kPart - 1) / kPart;
    auto choose = [&](auto self, auto width) {
      constexpr int kWidth = decltype(width)::value;
      if constexpr (kWidth == kPairs) multiply(width);
      else if (parts * kPart <= kWidth) multiply(width);
      else self(self, std::integral_constant<int, kWidth + kPart>());
    };
    choose(choose, std::integral_constant<int, kPart>());

    // What a warp's rows become leaves by shared memory, kPart pairs at a time, where it is turned.
    const int row = tile.out_tile * (paired ? P::kRows / 2 : P::kRows) + group * 64;  // the first of these 64
    const int width = paired ? product.out / 2 : product.out;                          // of what is written
    float bias[2][2] = {};
    if (product.bias != nullptr) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int own_row = row + warp * 16 + 8 * r + g, of = paired ? 2 * own_row + m : own_row + m * P::kRows / 2;
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
      if (!kDown) finish_columns(p, own_sums);
      uint4* to = staged + part % 2 * 2 * kPart * kPitch;
#pragma unroll
      for (int m = 0; m < 2; ++m)
        if (m == 0 || !paired) {
          uint32_t words[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) words[k] = pack<T>(own_sums[m][2 * k], own_sums[m][2 * k + 1]);
          const int lane = thread % 32;
          store_turned(to + (m * kPart + lane / 16 * 8 + lane % 8) * kPitch + warp * 2 + lane / 8 % 2, words);
        }
      meet();
      const int vector = thread % 8, pair = part * kPart + thread / 8;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int column = row + m * P::kRows / 2 + 8 * vector;
        if ((m == 1 && paired) || pair >= tile.count || column >= width) continue;
        T* target = kDown ? static_cast<T*>(pairs.made) + static_cast<int64_t>(own_pairs[pair]) * p.hidden
                          : static_cast<T*>(pairs.inner) + static_cast<int64_t>(tile.first + pair) * p.inner;
        *reinterpret_cast<uint4*>(target + column) = to[(m * kPart + thread / 8) * kPitch + vector];
      }
    }
    meet();  // before what leaves next
  }
}

template <typename T, bool kDown, int kGroups, int kPairs, int kStages, int kBlocks>
__global__ void __launch_bounds__((1 + kGroups) * 128, kBlocks)
    grouped_kernel(const __grid_constant__ Maps maps, const __grid_constant__ ExpertsParams p,
                   const __grid_constant__ Pairs pairs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using P = Place<kGroups, kPairs, kStages>;
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
  const int out_tiles = (product.out + P::kRows - 1) / P::kRows, stages = (product.in + kLine - 1) / kLine;
  const int count = Groups(p, pairs, before, kPairs).template count<P::kThreads>() * out_tiles;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be one for a warp
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) copy_all<kDown>(place, maps, p, pairs, Tiles{pairs, before, out_tiles}, count, stages);
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

// Rows of x by place, where `made` will be: a block for each.
__global__ void __launch_bounds__(128) sort_x_kernel(ExpertsParams p, Pairs pairs) {
  wait_for_inputs();
  let_next_start();
  const int place = blockIdx.x, vectors = p.hidden / 8;
  if (place >= pairs.starts[p.num_experts]) return;
  const uint4* from = static_cast<const uint4*>(p.x) + static_cast<int64_t>(pairs.order[place] / p.top_k) * vectors;
  uint4* to = static_cast<uint4*>(pairs.made) + static_cast<int64_t>(place) * vectors;
  for (int i = threadIdx.x; i < vectors; i += 128) to[i] = from[i];
}

template <typename T, bool kDown, int kGroups, int kPairs, int kStages, int kBlocks>
cudaError_t run_tiles(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  using P = Place<kGroups, kPairs, kStages>;
  auto kernel = grouped_kernel<T, kDown, kGroups, kPairs, kStages, kBlocks>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes);
  if (error != cudaSuccess) return error;
  const device::Product<T> product(p, pairs, kDown);
  const cuuint64_t in = product.in, pairs_count = static_cast<cuuint64_t>(p.num_tokens) * p.top_k;
  const cuuint64_t of_each = !kDown && p.gated ? 2 : 1, experts = p.num_experts;
  Maps maps;
  if (!map<4>(maps.weights, kMapType<T>, CU_TENSOR_MAP_SWIZZLE_128B, product.weight,
              {in, of_each, product.out / of_each, experts}, sizeof(T), {kLine, 1, P::kRows / 2, 1}) ||
      !map<2>(maps.x, kMapType<T>, CU_TENSOR_MAP_SWIZZLE_128B, kDown ? product.x : pairs.made, {in, pairs_count},
              sizeof(T), {kLine, kPart}))
    return cudaErrorInvalidValue;
  const int64_t groups = std::min<int64_t>(pairs_count, pairs_count / kPairs + p.num_experts);
  const int64_t tiles = groups * blocks_for(product.out, P::kRows), places = int64_t{kBlocks} * multiprocessors();
  return launch(kernel, static_cast<unsigned>(std::min(tiles, places)), P::kThreads, P::kBytes, stream, maps, p, pairs);
}

template <typename T, int kGroups, int kPairs, int kStages, int kBlocks>
cudaError_t run_both(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  cudaError_t error = launch(sort_x_kernel, p.num_tokens * p.top_k, 128, 0, stream, p, pairs);
  if (error == cudaSuccess) error = run_tiles<T, false, kGroups, kPairs, kStages, kBlocks>(p, pairs, stream);
  return error != cudaSuccess ? error : run_tiles<T, true, kGroups, kPairs, kStages, kBlocks>(p, pairs, stream);
}

// By how many pairs an expert has on average: a group of its tile, which is multiplied at once, should have room for most.
template <typename T>
cudaError_t run_type(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const int64_t each = static_cast<int64_t>(p.num_tokens) * p.top_k / p.num_experts;
  if (each <= 32) return run_both<T, 1, 64, 4, 2>(p, pairs, stream);
  if (each <= 160) return run_both<T, 2, 144, 4, 1>(p, pairs, stream);
  return run_both<T, 2, 128, 4, 1>(p, pairs, stream);
}

}  // namespace

bool serves_experts_on_hopper(const ExpertsParams& p) {
  return p.num_tokens > 1 && device_property<cudaDevAttrComputeCapabilityMajor>() == 9 && encode() != nullptr;
}

cudaError_t many_experts_on_hopper(DType dtype, const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  if (p.hidden % 8 != 0 || p.inner % 8 != 0) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, pairs, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
