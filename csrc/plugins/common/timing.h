// How long device work takes, for those who choose between kernels by measurement.
#pragma once

#include "plugin.h"

namespace llmc {

// Whether this stream is being captured, when nothing may wait for it.
inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "asking for a stream's state");
  return status != cudaStreamCaptureStatusNone;
}

// Enqueue work once and then `repeats` times more; milliseconds per run of these. Waits for the stream.
template <typename Work>
float time_on(cudaStream_t stream, int repeats, Work&& work) {
  struct Event {
    Event() { check(cudaEventCreate(&handle), "an event"); }
    ~Event() { cudaEventDestroy(handle); }
    cudaEvent_t handle = nullptr;
  } start, end;
  work();
  check(cudaEventRecord(start.handle, stream), "an event");
  for (int i = 0; i < repeats; ++i) work();
  check(cudaEventRecord(end.handle, stream), "an event");
  check(cudaStreamSynchronize(stream), "waiting for kernels");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, start.handle, end.handle), "timing");
  return repeats > 0 ? milliseconds / static_cast<float>(repeats) : 0;
}

}  // namespace llmc
