// Decode attention by mma: one new token per sequence, 16-bit types, split KV (flash-decoding).
//
// A block takes one sequence, one KV head and up to 8 of its query heads, over one KV split as
// plan_kv_splits_kernel has planned. It normalizes and rotates its heads itself, and appends the
// new key and value. A warp takes 16 keys at a time, as rows of the mma tile: S = K * Q^T, with K's
// dimensions permuted so that a thread has 8 adjacent elements of a key. The transposed weights
// (movmatrix) times V are the sums; V's rows are paired by byte permutes, and its columns permuted
// so that a thread has 8 adjacent elements of a value. With a head_dim above 256 the sums are V^T
// times the weights, which takes half the registers. Keys and values are copied to shared memory
// rounds ahead, by whole rows, the first of them before the previous kernel has ended (PDL). The
// softmaxes of warps are merged at the end, and those of splits by the block that ends last. Reads
// the visible keys and values once per 8 query heads; writes head_dim elements per head.
#include "../common/cp_async.cuh"
#include "../common/mma.cuh"
#include "attention.cuh"
#include "decode.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kHeads = 8, kKeys = 16;
// Costs in positions that a block could read meanwhile: of starting a split, of merging splits, and
// of the next kernel's first weights waiting for a free SM.
constexpr int kSplitStartCost = 128, kSplitMergeCost = 450, kBusyCost = 150;
constexpr int kSpareSplits = 16;  // for sequences longer than the others, with any batch size
constexpr int kPlanThreads = 256;

int columns_of(const AttentionParams& p) {
  const int group = p.num_heads / p.num_kv_heads;
  return p.num_kv_heads * ((group + kHeads - 1) / kHeads);
}

// Maximum number of KV splits of a step. With few sequences, one block per SM; two, if there is
// more than one block per SM without splits.
int max_kv_splits(const AttentionParams& p) {
  const int columns = columns_of(p), all = static_cast<int>(num_sms());
  const int enough = (columns * p.batch <= all ? 1 : 2) * all / columns;
  const int more = std::min(std::max(enough - p.batch, kSpareSplits), kAttentionCounters / columns);
  return p.batch + (p.max_seq_len > kKeys ? more : 0);
}

