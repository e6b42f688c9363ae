// Work that is captured as a CUDA graph at its first run.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace llmc {

class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();
  // Runs `work`, which enqueues on `stream` and must always be the same.
  void run(cudaStream_t stream, const std::function<void()>& work);

 private:
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace llmc
