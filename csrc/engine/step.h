// What the host gives for a step, and what of it is checked before anything is enqueued: kernels believe it.
#pragma once

#include <algorithm>
#include <vector>

#include "../kernels/sampling/state.h"
#include "../plugins/common/plugin.h"

namespace llmc {

// A dimension below zero is one of these sizes of a step, or of the engine's KV cache and states.
enum Size : int64_t {
  kNumTokens = -1, kNumLogits = -2, kBatch = -3, kBatchPlus1 = -4, kNumBlocks = -5, kNumStates = -6
};

struct Limits {
  int max_batch, max_tokens, max_logits, max_seq_len;  // max_batch: slots, too
  int block_size;          // positions of a block of the KV cache, a power of two
  int mem_max_seq_len = 0;  // tokens of a prompt that an encoder takes; 0: there is none
  int num_blocks = 0;       // of the KV cache; 0: they are not there yet
  int num_states = 0;       // that layers keep; 0: none keeps any

  // Throws Error where one is below what any step needs.
  void check() const;
  int64_t memory_rows() const { return static_cast<int64_t>(max_batch) * mem_max_seq_len; }
  // Columns of a block table: whole tiles of 128 positions, which is what cuDNN reads.
  int max_blocks() const { return ((max_seq_len + 127) / 128 * 128 + block_size - 1) / block_size; }
  // Sequences that a decode step has at most.
  int decoding() const { return std::min(max_batch, std::min(max_tokens, max_logits)); }
};

// An array on the host, which somebody else owns.
template <typename T>
struct HostArray {
  const T* data = nullptr;
  int64_t size = 0;

  const T& operator[](int64_t i) const { return data[i]; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
  int64_t bytes() const { return size * static_cast<int64_t>(sizeof(T)); }
};

// The sizes of a step, and what Context says of it.
struct Step {
  int num_tokens = 0, num_logits = 0, batch = 0;
  bool decode = false;  // every sequence has exactly one new token, and all of their logits are wanted in order
  int num_decode = 0, longest = 0, reach = 0;
  bool prefix = false;  // sequences that decode share one: see Prefix

  static Step of_decoding(int batch) { return {batch, batch, batch, true, batch, 0, 0}; }
};

enum class Logits : int32_t { kNone, kSampled, kAll };

// Sequences that enter slots: see kernels::AdmitParams. `tokens` are those of all, prompts and what is generated;
// `lists` those of all, in which a state's processing.lists is where its own begin.
struct Admissions {
  HostArray<int32_t> slots;
  HostArray<kernels::SlotState> states;
  HostArray<int32_t> prompts, lengths;  // tokens of each: its prompt's, and in all
  HostArray<int32_t> tokens, lists;
};

// A step, as runtime/step.py has it.
struct StepInputs {
  HostArray<int64_t> token_ids;                // [num_tokens]; -1: what the sequence's slot chose last
  HostArray<int32_t> cu_seqlens, past_lens;    // [batch + 1], [batch]
  HostArray<int32_t> block_tables;             // [batch, width]
  HostArray<int32_t> slots;                    // [batch]
  int num_decode;
  HostArray<int32_t> sample;                   // [num_sampled], ascending
  HostArray<int32_t> copies;                   // [num_copies, 2]
  int candidates;
  Logits logits;
  HostArray<int32_t> memory_starts, memory_lens;  // [batch] each, or nothing: see EncoderInputs
  HostArray<int32_t> mask_rows;                // [num_sampled], or nothing: of masks, -1 where all tokens are allowed
  HostArray<uint32_t> masks;                   // [.., ceil(vocab_size / 32)]: see kernels::ProcessLogitsParams
  HostArray<int32_t> state_slots;              // [batch], which state is a sequence's; nothing where there are none
  HostArray<int32_t> state_copies;             // [num_copies, 2]
  HostArray<int32_t> scored_rows;              // [num_scored], tokens of the step, not with Logits::kAll
  HostArray<int64_t> scored_targets;           // [num_scored], the token that follows each
  HostArray<int32_t> scored_counts;            // [num_scored], most likely tokens that are reported with each
  Admissions admit;

  int batch() const { return static_cast<int>(past_lens.size); }
  int width() const { return static_cast<int>(block_tables.size / past_lens.size); }
  int fresh(int64_t sequence) const { return cu_seqlens[sequence + 1] - cu_seqlens[sequence]; }
};

// What the host knows of the slots.
struct SlotRecord {
  bool has_sampled = false, draws = false, processes = false, reports = false, keeps_history = false;
};

// The step's sizes. Throws Error where an array has another size than the others say, or a value that points out of
// anything. `slots` [max_batch] are as the step before left them.
Step check_step(const StepInputs& inputs, const Limits& limits, int vocab_size, const std::vector<SlotRecord>& slots);

// Positions that sequences which decode have in the same blocks, from the first on: attention reads them once for all, by a
// kernel more, where that is worth it.
struct Prefix {
  int owner = 0, length = 0;      // one of the sequences, and how many positions they share; 0: none
  std::vector<int32_t> own_from;  // [batch]: so many of those that do, 0 of others; or nothing
};
Prefix shared_prefix(const StepInputs& inputs, int block_size);

// Prompts for an encoder: token i leaves what decoders see of it in row memory_rows[i] of the memory, in which prompt p
// has mem_max_seq_len rows.
struct EncoderInputs {
  HostArray<int64_t> input_ids, position_ids;
  HostArray<int32_t> cu_seqlens;
  HostArray<int64_t> memory_rows;
};
Step check_step(const EncoderInputs& inputs, const Limits& limits);

// Throws Error where an array has not the size that it is to have.
void check_size(const char* what, int64_t size, int64_t wanted);

}  // namespace llmc
