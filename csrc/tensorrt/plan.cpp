#include "plan.h"

#include <dlfcn.h>

#include <algorithm>
#include <mutex>
#include <new>

#include "../kernels/rowwise/params.h"
#include "library.h"

namespace llmc::tensorrt {
namespace {

using namespace nvinfer1;

// Optimization profiles: the compiler makes one for prompts and one for decoding.
constexpr int kPrefill = 0, kDecode = 1;

constexpr const char* kStep = "llmc_step";
constexpr size_t kAlignment = 256;  // required of every address by TensorRT

class Logger : public ILogger {
 public:
  void log(Severity severity, const char* text) noexcept override {
    if (severity > Severity::kERROR) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    last_ = text;
  }
  // Returns and clears the last error.
  std::string take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_.empty() ? "it does not say why" : std::exchange(last_, {});
  }

 private:
  std::mutex mutex_;
  std::string last_;
};

// TensorRT keeps it longer than any engine.
Logger& logger() {
  static auto* made = new Logger;
  return *made;
}

void* handle = nullptr;

template <typename Function>
Function* symbol(const char* name) {
  void* found = handle == nullptr ? nullptr : dlsym(handle, name);
  if (found == nullptr) throw Error(std::string("TensorRT's library has no ") + name);
  return reinterpret_cast<Function*>(found);
}

std::string text_of(const nvinfer1::Dims& dims) {
  std::string text;
  for (int i = 0; i < dims.nbDims; ++i) text += (i == 0 ? "" : ", ") + std::to_string(dims.d[i]);
  return "[" + text + "]";
}

nvinfer1::Dims dims_of(const Tensor& tensor) {
  nvinfer1::Dims dims{};
  if (tensor.shape.size() > nvinfer1::Dims::MAX_DIMS)
    throw Error("the tensor has more dimensions than TensorRT supports");
  dims.nbDims = static_cast<int>(tensor.shape.size());
  std::copy(tensor.shape.begin(), tensor.shape.end(), dims.d);
  return dims;
}

bool equal(const nvinfer1::Dims& a, const nvinfer1::Dims& b) {
  return a.nbDims == b.nbDims && std::equal(a.d, a.d + a.nbDims, b.d);
}

// An LlmcStep at an aligned address in page-locked memory.
class PinnedStep {
 public:
  PinnedStep() {
    check(cudaMallocHost(&memory_, kAlignment + sizeof(LlmcStep)), "allocating pinned memory");
    const auto address = reinterpret_cast<uintptr_t>(memory_);
    step_ = new (reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment))
        LlmcStep;
  }
  ~PinnedStep() { cudaFreeHost(memory_); }
  PinnedStep(const PinnedStep&) = delete;
  LlmcStep& operator*() const { return *step_; }

 private:
  void* memory_ = nullptr;
  LlmcStep* step_ = nullptr;
};

}  // namespace

namespace {

// Throws Error unless all tensors exist in the plan with the dtype of the program. int64 inputs may
// be int32 in the plan.
void check_ports(const ICudaEngine& engine, const std::vector<Port>& ports, TensorIOMode mode) {
  for (const Port& port : ports) {
    const char* name = port.name.c_str();
    if (engine.getTensorIOMode(name) != mode)
      throw Error("the plan has no tensor '" + port.name + "'");
    const DataType held = engine.getTensorDataType(name);
    const bool narrowed =
        port.dtype == DType::kInt64 && held == DataType::kINT32 && mode == TensorIOMode::kINPUT;
    if (!narrowed && (!known(held) || from_tensorrt(held) != port.dtype))
      throw Error("the plan's " + port.name + " is not of " + name_of(port.dtype));
  }
}

}  // namespace

std::string load_tensorrt(const std::string& library) {
  handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_GLOBAL);  // GLOBAL: plugins look it up
  if (handle == nullptr)
    throw Error("TensorRT cannot be loaded (" + std::string(dlerror()) +
                "); install it, or name libnvinfer.so." + std::to_string(NV_TENSORRT_MAJOR) +
                " in LLMC_TENSORRT_LIBRARY");
  const int number = symbol<int32_t()>("getInferLibVersion")();  // 8.6.1 is 8601, 10.3.0 is 100300
  const int unit = number < 10000 ? 10 : 100, major = number / 100 / unit,
            minor = number / 100 % unit;
  if (major != NV_TENSORRT_MAJOR)
    throw Error("llmc was built for TensorRT " + std::to_string(NV_TENSORRT_MAJOR) + ", '" +
                library + "' is version " + std::to_string(major) +
                "; build llmc with its headers in TENSORRT_ROOT");
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(number % 100);
}

struct Plan::Engine {
  PinnedStep step;  // of both contexts, which run in sequence
  std::unique_ptr<IRuntime> runtime;
  std::unique_ptr<ICudaEngine> engine;
  std::unique_ptr<IExecutionContext> contexts[2];
  // int32 copies of int64 inputs.
  std::map<std::string, int32_t*> narrow;

  ~Engine() {
    for (auto& [name, data] : narrow) cudaFree(data);
  }
};

