#include "stream_state.h"

#include <map>

#include "../plugins/common/timing.h"

namespace llmc::tensorrt {
namespace {

std::mutex mutex;
Watching watched_by;

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  return device;
}

// By device.
std::map<int, ncclComm_t>& communicators() {
  static auto* all = new std::map<int, ncclComm_t>;
  return *all;
}
std::map<int, StepFacts>& known_steps() {
  static auto* all = new std::map<int, StepFacts>;
  return *all;
}

}  // namespace

StreamState& state_of(cudaStream_t stream) {
  static auto* all = new std::map<std::pair<int, cudaStream_t>, std::unique_ptr<StreamState>>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& state = (*all)[{current_device(), stream}];
  if (state == nullptr) {
    if (is_captured(stream))
      throw Error("a stream is captured before llmc's plugins ran there; run a step first");
    auto made = std::make_unique<StreamState>();
    check(cudaMalloc(&made->counters, kCounters * sizeof(int32_t)), "allocating counters");
    check(cudaMemsetAsync(made->counters, 0, kCounters * sizeof(int32_t), stream), "clearing counters");
    state = std::move(made);
  }
  return *state;
}

ncclComm_t communicator() {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = communicators().find(current_device());
  return found == communicators().end() ? nullptr : found->second;
}

void set_communicator(ncclComm_t communicator) {
  const std::lock_guard<std::mutex> lock(mutex);
  communicators()[current_device()] = communicator;
}

StepFacts step() {
  const std::lock_guard<std::mutex> lock(mutex);
  return known_steps()[current_device()];
}

void set_step(const StepFacts& step) {
  const std::lock_guard<std::mutex> lock(mutex);
  known_steps()[current_device()] = step;
}

Watching watching() {
  const std::lock_guard<std::mutex> lock(mutex);
  return watched_by;
}

void watch(const Watching& watching) {
  const std::lock_guard<std::mutex> lock(mutex);
  watched_by = watching;
}

}  // namespace llmc::tensorrt
