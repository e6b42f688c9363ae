#include "join_peers.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "../kernels/rowwise/params.h"
#include "../plugins/common/collective.h"
#include "../plugins/common/timing.h"
#include "graph.h"
#include "memory.h"

namespace llmc {
namespace {

// Data of a rank in packets: the sums of 64 rows of 4,096 16-bit elements.
constexpr int64_t kPacketBytes = 512 << 10;
// Of a buffer; there are two. Larger collectives are bound by the links, which NCCL uses well.
constexpr int64_t kMaxBufferBytes = 32 << 20;
// The time that the first sums of the ranks may take.
constexpr std::chrono::seconds kPatience{10};

// Timing: collectives of a graph, launches of the graph, the smallest sum, and the fraction of the
// time of the one-shot way that another has to save.
constexpr int kCollectives = 10, kLaunches = 5;
constexpr int64_t kSmallest = 1 << 10;
constexpr float kSaved = 0.05f;

int64_t rounded_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// What every rank has, in the order of ranks.
template <typename T>
std::vector<T> gather(const T& own, int ranks, ncclComm_t communicator, cudaStream_t stream) {
  DeviceBuffer sent(sizeof(T), "what a rank reports"),
      received(sizeof(T) * ranks, "what ranks report");
  upload(sent.data, &own, sizeof(T), stream);
  check(ncclAllGather(sent.data, received.data, sizeof(T), ncclUint8, communicator, stream),
        "gathering what ranks report");
  std::vector<T> all(ranks);
  check(
      cudaMemcpyAsync(all.data(), received.data, sizeof(T) * ranks, cudaMemcpyDeviceToHost, stream),
      "gathering what ranks report");
  check(cudaStreamSynchronize(stream), "gathering what ranks report");
  return all;
}

// The reason of this rank, or that another one has a reason; "" if no rank has.
std::string agree(const std::string& reason, int ranks, ncclComm_t communicator,
                  cudaStream_t stream) {
  const std::vector<char> failed = gather<char>(!reason.empty(), ranks, communicator, stream);
  const auto first = std::find(failed.begin(), failed.end(), 1);
  if (!reason.empty() || first == failed.end()) return reason;
  return "rank " + std::to_string(first - failed.begin()) + " cannot use the memory of the others";
}

// Waits for enqueued work; false if it takes too long.
bool wait_for(cudaStream_t stream) {
  const auto start = std::chrono::steady_clock::now();
  cudaError_t status = cudaErrorNotReady;
  while ((status = cudaStreamQuery(stream)) == cudaErrorNotReady &&
         std::chrono::steady_clock::now() - start < kPatience)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  if (status != cudaErrorNotReady) check(status, "the first collectives over peer memory");
  return status == cudaSuccess;
}

// Sums r + 1 over ranks r in both ways. Returns the reason if the sums are wrong, else "".
std::string first_sums(Peers& peers, cudaStream_t stream) {
  constexpr int kCount = 1000;
  const std::vector<float> own(kCount, static_cast<float>(peers.rank() + 1));
  DeviceBuffer x(sizeof(float) * kCount, "a sum"), y(sizeof(float) * kCount, "a sum");
  const float sum = static_cast<float>(peers.size() * (peers.size() + 1)) / 2;
  upload(x.data, own.data(), sizeof(float) * kCount, stream);
  for (CollectiveWay way : {CollectiveWay::kPackets, CollectiveWay::kBuffers}) {
    check(cudaMemsetAsync(y.data, 0, sizeof(float) * kCount, stream), "a sum");
    peers.all_reduce_by(way, DType::kFloat32, y.data, x.data, kCount, stream);
    if (!wait_for(stream)) {
      peers.abort();
      check(cudaStreamSynchronize(stream), "a sum");
      return "the data of other ranks do not arrive";
    }
    std::vector<float> found(kCount);
    check(cudaMemcpyAsync(found.data(), y.data, sizeof(float) * kCount, cudaMemcpyDeviceToHost,
                          stream),
          "a sum");
    check(cudaStreamSynchronize(stream), "a sum");
    if (!std::all_of(found.begin(), found.end(), [&](float one) { return one == sum; }))
      return "the data of other ranks arrive wrong";
  }
  return "";
}

// Milliseconds of a collective in a captured step, of the slowest rank.
template <typename Work>
float time_captured(ncclComm_t communicator, cudaStream_t stream, Work&& work) {
  Graph graph;
  const auto collectives = [&] {
    for (int i = 0; i < kCollectives; ++i) work();
  };
  graph.run(stream, collectives);  // captures
  Timer timer;
  float shortest = 0;
  for (int launch = 0; launch < kLaunches; ++launch) {
    check(cudaEventRecord(timer.start, stream), "an event");
    graph.run(stream, collectives);
    check(cudaEventRecord(timer.end, stream), "an event");
    check(cudaEventSynchronize(timer.end), "waiting for collectives");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, timer.start, timer.end), "timing");
    shortest = launch == 0 ? milliseconds : std::min(shortest, milliseconds);
  }
  DeviceBuffer slowest(sizeof(float), "times of ranks");
  upload(slowest.data, &shortest, sizeof(float), stream);
  check(ncclAllReduce(slowest.data, slowest.data, 1, ncclFloat32, ncclMax, communicator, stream),
        "gathering times");
  check(cudaMemcpyAsync(&shortest, slowest.data, sizeof(float), cudaMemcpyDeviceToHost, stream),
        "gathering times");
  check(cudaStreamSynchronize(stream), "gathering times");
  return shortest / kCollectives;
}

