// hopper_gemm(): the product of a weight as it lies in memory and a few rows of x, both read by Hopper's tensor cores from
// shared memory: of 16 bits, or codes of FP8. A tile is 64 rows of the weight, or 64 gates and their ups, for all rows of x. A
// block's copies are ahead of its products by as many stages as there is room for, each of 16 KB of the weight; those of the weight
// begin before the kernel ahead has ended, and two blocks are resident, so that memory is read while one of them ends.
//
// Blocks take tiles in turn. Where there are few, the blocks of a cluster share a tile's columns, and each adds up some of its outputs
// from what all have in shared memory: in the order of the columns, so that the same x gives the same y. Reads the weight once, and
// x once for each tile, from the cache.
//
// A norm costs nothing, as in gemv.cu: mean and deviation come from the x that is there for the products.
#include <algorithm>
#include <array>

#include "../gemv.cuh"
#include "wgmma.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using namespace sm90a;

constexpr int kRows = 64;         // of the weight that a product of the tensor core takes
constexpr int kLineBytes = 128;   // of a row that lie side by side in shared memory
constexpr int kStepBytes = 32;    // of a row, of which a product takes the columns
constexpr int kMultiplying = 128, kThreads = kMultiplying + 64;
constexpr int kMostParts = 4;     // of a tile, in a cluster: larger ones wait for room, all at once
constexpr int kClusterCost = 3;   // what it costs in stages that a cluster adds up its parts
constexpr int kExactStages = 4;   // of codes, whose sums the tensor core keeps less exactly than float32
constexpr uint32_t kMost = 115712;  // bytes of shared memory, of which a multiprocessor has twice as many

// Where in shared memory things lie, in bytes from a multiple of 1,024 on. A stage is of one line of gates and of ups, or of two.
template <typename E, int kTokens, bool kGated>
struct Place {
  static constexpr int kOperands = kGated ? 2 : 1, kLines = kGated ? 1 : 2;
  static constexpr int kColumns = kLines * kLineBytes / static_cast<int>(sizeof(E));  // of a stage
  static constexpr uint32_t kWeightBytes = kRows * kLineBytes, kXBytes = kTokens * kLineBytes;  // of a line
  static constexpr uint32_t kXAt = kOperands * kLines * kWeightBytes, kStageBytes = kXAt + kLines * kXBytes;
  static constexpr int kPitch = kRows + 4;  // floats from one row of x to the next, of sums
  static constexpr uint32_t kSumBytes = kOperands * kTokens * kPitch * 4, kMeasuredBytes = kTokens * 16;
  static constexpr uint32_t kRest = kSumBytes + kMeasuredBytes + 256 + 1024;
  static constexpr int kStages = std::min(8u, (kMost - kRest) / kStageBytes);
  static constexpr uint32_t kSumsAt = kStages * kStageBytes, kMeasuredAt = kSumsAt + kSumBytes;
  static constexpr uint32_t kBarriersAt = kMeasuredAt + kMeasuredBytes, kBytes = kSumsAt + kRest;
  static_assert(kStages >= 3 && kStageBytes % 1024 == 0 && kBarriersAt % 8 == 0 && 16 * kStages <= 256);

  uint8_t* bytes;
  uint32_t base = shared_address(bytes);

  __device__ uint32_t weights(int slot) const { return base + slot * kStageBytes; }
  __device__ uint32_t x(int slot) const { return base + slot * kStageBytes + kXAt; }
  __device__ float* sums() const { return reinterpret_cast<float*>(bytes + kSumsAt); }  // [kOperands, kTokens, kPitch]
  // Of each row of x its sum and that of its squares, and nothing.
  __device__ float4* measured() const { return reinterpret_cast<float4*>(bytes + kMeasuredAt); }
  __device__ Barrier there(int slot) const { return {base + kBarriersAt + 8 * slot}; }
  __device__ Barrier read(int slot) const { return {base + kBarriersAt + 8 * (kStages + slot)}; }
};

struct Maps {
  CUtensorMap weights, x;
};

// A block's stages: of each of its tiles all, or in a cluster its part of the stages of one.
struct Part {
  int first, step, tiles;  // tiles
  int begin, end;          // stages of each
  int rank, parts;

