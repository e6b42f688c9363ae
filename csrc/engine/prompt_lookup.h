// Drafts by prompt lookup on the device, after each step that asks for them.
#pragma once

#include "../kernels/sampling/lookup.h"
#include "../kernels/sampling/params.h"
#include "memory.h"
#include "step.h"

namespace llmc {

class PromptLookup {
 public:
  PromptLookup(const Limits& limits, DeviceMemory& memory, cudaStream_t stream);

  // Sets what the inputs of a step that follows depend on.
  void refer(kernels::PrepareInputsParams& params, const kernels::TokenHistory& history) const;

  // Enqueues the lookup. The caller sets what the step has on the device: history, states, slots,
  // sequences, count and max_length.
  void find(kernels::LookupDraftsParams params);

  // int64 [sequences, kMaxProposals], then int32 [sequences], the tokens that match, on the device.
  const void* drafts() const { return drafts_; }
  static int64_t bytes(int sequences) { return (8ll * kernels::kMaxProposals + 4) * sequences; }

 private:
  const cudaStream_t stream_;
  int64_t* drafts_;
  int64_t* slot_drafts_;  // [slots, kMaxProposals], of the slot's last step
  uint64_t* longest_matches_;
  int32_t* blocks_done_;
};

}  // namespace llmc
