// Prefill attention on Hopper by wgmma (FlashAttention-3), after append() has rotated the queries
// and written the caches. A block takes the queries of consecutive tokens of one sequence that
// share a KV head, up to kRows rows. It iterates over the visible keys, kKeys at a time, last ones
// first. A producer warp copies by TMA; two consumer warpgroups have 64 rows each. While one uses
// the tensor cores the other computes its softmax, and within a warpgroup the PV of a tile overlaps
// the softmax of the next. Reads the visible keys and values once per block.
//
// A prefix shared by decoding sequences is handled the same way: whole tokens of any sequences; all
// see all of it. decode_kernel merges the partial results. The host does not know the
// prefix, so there are blocks for all sequences of a step and for the maximum number of splits.
#include <algorithm>

#include "../common/mma.cuh"
#include "../common/wgmma_sm90.cuh"
#include "attention.cuh"
#include "prefill.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using namespace sm90;

constexpr int kRows = kPrefixRows, kConsumerGroups = 2, kThreads = (1 + kConsumerGroups) * 128,
              kStages = 2;
constexpr int kSmemColumns = 64;  // columns of a row in shared memory
constexpr uint32_t kSmemRowBytes = 2 * kSmemColumns;

// Shared memory, aligned to 1,024 bytes.
template <int kDim, int kKeys>
struct SharedStorage {
  static constexpr uint32_t kLines = kDim / kSmemColumns, kQueryBytes = kRows * kDim * 2,
                            kTileBytes = kKeys * kDim * 2;
  static constexpr uint32_t kKeysAt = kQueryBytes, kValuesAt = kKeysAt + kStages * kTileBytes;
  static constexpr uint32_t kBarriersAt = kValuesAt + kStages * kTileBytes;
  static constexpr uint32_t kBytes = kBarriersAt + 8 * (1 + 4 * kStages) + 1024;

  uint32_t base;

  __device__ uint32_t keys(int stage) const { return base + kKeysAt + stage * kTileBytes; }
  __device__ uint32_t values(int stage) const { return base + kValuesAt + stage * kTileBytes; }
  __device__ Mbarrier barrier(int index) const { return {base + kBarriersAt + 8 * index}; }
  __device__ Mbarrier query_barrier() const { return barrier(0); }
  __device__ Mbarrier key_full_barrier(int stage) const { return barrier(1 + stage); }
  __device__ Mbarrier key_empty_barrier(int stage) const { return barrier(1 + kStages + stage); }
  __device__ Mbarrier value_full_barrier(int stage) const {
    return barrier(1 + 2 * kStages + stage);
  }
  __device__ Mbarrier value_empty_barrier(int stage) const {
    return barrier(1 + 3 * kStages + stage);
  }
};

// Boxes of kPrefillUnit positions of keys and values, and of runs of such boxes in consecutive
// cache blocks.
struct TensorMaps {
  CUtensorMap queries, keys, values, key_runs, value_runs;
};

