// Simulates TensorRT for one plugin, with the same calls in the same order, where TensorRT is not
// installed.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "plugin_library.h"

namespace llmc::tensorrt {

// A plugin's answers for given inputs, and its serialized form.
struct Answers {
  std::vector<Tensor> outputs;  // without data
  std::vector<int>
      aliased;  // per output, the input that it aliases; -1: none. IPluginV2 does not report it
  int64_t workspace = 0;
  std::vector<char> serialized;
};

class Harness {
 public:
  explicit Harness(const std::string& library) : library_(library) {}

  struct Creator {
    std::string name, version, name_space;
    std::map<std::string, std::string> fields;  // name and type: "int", "float" or "str"
  };
  std::vector<Creator> creators() const;

  // Calls initLlmcPlugins for this process's TensorRT.
  void init(const std::string& name_space) const { library_.init(nullptr, name_space); }

  // Creates a plugin from fields, queries its outputs, offers dtypes and formats, configures and
  // serializes it. Needs no GPU. Throws Error with the plugin's reason if it refuses.
  Answers ask(const std::string& op, const Fields& fields, const std::vector<Tensor>& inputs) const;

  // The same; then deserializes the plugin and runs it `repeats` times with poisoned scratch.
  // Milliseconds per run after the first. `step` is passed as in a plan.
  float run(const std::string& op, Fields fields, std::vector<Tensor> inputs,
            const std::vector<Tensor>& outputs, int repeats, const LlmcStep* step) const;

 private:
  TensorRTCreator& creator(const std::string& op) const;
  float run(const std::string& op, const Fields& fields, const std::vector<Tensor>& inputs,
            const std::vector<Tensor>& outputs, int repeats) const;

  PluginLibrary library_;
};

}  // namespace llmc::tensorrt
