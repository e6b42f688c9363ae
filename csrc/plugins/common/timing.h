// Timing of device work, for choices between kernels.
#pragma once

#include <algorithm>
#include <vector>

#include "plugin.h"

namespace llmc {

// Whether the stream is being captured, so that nothing may synchronize it.
inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "querying a stream's capture status");
  return status != cudaStreamCaptureStatusNone;
}

struct Timer {
  Timer() {
    check(cudaEventCreate(&start), "an event");
    check(cudaEventCreate(&end), "an event");
  }
  ~Timer() {
    cudaEventDestroy(start);
    cudaEventDestroy(end);
  }
  Timer(const Timer&) = delete;
  cudaEvent_t start = nullptr, end = nullptr;
};

// Milliseconds of work with a cold L2 cache, as in a model: before each run `room` bytes at
// `swept`, more than the cache has, are written. The median of `repeats` runs after the first.
// Synchronizes the stream.
template <typename Work>
float time_cold(cudaStream_t stream, int repeats, void* swept, size_t room, Work&& work) {
  Timer timer;
  std::vector<float> times;
  for (int i = 0; i <= repeats; ++i) {
    check(cudaMemsetAsync(swept, i, room, stream), "flushing the L2 cache");
    check(cudaEventRecord(timer.start, stream), "an event");
    work();
    check(cudaEventRecord(timer.end, stream), "an event");
    check(cudaEventSynchronize(timer.end), "waiting for kernels");
    times.push_back(0);
    check(cudaEventElapsedTime(&times.back(), timer.start, timer.end), "timing");
  }
  std::sort(times.begin() + 1, times.end());
  return times[1 + repeats / 2];
}

// Milliseconds per run of `repeats` runs after a first one. Synchronizes the stream.
template <typename Work>
float time_on(cudaStream_t stream, int repeats, Work&& work) {
  Timer timer;
  work();
  check(cudaEventRecord(timer.start, stream), "an event");
  for (int i = 0; i < repeats; ++i) work();
  check(cudaEventRecord(timer.end, stream), "an event");
  check(cudaStreamSynchronize(stream), "waiting for kernels");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, timer.start, timer.end), "timing");
  return repeats > 0 ? milliseconds / static_cast<float>(repeats) : 0;
}

}  // namespace llmc
