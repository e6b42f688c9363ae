// Attention of encoders, encoder-decoder models and block drafters: queries that see all keys of
// their sequence, and causal ones with a score bias.
//
// A block takes one head and kQueries packed tokens, one sequence after the other if they belong to
// several. kLanes threads read a key, 8 elements each, for all of these queries. Every group of
// kLanes threads keeps its own online softmax; they are merged within the warp, then over the
// warps. Reads the keys and values of a sequence once per head and kQueries queries.
#include "bidirectional.h"

#include "attention.cuh"
#include "block.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kMostHeadDim = 256;

constexpr int kPrepareWarps = 4;

// Common parameters; out is T [num_tokens, num_heads * head_dim], as queries are, whose rows are
// query_stride elements apart.
struct Queries {
  void* out;
  const void* query;
  int64_t query_stride;
  const int32_t* cu_seqlens;  // [batch + 1]
  ScoreBias bias;
  int num_tokens, batch, num_heads, num_kv_heads, head_dim;
  float scale, softcap;
  const float* sinks;  // [num_heads] or null
};

// Keys in rows of a matrix; a query sees all of its sequence, or those in a window. Positions count
// within the sequence.
template <typename T>
struct RowsOfKeys {
  using Params = BidirectionalParams;
  using Element = T;

  __device__ RowsOfKeys(const Params& p, int sequence, int kv_head)
      : key_stride(p.key_stride), value_stride(p.value_stride), window(p.window) {
    const int wanted = p.key_starts != nullptr ? p.key_starts[sequence] : p.cu_seqlens[sequence];
    const int64_t start = min(max(wanted, 0), p.num_keys);
    count = p.key_lens != nullptr ? p.key_lens[sequence]
                                  : p.cu_seqlens[sequence + 1] - p.cu_seqlens[sequence];
    count = min(count, p.num_keys - static_cast<int>(start));
    key = static_cast<const T*>(p.key) + start * key_stride + kv_head * p.head_dim;
    value = static_cast<const T*>(p.value) + start * value_stride + kv_head * p.head_dim;
  }
  __device__ int begin(int i) const { return window > 0 ? max(0, i - window) : 0; }
  __device__ int end(int i) const { return window > 0 ? min(count, i + window + 1) : count; }
  __device__ bool sees(int i, int j) const { return window == 0 || abs(i - j) <= window; }
  __device__ const T* key_at(int j) const { return key + j * key_stride; }
  __device__ const T* value_at(int j) const { return value + j * value_stride; }
  __device__ int column(int i, int j, int distances) const {
    const int reach = distances / 2;
    return reach + min(max(j - i, -reach), reach);
  }

  const T *key, *value;
  int64_t key_stride, value_stride;
  int first = 0, count = 0, window;  // first: the position of the sequence's first query
};

// Keys in the KV cache; causal, with a window or chunk.
template <typename C>
struct CachedKeys {
  using Params = AttentionParams;
  using Element = C;

  __device__ CachedKeys(const Params& p, int sequence, int kv_head)
      : key(static_cast<const C*>(p.key_cache)),
        value(static_cast<const C*>(p.value_cache)),
        rows(p, sequence, kv_head),
        first(p.past_lens[sequence]),
        window(p.window),
        chunk(p.chunk) {}
  __device__ int begin(int i) const { return first_visible(window, chunk, i); }
  __device__ int end(int i) const { return i + 1; }
  __device__ bool sees(int i, int j) const { return j <= i && j >= begin(i); }
  __device__ const C* key_at(int j) const { return key + rows(j); }
  __device__ const C* value_at(int j) const { return value + rows(j); }
  __device__ int column(int i, int j, int distances) const {
    return min(max(i - j, 0), distances - 1);
  }

  const C *key, *value;
  CacheRows rows;
  int first, window, chunk;
};

// Keys in the KV cache; every query of the sequence sees all, or those within a window on both
// sides.
template <typename C>
struct BlockKeys {
  using Params = AttentionParams;
  using Element = C;

