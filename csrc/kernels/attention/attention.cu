// Attention one query token at a time, for what tensor core kernels do not support: float32, and
// prompts of an unusual head_dim. Also appends to the KV cache.
//
// A block takes one token, one KV head and up to kHeads of its query heads, over one KV split
// (flash-decoding). kLanes threads read a key, 8 elements each, kVectors times. Every group of
// kLanes threads keeps its own online softmax. They are merged at the end: within the warp, over
// the warps, and over the splits by the block that ends last. Reads the visible keys and values
// once per kHeads query heads.
#include "attention.cuh"
#include "decode.cuh"
#include "plan_kv_splits.cuh"
#include "prefill.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kWarps = 4;
constexpr int kMinKeysPerSplit = 64,
              kEnoughBlocks = 264;  // keys per split; from kEnoughBlocks blocks on KV is not split

// Zeros the values between a sequence's last position and the next multiple of kPrefillUnit, for
// some KV heads: they get weight 0, and 0 * NaN is NaN. Decoding does not read them.
template <typename C>
__device__ __forceinline__ void clear_tail(const AttentionParams& p, int sequence, int token,
                                           int position, int first_head, int heads, int thread,
                                           int threads) {
  if (p.decode || p.block_table == nullptr || token + 1 != start_of(p, sequence + 1)) return;
  constexpr int kWidth = sizeof(C) == 4 ? 4 : 8;
  const int end =
      min((position & -kPrefillUnit) + kPrefillUnit, (position & -p.block_size) + p.block_size);
  const int behind = end - position - 1, vectors = p.head_dim / kWidth;
  for (int i = thread; i < heads * behind * vectors; i += threads) {
    const int place = i / vectors;  // a position of a head
    const CacheRows row(p, sequence, first_head + place / behind);
    store(
        static_cast<C*>(p.value_cache) + row(position + 1 + place % behind) + i % vectors * kWidth,
        Vec<C, kWidth>{});
  }
}

// One warp per head of the token. Reads a row of qkv; writes rotated queries to p.queries, keys and
// values to the caches.
template <typename T, typename C, int kMost>
__global__ void append_kernel(AttentionParams p) {
  __shared__ float heads[kWarps][kMost];
  pdl_wait();
  pdl_launch_dependents();
  const int token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int sequence = sequence_of(p, token);
  const int position = p.past_lens[sequence] + token - start_of(p, sequence);
  const int all = qkv_heads(p);
  const float factor = query_factor(p, position);
  const RotaryRow rotary(p, token, position);
  for (int h = blockIdx.y * kWarps + warp; h < all; h += gridDim.y * kWarps) {
    const bool is_query = h < p.num_heads, is_value = h >= p.num_heads + p.num_kv_heads;
    const T* source =
        static_cast<const T*>(p.qkv) + token * p.qkv_stride + static_cast<int64_t>(h) * p.head_dim;
    norm_and_rope<T, kMost>(heads[warp], source, p,
                            is_query   ? p.q_norm
                            : is_value ? p.v_norm
                                       : p.k_norm,
                            rotary, !is_value);
    auto write = [&](auto* target) {
      for (int i = lane; i < p.head_dim; i += 32)
        target[i] = from_float<std::remove_pointer_t<decltype(target)>>(
            is_query ? heads[warp][i] * factor : heads[warp][i]);
    };
    if (is_query) {
      write(static_cast<T*>(p.queries) +
            (static_cast<int64_t>(token) * p.num_heads + h) * p.head_dim);
      if (p.reads && h < p.num_kv_heads)
        clear_tail<C>(p, sequence, token, position, h, 1, lane, 32);
    } else {
      const int kv_head = h - p.num_heads - (is_value ? p.num_kv_heads : 0);
      write(static_cast<C*>(is_value ? p.value_cache : p.key_cache) +
            CacheRows(p, sequence, kv_head)(position));
      if (is_value) clear_tail<C>(p, sequence, token, position, kv_head, 1, lane, 32);
    }
    __syncwarp();
  }
}

