// Kernels before and after the model in a step: slot admission, input preparation from one packed
// buffer, block copies, slot updates. They handle a few kilobytes, except for blocks; the number of
// launches dominates.
#include <algorithm>

#include "../common/device.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kAdmitThreads = 1024, kPrepareThreads = 256, kCopyThreads = 256, kCopyParts = 8,
              kTransferThreads = 256;
constexpr int64_t kTransferBytes = 32 << 10;  // above this, copy engines are as fast

__global__ void __launch_bounds__(kTransferThreads)
    transfer_kernel(char* to, const char* from, int bytes) {
  pdl_wait();
  pdl_launch_dependents();
  const int i = blockIdx.x * kTransferThreads + threadIdx.x, vectors = bytes / 16,
            rest = 15 * vectors + i;
  if (i < vectors) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  else if (rest < bytes) to[rest] = from[rest];
}

// Whether a slot keeps a history.
__device__ __forceinline__ bool keeps_history(const SlotState& state) {
  return state.processing.keeps_history || state.prompt_lookup;
}

// One block per sequence. Clears the counts of its slot, if it needs them: 4 bytes per token of the
// vocabulary.
__global__ void __launch_bounds__(kAdmitThreads) admit_kernel(AdmitParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int i = blockIdx.x;
  const int64_t slot = p.slots[i];
  if (threadIdx.x == 0) p.states[slot] = p.given[i];
  if (p.history.tokens == nullptr || !keeps_history(p.given[i])) return;
  int32_t* tokens = p.history.tokens + slot * p.history.room;
  const int32_t* given = p.tokens + p.starts[i];
  const int length = p.starts[i + 1] - p.starts[i];
  if (threadIdx.x == 0) p.history.lengths[slot] = length;
  if (!p.given[i].processing.keeps_history) {
    for (int k = threadIdx.x; k < length; k += kAdmitThreads) tokens[k] = given[k];
    return;
  }
  uint32_t* counts = p.history.counts + slot * p.history.vocab;
  for (int k = threadIdx.x; k < p.history.vocab; k += kAdmitThreads) counts[k] = 0;
  __syncthreads();
  for (int k = threadIdx.x; k < p.prompts[i]; k += kAdmitThreads)
    tokens[k] = given[k] | (atomicOr(&counts[given[k]], kInPrompt) != 0 ? kRepeated : 0);
  __syncthreads();
  for (int k = p.prompts[i] + threadIdx.x; k < length; k += kAdmitThreads)
    tokens[k] = given[k] | (atomicAdd(&counts[given[k]], 1u) != 0 ? kRepeated : 0);
}

__device__ __forceinline__ int sequence_of_token(const PrepareInputsParams& p, int token) {
  int low = 0, high = p.batch - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.host_seqlens[middle] <= token) low = middle;
    else high = middle - 1;
  }
  return low;
}

__device__ __forceinline__ int past_of(const PrepareInputsParams& p, int sequence) {
  const int past = p.host_past[sequence];
  if (p.host_offsets == nullptr || p.host_offsets[sequence] < 0) return past;
  const int own = p.lengths[p.host_slots[sequence]] - p.num_new + p.host_offsets[sequence];
  return min(max(own, past - p.host_unread[sequence]), past);
}

__device__ __forceinline__ int64_t id_of(const PrepareInputsParams& p, int sequence,
                                         int32_t given) {
  if (given >= 0) return given;
  const int64_t slot = p.host_slots[sequence];
  const int64_t id = given == -1 ? p.last[slot] : p.drafts[slot * p.drafts_stride - 2 - given];
  return max(id, int64_t{0});
}

// Writes the positions by axis of a token at a position, of a sequence with some rejected drafts.
__device__ __forceinline__ void rotate(const PrepareInputsParams& p, int token, int position,
                                       int rejected) {
  if (p.rotary_positions == nullptr) return;
#pragma unroll
  for (int axis = 0; axis < kRotaryAxes; ++axis) {
    const int at = token * kRotaryAxes + axis;
    p.rotary_positions[at] = p.host_rotary == nullptr || token >= p.num_tokens
                                 ? position
                                 : max(p.host_rotary[at] - rejected, 0);
  }
}

