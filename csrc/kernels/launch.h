// The kernels' launchers: raw pointers, sizes and a stream, returning the launch's error. No allocation,
// no synchronisation. Sizes are in elements. "T" in the comments is the DType argument.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace llmc {

enum class DType : int32_t {
  kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt32 = 3, kInt64 = 4, kFloat8 = 5, kUint8 = 6
};

enum class Activation : int32_t {
  kNone, kRelu, kRelu2, kGelu, kGeluTanh, kSilu, kQuickGelu, kTanh, kSigmoid, kSoftplus
};

namespace kernels {

// A weight [out, in] in fewer bits: codes that stand for (code - zero) · scale, or code · scale + minimum, by groups of
// columns; csrc/plugins/quantization.py says how it lies in memory.
enum class Codes : int32_t { kNone, kFour, kEight, kFloat8, kMxfp4 };
struct Packing {
  Codes codes = Codes::kNone;
  const float* scale = nullptr;
  const uint8_t* zero = nullptr;     // null: 8 of kFour, 128 of kEight, unless there is a minimum
  const float* minimum = nullptr;
  int group_size = 0;
  const float* blocks = nullptr;  // of kFloat8 in groups of kBlock: scales of kBlock rows, blocks_pitch() apart; or null
};
constexpr int kBlock = 128;
__host__ __device__ constexpr int blocks_pitch(int in) { return (in / kBlock + 3) / 4 * 4; }
// What is rounded by groups of kBlock columns has scales [in / kBlock, scale_pitch()], each a column of them.
__host__ __device__ constexpr int scale_pitch(int rows) { return (rows + 3) / 4 * 4; }

// y[t] = table[ids[t] - vocab_start] * scale + positions[position_ids[t]]; rows outside a table are zero.
// table T [rows, hidden], or packed; positions T [position_rows, hidden] or null.
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
  Packing packing = {};
};
cudaError_t embedding(DType dtype, const EmbeddingParams& params, cudaStream_t stream);

constexpr int kNormHidden = 32768;  // the longest row
// sum = x + residual (if there is one); y = norm(sum) * weight + bias. x, residual, y, sum are
// T [rows, hidden]; weight and bias float32 [hidden] or null; LayerNorm if centred, else RMSNorm; if plain, none.
// Where there are groups, weight is [groups, hidden], and row r's is row r % groups.
// Rounded: each row to FP8 (e4m3) with fixed_scale, or where that is 0 a scale of its own, max|row| / 448; with rounded_group,
// 32, 64 or 128 columns, each group with its own. y has the numbers that come of it; where codes is there, it has them
// instead, uint8 [rows, hidden] in the order in which a packed weight's columns lie, and scale what they are codes of, [rows]
// or null, or of groups [hidden / rounded_group, scale_pitch(rows)]: for 16-bit T, and hidden in a multiple of 8.
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
  bool plain = false, rounded = false;
  uint8_t* codes = nullptr;
  float* scale = nullptr;
  float fixed_scale = 0;
  int rounded_group = 0;
  int groups = 1;
  // Where a row is `groups` rows of another tensor's, activation(gate) [rows / groups, groups * hidden] T, in rows that are
  // gate_pitch apart: what y, or with gate_first x, is multiplied by. None, silu or sigmoid; not rounded.
  const void* gate = nullptr;
  int64_t gate_pitch = 0;
  Activation gate_activation = Activation::kNone;
  bool gate_first = false;
};
cudaError_t norm(DType dtype, const NormParams& params, cudaStream_t stream);

