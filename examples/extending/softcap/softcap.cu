// Reads x and writes y, 4 bytes per element each. A thread has one element.
#include <cuda_runtime.h>

namespace {

__global__ void softcap_kernel(float* y, const float* x, float cap, long long size) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < size) y[i] = cap * tanhf(x[i] / cap);
}

}  // namespace

cudaError_t softcap(float* y, const float* x, float cap, long long size, cudaStream_t stream) {
  constexpr int kThreads = 256;
  softcap_kernel<<<(size + kThreads - 1) / kThreads, kThreads, 0, stream>>>(y, x, cap, size);
  return cudaGetLastError();
}
