// linear_attention() for prompts: the chunked form, on tensor cores. Let S be the state before a
// chunk of kChunk tokens, c the prefix sums of its log decays, and "°" a row-wise product. The
// updates N and the output O are
//
//     (1 + A) N = beta ° V - beta e^c ° K S
//     O         = e^c ° Q S + P N
//     A[i][j]   = beta_i e^(c_i - c_j) k_i . k_j  for j < i
//     P[i][j]   = e^(c_i - c_j) q_i . k_j         for j <= i
//
// and S becomes e^c_last S + (e^(c_last - c) ° K)^T N. All these exponentials are at most 1 if the
// decays are. chunk_prepare_kernel computes P and the inverse of 1 + A for all chunks and heads in
// parallel. chunk_state_kernel iterates over chunks with 32 columns of a head's state in registers.
// Products are tf32, which represents 16-bit elements exactly; sums are float32.
#include "../common/cp_async.cuh"
#include "../common/mma.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kChunk = 64, kColumns = 32, kThreads = 128, kTiles = 2;
// Scratch per chunk and head: the inverse and P as mma fragments, 128 floats per 16 rows and 8
// columns that are not zero; four factors per token; the decay of the state.
constexpr int kSteps = 20, kMatrix = kSteps * 128, kFactors = 2 * kMatrix,
              kFade = kFactors + 4 * kChunk, kUnit = kFade + 4;
__device__ constexpr int step_of(int warp, int step) { return warp * (warp + 1) + step; }

__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rounded(float x) { return __uint_as_float(to_tf32(x)); }

// c [16, 8] += a [16, 8] * b [8, 8]. A lane has columns 2 t and 2 t + 1 of a, and these rows of b.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const float4& a, const float2& b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)),
        "r"(__float_as_uint(a.w)), "r"(__float_as_uint(b.x)), "r"(__float_as_uint(b.y)));
}

__device__ __forceinline__ float2 pair_at(const float* p) {
  return *reinterpret_cast<const float2*>(p);
}

template <typename T>
__device__ __forceinline__ float2 widen_pair(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>)
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}
// The fragment of a lane's pairs of rows g and g + 8 for mma_m16n8k8_tf32().
template <typename T>
__device__ __forceinline__ float4 operand(uint32_t low, uint32_t high) {
  const float2 a = widen_pair<T>(low), b = widen_pair<T>(high);
  return {a.x, b.x, a.y, b.y};
}

// The sequence's first chunk in scratch.
__device__ __forceinline__ int first_slot(const LinearAttentionParams& p, int sequence) {
  return (p.cu_seqlens[sequence] - p.cu_seqlens[p.first_sequence]) / kChunk + sequence -
         p.first_sequence;
}