// y = act(x · weightᵀ + bias) + residual; x T [rows, in], weight T [out, in]; bias [out] and residual
// [rows, out] T or null. Gated: weight [2 · out, in], y = act(gate) * up. At most kGemvRows rows, in a
// multiple of 8, 16-bit types. With `norm`, x is normed first, without weight and bias; where row_sums is
// there (float32, the sum of each row of weight) its mean is taken off. A norm_weight is integer_gemv()'s alone, and
// float8_gemv()'s and float16_gemv()'s, without row_sums.
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
  const float* norm_weight = nullptr;  // float32 [in]
  Packing packing = {};
  const float* x_scale = nullptr;  // [rows] of x in FP8
  float fixed_scale = 0;           // of what is rounded here, or 0: each row's own
  bool grouped = false;            // x_scale, or what is rounded here, is of groups of kBlock columns
  float y_inverse = 0;             // one over the scale of y in FP8, or 0: it is T
};
cudaError_t gemv(DType dtype, const GemvParams& params, cudaStream_t stream);
// Brings codes of `count` numbers in rows of `in`, as csrc/plugins/quantization.py stores them, into the order that the
// kernels read, in place; once.
cudaError_t repack(void* weight, Codes codes, int64_t count, int in, cudaStream_t stream);
// to [columns, rows] = from [rows, columns]
cudaError_t transpose(float* to, const float* from, int rows, int columns, cudaStream_t stream);
// The same of a packed weight, whose groups are multiples of 32 columns.
cudaError_t packed_gemv(DType dtype, const GemvParams& params, cudaStream_t stream);
// The same by integers, which packed_gemv() takes where it has_integer_gemv(): whole vectors of codes in a group.
constexpr int kIntegerRows = 4;
bool has_integer_gemv(const GemvParams& params);
cudaError_t integer_gemv(DType dtype, const GemvParams& params, cudaStream_t stream);
// The same of a weight in FP8 with a scale for each row, and of x in FP8 as `norm` makes it: codes [rows, in] and x_scale; `in`
// in a multiple of 64, compute capability 8.9 or more. Without x_scale, where has_rounding_gemv(), of x in T: it makes
// codes and scales itself, of rows that are normed first with `norm`. `grouped`: of a weight in blocks, and of x in groups.
constexpr int kFloat8GemvRows = 32;
bool has_rounding_gemv(const GemvParams& params);
cudaError_t float8_gemv(DType dtype, const GemvParams& params, cudaStream_t stream);
// The same of x in T that stays numbers, which packed_gemv() takes where it has_float16_gemv(): on Hopper, for few rows, which
// are normed first with `norm`.
bool has_float16_gemv(const GemvParams& params);
cudaError_t float16_gemv(DType dtype, const GemvParams& params, cudaStream_t stream);
// The same for some more rows, where has_hopper_gemm(): of a weight of 16 bits, in FP8 with x in FP8 as above, or in 4 bits,
// where it takes a norm_weight too, but no row_sums.
constexpr int kHopperGemmRows = 24, kHopperGemmCodes = 32, kHopperGemmPacked = 16;
bool has_hopper_gemm(DType dtype, const GemvParams& params);
cudaError_t hopper_gemm(DType dtype, const GemvParams& params, cudaStream_t stream);
// Of a packed weight for more rows, and without norm, where has_packed_gemm(): for up to 256 rows, on Hopper for up to
// kPackedGemmRows where y is of whole vectors and gates are of SiLU or GELU by tanh, what is not gated of no activation.
// Scratch: packed_gemm_scratch() bytes. Counters: kPackedGemmBlocks, zero before and after.
constexpr int kPackedGemmBlocks = 512, kPackedGemmRows = 1024;
bool has_packed_gemm(DType dtype, const GemvParams& params);
int64_t packed_gemm_scratch(int rows, int in);
cudaError_t packed_gemm(DType dtype, const GemvParams& params, void* scratch, int32_t* counters, cudaStream_t stream);
// T [out, in] of such a weight, of any `in` and groups that are whole; rounded to T.
cudaError_t unpack(DType dtype, void* y, const void* weight, const Packing& packing, int out, int in,
                   cudaStream_t stream);

