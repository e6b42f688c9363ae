#include "step.h"

#include <functional>
#include <map>

#include "../kernels/attention/params.h"

namespace llmc {
namespace {

std::string text(int64_t number) { return std::to_string(number); }

// Throws Error unless all values are in [least, end).
template <typename T>
void check_range(const char* what, const HostArray<T>& values, int64_t least, int64_t end) {
  for (int64_t i = 0; i < values.size; ++i)
    if (values[i] < least || values[i] >= end)
      throw Error(std::string(what) + "[" + text(i) + "] is " + text(values[i]) + ", expected " +
                  text(least) + " to " + text(end - 1));
}

// Checks that every sequence has a token, and every token a sequence.
void check_starts(const HostArray<int32_t>& cu_seqlens, int64_t batch, int64_t num_tokens) {
  check_size("cu_seqlens", cu_seqlens.size, batch + 1);
  if (cu_seqlens[0] != 0 || cu_seqlens[batch] != num_tokens)
    throw Error("cu_seqlens go from " + text(cu_seqlens[0]) + " to " + text(cu_seqlens[batch]) +
                ", expected 0 to num_tokens " + text(num_tokens));
  for (int64_t b = 0; b < batch; ++b)
    if (cu_seqlens[b + 1] <= cu_seqlens[b])
      throw Error("cu_seqlens[" + text(b + 1) + "] is " + text(cu_seqlens[b + 1]) + " after " +
                  text(cu_seqlens[b]) + "; every sequence of a step needs a token");
}

void check_rows(int64_t batch, const Limits& limits) {
  if (batch < 1) throw Error("a batch of " + text(batch) + " has no sequences");
  if (batch > limits.max_batch)
    throw Error("a batch of " + text(batch) + " exceeds max_batch_size " + text(limits.max_batch));
}

// Throws Error unless lists have the layout of kernels::LogitsProcessing, with valid tokens.
void check_processing(const kernels::LogitsProcessing& wanted, const HostArray<int32_t>& lists,
                      int64_t vocab) {
  const int64_t counts[] = {wanted.lists, wanted.num_biases, wanted.num_ends, wanted.num_forced,
                            wanted.num_words};
  if (std::any_of(std::begin(counts), std::end(counts), [](int64_t count) { return count < 0; }))
    throw Error("a sequence's logits processing has a negative size");
  const int64_t room = lists.size - wanted.lists;
  const int64_t ends = 2ll * wanted.num_biases, forced = ends + wanted.num_ends;
  const int64_t words = forced + 2ll * wanted.num_forced;
  const int64_t fixed = words + (wanted.num_words > 0 ? wanted.num_words + 1ll : 0);
  if (fixed > room)
    throw Error("a sequence's lists of " + text(fixed) + " entries exceed the " +
                text(std::max<int64_t>(room, 0)) + " available");
  const int32_t* own = lists.data + wanted.lists;
  auto check_tokens = [&](int64_t from, int64_t count) {
    for (int64_t i = from; i < from + count; ++i)
      if (own[i] < 0 || own[i] >= vocab)
        throw Error("a sequence's logits processing has token id " + text(own[i]) +
                    ", expected 0 to " + text(vocab - 1));
  };
  check_tokens(0, wanted.num_biases);
  check_tokens(ends, wanted.num_ends);
  check_tokens(forced, wanted.num_forced);
  for (int64_t i = 0; i < wanted.num_words; ++i) {
    const int64_t begin = own[words + i], end = own[words + i + 1];
    if (begin < fixed || end <= begin || end > room)
      throw Error("a sequence's bad words exceed its lists");
    check_tokens(end - 1, 1);
  }
}

void check_distinct(const char* what, const HostArray<int32_t>& values, int64_t end) {
  check_range(what, values, 0, end);
  std::vector<bool> seen(end);
  for (int32_t value : values) {
    if (seen[value]) throw Error(std::string(what) + " has " + text(value) + " twice");
    seen[value] = true;
  }
}

void check_admissions(const Admissions& admit, const Limits& limits, int64_t vocab) {
  const int64_t count = admit.slots.size;
  check_distinct("the slots of admitted sequences", admit.slots, limits.max_batch);
  check_size("their states", admit.states.size, count);
  check_size("the prompt lengths of admitted sequences", admit.prompts.size, count);
  check_size("their lengths", admit.lengths.size, count);
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const kernels::SlotState& state = admit.states[i];
    if (state.logprobs > kernels::kTopLogprobs)
      throw Error("log-probabilities of " + text(state.logprobs) + " tokens exceed " +
                  text(kernels::kTopLogprobs));
    if (admit.prompts[i] < 0 || admit.lengths[i] < admit.prompts[i] ||
        admit.lengths[i] > limits.max_seq_len + 1)
      throw Error("a sequence of " + text(admit.lengths[i]) + " tokens, " + text(admit.prompts[i]) +
                  " of them in its prompt, exceeds max_seq_len " + text(limits.max_seq_len));
    if (state.prompt_lookup && !limits.prompt_lookup)
      throw Error("a sequence looks up drafts, but the engine was loaded without prompt lookup");
    check_processing(state.processing, admit.lists, vocab);
    total += admit.lengths[i];
  }
  check_size("the tokens of admitted sequences", admit.tokens.size, total);
  check_range("the tokens of admitted sequences", admit.tokens, 0, vocab);
}

// Copies run in parallel: no block, or state, may be both source and target, or target twice.
void check_copies(const std::string& what, const HostArray<int32_t>& copies, int end) {
  if (copies.size % 2 != 0)
    throw Error("copies of " + what + "s are not pairs of source and destination");
  check_range(("copies of " + what + "s").c_str(), copies, 0, end);
  std::vector<int32_t> to, from;
  for (int64_t i = 0; i < copies.size; ++i) (i % 2 ? to : from).push_back(copies[i]);
  std::sort(to.begin(), to.end());
  for (size_t i = 0; i + 1 < to.size(); ++i)
    if (to[i] == to[i + 1])
      throw Error(what + " " + text(to[i]) + " is a destination of two copies");
  for (int32_t block : from)
    if (std::binary_search(to.begin(), to.end(), block))
      throw Error(what + " " + text(block) +
                  " is both source and destination of copies in one step");
}

void check_memory(const HostArray<int32_t>& starts, const HostArray<int32_t>& lens, int64_t batch,
                  const Limits& limits) {
  check_size("memory_starts", starts.size, limits.mem_max_seq_len > 0 ? batch : 0);
  check_size("encoder_sequence_length", lens.size, starts.size);
  for (int64_t b = 0; b < starts.size; ++b)
    if (starts[b] < 0 || lens[b] < 0 ||
        static_cast<int64_t>(starts[b]) + lens[b] > limits.memory_rows())
      throw Error(text(lens[b]) + " rows of encoder output at " + text(starts[b]) + " exceed the " +
                  text(limits.memory_rows()) + " available rows");
}

void check_masks(const StepInputs& inputs, int vocab_size) {
  if (inputs.mask_rows.size == 0 && inputs.masks.size == 0) return;
  const int64_t words = (vocab_size + 31) / 32;
  check_size("the rows of token masks", inputs.mask_rows.size, inputs.sampled_rows());
  if (inputs.masks.size % words != 0)
    throw Error("token masks of " + text(inputs.masks.size) + " words are not rows of " +
                text(words) + " words");
  check_range("the rows of token masks", inputs.mask_rows, -1, inputs.masks.size / words);
}

void check_drafts(const StepInputs& inputs, const Limits& limits, int vocab_size) {
  if (inputs.num_drafts.size == 0) return;
  check_size("num_drafts", inputs.num_drafts.size, inputs.sample.size);
  if (inputs.candidates > 0 || inputs.logits == Logits::kAll)
    throw Error("a step with drafts cannot return candidates or the logits of all tokens");
  for (int64_t i = 0; i < inputs.sample.size; ++i) {
    const int64_t drafts = inputs.num_drafts[i], sequence = inputs.sample[i];
    const int64_t end = inputs.cu_seqlens[sequence + 1];
    bool fits = drafts >= 0 && drafts < (inputs.verifies ? end : inputs.fresh(sequence));
    for (int64_t row = sequence - drafts; fits && inputs.verifies && row < sequence; ++row)
      fits = inputs.slots[row] == inputs.slots[sequence];
    if (!fits)
      throw Error(text(drafts) + " drafts of sequence " + text(sequence) + " exceed its tokens");
    for (int64_t token = end - drafts; token < end; ++token)
      if (inputs.token_ids[token] == -1 || inputs.token_ids[token] >= vocab_size)
        throw Error("draft " + text(token) + " is " + text(inputs.token_ids[token]) +
                    ", expected 0 to " + text(vocab_size - 1));
  }
  if (inputs.sampled_rows() > limits.max_batch)
    throw Error("a step of " + text(inputs.sample.size) + " sampled sequences and " +
                text(inputs.sampled_rows() - inputs.sample.size) +
                " drafts exceeds the engine's limit of " + text(limits.max_batch));
}

// Checks the number of rows of each sequence, which begin here.
void check_sequence_rows(const std::vector<int32_t>& starts) {
  for (size_t i = 0; i + 1 < starts.size(); ++i)
    if (starts[i + 1] - starts[i] > kernels::kMaxRows)
      throw Error(text(starts[i + 1] - starts[i]) + " rows of sequence " +
                  text(static_cast<int64_t>(i)) + " exceed " + text(kernels::kMaxRows));
}

// Checks the states of each sequence, whose tokens or rows these are.
void check_states(const StepInputs& inputs, const Limits& limits,
                  const std::vector<int32_t>& starts) {
  const int64_t count = limits.num_states > 0 ? static_cast<int64_t>(starts.size()) - 1 : 0;
  check_copies("state", inputs.state_copies, limits.num_states);
  check_size("state_slots", inputs.state_slots.size, count);
  check_distinct("state_slots", inputs.state_slots, limits.num_states);
  check_size("commit_lens", inputs.commit_lens.size, count);
  for (int64_t i = 0; i < count; ++i)
    if (inputs.commit_lens[i] < 1 || inputs.commit_lens[i] > starts[i + 1] - starts[i])
      throw Error("commit_lens[" + text(i) + "] is " + text(inputs.commit_lens[i]) +
                  ", expected 1 to the sequence's " + text(starts[i + 1] - starts[i]) + " tokens");
}

void check_scored(const StepInputs& inputs, int64_t num_tokens, int vocab_size) {
  check_size("the targets of scored rows", inputs.scored_targets.size, inputs.scored_rows.size);
  check_size("the counts of scored rows", inputs.scored_counts.size, inputs.scored_rows.size);
  check_range("scored_rows", inputs.scored_rows, 0, num_tokens);
  check_range("scored_targets", inputs.scored_targets, 0, vocab_size);
  check_range("scored_counts", inputs.scored_counts, 0, kernels::kTopLogprobs + 1);
  if (inputs.logits == Logits::kAll && inputs.scored_rows.size > 0)
    throw Error("a step with logits=all cannot have scored rows");
}

void check_adapters(const StepInputs& inputs, const Limits& limits, int64_t num_tokens) {
  if (inputs.lora_ids.size == 0) return;
  if (limits.max_loras == 0)
    throw Error("a step has LoRA adapters, which the program does not take");
  check_size("lora_ids", inputs.lora_ids.size, num_tokens);
  check_range("lora_ids", inputs.lora_ids, -1, limits.max_loras);
}

void check_embeds(const StepInputs& inputs, const Limits& limits, int64_t num_tokens) {
  if (inputs.embed_ids.size == 0) {
    check_size("embeds without embed_ids", inputs.embeds.size, 0);
    check_size("deep_embeds without embed_ids", inputs.deep_embeds.size, 0);
    return;
  }
  if (limits.embeds_width == 0)
    throw Error("a step has rows in place of token embeddings, which the program does not take");
  check_size("embed_ids", inputs.embed_ids.size, num_tokens);
  const int64_t rows = inputs.embeds.size / limits.embeds_width;
  check_size("embeds", inputs.embeds.size, rows * limits.embeds_width);
  if (rows > num_tokens)
    throw Error("a step has " + text(rows) + " rows in place of the embeddings of " +
                text(num_tokens) + " tokens");
  check_range("embed_ids", inputs.embed_ids, -1, rows);
  if (inputs.deep_embeds.size > 0)
    check_size("deep_embeds", inputs.deep_embeds.size, limits.num_deep_embeds * inputs.embeds.size);
}

void check_rotary_positions(const StepInputs& inputs, const Limits& limits, int64_t num_tokens) {
  if (inputs.rotary_positions.size == 0) return;
  if (!limits.has_axes)
    throw Error("a step has positions by axis, which the program does not take");
  check_size("rotary_positions", inputs.rotary_positions.size, num_tokens * kernels::kRotaryAxes);
  check_range("rotary_positions", inputs.rotary_positions, 0, limits.max_seq_len);
}

void check_ranges(const StepInputs& inputs, const Limits& limits, int64_t num_tokens) {
  const auto& ranges = inputs.bidirectional_ranges;
  if (ranges.size == 0) return;
  if (!limits.has_ranges)
    throw Error("a step has bidirectional ranges, which the program does not take");
  check_size("bidirectional_ranges", ranges.size, num_tokens * 2);
}

// Checks that the tokens of sequence b are in their ranges, which its positions contain.
void check_ranges_of(const StepInputs& inputs, int64_t b) {
  const auto& ranges = inputs.bidirectional_ranges;
  if (ranges.size == 0) return;
  const int64_t past = inputs.past_lens[b], fresh = inputs.fresh(b);
  for (int64_t i = 0; i < fresh; ++i) {
    const int64_t token = inputs.cu_seqlens[b] + i;
    const int64_t first = ranges[2 * token], end = ranges[2 * token + 1];
    if (first == 0 && end == 0) continue;
    if (first < 0 || first > past + i || end <= past + i || end > past + fresh)
      throw Error("token " + text(i) + " of sequence " + text(b) + " has the range " + text(first) +
                  " to " + text(end) + ", expected one of its position " + text(past + i) +
                  " within " + text(past + fresh) + " positions");
  }
}

void check_proposals(const StepInputs& inputs, const Limits& limits, int64_t batch) {
  check_range("next_tokens", inputs.next_tokens, -1, int64_t{1} << 31);
  if (inputs.next_tokens.size > 0) check_size("next_tokens", inputs.next_tokens.size, batch);
  if (inputs.unread.size > 0) check_size("unread", inputs.unread.size, batch);
  if (inputs.unread.size > 0 && limits.max_proposals == 0)
    throw Error("a step has unread drafts, but the program has no draft model or prompt lookup");
  if (inputs.propose >= 0 && limits.max_proposals == 0)
    throw Error("a step proposes drafts, but the program has no draft model or prompt lookup");
  if (inputs.propose < -1 || inputs.propose > limits.max_proposals)
    throw Error("a step proposes " + text(inputs.propose) + " drafts, expected -1 to " +
                text(limits.max_proposals));
  if (inputs.propose >= 0 && inputs.logits == Logits::kAll)
    throw Error("a step with logits=all cannot propose drafts");
}

// Blocks of a sequence for `positions`, and for as many drafts of a draft model as there are.
void check_blocks(const StepInputs& inputs, int64_t b, int64_t positions, const Limits& limits) {
  const int64_t width = inputs.width(), size = limits.block_size;
  const int64_t blocks = (positions + size - 1) / size;
  if (blocks > width)
    throw Error(text(positions) + " positions of sequence " + text(b) + " exceed the " +
                text(width) + " blocks of its table");
  const int32_t* table = inputs.block_tables.data + b * width;
  check_range("block_tables", HostArray<int32_t>{table, blocks}, 0, limits.num_blocks);
  const int64_t all =
      std::min(width, (positions + inputs.proposed_positions(limits) + size - 1) / size);
  check_range("block_tables of drafts", HostArray<int32_t>{table + blocks, all - blocks}, -1,
              limits.num_blocks);
}

}  // namespace

