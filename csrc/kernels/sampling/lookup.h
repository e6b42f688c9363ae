// Prompt lookup: what followed the latest tokens earlier in the sequence, as drafts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "drafts.h"
#include "state.h"

namespace llmc::kernels {

constexpr int kMinMatch = 2, kMaxMatch = 16;  // as in runtime/speculation/ngram.py

// After a step has sampled: `count` drafts of each sequence, at most kMaxProposals. Of the longest
// matches of the latest tokens, the most recent one is drafted from. A match that overlaps the end
// is repeated.
struct LookupDraftsParams {
  TokenHistory history;
  const SlotState* states;
  const int32_t* slots;  // [sequences]; those without prompt_lookup have no drafts
  int64_t* drafts;       // [sequences, kMaxProposals]; -1: none
  int32_t* matches;      // [sequences], tokens that match, at most kMaxMatch; 0: no drafts
  int64_t* slot_drafts;  // [slots, kMaxProposals], as `drafts`
  // Scratch, 0 before and after: the longest match of each sequence, and its blocks that have
  // ended.
  uint64_t* longest_matches;  // [sequences]
  int32_t* blocks_done;       // [sequences]
  int sequences, count;
  int max_length;  // upper bound of the lengths of the histories
};
cudaError_t lookup_drafts(const LookupDraftsParams& params, cudaStream_t stream);

}  // namespace llmc::kernels
