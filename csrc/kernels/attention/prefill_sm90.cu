// Causal attention of many new tokens on Hopper's tensor cores, after append() has written the caches and turned the
// queries. A block takes the queries of consecutive tokens of one sequence that share a KV head, up to kRows rows; it
// walks over the visible keys kKeys at a time, the last ones first. One warp copies, two warpgroups with 64 rows each
// multiply: while one has the tensor cores, the other makes its softmax, and within one the values' product of a tile
// runs beside the softmax of the next (FlashAttention-3). Reads the visible keys and values once per block.
//
// A prefix that decoding sequences share is attended to likewise, by whole tokens of whichever sequences, all of which see
// all of it; what is left of each row decode_kernel merges with the rest of its sequence. How long it is the host does not
// know: there are blocks for all sequences of a step, and for as many parts as there may be.
#include <algorithm>

#include "../common/mma.cuh"
#include "../common/wgmma_sm90.cuh"
#include "attention.cuh"
#include "prefill.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using namespace sm90a;

constexpr int kRows = kPrefixRows, kGroups = 2, kThreads = (1 + kGroups) * 128, kStages = 2;
constexpr int kLine = 64;  // columns that a row of shared memory has
constexpr uint32_t kLineBytes = 2 * kLine;

// Where in shared memory things lie, in bytes from a multiple of 1,024 on.
template <int kDim, int kKeys>
struct Place {
  static constexpr uint32_t kLines = kDim / kLine, kQueryBytes = kRows * kDim * 2, kTileBytes = kKeys * kDim * 2;
  static constexpr uint32_t kKeysAt = kQueryBytes, kValuesAt = kKeysAt + kStages * kTileBytes;
  static constexpr uint32_t kBarriersAt = kValuesAt + kStages * kTileBytes;
  static constexpr uint32_t kBytes = kBarriersAt + 8 * (1 + 4 * kStages) + 1024;

  uint32_t base;

  __device__ uint32_t keys(int stage) const { return base + kKeysAt + stage * kTileBytes; }
  __device__ uint32_t values(int stage) const { return base + kValuesAt + stage * kTileBytes; }
  __device__ Barrier barrier(int index) const { return {base + kBarriersAt + 8 * index}; }
  __device__ Barrier queries_there() const { return barrier(0); }
  __device__ Barrier keys_there(int stage) const { return barrier(1 + stage); }
  __device__ Barrier keys_read(int stage) const { return barrier(1 + kStages + stage); }
  __device__ Barrier values_there(int stage) const { return barrier(1 + 2 * kStages + stage); }
  __device__ Barrier values_read(int stage) const { return barrier(1 + 3 * kStages + stage); }
};

// Keys and values in boxes of kPrefillUnit positions, and of `run` such boxes, where blocks follow one another as the
// positions do.
struct Maps {
  CUtensorMap queries, keys, values, key_runs, value_runs;
};

