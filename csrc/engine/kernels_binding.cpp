// Python functions for single ops and kernels on device tensors of the caller, for tests and
// benchmarks. Shapes and dtypes are checked; addresses are not.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "../kernels/sampling/lookup.h"
#include "../kernels/sampling/params.h"
#include "../plugins/common/lora_plan.h"
#include "../plugins/common/timing.h"
#include "binding.h"
#include "memory.h"

namespace nb = nanobind;

namespace llmc {

std::vector<Tensor> tensors_of(const std::vector<Foreign>& foreign) {
  std::vector<Tensor> tensors;
  for (const auto& [address, dtype, shape] : foreign)
    tensors.push_back({reinterpret_cast<void*>(address), dtype_of(dtype), shape});
  return tensors;
}

namespace {

std::vector<Dims> dims_of(const std::vector<Tensor>& tensors) {
  std::vector<Dims> all;
  for (const Tensor& tensor : tensors) {
    Dims dims;
    for (int64_t dim : tensor.shape) dims.push_back(dim);
    all.push_back(dims);
  }
  return all;
}

Shape shape_of(const Dims& dims) {
  Shape shape;
  for (const Dim& dim : dims) shape.push_back(dim.number());
  return shape;
}

// The tensors of a kernel, checked for presence, dtype and size.
class KernelTensors {
 public:
  KernelTensors(const char* kernel, const std::vector<Foreign>& foreign, size_t count)
      : kernel_(kernel), tensors_(tensors_of(foreign)) {
    if (tensors_.size() != count)
      throw Error(std::string(kernel) + " takes " + std::to_string(count) + " tensors, not " +
                  std::to_string(tensors_.size()));
  }

  template <typename T>
  T* of(int index, const Shape& shape, DType dtype) const {
    return static_cast<T*>(bytes(index, shape, width(dtype)));
  }
  float* floats(int index, const Shape& shape) const {
    return of<float>(index, shape, DType::kFloat32);
  }
  int32_t* ints(int index, const Shape& shape) const {
    return of<int32_t>(index, shape, DType::kInt32);
  }
  int64_t* longs(int index, const Shape& shape) const {
    return of<int64_t>(index, shape, DType::kInt64);
  }
  // A tensor of records, or of another dtype, with this element size in bytes.
  void* bytes(int index, const Shape& shape, int64_t element) const {
    const Tensor& tensor = tensors_[index];
    const int64_t wanted = Tensor{nullptr, DType::kFloat32, shape}.size() * element;
    if ((tensor.data == nullptr && wanted > 0) || tensor.size() * width(tensor.dtype) < wanted)
      throw Error(std::string(kernel_) + "'s tensor " + std::to_string(index) + " has " +
                  std::to_string(tensor.size() * width(tensor.dtype)) + " bytes, expected " +
                  std::to_string(wanted));
    return tensor.data;
  }
  // A matrix [rows, at least `columns`].
  const Tensor& matrix(int index, int64_t columns) const {
    const Tensor& tensor = tensors_[index];
    if (tensor.data == nullptr || tensor.shape.size() != 2 || tensor.shape[0] < 1 ||
        tensor.shape[1] < columns)
      throw Error(std::string(kernel_) + "'s tensor " + std::to_string(index) +
                  " is not a matrix of at least " + std::to_string(columns) + " columns");
    return tensor;
  }

