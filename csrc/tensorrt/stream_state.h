// What ops keep between runs. TensorRT gives a plugin a stream and scratch, nothing that lasts.
#pragma once

#include <mutex>

#include "../plugins/common/plugin.h"

namespace llmc::tensorrt {

// Of one stream: what is enqueued there runs in order, and so can share scratch.
struct StreamState {
  Gemm gemm;
  std::unique_ptr<AttentionBackend> attention = make_attention_backend("fastest");
  int32_t* counters = nullptr;
  std::mutex mutex;
};

// Made at the first call for a stream of the current device, which must not be captured then, and never
// freed: the driver may end before static objects do.
StreamState& state_of(cudaStream_t stream);

}  // namespace llmc::tensorrt
