// An op as TensorRT sees it, whichever of its plugin interfaces wraps it. Nothing here names an op: what
// TensorRT asks is answered from the op's declaration and its plugin core.
//
// Beside the op's own fields a plugin has three:
//   present  the names of the inputs that a node gives, in the op's order with spaces between, as TensorRT
//            has no absent inputs; empty: the first ones
//   dtype    what it computes in, such as float16; empty: what its inputs have
//   makes    the names in the network of all its outputs, with spaces between, for watchers; empty: not known
//
// Beside the op's own inputs a plugin has one, the last: llmc_step (library.h), which `present` names where a node
// gives it.
//
// Bytes, such as the codes of a weight in fewer bits, are int32 in the network, which has constants of no bytes: four rows
// are one, so [out, width] is [out / 4, width] there, the same memory. They come as Plugin::prepare would leave them.
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

// One creator per op, for ever.
const std::vector<Creator*>& creators();

// The namespace of creators and plugins: "llmc" unless init chose another.
std::string& plugin_namespace();

// Tell TensorRT's logger, or stderr where there is none, and llmcPluginError().
void report(const std::string& problem) noexcept;

// work(), or what stands for failure where it throws: TensorRT's interfaces know no exceptions.
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
  // Throws Error for a field that is unknown, missing, of another type or without meaning. A building
  // collective does nothing: TensorRT times plugins where no other rank is.
  Shell(const PluginType& type, const Fields& fields, bool building);
  Shell(const Shell& other) : Shell(other.type_, other.fields_, other.building_) {}
  Shell& operator=(const Shell&) = delete;

  const PluginType& type() const { return type_; }
  const std::string& version() const { return version_; }
  const Fields& fields() const { return fields_; }  // all of them, as values
  const std::string& text() const { return text_; }  // the same, as text
  int outputs() const { return static_cast<int>(type_.outputs.size()); }

  // From here on a node has this many inputs. Throws Error where that is not what `present` says, or too few.
  void settle(int inputs);

  nvinfer1::DataType output_type(int output, const nvinfer1::DataType* inputs, int count) const;
  std::vector<nvinfer1::DimsExprs> output_shapes(const nvinfer1::DimsExprs* inputs, int count,
                                                 nvinfer1::IExprBuilder& builder) const;
  // Which of the node's inputs an output is the memory of; -1: of none.
  int aliased(int output) const;
  // Whether the tensor at `position` may be what it is, given those before it; outputs follow the inputs.
  template <typename Desc>
  bool supports(int position, const Desc* tensors, int inputs) const;
  // For these inputs, or where they have no numbers yet, their largest.
  template <typename Desc>
  size_t workspace(const Desc* inputs, int count) const;
  void enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc* output_descs,
               const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) const;

 private:
  std::vector<int> given(int count) const;
  bool supports(const nvinfer1::PluginTensorDesc& desc, const Port& port, const DType* computing) const;
  // Whether its dtype is what the op computes in.
  bool computes(const Port& port) const { return port.dtypes.empty() && !port.is_bytes(fields_); }
  std::vector<Tensor> inputs(const nvinfer1::PluginTensorDesc* descs, const void* const* data, int count) const;
  // The input in whose memory an output is; itself where it is in none's.
  const Port& held_by(const Port& port) const;
  // What the field kv_dtype says of an input or output.
  std::optional<DType> held(const Port& port) const;
  size_t workspace(const std::vector<nvinfer1::PluginTensorDesc>& inputs) const;
  static LlmcStep read_step(const Tensor& given);
  void show(const LlmcStep& step, const std::vector<Tensor>& outputs, cudaStream_t stream) const;

  const PluginType& type_;
  const std::vector<Port> inputs_;  // the op's and llmc_step
  const std::string version_;
  Fields fields_;
  std::string text_;
  const bool building_;
  std::unique_ptr<Plugin> core_;
  std::vector<int> given_;  // which of inputs_ each of the node's inputs is; empty: not known yet
};

// An op's fields, with the three of every plugin.
Fields declared_fields(const PluginType& type);

// The fields that TensorRT hands to a creator. Throws Error for one of an impossible type or size.
Fields read_fields(const PluginType& type, const nvinfer1::PluginFieldCollection* given);

// Fields as lines "name=i4", "name=f0x1p-1", "name=ssilu", and back. Throws Error where the text is damaged.
std::string write_text(const Fields& fields);
Fields read_text(const PluginType& type, const std::string& text);

// What a creator's fields are called and of which type, in which TensorRT's importer gives them: 32 bits.
std::vector<nvinfer1::PluginField> name_fields(const Fields& fields);

inline const nvinfer1::PluginTensorDesc& fixed(const nvinfer1::PluginTensorDesc& desc) { return desc; }
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
  const Port& port = position < inputs ? inputs_[given[position]] : type_.outputs.at(position - inputs);
  return supports(fixed(tensors[position]), port, before);
}

template <typename Desc>
size_t Shell::workspace(const Desc* inputs, int count) const {
  std::vector<nvinfer1::PluginTensorDesc> descs;
  for (int i = 0; i < count; ++i) descs.push_back(largest(inputs[i]));
  return workspace(descs);
}

}  // namespace llmc::tensorrt
