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

// A tensor of the network, and of which dtype it is in the engine.
struct Port {
  std::string name;
  DType dtype;
};

class Plan : public Plugin {
 public:
  // Deserializes a plan with the TensorRT that is loaded, on the current device. Inputs and outputs are the
  // network's but for llmc_step, in the order in which enqueue is given them. Throws Error where TensorRT does not
  // take it, or it has others.
  Plan(const PluginLibrary& plugins, const void* plan, size_t bytes, std::vector<Port> inputs,
       std::vector<Port> outputs);
  ~Plan() override;

  std::vector<Dims> shapes(const std::vector<Dims>&) const override { return {}; }
  // Throws Error where a tensor has not the shape that the plan takes or makes.
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