void Limits::check() const {
  auto check = [](const char* name, int limit, int least) {
    constexpr int kMost = 1 << 30;  // so that the sum of two fits an int
    if (limit < least || limit > kMost)
      throw Error(std::string("the engine's ") + name + " is " + text(limit) + ", expected " +
                  text(least) + " to " + text(kMost));
  };
  check("max_batch", max_batch, 1);
  check("max_tokens", max_tokens, 1);
  check("max_logits", max_logits, 1);
  check("max_seq_len", max_seq_len, 1);
  check("mem_max_seq_len", mem_max_seq_len, 0);
  check("block_size", block_size, 1);
  check("num_blocks", num_blocks, 0);
  check("num_states", num_states, 0);
  check("max_proposals", max_proposals, 0);
  check("max_states", max_states, 0);
  check("max_loras", max_loras, 0);
  check("max_lora_rank", max_lora_rank, 0);
  if (max_lora_rank % 8 != 0)
    throw Error("max_lora_rank " + text(max_lora_rank) + " is not a multiple of 8");
  if ((block_size & (block_size - 1)) != 0)
    throw Error("block_size " + text(block_size) + " is not a power of two");
}

void check_size(const char* what, int64_t size, int64_t wanted) {
  if (size != wanted)
    throw Error(std::string(what) + " has " + text(size) + " elements, expected " + text(wanted));
}

