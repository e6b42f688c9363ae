#include "step.h"

namespace llmc {
namespace {

std::string text(int64_t number) { return std::to_string(number); }

// Throws Error where a value is not from `least` to below `end`.
template <typename T>
void check_range(const char* what, const HostArray<T>& values, int64_t least, int64_t end) {
  for (int64_t i = 0; i < values.size; ++i)
    if (values[i] < least || values[i] >= end)
      throw Error(std::string(what) + "[" + text(i) + "] is " + text(values[i]) + ", which is not from " +
                  text(least) + " to " + text(end - 1));
}

// Every sequence has a token at least, and all tokens are some sequence's.
void check_starts(const HostArray<int32_t>& cu_seqlens, int64_t batch, int64_t num_tokens) {
  check_size("cu_seqlens", cu_seqlens.size, batch + 1);
  if (cu_seqlens[0] != 0 || cu_seqlens[batch] != num_tokens)
    throw Error("cu_seqlens are from " + text(cu_seqlens[0]) + " to " + text(cu_seqlens[batch]) +
                ", the tokens from 0 to " + text(num_tokens));
  for (int64_t b = 0; b < batch; ++b)
    if (cu_seqlens[b + 1] <= cu_seqlens[b])
      throw Error("cu_seqlens[" + text(b + 1) + "] is " + text(cu_seqlens[b + 1]) + " after " + text(cu_seqlens[b]) +
                  "; every sequence of a step has a token");
}

void check_limits(int64_t num_tokens, int64_t num_logits, int64_t rows, const Limits& limits) {
  if (num_tokens > limits.max_tokens || num_logits > limits.max_logits || rows > limits.max_batch)
    throw Error("a step of " + text(num_tokens) + " tokens, " + text(num_logits) + " logits and cache rows up to " +
                text(rows) + " exceeds the engine's limits of " + text(limits.max_tokens) + ", " +
                text(limits.max_logits) + " and " + text(limits.max_batch));
}

}  // namespace

void Limits::check() const {
  auto check = [](const char* name, int limit, int least) {
    constexpr int kMost = 1 << 30;  // so that the sum of two is an int
    if (limit < least || limit > kMost)
      throw Error(std::string("the engine's ") + name + " is " + text(limit) + ", which is not from " + text(least) +
                  " to " + text(kMost));
  };
  check("max_batch", max_batch, 1);
  check("max_tokens", max_tokens, 1);
  check("max_logits", max_logits, 1);
  check("max_seq_len", max_seq_len, 1);
  check("mem_max_seq_len", mem_max_seq_len, 0);
}

void check_size(const char* what, int64_t size, int64_t wanted) {
  if (size != wanted)
    throw Error(std::string(what) + " has " + text(size) + " elements, expected " + text(wanted));
}

void check_rows(int64_t first_row, int64_t batch, const Limits& limits) {
  if (batch < 1) throw Error("a batch of " + text(batch) + " has no sequence");
  if (first_row < 0 || first_row + batch > limits.max_batch)
    throw Error("a batch of " + text(batch) + " in cache rows from " + text(first_row) + " on exceeds max_batch_size " +
                text(limits.max_batch));
}

Step check_step(const StepInputs& inputs, const Limits& limits) {
  const int64_t num_tokens = inputs.input_ids.size, num_logits = inputs.logits_indices.size;
  const int64_t batch = inputs.past_lens.size;
  if (inputs.first_row < 0) throw Error("there is no cache row " + text(inputs.first_row));
  check_limits(num_tokens, num_logits, inputs.first_row + batch, limits);
  check_rows(inputs.first_row, batch, limits);
  check_size("position_ids", inputs.position_ids.size, num_tokens);
  check_starts(inputs.cu_seqlens, batch, num_tokens);
  check_range("position_ids", inputs.position_ids, 0, limits.max_seq_len);
  if (num_logits < 1) throw Error("a step wants no logits");
  check_range("logits_indices", inputs.logits_indices, 0, num_tokens);
  Step step{static_cast<int>(num_tokens), static_cast<int>(num_logits), static_cast<int>(batch), inputs.first_row,
            inputs.decode};
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t fresh = inputs.cu_seqlens[b + 1] - inputs.cu_seqlens[b], past = inputs.past_lens[b];
    if (past < 0 || past + fresh > limits.max_seq_len)
      throw Error(text(fresh) + " tokens after " + text(past) + " of sequence " + text(b) +
                  " exceed the cache's " + text(limits.max_seq_len) + " positions");
    step.longest = std::max<int>(step.longest, fresh);
    step.reach = std::max<int>(step.reach, past + fresh);
  }
  if (inputs.decode)  // then the model's Gather is left out
    for (int64_t i = 0; i < std::max(num_tokens, num_logits); ++i)
      if (num_tokens != batch || num_logits != batch || inputs.logits_indices[i] != i)
        throw Error("a decode step has a token of each sequence, and wants the logits of all in their order");
  step.indirect = inputs.indirection.size > 0;
  if (step.indirect) {
    check_size("cache_indirection", inputs.indirection.size, batch * limits.max_seq_len);
    for (int64_t b = 0; b < batch; ++b)
      check_range("cache_indirection",
                  HostArray<int32_t>{inputs.indirection.data + b * limits.max_seq_len, inputs.past_lens[b]}, 0,
                  limits.max_batch - inputs.first_row);
  }
  return step;
}

