// Connects the ranks of a communicator over peer memory, and times which way of each collective is
// the fastest. All ranks call each function at the same time.
#pragma once

#include <string>

#include "../plugins/common/peers.h"

namespace llmc {

// The largest collectives of a program: bytes of x of an all-reduce; rows and elements per row of x
// of an all-gather. 0: the program has no such collective.
struct CollectiveSizes {
  DType dtype = DType::kFloat32;
  int64_t reduced_bytes = 0;
  int gathered_rows = 0;
  int64_t gathered_width = 0;
};

// A region for these sizes, as far as buffers have room for them.
kernels::PeerLayout layout_of(const CollectiveSizes& sizes, int ranks);

// Exchanges the addresses of the ranks and maps their regions; peers is null on a rank that could
// not allocate its region. Then computes two sums, and waits for them for a limited time. Returns
// "" on all ranks, or on each the reason why this is not possible.
std::string connect(Peers* peers, int rank, int ranks, ncclComm_t communicator,
                    cudaStream_t stream);

// Times all ways of collectives of these sizes inside CUDA graphs, those of NCCL only `with_nccl`.
// All ranks make the same choices.
void choose_ways(Peers& peers, const CollectiveSizes& sizes, bool with_nccl,
                 ncclComm_t communicator, cudaStream_t stream);

// Enqueues that epochs begin again at 1.
void reset(Peers& peers, ncclComm_t communicator, cudaStream_t stream);

}  // namespace llmc
