// The Python module llmc_cuda._cuda.tensorrt.
#include "../engine/binding.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "../engine/engine.h"
#include "harness.h"
#include "plan.h"

namespace nb = nanobind;

namespace llmc::tensorrt {
namespace {

// As Foreign, without addresses.
std::vector<std::pair<std::string, Shape>> described(const std::vector<Tensor>& tensors) {
  std::vector<std::pair<std::string, Shape>> made;
  for (const Tensor& tensor : tensors) made.emplace_back(name_of(tensor.dtype), tensor.shape);
  return made;
}

// Tensors produced by a plan's plugins, copied to the host.
class Watch {
 public:
  // (name, shape, float32 values), in order of production.
  nb::list values() const {
    nb::list all;
    for (const auto& [name, shape, values] : kept_)
      all.append(nb::make_tuple(name, shape, nb::bytes(values.data(), 4 * values.size())));
    return all;
  }

  static void keep(void* self, const char* name, const void* data, const char* dtype,
                   const int64_t* shape, int rank, cudaStream_t stream) {
    const Tensor made{nullptr, dtype_of(dtype), Shape(shape, shape + rank)};
    std::vector<char> host(made.size() * width(made.dtype));
    std::vector<float> values(made.size());
    check(cudaMemcpyAsync(host.data(), data, host.size(), cudaMemcpyDeviceToHost, stream),
          "watching");
    check(cudaStreamSynchronize(stream), "watching");
    to_float(values.data(), host.data(), made.size(), made.dtype);
    static_cast<Watch*>(self)->kept_.emplace_back(name, made.shape, std::move(values));
  }

 private:
  std::vector<std::tuple<std::string, Shape, std::vector<float>>> kept_;
};

// Of a step: longest, reach, num_decode.
using Facts = std::tuple<int, int, int>;

}  // namespace

void bind(nb::module_ m) {
  m.attr("version") = std::to_string(NV_TENSORRT_MAJOR) + "." + std::to_string(NV_TENSORRT_MINOR);
  m.attr("plugin_interface") = LLMC_PLUGIN_V2 ? "IPluginV2DynamicExt" : "IPluginV3";

  nb::class_<Watch>(m, "Watch").def(nb::init<>()).def("values", &Watch::values);
  // From now on an engine's plans report what their plugins produce; None: stops. The watch must
  // stay alive.
  m.def(
      "watch",
      [](Engine& engine, Watch* watch) {
        engine.watch_inside(watch == nullptr ? nullptr : &Watch::keep, watch);
      },
      nb::arg("engine"), nb::arg("watch").none());

  nb::class_<Harness::Creator>(m, "Creator")
      .def_ro("name", &Harness::Creator::name)
      .def_ro("version", &Harness::Creator::version)
      .def_ro("namespace", &Harness::Creator::name_space)
      .def_ro("fields", &Harness::Creator::fields);
  nb::class_<Answers>(m, "Answers")
      .def_prop_ro("outputs", [](const Answers& answers) { return described(answers.outputs); })
      .def_ro("aliased", &Answers::aliased)
      .def_ro("workspace", &Answers::workspace);
  nb::class_<Harness>(m, "Harness")
      .def(nb::init<const std::string&>(), nb::arg("library"))
      .def_prop_ro("creators", &Harness::creators)
      .def("init", &Harness::init, nb::arg("namespace") = "llmc")
      .def("ask",
           [](const Harness& self, const std::string& op, const Fields& fields,
              const std::vector<Foreign>& inputs) {
             return self.ask(op, fields, tensors_of(inputs));
           })
      .def(
          "run",
          [](const Harness& self, const std::string& op, const Fields& fields,
             const std::vector<Foreign>& inputs, const std::vector<Foreign>& outputs, int repeats,
             std::optional<Facts> facts, Watch* watch) {
            LlmcStep step;
            if (facts) std::tie(step.longest, step.reach, step.num_decode) = *facts;
            if (watch != nullptr) step.watcher = &Watch::keep, step.user = watch;
            return self.run(op, fields, tensors_of(inputs), tensors_of(outputs), repeats,
                            facts || watch != nullptr ? &step : nullptr);
          },
          nb::arg("op"), nb::arg("fields"), nb::arg("inputs"), nb::arg("outputs"),
          nb::arg("repeats") = 1, nb::arg("step") = nb::none(), nb::arg("watch") = nb::none());

  m.def("load", &load_tensorrt, nb::arg("library"));
  m.attr("step_ints") = kLlmcStepInts;
  // Adds a plan to a program as a node on this device: (name in the network, tensor of the program)
  // for each input and output.
  using Named = std::vector<std::pair<std::string, int>>;
  m.def(
      "add_plan",
      [](Program& program, int device, const std::string& plugins, nb::bytes plan,
         const Named& inputs, const Named& outputs, bool of_encoder) {
        std::vector<Port> ports[2];
        std::vector<int> tensors[2];
        for (const Named* named : {&inputs, &outputs})
          for (const auto& [name, tensor] : *named) {
            ports[named == &outputs].push_back({name, program.tensor(tensor).dtype});
            tensors[named == &outputs].push_back(tensor);
          }
        check(cudaSetDevice(device), "choosing a device");
        auto made = std::make_unique<Plan>(PluginLibrary(plugins), plan.data(), plan.size(),
                                           ports[0], ports[1]);
        program.add_node("TensorRT", std::move(made), tensors[0], tensors[1],
                         of_encoder ? Part::kEncoder : Part::kModel);
      },
      nb::arg("program"), nb::arg("device"), nb::arg("plugins"), nb::arg("plan"), nb::arg("inputs"),
      nb::arg("outputs"), nb::arg("of_encoder") = false);
}

}  // namespace llmc::tensorrt