template <typename T, int kKeys, bool kDelta>
__global__ void __launch_bounds__(kThreads) chunk_prepare_kernel(LinearAttentionParams p) {
  constexpr int kPitch = kKeys + 8, kRow = kKeys / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  T* keys = reinterpret_cast<T*>(shared);                      // [kChunk][kPitch]
  T* queries = keys + kChunk * kPitch;                         // [kChunk][kPitch]
  __shared__ __align__(16) float columns[kChunk][kChunk + 4];  // of A
  __shared__ float inverse[kChunk][kChunk + 1];
  __shared__ float sums[kChunk], betas[kChunk], of_key[kChunk], of_query[kChunk];
  const int slot = blockIdx.x, head = blockIdx.y, thread = threadIdx.x, warp = thread / 32,
            lane = thread % 32;
  const int g = lane / 4, t = lane % 4;
  pdl_wait();
  pdl_launch_dependents();
  int low = p.first_sequence, high = p.first_sequence + p.batch - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_slot(p, middle) <= slot) low = middle;
    else high = middle - 1;
  }
  const int begin = p.cu_seqlens[low] + (slot - first_slot(p, low)) * kChunk;
  const int count = min(kChunk, p.cu_seqlens[low + 1] - begin);
  if (count <= 0) return;

  const int64_t width = 2ll * p.k_heads * p.k_dim + static_cast<int64_t>(p.v_heads) * p.v_dim;
  const int key_head = head / (p.v_heads / p.k_heads);
  const T* from =
      static_cast<const T*>(p.qkv) + begin * width + static_cast<int64_t>(key_head) * p.k_dim;
  for (int i = thread; i < 2 * kChunk * kRow; i += kThreads) {
    const int row = i / kRow % kChunk, at = i % kRow * 8;
    const bool is_key = i / kRow >= kChunk, there = row < count && at < p.k_dim;
    uint4* to = reinterpret_cast<uint4*>((is_key ? keys : queries) + row * kPitch + at);
    cp_async(
        to,
        there ? from + row * width + (is_key ? static_cast<int64_t>(p.k_heads) * p.k_dim : 0) + at
              : from,
        there);
  }
  cp_async_commit();
  if (warp == 0) {
    const float rate = p.decay_rate != nullptr ? p.decay_rate[head] : 1.f;
    const float decay_bias = p.decay_bias != nullptr ? p.decay_bias[head] : 0.f;
    const float beta_bias = p.beta_bias != nullptr ? p.beta_bias[head] : 0.f;
    float own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * lane + i;
      const int64_t token = begin + min(row, count - 1);
      const float decay =
          to_float(static_cast<const T*>(p.decay)[token * p.decay_stride + head]) + decay_bias;
      own[i] = row < count ? device::activate(decay, p.decay_activation) * rate : 0.f;
      float beta = 1;
      if (p.beta != nullptr)
        beta = device::activate(
            to_float(static_cast<const T*>(p.beta)[token * p.beta_stride + head]) + beta_bias,
            p.beta_activation);
      betas[row] = row >= count ? 0.f : beta;
    }
    const float at = warp_scan(own[0] + own[1]);
    sums[2 * lane] = at - own[1], sums[2 * lane + 1] = at;
  }
  cp_async_wait<0>();
  __syncthreads();
  {  // one thread per norm of a key or query
    const T* row = (thread < kChunk ? keys : queries) + thread % kChunk * kPitch;
    float squares = 0;
    if (p.l2norm)
      for (int at = 0; at < kKeys; at += 8) {
        const auto vector = load<T, 8>(row + at);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          squares = fmaf(to_float(vector.data[i]), to_float(vector.data[i]), squares);
      }
    const float length = p.l2norm ? 1.f / sqrtf(squares + 1e-6f) : 1.f;
    if (thread < kChunk) of_key[thread] = length;
    else of_query[thread - kChunk] = length * p.scale;
  }
  __syncthreads();

  // A warp has 16 rows, and columns up to its last row.
  float by_key[8][4] = {}, by_query[8][4] = {};