// Plans the KV splits of a step, once for all layers with the same parameters. Tries all numbers of
// splits of the longest sequence and takes the one with the lowest cost of the busiest SM, if all
// splits have room. Padding rows have one position and are ignored. Splits begin at multiples of
// kKeys. Reads past_lens and writes num_parts KvSplits; one block.
__global__ void __launch_bounds__(kPlanThreads)
    plan_kv_splits_kernel(AttentionParams p, int num_parts, int columns, int processors) {
  constexpr int kWarps = kPlanThreads / 32;
  pdl_wait();
  pdl_launch_dependents();
  __shared__ int longest_of[kWarps], sums_of[kWarps][2];
  __shared__ int64_t cost_of[kMaxSplits];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  auto begin_of = [&](int i) { return own_from(p, i, p.past_lens[i]) / kKeys * kKeys; };
  auto length_of = [&](int i) { return p.past_lens[i] + 1 - begin_of(i); };
  auto over = [](int x, int y) { return (x + y - 1) / y; };
  int longest = 1;
  for (int i = thread; i < p.batch; i += kPlanThreads) longest = max(longest, length_of(i));
  longest = __reduce_max_sync(~0u, longest);
  if (lane == 0) longest_of[warp] = longest;
  if (thread < kMaxSplits) cost_of[thread] = INT64_MAX;
  __syncthreads();
  for (int other : longest_of) longest = max(longest, other);
  auto each_of = [&](int wanted) { return over(over(longest, wanted), kKeys) * kKeys; };

  const int most = min(over(longest, kKeys),
                       p.prefix.of == nullptr ? kMaxSplits : kMaxSplits - kMaxPrefixSplits);
  for (int wanted = warp + 1; wanted <= most; wanted += kWarps) {
    const int each = each_of(wanted);
    int all = 0, blocks = 0;
    for (int i = lane; i < p.batch; i += 32) {
      const int length = length_of(i), parts = over(length, each);
      all += parts;
      if (length > 1) blocks += parts;
    }
    all = __reduce_add_sync(~0u, all), blocks = __reduce_add_sync(~0u, blocks);
    const int64_t running = static_cast<int64_t>(columns) * blocks;
    if (lane == 0 && (all <= num_parts || wanted == 1))
      cost_of[wanted - 1] = (running + processors - 1) / processors * (each + kSplitStartCost) +
                            (wanted > 1 ? kSplitMergeCost : 0) +
                            min(running, static_cast<int64_t>(processors)) * kBusyCost / processors;
  }
  __syncthreads();
  int64_t least = INT64_MAX;
  int each = longest;
  for (int wanted = 1; wanted <= most; ++wanted)
    if (cost_of[wanted - 1] < least) least = cost_of[wanted - 1], each = each_of(wanted);

  int made = 0, earlier_splits = 0;  // splits of earlier sequences, and of those that are split
  for (int first = 0; first < p.batch; first += kPlanThreads) {
    const int i = first + thread;
    int length = 0, begin = 0, of_part = 1, used = 0;
    if (i < p.batch) {
      length = length_of(i), begin = begin_of(i);
      of_part = over(over(length, over(length, each)), kKeys) * kKeys;  // evenly
      used = over(length, of_part);
    }
    int sums[2] = {used, used > 1 ? used : 0};
#pragma unroll
    for (int& sum : sums) sum = warp_scan(sum);
    __syncthreads();
    if (lane == 31) sums_of[warp][0] = sums[0], sums_of[warp][1] = sums[1];
    __syncthreads();
    int of_all[2] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (w < warp) sums[k] += sums_of[w][k];
        of_all[k] += sums_of[w][k];
      }
    const int at = made + sums[0] - used, split = earlier_splits + sums[1] - (used > 1 ? used : 0);
    for (int part = 0; part < used; ++part) {
      const int from = begin + part * of_part;
      p.kv_splits[at + part] = {i, from, min(begin + length, from + of_part),
                                static_cast<uint32_t>(part | used << 8 | split << 16)};
    }
    made += of_all[0], earlier_splits += of_all[1];
  }
  for (int i = made + thread; i < num_parts; i += kPlanThreads) p.kv_splits[i] = {-1, 0, 0, 0};
}

// Starts a copy to shared memory; writes zeros unless `there`. (Bypassing L1 and an L2 prefetch of
// 256 bytes were both slower here.)
template <typename V>
__device__ __forceinline__ void cp_async(V* to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "n"(sizeof(V)), "r"(there ? static_cast<int>(sizeof(V)) : 0)
               : "memory");
}

// Eight cache elements as an mma fragment.
template <typename T, typename C>
__device__ __forceinline__ uint4 words_of(const Cached<C>& cached) {
  const Vec<T, 8> wide = convert_cache<T, C>(cached);
  return *reinterpret_cast<const uint4*>(&wide);
}

// kSteps: head_dim / 32, rounded up.
template <typename T, typename C, int kSteps, int kWarps>
struct Layout {
  static constexpr int kDim = kSteps * 32, kPitch = kDim + 8, kHalves = (kDim + 63) / 64;
  // Rounds of 16 keys and values in flight per warp.
  static constexpr int kRounds = (kWarps > 4 && kDim > 128) || kDim > 256 ? 1 : 2;
  static constexpr bool kTall = kDim > 256;  // sums are V^T * weights
  // Vectors of 8 elements: of a row, of a row in shared memory, of a round.
  static constexpr int kVectors = kDim / 8, kRow = kSteps == 3 ? 16 : kVectors,
                       kRound = 2 * kKeys * kRow;
  // Swizzled position of vector `at` of a row, without bank conflicts.
  __device__ static int key_at(int row, int at) {
    return row * kRow + (at ^ (row % 4 * 4 & (kRow - 1)));
  }
  __device__ static int value_at(int row, int at) {
    return (kKeys + row) * kRow + (at ^ (row & (kTall ? 7 : 6) & (kRow - 1)));
  }
  static constexpr size_t kShared = sizeof(Cached<C>) * kWarps * kRounds * kRound +
                                    sizeof(T) * kHeads * kPitch + sizeof(C) * 2 * kPitch +
                                    sizeof(float) * kWarps * kDim;
  // A warp's sums reuse the memory of its keys and values.
  static_assert(sizeof(Cached<C>) * kRounds * kRound >= sizeof(float) * kHeads * kDim);
};

