// Attention of packed queries to all keys of their sequence; see
// csrc/plugins/bidirectional_attention/op.py for the contract.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/dtype.h"

namespace llmc::kernels {

struct BidirectionalParams {
  void* out;                                       // T [num_tokens, num_heads * head_dim]
  const void* query;                               // T [num_tokens, num_heads * head_dim]
  const void* key;                                 // T [num_keys, num_kv_heads * head_dim]
  const void* value;                               // T [num_keys, num_kv_heads * head_dim]
  int64_t query_stride, key_stride, value_stride;  // distances between their rows
  const int32_t* cu_seqlens;                       // [batch + 1]
  const int32_t* key_starts;  // [batch], or null with key_lens: keys are in the queries' rows
  const int32_t* key_lens;
  const float* distance_bias;  // float32 [num_heads, distances] or null
  int num_tokens, num_keys, batch, num_heads, num_kv_heads, head_dim,
      distances;  // keys from num_keys on are not read
  int window;     // keys farther than this from their query are not seen; 0: all are
  float scale, softcap;
};
cudaError_t bidirectional(DType dtype, const BidirectionalParams& params, cudaStream_t stream);

// The same on tensor cores, where has_bidirectional_mma(): 16-bit types and keys in the rows of the
// queries. It is several times as fast.
bool has_bidirectional_mma(DType dtype, const BidirectionalParams& params);
cudaError_t bidirectional_mma(DType dtype, const BidirectionalParams& params, cudaStream_t stream);

// Copies heads to dense rows. Queries and keys are normalized, then rotated by their position in
// the sequence, or with rotary_by_row by their row; or the other way round with norm_after_rotary.
// Both need keys in the queries' rows.
struct PrepareHeadsParams {
  void *query_out, *key_out, *value_out;  // T [num_tokens or num_keys, heads * head_dim]
  const void *query, *key, *value;        // as in BidirectionalParams
  int64_t query_stride, key_stride, value_stride;
  const int32_t* cu_seqlens;     // [batch + 1]
  const float *cos, *sin;        // [positions or num_tokens, rotary_dim / 2] or null
  const float *q_norm, *k_norm;  // [head_dim] or null
  int num_tokens, num_keys, batch, num_heads, num_kv_heads, head_dim, rotary_dim;
  bool interleaved, norm_after_rotary, rotary_by_row;
  float norm_epsilon;
};
cudaError_t prepare_heads(DType dtype, const PrepareHeadsParams& params, cudaStream_t stream);

}  // namespace llmc::kernels
