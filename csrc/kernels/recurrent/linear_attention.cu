// Linear attention with a state matrix per head (gated delta rule). Each token decays the state,
// adds the outer product of its key and its update, and reads it with its query. Columns of the
// state are independent: a column stays in registers of kLanes threads for all new tokens of a
// sequence; keys and queries pass through shared memory in tiles of tokens. Reads q, k, v once per
// kColumns columns, and the state once; writes out and the state. Drafts follow the tokens after
// which the state is stored. For decoding,
// linear_attention_step_kernel keeps less and has more of the state in flight.
#include "../common/device.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kLanes = 4, kColumns = 32, kThreads = kLanes * kColumns, kVector = 8;

enum class Rule {
  kGated,
  kDelta,
  kByChannel
};  // kByChannel: a decay per row of the state; the update rule is in the params

// kKeys: k_dim, rounded up. kAligned: keys can be loaded by vectors.
template <typename T, int kKeys, Rule kRule, bool kAligned>
__global__ void __launch_bounds__(kThreads) linear_attention_kernel(LinearAttentionParams p) {
  constexpr bool kByChannel = kRule == Rule::kByChannel;
  constexpr int kTile =
      kByChannel && kKeys > 128 ? 8 : 16;              // tokens per tile, limited by shared memory
  constexpr int kRow = kKeys / kVector;                // threads that load a key
  constexpr int kTurns = 2 * kTile * kRow / kThreads;  // of queries and keys
  constexpr int kFours =
      kKeys / kLanes / 4;  // fours of a thread's part of a column: elements 16 i + 4 lane + j
  __shared__ __align__(16) float queries[kTile][kKeys], keys[kTile][kKeys], values[kTile][kColumns];
  __shared__ float factors[kTile], betas[kTile];
  __shared__ __align__(16) float row_factors[kByChannel ? kTile : 1][kKeys];
  const bool delta = kByChannel ? p.delta : kRule == Rule::kDelta;

  const int head = blockIdx.y, sequence = p.first_sequence + blockIdx.z,
            first_column = blockIdx.x * kColumns;
  const int thread = threadIdx.x, lane = thread % kLanes, own = thread / kLanes,
            column = first_column + own;
  const int begin = p.cu_seqlens[sequence], end = p.cu_seqlens[sequence + 1];
  const int row = p.state_slots != nullptr ? p.state_slots[sequence] : sequence;
  float* state =
      p.state + (static_cast<int64_t>(row) * p.v_heads + head) * p.k_dim * p.v_dim + column;
  const bool has_column = column < p.v_dim;
  float4 memory[kFours];
  auto each = [&](auto&& f) {  // f(row of the state, element)
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int key = 4 * kLanes * i + 4 * lane;
      f(key, memory[i].x), f(key + 1, memory[i].y), f(key + 2, memory[i].z),
          f(key + 3, memory[i].w);
    }
  };
  // The state was written in an earlier step, so it may be read before pdl_wait().
  const bool reads = begin < end && has_column && p.past_lens[sequence] > 0;
  each([&](int key, float& element) {
    element = reads && key < p.k_dim ? state[static_cast<int64_t>(key) * p.v_dim] : 0.f;
  });
  pdl_wait();
  pdl_launch_dependents();
  if (begin == end && p.past_lens[sequence] > 0) return;
  const int stop = p.commit_lens != nullptr ? begin + p.commit_lens[sequence] : end;
  auto store_state = [&] {
    each([&](int key, float& element) {
      if (has_column && key < p.k_dim) state[static_cast<int64_t>(key) * p.v_dim] = element;
    });
  };
  if (stop == begin) store_state();

  const int64_t width = 2ll * p.k_heads * p.k_dim + static_cast<int64_t>(p.v_heads) * p.v_dim;
  const T* qkv = static_cast<const T*>(p.qkv);
  const int key_head = head / (p.v_heads / p.k_heads);
  const T* own_values =
      qkv + 2ll * p.k_heads * p.k_dim + static_cast<int64_t>(head) * p.v_dim + first_column;
  const float rate = p.decay_rate != nullptr ? p.decay_rate[head] : 1.f;
  const float decay_bias = p.decay_bias != nullptr ? p.decay_bias[head] : 0.f;
  const float beta_bias = p.beta_bias != nullptr ? p.beta_bias[head] : 0.f;
  const float skip = p.skip != nullptr ? to_float(static_cast<const T*>(p.skip)[head]) : 0.f;

  // A tile in flight: queries, then keys, by rows of threads; values of four columns; gates.
  Vec<T, kVector> rows[kTurns];
  T given[kColumns * kTile / kThreads];
  float decay = 0, beta = 1;
  constexpr int kGiven = kColumns * kTile / kThreads, kValueThreads = kColumns / kGiven;
  constexpr int kDecayTurns = kByChannel ? (kTile * kRow + kThreads - 1) / kThreads : 0;
  Vec<T, kVector> decays[kByChannel ? kDecayTurns : 1];
  auto read_row = [&](Vec<T, kVector>& row, const T* from, int at,
                      bool there) {  // elements [at, at + kVector) of a key
#pragma unroll
    for (int i = 0; i < kVector; ++i) row.data[i] = from_float<T>(0.f);
    if (!there) return;
    if constexpr (kAligned) {
      if (at < p.k_dim) row = load<T, kVector>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (at + i < p.k_dim) row.data[i] = from[i];
    }
  };
  auto fetch = [&](int tile) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int index = (turn * kThreads + thread) / kRow, at = thread % kRow * kVector;
      const int token = tile + index % kTile;
      read_row(rows[turn],
               qkv + token * width +
                   (index / kTile * p.k_heads + key_head) * static_cast<int64_t>(p.k_dim) + at,
               at, token < end);
    }