// Minimum blocks per SM, to keep ptxas from spilling for a higher occupancy.
template <typename C, int kSteps, int kWarps>
constexpr int kResident = kSteps <= 4 && kWarps == 8 && sizeof(C) == 2 ? 1 : 0;

template <typename T, typename C, int kSteps, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kResident<C, kSteps, kWarps>)
    decode_kernel(AttentionParams p) {
  using L = Layout<T, C, kSteps, kWarps>;
  constexpr int kDim = L::kDim, kPitch = L::kPitch, kHalves = L::kHalves;
  extern __shared__ uint4 raw[];
  auto ring_of = [&](int warp) {
    return reinterpret_cast<Cached<C>*>(raw) + warp * L::kRounds * L::kRound;
  };
  T* queries = reinterpret_cast<T*>(ring_of(kWarps));  // [kHeads][kPitch]
  C* fresh_key = reinterpret_cast<C*>(
      queries + kHeads * kPitch);  // [kPitch]: the new position, in the cache's type
  C* fresh_value = fresh_key + kPitch;
  __shared__ float peak_of[kWarps][kHeads], total_of[kWarps][kHeads];
  const int dim = p.head_dim, group = p.num_heads / p.num_kv_heads;
  const int chunks = (group + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.x / chunks,
            first_head = kv_head * group + blockIdx.x % chunks * kHeads;
  const int heads = min(kHeads, (kv_head + 1) * group - first_head);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // The previous kernel plans the splits, or appends positions.
  if (!p.splits_planned || p.appended) pdl_wait();
  const KvSplit own = p.kv_splits[blockIdx.y];
  if (own.sequence < 0) return;
  const int sequence = own.sequence, from = own.from, to = own.to;
  const int part = static_cast<int>(own.packed_index & 255),
            parts = static_cast<int>(own.packed_index >> 8 & 255);
  const CacheRows row_of(p, sequence, kv_head);
  C* keys = static_cast<C*>(p.key_cache);
  C* values = static_cast<C*>(p.value_cache);
  // A warp's rounds are kWarps * kKeys positions apart. The new position is not copied.
  const bool has_new = part == parts - 1;
  const int mine = from + warp * kKeys, limit = has_new ? to - 1 : to;
  const bool one_block = row_of.in_line(kKeys), in_line = one_block && dim == kDim;
  // Block of the round that is copied next, so that no copy waits for the table.
  int block = mine < to ? row_of.block_of(mine) : 0;
  auto copy = [&](int round) {
    const int start = mine + round * kWarps * kKeys, next = start + kWarps * kKeys;
    if (start < to) {
      Cached<C>* into = ring_of(warp) + round % L::kRounds * L::kRound;
      // If rows are contiguous, so are a round's vectors.
      const int64_t first = row_of.at(block, start);
      if (next < to) block = row_of.block_of(next);
#pragma unroll
      for (int i = 0; i < kKeys * L::kVectors / 32; ++i) {
        const int vector = lane + 32 * i, row = vector / L::kVectors, at = vector % L::kVectors;
        const bool there = start + row < limit && 8 * at < dim;
        int64_t from = first + 8 * vector;
        if (!in_line) from = first + static_cast<int64_t>(row) * dim + 8 * at;
        if (!one_block) from = there ? row_of(start + row) + 8 * at : 0;
        cp_async(into + L::key_at(row, at), keys + from, there);
        cp_async(into + L::value_at(row, at), values + from, there);
      }
    }
    cp_async_commit();
  };
  for (int i = 0; i < L::kRounds; ++i) copy(i);
  for (int i = heads * kPitch + threadIdx.x; i < kHeads * kPitch; i += kWarps * 32)
    queries[i] = from_float<T>(0.f);
  const int position = has_new ? to - 1 : p.past_lens[sequence],
            seen = own_from(p, sequence, position);
  pdl_wait();
  pdl_launch_dependents();

  const T* qkv = static_cast<const T*>(p.qkv) + sequence * p.qkv_stride;
  // One warp per query head, and for the new key and value if they are in this split. Blocks of the
  // same KV head write the same values.
  float* scratch = reinterpret_cast<float*>(fresh_value + kPitch) + warp * kDim;
  for (int task = warp; task < heads + (has_new ? 2 : 0); task += kWarps) {
    const bool is_query = task < heads, is_value = task == heads + 1;
    C* const fresh = is_value ? fresh_value : fresh_key;
    C* const row = (is_value ? values : keys) + row_of(position);
    if ((p.reads || p.appended) && !is_query) {
      for (int i = lane; i < kDim; i += 32) fresh[i] = i < dim ? row[i] : from_float<C>(0.f);
      continue;
    }
    const int head =
        is_query ? first_head + task : p.num_heads + (is_value ? p.num_kv_heads : 0) + kv_head;
    norm_and_rope<T, kDim>(scratch, qkv + head * dim, p,
                           is_query   ? p.q_norm
                           : is_value ? p.v_norm
                                      : p.k_norm,
                           position, !is_value);
    if (is_query) {
      const float factor = query_factor(p, position);
      for (int i = lane; i < kDim; i += 32)
        queries[task * kPitch + i] = from_float<T>(i < dim ? scratch[i] * factor : 0.f);
    } else {
      for (int i = lane; i < kDim; i += 32) {
        const C cached = from_float<C>(i < dim ? scratch[i] : 0.f);
        fresh[i] = cached;
        if (i < dim) row[i] = cached;
      }
    }
    __syncwarp();
  }
  __syncthreads();

  float sum[L::kTall ? 1 : kHalves][8][4] = {}, tall[L::kTall ? kDim / 16 : 1][4] = {};
  float peak[2] = {-INFINITY, -INFINITY}, total[2] = {};  // of heads 2t and 2t + 1
  const float scale = p.scale * (p.softcap > 0 ? 1.f : kLog2E);
  for (int round = 0, start = mine; start < to; ++round, start += kWarps * kKeys) {
    cp_async_wait<L::kRounds - 1>();
    __syncwarp();
    const Cached<C>* here = ring_of(warp) + round % L::kRounds * L::kRound;
    // Vector j of row r, or of the new position.
    auto key = [&](int j, int r) {
      const int row = g + 8 * r, at = 4 * j + t;
      return words_of<T, C>(start + row == position ? load_cache(fresh_key + 8 * at)
                                                    : here[L::key_at(row, at)]);
    };
    auto value = [&](int j, int r) {
      const int row = 2 * t + r % 2 + r / 2 * 8, at = 8 * j + g;
      if (at >= L::kVectors) return uint4{};
      return words_of<T, C>(start + row == position ? load_cache(fresh_value + 8 * at)
                                                    : here[L::value_at(row, at)]);
    };
    float score[4] = {};
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const uint4 b = *reinterpret_cast<const uint4*>(queries + g * kPitch + 32 * j + 8 * t);
      const uint4 low = key(j, 0), high = key(j, 1);
      const uint32_t even[4] = {low.x, high.x, low.y, high.y},
                     odd[4] = {low.z, high.z, low.w, high.w};
      mma_m16n8k16<T>(score, even, b.x, b.y);
      mma_m16n8k16<T>(score, odd, b.z, b.w);
    }
    float factor[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float s = score[2 * r + c] * scale;
        if (p.softcap > 0) s = p.softcap * tanhf(s / p.softcap) * kLog2E;
        const int key = start + g + 8 * r;
        score[2 * r + c] = key < to && key >= seen ? s : -INFINITY;
      }
      float higher = fmaxf(score[c], score[2 + c]);
#pragma unroll
      for (int mask = 4; mask < 32; mask <<= 1)
        higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, mask));
      higher = fmaxf(higher, peak[c]);  // finite: a round has a visible key
      factor[c] = exp2f(peak[c] - higher);
      peak[c] = higher;
      score[c] = exp2f(score[c] - higher);
      score[2 + c] = exp2f(score[2 + c] - higher);
      total[c] = total[c] * factor[c] + score[c] + score[2 + c];
    }
    if constexpr (L::kTall) {  // columns of the sums are heads, as of the scores
      const uint32_t weights[2] = {movmatrix_trans(pack2<T>(score[0], score[1])),
                                   movmatrix_trans(pack2<T>(score[2], score[3]))};
      const int key = lane % 8 + lane / 16 * 8;
#pragma unroll
      for (int j = 0; j < kDim / 16; ++j) {
        const int at = 2 * j + lane / 8 % 2;
        uint32_t a[4];
        ldmatrix_x4<true>(a, start + key == position
                                 ? reinterpret_cast<const void*>(fresh_value + 8 * at)
                                 : here + L::value_at(key, at));
#pragma unroll
        for (int c = 0; c < 4; ++c) tall[j][c] *= factor[c % 2];
        mma_m16n8k16<T>(tall[j], a, weights[0], weights[1]);
      }
      __syncwarp();
      copy(round + L::kRounds);
      continue;
    }
    // Rows of the sums are heads: row g needs the factor held by the lanes of heads 2t, 2t + 1.
    const float even_factor = __shfl_sync(~0u, factor[0], g / 2);
    const float odd_factor = __shfl_sync(~0u, factor[1], g / 2);
    const float old = g % 2 ? odd_factor : even_factor;
    const uint32_t weights[4] = {movmatrix_trans(pack2<T>(score[0], score[1])), 0,
                                 movmatrix_trans(pack2<T>(score[2], score[3])), 0};
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      uint4 row[4];
      const uint32_t* rows[4];
