// Experts, but for the products on tensor cores: pairs sorted before them, sums over a token's choices behind them, and
// products of any sizes and dtype.
//
// No step takes an atomic: what a block writes depends on its number alone, so the same inputs give the same sums.
#include <algorithm>

#include "experts.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kSortThreads = 512;

// A block per expert. It counts the pairs of those before it, which is where its own begin, and lists these in order.
// Reads all choices twice in each block, from the cache.
__global__ void __launch_bounds__(kSortThreads) sort_kernel(ExpertsParams p, Pairs pairs) {
  constexpr int kWarps = kSortThreads / 32;
  __shared__ int counts[kWarps];
  wait_for_inputs();
  let_next_start();
  const int expert = blockIdx.x, all = p.num_tokens * p.top_k, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int lower = 0;
  for (int pair = threadIdx.x; pair < all; pair += kSortThreads) {
    const int own = expert_of(p, pair);
    lower += own >= 0 && own < expert;
  }
  lower = __reduce_add_sync(~0u, lower);
  if (lane == 0) counts[warp] = lower;
  __syncthreads();
  int at = 0;
  for (int w = 0; w < kWarps; ++w) at += counts[w];
  if (threadIdx.x == 0) pairs.starts[expert] = at;
  for (int begin = 0; begin < all; begin += kSortThreads) {
    const int pair = begin + threadIdx.x;
    const bool mine = pair < all && expert_of(p, pair) == expert;
    const uint32_t found = __ballot_sync(~0u, mine);
    __syncthreads();  // counts have been read
    if (lane == 0) counts[warp] = __popc(found);
    __syncthreads();
    int place = at + __popc(found & ((1u << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += counts[w];
      at += counts[w];
    }
    if (mine) pairs.order[place] = pair;
  }
  if (threadIdx.x == 0 && expert == p.num_experts - 1) pairs.starts[p.num_experts] = at;
}

// y[token] = the sum over its choices of score · made. A vector per thread; reads `made` once.
template <typename T, int kWidth>
__global__ void combine_kernel(ExpertsParams p, Pairs pairs) {
  wait_for_inputs();
  let_next_start();
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth, token = blockIdx.x;
  if (i >= p.hidden) return;
  float sum[kWidth] = {};
  for (int pair = token * p.top_k; pair < (token + 1) * p.top_k; ++pair) {
    if (expert_of(p, pair) < 0) continue;
    const float score = p.scale_input ? 1.f : p.scores[pair];
    const auto made = load<T, kWidth>(static_cast<const T*>(pairs.made) + static_cast<int64_t>(pair) * p.hidden + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum[k] += score * to_float(made.data[k]);
  }
  store_floats(static_cast<T*>(p.y) + static_cast<int64_t>(token) * p.hidden + i, sum);
}

constexpr int kPlainPairs = 32, kPlainOut = 32, kPlainIn = 32;

// A product without tensor cores. A tile is kPlainOut rows of an expert's weight for kPlainPairs pairs, 2 × 2 of them a
// thread's; blocks take tiles in turn. Reads the weight once for each kPlainPairs pairs.
template <typename T, bool kDown>
__global__ void __launch_bounds__(256) plain_kernel(ExpertsParams p, Pairs pairs, bool tiled) {
  __shared__ int before[kMostExperts + 1];
  __shared__ float weights[kPlainIn][kPlainOut + 1], x[kPlainIn][kPlainPairs + 1];
  wait_for_inputs();
  let_next_start();
  const Product<T> product(p, pairs, kDown);
  const ExpertsPacking& packing = kDown ? p.down_packing : p.gate_up_packing;
  Groups groups(p, pairs, before, kPlainPairs);
  const int out_tiles = (product.out + kPlainOut - 1) / kPlainOut, tiles = groups.count<256>() * out_tiles;
  const int column = 2 * (threadIdx.x % 16), row = 2 * (threadIdx.x / 16);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Group group = groups.next(tile / out_tiles);
    const int first_out = tile % out_tiles * kPlainOut;
    float sum[2][2] = {};  // of a pair, of a row of the weight
    for (int begin = 0; begin < product.in; begin += kPlainIn) {
      __syncthreads();
      for (int i = threadIdx.x; i < kPlainIn * kPlainOut; i += 256) {
        const int at = begin + i % kPlainIn, of = i / kPlainIn;
        const bool there = at < product.in;
        weights[i % kPlainIn][of] = there ? number_at(product, packing, tiled, group.expert, first_out + of, at) : 0.f;
        x[i % kPlainIn][of] =
            there && of < group.count ? to_float(row_of(product, p, groups, group.first + of, kDown)[at]) : 0.f;
      }
      __syncthreads();
#pragma unroll 8
      for (int i = 0; i < kPlainIn; ++i)
#pragma unroll
        for (int a = 0; a < 2; ++a)
#pragma unroll
          for (int b = 0; b < 2; ++b) sum[a][b] += x[i][row + a] * weights[i][column + b];
    }
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const int place = group.first + row + a, out = first_out + column;
      if (row + a >= group.count) continue;
      if (!kDown && p.gated) {
        if (out < product.out)
          finish_inner(p, pairs, groups, product, group.expert, place, out / 2, sum[a][0], sum[a][1]);
        continue;
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (out + b >= product.out) continue;
        if (kDown) finish_made(p, pairs, groups, product, group.expert, place, out + b, sum[a][b]);
        else finish_inner(p, pairs, groups, product, group.expert, place, out + b, sum[a][b], 0.f);
      }
    }
  }
}
static_assert(kPlainPairs == kPlainOut);

bool up_tiled(const ExpertsParams& p) {
  const ExpertsPacking& packing = p.gate_up_packing;
  return experts_tiled(packing.codes, packing.group_size, p.gated ? 2 * p.inner : p.inner, p.hidden);
}
bool down_tiled(const ExpertsParams& p) {
  return experts_tiled(p.down_packing.codes, p.down_packing.group_size, p.hidden, p.inner);
}

template <typename T>
cudaError_t plain_experts(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  const unsigned blocks = 4 * multiprocessors();
  const cudaError_t error = launch(plain_kernel<T, false>, blocks, 256, 0, stream, p, pairs, up_tiled(p));
  return error != cudaSuccess ? error : launch(plain_kernel<T, true>, blocks, 256, 0, stream, p, pairs, down_tiled(p));
}

template <typename T>
cudaError_t combine(const ExpertsParams& p, const Pairs& pairs, cudaStream_t stream) {
  auto run = [&](auto kernel, int width) {
    return launch(kernel, dim3(p.num_tokens, blocks_for(p.hidden, 128 * width)), 128, 0, stream, p, pairs);
  };
  return p.hidden % kVec<T> == 0 ? run(combine_kernel<T, kVec<T>>, kVec<T>) : run(combine_kernel<T, 1>, 1);
}

// Places in scratch, and its size.
int64_t place(DType dtype, int64_t pairs, int num_experts, int hidden, int inner, void* scratch, Pairs* made) {
  int64_t bytes = 0;
  auto take = [&](int64_t count, int width) {
    void* at = static_cast<char*>(scratch) + bytes;
    bytes += (count * width + 255) / 256 * 256;
    return at;
  };
  const int width = dtype == DType::kFloat32 ? 4 : 2;
  auto* order = static_cast<int32_t*>(take(pairs, 4));
  auto* starts = static_cast<int32_t*>(take(num_experts + 1, 4));
  void* rows = take(pairs * inner, width);
  *made = {order, starts, rows, take(pairs * hidden, width)};
  return bytes;
}

}  // namespace