#pragma unroll
    for (int turn = 0; turn < kDecayTurns; ++turn) {
      const int index = (turn * kThreads + thread) / kRow, at = thread % kRow * kVector,
                token = tile + index;
      const T* own = static_cast<const T*>(p.decay) + token * p.decay_stride +
                     static_cast<int64_t>(head) * p.k_dim + at;
      read_row(decays[turn], own, at, index < kTile && token < end);
    }
    const int token = tile + thread / kValueThreads, at = thread % kValueThreads * kGiven;
#pragma unroll
    for (int i = 0; i < kGiven; ++i)
      given[i] = token < end && first_column + at + i < p.v_dim ? own_values[token * width + at + i]
                                                                : from_float<T>(0.f);
    if (thread < kTile && tile + thread < end) {
      const int64_t token = tile + thread;
      if constexpr (!kByChannel)
        decay = to_float(static_cast<const T*>(p.decay)[token * p.decay_stride + head]);
      if (p.beta != nullptr)
        beta = to_float(static_cast<const T*>(p.beta)[token * p.beta_stride + head]);
    }
  };
  auto put = [&] {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int index = (turn * kThreads + thread) / kRow, at = thread % kRow * kVector;
      const bool is_query = index < kTile;
      float numbers[kVector], squares = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        numbers[i] = to_float(rows[turn].data[i]);
        squares = fmaf(numbers[i], numbers[i], squares);
      }
      float scale = is_query ? p.scale : 1.f;
      if (p.l2norm) {
#pragma unroll
        for (int mask = kRow / 2; mask; mask >>= 1) squares += __shfl_xor_sync(~0u, squares, mask);
        scale /= sqrtf(squares + 1e-6f);
      }
      float* to = (is_query ? queries[index] : keys[index - kTile]) + at;
#pragma unroll
      for (int i = 0; i < kVector; ++i) to[i] = numbers[i] * scale;
    }
#pragma unroll
    for (int i = 0; i < kGiven; ++i)
      values[thread / kValueThreads][thread % kValueThreads * kGiven + i] = to_float(given[i]);
    if (thread < kTile) {
      factors[thread] = expf(device::activate(decay + decay_bias, p.decay_activation) * rate);
      betas[thread] =
          p.beta != nullptr ? device::activate(beta + beta_bias, p.beta_activation) : 1.f;
    }
