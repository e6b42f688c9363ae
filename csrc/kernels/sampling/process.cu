// Logits processors, in the order and arithmetic of runtime/sampling/sampler.py: logit bias,
// repetition penalty, presence and frequency penalty, bad words, min_tokens, forced tokens, then
// token masks.
//
// cast_logits_kernel copies logits to float32. process_logits_kernel: a block takes a row and
// changes what its slot's state names; penalties iterate over the slot's history, so the cost is in
// the sequence length, not in the vocabulary. mask_kernel, if any row has a mask, sets disallowed
// tokens to -inf. Reads vocab logits and writes vocab floats per row.
#include "../common/device.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

constexpr int kCopyThreads = 256, kCopyVectors = 4, kProcessingThreads = 512;

// A block copies kCopyVectors * kCopyThreads vectors of a row.
template <typename T>
__global__ void cast_logits_kernel(float* y, const T* x, int vocab, int stride, int y_stride) {
  pdl_wait();
  pdl_launch_dependents();
  constexpr int kWidth = kVec<T>;
  x += static_cast<int64_t>(blockIdx.y) * stride;
  y += static_cast<int64_t>(blockIdx.y) * y_stride;
  const bool aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0;
  Vec<T, kWidth> read[kCopyVectors];
  auto place = [&](int turn) {
    return ((static_cast<int>(blockIdx.x) * kCopyVectors + turn) * kCopyThreads +
            static_cast<int>(threadIdx.x)) *
           kWidth;
  };
#pragma unroll
  for (int turn = 0; turn < kCopyVectors; ++turn)
    if (aligned && place(turn) + kWidth <= vocab) read[turn] = load<T, kWidth>(x + place(turn));
#pragma unroll
  for (int turn = 0; turn < kCopyVectors; ++turn) {
    const int at = place(turn);
    if (aligned && at + kWidth <= vocab) {
#pragma unroll
      for (int part = 0; part < kWidth; part += 4) {
        Vec<float, 4> four;
#pragma unroll
        for (int k = 0; k < 4; ++k) four.data[k] = to_float(read[turn].data[part + k]);
        store(y + at + part, four);
      }
    } else {
      for (int i = at; i < min(vocab, at + kWidth); ++i) y[i] = to_float(x[i]);
    }
  }
}

__global__ void process_logits_kernel(ProcessLogitsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int r = blockIdx.x;
  const int64_t slot = p.slots[r], num_generated = p.states[slot].num_generated;
  const LogitsProcessing wanted = p.states[slot].processing;
  float* scores = p.scores + static_cast<int64_t>(r) * p.scores_stride;
  const int32_t* biased = p.lists + wanted.lists;
  const int32_t* biases = biased + wanted.num_biases;
  const int32_t* ends = biases + wanted.num_biases;
  const int32_t* forced = ends + wanted.num_ends;
  const int32_t* turns = forced + wanted.num_forced;
  const int32_t* words = turns + wanted.num_forced;
  for (int i = threadIdx.x; i < wanted.num_biases; i += kProcessingThreads)
    scores[biased[i]] = __fadd_rn(scores[biased[i]], __int_as_float(biases[i]));
  __syncthreads();

  const int32_t* tokens = nullptr;
  int length = 0;
  if (wanted.keeps_history && p.history.counts != nullptr) {
    tokens = p.history.tokens + slot * p.history.room;
    length = p.history.lengths[slot];
    const uint32_t* counts = p.history.counts + slot * p.history.vocab;
    const bool repeats = wanted.repetition != 1,
               counted = wanted.presence != 0 || wanted.frequency != 0;
    for (int i = threadIdx.x; i < length && (repeats || counted); i += kProcessingThreads) {
      const int32_t token = tokens[i];
      if (token & kRepeated) continue;
      float score = scores[token];
      if (repeats)
        score =
            score < 0 ? __fmul_rn(score, wanted.repetition) : __fdiv_rn(score, wanted.repetition);
      const uint32_t times = counts[token] & ~kInPrompt;
      if (counted && times > 0)
        score = static_cast<float>(__dsub_rn(
            static_cast<double>(score),
            __dadd_rn(wanted.presence, __dmul_rn(wanted.frequency, static_cast<double>(times)))));
      scores[token] = score;
    }
  }
  __syncthreads();

  for (int i = threadIdx.x; i < wanted.num_words; i += kProcessingThreads) {
    const int32_t* word = biased + words[i];
    const int before = words[i + 1] - words[i] - 1;  // tokens that the context must end with
    bool found = before <= length;
    for (int k = 0; k < before && found; ++k)
      found = (tokens[length - before + k] & ~kRepeated) == word[k];
    if (found) scores[word[before]] = -INFINITY;
  }
  if (num_generated < wanted.min_tokens)
    for (int i = threadIdx.x; i < wanted.num_ends; i += kProcessingThreads)
      scores[ends[i]] = -INFINITY;
  bool forces = false;
  for (int i = 0; i < wanted.num_forced; ++i) forces = forces || turns[i] == num_generated;
  if (!forces) return;
  __syncthreads();
  for (int i = threadIdx.x; i < p.vocab; i += kProcessingThreads) scores[i] = -INFINITY;
  __syncthreads();
  for (int i = threadIdx.x; i < wanted.num_forced; i += kProcessingThreads)
    if (turns[i] == num_generated) scores[forced[i]] = 0;
}

// A warp takes one word of the mask at a time.
__global__ void mask_kernel(ProcessLogitsParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int row = p.mask_rows[blockIdx.y], token = blockIdx.x * kProcessingThreads + threadIdx.x;
  if (row < 0 || token >= p.vocab) return;
  const uint32_t word = p.masks[static_cast<int64_t>(row) * ((p.vocab + 31) / 32) + token / 32];
  if ((word >> (token % 32) & 1) == 0)
    p.scores[static_cast<int64_t>(blockIdx.y) * p.scores_stride + token] = -INFINITY;
}

}  // namespace

cudaError_t process_logits(DType dtype, const ProcessLogitsParams& p, cudaStream_t stream) {
  cudaError_t status = dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const dim3 grid(ceil_div(p.vocab, kCopyThreads * kCopyVectors * kVec<T>), p.rows);
    return launch(cast_logits_kernel<T>, grid, kCopyThreads, 0, stream, p.scores,
                  static_cast<const T*>(p.logits), p.vocab, p.stride, p.scores_stride);
  });
  if (status == cudaSuccess)
    status = launch(process_logits_kernel, p.rows, kProcessingThreads, 0, stream, p);
  if (status != cudaSuccess || p.mask_rows == nullptr) return status;
  return launch(mask_kernel, dim3(ceil_div(p.vocab, kProcessingThreads), p.rows),
                kProcessingThreads, 0, stream, p);
}

}  // namespace llmc::kernels
