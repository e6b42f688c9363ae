// The ranks of one host as kernels over peer memory need them: each rank's region, mapped into all
// others, and which kernel a collective uses.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../../kernels/collective/params.h"
#include "plugin.h"

namespace llmc {

// How a collective is done. kPackets and kBuffers are the one-shot and two-shot all-reduce, and the
// two all-gathers of kernels/collective/params.h.
enum class CollectiveWay { kPackets, kBuffers, kNccl };

// The collectives of a rank over peer memory. Construct it on every rank, exchange the addresses,
// and connect. All ranks then enqueue the same collectives in the same order.
class Peers {
 public:
  // Where the region of a rank is, as plain bytes for other processes.
  struct Address {
    uint64_t host, process;  // random numbers, equal within a host and within a process
    uint64_t region;         // valid within the process
    int32_t device;          // likewise
    char bus[16];            // PCI bus id of the device
    cudaIpcMemHandle_t handle;
    kernels::PeerLayout layout;
  };

  // Allocates the region on the current device, and loads the kernels. Throws Error if memory is
  // insufficient.
  Peers(int rank, const kernels::PeerLayout& layout, cudaStream_t stream);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  Address address() const;
  // Maps the regions of all ranks; returns the reason if that is not possible, else "".
  std::string connect(const std::vector<Address>& ranks);

  int rank() const { return group_.rank; }
  int size() const { return group_.size; }
  const kernels::PeerGroup& group() const { return group_; }

  // Whether a collective of `bytes` of x per rank fits.
  bool fits_all_reduce(CollectiveWay way, int64_t bytes) const;
  bool fits_all_gather(CollectiveWay way, int64_t bytes) const;
  // The way of collectives up to a number of bytes of x, the largest number last. Larger ones are
  // left to NCCL. Without a choice kPackets precedes kBuffers.
  using Choices = std::map<int64_t, CollectiveWay>;
  void choose(Choices all_reduces, Choices all_gathers);
  CollectiveWay all_reduce_way(int64_t bytes) const;
  CollectiveWay all_gather_way(int64_t bytes) const;

  // Enqueues a collective; false if it is left to NCCL. See kernels/collective/params.h; x is
  // [rows, width].
  bool all_reduce(DType dtype, void* y, const void* x, int64_t count, cudaStream_t stream) const;
  bool all_gather(DType dtype, void* y, const void* x, int rows, int64_t width,
                  cudaStream_t stream) const;
  // The same with a norm, for sums by packets. False also if what is written overlaps another part
  // of x.
  bool all_reduce_norm(DType dtype, const kernels::AllReduceNormParams& params,
                       cudaStream_t stream) const;
  // Collectives in one way, which must fit.
  void all_reduce_by(CollectiveWay way, DType dtype, void* y, const void* x, int64_t count,
                     cudaStream_t stream) const;
  void all_gather_by(CollectiveWay way, DType dtype, void* y, const void* x, int rows,
                     int64_t width, cudaStream_t stream) const;

  // Ends the waiting of all kernels, now and later, from any thread: results are undefined.
  void abort();
  // Continues after abort(), when no kernel of any rank runs.
  void resume(cudaStream_t stream);
  // Enqueues that epochs begin again at 1. No rank may have a collective in flight until all ranks
  // have done so.
  void reset(cudaStream_t stream);

 private:
  static CollectiveWay way_of(const Choices& choices, int64_t bytes);

  kernels::PeerGroup group_{};
  uint32_t* abort_ = nullptr;  // on the host
  int device_ = 0;
  std::vector<void*> opened_;  // regions of other processes
  bool chosen_ = false;
  Choices all_reduces_, all_gathers_;
};

}  // namespace llmc
