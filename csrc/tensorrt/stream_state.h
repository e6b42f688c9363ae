// State of plugins between runs: TensorRT passes a stream and scratch only.
#pragma once

#include <mutex>

#include "../plugins/common/plugin.h"

namespace llmc::tensorrt {

// State of one stream, whose work runs in order and so can share scratch.
struct StreamState {
  Gemm gemm;
  std::unique_ptr<AttentionBackend> attention = make_attention_backend("fastest");
  int32_t* counters = nullptr;
  std::mutex mutex;
};

// Created at the first call for a stream of the current device, which must not be capturing then.
// Never freed: the driver may shut down before static objects.
StreamState& state_of(cudaStream_t stream);

}  // namespace llmc::tensorrt
