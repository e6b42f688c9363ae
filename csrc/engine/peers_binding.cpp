// Python class of ranks in one process, for tests and benchmarks of collectives. Shapes are
// checked; addresses are not.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <exception>
#include <functional>
#include <thread>

#include "../kernels/rowwise/params.h"
#include "../plugins/common/collective.h"
#include "../plugins/common/timing.h"
#include "binding.h"
#include "graph.h"
#include "memory.h"

namespace nb = nanobind;

namespace llmc {
namespace {

// Where the threads of ranks meet, unless one has failed. Graphs are made before any of them is
// launched: of two ranks on one device, one could otherwise wait for the other's kernels.
class Meeting {
 public:
  explicit Meeting(int expected) : expected_(expected) {}
  void wait() {
    ++arrived_;
    while (arrived_ < expected_ && !failed_) std::this_thread::yield();
  }
  void fail() { failed_ = true; }

 private:
  const int expected_;
  std::atomic<int> arrived_{0};
  std::atomic<bool> failed_{false};
};

// Restores the caller's device.
struct DeviceGuard {
  DeviceGuard() { check(cudaGetDevice(&device), "querying the device"); }
  ~DeviceGuard() { cudaSetDevice(device); }
  DeviceGuard(const DeviceGuard&) = delete;
  int device = 0;
};

// One rank per device of the list, which may name a device twice if grids fit it.
class LocalRanks {
 public:
  LocalRanks(const std::vector<int>& devices, int64_t packet_bytes, int64_t buffer_bytes)
      : devices_(devices) {
    const int size = static_cast<int>(devices.size());
    if (size < 2 || size > kernels::kMaxPeers)
      throw Error(std::to_string(size) + " ranks, expected 2 to " +
                  std::to_string(kernels::kMaxPeers));
    const DeviceGuard guard;
    const kernels::PeerLayout layout{size, packet_bytes, buffer_bytes};
    std::vector<Peers::Address> addresses;
    for (int rank = 0; rank < size; ++rank) {
      check(cudaSetDevice(devices[rank]), "choosing a device");
      streams_.push_back(std::make_unique<Stream>());
      peers_.push_back(std::make_unique<Peers>(rank, layout, streams_.back()->handle));
      addresses.push_back(peers_.back()->address());
    }
    for (int rank = 0; rank < size; ++rank) {
      check(cudaSetDevice(devices[rank]), "choosing a device");
      const std::string reason = peers_[rank]->connect(addresses);
      if (!reason.empty()) throw Error(reason);
    }
  }
  ~LocalRanks() {
    for (ncclComm_t communicator : communicators_) ncclCommDestroy(communicator);
  }
  LocalRanks(const LocalRanks&) = delete;

