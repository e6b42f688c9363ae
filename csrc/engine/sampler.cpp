#include "sampler.h"

#include <algorithm>

namespace llmc {
namespace {

constexpr int64_t kMaxEndIds = 64;

// Throws Error where lists are not as kernels::Processing says, or name a token that is none.
void check_processing(const kernels::Processing& wanted, const HostArray<int32_t>& lists, int64_t vocab) {
  const int64_t counts[] = {wanted.lists, wanted.num_biases, wanted.num_ends, wanted.num_forced, wanted.num_words};
  if (std::any_of(std::begin(counts), std::end(counts), [](int64_t count) { return count < 0; }))
    throw Error("a sequence's processing has a negative size");
  const int64_t room = lists.size - wanted.lists;
  const int64_t ends = 2ll * wanted.num_biases, forced = ends + wanted.num_ends;
  const int64_t words = forced + 2ll * wanted.num_forced;
  const int64_t fixed = words + (wanted.num_words > 0 ? wanted.num_words + 1ll : 0);
  if (fixed > room)
    throw Error("a sequence's lists of " + std::to_string(fixed) + " numbers exceed the " +
                std::to_string(std::max<int64_t>(room, 0)) + " that are there");
  const int32_t* own = lists.data + wanted.lists;
  auto check_tokens = [&](int64_t from, int64_t count) {
    for (int64_t i = from; i < from + count; ++i)
      if (own[i] < 0 || own[i] >= vocab)
        throw Error("a sequence's processing names token " + std::to_string(own[i]) + ", the vocabulary has " +
                    std::to_string(vocab));
  };
  check_tokens(0, wanted.num_biases);
  check_tokens(ends, wanted.num_ends);
  check_tokens(forced, wanted.num_forced);
  for (int64_t i = 0; i < wanted.num_words; ++i) {
    const int64_t begin = own[words + i], end = own[words + i + 1];
    if (begin < fixed || end <= begin || end > room) throw Error("a sequence's bad words are not in its lists");
    check_tokens(end - 1, 1);
  }
}

}  // namespace

Sampler::Sampler(const Limits& limits, int vocab_size, DeviceMemory& memory, cudaStream_t stream)
    : limits_(limits), vocab_size_(vocab_size), memory_(memory), stream_(stream), has_history_(limits.max_batch) {
  const int64_t rows = limits.max_batch;
  chosen_ = memory.allocate<int64_t>(rows, "tokens");
  made_ = memory.allocate<int64_t>(rows * (limits.max_seq_len + 1), "tokens");
  end_ids_ = memory.allocate<int64_t>(kMaxEndIds, "tokens");
  step_ = memory.allocate<int32_t>(1, "counters");
  finished_ = memory.allocate<uint8_t>(rows, "counters");
  temperature_ = memory.allocate<float>(rows, "sampling");
  top_k_ = memory.allocate<int32_t>(rows, "sampling");
  top_p_ = memory.allocate<float>(rows, "sampling");
  min_p_ = memory.allocate<float>(rows, "sampling");
  typical_p_ = memory.allocate<float>(rows, "sampling");
  seed_ = memory.allocate<uint64_t>(rows, "sampling");
  drawn_ = memory.allocate<int64_t>(rows, "sampling");
}

bool Sampler::begin(int batch, const Sampling& sampling, const Requests& requests,
                    const std::vector<int64_t>& end_ids) {
  check_rows(0, batch, limits_);
  check_size("temperature", sampling.temperature.size, batch);
  check_size("top_k", sampling.top_k.size, batch);
  check_size("top_p", sampling.top_p.size, batch);
  check_size("min_p", sampling.min_p.size, batch);
  check_size("typical_p", sampling.typical_p.size, batch);
  check_size("seed", sampling.seed.size, batch);
  check_size("drawn", sampling.drawn.size, batch);
  if (end_ids.size() > kMaxEndIds) throw Error("there are more than 64 end tokens");
  if (requests.processing) {
    check_size("processing", requests.processing->size, batch);
    for (const kernels::Processing& wanted : *requests.processing)
      check_processing(wanted, requests.lists, vocab_size_);
  }
  if (requests.logprobs) {
    check_size("logprobs", requests.logprobs->size, batch);
    for (int32_t count : *requests.logprobs)
      if (count > kernels::kTopLogprobs)
        throw Error("log-probabilities of " + std::to_string(count) + " tokens exceed " +
                    std::to_string(kernels::kTopLogprobs));
  }

  const bool moved = reserve(requests);
  batch_ = batch;
  steps_ = 0;
  num_end_ids_ = static_cast<int>(end_ids.size());
  draws_ = std::any_of(sampling.temperature.begin(), sampling.temperature.end(), [](float t) { return t > 0; });
  has_processing_ = requests.processing.has_value();
  reports_ = requests.logprobs.has_value();
  const int32_t zero = 0;
  auto send = [&](void* target, const auto& values) { upload(target, values.data, values.bytes(), stream_); };
  send(temperature_, sampling.temperature);
  send(top_k_, sampling.top_k);
  send(top_p_, sampling.top_p);
  send(min_p_, sampling.min_p);
  send(typical_p_, sampling.typical_p);
  send(seed_, sampling.seed);
  send(drawn_, sampling.drawn);
  if (has_processing_) {
    send(processing_, *requests.processing);
    send(lists_->data, requests.lists);
  }
  if (reports_) send(top_logprobs_, *requests.logprobs);
  upload(step_, &zero, sizeof zero, stream_);
  upload(end_ids_, end_ids.data(), 8 * static_cast<int64_t>(end_ids.size()), stream_);
  check(cudaMemsetAsync(finished_, 0, limits_.max_batch, stream_), "starting to decode");
  return moved;
}

// Room for what requests need. The lists last: where there is none for them, all is as it was.
bool Sampler::reserve(const Requests& requests) {
  const int64_t rows = limits_.max_batch;
  if (requests.logprobs) {
    if (top_logprobs_ == nullptr) top_logprobs_ = memory_.allocate<int32_t>(rows, "sampling");
    if (logprobs_ == nullptr)
      logprobs_ = memory_.allocate<kernels::Logprobs>(kernels::kLogprobSteps * rows, "log-probabilities");
  }
  if (!requests.processing) return false;
  if (processing_ == nullptr) processing_ = memory_.allocate<kernels::Processing>(rows, "sampling");
  if (scores_ == nullptr)
    scores_ = memory_.allocate<float>(rows * scores_width(), "the logits that sampling parameters change");
  if (requests.lists.size <= lists_room_) return false;
  const int64_t room = std::max<int64_t>(2 * requests.lists.size, 1 << 14);
  auto made = std::make_unique<DeviceBuffer>(4 * room, "bad words and logit biases");
  check(cudaStreamSynchronize(stream_), "the engine");  // nothing reads the old ones any more
  lists_ = std::move(made);
  lists_room_ = room;
  return true;
}

bool Sampler::set_history(int first_row, const HostArray<int32_t>& tokens, const std::vector<int32_t>& lengths) {
  const int rows = static_cast<int>(lengths.size());
  const int64_t most = limits_.max_batch, room = limits_.max_seq_len + 1;
  check_rows(first_row, rows, limits_);
  int64_t total = 0;
  for (int32_t length : lengths) {
    if (length < 0 || length > room) throw Error("a prompt of " + std::to_string(length) + " tokens exceeds the cache");
    total += length;
  }
  check_size("the prompts", tokens.size, total);
  for (int32_t token : tokens)
    if (token < 0 || token >= vocab_size_)
      throw Error("token " + std::to_string(token) + " of a prompt is not in the vocabulary of " +
                  std::to_string(vocab_size_));

  constexpr const char* kWhat = "the tokens that penalties are for";
  history_.vocab = vocab_size_;
  history_.room = static_cast<int>(room);
  if (history_.lengths == nullptr) history_.lengths = memory_.allocate<int32_t>(most, kWhat);
  if (history_.tokens == nullptr) history_.tokens = memory_.allocate<int32_t>(most * room, kWhat);
  const bool first = history_.counts == nullptr;
  if (first) history_.counts = memory_.allocate<uint32_t>(most * vocab_size_, kWhat);
  check(cudaMemsetAsync(history_.counts + static_cast<int64_t>(first_row) * vocab_size_, 0,
                        rows * static_cast<int64_t>(vocab_size_) * sizeof(uint32_t), stream_), "forgetting tokens");
  upload(history_.lengths + first_row, lengths.data(), 4ll * rows, stream_);
  const int32_t* at = tokens.data;
  for (int row = 0; row < rows; ++row) {
    upload(history_.tokens + (first_row + row) * room, at, 4ll * lengths[row], stream_);
    at += lengths[row];
    has_history_[first_row + row] = true;
  }
  check(kernels::count_prompts(history_, first_row, rows, stream_), "counting prompts' tokens");
  check(cudaStreamSynchronize(stream_), "the engine");  // the host's arrays end here
  return first;
}

void Sampler::choose(const Tensor& logits, int first_row) {
  const int stride = static_cast<int>(logits.shape[1]);
  kernels::SampleParams p{chosen_, logits.data, temperature_, top_k_, top_p_, min_p_, typical_p_, seed_, drawn_,
                          batch_, vocab_size_, stride, 0, draws_};
  DType dtype = logits.dtype;
  if (has_processing_) {
    const int scores_stride = static_cast<int>(scores_width());
    const kernels::ProcessParams process{scores_, logits.data, processing_, static_cast<const int32_t*>(lists_->data),
                                         drawn_, history_, batch_, vocab_size_, stride, scores_stride, first_row};
    check(kernels::process(dtype, process, stream_), "processing logits");
    dtype = DType::kFloat32;
    p.logits = scores_, p.stride = scores_stride, p.none = -1;
  }
  check(kernels::sample(dtype, p, stream_), "choosing tokens");
  if (!reports_) return;
  const kernels::LogprobsParams report{logprobs_, logits.data, chosen_, top_logprobs_, step_, batch_, vocab_size_,
                                       stride, limits_.max_batch};
  check(kernels::logprobs(logits.dtype, report, stream_), "finding log-probabilities");
}

void Sampler::advance(const NextInputs& inputs, int first_row) {
  kernels::AdvanceParams p{};
  p.input_ids = inputs.input_ids;
  p.position_ids = inputs.position_ids;
  p.past_lens = inputs.past_lens;
  p.drawn = drawn_;
  p.chosen = chosen_;
  p.made = made_;
  p.step = step_;
  p.finished = finished_;
  p.end_ids = end_ids_;
  p.batch = batch_;
  p.max_batch = limits_.max_batch;
  p.num_end_ids = num_end_ids_;
  p.max_seq_len = limits_.max_seq_len;
  p.processing = has_processing_ && history_.counts != nullptr ? processing_ : nullptr;
  p.history = history_;
  p.first_row = first_row;
  check(kernels::advance(p, stream_), "counting a step");
}

void Sampler::count(int steps) {
  if (steps > limits_.max_seq_len + 1 - steps_) throw Error("there is no room for that many steps");
  steps_ += steps;
}

std::vector<int64_t> Sampler::tokens(int steps) const {
  if (steps < 0 || steps > steps_) throw Error("there were not that many steps");
  std::vector<int64_t> tokens(static_cast<int64_t>(steps) * batch_);
  if (tokens.empty()) return tokens;
  const int64_t* first = made_ + static_cast<int64_t>(steps_ - steps) * limits_.max_batch;
  check(cudaMemcpy2DAsync(tokens.data(), 8ll * batch_, first, 8ll * limits_.max_batch, 8ll * batch_, steps,
                          cudaMemcpyDeviceToHost, stream_), "reading tokens");
  check(cudaStreamSynchronize(stream_), "the engine");
  return tokens;
}

void Sampler::read_logprobs(int steps, kernels::Logprobs* out, int64_t count) const {
  if (!reports_) throw Error("no log-probabilities were asked for");
  if (steps < 0 || steps > steps_ || steps > kernels::kLogprobSteps)
    throw Error("log-probabilities of " + std::to_string(steps) + " steps are not kept");
  check_size("the log-probabilities' records", count, static_cast<int64_t>(steps) * batch_);
  for (int step = steps_ - steps; step < steps_; ++step, out += batch_)
    check(cudaMemcpyAsync(out, logprobs_ + static_cast<int64_t>(step % kernels::kLogprobSteps) * limits_.max_batch,
                          sizeof(kernels::Logprobs) * batch_, cudaMemcpyDeviceToHost, stream_),
          "reading log-probabilities");
  check(cudaStreamSynchronize(stream_), "the engine");
}

void Sampler::copy_row(int source, int target) {
  if (history_.counts == nullptr || !has_history_[source]) return;
  auto copy = [&](auto* rows, int64_t width) {
    check(cudaMemcpyAsync(rows + target * width, rows + source * width, width * sizeof(*rows),
                          cudaMemcpyDeviceToDevice, stream_), "copying the tokens of a sequence");
  };
  copy(history_.counts, history_.vocab);
  copy(history_.tokens, history_.room);
  copy(history_.lengths, 1);
  has_history_[target] = true;
}

}  // namespace llmc
