// Plays TensorRT's part with one plugin, through the same calls in the same order, where TensorRT is not.
#pragma once

#include <string>
#include <vector>

#include "tensorrt.h"

namespace llmc::tensorrt {

#if LLMC_PLUGIN_V2
using TensorRTCreator = nvinfer1::IPluginCreator;
#else
using TensorRTCreator = nvinfer1::IPluginCreatorV3One;
#endif
using Bytes = std::vector<char>;

// What a plugin says of the tensors it was shown, and what is left of it in a plan.
struct Answers {
  std::vector<Tensor> outputs;  // without data
  std::vector<int> aliased;     // per output, the node's input that it is; -1: none. IPluginV2 does not tell
  int64_t workspace = 0;
  Bytes serialized;
};

class Harness {
 public:
  // Loads libllmc_plugins.so. Throws Error where it cannot be.
  explicit Harness(const std::string& library);

  struct Creator {
    std::string name, version, name_space;
    std::map<std::string, std::string> fields;  // name and kind: "int", "float" or "str"
  };
  std::vector<Creator> creators() const;

  // initLlmcPlugins with this process's TensorRT. Throws Error with its reason where it fails.
  void init(const std::string& name_space) const;

  // Create a plugin from fields, ask for its outputs, offer it dtypes and layouts, configure it, serialize
  // it. Needs no GPU. Throws Error with the plugin's reason where it refuses.
  Answers ask(const std::string& op, const Fields& fields, const std::vector<Tensor>& inputs) const;

  // All of that, then create the plugin again from what was serialized and run it `repeats` times with
  // poisoned scratch; milliseconds per run after the first.
  float run(const std::string& op, const Fields& fields, const std::vector<Tensor>& inputs,
            const std::vector<Tensor>& outputs, int repeats) const;

 private:
  template <typename Function>
  Function* symbol(const char* name) const;
  // Throws Error with what the plugin library says of the failure.
  void expect(bool done) const;
  std::vector<TensorRTCreator*> found() const;
  TensorRTCreator& creator(const std::string& op) const;

  void* handle_;
};

}  // namespace llmc::tensorrt
