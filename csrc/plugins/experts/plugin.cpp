#include "../common/plugin.h"

namespace llmc {
namespace {

// Pairs of an expert, on average, up to which the kernels for few tokens are taken.
constexpr int64_t kFewPairs = 8;

class Experts : public Plugin {
 public:
  explicit Experts(const Fields& fields) {
    p_.top_k = integer(fields, "top_k");
    p_.activation = activation_of(fields);
    p_.gated = integer(fields, "gated") != 0;
    p_.alpha = real(fields, "alpha");
    p_.limit = real(fields, "limit");
    p_.up_offset = real(fields, "up_offset");
    p_.scale_input = integer(fields, "scale_input") != 0;
    p_.first_expert = integer(fields, "sharded") != 0 ? integer(fields, "first_expert") : 0;
    if (!std::get<std::string>(fields.at("weight_dtype")).empty())
      throw Error("Experts has no kernel for weights in fewer bits yet");
    if (p_.top_k < 1) throw Error("Experts' top_k " + std::to_string(p_.top_k) + " is not 1 or more");
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims &x = in[0], &down = in[4];
    if (x.size() != 2 || down.size() != 3)
      throw Error("Experts' x and down have " + std::to_string(x.size()) + " and " + std::to_string(down.size()) +
                  " dimensions, not 2 and 3");
    if (down[0].known() && down[0].number() > kernels::kRouteExperts)
      throw Error(std::to_string(down[0].number()) + " experts: at most " + std::to_string(kernels::kRouteExperts) +
                  " are served");
    const Dim rows = down[2] * (p_.gated ? 2 : 1);
    expect("Experts' experts", in[1], {x[0], p_.top_k});
    expect("Experts' scores", in[2], {x[0], p_.top_k});
    expect("Experts' gate_up", in[3], {down[0], rows, x[1]});
    expect("Experts' down", down, {down[0], x[1], down[2]});
    if (const Dims* bias = optional(in, 5)) expect("Experts' gate_up_bias", *bias, {down[0], rows});
    if (const Dims* bias = optional(in, 6)) expect("Experts' down_bias", *bias, {down[0], x[1]});
    return {x};
  }

  int64_t workspace(const std::vector<Tensor>& in) const override {
    const Shape& down = in[4].shape;
    return kernels::experts_scratch(in[0].dtype, static_cast<int>(in[0].shape[0]), p_.top_k, static_cast<int>(down[0]),
                                    static_cast<int>(down[1]), static_cast<int>(down[2]));
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    kernels::ExpertsParams p = p_;
    p.y = out[0].data;
    p.x = in[0].data;
    p.experts = in[1].data;
    p.narrow = in[1].dtype == DType::kInt32;
    p.scores = static_cast<const float*>(in[2].data);
    p.gate_up = in[3].data;
    p.down = in[4].data;
    if (const Tensor* bias = optional(in, 5)) p.gate_up_bias = bias->data;
    if (const Tensor* bias = optional(in, 6)) p.down_bias = bias->data;
    p.scratch = workspace;
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.num_experts = static_cast<int>(in[4].shape[0]);
    p.hidden = static_cast<int>(in[4].shape[1]);
    p.inner = static_cast<int>(in[4].shape[2]);
    check(kernels::experts(in[0].dtype, p, way(in[0].dtype, p, context), context.stream), "Experts");
  }

 private:
  static kernels::ExpertsWay way(DType dtype, const kernels::ExpertsParams& p, const Context& context) {
    if (dtype == DType::kFloat32 || p.hidden % 8 != 0 || p.inner % 8 != 0) return kernels::ExpertsWay::kPlain;
    const bool few = p.num_tokens <= kernels::kGemvRows ||
                     static_cast<int64_t>(p.num_tokens) * p.top_k <= kFewPairs * p.num_experts;
    return context.gemm->takes_first(few) ? kernels::ExpertsWay::kFew : kernels::ExpertsWay::kMany;
  }

  kernels::ExpertsParams p_{};
};

}  // namespace

void register_experts() {
  register_plugin({"Experts", 2,
                   {"x", "experts: int64 int32", "scores: float32", "gate_up: weight_dtype", "down: weight_dtype",
                    "gate_up_bias?", "down_bias?", "gate_up_scale?: float32", "gate_up_zero?: uint8",
                    "down_scale?: float32", "down_zero?: uint8"},
                   {"y"},
                   {{"top_k", int64_t{0}}, {"activation", std::string("silu")}, {"gated", int64_t{1}}, {"alpha", 1.0},
                    {"limit", 0.0}, {"up_offset", 0.0}, {"scale_input", int64_t{0}}, {"first_expert", int64_t{0}},
                    {"sharded", int64_t{0}}, {"weight_dtype", std::string("")}, {"group_size", int64_t{0}},
                    {"in_features", int64_t{0}}, {"inner_features", int64_t{0}}},
                   {"top_k"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> { return std::make_unique<Experts>(fields); }});
}

}  // namespace llmc