Step check_step(const StepInputs& inputs, const Limits& limits, int vocab_size,
                const std::vector<SlotRecord>& slots) {
  const int64_t num_tokens = inputs.token_ids.size, batch = inputs.past_lens.size,
                sampled = inputs.sample.size;
  check_rows(batch, limits);
  const int64_t num_logits =
      inputs.logits == Logits::kAll ? num_tokens : inputs.sampled_rows() + inputs.scored_rows.size;
  if (num_tokens > limits.max_tokens || num_logits > limits.max_logits)
    throw Error("a step of " + text(num_tokens) + " tokens and " + text(num_logits) +
                " logits exceeds the engine's limits of " + text(limits.max_tokens) + " and " +
                text(limits.max_logits));
  check_starts(inputs.cu_seqlens, batch, num_tokens);
  check_range("token_ids", inputs.token_ids, -1 - limits.max_proposals, int64_t{1} << 31);
  if (inputs.token_type_ids.size > 0)
    check_size("token_type_ids", inputs.token_type_ids.size, num_tokens);
  check_range("token_type_ids", inputs.token_type_ids, 0, int64_t{1} << 31);
  if (inputs.verifies) check_range("slots", inputs.slots, 0, limits.max_batch);
  else check_distinct("slots", inputs.slots, limits.max_batch);
  check_size("slots", inputs.slots.size, batch);
  if (inputs.verifies && inputs.num_decode != batch)
    throw Error("a step of rows with drafts has prompts");
  if (inputs.block_tables.size % batch != 0)
    throw Error("block_tables of " + text(inputs.block_tables.size) + " elements are not rows of " +
                text(batch) + " sequences");
  if (inputs.num_decode < 0 || inputs.num_decode > batch)
    throw Error("num_decode " + text(inputs.num_decode) + ", expected 0 to the batch size " +
                text(batch));
  check_admissions(inputs.admit, limits, vocab_size);
  check_copies("block", inputs.copies, limits.num_blocks);
  const std::vector<int32_t> starts = inputs.sequence_starts();
  if (inputs.verifies) check_sequence_rows(starts);
  check_states(inputs, limits, starts);
  check_memory(inputs.memory_starts, inputs.memory_lens, batch, limits);
  Step step{static_cast<int>(num_tokens), static_cast<int>(num_logits), static_cast<int>(batch)};
  step.num_decode = inputs.num_decode;
  std::vector<bool> admitted(limits.max_batch);
  for (int32_t slot : inputs.admit.slots) admitted[slot] = true;
  check_proposals(inputs, limits, batch);
  check_adapters(inputs, limits, num_tokens);
  check_embeds(inputs, limits, num_tokens);
  check_rotary_positions(inputs, limits, num_tokens);
  check_ranges(inputs, limits, num_tokens);
  step.adapters = inputs.lora_ids.size > 0;
  step.embeds = inputs.embed_ids.size > 0;
  step.deep_embeds = inputs.deep_embeds.size > 0;
  step.ranges = inputs.bidirectional_ranges.size > 0;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t fresh = inputs.fresh(b), past = inputs.past_lens[b];
    if (past < 0 || past + fresh > limits.max_seq_len)
      throw Error(text(fresh) + " tokens after " + text(past) + " of sequence " + text(b) +
                  " exceed max_seq_len " + text(limits.max_seq_len));
    if (b < inputs.num_decode && fresh != 1)
      throw Error("sequence " + text(b) + " of " + text(inputs.num_decode) + " decoding ones has " +
                  text(fresh) + " new tokens, expected 1");
    check_blocks(inputs, b, past + fresh, limits);
    check_ranges_of(inputs, b);
    if (inputs.unread_of(b) < 0 || inputs.unread_of(b) > past)
      throw Error(text(inputs.unread_of(b)) + " unread drafts of sequence " + text(b) +
                  " exceed its past of " + text(past));
    const SlotRecord& slot = slots[inputs.slots[b]];
    for (int64_t i = inputs.cu_seqlens[b]; i < inputs.cu_seqlens[b + 1]; ++i)
      if (inputs.token_ids[i] < 0 && (admitted[inputs.slots[b]] || !slot.has_sampled))
        throw Error("token " + text(i) + " is the last one of slot " + text(inputs.slots[b]) +
                    ", which has not sampled any");
    if (b < inputs.num_decode) continue;  // for attention to prompts
    step.longest = std::max<int>(step.longest, fresh);
    step.reach = std::max<int>(step.reach, past + fresh);
  }
  check_range("sample", inputs.sample, 0, batch);
  check_drafts(inputs, limits, vocab_size);
  step.verifies = inputs.verifies;
  for (int64_t i = 0; i < sampled && !inputs.verifies; ++i) {
    const int64_t end = inputs.sample[i] + 1;
    if (inputs.drafts(i) == 0 || end <= step.num_decode) continue;
    step.num_drafted = static_cast<int>(end - step.num_decode);
    step.drafted_tokens = inputs.cu_seqlens[end] - step.num_decode;
  }
  check_masks(inputs, vocab_size);
  check_scored(inputs, num_tokens, vocab_size);
  for (int64_t i = 1; i < sampled; ++i)
    if (inputs.sample[i] <= inputs.sample[i - 1]) throw Error("sample is not ascending");
  if (inputs.candidates < 0 || inputs.candidates > vocab_size)
    throw Error("candidates is " + text(inputs.candidates) + ", expected 0 to vocab_size " +
                text(vocab_size));
  return step;
}

