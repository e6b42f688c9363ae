// The products of experts for few tokens, where reading the weights of those that were chosen is all the work.
//
// As in gemv.cu a tile is 16 rows of a weight, here of one expert's, for a group of its pairs: all of them where tokens
// are no more than a group takes, as a token's choices differ. As many blocks as fit take tiles in turn. A block's warps
// divide the inner dimension; the weights of a warp's next kStages chunks, whichever tile they are of, are under way to
// shared memory all the time. What a thread copies is what it reads back, as the tensor core wants it. A gate and what
// it gates are rows that follow one another, so the same tile. Reads the weights of every expert that was chosen once
// for each group, past L1, where x stays.
//
// Of the second product weights are under way before the first has ended: which they are was known before it began.
#include <algorithm>

#include "experts.cuh"
#include "gemv.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kRows = 16;   // of a weight in a tile
constexpr int kStep = 32;   // columns that a warp takes at once
constexpr int kUnroll = 4;  // steps in a chunk
constexpr int kStages = 3;  // chunks under way

// kTiles: 8 pairs each in a group.
template <typename T, int kWarps, int kTiles, bool kDown>
__global__ void __launch_bounds__(kWarps * 32) experts_gemv_kernel(const __grid_constant__ ExpertsParams p,
                                                                   const __grid_constant__ Pairs pairs) {
  constexpr int kThreads = kWarps * 32, kPairs = kTiles * 8, kChunk = kStep * kUnroll;
  extern __shared__ uint4 ring[];  // [kStages][kUnroll][2][kThreads]
  __shared__ int before[kMostExperts + 1];
  __shared__ float partial[kWarps][kRows][kPairs + 1];
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (!kDown) {
    wait_for_inputs();
    let_next_start();
  }
  const Product<T> product(p, pairs, kDown);
  Groups groups(p, pairs, before, kPairs), groups_ahead(p, pairs, before, kPairs);
  const int out_tiles = (product.out + kRows - 1) / kRows;
  const int tiles = groups.template count<kThreads>() * out_tiles;
  // A warp's columns.
  const int share = (product.in + kWarps * kStep - 1) / (kWarps * kStep) * kStep, chunks = (share + kChunk - 1) / kChunk;
  const int begin = warp * share, end = min(begin + share, product.in);

  // The copies are ahead of the products: their own place in the sequence of tiles and chunks.
  struct {
    int tile, chunk, slot;
    const T *low, *high;
  } ahead{static_cast<int>(blockIdx.x), 0, 0, nullptr, nullptr};
  auto find_rows = [&] {
    if (ahead.tile >= tiles) return;
    const int expert = groups_ahead.next(ahead.tile / out_tiles).expert, row = ahead.tile % out_tiles * kRows + g;
    ahead.low = product.row_of_weight(expert, row) + 8 * t;
    ahead.high = product.row_of_weight(expert, row + 8) + 8 * t;
  };
  auto copy_chunk = [&] {
    if (ahead.tile < tiles) {
      const int first = begin + ahead.chunk * kChunk;
      uint4* to = ring + ahead.slot * kUnroll * 2 * kThreads + threadIdx.x;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = first + u * kStep;
        const bool there = at + 8 * t < end;
        start_copy(to + 2 * u * kThreads, ahead.low + (there ? at : 0), there);
        start_copy(to + (2 * u + 1) * kThreads, ahead.high + (there ? at : 0), there);
      }
      ahead.slot = ahead.slot + 1 == kStages ? 0 : ahead.slot + 1;
      if (++ahead.chunk == chunks) {
        ahead.chunk = 0;
        ahead.tile += gridDim.x;
        find_rows();
      }
    }
    end_group();
  };
  find_rows();
  for (int i = 0; i < kStages; ++i) copy_chunk();
  if (kDown) {
    wait_for_inputs();
    let_next_start();
  }

  const uint4 zero = make_uint4(0, 0, 0, 0);
  int slot = 0, turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    const Group group = groups.next(tile / out_tiles);
    const T* x[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      x[n] = n * 8 + g < group.count ? row_of(product, p, groups, group.first + n * 8 + g, kDown) : nullptr;
    float sum[kTiles][4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      uint4 b[kUnroll][kTiles];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int at = begin + chunk * kChunk + u * kStep + 8 * t;
          b[u][n] = x[n] != nullptr && at < end ? *reinterpret_cast<const uint4*>(x[n] + at) : zero;
        }
      wait_for_group<kStages - 1>();
      const uint4* from = ring + slot * kUnroll * 2 * kThreads + threadIdx.x;
      slot = slot + 1 == kStages ? 0 : slot + 1;
      multiply_chunk<T, kThreads>(sum, from, b);
      copy_chunk();
    }
    if (turn > 0) __syncthreads();  // partial may still be read
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) partial[warp][g + c / 2 * 8][n * 8 + 2 * t + c % 2] = sum[n][c];
    __syncthreads();
    auto sum_of = [&](int row, int pair) {
      float value = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) value += partial[w][row][pair];
      return value;
    };
    const int first_row = tile % out_tiles * kRows, paired = !kDown && p.gated ? 2 : 1, columns = kRows / paired;
    // Each tile's outputs are the work of another warp first.
    for (int i = (threadIdx.x + turn * 32) % kThreads; i < columns * group.count; i += kThreads) {
      const int row = i % columns * paired, pair = i / columns, place = group.first + pair;
      if (first_row + row >= product.out) continue;
      const float value = sum_of(row, pair);
      if (kDown) finish_made(p, pairs, groups, product, group.expert, place, first_row + row, value);
      else finish_inner(p, pairs, groups, product, group.expert, place, (first_row + row) / paired, value,
                        p.gated ? sum_of(row + 1, pair) : 0.f);
    }
  }
}

