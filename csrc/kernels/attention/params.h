// Attention: causal over a KV cache, and multi-head latent. See rowwise/params.h for the
// conventions of launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/counters.h"
#include "../common/dtype.h"
#include "shared_prefix.h"

namespace llmc::kernels {

// One KV split of a decode step: positions [from, to) of a sequence; sequence < 0: unused. With
// AttentionParams::several_rows, `sequence` is the first of `rows` rows of the same one, after
// `earlier_rows` of other blocks.
struct KvSplit {
  int32_t sequence, from, to;
  uint32_t packed_index;  // index of the split | splits of the sequence << 8 | splits of earlier
                          // split sequences << 16
  int32_t rows, earlier_rows;
};
constexpr int kMaxRows = 32;  // of a sequence in a decode step
constexpr int kRotaryAxes = 3;

// Causal attention over packed tokens; see csrc/plugins/attention/op.py for the contract.
struct AttentionParams {
  void* out;  // T [num_tokens, num_heads * head_dim], or FP8 codes with an out_scale_inverse
  const void*
      qkv;  // T [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; with `reads` only queries
  void* key_cache;    // T or float8_e4m3fn [batch, num_kv_heads, max_seq_len, head_dim], or with a
                      // block table
  void* value_cache;  // [num_blocks, num_kv_heads, block_size, head_dim]
  const int32_t* block_table;  // [batch, max_seq_len / block_size] or null
  const int32_t* cu_seqlens;   // [batch + 1], starting at first_token
  const int32_t* past_lens;    // [batch]
  const float* cos;            // float32 [max_positions, rotary_dim / 2] or null
  const float* sin;
  // Positions of each row of qkv for the rotary embedding, and the column of them for each pair of
  // elements. Null: positions in the cache.
  const int32_t* rotary_positions;  // [num_tokens, kRotaryAxes] or null
  const int32_t* rotary_axes;       // [rotary_dim / 2] or null
  const float* q_norm;              // float32 [head_dim] or null
  const float* k_norm;
  const float* v_norm;
  const float*
      query_scale;     // float32 [max_positions] or null: a factor of the query at each position
  const float* sinks;  // float32 [num_heads] or null: logits of attention sinks
  // [num_tokens, 2] or null: first position and the one after the last of each token's
  // bidirectional range; 0, 0: none. Not for decoding.
  const int32_t* ranges;
  void* queries;  // T [num_tokens, num_heads * head_dim], after RoPE; unused in decoding without a
                  // prefix
  void* scratch;  // attention_scratch() bytes, for partial results of KV splits
  int32_t* counters;    // [kAttentionCounters], zero before and after
  KvSplit* kv_splits;   // decoding: batch + kAttentionCounters of them
  SharedPrefix prefix;  // decoding, with a block table
  int64_t qkv_stride;   // distance between rows of qkv
  int num_tokens, batch, num_heads, num_kv_heads, head_dim, max_seq_len, rotary_dim, window;
  int chunk;        // attention is limited to chunks of this many positions; 0: not limited
  int block_size;   // a power of two, with a block table
  int num_blocks;   // of the caches, with a block table
  int first_token;  // the token, as cu_seqlens count, at which qkv, out and queries begin
  bool interleaved;
  bool decode;  // every sequence has exactly one new token
  bool
      splits_planned;  // another layer of this step has written kv_splits, at least two kernels ago
  bool vanilla;        // use the per-token kernel, which supports everything; not for decoding
  bool float8;         // the caches are FP8
  bool norm_after_rotary;
  bool windowed_ranges;  // the window also hides positions of the query's range
  bool reads;            // cross-layer KV sharing: another layer has written the new positions
  bool several_rows;  // decoding: consecutive rows may be the last token and drafts of one sequence
  bool appended;      // append() has written the new positions
  float scale, softcap, norm_epsilon;
  float out_scale_inverse;  // reciprocal of the FP8 output scale; 0: out is T
};
// Writes rotated queries to `queries`, keys and values to the caches. Call before attention(),
// except for decoding.
cudaError_t append(DType dtype, const AttentionParams& params, cudaStream_t stream);
cudaError_t attention(DType dtype, const AttentionParams& params, cudaStream_t stream);
// Whether attention() supports several_rows, and whether it needs `appended` for them.
bool decodes_rows(DType dtype, const AttentionParams& params);
bool appends_rows(const AttentionParams& params);

// Attention of decoding sequences to the prefix that they share, where can_share_prefix(). Call
// between append() and attention(), which then merges the result and skips the prefix.
bool can_share_prefix(DType dtype, const AttentionParams& params);
int64_t prefix_scratch(int batch, int num_heads, int num_kv_heads, int head_dim);
cudaError_t prefix_attention(DType dtype, const AttentionParams& params, cudaStream_t stream);

// Whether the wgmma prefill kernel serves these prompts: not those with ranges. It is faster than
// cuDNN's where blocks are contiguous. Where they are scatter_mxfp4_bits, both are equal for very
// long prompts (bench/attention_gpu.py).
bool has_prefill_sm90(DType dtype, const AttentionParams& params);

// Sequence lengths for a library's kernel, for `rows` rows, the last ones possibly empty: the
// query offset in elements (starts [rows + 1]), the number of new tokens, and the number of all
// tokens ([rows] each). Also zeroes the cached values between a sequence's last position and the
// next multiple of 128, in the blocks that the table has there: these values get weight 0, and 0 *
// NaN is NaN.
struct SequenceLengths {
  int32_t *starts, *fresh, *all;
  int rows;
};
cudaError_t sequence_lengths(const SequenceLengths& lengths, const AttentionParams& params,
                             cudaStream_t stream);
int64_t attention_scratch(int num_heads, int head_dim);

// attention() with a score bias: `distance`, float32 [num_heads, distances], by the distance of key
// and query, and `key`, [num_heads, positions], by the key's position; each may be null. Call
// append() first, for decoding too. Uses neither scratch nor counters.
struct ScoreBias {
  const float *distance, *key;
  int distances, positions;
};
cudaError_t biased_attention(DType dtype, const AttentionParams& params, const ScoreBias& bias,
                             cudaStream_t stream);

// Multi-head latent attention (MLA); see csrc/plugins/latent_attention/op.py for the contract.
constexpr int kMaxLatentDim = 2048;  // maximum dimension of a row or a query
struct LatentAttentionParams {
  void* out;             // T [num_tokens, num_heads * value_dim]
  const void* query;     // T [num_tokens, num_heads * query_dim]
  const void* rows;      // T [num_tokens, shared_dim + latent]
  const void* key_up;    // T [num_heads, query_dim - shared_dim, latent]
  const void* value_up;  // T [num_heads, latent, value_dim]
  void* cache;           // T [batch, max_seq_len, shared_dim + latent], or with a block table [..,
                         // block_size, ..]
  const int32_t* block_table;             // [batch, max_seq_len / block_size] or null
  const int32_t *cu_seqlens, *past_lens;  // [batch + 1], [batch]
  const float *cos, *sin;                 // [max_positions, rotary_dim / 2] or null
  const float* sinks;                     // [num_heads] or null
  void* scratch;                          // latent_attention_scratch() bytes
  int num_tokens, batch, num_heads, query_dim, shared_dim, latent, value_dim, max_seq_len,
      rotary_dim;
  int block_size;  // a power of two, with a block table
  bool interleaved;
  float scale;
};
cudaError_t latent_attention(DType dtype, const LatentAttentionParams& params, cudaStream_t stream);
int64_t latent_attention_scratch(DType dtype, int num_tokens, int num_heads, int shared_dim,
                                 int latent);

}  // namespace llmc::kernels
