#include "draft_layers.h"

#include <algorithm>
#include <numeric>

namespace llmc {

SentLayers SentLayers::of(StagingBuffer& into, const StepInputs& inputs,
                          const std::vector<int>& origins) {
  const std::vector<int32_t> starts = inputs.sequence_starts();
  const int count = static_cast<int>(starts.size()) - 1;
  std::vector<int32_t> of_token, firsts, ends, slots, sampled(count, -1), lags, sampled_origins;
  std::vector<int32_t> by_row(inputs.batch());
  for (int s = 0; s < count; ++s) {
    const int first_row = inputs.verifies ? starts[s] : s;
    const int last_row = inputs.verifies ? starts[s + 1] - 1 : s;
    for (int row = first_row; row <= last_row; ++row) by_row[row] = s;
    firsts.push_back(inputs.cu_seqlens[first_row]);
    ends.push_back(inputs.cu_seqlens[last_row + 1]);
    slots.push_back(inputs.slots[first_row]);
    const int past = inputs.past_lens[first_row] - inputs.unread_of(first_row);
    lags.push_back(std::max(past - origins[slots.back()], 0));
    of_token.insert(of_token.end(), ends.back() - firsts.back(), s);
  }
  for (int64_t i = 0; i < inputs.sample.size; ++i) {
    sampled[by_row[inputs.sample[i]]] = static_cast<int32_t>(i);
    sampled_origins.push_back(origins[inputs.slots[inputs.sample[i]]]);
  }
  return {into.add(of_token),
          into.add(firsts),
          into.add(ends),
          into.add(slots),
          into.add(sampled),
          into.add(lags),
          into.add(sampled_origins),
          count};
}

DraftLayers::DraftLayers(const Program& program, DeviceMemory& memory, cudaStream_t stream)
    : program_(program),
      stream_(stream),
      max_rows_(program.limits().decoding()),
      padding_rows_(std::max(program.limits().max_tokens, program.limits().max_batch)),
      origins_(program.limits().max_batch) {
  constexpr const char* kWhat = "drafts";
  const Limits& limits = program.limits();
  const int64_t tokens = padding_rows_, rows = max_rows_, slots = limits.max_batch;
  int64_t widest = 0;
  for (int layer = 0; layer < program.num_draft_layers(); ++layer)
    widest = std::max<int64_t>(widest, width_of(layer));
  const int64_t row_bytes = widest * width(program.dtype());
  lagged_ids_ = memory.allocate<int64_t>(tokens, kWhat);
  lagged_positions_ = memory.allocate<int64_t>(tokens, kWhat);
  lagged_past_lens_ = memory.allocate<int32_t>(slots, kWhat);
  lagged_hidden_ = memory.allocate<char>(tokens * row_bytes, kWhat);
  tail_ids_ = memory.allocate<int64_t>(rows, kWhat);
  tail_positions_ = memory.allocate<int64_t>(rows, kWhat);
  tail_past_lens_ = memory.allocate<int32_t>(rows, kWhat);
  tail_seqlens_ = memory.allocate<int32_t>(rows + 1, kWhat);
  tail_table_ = memory.allocate<int32_t>(program.capacity(program.input(kBlockTable)), kWhat);
  tail_hidden_ = memory.allocate<char>(rows * row_bytes, kWhat);
  last_rows_ = memory.allocate<int64_t>(program.num_draft_layers() * rows, kWhat);
  carried_.push_back(nullptr);
  for (int layer = 1; layer < program.num_draft_layers(); ++layer)
    carried_.push_back(memory.allocate<char>(slots * row_bytes, kWhat));
}

int DraftLayers::width_of(int layer) const {
  return static_cast<int>(program_.tensor(program_.draft(layer).hidden).shape[1]);
}

std::map<int, void*> DraftLayers::step_inputs(int layer) const {
  return {{program_.input("input_ids"), lagged_ids_},
          {program_.input("position_ids"), lagged_positions_},
          {program_.input("past_lens"), lagged_past_lens_},
          {program_.draft(layer).hidden, lagged_hidden_}};
}

std::map<int, void*> DraftLayers::tail_inputs(int layer) const {
  return {{program_.input("input_ids"), tail_ids_},
          {program_.input("position_ids"), tail_positions_},
          {program_.input("cu_seqlens"), tail_seqlens_},
          {program_.input("past_lens"), tail_past_lens_},
          {program_.input(kBlockTable), tail_table_},
          {program_.draft(layer).hidden, tail_hidden_}};
}

void DraftLayers::allocate(const std::vector<int32_t>& table) {
  upload(tail_table_, table.data(), 4 * static_cast<int64_t>(table.size()), stream_);
  std::vector<int32_t> starts(max_rows_ + 1);
  std::iota(starts.begin(), starts.end(), 0);
  upload(tail_seqlens_, starts.data(), 4 * static_cast<int64_t>(starts.size()), stream_);
  std::vector<int64_t> last;
  for (int layer = 0; layer < program_.num_draft_layers(); ++layer)
    for (int64_t row = 0; row < max_rows_; ++row) last.push_back(row * layer + layer - 1);
  upload(last_rows_, last.data(), 8 * static_cast<int64_t>(last.size()), stream_);
  check(cudaStreamSynchronize(stream_), "the engine");  // the host's arrays are read
}

SentLayers DraftLayers::send(StagingBuffer& into, const StepInputs& inputs) {
  for (int32_t slot : inputs.admit.slots)
    for (int row = inputs.batch() - 1; row >= 0; --row)
      if (inputs.slots[row] == slot) origins_[slot] = inputs.past_lens[row];
  return SentLayers::of(into, inputs, origins_);
}

void DraftLayers::lag(int layer, const Given& given, const Step& step, const Tensor& hidden_out) {
  auto at = [&](int64_t offset) {
    return reinterpret_cast<const int32_t*>(given.received + offset);
  };
  const SentLayers& sent = given.sent;
  const kernels::LayerSequences sequences{at(sent.of_token), at(sent.firsts),  at(sent.ends),
                                          at(sent.slots),    at(sent.sampled), at(sent.lags),
                                          sent.count};
  kernels::LagRowsParams p{};
  p.sequences = sequences;
  p.ids = given.ids;
  p.position_ids = given.position_ids;
  p.hidden_out = hidden_out.data;
  p.carried = carried_[layer];
  p.lagged_ids = lagged_ids_;
  p.lagged_positions = lagged_positions_;
  p.past_lens = given.past_lens;
  p.lagged_past_lens = lagged_past_lens_;
  p.hidden = lagged_hidden_;
  p.num_tokens = given.num_tokens;
  p.rows = std::max(step.num_tokens, given.num_tokens);
  p.batch = step.batch;
  p.layer = layer;
  p.width = width_of(layer);
  p.by_rows = step.decode || step.verifies;
  check(kernels::lag_rows(hidden_out.dtype, p, stream_), "preparing a layer of a draft model");
  const kernels::CarryRowsParams carry{sequences,       given.counts,    given.before_drafts,
                                       hidden_out.data, carried_[layer], layer,
                                       width_of(layer)};
  check(kernels::carry_rows(hidden_out.dtype, carry, stream_),
        "preparing a layer of a draft model");
}

void DraftLayers::tail(int layer, const kernels::DraftInputs& next, const Given& given,
                       const int64_t* drafts, int sequences, int rows, const Tensor& hidden_out) {
  kernels::TailRowsParams p{};
  p.next = next;
  p.drafts = drafts;
  p.origins = reinterpret_cast<const int32_t*>(given.received + given.sent.origins);
  p.carried = carried_[layer];
  p.hidden_out = hidden_out.data;
  p.ids = tail_ids_;
  p.position_ids = tail_positions_;
  p.past_lens = tail_past_lens_;
  p.block_table = tail_table_;
  p.hidden = tail_hidden_;
  p.sequences = sequences;
  p.rows = rows;
  p.layer = layer;
  p.width = width_of(layer);
  p.padding_block = program_.limits().num_blocks;
  check(kernels::tail_rows(program_.dtype(), p, stream_), "preparing a layer of a draft model");
}

}  // namespace llmc