std::vector<int32_t> StepInputs::sequence_starts() const {
  if (!verifies) return {cu_seqlens.begin(), cu_seqlens.end()};
  std::vector<int32_t> starts;
  for (int row = 0; row < batch(); ++row)
    if (row == 0 || slots[row] != slots[row - 1]) starts.push_back(row);
  starts.push_back(batch());
  return starts;
}

SampledRows SampledRows::of(const StepInputs& inputs) {
  SampledRows made;
  const int64_t sampled = inputs.sample.size;
  int positions = sampled > 0 ? 1 : 0;
  for (int64_t i = 0; i < sampled; ++i) positions = std::max(positions, 1 + inputs.drafts(i));
  made.row_of.assign(sampled * positions, -1);
  for (int position = 0; position < positions; ++position) {
    made.begins.push_back(static_cast<int>(made.tokens.size()));
    int64_t mask = position;  // of sequence i at this position, in the order of the host
    for (int64_t i = 0; i < sampled; mask += 1 + inputs.drafts(i), ++i) {
      const int drafts = inputs.drafts(i);
      if (position > drafts) continue;
      const int32_t sequence = inputs.sample[i];
      const int32_t token = inputs.cu_seqlens[sequence + 1] - 1 - drafts + position;
      made.row_of[i * positions + position] = static_cast<int32_t>(made.tokens.size());
      made.tokens.push_back(token);
      made.slots.push_back(inputs.slots[sequence]);
      const int64_t next = position < drafts ? inputs.token_ids[token + 1] : -1;
      made.drafts.push_back(next < -1 ? -2 - (token + 1) : static_cast<int32_t>(next));
      made.drafts_before.push_back(position);
      if (inputs.mask_rows.size > 0) made.mask_rows.push_back(inputs.mask_rows[mask]);
    }
  }
  made.begins.push_back(static_cast<int>(made.tokens.size()));
  return made;
}

