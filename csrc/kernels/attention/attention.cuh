// Device code of the attention kernels: positions of packed tokens, head norm and RoPE, cache
// addressing, merging of softmaxes.
#pragma once

#include "../common/output_writer.cuh"
#include "params.h"

namespace llmc::device {

using kernels::AttentionParams;

constexpr int kMaxHeadDim = 512;

// The sequence of a packed token. cu_seqlens count from first_token on.
__device__ __forceinline__ int sequence_of(const int32_t* cu_seqlens, int batch, int token,
                                           int first_token = 0) {
  token += first_token;
  int low = 0, high = batch - 1;  // the last sequence that begins at or before the token
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (cu_seqlens[middle] <= token) low = middle;
    else high = middle - 1;
  }
  return low;
}

__device__ __forceinline__ int sequence_of(const AttentionParams& p, int token) {
  return sequence_of(p.cu_seqlens, p.batch, token, p.first_token);
}
// The row of qkv, out and queries at which a sequence begins; start_of(p, batch) is the end.
__device__ __forceinline__ int start_of(const AttentionParams& p, int sequence) {
  return p.cu_seqlens[sequence] - p.first_token;
}

// The first position that a query sees.
__device__ __forceinline__ int first_visible(int window, int chunk, int position) {
  const int first = window > 0 ? max(0, position + 1 - window) : 0;
  return chunk > 0 ? max(first, position / chunk * chunk) : first;
}
__device__ __forceinline__ int first_visible(const AttentionParams& p, int position) {
  return first_visible(p.window, p.chunk, position);
}
// The first and the last position that the query of a packed token sees. Both do not decrease from
// one token of a sequence to the next. `range`: the token's, or null.
__device__ __forceinline__ int first_visible(int window, int chunk, const int32_t* range,
                                             bool windowed_ranges, int position) {
  const int first = first_visible(window, chunk, position);
  return range == nullptr || windowed_ranges || range[1] == 0 ? first : min(first, range[0]);
}
__device__ __forceinline__ int last_visible(const int32_t* range, int position) {
  return range == nullptr ? position : max(position, range[1] - 1);
}
__device__ __forceinline__ const int32_t* range_of(const AttentionParams& p, int token) {
  return p.ranges == nullptr ? nullptr : p.ranges + 2 * static_cast<int64_t>(token);
}
// Decoding with a shared prefix: whether a sequence shares it, and the first position that it
// attends to by itself.
__device__ __forceinline__ bool shares_prefix(const AttentionParams& p, int sequence) {
  return p.prefix.of != nullptr && p.prefix.own_from[sequence] > 0;
}
__device__ __forceinline__ int own_from(const AttentionParams& p, int sequence, int position) {
  const int seen = first_visible(p, position);
  return p.prefix.of == nullptr ? seen : max(seen, p.prefix.own_from[sequence]);
}

// The blocks of prefix_attention() have kPrefixRows query rows of one KV head, whole tokens. If
// these do not fill all SMs, the prefix is split, and each split has separate blocks.
constexpr int kPrefixRows = 128, kPrefixBlocks = 132, kMaxPrefixSplits = 16, kPrefixKeys = 64;
__host__ __device__ __forceinline__ int prefix_blocks(const AttentionParams& p) {
  const int tokens = kPrefixRows / (p.num_heads / p.num_kv_heads);
  return (p.batch + tokens - 1) / tokens * p.num_kv_heads;
}
__host__ __device__ __forceinline__ int max_prefix_splits(const AttentionParams& p) {
  return max(1, min(kPrefixBlocks / prefix_blocks(p), kMaxPrefixSplits));
}
// Positions per prefix split, and number of splits.
__device__ __forceinline__ int prefix_split_size(const AttentionParams& p) {
  const int most = max_prefix_splits(p) * kPrefixKeys;
  return max(2, (p.prefix.of[1] + most - 1) / most) * kPrefixKeys;
}
__device__ __forceinline__ int prefix_splits(const AttentionParams& p) {
  return (p.prefix.of[1] + prefix_split_size(p) - 1) / prefix_split_size(p);
}
// Partial result of a head and prefix split: maximum, total, and from kPrefixSums on head_dim sums.
constexpr int kPrefixSums = 4;
__device__ __forceinline__ float* prefix_partial(float* results, int64_t index, int head_dim) {
  return results + index * (head_dim + kPrefixSums);
}
__device__ __forceinline__ float* prefix_partial(const AttentionParams& p, int64_t token_head,
                                                 int split, int parts) {
  return prefix_partial(p.prefix.results, token_head * parts + split, p.head_dim);
}

