// How the ranks of one host exchange data through each other's memory: packets, which are data and
// epoch in one, and buffers with flags. Compiled for the device, and for the host by a test that
// runs ranks and blocks as threads.
//
// Every rank has one region with the layout of PeerLayout, which all ranks write. A collective has
// an epoch, 1, 2, 3 and so on, counted on the device, so that a captured one advances it, too. An
// epoch uses the half epoch % 2 of the region. A rank begins epoch e + 2 after it has received from
// all ranks in e + 1, which they have begun after their reads of e. So two halves are enough, and
// nothing is reset between collectives.
//
// Each thread writes to all peers before it waits for any, and grids fit the device, so ranks wait
// for each other's launches only. A host that stops waiting sets `abort`; results are undefined
// then.
#pragma once

#include <cstdint>

#include "peer_group.h"

#if defined(__CUDACC__)
#define LLMC_PEER __device__ __forceinline__
#else
#define LLMC_PEER inline
#endif

namespace llmc::kernels::peer {

// Sixteen bytes, of elements or of a packet.
struct alignas(16) Words {
  uint32_t data[4];
};

// In the functions below, kMost is a constant that the number of ranks does not exceed.

// Polls between two looks at the rank's `aborted`, and at the host's `abort`, which is far away.
constexpr uint32_t kPollsOfDevice = 1 << 8, kPollsOfHost = 1 << 16;

// Writes data and epoch to a packet of a peer. Each half of a packet is written and read at once,
// as in NCCL's protocol LL. On the host a packet also orders what is before it and after it, as on
// the device reads that ended before a kernel began do not see what that kernel's packets permit.
LLMC_PEER void write_packet(Words* at, uint32_t first, uint32_t second, uint32_t epoch) {
#if defined(__CUDACC__)
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(first),
               "r"(epoch), "r"(second), "r"(epoch)
               : "memory");
#else
  auto* halves = reinterpret_cast<uint64_t*>(at);
  __atomic_store_n(halves, first | uint64_t{epoch} << 32, __ATOMIC_RELEASE);
  __atomic_store_n(halves + 1, second | uint64_t{epoch} << 32, __ATOMIC_RELEASE);
#endif
}

// Reads a packet; returns whether it has this epoch.
LLMC_PEER bool read_packet(const Words* from, uint32_t& first, uint32_t& second, uint32_t epoch) {
  uint32_t epochs[2];
#if defined(__CUDACC__)
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(first), "=r"(epochs[0]), "=r"(second), "=r"(epochs[1])
               : "l"(from)
               : "memory");
#else
  const auto* halves = reinterpret_cast<const uint64_t*>(from);
  const uint64_t low = __atomic_load_n(halves, __ATOMIC_ACQUIRE),
                 high = __atomic_load_n(halves + 1, __ATOMIC_ACQUIRE);
  first = static_cast<uint32_t>(low), epochs[0] = low >> 32;
  second = static_cast<uint32_t>(high), epochs[1] = high >> 32;
#endif
  return epochs[0] == epoch && epochs[1] == epoch;
}

// Raises a peer's flag after everything that the block has written.
LLMC_PEER void raise_flag(uint32_t* flag, uint32_t epoch) {
#if defined(__CUDACC__)
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
#else
  __atomic_store_n(flag, epoch, __ATOMIC_RELEASE);
#endif
}

LLMC_PEER uint32_t read_flag(const uint32_t* flag) {
#if defined(__CUDACC__)
  uint32_t epoch;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(epoch) : "l"(flag) : "memory");
  return epoch;
#else
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
#endif
}

