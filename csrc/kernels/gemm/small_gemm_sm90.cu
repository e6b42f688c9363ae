// hopper_gemm() of a weight as it lies in memory, of 16 bits or codes of FP8 with x in FP8 too: Hopper's tensor cores read both
// from shared memory. A stage is 16 KB of the weight: 128 bytes of 64 gates and of their ups, or 256 of 64 rows. Reads the
// weight once, and x once for each tile, from the cache.
//
// Grouped, 128 columns are a group of x and of the weight's blocks, whose sums are scaled before they are added to the others;
// a tile's rows are of one block, and its ups of one.
//
// A norm costs nothing, as in gemv.cu: mean and deviation come from the x that is there for the products.
#include "small_gemm_pipeline_sm90.cuh"
#include "small_gemm_sm90.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using namespace sm90a;

constexpr int kWarps = 4, kMultiplying = kWarps * 32;
constexpr int kStepBytes = 32;   // of a row, of which a product takes the columns
constexpr int kExactStages = 4;  // of codes, whose sums the tensor core keeps less exactly than float32

template <typename E, int kTokens, bool kGated>
struct Stage {
  static constexpr int kOperands = kGated ? 2 : 1, kLines = kGated ? 1 : 2;
  static constexpr int kColumns = kLines * kLineBytes / static_cast<int>(sizeof(E));
  static constexpr uint32_t kWeightBytes = kRows * kLineBytes, kXBytes = kTokens * kLineBytes;  // of a line
  static constexpr uint32_t kXAt = kOperands * kLines * kWeightBytes;
  using In = Room<kOperands, kTokens, kXAt + kLines * kXBytes, kWarps>;
};

struct Maps {
  CUtensorMap weights, x;
};

// Enqueues the products of a stage's lines: added to sums_of(line, operand), or in place of what is there.
template <typename E, int kTokens, bool kGated, bool kAdds, typename SumsOf>
__device__ __forceinline__ void enqueue_stage(const typename Stage<E, kTokens, kGated>::In& room, int slot, SumsOf&& sums_of) {
  using S = Stage<E, kTokens, kGated>;
  const uint64_t weights = by_rows(room.stage(slot)), x = by_rows(room.stage(slot) + S::kXAt);
  begin_products();
#pragma unroll
  for (int line = 0; line < S::kLines; ++line)
#pragma unroll
    for (int step = 0; step < kLineBytes / kStepBytes; ++step)
#pragma unroll
      for (int m = 0; m < S::kOperands; ++m)
        Product<E, kTokens>::of_shared(sums_of(line, m), weights + ((line + m) * S::kWeightBytes + step * kStepBytes) / 16,
                                       x + (line * S::kXBytes + step * kStepBytes) / 16, kAdds || step > 0);
  end_products();
}

// Sums of codes, each group's scaled: see Product for who has which.
template <int kTokens, bool kGated>
__device__ __forceinline__ void add_groups(const typename Stage<Float8, kTokens, kGated>::In& room, const GemvParams& p,
                                           const Part& part, int tile, int& slot, int& parity,
                                           float (&total)[kGated ? 2 : 1][kTokens / 2]) {
  using S = Stage<Float8, kTokens, kGated>;
  const int t = threadIdx.x % 4, pitch = scale_pitch(p.rows), groups = p.in / kBlock;
  for (int stage = part.begin; stage < part.end; ++stage) {
    float2 of_x[S::kLines][kTokens / 8];
    float of_weight[S::kLines][S::kOperands];
#pragma unroll
    for (int line = 0; line < S::kLines; ++line) {
      const int group = min(stage * S::kLines + line, groups - 1);  // beyond the last there are zeros
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i)
        of_x[line][i] = *reinterpret_cast<const float2*>(p.x_scale + group * pitch + min(i * 8 + 2 * t, pitch - 2));
#pragma unroll
      for (int m = 0; m < S::kOperands; ++m)
        of_weight[line][m] = __ldg(p.packing.blocks + (m * p.out + tile * kRows) / kBlock * blocks_pitch(p.in) + group);
    }
    room.there(slot).wait(parity);
    float sum[S::kLines][S::kOperands][kTokens / 2];
    enqueue_stage<Float8, kTokens, kGated, false>(room, slot, [&](int line, int m) -> auto& { return sum[line][m]; });
    wait_for_products<0>();
    if (threadIdx.x % 32 == 0) room.read(slot).arrive();
#pragma unroll
    for (int line = 0; line < S::kLines; ++line)
#pragma unroll
      for (int m = 0; m < S::kOperands; ++m)
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
          const float2& pair = of_x[line][i / 4];
          total[m][i] = fmaf(sum[line][m][i], of_weight[line][m] * (i % 2 == 0 ? pair.x : pair.y), total[m][i]);
        }
    if (++slot == S::In::kStages) slot = 0, parity ^= 1;
  }
}