// The tile of queries of a block, and the keys that it sees.
struct WorkTile {
  int sequence, first_token, tokens, past, begin, end, tiles;
};

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Producer warp. kRunKeys is a power of two; a box has as many positions, in one or several
// consecutive cache blocks.
template <int kRunKeys, int kDim, int kKeys>
__device__ __forceinline__ void produce(const SharedStorage<kDim, kKeys>& smem,
                                        const TensorMaps& maps, const AttentionParams& p,
                                        const WorkTile& work, int kv_head, int per_block) {
  using P = SharedStorage<kDim, kKeys>;
  const int lane = threadIdx.x % 32;
  constexpr int kUnits = kKeys / kPrefillUnit, kRun = kRunKeys / kPrefillUnit;
  static_assert(kUnits * P::kLines <= 32 && kUnits % kRun == 0);
  const int unit = lane % kUnits, line = lane / kUnits, in_run = unit % kRun;
  const bool copies = lane < static_cast<int>(kUnits * P::kLines);
  const uint32_t run = ((1u << kRun) - 1) << (lane - in_run);  // lanes of this run
  const int shift = __ffs(p.block_size) - 1, mask = p.block_size - 1;
  const int32_t* table =
      p.block_table + work.sequence * static_cast<int64_t>(p.max_seq_len >> shift);
  auto copy = [&](const CUtensorMap& map, const CUtensorMap& runs, uint32_t target,
                  Mbarrier barrier, int tile) {
    if (lane == 0) barrier.arrive_expect_tx(P::kTileBytes);
    // Positions after the last key are masked; any finite values do.
    const int wanted = work.begin + tile * kKeys + unit * kPrefillUnit;
    const int position = min(wanted, work.end - 1) & -kPrefillUnit;
    const int block = __ldg(table + (position >> shift)), in_block = position & mask;
    const int first = __shfl_sync(~0u, block, lane - in_run);
    const bool follows = position == wanted && block == first + (in_run * kPrefillUnit >> shift);
    const bool together = (__ballot_sync(~0u, follows) & run) == run;
    const uint32_t at = target + (line * kKeys + unit * kPrefillUnit) * kSmemRowBytes;
    if (!copies) return;
    const int row = (block * p.num_kv_heads + kv_head) * p.block_size + in_block;
    if (!together) tma_load(at, map, barrier, line * kSmemColumns, row);
    else if (in_run == 0)
      tma_load(at, runs, barrier, line * kSmemColumns, in_block, kv_head, block);
  };
  if (lane == 0) {
    const int group = p.num_heads / p.num_kv_heads;
    smem.query_barrier().arrive_expect_tx(P::kLines * per_block * group * kSmemRowBytes);
    for (uint32_t line = 0; line < P::kLines; ++line)
      tma_load(smem.base + line * kRows * kSmemRowBytes, maps.queries, smem.query_barrier(),
               line * kSmemColumns, 0, kv_head, work.first_token);
  }
  __syncwarp();
  for (int i = 0; i <= work.tiles; ++i) {
    if (i < work.tiles) {
      if (i >= kStages) smem.key_empty_barrier(i % kStages).wait(i / kStages - 1 & 1);
      copy(maps.keys, maps.key_runs, smem.keys(i % kStages), smem.key_full_barrier(i % kStages),
           work.tiles - 1 - i);
    }
    if (i > 0) {
      const int j = i - 1;
      if (j >= kStages) smem.value_empty_barrier(j % kStages).wait(j / kStages - 1 & 1);
      copy(maps.values, maps.value_runs, smem.values(j % kStages),
           smem.value_full_barrier(j % kStages), work.tiles - 1 - j);
    }
  }
}

// Epilogue: normalizes the sums and writes them to p.out; for a prefix, writes maximum, sum and
// weighted values as a partial result.
template <typename T, bool kPrefix, int kDim>
__device__ __forceinline__ void store_rows(const AttentionParams& p, const WorkTile& work,
                                           int kv_head, int heads, int t, const int (&token)[2],
                                           const int (&row)[2], const float (&out)[kDim / 2],
                                           const float (&row_max)[2], float (&row_sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
    row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
    if (token[r] >= work.tokens) continue;
    const int64_t token_head = static_cast<int64_t>(work.first_token + token[r]) * p.num_heads +
                               kv_head * heads + row[r] % heads;
    if constexpr (kPrefix) {
      float* result = prefix_partial(p, token_head, blockIdx.z, prefix_splits(p));
      if (t == 0) result[0] = row_max[r], result[1] = row_sum[r];
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        store(result + kPrefixSums + n * 8 + 2 * t,
              Vec<float, 2>{{out[4 * n + 2 * r], out[4 * n + 2 * r + 1]}});
      continue;
    }
    const float share =
        1 /
        (row_sum[r] + sink_weight(p.sinks, static_cast<int>(token_head % p.num_heads), row_max[r]));
    const OutputWriter<T> made(p.out, p.out_scale_inverse);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      made.write(token_head * kDim + 2 * t + n * 8,
                 {out[4 * n + 2 * r] * share, out[4 * n + 2 * r + 1] * share});
  }
}

