// Kernels around the passes of a draft model. The first pass runs on the tokens of a step; each
// later one on the last draft of every sequence. See rowwise/params.h for the conventions of
// launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/dtype.h"

namespace llmc::kernels {

constexpr int kMaxProposals = 16;  // drafts of a sequence in a step

// Inputs of the later passes, of one token per sequence; and how far each sequence is.
struct DraftInputs {
  int64_t *ids, *position_ids;  // [rows]
  int32_t* past_lens;           // [rows]
  int32_t* block_table;         // [rows, max_blocks]
  int32_t* positions;           // [rows], of the next pass; -1: the sequence does not draft
  int32_t* made;                // [rows], drafts so far
  int32_t* slots;               // [rows]; -1: padding
  int max_blocks, max_seq_len;
};

// After a step has sampled: writes the token ids of the first pass, and the state of each sequence
// after its last accepted token. Sequences that cannot draft, and rows from `sequences` to `rows`,
// read and write the padding block.
struct BeginDraftsParams {
  DraftInputs next;
  int64_t* ids;        // [num_tokens], of the first pass, shifted by one; null: not shifted
  int64_t* last_rows;  // [rows], token of the step of each sequence's last accepted one
  int32_t* lengths;    // [slots], positions of each sequence whose tokens are accepted
  const int64_t *input_ids, *position_ids;  // [num_tokens], of the step
  const int32_t* block_table;               // [.., max_blocks], of the step
  const int64_t* chosen;                    // sampled tokens
  const int32_t* counts;                    // [sequences], sampled tokens of each; null: one each
  const int32_t* row_of;  // [sequences, positions], sampled tokens in order; with counts
  // See DraftRows of engine/step.h.
  const int32_t *host_ids, *host_sampled;                 // [num_tokens]
  const int32_t *host_firsts, *host_slots, *host_tables;  // [sequences]
  int num_tokens, sequences, rows, positions, padding_block;
  // Next passes at the position of the last accepted token, with its features; 0: at the position
  // after it.
  int back;               // 0 or 1
  int span;               // positions that the next passes need, from that after it on
  const char* features;   // [num_tokens, feature_bytes], of the step; null: not read
  char* hidden;           // [rows, feature_bytes]
  int64_t feature_bytes;  // of a row, a multiple of 2
};
cudaError_t begin_drafts(const BeginDraftsParams& params, cudaStream_t stream);

// Inputs of a pass on blocks: the token after the last accepted one of each sequence, and masks.
struct FillBlocksParams {
  DraftInputs next;
  int64_t *ids, *position_ids;  // [rows, block]
  int64_t mask;
  int rows, block;
};
cudaError_t fill_blocks(const FillBlocksParams& params, cudaStream_t stream);

// After a pass on blocks: the most likely token of each mask is a draft, -1 of sequences that
// cannot draft. Equal logits: the first.
struct TakeBlocksParams {
  DraftInputs next;
  int64_t *drafts, *slot_drafts;          // [rows, kMaxProposals], [slots, kMaxProposals]
  const void* logits;                     // T [rows * masks, stride]
  const int64_t* token_ids;               // [vocab]: the token id of each column; null: the column
  int rows, masks, count, vocab, stride;  // count: drafts of each sequence, at most `masks`
};
cudaError_t take_blocks(DType dtype, const TakeBlocksParams& params, cudaStream_t stream);

// After a pass: appends the most likely token of each sequence to its drafts, -1 if it cannot
// draft, and makes it the input of the next pass. Equal logits: the first.
struct TakeDraftsParams {
  DraftInputs next;
  int64_t *drafts, *slot_drafts;  // [rows, kMaxProposals], [slots, kMaxProposals]
  const void* logits;             // T [.., stride]; of each row, or with logit_rows of these rows
  const int64_t* logit_rows;      // [rows], or null
  const int64_t* token_ids;       // [vocab]: the token id of each column; null: the column
  void* hidden;                   // T [rows, width], features of the next pass; null: none
  const void* hidden_out;         // T [.., width]; of each row, or with hidden_rows of these rows
  const int64_t* hidden_rows;     // [rows], or null
  int rows, vocab, stride, width;
  bool advances;  // the pass ran on the positions of `next`
};
cudaError_t take_drafts(DType dtype, const TakeDraftsParams& params, cudaStream_t stream);

}  // namespace llmc::kernels
