#include "harness.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "../engine/memory.h"
#include "../plugins/common/timing.h"

namespace llmc::tensorrt {
namespace {

using namespace nvinfer1;

#if NV_TENSORRT_MAJOR >= 10
using Number = int64_t;
#else
using Number = int32_t;
#endif

// A dimension expression: an input's, whose value only the harness knows, or a constant.
class Expr final : public IDimensionExpr, private apiv::VDimensionExpr {
 public:
  Expr(int64_t value, bool constant) : value_(value), constant_(constant) { mImpl = this; }
  int64_t value() const { return value_; }

 private:
  bool isConstant() const noexcept override { return constant_; }
  Number getConstantValue() const noexcept override { return constant_ ? Number(value_) : 0; }
#if NV_TENSORRT_MAJOR >= 10
  bool isSizeTensor() const noexcept override { return false; }
#endif

  const int64_t value_;
  const bool constant_;
};

class Exprs final : public IExprBuilder, private apiv::VExprBuilder {
 public:
  Exprs() { mImpl = this; }
  const IDimensionExpr* input(int64_t value) { return &all_.emplace_back(value, false); }

 private:
  const IDimensionExpr* constant(Number value) noexcept override {
    return &all_.emplace_back(value, true);
  }
  const IDimensionExpr* operation(DimensionOperation operation, const IDimensionExpr& first,
                                  const IDimensionExpr& second) noexcept override {
    const int64_t a = static_cast<const Expr&>(first).value(),
                  b = static_cast<const Expr&>(second).value();
    const bool constant = first.isConstant() && second.isConstant();
    switch (operation) {
      case DimensionOperation::kSUM: return &all_.emplace_back(a + b, constant);
      case DimensionOperation::kPROD: return &all_.emplace_back(a * b, constant);
      case DimensionOperation::kSUB: return &all_.emplace_back(a - b, constant);
      case DimensionOperation::kFLOOR_DIV: return &all_.emplace_back(a / b, constant);
      case DimensionOperation::kCEIL_DIV: return &all_.emplace_back((a + b - 1) / b, constant);
      default: return nullptr;
    }
  }
#if NV_TENSORRT_MAJOR >= 10
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&,
                                          const IDimensionExpr&) noexcept override {
    return nullptr;
  }
#endif

