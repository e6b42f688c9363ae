// Checks of ops with recurrent state.
#pragma once

#include "plugin.h"

namespace llmc {

// Throws Error unless a state is [batch, ..], or with state_slots [.., ..] and these [batch], as
// are commit_lens. `sizes` are those of one state.
inline void expect_states(const std::string& op, const Dims& state, const Dims* slots,
                          const Dims* commits, const Dim& batch, Dims sizes) {
  sizes.insert(sizes.begin(), slots != nullptr ? state[0] : batch);
  expect(op + "'s state", state, sizes);
  if (slots != nullptr) expect(op + "'s state_slots", *slots, {batch});
  if (commits != nullptr) expect(op + "'s commit_lens", *commits, {batch});
}

// Sets the sequences of a kernel's parameters: their tokens, past positions, states and tokens to
// commit. Absent tensors are null.
template <typename Params>
void set_sequences(Params& p, const Tensor& cu_seqlens, const Tensor& past_lens,
                   const Tensor* slots, const Tensor* commits, const Context& context) {
  p.cu_seqlens = static_cast<const int32_t*>(cu_seqlens.data);
  p.past_lens = static_cast<const int32_t*>(past_lens.data);
  if (context.verifies)
    p.cu_seqlens = context.sequences.cu_seqlens, p.past_lens = context.sequences.past_lens;
  if (slots != nullptr) p.state_slots = static_cast<const int32_t*>(slots->data);
  if (commits != nullptr) p.commit_lens = static_cast<const int32_t*>(commits->data);
}

}  // namespace llmc