// A block's part of the work.
struct Work {
  int sequence, first_token, tokens, past, begin, end, tiles;
};

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// kRunKeys is a power of two, and blocks of as many positions or fewer lie one behind the other in a box of so many.
template <int kRunKeys, int kDim, int kKeys>
__device__ __forceinline__ void copy_all(const Place<kDim, kKeys>& place, const Maps& maps,
                                         const AttentionParams& p, const Work& work, int kv_head, int per_block) {
  using P = Place<kDim, kKeys>;
  const int lane = threadIdx.x % 32;
  constexpr int kUnits = kKeys / kPrefillUnit, kRun = kRunKeys / kPrefillUnit;
  static_assert(kUnits * P::kLines <= 32 && kUnits % kRun == 0);
  const int unit = lane % kUnits, line = lane / kUnits, in_run = unit % kRun;
  const bool copies = lane < static_cast<int>(kUnits * P::kLines);
  const uint32_t run = ((1u << kRun) - 1) << (lane - in_run);  // the lanes of this one's run
  const int shift = __ffs(p.block_size) - 1, mask = p.block_size - 1;
  const int32_t* table = p.block_table + work.sequence * static_cast<int64_t>(p.max_seq_len >> shift);
  auto copy = [&](const CUtensorMap& map, const CUtensorMap& runs, uint32_t target, Barrier barrier, int tile) {
    if (lane == 0) barrier.expect(P::kTileBytes);
    // What lies behind the last key is masked: any numbers do.
    const int wanted = work.begin + tile * kKeys + unit * kPrefillUnit;
    const int position = min(wanted, work.end - 1) & -kPrefillUnit;
    const int block = __ldg(table + (position >> shift)), in_block = position & mask;
    const int first = __shfl_sync(~0u, block, lane - in_run);
    const bool follows = position == wanted && block == first + (in_run * kPrefillUnit >> shift);
    const bool together = (__ballot_sync(~0u, follows) & run) == run;
    const uint32_t at = target + (line * kKeys + unit * kPrefillUnit) * kLineBytes;
    if (!copies) return;
    const int row = (block * p.num_kv_heads + kv_head) * p.block_size + in_block;
    if (!together) copy_box(at, map, barrier, line * kLine, row);
    else if (in_run == 0) copy_box(at, runs, barrier, line * kLine, in_block, kv_head, block);
  };
  if (lane == 0) {
    const int group = p.num_heads / p.num_kv_heads;
    place.queries_there().expect(P::kLines * per_block * group * kLineBytes);
    for (uint32_t line = 0; line < P::kLines; ++line)
      copy_box(place.base + line * kRows * kLineBytes, maps.queries, place.queries_there(), line * kLine, 0, kv_head,
               work.first_token);
  }
  __syncwarp();
  for (int i = 0; i <= work.tiles; ++i) {
    if (i < work.tiles) {
      if (i >= kStages) place.keys_read(i % kStages).wait(i / kStages - 1 & 1);
      copy(maps.keys, maps.key_runs, place.keys(i % kStages), place.keys_there(i % kStages), work.tiles - 1 - i);
    }
    if (i > 0) {
      const int j = i - 1;
      if (j >= kStages) place.values_read(j % kStages).wait(j / kStages - 1 & 1);
      copy(maps.values, maps.value_runs, place.values(j % kStages), place.values_there(j % kStages),
           work.tiles - 1 - j);
    }
  }
}

