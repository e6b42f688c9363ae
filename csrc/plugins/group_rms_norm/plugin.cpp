#include "../common/norm.h"

namespace llmc {
namespace {

class GroupRMSNorm : public Plugin {
 public:
  explicit GroupRMSNorm(const Fields& fields) : groups_(integer(fields, "groups")), epsilon_(real(fields, "epsilon")) {
    if (groups_ < 1) throw Error("GroupRMSNorm's groups " + std::to_string(groups_) + " is below 1");
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims& x = in[0];
    if (x.empty()) throw Error("GroupRMSNorm's x has no dimensions");
    const Dim hidden = x[x.size() - 1];
    if (hidden.known()) {
      if (hidden.number() % groups_ != 0)
        throw Error("GroupRMSNorm's rows of " + std::to_string(hidden.number()) + " are not " + std::to_string(groups_) +
                    " equal groups");
      check_norm_rows(hidden.number() / groups_, "GroupRMSNorm");
    }
    expect("GroupRMSNorm's weight", in[1], {hidden});
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
    norm(in[0].dtype, p, "GroupRMSNorm", context.stream);
  }

 private:
  int groups_;
  float epsilon_;
};

}  // namespace

void register_group_rms_norm() {
  register_plugin({"GroupRMSNorm", 1, {"x", "weight: float32"}, {"y"}, {{"groups", int64_t{0}}, {"epsilon", 1e-6}}, {"groups"},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<GroupRMSNorm>(fields);
                   }});
}

}  // namespace llmc
