// Any op as an IPluginV2DynamicExt: TensorRT 8.6 to 10.
#include "shell.h"

#if LLMC_PLUGIN_V2

#include <cstring>

namespace llmc::tensorrt {
namespace {

using namespace nvinfer1;

class PluginV2 : public IPluginV2DynamicExt {
 public:
  explicit PluginV2(Shell shell) : shell_(std::move(shell)) {}

  // IPluginV2
  const char* getPluginType() const noexcept override { return shell_.type().name.c_str(); }
  const char* getPluginVersion() const noexcept override { return shell_.version().c_str(); }
  int32_t getNbOutputs() const noexcept override { return shell_.outputs(); }
  int32_t initialize() noexcept override { return 0; }
  void terminate() noexcept override {}
  size_t getSerializationSize() const noexcept override { return shell_.text().size(); }
  void serialize(void* buffer) const noexcept override {
    std::memcpy(buffer, shell_.text().data(), shell_.text().size());
  }
  void destroy() noexcept override { delete this; }
  void setPluginNamespace(const char* name) noexcept override { namespace_ = name; }
  const char* getPluginNamespace() const noexcept override { return namespace_.c_str(); }

  // IPluginV2Ext
  DataType getOutputDataType(int32_t output, const DataType* inputs,
                             int32_t count) const noexcept override {
    return guarded(DataType::kFLOAT, [&] { return shell_.output_type(output, inputs, count); });
  }

  // IPluginV2DynamicExt
  IPluginV2DynamicExt* clone() const noexcept override {
    return guarded<IPluginV2DynamicExt*>(nullptr, [&] {
      auto* made = new PluginV2(shell_);
      made->namespace_ = namespace_;
      return made;
    });
  }
  DimsExprs getOutputDimensions(int32_t output, const DimsExprs* inputs, int32_t count,
                                IExprBuilder& builder) noexcept override {
    return guarded(DimsExprs{-1, {}},
                   [&] { return shell_.output_shapes(inputs, count, builder).at(output); });
  }
  bool supportsFormatCombination(int32_t position, const PluginTensorDesc* tensors, int32_t inputs,
                                 int32_t) noexcept override {
    return guarded(false, [&] { return shell_.supports(position, tensors, inputs); });
  }
  void configurePlugin(const DynamicPluginTensorDesc*, int32_t inputs,
                       const DynamicPluginTensorDesc*, int32_t) noexcept override {
    guarded(false, [&] {
      shell_.settle(inputs);
      return true;
    });
  }
  size_t getWorkspaceSize(const PluginTensorDesc* inputs, int32_t count, const PluginTensorDesc*,
                          int32_t) const noexcept override {
    return guarded<size_t>(0, [&] { return shell_.workspace(inputs, count); });
  }
  int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override {
    return guarded(1, [&] {
      shell_.enqueue(input_descs, output_descs, inputs, outputs, workspace, stream);
      return 0;
    });
  }

 private:
  Shell shell_;
  std::string namespace_ = plugin_namespace();
};

class CreatorV2 : public IPluginCreator {
 public:
  explicit CreatorV2(const PluginType& type)
      : type_(type),
        version_(std::to_string(type.version)),
        fields_(declared_fields(type)),
        described_(name_fields(fields_)),
        collection_{static_cast<int32_t>(described_.size()), described_.data()} {}

  const char* getPluginName() const noexcept override { return type_.name.c_str(); }
  const char* getPluginVersion() const noexcept override { return version_.c_str(); }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  IPluginV2* createPlugin(const char*, const PluginFieldCollection* fields) noexcept override {
    return guarded<IPluginV2*>(
        nullptr, [&] { return new PluginV2(Shell(type_, read_fields(type_, fields), true)); });
  }
  IPluginV2* deserializePlugin(const char*, const void* data, size_t bytes) noexcept override {
    return guarded<IPluginV2*>(nullptr, [&] {
      return new PluginV2(
          Shell(type_, read_text(type_, {static_cast<const char*>(data), bytes}), false));
    });
  }
  void setPluginNamespace(const char* name) noexcept override { plugin_namespace() = name; }
  const char* getPluginNamespace() const noexcept override { return plugin_namespace().c_str(); }

 private:
  const PluginType& type_;
  const std::string version_;
  const Fields fields_;
  const std::vector<PluginField> described_;
  const PluginFieldCollection collection_;
};

}  // namespace

const std::vector<Creator*>& creators() {
  static const auto* all = [] {
    auto* made = new std::vector<Creator*>;
    for (const auto& [name, type] : plugin_types()) made->push_back(new CreatorV2(type));
    return made;
  }();
  return *all;
}

}  // namespace llmc::tensorrt

#endif
