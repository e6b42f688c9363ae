#include "shell.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "stream_state.h"

namespace llmc::tensorrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::PluginFieldType;

constexpr const char* kPresent = "present";
constexpr const char* kDType = "dtype";
constexpr const char* kMakes = "makes";
constexpr int64_t kBytes = 4;  // in one element of the network

// The value of a field, whose `length` must be 1.
template <typename T>
T number(const PluginType& type, const nvinfer1::PluginField& field) {
  if (field.length != 1)
    throw Error(type.name + "'s field '" + field.name + "' has " + std::to_string(field.length) +
                " values, expected 1");
  T value;
  std::memcpy(&value, field.data, sizeof value);
  return value;
}

Value value_of(const PluginType& type, const nvinfer1::PluginField& field) {
  if (field.data == nullptr) throw Error(type.name + "'s field '" + field.name + "' has no value");
  switch (field.type) {
    case PluginFieldType::kINT8: return int64_t{number<int8_t>(type, field)};
    case PluginFieldType::kINT16: return int64_t{number<int16_t>(type, field)};
    case PluginFieldType::kINT32: return int64_t{number<int32_t>(type, field)};
#if NV_TENSORRT_MAJOR >= 10
    case PluginFieldType::kINT64: return number<int64_t>(type, field);
#endif
    case PluginFieldType::kFLOAT32: return double{number<float>(type, field)};
    case PluginFieldType::kFLOAT64: return number<double>(type, field);
    case PluginFieldType::kCHAR: {
      const char* text = static_cast<const char*>(field.data);
      return std::string(text, strnlen(text, std::max(field.length, 0)));
    }
    default:
      throw Error(type.name + "'s field '" + field.name + "' is of TensorRT's field type " +
                  std::to_string(static_cast<int>(field.type)) +
                  ", expected an int, a float or a str");
  }
}

std::vector<Port> ports_of(const PluginType& type) {
  std::vector<Port> ports = type.inputs;
  ports.push_back("llmc_step?: int32");
  return ports;
}

std::vector<int> read_present(const PluginType& type, const std::vector<Port>& inputs,
                              const std::string& names) {
  std::vector<int> given;
  std::istringstream words(names);
  for (std::string name; words >> name;) {
    int index = 0;
    while (index < static_cast<int>(inputs.size()) && inputs[index].name != name) ++index;
    if (index == static_cast<int>(inputs.size()))
      throw Error(type.name + " has no input '" + name + "', which its field 'present' names");
    if (!given.empty() && index <= given.back())
      throw Error(type.name + "'s field 'present' has '" + name + "' in another order than the op");
    given.push_back(index);
  }
  return given;
}

}  // namespace

Fields declared_fields(const PluginType& type) {
  Fields fields = type.fields;
  fields.emplace(kPresent, std::string());
  fields.emplace(kDType, std::string());
  fields.emplace(kMakes, std::string());
  return fields;
}

Fields read_fields(const PluginType& type, const nvinfer1::PluginFieldCollection* given) {
  Fields fields;
  for (int i = 0; given != nullptr && i < given->nbFields; ++i)
    fields[given->fields[i].name] = value_of(type, given->fields[i]);
  return fields;
}

std::string write_text(const Fields& fields) {
  std::string text;
  for (const auto& [name, value] : fields) {
    text += name + "=";
    char digits[40];
    if (const auto* integer = std::get_if<int64_t>(&value)) {
      text += "i" + std::to_string(*integer);
    } else if (const auto* real = std::get_if<double>(&value)) {
      std::snprintf(digits, sizeof digits, "f%a", *real);
      text += digits;
    } else {
      text += "s" + std::get<std::string>(value);
    }
    text += "\n";
  }
  return text;
}