// A convolution of each channel along its sequence's tokens; see csrc/plugins/causal_conv1d/op.py for the contract.
// Sequence b's state is row state_slots[b] of `state`, where these are there, else row b.
constexpr int kConvTaps = 8;  // at most
struct CausalConvParams {
  void* y;                     // T [num_tokens, channels]
  const void* hidden;          // T [num_tokens, channels], in rows that are `pitch` apart
  const void* weight;          // T [channels, kernel_size]
  const void* bias;            // T [channels] or null
  float* state;                // [.., kernel_size - 1, channels]
  const int32_t *cu_seqlens, *past_lens, *state_slots;
  int num_tokens, batch, channels, kernel_size;
  int64_t pitch;
  Activation activation;
  bool single;                 // every sequence has one token
};
cudaError_t causal_conv(DType dtype, const CausalConvParams& params, cudaStream_t stream);

// Attention whose past is a matrix for each head; see csrc/plugins/linear_attention/op.py for the contract. States are
// found as above.
constexpr int kLinearKeys = 256;  // the longest key
struct LinearAttentionParams {
  void* out;                   // T [num_tokens, v_heads * v_dim]
  const void* qkv;             // T [num_tokens, 2 * k_heads * k_dim + v_heads * v_dim]
  const void* decay;           // T [num_tokens, v_heads], or per channel [num_tokens, v_heads * k_dim]
  const void* beta;            // T [num_tokens, v_heads] or null
  const void* skip;            // T [v_heads] or null
  const float* decay_rate;     // [v_heads] or null
  const float *decay_bias, *beta_bias;  // likewise
  int64_t decay_pitch, beta_pitch;      // how far their rows are apart
  Activation decay_activation, beta_activation;  // behind these; of a decay for each channel none
  float* state;                // [.., v_heads, k_dim, v_dim]
  const int32_t *cu_seqlens, *past_lens, *state_slots;
  int num_tokens, first_sequence, batch, k_heads, v_heads, k_dim, v_dim;  // of `batch` sequences from the first one on
  float scale;
  bool delta, l2norm, decay_per_channel;
  float* scratch;              // linear_attention_scratch() bytes, for chunks alone
  bool single = false;         // each sequence has one token at most
};
cudaError_t linear_attention(DType dtype, const LinearAttentionParams& params, cudaStream_t stream);
// The same by chunks of tokens, on tensor cores; scratch for so many tokens at most.
constexpr int kLinearChunked = 128;  // new tokens that sequences must have on average
bool takes_chunks(DType dtype, const LinearAttentionParams& params);
int64_t linear_attention_scratch(int num_tokens, int v_heads);
cudaError_t linear_attention_chunks(DType dtype, const LinearAttentionParams& params, cudaStream_t stream);

// Which experts a token goes to; see csrc/plugins/route/op.py for the contract.
enum class RouteScore : int32_t { kSoftmax, kSigmoid, kSqrtSoftplus, kSparseMixer };
constexpr int kRouteExperts = 1024, kRouteChosen = 32;  // at most
struct RouteParams {
  void* experts;       // int64, or int32 if narrow, [num_tokens, top_k]
  float* scores;       // [num_tokens, top_k]
  const void* logits;  // T [num_tokens, num_experts]
  const float* bias;   // [num_experts] or null
  const float* expert_scale;  // [num_experts] or null
  int num_tokens, num_experts, top_k, groups, top_groups;
  RouteScore score;
  bool top2;           // a group's rank is the sum of its two highest scores, not its highest
  bool normalize, narrow;
  float epsilon, scale, jitter;
};
cudaError_t route(DType dtype, const RouteParams& params, cudaStream_t stream);

// How a stack of weights [num_experts, out, in] is stored: scales [num_experts, out, in / group_size] are float32, of kMxfp4 the
// bits of exponents; zeros as a weight's. Where experts_tiled(), pack_experts() has brought both into tiles: see experts.cuh.
struct ExpertsPacking {
  Codes codes = Codes::kNone;
  const void* scale = nullptr;
  const uint8_t* zero = nullptr;  // null: 8 of kFour, 128 of kEight
  int group_size = 0;
};
bool experts_tiled(Codes codes, int group_size, int out, int in);
// In place, once; `spare` has room for one expert's weight, and for its scales.
cudaError_t pack_experts(void* weight, void* scale, void* spare, Codes codes, int group_size, int num_experts, int out,
                         int in, cudaStream_t stream);

