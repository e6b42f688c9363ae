#include "../common/plugin.h"
#include "../../kernels/rowwise/params.h"

namespace llmc {
namespace {

class Gate : public Plugin {
 public:
  explicit Gate(const Fields& fields) : activation_(activation_of(fields)) {}

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims& x = in[0];
    if (x.empty()) throw Error("Gate's x has no dimensions");
    expect("Gate's gate", in[1], x);
    return {x};
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    kernels::GateParams p{};
    p.y = out[0].data;
    p.x = in[0].data;
    p.gate = in[1].data;
    p.x_stride = in[0].row_pitch();
    p.gate_stride = in[1].row_pitch();
    p.width = static_cast<int>(out[0].shape.back());
    p.rows = static_cast<int>(out[0].size() / p.width);
    p.activation = activation_;
    check(kernels::gate(out[0].dtype, p, context.stream), "Gate");
  }

 private:
  Activation activation_;
};

}  // namespace

void register_gate() {
  register_plugin({"Gate",
                   1,
                   {"x: columns", "gate: columns"},
                   {"y"},
                   {{"activation", std::string("none")}},
                   {},
                   [](const Fields& fields) -> std::unique_ptr<Plugin> {
                     return std::make_unique<Gate>(fields);
                   }});
}

}  // namespace llmc
