// An engine that TensorRT built, as one node of our engine's schedule.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plugin_library.h"

namespace llmc::tensorrt {

// Loads TensorRT's library; its version, such as "8.6.0". Throws Error where it cannot be loaded, or is
// of another major version than llmc was built for.
std::string load_tensorrt(const std::string& library);

class Plan : public Plugin {
 public:
  // Deserializes a plan with the TensorRT that is loaded. Inputs and outputs are the network's, in the order
  // in which enqueue is given them. Throws Error where TensorRT does not take it.
  Plan(const PluginLibrary& plugins, const void* plan, size_t bytes, std::vector<std::string> inputs,
       std::vector<std::string> outputs);
  ~Plan() override;

  std::vector<Dims> shapes(const std::vector<Dims>&) const override { return {}; }
  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override;

 private:
  struct Engine;

  const PluginLibrary plugins_;
  const std::vector<std::string> inputs_, outputs_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace llmc::tensorrt