template <typename T, typename E, int kTokens, bool kGated, bool kGrouped>
__device__ __forceinline__ void multiply_all(const typename Stage<E, kTokens, kGated>::In& room, const GemvParams& p,
                                             const Part& part) {
  using S = Stage<E, kTokens, kGated>;
  constexpr bool kIsExact = !std::is_same_v<E, Float8>;
  const int thread = threadIdx.x, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  wait_for_inputs();
  let_next_start();

  constexpr int kVectors = kTokens * 8 / kMultiplying + (kTokens < 16);  // of a line; of row thread / 8 + 16 · i
  float of_x[kVectors][2] = {};
  int slot = 0, parity = 0;
  for (int tile = part.first; tile < part.tiles; tile += part.step) {
    float sum[S::kOperands][kTokens / 2] = {}, total[S::kOperands][kTokens / 2] = {};
    const bool measures = p.norm && tile == part.first;
    const Outputs<T, S::kOperands, kTokens, kMultiplying> outputs(p, part, tile);
    if constexpr (kGrouped) add_groups<kTokens, kGated>(room, p, part, tile, slot, parity, total);
    auto add_sums = [&] {
#pragma unroll
      for (int m = 0; m < S::kOperands; ++m)
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) total[m][i] += sum[m][i], sum[m][i] = 0;
    };
    int last = -1;
    for (int stage = kGrouped ? part.end : part.begin; stage < part.end; ++stage) {
      room.there(slot).wait(parity);
      enqueue_stage<E, kTokens, kGated, true>(room, slot, [&](int, int m) -> auto& { return sum[m]; });
      if constexpr (kIsExact)
        if (measures && thread < kTokens * 8)
#pragma unroll
          for (int line = 0; line < S::kLines; ++line)
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
              const uint32_t vector = (thread + i * kMultiplying) * 16;
              const auto words = load_shared<4>(room.stage(slot) + S::kXAt + line * S::kXBytes + vector);
              measure<E>(of_x[i], *reinterpret_cast<const uint4*>(&words));
            }
      if (!kIsExact && (stage - part.begin) % kExactStages == kExactStages - 1) {
        wait_for_products<0>();
        add_sums();
      } else {
        wait_for_products<1>();
      }
      if (last >= 0 && thread % 32 == 0) room.read(last).arrive();
      last = slot;
      if (++slot == S::In::kStages) slot = 0, parity ^= 1;
    }
    wait_for_products<0>();
    if (!kGrouped && thread % 32 == 0) room.read(last).arrive();
    if (!kGrouped) add_sums();
    if (part.parts == 1) room.meet();  // sums may still be read
    if (measures) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int mask = 1; mask < 8; mask <<= 1) of_x[i][k] += __shfl_xor_sync(~0u, of_x[i][k], mask);
        const int row = thread / 8 + kMultiplying / 8 * i;
        if (thread % 8 == 0 && row < kTokens) room.measured()[row] = make_float4(of_x[i][0], of_x[i][1], 0, 0);
      }
    }
#pragma unroll
    for (int m = 0; m < S::kOperands; ++m)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i)
        room.sums()[(m * kTokens + i / 4 * 8 + 2 * t + i % 2) * kPitch + warp * 16 + g + i / 2 % 2 * 8] = total[m][i];
    room.meet(part.parts);
    outputs.finish(room.sums(), room.measured());
  }
  room.leave(part.parts);
}

