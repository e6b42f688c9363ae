// The later layers of a draft model with several: their device arrays, and what runs between their
// passes. See kernels/sampling/draft_layers.h.
#pragma once

#include <map>
#include <vector>

#include "../kernels/sampling/draft_layers.h"
#include "../kernels/sampling/params.h"
#include "memory.h"
#include "program.h"

namespace llmc {

// Sequences of a step, staged: offsets of the arrays of kernels::LayerSequences, and of `origins`,
// by index in `sample`.
struct SentLayers {
  int64_t of_token = 0, firsts = 0, ends = 0, slots = 0, sampled = 0, lags = 0, origins = 0;
  int count = 0;

  // origins: by slot, the position of the first token after its admission.
  static SentLayers of(StagingBuffer& into, const StepInputs& inputs,
                       const std::vector<int>& origins);
};

class DraftLayers {
 public:
  DraftLayers(const Program& program, DeviceMemory& memory, cudaStream_t stream);

  // Inputs of the passes of layers after the first, by tensor: on the tokens of a step, and on the
  // tails.
  std::map<int, void*> step_inputs(int layer) const;
  std::map<int, void*> tail_inputs(int layer) const;
  // Call after the KV cache is allocated.
  void allocate(const std::vector<int32_t>& table);

  // Notes the sequences that a step admits, and stages its sequences.
  SentLayers send(StagingBuffer& into, const StepInputs& inputs);

  // What a step has on the device.
  struct Given {
    SentLayers sent;
    const char* received;
    const int64_t *ids, *position_ids;  // of the first layer
    const int32_t* past_lens;
    const int32_t* counts;         // of sampled tokens, or null
    const int32_t* before_drafts;  // [num_sampled]
    int num_tokens;                // of the step, without padding
  };
  // Enqueues what precedes the pass of a layer on the tokens of a step: after the layer before.
  void lag(int layer, const Given& given, const Step& step, const Tensor& hidden_out);
  // Enqueues what precedes the pass on the tail of a layer, of `rows` rows: after the tail before,
  // whose hidden_out this is.
  void tail(int layer, const kernels::DraftInputs& next, const Given& given, const int64_t* drafts,
            int sequences, int rows, const Tensor& hidden_out);
  // The last row of each sequence's tail, int64 [sequences].
  const int64_t* last_rows(int layer) const { return last_rows_ + int64_t{layer} * max_rows_; }

 private:
  int width_of(int layer) const;

  const Program& program_;
  const cudaStream_t stream_;
  const int max_rows_, padding_rows_;
  std::vector<int> origins_;
  // On the tokens of a step, and on the tail.
  int64_t *lagged_ids_, *lagged_positions_, *tail_ids_, *tail_positions_, *last_rows_;
  int32_t *lagged_past_lens_, *tail_past_lens_, *tail_table_, *tail_seqlens_;
  char *lagged_hidden_, *tail_hidden_;
  std::vector<char*> carried_;  // by layer, T [slots, width]
};

}  // namespace llmc