// The sums of experts; see csrc/plugins/experts/op.py for the contract. An expert that is not from first_expert on among
// num_experts adds nothing. Rounded, what both products multiply becomes numbers of FP8 (e4m3) times a scale, max|…| / 448, of
// rounded_group columns, or where that is 0 of the row; of float32 too.
struct ExpertsParams {
  void* y;                   // T [num_tokens, hidden]
  const void* x;             // T [num_tokens, hidden]
  const void* experts;       // int64, or int32 if narrow, [num_tokens, top_k]
  const float* scores;       // [num_tokens, top_k]
  const void* gate_up;       // T [num_experts, inner, hidden], gated [num_experts, 2 * inner, hidden]
  const void* down;          // T [num_experts, hidden, inner]
  const void* gate_up_bias;  // T [num_experts, inner or 2 * inner] or null
  const void* down_bias;     // T [num_experts, hidden] or null
  const void* residual;      // T [num_tokens, hidden] or null: what is added to the sums; y may lie there
  void* scratch;             // experts_scratch() bytes
  int num_tokens, top_k, num_experts, first_expert, hidden, inner;
  Activation activation;
  float alpha, limit, up_offset;
  bool gated, scale_input, narrow;
  bool rounded = false;
  int rounded_group = 0;
  ExpertsPacking gate_up_packing = {}, down_packing = {};
};
// Few tokens, which wait for weights; many, in tiles of the tensor core; or any, of any sizes and dtype. The first two
// take 16-bit types, and hidden and inner that are multiples of 8, or packed weights in tiles.
constexpr int kFewExpertPairs = 2048;  // that kFew takes
enum class ExpertsWay { kFew, kMany, kPlain };
cudaError_t experts(DType dtype, const ExpertsParams& params, ExpertsWay way, cudaStream_t stream);
// Whether this GPU is a Hopper, whose kernel for many tokens is the faster one from few tokens on; of weights of 16 bits.
bool serves_experts_on_hopper(const ExpertsParams& params);
int64_t experts_scratch(DType dtype, int num_tokens, int top_k, int num_experts, int hidden, int inner, bool rounded);

// y = act(sums · x_scale · weight_scale + bias) + residual, of what FP8 codes come to: sums float32 [rows, out], x_scale
// [rows], weight_scale [out]; bias [out] and residual [rows, out] T or null. Gated: sums, weight_scale and bias are 2 · out
// wide, y = act(gate) * up. out is a multiple of 4.
struct RescaleParams {
  void* y;
  const float* sums;
  const float* x_scale;
  const float* weight_scale;
  const void* bias;
  const void* residual;
  int rows, out;
  Activation activation;
  bool gated;
  float y_inverse;
};
cudaError_t rescale(DType dtype, const RescaleParams& params, cudaStream_t stream);

// y = x * activation(gate), T [rows, width], where rows of x and of gates are so far apart.
struct GateParams {
  void* y;
  const void *x, *gate;
  int64_t x_pitch, gate_pitch;
  int rows, width;
  Activation activation;
  float y_inverse = 0;  // as GemvParams'
};
cudaError_t gate(DType dtype, const GateParams& params, cudaStream_t stream);

// x[r, i] = act(x[r, i]) in place, T [count].
cudaError_t activate(DType dtype, void* x, int64_t count, Activation activation, cudaStream_t stream);

