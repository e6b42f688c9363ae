// Any op as an IPluginV3: TensorRT 10 and later.
#include "shell.h"

#if !LLMC_PLUGIN_V2

namespace llmc::tensorrt {
namespace {

using namespace nvinfer1;

#if NV_TENSORRT_MAJOR > 10 || NV_TENSORRT_MINOR >= 3
using Build = IPluginV3OneBuildV2;  // an output may alias an input
#else
using Build = IPluginV3OneBuild;
#endif

class PluginV3 : public IPluginV3,
                 public IPluginV3OneCore,
                 public Build,
                 public IPluginV3OneRuntime {
 public:
  explicit PluginV3(Shell shell) : shell_(std::move(shell)) {}

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
    switch (type) {
      case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
      case PluginCapabilityType::kBUILD: return static_cast<Build*>(this);
      case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }
  IPluginV3* clone() noexcept override {
    return guarded<IPluginV3*>(nullptr, [&] { return new PluginV3(shell_); });
  }

  // IPluginV3OneCore
  const char* getPluginName() const noexcept override { return shell_.type().name.c_str(); }
  const char* getPluginVersion() const noexcept override { return shell_.version().c_str(); }
  const char* getPluginNamespace() const noexcept override { return plugin_namespace().c_str(); }

  // IPluginV3OneBuild
  int32_t getNbOutputs() const noexcept override { return shell_.outputs(); }
  int32_t getOutputDataTypes(DataType* outputs, int32_t, const DataType* inputs,
                             int32_t count) const noexcept override {
    return guarded(1, [&] {
      for (int output = 0; output < shell_.outputs(); ++output)
        outputs[output] = shell_.output_type(output, inputs, count);
      return 0;
    });
  }
  int32_t getOutputShapes(const DimsExprs* inputs, int32_t count, const DimsExprs*, int32_t,
                          DimsExprs* outputs, int32_t, IExprBuilder& builder) noexcept override {
    return guarded(1, [&] {
      const std::vector<DimsExprs> shapes = shell_.output_shapes(inputs, count, builder);
      std::copy(shapes.begin(), shapes.end(), outputs);
      return 0;
    });
  }
  bool supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors,
                                 int32_t inputs, int32_t) noexcept override {
    return guarded(false, [&] { return shell_.supports(position, tensors, inputs); });
  }
  int32_t configurePlugin(const DynamicPluginTensorDesc*, int32_t inputs,
                          const DynamicPluginTensorDesc*, int32_t) noexcept override {
    return settle(inputs);
  }
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t count,
                          const DynamicPluginTensorDesc*, int32_t) const noexcept override {
    return guarded<size_t>(0, [&] { return shell_.workspace(inputs, count); });
  }
  const char* getTimingCacheID() noexcept override { return shell_.text().c_str(); }
  const char* getMetadataString() noexcept override { return shell_.text().c_str(); }
#if NV_TENSORRT_MAJOR > 10 || NV_TENSORRT_MINOR >= 3
  int32_t getAliasedInput(int32_t output) noexcept override {
    return guarded(-1, [&] { return shell_.aliased(output); });
  }
#endif

  // IPluginV3OneRuntime
  int32_t onShapeChange(const PluginTensorDesc*, int32_t inputs, const PluginTensorDesc*,
                        int32_t) noexcept override {
    return settle(inputs);
  }
  int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override {
    return guarded(1, [&] {
      shell_.enqueue(input_descs, output_descs, inputs, outputs, workspace, stream);
      return 0;
    });
  }
  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }
  const PluginFieldCollection* getFieldsToSerialize() noexcept override {
    return guarded<const PluginFieldCollection*>(nullptr, [&] {
      serialized_.clear();
      for (const auto& [name, value] : shell_.fields()) {
        if (const auto* integer = std::get_if<int64_t>(&value))
          serialized_.emplace_back(name.c_str(), integer, PluginFieldType::kINT64, 1);
        else if (const auto* real = std::get_if<double>(&value))
          serialized_.emplace_back(name.c_str(), real, PluginFieldType::kFLOAT64, 1);
        else
          serialized_.emplace_back(name.c_str(), std::get<std::string>(value).c_str(),
                                   PluginFieldType::kCHAR,
                                   static_cast<int32_t>(std::get<std::string>(value).size()) + 1);
      }
      collection_ = {static_cast<int32_t>(serialized_.size()), serialized_.data()};
      return &collection_;
    });
  }

 private:
  int32_t settle(int32_t inputs) noexcept {
    return guarded(1, [&] {
      shell_.settle(inputs);
      return 0;
    });
  }

  Shell shell_;
  std::vector<PluginField> serialized_;
  PluginFieldCollection collection_{};
};

class CreatorV3 : public IPluginCreatorV3One {
 public:
  explicit CreatorV3(const PluginType& type)
      : type_(type),
        version_(std::to_string(type.version)),
        fields_(declared_fields(type)),
        described_(name_fields(fields_)),
        collection_{static_cast<int32_t>(described_.size()), described_.data()} {}

  IPluginV3* createPlugin(const char*, const PluginFieldCollection* fields,
                          TensorRTPhase phase) noexcept override {
    return guarded<IPluginV3*>(nullptr, [&] {
      return new PluginV3(Shell(type_, read_fields(type_, fields), phase == TensorRTPhase::kBUILD));
    });
  }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return type_.name.c_str(); }
  const char* getPluginVersion() const noexcept override { return version_.c_str(); }
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
    for (const auto& [name, type] : plugin_types()) made->push_back(new CreatorV3(type));
    return made;
  }();
  return *all;
}

}  // namespace llmc::tensorrt

#endif
