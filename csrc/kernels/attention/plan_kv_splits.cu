// Plan of a step's KV splits (flash-decoding), on the device: a captured graph serves any lengths.
#include "plan_kv_splits.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

// Costs in positions that a block could read meanwhile: of starting a split, of merging splits, and
// of the next kernel's first weights waiting for a free SM.
constexpr int kSplitStartCost = 128, kSplitMergeCost = 450, kBusyCost = 150;
constexpr int kSpareSplits = 16;  // for sequences longer than the others, with any batch size
constexpr int kPlanThreads = 256;

// Whether row i + 1 belongs to the sequence of row i: only that sequence has the block of its
// latest position, which is being written.
__device__ __forceinline__ bool continues(const AttentionParams& p, int i) {
  const int past = p.past_lens[i];
  if (i + 1 >= p.batch || p.past_lens[i + 1] != past + 1) return false;
  const CacheRows of(p, i, 0), next(p, i + 1, 0);
  return of.table != nullptr && of.block_of(past) == next.block_of(past);
}

// Rows of the block that begins with row i, and earlier rows of its sequence; 0 rows: the block of
// an earlier one takes it.
struct BlockRows {
  uint8_t rows, earlier;
};
__device__ __forceinline__ BlockRows rows_from(const AttentionParams& p, int i, int most) {
  int earlier = 0, rows = 1;
  while (i > earlier && earlier < kMaxRows - 1 && continues(p, i - earlier - 1)) ++earlier;
  if (earlier % most != 0) return {};
  while (rows < most && continues(p, i + rows - 1)) ++rows;
  return {static_cast<uint8_t>(rows), static_cast<uint8_t>(earlier)};
}

// Plans the KV splits of a step, once for all layers with the same parameters. Tries all numbers of
// splits of the longest sequence and takes the one with the lowest cost of the busiest SM, if all
// splits have room. Padding rows have one position and are ignored. Splits begin at multiples of
// kDecodeKeys. Rows of one sequence have the splits of their block's first row. Reads past_lens and
// writes num_parts KvSplits; one block.
__global__ void __launch_bounds__(kPlanThreads)
    plan_kv_splits_kernel(AttentionParams p, int num_parts, int columns, int processors) {
  constexpr int kWarps = kPlanThreads / 32;
  pdl_wait();
  pdl_launch_dependents();
  __shared__ int longest_of[kWarps], sums_of[kWarps][2];
  __shared__ int64_t cost_of[kMaxSplits];
  __shared__ BlockRows rows_of[kPlannedRows];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  auto begin_of = [&](int i) { return own_from(p, i, p.past_lens[i]) / kDecodeKeys * kDecodeKeys; };
  const int together = rows_per_block(p);
  if (together > 1) {
    for (int i = thread; i < p.batch; i += kPlanThreads) rows_of[i] = rows_from(p, i, together);
    __syncthreads();
  }
  auto block_rows = [&](int i) { return together == 1 ? BlockRows{1, 0} : rows_of[i]; };
  auto length_of = [&](int i) {
    const int rows = block_rows(i).rows;
    return rows == 0 ? 0 : p.past_lens[i] + rows - begin_of(i);
  };
  auto over = [](int x, int y) { return (x + y - 1) / y; };
  int longest = 1;
  for (int i = thread; i < p.batch; i += kPlanThreads) longest = max(longest, length_of(i));
  longest = __reduce_max_sync(~0u, longest);
  if (lane == 0) longest_of[warp] = longest;
  if (thread < kMaxSplits) cost_of[thread] = INT64_MAX;
  __syncthreads();
  for (int other : longest_of) longest = max(longest, other);
  auto each_of = [&](int wanted) { return over(over(longest, wanted), kDecodeKeys) * kDecodeKeys; };

  const int most = min(over(longest, kDecodeKeys),
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
      if (length > 0) {
        of_part = over(over(length, over(length, each)), kDecodeKeys) * kDecodeKeys;  // evenly
        used = over(length, of_part);
      }
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
    const BlockRows own = used > 0 ? block_rows(i) : BlockRows{};
    for (int part = 0; part < used; ++part) {
      const int from = begin + part * of_part;
      p.kv_splits[at + part] = {i,
                                from,
                                min(begin + length, from + of_part),
                                static_cast<uint32_t>(part | used << 8 | split << 16),
                                own.rows,
                                own.earlier};
    }
    made += of_all[0], earlier_splits += of_all[1];
  }
  for (int i = made + thread; i < num_parts; i += kPlanThreads) p.kv_splits[i] = {-1};
}
}  // namespace

int decode_columns(const AttentionParams& p) {
  const int group = p.num_heads / p.num_kv_heads;
  return p.num_kv_heads * ((group + kDecodeHeads - 1) / kDecodeHeads);
}

// With few sequences, one block per SM; two, if there is more than one block per SM without splits.
int max_kv_splits(const AttentionParams& p) {
  const int columns = decode_columns(p), all = static_cast<int>(num_sms());
  const int enough = (columns * p.batch <= all ? 1 : 2) * all / columns;
  const int more = std::min(std::max(enough - p.batch, kSpareSplits), kAttentionCounters / columns);
  return p.batch + (p.max_seq_len > kDecodeKeys ? more : 0);
}

cudaError_t plan_kv_splits(const AttentionParams& p, cudaStream_t stream) {
  return launch(plan_kv_splits_kernel, 1, kPlanThreads, 0, stream, p, max_kv_splits(p),
                decode_columns(p), static_cast<int>(num_sms()));
}

}  // namespace llmc::kernels