// Causal attention over packed tokens; see csrc/plugins/attention/op.py for the contract. Scratch is for
// partial results: attention_scratch() bytes. Counters are zero before and after.
// Positions that several decoding sequences have in the same blocks, from the first on. What they are only the device is
// told, so that a captured step serves any.
struct SharedPrefix {
  const int32_t* of;        // [2]: one of these sequences, and how many positions; null: there is none
  const int32_t* own_from;  // [batch]: the first position that a sequence reads by itself: so many, or 0
  float* results;           // prefix_scratch() bytes
};

// What blocks of a decoding step take: positions `from` to `to` of a sequence, or where `sequence` is below 0 nothing. `place`
// has which part of the sequence it is, of how many, and of how many that are not alone it and those before it are behind.
struct DecodePart {
  int32_t sequence, from, to;
  uint32_t place;  // index | used << 8 | behind << 16
};

struct AttentionParams {
  void* out;             // T [num_tokens, num_heads * head_dim], or codes of FP8 where there is an out_inverse
  const void* qkv;       // T [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; of `reads` queries alone
  void* key_cache;       // T or float8_e4m3fn [batch, num_kv_heads, max_seq_len, head_dim], or with a block table
  void* value_cache;     // [num_blocks, num_kv_heads, block_size, head_dim]
  const int32_t* block_table;  // [batch, max_seq_len / block_size] or null
  const int32_t* cu_seqlens;  // [batch + 1], from first_token on
  const int32_t* past_lens;   // [batch]
  const float* cos;      // float32 [max_positions, rotary_dim / 2] or null
  const float* sin;
  const float* q_norm;   // float32 [head_dim] or null
  const float* k_norm;
  const float* v_norm;
  const float* query_scale;  // float32 [max_positions] or null: a factor of the query at each position
  const float* sinks;    // float32 [num_heads] or null: scores without values
  void* queries;         // T [num_tokens, num_heads * head_dim], rotated; not needed for decoding without a prefix
  void* scratch;
  int32_t* counters;     // [kAttentionCounters]
  DecodePart* parts;     // for decoding: room for kAttentionCounters more than sequences
  SharedPrefix prefix;   // for decoding, with a block table
  int64_t qkv_pitch;     // how far rows of qkv are apart
  int num_tokens, batch, num_heads, num_kv_heads, head_dim, max_seq_len, rotary_dim, window;
  int chunk;             // 0, or how many positions see one another alone
  int block_size;        // a power of two, with a block table
  int num_blocks;        // that the caches have, with a block table
  int first_token;       // what qkv, out and queries begin with, as cu_seqlens count
  bool interleaved;
  bool decode;           // every sequence has exactly one new token
  bool divided;          // parts were made by another layer of this step, by a kernel before the last one
  bool vanilla;          // a token at a time, by the kernel that serves everything; not for decoding
  bool float8;           // in the caches
  bool norm_after_rotary;
  bool reads;            // caches are another layer's, which has written the new positions: queries alone are new
  float scale, softcap, norm_epsilon;
  float out_inverse;     // one over the scale of out in FP8, or 0
};
// First append(): turned queries to `queries`, keys and values to the caches. Not for decoding.
cudaError_t append(DType dtype, const AttentionParams& params, cudaStream_t stream);
cudaError_t attention(DType dtype, const AttentionParams& params, cudaStream_t stream);
// Between the two, where sequences decode: attention to the prefix that they share, which the second then leaves out. Where
// can_share_prefix.
bool can_share_prefix(DType dtype, const AttentionParams& params);
int64_t prefix_scratch(int batch, int num_heads, int num_kv_heads, int head_dim);
cudaError_t prefix_attention(DType dtype, const AttentionParams& params, cudaStream_t stream);
// Whether that has Hopper's own kernel for these prompts. It is ahead of cuDNN's where blocks follow one another; where they
// lie anywhere, level with it for very long prompts (bench/attention_gpu.py).
bool prefills_on_hopper(DType dtype, const AttentionParams& params);
// For a library: of each sequence, and then of nothing up to `rows`, where its queries begin, in elements
// (starts [rows + 1]), and how many tokens are new and there in all ([rows] each). Cached values are cleared
// behind a sequence's last up to the next multiple of 128, in blocks that the table names there too: what lies there
// gets weight 0, and 0 · NaN is NaN.
struct Lengths {
  int32_t *starts, *fresh, *all;
  int rows;
};
cudaError_t sequence_lengths(const Lengths& lengths, const AttentionParams& params, cudaStream_t stream);
constexpr int kAttentionCounters = 792;
int64_t attention_scratch(int num_heads, int head_dim);
// The same where `distance`, float32 [num_heads, distances], is added to the scores, and `key`, [num_heads, positions],
// by the key's position; each null where there is none. First append(), for decoding too. Needs no scratch and no counters.
struct ScoreBias {
  const float *distance, *key;
  int distances, positions;
};
cudaError_t biased_attention(DType dtype, const AttentionParams& params, const ScoreBias& bias, cudaStream_t stream);

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

