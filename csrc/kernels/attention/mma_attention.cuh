// Attention of several queries of a sequence by mma (FlashAttention-2). A block takes kRows
// consecutive queries of one sequence and head, four warps with 16 rows each. It iterates over the
// visible keys, kKeys at a time, in two shared memory stages filled by cp.async, with an online
// softmax. With a head_dim above 256 two warps have the same rows: both compute the scores, and
// each the sums of half the columns. Reads the visible keys and values once per kRows queries and
// head.
//
// `Keys` says where queries and keys are and what a query sees. Its members:
//   Params, Element                parameters of the launcher, and the type of keys and values
//   start_of(p, b)                 row of the first query of sequence b
//   query(p, row, head)            that row's query
//   sinks(p), out_scale_inverse(p) as in AttentionParams
//   past                           position of the sequence's first query
//   first_seen(i), last_seen(i)    first and last position that the query at position i sees
//   key, value, row(j)             addresses, and the offset of position j from both
#pragma once

#include "../common/mma.cuh"
#include "attention.cuh"

namespace llmc::kernels::mma_attention {

using namespace device;

constexpr int kRows = 64;
template <int kDim>
constexpr int kSplit = kDim > 256 ? 2 : 1;  // warps that have the same rows

__device__ __forceinline__ void copy_async(void* target, const void* source, bool there) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  const int bytes = there ? 16 : 0;  // the rest is zero-filled
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(source), "r"(bytes));
}

template <int kDim>
constexpr int kKeysOf = 64 / kSplit<kDim>;
template <int kDim>
constexpr int kThreadsOf = 128 * kSplit<kDim>;