Fields read_text(const PluginType& type, const std::string& text) {
  const Error damaged("what was serialized of a " + type.name +
                      " is damaged; build the engine again");
  if (text.empty() || text.back() != '\n') throw damaged;
  Fields fields;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find('=');
    if (equals == std::string::npos || equals + 1 == line.size()) throw damaged;
    const std::string value = line.substr(equals + 2);
    char* end = nullptr;
    Value& field = fields[line.substr(0, equals)];
    switch (line[equals + 1]) {
      case 'i': field = static_cast<int64_t>(std::strtoll(value.c_str(), &end, 10)); break;
      case 'f': field = std::strtod(value.c_str(), &end); break;
      case 's': field = value; break;
      default: throw damaged;
    }
    if (end != nullptr && (value.empty() || *end != '\0')) throw damaged;
  }
  if (fields.size() != declared_fields(type).size()) throw damaged;
  return fields;
}

std::vector<nvinfer1::PluginField> name_fields(const Fields& fields) {
  constexpr PluginFieldType kTypes[] = {PluginFieldType::kINT32, PluginFieldType::kFLOAT32,
                                        PluginFieldType::kCHAR};
  std::vector<nvinfer1::PluginField> named;
  for (const auto& [name, value] : fields)
    named.emplace_back(name.c_str(), nullptr, kTypes[value.index()], 1);
  return named;
}

Shell::Shell(const PluginType& type, const Fields& fields, bool building)
    : type_(type),
      inputs_(ports_of(type)),
      version_(std::to_string(type.version)),
      fields_(declared_fields(type)),
      building_(building) {
  Fields own = fields;
  for (const char* name : {kPresent, kDType, kMakes}) own.erase(name);
  core_ = make_plugin(type.name, own);
  for (const auto& [name, value] : fields) {
    if (fields_[name].index() !=
        value.index())  // one of the three; make_plugin() has checked the op's own
      throw Error(type.name + "'s field '" + name + "' is not a str");
    fields_[name] = value;
  }
  for (const auto* ports : {&type.inputs, &type.outputs})
    for (const Port& port : *ports)
      if (port.is_rounded(fields_))
        throw Error(type.name + "'s " + port.name + " is FP8, which plans do not support");
  const std::string& dtype = std::get<std::string>(fields_[kDType]);
  if (!dtype.empty()) to_tensorrt(dtype_of(dtype));
  const std::string& present = std::get<std::string>(fields_[kPresent]);
  if (!present.empty()) {
    given_ = read_present(type, inputs_, present);
    settle(static_cast<int>(given_.size()));
  }
  text_ = write_text(fields_);
}

void Shell::settle(int inputs) {
  given_ = given(inputs);
  for (int index = 0; index < static_cast<int>(type_.inputs.size()); ++index)
    if (!type_.inputs[index].optional &&
        std::find(given_.begin(), given_.end(), index) == given_.end())
      throw Error(type_.name + " needs the input '" + type_.inputs[index].name + "'");
  std::string names;
  for (int index : given_) names += (names.empty() ? "" : " ") + inputs_[index].name;
  fields_[kPresent] = names;
  text_ = write_text(fields_);
}

std::vector<int> Shell::given(int count) const {
  if (given_.empty()) {
    if (count > static_cast<int>(type_.inputs.size()))
      throw Error(type_.name + " takes " + std::to_string(type_.inputs.size()) + " inputs, not " +
                  std::to_string(count));
    std::vector<int> first(count);
    for (int i = 0; i < count; ++i) first[i] = i;
    return first;
  }
  if (count != static_cast<int>(given_.size()))
    throw Error(type_.name + " has " + std::to_string(count) +
                " inputs, its field 'present' names " + std::to_string(given_.size()));
  return given_;
}

const Port& Shell::held_by(const Port& port) const {
  for (const Port& input : type_.inputs)
    if (input.name == port.in_place) return input;
  return port;
}

std::optional<DType> Shell::held(const Port& port) const {
  if (!held_by(port).cached) return {};
  const auto& kv_dtype = std::get<std::string>(fields_.at("kv_dtype"));
  return kv_dtype.empty() ? std::optional<DType>() : dtype_of(kv_dtype);
}