  __device__ BlockKeys(const Params& p, int sequence, int kv_head)
      : key(static_cast<const C*>(p.key_cache)),
        value(static_cast<const C*>(p.value_cache)),
        rows(p, sequence, kv_head),
        first(p.past_lens[sequence]),
        count(first + p.cu_seqlens[sequence + 1] - p.cu_seqlens[sequence]),
        window(p.window) {}
  __device__ int begin(int i) const { return window > 0 ? max(0, i - window) : 0; }
  __device__ int end(int i) const { return window > 0 ? min(count, i + window + 1) : count; }
  __device__ bool sees(int i, int j) const { return j >= begin(i) && j < end(i); }
  __device__ const C* key_at(int j) const { return key + rows(j); }
  __device__ const C* value_at(int j) const { return value + rows(j); }
  __device__ int column(int, int, int) const { return 0; }

  const C *key, *value;
  CacheRows rows;
  int first, count, window;
};

template <typename T, int kLanes, int kQueries, int kWarps, typename Keys>
__global__ void __launch_bounds__(kWarps * 32)
    biased_attention_kernel(Queries p, typename Keys::Params where) {
  using C = typename Keys::Element;
  constexpr int kGroups = 32 / kLanes, kTurns = kQueries == 1 ? 4 : 2, kStride = kWarps * kGroups;
  extern __shared__ float shared[];  // sums [kWarps][kQueries][head_dim]
  __shared__ float peak_of[kWarps][kQueries], total_of[kWarps][kQueries];
  pdl_wait();
  pdl_launch_dependents();
  const int dim = p.head_dim, head = blockIdx.y, kv_head = head / (p.num_heads / p.num_kv_heads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int in_key = lane % kLanes * 8;
  const bool inside = in_key < dim;
  auto of_head = [&](const float* table, int columns) {
    return table == nullptr ? nullptr : table + static_cast<int64_t>(head) * columns;
  };
  const float* by_distance = of_head(p.bias.distance, p.bias.distances);
  const float* by_key = of_head(p.bias.key, p.bias.positions);
  const int last_token = min(p.num_tokens, (static_cast<int>(blockIdx.x) + 1) * kQueries);
  for (int token = blockIdx.x * kQueries; token < last_token;) {
    const int sequence = sequence_of(p.cu_seqlens, p.batch, token);
    const int queries = min(last_token, p.cu_seqlens[sequence + 1]) - token;
    const Keys keys(where, sequence, kv_head);
    const int position = keys.first + token - p.cu_seqlens[sequence];
    const int from = keys.begin(position), to = keys.end(position + queries - 1);
    const int64_t place =
        (static_cast<int64_t>(token) * p.num_heads + head) * dim;  // of the first query
    const int64_t next = static_cast<int64_t>(p.num_heads) * dim;

    float q[kQueries][8], sum[kQueries][8] = {}, peak[kQueries], total[kQueries] = {};
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
      peak[n] = -INFINITY;
      Vec<T, 8> read;
#pragma unroll
      for (int i = 0; i < 8; ++i) read.data[i] = from_float<T>(0.f);
      if (inside && n < queries)
        read = load<T, 8>(static_cast<const T*>(p.query) + (token + n) * p.query_stride +
                          head * dim + in_key);
#pragma unroll
      for (int i = 0; i < 8; ++i) q[n][i] = to_float(read.data[i]) * p.scale;
    }
    for (int start = from + warp * kGroups + lane / kLanes; start - lane / kLanes < to;
         start += kStride * kTurns) {
      Cached<C> key[kTurns], value[kTurns];
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int j = start + turn * kStride;
        key[turn] = value[turn] = Cached<C>{};
        if (j < to && inside) {
          key[turn] = load_cache(keys.key_at(j) + in_key);
          value[turn] = load_cache(keys.value_at(j) + in_key);
        }
      }
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int j = start + turn * kStride;
        const Vec<T, 8> k = convert_cache<T, C>(key[turn]), v = convert_cache<T, C>(value[turn]);
#pragma unroll
        for (int n = 0; n < kQueries; ++n) {
          float score = 0;
#pragma unroll
          for (int i = 0; i < 8; ++i) score += q[n][i] * to_float(k.data[i]);
#pragma unroll
          for (int mask = kLanes / 2; mask; mask >>= 1) score += __shfl_xor_sync(~0u, score, mask);
          if (j >= to || n >= queries || !keys.sees(position + n, j))
            continue;  // uniform over a lane group
          if (p.softcap > 0) score = p.softcap * tanhf(score / p.softcap);
          if (by_distance != nullptr)
            score += by_distance[keys.column(position + n, j, p.bias.distances)];
          if (by_key != nullptr) score += by_key[j];
          score *= kLog2E;
          const float higher = fmaxf(peak[n], score);
          if (higher == -INFINITY) continue;
          const float old = exp2f(peak[n] - higher), fresh = exp2f(score - higher);
          peak[n] = higher;
          total[n] = total[n] * old + fresh;
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[n][i] = sum[n][i] * old + fresh * to_float(v.data[i]);
        }
      }
    }
    // Merge the lane groups of the warp, then the warps.
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
      merge_lanes<kLanes>(peak[n], total[n], sum[n]);
      if (lane < kLanes && inside)