// One consumer warpgroup: 64 rows of queries. A thread has rows row[0] and row[1]. The
// steps are lambdas: as members of a struct they took 3 % longer on an H200.
template <typename T, bool kPrefix, int kDim, int kKeys>
__device__ __forceinline__ void consume(const SharedStorage<kDim, kKeys>& smem,
                                        const AttentionParams& p, const WorkTile& work, int kv_head,
                                        int warpgroup) {
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
  const int first_seen_by_all = first_visible(p, position_of((warpgroup * 64 + 63) / heads));

  float out[kDim / 2] = {}, score[kKeys / 2], row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
  uint32_t weight[kKeys / 4];
  const float scale = p.scale * kLog2E;
  auto release = [&](Mbarrier barrier) {
    if (lane == 0) barrier.arrive();
  };
  auto qk_gemm = [&](int i) {
    const uint32_t queries = smem.base + warpgroup * 64 * kSmemRowBytes,
                   keys = smem.keys(i % kStages);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      Wgmma<T, kKeys>::ss(
          score, make_smem_desc_k_major(queries + k / 4 * kRows * kSmemRowBytes + k % 4 * 32),
          make_smem_desc_k_major(keys + k / 4 * kKeys * kSmemRowBytes + k % 4 * 32), k > 0);
    wgmma_commit();
  };
  auto pv_gemm = [&](int i) {
    const uint32_t values = smem.values(i % kStages);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      Wgmma<T, kDim>::rs(
          out, weight + 4 * k,
          make_smem_desc_mn_major(values + k * 16 * kSmemRowBytes, kKeys * kSmemRowBytes));
    wgmma_commit();
  };
  // The tile's weights from its scores, and what earlier sums are to be multiplied with.
  auto start_of_tile = [&](int i) { return work.begin + (work.tiles - 1 - i) * kKeys; };
  auto online_softmax = [&](int i, float (&old)[2], auto masked) {
    if constexpr (decltype(masked)::value) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int last = position_of(token[r]), first = first_visible(p, last);
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
      for (int n = 0; n < kKeys / 8; ++n)
        higher = fmaxf(higher, fmaxf(score[4 * n + 2 * r], score[4 * n + 2 * r + 1]));
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
      higher = fmaxf(row_max[r], higher * scale);
      const float shift = higher == -INFINITY ? 0 : higher;
      old[r] = fast_exp2(row_max[r] - shift);
      row_max[r] = higher;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& s = score[4 * n + 2 * r + c];
          s = fast_exp2(s * scale - shift);
          sum += s;
        }
      row_sum[r] = row_sum[r] * old[r] + sum;
    }
  };
  auto convert_weights = [&] {
#pragma unroll
    for (int k = 0; k < kKeys / 4; ++k) weight[k] = pack2<T>(score[2 * k], score[2 * k + 1]);
  };

  // A warpgroup's turn at the tensor cores is its barrier, the first one's first.
  const int mine = 1 + warpgroup, others = 2 - warpgroup;
  if (warpgroup == 1 && work.tiles > 1) named_barrier_arrive(others, kConsumerGroups * 128);
  float old[2];
  smem.query_barrier().wait(0);
  smem.key_full_barrier(0).wait(0);
  wgmma_fence();
  qk_gemm(0);
  wgmma_wait<0>();
  release(smem.key_empty_barrier(0));
  online_softmax(0, old, std::true_type());
  convert_weights();
  auto turn = [&](int i, auto masked) {
    smem.key_full_barrier(i % kStages).wait(i / kStages & 1);
    named_barrier_sync(mine, kConsumerGroups * 128);
    wgmma_fence();
    qk_gemm(i);
    smem.value_full_barrier((i - 1) % kStages).wait((i - 1) / kStages & 1);
    wgmma_fence();
    pv_gemm(i - 1);
    if (warpgroup == 0 || i + 1 < work.tiles) named_barrier_arrive(others, kConsumerGroups * 128);
    wgmma_wait<1>();
    release(smem.key_empty_barrier(i % kStages));
    online_softmax(i, old, masked);
    wgmma_wait<0>();
    release(smem.value_empty_barrier((i - 1) % kStages));
    if (__any_sync(~0u, old[0] != 1 || old[1] != 1)) {
#pragma unroll
      for (int c = 0; c < kDim / 2; ++c) out[c] *= old[c / 2 % 2];
    }
    convert_weights();
  };
  // Tiles that every query of this warpgroup sees whole need no masks.
  int i = 1;
  for (; i < work.tiles && start_of_tile(i) + kKeys > lowest + 1; ++i) turn(i, std::true_type());
  for (; i < work.tiles && start_of_tile(i) >= first_seen_by_all; ++i) turn(i, std::false_type());
  for (; i < work.tiles; ++i) turn(i, std::true_type());
  smem.value_full_barrier((work.tiles - 1) % kStages).wait((work.tiles - 1) / kStages & 1);
  wgmma_fence();
  pv_gemm(work.tiles - 1);
  wgmma_wait<0>();

  store_rows<T, kPrefix, kDim>(p, work, kv_head, heads, t, token, row, out, row_max, row_sum);
}