// Attention of all heads to one row for each position; see csrc/plugins/latent_attention/op.py for the contract.
constexpr int kLatentDim = 2048;  // of a row or a query, at most
struct LatentAttentionParams {
  void* out;             // T [num_tokens, num_heads * value_dim]
  const void* query;     // T [num_tokens, num_heads * query_dim]
  const void* rows;      // T [num_tokens, shared_dim + latent]
  const void* key_up;    // T [num_heads, query_dim - shared_dim, latent]
  const void* value_up;  // T [num_heads, latent, value_dim]
  void* cache;           // T [batch, max_seq_len, shared_dim + latent], or with a block table [.., block_size, ..]
  const int32_t* block_table;             // [batch, max_seq_len / block_size] or null
  const int32_t *cu_seqlens, *past_lens;  // [batch + 1], [batch]
  const float *cos, *sin;                 // [max_positions, rotary_dim / 2] or null
  const float* sinks;                     // [num_heads] or null
  void* scratch;                          // latent_attention_scratch() bytes
  int num_tokens, batch, num_heads, query_dim, shared_dim, latent, value_dim, max_seq_len, rotary_dim;
  int block_size;        // a power of two, with a block table
  bool interleaved;
  float scale;
};
cudaError_t latent_attention(DType dtype, const LatentAttentionParams& params, cudaStream_t stream);
int64_t latent_attention_scratch(DType dtype, int num_tokens, int num_heads, int shared_dim, int latent);

// y[i] = a[i] op b[i], T [count], or what the op makes of a[i], or of a[i], b[i] and c[i]; true is 1.
enum class Elementwise : int32_t { kAdd, kSub, kMul, kDiv, kMin, kMax, kTanh, kExp, kSigmoid, kNeg, kSoftplus, kGelu, kGeluTanh,
                                kElu, kGreater, kLess, kWhere };
// What stands for y[r, i], T [rows, width]: x[r, i]; of a column x[r]; of a row, which is float32, x[i]; of a number,
// likewise, x[0].
enum class Operand : int32_t { kWhole, kColumn, kRow, kNumber };
struct Operands {
  const void* data[3];  // null where the op has fewer
  Operand is[3];
};
cudaError_t elementwise(DType dtype, Elementwise op, void* y, const Operands& operands, int64_t count, int width,
                        cudaStream_t stream);

// y[i] = x[rows[i]], T [count, width], where x has x_rows; rows that it has not are zero.
cudaError_t gather_rows(DType dtype, void* y, const void* x, const int64_t* rows, int count, int64_t x_rows, int width,
                        cudaStream_t stream);

// y[r, i] = x[r, index[i]], T [rows, width], where x has x_width columns; those that it has not are zero.
cudaError_t gather_columns(DType dtype, void* y, const void* x, const int32_t* index, int rows, int x_width, int width,
                           cudaStream_t stream);

// y[rows[i]] = x[i], T [count, width], where y has y_rows; what would go to others goes nowhere.
cudaError_t scatter_rows(DType dtype, void* y, const void* x, const int64_t* rows, int count, int64_t y_rows, int width,
                         cudaStream_t stream);

