// Runs the protocol of collectives over peer memory on the host: ranks and blocks are threads, and
// a block has one thread. Checks all results; exits with 1 and a line if one is wrong.
//
// Usage: peer_ranks RANKS BLOCKS
#include <pthread.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/kernels/collective/protocol.cuh"

namespace {

using namespace llmc::kernels;
using namespace llmc::kernels::peer;

struct HostCta {
  int own, all;
  int thread() const { return 0; }
  int threads() const { return 1; }
  int block() const { return own; }
  int blocks() const { return all; }
  void sync() const {}
};

// Sums of float32.
struct SumOfFloats {
  struct Total {
    float data[4];
  };
  static void add(Total& total, const Words& words) {
    float own[4];
    std::memcpy(own, words.data, sizeof own);
    for (int k = 0; k < 4; ++k) total.data[k] += own[k];
  }
  static Words round(const Total& total) {
    Words words;
    std::memcpy(words.data, total.data, sizeof total.data);
    return words;
  }
};

// A collective: x of all ranks has `bytes`, in rows of `width` bytes for an all-gather.
enum class Kind { kOneShot, kTwoShot, kGatherPackets, kGatherBuffers };
struct Work {
  Kind kind;
  int64_t bytes, width;
  int blocks;
  std::vector<std::vector<float>> x, y;  // of each rank
};

constexpr int64_t kMaxFloats = 4096;

std::vector<Work> random_works(int count, int ranks, int blocks) {
  std::mt19937 random(ranks * 100 + blocks);
  std::normal_distribution<float> normal;
  std::vector<Work> works;
  for (int i = 0; i < count; ++i) {
    Work work{};
    work.kind = static_cast<Kind>(random() % 4);
    const bool gathers = work.kind >= Kind::kGatherPackets;
    const int64_t rows = 1 + random() % 5,
                  columns = gathers ? 4 * (1 + random() % 40) : 1 + random() % (kMaxFloats / 5);
    work.width = 4 * columns;
    work.bytes = rows * work.width;
    work.blocks = 1 + random() % blocks;
    for (int rank = 0; rank < ranks; ++rank) {
      work.x.emplace_back(rows * columns);
      for (float& one : work.x.back()) one = normal(random);
      work.y.emplace_back(rows * columns * (gathers ? ranks : 1));
    }
    works.push_back(std::move(work));
  }
  return works;
}

// What all ranks must have, bit by bit.
std::vector<float> expected(const Work& work) {
  const size_t count = work.x[0].size();
  std::vector<float> result;
  if (work.kind < Kind::kGatherPackets) {
    for (size_t i = 0; i < count; ++i) {
      float sum = 0;
      for (const auto& x : work.x) sum += x[i];
      result.push_back(sum);
    }
    return result;
  }
  const size_t columns = work.width / 4;
  for (size_t row = 0; row < count / columns; ++row)
    for (const auto& x : work.x)
      result.insert(result.end(), x.begin() + row * columns, x.begin() + (row + 1) * columns);
  return result;
}

template <int kMost>
void run(const PeerGroup& group, const HostCta& cta, Work& work) {
  float *y = work.y[group.rank].data(), *x = work.x[group.rank].data();
  const int rows = static_cast<int>(work.bytes / work.width),
            width = static_cast<int>(work.width / 16);
  auto *to = reinterpret_cast<Words*>(y), *from = reinterpret_cast<Words*>(x);
  switch (work.kind) {
    case Kind::kOneShot: return one_shot<SumOfFloats, kMost>(group, cta, y, x, work.bytes);
    case Kind::kTwoShot: return two_shot<SumOfFloats, kMost>(group, cta, y, x, work.bytes);
    case Kind::kGatherPackets: return gather_packets<kMost>(group, cta, to, from, rows, width);
    case Kind::kGatherBuffers: return gather_buffers(group, cta, to, from, rows, width);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int ranks = std::atoi(argv[1]), blocks = std::atoi(argv[2]);
  const int64_t most = 4 * kMaxFloats;
  const PeerLayout layout{ranks, most, 2 * most + 64 * ranks + most * ranks};
  std::vector<Work> works = random_works(60, ranks, blocks);
  std::vector<std::vector<Words>> regions(ranks, std::vector<Words>(layout.bytes() / 16 + 1));
  std::vector<PeerState> states(ranks);
  const uint32_t abort = 0;
  std::vector<PeerGroup> groups;
  for (int rank = 0; rank < ranks; ++rank) {
    PeerGroup group{rank, ranks, layout, {}, &states[rank], &abort};
    for (int other = 0; other < ranks; ++other)
      group.regions[other] = reinterpret_cast<char*>(regions[other].data());
    groups.push_back(group);
  }
  // A rank's blocks begin a collective when all of them have ended the one before it, as kernels
  // of a stream do. Ranks wait for each other by the protocol only.
  std::vector<pthread_barrier_t> ends(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    pthread_barrier_init(&ends[rank], nullptr, blocks);
    for (int block = 0; block < blocks; ++block)
      threads.emplace_back([&, rank, block] {
        for (Work& work : works) {
          const HostCta cta{block, work.blocks};
          if (block < work.blocks) {
            if (ranks <= 2) run<2>(groups[rank], cta, work);
            else run<kMaxPeers>(groups[rank], cta, work);
          }
          pthread_barrier_wait(&ends[rank]);
        }
      });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < works.size(); ++i)
    for (int rank = 0; rank < ranks; ++rank)
      if (works[i].y[rank] != expected(works[i])) {
        std::printf("collective %zu of kind %d: rank %d has a wrong result\n", i,
                    static_cast<int>(works[i].kind), rank);
        return 1;
      }
  return 0;
}
