#include "stream_state.h"

#include <map>

#include "../plugins/common/timing.h"

namespace llmc::tensorrt {
namespace {

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  return device;
}

}  // namespace

StreamState& state_of(cudaStream_t stream) {
  static std::mutex mutex;
  static auto* all = new std::map<std::pair<int, cudaStream_t>, std::unique_ptr<StreamState>>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& state = (*all)[{current_device(), stream}];
  if (state == nullptr) {
    if (is_captured(stream))
      throw Error("a stream is captured before llmc's plugins ran on it; run a step first");
    auto made = std::make_unique<StreamState>();
    check(cudaMalloc(&made->counters, kCounters * sizeof(int32_t)), "allocating counters");
    check(cudaMemsetAsync(made->counters, 0, kCounters * sizeof(int32_t), stream),
          "clearing counters");
    state = std::move(made);
  }
  return *state;
}

}  // namespace llmc::tensorrt