// Heads in a row of qkv.
__host__ __device__ __forceinline__ int qkv_heads(const AttentionParams& p) {
  return p.num_heads + (p.reads ? 0 : 2 * p.num_kv_heads);
}
// The factor of a query at a position.
__device__ __forceinline__ float query_factor(const AttentionParams& p, int position) {
  return p.query_scale == nullptr ? 1.f : p.query_scale[position];
}

// Positions by which a row of qkv is rotated, given its position in the cache.
struct RotaryRow {
  __device__ RotaryRow(const AttentionParams& p, int64_t row, int position) : axes(p.rotary_axes) {
#pragma unroll
    for (int axis = 0; axis < kernels::kRotaryAxes; ++axis)
      by_axis[axis] =
          axes == nullptr ? position : p.rotary_positions[row * kernels::kRotaryAxes + axis];
  }

  // Position of a pair of elements.
  __device__ __forceinline__ int64_t of(int pair) const {
    const int axis = axes == nullptr ? 0 : axes[pair];
    return axis == 0 ? by_axis[0] : axis == 1 ? by_axis[1] : by_axis[2];
  }

  const int32_t* axes;
  int by_axis[kernels::kRotaryAxes];
};

// A warp loads one head, normalizes it (with a weight) and applies RoPE (with cos and sin), or in
// the other order, and leaves it in `head` (shared memory, float32 [head_dim]). head_dim is at most
// kMost.
template <typename T, int kMost>
__device__ __forceinline__ void norm_and_rope(float* head, const T* source,
                                              const AttentionParams& p, const float* weight,
                                              const RotaryRow& row, bool turn) {
  const int lane = threadIdx.x % 32, dim = p.head_dim;
  const int half = turn && p.cos != nullptr ? p.rotary_dim / 2 : 0;
  constexpr int kPairs = (kMost / 2 + 31) / 32;
  float cos[kPairs], sin[kPairs], x[2 * kPairs];  // loads are issued together
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int i = lane + 32 * k;
    const int64_t at = i < half ? row.of(i) * half + i : 0;
    cos[k] = i < half ? p.cos[at] : 0.f;
    sin[k] = i < half ? p.sin[at] : 0.f;
  }
#pragma unroll
  for (int k = 0; k < 2 * kPairs; ++k)
    x[k] = lane + 32 * k < dim ? to_float(source[lane + 32 * k]) : 0.f;
  float squares = 0;
#pragma unroll
  for (int k = 0; k < 2 * kPairs; ++k) {
    if (lane + 32 * k < dim) head[lane + 32 * k] = x[k];
    squares += x[k] * x[k];
  }
  auto norm = [&] {
    const float scale = rsqrtf(warp_sum(squares) / dim + p.norm_epsilon);
    for (int i = lane; i < dim; i += 32) head[i] *= scale * weight[i];
  };
  if (weight != nullptr && !p.norm_after_rotary) norm();
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int i = lane + 32 * k;
    if (i >= half) break;
    const int a = p.interleaved ? 2 * i : i, b = p.interleaved ? 2 * i + 1 : i + half;
    const float first = head[a], second = head[b];
    head[a] = first * cos[k] - second * sin[k];
    head[b] = second * cos[k] + first * sin[k];
  }
  __syncwarp();
  if (weight == nullptr || !p.norm_after_rotary) return;
  squares = 0;
  for (int i = lane; i < dim; i += 32) squares += head[i] * head[i];
  norm();
  __syncwarp();
}

