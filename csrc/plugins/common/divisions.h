// How the sequences of a step that decode are divided into parts: made by the first of the layers that divide alike.
#pragma once

#include <array>
#include <vector>

#include "../../kernels/attention/params.h"

namespace llmc {

class Divisions {
 public:
  static constexpr int kKinds = 8;  // of layers, by windows and heads, for which there is room; others divide for themselves
  // Parts that a kind has of so many sequences, at most.
  static int64_t room(int64_t batch) { return batch + kernels::kAttentionCounters; }

  // `parts`: on the device, kKinds times `each`, which is a room().
  Divisions(kernels::DecodePart* parts, int64_t each) : parts_(parts), each_(each) {}
  void begin_step() { made_.clear(); }

  // Gives p its parts, and says whether another layer has made them in this step; leaves p as it is where there is no room for
  // another kind.
  void place(kernels::AttentionParams& p) {
    const Kind kind{p.batch, p.num_heads, p.num_kv_heads, p.max_seq_len, p.window, p.chunk, p.prefix.of != nullptr};
    size_t at = 0;
    while (at < made_.size() && made_[at] != kind) ++at;
    if (at == kKinds) return;
    p.divided = at < made_.size();
    if (!p.divided) made_.push_back(kind);
    p.parts = parts_ + at * each_;
  }

 private:
  using Kind = std::array<int, 7>;
  kernels::DecodePart* parts_;
  int64_t each_;
  std::vector<Kind> made_;
};

}  // namespace llmc
