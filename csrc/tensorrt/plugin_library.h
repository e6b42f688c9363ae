// libllmc_plugins.so, loaded: the interface of csrc/tensorrt/library.h, with failures as Errors.
#pragma once

#include <string>
#include <vector>

#include "library.h"
#include "tensorrt.h"

namespace llmc::tensorrt {

#if LLMC_PLUGIN_V2
using TensorRTCreator = nvinfer1::IPluginCreator;
#else
using TensorRTCreator = nvinfer1::IPluginCreatorV3One;
#endif

class PluginLibrary {
 public:
  // Throws Error if it cannot be loaded. It stays loaded: plugins may outlive this object.
  explicit PluginLibrary(const std::string& path);

  // Registers its creators with this process's TensorRT.
  void init(nvinfer1::ILogger* logger, const std::string& name_space) const;
  std::vector<TensorRTCreator*> creators() const;

  // Throws Error with the library's message if `done` is false.
  void expect(bool done) const;

 private:
  template <typename Function>
  Function* symbol(const char* name) const;

  void* handle_;
};

}  // namespace llmc::tensorrt
