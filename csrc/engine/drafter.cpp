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
  check(cudaStreamSynchronize(stream_), "the engine");  // `starts` is read
}

void Drafter::refer(kernels::PrepareInputsParams& p) const {
  p.drafts = slot_drafts_;
  p.lengths = lengths_;
  p.drafts_stride = kernels::kMaxProposals;
}

void Drafter::begin(kernels::BeginDraftsParams p, const SentDrafts& sent, const char* received) {
  auto at = [&](int64_t offset) { return reinterpret_cast<const int32_t*>(received + offset); };
  p.next = next_;
  p.ids = reads_features() ? ids_ : nullptr;
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
  p.advances = rows == Rows::kNext;
  if (reads_features()) {
    p.hidden = outputs.hidden.data;
    p.hidden_out = outputs.hidden_out.data;
    p.hidden_rows = rows == Rows::kNext ? nullptr : last_rows_;
    p.width = static_cast<int>(outputs.hidden.shape[1]);
  }
  check(kernels::take_drafts(outputs.logits.dtype, p, stream_), "taking drafts");
}

}  // namespace llmc
