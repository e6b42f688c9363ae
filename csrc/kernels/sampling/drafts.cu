// Kernels around the passes of a draft model: inputs from what a step accepted, and the most likely
// token of each row as the next draft.
#include <algorithm>

#include "../common/device.cuh"
#include "drafts.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kBeginThreads = 256, kTakeThreads = 1024, kTakeWarps = kTakeThreads / 32;

__device__ int64_t last_accepted(const BeginDraftsParams& p, int sequence, int count) {
  const int row = p.counts == nullptr
                      ? sequence
                      : p.row_of[static_cast<int64_t>(sequence) * p.positions + count - 1];
  return p.chosen[row];
}

__device__ __forceinline__ int count_of(const BeginDraftsParams& p, int sequence) {
  return p.counts == nullptr ? 1 : p.counts[sequence];
}

// The token of the first pass at a row: after the last accepted token the sampled one. Rows of
// rejected drafts are read by no later pass.
__device__ int64_t shifted_id(const BeginDraftsParams& p, int token) {
  const int sequence = p.host_sampled[token];
  const int count = sequence < 0 ? 0 : count_of(p, sequence);
  if (count > 0 && token == p.host_firsts[sequence] + count - 1)
    return last_accepted(p, sequence, count);
  return p.host_ids[token] >= 0 ? p.host_ids[token] : p.input_ids[token + 1];
}

// Position of the token after the last accepted one; -1: the sequence cannot draft.
__device__ int begin_sequence(const BeginDraftsParams& p, int row) {
  int position = -1, end = 0, last = 0;
  int64_t token = 0;
  const bool there = row < p.sequences;
  if (there) {
    const int count = count_of(p, row);
    last = p.host_firsts[row] + count - 1;
    token = last_accepted(p, row, count);
    end = static_cast<int>(p.position_ids[last]) + 1;
    if (token >= 0 && end + p.span <= p.next.max_seq_len) position = end - p.back;
  }
  if (threadIdx.x == 0) {
    p.last_rows[row] = last;
    p.next.slots[row] = there ? p.host_slots[row] : -1;
    if (there) p.lengths[p.host_slots[row]] = end;
    p.next.positions[row] = position, p.next.made[row] = 0;
    p.next.ids[row] = max(token, int64_t{0});
    p.next.position_ids[row] = p.next.past_lens[row] = max(position, 0);
  }
  return position;
}

// One thread per token; one block per sequence, in turn, which copies its row of the block table.
__global__ void __launch_bounds__(kBeginThreads) begin_drafts_kernel(BeginDraftsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int i = blockIdx.x * kBeginThreads + threadIdx.x;
  if (p.ids != nullptr && i < p.num_tokens) p.ids[i] = max(shifted_id(p, i), int64_t{0});
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const bool drafts = begin_sequence(p, row) >= 0;
    const int64_t from = drafts ? static_cast<int64_t>(p.host_tables[row]) * p.next.max_blocks : 0;
    int32_t* to = p.next.block_table + static_cast<int64_t>(row) * p.next.max_blocks;
    for (int k = threadIdx.x; k < p.next.max_blocks; k += kBeginThreads)
      to[k] = drafts ? p.block_table[from + k] : p.padding_block;
    if (p.features == nullptr) continue;
    const int last = row < p.sequences ? p.host_firsts[row] + count_of(p, row) - 1 : 0;
    const auto* read = reinterpret_cast<const uint16_t*>(p.features + last * p.feature_bytes);
    auto* hidden = reinterpret_cast<uint16_t*>(p.hidden + row * p.feature_bytes);
    for (int k = threadIdx.x; k < p.feature_bytes / 2; k += kBeginThreads) hidden[k] = read[k];
  }
}

struct Best {
  float logit;
  int index;

  __device__ __forceinline__ void keep(float other, int at) {
    if (other > logit || (other == logit && at < index)) logit = other, index = at;
  }
  __device__ __forceinline__ void keep_of_warp() {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1)
      keep(__shfl_xor_sync(~0u, logit, mask), __shfl_xor_sync(~0u, index, mask));
  }
};

// Index of the largest logit, in thread 0; 0 if all are NaN.
template <typename T>
__device__ int argmax(const T* logits, int count) {
  __shared__ Best of_warp[kTakeWarps];
  Best best{-INFINITY, 0x7fffffff};
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
  const int whole = aligned ? count / kVec<T> * kVec<T> : 0;
  for (int i = threadIdx.x * kVec<T>; i < whole; i += kTakeThreads * kVec<T>) {
    const auto read = load<T, kVec<T>>(logits + i);
#pragma unroll
    for (int k = 0; k < kVec<T>; ++k) best.keep(to_float(read.data[k]), i + k);
  }
  for (int i = whole + threadIdx.x; i < count; i += kTakeThreads) best.keep(to_float(logits[i]), i);
  best.keep_of_warp();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x < 32) {
    best = of_warp[threadIdx.x];
    best.keep_of_warp();
  }
  return best.index < count ? best.index : 0;
}