Step check_step(const EncoderInputs& inputs, const Limits& limits) {
  const int64_t num_tokens = inputs.input_ids.size, batch = inputs.cu_seqlens.size - 1;
  if (num_tokens > limits.max_tokens || batch > limits.max_batch)
    throw Error(text(batch) + " prompts of " + text(num_tokens) + " tokens exceed the engine's limits of " +
                text(limits.max_batch) + " and " + text(limits.max_tokens));
  check_rows(0, batch, limits);
  check_size("position_ids", inputs.position_ids.size, num_tokens);
  check_size("memory_rows", inputs.memory_rows.size, num_tokens);
  check_starts(inputs.cu_seqlens, batch, num_tokens);
  check_range("position_ids", inputs.position_ids, 0, limits.mem_max_seq_len);
  check_range("memory_rows", inputs.memory_rows, 0, limits.memory_rows());
  return {static_cast<int>(num_tokens), 0, static_cast<int>(batch)};
}

void check_memory(const HostArray<int32_t>& starts, const HostArray<int32_t>& lens, const Limits& limits) {
  check_rows(0, starts.size, limits);
  check_size("encoder_sequence_length", lens.size, starts.size);
  for (int64_t b = 0; b < starts.size; ++b)
    if (starts[b] < 0 || lens[b] < 0 || static_cast<int64_t>(starts[b]) + lens[b] > limits.memory_rows())
      throw Error(text(lens[b]) + " rows from " + text(starts[b]) + " on exceed the encoder's memory of " +
                  text(limits.memory_rows()) + " rows");
}

void check_step(const BeamStep& step, const Limits& limits) {
  if (step.batch < 1 || step.beam < 1 || static_cast<int64_t>(step.batch) * step.beam > limits.decoding() ||
      step.beam > kernels::kMaxBeams)
    throw Error(text(step.batch) + " prompts with " + text(step.beam) + " beams each exceed max_batch_size " +
                text(limits.decoding()) + " or the " + text(kernels::kMaxBeams) + " beams that a prompt can have");
  const int64_t rows = step.rows();
  check_size("tokens", step.tokens.size, rows);
  check_size("parents", step.parents.size, rows);
  check_size("past_lens", step.past.size, rows);
  check_size("prompt_lens", step.prompts.size, rows);
  check_range("parents", step.parents, 0, step.beam);
  check_range("past_lens", step.past, 0, limits.max_seq_len);
  check_range("prompt_lens", step.prompts, 0, limits.max_seq_len + 1ll);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = row / step.beam * step.beam;
    if (step.past[row] != step.past[first] || step.prompts[row] != step.prompts[first])
      throw Error("beams of prompt " + text(row / step.beam) + " differ in how long they are");
  }
}

}  // namespace llmc