// The fastest of the ways that fit; the one-shot way unless another is clearly faster. Fits and
// times are equal on all ranks.
template <typename Fits, typename Time>
CollectiveWay fastest(bool with_nccl, Fits&& fits, Time&& time) {
  CollectiveWay best = CollectiveWay::kNccl;
  float shortest = 0;
  for (CollectiveWay way :
       {CollectiveWay::kPackets, CollectiveWay::kBuffers, CollectiveWay::kNccl}) {
    if (!fits(way) || (way == CollectiveWay::kNccl && !with_nccl)) continue;
    const float milliseconds = time(way);
    if (shortest > 0 && milliseconds >= (1 - kSaved) * shortest) continue;
    best = way;
    shortest = milliseconds;
  }
  return best;
}

Peers::Choices choose_all_reduces(const Peers& peers, const CollectiveSizes& sizes, bool with_nccl,
                                  ncclComm_t communicator, cudaStream_t stream) {
  Peers::Choices choices;
  const int64_t room = peers.group().layout.buffer_bytes / 2 - 16 * peers.size();
  const int64_t most = std::min(sizes.reduced_bytes, room / 16 * 16);
  if (most <= 0) return choices;
  DeviceBuffer x(most, "timing collectives"), y(most, "timing collectives");
  check(cudaMemsetAsync(x.data, 0, most, stream), "timing collectives");
  for (int64_t bytes = std::min(kSmallest, most);; bytes = std::min(2 * bytes, most)) {
    const int64_t count = bytes / width(sizes.dtype);
    choices[bytes] = fastest(
        with_nccl, [&](CollectiveWay way) { return peers.fits_all_reduce(way, bytes); },
        [&](CollectiveWay way) {
          return time_captured(communicator, stream, [&] {
            if (way != CollectiveWay::kNccl)
              return peers.all_reduce_by(way, sizes.dtype, y.data, x.data, count, stream);
            check(ncclAllReduce(x.data, y.data, count, nccl_type(sizes.dtype), ncclSum,
                                communicator, stream),
                  "timing collectives");
          });
        });
    if (bytes == most) return choices;
  }
}