// One thread per token and per row; one block per update of the block table, in turn.
__global__ void __launch_bounds__(kPrepareThreads) prepare_inputs_kernel(PrepareInputsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int i = blockIdx.x * kPrepareThreads + threadIdx.x;
  if (i < p.num_tokens) {
    const int sequence = sequence_of_token(p, i), past = past_of(p, sequence);
    p.input_ids[i] = id_of(p, sequence, p.host_ids[i]);
    p.position_ids[i] = past + i - p.host_seqlens[sequence];
    rotate(p, i, past + i - p.host_seqlens[sequence], p.host_past[sequence] - past);
  } else if (i < p.rows) {
    p.input_ids[i] = 0, p.position_ids[i] = 0;
    rotate(p, i, 0, 0);
  }
  if (i < p.num_logits) p.logits_indices[i] = p.host_logits[i];
  else if (i < p.rows) p.logits_indices[i] = i;
  if (p.host_lora_ids != nullptr && p.lora_ids != nullptr && i < max(p.num_tokens, p.rows))
    p.lora_ids[i] = i < p.num_tokens ? p.host_lora_ids[i] : -1;
  if (p.host_lora_ids != nullptr && p.lora_logits_ids != nullptr) {
    if (i < p.num_logits) p.lora_logits_ids[i] = p.host_lora_ids[p.host_logits[i]];
    else if (i < p.rows) p.lora_logits_ids[i] = i < p.num_tokens ? p.host_lora_ids[i] : -1;
  }
  if (i <= p.rows) p.cu_seqlens[i] = i <= p.batch ? p.host_seqlens[i] : p.num_tokens + i - p.batch;
  if (i < p.rows) {
    const bool there = i < p.batch;
    p.past_lens[i] = there ? past_of(p, i) : 0;
    if (p.memory_starts != nullptr) {
      p.memory_starts[i] = there ? p.host_starts[i] : 0;
      p.memory_lens[i] = there ? p.host_lens[i] : 1;  // attention to no key is NaN
    }
    const bool is_sequence = i < p.num_sequences;
    if (p.state_slots != nullptr) p.state_slots[i] = is_sequence ? p.host_states[i] : p.num_states;
    if (p.commit_lens != nullptr) p.commit_lens[i] = is_sequence ? p.host_commits[i] : 1;
    if (p.host_own_from != nullptr) {
      p.own_from[i] = there ? p.host_own_from[i] : 0;
      if (i == 0) p.prefix[0] = p.prefix_owner, p.prefix[1] = p.prefix_length;
    }
  }
  if (p.sequence_starts != nullptr && i <= p.rows) {
    const int past_end = i - p.num_sequences;  // a padding row, or an empty sequence
    p.sequence_starts[i] =
        past_end <= 0 ? p.host_sequence_starts[i] : min(p.num_tokens + past_end, p.rows);
    if (i < p.rows) {
      const bool is_padding = p.num_tokens + past_end < p.rows;
      p.sequence_past[i] = past_end < 0 ? p.host_sequence_past[i] : is_padding ? 0 : 1;
    }
  }
  for (int r = blockIdx.x; r < p.num_runs; r += gridDim.x) {
    const BlockTableUpdate run = p.runs[r];
    for (int k = threadIdx.x; k < run.count; k += kPrepareThreads)
      p.block_table[static_cast<int64_t>(run.row) * p.max_blocks + run.first + k] =
          p.blocks[run.from + k];
  }
}

template <typename Word>
__device__ __forceinline__ void copy_words(const void* from, void* to, int64_t bytes) {
  const auto* source = static_cast<const Word*>(from);
  auto* target = static_cast<Word*>(to);
  for (int64_t i = blockIdx.z * kCopyThreads + threadIdx.x;
       i < bytes / static_cast<int>(sizeof(Word)); i += gridDim.z * kCopyThreads)
    target[i] = source[i];
}