#pragma unroll 2
  for (int step = 0; step < kKeys / 16; ++step) {
    const int own = (16 * warp + lane % 16) * kPitch + 16 * step + lane / 16 * 8;
    uint32_t of_keys[4], of_queries[4];
    if (kDelta) ldmatrix_x4<false>(of_keys, keys + own);
    ldmatrix_x4<false>(of_queries, queries + own);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > warp) continue;
      uint32_t b[4];
      ldmatrix_x4<false>(
          b, keys + (16 * n + lane / 16 * 8 + lane % 8) * kPitch + 16 * step + lane / 8 % 2 * 8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (kDelta) mma_m16n8k16<T>(by_key[2 * n + half], of_keys, b[2 * half], b[2 * half + 1]);
        mma_m16n8k16<T>(by_query[2 * n + half], of_queries, b[2 * half], b[2 * half + 1]);
      }
    }
  }
  float* unit = p.scratch + (static_cast<int64_t>(slot) * p.v_heads + head) * kUnit;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n / 2 > warp) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = 16 * warp + g + c / 2 * 8, column = 8 * n + 2 * t + c % 2;
      const float factor = column <= row ? of_key[column] * __expf(sums[row] - sums[column]) : 0.f;
      by_query[n][c] = column <= row ? by_query[n][c] * factor * of_query[row] : 0.f;
      if (kDelta)
        columns[column][row] =
            column < row ? by_key[n][c] * factor * of_key[row] * betas[row] : 0.f;
    }
    const auto& own = by_query[n];
    reinterpret_cast<float4*>(unit + kMatrix)[step_of(warp, n) * 32 + lane] = {
        rounded(own[0]), rounded(own[2]), rounded(own[1]), rounded(own[3])};
  }
  if (thread < kChunk) {
    const float grown = __expf(sums[thread]), left = __expf(sums[kChunk - 1] - sums[thread]);
    reinterpret_cast<float4*>(unit + kFactors)[thread] = {betas[thread] * grown * of_key[thread],
                                                          grown * of_query[thread],
                                                          left * of_key[thread], betas[thread]};
    if (thread == 0) unit[kFade] = __expf(sums[kChunk - 1]);
  }
  if constexpr (kDelta) {
    __syncthreads();
    if (thread < kChunk)  // one column of the inverse per thread, 16 rows at a time
      for (int first = 0; first < kChunk; first += 16) {
        float own[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) own[i] = first + i == thread;
        auto take_off = [&](int before, float x, int from) {
#pragma unroll
          for (int i = 0; i < 16; i += 4) {
            const float4 a = *reinterpret_cast<const float4*>(&columns[before][first + i]);
            if (i >= from) own[i] = fmaf(-a.x, x, own[i]);
            if (i + 1 >= from) own[i + 1] = fmaf(-a.y, x, own[i + 1]);
            if (i + 2 >= from) own[i + 2] = fmaf(-a.z, x, own[i + 2]);
            if (i + 3 >= from) own[i + 3] = fmaf(-a.w, x, own[i + 3]);
          }
        };
        for (int before = 0; before < first; ++before) take_off(before, inverse[before][thread], 0);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          inverse[first + i][thread] = own[i];
          take_off(first + i, own[i], i + 1);
        }
      }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      if (step / 2 > warp) continue;
      const int row = 16 * warp + g, column = 8 * step + 2 * t;
      reinterpret_cast<float4*>(unit)[step_of(warp, step) * 32 + lane] = {
          rounded(inverse[row][column]), rounded(inverse[row + 8][column]),
          rounded(inverse[row][column + 1]), rounded(inverse[row + 8][column + 1])};
    }
  }
}

template <int kKeys>
struct SharedLayout {  // bytes
  static constexpr int kPitch = kKeys + 8, kValuePitch = kColumns + 8, kStatePitch = kKeys + 8,
                       kRowPitch = kChunk + 8;
  static constexpr int kRows = kChunk * kPitch * 2;  // of 16 bits
  static constexpr int kValues = 3 * kRows, kState = kValues + kChunk * kValuePitch * 2;
  static constexpr int kWritten = kState + kColumns * kStatePitch * 4,
                       kAll = kWritten + 3 * kColumns * kRowPitch * 4;
};

