// Python's view: llmc_cuda._cuda.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "../plugins/common/timing.h"
#include "binding.h"
#include "engine.h"

namespace nb = nanobind;
using namespace llmc;

namespace llmc {

std::vector<Tensor> tensors_of(const std::vector<Foreign>& foreign) {
  std::vector<Tensor> tensors;
  for (const auto& [address, dtype, shape] : foreign)
    tensors.push_back({reinterpret_cast<void*>(address), dtype_of(dtype), shape});
  return tensors;
}

}  // namespace llmc

namespace {

template <typename T>
using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;
template <typename T>
using Output = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

// Run one op on device tensors `repeats` times and wait; milliseconds per run after the first.
float run_op(const std::string& name, const Fields& fields, const std::vector<Foreign>& inputs,
             const std::vector<Foreign>& outputs, bool decode, int repeats, int longest, int reach) {
  static Gemm* gemm = new Gemm;  // never freed: the driver may end before static objects do
  static Sdpa* sdpa = new Sdpa(/*always=*/true);
  const auto plugin = make_plugin(name, fields);
  const std::vector<Tensor> in = tensors_of(inputs), out = tensors_of(outputs);
  const int64_t bytes = plugin->workspace(in);
  DeviceBuffer workspace(bytes, "scratch");
  check(cudaMemset(workspace.data, 0xff, bytes), "scratch");
  DeviceBuffer counters(kCounters * sizeof(int32_t), "counters");
  check(cudaMemset(counters.data, 0, kCounters * sizeof(int32_t)), "counters");
  Context context;
  context.gemm = gemm;
  context.counters = static_cast<int32_t*>(counters.data);
  context.decode = decode;
  context.sdpa = sdpa;
  context.longest = longest;
  context.reach = reach;
  check(cudaDeviceSynchronize(), "waiting");
  check(cudaStreamCreate(&context.stream), "a stream");
  const float milliseconds = time_on(context.stream, repeats - 1, [&] {
    plugin->enqueue(in, out, workspace.data, context);
  });
  cudaStreamDestroy(context.stream);
  return milliseconds;
}

// Launch `repeats` times and wait; milliseconds per launch after the first.
template <typename Launch>
float timed(Launch&& launch, int repeats, const char* what) {
  return time_on(nullptr, repeats - 1, [&] { check(launch(), what); });
}

// counts [cache rows, vocab], tokens [cache rows, room] and lengths.
kernels::Memory memory_of(const std::vector<Tensor>& t, size_t first, int vocab) {
  return {static_cast<uint32_t*>(t[first].data), static_cast<int32_t*>(t[first + 1].data),
          static_cast<int32_t*>(t[first + 2].data), vocab, static_cast<int>(t[first + 1].shape[1])};
}

std::vector<std::string> texts_of(const std::vector<Port>& ports) {
  std::vector<std::string> texts;
  for (const Port& port : ports) texts.push_back(port.text());
  return texts;
}

}  // namespace