#pragma unroll
    for (int turn = 0; turn < kDecayTurns; ++turn) {
      const int index = (turn * kThreads + thread) / kRow, at = thread % kRow * kVector;
      if (index >= kTile) break;
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        row_factors[index][at + i] = expf(to_float(decays[turn].data[i]));
    }
  };
  auto across = [](float x) {  // sum over a column's threads
#pragma unroll
    for (int mask = kLanes / 2; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
    return x;
  };

  T* out = static_cast<T*>(p.out) + static_cast<int64_t>(head) * p.v_dim + column;
  fetch(begin);
  for (int tile = begin; tile < end; tile += kTile) {
    __syncthreads();  // the previous tile has been read
    put();
    __syncthreads();
    if (tile + kTile < end) fetch(tile + kTile);
    const int count = min(kTile, end - tile);
    for (int t = 0; t < count; ++t) {
      const float4* key = reinterpret_cast<const float4*>(keys[t]) + lane;
      const float4* query = reinterpret_cast<const float4*>(queries[t]) + lane;
      const float factor = kByChannel ? 1.f : factors[t], value = values[t][own];
      float news = value;
      if constexpr (kByChannel) {
        const float4* by = reinterpret_cast<const float4*>(row_factors[t]) + lane;
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
          const float4 f = by[kLanes * i];
          memory[i].x *= f.x, memory[i].y *= f.y, memory[i].z *= f.z, memory[i].w *= f.w;
        }
      }
      if (delta) {
        float4 sum{};
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
          const float4 k = key[kLanes * i];
          sum.x = fmaf(k.x, memory[i].x, sum.x), sum.y = fmaf(k.y, memory[i].y, sum.y);
          sum.z = fmaf(k.z, memory[i].z, sum.z), sum.w = fmaf(k.w, memory[i].w, sum.w);
        }
        news -= factor * across((sum.x + sum.y) + (sum.z + sum.w));
      }
      news *= betas[t];
      float4 sum{};
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        const float4 k = key[kLanes * i], q = query[kLanes * i];
        memory[i].x = fmaf(memory[i].x, factor, k.x * news),
        memory[i].y = fmaf(memory[i].y, factor, k.y * news);
        memory[i].z = fmaf(memory[i].z, factor, k.z * news),
        memory[i].w = fmaf(memory[i].w, factor, k.w * news);
        sum.x = fmaf(q.x, memory[i].x, sum.x), sum.y = fmaf(q.y, memory[i].y, sum.y);
        sum.z = fmaf(q.z, memory[i].z, sum.z), sum.w = fmaf(q.w, memory[i].w, sum.w);
      }
      const float read = across((sum.x + sum.y) + (sum.z + sum.w));
      if (lane == 0 && has_column)
        out[static_cast<int64_t>(tile + t) * p.v_heads * p.v_dim] =
            from_float<T>(fmaf(skip, value, read));
      if (tile + t + 1 == stop) store_state();
    }
  }
}

// Decoding: one token per sequence. The state is read once, with unnormalized keys and queries: q *
// (S + k n) = q * S + (q * k) n. One block per head, sequence and 32 columns; a thread has kEach
// rows of four columns. Reads and writes k_dim * v_dim floats per head.
constexpr int kStepFours = 8, kStepParts = kThreads / kStepFours;

