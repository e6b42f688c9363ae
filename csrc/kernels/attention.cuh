// What the attention kernels share: where a token stands, and what happens to a head before it is used.
#pragma once

#include "device.cuh"

namespace llmc::device {

using kernels::AttentionParams;

constexpr int kMaxHeadDim = 256;

// The sequence that a packed token belongs to.
__device__ __forceinline__ int sequence_of(const int32_t* cu_seqlens, int batch, int token) {
  int low = 0, high = batch - 1;  // the last sequence that begins at or before the token
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (cu_seqlens[middle] <= token) low = middle; else high = middle - 1;
  }
  return low;
}

// A warp reads one head, norms it if there is a weight, turns it if there are cos and sin, and leaves it in
// `head` (shared, float32 [head_dim]).
template <typename T>
__device__ __forceinline__ void prepare_head(float* head, const T* source, const AttentionParams& p,
                                             const float* weight, int position, bool turn) {
  const int lane = threadIdx.x % 32, dim = p.head_dim;
  const int half = turn && p.cos != nullptr ? p.rotary_dim / 2 : 0;
  constexpr int kPairs = kMaxHeadDim / 2 / 32;
  float cos[kPairs], sin[kPairs];  // read first, so that all reads are under way together
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int i = lane + 32 * k;
    const int64_t at = static_cast<int64_t>(position) * half + i;
    cos[k] = i < half ? p.cos[at] : 0.f;
    sin[k] = i < half ? p.sin[at] : 0.f;
  }
  float squares = 0;
#pragma unroll
  for (int k = 0; k < 2 * kPairs; ++k) {
    const int i = lane + 32 * k;
    if (i >= dim) break;
    const float x = to_float(source[i]);
    head[i] = x;
    squares += x * x;
  }
  if (weight != nullptr) {
    const float scale = rsqrtf(warp_sum(squares) / dim + p.norm_epsilon);
    for (int i = lane; i < dim; i += 32) head[i] *= scale * weight[i];
  }
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int i = lane + 32 * k;
    if (i >= half) break;
    const int a = p.interleaved ? 2 * i : i, b = p.interleaved ? 2 * i + 1 : i + half;
    const float x = head[a], y = head[b];
    head[a] = x * cos[k] - y * sin[k];
    head[b] = y * cos[k] + x * sin[k];
  }
  __syncwarp();
}

template <typename T>
__device__ __forceinline__ int64_t cache_row(const AttentionParams& p, int sequence, int kv_head,
                                             int position) {
  return ((static_cast<int64_t>(sequence) * p.num_kv_heads + kv_head) * p.max_seq_len + position) *
         p.head_dim;
}

}  // namespace llmc::device
