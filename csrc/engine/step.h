// The host's inputs of a step, and their checks before anything is enqueued: kernels rely on them.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "../kernels/sampling/state.h"
#include "../plugins/common/plugin.h"

namespace llmc {

// Symbolic dimensions: a size of a step, or of the engine's KV cache and states.
enum Size : int64_t {
  kNumTokens = -1,
  kNumLogits = -2,
  kBatch = -3,
  kBatchPlus1 = -4,
  kNumBlocks = -5,
  kNumStates = -6,
  kMaxLoras = -7,
  kMaxLoraRank = -8
};

struct Limits {
  int max_batch, max_tokens, max_logits, max_seq_len;  // max_batch: also the number of slots
  int block_size;           // positions per KV cache block, a power of two
  int mem_max_seq_len = 0;  // maximum tokens of an encoder prompt; 0: no encoder
  int num_blocks = 0;       // of the KV cache; 0: not allocated yet
  int num_states = 0;       // recurrent states; 0: no layer has any
  int max_proposals =
      0;                // drafts that a draft model or prompt lookup proposes in a step; 0: neither
  int draft_block = 0;  // positions that a draft model of blocks writes after a sequence's; 0: none
  int max_states = 0;   // maximum of these; 0: max_batch
  bool prompt_lookup = false;  // whether drafts are looked up in the histories of slots
  int max_loras = 0;           // slots of LoRA adapters; 0: the model takes none
  int max_lora_rank = 0;       // maximum rank of an adapter, a multiple of 8
  int64_t features_bytes = 0;  // of a row that the encoder reads; 0: it reads token ids
  int64_t embeds_width = 0;    // of rows in place of token embeddings; 0: the model takes none
  int num_deep_embeds = 0;     // rows that an embedding has for deep layers, of the same width
  bool has_axes = false;       // whether tokens have positions by axis
  bool has_ranges = false;     // whether tokens may have bidirectional ranges

  // Throws Error if a limit is below the minimum.
  void check() const;
  int64_t memory_rows() const { return static_cast<int64_t>(max_batch) * mem_max_seq_len; }
  // Columns of a block table: whole tiles of 128 positions, which cuDNN reads.
  int max_blocks() const { return ((max_seq_len + 127) / 128 * 128 + block_size - 1) / block_size; }
  // Maximum number of sequences of a decode step.
  int decoding() const { return std::min(max_batch, std::min(max_tokens, max_logits)); }
};

// A host array owned by the caller.
template <typename T>
struct HostArray {
  const T* data = nullptr;
  int64_t size = 0;

  const T& operator[](int64_t i) const { return data[i]; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
  int64_t bytes() const { return size * static_cast<int64_t>(sizeof(T)); }
};

// The sizes of a step, and what Context contains of it.
struct Step {
  int num_tokens = 0, num_logits = 0, batch = 0;
  bool decode =
      false;  // every sequence has exactly one new token, and all logits are wanted in order
  int num_decode = 0, longest = 0, reach = 0;
  bool prefix = false;    // decoding sequences share a prefix: see Prefix
  bool verifies = false;  // see StepInputs
  int num_drafted = 0, drafted_tokens = 0;
  bool adapters = false;     // whether a token has a LoRA adapter
  bool embeds = false;       // whether a token has a row in place of its embedding
  bool deep_embeds = false;  // whether such a row has rows for deep layers
  bool ranges = false;       // whether a token has a bidirectional range

