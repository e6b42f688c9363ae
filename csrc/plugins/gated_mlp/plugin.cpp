#include "../common/linear.h"

namespace llmc {
namespace {

class GatedMLP : public Plugin {
 public:
  explicit GatedMLP(const Fields& fields) : activation_(activation_of(fields)) {}

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    return {linear_shape(in[0], in[1], true, optional(in, 2))};
  }

  int64_t workspace(const std::vector<Tensor>& in) const override {
    return linear_workspace(in[0], in[1], true);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    linear({in[0], in[1], optional(in, 2), nullptr, out[0], activation_, true}, workspace, context);
  }

 private:
  Activation activation_;
};

}  // namespace

void register_gated_mlp() {
  register_plugin({"GatedMLP", 1, {"x", "weight", "bias?"}, {"y"},
                   {{"activation", std::string("silu")}}, {},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<GatedMLP>(fields);
                   }});
}

}  // namespace llmc
