// Checks of ops with recurrent state.
#pragma once

#include "plugin.h"

namespace llmc {

// Throws Error unless a state is [batch, ..], or with state_slots [.., ..] and these [batch].
// `sizes` are those of one state.
inline void expect_states(const std::string& op, const Dims& state, const Dims* slots,
                          const Dim& batch, Dims sizes) {
  sizes.insert(sizes.begin(), slots != nullptr ? state[0] : batch);
  expect(op + "'s state", state, sizes);
  if (slots != nullptr) expect(op + "'s state_slots", *slots, {batch});
}

}  // namespace llmc
