// The ranks of collectives over peer memory, and the layout of the memory that they share. Also
// compiled without CUDA, by a test of protocol.cuh.
#pragma once

#include <cstdint>

namespace llmc::kernels {

constexpr int kMaxPeers = 8;
// Blocks of a collective, few so that waiting leaves the device to others. All are resident.
constexpr int kPeerBlocks = 64, kPeerThreads = 512;

// Device memory of a rank that only the rank itself uses, zero at first.
struct PeerState {
  uint32_t epoch;     // of the last collective
  uint32_t finished;  // blocks of the current one that have ended
  uint32_t aborted;
};

// Offsets in the region of a rank, which the other ranks write. Each half has flags [2, size,
// kPeerBlocks], packets [size, 2 * packet_bytes] and a buffer of buffer_bytes.
struct PeerLayout {
  int size;
  int64_t packet_bytes;  // data of a rank in packets, which take twice as much
  int64_t buffer_bytes;

  bool operator==(const PeerLayout& other) const {
    return size == other.size && packet_bytes == other.packet_bytes &&
           buffer_bytes == other.buffer_bytes;
  }
#if defined(__CUDACC__)
#define LLMC_LAYOUT __host__ __device__
#else
#define LLMC_LAYOUT
#endif
  LLMC_LAYOUT int64_t flag(int half, int phase, int from, int block) const {
    return half * flag_bytes() + 4 * ((int64_t{phase} * size + from) * kPeerBlocks + block);
  }
  LLMC_LAYOUT int64_t packets(int half, int from) const {
    return 2 * flag_bytes() + (int64_t{half} * size + from) * 2 * packet_bytes;
  }
  LLMC_LAYOUT int64_t buffer(int half) const { return packets(2, 0) + half * buffer_bytes; }
  LLMC_LAYOUT int64_t bytes() const { return buffer(2); }
  LLMC_LAYOUT int64_t flag_bytes() const { return int64_t{2} * 4 * size * kPeerBlocks; }
#undef LLMC_LAYOUT
};

// The ranks of a collective as one of them sees them.
struct PeerGroup {
  int rank, size;
  PeerLayout layout;
  char* regions[kMaxPeers];  // of each rank, zero at first; those of others on their devices
  PeerState* state;
  const uint32_t* abort;  // of the host; not 0 ends all waiting
};

}  // namespace llmc::kernels