template <typename T, int kKeys, bool kDelta>
__global__ void __launch_bounds__(2 * kThreads) chunk_state_kernel(LinearAttentionParams p) {
  using R = SharedLayout<kKeys>;
  constexpr int kRow = kKeys / 8, kParts = kKeys / 64;  // kParts: blocks of 16 state rows of a warp
  constexpr int kStep = 2 * kThreads;
  extern __shared__ __align__(16) unsigned char shared[];
  T* queries = reinterpret_cast<T*>(shared);              // [kChunk][kPitch]
  T* all_keys = queries + kChunk * R::kPitch;             // [2][kChunk][kPitch]
  T* values = reinterpret_cast<T*>(shared + R::kValues);  // [kChunk][kValuePitch]
  float* past = reinterpret_cast<float*>(
      shared + R::kState);  // columns of the state, [kColumns][kStatePitch]
  float* wanted = reinterpret_cast<float*>(
      shared + R::kWritten);  // right-hand side of N, [kColumns][kRowPitch]
  float* written =
      wanted + kColumns * R::kRowPitch;  // N; faded: N times the decay until the end of the chunk
  float* faded = written + kColumns * R::kRowPitch;
  const int sequence = p.first_sequence + blockIdx.z, head = blockIdx.y,
            first_column = blockIdx.x * kColumns;
  // Four warps share 16 columns, with 16 rows of a chunk each.
  const int thread = threadIdx.x, warp = thread / 32 % 4, side = thread / kThreads * 16;
  const int lane = thread % 32, g = lane / 4, t = lane % 4;
  const int begin = p.cu_seqlens[sequence], end = p.cu_seqlens[sequence + 1];
  const bool has_past = p.past_lens[sequence] > 0;
  const int row_of_state = p.state_slots != nullptr ? p.state_slots[sequence] : sequence;
  float* state = p.state +
                 (static_cast<int64_t>(row_of_state) * p.v_heads + head) * p.k_dim * p.v_dim +
                 first_column;

  // Rows 16 (kParts * warp + i) + g and + 8 of the state, columns side + 8 n + 2 t and + 1. Written
  // in an earlier step.
  float memory[kParts][kTiles][4];
  auto each = [&](auto&& f) {  // f(state row, column, two adjacent elements)
#pragma unroll
    for (int i = 0; i < kParts; ++i)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; c += 2)
          f(16 * (kParts * warp + i) + g + 4 * c, side + 8 * n + 2 * t, memory[i][n][c],
            memory[i][n][c + 1]);
  };
  each([&](int key, int column, float& x, float& y) {
    const bool reads = has_past && key < p.k_dim && first_column + column < p.v_dim;
    const float2 both = reads ? pair_at(state + static_cast<int64_t>(key) * p.v_dim + column)
                              : make_float2(0.f, 0.f);
    x = both.x, y = both.y;
  });
  auto show = [&] {
    each([&](int key, int column, float x, float y) {
      past[column * R::kStatePitch + key] = rounded(x),
                                     past[(column + 1) * R::kStatePitch + key] = rounded(y);
    });
  };
  show();
  pdl_wait();
  pdl_launch_dependents();
  if (begin == end && has_past) return;

  const int64_t width = 2ll * p.k_heads * p.k_dim + static_cast<int64_t>(p.v_heads) * p.v_dim;
  const int64_t all = static_cast<int64_t>(p.k_heads) * p.k_dim;
  const int key_head = head / (p.v_heads / p.k_heads);
  const T* qkv = static_cast<const T*>(p.qkv) + static_cast<int64_t>(key_head) * p.k_dim;
  const T* own_values =
      static_cast<const T*>(p.qkv) + 2 * all + static_cast<int64_t>(head) * p.v_dim + first_column;
  auto copy_rows = [&](T* to, const T* from, int first) {
    for (int i = thread; i < kChunk * kRow; i += kStep) {
      const int row = i / kRow, at = i % kRow * 8;
      const bool there = first + row < end && at < p.k_dim;
      cp_async(reinterpret_cast<uint4*>(to + row * R::kPitch + at),
               there ? from + (first + row) * width + at : from, there);
    }
  };
  auto copy_queries_and_values = [&](int first) {
    copy_rows(queries, qkv, first);
    for (int i = thread; i < kChunk * kColumns / 8; i += kStep) {
      const int row = i / (kColumns / 8), at = i % (kColumns / 8) * 8;
      const bool there = first + row < end && first_column + at < p.v_dim;
      cp_async(reinterpret_cast<uint4*>(values + row * R::kValuePitch + at),
               there ? own_values + (first + row) * width + at : qkv, there);
    }
  };
  const float skip = p.skip != nullptr ? to_float(static_cast<const T*>(p.skip)[head]) : 0.f;
  const float* unit =
      p.scratch + (static_cast<int64_t>(first_slot(p, sequence)) * p.v_heads + head) * kUnit;
  T* out = static_cast<T*>(p.out) + static_cast<int64_t>(head) * p.v_dim + first_column;
  const int64_t out_width = static_cast<int64_t>(p.v_heads) * p.v_dim;
  const int row = 16 * warp + g;  // of a chunk; the thread also has row + 8

  copy_rows(all_keys, qkv + all, begin);
  copy_queries_and_values(begin);
  cp_async_commit();
  int stage = 0;
  for (int first = begin; first < end;
       first += kChunk, unit += static_cast<int64_t>(p.v_heads) * kUnit, stage ^= 1) {
    const T* keys = all_keys + stage * kChunk * R::kPitch;
    const auto* factors = reinterpret_cast<const float4*>(unit + kFactors);
    const float4 low = factors[row], high = factors[row + 8];
    const float fade = unit[kFade];
    float4 solve[8], attend[8];
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      if (step / 2 > warp) continue;
      const float4* at = reinterpret_cast<const float4*>(unit) + step_of(warp, step) * 32 + lane;
      if (kDelta) solve[step] = at[0];
      attend[step] = at[kMatrix / 4];
    }
    cp_async_wait<0>();
    __syncthreads();
    if (first + kChunk < end)
      copy_rows(all_keys + (stage ^ 1) * kChunk * R::kPitch, qkv + all, first + kChunk);
    cp_async_commit();

    float known[kTiles][4] = {}, read[kTiles][4] = {};  // K S and Q S