Plan::Plan(const PluginLibrary& plugins, const void* plan, size_t bytes, std::vector<Port> inputs,
           std::vector<Port> outputs)
    : inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      engine_(std::make_unique<Engine>()) {
  plugins.init(&logger(), "llmc");
  // The loaded version: headers of another minor version are compatible.
  engine_->runtime.reset(static_cast<IRuntime*>(symbol<void*(void*, int32_t)>(
      "createInferRuntime_INTERNAL")(&logger(), symbol<int32_t()>("getInferLibVersion")())));
  if (engine_->runtime == nullptr)
    throw Error("TensorRT failed to create a runtime: " + logger().take());
  engine_->engine.reset(engine_->runtime->deserializeCudaEngine(plan, bytes));
  if (engine_->engine == nullptr)
    throw Error("TensorRT cannot deserialize the plan: " + logger().take());
  const ICudaEngine& engine = *engine_->engine;
  if (engine.getNbOptimizationProfiles() != 2)
    throw Error("the plan has " + std::to_string(engine.getNbOptimizationProfiles()) +
                " profiles instead of 2");
  const nvinfer1::Dims step = engine.getTensorShape(kStep);
  if (engine.getTensorIOMode(kStep) != TensorIOMode::kINPUT || step.nbDims != 1 ||
      step.d[0] != kLlmcStepInts)
    throw Error(std::string("the plan has no input ") + kStep +
                " of the expected form; compile the model again");
  check_ports(engine, inputs_, TensorIOMode::kINPUT);
  check_ports(engine, outputs_, TensorIOMode::kOUTPUT);
  for (int profile : {kPrefill, kDecode}) {
    auto& context = engine_->contexts[profile];
    context.reset(engine_->engine->createExecutionContext());
    if (context == nullptr || !context->setOptimizationProfileAsync(profile, nullptr) ||
        !context->setTensorAddress(kStep, &*engine_->step))
      throw Error("TensorRT failed to create an execution context: " + logger().take());
  }
  for (const Port& port : inputs_) {
    const char* name = port.name.c_str();
    if (port.dtype != DType::kInt64 || engine.getTensorDataType(name) != DataType::kINT32) continue;
    const nvinfer1::Dims most = engine.getProfileShape(name, kPrefill, OptProfileSelector::kMAX);
    if (most.nbDims != 1)
      throw Error("the plan's " + port.name + " has " + std::to_string(most.nbDims) +
                  " dimensions");
    check(cudaMalloc(&engine_->narrow[port.name], most.d[0] * sizeof(int32_t)),
          "allocating inputs");
  }
  check(cudaStreamSynchronize(nullptr), "choosing profiles");
}

Plan::~Plan() = default;

void Plan::enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
                   const Context& context) const {
  LlmcStep& step = *engine_->step;
  step.longest = context.longest;
  step.reach = context.reach;
  step.num_decode = context.num_decode;
  step.communicator = context.communicator;
  step.watcher = context.watcher;
  step.user = context.user;
  bind_inputs(in, context);
  bind_outputs(out, context);
  if (!engine_->contexts[context.decode ? kDecode : kPrefill]->enqueueV3(context.stream))
    throw Error("TensorRT: " + logger().take());
}

void Plan::bind_inputs(const std::vector<Tensor>& in, const Context& context) const {
  const int profile = context.decode ? kDecode : kPrefill;
  IExecutionContext& execution = *engine_->contexts[profile];
  kernels::NarrowParams narrowed{};
  int count = 0;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const char* name = inputs_[i].name.c_str();
    const nvinfer1::Dims dims = dims_of(in[i]);
    const nvinfer1::Dims least =
        engine_->engine->getProfileShape(name, profile, OptProfileSelector::kMIN);
    const nvinfer1::Dims most =
        engine_->engine->getProfileShape(name, profile, OptProfileSelector::kMAX);
    bool fits = dims.nbDims == most.nbDims;
    for (int axis = 0; axis < dims.nbDims && fits; ++axis)
      fits = dims.d[axis] >= least.d[axis] && dims.d[axis] <= most.d[axis];
    if (!fits)
      throw Error("the step's " + inputs_[i].name + " is " + text_of(dims) +
                  ", the plan's profile for " + (context.decode ? "decoding" : "prompts") +
                  " has " + text_of(least) + " to " + text_of(most) +
                  "; compile the model again with a larger --max_batch_size or --max_seq_len");
    void* data = in[i].data;
    const auto narrow = engine_->narrow.find(inputs_[i].name);
    if (narrow != engine_->narrow.end()) {
      if (count == kernels::kMaxNarrow) throw Error("the plan has too many int64 inputs");
      narrowed.x[count] = static_cast<const int64_t*>(data);
      narrowed.y[count] = narrow->second;
      narrowed.count[count++] = static_cast<int>(in[i].size());
      data = narrow->second;
    }
    if (reinterpret_cast<uintptr_t>(data) % kAlignment != 0)
      throw Error("TensorRT needs " + inputs_[i].name + " at an address that is a multiple of 256");
    if (!execution.setInputShape(name, dims) || !execution.setTensorAddress(name, data))
      throw Error("TensorRT rejects " + inputs_[i].name + " as " + text_of(dims) + ": " +
                  logger().take());
  }
  if (count > 0) check(kernels::narrow(narrowed, context.stream), "converting int64 to int32");
}

void Plan::bind_outputs(const std::vector<Tensor>& out, const Context& context) const {
  IExecutionContext& execution = *engine_->contexts[context.decode ? kDecode : kPrefill];
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const char* name = outputs_[i].name.c_str();
    const nvinfer1::Dims made = execution.getTensorShape(name), dims = dims_of(out[i]);
    if (!equal(made, dims))
      throw Error("the plan's output " + outputs_[i].name + " is " + text_of(made) +
                  ", the engine expects " + text_of(dims) + "; compile the model again");
    if (!execution.setTensorAddress(name, out[i].data))
      throw Error("TensorRT rejects the address of " + outputs_[i].name + ": " + logger().take());
  }
}

}  // namespace llmc::tensorrt
