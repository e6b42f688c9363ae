#include "plugin_library.h"

#include <dlfcn.h>

namespace llmc::tensorrt {

PluginLibrary::PluginLibrary(const std::string& path)
    : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ == nullptr)
    throw Error("llmc's TensorRT plugins cannot be loaded (" + std::string(dlerror()) +
                "); build llmc with TENSORRT_ROOT");
}

template <typename Function>
Function* PluginLibrary::symbol(const char* name) const {
  void* found = dlsym(handle_, name);
  if (found == nullptr)
    throw Error(std::string("llmc's plugin library has no ") + name + "; build it again");
  return reinterpret_cast<Function*>(found);
}

void PluginLibrary::expect(bool done) const {
  if (!done) throw Error(symbol<const char*()>("llmcPluginError")());
}

void PluginLibrary::init(nvinfer1::ILogger* logger, const std::string& name_space) const {
  expect(symbol<bool(void*, const char*, void*)>("initLlmcPlugins")(logger, name_space.c_str(),
                                                                    nullptr));
}

std::vector<TensorRTCreator*> PluginLibrary::creators() const {
  int32_t count = 0;
#if LLMC_PLUGIN_V2
  const auto* all = symbol<nvinfer1::IPluginCreator* const*(int32_t&)>("getPluginCreators")(count);
#else
  const auto* all =
      symbol<nvinfer1::IPluginCreatorInterface* const*(int32_t&)>("getCreators")(count);
#endif
  std::vector<TensorRTCreator*> creators;
  for (int32_t i = 0; i < count; ++i) creators.push_back(static_cast<TensorRTCreator*>(all[i]));
  return creators;
}

}  // namespace llmc::tensorrt
