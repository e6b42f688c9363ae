// What libllmc_plugins.so offers to those who load it.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>

#define LLMC_EXPORT __attribute__((visibility("default")))

extern "C" {

// A tensor that a plugin made: its name in the network, where it lies on the device, dtype ("float16") and shape.
// What is to be read of it is to be enqueued on `stream` before the watcher returns.
using LlmcWatcher = void (*)(void* user, const char* name, const void* data, const char* dtype,
                             const int64_t* shape, int rank, cudaStream_t stream);

// What plugins are told of a step, by the input `llmc_step` that every one of a plan's has: its address is to be that
// of an LlmcStep in host memory that the device knows (cudaMallocHost), at a multiple of 256. It is read by the host
// while the step is enqueued, so it may change between steps, and belongs to one execution context at a time. Where
// the address is of anything else, as while TensorRT builds, a step is what LlmcStep() says.
struct LlmcStep {
  static constexpr uint64_t kMagic = 0x70657473636d6c6c;  // "llmcstep"
  uint64_t magic = kMagic;
  // A sequence has at most `longest` new tokens, and `reach` with those before; 0: nothing is known, and then prompts
  // go without cuDNN.
  int32_t longest = 0, reach = 0;
  int32_t num_decode = 0;  // the first so many sequences have one new token each
  int32_t unused = 0;
  void* communicator = nullptr;   // the ncclComm_t of the ranks that share the model; null where there is one
  // Called with `user` for every tensor that a plugin makes, but for caches, right after its kernels are enqueued.
  LlmcWatcher watcher = nullptr;
  void* user = nullptr;
};
constexpr int kLlmcStepInts = 16;  // the input's shape: int32 [16]
static_assert(sizeof(LlmcStep) <= kLlmcStepInts * sizeof(int32_t));

// Register every op's creator in a namespace, "llmc" if null. logger: an ILogger for what goes wrong, or null
// for the one that TensorRT was given. registry: an IPluginRegistry, or null for that of the TensorRT in this
// process. Later calls with the same registry do nothing. False, with the reason in llmcPluginError(), where
// there is no TensorRT, another one than the library was compiled for, or one with creators of these names.
LLMC_EXPORT bool initLlmcPlugins(void* logger, const char* libNamespace, void* registry);

// What last went wrong in this thread, as one sentence; "" if nothing has.
LLMC_EXPORT const char* llmcPluginError();

// What IPluginRegistry::loadLibrary looks for.
LLMC_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder);
#if NV_TENSORRT_MAJOR < 11
LLMC_EXPORT nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count);
#endif
#if NV_TENSORRT_MAJOR >= 10
LLMC_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);
#endif

}  // extern "C"
