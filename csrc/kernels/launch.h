// The kernels' launchers: raw pointers, sizes and a stream, returning the launch's error. No allocation,
// no synchronisation. Sizes are in elements. "T" in the comments is the DType argument.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace llmc {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt32 = 3, kInt64 = 4, kFloat8 = 5 };

enum class Activation : int32_t {
  kNone, kRelu, kRelu2, kGelu, kGeluTanh, kSilu, kQuickGelu, kTanh
};

namespace kernels {

// y[t] = table[ids[t] - vocab_start] * scale + positions[position_ids[t]]; rows outside a table are zero.
// table T [rows, hidden]; positions T [position_rows, hidden] or null.
struct EmbeddingParams {
  void* y;
  const void* ids;  // int64, or int32 if narrow_ids
  const void* table;
  const void* position_ids;
  const void* positions;
  int64_t rows, position_rows, vocab_start;
  int num_tokens, hidden;
  float scale;
  bool narrow_ids;
};
cudaError_t embedding(DType dtype, const EmbeddingParams& params, cudaStream_t stream);

constexpr int kNormHidden = 32768;  // the longest row
// sum = x + residual (if there is one); y = norm(sum) * weight + bias. x, residual, y, sum are
// T [rows, hidden]; weight and bias float32 [hidden] or null; LayerNorm if centred, else RMSNorm.
struct NormParams {
  void* y;
  void* sum;
  const void* x;
  const void* residual;
  const float* weight;
  const float* bias;
  int rows, hidden;
  float epsilon;
  bool centred;
};
cudaError_t norm(DType dtype, const NormParams& params, cudaStream_t stream);

// y = act(x · weightᵀ + bias) + residual; x T [rows, in], weight T [out, in]; bias [out] and residual
// [rows, out] T or null. Gated: weight [2 · out, in], y = act(gate) * up. At most kGemvRows rows, in a
// multiple of 8, 16-bit types. With `norm`, x is normed first, without weight and bias; where row_sums is
// there (float32, the sum of each row of weight) its mean is taken off.
constexpr int kGemvRows = 16;
struct GemvParams {
  void* y;
  const void* x;
  const void* weight;
  const void* bias;
  const void* residual;
  int rows, in, out;
  Activation activation;
  bool gated;
  bool norm = false;
  const float* row_sums = nullptr;
  float epsilon = 0;
};
cudaError_t gemv(DType dtype, const GemvParams& params, cudaStream_t stream);

// y[r, i] = act(both[r, i]) * both[r, width + i]; both T [rows, 2 · width].
cudaError_t gate(DType dtype, void* y, const void* both, int rows, int width, Activation activation,
                 cudaStream_t stream);

// x[r, i] = act(x[r, i]) in place, T [count].
cudaError_t activate(DType dtype, void* x, int64_t count, Activation activation, cudaStream_t stream);

// Causal attention over packed tokens; see csrc/plugins/attention/op.py for the contract. Scratch is for
// partial results: attention_scratch() bytes. Counters are zero before and after.
struct AttentionParams {
  void* out;             // T [num_tokens, num_heads * head_dim]
  const void* qkv;       // T [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
  void* key_cache;       // T or float8_e4m3fn [batch, num_kv_heads, max_seq_len, head_dim], or with a block table
  void* value_cache;     // [num_blocks, num_kv_heads, block_size, head_dim]
  const int32_t* block_table;  // [batch, max_seq_len / block_size] or null
  const int32_t* cu_seqlens;  // [batch + 1]
  const int32_t* past_lens;   // [batch]
  const float* cos;      // float32 [max_positions, rotary_dim / 2] or null
  const float* sin;
  const float* q_norm;   // float32 [head_dim] or null
  const float* k_norm;
  void* queries;         // T [num_tokens, num_heads * head_dim], rotated; not needed for decoding
  void* scratch;
  int32_t* counters;     // [kAttentionCounters]
  int num_tokens, batch, num_heads, num_kv_heads, head_dim, max_seq_len, rotary_dim, window;
  int block_size;        // a power of two, with a block table
  bool interleaved;
  bool decode;           // every sequence has exactly one new token
  bool float8;           // in the caches
  float scale, softcap, norm_epsilon;
  // [batch, max_seq_len] or null, not with a block table: the cache row of each position before the new ones.
  const int32_t* cache_indirection;
};
// First append(): turned queries to `queries`, keys and values to the caches. Not for decoding.
cudaError_t append(DType dtype, const AttentionParams& params, cudaStream_t stream);
cudaError_t attention(DType dtype, const AttentionParams& params, cudaStream_t stream);
// For a library: of each sequence, and then of nothing up to `rows`, where its queries begin, in elements
// (starts [rows + 1]), and how many tokens are new and there in all ([rows] each). Cached values are cleared
// behind a sequence's last up to the next multiple of 128: what lies there gets weight 0, and 0 · NaN is NaN.
struct Lengths {
  int32_t *starts, *fresh, *all;
  int rows;
};
cudaError_t sequence_lengths(const Lengths& lengths, const AttentionParams& params, cudaStream_t stream);
constexpr int kAttentionCounters = 264;
int64_t attention_scratch(int num_heads, int head_dim);
// The same where distance_bias, float32 [num_heads, distances], is added to the scores: first append(), for
// decoding too. Needs no scratch and no counters.
cudaError_t biased_attention(DType dtype, const AttentionParams& params, const float* distance_bias, int distances,
                             cudaStream_t stream);

// Attention of packed queries to all keys of their sequence; see csrc/plugins/bidirectional_attention/op.py for
// the contract.
struct BidirectionalParams {
  void* out;                   // T [num_tokens, num_heads * head_dim]
  const void* query;           // as out
  const void* key;             // T [num_keys, num_kv_heads * head_dim]
  const void* value;
  const int32_t* cu_seqlens;   // [batch + 1]
  const int32_t* key_starts;   // [batch], or null with key_lens: keys are in the queries' rows
  const int32_t* key_lens;
  const float* distance_bias;  // float32 [num_heads, distances] or null
  int num_tokens, num_keys, batch, num_heads, num_kv_heads, head_dim, distances;  // keys beyond num_keys are not read
  float scale;
};
cudaError_t bidirectional(DType dtype, const BidirectionalParams& params, cudaStream_t stream);

// y[i] = a[i] op b[i], T [count]; an operand that is one float32 number is marked, b is null for one input.
enum class Elementwise : int32_t { kAdd, kSub, kMul, kDiv, kMin, kMax, kTanh, kExp, kSigmoid, kNeg };
cudaError_t elementwise(DType dtype, Elementwise op, void* y, const void* a, const void* b, bool a_is_number,
                        bool b_is_number, int64_t count, cudaStream_t stream);

// y[i] = x[rows[i]], T [count, width], where x has x_rows; rows that it has not are zero.
cudaError_t gather_rows(DType dtype, void* y, const void* x, const int64_t* rows, int count, int64_t x_rows, int width,
                        cudaStream_t stream);

// y[rows[i]] = x[i], T [count, width], where y has y_rows; what would go to others goes nowhere.
cudaError_t scatter_rows(DType dtype, void* y, const void* x, const int64_t* rows, int count, int64_t y_rows, int width,
                         cudaStream_t stream);

// What was in each row of the cache: prompt and generated tokens, for penalties and bad words.
constexpr uint32_t kInPrompt = 1u << 31;    // of a count: the token is in the prompt
constexpr int32_t kRepeated = 1 << 30;      // of a token: it was there before
struct TokenHistory {
  uint32_t* counts;  // [cache rows, vocab]: how often a token was generated, and kInPrompt
  int32_t* tokens;   // [cache rows, room], in their order, and kRepeated
  int32_t* lengths;  // [cache rows]
  int vocab, room;
};
// Rows from `row` on, whose counts are zero and whose tokens are a prompt's: count them.
cudaError_t count_prompts(const TokenHistory& history, int row, int rows, cudaStream_t stream);

// How a row's logits are changed before a token is chosen, as runtime/decoding/processing.py writes it. Its lists lie
// behind one another: the biased tokens, their biases (float32 bits), the end tokens, the forced tokens, how many
// are generated before each of these, where each bad word begins and the last one ends (counted from the row's
// lists), the bad words' tokens.
struct Processing {
  double presence, frequency;
  float repetition;
  int32_t min_tokens, lists, num_biases, num_ends, num_forced, num_words;
  int32_t keeps_history;  // whether the row's TokenHistory is kept
};

// scores[r, :vocab] = what runtime/decoding/processors.py makes of logits[r, :vocab]; logits T [rows, stride],
// scores float32 [rows, scores_stride], whose stride is a multiple of 4. Row r of the logits has cache row
// first_row + r.
struct ProcessParams {
  float* scores;
  const void* logits;
  const Processing* processing;  // [rows]
  const int32_t* lists;
  const int64_t* drawn;    // [rows], tokens that each sequence has generated
  TokenHistory history;    // counts null where no row's is kept
  int rows, vocab, stride, scores_stride, first_row;
};
cudaError_t process(DType dtype, const ProcessParams& params, cudaStream_t stream);

// tokens[r]: the likeliest of logits[r, :vocab] where temperature is 0, else drawn from their softmax at the
// temperature, cut to the top_k likeliest (0: all; ties stay), of these to the fewest that have top_p of the
// probability, to those with at least min_p of the likeliest one's, and to the most typical that have typical_p
// of what is left. The draw is number `drawn` of the sequence's seed. logits T [rows, stride].
struct SampleParams {
  int64_t* tokens;
  const void* logits;
  const float* temperature;  // each [rows]
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* typical_p;
  const uint64_t* seed;
  const int64_t* drawn;
  int rows, vocab, stride;
  int64_t none;  // the token of a row all of whose logits are -inf
  bool draws;    // whether any temperature is above 0
};
cudaError_t sample(DType dtype, const SampleParams& params, cudaStream_t stream);

// Log-probabilities, the log-softmax of logits[r, :vocab], of the chosen token and the top[r] likeliest ones,
// likeliest first, of equal ones the lower id; nothing where top[r] is negative. logits T [rows, stride].
constexpr int kTopLogprobs = 20, kLogprobSteps = 64;
struct Logprobs {
  float chosen, top[kTopLogprobs];
  int32_t tokens[kTopLogprobs];
};
struct LogprobsParams {
  Logprobs* made;           // [kLogprobSteps, max_batch]
  const void* logits;
  const int64_t* chosen;    // [rows]
  const int32_t* top;       // [rows], at most kTopLogprobs
  const int32_t* step;      // [1]: the row of made to write, modulo kLogprobSteps
  int rows, vocab, stride, max_batch;
};
cudaError_t logprobs(DType dtype, const LogprobsParams& params, cudaStream_t stream);

// For each row of logits, T [rows, stride], the `count` likeliest of its first `vocab` tokens and their
// log-probabilities, the likeliest first, equally likely ones in the order of tokens. count is at most vocab.
struct CandidatesParams {
  int32_t* tokens;     // [rows, count]
  float* log_probs;    // [rows, count]
  const void* logits;
  void* scratch;       // candidates_scratch() bytes
  int rows, vocab, stride, count;
};
cudaError_t candidates(DType dtype, const CandidatesParams& params, cudaStream_t stream);
int64_t candidates_scratch(int rows, int vocab, int count);

// Before a step of beam search: make the chosen tokens the next input, and let each beam continue its parent.
// What a beam has in the cache before its newest position lies where its parent's does, the newest in the
// parent's own row. Beam k of prompt b is row b * beam + k; a prompt lies in its first beam's row.
struct FollowParams {
  int64_t* input_ids;          // [rows], rows = batch * beam
  int64_t* position_ids;       // [rows]
  int32_t* past_lens;          // [rows]
  int32_t* cu_seqlens;         // [rows + 1]
  int64_t* logits_indices;     // [rows]: each its own, which a TensorRT plan gathers by
  int32_t* cache_indirection;  // [rows, max_seq_len]
  const int64_t* tokens;       // [rows]
  const int32_t* parents;      // [rows], each a beam of the same prompt
  const int32_t* past;         // [rows]: positions in the cache, the same for all beams of a prompt
  const int32_t* prompts;      // [rows]: how many of them are the prompt's
  int batch, beam, max_seq_len;
};
constexpr int kMaxBeams = 384;
cudaError_t follow(const FollowParams& params, cudaStream_t stream);

// After a step: write down the chosen tokens; for each sequence that has not ended, make its token the next
// input and count a position. A sequence whose token is negative ends.
struct AdvanceParams {
  int64_t* input_ids;       // [batch]
  int64_t* position_ids;    // [batch]
  int32_t* past_lens;       // [batch]
  int64_t* drawn;           // [batch]
  const int64_t* chosen;    // [batch]
  int64_t* made;            // [max_steps, max_batch]
  int32_t* step;            // [1]: the row of made to write
  uint8_t* finished;        // [batch]
  const int64_t* end_ids;   // [num_end_ids]
  int batch, max_batch, num_end_ids, max_seq_len;
  const Processing* processing;  // [batch] or null: whose tokens go into the history
  TokenHistory history;
  int first_row;            // the cache row of sequence 0
};
cudaError_t advance(const AdvanceParams& params, cudaStream_t stream);

// y[r, part, i] = x[part, r, i]: what `parts` ranks gathered one after the other, side by side.
cudaError_t interleave(DType dtype, void* y, const void* x, int parts, int rows, int width,
                       cudaStream_t stream);

// y[i] = x[i] for up to kNarrowed arrays at once; those that are fewer have count 0.
constexpr int kNarrowed = 4;
struct NarrowParams {
  int32_t* y[kNarrowed];
  const int64_t* x[kNarrowed];
  int count[kNarrowed];
};
cudaError_t narrow(const NarrowParams& params, cudaStream_t stream);

}  // namespace kernels
}  // namespace llmc
