// Layers with recurrent state: causal convolution, gated delta rule. See rowwise/params.h for the
// conventions of launchers.
//
// Sequence b's state is row state_slots[b] of `state`, or row b without state_slots. It is stored
// after commit_lens[b] of the sequence's new tokens, or after all of them without commit_lens.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/dtype.h"

namespace llmc::kernels {

// Depthwise causal convolution along each sequence; see csrc/plugins/causal_conv1d/op.py for the
// contract.
constexpr int kMaxConvKernel = 8;  // maximum kernel_size
struct CausalConvParams {
  void* y;             // T [num_tokens, channels]
  const void* hidden;  // T [num_tokens, channels], rows `pitch` apart
  const void* weight;  // T [channels, kernel_size]
  const void* bias;    // T [channels] or null
  float* state;        // [.., kernel_size - 1, channels]
  const int32_t *cu_seqlens, *past_lens, *state_slots, *commit_lens;
  int num_tokens, batch, channels, kernel_size;
  int64_t pitch;
  Activation activation;
  bool few;  // every sequence has few tokens
};
cudaError_t causal_conv(DType dtype, const CausalConvParams& params, cudaStream_t stream);

// Linear attention with a state matrix per head (gated delta rule); see
// csrc/plugins/linear_attention/op.py for the contract.
constexpr int kMaxKeyDim = 256;  // maximum k_dim
struct LinearAttentionParams {
  void* out;                // T [num_tokens, v_heads * v_dim]
  const void* qkv;          // T [num_tokens, 2 * k_heads * k_dim + v_heads * v_dim]
  const void* decay;        // T [num_tokens, v_heads], or per channel [num_tokens, v_heads * k_dim]
  const void* beta;         // T [num_tokens, v_heads] or null
  const void* skip;         // T [v_heads] or null
  const float* decay_rate;  // [v_heads] or null
  const float *decay_bias, *beta_bias;  // [v_heads] or null
  int64_t decay_stride, beta_stride;    // distance between rows of decay and of beta
  Activation decay_activation,
      beta_activation;  // applied after the bias; kNone for a decay per channel
  float* state;         // [.., v_heads, k_dim, v_dim]
  const int32_t *cu_seqlens, *past_lens, *state_slots, *commit_lens;
  int num_tokens, first_sequence, batch, k_heads, v_heads, k_dim,
      v_dim;  // sequences [first_sequence, + batch)
  float scale;
  bool delta, l2norm, decay_per_channel;
  float* scratch;       // linear_attention_scratch() bytes; only for linear_attention_chunks()
  bool single = false;  // every sequence has at most one token, and stores its state after it
};
cudaError_t linear_attention(DType dtype, const LinearAttentionParams& params, cudaStream_t stream);
// The chunked form, on tensor cores. States are stored after all tokens.
constexpr int kMinChunkTokens = 128;  // minimum average of new tokens per sequence
bool can_chunk(DType dtype, const LinearAttentionParams& params);
int64_t linear_attention_scratch(int num_tokens, int v_heads);
cudaError_t linear_attention_chunks(DType dtype, const LinearAttentionParams& params,
                                    cudaStream_t stream);

}  // namespace llmc::kernels