// A sink's contribution to the total of a softmax with this maximum. Exponents are of base 2.
__device__ __forceinline__ float sink_weight(const float* sinks, int head, float peak) {
  return sinks == nullptr ? 0.f : exp2f(sinks[head] * kLog2E - peak);
}

// Cache offsets of a sequence's positions for one KV head, with or without a block table.
struct CacheRows {
  __device__ CacheRows(const AttentionParams& p, int sequence, int kv_head) : dim(p.head_dim) {
    if (p.block_table == nullptr) {
      first = (static_cast<int64_t>(sequence) * p.num_kv_heads + kv_head) * p.max_seq_len * dim;
    } else {
      shift = __ffs(p.block_size) - 1;
      mask = p.block_size - 1;
      table = p.block_table + sequence * static_cast<int64_t>(p.max_seq_len >> shift);
      first = static_cast<int64_t>(kv_head) * p.block_size * dim;
      stride = static_cast<int64_t>(p.num_kv_heads) * p.block_size * dim;
    }
  }

  __device__ __forceinline__ int64_t operator()(int position) const {
    return at(block_of(position), position);
  }
  // The block of a position, and the offset of a position in a block.
  __device__ __forceinline__ int block_of(int position) const {
    return table == nullptr ? 0 : __ldg(table + (position >> shift));
  }
  __device__ __forceinline__ int64_t at(int block, int position) const {
    return first + block * stride + static_cast<int64_t>(position & mask) * dim;
  }
  // Whether `positions` positions from a multiple of that number on are contiguous.
  __device__ __forceinline__ bool in_line(int positions) const { return mask >= positions - 1; }

  const int32_t* table = nullptr;
  int64_t first, stride = 0;
  int dim, shift = 0, mask = 0x7fffffff;
};

constexpr int kMaxSplits = 32;  // of a sequence

// Merges the online softmaxes of lane groups of kLanes; the result is in every lane. Exponents are
// of base 2; the maximum is -inf without keys.
template <int kLanes, int kOwn>
__device__ __forceinline__ void merge_lanes(float& peak, float& total, float (&sum)[kOwn]) {
#pragma unroll
  for (int mask = kLanes; mask < 32; mask <<= 1) {
    const float other = __shfl_xor_sync(~0u, peak, mask), higher = fmaxf(peak, other);
    const float mine = higher == -INFINITY ? 0 : exp2f(peak - higher);
    const float theirs = higher == -INFINITY ? 0 : exp2f(other - higher);
    peak = higher;
    total = total * mine + __shfl_xor_sync(~0u, total, mask) * theirs;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      sum[i] = sum[i] * mine + __shfl_xor_sync(~0u, sum[i], mask) * theirs;
  }
}

// The block's split of a sequence: its index, the number of splits, the counter of finished splits,
// the address and strides (in floats) of partial results per head and split, and whether the
// sequence shares a prefix. A block of several rows has row_heads heads of each, and num_heads in
// all lie between them.
struct KvSplitState {
  int index, num_splits;
  int32_t* counter;
  float* results;
  int64_t next_head, next_split;
  bool prefix = false;
  int row_heads = 0, num_heads = 0;

  __device__ float* result(int head, int split) const {
    return results + head * next_head + split * next_split;
  }
  // Head h of the block, counted from its first: within its row, and in all rows.
  template <bool kRows>
  __device__ __forceinline__ int in_row(int h) const {
    return kRows ? h % row_heads : h;
  }
  template <bool kRows>
  __device__ __forceinline__ int in_rows(int h) const {
    return kRows ? h / row_heads * num_heads + h % row_heads : h;
  }
};
// Query heads of one row in a decode block at most; with more, they are of several rows.
constexpr int kDecodeHeads = 8;

