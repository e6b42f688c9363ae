// Kernels between the layers of a draft model: they move rows of hidden_out, and shift token ids
// and positions. Each row is read and written once.
#include "draft_layers.h"

#include "../common/device.cuh"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kRowThreads = 128;

template <typename T>
__device__ __forceinline__ void copy_row(const void* from, int64_t source, void* to, int64_t target,
                                         int width) {
  const T* read = static_cast<const T*>(from) + source * width;
  T* written = static_cast<T*>(to) + target * width;
  for (int i = threadIdx.x; i < width; i += kRowThreads) written[i] = read[i];
}

// One block per row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) lag_rows_kernel(LagRowsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int row = blockIdx.x;
  const bool there = row < p.num_tokens;
  const int sequence = there ? p.sequences.of_token[row] : 0;
  const int lag = min(p.layer, p.sequences.lags[sequence]);
  const int lag_before = min(p.layer - 1, p.sequences.lags[sequence]);
  if (threadIdx.x == 0) {
    const int source = row + p.layer - lag;  // the row of the first layer with the same token
    p.lagged_ids[row] = there && source < p.sequences.ends[sequence] ? p.ids[source] : 0;
    p.lagged_positions[row] = there ? max(p.position_ids[row] - lag, int64_t{0}) : 0;
    if (row < p.batch) {
      const int of_row = p.by_rows ? lag : min(p.layer, p.sequences.lags[row]);
      p.lagged_past_lens[row] = !p.by_rows || there ? max(p.past_lens[row] - of_row, 0) : 0;
    }
  }
  if (!there) return;
  const bool moves = lag > lag_before;
  if (moves && row == p.sequences.firsts[sequence])
    copy_row<T>(p.carried, p.sequences.slots[sequence], p.hidden, row, p.width);
  else copy_row<T>(p.hidden_out, row - moves, p.hidden, row, p.width);
}

// One block per sequence.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) carry_rows_kernel(CarryRowsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int sequence = blockIdx.x, sampled = p.sequences.sampled[sequence];
  int last = p.sequences.ends[sequence] - 1;
  if (sampled >= 0)
    last = p.before_drafts[sampled] + (p.counts != nullptr ? p.counts[sampled] : 1) - 1;
  const int row = last - (p.layer - 1 - min(p.layer - 1, p.sequences.lags[sequence]));
  if (row >= p.sequences.firsts[sequence])
    copy_row<T>(p.hidden_out, row, p.carried, p.sequences.slots[sequence], p.width);
}

// One block per row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) tail_rows_kernel(TailRowsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int row = blockIdx.x, sequence = row / p.layer, place = row % p.layer;
  int position = -1;
  if (sequence < p.sequences && p.next.positions[sequence] >= 0) {
    position = p.next.positions[sequence] - p.layer + place;
    if (position < p.origins[sequence]) position = -1;
  }
  const bool there = position >= 0;
  const int64_t from = static_cast<int64_t>(sequence) * p.next.max_blocks;
  int32_t* table = p.block_table + static_cast<int64_t>(row) * p.next.max_blocks;
  for (int k = threadIdx.x; k < p.next.max_blocks; k += kRowThreads)
    table[k] = there ? p.next.block_table[from + k] : p.padding_block;
  if (threadIdx.x == 0) {
    p.ids[row] =
        there ? max(p.drafts[static_cast<int64_t>(sequence) * kMaxProposals + place], int64_t{0})
              : 0;
    p.position_ids[row] = p.past_lens[row] = max(position, 0);
  }
  if (!there) return;
  if (place == 0) copy_row<T>(p.carried, p.next.slots[sequence], p.hidden, row, p.width);
  else
    copy_row<T>(p.hidden_out, static_cast<int64_t>(sequence) * (p.layer - 1) + place - 1, p.hidden,
                row, p.width);
}

}  // namespace

cudaError_t lag_rows(DType dtype, const LagRowsParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(lag_rows_kernel<T>, p.rows, kRowThreads, 0, stream, p);
  });
}

cudaError_t carry_rows(DType dtype, const CarryRowsParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(carry_rows_kernel<T>, p.sequences.count, kRowThreads, 0, stream, p);
  });
}

cudaError_t tail_rows(DType dtype, const TailRowsParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(tail_rows_kernel<T>, p.rows, kRowThreads, 0, stream, p);
  });
}

}  // namespace llmc::kernels