#pragma unroll
        for (int i = 0; i < 8; ++i) shared[(warp * kQueries + n) * dim + in_key + i] = sum[n][i];
      if (lane == 0) peak_of[warp][n] = peak[n], total_of[warp][n] = total[n];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < queries * dim; i += kWarps * 32) {
      const int n = i / dim;
      float higher = -INFINITY, all = 0, weighted = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) higher = fmaxf(higher, peak_of[w][n]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float weight = higher == -INFINITY ? 0 : exp2f(peak_of[w][n] - higher);
        all += total_of[w][n] * weight;
        weighted += shared[(w * kQueries + n) * dim + i % dim] * weight;
      }
      if (higher != -INFINITY) all += sink_weight(p.sinks, head, higher);
      static_cast<T*>(p.out)[place + n * next + i % dim] =
          from_float<T>(all > 0 ? weighted / all : 0.f);
    }
    __syncthreads();  // before the next sequence's sums
    token += queries;
  }
}

template <typename T, int kLanes, typename Keys>
cudaError_t run_lanes(const Queries& p, const typename Keys::Params& where, cudaStream_t stream) {
  auto run = [&](auto queries, auto warps) {
    constexpr int kQueries = decltype(queries)::value, kWarps = decltype(warps)::value;
    const size_t shared = sizeof(float) * kWarps * kQueries * p.head_dim;
    static_assert(sizeof(float) * kWarps * kQueries * kMostHeadDim <= 32 * 1024);
    return launch(biased_attention_kernel<T, kLanes, kQueries, kWarps, Keys>,
                  dim3(ceil_div(p.num_tokens, kQueries), p.num_heads), kWarps * 32, shared, stream,
                  p, where);
  };
  if (p.num_tokens <= p.batch)
    return run(std::integral_constant<int, 1>(), std::integral_constant<int, 8>());
  return run(std::integral_constant<int, 4>(), std::integral_constant<int, 4>());
}

// A warp takes a head of a row. Reads and writes each head once.
template <typename T>
__global__ void __launch_bounds__(kPrepareWarps * 32) prepare_heads_kernel(PrepareHeadsParams p) {
  __shared__ float heads[kPrepareWarps][kMostHeadDim];
  pdl_wait();
  pdl_launch_dependents();
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = p.head_dim;
  const int position =
      p.rotary_by_row ? row : row - p.cu_seqlens[sequence_of(p.cu_seqlens, p.batch, row)];
  AttentionParams how{};  // what norm_and_rope reads
  how.cos = p.cos, how.sin = p.sin;
  how.head_dim = dim, how.rotary_dim = p.rotary_dim;
  how.interleaved = p.interleaved, how.norm_after_rotary = p.norm_after_rotary;
  how.norm_epsilon = p.norm_epsilon;
  float* own = heads[warp];
  auto copy = [&](void* to, const void* from, int64_t stride, int count, int h, const float* weight,
                  bool turn) {
    norm_and_rope<T, kMostHeadDim>(own, static_cast<const T*>(from) + row * stride + h * dim, how,
                                   weight, RotaryRow(how, row, position), turn);
    T* target = static_cast<T*>(to) + (static_cast<int64_t>(row) * count + h) * dim;
    for (int i = lane; i < dim; i += 32) target[i] = from_float<T>(own[i]);
    __syncwarp();
  };
  const int all = p.num_heads + 2 * p.num_kv_heads;
  for (int h = blockIdx.y * kPrepareWarps + warp; h < all; h += gridDim.y * kPrepareWarps) {
    const int kv_head = h - p.num_heads;
    if (row >= (kv_head < 0 ? p.num_tokens : p.num_keys)) continue;
    if (kv_head < 0) copy(p.query_out, p.query, p.query_stride, p.num_heads, h, p.q_norm, true);
    else if (kv_head < p.num_kv_heads)
      copy(p.key_out, p.key, p.key_stride, p.num_kv_heads, kv_head, p.k_norm, true);
    else
      copy(p.value_out, p.value, p.value_stride, p.num_kv_heads, kv_head - p.num_kv_heads, nullptr,
           false);
  }
}