// A lane's share of a head's softmax, given its maximum and total.
__device__ __forceinline__ float softmax_share(const float* sinks, int head, float peak,
                                               float total) {
  float higher = peak;
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, mask));
  const float weight = exp2f(peak - higher);
  const float all = warp_sum(total * weight) + sink_weight(sinks, head, higher);
  return weight / all;
}

// Merges the partial results of all splits and of the shared prefix. Not inlined, so that its
// registers do not limit the kernel.
template <typename T, int kWidth, int kWarps, int kHeads>
__device__ __noinline__ void merge_splits(OutputWriter<T> out, int64_t begin, KvSplitState split,
                                          int heads, int dim, const float* sinks, int first_head,
                                          float* prefix, int before, float (*share_of)[32]) {
  constexpr bool kRows = kHeads > kDecodeHeads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = kWidth > 0 ? kWidth : dim;
  auto of_prefix = [&](int h, int k) {
    return prefix_partial(prefix, split.in_rows<kRows>(h) * before + k, dim);
  };
  auto share = [&](int h, float peak, float total) {
    share_of[h][lane] = softmax_share(sinks, first_head + split.in_row<kRows>(h), peak, total);
  };
  // Splits come first, then those of the prefix. A thread has two elements of a head at a time.
  // Partial sums are loaded while the shares are computed.
  constexpr int kTogether = 16;
  float2 sums[kTogether];
  auto read = [&](int at, int first) {
    const float* result = split.result(at / width, first) + 2 + at % width;
#pragma unroll
    for (int k = 0; k < kTogether; ++k, result += split.next_split)
      if (first + k < split.num_splits) sums[k] = __ldcg(reinterpret_cast<const float2*>(result));
  };
  const int own = threadIdx.x * 2;
  if (own < heads * width && own % width < dim) read(own, 0);
  for (int h = warp; h < heads; h += kWarps) {
    const float* result = lane < split.num_splits
                              ? split.result(h, lane)
                              : of_prefix(h, max(0, min(lane - split.num_splits, before - 1)));
    const bool there = lane < split.num_splits + before;
    share(h, there ? __ldcg(result) : -INFINITY, there ? __ldcg(result + 1) : 0.f);
  }
  __syncthreads();
  for (int at = own; at < heads * width; at += kWarps * 64) {
    const int h = at / width, i = at % width;
    if (i >= dim) continue;
    if (at != own) read(at, 0);
    float2 sum{};
    for (int first = 0; first < split.num_splits; first += kTogether) {
      if (first > 0) read(at, first);
#pragma unroll
      for (int k = 0; k < kTogether; ++k)
        if (first + k < split.num_splits) {
          sum.x += share_of[h][first + k] * sums[k].x;
          sum.y += share_of[h][first + k] * sums[k].y;
        }
    }
    for (int k = 0; k < before; ++k) {
      const float* of = of_prefix(h, k) + kPrefixSums + i;
      sum.x += share_of[h][split.num_splits + k] * __ldcg(of);
      sum.y += share_of[h][split.num_splits + k] * __ldcg(of + 1);
    }
    out.write(begin + split.in_rows<kRows>(h) * dim + i, {sum.x, sum.y});
  }
}