// Sequence b has the blocks from start_of(b) / per_block + b on; its last one may be empty. Blocks
// with the most keys come first.
__device__ __forceinline__ WorkTile prompt_work(const AttentionParams& p, int per_block) {
  const int block = gridDim.y - 1 - blockIdx.y;
  auto first_block = [&](int b) { return start_of(p, b) / per_block + b; };
  int sequence = 0;
  for (int high = p.batch - 1; sequence < high;) {
    const int middle = (sequence + high + 1) / 2;
    if (first_block(middle) <= block) sequence = middle;
    else high = middle - 1;
  }
  const int skipped = (block - first_block(sequence)) * per_block;
  WorkTile work{sequence, start_of(p, sequence) + skipped};
  work.tokens = min(per_block, start_of(p, sequence + 1) - work.first_token);
  work.past = p.past_lens[sequence] + skipped;  // position of the first query
  work.end = work.past + work.tokens;           // keys that any query sees
  work.begin = first_visible(p, work.past);
  return work;
}

// A split of the prefix, for some tokens if any of them shares it.
__device__ __forceinline__ WorkTile prefix_work(const AttentionParams& p, int per_block) {
  WorkTile work{p.prefix.of[0], static_cast<int>(blockIdx.y) * per_block};
  const int here = min(per_block, p.batch - work.first_token), thread = threadIdx.x;
  work.begin = blockIdx.z * prefix_split_size(p);
  work.end = min(p.prefix.of[1], work.begin + prefix_split_size(p));
  const bool shares = thread < here && shares_prefix(p, work.first_token + thread);
  work.tokens = __syncthreads_or(shares) && work.begin < work.end ? here : 0;
  return work;
}

template <typename T, int kDim, int kKeys, int kRunKeys, bool kPrefix>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ TensorMaps maps, AttentionParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using P = SharedStorage<kDim, kKeys>;
  extern __shared__ uint8_t raw[];
  const P smem{(smem_address(raw) + 1023) & ~1023u};
  const int kv_head = blockIdx.x, per_block = kRows / (p.num_heads / p.num_kv_heads);
  if (threadIdx.x == 0) {
    smem.query_barrier().init(1);
    for (int stage = 0; stage < kStages; ++stage) {
      smem.key_full_barrier(stage).init(1);
      smem.value_full_barrier(stage).init(1);
      smem.key_empty_barrier(stage).init(kConsumerGroups * 4);
      smem.value_empty_barrier(stage).init(kConsumerGroups * 4);
    }
    fence_mbarrier_init();
  }
  pdl_wait();
  pdl_launch_dependents();

  WorkTile work = kPrefix ? prefix_work(p, per_block) : prompt_work(p, per_block);
  if (work.tokens <= 0) return;
  work.begin &= -kRunKeys;
  work.tiles = (work.end - work.begin + kKeys - 1) / kKeys;
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform for a warp
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x < 32) produce<kRunKeys>(smem, maps, p, work, kv_head, per_block);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume<T, kPrefix>(smem, p, work, kv_head, group - 1);
  }
#endif
}

// Tensor map of T; a box has kSmemColumns of the innermost dimension.
template <typename T, int kRank>
bool make_tensor_map(CUtensorMap& made, const void* data, const cuuint64_t (&sizes)[kRank],
                     const cuuint32_t (&box)[kRank]) {
  return sm90::make_tensor_map(made, kTensorMapType<T>, CU_TENSOR_MAP_SWIZZLE_128B, data, sizes,
                               sizeof(T), box);
}