// The same without head norms and with RoPE on whole vectors: one block per token, one vector and
// its rotation partner per thread and iteration.
template <typename T, typename C>
__global__ void append_vectors_kernel(AttentionParams p) {
  constexpr int kWidth = kVec<T>;
  pdl_wait();
  pdl_launch_dependents();
  const int token = blockIdx.x, sequence = sequence_of(p, token);
  const int position = p.past_lens[sequence] + token - start_of(p, sequence);
  const int all = qkv_heads(p), vectors = p.head_dim / kWidth;
  const float factor = query_factor(p, position);
  const int half = p.cos == nullptr ? 0 : p.rotary_dim / 2;
  const RotaryRow rotary(p, token, position);
  const T* row = static_cast<const T*>(p.qkv) + token * p.qkv_stride;
  for (int i = threadIdx.x; i < all * vectors; i += blockDim.x) {
    const int h = i / vectors, at = i % vectors * kWidth;
    const bool is_query = h < p.num_heads, is_value = h >= p.num_heads + p.num_kv_heads;
    const auto vector = load<T, kWidth>(row + h * p.head_dim + at);
    float value[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) value[k] = to_float(vector.data[k]);
    if (at < 2 * half && !is_value) {
      const bool first = at < half;
      const auto other = load<T, kWidth>(row + h * p.head_dim + (first ? at + half : at - half));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float y = to_float(other.data[k]);
        const int pair = (first ? at : at - half) + k;
        const int64_t angle = rotary.of(pair) * half + pair;
        value[k] = value[k] * p.cos[angle] + (first ? -y : y) * p.sin[angle];
      }
    }
    if (is_query) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) value[k] *= factor;
      store_floats(static_cast<T*>(p.queries) +
                       (static_cast<int64_t>(token) * p.num_heads + h) * p.head_dim + at,
                   value);
    } else {
      const int kv_head = h - p.num_heads - (is_value ? p.num_kv_heads : 0);
      store_floats(static_cast<C*>(is_value ? p.value_cache : p.key_cache) +
                       CacheRows(p, sequence, kv_head)(position) + at,
                   value);
    }
  }
  clear_tail<C>(p, sequence, token, position, 0, p.num_kv_heads, threadIdx.x, blockDim.x);
}

// One block per row and KV head, for caches of 2-byte elements.
__global__ void sequence_lengths_kernel(SequenceLengths lengths, AttentionParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int row = blockIdx.x, head = blockIdx.y;
  const int start = start_of(p, min(row, p.batch));
  const int fresh = row < p.batch ? start_of(p, row + 1) - start : 0;
  const int all = row < p.batch ? p.past_lens[row] + fresh : 0;
  if (threadIdx.x == 0 && head == 0) {
    lengths.starts[row] = start * p.num_heads * p.head_dim;
    if (row < lengths.rows) lengths.fresh[row] = fresh, lengths.all[row] = all;
  }
  if (row >= p.batch) return;
  const int vectors = p.head_dim / 8, end = min((all + 127) / 128 * 128, p.max_seq_len);
  const CacheRows place(p, row, head);
  auto* values = static_cast<uint4*>(p.value_cache);
  for (int i = all * vectors + threadIdx.x; i < end * vectors; i += blockDim.x)
    values[place(i / vectors) / 8 + i % vectors] = make_uint4(0, 0, 0, 0);
}