LLMC_PEER uint32_t read_word(const uint32_t* word) {
#if defined(__CUDACC__)
  return *static_cast<const volatile uint32_t*>(word);
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

LLMC_PEER void write_word(uint32_t* word, uint32_t value) {
#if defined(__CUDACC__)
  *static_cast<volatile uint32_t*>(word) = value;
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

// Adds 1; returns the value before.
LLMC_PEER uint32_t increment(uint32_t* word) {
#if defined(__CUDACC__)
  return atomicAdd(word, 1u);
#else
  return __atomic_fetch_add(word, 1u, __ATOMIC_ACQ_REL);
#endif
}

// Polls until `is_ready` or the end of waiting.
template <typename IsReady>
LLMC_PEER void wait_until(const PeerGroup& peers, IsReady&& is_ready) {
  for (uint32_t polls = 1; !is_ready(); ++polls) {
    if (polls % kPollsOfDevice == 0 && read_word(&peers.state->aborted) != 0) return;
    if (polls % kPollsOfHost == 0 && read_word(peers.abort) != 0)
      write_word(&peers.state->aborted, 1);
  }
}

// A collective as one block sees it. Cta: thread() of threads(), block() of blocks(), and sync().
template <typename Cta>
class Collective {
 public:
  // All earlier kernels of the rank must have completed.
  LLMC_PEER Collective(const PeerGroup& peers, const Cta& cta)
      : peers_(peers), cta_(cta), epoch_(read_word(&peers.state->epoch) + 1) {}

  // The thread's elements of an array that the grid shares: first(), then every stride()-th.
  LLMC_PEER int64_t first() const { return int64_t{cta_.block()} * cta_.threads() + cta_.thread(); }
  LLMC_PEER int64_t stride() const { return int64_t{cta_.blocks()} * cta_.threads(); }

  // Sends element `i` of `count` to all peers by two packets, which lie in two planes so that
  // adjacent threads write adjacent packets.
  LLMC_PEER void send_packets(const Words& words, int64_t i, int64_t count) const {
    for (int step = 1; step < peers_.size; ++step) {
      Words* packets = packets_of((peers_.rank + step) % peers_.size, peers_.rank);
      write_packet(packets + i, words.data[0], words.data[1], epoch_);
      write_packet(packets + count + i, words.data[2], words.data[3], epoch_);
    }
  }

  // Waits for element `i` of each rank. words[rank] keeps its value for this rank itself.
  template <int kMost>
  LLMC_PEER void receive_packets(Words (&words)[kMost], int64_t i, int64_t count) const {
    wait_until(peers_, [&] {
      bool ready = true;
#pragma unroll
      for (int rank = 0; rank < kMost; ++rank) {
        if (rank >= peers_.size || rank == peers_.rank) continue;
        const Words* packets = packets_of(peers_.rank, rank);
        uint32_t* data = words[rank].data;
        ready &= read_packet(packets + i, data[0], data[1], epoch_);
        ready &= read_packet(packets + count + i, data[2], data[3], epoch_);
      }
      return ready;
    });
  }

  // Sixteen-byte elements of the buffer of a rank, which all ranks write.
  LLMC_PEER Words* buffer_of(int rank) const {
    return reinterpret_cast<Words*>(peers_.regions[rank] + peers_.layout.buffer(epoch_ % 2));
  }

  // Reports to the same block of each peer that this block has written to its buffer in a phase,
  // and waits for their reports.
  LLMC_PEER void meet(int phase) const {
    cta_.sync();
    for (int rank = cta_.thread(); rank < peers_.size; rank += cta_.threads())
      if (rank != peers_.rank) raise_flag(flag_of(rank, phase, peers_.rank), epoch_);
    for (int rank = cta_.thread(); rank < peers_.size; rank += cta_.threads()) {
      if (rank == peers_.rank) continue;
      const uint32_t* flag = flag_of(peers_.rank, phase, rank);
      wait_until(peers_, [&] { return read_flag(flag) == epoch_; });
    }
    cta_.sync();
  }

  // Ends the epoch, once all blocks are here.
  LLMC_PEER void finish() const {
    cta_.sync();
    if (cta_.thread() != 0) return;
    if (increment(&peers_.state->finished) + 1 < static_cast<uint32_t>(cta_.blocks())) return;
    write_word(&peers_.state->finished, 0);
    write_word(&peers_.state->epoch, epoch_);
  }

 private:
  // Packets in the memory of rank `at` that rank `from` writes.
  LLMC_PEER Words* packets_of(int at, int from) const {
    return reinterpret_cast<Words*>(peers_.regions[at] + peers_.layout.packets(epoch_ % 2, from));
  }
  LLMC_PEER uint32_t* flag_of(int at, int phase, int from) const {
    return reinterpret_cast<uint32_t*>(peers_.regions[at] +
                                       peers_.layout.flag(epoch_ % 2, phase, from, cta_.block()));
  }

  const PeerGroup& peers_;
  const Cta& cta_;
  const uint32_t epoch_;
};

// Elements of `bytes`, the last of them maybe in part.
LLMC_PEER int64_t words_of(int64_t bytes) { return (bytes + 15) / 16; }

// Element `i` of an array of `bytes`, with zeros after its end; and its store.
LLMC_PEER Words load_words(const void* from, int64_t i, int64_t bytes) {
  if (16 * i + 16 <= bytes) return static_cast<const Words*>(from)[i];
  Words words{};
  const auto* own = static_cast<const uint8_t*>(from);
  for (int64_t k = 16 * i; k < bytes; ++k)
    words.data[(k - 16 * i) / 4] |= uint32_t{own[k]} << 8 * (k % 4);
  return words;
}
LLMC_PEER void store_words(void* to, int64_t i, int64_t bytes, const Words& words) {
  if (16 * i + 16 <= bytes) {
    static_cast<Words*>(to)[i] = words;
    return;
  }
  for (int64_t k = 16 * i; k < bytes; ++k)
    static_cast<uint8_t*>(to)[k] =
        static_cast<uint8_t>(words.data[(k - 16 * i) / 4] >> 8 * (k % 4));
}

// The sum of the elements of `size` ranks, in float32 and in the order of ranks, so that all ranks
// have the same bits. Sum: add(total, words) and round(total).
template <typename Sum, int kMost>
LLMC_PEER Words sum_words(const Words (&words)[kMost], int size) {
  typename Sum::Total total{};
#pragma unroll
  for (int rank = 0; rank < kMost; ++rank)
    if (rank < size) Sum::add(total, words[rank]);
  return Sum::round(total);
}

// y = the sum of x over ranks, `bytes` each: every rank sends x to all others. One way over the
// link, size - 1 times the data, doubled by the epochs.
template <typename Sum, int kMost, typename Cta>
LLMC_PEER void one_shot(const PeerGroup& peers, const Cta& cta, void* y, const void* x,
                        int64_t bytes) {
  const Collective<Cta> collective(peers, cta);
  const int64_t count = words_of(bytes);
  for (int64_t i = collective.first(); i < count; i += collective.stride())
    collective.send_packets(load_words(x, i, bytes), i, count);
  for (int64_t i = collective.first(); i < count; i += collective.stride()) {
    Words words[kMost];
    const Words own = load_words(x, i, bytes);
#pragma unroll
    for (int rank = 0; rank < kMost; ++rank)
      if (rank == peers.rank) words[rank] = own;
    collective.receive_packets(words, i, count);
    store_words(y, i, bytes, sum_words<Sum>(words, peers.size));
  }
  collective.finish();
}

// Elements of x that one rank sums in two_shot().
LLMC_PEER int64_t chunk_of(int64_t bytes, int size) { return (words_of(bytes) + size - 1) / size; }

// The same: each rank sums a chunk of x and sends the sum to all others. Two ways over the link,
// twice (size - 1) / size of the data. Chunk c of rank r is at c of the buffer of rank c; the sums
// follow.
template <typename Sum, int kMost, typename Cta>
LLMC_PEER void two_shot(const PeerGroup& peers, const Cta& cta, void* y, const void* x,
                        int64_t bytes) {
  const Collective<Cta> collective(peers, cta);
  const int size = peers.size, own = peers.rank;
  const int64_t count = words_of(bytes), chunk = chunk_of(bytes, size);
  const Words* received = collective.buffer_of(own);
  for (int step = 1; step < size; ++step) {
    const int rank = (own + step) % size;
    Words* buffer = collective.buffer_of(rank) + own * chunk;
    for (int64_t i = collective.first(); i < chunk && rank * chunk + i < count;
         i += collective.stride())
      buffer[i] = load_words(x, rank * chunk + i, bytes);
  }
  collective.meet(0);
  for (int64_t i = collective.first(); i < chunk && own * chunk + i < count;
       i += collective.stride()) {
    Words words[kMost];
#pragma unroll
    for (int rank = 0; rank < kMost; ++rank)
      if (rank < size)
        words[rank] =
            rank == own ? load_words(x, own * chunk + i, bytes) : received[rank * chunk + i];
    const Words sum = sum_words<Sum>(words, size);
    for (int step = 1; step < size; ++step)
      collective.buffer_of((own + step) % size)[(size + own) * chunk + i] = sum;
    store_words(y, own * chunk + i, bytes, sum);
  }
  collective.meet(1);
  for (int step = 1; step < size; ++step) {
    const int rank = (own + step) % size;
    for (int64_t i = collective.first(); i < chunk && rank * chunk + i < count;
         i += collective.stride())
      store_words(y, rank * chunk + i, bytes, received[(size + rank) * chunk + i]);
  }
  collective.finish();
}

// Where element `i` of rank's rows [rows, width] belongs in [rows, size, width].
LLMC_PEER int64_t gathered(int64_t i, int rank, int size, int width) {
  const uint32_t row = static_cast<uint32_t>(i) / width, column = static_cast<uint32_t>(i) % width;
  return (int64_t{row} * size + rank) * width + column;
}

// y [rows, size * width] = the columns of all ranks' x [rows, width], in elements of 16 bytes: by
// packets straight into y.
template <int kMost, typename Cta>
LLMC_PEER void gather_packets(const PeerGroup& peers, const Cta& cta, Words* y, const Words* x,
                              int rows, int width) {
  const Collective<Cta> collective(peers, cta);
  const int64_t count = int64_t{rows} * width;
  for (int64_t i = collective.first(); i < count; i += collective.stride()) {
    const Words own = x[i];
    collective.send_packets(own, i, count);
    y[gathered(i, peers.rank, peers.size, width)] = own;
  }
  for (int64_t i = collective.first(); i < count; i += collective.stride()) {
    Words words[kMost];
    collective.receive_packets(words, i, count);
#pragma unroll
    for (int rank = 0; rank < kMost; ++rank)
      if (rank < peers.size && rank != peers.rank)
        y[gathered(i, rank, peers.size, width)] = words[rank];
  }
  collective.finish();
}

// The same through the buffers: half of the bytes over the link, and one more copy on each rank.
template <typename Cta>
LLMC_PEER void gather_buffers(const PeerGroup& peers, const Cta& cta, Words* y, const Words* x,
                              int rows, int width) {
  const Collective<Cta> collective(peers, cta);
  const int64_t count = int64_t{rows} * width;
  for (int64_t i = collective.first(); i < count; i += collective.stride()) {
    const Words own = x[i];
    for (int step = 1; step < peers.size; ++step)
      collective.buffer_of((peers.rank + step) % peers.size)[peers.rank * count + i] = own;
    y[gathered(i, peers.rank, peers.size, width)] = own;
  }
  collective.meet(0);
  const Words* received = collective.buffer_of(peers.rank);
  for (int step = 1; step < peers.size; ++step) {
    const int rank = (peers.rank + step) % peers.size;
    for (int64_t i = collective.first(); i < count; i += collective.stride())
      y[gathered(i, rank, peers.size, width)] = received[rank * count + i];
  }
  collective.finish();
}

}  // namespace llmc::kernels::peer