template <bool kPrefix, typename T, int kDim, int kKeys, int kRunKeys>
cudaError_t run(const AttentionParams& p, cudaStream_t stream) {
  using P = SharedStorage<kDim, kKeys>;
  const auto kernel = prefill_kernel<T, kDim, kKeys, kRunKeys, kPrefix>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes);
  if (error != cudaSuccess) return error;
  const auto group = static_cast<cuuint32_t>(p.num_heads / p.num_kv_heads),
             per_block = kRows / group;
  const auto kv_heads = static_cast<cuuint64_t>(p.num_kv_heads);
  const auto tokens = static_cast<cuuint64_t>(p.num_tokens),
             blocks = static_cast<cuuint64_t>(p.num_blocks);
  const auto size = static_cast<cuuint32_t>(p.block_size),
             in_block = std::min<cuuint32_t>(size, kRunKeys);
  const cuuint64_t rows[] = {kDim, blocks * kv_heads * size},
                   cache[] = {kDim, size, kv_heads, blocks};
  const cuuint32_t unit[] = {kSmemColumns, kPrefillUnit},
                   run[] = {kSmemColumns, in_block, 1, kRunKeys / in_block};
  TensorMaps maps;
  if (!make_tensor_map<T, 4>(maps.queries, p.queries, {kDim, group, kv_heads, tokens},
                             {kSmemColumns, group, 1, per_block}) ||
      !make_tensor_map<T>(maps.keys, p.key_cache, rows, unit) ||
      !make_tensor_map<T>(maps.values, p.value_cache, rows, unit) ||
      !make_tensor_map<T>(maps.key_runs, p.key_cache, cache, run) ||
      !make_tensor_map<T>(maps.value_runs, p.value_cache, cache, run))
    return cudaErrorInvalidValue;
  // Maximum number of query blocks: every sequence may end in a partial one.
  const unsigned parts =
      kPrefix ? prefix_blocks(p) / p.num_kv_heads : p.num_tokens / per_block + p.batch;
  return launch(kernel, dim3(p.num_kv_heads, parts, kPrefix ? max_prefix_splits(p) : 1), kThreads,
                P::kBytes, stream, maps, p);
}

template <bool kPrefix, typename T>
cudaError_t dispatch_head_dim(const AttentionParams& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 64: return run<kPrefix, T, 64, 128, 64>(p, stream);
    case 128: return run<kPrefix, T, 128, 160, 32>(p, stream);
    case 256: return run<kPrefix, T, 256, 64, 64>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

bool has_prefill_sm90(DType dtype, const AttentionParams& p) {
  const int group = p.num_heads / p.num_kv_heads;
  if (group > kRows || p.num_tokens / (kRows / group) + p.batch > 65535)
    return false;  // maximum grid dimension
  return (dtype == DType::kFloat16 || dtype == DType::kBFloat16) && !p.float8 && p.softcap == 0 &&
         p.block_table != nullptr && p.ranges == nullptr && p.block_size >= kPrefillUnit &&
         (p.head_dim == 64 || p.head_dim == 128 || p.head_dim == 256) &&
         device_attribute<cudaDevAttrComputeCapabilityMajor>() == 9 &&
         tensor_map_encoder() != nullptr;
}

cudaError_t prefill_sm90(DType dtype, const AttentionParams& p, cudaStream_t stream) {
  return dtype == DType::kFloat16 ? dispatch_head_dim<false, __half>(p, stream)
                                  : dispatch_head_dim<false, __nv_bfloat16>(p, stream);
}

bool can_share_prefix(DType dtype, const AttentionParams& p) {
  return has_prefill_sm90(dtype, p) && p.window == 0 && p.chunk == 0;
}

// There are several splits only with at most kPrefixBlocks blocks.
int64_t prefix_scratch(int batch, int num_heads, int num_kv_heads, int head_dim) {
  AttentionParams p{};
  p.batch = batch, p.num_heads = num_heads, p.num_kv_heads = num_kv_heads;
  if (num_heads / num_kv_heads > kPrefixRows) return 0;
  const int64_t blocks = std::max(prefix_blocks(p), kPrefixBlocks);
  return blocks * kPrefixRows * (head_dim + kPrefixSums) * static_cast<int64_t>(sizeof(float));
}

cudaError_t prefix_attention(DType dtype, const AttentionParams& p, cudaStream_t stream) {
  if (!can_share_prefix(dtype, p)) return cudaErrorInvalidValue;
  return dtype == DType::kFloat16 ? dispatch_head_dim<true, __half>(p, stream)
                                  : dispatch_head_dim<true, __nv_bfloat16>(p, stream);
}

}  // namespace llmc::kernels
