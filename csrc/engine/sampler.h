// Choosing tokens on the device: from a step's logits, for a batch whose wishes the host told once.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "memory.h"
#include "step.h"

namespace llmc {

// How each sequence of a batch chooses its tokens, on the host: see kernels::SampleParams. [batch] each.
struct Sampling {
  HostArray<float> temperature;
  HostArray<int32_t> top_k;
  HostArray<float> top_p, min_p, typical_p;
  HostArray<uint64_t> seed;
  HostArray<int64_t> drawn;
};

// What else it asks for, on the host; nothing where no sequence of the batch does.
struct Requests {
  std::optional<HostArray<kernels::Processing>> processing;  // [batch], and their lists
  HostArray<int32_t> lists;
  std::optional<HostArray<int32_t>> logprobs;     // [batch]: see kernels::LogprobsParams::top
};

// Where the inputs of a step are that choosing a token makes the next step's.
struct NextInputs {
  int64_t *input_ids, *position_ids;
  int32_t* past_lens;
};

class Sampler {
 public:
  Sampler(const Limits& limits, int vocab_size, DeviceMemory& memory, cudaStream_t stream);

  // From now on choose for these sequences. True where captured steps know an address that is no more. Throws Error,
  // before anything is enqueued, where arrays differ in size or a record names what is not there.
  bool begin(int batch, const Sampling& sampling, const Requests& requests, const std::vector<int64_t>& end_ids);
  // The prompts of the sequences in the cache rows from `first_row` on, one behind the other, for processing that
  // depends on them; from now on their new tokens are kept as well. Result and errors as begin's.
  bool set_history(int first_row, const HostArray<int32_t>& tokens, const std::vector<int32_t>& lengths);

  // Enqueue the choice from logits [batch, width] of the sequences in the cache rows from `first_row` on.
  void choose(const Tensor& logits, int first_row);
  // Then: write the tokens down, and make them the next step's inputs where a sequence goes on.
  void advance(const NextInputs& inputs, int first_row);
  // So many more steps are chosen. Throws Error where there is no room to write them down.
  void count(int steps);

  int batch() const { return batch_; }
  // What captured steps depend on.
  using Key = std::tuple<int, int, bool, bool, bool>;
  Key key() const { return {batch_, num_end_ids_, draws_, has_processing_, reports_}; }

  // The tokens of the last `steps` steps, [steps, batch]; -1 where no token was allowed. Waits.
  std::vector<int64_t> tokens(int steps) const;
  // Log-probabilities of the last `steps` steps, at most kernels::kLogprobSteps, [steps, batch]. Waits.
  void read_logprobs(int steps, kernels::Logprobs* out, int64_t count) const;

  // A sequence goes on in another cache row.
  void copy_row(int source, int target);

 private:
  bool reserve(const Requests& requests);
  int64_t scores_width() const { return (vocab_size_ + 3) / 4 * 4; }

  const Limits limits_;
  const int vocab_size_;
  DeviceMemory& memory_;
  const cudaStream_t stream_;
  int batch_ = 0, steps_ = 0, num_end_ids_ = 0;
  bool draws_ = false, has_processing_ = false, reports_ = false;  // what some sequence of the batch asks for
  // On the device: [max_batch] each, but made [max_seq_len + 1, max_batch], step [1] and end_ids.
  int64_t *chosen_, *made_, *end_ids_, *drawn_;
  int32_t *step_, *top_k_;
  float *temperature_, *top_p_, *min_p_, *typical_p_;
  uint64_t* seed_;
  uint8_t* finished_;
  // Allocated when it is first asked for.
  kernels::Processing* processing_ = nullptr;
  float* scores_ = nullptr;
  kernels::TokenHistory history_{};
  std::vector<bool> has_history_;  // by cache row
  kernels::Logprobs* logprobs_ = nullptr;
  int32_t* top_logprobs_ = nullptr;
  std::unique_ptr<DeviceBuffer> lists_;
  int64_t lists_room_ = -1;  // numbers; -1: there are none yet, nor is there room for none
};

}  // namespace llmc
