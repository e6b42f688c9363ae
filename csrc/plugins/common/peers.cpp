#include "peers.h"

#include <fstream>
#include <random>

namespace llmc {
namespace {

// A number that differs between hosts, and changes when one starts; 0 if it is unknown.
uint64_t host_number() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id.empty() ? 0 : std::hash<std::string>()(id);
}

uint64_t process_number() {
  static const uint64_t number = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return number;
}

// The number of a device here; -1 if this process does not see it.
int device_at(const char* bus) {
  int device = -1;
  if (cudaDeviceGetByPCIBusId(&device, bus) == cudaSuccess) return device;
  cudaGetLastError();
  return -1;
}

// The last error as text; clears it.
std::string reason_of(cudaError_t status) {
  cudaGetLastError();
  return cudaGetErrorString(status);
}

}  // namespace

Peers::Peers(int rank, const kernels::PeerLayout& layout, cudaStream_t stream) {
  check(cudaGetDevice(&device_), "querying the device");
  check(kernels::load_collectives(layout.size), "loading the collectives over peer memory");
  group_.rank = rank;
  group_.size = layout.size;
  group_.layout = layout;
  void *region = nullptr, *state = nullptr, *flag = nullptr;
  try {
    check(cudaHostAlloc(&flag, sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable),
          "allocating the flag that ends collectives");
    abort_ = static_cast<uint32_t*>(flag);
    *abort_ = 0;
    check(cudaHostGetDevicePointer(&flag, abort_, 0), "mapping the flag that ends collectives");
    group_.abort = static_cast<const uint32_t*>(flag);
    check(cudaMalloc(&region, layout.bytes()), "allocating the buffers of collectives");
    group_.regions[rank] = static_cast<char*>(region);
    check(cudaMalloc(&state, sizeof(kernels::PeerState)), "allocating the state of collectives");
    group_.state = static_cast<kernels::PeerState*>(state);
    reset(stream);
    check(cudaStreamSynchronize(stream), "clearing the buffers of collectives");
  } catch (...) {
    cudaFree(state);
    cudaFree(region);
    cudaFreeHost(abort_);
    throw;
  }
}

Peers::~Peers() {
  for (void* region : opened_) cudaIpcCloseMemHandle(region);
  cudaFree(group_.state);
  cudaFree(group_.regions[group_.rank]);
  cudaFreeHost(abort_);
}

Peers::Address Peers::address() const {
  Address own{};
  own.host = host_number();
  own.process = process_number();
  own.region = reinterpret_cast<uint64_t>(group_.regions[group_.rank]);
  own.device = device_;
  own.layout = group_.layout;
  check(cudaDeviceGetPCIBusId(own.bus, sizeof own.bus, device_), "querying the device");
  // Without it, other processes cannot open the region, and report that.
  if (cudaIpcGetMemHandle(&own.handle, group_.regions[group_.rank]) != cudaSuccess)
    cudaGetLastError();
  return own;
}

std::string Peers::connect(const std::vector<Address>& ranks) {
  const Address own = address();
  for (int rank = 0; rank < group_.size; ++rank) {
    if (rank == group_.rank) continue;
    const Address& other = ranks[rank];
    const std::string name = "rank " + std::to_string(rank);
    if (own.host == 0 || other.host != own.host) return name + " is on another host";
    if (!(other.layout == own.layout)) return name + " has buffers of other sizes";
    const bool here = other.process == own.process;
    const int device = here ? other.device : device_at(other.bus);
    int accessible = 1;
    if (device >= 0 && device != device_)
      check(cudaDeviceCanAccessPeer(&accessible, device_, device), "querying peer access");
    if (accessible == 0)
      return "GPU " + std::to_string(device_) + " cannot access the memory of GPU " +
             std::to_string(device);
    if (!here) {
      void* region = nullptr;
      const cudaError_t status =
          cudaIpcOpenMemHandle(&region, other.handle, cudaIpcMemLazyEnablePeerAccess);
      if (status != cudaSuccess)
        return "the memory of " + name + " cannot be opened: " + reason_of(status);
      opened_.push_back(region);
      group_.regions[rank] = static_cast<char*>(region);
      continue;
    }
    if (device != device_) {
      const cudaError_t status = cudaDeviceEnablePeerAccess(device, 0);
      if (status != cudaSuccess && status != cudaErrorPeerAccessAlreadyEnabled)
        return "the memory of " + name + " cannot be accessed: " + reason_of(status);
      cudaGetLastError();
    }
    group_.regions[rank] = reinterpret_cast<char*>(other.region);
  }
  return "";
}

bool Peers::fits_all_reduce(CollectiveWay way, int64_t bytes) const {
  const kernels::PeerLayout& layout = group_.layout;
  if (way == CollectiveWay::kPackets) return bytes <= layout.packet_bytes;
  return way == CollectiveWay::kNccl ||
         kernels::two_shot_bytes(bytes, group_.size) <= layout.buffer_bytes;
}

