#include "drafter.h"

#include <algorithm>
#include <numeric>

namespace llmc {

SentDrafts SentDrafts::of(StagingBuffer& into, const StepInputs& inputs) {
  const DraftRows rows = DraftRows::of(inputs);
  return {into.add(rows.ids),   into.add(rows.sampled), into.add(rows.firsts),
          into.add(rows.slots), into.add(rows.tables),  static_cast<int>(rows.ids.size())};
}

Drafter::Drafter(const Program& program, const void* token_ids, DeviceMemory& memory,
                 cudaStream_t stream)
    : program_(program), stream_(stream), token_ids_(static_cast<const int64_t*>(token_ids)) {
  constexpr const char* kWhat = "drafts";
  const Limits& limits = program.limits();
  const int64_t rows = limits.max_batch;
  ids_ = memory.allocate<int64_t>(program.capacity(program.input("input_ids")), kWhat);
  last_rows_ = memory.allocate<int64_t>(std::max<int64_t>(limits.max_logits, rows), kWhat);
  drafts_ = memory.allocate<int64_t>(rows * kernels::kMaxProposals, kWhat);
  slot_drafts_ = memory.allocate<int64_t>(rows * kernels::kMaxProposals, kWhat);
  lengths_ = memory.allocate<int32_t>(rows, kWhat);
  cu_seqlens_ = memory.allocate<int32_t>(rows + 1, kWhat);
  next_.ids = memory.allocate<int64_t>(rows, kWhat);
  next_.position_ids = memory.allocate<int64_t>(rows, kWhat);
  next_.past_lens = memory.allocate<int32_t>(rows, kWhat);
  next_.block_table = memory.allocate<int32_t>(program.capacity(program.input(kBlockTable)), kWhat);
  next_.positions = memory.allocate<int32_t>(rows, kWhat);
  next_.made = memory.allocate<int32_t>(rows, kWhat);
  next_.slots = memory.allocate<int32_t>(rows, kWhat);
  next_.max_blocks = limits.max_blocks();
  next_.max_seq_len = limits.max_seq_len;
  if (block() == 0) return;
  const int64_t tokens = int64_t{max_blocks()} * block();
  block_ids_ = memory.allocate<int64_t>(tokens, kWhat);
  block_positions_ = memory.allocate<int64_t>(tokens, kWhat);
  mask_rows_ = memory.allocate<int64_t>(tokens, kWhat);
  block_seqlens_ = memory.allocate<int32_t>(max_blocks() + 1, kWhat);
  const Declared& hidden = program.tensor(program.draft().hidden);
  no_features_ = memory.allocate<char>(tokens * hidden.shape[1] * width(hidden.dtype), kWhat);
}

int Drafter::max_blocks() const {
  const Limits& limits = program_.limits();
  if (block() > limits.max_seq_len) return 0;  // also of padding, at position 0
  return std::min(
      {limits.max_batch, limits.max_tokens / block(), limits.max_logits / (block() - 1)});
}

void Drafter::take_none(int count) {
  check(cudaMemsetAsync(drafts_, 0xff, 8ll * kernels::kMaxProposals * count, stream_),
        "taking drafts");
}

std::map<int, void*> Drafter::block_inputs() const {
  std::map<int, void*> inputs = next_inputs();
  inputs[program_.input("input_ids")] = block_ids_;
  inputs[program_.input("position_ids")] = block_positions_;
  inputs[program_.input("cu_seqlens")] = block_seqlens_;
  inputs[program_.input("logits_indices")] = mask_rows_;
  inputs[program_.draft().hidden] = no_features_;
  return inputs;
}

void Drafter::fill(int rows) {
  const kernels::FillBlocksParams p{next_, block_ids_, block_positions_, program_.draft().mask,
                                    rows,  block()};
  check(kernels::fill_blocks(p, stream_), "preparing a draft model");
}

void Drafter::take_blocks(const Tensor& logits, int count, int drafts) {
  kernels::TakeBlocksParams p{};
  p.next = next_;
  p.drafts = drafts_;
  p.slot_drafts = slot_drafts_;
  p.logits = logits.data;
  p.token_ids = token_ids_;
  p.rows = count;
  p.masks = block() - 1;
  p.count = drafts;
  p.vocab = program_.draft().vocab_size;
  p.stride = static_cast<int>(logits.shape[1]);
  check(kernels::take_blocks(logits.dtype, p, stream_), "taking drafts");
}

std::map<int, void*> Drafter::first_inputs() const {
  std::map<int, void*> inputs{{program_.input("logits_indices"), last_rows_}};
  if (reads_features()) inputs[program_.input("input_ids")] = ids_;
  return inputs;
}

std::map<int, void*> Drafter::next_inputs() const {
  return {{program_.input("input_ids"), next_.ids},
          {program_.input("position_ids"), next_.position_ids},
          {program_.input("cu_seqlens"), cu_seqlens_},
          {program_.input("past_lens"), next_.past_lens},
          {program_.input(kBlockTable), next_.block_table}};
}

void Drafter::allocate(const std::vector<int32_t>& table) {
  upload(next_.block_table, table.data(), 4 * static_cast<int64_t>(table.size()), stream_);
  std::vector<int32_t> starts(program_.limits().max_batch + 1);
  std::iota(starts.begin(), starts.end(), 0);
  upload(cu_seqlens_, starts.data(), 4 * static_cast<int64_t>(starts.size()), stream_);
  std::vector<int32_t> seqlens;
  std::vector<int64_t> masks;
  for (int row = 0; block() > 0 && row <= max_blocks(); ++row) {
    seqlens.push_back(row * block());
    for (int i = 1; i < block() && row < max_blocks(); ++i) masks.push_back(row * block() + i);
  }
  upload(block_seqlens_, seqlens.data(), 4 * static_cast<int64_t>(seqlens.size()), stream_);
  upload(mask_rows_, masks.data(), 8 * static_cast<int64_t>(masks.size()), stream_);
  check(cudaStreamSynchronize(stream_), "the engine");  // the host's arrays are read
}

void Drafter::refer(kernels::PrepareInputsParams& p) const {
  p.drafts = slot_drafts_;
  p.lengths = lengths_;
  p.drafts_stride = kernels::kMaxProposals;
}

void Drafter::begin(kernels::BeginDraftsParams p, const SentDrafts& sent, const char* received) {
  auto at = [&](int64_t offset) { return reinterpret_cast<const int32_t*>(received + offset); };
  p.next = next_;
  p.ids = drafts_on_steps() ? ids_ : nullptr;
  p.back = !runs_on_steps();
  p.span = std::max(block(), 1);
  p.last_rows = last_rows_;
  p.lengths = lengths_;
  p.host_ids = at(sent.ids);
  p.host_sampled = at(sent.sampled);
  p.host_firsts = at(sent.firsts);
  p.host_slots = at(sent.slots);
  p.host_tables = at(sent.tables);
  p.num_tokens = sent.num_tokens;
  p.padding_block = program_.limits().num_blocks;
  check(kernels::begin_drafts(p, stream_), "preparing a draft model");
}

void Drafter::take_rows(const DraftOutputs& outputs, int count, const int64_t* rows) {
  kernels::TakeDraftsParams p{};
  p.next = next_;
  p.drafts = drafts_;
  p.slot_drafts = slot_drafts_;
  p.logits = outputs.logits.data;
  p.logit_rows = p.hidden_rows = rows;
  p.token_ids = token_ids_;
  p.rows = count;
  p.vocab = program_.draft().vocab_size;
  p.stride = static_cast<int>(outputs.logits.shape[1]);
  p.hidden = outputs.hidden.data;
  p.hidden_out = outputs.hidden_out.data;
  p.width = static_cast<int>(outputs.hidden_out.shape[1]);
  check(kernels::take_drafts(outputs.logits.dtype, p, stream_), "taking drafts");
}

void Drafter::take(const DraftOutputs& outputs, int count, Rows rows) {
  kernels::TakeDraftsParams p{};
  p.next = next_;
  p.drafts = drafts_;
  p.slot_drafts = slot_drafts_;
  p.logits = outputs.logits.data;
  p.logit_rows = rows == Rows::kOfAll ? last_rows_ : nullptr;
  p.token_ids = token_ids_;
  p.rows = count;
  p.vocab = program_.draft().vocab_size;
  p.stride = static_cast<int>(outputs.logits.shape[1]);
  p.advances = rows == Rows::kNext && runs_on_steps();
  if (reads_features() && outputs.hidden.data != nullptr) {
    p.hidden = outputs.hidden.data;
    p.hidden_out = outputs.hidden_out.data;
    p.hidden_rows = rows == Rows::kNext ? nullptr : last_rows_;
    p.width = static_cast<int>(outputs.hidden.shape[1]);
  }
  check(kernels::take_drafts(outputs.logits.dtype, p, stream_), "taking drafts");
}

}  // namespace llmc