#pragma unroll
      for (int r = 0; r < 4; ++r)
        row[r] = value(j, r), rows[r] = reinterpret_cast<const uint32_t*>(&row[r]);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (start != mine) sum[j][e][0] *= old, sum[j][e][1] *= old;
        const uint32_t pick = e % 2 ? 0x7632 : 0x5410;
        mma_m16n8k16<T>(sum[j][e], weights, __byte_perm(rows[0][e / 2], rows[1][e / 2], pick),
                        __byte_perm(rows[2][e / 2], rows[3][e / 2], pick));
      }
    }
    __syncwarp();  // the round has been read
    copy(round + L::kRounds);
  }
  // Merge the warps. A warp without keys has total 0 and maximum -inf.
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int mask = 4; mask < 32; mask <<= 1) total[c] += __shfl_xor_sync(~0u, total[c], mask);
    if (g == 0) peak_of[warp][2 * t + c] = peak[c], total_of[warp][2 * t + c] = total[c];
  }
  // Four adjacent elements of a row are swizzled against bank conflicts.
  auto place = [&](int row, int i) {
    return reinterpret_cast<float*>(ring_of(row / kHeads)) + row % kHeads * kDim +
           (i ^ ((i >> 5 & 1) | (row & 1) << 1) << 2);
  };
  if constexpr (L::kTall)
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        *place(warp * kHeads + 2 * t + c % 2, 16 * j + g + c / 2 * 8) = tall[j][c];
#pragma unroll
  for (int j = 0; j < (L::kTall ? 0 : kHalves); ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        const int at = 64 * j + 8 * (2 * t + c) + e;
        if (at < kDim)
          *reinterpret_cast<float4*>(place(warp * kHeads + g, at)) =
              make_float4(sum[j][e][c], sum[j][e + 1][c], sum[j][e + 2][c], sum[j][e + 3][c]);
      }
  const int earlier_splits = static_cast<int>(own.packed_index >> 16), of_head = dim + 2,
            of_block = min(p.num_heads, kHeads) * of_head;
  const int64_t of_all = static_cast<int64_t>(gridDim.x) * of_block;
  int32_t* counter = p.counters + earlier_splits / 2 * gridDim.x +
                     blockIdx.x;  // each earlier split sequence has at least two
  float* results = static_cast<float*>(p.scratch) + earlier_splits * of_all + blockIdx.x * of_block;
  merge<T, kDim>(p, peak_of, total_of, [&](int row, int i) { return *place(row, i); }, heads,
                 static_cast<int64_t>(sequence) * p.num_heads + first_head,
                 {part, parts, counter, results, of_head, of_all, shares_prefix(p, sequence)});
}

