#include "plugin.h"

#include <limits>
#include <sstream>

namespace llmc {
namespace {

std::map<std::string, PluginType>& types() {
  static std::map<std::string, PluginType> all;
  return all;
}

const char* kind(const Value& value) {
  static const char* names[] = {"an int", "a float", "a str"};
  return names[value.index()];
}

// Indexed by DType.
constexpr const char* kDTypeNames[] = {"float32", "float16",       "bfloat16", "int32",
                                       "int64",   "float8_e4m3fn", "uint8"};
constexpr int kDTypeWidths[] = {4, 2, 2, 4, 8, 1, 1};

std::string text_of(const Dims& dims) {
  std::string text;
  for (const Dim& dim : dims)
    text += (text.empty() ? "" : ", ") + (dim.known() ? std::to_string(dim.number()) : "?");
  return "[" + text + "]";
}

}  // namespace

void expect(const std::string& what, const Dims& given, const Dims& wanted) {
  if (given.empty()) return;
  bool fits = given.size() == wanted.size();
  for (size_t axis = 0; fits && axis < given.size(); ++axis) {
    const Dim &a = given[axis], &b = wanted[axis];
    fits = !a.known() || !b.known() || a.number() == b.number();
  }
  if (!fits) throw Error(what + " is " + text_of(given) + ", expected " + text_of(wanted));
}

void expect_at_least(const std::string& what, const Dim& given, const Dim& wanted) {
  if (given.known() && wanted.known() && given.number() < wanted.number())
    throw Error(what + " is " + std::to_string(given.number()) + ", expected at least " +
                std::to_string(wanted.number()));
}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw Error(std::string(what) + " failed: " + cudaGetErrorString(status));
}

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(std::string(what) + " failed: " + cublasLtGetStatusString(status));
}

void check(ncclResult_t status, const char* what) {
  if (status != ncclSuccess)
    throw Error(std::string(what) + " failed: " + ncclGetErrorString(status));
}

const char* name_of(DType dtype) { return kDTypeNames[static_cast<int>(dtype)]; }
int64_t width(DType dtype) { return kDTypeWidths[static_cast<int>(dtype)]; }

DType dtype_of(const std::string& name) {
  for (size_t i = 0; i < std::size(kDTypeNames); ++i)
    if (name == kDTypeNames[i]) return static_cast<DType>(i);
  throw Error("unknown dtype '" + name + "'");
}

Port::Port(const char* declared) {
  std::istringstream words(declared);
  std::string word;
  words >> name;
  const bool typed = name.back() == ':';
  if (typed) name.pop_back();
  optional = name.back() == '?';
  if (optional) name.pop_back();
  while (words >> word) {
    if (word == "=") words >> in_place;
    else if (word == "kv_dtype") cached = true;
    else if (word == "weight_dtype") packed = true;
    else if (word == "scale_dtype") scales = true, dtypes.push_back(DType::kFloat32);
    else if (word == "x_dtype" || word == "out_scale") rounded = word;
    else if (word == "number") number = true;
    else if (word == "columns") columns = true;
    else dtypes.push_back(dtype_of(word));
  }
}

bool Port::is_bytes(const Fields& fields) const {
  if (!packed && !scales) return dtypes == std::vector<DType>{DType::kUint8};
  const auto& stored = std::get<std::string>(fields.at("weight_dtype"));
  return packed ? !stored.empty() : stored == "mxfp4";
}

bool Port::is_rounded(const Fields& fields) const {
  const auto field = fields.find(rounded);
  if (rounded.empty() || field == fields.end()) return false;
  const auto* dtype = std::get_if<std::string>(&field->second);
  return dtype != nullptr ? !dtype->empty() : std::get<double>(field->second) > 0;
}

void register_plugin(PluginType type) {
  const std::string name = type.name;
  if (!types().emplace(name, std::move(type)).second)
    throw Error("op '" + name + "' is registered twice");
}

const std::map<std::string, PluginType>& plugin_types() {
  init_plugins();
  return types();
}

std::unique_ptr<Plugin> make_plugin(const std::string& name, const Fields& fields) {
  const auto found = plugin_types().find(name);
  if (found == plugin_types().end()) throw Error("unknown op '" + name + "' in namespace llmc");
  return make_plugin(found->second, fields);
}

std::unique_ptr<Plugin> make_plugin(const PluginType& type, const Fields& fields) {
  const std::string& name = type.name;
  Fields complete = type.fields;
  for (const auto& [field, value] : fields) {
    const auto declared = complete.find(field);
    if (declared == complete.end()) throw Error(name + " has no attribute '" + field + "'");
    if (declared->second.index() != value.index())
      throw Error(name + "'s attribute '" + field + "' is " + kind(value) + ", expected " +
                  kind(declared->second));
    declared->second = value;
  }
  for (const std::string& field : type.required)
    if (!fields.count(field)) throw Error(name + " needs the attribute '" + field + "'");
  return type.make(complete);
}

int integer(const Fields& fields, const char* name) {
  const int64_t value = std::get<int64_t>(fields.at(name));
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max())
    throw Error(std::string("the attribute '") + name + "' is " + std::to_string(value) +
                ", which does not fit in 32 bits");
  return static_cast<int>(value);
}

Activation activation_of(const Fields& fields, const char* field) {
  static const std::map<std::string, Activation> names = {{"none", Activation::kNone},
                                                          {"relu", Activation::kRelu},
                                                          {"relu2", Activation::kRelu2},
                                                          {"gelu", Activation::kGelu},
                                                          {"gelu_tanh", Activation::kGeluTanh},
                                                          {"silu", Activation::kSilu},
                                                          {"quick_gelu", Activation::kQuickGelu},
                                                          {"tanh", Activation::kTanh},
                                                          {"sigmoid", Activation::kSigmoid},
                                                          {"softplus", Activation::kSoftplus}};
  const std::string& name = std::get<std::string>(fields.at(field));
  const auto found = names.find(name);
  if (found == names.end()) throw Error("unknown activation '" + name + "'");
  return found->second;
}

}  // namespace llmc