  // Runs a collective `repeats` times on all ranks, or on one only; milliseconds of a run on the
  // slowest rank. captured: inside a CUDA graph, after as many runs without. Tensors of each rank:
  // all_reduce: y, x. all_gather: y, x, and with nccl the parts in between. all_reduce_norm: y,
  // sum, normed, x, residual, weight.
  float run(const std::string& op, const std::string& way,
            const std::vector<std::vector<Foreign>>& tensors, int repeats, bool captured, int only,
            float epsilon) {
    if (tensors.size() != peers_.size()) throw Error("there are not as many tensors as ranks");
    if (way == "nccl") make_communicators();
    std::vector<float> times(peers_.size());
    std::vector<std::exception_ptr> failures(peers_.size());
    std::vector<std::thread> threads;
    Meeting meeting(only >= 0 ? 1 : static_cast<int>(peers_.size()));
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      if (only >= 0 && static_cast<size_t>(only) != rank) continue;
      threads.emplace_back([&, rank] {
        try {
          check(cudaSetDevice(devices_[rank]), "choosing a device");
          const std::vector<Tensor> own = tensors_of(tensors[rank]);
          const auto work = [&] { enqueue(op, way, static_cast<int>(rank), own, epsilon); };
          times[rank] = time(streams_[rank]->handle, repeats, captured, meeting, work);
        } catch (...) {
          failures[rank] = std::current_exception();
          meeting.fail();
          abort();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures) {
      if (!failure) continue;
      resume();
      std::rethrow_exception(failure);
    }
    return *std::max_element(times.begin(), times.end());
  }

  void abort() {
    for (const auto& peers : peers_) peers->abort();
  }

  // Begins again after abort().
  void resume() {
    const DeviceGuard guard;
    for (const auto& stream : streams_)
      check(cudaStreamSynchronize(stream->handle), "waiting for ranks");
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      check(cudaSetDevice(devices_[rank]), "choosing a device");
      peers_[rank]->resume(streams_[rank]->handle);
      check(cudaStreamSynchronize(streams_[rank]->handle), "waiting for ranks");
    }
  }

 private:
  static float time(cudaStream_t stream, int repeats, bool captured, Meeting& meeting,
                    const std::function<void()>& work) {
    if (!captured) {
      meeting.wait();
      return time_on(stream, repeats - 1, work);
    }
    Graph graph;
    const auto all = [&] {
      for (int i = 0; i < repeats; ++i) work();
    };
    graph.run(stream, all);
    check(cudaStreamSynchronize(stream), "waiting for ranks");
    meeting.wait();
    return time_on(stream, 1, [&] { graph.run(stream, all); }) / static_cast<float>(repeats);
  }

  void make_communicators() {
    if (!communicators_.empty()) return;
    std::vector<ncclComm_t> made(devices_.size());
    check(ncclCommInitAll(made.data(), static_cast<int>(made.size()), devices_.data()),
          "making communicators");
    communicators_ = made;
  }

  void enqueue(const std::string& op, const std::string& way, int rank,
               const std::vector<Tensor>& tensors, float epsilon) const {
    const cudaStream_t stream = streams_[rank]->handle;
    const Peers& peers = *peers_[rank];
    const CollectiveWay by = way == "one_shot"   ? CollectiveWay::kPackets
                             : way == "two_shot" ? CollectiveWay::kBuffers
                                                 : CollectiveWay::kNccl;
    if (by == CollectiveWay::kNccl && way != "nccl")
      throw Error("there is no way '" + way + "', expected one_shot, two_shot or nccl");
    const size_t count = op == "all_reduce_norm" ? 6 : op == "all_gather" ? 3 : 2;
    if (tensors.size() != count)
      throw Error(op + " takes " + std::to_string(count) + " tensors of each rank");
    const Tensor &y = tensors[0], &x = tensors[op == "all_reduce_norm" ? 3 : 1];
    if (x.shape.size() != 2) throw Error("x is not a matrix");
    const int rows = static_cast<int>(x.shape[0]), width = static_cast<int>(x.shape[1]);
    if (op == "all_reduce_norm") {
      if (by != CollectiveWay::kPackets ||
          !peers.all_reduce_norm(x.dtype,
                                 {y.data, tensors[1].data, tensors[2].data, x.data, tensors[4].data,
                                  static_cast<const float*>(tensors[5].data), rows, width, epsilon},
                                 stream))
        throw Error("all_reduce_norm does not support these tensors");
    } else if (op == "all_reduce") {
      if (by != CollectiveWay::kNccl)
        return peers.all_reduce_by(by, x.dtype, y.data, x.data, x.size(), stream);
      check(ncclAllReduce(x.data, y.data, x.size(), nccl_type(x.dtype), ncclSum,
                          communicators_[rank], stream),
            "an all-reduce");
    } else if (op == "all_gather") {
      if (by != CollectiveWay::kNccl)
        return peers.all_gather_by(by, x.dtype, y.data, x.data, rows, width, stream);
      check(ncclAllGather(x.data, tensors[2].data, x.size(), nccl_type(x.dtype),
                          communicators_[rank], stream),
            "an all-gather");
      check(
          kernels::interleave(x.dtype, y.data, tensors[2].data, peers.size(), rows, width, stream),
          "an all-gather");
    } else {
      throw Error("there is no collective '" + op + "'");
    }
  }

  const std::vector<int> devices_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<std::unique_ptr<Peers>> peers_;
  std::vector<ncclComm_t> communicators_;
};

}  // namespace

void bind_peers(nb::module_& m) {
  nb::class_<LocalRanks>(m, "LocalRanks")
      .def(nb::init<const std::vector<int>&, int64_t, int64_t>(), nb::arg("devices"),
           nb::arg("packet_bytes") = 512 << 10, nb::arg("buffer_bytes") = 32 << 20)
      .def("run", &LocalRanks::run, nb::arg("op"), nb::arg("way"), nb::arg("tensors"),
           nb::arg("repeats") = 1, nb::arg("captured") = false, nb::arg("only") = -1,
           nb::arg("epsilon") = 1e-6f, nb::call_guard<nb::gil_scoped_release>())
      .def("abort", &LocalRanks::abort)
      .def("resume", &LocalRanks::resume, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace llmc