template <typename T, typename C>
cudaError_t run_append(const AttentionParams& p, cudaStream_t stream) {
  const int all = qkv_heads(p);
  const bool vectors = p.q_norm == nullptr && p.k_norm == nullptr && p.v_norm == nullptr &&
                       p.head_dim % kVec<T> == 0 && has_aligned_rows<T>(p.qkv, p.qkv_stride) &&
                       (p.cos == nullptr || (!p.interleaved && p.rotary_dim % (2 * kVec<T>) == 0));
  if (vectors) return launch(append_vectors_kernel<T, C>, p.num_tokens, 256, 0, stream, p);
  const dim3 grid(p.num_tokens, (all + kWarps - 1) / kWarps);
  if (p.head_dim <= 256) return launch(append_kernel<T, C, 256>, grid, kWarps * 32, 0, stream, p);
  return launch(append_kernel<T, C, kMaxHeadDim>, grid, kWarps * 32, 0, stream, p);
}

// kFused: decoding; the kernel normalizes, rotates and appends its heads itself.
template <typename T, typename C, int kLanes, int kVectors, int kHeads, bool kFused>
__global__ void __launch_bounds__(kWarps * 32)
    token_attention_kernel(AttentionParams p, int parts) {
  constexpr int kGroups = 32 / kLanes, kTurns = 4 / kVectors, kMost = 8 * kLanes * kVectors,
                kOwn = 8 * kVectors;
  extern __shared__ float shared[];
  float* queries = shared;                      // [kHeads][head_dim]
  float* sums = queries + kHeads * p.head_dim;  // [kWarps][kHeads][head_dim]
  __shared__ float peak_of[kWarps][kHeads], total_of[kWarps][kHeads];
  pdl_wait();
  pdl_launch_dependents();
  const int dim = p.head_dim, group = p.num_heads / p.num_kv_heads;
  const int chunks = (group + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.x / chunks,
            first_head = kv_head * group + blockIdx.x % chunks * kHeads;
  const int heads = min(kHeads, (kv_head + 1) * group - first_head);
  const int token = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int sequence = kFused ? token : sequence_of(p, token);
  const int position = p.past_lens[sequence] + (kFused ? 0 : token - start_of(p, sequence));
  const int32_t* const range = kFused ? nullptr : range_of(p, token);
  const int begin = first_visible(p.window, p.chunk, range, p.windowed_ranges, position);
  const int end = last_visible(range, position) + 1, count = end - begin;
  const int used = min(parts, (count + kMinKeysPerSplit - 1) / kMinKeysPerSplit), part = blockIdx.z;
  if (part >= used) return;
  const int per_part = (count + used - 1) / used;
  const int from = begin + part * per_part, to = min(end, from + per_part);

  const CacheRows row(p, sequence, kv_head);
  C* keys = static_cast<C*>(p.key_cache);
  C* values = static_cast<C*>(p.value_cache);
  if constexpr (kFused) {
    const T* qkv = static_cast<const T*>(p.qkv) + token * p.qkv_stride;
    const RotaryRow rotary(p, token, position);
    for (int h = warp; h < heads; h += kWarps)
      norm_and_rope<T, kMost>(queries + h * dim, qkv + (first_head + h) * dim, p, p.q_norm, rotary,
                              true);
    if (to == position + 1 && warp == kWarps - 1 && !p.reads) {
      // The block that reads the new position also writes it; blocks of the same KV head write the
      // same values.
      float* scratch = sums;
      const T* key = qkv + (p.num_heads + kv_head) * dim;
      norm_and_rope<T, kMost>(scratch, key, p, p.k_norm, rotary, true);
      for (int i = lane; i < dim; i += 32) keys[row(position) + i] = from_float<C>(scratch[i]);
      __syncwarp();
      norm_and_rope<T, kMost>(scratch, key + p.num_kv_heads * dim, p, p.v_norm, rotary, false);
      for (int i = lane; i < dim; i += 32) values[row(position) + i] = from_float<C>(scratch[i]);
    }
  } else {
    const T* source = static_cast<const T*>(p.queries) +
                      (static_cast<int64_t>(token) * p.num_heads + first_head) * dim;
    for (int i = threadIdx.x; i < heads * dim; i += blockDim.x) queries[i] = to_float(source[i]);
  }
  __syncthreads();

  auto in_key = [&](int v) {
    return (v * kLanes + lane % kLanes) * 8;
  };  // where this thread's vector v of a key begins
  auto inside = [&](int v) { return in_key(v) < dim; };
  const float scale =
      p.scale * (p.softcap > 0 ? 1.f : kLog2E) * (kFused ? query_factor(p, position) : 1.f);
  float q[kHeads][kOwn], sum[kHeads][kOwn] = {}, peak[kHeads], total[kHeads] = {};
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    peak[h] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      q[h][i] = inside(i / 8) && h < heads ? queries[h * dim + in_key(i / 8) + i % 8] * scale : 0;
  }
  constexpr int kStride = kWarps * kGroups;
  for (int start = from + warp * kGroups + lane / kLanes; start - lane / kLanes < to;
       start += kStride * kTurns) {
    Cached<C> key[kTurns][kVectors], value[kTurns][kVectors];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int j = start + turn * kStride;
        key[turn][v] = value[turn][v] = Cached<C>{};
        if (j < to && inside(v)) {
          key[turn][v] = load_cache(keys + row(j) + in_key(v));
          value[turn][v] = load_cache(values + row(j) + in_key(v));
        }
      }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const bool there = start + turn * kStride < to;
      Vec<T, 8> k[kVectors], value_of[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        k[v] = convert_cache<T, C>(key[turn][v]), value_of[v] = convert_cache<T, C>(value[turn][v]);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float score = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) score += q[h][i] * to_float(k[i / 8].data[i % 8]);
#pragma unroll
        for (int mask = kLanes / 2; mask; mask >>= 1) score += __shfl_xor_sync(~0u, score, mask);
        if (p.softcap > 0) score = p.softcap * tanhf(score / p.softcap) * kLog2E;
        if (!there) score = -INFINITY;
        const float higher = fmaxf(peak[h], score);
        if (higher == -INFINITY) continue;  // uniform over a lane group
        const float old = exp2f(peak[h] - higher), fresh = exp2f(score - higher);
        peak[h] = higher;
        total[h] = total[h] * old + fresh;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
          sum[h][i] = sum[h][i] * old + fresh * to_float(value_of[i / 8].data[i % 8]);
      }
    }
  }
  // Merge the lane groups of the warp, then the warps.
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    merge_lanes<kLanes>(peak[h], total[h], sum[h]);
    if (lane < kLanes)
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (inside(i / 8)) sums[(warp * kHeads + h) * dim + in_key(i / 8) + i % 8] = sum[h][i];
    if (lane == 0) peak_of[warp][h] = peak[h], total_of[warp][h] = total[h];
  }
  merge<T, 0>(p, peak_of, total_of, [&](int row, int i) { return sums[row * dim + i]; }, heads,
              static_cast<int64_t>(token) * p.num_heads + first_head,
              {part, used, p.counters + blockIdx.y * gridDim.x + blockIdx.x,
               static_cast<float*>(p.scratch) +
                   (static_cast<int64_t>(token) * p.num_heads + first_head) * parts * (dim + 2),
               static_cast<int64_t>(parts) * (dim + 2), dim + 2});
}

