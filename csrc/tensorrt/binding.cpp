// Python's view: llmc._cuda.tensorrt.
#include "../engine/binding.h"

#include <nanobind/stl/map.h>
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

}  // namespace

void bind(nb::module_ m) {
  m.attr("version") = std::to_string(NV_TENSORRT_MAJOR) + "." + std::to_string(NV_TENSORRT_MINOR);
  m.attr("plugin_interface") = LLMC_PLUGIN_V2 ? "IPluginV2DynamicExt" : "IPluginV3";

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
      .def("ask", [](const Harness& self, const std::string& op, const Fields& fields,
                     const std::vector<Foreign>& inputs) { return self.ask(op, fields, tensors_of(inputs)); })
      .def("run",
           [](const Harness& self, const std::string& op, const Fields& fields,
              const std::vector<Foreign>& inputs, const std::vector<Foreign>& outputs, int repeats) {
             return self.run(op, fields, tensors_of(inputs), tensors_of(outputs), repeats);
           },
           nb::arg("op"), nb::arg("fields"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("repeats") = 1);

  m.def("load", &load_tensorrt, nb::arg("library"));
  // Let an engine run a plan as a node: (name in the network, tensor of the engine) for each in- and output.
  using Named = std::vector<std::pair<std::string, int>>;
  m.def("add_plan", [](Engine& engine, const std::string& plugins, nb::bytes plan, const Named& inputs,
                       const Named& outputs) {
    std::vector<std::string> names[2];
    std::vector<int> tensors[2];
    for (const Named* named : {&inputs, &outputs})
      for (const auto& [name, tensor] : *named) {
        names[named == &outputs].push_back(name);
        tensors[named == &outputs].push_back(tensor);
      }
    auto made = std::make_unique<Plan>(PluginLibrary(plugins), plan.data(), plan.size(), names[0], names[1]);
    engine.add_node("TensorRT", std::move(made), tensors[0], tensors[1]);
  }, nb::arg("engine"), nb::arg("plugins"), nb::arg("plan"), nb::arg("inputs"), nb::arg("outputs"));
}

}  // namespace llmc::tensorrt