int64_t experts_scratch(DType dtype, int num_tokens, int top_k, int num_experts, int hidden, int inner) {
  Pairs pairs;
  return place(dtype, static_cast<int64_t>(num_tokens) * top_k, num_experts, hidden, inner, nullptr, &pairs);
}

cudaError_t experts(DType dtype, const ExpertsParams& p, ExpertsWay way, cudaStream_t stream) {
  const bool packed = p.gate_up_packing.codes != Codes::kNone;
  if (p.num_experts > kMostExperts || (packed && way != ExpertsWay::kPlain && !(up_tiled(p) && down_tiled(p))))
    return cudaErrorInvalidValue;
  Pairs pairs;
  place(dtype, static_cast<int64_t>(p.num_tokens) * p.top_k, p.num_experts, p.hidden, p.inner, p.scratch, &pairs);
  cudaError_t error = cudaSuccess;
  if (p.num_tokens > 1 && way != ExpertsWay::kFew) error = launch(sort_kernel, p.num_experts, kSortThreads, 0, stream, p, pairs);
  if (error != cudaSuccess) return error;
  return with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    error = way == ExpertsWay::kPlain ? plain_experts<T>(p, pairs, stream)
            : way == ExpertsWay::kFew ? few_experts(dtype, p, pairs, stream)
            : packed ? many_packed_experts(dtype, p, pairs, stream) : many_experts(dtype, p, pairs, stream);
    return error != cudaSuccess ? error : combine<T>(p, pairs, stream);
  });
}

}  // namespace llmc::kernels
