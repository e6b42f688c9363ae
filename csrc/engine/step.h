// What the host gives for a step, and what of it is checked before anything is enqueued: kernels believe it.
#pragma once

#include <algorithm>

#include "../plugins/common/plugin.h"

namespace llmc {

// A dimension below zero is one of these sizes of a step.
enum Size : int64_t { kNumTokens = -1, kNumLogits = -2, kBatch = -3, kBatchPlus1 = -4 };

struct Limits {
  int max_batch, max_tokens, max_logits, max_seq_len;
  int mem_max_seq_len = 0;  // tokens of a prompt that an encoder takes; 0: there is none

  // Throws Error where one is below what any step needs.
  void check() const;
  int64_t memory_rows() const { return static_cast<int64_t>(max_batch) * mem_max_seq_len; }
  // Sequences that a decode step has at most.
  int decoding() const { return std::min(max_batch, std::min(max_tokens, max_logits)); }
};

// An array on the host, which somebody else owns.
template <typename T>
struct HostArray {
  const T* data = nullptr;
  int64_t size = 0;

  const T& operator[](int64_t i) const { return data[i]; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
  int64_t bytes() const { return size * static_cast<int64_t>(sizeof(T)); }
};

// The sizes of a step, and what Context says of it.
struct Step {
  int num_tokens = 0, num_logits = 0, batch = 0, first_row = 0;
  bool decode = false;         // every sequence has exactly one new token, and all of their logits are wanted
  int longest = 0, reach = 0;
  bool indirect = false;

  static Step of_decoding(int batch, bool indirect = false) { return {batch, batch, batch, 0, true, 0, 0, indirect}; }
};

// A step of prompts, of continuations, or of both.
struct StepInputs {
  HostArray<int64_t> input_ids, position_ids;  // [num_tokens]
  HostArray<int32_t> cu_seqlens, past_lens;    // [batch + 1], [batch]
  HostArray<int64_t> logits_indices;           // [num_logits]
  HostArray<int32_t> indirection;              // [batch, max_seq_len], or nothing
  int first_row;                               // the cache row of sequence 0
  bool decode;                                 // see Step
};
// Throws Error where an array has another size than the others say, or a value that points out of anything.
Step check_step(const StepInputs& inputs, const Limits& limits);

// Prompts for an encoder: token i leaves what decoders see of it in row memory_rows[i] of the memory.
struct EncoderInputs {
  HostArray<int64_t> input_ids, position_ids;
  HostArray<int32_t> cu_seqlens;
  HostArray<int64_t> memory_rows;
};
Step check_step(const EncoderInputs& inputs, const Limits& limits);

// Where sequences' prompts are in the encoder's memory: lens[b] rows from starts[b] on.
void check_memory(const HostArray<int32_t>& starts, const HostArray<int32_t>& lens, const Limits& limits);

// A step of beam search, on the host: see kernels::FollowParams. [batch * beam] each.
struct BeamStep {
  HostArray<int64_t> tokens;
  HostArray<int32_t> parents, past, prompts;
  int batch, beam, count;  // count: candidates wanted of each row

  int rows() const { return batch * beam; }
};
void check_step(const BeamStep& step, const Limits& limits);

// A batch within the limits, in cache rows from first_row on.
void check_rows(int64_t first_row, int64_t batch, const Limits& limits);

// Throws Error where an array has not the size that it is to have.
void check_size(const char* what, int64_t size, int64_t wanted);

}  // namespace llmc
