#include "builtin.h"

#include "../kernels/rowwise/params.h"

namespace llmc {
namespace {

// Selects the rows whose logits a step wants.
class Gather : public Plugin {
 public:
  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    expect("Gather's x", in[0], {in[0][0], in[0][1]});
    expect("Gather's logits_indices", in[1], {in[1][0]});
    return {{in[1][0], in[0][1]}};
  }
  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    check(kernels::gather_rows(in[0].dtype, out[0].data, in[0].data,
                               static_cast<const int64_t*>(in[1].data),
                               static_cast<int>(in[1].shape[0]), in[0].shape[0],
                               static_cast<int>(in[0].shape[1]), context.stream),
          "Gather");
  }
  bool passes_on(const Context& context) const override {
    return context.decode;
  }  // all rows, in order
};

// Selects columns of a value, in any order.
class Columns : public Plugin {
 public:
  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    expect("Columns's x", in[0], {in[0][0], in[0][1]});
    expect("Columns's index", in[1], {in[1][0]});
    return {{in[0][0], in[1][0]}};
  }
  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    check(kernels::gather_columns(
              in[0].dtype, out[0].data, in[0].data, static_cast<const int32_t*>(in[1].data),
              static_cast<int>(in[0].shape[0]), static_cast<int>(in[0].shape[1]),
              static_cast<int>(in[1].shape[0]), context.stream),
          "Columns");
  }
};

// Writes rows of a tensor to rows of the encoder output.
class Scatter : public Plugin {
 public:
  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    expect("Scatter's x", in[0], {in[0][0], in[0][1]});
    expect("Scatter's memory_rows", in[1], {in[0][0]});
    expect("Scatter's memory", in[2], {in[2][0], in[0][1]});
    return {};
  }
  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>&, void*,
               const Context& context) const override {
    check(kernels::scatter_rows(in[0].dtype, in[2].data, in[0].data,
                                static_cast<const int64_t*>(in[1].data),
                                static_cast<int>(in[1].shape[0]), in[2].shape[0],
                                static_cast<int>(in[0].shape[1]), context.stream),
          "Scatter");
  }
};

// Concatenates values along columns.
class Concat : public Plugin {
 public:
  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    int64_t width = 0;
    for (const Dims& x : in) {
      if (x.empty()) continue;
      expect("Concat's input", x, {in[0][0], x[1]});
      width += x[1].number();
    }
    return {{in[0][0], width}};
  }
  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    kernels::ConcatParams p{};
    p.y = out[0].data;
    p.rows = static_cast<int>(out[0].shape[0]);
    for (size_t i = 0; i < in.size(); ++i)
      if (in[i].data != nullptr)
        p.x[i] = in[i].data, p.widths[i] = static_cast<int>(in[i].shape[1]);
    check(kernels::concat(out[0].dtype, p, context.stream), "Concat");
  }
};

// An elementwise ONNX op. A float32 number is broadcast to all elements, a float32 row to all rows,
// and a column to all columns.
class ElementwiseOp : public Plugin {
 public:
  explicit ElementwiseOp(kernels::Elementwise op) : op_(op) {}

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const Dims* found =
        nullptr;  // the operand with the output's shape: preferably one that is not a column
    for (const Dims& operand : in)
      if (!is_weight(operand) && (found == nullptr || (is_column(*found) && !is_column(operand))))
        found = &operand;
    const Dims& y = found != nullptr ? *found : in[0];
    if (is_weight(y)) throw Error("an elementwise op has only weights as inputs; expected a value");
    for (const Dims& operand : in)
      expect("an elementwise op's operand", operand,
             !is_weight(operand)  ? (is_column(operand) ? Dims{y[0], 1} : y)
             : is_number(operand) ? Dims{1}
                                  : Dims{y[1]});
    return {y};
  }
  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    kernels::Operands operands{};
    for (size_t i = 0; i < in.size(); ++i)
      operands.data[i] = in[i].data, operands.is[i] = operand(in[i], out[0]);
    check(kernels::elementwise(out[0].dtype, op_, out[0].data, operands, out[0].size(),
                               static_cast<int>(out[0].shape.back()), context.stream),
          "an elementwise op");
  }

 private:
  template <typename Dimensions>
  static bool is_weight(const Dimensions& shape) {
    return shape.size() < 2;
  }
  static bool is_number(const Dims& shape) {
    return shape.empty() || (shape[0].known() && shape[0].number() == 1);
  }
  static bool is_column(const Dims& shape) {
    return shape.size() == 2 && shape[1].known() && shape[1].number() == 1;
  }
  static kernels::Operand operand(const Tensor& x, const Tensor& y) {
    if (is_weight(x.shape))
      return x.size() == 1 ? kernels::Operand::kNumber : kernels::Operand::kRow;
    return x.shape == y.shape ? kernels::Operand::kWhole : kernels::Operand::kColumn;
  }

  kernels::Elementwise op_;
};

template <kernels::Elementwise kOp>
std::unique_ptr<Plugin> make(const Fields&) {
  return std::make_unique<ElementwiseOp>(kOp);
}

template <typename Node>
std::unique_ptr<Plugin> make(const Fields&) {
  return std::make_unique<Node>();
}

std::map<std::string, PluginType> all_types() {
  using kernels::Elementwise;
  std::map<std::string, PluginType> types;
  auto add = [&](const std::string& name, std::vector<Port> inputs, std::vector<Port> outputs,
                 auto make) {
    types[name] = {name, 1, std::move(inputs), std::move(outputs), {}, {}, make};
  };
  add("Gather", {"x", "logits_indices: int64"}, {"y"}, &make<Gather>);
  add("Columns", {"x", "index: int32"}, {"y"}, &make<Columns>);
  add("Scatter", {"x", "memory_rows: int64", "memory"}, {}, &make<Scatter>);
  add("Concat", {"a", "b", "c?", "d?"}, {"y"}, &make<Concat>);
  const std::vector<Port> one = {"a"}, two = {"a: number", "b: number"};
  add("Add", two, {"y"}, &make<Elementwise::kAdd>);
  add("Sub", two, {"y"}, &make<Elementwise::kSub>);
  add("Mul", two, {"y"}, &make<Elementwise::kMul>);
  add("Div", two, {"y"}, &make<Elementwise::kDiv>);
  add("Min", two, {"y"}, &make<Elementwise::kMin>);
  add("Max", two, {"y"}, &make<Elementwise::kMax>);
  add("Greater", two, {"y"}, &make<Elementwise::kGreater>);
  add("Less", two, {"y"}, &make<Elementwise::kLess>);
  add("Where", {"a", "b: number", "c: number"}, {"y"}, &make<Elementwise::kWhere>);
  add("Elu", one, {"y"}, &make<Elementwise::kElu>);
  add("Tanh", one, {"y"}, &make<Elementwise::kTanh>);
  add("Exp", one, {"y"}, &make<Elementwise::kExp>);
  add("Sigmoid", one, {"y"}, &make<Elementwise::kSigmoid>);
  add("Neg", one, {"y"}, &make<Elementwise::kNeg>);
  add("Softplus", one, {"y"}, &make<Elementwise::kSoftplus>);
  add("Gelu", one, {"y"}, &make<Elementwise::kGelu>);
  add("GeluTanh", one, {"y"}, &make<Elementwise::kGeluTanh>);
  return types;
}

}  // namespace

const std::map<std::string, PluginType>& builtin_types() {
  static const auto* types = new std::map<std::string, PluginType>(all_types());
  return *types;
}

}  // namespace llmc
