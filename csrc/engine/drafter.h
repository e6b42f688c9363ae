// The device arrays of a draft model's passes, and what runs between the passes.
#pragma once

#include <map>
#include <vector>

#include "../kernels/sampling/drafts.h"
#include "../kernels/sampling/params.h"
#include "memory.h"
#include "program.h"

namespace llmc {

// DraftRows of a step, staged: offsets of its arrays.
struct SentDrafts {
  int64_t ids = 0, sampled = 0, firsts = 0, slots = 0, tables = 0;
  int num_tokens = 0;

  static SentDrafts of(StagingBuffer& into, const StepInputs& inputs);
};

// Outputs of a pass, and the tensor with the features of the next one; the latter two may be
// absent.
struct DraftOutputs {
  Tensor logits, hidden_out, hidden;
};

// The first pass of a draft model runs on the tokens of a step, if it has own caches; the next ones
// run on the last draft of each sequence. All passes read the model's inputs, except for those that
// are listed here.
class Drafter {
 public:
  // token_ids: see DraftTensors, on the device; null: columns are token ids.
  Drafter(const Program& program, const void* token_ids, DeviceMemory& memory, cudaStream_t stream);

  // Whether the draft model reads features of the model.
  bool reads_features() const { return program_.draft().features >= 0; }
  // Whether a first pass runs on the tokens of a step, and whether that drafts.
  bool runs_on_steps() const { return !program_.draft().at_one_position; }
  bool drafts_on_steps() const { return runs_on_steps() && reads_features() && block() == 0; }
  // Tokens of a block, see DraftTensors, and the most sequences of a pass on blocks.
  int block() const { return program_.draft().block; }
  int max_blocks() const;
  // Inputs of the first pass, and of the next ones, by tensor.
  std::map<int, void*> first_inputs() const;
  std::map<int, void*> next_inputs() const;
  // Inputs of the pass on blocks, which then is the only next one.
  std::map<int, void*> block_inputs() const;
  // Call after the KV cache is allocated; all entries of `table` are the padding block.
  void allocate(const std::vector<int32_t>& table);

  // Sets what the inputs of a step that follows depend on.
  void refer(kernels::PrepareInputsParams& params) const;

  // Enqueues what precedes the first pass. The caller sets what the step has on the device:
  // input_ids, position_ids, block_table, chosen, counts, row_of, positions, sequences and rows;
  // without a first pass also features and hidden.
  void begin(kernels::BeginDraftsParams params, const SentDrafts& sent, const char* received);

  // Which rows of a pass's outputs belong to the sequences: the last accepted token of each, with
  // logits of all tokens, or of these tokens only; or in order.
  enum class Rows { kOfAll, kOfSampled, kNext };
  // Rows of the outputs of another pass, int64 on the device; the features of the next pass are
  // copied if `hidden` is given.
  void take_rows(const DraftOutputs& outputs, int count, const int64_t* rows);
  // Enqueues what follows a pass that drafts: appends a draft to each of the first `count`
  // sequences.
  void take(const DraftOutputs& outputs, int count, Rows rows);

  // Enqueues what precedes the pass on blocks of `rows` sequences, and what follows it: `drafts` of
  // each of the first `count`.
  void fill(int rows);
  void take_blocks(const Tensor& logits, int count, int drafts);
  // Enqueues that the first `count` sequences have no drafts.
  void take_none(int count);

  // int64 [sequences, kMaxProposals], on the device.
  const int64_t* drafts() const { return drafts_; }
  const kernels::DraftInputs& next() const { return next_; }
  const int64_t* shifted_ids() const { return ids_; }

 private:
  const Program& program_;
  const cudaStream_t stream_;
  int64_t *ids_, *last_rows_, *drafts_;
  int64_t* slot_drafts_;  // [slots, kMaxProposals], of the slot's last step
  int32_t* lengths_;      // [slots]
  int32_t* cu_seqlens_;   // of the next passes: one token each
  kernels::DraftInputs next_{};
  const int64_t* token_ids_;
  // Of blocks: [max_blocks() * block()] each, but one more in block_seqlens_, and the masks' rows.
  int64_t *block_ids_ = nullptr, *block_positions_ = nullptr, *mask_rows_ = nullptr;
  int32_t* block_seqlens_ = nullptr;
  char* no_features_ = nullptr;  // zeros
};

}  // namespace llmc