DataType Shell::output_type(int output, const DataType* inputs, int count) const {
  if (const auto dtype = held(type_.outputs.at(output))) return to_tensorrt(*dtype);
  for (DType own : held_by(type_.outputs[output]).dtypes)
    if (known(own)) return to_tensorrt(own);
  const std::vector<int> given = this->given(count);
  const std::string& dtype = std::get<std::string>(fields_.at(kDType));
  if (!dtype.empty()) return to_tensorrt(dtype_of(dtype));
  for (int i = 0; i < count; ++i)
    if (computes(inputs_[given[i]])) return inputs[i];
  throw Error(type_.name + " has no input from which to take the dtype of its outputs");
}

std::vector<nvinfer1::DimsExprs> Shell::output_shapes(const nvinfer1::DimsExprs* inputs, int count,
                                                      nvinfer1::IExprBuilder& builder) const {
  const std::vector<int> given = this->given(count);
  std::vector<Dims> dims(inputs_.size());
  for (int i = 0; i < count; ++i) {
    const bool bytes = inputs_[given[i]].is_bytes(fields_);
    for (int axis = 0; axis < inputs[i].nbDims; ++axis)
      dims[given[i]].push_back(bytes && axis == inputs[i].nbDims - 2 ? Dim(i, axis) * kBytes
                                                                     : Dim(i, axis));
  }
  dims.pop_back();  // llmc_step is not an input of the op
  std::vector<nvinfer1::DimsExprs> shapes;
  for (const Dims& shape : core_->shapes(dims)) {
    nvinfer1::DimsExprs made{};
    made.nbDims = static_cast<int>(shape.size());
    for (int axis = 0; axis < made.nbDims; ++axis) {
      const Dim& dim = shape[axis];
      using nvinfer1::DimensionOperation;
      const nvinfer1::IDimensionExpr* size =
          dim.input < 0 ? builder.constant(dim.times) : inputs[dim.input].d[dim.axis];
      if (dim.input >= 0 && dim.times != 1)
        size = builder.operation(DimensionOperation::kPROD, *size, *builder.constant(dim.times));
      if (dim.over != 1)
        size =
            builder.operation(DimensionOperation::kFLOOR_DIV, *size, *builder.constant(dim.over));
      if (dim.less != 0)
        size = builder.operation(DimensionOperation::kSUB, *size, *builder.constant(dim.less));
      made.d[axis] = size;
    }
    shapes.push_back(made);
  }
  return shapes;
}

int Shell::aliased(int output) const {
  const std::string& name = type_.outputs.at(output).in_place;
  for (size_t i = 0; i < given_.size(); ++i)
    if (!name.empty() && inputs_[given_[i]].name == name) return static_cast<int>(i);
  return -1;
}

