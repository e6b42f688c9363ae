#include "graph.h"

#include "../plugins/common/plugin.h"

namespace llmc {

Graph::~Graph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
}

void Graph::run(cudaStream_t stream, const std::function<void()>& work) {
  if (executable_ != nullptr) {
    check(cudaGraphLaunch(executable_, stream), "launching the CUDA graph of a decode step");
    return;
  }
  work();  // selects GEMMs and loads kernels, which is not possible during capture
  cudaGraph_t captured = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing");
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(stream, &captured);
    if (captured != nullptr) cudaGraphDestroy(captured);
    throw;
  }
  check(cudaStreamEndCapture(stream, &captured), "capturing");
  const cudaError_t status = cudaGraphInstantiate(&executable_, captured, 0);
  cudaGraphDestroy(captured);
  check(status, "instantiating a CUDA graph");
  check(cudaGraphUpload(executable_, stream), "uploading a CUDA graph");
}

}  // namespace llmc
