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
  float squares = 0;
  for (int i = lane; i < dim; i += 32) {
    const float x = to_float(source[i]);
    head[i] = x;
    squares += x * x;
  }
  if (weight != nullptr) {
    const float scale = rsqrtf(warp_sum(squares) / dim + p.norm_epsilon);
    for (int i = lane; i < dim; i += 32) head[i] *= scale * weight[i];
  }
  __syncwarp();
  if (turn && p.cos != nullptr) {
    const int half = p.rotary_dim / 2;
    for (int i = lane; i < half; i += 32) {
      const int a = p.interleaved ? 2 * i : i, b = p.interleaved ? 2 * i + 1 : i + half;
      const float cos = p.cos[static_cast<int64_t>(position) * half + i];
      const float sin = p.sin[static_cast<int64_t>(position) * half + i];
      const float x = head[a], y = head[b];
      head[a] = x * cos - y * sin;
      head[b] = y * cos + x * sin;
    }
    __syncwarp();
  }
}

template <typename T>
__device__ __forceinline__ int64_t cache_row(const AttentionParams& p, int sequence, int kv_head,
                                             int position) {
  return ((static_cast<int64_t>(sequence) * p.num_kv_heads + kv_head) * p.max_seq_len + position) *
         p.head_dim;
}

}  // namespace llmc::device
