// Beam search: a step whose rows continue one another, and what the host chooses from after it.
#include <algorithm>
#include <cstring>

#include "engine.h"

namespace llmc {

// What the host gives for a row of a step: a token, its parent, its past, and how much of that is the prompt.
constexpr int64_t kGiven = 8 + 3 * 4;
// What it gets for a candidate: a token and a log-probability.
constexpr int64_t kFound = 4 + 4;

Engine::Beams::Beams(int rows, int vocab, int count)
    : count(count),
      given(rows * kGiven, "beam search"),
      found(rows * kFound * count, "beam search"),
      scratch(kernels::candidates_scratch(rows, vocab, count), "beam search") {
  check(cudaMallocHost(&host_given, rows * kGiven), "allocating pinned memory");
  const cudaError_t status = cudaMallocHost(&host_found, rows * kFound * count);
  if (status != cudaSuccess) cudaFreeHost(host_given);
  check(status, "allocating pinned memory");
}

Engine::Beams::~Beams() {
  cudaFreeHost(host_given);
  cudaFreeHost(host_found);
}

void Engine::check_beams() const {
  if (indirection_ < 0)
    throw Error("the model was not compiled for beam search; compile it with --max_beam_width");
}

void Engine::reserve_beams(int count) {
  if (count < 1 || count > vocab_size_)
    throw Error(std::to_string(count) + " candidates are not from 1 to the vocabulary's " +
                std::to_string(vocab_size_));
  if (beams_ != nullptr && beams_->count >= count) return;
  synchronize();
  beams_.reset();
  int room = 16;
  while (room < count) room *= 2;
  beams_ = std::make_unique<Beams>(limits_.max_batch, vocab_size_, std::min(room, vocab_size_));
}

// Of the logits that last_ made, to the host's pinned memory: all tokens, then all log-probabilities.
void Engine::enqueue_candidates(int rows, int count) {
  const Tensor logits = resolve(logits_, last_);
  auto* tokens = static_cast<int32_t*>(beams_->found.data);
  const kernels::CandidatesParams p{tokens, reinterpret_cast<float*>(tokens + static_cast<int64_t>(rows) * count),
                                    logits.data, beams_->scratch.data, rows, vocab_size_,
                                    static_cast<int>(logits.shape[1]), count};
  check(kernels::candidates(logits.dtype, p, stream_), "choosing candidates");
  check(cudaMemcpyAsync(beams_->host_found, beams_->found.data, rows * kFound * count, cudaMemcpyDeviceToHost,
                        stream_), "reading candidates");
}

void Engine::read_candidates(int rows, int count, int32_t* tokens, float* log_probs) const {
  const int64_t bytes = 4ll * rows * count;
  std::memcpy(tokens, beams_->host_found, bytes);
  std::memcpy(log_probs, static_cast<const char*>(beams_->host_found) + bytes, bytes);
}

void Engine::candidates(int count, int32_t* tokens, float* log_probs) {
  check(cudaSetDevice(device_), "choosing a device");
  if (last_.num_logits > limits_.max_batch)
    throw Error("candidates of " + std::to_string(last_.num_logits) + " rows exceed max_batch_size " +
                std::to_string(limits_.max_batch));
  reserve_beams(count);
  enqueue_candidates(last_.num_logits, count);
  synchronize();
  read_candidates(last_.num_logits, count, tokens, log_probs);
}

void Engine::follow(const BeamStep& beams, int32_t* tokens, float* log_probs) {
  const int rows = beams.batch * beams.beam;
  check_beams();
  if (rows > limits_.max_batch || beams.beam > kernels::kMaxBeams)
    throw Error(std::to_string(beams.batch) + " prompts with " + std::to_string(beams.beam) +
                " beams each exceed max_batch_size " + std::to_string(limits_.max_batch) + " or the " +
                std::to_string(kernels::kMaxBeams) + " beams that a prompt can have");
  check(cudaSetDevice(device_), "choosing a device");
  reserve_beams(beams.count);
  auto copy = [at = static_cast<char*>(beams_->host_given)](const void* values, int64_t bytes) mutable {
    std::memcpy(at, values, bytes);
    at += bytes;
  };
  copy(beams.tokens, 8ll * rows);
  copy(beams.parents, 4ll * rows);
  copy(beams.past, 4ll * rows);
  copy(beams.prompts, 4ll * rows);
  const Step step{rows, rows, rows, 0, true, 0, 0, true};
  beams_->graphs[{beams.batch, beams.beam, beams.count}].run(stream_, 1, [&] {
    upload(beams_->given.data, beams_->host_given, rows * kGiven);
    auto* parents = reinterpret_cast<const int32_t*>(static_cast<const int64_t*>(beams_->given.data) + rows);
    check(kernels::follow({static_cast<int64_t*>(input("input_ids")), static_cast<int64_t*>(input("position_ids")),
                           static_cast<int32_t*>(input("past_lens")), static_cast<int32_t*>(input("cu_seqlens")),
                           static_cast<int64_t*>(input("logits_indices")), static_cast<int32_t*>(input(kIndirection)),
                           static_cast<const int64_t*>(beams_->given.data), parents, parents + rows,
                           parents + 2 * rows, beams.batch, beams.beam, limits_.max_seq_len}, stream_),
          "continuing beams");
    enqueue(step);
    enqueue_candidates(rows, beams.count);
  });
  last_ = step;
  synchronize();
  read_candidates(rows, beams.count, tokens, log_probs);
}

}  // namespace llmc