template <typename T, typename C, int kLanes, int kVectors, int kHeads, bool kFused>
cudaError_t run_tokens(const AttentionParams& p, cudaStream_t stream) {
  const int group = p.num_heads / p.num_kv_heads,
            columns = p.num_kv_heads * ((group + kHeads - 1) / kHeads);
  const int blocks = columns * p.num_tokens;
  // KV is split if there are few blocks, into less than twice kEnoughBlocks.
  const int wanted = blocks >= kEnoughBlocks ? 1 : (kEnoughBlocks + blocks - 1) / blocks;
  const int parts =
      min(min(wanted, kMaxSplits), (p.max_seq_len + kMinKeysPerSplit - 1) / kMinKeysPerSplit);
  const size_t shared = sizeof(float) * (1 + kWarps) * kHeads * p.head_dim;
  auto kernel = token_attention_kernel<T, C, kLanes, kVectors, kHeads, kFused>;
  if (shared > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  return launch(kernel, dim3(columns, p.num_tokens, parts), kWarps * 32, shared, stream, p, parts);
}

template <typename T, typename C, int kLanes, int kVectors, bool kFused>
cudaError_t tokens_of_lanes(const AttentionParams& p, cudaStream_t stream) {
  const int group = p.num_heads / p.num_kv_heads;
  if (group == 1) return run_tokens<T, C, kLanes, kVectors, 1, kFused>(p, stream);
  if constexpr (std::is_same_v<T, float> && kVectors == 1)  // other instantiations are too rare
    if (group == 2) return run_tokens<T, C, kLanes, kVectors, 2, kFused>(p, stream);
  return run_tokens<T, C, kLanes, kVectors, 4, kFused>(p, stream);
}

template <typename T, typename C, bool kFused>
cudaError_t tokens(const AttentionParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return tokens_of_lanes<T, C, 8, 1, kFused>(p, stream);
  if (p.head_dim <= 128) return tokens_of_lanes<T, C, 16, 1, kFused>(p, stream);
  if (p.head_dim <= 256) return tokens_of_lanes<T, C, 32, 1, kFused>(p, stream);
  return tokens_of_lanes<T, C, 32, 2, kFused>(p, stream);
}

}  // namespace