DraftRows DraftRows::of(const StepInputs& inputs) {
  DraftRows made;
  const int64_t batch = inputs.batch(), num_tokens = inputs.token_ids.size;
  for (int64_t b = 0; b < batch; ++b) {
    const bool goes_on = inputs.verifies && b + 1 < batch && inputs.slots[b + 1] == inputs.slots[b];
    const int64_t end = inputs.cu_seqlens[b + 1];
    for (int64_t token = inputs.cu_seqlens[b] + 1; token < end; ++token)
      made.ids.push_back(static_cast<int32_t>(std::max<int64_t>(inputs.token_ids[token], -1)));
    int64_t next = 0;
    if (goes_on) next = std::max<int64_t>(inputs.token_ids[end], -1);
    else if (inputs.next_tokens.size > 0) next = std::max<int64_t>(inputs.next_tokens[b], 0);
    made.ids.push_back(static_cast<int32_t>(next));
  }
  made.sampled.assign(num_tokens, -1);
  for (int64_t i = 0; i < inputs.sample.size; ++i) {
    const int32_t end = inputs.cu_seqlens[inputs.sample[i] + 1];
    made.firsts.push_back(end - 1 - inputs.drafts(i));
    made.slots.push_back(inputs.slots[inputs.sample[i]]);
    made.tables.push_back(inputs.sample[i]);
    for (int32_t token = made.firsts.back(); token < end; ++token)
      made.sampled[token] = static_cast<int32_t>(i);
  }
  return made;
}