// Epilogue of an attention block: merges the warps' softmaxes and writes rows of p.out. If the
// sequence is split, writes a partial result to p.scratch, and the block that ends last merges all.
// Exponents are of base 2; a warp without keys has maximum -inf and total 0. sum_at(w * kHeads + h,
// i) is element i of warp w's sum for head h, in shared memory. `heads` rows begin at token_head =
// token * num_heads + first head; see KvSplitState for several tokens. kWidth is a compile-time
// bound of head_dim, or 0.
template <typename T, int kWidth, int kWarps, int kHeads, typename Sum>
__device__ void merge(const AttentionParams& p, const float (&peak_of)[kWarps][kHeads],
                      const float (&total_of)[kWarps][kHeads], Sum&& sum_at, int heads,
                      int64_t token_head, KvSplitState split) {
  constexpr bool kRows = kHeads > kDecodeHeads;
  __shared__ bool last;
  const int dim = p.head_dim, width = kWidth > 0 ? kWidth : dim;
  __syncthreads();
  const OutputWriter<T> out(p.out, p.out_scale_inverse);
  const int64_t begin = token_head * dim;
  const int first_head = static_cast<int>(token_head % p.num_heads);
  const int before = split.prefix ? prefix_splits(p) : 0;  // prefix splits
  auto of_prefix = [&](int h, int k) {
    return prefix_partial(p, token_head + split.in_rows<kRows>(h), k, before);
  };
  // Share of each split in a head's sum, one lane per split.
  static_assert(kMaxSplits <= 32 && kWarps + kMaxPrefixSplits <= 32);
  __shared__ float share_of[kHeads][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto share = [&](int h, float peak, float total) {
    share_of[h][lane] = softmax_share(p.sinks, first_head + split.in_row<kRows>(h), peak, total);
  };
  if (split.num_splits == 1 &&
      before > 0) {  // the warps, and the prefix splits, which are loaded together
    constexpr int kEach = (kHeads + kWarps - 1) / kWarps;
    float peak[kEach], total[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int h = min(warp + k * kWarps, heads - 1), at = lane - kWarps,
                own = min(lane, kWarps - 1);
      const float* result = of_prefix(h, max(0, min(at, before - 1)));
      peak[k] = __ldcg(result), total[k] = __ldcg(result + 1);
      if (at < 0) peak[k] = peak_of[own][h], total[k] = total_of[own][h];
      if (at >= before) peak[k] = -INFINITY, total[k] = 0;
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      if (warp + k * kWarps < heads) share(warp + k * kWarps, peak[k], total[k]);
    __syncthreads();
    for (int at = threadIdx.x * 4; at < heads * dim; at += kWarps * 32 * 4) {
      const int h = at / dim, i = at % dim;
      float sum[4] = {};
#pragma unroll 4
      for (int k = 0; k < before; ++k) {
        const float4 more =
            __ldcg(reinterpret_cast<const float4*>(of_prefix(h, k) + kPrefixSums + i));
        const float weight = share_of[h][kWarps + k];
        sum[0] = fmaf(more.x, weight, sum[0]), sum[1] = fmaf(more.y, weight, sum[1]);
        sum[2] = fmaf(more.z, weight, sum[2]), sum[3] = fmaf(more.w, weight, sum[3]);
      }
#pragma unroll
      for (int w = 0; w < kWarps; ++w)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          sum[c] = fmaf(sum_at(w * kHeads + h, i + c), share_of[h][w], sum[c]);
      out.write(kRows ? begin + split.in_rows<kRows>(h) * dim + i : begin + at, sum);
    }
    return;
  }
  for (int at = threadIdx.x; at < heads * width; at += kWarps * 32) {
    const int h = at / width, i = at % width;
    if (i >= dim) continue;
    float higher = -INFINITY, total = 0, sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) higher = fmaxf(higher, peak_of[w][h]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2f(peak_of[w][h] - higher);
      total += total_of[w][h] * weight;
      sum += sum_at(w * kHeads + h, i) * weight;
    }
    if (split.num_splits == 1) {
      total += sink_weight(p.sinks, first_head + split.in_row<kRows>(h), higher);
      out.write(begin + split.in_rows<kRows>(h) * dim + i, sum / total);
    } else {
      float* result = split.result(h, split.index);  // maximum, total and head_dim sums
      result[2 + i] = sum;
      if (i == 0) result[0] = higher, result[1] = total;
    }
  }
  if (split.num_splits == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {  // the fences cover all threads of the block
    __threadfence();
    last = atomicAdd(split.counter, 1) == split.num_splits - 1;
    if (last) *split.counter = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  merge_splits<T, kWidth, kWarps, kHeads>(out, begin, split, heads, dim, p.sinks, first_head,
                                          of_prefix(0, 0), before, share_of);
}

}  // namespace llmc::device
