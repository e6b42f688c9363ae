// A TensorRT engine as a node of a program.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plugin_library.h"

namespace llmc::tensorrt {

// Loads TensorRT's library and returns its version, such as "8.6.0". Throws Error if it cannot be
// loaded, or has another major version than llmc was built for.
std::string load_tensorrt(const std::string& library);

// A tensor of the network, with its dtype in the program.
struct Port {
  std::string name;
  DType dtype;
};

class Plan : public Plugin {
 public:
  // Deserializes a plan with the loaded TensorRT on the current device. Inputs and outputs are the
  // network's without llmc_step, in the order of enqueue(). Throws Error if TensorRT rejects the
  // plan, or its tensors differ.
  Plan(const PluginLibrary& plugins, const void* plan, size_t bytes, std::vector<Port> inputs,
       std::vector<Port> outputs);
  ~Plan() override;

  std::vector<Dims> shapes(const std::vector<Dims>&) const override { return {}; }
  // Throws Error if a tensor's shape is not supported by the plan.
  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override;

 private:
  struct Engine;

  void bind_inputs(const std::vector<Tensor>& in, const Context& context) const;
  void bind_outputs(const std::vector<Tensor>& out, const Context& context) const;

  const std::vector<Port> inputs_, outputs_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace llmc::tensorrt
