#include "../common/norm.h"

namespace llmc {
namespace {

class GroupRMSNorm : public Plugin {
 public:
  explicit GroupRMSNorm(const Fields& fields)
      : groups_(integer(fields, "groups")),
        epsilon_(real(fields, "epsilon")),
        activation_(activation_of(fields)),
        gate_first_(integer(fields, "gate_first") != 0) {
    if (activation_ != Activation::kNone && activation_ != Activation::kSilu &&
        activation_ != Activation::kSigmoid)
      throw Error("GroupRMSNorm has an unknown activation '" +
                  std::get<std::string>(fields.at("activation")) + "'");
    if (groups_ < 1)
      throw Error("GroupRMSNorm's groups " + std::to_string(groups_) + " is below 1");
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims& x = in[0];
    if (x.empty()) throw Error("GroupRMSNorm's x has no dimensions");
    const Dim hidden = x[x.size() - 1];
    if (hidden.known()) {
      if (hidden.number() % groups_ != 0)
        throw Error("GroupRMSNorm's rows of " + std::to_string(hidden.number()) +
                    " are not divisible into " + std::to_string(groups_) + " groups");
      check_norm_rows(hidden.number() / groups_, "GroupRMSNorm");
    }
    expect("GroupRMSNorm's weight", in[1], {hidden});
    if (const Dims* gate = optional(in, 2)) expect("GroupRMSNorm's gate", *gate, x);
    return {x};
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    kernels::NormParams p{};
    p.y = out[0].data;
    p.x = in[0].data;
    p.weight = static_cast<const float*>(in[1].data);
    p.groups = groups_;
    p.hidden = static_cast<int>(in[0].shape.back()) / groups_;
    p.rows = static_cast<int>(in[0].size() / p.hidden);
    p.epsilon = epsilon_;
    if (const Tensor* gate = optional(in, 2)) {
      p.gate = gate->data;
      p.gate_stride = gate->row_pitch();
      p.gate_activation = activation_;
      p.gate_first = gate_first_;
    }
    norm(in[0].dtype, p, "GroupRMSNorm", context.stream);
  }

 private:
  int groups_;
  float epsilon_;
  Activation activation_;
  bool gate_first_;
};

}  // namespace

void register_group_rms_norm() {
  register_plugin({"GroupRMSNorm",
                   2,
                   {"x", "weight: float32", "gate?: columns"},
                   {"y"},
                   {{"groups", int64_t{0}},
                    {"epsilon", 1e-6},
                    {"activation", std::string("none")},
                    {"gate_first", int64_t{0}}},
                   {"groups"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<GroupRMSNorm>(fields);
                   }});
}

}  // namespace llmc
