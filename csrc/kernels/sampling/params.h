// Kernels around the model in a step: slot admission, input preparation, logits processing,
// sampling, log-probabilities. See rowwise/params.h for the conventions of launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../attention/params.h"
#include "../common/dtype.h"
#include "state.h"

namespace llmc::kernels {

// Installs sequences in slots: states[slots[i]] = given[i]. If the slot keeps a history, it starts
// with tokens[starts[i]:starts[i + 1]], whose first prompts[i] tokens are the prompt.
struct AdmitParams {
  SlotState* states;
  const SlotState* given;          // [count]
  const int32_t *slots, *prompts;  // [count]
  const int32_t* starts;           // [count + 1]
  const int32_t* tokens;
  TokenHistory history;  // tokens is null if no slot keeps one
  int count;
};
cudaError_t admit(const AdmitParams& params, cudaStream_t stream);

// An update of the block table: `count` entries of a row from column `first` on, taken from
// blocks[from].
struct BlockTableUpdate {
  int32_t row, first, count, from;
};

// Copies bytes between pinned and device memory, small ones by a kernel: a kernel waits longer for
// a copy engine.
cudaError_t transfer(void* to, const void* from, int64_t bytes, cudaStream_t stream);

// Writes the model's inputs of a step from what the host sent. Padding rows, from `batch` to
// `rows`, are sequences of one token 0 at position 0.
struct PrepareInputsParams {
  int64_t *input_ids, *position_ids;     // [max(num_tokens, rows)]
  int32_t *cu_seqlens, *past_lens;       // [rows + 1], [rows]
  int64_t* logits_indices;               // [max(num_logits, rows)]
  int32_t *memory_starts, *memory_lens;  // [rows], or null
  int32_t* block_table;                  // [rows, max_blocks]
  int32_t *prefix, *own_from;            // see SharedPrefix: [2], [rows]
  // [rows], or null; num_states, the padding state, and 1 in padding rows.
  int32_t *state_slots, *commit_lens;
  // Rows of sequences, [rows + 1] and [rows], or null. Those two are then by sequence. Padding rows
  // are sequences, and empty sequences follow.
  int32_t *sequence_starts, *sequence_past;
  // The slots of the LoRA adapters of tokens and of rows of logits, or null; -1 in padding rows.
  int32_t *lora_ids, *lora_logits_ids;  // as input_ids and logits_indices
  int32_t* rotary_positions;            // [max(num_tokens, rows), kRotaryAxes], or null
  // Sent by the host.
  const int32_t* host_ids;  // [num_tokens]; -1: the token that the sequence's slot sampled last; -2
                            // - i: draft i after it
  const int32_t *host_seqlens, *host_past, *host_slots, *host_logits, *host_starts, *host_lens,
      *host_states, *host_commits;
  const int32_t *host_sequence_starts, *host_sequence_past;  // [num_sequences + 1], [num_sequences]
  const int32_t* host_own_from;                              // [batch]; null: no shared prefix
  const int32_t* host_lora_ids;                              // [num_tokens]; null: no adapter
  const int32_t* host_rotary;  // [num_tokens, kRotaryAxes], given that all unread drafts are
                               // accepted; null: of each token its position
  const BlockTableUpdate* runs;
  const int32_t* blocks;
  const int64_t* last;  // [slots]
  // A sequence with host_offsets[b] >= 0 begins that many positions after its slot's length,
  // without num_new, but at most host_unread[b] before host_past[b]. Null if no draft is unread.
  const int32_t *host_offsets, *host_unread;  // [batch]
  const int64_t* drafts;                      // [slots, drafts_stride]
  const int32_t* lengths;                     // [slots]
  int drafts_stride, num_new;
  int num_tokens, batch, num_sequences, num_logits, rows, num_runs, max_blocks, num_states,
      prefix_owner, prefix_length;
};
cudaError_t prepare_inputs(const PrepareInputsParams& params, cudaStream_t stream);

// Copies KV cache blocks, or states: in each of `caches`, with blocks of `bytes` bytes (a multiple
// of 4), block pairs[2 i] to block pairs[2 i + 1].
struct CacheBlocks {
  void* data;
  int64_t bytes;
};
cudaError_t copy_blocks(const CacheBlocks* caches, int num_caches, const int32_t* pairs,
                        int num_pairs, cudaStream_t stream);

// Logits processors, as runtime/sampling/logits_processors.py: scores[r, :vocab] from logits[r,
// :vocab]. logits is T [rows, stride]; scores is float32 [rows, scores_stride], a multiple of 4.
// Row r belongs to slot slots[r].
struct ProcessLogitsParams {
  float* scores;
  const void* logits;
  const SlotState* states;
  const int32_t* slots;  // [rows]
  const int32_t* lists;
  TokenHistory history;  // counts is null if no slot keeps one
  int rows, vocab, stride, scores_stride;
  // Token masks: row r's is mask_rows[r], negative for none. masks is [.., ceil(vocab / 32)]; bit t
  // % 32 of word t / 32 allows token t. mask_rows is null if no row has a mask.
  const int32_t* mask_rows;  // [rows]
  const uint32_t* masks;
};
cudaError_t process_logits(DType dtype, const ProcessLogitsParams& params, cudaStream_t stream);

// The token of a row with a logit that is NaN or +inf.
constexpr int64_t kNotFinite = -2;

// tokens[r]: the token sampled from logits[r, :vocab] with the parameters of slot slots[r]. logits
// is T [rows, stride].
struct SampleParams {
  int64_t* tokens;
  const void* logits;
  const SlotState* states;
  const int32_t* slots;  // [rows]
  int rows, vocab, stride;
  int64_t none;                            // the token of a row whose logits are all -inf
  bool draws;                              // whether any temperature is above 0
  const int32_t* drafts_before = nullptr;  // [rows]: drafts of the sequence before each row, which
                                           // count as generated; null: none
};
cudaError_t sample(DType dtype, const SampleParams& params, cudaStream_t stream);

// Log-softmax of logits[r, :vocab] at the sampled token and at as many top tokens as the slot asks
// for. logits is T [rows, stride].
struct LogprobsParams {
  Logprobs* made;  // [rows]; untouched where the slot asks for none
  const void* logits;
  const int64_t* chosen;  // [rows]
  const SlotState* states;
  const int32_t* slots;  // [rows]
  int rows, vocab, stride;
  const int32_t* counts =
      nullptr;  // [rows]: top tokens per row, at most kTopLogprobs, in place of the slots'
};
cudaError_t logprobs(DType dtype, const LogprobsParams& params, cudaStream_t stream);

// After sampling: keeps each slot's last token, counts it, and appends it to the history. A
// negative token, where no token was allowed, is only kept as the last.
struct UpdateSlotsParams {
  SlotState* states;
  int64_t* last;          // [slots]
  const int32_t* slots;   // [rows]
  const int64_t* chosen;  // [rows]
  TokenHistory history;   // tokens is null if no slot keeps one
  int rows;
};
cudaError_t update_slots(const UpdateSlotsParams& params, cudaStream_t stream);

// After sampling one token after the last of each sequence and after each of its drafts: accepts
// drafts up to the first that differs from the token sampled before it, and updates the slots as
// update_slots() with the accepted drafts and one more token.
struct AcceptDraftsParams {
  SlotState* states;
  int64_t* last;          // [slots]
  const int32_t* slots;   // [rows]
  const int64_t* chosen;  // [rows]
  const int32_t* drafts;  // [rows]: the draft that follows each; -1: none; -2 - t: input_ids[t]
  const int32_t* row_of;  // [sequences, positions]: rows of a sequence in order; negative: none
  int32_t* counts;        // [sequences]: tokens of each
  TokenHistory history;   // tokens is null if no slot keeps one
  int sequences, positions;
  int first, end;                      // the positions to process; all before `first` have been
  const int64_t* input_ids = nullptr;  // of the step
};
cudaError_t accept_drafts(const AcceptDraftsParams& params, cudaStream_t stream);

// The `count` most likely tokens of each row of logits, T [rows, stride], among the first `vocab`,
// with log-probabilities, in descending order, ties by ascending token. count is at most vocab.
struct CandidatesParams {
  int32_t* tokens;   // [rows, count]
  float* log_probs;  // [rows, count]
  const void* logits;
  void* scratch;  // candidates_scratch() bytes
  int rows, vocab, stride, count;
};
cudaError_t candidates(DType dtype, const CandidatesParams& params, cudaStream_t stream);
int64_t candidates_scratch(int rows, int vocab, int count);

}  // namespace llmc::kernels