Step check_step(const EncoderInputs& inputs, const Limits& limits) {
  const int64_t num_tokens = inputs.position_ids.size, batch = inputs.cu_seqlens.size - 1;
  if (num_tokens > limits.max_tokens || batch > limits.max_batch)
    throw Error(text(batch) + " prompts of " + text(num_tokens) +
                " tokens exceed the engine's limits of " + text(limits.max_batch) + " and " +
                text(limits.max_tokens));
  check_rows(batch, limits);
  check_size("input_ids", inputs.input_ids.size, limits.features_bytes > 0 ? 0 : num_tokens);
  check_size("features", inputs.features.size, num_tokens * limits.features_bytes);
  check_size("memory_rows", inputs.memory_rows.size, num_tokens);
  check_starts(inputs.cu_seqlens, batch, num_tokens);
  check_range("position_ids", inputs.position_ids, 0, limits.mem_max_seq_len);
  check_range("memory_rows", inputs.memory_rows, 0, limits.memory_rows());
  return {static_cast<int>(num_tokens), 0, static_cast<int>(batch)};
}

void check_segments(const HostArray<int32_t>& cu_seqlens, int num_tokens) {
  const int64_t last = cu_seqlens.size - 1;
  if (last < 1 || cu_seqlens[0] != 0 || cu_seqlens[last] != num_tokens ||
      !std::is_sorted(cu_seqlens.begin(), cu_seqlens.end()))
    throw Error("the segments of an image are not in order, or do not end at patch " +
                text(num_tokens));
}