template <typename T, bool kPrefix, int kDim, int kKeys>
__device__ __forceinline__ void multiply_all(const Place<kDim, kKeys>& place, const AttentionParams& p,
                                             const Work& work, int kv_head, int warpgroup) {
  const int heads = p.num_heads / p.num_kv_heads;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
  int token[2], row[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row[r] = warpgroup * 64 + warp * 16 + lane / 4 + 8 * r;
    token[r] = row[r] / heads;
  }
  // The first position of this warpgroup's queries, and the first key that its last one sees.
  auto position_of = [&](int token) { return kPrefix ? work.end - 1 : work.past + token; };
  const int lowest = position_of(warpgroup * 64 / heads);
  const int seen_by_all = first_seen(p, position_of((warpgroup * 64 + 63) / heads));

  float out[kDim / 2] = {}, score[kKeys / 2], peak[2] = {-INFINITY, -INFINITY}, total[2] = {};
  uint32_t weight[kKeys / 4];
  const float scale = p.scale * kLog2E;
  auto release = [&](Barrier barrier) {
    if (lane == 0) barrier.arrive();
  };
  auto score_tile = [&](int i) {
    const uint32_t queries = place.base + warpgroup * 64 * kLineBytes, keys = place.keys(i % kStages);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      Product<T, kKeys>::of_shared(score, by_rows(queries + k / 4 * kRows * kLineBytes + k % 4 * 32),
                                   by_rows(keys + k / 4 * kKeys * kLineBytes + k % 4 * 32), k > 0);
    end_products();
  };
  auto weigh_values = [&](int i) {
    const uint32_t values = place.values(i % kStages);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      Product<T, kDim>::of_registers(out, weight + 4 * k, by_columns(values + k * 16 * kLineBytes, kKeys * kLineBytes));
    end_products();
  };
  // The tile's weights from its scores, and what earlier sums are to be multiplied with.
  auto start_of_tile = [&](int i) { return work.begin + (work.tiles - 1 - i) * kKeys; };
  auto soften = [&](int i, float (&old)[2], auto masked) {
    if constexpr (decltype(masked)::value) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int last = position_of(token[r]), first = first_seen(p, last);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int key = start_of_tile(i) + n * 8 + 2 * t + c;
            if (key > last || key < first) score[4 * n + 2 * r + c] = -INFINITY;
          }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float higher = score[2 * r];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) higher = fmaxf(higher, fmaxf(score[4 * n + 2 * r], score[4 * n + 2 * r + 1]));
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
      higher = fmaxf(peak[r], higher * scale);
      const float shift = higher == -INFINITY ? 0 : higher;
      old[r] = exp2_of(peak[r] - shift);
      peak[r] = higher;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& s = score[4 * n + 2 * r + c];
          s = exp2_of(s * scale - shift);
          sum += s;
        }
      total[r] = total[r] * old[r] + sum;
    }
  };
  auto keep_weights = [&] {
#pragma unroll
    for (int k = 0; k < kKeys / 4; ++k) weight[k] = pack<T>(score[2 * k], score[2 * k + 1]);
  };

  // A warpgroup's turn at the tensor cores is its barrier, the first one's first.
  const int mine = 1 + warpgroup, others = 2 - warpgroup;
  if (warpgroup == 1 && work.tiles > 1) arrive_at(others, kGroups * 128);
  float old[2];
  place.queries_there().wait(0);
  place.keys_there(0).wait(0);
  begin_products();
  score_tile(0);
  wait_for_products<0>();
  release(place.keys_read(0));
  soften(0, old, std::true_type());
  keep_weights();
  auto turn = [&](int i, auto masked) {
    place.keys_there(i % kStages).wait(i / kStages & 1);
    meet(mine, kGroups * 128);
    begin_products();
    score_tile(i);
    place.values_there((i - 1) % kStages).wait((i - 1) / kStages & 1);
    begin_products();
    weigh_values(i - 1);
    if (warpgroup == 0 || i + 1 < work.tiles) arrive_at(others, kGroups * 128);
    wait_for_products<1>();
    release(place.keys_read(i % kStages));
    soften(i, old, masked);
    wait_for_products<0>();
    release(place.values_read((i - 1) % kStages));
    if (__any_sync(~0u, old[0] != 1 || old[1] != 1)) {
#pragma unroll
      for (int c = 0; c < kDim / 2; ++c) out[c] *= old[c / 2 % 2];
    }
    keep_weights();
  };
  // Tiles that every query of this warpgroup sees whole need no masks.
  int i = 1;
  for (; i < work.tiles && start_of_tile(i) + kKeys > lowest + 1; ++i) turn(i, std::true_type());
  for (; i < work.tiles && start_of_tile(i) >= seen_by_all; ++i) turn(i, std::false_type());
  for (; i < work.tiles; ++i) turn(i, std::true_type());
  place.values_there((work.tiles - 1) % kStages).wait((work.tiles - 1) / kStages & 1);
  begin_products();
  weigh_values(work.tiles - 1);
  wait_for_products<0>();

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
    if (token[r] >= work.tokens) continue;
    const int64_t token_head =
        static_cast<int64_t>(work.first_token + token[r]) * p.num_heads + kv_head * heads + row[r] % heads;
    if constexpr (kPrefix) {
      float* result = prefix_result(p, token_head, blockIdx.z, prefix_parts(p));
      if (t == 0) result[0] = peak[r], result[1] = total[r];
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        store(result + kPrefixSums + n * 8 + 2 * t, Vec<float, 2>{{out[4 * n + 2 * r], out[4 * n + 2 * r + 1]}});
      continue;
    }
    const float share = 1 / (total[r] + sink_of(p.sinks, static_cast<int>(token_head % p.num_heads), peak[r]));
    const Made<T> made(p.out, p.out_inverse);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      made.put(token_head * kDim + 2 * t + n * 8, {out[4 * n + 2 * r] * share, out[4 * n + 2 * r + 1] * share});
  }
}