template <typename T, int kEach, bool kAligned>
__global__ void __launch_bounds__(kThreads) linear_attention_step_kernel(LinearAttentionParams p) {
  __shared__ float partial[kThreads / 32][kStepFours][11];
  const int head = blockIdx.y, sequence = p.first_sequence + blockIdx.z;
  const int four = threadIdx.x % kStepFours, part = threadIdx.x / kStepFours,
            first_key = part * kEach;
  const int column = (blockIdx.x * kStepFours + four) * 4;
  const int token = p.cu_seqlens[sequence];
  const bool empty = token == p.cu_seqlens[sequence + 1], begins = p.past_lens[sequence] == 0;
  const int row = p.state_slots != nullptr ? p.state_slots[sequence] : sequence;
  float* state = p.state +
                 ((static_cast<int64_t>(row) * p.v_heads + head) * p.k_dim + first_key) * p.v_dim +
                 column;
  const bool has_column = column < p.v_dim;
  Vec<float, 4> memory[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    memory[i] = {};
    if (has_column && !empty && !begins && first_key + i < p.k_dim)
      memory[i] = load<float, 4>(state + static_cast<int64_t>(i) * p.v_dim);
  }
  const float rate = p.decay_rate != nullptr ? p.decay_rate[head] : 1.f;
  const float decay_bias = p.decay_bias != nullptr ? p.decay_bias[head] : 0.f;
  const float beta_bias = p.beta_bias != nullptr ? p.beta_bias[head] : 0.f;
  const float skip = p.skip != nullptr ? to_float(static_cast<const T*>(p.skip)[head]) : 0.f;
  pdl_wait();
  pdl_launch_dependents();
  if (empty && !begins) return;

  float query[kEach] = {}, key[kEach] = {}, factor[kEach], value[4] = {}, beta = 1;
  auto read = [&](float (&to)[kEach], const T* from) {
    constexpr int kWide = kEach < kVector ? kEach : kVector;
#pragma unroll
    for (int i = 0; i < kEach; i += kWide) {
      if constexpr (kAligned) {
        if (first_key + i >= p.k_dim) continue;
        const auto numbers = load<T, kWide>(from + first_key + i);
#pragma unroll
        for (int k = 0; k < kWide; ++k) to[i + k] = to_float(numbers.data[k]);
      } else {
#pragma unroll
        for (int k = 0; k < kWide; ++k)
          if (first_key + i + k < p.k_dim) to[i + k] = to_float(from[first_key + i + k]);
      }
    }
  };
#pragma unroll
  for (int i = 0; i < kEach; ++i) factor[i] = 0;
  if (!empty) {
    const T* qkv = static_cast<const T*>(p.qkv) +
                   token * (2ll * p.k_heads * p.k_dim + static_cast<int64_t>(p.v_heads) * p.v_dim);
    const T* own = qkv + static_cast<int64_t>(head / (p.v_heads / p.k_heads)) * p.k_dim;
    const T* decay = static_cast<const T*>(p.decay) + token * p.decay_stride;
    read(query, own);
    read(key, own + static_cast<int64_t>(p.k_heads) * p.k_dim);
    if (p.decay_per_channel) {
      read(factor, decay + static_cast<int64_t>(head) * p.k_dim);
#pragma unroll
      for (int i = 0; i < kEach; ++i) factor[i] = expf(factor[i]);
    } else {
      const float same =
          expf(device::activate(to_float(decay[head]) + decay_bias, p.decay_activation) * rate);
#pragma unroll
      for (int i = 0; i < kEach; ++i) factor[i] = same;
    }
    if (p.beta != nullptr)
      beta = device::activate(
          to_float(static_cast<const T*>(p.beta)[token * p.beta_stride + head]) + beta_bias,
          p.beta_activation);
    if (has_column) {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        value[c] = to_float(
            qkv[2ll * p.k_heads * p.k_dim + static_cast<int64_t>(head) * p.v_dim + column + c]);
    }
  }

  // Sums of query * column and key * column, query * key, and the squares of both.
  float sums[11] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      memory[i].data[c] *= factor[i];
      sums[c] = fmaf(query[i], memory[i].data[c], sums[c]);
      sums[4 + c] = fmaf(key[i], memory[i].data[c], sums[4 + c]);
    }
    sums[8] = fmaf(query[i], key[i], sums[8]);
    sums[9] = fmaf(query[i], query[i], sums[9]);
    sums[10] = fmaf(key[i], key[i], sums[10]);
  }