// Appends a draft, and moves the sequence to its position. A draft after the last position is -1.
__device__ void append_draft(const TakeDraftsParams& p, int row, int64_t token) {
  int position = p.next.positions[row];
  const int made = p.next.made[row];
  const bool fits = position >= 0 && position < p.next.max_seq_len;
  const int64_t slot = p.next.slots[row];
  if (made < kMaxProposals && slot >= 0) {
    p.drafts[static_cast<int64_t>(row) * kMaxProposals + made] = fits ? token : -1;
    p.slot_drafts[slot * kMaxProposals + made] = fits ? token : -1;
    p.next.made[row] = made + 1;
  }
  if (p.advances && fits) p.next.positions[row] = ++position;
  p.next.ids[row] = token;
  p.next.position_ids[row] = p.next.past_lens[row] = min(max(position, 0), p.next.max_seq_len - 1);
}

// One block per sequence. Reads a row of logits, and copies a row of hidden_out.
template <typename T>
__global__ void __launch_bounds__(kTakeThreads) take_drafts_kernel(TakeDraftsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int row = blockIdx.x;
  const int64_t logit_row = p.logit_rows != nullptr ? p.logit_rows[row] : row;
  const int column = argmax(static_cast<const T*>(p.logits) + logit_row * p.stride, p.vocab);
  if (threadIdx.x == 0) append_draft(p, row, p.token_ids != nullptr ? p.token_ids[column] : column);
  if (p.hidden == nullptr) return;
  const int64_t hidden_row = p.hidden_rows != nullptr ? p.hidden_rows[row] : row;
  const T* from = static_cast<const T*>(p.hidden_out) + hidden_row * p.width;
  T* to = static_cast<T*>(p.hidden) + static_cast<int64_t>(row) * p.width;
  for (int i = threadIdx.x; i < p.width; i += kTakeThreads) to[i] = from[i];
}

// One thread per token.
__global__ void __launch_bounds__(kBeginThreads) fill_blocks_kernel(FillBlocksParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int i = blockIdx.x * kBeginThreads + threadIdx.x;
  if (i >= p.rows * p.block) return;
  const int row = i / p.block, place = i % p.block;
  p.ids[i] = place == 0 ? p.next.ids[row] : p.mask;
  p.position_ids[i] = p.next.past_lens[row] + place;
}

// Blocks (drafts, sequences). Each reads a row of logits.
template <typename T>
__global__ void __launch_bounds__(kTakeThreads) take_blocks_kernel(TakeBlocksParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int place = blockIdx.x, row = blockIdx.y;
  const int64_t logit_row = static_cast<int64_t>(row) * p.masks + place;
  const int column = argmax(static_cast<const T*>(p.logits) + logit_row * p.stride, p.vocab);
  const int64_t slot = p.next.slots[row];
  if (threadIdx.x > 0 || slot < 0) return;
  const int64_t token = p.token_ids != nullptr ? p.token_ids[column] : column;
  const int64_t draft = p.next.positions[row] >= 0 ? token : -1;
  p.drafts[static_cast<int64_t>(row) * kMaxProposals + place] = draft;
  p.slot_drafts[slot * kMaxProposals + place] = draft;
}

}  // namespace

// Without PDL: the predecessor in the stream may be a copy, not a kernel.
cudaError_t begin_drafts(const BeginDraftsParams& p, cudaStream_t stream) {
  const unsigned blocks =
      std::max(ceil_div(p.num_tokens, kBeginThreads), static_cast<unsigned>(p.rows));
  begin_drafts_kernel<<<blocks, kBeginThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t fill_blocks(const FillBlocksParams& p, cudaStream_t stream) {
  return launch(fill_blocks_kernel, ceil_div(p.rows * p.block, kBeginThreads), kBeginThreads, 0,
                stream, p);
}

cudaError_t take_blocks(DType dtype, const TakeBlocksParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(take_blocks_kernel<T>, dim3(p.count, p.rows), kTakeThreads, 0, stream, p);
  });
}

cudaError_t take_drafts(DType dtype, const TakeDraftsParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(take_drafts_kernel<T>, p.rows, kTakeThreads, 0, stream, p);
  });
}

}  // namespace llmc::kernels
