// The C interface of libllmc_plugins.so.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>

#define LLMC_EXPORT __attribute__((visibility("default")))

extern "C" {

// Called for a tensor that a plugin produced: name in the network, device address, dtype
// ("float16") and shape. Reads must be enqueued on `stream` before it returns.
using LlmcWatcher = void (*)(void* user, const char* name, const void* data, const char* dtype,
                             const int64_t* shape, int rank, cudaStream_t stream);

// Properties of a step, passed to plugins through the input `llmc_step` of every plan: its address
// is that of an LlmcStep in page-locked host memory (cudaMallocHost), aligned to 256 bytes. The
// host reads it while it enqueues a step, so it may change between steps, and belongs to one
// execution context at a time. With any other address, as while TensorRT builds, a default
// LlmcStep() is used.
struct LlmcStep {
  static constexpr uint64_t kMagic = 0x70657473636d6c6c;  // "llmcstep"
  uint64_t magic = kMagic;
  // Maximum number of new tokens, and of all tokens, of a sequence; 0: unknown, and prompts do not
  // use cuDNN.
  int32_t longest = 0, reach = 0;
  int32_t num_decode = 0;  // the first num_decode sequences have one new token each
  int32_t unused = 0;
  void* communicator = nullptr;  // the ncclComm_t of the tensor-parallel ranks; null for one rank
  // Called with `user` for every tensor that a plugin produces, except caches, right after its
  // kernels are enqueued.
  LlmcWatcher watcher = nullptr;
  void* user = nullptr;
};
constexpr int kLlmcStepInts = 16;  // shape of the input: int32 [16]
static_assert(sizeof(LlmcStep) <= kLlmcStepInts * sizeof(int32_t));

// Registers every op's creator in a namespace, "llmc" if null. logger: an ILogger for errors, or
// null for TensorRT's own. registry: an IPluginRegistry, or null for that of this process's
// TensorRT. Later calls with the same registry do nothing. Returns false, with the reason in
// llmcPluginError(), without TensorRT, with another version than the library was compiled for, or
// if the names are taken.
LLMC_EXPORT bool initLlmcPlugins(void* logger, const char* libNamespace, void* registry);

// The last error of this thread; "" without an error.
LLMC_EXPORT const char* llmcPluginError();

// Symbols that IPluginRegistry::loadLibrary looks up.
LLMC_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder);
#if NV_TENSORRT_MAJOR < 11
LLMC_EXPORT nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count);
#endif
#if NV_TENSORRT_MAJOR >= 10
LLMC_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);
#endif

}  // extern "C"
