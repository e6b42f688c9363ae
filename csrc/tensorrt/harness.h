// Plays TensorRT's part with one plugin, through the same calls in the same order, where TensorRT is not.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "plugin_library.h"

namespace llmc::tensorrt {

// What a plugin says of the tensors it was shown, and what is left of it in a plan.
struct Answers {
  std::vector<Tensor> outputs;  // without data
  std::vector<int> aliased;     // per output, the node's input that it is; -1: none. IPluginV2 does not tell
  int64_t workspace = 0;
  std::vector<char> serialized;
};

class Harness {
 public:
  explicit Harness(const std::string& library) : library_(library) {}

  struct Creator {
    std::string name, version, name_space;
    std::map<std::string, std::string> fields;  // name and kind: "int", "float" or "str"
  };
  std::vector<Creator> creators() const;

  // initLlmcPlugins with this process's TensorRT.
  void init(const std::string& name_space) const { library_.init(nullptr, name_space); }

  // Create a plugin from fields, ask for its outputs, offer it dtypes and layouts, configure, serialize it.
  // Needs no GPU. Throws Error with the plugin's reason where it refuses.
  Answers ask(const std::string& op, const Fields& fields, const std::vector<Tensor>& inputs) const;

  // All of that, then create the plugin again from what was serialized and run it `repeats` times with
  // poisoned scratch; milliseconds per run after the first. With a step, the plugin is told of it as in a plan.
  float run(const std::string& op, Fields fields, std::vector<Tensor> inputs, const std::vector<Tensor>& outputs,
            int repeats, const LlmcStep* step) const;

 private:
  TensorRTCreator& creator(const std::string& op) const;
  float run(const std::string& op, const Fields& fields, const std::vector<Tensor>& inputs,
            const std::vector<Tensor>& outputs, int repeats) const;

  PluginLibrary library_;
};

}  // namespace llmc::tensorrt