  static Step of_decoding(int batch) { return {batch, batch, batch, true, batch, 0, 0}; }
};

// kPooled: the pooled rows of a program that has no logits.
enum class Logits : int32_t { kNone, kSampled, kAll, kPooled };

// Sequences that are installed in slots: see kernels::AdmitParams. `tokens` are the prompt and
// generated tokens of all; `lists` the lists of all; processing.lists of a
// state is the offset of its lists.
struct Admissions {
  HostArray<int32_t> slots;
  HostArray<kernels::SlotState> states;
  HostArray<int32_t> prompts, lengths;  // prompt tokens, and all tokens, of each
  HostArray<int32_t> tokens, lists;
};

// A step, as in runtime/core/step.py.
struct StepInputs {
  HostArray<int64_t> token_ids;  // [num_tokens]; -1: the slot's last sampled token; -2 - i: draft i
                                 // of the draft model, or of prompt lookup, after it
  HostArray<int32_t> cu_seqlens, past_lens;  // [batch + 1], [batch]
  HostArray<int32_t> block_tables;           // [batch, width]; -1: no block
  HostArray<int32_t> slots;                  // [batch]
  int num_decode;
  bool verifies;  // every row is a decoding sequence, and adjacent rows with the same slot are the
                  // last token and the drafts of one; with recurrent states, after the drafts that
                  // the step before accepted
  HostArray<int32_t> sample;  // [num_sampled], ascending; with `verifies`, each sequence's last row
  HostArray<int32_t> num_drafts;  // [num_sampled], the last tokens of each; empty: none has any
  HostArray<int32_t> copies;      // [num_copies, 2]
  int candidates;
  Logits logits;
  HostArray<int32_t> memory_starts, memory_lens;  // [batch] each, or empty: see EncoderInputs
  HostArray<int32_t>
      mask_rows;  // [num_sampled + drafts], or empty: index of a mask; -1: all tokens are allowed
  HostArray<uint32_t> masks;  // [.., ceil(vocab_size / 32)]: see kernels::ProcessLogitsParams
  // With `verifies`, these two are by sequence, not by row. Empty without states.
  HostArray<int32_t> state_slots;     // [batch], the state of each sequence
  HostArray<int32_t> commit_lens;     // [batch], new tokens after which it is stored
  HostArray<int32_t> state_copies;    // [num_copies, 2]
  HostArray<int32_t> scored_rows;     // [num_scored], tokens of the step, not with Logits::kAll
  HostArray<int64_t> scored_targets;  // [num_scored], the token that follows each
  HostArray<int32_t> scored_counts;   // [num_scored], number of top tokens reported with each
  HostArray<int64_t> next_tokens;     // [batch], the token after those of each sequence that is not
                                      // sampled, negative if unknown; empty: none is known
  // Positions after a sequence's tokens that proposals take, as far as there are blocks.
  int proposed_positions(const Limits& limits) const {
    return propose > 0 ? std::max(propose, limits.draft_block) : 0;
  }
  int propose;  // drafts of the next tokens to propose for each of `sample`; -1: neither the draft
                // model nor prompt lookup runs
  HostArray<int32_t> unread;  // [batch], drafts of earlier steps that past_lens counts as accepted;
                              // the device subtracts rejected ones; empty: none
  HostArray<int32_t> lora_ids;  // [num_tokens], the slot of each token's adapter, or -1; empty: no
                                // token has one
  HostArray<int64_t> token_type_ids;    // [num_tokens], or empty: all are 0
  HostArray<float> embeds;              // [num_embeds, width], rows in place of token embeddings
  HostArray<int32_t> embed_ids;         // [num_tokens], the row of each, or -1; empty: none has any
  HostArray<float> deep_embeds;         // [num_deep_embeds, num_embeds, width], or empty: all are 0
  HostArray<int32_t> rotary_positions;  // [num_tokens, kernels::kRotaryAxes]; empty: of each token
                                        // its position. As past_lens, they count unread drafts
  HostArray<int32_t> bidirectional_ranges;  // [num_tokens, 2], first position and the one after the
                                            // last of each token's range, or 0, 0; empty: all 0
  Admissions admit;