// What was in each slot's sequence: prompt and generated tokens, for penalties and bad words.
constexpr uint32_t kInPrompt = 1u << 31;    // of a count: the token is in the prompt
constexpr int32_t kRepeated = 1 << 30;      // of a token: it was there before
struct TokenHistory {
  uint32_t* counts;  // [slots, vocab]: how often a token was generated, and kInPrompt
  int32_t* tokens;   // [slots, room], in their order, and kRepeated
  int32_t* lengths;  // [slots]
  int vocab, room;
};

// How a slot's logits are changed before a token is chosen, as runtime/decoding/processing.py writes it. Its lists lie
// behind one another: the biased tokens, their biases (float32 bits), the end tokens, the forced tokens, how many
// are generated before each of these, where each bad word begins and the last one ends (counted from the slot's
// lists), the bad words' tokens.
struct Processing {
  double presence, frequency;
  float repetition;
  int32_t min_tokens, lists, num_biases, num_ends, num_forced, num_words;
  int32_t keeps_history;  // whether the slot's TokenHistory is kept
};

// How a slot's sequence chooses tokens, as runtime/decoding/processing.py writes it. The likeliest where temperature is
// 0, else one drawn from the softmax at the temperature, cut to the top_k likeliest (0: all; ties stay), of these to
// the fewest that have top_p of the probability, to those with at least min_p of the likeliest one's, and to the most
// typical that have typical_p of what is left. The draw is number `drawn` of the seed.
struct SlotState {
  uint64_t seed;
  int64_t drawn;  // tokens that it has generated
  float temperature, top_p, min_p, typical_p;
  int32_t top_k;
  int32_t logprobs;  // of so many likeliest tokens log-probabilities are wanted, at most kTopLogprobs; -1: none
  Processing processing;
};

// Sequences that enter slots: states[slots[i]] = given[i], and where one keeps a history, it is begun with
// tokens[starts[i]:starts[i + 1]], the first prompts[i] of which are its prompt's.
struct AdmitParams {
  SlotState* states;
  const SlotState* given;  // [count]
  const int32_t *slots, *prompts;  // [count]
  const int32_t* starts;           // [count + 1]
  const int32_t* tokens;
  TokenHistory history;            // counts null where no slot's is kept
  int count;
};
cudaError_t admit(const AdmitParams& params, cudaStream_t stream);

// A run of a row of the block table that changes: `count` blocks from column `first` on, which lie at `from`.
struct TableRun {
  int32_t row, first, count, from;
};

// Bytes from pinned memory to the device or back, few of them by a kernel: kernels wait longer for the copy engines.
cudaError_t transfer(void* to, const void* from, int64_t bytes, cudaStream_t stream);

// The inputs of a model's step from what the host sent. Rows behind the batch's, up to `rows`, are sequences with one
// token, 0, at position 0.
struct PrepareParams {
  int64_t *input_ids, *position_ids;   // [num_tokens], or [rows] where there are more
  int32_t *cu_seqlens, *past_lens;     // [rows + 1], [rows]
  int64_t* logits_indices;             // [num_logits], or [rows] where there are more
  int32_t *memory_starts, *memory_lens;  // [rows], or null
  int32_t* block_table;                // [rows, max_blocks]
  int32_t *prefix, *own_from;          // see SharedPrefix: [2], [rows]
  int32_t* state_slots;                // [rows], or null; num_states, which is nobody's, behind the batch's
  // What the host sent, and what slots chose last.
  const int32_t* given_ids;            // [num_tokens]; below 0: what the slot of its sequence chose last
  const int32_t *given_seqlens, *given_past, *given_slots, *given_logits, *given_starts, *given_lens, *given_states;
  const int32_t* given_own_from;       // [batch]; null: no sequences share a prefix
  const TableRun* runs;
  const int32_t* blocks;
  const int64_t* last;                 // [slots]
  int num_tokens, batch, num_logits, rows, num_runs, max_blocks, num_states, prefix_owner, prefix_length;
};
cudaError_t prepare(const PrepareParams& params, cudaStream_t stream);

