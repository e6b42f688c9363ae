#include <algorithm>
#include <utility>

#include "../common/heads.h"

namespace llmc {
namespace {

class CausalAttention : public Plugin {
 public:
  explicit CausalAttention(const Fields& fields) {
    read_heads(p_, "CausalAttention", fields);
    p_.rotary_dim = integer(fields, "rotary_dim");
    p_.window = integer(fields, "window");
    p_.interleaved = integer(fields, "interleaved") != 0;
    p_.softcap = real(fields, "softcap");
    p_.norm_epsilon = real(fields, "norm_epsilon");
    if (p_.rotary_dim < 0 || p_.rotary_dim % 2 != 0 || p_.rotary_dim > p_.head_dim)
      throw Error("CausalAttention's rotary_dim " + std::to_string(p_.rotary_dim) +
                  " is not an even number from 0 to head_dim " + std::to_string(p_.head_dim));
    p_.norm_after_rotary = integer(fields, "norm_after_rotary") != 0;
    if (integer(fields, "chunk") != 0) throw Error("CausalAttention has no kernels for attention in chunks yet");
    const auto& kv_dtype = std::get<std::string>(fields.at("kv_dtype"));
    p_.float8 = kv_dtype == name_of(DType::kFloat8);
    if (!p_.float8 && !kv_dtype.empty())
      throw Error("CausalAttention's kv_dtype is '' or " + std::string(name_of(DType::kFloat8)) + ", not '" +
                  kv_dtype + "'");
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    if (in[0].size() != 2 || in[1].size() != 4 || in[2].size() != 4)
      throw Error("CausalAttention's qkv has 2 dimensions and each cache 4, not " +
                  std::to_string(in[0].size()) + ", " + std::to_string(in[1].size()) + " and " +
                  std::to_string(in[2].size()));
    const std::string op = "CausalAttention";
    const Dims &qkv = in[0], &cache = in[1], *table = optional(in, 9);
    const Dim batch = in[4][0];
    expect(op + "'s qkv", qkv, {qkv[0], static_cast<int64_t>(p_.num_heads + 2 * p_.num_kv_heads) * p_.head_dim});
    expect(op + "'s key_cache", cache, {table != nullptr ? cache[0] : batch, p_.num_kv_heads, cache[2], p_.head_dim});
    expect(op + "'s value_cache", in[2], cache);
    expect(op + "'s past_lens", in[4], {batch});
    expect_starts(op, in[3], batch);
    const Dims *cos = optional(in, 5), *sin = optional(in, 6);
    if ((cos == nullptr) != (p_.rotary_dim == 0) || (sin == nullptr) != (cos == nullptr))
      throw Error(op + " takes cos, sin and a rotary_dim above 0 together");
    for (const Dims* turns : {cos, sin}) {
      if (turns == nullptr) continue;
      expect(op + "'s cos or sin", *turns, {(*turns)[0], p_.rotary_dim / 2});
      if (table == nullptr) expect_at_least(op + "'s number of cos or sin", (*turns)[0], cache[2]);
    }
    if (table != nullptr && cos != nullptr) expect(op + "'s sin", *sin, *cos);
    for (size_t norm : {7, 8})
      if (const Dims* weight = optional(in, norm)) expect(op + "'s norm of a head", *weight, {p_.head_dim});
    if (table != nullptr) expect(op + "'s block_table", *table, {batch, (*table)[1]});
    if (const Dims* bias = optional(in, 10)) expect(op + "'s distance_bias", *bias, {p_.num_heads, (*bias)[1]});
    if (const Dims* sinks = optional(in, 11)) expect(op + "'s sinks", *sinks, {p_.num_heads});
    for (auto [input, what] : {std::pair(12, "norms of values"), std::pair(13, "a bias by key"),
                               std::pair(14, "a factor of queries by position")})
      if (optional(in, input) != nullptr) throw Error(op + " has no kernels for " + what + " yet");
    return {{qkv[0], static_cast<int64_t>(p_.num_heads) * p_.head_dim}, cache, in[2]};
  }

