// Per-slot sampling state: the records that hosts send to the device.
#pragma once

#include <cstdint>

namespace llmc::kernels {

// The tokens of each slot's sequence, prompt and generated, for penalties, bad words and prompt
// lookup.
constexpr uint32_t kInPrompt = 1u << 31;  // flag of a count: the token is in the prompt
constexpr int32_t kRepeated = 1 << 30;    // flag of a token: it occurred before
struct TokenHistory {
  // [slots, vocab]: how often a token was generated, and kInPrompt; not of slots that only look up.
  uint32_t* counts;
  int32_t* tokens;   // [slots, room], in order, and kRepeated
  int32_t* lengths;  // [slots]
  int vocab, room;
};

// Logits processors of a slot, in the layout that runtime/sampling/slot_params.py writes. The
// slot's lists are contiguous from `lists` on: biased tokens, their biases (float32 bits), EOS
// tokens, forced tokens, the number of generated tokens before each forced one, the offset of each
// bad word and the end of the last (from the slot's first list), the bad words' tokens.
struct LogitsProcessing {
  double presence, frequency;
  float repetition;
  int32_t min_tokens, lists, num_biases, num_ends, num_forced, num_words;
  int32_t keeps_history;  // whether these need the slot's TokenHistory
};

// Sampling parameters of a slot, in the layout that runtime/sampling/slot_params.py writes. Greedy
// where temperature is 0. Otherwise samples from softmax(logits / temperature) after, in this
// order: top_k (0: all; ties are kept), top_p, min_p relative to the most likely token, and
// typical_p. The random number is number `num_generated` of the seed.
struct SlotState {
  uint64_t seed;
  int64_t num_generated;  // tokens generated so far
  float temperature, top_p, min_p, typical_p;
  int32_t top_k;
  int32_t
      logprobs;  // number of top log-probabilities to report, at most kTopLogprobs; -1: none at all
  LogitsProcessing processing;
  int32_t prompt_lookup;  // whether drafts are looked up in the slot's TokenHistory
};

// Log-probabilities of a sampled token and of the most likely tokens, in descending order, ties by
// ascending token.
constexpr int kTopLogprobs = 20;
struct Logprobs {
  float chosen, top[kTopLogprobs];
  int32_t tokens[kTopLogprobs];
  int32_t rank;  // rank of the sampled token, from 1, ties at the best rank; only with
                 // LogprobsParams.counts
};

}  // namespace llmc::kernels
