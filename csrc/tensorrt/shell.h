// An op as a TensorRT plugin, independent of the plugin interface. No op is named here: TensorRT's
// queries are answered from the op's declaration and its plugin core.
//
// In addition to the op's attributes a plugin has three fields:
//   present  names of the inputs that a node has, in the op's order, separated by spaces, since
//            TensorRT has no absent inputs; empty: the first ones
//   dtype    the dtype that the op computes in, such as float16; empty: that of its inputs
//   makes    names of all outputs in the network, separated by spaces, for watchers; empty: unknown
//
// In addition to the op's inputs a plugin has llmc_step (library.h), the last one, if `present`
// names it.
//
// Bytes, such as the codes of a quantized weight, are int32 in the network, which has no byte
// constants. Four rows are one: [out, width] is [out / 4, width] there, with the same memory. They
// are in the layout after Plugin::prepare().
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "library.h"
#include "tensorrt.h"

namespace llmc::tensorrt {

#if LLMC_PLUGIN_V2
using Creator = nvinfer1::IPluginCreator;
#else
using Creator = nvinfer1::IPluginCreatorInterface;
#endif

// One creator per op, never freed.
const std::vector<Creator*>& creators();

// The namespace of creators and plugins: "llmc" unless init() sets another.
std::string& plugin_namespace();

// Reports a problem to TensorRT's logger, or to stderr without one, and to llmcPluginError().
void report(const std::string& problem) noexcept;

// Returns work(), or `failure` if it throws: TensorRT's interfaces have no exceptions.
template <typename Result, typename Work>
Result guarded(Result failure, Work&& work) noexcept {
  try {
    return work();
  } catch (const std::exception& error) {
    report(error.what());
    return failure;
  }
}

class Shell {
 public:
  // Throws Error for a field that is unknown, missing, of the wrong type or invalid. While
  // building, a collective does nothing: TensorRT times plugins on one rank only.
  Shell(const PluginType& type, const Fields& fields, bool building);
  Shell(const Shell& other) : Shell(other.type_, other.fields_, other.building_) {}
  Shell& operator=(const Shell&) = delete;

  const PluginType& type() const { return type_; }
  const std::string& version() const { return version_; }
  const Fields& fields() const { return fields_; }   // all of them, as values
  const std::string& text() const { return text_; }  // the same, as text
  int outputs() const { return static_cast<int>(type_.outputs.size()); }

  // Fixes the number of a node's inputs. Throws Error if that contradicts `present`, or is too
  // small.
  void settle(int inputs);

  nvinfer1::DataType output_type(int output, const nvinfer1::DataType* inputs, int count) const;
  std::vector<nvinfer1::DimsExprs> output_shapes(const nvinfer1::DimsExprs* inputs, int count,
                                                 nvinfer1::IExprBuilder& builder) const;
  // The input that an output aliases; -1: none.
  int aliased(int output) const;
  // Whether the tensor at `position` is supported, given those before it; outputs follow the
  // inputs.
  template <typename Desc>
  bool supports(int position, const Desc* tensors, int inputs) const;
  // For these inputs, or their maximum shapes while these are dynamic.
  template <typename Desc>
  size_t workspace(const Desc* inputs, int count) const;
  void enqueue(const nvinfer1::PluginTensorDesc* input_descs,
               const nvinfer1::PluginTensorDesc* output_descs, const void* const* inputs,
               void* const* outputs, void* workspace, cudaStream_t stream) const;

 private:
  std::vector<int> given(int count) const;
  bool supports(const nvinfer1::PluginTensorDesc& desc, const Port& port,
                const DType* computing) const;
  // Whether its dtype is the one that the op computes in.
  bool computes(const Port& port) const { return port.dtypes.empty() && !port.is_bytes(fields_); }
  std::vector<Tensor> inputs(const nvinfer1::PluginTensorDesc* descs, const void* const* data,
                             int count) const;
  // The input that a port aliases, or the port itself.
  const Port& held_by(const Port& port) const;
  // The dtype of attribute kv_dtype, for cache ports.
  std::optional<DType> held(const Port& port) const;
  size_t workspace(const std::vector<nvinfer1::PluginTensorDesc>& inputs) const;
  static LlmcStep read_step(const Tensor& given);
  void show(const LlmcStep& step, const std::vector<Tensor>& outputs, cudaStream_t stream) const;

  const PluginType& type_;
  const std::vector<Port> inputs_;  // the op's, and llmc_step
  const std::string version_;
  Fields fields_;
  std::string text_;
  const bool building_;
  std::unique_ptr<Plugin> core_;
  std::vector<int> given_;  // index in inputs_ of each of the node's inputs; empty: not known yet
};

// An op's attributes and the three fields above.
Fields declared_fields(const PluginType& type);

// Reads the fields that TensorRT passes to a creator. Throws Error for an unsupported type or size.
Fields read_fields(const PluginType& type, const nvinfer1::PluginFieldCollection* given);

// Serializes fields as lines "name=i4", "name=f0x1p-1", "name=ssilu", and back. Throws Error if the
// text is damaged.
std::string write_text(const Fields& fields);
Fields read_text(const PluginType& type, const std::string& text);

// Names and types of a creator's fields as TensorRT's importer passes them: 32 bits.
std::vector<nvinfer1::PluginField> name_fields(const Fields& fields);

inline const nvinfer1::PluginTensorDesc& fixed(const nvinfer1::PluginTensorDesc& desc) {
  return desc;
}
inline const nvinfer1::PluginTensorDesc& fixed(const nvinfer1::DynamicPluginTensorDesc& desc) {
  return desc.desc;
}

inline nvinfer1::PluginTensorDesc largest(const nvinfer1::PluginTensorDesc& desc) { return desc; }
inline nvinfer1::PluginTensorDesc largest(const nvinfer1::DynamicPluginTensorDesc& desc) {
  nvinfer1::PluginTensorDesc made = desc.desc;
  made.dims = desc.max;
  return made;
}

template <typename Desc>
bool Shell::supports(int position, const Desc* tensors, int inputs) const {
  const std::vector<int> given = this->given(inputs);
  DType computing;
  const DType* before = nullptr;
  for (int i = 0; i < position && i < inputs && before == nullptr; ++i)
    if (computes(inputs_[given[i]]) && known(fixed(tensors[i]).type)) {
      computing = from_tensorrt(fixed(tensors[i]).type);
      before = &computing;
    }
  const Port& port =
      position < inputs ? inputs_[given[position]] : type_.outputs.at(position - inputs);
  return supports(fixed(tensors[position]), port, before);
}

template <typename Desc>
size_t Shell::workspace(const Desc* inputs, int count) const {
  std::vector<nvinfer1::PluginTensorDesc> descs;
  for (int i = 0; i < count; ++i) descs.push_back(largest(inputs[i]));
  return workspace(descs);
}

}  // namespace llmc::tensorrt