void check_merged_rows(const HostArray<int64_t>& rows, int num_tokens) {
  check_range("the patches of an image's rows", rows, 0, num_tokens);
}

// Compares sequences with the same first block with the first of them. The gain is the number of
// positions that all but one of the sharing sequences do not read. Rows of one sequence count once.
Prefix shared_prefix(const StepInputs& inputs, int block_size) {
  constexpr int kDecodeKeys = 16;    // positions per step of decode attention
  constexpr int64_t kWorth = 24000;  // minimum gain, in positions
  Prefix best;
  int64_t saved = kWorth - 1;
  std::map<int32_t, std::vector<int>> alike;  // by first block
  if (block_size < kDecodeKeys) return best;
  const int64_t width = inputs.num_decode > 1 ? inputs.width() : 0;
  auto blocks_of = [&](int sequence) { return inputs.block_tables.data + sequence * width; };
  // Full blocks, which are not written any more.
  auto full = [&](int sequence) {
    const int64_t past = inputs.past_lens[sequence] - inputs.unread_of(sequence);
    return static_cast<int>(std::min<int64_t>(past / block_size, width));
  };
  auto continues = [&](int row) {  // the sequence of the row before
    return inputs.verifies && row > 0 && inputs.slots[row - 1] == inputs.slots[row];
  };
  for (int i = 0; i < inputs.num_decode && width > 0; ++i)
    if (!continues(i) && full(i) > 0) alike[blocks_of(i)[0]].push_back(i);
  for (const auto& [block, sequences] : alike) {
    const int first = sequences[0];
    std::vector<std::pair<int, int>> common;  // (common blocks, sequence), the most first
    for (int i : sequences) {
      const int32_t* own = blocks_of(i);
      const int most = std::min(full(first), full(i));
      common.push_back(
          {static_cast<int>(std::mismatch(own, own + most, blocks_of(first)).first - own), i});
    }
    std::sort(common.begin(), common.end(), std::greater<>());
    for (size_t n = 1; n < common.size(); ++n) {
      const int64_t all = static_cast<int64_t>(n) * common[n].first * block_size;
      if (all <= saved) continue;
      saved = all;
      best = {first, common[n].first * block_size, std::vector<int32_t>(inputs.batch())};
      for (size_t k = 0; k <= n; ++k) {
        int row = common[k].second;
        do best.own_from[row] = best.length;
        while (++row < inputs.num_decode && continues(row));
      }
    }
  }
  return best;
}

}  // namespace llmc
