#include "../../kernels/attention/params.h"
#include "../common/heads.h"

namespace llmc {
namespace {

class BidirectionalAttention : public Plugin {
 public:
  explicit BidirectionalAttention(const Fields& fields) {
    read_heads(p_, "BidirectionalAttention", fields, 256);
    if (integer(fields, "rotary_dim") != 0 || integer(fields, "window") != 0 ||
        real(fields, "softcap") != 0)
      throw Error("BidirectionalAttention has no kernel for a rotary embedding, window or softcap");
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    if (in[0].size() != 2 || in[1].size() != 2 || in[2].size() != 2)
      throw Error("BidirectionalAttention's query, key and value have 2 dimensions, not " +
                  std::to_string(in[0].size()) + ", " + std::to_string(in[1].size()) + " and " +
                  std::to_string(in[2].size()));
    const std::string op = "BidirectionalAttention";
    const Dims *starts = optional(in, 4), *lens = optional(in, 5);
    if ((starts == nullptr) != (lens == nullptr))
      throw Error(op + " takes key_starts and key_lens together");
    const Dims out{in[0][0], static_cast<int64_t>(p_.num_heads) * p_.head_dim};
    const Dims keys{starts != nullptr ? in[1][0] : in[0][0],
                    static_cast<int64_t>(p_.num_kv_heads) * p_.head_dim};
    expect(op + "'s query", in[0], out);
    expect(op + "'s key", in[1], keys);
    expect(op + "'s value", in[2], in[1]);
    expect(op + "'s cu_seqlens", in[3], {in[3][0]});
    if (starts != nullptr) {
      expect(op + "'s key_lens", *lens, *starts);
      expect_starts(op, in[3], (*starts)[0]);
    }
    if (const Dims* bias = optional(in, 6)) {
      expect(op + "'s distance_bias", *bias, {p_.num_heads, (*bias)[1]});
      if ((*bias)[1].known() && (*bias)[1].number() % 2 == 0)
        throw Error(op + "'s distance_bias has " + std::to_string((*bias)[1].number()) +
                    " columns, expected an odd number: as many before a query as after it");
    }
    return {out};
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    kernels::BidirectionalParams p = p_;
    p.out = out[0].data;
    p.query = in[0].data;
    p.key = in[1].data;
    p.value = in[2].data;
    p.cu_seqlens = static_cast<const int32_t*>(in[3].data);
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.batch = static_cast<int>(in[3].shape[0]) - 1;
    p.num_keys = static_cast<int>(in[1].shape[0]);
    const Tensor *starts = optional(in, 4), *lens = optional(in, 5);
    if (starts != nullptr) {
      p.key_starts = static_cast<const int32_t*>(starts->data);
      p.key_lens = static_cast<const int32_t*>(lens->data);
    }
    if (const Tensor* bias = optional(in, 6)) {
      p.distance_bias = static_cast<const float*>(bias->data);
      p.distances = static_cast<int>(bias->shape[1]);
    }
    check(kernels::bidirectional(in[0].dtype, p, context.stream), "BidirectionalAttention");
  }

 private:
  kernels::BidirectionalParams p_{};
};

}  // namespace

void register_bidirectional_attention() {
  register_plugin({"BidirectionalAttention",
                   1,
                   {"query", "key", "value", "cu_seqlens: int32", "key_starts?: int32",
                    "key_lens?: int32", "distance_bias?: float32", "cos?: float32",
                    "sin?: float32", "q_norm?: float32", "k_norm?: float32"},
                   {"out"},
                   {{"num_heads", int64_t{0}},
                    {"num_kv_heads", int64_t{0}},
                    {"head_dim", int64_t{0}},
                    {"scale", 0.0},
                    {"softcap", 0.0},
                    {"window", int64_t{0}},
                    {"rotary_dim", int64_t{0}},
                    {"interleaved", int64_t{0}},
                    {"norm_epsilon", 1e-6},
                    {"norm_after_rotary", int64_t{0}}},
                   {"num_heads", "num_kv_heads", "head_dim"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<BidirectionalAttention>(fields);
                   }});
}

}  // namespace llmc