template <typename T, typename C, int kSteps, int kWarps>
cudaError_t run_warps(const AttentionParams& p, cudaStream_t stream) {
  constexpr size_t kShared = Layout<T, C, kSteps, kWarps>::kShared;
  auto kernel = decode_kernel<T, C, kSteps, kWarps>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(columns_of(p), max_kv_splits(p)), kWarps * 32, kShared, stream, p);
}

template <typename T, typename C, int kSteps, int kWarps>
bool fits() {
  return static_cast<int>(Layout<T, C, kSteps, kWarps>::kShared) <=
         device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
}

// With few blocks, more warps each: latency dominates. With more blocks than fit at once, fewer
// warps; with many waves, one warp, so that the last blocks end together.
template <typename T, typename C, int kSteps>
cudaError_t run(const AttentionParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(columns_of(p) * p.batch);
  if constexpr (kSteps <= 2)
    if (4 * blocks <= num_sms() && fits<T, C, kSteps, 12>())
      return run_warps<T, C, kSteps, 12>(p, stream);
  if (blocks <= num_sms() && fits<T, C, kSteps, 8>()) return run_warps<T, C, kSteps, 8>(p, stream);
  static const unsigned resident = [] {
    if (!fits<T, C, kSteps, 4>()) return 0u;
    constexpr int kShared = Layout<T, C, kSteps, 4>::kShared;
    auto kernel = decode_kernel<T, C, kSteps, 4>;
    int blocks = 0;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 4 * 32, kShared);
    return blocks * num_sms();
  }();
  if constexpr (kSteps <= 4)
    if (blocks > 2 * resident) return run_warps<T, C, kSteps, 1>(p, stream);
  if (blocks > resident) return run_warps<T, C, kSteps, 2>(p, stream);
  return run_warps<T, C, kSteps, 4>(p, stream);
}