  __device__ Part(int tiles, int stages, int parts) : tiles(tiles), parts(parts) {
    const int block = blockIdx.x;
    rank = parts > 1 ? block % parts : 0, first = parts > 1 ? block / parts : block;
    step = parts > 1 ? tiles : gridDim.x;
    begin = stages * rank / parts, end = stages * (rank + 1) / parts;
  }
};

// A block's copies, one stage after the other, as places for them come free.
template <typename P, typename Copy>
__device__ __forceinline__ void copy_all(const P& place, const Part& part, Copy&& copy) {
  int slot = 0, parity = 1;  // of an unused place the phase before the first has ended
  for (int tile = part.first; tile < part.tiles; tile += part.step)
    for (int stage = part.begin; stage < part.end; ++stage) {
      place.read(slot).wait(parity);
      copy(slot, tile, stage);
      if (++slot == P::kStages) slot = 0, parity ^= 1;
    }
}

// Until all threads that multiply are here.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(kMultiplying) : "memory"); }

template <typename T, typename E, int kTokens, bool kGated>
__device__ __forceinline__ void multiply_all(const Place<E, kTokens, kGated>& place, const GemvParams& p, const Part& part) {
  using P = Place<E, kTokens, kGated>;
  constexpr bool kIsExact = !std::is_same_v<E, Float8>;
  const int thread = threadIdx.x, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  wait_for_inputs();
  let_next_start();

  constexpr int kVectors = kTokens * 8 / kMultiplying + (kTokens < 16);  // of a line that a thread measures; row thread / 8 + 16 · i
  float of_x[kVectors][2] = {};
  // Four outputs of a row of x are a thread's at once: of those of a tile, the block's share.
  constexpr int kFours = kRows / 4, kOwn = kTokens * kFours / kMultiplying;
  const int share = (p.rows * kFours + part.parts - 1) / part.parts, all = min(p.rows * kFours, (part.rank + 1) * share);
  int slot = 0, parity = 0;
  for (int tile = part.first; tile < part.tiles; tile += part.step) {
    float sum[P::kOperands][kTokens / 2] = {}, total[P::kOperands][kTokens / 2] = {};
    const bool measures = p.norm && tile == part.first;
    Vec<T, 4> residual[kOwn];  // read while there is time
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int of = part.rank * share + thread + i * kMultiplying, output = tile * kRows + of % kFours * 4;
      if (p.residual != nullptr && of < all && output < p.out)
        residual[i] = load<T, 4>(static_cast<const T*>(p.residual) + static_cast<int64_t>(of / kFours) * p.out + output);
    }
    auto add_sums = [&] {
#pragma unroll
      for (int m = 0; m < P::kOperands; ++m)
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) total[m][i] += sum[m][i], sum[m][i] = 0;
    };
    int last = -1;
    for (int stage = part.begin; stage < part.end; ++stage) {
      place.there(slot).wait(parity);
      const uint64_t weights = by_rows(place.weights(slot)), x = by_rows(place.x(slot));
      begin_products();
#pragma unroll
      for (int line = 0; line < P::kLines; ++line)
#pragma unroll
        for (int step = 0; step < kLineBytes / kStepBytes; ++step)
#pragma unroll
          for (int m = 0; m < P::kOperands; ++m)
            Product<E, kTokens>::of_shared(sum[m], weights + ((line + m) * P::kWeightBytes + step * kStepBytes) / 16,
                                           x + (line * P::kXBytes + step * kStepBytes) / 16, 1);
      end_products();
      if constexpr (kIsExact)
        if (measures && thread < kTokens * 8)
#pragma unroll
          for (int line = 0; line < P::kLines; ++line)
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
              const auto words = load_shared<4>(place.x(slot) + line * P::kXBytes + (thread + i * kMultiplying) * 16);
              measure<E>(of_x[i], *reinterpret_cast<const uint4*>(&words));
            }
      if (!kIsExact && (stage - part.begin) % kExactStages == kExactStages - 1) {
        wait_for_products<0>();
        add_sums();
      } else {
        wait_for_products<1>();
      }
      if (last >= 0 && thread % 32 == 0) place.read(last).arrive();
      last = slot;
      if (++slot == P::kStages) slot = 0, parity ^= 1;
    }
    wait_for_products<0>();
    if (thread % 32 == 0) place.read(last).arrive();
    add_sums();
    if (measures) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int mask = 1; mask < 8; mask <<= 1) of_x[i][k] += __shfl_xor_sync(~0u, of_x[i][k], mask);
        const int row = thread / 8 + kMultiplying / 8 * i;
        if (thread % 8 == 0 && row < kTokens) place.measured()[row] = make_float4(of_x[i][0], of_x[i][1], 0, 0);
      }
    }
    float* const sums = place.sums();
    if (part.parts == 1) meet();  // sums may still be read