// As many blocks as are resident at once.
template <typename T, int kWarps, int kTiles, bool kDown>
cudaError_t run_tiles(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  constexpr size_t kShared = sizeof(uint4) * kStages * kUnroll * 2 * kWarps * 32;
  auto kernel = experts_gemv_kernel<T, kWarps, kTiles, kDown>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  static const int resident = [kernel] {
    int blocks = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kWarps * 32, kShared);
    return std::max(blocks, 1) * static_cast<int>(multiprocessors());
  }();
  const int64_t tiles = static_cast<int64_t>(p.num_tokens) * p.top_k * blocks_for(Product<T>(p, pairs, kDown).out, kRows);
  return launch(kernel, static_cast<unsigned>(std::min<int64_t>(tiles, resident)), kWarps * 32, kShared, stream, p, pairs);
}

// As many warps as have columns to read, and no more than have their rings in shared memory beside the rest.
template <typename T, int kTiles, bool kDown>
cudaError_t run(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  constexpr int kRing = kStages * kUnroll * 2 * 32 * sizeof(uint4), kRest = 16 << 10;
  const int room = (device_property<cudaDevAttrMaxSharedMemoryPerBlockOptin>() - kRest) / kRing;
  const unsigned wanted = blocks_for(kDown ? p.inner : p.hidden, 2 * kStep);
  if (wanted > 4 && room >= 8) return run_tiles<T, 8, kTiles, kDown>(p, pairs, stream);
  return run_tiles<T, 4, kTiles, kDown>(p, pairs, stream);
}

template <typename T, int kTiles>
cudaError_t run_both(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const cudaError_t error = run<T, kTiles, false>(p, pairs, stream);
  return error != cudaSuccess ? error : run<T, kTiles, true>(p, pairs, stream);
}

template <typename T>
cudaError_t run_type(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  return p.num_tokens <= 8 ? run_both<T, 1>(p, pairs, stream) : run_both<T, 2>(p, pairs, stream);
}

}  // namespace

cudaError_t few_experts(DType dtype, const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  if (p.hidden % 8 != 0 || p.inner % 8 != 0) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, pairs, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
