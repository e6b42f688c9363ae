// Sampling on the device, with per-slot sampling state.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "memory.h"
#include "step.h"

namespace llmc {

// Token masks of a step on the device; null if absent.
struct Masks {
  const int32_t* rows;
  const uint32_t* words;
};

// Admissions of a step on the device.
struct AdmittedArrays {
  const kernels::SlotState* states;
  const int32_t *slots, *prompts, *starts, *tokens, *lists;
};

// Rows of logits that belong to one sequence: after its last token and after each draft. Rows are
// ordered by position: first those of all sequences without drafts before them.
struct DraftedRows {
  std::vector<int> begins;  // [positions + 1], the first row of each position
  int sequences = 0;
  // On the device.
  const int32_t* row_of = nullptr;         // [sequences, positions]; negative: no such row
  const int32_t* drafts = nullptr;         // [rows], see SampledRows
  const int32_t* drafts_before = nullptr;  // [rows]
  const int64_t* input_ids = nullptr;      // of the step

  int positions() const { return static_cast<int>(begins.size()) - 1; }
};

class Sampler {
 public:
  Sampler(const Limits& limits, int vocab_size, DeviceMemory& memory, cudaStream_t stream);

  const std::vector<SlotRecord>& slots() const { return slots_; }
  const kernels::TokenHistory& history() const { return history_; }
  const kernels::SlotState* states() const { return states_; }

  // Makes room for the lists of admitted sequences, and writes their offsets to `states`.
  // Synchronizes if memory in use must move.
  void make_room(const Admissions& admit, std::vector<kernels::SlotState>& states);
  // Enqueues the admission.
  void admit(const Admissions& admit, const AdmittedArrays& given,
             const std::vector<kernels::SlotState>& states);

  // Enqueues logits processing, sampling of one token per row of logits [rows, width], and the slot
  // updates. `slots` are the host's copy of device_slots.
  void sample(const Tensor& logits, const int32_t* device_slots, const std::vector<int32_t>& slots,
              const Masks& masks, const DraftedRows* drafted = nullptr);
  // Sampled tokens, and log-probabilities if any slot of the last call asks for them; [rows] each,
  // on the device.
  const int64_t* sampled() const { return sampled_; }
  // Tokens of each sequence of the last call with drafted rows.
  const int32_t* counts() const { return counts_; }
  const kernels::Logprobs* logprobs() const { return reported_ ? logprobs_ : nullptr; }
  // The last token of each slot.
  const int64_t* last() const { return last_; }

 private:
  int64_t scores_width() const { return (vocab_size_ + 3) / 4 * 4; }
  void choose(const Tensor& logits, const int32_t* device_slots, int begin, int end, bool draws,
              bool processes, const Masks& masks, const int32_t* drafts_before);
  int64_t place_lists(int32_t slot, int64_t size);
  void keep_tokens();
  void keep_counts();

  const Limits limits_;
  const int vocab_size_;
  DeviceMemory& memory_;
  const cudaStream_t stream_;
  std::vector<SlotRecord> slots_;
  bool reported_ = false;
  // On the device, [max_batch] each.
  kernels::SlotState* states_;
  int64_t *sampled_, *last_;
  int32_t* counts_;
  // Allocated on first use.
  float* scores_ = nullptr;
  kernels::Logprobs* logprobs_ = nullptr;
  kernels::TokenHistory history_{};  // its tokens at once with prompt lookup
  // Bad words, biases and so on; each slot has its range.
  std::unique_ptr<DeviceBuffer> lists_;
  int64_t lists_room_ = 0;
  std::map<int32_t, std::pair<int64_t, int64_t>> places_;  // by slot: begin, end
};

}  // namespace llmc
