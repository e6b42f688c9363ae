#include "plan.h"

#include <dlfcn.h>

#include <mutex>

namespace llmc::tensorrt {
namespace {

using namespace nvinfer1;

// By profile: the compiler makes one for prompts and one for decoding.
constexpr int kPrefill = 0, kDecode = 1;

class Logger : public ILogger {
 public:
  void log(Severity severity, const char* text) noexcept override {
    if (severity > Severity::kERROR) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    last_ = text;
  }
  // What went wrong last, and forget it.
  std::string take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_.empty() ? "it does not say why" : std::exchange(last_, {});
  }

 private:
  std::mutex mutex_;
  std::string last_;
};

// TensorRT keeps it beyond any engine.
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

}  // namespace

std::string load_tensorrt(const std::string& library) {
  handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_GLOBAL);  // GLOBAL: the plugins look for it
  if (handle == nullptr)
    throw Error("TensorRT cannot be loaded (" + std::string(dlerror()) +
                "); install it, or name libnvinfer.so." + std::to_string(NV_TENSORRT_MAJOR) +
                " in LLMC_TENSORRT_LIBRARY");
  const int number = symbol<int32_t()>("getInferLibVersion")();  // 8.6.1 is 8601, 10.3.0 is 100300
  const int unit = number < 10000 ? 10 : 100, major = number / 100 / unit, minor = number / 100 % unit;
  if (major != NV_TENSORRT_MAJOR)
    throw Error("llmc was built for TensorRT " + std::to_string(NV_TENSORRT_MAJOR) + ", '" + library +
                "' is version " + std::to_string(major) + "; build llmc with its headers in TENSORRT_ROOT");
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(number % 100);
}

struct Plan::Engine {
  std::unique_ptr<IRuntime> runtime;
  std::unique_ptr<ICudaEngine> engine;
  std::unique_ptr<IExecutionContext> contexts[2];
  // For inputs of 64 bits where the network has 32.
  std::map<std::string, int32_t*> narrow;

  ~Engine() {
    for (auto& [name, data] : narrow) cudaFree(data);
  }
};

Plan::Plan(const PluginLibrary& plugins, const void* plan, size_t bytes, std::vector<std::string> inputs,
           std::vector<std::string> outputs)
    : plugins_(plugins), inputs_(std::move(inputs)), outputs_(std::move(outputs)),
      engine_(std::make_unique<Engine>()) {
  plugins_.init(&logger(), "llmc");
  // The version that is loaded: headers of another minor version serve.
  engine_->runtime.reset(static_cast<IRuntime*>(symbol<void*(void*, int32_t)>("createInferRuntime_INTERNAL")(
      &logger(), symbol<int32_t()>("getInferLibVersion")())));
  if (engine_->runtime == nullptr) throw Error("TensorRT does not start: " + logger().take());
  engine_->engine.reset(engine_->runtime->deserializeCudaEngine(plan, bytes));
  if (engine_->engine == nullptr) throw Error("TensorRT does not take the plan: " + logger().take());
  const ICudaEngine& engine = *engine_->engine;
  if (engine.getNbOptimizationProfiles() != 2)
    throw Error("the plan has " + std::to_string(engine.getNbOptimizationProfiles()) +
                " profiles instead of 2");
  for (int profile : {kPrefill, kDecode}) {
    auto& context = engine_->contexts[profile];
    context.reset(engine_->engine->createExecutionContext());
    if (context == nullptr || !context->setOptimizationProfileAsync(profile, nullptr))
      throw Error("TensorRT makes no execution context: " + logger().take());
  }
  for (const auto* names : {&inputs_, &outputs_})
    for (const std::string& name : *names)
      if ((engine.getTensorIOMode(name.c_str()) == TensorIOMode::kINPUT) != (names == &inputs_))
        throw Error("the plan has no tensor '" + name + "'");
  for (const std::string& name : inputs_) {
    const nvinfer1::Dims most = engine.getProfileShape(name.c_str(), kPrefill, OptProfileSelector::kMAX);
    if (engine.getTensorDataType(name.c_str()) != DataType::kINT32 || most.nbDims != 1) continue;
    check(cudaMalloc(&engine_->narrow[name], most.d[0] * sizeof(int32_t)), "allocating inputs");
  }
  check(cudaStreamSynchronize(nullptr), "choosing profiles");
}

Plan::~Plan() = default;

void Plan::enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
                   const Context& context) const {
  const int profile = context.decode ? kDecode : kPrefill;
  IExecutionContext& execution = *engine_->contexts[profile];
  plugins_.set_communicator(context.communicator);
  plugins_.set_step(context.longest, context.reach, context.indirect);
  kernels::NarrowParams narrowed{};
  int count = 0;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const char* name = inputs_[i].c_str();
    nvinfer1::Dims dims{};
    dims.nbDims = static_cast<int>(in[i].shape.size());
    const nvinfer1::Dims least = engine_->engine->getProfileShape(name, profile, OptProfileSelector::kMIN);
    const nvinfer1::Dims most = engine_->engine->getProfileShape(name, profile, OptProfileSelector::kMAX);
    bool fits = dims.nbDims == most.nbDims;
    for (int axis = 0; axis < dims.nbDims && fits; ++axis) {
      dims.d[axis] = in[i].shape[axis];
      fits = dims.d[axis] >= least.d[axis] && dims.d[axis] <= most.d[axis];
    }
    if (!fits)
      throw Error("the step's " + inputs_[i] + " is " + text_of(dims) + ", the plan's profile for " +
                  (context.decode ? "decoding" : "prompts") + " has " + text_of(least) + " to " +
                  text_of(most) +
                  "; compile the model again with a larger --max_batch_size or --max_seq_len");
    void* data = in[i].data;
    const auto narrow = engine_->narrow.find(inputs_[i]);
    if (in[i].dtype == DType::kInt64 && narrow != engine_->narrow.end()) {
      if (count == kernels::kNarrowed) throw Error("the plan has too many inputs of 64 bits");
      narrowed.x[count] = static_cast<const int64_t*>(data);
      narrowed.y[count] = narrow->second;
      narrowed.count[count++] = static_cast<int>(in[i].size());
      data = narrow->second;
    }
    if (reinterpret_cast<uintptr_t>(data) % 256 != 0)
      throw Error("TensorRT needs " + inputs_[i] + " at a multiple of 256 bytes");
    if (!execution.setInputShape(name, dims) || !execution.setTensorAddress(name, data))
      throw Error("TensorRT does not take " + inputs_[i] + " as " + text_of(dims) + ": " + logger().take());
  }
  for (size_t i = 0; i < outputs_.size(); ++i)
    if (!execution.setTensorAddress(outputs_[i].c_str(), out[i].data))
      throw Error("TensorRT does not take the place of " + outputs_[i] + ": " + logger().take());
  if (count > 0) check(kernels::narrow(narrowed, context.stream), "making 32 bits of 64");
  if (!execution.enqueueV3(context.stream)) throw Error("TensorRT: " + logger().take());
}

}  // namespace llmc::tensorrt
