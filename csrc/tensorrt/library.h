// What libllmc_plugins.so offers to those who load it.
#pragma once

#include <NvInferRuntime.h>

#define LLMC_EXPORT __attribute__((visibility("default")))

extern "C" {

// Register every op's creator in a namespace, "llmc" if null. logger: an ILogger for what goes wrong, or null
// for the one that TensorRT was given. registry: an IPluginRegistry, or null for that of the TensorRT in this
// process. Later calls with the same registry do nothing. False, with the reason in llmcPluginError(), where
// there is no TensorRT, another one than the library was compiled for, or one with creators of these names.
LLMC_EXPORT bool initLlmcPlugins(void* logger, const char* libNamespace, void* registry);

// What last went wrong in this thread, as one sentence; "" if nothing has.
LLMC_EXPORT const char* llmcPluginError();

// The ncclComm_t of the ranks that share the model, for plugins that run on the current device.
LLMC_EXPORT void llmcSetCommunicator(void* communicator);

// What plugins on the current device may take for granted of what is enqueued next: a sequence has at most
// `longest` new tokens, and `reach` with those before (0: nothing is known, and then prompts go without cuDNN);
// and without `indirect` a cache_indirection is not read, as each cache row has its own past.
LLMC_EXPORT void llmcSetStep(int longest, int reach, bool indirect);

// A tensor that a plugin made: its name in the network, where it lies on the device, dtype ("float16") and shape.
// What is to be read of it is to be enqueued on `stream` before the watcher returns.
using LlmcWatcher = void (*)(void* user, const char* name, const void* data, const char* dtype,
                             const int64_t* shape, int rank, cudaStream_t stream);

// From now on call `watcher` for every tensor that a plugin makes, right after its kernels are enqueued, but for
// caches; null: no more. Plugins know names from their field `makes`.
LLMC_EXPORT void llmcWatch(LlmcWatcher watcher, void* user);

// What IPluginRegistry::loadLibrary looks for.
LLMC_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder);
#if NV_TENSORRT_MAJOR < 11
LLMC_EXPORT nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count);
#endif
#if NV_TENSORRT_MAJOR >= 10
LLMC_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);
#endif

}  // extern "C"