bool Shell::supports(const nvinfer1::PluginTensorDesc& desc, const Port& port,
                     const DType* computing) const {
  if (desc.format != nvinfer1::TensorFormat::kLINEAR || !known(desc.type)) return false;
  const DType dtype = from_tensorrt(desc.type);
  if (const auto cached = held(port)) return dtype == *cached;
  if (port.is_bytes(fields_)) return dtype == DType::kInt32;
  const std::vector<DType>& dtypes = held_by(port).dtypes;
  if (!dtypes.empty()) return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
  if (computing != nullptr) return dtype == *computing;
  const std::string& wanted = std::get<std::string>(fields_.at(kDType));
  if (!wanted.empty()) return wanted == name_of(dtype);
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

namespace {

std::vector<Tensor> tensors(const nvinfer1::PluginTensorDesc* descs, const void* const* data,
                            const std::vector<int>& places, size_t count) {
  std::vector<Tensor> made(count);
  for (size_t i = 0; i < places.size(); ++i) {
    Tensor& tensor = made[places[i]];
    tensor.dtype = from_tensorrt(descs[i].type);
    tensor.shape.assign(descs[i].dims.d, descs[i].dims.d + descs[i].dims.nbDims);
    // Kernels write only to inputs that an output aliases.
    tensor.data = data == nullptr ? nullptr : const_cast<void*>(data[i]);
  }
  return made;
}

}  // namespace

std::vector<Tensor> Shell::inputs(const nvinfer1::PluginTensorDesc* descs, const void* const* data,
                                  int count) const {
  const std::vector<int> given = this->given(count);
  std::vector<Tensor> made = tensors(descs, data, given, inputs_.size());
  for (int index : given) {
    if (!inputs_[index].is_bytes(fields_)) continue;
    Tensor& tensor = made[index];
    tensor.dtype = DType::kUint8;
    tensor.shape.at(tensor.shape.size() - 2) *= kBytes;
  }
  return made;
}

size_t Shell::workspace(const std::vector<nvinfer1::PluginTensorDesc>& inputs) const {
  std::vector<Tensor> in = this->inputs(inputs.data(), nullptr, static_cast<int>(inputs.size()));
  in.pop_back();
  return core_->workspace(in);
}

void Shell::enqueue(const nvinfer1::PluginTensorDesc* input_descs,
                    const nvinfer1::PluginTensorDesc* output_descs, const void* const* inputs,
                    void* const* outputs, void* workspace, cudaStream_t stream) const {
  if (given_.empty()) throw Error(type_.name + " was run before it was configured");
  if (building_ && core_->collective()) return;
  std::vector<Tensor> in = this->inputs(input_descs, inputs, static_cast<int>(given_.size()));
  const LlmcStep step = read_step(in.back());
  in.pop_back();
  std::vector<int> all(type_.outputs.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  const std::vector<Tensor> out = tensors(output_descs, outputs, all, all.size());
  for (int output = 0; output < this->outputs(); ++output) {
    const int source = aliased(output);
    if (source < 0) continue;
    Tensor& held = in[given_[source]];
    if (held.data != out[output].data)  // not bound to one address: copy to the output first
      check(cudaMemcpyAsync(out[output].data, held.data, held.size() * width(held.dtype),
                            cudaMemcpyDeviceToDevice, stream),
            type_.name.c_str());
    held.data = out[output].data;
  }
  StreamState& state = state_of(stream);
  const std::lock_guard<std::mutex> lock(state.mutex);
  Context context;
  context.stream = stream;
  context.gemm = &state.gemm;
  context.counters = state.counters;
  context.communicator = static_cast<ncclComm_t>(step.communicator);
  context.attention = state.attention.get();
  context.longest = step.longest;
  context.reach = step.reach;
  context.num_decode = step.num_decode;
  context.dense = true;
  context.building = building_;
  core_->enqueue(in, out, workspace, context);
  show(step, out, stream);
}

LlmcStep Shell::read_step(const Tensor& given) {
  cudaPointerAttributes where{};
  LlmcStep step;
  if (given.data == nullptr || given.size() < kLlmcStepInts) return step;
  check(cudaPointerGetAttributes(&where, given.data), "asking where a step is");
  if (where.type != cudaMemoryTypeHost) return step;
  std::memcpy(&step, given.data, sizeof step);
  return step.magic == LlmcStep::kMagic ? step : LlmcStep();
}

void Shell::show(const LlmcStep& step, const std::vector<Tensor>& outputs,
                 cudaStream_t stream) const {
  if (step.watcher == nullptr) return;
  std::istringstream names(std::get<std::string>(fields_.at(kMakes)));
  std::string name;
  for (int i = 0; i < this->outputs() && names >> name; ++i) {
    const Tensor& made = outputs[i];
    if (aliased(i) < 0)
      step.watcher(step.user, name.c_str(), made.data, name_of(made.dtype), made.shape.data(),
                   static_cast<int>(made.shape.size()), stream);
  }
}

}  // namespace llmc::tensorrt