template <typename T, int kDim, typename Keys>
__global__ void __launch_bounds__(kThreadsOf<kDim>) attention_kernel(typename Keys::Params p) {
  using C = typename Keys::Element;
  static_assert(kDim % (16 * kSplit<kDim>) == 0);
  constexpr int kKeys = kKeysOf<kDim>, kThreads = kThreadsOf<kDim>, kOwn = kDim / kSplit<kDim>;
  constexpr int kPitch = kDim + 8;  // shifts rows by 16 bytes, against bank conflicts
  constexpr int kStageSize = kKeys * kPitch;
  extern __shared__ uint4 raw[];
  T* queries = reinterpret_cast<T*>(raw);  // [kRows][kPitch]
  T* keys = queries + kRows * kPitch;      // [2][kKeys][kPitch]
  T* values = keys + 2 * kStageSize;
  pdl_wait();
  pdl_launch_dependents();

  // Sequence b has the tiles from start_of(b) / kRows + b on; its last one may be empty.
  auto first_tile = [&](int b) { return Keys::start_of(p, b) / kRows + b; };
  int sequence = 0;
  for (int high = p.batch - 1; sequence < high;) {
    const int middle = (sequence + high + 1) / 2;
    if (first_tile(middle) <= static_cast<int>(blockIdx.x)) sequence = middle;
    else high = middle - 1;
  }
  const int tile = blockIdx.x - first_tile(sequence);
  const int first_token = Keys::start_of(p, sequence) + tile * kRows;
  const int rows = min(kRows, Keys::start_of(p, sequence + 1) - first_token);
  if (rows <= 0) return;
  const int head = blockIdx.y, kv_head = head / (p.num_heads / p.num_kv_heads);
  const Keys seen(p, sequence, kv_head);
  const int past = seen.past + tile * kRows;            // position of the first query
  const int end = seen.last_seen(past + rows - 1) + 1;  // keys that any query sees
  const int begin = seen.first_seen(past) / kKeys * kKeys;

  constexpr int kVectors = kDim / 8;
  for (int i = threadIdx.x; i < kRows * kVectors; i += kThreads) {
    const int row = i / kVectors, column = i % kVectors * 8;
    const T* source = Keys::query(p, first_token + min(row, rows - 1), head) + column;
    copy_async(queries + row * kPitch + column, source, row < rows);
  }
  auto fetch = [&](int start, int stage) {
    for (int i = threadIdx.x; i < kKeys * kVectors; i += kThreads) {
      const int row = i / kVectors, column = i % kVectors * 8, at = start + row;
      const int64_t offset = seen.row(min(at, end - 1)) + column;
      const int place = stage * kStageSize + row * kPitch + column;
      if constexpr (std::is_same_v<T, C>) {
        copy_async(keys + place, seen.key + offset, at < end);
        copy_async(values + place, seen.value + offset, at < end);
      } else {
        // After the last key its copies, which no query sees.
        const Cached<C> key = load_cache(seen.key + offset),
                        value = load_cache(seen.value + offset);
        store(keys + place, convert_cache<T, C>(key));
        store(values + place, convert_cache<T, C>(value));
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  fetch(begin, 0);

  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_column = kSplit<kDim> > 1 ? threadIdx.x / 128 * kOwn : 0;
  float out[kOwn / 8][4] = {};
  float peak[2] = {-INFINITY, -INFINITY}, total[2] = {};
  // Row r of this thread is query position past + warp * 16 + g + 8 * r.
  const int own = past + warp * 16 + g;
  const int first_of[2] = {seen.first_seen(own), seen.first_seen(own + 8)},
            last_of[2] = {seen.last_seen(own), seen.last_seen(own + 8)};
  const float scale = p.scale * (p.softcap > 0 ? 1.f : kLog2E);
  int stage = 0;
  for (int start = begin; start < end; start += kKeys, stage ^= 1) {
    if (start + kKeys < end) {
      fetch(start + kKeys, stage ^ 1);
      asm volatile("cp.async.wait_group 1;");
    } else {
      asm volatile("cp.async.wait_group 0;");
    }
    __syncthreads();
    if (warp * 16 >= rows) {  // no queries
      __syncthreads();
      continue;
    }
    float score[kKeys / 8][4] = {};
    const T* stage_keys = keys + stage * kStageSize;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t a[4];
      ldmatrix_x4<false>(a, queries + (warp * 16 + lane % 16) * kPitch + k * 16 + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t
            b[4];  // keys n * 16 to + 7 and + 8 to + 15, each columns k * 16 to + 7 and + 8 to + 15
        ldmatrix_x4<false>(b, stage_keys + (n * 16 + lane / 16 * 8 + lane % 8) * kPitch + k * 16 +
                                  lane % 16 / 8 * 8);
        mma_m16n8k16<T>(score[2 * n], a, b[0], b[1]);
        mma_m16n8k16<T>(score[2 * n + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool all_seen = start + kKeys <= last_of[r] + 1 && start >= first_of[r];
      float higher = peak[r];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float s = score[n][2 * r + c] * scale;
          if (p.softcap > 0) s = p.softcap * tanhf(s / p.softcap) * kLog2E;
          if (!all_seen) {
            const int key = start + n * 8 + 2 * t + c;
            if (key > last_of[r] || key < first_of[r]) s = -INFINITY;
          }
          score[n][2 * r + c] = s;
          higher = fmaxf(higher, s);
        }
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
      const float shift = higher == -INFINITY ? 0 : higher;
      const float old = exp2f(peak[r] - shift);
      peak[r] = higher;
      total[r] *= old;
#pragma unroll
      for (int n = 0; n < kOwn / 8; ++n) out[n][2 * r] *= old, out[n][2 * r + 1] *= old;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float weight = exp2f(score[n][2 * r + c] - shift);
          score[n][2 * r + c] = weight;
          total[r] += weight;
        }
    }
    const T* stage_values = values + stage * kStageSize;
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t a[4] = {pack2<T>(score[2 * k][0], score[2 * k][1]),
                             pack2<T>(score[2 * k][2], score[2 * k][3]),
                             pack2<T>(score[2 * k + 1][0], score[2 * k + 1][1]),
                             pack2<T>(score[2 * k + 1][2], score[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kOwn / 16; ++n) {
        uint32_t b[4];
        ldmatrix_x4<true>(b, stage_values + (k * 16 + lane % 16) * kPitch + first_column + n * 16 +
                                 lane / 16 * 8);
        mma_m16n8k16<T>(out[2 * n], a, b[0], b[1]);
        mma_m16n8k16<T>(out[2 * n + 1], a, b[2], b[3]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
    const int row = warp * 16 + g + 8 * r;
    if (row >= rows) continue;
    total[r] += sink_weight(Keys::sinks(p), head, peak[r]);
    const OutputWriter<T> made(p.out, Keys::out_scale_inverse(p));
    const int64_t begin = (static_cast<int64_t>(first_token + row) * p.num_heads + head) * kDim +
                          first_column + 2 * t;
#pragma unroll
    for (int n = 0; n < kOwn / 8; ++n)
      made.write(begin + n * 8, {out[n][2 * r] / total[r], out[n][2 * r + 1] / total[r]});
  }
}

template <int kDim>
constexpr int kShared = 2 * (kRows + 4 * kKeysOf<kDim>)*(kDim + 8);  // bytes

template <typename T, int kDim, typename Keys>
cudaError_t run(const typename Keys::Params& p, cudaStream_t stream) {
  const auto kernel = attention_kernel<T, kDim, Keys>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared<kDim>);
  if (error != cudaSuccess) return error;
  // Maximum number of query tiles: every sequence may end in a partial one.
  const unsigned tiles = p.num_tokens / kRows + p.batch;
  return launch(kernel, dim3(tiles, p.num_heads), kThreadsOf<kDim>, kShared<kDim>, stream, p);
}

}  // namespace llmc::kernels::mma_attention