// KV is split only with fewer than kAttentionCounters blocks, so there are never twice as many;
// each has at most 8 heads, or kRowHeads of several rows.
int64_t attention_scratch(int num_heads, int head_dim) {
  const int64_t heads = head_dim <= 256 ? kRowHeads : min(num_heads, kDecodeHeads);
  return sizeof(float) * 2 * kAttentionCounters * heads * (head_dim + 2);
}

cudaError_t append(DType dtype, const AttentionParams& p, cudaStream_t stream) {
  return dispatch_cache_dtype(dtype, p.float8, [&](auto* type, auto* cached) {
    return run_append<std::remove_pointer_t<decltype(type)>,
                      std::remove_pointer_t<decltype(cached)>>(p, stream);
  });
}

cudaError_t sequence_lengths(const SequenceLengths& lengths, const AttentionParams& p,
                             cudaStream_t stream) {
  return launch(sequence_lengths_kernel, dim3(lengths.rows + 1, p.num_kv_heads), 128, 0, stream,
                lengths, p);
}

bool decodes_rows(DType dtype, const AttentionParams& p) { return can_decode(dtype, p); }
bool appends_rows(const AttentionParams& p) { return rows_per_block(p) == 1; }

cudaError_t attention(DType dtype, const AttentionParams& p, cudaStream_t stream) {
  if (p.head_dim % 8 != 0 || p.head_dim > kMaxHeadDim || p.num_heads % p.num_kv_heads != 0)
    return cudaErrorInvalidValue;
  if (p.decode && can_decode(dtype, p)) return decode(dtype, p, stream);
  if (p.decode && dtype != DType::kFloat32) {
    const cudaError_t error = append(dtype, p, stream);
    if (error != cudaSuccess) return error;
  }
  if (!p.decode && !p.vanilla && has_prefill_sm90(dtype, p)) return prefill_sm90(dtype, p, stream);
  if (!p.decode && !p.vanilla && can_prefill(dtype, p.head_dim)) return prefill(dtype, p, stream);
  return dispatch_cache_dtype(dtype, p.float8, [&](auto* type, auto* cached) {
    using T = std::remove_pointer_t<decltype(type)>;
    using C = std::remove_pointer_t<decltype(cached)>;
    if constexpr (std::is_same_v<T, float>)
      if (p.decode) return tokens<T, C, true>(p, stream);
    return tokens<T, C, false>(p, stream);
  });
}

}  // namespace llmc::kernels