Peers::Choices choose_all_gathers(const Peers& peers, const CollectiveSizes& sizes, bool with_nccl,
                                  ncclComm_t communicator, cudaStream_t stream) {
  Peers::Choices choices;
  const int64_t row = sizes.gathered_width * width(sizes.dtype);
  if (row == 0 || row % 16 != 0) return choices;
  const int ranks = peers.size();
  const auto most = static_cast<int>(
      std::min<int64_t>(sizes.gathered_rows, peers.group().layout.buffer_bytes / (ranks * row)));
  if (most == 0) return choices;
  DeviceBuffer x(most * row, "timing collectives"), y(most * row * ranks, "timing collectives"),
      parts(most * row * ranks, "timing collectives");
  check(cudaMemsetAsync(x.data, 0, most * row, stream), "timing collectives");
  for (int rows = 1;; rows = std::min(2 * rows, most)) {
    const int64_t columns = sizes.gathered_width;
    choices[rows * row] = fastest(
        with_nccl, [&](CollectiveWay way) { return peers.fits_all_gather(way, rows * row); },
        [&](CollectiveWay way) {
          return time_captured(communicator, stream, [&] {
            if (way != CollectiveWay::kNccl)
              return peers.all_gather_by(way, sizes.dtype, y.data, x.data, rows, columns, stream);
            check(ncclAllGather(x.data, parts.data, rows * columns, nccl_type(sizes.dtype),
                                communicator, stream),
                  "timing collectives");
            check(kernels::interleave(sizes.dtype, y.data, parts.data, ranks, rows,
                                      static_cast<int>(columns), stream),
                  "timing collectives");
          });
        });
    if (rows == most) return choices;
  }
}

}  // namespace

kernels::PeerLayout layout_of(const CollectiveSizes& sizes, int ranks) {
  const int64_t gathered = sizes.gathered_rows * sizes.gathered_width * width(sizes.dtype);
  const int64_t wanted =
      std::max(kernels::two_shot_bytes(sizes.reduced_bytes, ranks), gathered * ranks);
  return {ranks, kPacketBytes,
          std::clamp(rounded_up(wanted), rounded_up(kPacketBytes), kMaxBufferBytes)};
}

std::string connect(Peers* peers, int rank, int ranks, ncclComm_t communicator,
                    cudaStream_t stream) {
  struct Report {
    bool has_region;
    Peers::Address address;
  };
  Report own{};
  own.has_region = peers != nullptr;
  if (peers != nullptr) own.address = peers->address();
  const std::vector<Report> reports = gather(own, ranks, communicator, stream);
  std::vector<Peers::Address> addresses;
  std::string reason;
  for (int other = 0; other < ranks; ++other) {
    addresses.push_back(reports[other].address);
    if (!reports[other].has_region)
      reason = "rank " + std::to_string(other) + " has no memory for the buffers of collectives";
  }
  if (!reason.empty()) return reason;  // on all ranks
  reason = agree(peers->connect(addresses), ranks, communicator, stream);
  if (!reason.empty()) return reason;
  return agree(first_sums(*peers, stream), ranks, communicator, stream);
}

void choose_ways(Peers& peers, const CollectiveSizes& sizes, bool with_nccl,
                 ncclComm_t communicator, cudaStream_t stream) {
  Peers::Choices all_reduces = choose_all_reduces(peers, sizes, with_nccl, communicator, stream);
  peers.choose(std::move(all_reduces),
               choose_all_gathers(peers, sizes, with_nccl, communicator, stream));
}

void reset(Peers& peers, ncclComm_t communicator, cudaStream_t stream) {
  void* word = &peers.group().state->finished;
  const auto wait_for_ranks = [&] {
    check(ncclAllReduce(word, word, 1, ncclUint32, ncclSum, communicator, stream),
          "waiting for other ranks");
  };
  wait_for_ranks();
  peers.reset(stream);
  wait_for_ranks();
}

}  // namespace llmc