#pragma unroll
  for (int k = 0; k < 11; ++k) {
    sums[k] += __shfl_xor_sync(~0u, sums[k], 8);
    sums[k] += __shfl_xor_sync(~0u, sums[k], 16);
    if (threadIdx.x % 32 < kStepFours) partial[threadIdx.x / 32][four][k] = sums[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 11; ++k) {
    sums[k] = partial[0][four][k];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; ++warp) sums[k] += partial[warp][four][k];
  }
  if (!has_column) return;
  const float query_scale = p.l2norm ? p.scale / sqrtf(sums[9] + 1e-6f) : p.scale;
  const float key_scale = p.l2norm ? 1.f / sqrtf(sums[10] + 1e-6f) : 1.f;
  float news[4];
  Vec<T, 4> out;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    news[c] = (p.delta ? value[c] - key_scale * sums[4 + c] : value[c]) * beta * key_scale;
    out.data[c] =
        from_float<T>(fmaf(skip, value[c], query_scale * fmaf(sums[8], news[c], sums[c])));
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (first_key + i >= p.k_dim) break;
#pragma unroll
    for (int c = 0; c < 4; ++c) memory[i].data[c] = fmaf(key[i], news[c], memory[i].data[c]);
    store(state + static_cast<int64_t>(i) * p.v_dim, memory[i]);
  }
  if (part == 0 && !empty)
    store(static_cast<T*>(p.out) + (static_cast<int64_t>(token) * p.v_heads + head) * p.v_dim +
              column,
          out);
}

template <typename T, int kKeys>
cudaError_t run_step(const LinearAttentionParams& p, cudaStream_t stream) {
  constexpr int kEach = kKeys / kStepParts;
  const dim3 grid(ceil_div(p.v_dim, 4 * kStepFours), p.v_heads, p.batch);
  const bool aligned =
      p.k_dim % kVector == 0 && p.v_heads * p.v_dim % kVector == 0 &&
      (!p.decay_per_channel || has_aligned_rows<T, kVector>(p.decay, p.decay_stride));
  return aligned
             ? launch(linear_attention_step_kernel<T, kEach, true>, grid, kThreads, 0, stream, p)
             : launch(linear_attention_step_kernel<T, kEach, false>, grid, kThreads, 0, stream, p);
}

template <typename T, int kKeys>
cudaError_t run(const LinearAttentionParams& p, cudaStream_t stream) {
  if (p.single && p.v_dim % 4 == 0) return run_step<T, kKeys>(p, stream);
  const dim3 grid(ceil_div(p.v_dim, kColumns), p.v_heads, p.batch);
  auto with = [&](auto kernel) { return launch(kernel, grid, kThreads, 0, stream, p); };
  const bool aligned =
      p.k_dim % kVector == 0 && p.v_heads * p.v_dim % kVector == 0 &&
      (!p.decay_per_channel || has_aligned_rows<T, kVector>(p.decay, p.decay_stride));
  auto by = [&](auto rule) {
    return aligned ? with(linear_attention_kernel<T, kKeys, rule.value, true>)
                   : with(linear_attention_kernel<T, kKeys, rule.value, false>);
  };
  if (p.decay_per_channel) return by(std::integral_constant<Rule, Rule::kByChannel>());
  return p.delta ? by(std::integral_constant<Rule, Rule::kDelta>())
                 : by(std::integral_constant<Rule, Rule::kGated>());
}

}  // namespace

cudaError_t linear_attention(DType dtype, const LinearAttentionParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (p.k_dim <= 32) return run<T, 32>(p, stream);
    if (p.k_dim <= 64) return run<T, 64>(p, stream);
    if (p.k_dim <= 128) return run<T, 128>(p, stream);
    if (p.k_dim <= kMaxKeyDim) return run<T, kMaxKeyDim>(p, stream);
    return cudaErrorInvalidValue;
  });
}

}  // namespace llmc::kernels
