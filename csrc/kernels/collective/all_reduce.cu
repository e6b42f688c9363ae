// All-reduce over peer memory. Reads x once from memory and writes y once; one_shot() and
// two_shot() in protocol.cuh state what passes over the links. Bound by latency for few rows.
#include "launch.cuh"

namespace llmc::kernels {
namespace {

using namespace peer;

template <typename T, int kMost, bool kTwoShot>
__global__ void __launch_bounds__(kPeerThreads)
    all_reduce_kernel(__grid_constant__ const PeerGroup peers, void* y, const void* x,
                      int64_t bytes) {
  device::pdl_wait();
  device::pdl_launch_dependents();
  if constexpr (kTwoShot) two_shot<SumOf<T>, kMost>(peers, DeviceCta(), y, x, bytes);
  else one_shot<SumOf<T>, kMost>(peers, DeviceCta(), y, x, bytes);
}

template <bool kTwoShot>
cudaError_t all_reduce(DType dtype, const PeerGroup& peers, void* y, const void* x, int64_t count,
                       cudaStream_t stream) {
  return device::dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    const bool fits = kTwoShot ? two_shot_bytes(bytes, peers.size) <= peers.layout.buffer_bytes
                               : bytes <= peers.layout.packet_bytes;
    if (!fits || !is_aligned(y, x)) return cudaErrorInvalidValue;
    if (count == 0) return cudaSuccess;
    const int64_t words = (bytes + 15) / 16;
    return dispatch_size(peers.size, [&](auto most) {
      return device::launch(all_reduce_kernel<T, most.value, kTwoShot>,
                            blocks_of(kTwoShot ? (words + peers.size - 1) / peers.size : words),
                            kPeerThreads, 0, stream, peers, y, x, bytes);
    });
  });
}

}  // namespace

cudaError_t one_shot_all_reduce(DType dtype, const PeerGroup& peers, void* y, const void* x,
                                int64_t count, cudaStream_t stream) {
  return all_reduce<false>(dtype, peers, y, x, count, stream);
}

cudaError_t two_shot_all_reduce(DType dtype, const PeerGroup& peers, void* y, const void* x,
                                int64_t count, cudaStream_t stream) {
  return all_reduce<true>(dtype, peers, y, x, count, stream);
}

cudaError_t load_collectives(int size) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const cudaError_t status = device::dispatch_dtype(dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      return dispatch_size(size, [](auto most) {
        const cudaError_t first = load_kernel(all_reduce_kernel<T, most.value, false>);
        return first != cudaSuccess ? first : load_kernel(all_reduce_kernel<T, most.value, true>);
      });
    });
    if (status != cudaSuccess) return status;
  }
  const cudaError_t status = load_all_reduce_norm(size);
  return status != cudaSuccess ? status : load_all_gather(size);
}

}  // namespace llmc::kernels
