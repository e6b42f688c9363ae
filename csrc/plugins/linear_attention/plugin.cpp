#include "../../kernels/recurrent/params.h"
#include "../common/states.h"

namespace llmc {
namespace {

class GatedLinearAttention : public Plugin {
 public:
  explicit GatedLinearAttention(const Fields& fields) {
    p_.k_heads = integer(fields, "num_k_heads");
    p_.v_heads = integer(fields, "num_v_heads");
    p_.k_dim = integer(fields, "k_head_dim");
    p_.v_dim = integer(fields, "v_head_dim");
    p_.scale = real(fields, "scale");
    p_.decay_per_channel = integer(fields, "decay_per_channel") != 0;
    p_.decay_activation = activation_of(fields, "decay_activation");
    p_.beta_activation = activation_of(fields, "beta_activation");
    if (p_.decay_per_channel && p_.decay_activation != Activation::kNone)
      throw Error("GatedLinearAttention takes no decay_activation with decay_per_channel");
    p_.l2norm = integer(fields, "l2norm") != 0;
    const auto& rule = std::get<std::string>(fields.at("update_rule"));
    if (rule != "gated" && rule != "gated_delta")
      throw Error("GatedLinearAttention has an unknown update_rule '" + rule + "'");
    p_.delta = rule == "gated_delta";
    if (p_.k_heads < 1 || p_.v_heads < 1 || p_.v_heads % p_.k_heads != 0 || p_.k_dim < 1 ||
        p_.v_dim < 1)
      throw Error("GatedLinearAttention of " + std::to_string(p_.v_heads) + " value heads of " +
                  std::to_string(p_.v_dim) + " in " + std::to_string(p_.k_heads) +
                  " groups of keys of " + std::to_string(p_.k_dim));
    if (p_.k_dim > kernels::kMaxKeyDim)
      throw Error("GatedLinearAttention's k_head_dim " + std::to_string(p_.k_dim) + " exceeds " +
                  std::to_string(kernels::kMaxKeyDim));
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims& qkv = in[0];
    const int64_t values = static_cast<int64_t>(p_.v_heads) * p_.v_dim;
    const Dims gates{qkv[0], p_.v_heads};
    expect("GatedLinearAttention's qkv", qkv,
           {qkv[0], 2 * static_cast<int64_t>(p_.k_heads) * p_.k_dim + values});
    const int64_t decays =
        p_.decay_per_channel ? static_cast<int64_t>(p_.v_heads) * p_.k_dim : p_.v_heads;
    expect("GatedLinearAttention's decay", in[1], {qkv[0], decays});
    if (p_.decay_per_channel && (optional(in, 8) != nullptr || optional(in, 9) != nullptr))
      throw Error("GatedLinearAttention takes no decay_rate and decay_bias with decay_per_channel");
    if (optional(in, 10) != nullptr && optional(in, 5) == nullptr)
      throw Error("GatedLinearAttention has a beta_bias but no beta");
    expect_states("GatedLinearAttention", in[2], optional(in, 7), optional(in, 11), in[4][0],
                  {p_.v_heads, p_.k_dim, p_.v_dim});
    if (const Dims* beta = optional(in, 5)) expect("GatedLinearAttention's beta", *beta, gates);
    for (size_t i : {6, 8, 9, 10})
      if (const Dims* each = optional(in, i))
        expect("GatedLinearAttention's per-head inputs", *each, {p_.v_heads});
    return {{qkv[0], values}, in[2]};
  }

  int64_t workspace(const std::vector<Tensor>& in) const override {
    return in[0].dtype == DType::kFloat32
               ? 0
               : kernels::linear_attention_scratch(static_cast<int>(in[0].shape[0]), p_.v_heads);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    kernels::LinearAttentionParams p = p_;
    p.out = out[0].data;
    p.qkv = in[0].data;
    p.decay = in[1].data;
    p.state = static_cast<float*>(in[2].data);
    set_sequences(p, in[3], in[4], optional(in, 7), optional(in, 11), context);
    p.decay_stride = in[1].row_pitch();
    if (const Tensor* beta = optional(in, 5))
      p.beta = beta->data, p.beta_stride = beta->row_pitch();
    if (const Tensor* skip = optional(in, 6)) p.skip = skip->data;
    if (const Tensor* rate = optional(in, 8)) p.decay_rate = static_cast<const float*>(rate->data);
    if (const Tensor* bias = optional(in, 9)) p.decay_bias = static_cast<const float*>(bias->data);
    if (const Tensor* bias = optional(in, 10)) p.beta_bias = static_cast<const float*>(bias->data);
    p.scratch = static_cast<float*>(workspace);
    // Decoding sequences first, then those with drafts, then prompts.
    const int batch = static_cast<int>(in[4].shape[0]);
    const int decoding = context.verifies ? 0 : context.decode ? batch : context.num_decode;
    const int drafted = context.verifies ? batch : decoding + context.num_drafted;
    auto run = [&](int first, int end, int tokens) {
      if (first == end) return;
      kernels::LinearAttentionParams part = p;
      part.first_sequence = first;
      part.batch = end - first;
      part.num_tokens = tokens;
      part.single = first < decoding;
      check(kernels::can_chunk(in[0].dtype, part)
                ? kernels::linear_attention_chunks(in[0].dtype, part, context.stream)
                : kernels::linear_attention(in[0].dtype, part, context.stream),
            "GatedLinearAttention");
    };
    run(0, decoding, 0);
    run(decoding, drafted, 0);
    run(drafted, batch, static_cast<int>(in[0].shape[0]) - decoding - context.drafted_tokens);
  }

 private:
  kernels::LinearAttentionParams p_{};
};

}  // namespace

void register_linear_attention() {
  register_plugin(
      {"GatedLinearAttention",
       3,
       {"qkv", "decay: columns", "state: float32", "cu_seqlens: int32", "past_lens: int32",
        "beta?: columns", "skip?", "state_slots?: int32", "decay_rate?: float32",
        "decay_bias?: float32", "beta_bias?: float32", "commit_lens?: int32"},
       {"out", "state_out = state"},
       {{"num_k_heads", int64_t{0}},
        {"num_v_heads", int64_t{0}},
        {"k_head_dim", int64_t{0}},
        {"v_head_dim", int64_t{0}},
        {"update_rule", std::string("gated")},
        {"scale", 1.0},
        {"l2norm", int64_t{0}},
        {"decay_per_channel", int64_t{0}},
        {"decay_activation", std::string("none")},
        {"beta_activation", std::string("none")}},
       {"num_k_heads", "num_v_heads", "k_head_dim", "v_head_dim"},
       [](const Fields& fields) -> std::unique_ptr<Plugin> {
         return std::make_unique<GatedLinearAttention>(fields);
       }});
}

}  // namespace llmc
