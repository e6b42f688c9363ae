#include <cmath>
#include <utility>

#include "../../kernels/attention/params.h"
#include "../common/heads.h"

namespace llmc {
namespace {

const std::string kOp = "LatentAttention";

class LatentAttention : public Plugin {
 public:
  explicit LatentAttention(const Fields& fields) {
    p_.num_heads = integer(fields, "num_heads");
    p_.query_dim = integer(fields, "query_dim");
    p_.shared_dim = integer(fields, "shared_dim");
    p_.rotary_dim = integer(fields, "rotary_dim");
    p_.interleaved = integer(fields, "interleaved") != 0;
    p_.scale = real(fields, "scale");
    const int dim = integer(fields, "head_dim"), kv_heads = integer(fields, "num_kv_heads");
    p_.latent = dim - p_.shared_dim;
    if (p_.num_heads < 1 || kv_heads != 1)
      throw Error(kOp + " of " + std::to_string(p_.num_heads) + " heads to " +
                  std::to_string(kv_heads) + ", expected one row for all");
    if (p_.shared_dim < 1 || dim <= p_.shared_dim || p_.query_dim <= p_.shared_dim)
      throw Error(kOp + "'s shared_dim " + std::to_string(p_.shared_dim) +
                  " does not fit in a row of " + std::to_string(dim) + " and a query of " +
                  std::to_string(p_.query_dim));
    for (auto [name, size] : {std::pair("head_dim", dim), std::pair("query_dim", p_.query_dim)})
      if (size > kernels::kMaxLatentDim)
        throw Error(kOp + "'s " + name + " " + std::to_string(size) + " exceeds " +
                    std::to_string(kernels::kMaxLatentDim));
    if (p_.rotary_dim < 0 || p_.rotary_dim % 2 != 0 || p_.rotary_dim > p_.shared_dim)
      throw Error(kOp + "'s rotary_dim " + std::to_string(p_.rotary_dim) +
                  " is not an even number from 0 to shared_dim " + std::to_string(p_.shared_dim));
    if (!std::get<std::string>(fields.at("kv_dtype")).empty())
      throw Error(kOp + " does not support a quantized KV cache");
    if (p_.scale == 0) p_.scale = 1 / std::sqrt(static_cast<float>(p_.query_dim));
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const int64_t dim = p_.shared_dim + p_.latent, heads = p_.num_heads;
    const Dims &query = in[0], &value_up = in[3], &cache = in[4], *cos = optional(in, 7),
               *sin = optional(in, 8);
    const Dims* table = optional(in, 10);
    const Dim batch = in[6][0];
    expect(kOp + "'s query", query, {query[0], heads * p_.query_dim});
    expect(kOp + "'s rows", in[1], {query[0], dim});
    expect(kOp + "'s key_up", in[2], {heads, p_.query_dim - p_.shared_dim, p_.latent});
    expect(kOp + "'s value_up", value_up, {heads, p_.latent, value_up[2]});
    expect(kOp + "'s latent_cache", cache, {table != nullptr ? cache[0] : batch, 1, cache[2], dim});
    expect(kOp + "'s past_lens", in[6], {batch});
    expect_starts(kOp, in[5], batch);
    if ((cos == nullptr) != (p_.rotary_dim == 0) || (sin == nullptr) != (cos == nullptr))
      throw Error(kOp + " takes cos, sin and a rotary_dim above 0 together");
    for (const Dims* turns : {cos, sin}) {
      if (turns == nullptr) continue;
      expect(kOp + "'s cos or sin", *turns, {(*turns)[0], p_.rotary_dim / 2});
      if (table == nullptr) expect_at_least(kOp + "'s number of cos or sin", (*turns)[0], cache[2]);
    }
    if (table != nullptr && cos != nullptr) expect(kOp + "'s sin", *sin, *cos);
    if (const Dims* sinks = optional(in, 9)) expect(kOp + "'s sinks", *sinks, {heads});
    if (table != nullptr) expect(kOp + "'s block_table", *table, {batch, (*table)[1]});
    return {{query[0], value_up[2] * heads}, cache};
  }

  int64_t workspace(const std::vector<Tensor>& in) const override {
    return kernels::latent_attention_scratch(in[0].dtype, static_cast<int>(in[0].shape[0]),
                                             p_.num_heads, p_.shared_dim, p_.latent);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    kernels::LatentAttentionParams p = p_;
    p.out = out[0].data;
    p.query = in[0].data;
    p.rows = in[1].data;
    p.key_up = in[2].data;
    p.value_up = in[3].data;
    p.cache = in[4].data;
    p.cu_seqlens = static_cast<const int32_t*>(in[5].data);
    p.past_lens = static_cast<const int32_t*>(in[6].data);
    const float** numbers[] = {&p.cos, &p.sin, &p.sinks};
    for (size_t i = 0; i < 3; ++i)
      if (const Tensor* given = optional(in, 7 + i))
        *numbers[i] = static_cast<const float*>(given->data);
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.batch = static_cast<int>(in[6].shape[0]);
    p.value_dim = static_cast<int>(in[3].shape[2]);
    p.max_seq_len = static_cast<int>(in[4].shape[2]);
    if (const Tensor* table = optional(in, 10)) {
      if (context.building) return;  // blocks do not exist while TensorRT builds
      p.block_table = static_cast<const int32_t*>(table->data);
      p.block_size = p.max_seq_len;
      p.max_seq_len *= static_cast<int>(table->shape[1]);
      if ((p.block_size & (p.block_size - 1)) != 0)
        throw Error(kOp + "'s block size " + std::to_string(p.block_size) +
                    " is not a power of two");
    }
    p.scratch = workspace;
    check(kernels::latent_attention(in[0].dtype, p, context.stream), kOp.c_str());
  }

 private:
  kernels::LatentAttentionParams p_{};
};

}  // namespace

void register_latent_attention() {
  register_plugin({"LatentAttention",
                   2,
                   {"query", "rows", "key_up", "value_up", "latent_cache: kv_dtype",
                    "cu_seqlens: int32", "past_lens: int32", "cos?: float32", "sin?: float32",
                    "sinks?: float32", "block_table?: int32"},
                   {"out", "latent_cache_out = latent_cache"},
                   {{"num_heads", int64_t{0}},
                    {"num_kv_heads", int64_t{0}},
                    {"head_dim", int64_t{0}},
                    {"query_dim", int64_t{0}},
                    {"shared_dim", int64_t{0}},
                    {"scale", 0.0},
                    {"rotary_dim", int64_t{0}},
                    {"interleaved", int64_t{0}},
                    {"kv_dtype", std::string()}},
                   {"num_heads", "num_kv_heads", "head_dim", "query_dim", "shared_dim"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<LatentAttention>(fields);
                   }});
}

}  // namespace llmc
