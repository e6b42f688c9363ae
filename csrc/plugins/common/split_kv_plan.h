// KV splits of the decoding sequences of a step, planned by the first of the layers that have the
// same parameters.
#pragma once

#include <array>
#include <vector>

#include "../../kernels/attention/params.h"

namespace llmc {

class SplitKvPlan {
 public:
  static constexpr int kMaxKinds =
      8;  // of layers, by window and heads; further kinds plan for themselves
  // Maximum number of KV splits of a kind.
  static int64_t capacity(int64_t batch) { return batch + kernels::kAttentionCounters; }

  // `kv_splits`: device memory for kMaxKinds * each, where `each` is a capacity().
  SplitKvPlan(kernels::KvSplit* kv_splits, int64_t each) : kv_splits_(kv_splits), each_(each) {}
  void begin_step() { made_.clear(); }

  // Sets p.kv_splits, and whether another layer has already planned them in this step. Leaves p
  // unchanged if there is no room for another kind.
  void assign(kernels::AttentionParams& p) {
    const Kind kind{p.batch,  p.num_heads, p.num_kv_heads,         p.max_seq_len,
                    p.window, p.chunk,     p.prefix.of != nullptr, kernels::appends_rows(p)};
    size_t at = 0;
    while (at < made_.size() && made_[at] != kind) ++at;
    if (at == kMaxKinds) return;
    p.splits_planned = at < made_.size();
    if (!p.splits_planned) made_.push_back(kind);
    p.kv_splits = kv_splits_ + at * each_;
  }

 private:
  using Kind = std::array<int, 8>;
  kernels::KvSplit* kv_splits_;
  int64_t each_;
  std::vector<Kind> made_;
};

}  // namespace llmc