 private:
  const char* kernel_;
  const std::vector<Tensor> tensors_;
};

// counts [slots, vocab], tokens [slots, room] and lengths.
kernels::TokenHistory history_of(const KernelTensors& given, int first, int vocab) {
  const Tensor& tokens = given.matrix(first + 1, 1);
  const int64_t slots = tokens.shape[0], room = tokens.shape[1];
  return {static_cast<uint32_t*>(given.bytes(first, {slots, vocab}, sizeof(uint32_t))),
          given.ints(first + 1, {slots, room}), given.ints(first + 2, {slots}), vocab,
          static_cast<int>(room)};
}

kernels::SlotState* states_of(const KernelTensors& given, int index, int64_t count) {
  return static_cast<kernels::SlotState*>(given.bytes(index, {count}, sizeof(kernels::SlotState)));
}

// Launches `repeats` times and synchronizes; milliseconds per launch after the first.
template <typename Launch>
float timed(Launch&& launch, int repeats, const char* what) {
  return time_on(nullptr, repeats - 1, [&] { check(launch(), what); });
}

// Runs one op on device tensors `repeats` times and synchronizes; milliseconds per run after the
// first. `firsts`: see Gemm::decide(). `pitches`: of the inputs, see Tensor; empty for dense
// tensors. `own_from`: per decoding sequence the first position that it attends to by itself;
// positions before it are a shared prefix. `adapters`: whether rows have LoRA adapters.
float run_op(const std::string& name, const Fields& fields, const std::vector<Foreign>& inputs,
             const std::vector<Foreign>& outputs, int num_decode, int repeats, int longest,
             int reach, const std::vector<bool>& firsts, const std::vector<int64_t>& pitches,
             const std::vector<int>& own_from, bool adapters) {
  static Gemm* gemm = new Gemm;  // never freed: the driver may shut down before static objects
  static AttentionBackend* cudnn =
      longest > 0 ? make_attention_backend("cudnn").release() : nullptr;
  const auto plugin = make_plugin(name, fields);
  std::vector<Tensor> in = tensors_of(inputs);
  const std::vector<Tensor> out = tensors_of(outputs);
  const std::vector<Port>& ports = plugin_types().at(name).inputs;
  for (size_t i = 0; i < pitches.size() && i < in.size(); ++i) {
    if (pitches[i] != 0 && (!ports[i].columns || pitches[i] < in[i].shape.back()))
      throw Error("the row pitch of " + name + "'s " + ports[i].name + " cannot be " +
                  std::to_string(pitches[i]));
    in[i].pitch = pitches[i];
  }
  const std::vector<Dims> made = plugin->shapes(dims_of(in)), given = dims_of(out);
  for (size_t i = 0; i < made.size(); ++i)
    expect("output " + std::to_string(i) + " of " + name, i < given.size() ? given[i] : Dims{0},
           made[i]);
  std::set<const void*> done;
  plugin->prepare(in, done, nullptr);
  const int64_t bytes = plugin->workspace(in);
  DeviceBuffer workspace(bytes, "scratch");
  check(cudaMemset(workspace.data, 0xff, bytes), "scratch");
  DeviceBuffer counters(kCounters * sizeof(int32_t), "counters");
  check(cudaMemset(counters.data, 0, kCounters * sizeof(int32_t)), "counters");
  Context context;
  DeviceBuffer prefix((2 + own_from.size()) * sizeof(int32_t), "a prefix");
  if (const auto owner = std::max_element(own_from.begin(), own_from.end());
      owner != own_from.end()) {
    std::vector<int32_t> all{static_cast<int32_t>(owner - own_from.begin()), *owner};
    all.insert(all.end(), own_from.begin(), own_from.end());
    check(cudaMemcpy(prefix.data, all.data(), all.size() * sizeof(int32_t), cudaMemcpyHostToDevice),
          "a prefix");
    const auto* of = static_cast<const int32_t*>(prefix.data);
    context.prefix = {of, of + 2, nullptr};
  }
  context.gemm = gemm;
  gemm->decide(firsts);
  context.counters = static_cast<int32_t*>(counters.data);
  context.num_decode = num_decode;
  context.attention = longest > 0 ? cudnn : nullptr;
  context.longest = longest;
  context.reach = reach;
  context.adapters = adapters;
  constexpr int kRows = 1 << 16;
  const int slots = kernels::kMaxLoraSlots, tiles = kernels::lora_tiles(kRows, slots);
  DeviceBuffer order(adapters ? LoraPlan::kKinds * kRows * 4 : 0, "rows of adapters"),
      tiled(adapters ? LoraPlan::kKinds * tiles * sizeof(kernels::LoraTile) : 0,
            "rows of adapters");
  LoraPlan plan(static_cast<int32_t*>(order.data), static_cast<kernels::LoraTile*>(tiled.data),
                kRows, slots);
  context.lora_plan = &plan;
  check(cudaDeviceSynchronize(), "waiting");
  check(cudaStreamCreate(&context.stream), "a stream");
  const float milliseconds = time_on(context.stream, repeats - 1, [&] {
    plan.begin_step();
    plugin->enqueue(in, out, workspace.data, context);
  });
  cudaStreamDestroy(context.stream);
  return milliseconds;
}

// Tensors: tokens, logits, states, slots.
float sample(const std::vector<Foreign>& tensors, int vocab, int64_t none, bool draws,
             int repeats) {
  const KernelTensors t("sample", tensors, 4);
  const Tensor& logits = t.matrix(1, vocab);
  const int64_t rows = logits.shape[0];
  const kernels::SampleParams p{t.longs(0, {rows}),
                                logits.data,
                                states_of(t, 2, 1),
                                t.ints(3, {rows}),
                                static_cast<int>(rows),
                                vocab,
                                static_cast<int>(logits.shape[1]),
                                none,
                                draws};
  return timed([&] { return kernels::sample(logits.dtype, p, nullptr); }, repeats, "sample");
}

// Tensors: scores, logits, states, slots, lists, three of a history, mask_rows and masks (both may
// be empty).
float process(const std::vector<Foreign>& tensors, int vocab, int repeats) {
  const KernelTensors t("process", tensors, 10);
  const Tensor &scores = t.matrix(0, vocab), &logits = t.matrix(1, vocab);
  const int64_t rows = logits.shape[0];
  const kernels::ProcessLogitsParams p{t.floats(0, {rows, scores.shape[1]}),
                                       logits.data,
                                       states_of(t, 2, 1),
                                       t.ints(3, {rows}),
                                       t.ints(4, {0}),
                                       history_of(t, 5, vocab),
                                       static_cast<int>(rows),
                                       vocab,
                                       static_cast<int>(logits.shape[1]),
                                       static_cast<int>(scores.shape[1]),
                                       t.ints(8, {0}),
                                       static_cast<const uint32_t*>(t.bytes(9, {0}, 4))};
  return timed([&] { return kernels::process_logits(logits.dtype, p, nullptr); }, repeats,
               "process");
}

// Tensors: states, given states, slots, prompts, starts, tokens, three of a history.
void admit(const std::vector<Foreign>& tensors, int vocab, int count) {
  const KernelTensors t("admit", tensors, 9);
  check(kernels::admit(
            {states_of(t, 0, count), states_of(t, 1, count), t.ints(2, {count}), t.ints(3, {count}),
             t.ints(4, {count + 1}), t.ints(5, {0}), history_of(t, 6, vocab), count},
            nullptr),
        "admit");
  check(cudaDeviceSynchronize(), "admit");
}

// Tensors: records, logits, sampled tokens, states, slots.
float logprobs(const std::vector<Foreign>& tensors, int vocab, int repeats) {
  const KernelTensors t("logprobs", tensors, 5);
  const Tensor& logits = t.matrix(1, vocab);
  const int64_t rows = logits.shape[0];
  const kernels::LogprobsParams p{
      static_cast<kernels::Logprobs*>(t.bytes(0, {rows}, sizeof(kernels::Logprobs))),
      logits.data,
      t.longs(2, {rows}),
      states_of(t, 3, 1),
      t.ints(4, {rows}),
      static_cast<int>(rows),
      vocab,
      static_cast<int>(logits.shape[1])};
  return timed([&] { return kernels::logprobs(logits.dtype, p, nullptr); }, repeats, "logprobs");
}

// Tensors: drafts, matches, drafts by slot, states, slots, three of a history.
float lookup_drafts(const std::vector<Foreign>& tensors, int vocab, int count, int max_length,
                    int repeats) {
  const KernelTensors t("lookup_drafts", tensors, 8);
  const int64_t rows = t.matrix(0, kernels::kMaxProposals).shape[0];
  const kernels::TokenHistory history = history_of(t, 5, vocab);
  DeviceBuffer matches(8 * rows, "matches"), done(4 * rows, "counters");
  check(cudaMemset(matches.data, 0, 8 * rows), "matches");
  check(cudaMemset(done.data, 0, 4 * rows), "counters");
  const kernels::LookupDraftsParams p{history,
                                      states_of(t, 3, 1),
                                      t.ints(4, {rows}),
                                      t.longs(0, {rows, kernels::kMaxProposals}),
                                      t.ints(1, {rows}),
                                      t.longs(2, {1, kernels::kMaxProposals}),
                                      static_cast<uint64_t*>(matches.data),
                                      static_cast<int32_t*>(done.data),
                                      static_cast<int>(rows),
                                      count,
                                      max_length};
  return timed([&] { return kernels::lookup_drafts(p, nullptr); }, repeats, "lookup_drafts");
}

void candidates(const std::vector<Foreign>& tensors, int vocab, int repeats) {
  const KernelTensors t("candidates", tensors, 3);
  const Tensor& logits = t.matrix(2, vocab);
  const int rows = static_cast<int>(logits.shape[0]),
            count = static_cast<int>(t.matrix(0, 1).shape[1]);
  DeviceBuffer scratch(kernels::candidates_scratch(rows, vocab, count), "scratch");
  const kernels::CandidatesParams p{t.ints(0, {rows, count}),
                                    t.floats(1, {rows, count}),
                                    logits.data,
                                    scratch.data,
                                    rows,
                                    vocab,
                                    static_cast<int>(logits.shape[1]),
                                    count};
  for (int i = 0; i < repeats; ++i)
    check(kernels::candidates(logits.dtype, p, nullptr), "candidates");
  check(cudaDeviceSynchronize(), "candidates");
}

std::vector<std::string> texts_of(const std::vector<Port>& ports) {
  std::vector<std::string> texts;
  for (const Port& port : ports) texts.push_back(port.text());
  return texts;
}

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::class_<PluginType>(m, "PluginType")
      .def_ro("name", &PluginType::name)
      .def_ro("version", &PluginType::version)
      .def_prop_ro("inputs", [](const PluginType& type) { return texts_of(type.inputs); })
      .def_prop_ro("outputs", [](const PluginType& type) { return texts_of(type.outputs); })
      .def_ro("fields", &PluginType::fields)
      .def_ro("required", &PluginType::required);
  m.def(
      "plugin_types",
      [] {
        std::vector<const PluginType*> types;
        for (const auto& [name, type] : plugin_types()) types.push_back(&type);
        return types;
      },
      nb::rv_policy::reference);
  m.def("make_plugin",
        [](const std::string& name, const Fields& fields) { make_plugin(name, fields); });
  // Output shapes of an op from input shapes (empty: absent).
  m.def(
      "shapes",
      [](const std::string& name, const Fields& fields, const std::vector<Shape>& inputs) {
        std::vector<Tensor> tensors;
        for (const Shape& shape : inputs) tensors.push_back({nullptr, DType::kFloat32, shape});
        std::vector<Shape> made;
        for (const Dims& dims : make_plugin(name, fields)->shapes(dims_of(tensors)))
          made.push_back(shape_of(dims));
        return made;
      },
      nb::arg("op"), nb::arg("fields"), nb::arg("inputs"));
  m.def("run_op", &run_op, nb::arg("name"), nb::arg("fields"), nb::arg("inputs"),
        nb::arg("outputs"), nb::arg("num_decode") = 0, nb::arg("repeats") = 1,
        nb::arg("longest") = 0, nb::arg("reach") = 0, nb::arg("firsts") = std::vector<bool>(),
        nb::arg("pitches") = std::vector<int64_t>(), nb::arg("own_from") = std::vector<int>(),
        nb::arg("adapters") = false);
  // Sampling kernels: see kernels/sampling/params.h.
  m.def("sample", &sample, nb::arg("tensors"), nb::arg("vocab"), nb::arg("none") = 0,
        nb::arg("draws") = true, nb::arg("repeats") = 1);
  m.def("process", &process, nb::arg("tensors"), nb::arg("vocab"), nb::arg("repeats") = 1);
  m.def("admit", &admit);
  m.def("logprobs", &logprobs, nb::arg("tensors"), nb::arg("vocab"), nb::arg("repeats") = 1);
  m.def("candidates", &candidates, nb::arg("tensors"), nb::arg("vocab"), nb::arg("repeats") = 1);
  m.def("lookup_drafts", &lookup_drafts, nb::arg("tensors"), nb::arg("vocab"), nb::arg("count"),
        nb::arg("max_length"), nb::arg("repeats") = 1);
  m.attr("record_bytes") = std::make_pair(sizeof(kernels::SlotState), sizeof(kernels::Logprobs));
}

}  // namespace llmc
