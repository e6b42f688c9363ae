// What ops keep between runs. TensorRT gives a plugin a stream and scratch, nothing that lasts.
#pragma once

#include <mutex>

#include "../plugins/common/plugin.h"
#include "library.h"

namespace llmc::tensorrt {

// Of one stream: what is enqueued there runs in order, and so can share scratch.
struct StreamState {
  Gemm gemm;
  Sdpa sdpa;
  int32_t* counters = nullptr;
  std::mutex mutex;
};

// Made at the first call for a stream of the current device, which must not be captured then, and never
// freed: the driver may end before static objects do.
StreamState& state_of(cudaStream_t stream);

// Of the ranks that share the model, on the current device; null until it is set.
ncclComm_t communicator();
void set_communicator(ncclComm_t communicator);

// See llmcSetStep.
struct StepFacts {
  int longest = 0, reach = 0;
  bool indirect = true;
};
StepFacts step();
void set_step(const StepFacts& step);

// Who wants to see what plugins make; see llmcWatch.
struct Watching {
  LlmcWatcher watcher = nullptr;
  void* user = nullptr;
};
Watching watching();
void watch(const Watching& watching);

}  // namespace llmc::tensorrt