#pragma unroll
    for (int m = 0; m < P::kOperands; ++m)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i)
        sums[(m * kTokens + i / 4 * 8 + 2 * t + i % 2) * P::kPitch + warp * 16 + g + i / 2 % 2 * 8] = total[m][i];
    if (part.parts == 1) {
      meet();
    } else {
      arrive_at_cluster();
      wait_for_cluster();
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int of = part.rank * share + thread + i * kMultiplying, token = of / kFours, four = of % kFours * 4;
      const int output = tile * kRows + four;
      if (of >= all || output >= p.out) continue;
      const float* from = sums + token * P::kPitch + four;
      float4 whole{}, ups{}, measured{};
      auto add = [](float4& to, const float4& more) { to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w; };
      auto add_all = [&](auto&& read) {
        add(whole, read(from));
        if (kGated) add(ups, read(from + kTokens * P::kPitch));
        if (p.norm) add(measured, read(reinterpret_cast<const float*>(place.measured() + token)));
      };
      if (part.parts == 1)
        add_all([](const float* from) { return *reinterpret_cast<const float4*>(from); });
      else
#pragma unroll 4
        for (int other = 0; other < part.parts; ++other)
          add_all([&](const float* from) { return load_from_rank(from, other); });
      float values[] = {whole.x, whole.y, whole.z, whole.w};
      const float of_up[] = {ups.x, ups.y, ups.z, ups.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        values[k] = output_of<T>(p, values[k], of_up[k], measured.x, measured.y, token, output + k, kGated, p.norm);
        if (p.residual != nullptr) values[k] += to_float(residual[i].data[k]);
      }
      store_floats(static_cast<T*>(p.y) + static_cast<int64_t>(token) * p.out + output, values);
    }
  }
  if (part.parts > 1) {  // others may still read what is here
    arrive_only();
    wait_for_cluster();
  }
}

template <typename T, typename E, int kTokens, bool kGated>
__global__ void __launch_bounds__(kThreads, 2)
    hopper_gemm_kernel(const __grid_constant__ Maps maps, GemvParams p, int tiles, int stages, int parts) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using P = Place<E, kTokens, kGated>;
  extern __shared__ uint8_t raw[];
  const P place{raw + (-shared_address(raw) & 1023)};
  const Part part(tiles, stages, parts);
  if (threadIdx.x == kMultiplying) {
    fetch_map(maps.weights), fetch_map(maps.x);
    for (int slot = 0; slot < P::kStages; ++slot) {
      place.there(slot).init(2);
      place.read(slot).init(kMultiplying / 32);
    }
    let_copies_see_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kMultiplying) {
    multiply_all<T>(place, p, part);
  } else if (threadIdx.x == kMultiplying) {
    copy_all(place, part, [&](int slot, int tile, int stage) {
      const Barrier there = place.there(slot);
      const uint32_t to = place.weights(slot);
      there.expect(P::kXAt);
      const int column = stage * P::kColumns, row = tile * kRows;
      copy_box(to, maps.weights, there, column, row);
      copy_box(to + P::kWeightBytes, maps.weights, there, kGated ? column : column + P::kColumns / 2, kGated ? p.out + row : row);
    });
  } else if (threadIdx.x == kMultiplying + 32) {
    wait_for_inputs();  // of which weights are none
    copy_all(place, part, [&](int slot, int, int stage) {
      const Barrier there = place.there(slot);
      there.expect(P::kLines * P::kXBytes);
#pragma unroll
      for (int line = 0; line < P::kLines; ++line)
        copy_box(place.x(slot) + line * P::kXBytes, maps.x, there, stage * P::kColumns + line * P::kColumns / P::kLines, 0);
    });
  }
#endif
}

