// Choosing tokens on the device, by slots that know how their sequences sample.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "memory.h"
#include "step.h"

namespace llmc {

// What the host sent of a step's masks, on the device; null where there are none.
struct Masks {
  const int32_t* rows;
  const uint32_t* words;
};

// What the host sent of Admissions, on the device.
struct AdmittedArrays {
  const kernels::SlotState* states;
  const int32_t *slots, *prompts, *starts, *tokens, *lists;
};

class Sampler {
 public:
  Sampler(const Limits& limits, int vocab_size, DeviceMemory& memory, cudaStream_t stream);

  const std::vector<SlotRecord>& slots() const { return slots_; }

  // Room for sequences that enter slots, whose states then say where their lists are in `lists()`: in `states`. Waits
  // where memory that is used must move.
  void make_room(const Admissions& admit, std::vector<kernels::SlotState>& states);
  // Enqueue that they enter.
  void admit(const Admissions& admit, const AdmittedArrays& given, const std::vector<kernels::SlotState>& states);

  // Enqueue the choice of a token from each row of logits [rows, width] by the slots on the device, of which the host
  // knows `slots`; and what follows for these.
  void sample(const Tensor& logits, const int32_t* device_slots, const std::vector<int32_t>& slots,
              const Masks& masks);
  // What was chosen, and where any slot of the last choice wants them its log-probabilities; [rows] each, on the device.
  const int64_t* sampled() const { return sampled_; }
  const kernels::Logprobs* logprobs() const { return reported_ ? logprobs_ : nullptr; }
  // What each slot chose last.
  const int64_t* last() const { return last_; }

 private:
  int64_t scores_width() const { return (vocab_size_ + 3) / 4 * 4; }
  int64_t place_lists(int32_t slot, int64_t size);

  const Limits limits_;
  const int vocab_size_;
  DeviceMemory& memory_;
  const cudaStream_t stream_;
  std::vector<SlotRecord> slots_;
  bool reported_ = false;
  // On the device: [max_batch] each.
  kernels::SlotState* states_;
  int64_t *sampled_, *last_;
  // Allocated when it is first asked for.
  float* scores_ = nullptr;
  kernels::Logprobs* logprobs_ = nullptr;
  kernels::TokenHistory history_{};
  // Lists of bad words, biases and so on: each slot's have a place of their own.
  std::unique_ptr<DeviceBuffer> lists_;
  int64_t lists_room_ = 0;
  std::map<int32_t, std::pair<int64_t, int64_t>> places_;  // by slot: from, to
};

}  // namespace llmc