// Sequence b has the blocks from start_of(b) / per_block + b on, the last of them perhaps without tokens. Those with the most
// keys come first.
__device__ __forceinline__ Work prompt_of_block(const AttentionParams& p, int per_block) {
  const int block = gridDim.y - 1 - blockIdx.y;
  auto first_block = [&](int b) { return start_of(p, b) / per_block + b; };
  int sequence = 0;
  for (int high = p.batch - 1; sequence < high;) {
    const int middle = (sequence + high + 1) / 2;
    if (first_block(middle) <= block) sequence = middle; else high = middle - 1;
  }
  const int skipped = (block - first_block(sequence)) * per_block;
  Work work{sequence, start_of(p, sequence) + skipped};
  work.tokens = min(per_block, start_of(p, sequence + 1) - work.first_token);
  work.past = p.past_lens[sequence] + skipped;  // position of the first query
  work.end = work.past + work.tokens;           // keys that any query sees
  work.begin = first_seen(p, work.past);
  return work;
}

// A part of the prefix, for some tokens if any of them shares it.
__device__ __forceinline__ Work prefix_of_block(const AttentionParams& p, int per_block) {
  Work work{p.prefix.of[0], static_cast<int>(blockIdx.y) * per_block};
  const int here = min(per_block, p.batch - work.first_token), thread = threadIdx.x;
  work.begin = blockIdx.z * prefix_part(p);
  work.end = min(p.prefix.of[1], work.begin + prefix_part(p));
  const bool shares = thread < here && shares_prefix(p, work.first_token + thread);
  work.tokens = __syncthreads_or(shares) && work.begin < work.end ? here : 0;
  return work;
}

template <typename T, int kDim, int kKeys, int kRunKeys, bool kPrefix>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(const __grid_constant__ Maps maps, AttentionParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using P = Place<kDim, kKeys>;
  extern __shared__ uint8_t raw[];
  const P place{(shared_address(raw) + 1023) & ~1023u};
  const int kv_head = blockIdx.x, per_block = kRows / (p.num_heads / p.num_kv_heads);
  if (threadIdx.x == 0) {
    place.queries_there().init(1);
    for (int stage = 0; stage < kStages; ++stage) {
      place.keys_there(stage).init(1);
      place.values_there(stage).init(1);
      place.keys_read(stage).init(kGroups * 4);
      place.values_read(stage).init(kGroups * 4);
    }
    let_copies_see_barriers();
  }
  wait_for_inputs();
  let_next_start();

  Work work = kPrefix ? prefix_of_block(p, per_block) : prompt_of_block(p, per_block);
  if (work.tokens <= 0) return;
  work.begin &= -kRunKeys;
  work.tiles = (work.end - work.begin + kKeys - 1) / kKeys;
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be one for a warp
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x < 32) copy_all<kRunKeys>(place, maps, p, work, kv_head, per_block);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    multiply_all<T, kPrefix>(place, p, work, kv_head, group - 1);
  }
#endif
}

// Of elements of T; a box has kLine of the innermost ones.
template <typename T, int kRank>
bool map(CUtensorMap& made, const void* data, const cuuint64_t (&sizes)[kRank], const cuuint32_t (&box)[kRank]) {
  return sm90a::map(made, kMapType<T>, CU_TENSOR_MAP_SWIZZLE_128B, data, sizes, sizeof(T), box);
}