template <typename T, typename E, int kTokens, bool kGated>
cudaError_t run(const GemvParams& p, cudaStream_t stream) {
  using P = Place<E, kTokens, kGated>;
  auto kernel = hopper_gemm_kernel<T, E, kTokens, kGated>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes);
  if (error != cudaSuccess) return error;
  const auto in = static_cast<cuuint64_t>(p.in), rows = static_cast<cuuint64_t>(P::kOperands) * p.out;
  constexpr int kWidth = sizeof(E);
  constexpr auto kType = kWidth == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : kMapType<T>;
  constexpr auto kTurned = CU_TENSOR_MAP_SWIZZLE_128B;
  Maps maps;
  if (!map(maps.weights, kType, kTurned, p.weight, {in, rows}, kWidth, {kLineBytes / kWidth, kRows}) ||
      !map(maps.x, kType, kTurned, p.x, {in, static_cast<cuuint64_t>(p.rows)}, kWidth, {kLineBytes / kWidth, kTokens}))
    return cudaErrorInvalidValue;
  // Clusters of so many blocks that are resident at once.
  static const std::array<int, kMostParts + 1> resident = [kernel] {
    std::array<int, kMostParts + 1> found{0, 2 * static_cast<int>(multiprocessors())};
    for (int parts = 2; parts <= kMostParts; ++parts) {
      const Launch all(parts, kThreads, P::kBytes, nullptr, parts);
      if (cudaOccupancyMaxActiveClusters(&found[parts], kernel, all.config()) != cudaSuccess) found[parts] = 0;
    }
    return found;
  }();
  const int tiles = static_cast<int>(blocks_for(p.out, kRows)), stages = static_cast<int>(blocks_for(p.in, P::kColumns));
  int parts = 1, least = static_cast<int>(blocks_for(tiles, resident[1])) * stages;
  for (int more = 2; more <= std::min(kMostParts, stages); ++more) {
    if (resident[more] == 0) continue;
    const int cost = static_cast<int>(blocks_for(tiles, resident[more]) * blocks_for(stages, more)) + kClusterCost;
    if (cost < least) parts = more, least = cost;
  }
  const int blocks = parts > 1 ? tiles * parts : std::min(tiles, resident[1]);
  return cudaLaunchKernelEx(Launch(blocks, kThreads, P::kBytes, stream, parts).config(), kernel, maps, p, tiles, stages, parts);
}

template <typename T, typename E, int kTokens>
cudaError_t of_rows(const GemvParams& p, cudaStream_t stream) {
  return p.gated ? run<T, E, kTokens, true>(p, stream) : run<T, E, kTokens, false>(p, stream);
}

template <typename T, typename E>
cudaError_t of_weight(const GemvParams& p, cudaStream_t stream) {
  return p.rows <= 8 ? of_rows<T, E, 8>(p, stream) : p.rows <= 16 ? of_rows<T, E, 16>(p, stream) : of_rows<T, E, 32>(p, stream);
}

template <typename T>
cudaError_t of_type(const GemvParams& p, cudaStream_t stream) {
  return p.x_scale != nullptr ? of_weight<T, Float8>(p, stream) : of_weight<T, T>(p, stream);
}

}  // namespace

bool has_hopper_gemm(DType dtype, const GemvParams& p) {
  const bool codes = p.packing.codes == Codes::kFloat8 && p.x_scale != nullptr && p.packing.group_size == p.in && !p.norm;
  const auto lies_at = [](const void* from, uintptr_t multiple) { return reinterpret_cast<uintptr_t>(from) % multiple == 0; };
  return (codes || p.packing.codes == Codes::kNone) && (dtype == DType::kFloat16 || dtype == DType::kBFloat16) &&
         p.rows <= (codes ? kHopperGemmCodes : kHopperGemmRows) && p.in % (codes ? 16 : 8) == 0 && p.out % 4 == 0 &&
         p.norm_weight == nullptr && lies_at(p.x, 16) && lies_at(p.weight, 16) && lies_at(p.y, 8) && lies_at(p.residual, 8) &&
         device_property<cudaDevAttrComputeCapabilityMajor>() == 9 && encode() != nullptr;
}

cudaError_t hopper_gemm(DType dtype, const GemvParams& p, cudaStream_t stream) {
  return dtype == DType::kFloat16 ? of_type<__half>(p, stream) : of_type<__nv_bfloat16>(p, stream);
}

}  // namespace llmc::kernels