bool Peers::fits_all_gather(CollectiveWay way, int64_t bytes) const {
  const kernels::PeerLayout& layout = group_.layout;
  if (way == CollectiveWay::kPackets) return bytes <= layout.packet_bytes;
  return way == CollectiveWay::kNccl || bytes * group_.size <= layout.buffer_bytes;
}

void Peers::choose(Choices all_reduces, Choices all_gathers) {
  all_reduces_ = std::move(all_reduces);
  all_gathers_ = std::move(all_gathers);
  chosen_ = true;
}

CollectiveWay Peers::way_of(const Choices& choices, int64_t bytes) {
  const auto found = choices.lower_bound(bytes);
  return found == choices.end() ? CollectiveWay::kNccl : found->second;
}

CollectiveWay Peers::all_reduce_way(int64_t bytes) const {
  if (chosen_) return way_of(all_reduces_, bytes);
  if (fits_all_reduce(CollectiveWay::kPackets, bytes)) return CollectiveWay::kPackets;
  return fits_all_reduce(CollectiveWay::kBuffers, bytes) ? CollectiveWay::kBuffers
                                                         : CollectiveWay::kNccl;
}

CollectiveWay Peers::all_gather_way(int64_t bytes) const {
  if (chosen_) return way_of(all_gathers_, bytes);
  if (fits_all_gather(CollectiveWay::kPackets, bytes)) return CollectiveWay::kPackets;
  return fits_all_gather(CollectiveWay::kBuffers, bytes) ? CollectiveWay::kBuffers
                                                         : CollectiveWay::kNccl;
}

namespace {

bool is_aligned(const void* y, const void* x) {
  return (reinterpret_cast<uintptr_t>(y) | reinterpret_cast<uintptr_t>(x)) % 16 == 0;
}

}  // namespace

bool Peers::all_reduce(DType dtype, void* y, const void* x, int64_t count,
                       cudaStream_t stream) const {
  const CollectiveWay way = all_reduce_way(count * width(dtype));
  if (way == CollectiveWay::kNccl || !is_aligned(y, x)) return false;
  all_reduce_by(way, dtype, y, x, count, stream);
  return true;
}

bool Peers::all_gather(DType dtype, void* y, const void* x, int rows, int64_t width,
                       cudaStream_t stream) const {
  const int64_t bytes = width * llmc::width(dtype);
  const CollectiveWay way = all_gather_way(rows * bytes);
  if (way == CollectiveWay::kNccl || bytes % 16 != 0 || !is_aligned(y, x)) return false;
  all_gather_by(way, dtype, y, x, rows, width, stream);
  return true;
}

void Peers::all_reduce_by(CollectiveWay way, DType dtype, void* y, const void* x, int64_t count,
                          cudaStream_t stream) const {
  auto* launch =
      way == CollectiveWay::kPackets ? kernels::one_shot_all_reduce : kernels::two_shot_all_reduce;
  check(launch(dtype, group_, y, x, count, stream), "an all-reduce over peer memory");
}

void Peers::all_gather_by(CollectiveWay way, DType dtype, void* y, const void* x, int rows,
                          int64_t width, cudaStream_t stream) const {
  auto* launch =
      way == CollectiveWay::kPackets ? kernels::all_gather_packets : kernels::all_gather_buffers;
  check(launch(group_, y, x, rows, width * llmc::width(dtype), stream),
        "an all-gather over peer memory");
}

bool Peers::all_reduce_norm(DType dtype, const kernels::AllReduceNormParams& p,
                            cudaStream_t stream) const {
  const int64_t element = width(dtype), row = p.hidden * element;
  if (all_reduce_way(p.rows * row) != CollectiveWay::kPackets || row % 16 != 0 ||
      p.hidden > kernels::max_reduced_hidden(element) || !is_aligned(p.y, p.x) ||
      !is_aligned(p.normed, p.residual) || !is_aligned(p.sum, nullptr))
    return false;
  const auto overlaps = [&](const void* written) {
    const auto first = reinterpret_cast<uintptr_t>(written), x = reinterpret_cast<uintptr_t>(p.x);
    const auto bytes = static_cast<uintptr_t>(p.rows * row);
    return first != x && first < x + bytes && x < first + bytes;
  };
  if (overlaps(p.normed) || (p.sum != nullptr && overlaps(p.sum))) return false;
  check(kernels::all_reduce_norm(dtype, group_, p, stream), "an all-reduce with a norm");
  return true;
}

void Peers::abort() { __atomic_store_n(abort_, 1u, __ATOMIC_SEQ_CST); }

void Peers::resume(cudaStream_t stream) {
  __atomic_store_n(abort_, 0u, __ATOMIC_SEQ_CST);
  reset(stream);
}

void Peers::reset(cudaStream_t stream) {
  check(cudaMemsetAsync(group_.regions[group_.rank], 0, group_.layout.bytes(), stream),
        "clearing the buffers of collectives");
  check(cudaMemsetAsync(group_.state, 0, sizeof(kernels::PeerState), stream),
        "clearing the state of collectives");
}

}  // namespace llmc
