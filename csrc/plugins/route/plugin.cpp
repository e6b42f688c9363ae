#include "../common/plugin.h"
#include "../../kernels/moe/params.h"

namespace llmc {
namespace {

kernels::RouteScore score_of(const Fields& fields) {
  static const std::map<std::string, kernels::RouteScore> names = {
      {"softmax", kernels::RouteScore::kSoftmax},
      {"sigmoid", kernels::RouteScore::kSigmoid},
      {"sqrtsoftplus", kernels::RouteScore::kSqrtSoftplus},
      {"sparsemixer", kernels::RouteScore::kSparseMixer}};
  const auto found = names.find(std::get<std::string>(fields.at("score")));
  if (found == names.end())
    throw Error("Route has an unknown score '" + std::get<std::string>(fields.at("score")) + "'");
  return found->second;
}

class Route : public Plugin {
 public:
  explicit Route(const Fields& fields) {
    p_.top_k = integer(fields, "top_k");
    p_.groups = integer(fields, "groups");
    p_.top_groups = integer(fields, "top_groups");
    p_.score = score_of(fields);
    p_.top2 = std::get<std::string>(fields.at("group_score")) == "top2";
    p_.normalize = integer(fields, "normalize") != 0;
    p_.epsilon = real(fields, "epsilon");
    p_.scale = real(fields, "scale");
    p_.jitter = real(fields, "jitter");
    if (p_.top_k < 1 || p_.top_k > kernels::kRouteTopK)
      throw Error("Route's top_k " + std::to_string(p_.top_k) + " is not from 1 to " +
                  std::to_string(kernels::kRouteTopK));
    if (p_.top_groups < 1 || p_.top_groups > p_.groups)
      throw Error("Route has top_groups " + std::to_string(p_.top_groups) +
                  ", expected 1 to groups " + std::to_string(p_.groups) + " groups");
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims &logits = in[0], *bias = optional(in, 1);
    if (logits.size() != 2)
      throw Error("Route's logits have " + std::to_string(logits.size()) + " dimensions, not 2");
    if (p_.score == kernels::RouteScore::kSparseMixer && (bias != nullptr || p_.groups > 1))
      throw Error("Route with sparsemixer takes neither a bias nor groups");
    if (logits[1].known()) check_experts(logits[1].number());
    if (bias != nullptr) expect("Route's bias", *bias, {logits[1]});
    if (const Dims* scale = optional(in, 2)) expect("Route's expert_scale", *scale, {logits[1]});
    const Dims chosen{logits[0], p_.top_k};
    return {chosen, chosen};
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    kernels::RouteParams p = p_;
    p.experts = out[0].data;
    p.narrow = out[0].dtype == DType::kInt32;
    p.scores = static_cast<float*>(out[1].data);
    p.logits = in[0].data;
    if (const Tensor* bias = optional(in, 1)) p.bias = static_cast<const float*>(bias->data);
    if (const Tensor* scale = optional(in, 2))
      p.expert_scale = static_cast<const float*>(scale->data);
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.num_experts = static_cast<int>(in[0].shape[1]);
    check(kernels::route(in[0].dtype, p, context.stream), "Route");
  }

 private:
  void check_experts(int64_t num_experts) const {
    const std::string what = "Route's logits of " + std::to_string(num_experts) + " experts";
    if (num_experts > kernels::kRouteExperts)
      throw Error(what + ": at most " + std::to_string(kernels::kRouteExperts) + " are supported");
    if (num_experts % p_.groups != 0)
      throw Error(what + " are not divisible into " + std::to_string(p_.groups) + " groups");
    if (num_experts / p_.groups * p_.top_groups < p_.top_k)
      throw Error(what + " are too few for top_k " + std::to_string(p_.top_k) + " of " +
                  std::to_string(p_.top_groups) + " groups");
    if (p_.top2 && num_experts < 2 * p_.groups) throw Error(what + " are fewer than two per group");
  }

  kernels::RouteParams p_{};
};

}  // namespace

void register_route() {
  register_plugin({"Route",
                   2,
                   {"logits", "bias?: float32", "expert_scale?: float32"},
                   {"experts: int64 int32", "scores: float32"},
                   {{"top_k", int64_t{0}},
                    {"score", std::string("softmax")},
                    {"groups", int64_t{1}},
                    {"top_groups", int64_t{1}},
                    {"group_score", std::string("max")},
                    {"normalize", int64_t{0}},
                    {"epsilon", 0.0},
                    {"scale", 1.0},
                    {"jitter", 0.0}},
                   {"top_k"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<Route>(fields);
                   }});
}

}  // namespace llmc