template <typename T, typename E, int kTokens, bool kGated, bool kGrouped>
__global__ void __launch_bounds__(kMultiplying + 64, kResident)
    gemm_kernel(const __grid_constant__ Maps maps, GemvParams p, int tiles, int stages, int parts) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = Stage<E, kTokens, kGated>;
  extern __shared__ uint8_t raw[];
  const typename S::In room{raw + (-shared_address(raw) & 1023)};
  const Part part(tiles, stages, parts);
  room.begin();
  if (threadIdx.x < kMultiplying) {
    multiply_all<T, E, kTokens, kGated, kGrouped>(room, p, part);
  } else if (threadIdx.x == kMultiplying) {
    copy_all</*kOfWeight=*/true>(room, part, [&](int slot, int tile, int stage) {
      const Barrier there = room.there(slot);
      const uint32_t to = room.stage(slot);
      const int column = stage * S::kColumns, row = tile * kRows;
      there.expect(S::kXAt);
      copy_box(to, maps.weights, there, column, row, 0);
      if (!kGated) copy_box(to + S::kWeightBytes, maps.weights, there, column + S::kColumns / 2, row, 0);
    });
  } else if (threadIdx.x == kMultiplying + 32) {
    wait_for_inputs();  // of which weights are none
    copy_all</*kOfWeight=*/false>(room, part, [&](int slot, int, int stage) {
      const Barrier there = room.there(slot);
      there.expect(S::kLines * S::kXBytes);
#pragma unroll
      for (int line = 0; line < S::kLines; ++line)
        copy_box(room.stage(slot) + S::kXAt + line * S::kXBytes, maps.x, there,
                 stage * S::kColumns + line * S::kColumns / S::kLines, 0);
    });
  }
#endif
}

template <typename T, typename E, int kTokens, bool kGated, bool kGrouped>
cudaError_t run(const GemvParams& p, cudaStream_t stream) {
  using S = Stage<E, kTokens, kGated>;
  constexpr int kWidth = sizeof(E);
  constexpr auto kType = kWidth == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : kMapType<T>;
  constexpr auto kTurned = CU_TENSOR_MAP_SWIZZLE_128B;
  const auto in = static_cast<cuuint64_t>(p.in), out = static_cast<cuuint64_t>(p.out);
  Maps maps;
  if (!map(maps.weights, kType, kTurned, p.weight, {in, out, S::kOperands}, kWidth, {kLineBytes / kWidth, kRows, S::kOperands}) ||
      !map(maps.x, kType, kTurned, p.x, {in, static_cast<cuuint64_t>(p.rows)}, kWidth, {kLineBytes / kWidth, kTokens}))
    return cudaErrorInvalidValue;
  const int stages = static_cast<int>(blocks_for(p.in, S::kColumns));
  return launch_shared<gemm_kernel<T, E, kTokens, kGated, kGrouped>, typename S::In>(stages, maps, p, stream);
}

template <typename T, typename E, int kTokens, bool kGrouped>
cudaError_t of_rows(const GemvParams& p, cudaStream_t stream) {
  return p.gated ? run<T, E, kTokens, true, kGrouped>(p, stream) : run<T, E, kTokens, false, kGrouped>(p, stream);
}

template <typename T, typename E, bool kGrouped = false>
cudaError_t of_weight(const GemvParams& p, cudaStream_t stream) {
  return p.rows <= 8    ? of_rows<T, E, 8, kGrouped>(p, stream)
         : p.rows <= 16 ? of_rows<T, E, 16, kGrouped>(p, stream)
                        : of_rows<T, E, 32, kGrouped>(p, stream);
}

template <typename T>
cudaError_t of_type(const GemvParams& p, cudaStream_t stream) {
  if (p.packing.codes == Codes::kFour) return packed_rows_gemm<T>(p, stream);
  if (p.x_scale == nullptr) return of_weight<T, T>(p, stream);
  return p.grouped ? of_weight<T, Float8, true>(p, stream) : of_weight<T, Float8>(p, stream);
}

}  // namespace

bool has_hopper_gemm(DType dtype, const GemvParams& p) {
  if ((dtype != DType::kFloat16 && dtype != DType::kBFloat16) || p.out % 4 != 0 || !lies_at(p.x, 16) || !lies_at(p.weight, 16) ||
      !lies_at(p.y, 8) || !lies_at(p.residual, 8) || device_property<cudaDevAttrComputeCapabilityMajor>() != 9 ||
      encode() == nullptr)
    return false;
  switch (p.packing.codes) {
    case Codes::kNone: return p.rows <= kHopperGemmRows && p.in % 8 == 0 && p.norm_weight == nullptr;
    case Codes::kFloat8:
      return p.rows <= kHopperGemmCodes && p.x_scale != nullptr && !p.norm &&
             (p.grouped ? p.packing.blocks != nullptr && p.in % kBlock == 0 && (!p.gated || p.out % kRows == 0)
                        : p.in % 16 == 0 && p.packing.group_size == p.in);
    case Codes::kFour: return has_packed_rows_gemm(p);
    default: return false;
  }
}

cudaError_t hopper_gemm(DType dtype, const GemvParams& p, cudaStream_t stream) {
  return dtype == DType::kFloat16 ? of_type<__half>(p, stream) : of_type<__nv_bfloat16>(p, stream);
}

}  // namespace llmc::kernels