NB_MODULE(_cuda, m) {
  nb::exception<Error>(m, "CudaError");
#ifdef LLMC_TENSORRT
  tensorrt::bind(m.def_submodule("tensorrt"));
#endif

  nb::class_<PluginType>(m, "PluginType")
      .def_ro("name", &PluginType::name)
      .def_ro("version", &PluginType::version)
      .def_prop_ro("inputs", [](const PluginType& type) { return texts_of(type.inputs); })
      .def_prop_ro("outputs", [](const PluginType& type) { return texts_of(type.outputs); })
      .def_ro("fields", &PluginType::fields)
      .def_ro("required", &PluginType::required);
  m.def("plugin_types", [] {
    std::vector<const PluginType*> types;
    for (const auto& [name, type] : plugin_types()) types.push_back(&type);
    return types;
  }, nb::rv_policy::reference);
  m.def("make_plugin", [](const std::string& name, const Fields& fields) { make_plugin(name, fields); });
  // The kernels that choose tokens, on device tensors: see kernels/launch.h.
  m.def("sample", [](const std::vector<Foreign>& tensors, int vocab, int64_t none, bool draws, int repeats) {
    const std::vector<Tensor> t = tensors_of(tensors);
    const kernels::SampleParams p{
        static_cast<int64_t*>(t[0].data), t[1].data, static_cast<float*>(t[2].data),
        static_cast<int32_t*>(t[3].data), static_cast<float*>(t[4].data), static_cast<float*>(t[5].data),
        static_cast<float*>(t[6].data), static_cast<uint64_t*>(t[7].data), static_cast<int64_t*>(t[8].data),
        static_cast<int>(t[1].shape[0]), vocab, static_cast<int>(t[1].shape[1]), none, draws};
    return timed([&] { return kernels::sample(t[1].dtype, p, nullptr); }, repeats, "sample");
  }, nb::arg("tensors"), nb::arg("vocab"), nb::arg("none") = 0, nb::arg("draws") = true, nb::arg("repeats") = 1);
  m.def("process", [](const std::vector<Foreign>& tensors, int vocab, int first_row, int repeats) {
    const std::vector<Tensor> t = tensors_of(tensors);
    const kernels::ProcessParams p{
        static_cast<float*>(t[0].data), t[1].data, static_cast<const kernels::Rule*>(t[2].data),
        static_cast<const int32_t*>(t[3].data), static_cast<const int64_t*>(t[4].data), memory_of(t, 5, vocab),
        static_cast<int>(t[1].shape[0]), vocab, static_cast<int>(t[1].shape[1]),
        static_cast<int>(t[0].shape[1]), first_row};
    return timed([&] { return kernels::process(t[1].dtype, p, nullptr); }, repeats, "process");
  }, nb::arg("tensors"), nb::arg("vocab"), nb::arg("first_row") = 0, nb::arg("repeats") = 1);
  m.def("remember", [](const std::vector<Foreign>& tensors, int vocab, int row, int rows) {
    const kernels::Memory memory = memory_of(tensors_of(tensors), 0, vocab);
    check(kernels::remember(memory, row, rows, nullptr), "remember");
    check(cudaDeviceSynchronize(), "remember");
  });
  m.def("logprobs", [](const std::vector<Foreign>& tensors, int vocab, int max_batch, int repeats) {
    const std::vector<Tensor> t = tensors_of(tensors);
    const kernels::LogprobsParams p{
        static_cast<kernels::Logprobs*>(t[0].data), t[1].data, static_cast<const int64_t*>(t[2].data),
        static_cast<const int32_t*>(t[3].data), static_cast<const int32_t*>(t[4].data),
        static_cast<int>(t[1].shape[0]), vocab, static_cast<int>(t[1].shape[1]), max_batch};
    return timed([&] { return kernels::logprobs(t[1].dtype, p, nullptr); }, repeats, "logprobs");
  }, nb::arg("tensors"), nb::arg("vocab"), nb::arg("max_batch"), nb::arg("repeats") = 1);
  m.attr("logprob_steps") = kernels::kLogprobSteps;
  m.attr("record_bytes") = std::make_pair(sizeof(kernels::Rule), sizeof(kernels::Logprobs));
  // kernels::candidates on device tensors, `repeats` times.
  m.def("candidates", [](const std::vector<Foreign>& tensors, int vocab, int repeats) {
    const std::vector<Tensor> t = tensors_of(tensors);
    const int rows = static_cast<int>(t[2].shape[0]), count = static_cast<int>(t[0].shape[1]);
    DeviceBuffer scratch(kernels::candidates_scratch(rows, vocab, count), "scratch");
    const kernels::CandidatesParams p{
        static_cast<int32_t*>(t[0].data), static_cast<float*>(t[1].data), t[2].data, scratch.data, rows, vocab,
        static_cast<int>(t[2].shape[1]), count};
    for (int i = 0; i < repeats; ++i) check(kernels::candidates(t[2].dtype, p, nullptr), "candidates");
    check(cudaDeviceSynchronize(), "candidates");
  }, nb::arg("tensors"), nb::arg("vocab"), nb::arg("repeats") = 1);
  // kernels::follow on device tensors, in the order of its parameters.
  m.def("follow", [](const std::vector<Foreign>& tensors, int batch, int beam) {
    const std::vector<Tensor> t = tensors_of(tensors);
    auto ints = [&](int i) { return static_cast<int32_t*>(t[i].data); };
    auto longs = [&](int i) { return static_cast<int64_t*>(t[i].data); };
    check(kernels::follow({longs(0), longs(1), ints(2), ints(3), longs(4), ints(5), longs(6), ints(7), ints(8),
                           ints(9), batch, beam, static_cast<int>(t[5].shape[1])}, nullptr), "follow");
    check(cudaDeviceSynchronize(), "follow");
  });
  m.def("run_op", &run_op, nb::arg("name"), nb::arg("fields"), nb::arg("inputs"), nb::arg("outputs"),
        nb::arg("decode") = false, nb::arg("repeats") = 1, nb::arg("longest") = 0, nb::arg("reach") = 0);
  // How many devices there are; where there is no driver, zero and why.
  m.def("devices", [] {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    return std::make_pair(status == cudaSuccess ? count : 0,
                          std::string(status == cudaSuccess ? "" : cudaGetErrorString(status)));
  });

  // What a device is: (major, minor) of its compute capability.
  m.def("compute_capability", [](int device) {
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking a device");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking a device");
    return std::make_pair(major, minor);
  });
  m.attr("version") = LLMC_VERSION;  // of the distribution llmc-cuda
  m.attr("architectures") = LLMC_ARCHITECTURES;  // those that the kernels were compiled for, such as "80 90"

  nb::class_<Engine>(m, "Engine")
      .def("__init__",
           [](Engine* self, int device, const std::string& dtype, int max_batch, int max_tokens,
              int max_logits, int max_seq_len, int mem_max_seq_len, int64_t token_bytes, int64_t logit_bytes) {
             new (self) Engine(device, dtype_of(dtype),
                               {max_batch, max_tokens, max_logits, max_seq_len, mem_max_seq_len}, token_bytes,
                               logit_bytes);
           },
           nb::kw_only(), nb::arg("device"), nb::arg("dtype"), nb::arg("max_batch"), nb::arg("max_tokens"),
           nb::arg("max_logits"), nb::arg("max_seq_len"), nb::arg("mem_max_seq_len") = 0, nb::arg("token_bytes"),
           nb::arg("logit_bytes"))
      .def("add_input", [](Engine& self, const std::string& name, const std::string& dtype) {
        return self.add_input(name, dtype_of(dtype));
      })
      .def("add_weight", [](Engine& self, const std::string& dtype, const Shape& shape) {
        return self.add_weight(dtype_of(dtype), shape);
      })
      .def("add_cache", [](Engine& self, const std::string& dtype, const Shape& row_shape) {
        return self.add_cache(dtype_of(dtype), row_shape);
      })
      .def("add_memory", &Engine::add_memory)
      .def("add_value", [](Engine& self, const std::string& dtype, const Shape& shape, int64_t offset,
                           bool per_logit) {
        return self.add_value(dtype_of(dtype), shape, offset, per_logit);
      })
      .def("add_node", nb::overload_cast<const std::string&, const Fields&, const std::vector<int>&,
                                         const std::vector<int>&, bool>(&Engine::add_node),
           nb::arg("op"), nb::arg("fields"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("of_encoder") = false)
      .def("set_logits", &Engine::set_logits)
      .def("load_weight",
           [](Engine& self, int tensor, Array<uint8_t> data, int64_t offset) {
             nb::gil_scoped_release release;
             self.load_weight(tensor, data.data(), static_cast<int64_t>(data.nbytes()), offset);
           })
      .def("finish", &Engine::finish)
      .def("run",
           [](Engine& self, Array<int64_t> input_ids, Array<int64_t> position_ids,
              Array<int32_t> cu_seqlens, Array<int32_t> past_lens, Array<int64_t> logits_indices,
              Array<int32_t> indirection, int first_row, bool decode) {
             const Step step{static_cast<int>(input_ids.size()), static_cast<int>(logits_indices.size()),
                             static_cast<int>(past_lens.size()), first_row, decode};
             nb::gil_scoped_release release;
             self.run(input_ids.data(), position_ids.data(), cu_seqlens.data(), past_lens.data(),
                      logits_indices.data(), indirection.size() ? indirection.data() : nullptr, step);
           })
      .def("encode",
           [](Engine& self, Array<int64_t> input_ids, Array<int64_t> position_ids, Array<int32_t> cu_seqlens,
              Array<int64_t> memory_rows) {
             nb::gil_scoped_release release;
             self.encode(input_ids.data(), position_ids.data(), cu_seqlens.data(), memory_rows.data(),
                         static_cast<int>(input_ids.size()), static_cast<int>(cu_seqlens.size()) - 1);
           })
      .def("set_memory",
           [](Engine& self, Array<int32_t> starts, Array<int32_t> lens) {
             nb::gil_scoped_release release;
             self.set_memory(starts.data(), lens.data(), static_cast<int>(starts.size()));
           })
      .def("read_logits",
           [](Engine& self, nb::ndarray<float, nb::c_contig, nb::device::cpu> out) {
             nb::gil_scoped_release release;
             self.read_logits(out.data());
           })
      .def("watch", &Engine::watch)
      .def("read_watched",
           [](const Engine& self, int tensor, nb::ndarray<float, nb::c_contig, nb::device::cpu> out) {
             self.read_watched(tensor, out.data());
           })
      .def("begin_decode",
           [](Engine& self, Array<int64_t> tokens, Array<int32_t> past_lens, Array<float> temperature,
              Array<int32_t> top_k, Array<float> top_p, Array<float> min_p, Array<float> typical_p,
              Array<uint64_t> seed, Array<int64_t> drawn, const std::vector<int64_t>& end_ids,
              std::optional<Array<uint8_t>> rules, std::optional<Array<int32_t>> lists,
              std::optional<Array<int32_t>> logprobs, int first_row) {
             Requests requests;
             const size_t batch = past_lens.size();
             if (rules && lists) {
               if (rules->size() != batch * sizeof(kernels::Rule)) throw Error("there is not a rule for each row");
               requests.rules = reinterpret_cast<const kernels::Rule*>(rules->data());
               requests.lists = lists->data();
               requests.list_size = static_cast<int64_t>(lists->size());
             }
             if (logprobs) requests.logprobs = logprobs->data();
             requests.first_row = first_row;
             nb::gil_scoped_release release;
             self.begin_decode(tokens.size() ? tokens.data() : nullptr, past_lens.data(), static_cast<int>(batch),
                               {temperature.data(), top_k.data(), top_p.data(), min_p.data(), typical_p.data(),
                                seed.data(), drawn.data()}, requests, end_ids);
           },
           nb::arg("tokens"), nb::arg("past_lens"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"),
           nb::arg("min_p"), nb::arg("typical_p"), nb::arg("seed"), nb::arg("drawn"), nb::arg("end_ids"),
           nb::arg("rules") = nb::none(), nb::arg("lists") = nb::none(), nb::arg("logprobs") = nb::none(),
           nb::arg("first_row") = 0)
      .def("remember",
           [](Engine& self, int first_row, Array<int32_t> tokens, const std::vector<int32_t>& lengths) {
             nb::gil_scoped_release release;
             self.remember(first_row, tokens.data(), lengths);
           })
      .def("read_logprobs",
           [](Engine& self, int steps, nb::ndarray<uint8_t, nb::c_contig, nb::device::cpu> out) {
             nb::gil_scoped_release release;
             self.read_logprobs(steps, reinterpret_cast<kernels::Logprobs*>(out.data()));
           })
      .def("decode", &Engine::decode, nb::call_guard<nb::gil_scoped_release>())
      .def("history", &Engine::history, nb::call_guard<nb::gil_scoped_release>())
      .def("candidates",
           [](Engine& self, Output<int32_t> tokens, Output<float> log_probs) {
             nb::gil_scoped_release release;
             self.candidates(static_cast<int>(tokens.shape(1)), tokens.data(), log_probs.data());
           })
      .def("follow",
           [](Engine& self, Array<int64_t> tokens, Array<int32_t> parents, Array<int32_t> past,
              Array<int32_t> prompts, Output<int32_t> next_tokens, Output<float> log_probs) {
             const BeamStep step{tokens.data(), parents.data(), past.data(), prompts.data(),
                                 static_cast<int>(tokens.shape(0)), static_cast<int>(tokens.shape(1)),
                                 static_cast<int>(next_tokens.shape(1))};
             nb::gil_scoped_release release;
             self.follow(step, next_tokens.data(), log_probs.data());
           })
      .def("join",
           [](Engine& self, nb::bytes id, int rank, int size) {
             const std::string copy(id.c_str(), id.size());
             nb::gil_scoped_release release;
             self.join(copy, rank, size);
           })
      .def("abort", &Engine::abort, nb::call_guard<nb::gil_scoped_release>())
      .def_static("unique_id",
                  [] {
                    const std::string id = Engine::unique_id();
                    return nb::bytes(id.data(), id.size());
                  })
      .def("copy_row", &Engine::copy_row)
      .def("synchronize", &Engine::synchronize, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("bytes_allocated", &Engine::bytes_allocated);
}