#pragma unroll 4
    for (int step = 0; step < kKeys / 16; ++step) {
      const int own = (16 * warp + lane % 16) * R::kPitch + 16 * step + lane / 16 * 8;
      uint32_t of_keys[4], of_queries[4];
      if (kDelta) ldmatrix_x4<false>(of_keys, keys + own);
      ldmatrix_x4<false>(of_queries, queries + own);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 query = operand<T>(of_queries[2 * half], of_queries[2 * half + 1]);
        const float4 key = kDelta ? operand<T>(of_keys[2 * half], of_keys[2 * half + 1]) : query;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const float2 b =
              pair_at(past + (side + 8 * n + g) * R::kStatePitch + 16 * step + 8 * half + 2 * t);
          if (kDelta) mma_m16n8k8_tf32(known[n], key, b);
          mma_m16n8k8_tf32(read[n], query, b);
        }
      }
    }
    float news[kTiles][4], value[kTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; c += 2) {
        const float4& own = c == 0 ? low : high;
        const float2 both = widen_pair<T>(*reinterpret_cast<const uint32_t*>(
            values + (row + 4 * c) * R::kValuePitch + side + 8 * n + 2 * t));
        value[n][c] = both.x, value[n][c + 1] = both.y;
#pragma unroll
        for (int i = c; i < c + 2; ++i) {
          news[n][i] = own.w * value[n][i];
          if (kDelta) {
            const float x = fmaf(-own.x, known[n][i], news[n][i]);
            wanted[(side + 8 * n + 2 * t + i % 2) * R::kRowPitch + row + 4 * c] = rounded(x);
            news[n][i] = 0;
          }
        }
      }
    __syncthreads();  // state, queries and values have been read
    if (first + kChunk < end) copy_queries_and_values(first + kChunk);
    cp_async_commit();
    if constexpr (kDelta) {  // without the brace nvcc omits the next loop as well
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        if (step / 2 > warp) continue;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          mma_m16n8k8_tf32(news[n], solve[step],
                           pair_at(wanted + (side + 8 * n + g) * R::kRowPitch + 8 * step + 2 * t));
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int at = (side + 8 * n + 2 * t + c % 2) * R::kRowPitch + row + c / 2 * 8;
        written[at] = rounded(news[n][c]);
        faded[at] = rounded(news[n][c] * (c < 2 ? low.z : high.z));
        read[n][c] = read[n][c] * (c < 2 ? low.y : high.y);
      }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      if (step / 2 > warp) continue;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        mma_m16n8k8_tf32(read[n], attend[step],
                         pair_at(written + (side + 8 * n + g) * R::kRowPitch + 8 * step + 2 * t));
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; c += 2)
        if (first + row + 4 * c < end && first_column + side + 8 * n + 2 * t < p.v_dim)
          *reinterpret_cast<uint32_t*>(out + (first + row + 4 * c) * out_width + side + 8 * n +
                                       2 * t) =
              pack2<T>(fmaf(skip, value[n][c], read[n][c]),
                       fmaf(skip, value[n][c + 1], read[n][c + 1]));

    each([&](int, int, float& x, float& y) { x *= fade, y *= fade; });
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step)
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        uint32_t pairs[4];
        ldmatrix_x4<true>(pairs, keys + (16 * step + lane / 16 * 8 + lane % 8) * R::kPitch +
                                     16 * (kParts * warp + i) + lane / 8 % 2 * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 a = operand<T>(pairs[2 * half], pairs[2 * half + 1]);
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
            mma_m16n8k8_tf32(
                memory[i][n], a,
                pair_at(faded + (side + 8 * n + g) * R::kRowPitch + 16 * step + 8 * half + 2 * t));
        }
      }
    show();
  }
  each([&](int key, int column, float x, float y) {
    if (key < p.k_dim && first_column + column < p.v_dim)
      *reinterpret_cast<float2*>(state + static_cast<int64_t>(key) * p.v_dim + column) =
          make_float2(x, y);
  });
}