  int batch() const { return static_cast<int>(past_lens.size); }
  int width() const { return static_cast<int>(block_tables.size / past_lens.size); }
  int fresh(int64_t sequence) const { return cu_seqlens[sequence + 1] - cu_seqlens[sequence]; }
  int unread_of(int64_t sequence) const { return unread.size > 0 ? unread[sequence] : 0; }
  // Rows of each sequence, [sequences + 1], with `verifies`; else cu_seqlens.
  std::vector<int32_t> sequence_starts() const;
  int drafts(int64_t sampled) const { return num_drafts.size > 0 ? num_drafts[sampled] : 0; }
  // Rows from which tokens are sampled: of each sequence one, and one more for each draft.
  int64_t sampled_rows() const {
    return std::accumulate(num_drafts.begin(), num_drafts.end(), sample.size);
  }
};

// The host's record of a slot.
struct SlotRecord {
  bool has_sampled = false, draws = false, processes = false, reports = false,
       keeps_history = false;
};

// The sizes of the step. Throws Error if array sizes are inconsistent or a value is out of range.
// `slots` [max_batch] are as the previous step left them.
Step check_step(const StepInputs& inputs, const Limits& limits, int vocab_size,
                const std::vector<SlotRecord>& slots);

// Positions that decoding sequences have in the same blocks, from position 0 on. One additional
// kernel attends to them once for all of these sequences, if that pays off.
struct Prefix {
  int owner = 0, length = 0;  // one of the sequences, and the number of shared positions; 0: none
  std::vector<int32_t>
      own_from;  // [batch]: the length for sequences that share it, 0 for others; or empty
};
Prefix shared_prefix(const StepInputs& inputs, int block_size);

// The rows from which a step samples: of each of `sample` one after its last token and one after
// each draft. They are ordered by position: first those before all drafts.
struct SampledRows {
  std::vector<int32_t> tokens, slots;          // [rows], tokens of the step and their slots
  std::vector<int32_t> drafts, drafts_before;  // [rows], the draft that follows (-1: none; -2 - t:
                                               // token t of the step), and the number of drafts
                                               // before
  std::vector<int32_t> mask_rows;              // [rows], or empty
  std::vector<int32_t> row_of;                 // [num_sampled, positions], -1: no such row
  std::vector<int> begins;                     // [positions + 1], the first row of each position

  static SampledRows of(const StepInputs& inputs);
};

// The rows of a draft model that runs on the tokens of a step, and the sequences that it drafts
// for. Tokens are shifted if it reads features: a row has the token after the model's.
struct DraftRows {
  std::vector<int32_t> ids;  // [num_tokens], the token after each; 0: unknown; -1: the next token
                             // of the step, which only the device knows
  std::vector<int32_t> sampled;  // [num_tokens], index in `sample` of the sequence of each last
                                 // token before drafts and of each draft; -1: another token
  std::vector<int32_t> firsts;   // [num_sampled], the last token before the drafts of each
  std::vector<int32_t> slots;    // [num_sampled]
  std::vector<int32_t> tables;   // [num_sampled], row of the block table with all blocks of each

  static DraftRows of(const StepInputs& inputs);
};

// Prompts for an encoder: the output of token i is written to row memory_rows[i]. Prompt p has
// mem_max_seq_len rows.
struct EncoderInputs {
  HostArray<int64_t> input_ids;  // [num_tokens]; empty if the encoder reads rows
  HostArray<uint8_t> features;   // [num_tokens, features_bytes], rows of the model's dtype
  HostArray<int64_t> position_ids;
  HostArray<int32_t> cu_seqlens;
  HostArray<int64_t> memory_rows;
};
Step check_step(const EncoderInputs& inputs, const Limits& limits);

// Throws Error unless the segments of an image's patches begin at 0 and end at the last patch; any
// may be empty.
void check_segments(const HostArray<int32_t>& cu_seqlens, int num_tokens);
// Throws Error unless these are indices of patches.
void check_merged_rows(const HostArray<int64_t>& rows, int num_tokens);

// Throws Error unless an array has the expected size.
void check_size(const char* what, int64_t size, int64_t wanted);

}  // namespace llmc
