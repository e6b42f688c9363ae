#include "prompt_lookup.h"

namespace llmc {

PromptLookup::PromptLookup(const Limits& limits, DeviceMemory& memory, cudaStream_t stream)
    : stream_(stream) {
  constexpr const char* kWhat = "drafts";
  const int64_t rows = limits.max_batch;
  drafts_ = reinterpret_cast<int64_t*>(memory.allocate<char>(bytes(limits.max_batch), kWhat));
  slot_drafts_ = memory.allocate<int64_t>(rows * kernels::kMaxProposals, kWhat);
  longest_matches_ = memory.allocate<uint64_t>(rows, kWhat);
  blocks_done_ = memory.allocate<int32_t>(rows, kWhat);
}

void PromptLookup::refer(kernels::PrepareInputsParams& p,
                         const kernels::TokenHistory& history) const {
  p.drafts = slot_drafts_;
  p.drafts_stride = kernels::kMaxProposals;
  p.lengths = history.lengths;
  p.num_new = 1;  // the last token of a history has no position in the KV cache yet
}

void PromptLookup::find(kernels::LookupDraftsParams p) {
  p.drafts = drafts_;
  p.matches = reinterpret_cast<int32_t*>(drafts_ + kernels::kMaxProposals * int64_t{p.sequences});
  p.slot_drafts = slot_drafts_;
  p.longest_matches = longest_matches_;
  p.blocks_done = blocks_done_;
  check(kernels::lookup_drafts(p, stream_), "looking up drafts");
}

}  // namespace llmc
