// All-gather over peer memory: logits of a partitioned LM head. Reads x once and writes y once;
// through the buffers it writes and reads the parts of the others once more.
#include "launch.cuh"

namespace llmc::kernels {
namespace {

using namespace peer;

template <int kMost, bool kBuffers>
__global__ void __launch_bounds__(kPeerThreads)
    all_gather_kernel(__grid_constant__ const PeerGroup peers, Words* y, const Words* x, int rows,
                      int width) {
  device::pdl_wait();
  device::pdl_launch_dependents();
  if constexpr (kBuffers) gather_buffers(peers, DeviceCta(), y, x, rows, width);
  else gather_packets<kMost>(peers, DeviceCta(), y, x, rows, width);
}

template <bool kBuffers>
cudaError_t all_gather(const PeerGroup& peers, void* y, const void* x, int rows, int64_t width,
                       cudaStream_t stream) {
  const int64_t bytes = rows * width;
  const bool fits = kBuffers ? bytes * peers.size <= peers.layout.buffer_bytes
                             : bytes <= peers.layout.packet_bytes;
  if (!fits || width % 16 != 0 || !is_aligned(y, x)) return cudaErrorInvalidValue;
  if (bytes == 0) return cudaSuccess;
  return dispatch_size(peers.size, [&](auto most) {
    return device::launch(all_gather_kernel<most.value, kBuffers>, blocks_of(bytes / 16),
                          kPeerThreads, 0, stream, peers, static_cast<Words*>(y),
                          static_cast<const Words*>(x), rows, static_cast<int>(width / 16));
  });
}

}  // namespace

cudaError_t all_gather_packets(const PeerGroup& peers, void* y, const void* x, int rows,
                               int64_t width, cudaStream_t stream) {
  return all_gather<false>(peers, y, x, rows, width, stream);
}

cudaError_t all_gather_buffers(const PeerGroup& peers, void* y, const void* x, int rows,
                               int64_t width, cudaStream_t stream) {
  return all_gather<true>(peers, y, x, rows, width, stream);
}

cudaError_t load_all_gather(int size) {
  return dispatch_size(size, [](auto most) {
    const cudaError_t first = load_kernel(all_gather_kernel<most.value, false>);
    return first != cudaSuccess ? first : load_kernel(all_gather_kernel<most.value, true>);
  });
}

}  // namespace llmc::kernels