template <typename T, typename C>
cudaError_t run_cache(const AttentionParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return run<T, C, 2>(p, stream);  // few models have 32 or less
  if (p.head_dim <= 96) return run<T, C, 3>(p, stream);
  if (p.head_dim <= 128) return run<T, C, 4>(p, stream);
  if (p.head_dim <= 256) return run<T, C, 8>(p, stream);
  if constexpr (std::is_same_v<T, C>) return run_warps<T, C, 16, 4>(p, stream);
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t run_type(const AttentionParams& p, cudaStream_t stream) {
  return p.float8 ? run_cache<T, Float8>(p, stream) : run_cache<T, T>(p, stream);
}

}  // namespace

bool can_decode(DType dtype, const AttentionParams& p) {
  if (dtype == DType::kFloat32) return false;
  return p.head_dim <= 256 || (!p.float8 && fits<__half, __half, 16, 4>());
}

cudaError_t decode(DType dtype, const AttentionParams& p, cudaStream_t stream) {
  if (!p.splits_planned) {
    const cudaError_t error = launch(plan_kv_splits_kernel, 1, kPlanThreads, 0, stream, p,
                                     max_kv_splits(p), columns_of(p), static_cast<int>(num_sms()));
    if (error != cudaSuccess) return error;
  }
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
