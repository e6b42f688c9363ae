// Work that is enqueued once and from then on launched as a CUDA graph.
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
  // Does `work`, which enqueues on `stream`; always the same work.
  void run(cudaStream_t stream, const std::function<void()>& work);

 private:
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace llmc