// Copy blocks of caches, or states: of each of `caches`, whose blocks have `bytes` bytes, a multiple of 4, block
// pairs[2 i] to block pairs[2 i + 1].
struct CacheBlocks {
  void* data;
  int64_t bytes;
};
cudaError_t copy_blocks(const CacheBlocks* caches, int num_caches, const int32_t* pairs, int num_pairs,
                        cudaStream_t stream);

// scores[r, :vocab] = what runtime/decoding/processors.py makes of logits[r, :vocab]; logits T [rows, stride],
// scores float32 [rows, scores_stride], whose stride is a multiple of 4. Row r of the logits is slot slots[r]'s.
struct ProcessParams {
  float* scores;
  const void* logits;
  const SlotState* states;
  const int32_t* slots;    // [rows]
  const int32_t* lists;
  TokenHistory history;    // counts null where no slot's is kept
  int rows, vocab, stride, scores_stride;
  // Where only some tokens may be chosen: row r's mask is mask_rows[r], below 0 none; masks [.., ceil(vocab / 32)], in
  // which bit t % 32 of word t / 32 is token t's. mask_rows null where no row has one.
  const int32_t* mask_rows;  // [rows]
  const uint32_t* masks;
};
cudaError_t process(DType dtype, const ProcessParams& params, cudaStream_t stream);

// tokens[r]: the token that slot slots[r] samples from logits[r, :vocab]; logits T [rows, stride].
constexpr int64_t kNotFinite = -2;  // the token of a row with a logit that is NaN or +inf
struct SampleParams {
  int64_t* tokens;
  const void* logits;
  const SlotState* states;
  const int32_t* slots;  // [rows]
  int rows, vocab, stride;
  int64_t none;  // the token of a row all of whose logits are -inf
  bool draws;    // whether any temperature is above 0
};
cudaError_t sample(DType dtype, const SampleParams& params, cudaStream_t stream);

// Log-probabilities, the log-softmax of logits[r, :vocab], of the chosen token and as many of the likeliest ones as the
// slot's state asks for, likeliest first, of equal ones the lower id. logits T [rows, stride].
constexpr int kTopLogprobs = 20;
struct Logprobs {
  float chosen, top[kTopLogprobs];
  int32_t tokens[kTopLogprobs];
  int32_t rank;  // of the chosen token from 1, the least of equal ones; where LogprobsParams.counts are given
};
struct LogprobsParams {
  Logprobs* made;           // [rows]; untouched where the slot asks for none
  const void* logits;
  const int64_t* chosen;    // [rows]
  const SlotState* states;
  const int32_t* slots;     // [rows]
  int rows, vocab, stride;
  const int32_t* counts = nullptr;  // [rows], instead of what slots ask for, at most kTopLogprobs
};
cudaError_t logprobs(DType dtype, const LogprobsParams& params, cudaStream_t stream);

// Slots have chosen tokens: keep them as their last, count them, and add them to histories that are kept. A token
// below 0, where none was allowed, is only the last.
struct AdvanceParams {
  SlotState* states;
  int64_t* last;           // [slots]
  const int32_t* slots;    // [rows]
  const int64_t* chosen;   // [rows]
  TokenHistory history;    // counts null where no slot's is kept
  int rows;
};
cudaError_t advance(const AdvanceParams& params, cudaStream_t stream);

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

// y[r] = the rows x[0][r], x[1][r], .. side by side, T [rows, widths[part]] each; those that are fewer have width 0.
constexpr int kJoined = 4;
struct JoinParams {
  void* y;
  const void* x[kJoined];
  int widths[kJoined];
  int rows;
};
cudaError_t join(DType dtype, const JoinParams& params, cudaStream_t stream);

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
