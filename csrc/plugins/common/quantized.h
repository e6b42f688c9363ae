// Quantized weights of ops: attributes and inputs of csrc/plugins/quantization.py.
#pragma once

#include "../../kernels/common/quantization.h"
#include "plugin.h"

namespace llmc {

// Adds the ports and attributes of a quantized weight. The weight itself is declared "weight:
// weight_dtype".
inline std::vector<Port> quantizable_ports(std::vector<Port> ports) {
  for (const char* port : {"weight_scale?: float32", "weight_zero?: uint8", "weight_min?: float32"})
    ports.emplace_back(port);
  return ports;
}
inline Fields quantizable_fields(Fields fields) {
  fields["weight_dtype"] = std::string("");
  for (const char* field : {"group_size", "in_features", "out_features"})
    fields[field] = int64_t{0};
  return fields;
}

// The same for ops that can quantize x; taking_fields() also for ops that take a quantized x ("x:
// x_dtype").
inline std::vector<Port> rounding_ports(std::vector<Port> ports) {
  ports = quantizable_ports(std::move(ports));
  ports.emplace_back("weight_blocks?: float32");
  return ports;
}
inline Fields rounding_fields(Fields fields) {
  fields["activation_dtype"] = std::string("");
  fields["activation_scale"] = 0.0;
  fields["activation_group_size"] = int64_t{0};
  return quantizable_fields(std::move(fields));
}
inline Fields taking_fields(Fields fields) {
  fields["x_dtype"] = std::string("");
  return rounding_fields(std::move(fields));
}

// Throws Error for group sizes and row widths that no kernel quantizes to FP8. group 0: one scale
// per row.
void check_rounded(int group, std::initializer_list<int> widths);

// The quantization scheme of an op's weight and of its x. `first`: index of weight_scale among the
// op's inputs.
class Quantized {
 public:
  Quantized(const Fields& fields, size_t first);

  explicit operator bool() const { return quant_.code_type != kernels::CodeType::kNone; }
  // [out, in] of the weight. Throws Error unless weight, scales, zeros and minima match the
  // attributes.
  Dims matrix(const std::vector<Dims>& in, size_t weight) const;
  kernels::QuantParams quant_params(const std::vector<Tensor>& in) const;
  // See Plugin::prepare(): repacks codes, and transposes scales and minima to [in / group_size,
  // out].
  void prepare(const std::vector<Tensor>& in, size_t weight, std::set<const void*>& done,
               cudaStream_t stream) const;
  int out() const { return out_; }
  int in() const { return in_; }
  // Whether x is quantized to FP8, here or by the previous op: with the static activation_scale(),
  // or where that is 0 with dynamic scales per row, or per group of activation_group() columns.
  bool rounds() const { return rounds_; }
  int activation_group() const { return activation_group_; }
  float activation_scale() const { return activation_scale_; }
  // Rows of the weight, quantized or not.
  int rows(const Tensor& weight) const { return *this ? out_ : static_cast<int>(weight.shape[0]); }

 private:
  kernels::QuantParams quant_;
  bool zeros_;  // groups have zeros or minima
  int out_, in_;
  size_t first_;
  bool rounds_ = false;
  float activation_scale_ = 0;
  int activation_group_ = 0;
};

}  // namespace llmc
