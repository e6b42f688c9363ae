#include "sampler.h"

#include <algorithm>

#include "../kernels/sampling/params.h"

namespace llmc {

Sampler::Sampler(const Limits& limits, int vocab_size, DeviceMemory& memory, cudaStream_t stream)
    : limits_(limits),
      vocab_size_(vocab_size),
      memory_(memory),
      stream_(stream),
      slots_(limits.max_batch) {
  const int64_t slots = limits.max_batch;
  states_ = memory.allocate<kernels::SlotState>(slots, "sampling");
  sampled_ = memory.allocate<int64_t>(slots, "tokens");
  last_ = memory.allocate<int64_t>(slots, "tokens");
  counts_ = memory.allocate<int32_t>(slots, "tokens");
  if (limits.prompt_lookup) keep_tokens();
}

void Sampler::keep_tokens() {
  if (history_.tokens != nullptr) return;
  const int64_t slots = limits_.max_batch;
  history_.room = limits_.max_seq_len + 1;
  history_.lengths = memory_.allocate<int32_t>(slots, "the tokens of sequences");
  history_.tokens = memory_.allocate<int32_t>(slots * history_.room, "the tokens of sequences");
}

void Sampler::keep_counts() {
  keep_tokens();
  if (history_.counts != nullptr) return;
  history_.vocab = vocab_size_;
  history_.counts = memory_.allocate<uint32_t>(int64_t{limits_.max_batch} * vocab_size_,
                                               "the token counts of penalties");
}

// Finds a free range for a slot's lists.
int64_t Sampler::place_lists(int32_t slot, int64_t size) {
  places_.erase(slot);
  if (size == 0) return 0;
  std::vector<std::pair<int64_t, int64_t>> taken;
  for (const auto& [other, place] : places_) taken.push_back(place);
  std::sort(taken.begin(), taken.end());
  int64_t at = 0;
  for (const auto& [from, to] : taken) {
    if (at + size <= from) break;
    at = to;
  }
  if (at + size > lists_room_) {
    const int64_t room = std::max<int64_t>(2 * (at + size), 1 << 14);
    auto made = std::make_unique<DeviceBuffer>(4 * room, "bad words and logit biases");
    if (lists_room_ > 0)
      check(cudaMemcpyAsync(made->data, lists_->data, 4 * lists_room_, cudaMemcpyDeviceToDevice,
                            stream_),
            "growing the buffer of bad words and logit biases");
    check(cudaStreamSynchronize(stream_), "the engine");  // nothing reads the old buffer any more
    lists_ = std::move(made);
    lists_room_ = room;
  }
  places_[slot] = {at, at + size};
  return at;
}

void Sampler::make_room(const Admissions& admit, std::vector<kernels::SlotState>& states) {
  states.assign(admit.states.begin(), admit.states.end());
  for (size_t i = 0; i < states.size(); ++i) {
    kernels::LogitsProcessing& wanted = states[i].processing;
    // Its lists end where the next sequence's begin.
    const int64_t begin = wanted.lists, end = i + 1 < states.size()
                                                  ? admit.states[i + 1].processing.lists
                                                  : admit.lists.size;
    if (end < begin) throw Error("the lists of admitted sequences are not in their order");
    wanted.lists = static_cast<int32_t>(place_lists(admit.slots[i], end - begin));
    if (wanted.keeps_history) keep_counts();
  }
}

void Sampler::admit(const Admissions& admit, const AdmittedArrays& given,
                    const std::vector<kernels::SlotState>& states) {
  if (states.empty()) return;
  for (size_t i = 0; i < states.size(); ++i) {
    const kernels::SlotState& state = states[i];
    const kernels::LogitsProcessing& p = state.processing;
    const bool processes =
        p.keeps_history || p.num_biases || p.num_ends || p.num_forced || p.num_words;
    slots_[admit.slots[i]] = {false, state.temperature > 0, processes, state.logprobs >= 0,
                              p.keeps_history || state.prompt_lookup};
    const auto place = places_.find(admit.slots[i]);
    if (place == places_.end()) continue;
    check(cudaMemcpyAsync(static_cast<int32_t*>(lists_->data) + p.lists,
                          given.lists + admit.states[i].processing.lists,
                          4 * (place->second.second - place->second.first),
                          cudaMemcpyDeviceToDevice, stream_),
          "copying bad words and logit biases");
  }
  check(kernels::admit({states_, given.states, given.slots, given.prompts, given.starts,
                        given.tokens, history_, static_cast<int>(states.size())},
                       stream_),
        "admitting sequences to slots");
}

// Samples from rows [begin, end).
void Sampler::choose(const Tensor& logits, const int32_t* device_slots, int begin, int end,
                     bool draws, bool processes, const Masks& masks, const int32_t* drafts_before) {
  const int stride = static_cast<int>(logits.shape[1]), rows = end - begin;
  const void* data =
      static_cast<const char*>(logits.data) + begin * logits.shape[1] * width(logits.dtype);
  kernels::SampleParams p{sampled_ + begin, data, states_, device_slots + begin, rows, vocab_size_,
                          stride,           0,    draws};
  if (drafts_before != nullptr) p.drafts_before = drafts_before + begin;
  DType dtype = logits.dtype;
  if (processes) {
    const int64_t width = scores_width();
    if (scores_ == nullptr)
      scores_ = memory_.allocate<float>(limits_.max_batch * width, "the processed logits");
    const kernels::ProcessLogitsParams process{
        scores_,
        data,
        states_,
        device_slots + begin,
        lists_ ? static_cast<const int32_t*>(lists_->data) : nullptr,
        history_,
        rows,
        vocab_size_,
        stride,
        static_cast<int>(width),
        masks.rows != nullptr ? masks.rows + begin : nullptr,
        masks.words};
    check(kernels::process_logits(dtype, process, stream_), "processing logits");
    dtype = DType::kFloat32;
    p.logits = scores_, p.stride = static_cast<int>(width), p.none = -1;
  }
  check(kernels::sample(dtype, p, stream_), "choosing tokens");
}

void Sampler::sample(const Tensor& logits, const int32_t* device_slots,
                     const std::vector<int32_t>& slots, const Masks& masks,
                     const DraftedRows* drafted) {
  const int rows = static_cast<int>(slots.size()), stride = static_cast<int>(logits.shape[1]);
  bool draws = false, processes = masks.rows != nullptr, keeps = false, counts = false;
  reported_ = false;
  for (int32_t slot : slots) {
    SlotRecord& known = slots_[slot];
    known.has_sampled = true;
    draws = draws || known.draws, processes = processes || known.processes,
    keeps = keeps || known.keeps_history, counts = counts || known.processes;
    reported_ = reported_ || known.reports;
  }
  kernels::TokenHistory history = history_;
  if (!keeps) history = {};
  if (drafted == nullptr) {
    choose(logits, device_slots, 0, rows, draws, processes, masks, nullptr);
  } else {
    // Processors depend on the tokens before, so that positions are sampled in turn.
    const int step = counts ? 1 : drafted->positions();
    for (int first = 0; first < drafted->positions(); first += step) {
      const int end = first + step;
      choose(logits, device_slots, drafted->begins[first], drafted->begins[end], draws, processes,
             masks, counts ? nullptr : drafted->drafts_before);
      check(kernels::accept_drafts(
                {states_, last_, device_slots, sampled_, drafted->drafts, drafted->row_of, counts_,
                 history, drafted->sequences, drafted->positions(), first, end, drafted->input_ids},
                stream_),
            "accepting drafts");
    }
  }
  if (reported_) {
    if (logprobs_ == nullptr)
      logprobs_ = memory_.allocate<kernels::Logprobs>(limits_.max_batch, "log-probabilities");
    check(kernels::logprobs(
              logits.dtype,
              {logprobs_, logits.data, sampled_, states_, device_slots, rows, vocab_size_, stride},
              stream_),
          "computing log-probabilities");
  }
  if (drafted == nullptr)
    check(kernels::update_slots({states_, last_, device_slots, sampled_, history, rows}, stream_),
          "counting tokens");
}

}  // namespace llmc
