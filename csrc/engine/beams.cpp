#include "beams.h"

#include <algorithm>
#include <cstring>

namespace llmc {
namespace {

// What the host gives for a row of a step: a token, its parent, its past, and how much of that is the prompt.
constexpr int64_t kGiven = 8 + 3 * 4;
// What it gets for a candidate: a token and a log-probability.
constexpr int64_t kFound = 4 + 4;

}  // namespace

Beams::Room::Room(int rows, int vocab, int count)
    : count(count),
      given(rows * kGiven, "beam search"),
      found(rows * kFound * count, "beam search"),
      scratch(kernels::candidates_scratch(rows, vocab, count), "beam search"),
      host_given(rows * kGiven),
      host_found(rows * kFound * count) {}

void Beams::reserve(int count) {
  if (count < 1 || count > vocab_size_)
    throw Error(std::to_string(count) + " candidates are not from 1 to the vocabulary's " +
                std::to_string(vocab_size_));
  if (room_ != nullptr && room_->count >= count) return;
  check(cudaStreamSynchronize(stream_), "the engine");
  graphs_.clear();
  room_.reset();
  int64_t room = 16;
  while (room < count) room *= 2;
  room = std::min<int64_t>(room, vocab_size_);
  room_ = std::make_unique<Room>(limits_.max_batch, vocab_size_, static_cast<int>(room));
}

void Beams::give(const BeamStep& step) {
  auto copy = [at = static_cast<char*>(room_->host_given.data)](const auto& values) mutable {
    std::memcpy(at, values.data, values.bytes());
    at += values.bytes();
  };
  copy(step.tokens);
  copy(step.parents);
  copy(step.past);
  copy(step.prompts);
}

void Beams::follow(const BeamStep& step, const BeamInputs& inputs) {
  const int rows = step.rows();
  upload(room_->given.data, room_->host_given.data, rows * kGiven, stream_);
  auto* tokens = static_cast<const int64_t*>(room_->given.data);
  auto* parents = reinterpret_cast<const int32_t*>(tokens + rows);
  check(kernels::follow({inputs.input_ids, inputs.position_ids, inputs.past_lens, inputs.cu_seqlens,
                         inputs.logits_indices, inputs.indirection, tokens, parents, parents + rows,
                         parents + 2 * rows, step.batch, step.beam, limits_.max_seq_len}, stream_),
        "continuing beams");
}

// To the host's pinned memory: all tokens, then all log-probabilities.
void Beams::find(const Tensor& logits, int count) {
  const int rows = static_cast<int>(logits.shape[0]);
  auto* tokens = static_cast<int32_t*>(room_->found.data);
  const kernels::CandidatesParams p{tokens, reinterpret_cast<float*>(tokens + static_cast<int64_t>(rows) * count),
                                    logits.data, room_->scratch.data, rows, vocab_size_,
                                    static_cast<int>(logits.shape[1]), count};
  check(kernels::candidates(logits.dtype, p, stream_), "choosing candidates");
  check(cudaMemcpyAsync(room_->host_found.data, room_->found.data, rows * kFound * count, cudaMemcpyDeviceToHost,
                        stream_), "reading candidates");
}

void Beams::read(int rows, int count, int32_t* tokens, float* log_probs) const {
  const int64_t bytes = 4ll * rows * count;
  std::memcpy(tokens, room_->host_found.data, bytes);
  std::memcpy(log_probs, static_cast<const char*>(room_->host_found.data) + bytes, bytes);
}

}  // namespace llmc
