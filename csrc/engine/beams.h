// Beam search: a step whose rows continue one another, and what the host chooses from after it.
#pragma once

#include <memory>
#include <tuple>

#include "graph.h"
#include "memory.h"
#include "step.h"

namespace llmc {

// Where the inputs are that a step of beams makes of the host's choice: see kernels::FollowParams.
struct BeamInputs {
  int64_t *input_ids, *position_ids;
  int32_t *past_lens, *cu_seqlens;
  int64_t* logits_indices;
  int32_t* indirection;
};

class Beams {
 public:
  Beams(const Limits& limits, int vocab_size, cudaStream_t stream)
      : limits_(limits), vocab_size_(vocab_size), stream_(stream) {}

  // Room for so many candidates of each row; what is captured before may be forgotten. Throws Error where the
  // vocabulary has not so many tokens.
  void reserve(int count);

  // Keep what the host gives for a step, and enqueue `work`, captured, between what that makes of the inputs and the
  // candidates of the logits that `work` returns.
  template <typename Work>
  void run(const BeamStep& step, const BeamInputs& inputs, Work&& work) {
    give(step);
    graphs_.run({step.batch, step.beam, step.count}, stream_, 1, [&] {
      follow(step, inputs);
      find(work(), step.count);
    });
  }

  // Enqueue the choice of the likeliest tokens of each row of logits, [rows, width], at most max_batch of them.
  void find(const Tensor& logits, int count);
  // What was found, [rows, count] each, once the stream has ended.
  void read(int rows, int count, int32_t* tokens, float* log_probs) const;

 private:
  struct Room {
    Room(int rows, int vocab, int count);

    int count;
    DeviceBuffer given, found, scratch;
    PinnedBuffer host_given, host_found;
  };

  void give(const BeamStep& step);
  void follow(const BeamStep& step, const BeamInputs& inputs);

  const Limits limits_;
  const int vocab_size_;
  const cudaStream_t stream_;
  std::unique_ptr<Room> room_;
  Graphs<std::tuple<int, int, int>> graphs_;  // by batch, beam and count; they know the room
};

}  // namespace llmc