template <typename T, int kKeys, bool kDelta>
cudaError_t run(const LinearAttentionParams& p, cudaStream_t stream) {
  constexpr int kPrepare = 2 * kChunk * (kKeys + 8) * 2;
  const auto prepare = chunk_prepare_kernel<T, kKeys, kDelta>;
  const auto chunks = chunk_state_kernel<T, kKeys, kDelta>;
  cudaError_t error =
      cudaFuncSetAttribute(prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, kPrepare);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(chunks, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               SharedLayout<kKeys>::kAll);
  if (error != cudaSuccess) return error;
  const unsigned slots = p.num_tokens / kChunk + p.batch;
  error = launch(prepare, dim3(slots, p.v_heads), kThreads, kPrepare, stream, p);
  if (error != cudaSuccess) return error;
  return launch(chunks, dim3(ceil_div(p.v_dim, kColumns), p.v_heads, p.batch), 2 * kThreads,
                SharedLayout<kKeys>::kAll, stream, p);
}

template <typename T, int kKeys>
cudaError_t run_rule(const LinearAttentionParams& p, cudaStream_t stream) {
  return p.delta ? run<T, kKeys, true>(p, stream) : run<T, kKeys, false>(p, stream);
}

template <typename T>
cudaError_t run_type(const LinearAttentionParams& p, cudaStream_t stream) {
  if (p.k_dim <= 64) return run_rule<T, 64>(p, stream);
  if (p.k_dim <= 128) return run_rule<T, 128>(p, stream);
  return run_rule<T, 256>(p, stream);
}

}  // namespace

bool can_chunk(DType dtype, const LinearAttentionParams& p) {
  const int room = p.k_dim <= 64    ? SharedLayout<64>::kAll
                   : p.k_dim <= 128 ? SharedLayout<128>::kAll
                                    : SharedLayout<256>::kAll;
  return dtype != DType::kFloat32 && !p.decay_per_channel && p.k_dim % 8 == 0 && p.v_dim % 8 == 0 &&
         p.k_dim <= kMaxKeyDim && p.num_tokens >= kMinChunkTokens * p.batch &&
         device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= room;
}

int64_t linear_attention_scratch(int num_tokens, int v_heads) {
  return static_cast<int64_t>(num_tokens / kChunk + num_tokens / kMinChunkTokens) * v_heads *
         kUnit * sizeof(float);
}

cudaError_t linear_attention_chunks(DType dtype, const LinearAttentionParams& p,
                                    cudaStream_t stream) {
  if (!can_chunk(dtype, p)) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  return run_type<__nv_bfloat16>(p, stream);
}

}  // namespace llmc::kernels