template <typename T, typename Keys>
cudaError_t run(const Queries& p, const typename Keys::Params& where, cudaStream_t stream) {
  if (p.head_dim % 8 != 0 || p.head_dim > kMostHeadDim || p.num_heads % p.num_kv_heads != 0)
    return cudaErrorInvalidValue;
  if (p.head_dim <= 64) return run_lanes<T, 8, Keys>(p, where, stream);
  if (p.head_dim <= 128) return run_lanes<T, 16, Keys>(p, where, stream);
  return run_lanes<T, 32, Keys>(p, where, stream);
}

}  // namespace

cudaError_t bidirectional(DType dtype, const BidirectionalParams& p, cudaStream_t stream) {
  if (has_bidirectional_mma(dtype, p)) return bidirectional_mma(dtype, p, stream);
  const Queries queries{p.out,
                        p.query,
                        p.query_stride,
                        p.cu_seqlens,
                        {p.distance_bias, nullptr, p.distances, 0},
                        p.num_tokens,
                        p.batch,
                        p.num_heads,
                        p.num_kv_heads,
                        p.head_dim,
                        p.scale,
                        p.softcap,
                        nullptr};
  return dispatch_dtype(dtype, [&](auto* type) {
    return run<std::remove_pointer_t<decltype(type)>,
               RowsOfKeys<std::remove_pointer_t<decltype(type)>>>(queries, p, stream);
  });
}

cudaError_t prepare_heads(DType dtype, const PrepareHeadsParams& p, cudaStream_t stream) {
  if (p.head_dim > kMostHeadDim) return cudaErrorInvalidValue;
  const int most = ceil_div(p.num_heads + 2 * p.num_kv_heads, kPrepareWarps);
  return dispatch_dtype(dtype, [&](auto* type) {
    return launch(prepare_heads_kernel<std::remove_pointer_t<decltype(type)>>,
                  dim3(std::max(p.num_tokens, p.num_keys), std::min(most, 4)), kPrepareWarps * 32,
                  0, stream, p);
  });
}

cudaError_t block_attention(DType dtype, const AttentionParams& p, cudaStream_t stream) {
  const Queries queries{p.out,        p.queries,   static_cast<int64_t>(p.num_heads) * p.head_dim,
                        p.cu_seqlens, {},          p.num_tokens,
                        p.batch,      p.num_heads, p.num_kv_heads,
                        p.head_dim,   p.scale,     0,
                        nullptr};
  return dispatch_cache_dtype(dtype, p.float8, [&](auto* type, auto* cached) {
    return run<std::remove_pointer_t<decltype(type)>,
               BlockKeys<std::remove_pointer_t<decltype(cached)>>>(queries, p, stream);
  });
}

cudaError_t biased_attention(DType dtype, const AttentionParams& p, const ScoreBias& bias,
                             cudaStream_t stream) {
  const Queries queries{p.out,        p.queries,   static_cast<int64_t>(p.num_heads) * p.head_dim,
                        p.cu_seqlens, bias,        p.num_tokens,
                        p.batch,      p.num_heads, p.num_kv_heads,
                        p.head_dim,   p.scale,     p.softcap,
                        p.sinks};
  return dispatch_cache_dtype(dtype, p.float8, [&](auto* type, auto* cached) {
    return run<std::remove_pointer_t<decltype(type)>,
               CachedKeys<std::remove_pointer_t<decltype(cached)>>>(queries, p, stream);
  });
}

}  // namespace llmc::kernels
