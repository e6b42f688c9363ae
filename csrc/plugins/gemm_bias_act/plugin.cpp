#include "../common/linear.h"

namespace llmc {
namespace {

class GemmBiasAct : public Plugin {
 public:
  explicit GemmBiasAct(const Fields& fields) : activation_(activation_of(fields)) {}

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    return {linear_shape(in[0], in[1], false, optional(in, 2))};
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    linear({in[0], in[1], optional(in, 2), nullptr, out[0], activation_, false}, nullptr, context);
  }

 private:
  Activation activation_;
};

}  // namespace

void register_gemm_bias_act() {
  register_plugin({"GemmBiasAct", 1, {"x", "weight", "bias?"}, {"y"},
                   {{"activation", std::string("none")}}, {},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<GemmBiasAct>(fields);
                   }});
}

}  // namespace llmc
