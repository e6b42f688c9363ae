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

// Fills the rotary embedding, norms, window and cache dtype of an op with a KV cache. Throws Error
// if they are invalid.
template <typename Params>
void read_cached(Params& p, const std::string& op, const Fields& fields) {
  p.rotary_dim = integer(fields, "rotary_dim");
  p.window = integer(fields, "window");
  p.interleaved = integer(fields, "interleaved") != 0;
  p.norm_epsilon = real(fields, "norm_epsilon");
  p.norm_after_rotary = integer(fields, "norm_after_rotary") != 0;
  if (p.rotary_dim < 0 || p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim)
    throw Error(op + "'s rotary_dim " + std::to_string(p.rotary_dim) +
                " is not an even number from 0 to head_dim " + std::to_string(p.head_dim));
  const auto& kv_dtype = std::get<std::string>(fields.at("kv_dtype"));
  p.float8 = kv_dtype == name_of(DType::kFloat8);
  if (!p.float8 && !kv_dtype.empty())
    throw Error(op + "'s kv_dtype can be '' or " + std::string(name_of(DType::kFloat8)) +
                ", not '" + kv_dtype + "'");
}

// Throws Error unless these inputs of an op with a KV cache fit together: rows, key_cache,
// value_cache, cu_seqlens, past_lens, cos, sin, and the block table or null. `rows`: name of the
// first, which has `heads` heads. Returns the positions of cos and sin.
template <typename Params>
std::vector<Dim> expect_cached(const Params& p, const std::string& op, const std::vector<Dims>& in,
                               const char* rows, int64_t heads, const Dims* table) {
  if (in[0].size() != 2 || in[1].size() != 4 || in[2].size() != 4)
    throw Error(op + "'s rows need 2 dimensions and each cache 4, not " +
                std::to_string(in[0].size()) + ", " + std::to_string(in[1].size()) + " and " +
                std::to_string(in[2].size()));
  const Dims& cache = in[1];
  const Dim batch = in[4][0];
  expect(op + "'s " + rows, in[0], {in[0][0], heads * p.head_dim});
  expect(op + "'s key_cache", cache,
         {table != nullptr ? cache[0] : batch, p.num_kv_heads, cache[2], p.head_dim});
  expect(op + "'s value_cache", in[2], cache);
  expect(op + "'s past_lens", in[4], {batch});
  expect_starts(op, in[3], batch);
  const Dims *cos = optional(in, 5), *sin = optional(in, 6);
  if ((cos == nullptr) != (p.rotary_dim == 0) || (sin == nullptr) != (cos == nullptr))
    throw Error(op + " takes cos, sin and a rotary_dim above 0 together");
  std::vector<Dim> positions;
  for (const Dims* turns : {cos, sin}) {
    if (turns == nullptr) continue;
    expect(op + "'s cos or sin", *turns, {(*turns)[0], p.rotary_dim / 2});
    positions.push_back((*turns)[0]);
  }
  if (table != nullptr) expect(op + "'s block_table", *table, {batch, (*table)[1]});
  return positions;
}

// Throws Error unless tables with these numbers of positions serve the cache, or, where a block
// table tells its length, are alike.
inline void expect_positions(const std::string& op, const std::vector<Dim>& positions,
                             const Dims& cache, const Dims* table) {
  for (const Dim& own : positions) {
    if (table == nullptr) expect_at_least(op + "'s positions of a table", own, cache[2]);
    else expect(op + "'s positions of a table", Dims{own}, {positions[0]});
  }
}

// Throws Error unless both caches have the dtype of the op's kv_dtype.
inline void check_cache_dtypes(const std::string& op, const std::vector<Tensor>& in, bool float8) {
  if ((in[1].dtype == DType::kFloat8) != float8 || in[2].dtype != in[1].dtype)
    throw Error(op + "'s caches are " + name_of(in[1].dtype) + " and " + name_of(in[2].dtype) +
                ", which does not match its kv_dtype");
}

}  // namespace llmc