  // The split kernel's partial results, then the turned queries.
  int64_t workspace(const std::vector<Tensor>& in) const override {
    return scratch() + in[0].shape[0] * p_.num_heads * p_.head_dim * 4;
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    kernels::AttentionParams p = p_;
    p.out = out[0].data;
    p.qkv = in[0].data;
    if ((in[1].dtype == DType::kFloat8) != p.float8 || in[2].dtype != in[1].dtype)
      throw Error(std::string("CausalAttention's caches are of ") + name_of(in[1].dtype) + " and " +
                  name_of(in[2].dtype) + ", which its kv_dtype does not say");
    p.key_cache = in[1].data;
    p.value_cache = in[2].data;
    p.cu_seqlens = static_cast<const int32_t*>(in[3].data);
    p.past_lens = static_cast<const int32_t*>(in[4].data);
    const float** tables[] = {&p.cos, &p.sin, &p.q_norm, &p.k_norm};
    for (size_t i = 0; i < 4; ++i)
      if (const Tensor* table = optional(in, 5 + i)) *tables[i] = static_cast<const float*>(table->data);
    if (const Tensor* sinks = optional(in, 11)) p.sinks = static_cast<const float*>(sinks->data);
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.batch = static_cast<int>(in[4].shape[0]);
    p.max_seq_len = static_cast<int>(in[1].shape[2]);
    if (const Tensor* table = optional(in, 9)) {
      if (context.building) return;  // its blocks are nowhere
      p.block_table = static_cast<const int32_t*>(table->data);
      p.block_size = p.max_seq_len;
      p.num_blocks = static_cast<int>(in[1].shape[0]);
      p.max_seq_len *= static_cast<int>(table->shape[1]);
      if ((p.block_size & (p.block_size - 1)) != 0)
        throw Error("CausalAttention's block size " + std::to_string(p.block_size) +
                    " is not a power of two");
    }
    p.scratch = workspace;
    p.counters = context.counters;
    p.queries = static_cast<char*>(workspace) + scratch();
    if (const Tensor* bias = optional(in, 10)) {
      check(kernels::append(in[0].dtype, p, context.stream), "CausalAttention");
      check(kernels::biased_attention(in[0].dtype, p, static_cast<const float*>(bias->data),
                                      static_cast<int>(bias->shape[1]), context.stream), "CausalAttention");
      return;
    }
    if (context.backend == AttentionBackend::kVanilla) {
      p.vanilla = true;
      check(kernels::append(in[0].dtype, p, context.stream), "CausalAttention");
      check(kernels::attention(in[0].dtype, p, context.stream), "CausalAttention");
      return;
    }
    const int decodes = context.dense && p.num_tokens == p.batch ? p.batch : std::min(context.num_decode, p.batch);
    if (decodes > 0) {
      kernels::AttentionParams half = p;
      half.decode = true;
      half.num_tokens = half.batch = decodes;
      check(kernels::attention(in[0].dtype, half, context.stream), "CausalAttention");
    }
    if (decodes == p.batch) return;
    if (decodes > 0) skip(p, decodes, in);
    check(kernels::append(in[0].dtype, p, context.stream), "CausalAttention");
    const bool asks = context.backend == AttentionBackend::kCudnn ||
        (context.backend == AttentionBackend::kFastest && !kernels::prefills_on_hopper(in[0].dtype, p));
    if (context.sdpa != nullptr && asks && context.longest > 0 && !p.float8 &&
        context.sdpa->run(in[0].dtype, p, context.longest, context.reach, context.stream))
      return;
    check(kernels::attention(in[0].dtype, p, context.stream), "CausalAttention");
  }

 private:
  // Leave the first sequences out, which have one token each.
  static void skip(kernels::AttentionParams& p, int sequences, const std::vector<Tensor>& in) {
    const int64_t element = width(in[0].dtype), row = static_cast<int64_t>(p.num_heads) * p.head_dim * element;
    const int64_t kv_row = 2ll * p.num_kv_heads * p.head_dim * element;
    p.out = static_cast<char*>(p.out) + sequences * row;
    p.qkv = static_cast<const char*>(p.qkv) + sequences * (row + kv_row);
    p.cu_seqlens += sequences;
    p.past_lens += sequences;
    p.first_token = sequences;
    p.num_tokens -= sequences;
    p.batch -= sequences;
    if (p.block_table != nullptr) {
      p.block_table += sequences * static_cast<int64_t>(p.max_seq_len / p.block_size);
    } else {
      const int64_t cached = in[1].size() / in[1].shape[0] * width(in[1].dtype);
      p.key_cache = static_cast<char*>(p.key_cache) + sequences * cached;
      p.value_cache = static_cast<char*>(p.value_cache) + sequences * cached;
    }
  }

  int64_t scratch() const {
    return (kernels::attention_scratch(p_.num_heads, p_.head_dim) + 255) / 256 * 256;
  }

  kernels::AttentionParams p_{};
};

}  // namespace

void register_attention() {
  register_plugin(
      {"CausalAttention", 5,
       {"qkv", "key_cache: kv_dtype", "value_cache: kv_dtype", "cu_seqlens: int32", "past_lens: int32",
        "cos?: float32", "sin?: float32", "q_norm?: float32", "k_norm?: float32", "block_table?: int32",
        "distance_bias?: float32", "sinks?: float32", "v_norm?: float32", "key_bias?: float32",
        "query_scale?: float32"},
       {"out", "key_cache_out = key_cache", "value_cache_out = value_cache"},
       {{"num_heads", int64_t{0}}, {"num_kv_heads", int64_t{0}}, {"head_dim", int64_t{0}},
        {"scale", 0.0}, {"softcap", 0.0}, {"window", int64_t{0}}, {"rotary_dim", int64_t{0}},
        {"interleaved", int64_t{0}}, {"norm_epsilon", 1e-6}, {"kv_dtype", std::string("")},
        {"norm_after_rotary", int64_t{0}}, {"chunk", int64_t{0}}},
       {"num_heads", "num_kv_heads", "head_dim"},
       [](const Fields& fields) -> std::unique_ptr<Plugin> {
         return std::make_unique<CausalAttention>(fields);
       }});
}

}  // namespace llmc
