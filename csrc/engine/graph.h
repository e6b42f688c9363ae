// Work that is enqueued once and from then on launched as a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <map>

namespace llmc {

class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();
  // Does `work`, which enqueues on `stream`, so many times; always the same work.
  void run(cudaStream_t stream, int times, const std::function<void()>& work);

 private:
  cudaGraphExec_t executable_ = nullptr;
};

// A graph for each kind of step, by what its work depends on beside what lies in device memory.
template <typename Key>
class Graphs {
 public:
  void run(const Key& key, cudaStream_t stream, int times, const std::function<void()>& work) {
    graphs_[key].run(stream, times, work);
  }
  // Forget all: they know addresses that are no more. Nothing of theirs may be under way.
  void clear() { graphs_.clear(); }

 private:
  std::map<Key, Graph> graphs_;
};

}  // namespace llmc