template <bool kPrefix, typename T, int kDim, int kKeys, int kRunKeys>
cudaError_t run(const AttentionParams& p, cudaStream_t stream) {
  using P = Place<kDim, kKeys>;
  const auto kernel = prefill_kernel<T, kDim, kKeys, kRunKeys, kPrefix>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes);
  if (error != cudaSuccess) return error;
  const auto group = static_cast<cuuint32_t>(p.num_heads / p.num_kv_heads), per_block = kRows / group;
  const auto kv_heads = static_cast<cuuint64_t>(p.num_kv_heads);
  const auto tokens = static_cast<cuuint64_t>(p.num_tokens), blocks = static_cast<cuuint64_t>(p.num_blocks);
  const auto size = static_cast<cuuint32_t>(p.block_size), in_block = std::min<cuuint32_t>(size, kRunKeys);
  const cuuint64_t rows[] = {kDim, blocks * kv_heads * size}, cache[] = {kDim, size, kv_heads, blocks};
  const cuuint32_t unit[] = {kLine, kPrefillUnit}, run[] = {kLine, in_block, 1, kRunKeys / in_block};
  Maps maps;
  if (!map<T, 4>(maps.queries, p.queries, {kDim, group, kv_heads, tokens}, {kLine, group, 1, per_block}) ||
      !map<T>(maps.keys, p.key_cache, rows, unit) || !map<T>(maps.values, p.value_cache, rows, unit) ||
      !map<T>(maps.key_runs, p.key_cache, cache, run) || !map<T>(maps.value_runs, p.value_cache, cache, run))
    return cudaErrorInvalidValue;
  // At most so many blocks of queries, as every sequence may end in a broken one.
  const unsigned parts = kPrefix ? prefix_blocks(p) / p.num_kv_heads : p.num_tokens / per_block + p.batch;
  return launch(kernel, dim3(p.num_kv_heads, parts, kPrefix ? most_prefix_parts(p) : 1), kThreads, P::kBytes, stream, maps,
                p);
}

template <bool kPrefix, typename T>
cudaError_t of_type(const AttentionParams& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 64: return run<kPrefix, T, 64, 128, 64>(p, stream);
    case 128: return run<kPrefix, T, 128, 160, 32>(p, stream);
    case 256: return run<kPrefix, T, 256, 64, 64>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

bool prefills_on_hopper(DType dtype, const AttentionParams& p) {
  const int group = p.num_heads / p.num_kv_heads;
  if (group > kRows || p.num_tokens / (kRows / group) + p.batch > 65535) return false;  // more than a grid has
  return (dtype == DType::kFloat16 || dtype == DType::kBFloat16) && !p.float8 && p.softcap == 0 &&
         p.block_table != nullptr && p.block_size >= kPrefillUnit &&
         (p.head_dim == 64 || p.head_dim == 128 || p.head_dim == 256) &&
         device_property<cudaDevAttrComputeCapabilityMajor>() == 9 && encode() != nullptr;
}

cudaError_t prefill_on_hopper(DType dtype, const AttentionParams& p, cudaStream_t stream) {
  return dtype == DType::kFloat16 ? of_type<false, __half>(p, stream) : of_type<false, __nv_bfloat16>(p, stream);
}

bool can_share_prefix(DType dtype, const AttentionParams& p) {
  return prefills_on_hopper(dtype, p) && p.window == 0 && p.chunk == 0;
}

// Parts are several only where they are at most kPrefixBlocks blocks.
int64_t prefix_scratch(int batch, int num_heads, int num_kv_heads, int head_dim) {
  AttentionParams p{};
  p.batch = batch, p.num_heads = num_heads, p.num_kv_heads = num_kv_heads;
  if (num_heads / num_kv_heads > kPrefixRows) return 0;
  const int64_t blocks = std::max(prefix_blocks(p), kPrefixBlocks);
  return blocks * kPrefixRows * (head_dim + kPrefixSums) * static_cast<int64_t>(sizeof(float));
}

cudaError_t prefix_attention(DType dtype, const AttentionParams& p, cudaStream_t stream) {
  if (!can_share_prefix(dtype, p)) return cudaErrorInvalidValue;
  return dtype == DType::kFloat16 ? of_type<true, __half>(p, stream) : of_type<true, __nv_bfloat16>(p, stream);
}

}  // namespace llmc::kernels
