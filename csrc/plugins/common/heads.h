// Attributes and shapes that attention ops have in common.
#pragma once

#include <cmath>

#include "plugin.h"

namespace llmc {

// Fills num_heads, num_kv_heads, head_dim and scale of kernel parameters. Throws Error if no kernel
// supports them; head_dim is at most `most`.
template <typename Params>
void read_heads(Params& p, const std::string& op, const Fields& fields, int most) {
  p.num_heads = integer(fields, "num_heads");
  p.num_kv_heads = integer(fields, "num_kv_heads");
  p.head_dim = integer(fields, "head_dim");
  p.scale = real(fields, "scale");
  if (p.num_kv_heads < 1 || p.num_heads < 1 || p.num_heads % p.num_kv_heads != 0)
    throw Error(op + "'s num_heads " + std::to_string(p.num_heads) +
                " is not a multiple of num_kv_heads " + std::to_string(p.num_kv_heads));
  if (p.head_dim % 8 != 0 || p.head_dim < 8 || p.head_dim > most)
    throw Error(op + "'s head_dim " + std::to_string(p.head_dim) +
                " is not a multiple of 8 from 8 to " + std::to_string(most));
  if (p.scale == 0) p.scale = 1 / std::sqrt(static_cast<float>(p.head_dim));
}

// Throws Error unless cu_seqlens has batch + 1 elements.
inline void expect_starts(const std::string& op, const Dims& cu_seqlens, const Dim& batch) {
  expect(op + "'s cu_seqlens", cu_seqlens,
         {batch.known() ? Dim(batch.number() + 1) : cu_seqlens[0]});
}

}  // namespace llmc