// One block per cache, pair and part of the pair's bytes.
__global__ void __launch_bounds__(kCopyThreads)
    copy_blocks_kernel(const CacheBlocks* caches, const int32_t* pairs) {
  pdl_wait();
  pdl_launch_dependents();
  const CacheBlocks cache = caches[blockIdx.x];
  const char* from = static_cast<const char*>(cache.data) + pairs[2 * blockIdx.y] * cache.bytes;
  char* to = static_cast<char*>(cache.data) + pairs[2 * blockIdx.y + 1] * cache.bytes;
  if (cache.bytes % 16 == 0) copy_words<uint4>(from, to, cache.bytes);
  else copy_words<uint32_t>(from, to, cache.bytes);
}

__device__ void append_token(const TokenHistory& history, int64_t slot, int64_t token,
                             bool counts) {
  const int length = history.lengths[slot];
  if (length >= history.room) return;
  bool repeats = false;
  if (counts) repeats = history.counts[slot * history.vocab + token]++ != 0;
  history.tokens[slot * history.room + length] =
      static_cast<int32_t>(token) | (repeats ? kRepeated : 0);
  history.lengths[slot] = length + 1;
}

template <typename P>
__device__ void update_slot(const P& p, int64_t slot, int64_t token) {
  SlotState& state = p.states[slot];
  p.last[slot] = token;
  if (token < 0) return;
  ++state.num_generated;
  if (p.history.tokens != nullptr && keeps_history(state))
    append_token(p.history, slot, token, state.processing.keeps_history);
}

__global__ void update_slots_kernel(UpdateSlotsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  for (int r = threadIdx.x; r < p.rows; r += blockDim.x) update_slot(p, p.slots[r], p.chosen[r]);
}

// The draft after a row; negative: none.
__device__ __forceinline__ int64_t draft_after(const AcceptDraftsParams& p, int row) {
  return p.drafts[row] >= -1 ? p.drafts[row] : p.input_ids[-2 - p.drafts[row]];
}

// One thread per sequence.
__global__ void accept_drafts_kernel(AcceptDraftsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  for (int s = threadIdx.x; s < p.sequences; s += blockDim.x) {
    const int32_t* row_of = p.row_of + static_cast<int64_t>(s) * p.positions;
    int count = p.first == 0 ? 0 : p.counts[s];
    for (int i = p.first; i < p.end && count == i && row_of[i] >= 0; ++i) {
      const int before = i > 0 ? row_of[i - 1] : -1;
      if (before >= 0 && p.chosen[before] != draft_after(p, before)) break;
      update_slot(p, p.slots[row_of[i]], p.chosen[row_of[i]]);
      ++count;
    }
    p.counts[s] = count;
  }
}

}  // namespace

// Without PDL: the predecessor in the stream is a copy, not a kernel.
cudaError_t admit(const AdmitParams& p, cudaStream_t stream) {
  admit_kernel<<<p.count, kAdmitThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t transfer(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (bytes > kTransferBytes || !is_aligned(to, 16) || !is_aligned(from, 16))
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
  return launch(transfer_kernel, ceil_div(bytes / 16 + bytes % 16, kTransferThreads),
                kTransferThreads, 0, stream, static_cast<char*>(to), static_cast<const char*>(from),
                static_cast<int>(bytes));
}

cudaError_t prepare_inputs(const PrepareInputsParams& p, cudaStream_t stream) {
  const int most = std::max({p.num_tokens, p.num_logits, p.rows + 1});
  prepare_inputs_kernel<<<ceil_div(most, kPrepareThreads), kPrepareThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t copy_blocks(const CacheBlocks* caches, int num_caches, const int32_t* pairs,
                        int num_pairs, cudaStream_t stream) {
  return launch(copy_blocks_kernel, dim3(num_caches, num_pairs, kCopyParts), kCopyThreads, 0,
                stream, caches, pairs);
}

cudaError_t update_slots(const UpdateSlotsParams& p, cudaStream_t stream) {
  return launch(update_slots_kernel, 1, 256, 0, stream, p);
}

cudaError_t accept_drafts(const AcceptDraftsParams& p, cudaStream_t stream) {
  return launch(accept_drafts_kernel, 1, 256, 0, stream, p);
}

}  // namespace llmc::kernels