  std::deque<Expr> all_;
};

PluginTensorDesc describe(const Tensor& tensor) {
  PluginTensorDesc desc{};
  desc.type = to_tensorrt(tensor.dtype);
  desc.format = TensorFormat::kLINEAR;
  desc.scale = 1;
  desc.dims.nbDims = static_cast<int>(tensor.shape.size());
  std::copy(tensor.shape.begin(), tensor.shape.end(), desc.dims.d);
  return desc;
}

std::vector<PluginTensorDesc> describe(const std::vector<Tensor>& tensors) {
  std::vector<PluginTensorDesc> descs;
  for (const Tensor& tensor : tensors) descs.push_back(describe(tensor));
  return descs;
}

// As a builder passes them: dynamic, with the ranges of a profile.
std::vector<DynamicPluginTensorDesc> dynamic(const std::vector<PluginTensorDesc>& descs) {
  std::vector<DynamicPluginTensorDesc> made;
  for (const PluginTensorDesc& desc : descs) {
    DynamicPluginTensorDesc wide{};
    wide.desc = desc;
    std::fill_n(wide.desc.dims.d, desc.dims.nbDims, -1);
    wide.min = wide.max = desc.dims;
#if NV_TENSORRT_MAJOR >= 10
    wide.opt = desc.dims;
#endif
    std::fill_n(wide.min.d, desc.dims.nbDims, 1);
    made.push_back(wide);
  }
  return made;
}

PluginTensorDesc& inner(PluginTensorDesc& desc) { return desc; }
PluginTensorDesc& inner(DynamicPluginTensorDesc& desc) { return desc.desc; }

// Offers every tensor in each dtype and two formats: a plugin must accept its own dtype, and only
// the linear format.
template <typename Build, typename Desc>
void offer(Build& plugin, std::vector<Desc> descs, const std::vector<Desc>& out) {
  const int inputs = static_cast<int>(descs.size()), outputs = static_cast<int>(out.size());
  descs.insert(descs.end(), out.begin(), out.end());
  for (int position = 0; position < inputs + outputs; ++position) {
    PluginTensorDesc& desc = inner(descs[position]);
    const PluginTensorDesc whole = desc;
    for (const auto& pair : kDataTypes) {
      desc.type = pair.second;
      for (const TensorFormat format : {TensorFormat::kCHW4, TensorFormat::kLINEAR}) {
        desc.format = format;
        const bool taken =
            plugin.supportsFormatCombination(position, descs.data(), inputs, outputs);
        if (format != TensorFormat::kLINEAR && taken)
          throw Error("the plugin accepts a layout that is not linear");
        if (format == TensorFormat::kLINEAR && desc.type == whole.type && !taken)
          throw Error("the plugin does not accept tensor " + std::to_string(position) + " as " +
                      name_of(from_tensorrt(whole.type)));
      }
    }
    desc = whole;
  }
}

// Fields as TensorRT's importer makes them from ONNX attributes.
class Attributes {
 public:
  explicit Attributes(const Fields& fields) {
    for (const auto& [name, value] : fields) {
      if (const auto* integer = std::get_if<int64_t>(&value)) {
        integers_.push_back(static_cast<int32_t>(*integer));
        fields_.emplace_back(name.c_str(), &integers_.back(), PluginFieldType::kINT32, 1);
      } else if (const auto* real = std::get_if<double>(&value)) {
        reals_.push_back(static_cast<float>(*real));
        fields_.emplace_back(name.c_str(), &reals_.back(), PluginFieldType::kFLOAT32, 1);
      } else {
        const std::string& text = std::get<std::string>(value);
        fields_.emplace_back(name.c_str(), text.c_str(), PluginFieldType::kCHAR,
                             static_cast<int32_t>(text.size()) + 1);
      }
    }
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  Attributes(const Attributes&) = delete;
  const PluginFieldCollection* get() const { return &collection_; }

 private:
  std::deque<int32_t> integers_;
  std::deque<float> reals_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

std::vector<DimsExprs> express(const std::vector<Tensor>& tensors, Exprs& exprs) {
  std::vector<DimsExprs> made;
  for (const Tensor& tensor : tensors) {
    DimsExprs dims{};
    dims.nbDims = static_cast<int>(tensor.shape.size());
    for (int axis = 0; axis < dims.nbDims; ++axis) dims.d[axis] = exprs.input(tensor.shape[axis]);
    made.push_back(dims);
  }
  return made;
}

Shape value_of(const DimsExprs& dims) {
  Shape shape;
  for (int axis = 0; axis < dims.nbDims; ++axis)
    shape.push_back(static_cast<const Expr*>(dims.d[axis])->value());
  return shape;
}

std::vector<DataType> types_of(const std::vector<Tensor>& tensors) {
  std::vector<DataType> types;
  for (const Tensor& tensor : tensors) types.push_back(to_tensorrt(tensor.dtype));
  return types;
}

// Stream, events and scratch of a run; `enqueue` passes the scratch to the plugin.
template <typename Enqueue>
float measure(int64_t bytes, int repeats, Enqueue&& enqueue) {
  cudaStream_t stream = nullptr;
  void* scratch = nullptr;
  check(cudaDeviceSynchronize(), "waiting");
  check(cudaStreamCreate(&stream), "a stream");
  check(cudaMalloc(&scratch, std::max<int64_t>(bytes, 1)), "scratch");
  check(cudaMemsetAsync(scratch, 0xff, bytes, stream), "scratch");
  const float milliseconds = time_on(stream, repeats - 1, [&] { enqueue(scratch, stream); });
  cudaFree(scratch);
  cudaStreamDestroy(stream);
  return milliseconds;
}

struct Pointers {
  explicit Pointers(const std::vector<Tensor>& tensors) {
    for (const Tensor& tensor : tensors) all.push_back(tensor.data);
  }
  std::vector<void*> all;
};

}  // namespace

std::vector<Harness::Creator> Harness::creators() const {
  static const std::map<PluginFieldType, std::string> kinds = {{PluginFieldType::kINT32, "int"},
                                                               {PluginFieldType::kFLOAT32, "float"},
                                                               {PluginFieldType::kCHAR, "str"}};
  std::vector<Creator> creators;
  for (TensorRTCreator* creator : library_.creators()) {
    Creator made{
        creator->getPluginName(), creator->getPluginVersion(), creator->getPluginNamespace(), {}};
    const PluginFieldCollection* fields = creator->getFieldNames();
    for (int32_t i = 0; i < fields->nbFields; ++i)
      made.fields[fields->fields[i].name] = kinds.at(fields->fields[i].type);
    creators.push_back(std::move(made));
  }
  return creators;
}

TensorRTCreator& Harness::creator(const std::string& op) const {
  for (TensorRTCreator* creator : library_.creators())
    if (op == creator->getPluginName()) return *creator;
  throw Error("unknown plugin '" + op + "'");
}

float Harness::run(const std::string& op, Fields fields, std::vector<Tensor> inputs,
                   const std::vector<Tensor>& outputs, int repeats, const LlmcStep* step) const {
  if (step == nullptr) return run(op, fields, inputs, outputs, repeats);
  const PinnedBuffer pinned(kLlmcStepInts * sizeof(int32_t));
  std::memcpy(pinned.data, step, sizeof *step);
  Value& present = fields.emplace("present", std::string()).first->second;
  std::get<std::string>(present) += " llmc_step";
  inputs.push_back({pinned.data, DType::kInt32, {kLlmcStepInts}});
  return run(op, fields, inputs, outputs, repeats);
}

#if LLMC_PLUGIN_V2

namespace {

struct Destroy {
  void operator()(IPluginV2DynamicExt* plugin) const {
    plugin->terminate();
    plugin->destroy();
  }
};
using Owned = std::unique_ptr<IPluginV2DynamicExt, Destroy>;

}  // namespace

Answers Harness::ask(const std::string& op, const Fields& fields,
                     const std::vector<Tensor>& inputs) const {
  const Attributes attributes(fields);
  auto* created = creator(op).createPlugin("node", attributes.get());
  library_.expect(created != nullptr);
  const Owned first(static_cast<IPluginV2DynamicExt*>(created)), plugin(first->clone());
  const int count = static_cast<int>(inputs.size()), outputs = plugin->getNbOutputs();
  const std::vector<DataType> types = types_of(inputs);
  Exprs exprs;
  const std::vector<DimsExprs> dims = express(inputs, exprs);
  Answers answers;
  for (int i = 0; i < outputs; ++i) {
    const DimsExprs shape = plugin->getOutputDimensions(i, dims.data(), count, exprs);
    library_.expect(shape.nbDims >= 0);
    answers.outputs.push_back({nullptr,
                               from_tensorrt(plugin->getOutputDataType(i, types.data(), count)),
                               value_of(shape)});
    answers.aliased.push_back(-1);
  }
  const std::vector<PluginTensorDesc> in = describe(inputs), out = describe(answers.outputs);
  offer(*plugin, in, out);
  plugin->configurePlugin(dynamic(in).data(), count, dynamic(out).data(), outputs);
  answers.workspace =
      static_cast<int64_t>(plugin->getWorkspaceSize(in.data(), count, out.data(), outputs));
  answers.serialized.resize(plugin->getSerializationSize());
  plugin->serialize(answers.serialized.data());
  return answers;
}

float Harness::run(const std::string& op, const Fields& fields, const std::vector<Tensor>& inputs,
                   const std::vector<Tensor>& outputs, int repeats) const {
  const Answers answers = ask(op, fields, inputs);
  auto* created =
      creator(op).deserializePlugin("node", answers.serialized.data(), answers.serialized.size());
  library_.expect(created != nullptr);
  const Owned first(static_cast<IPluginV2DynamicExt*>(created)), plugin(first->clone());
  plugin->attachToContext(nullptr, nullptr, nullptr);
  library_.expect(plugin->initialize() == 0);
  const std::vector<PluginTensorDesc> in = describe(inputs), out = describe(outputs);
  const Pointers from(inputs), to(outputs);
  return measure(answers.workspace, repeats, [&](void* scratch, cudaStream_t stream) {
    library_.expect(plugin->enqueue(in.data(), out.data(), from.all.data(), to.all.data(), scratch,
                                    stream) == 0);
  });
}

#else

namespace {

template <typename Interface>
Interface& capability(IPluginV3& plugin, PluginCapabilityType type) {
  auto* found = plugin.getCapabilityInterface(type);
  if (found == nullptr) throw Error("the plugin lacks a capability");
  return *static_cast<Interface*>(found);
}

// Serialized fields, as in a plan.
std::vector<char> write(const PluginFieldCollection& fields) {
  std::vector<char> bytes;
  auto append = [&](const void* data, size_t count) {
    bytes.insert(bytes.end(), static_cast<const char*>(data),
                 static_cast<const char*>(data) + count);
  };
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    const PluginField& field = fields.fields[i];
    append(field.name, std::strlen(field.name) + 1);
    append(&field.type, sizeof field.type);
    append(&field.length, sizeof field.length);
    append(field.data, (field.type == PluginFieldType::kCHAR ? 1 : 8) * field.length);
  }
  return bytes;
}

std::vector<PluginField> read(const std::vector<char>& bytes) {
  std::vector<PluginField> fields;
  for (const char* at = bytes.data(); at < bytes.data() + bytes.size();) {
    PluginField field(at);
    at += std::strlen(at) + 1;
    std::memcpy(&field.type, at, sizeof field.type);
    std::memcpy(&field.length, at + sizeof field.type, sizeof field.length);
    field.data = at += sizeof field.type + sizeof field.length;
    at += (field.type == PluginFieldType::kCHAR ? 1 : 8) * field.length;
    fields.push_back(field);
  }
  return fields;
}

}  // namespace

Answers Harness::ask(const std::string& op, const Fields& fields,
                     const std::vector<Tensor>& inputs) const {
  const Attributes attributes(fields);
  const std::unique_ptr<IPluginV3> first(
      creator(op).createPlugin("node", attributes.get(), TensorRTPhase::kBUILD));
  library_.expect(first != nullptr);
  const std::unique_ptr<IPluginV3> plugin(first->clone());
  library_.expect(plugin != nullptr);
  auto& core = capability<IPluginV3OneCore>(*plugin, PluginCapabilityType::kCORE);
  if (op != core.getPluginName() ||
      core.getPluginNamespace() != std::string(creator(op).getPluginNamespace()))
    throw Error("the plugin and its creator differ in name or namespace");
  auto& build = capability<IPluginV3OneBuild>(*plugin, PluginCapabilityType::kBUILD);
  const int count = static_cast<int>(inputs.size()), outputs = build.getNbOutputs();
  std::vector<DataType> types(outputs);
  library_.expect(build.getOutputDataTypes(types.data(), outputs, types_of(inputs).data(), count) ==
                  0);
  Exprs exprs;
  std::vector<DimsExprs> shapes(outputs);
  library_.expect(build.getOutputShapes(express(inputs, exprs).data(), count, nullptr, 0,
                                        shapes.data(), outputs, exprs) == 0);
  Answers answers;
  for (int i = 0; i < outputs; ++i)
    answers.outputs.push_back({nullptr, from_tensorrt(types[i]), value_of(shapes[i])});
  const auto in = dynamic(describe(inputs)), out = dynamic(describe(answers.outputs));
  offer(build, in, out);
  library_.expect(build.configurePlugin(in.data(), count, out.data(), outputs) == 0);
  answers.workspace =
      static_cast<int64_t>(build.getWorkspaceSize(in.data(), count, out.data(), outputs));
#if NV_TENSORRT_MAJOR > 10 || NV_TENSORRT_MINOR >= 3
  auto& aliasing = static_cast<IPluginV3OneBuildV2&>(build);
  if (build.getInterfaceInfo().major >= 2)
    for (int i = 0; i < outputs; ++i) answers.aliased.push_back(aliasing.getAliasedInput(i));
#endif
  auto& runtime = capability<IPluginV3OneRuntime>(*plugin, PluginCapabilityType::kRUNTIME);
  const PluginFieldCollection* serialized = runtime.getFieldsToSerialize();
  library_.expect(serialized != nullptr);
  answers.serialized = write(*serialized);
  return answers;
}

float Harness::run(const std::string& op, const Fields& fields, const std::vector<Tensor>& inputs,
                   const std::vector<Tensor>& outputs, int repeats) const {
  const Answers answers = ask(op, fields, inputs);
  const std::vector<PluginField> serialized = read(answers.serialized);
  const PluginFieldCollection collection{static_cast<int32_t>(serialized.size()),
                                         serialized.data()};
  const std::unique_ptr<IPluginV3> first(
      creator(op).createPlugin("node", &collection, TensorRTPhase::kRUNTIME));
  library_.expect(first != nullptr);
  auto& unattached = capability<IPluginV3OneRuntime>(*first, PluginCapabilityType::kRUNTIME);
  const std::unique_ptr<IPluginV3> plugin(unattached.attachToContext(nullptr));
  library_.expect(plugin != nullptr);
  auto& runtime = capability<IPluginV3OneRuntime>(*plugin, PluginCapabilityType::kRUNTIME);
  const std::vector<PluginTensorDesc> in = describe(inputs), out = describe(outputs);
  library_.expect(runtime.onShapeChange(in.data(), static_cast<int>(in.size()), out.data(),
                                        static_cast<int>(out.size())) == 0);
  const Pointers from(inputs), to(outputs);
  return measure(answers.workspace, repeats, [&](void* scratch, cudaStream_t stream) {
    library_.expect(runtime.enqueue(in.data(), out.data(), from.all.data(), to.all.data(), scratch,
                                    stream) == 0);
  });
}

#endif

}  // namespace llmc::tensorrt
