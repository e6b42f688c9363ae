// Rows of a step sorted by their adapters, planned by the first layer that has these rows.
#pragma once

#include <array>

#include "../../kernels/gemm/lora.h"
#include "plugin.h"

namespace llmc {

class LoraPlan {
 public:
  static constexpr int kKinds = 2;  // of rows: tokens, and rows of logits

  struct Tiles {
    const int32_t* order;
    const kernels::LoraTile* tiles;
  };

  // `order` has room for kKinds * rows, `tiles` for kKinds * lora_tiles(rows, slots).
  LoraPlan(int32_t* order, kernels::LoraTile* tiles, int rows, int slots)
      : order_(order), tiles_(tiles), rows_(rows), most_(kernels::lora_tiles(rows, slots)) {}
  void begin_step() { planned_ = {}; }

  // Tiles of rows with these slots, the same in all calls of a step. Throws Error for more rows, or
  // more kinds of them, than there is room for.
  Tiles tiles(const int32_t* ids, int rows, int slots, cudaStream_t stream) {
    size_t kind = 0;
    while (kind < kKinds && planned_[kind] != nullptr && planned_[kind] != ids) ++kind;
    if (kind == kKinds || rows > rows_ || kernels::lora_tiles(rows, slots) > most_)
      throw Error("a step has no room for adapters of " + std::to_string(rows) + " rows");
    int32_t* order = order_ + kind * rows_;
    kernels::LoraTile* tiles = tiles_ + kind * most_;
    if (planned_[kind] == nullptr)
      check(kernels::plan_lora_tiles(ids, rows, slots, order, tiles, stream),
            "sorting rows by adapter");
    planned_[kind] = ids;
    return {order, tiles};
  }

 private:
  int32_t* order_;
  kernels::LoraTile* tiles_;
  int rows_, most_;
  std::array<const int32_t*, kKinds> planned_{};
};

}  // namespace llmc
