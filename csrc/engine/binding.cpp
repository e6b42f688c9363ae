// Python's view: llmc_cuda._cuda.
#include "binding.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "engine.h"

namespace nb = nanobind;
using namespace llmc;

namespace {

template <typename T>
using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;
template <typename T>
using Output = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
using Numbers = std::vector<int>;

template <typename T>
HostArray<T> host(const Array<T>& array) {
  return {array.data(), static_cast<int64_t>(array.size())};
}

StepInputs step_inputs(const Array<int64_t>& input_ids, const Array<int64_t>& position_ids,
                       const Array<int32_t>& cu_seqlens, const Array<int32_t>& past_lens,
                       const Array<int64_t>& logits_indices, const Array<int32_t>& indirection, int first_row,
                       bool decode) {
  return {host(input_ids),      host(position_ids), host(cu_seqlens), host(past_lens),
          host(logits_indices), host(indirection),  first_row,        decode};
}

// tokens [batch, beam], and candidates [batch * beam, count] of each array.
BeamStep beam_step(const Array<int64_t>& tokens, const Array<int32_t>& parents, const Array<int32_t>& past,
                   const Array<int32_t>& prompts, int64_t count) {
  if (tokens.ndim() != 2) throw Error("the tokens of beams are not [batch, beam]");
  return {host(tokens), host(parents), host(past), host(prompts), static_cast<int>(tokens.shape(0)),
          static_cast<int>(tokens.shape(1)), static_cast<int>(count)};
}

// How many candidates of each of `rows` there is room for.
int64_t room_for(const Output<int32_t>& tokens, const Output<float>& log_probs, int64_t rows) {
  if (tokens.ndim() != 2 || log_probs.ndim() != 2 || tokens.size() != log_probs.size() ||
      static_cast<int64_t>(tokens.shape(0)) != rows || tokens.shape(1) != log_probs.shape(1) ||
      tokens.shape(1) > INT32_MAX)
    throw Error("candidates of " + std::to_string(rows) + " rows are not in two arrays [rows, count]");
  return static_cast<int64_t>(tokens.shape(1));
}

void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program")
      .def("__init__",
           [](Program* self, const std::string& dtype, int max_batch, int max_tokens, int max_logits,
              int max_seq_len, int mem_max_seq_len, int64_t token_bytes, int64_t logit_bytes) {
             new (self) Program(dtype_of(dtype), {max_batch, max_tokens, max_logits, max_seq_len, mem_max_seq_len},
                                token_bytes, logit_bytes);
           },
           nb::kw_only(), nb::arg("dtype"), nb::arg("max_batch"), nb::arg("max_tokens"), nb::arg("max_logits"),
           nb::arg("max_seq_len"), nb::arg("mem_max_seq_len") = 0, nb::arg("token_bytes"), nb::arg("logit_bytes"))
      .def("add_input", [](Program& self, const std::string& name, const std::string& dtype) {
        return self.add_input(name, dtype_of(dtype));
      })
      .def("add_weight", [](Program& self, const std::string& dtype, const Shape& shape) {
        return self.add_weight(dtype_of(dtype), shape);
      })
      .def("add_cache", [](Program& self, const std::string& dtype, const Shape& row_shape) {
        return self.add_cache(dtype_of(dtype), row_shape);
      })
      .def("add_memory", &Program::add_memory)
      .def("add_value", [](Program& self, const std::string& dtype, const Shape& shape, int64_t offset,
                           bool per_logit) {
        return self.add_value(dtype_of(dtype), shape, offset, per_logit);
      })
      .def("add_node", nb::overload_cast<const std::string&, const Fields&, const Numbers&, const Numbers&, bool>(
                           &Program::add_node),
           nb::arg("op"), nb::arg("fields"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("of_encoder") = false)
      .def("set_logits", &Program::set_logits)
      // Whether an engine with these limits would take a step, as `Engine.run`, `encode`, `set_memory` and `follow`
      // check it; raises where it would not.
      .def("check_run",
           [](const Program& self, Array<int64_t> input_ids, Array<int64_t> position_ids, Array<int32_t> cu_seqlens,
              Array<int32_t> past_lens, Array<int64_t> logits_indices, Array<int32_t> indirection, int first_row,
              bool decode) {
             check_step(step_inputs(input_ids, position_ids, cu_seqlens, past_lens, logits_indices, indirection,
                                    first_row, decode), self.limits());
           })
      .def("check_encode",
           [](const Program& self, Array<int64_t> input_ids, Array<int64_t> position_ids, Array<int32_t> cu_seqlens,
              Array<int64_t> memory_rows) {
             check_step(EncoderInputs{host(input_ids), host(position_ids), host(cu_seqlens), host(memory_rows)},
                        self.limits());
           })
      .def("check_memory", [](const Program& self, Array<int32_t> starts, Array<int32_t> lens) {
        check_memory(host(starts), host(lens), self.limits());
      })
      .def("check_follow",
           [](const Program& self, Array<int64_t> tokens, Array<int32_t> parents, Array<int32_t> past,
              Array<int32_t> prompts) { check_step(beam_step(tokens, parents, past, prompts, 1), self.limits()); });
}

void bind_engine(nb::module_& m) {
  nb::class_<Engine>(m, "Engine")
      // Takes the program, which is empty afterwards.
      .def("__init__",
           [](Engine* self, Program& program, int device) { new (self) Engine(std::move(program), device); },
           nb::arg("program"), nb::arg("device"))
      .def("load_weight",
           [](Engine& self, int tensor, Array<uint8_t> data) {
             nb::gil_scoped_release release;
             self.load_weight(tensor, data.data(), static_cast<int64_t>(data.nbytes()));
           })
      .def("bytes_of", &Engine::bytes_of)
      .def("run",
           [](Engine& self, Array<int64_t> input_ids, Array<int64_t> position_ids,
              Array<int32_t> cu_seqlens, Array<int32_t> past_lens, Array<int64_t> logits_indices,
              Array<int32_t> indirection, int first_row, bool decode) {
             nb::gil_scoped_release release;
             self.run(step_inputs(input_ids, position_ids, cu_seqlens, past_lens, logits_indices, indirection,
                                  first_row, decode));
           })
      .def("encode",
           [](Engine& self, Array<int64_t> input_ids, Array<int64_t> position_ids, Array<int32_t> cu_seqlens,
              Array<int64_t> memory_rows) {
             nb::gil_scoped_release release;
             self.encode({host(input_ids), host(position_ids), host(cu_seqlens), host(memory_rows)});
           })
      .def("set_memory",
           [](Engine& self, Array<int32_t> starts, Array<int32_t> lens) {
             nb::gil_scoped_release release;
             self.set_memory(host(starts), host(lens));
           })
      .def("read_logits",
           [](Engine& self, Output<float> out) {
             nb::gil_scoped_release release;
             self.read_logits(out.data(), static_cast<int64_t>(out.size()));
           })
      .def("watch", &Engine::watch)
      .def("read_watched",
           [](const Engine& self, int tensor, Output<float> out) {
             self.read_watched(tensor, out.data(), static_cast<int64_t>(out.size()));
           })
      .def("begin_decode",
           [](Engine& self, Array<int64_t> tokens, Array<int32_t> past_lens, Array<float> temperature,
              Array<int32_t> top_k, Array<float> top_p, Array<float> min_p, Array<float> typical_p,
              Array<uint64_t> seed, Array<int64_t> drawn, const std::vector<int64_t>& end_ids,
              std::optional<Array<uint8_t>> processing, std::optional<Array<int32_t>> lists,
              std::optional<Array<int32_t>> logprobs, int first_row) {
             Requests requests;
             if (processing.has_value() != lists.has_value()) throw Error("processing and its lists come together");
             if (processing) {
               constexpr int64_t kBytes = sizeof(kernels::Processing);
               check_size("processing", static_cast<int64_t>(processing->size()), past_lens.size() * kBytes);
               requests.processing = {reinterpret_cast<const kernels::Processing*>(processing->data()),
                                 static_cast<int64_t>(past_lens.size())};
               requests.lists = host(*lists);
             }
             if (logprobs) requests.logprobs = host(*logprobs);
             nb::gil_scoped_release release;
             self.begin_decode(host(tokens), host(past_lens),
                               {host(temperature), host(top_k), host(top_p), host(min_p), host(typical_p),
                                host(seed), host(drawn)}, requests, end_ids, first_row);
           },
           nb::arg("tokens"), nb::arg("past_lens"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"),
           nb::arg("min_p"), nb::arg("typical_p"), nb::arg("seed"), nb::arg("drawn"), nb::arg("end_ids"),
           nb::arg("processing") = nb::none(), nb::arg("lists") = nb::none(), nb::arg("logprobs") = nb::none(),
           nb::arg("first_row") = 0)
      .def("decode", &Engine::decode, nb::call_guard<nb::gil_scoped_release>())
      .def("tokens", &Engine::tokens, nb::call_guard<nb::gil_scoped_release>())
      .def("read_logprobs",
           [](Engine& self, int steps, Output<uint8_t> out) {
             constexpr size_t kBytes = sizeof(kernels::Logprobs);
             if (out.size() % kBytes != 0) throw Error("an array is not of whole records of log-probabilities");
             nb::gil_scoped_release release;
             self.read_logprobs(steps, reinterpret_cast<kernels::Logprobs*>(out.data()),
                                static_cast<int64_t>(out.size() / kBytes));
           })
      .def("set_history",
           [](Engine& self, int first_row, Array<int32_t> tokens, const std::vector<int32_t>& lengths) {
             nb::gil_scoped_release release;
             self.set_history(first_row, host(tokens), lengths);
           })
      .def("candidates",
           [](Engine& self, Output<int32_t> tokens, Output<float> log_probs) {
             const int64_t rows = tokens.ndim() == 2 ? static_cast<int64_t>(tokens.shape(0)) : 0;
             const int64_t count = room_for(tokens, log_probs, rows);
             nb::gil_scoped_release release;
             self.candidates(static_cast<int>(rows), static_cast<int>(count), tokens.data(), log_probs.data());
           })
      .def("follow",
           [](Engine& self, Array<int64_t> tokens, Array<int32_t> parents, Array<int32_t> past,
              Array<int32_t> prompts, Output<int32_t> next_tokens, Output<float> log_probs) {
             const BeamStep step = beam_step(tokens, parents, past, prompts,
                                             room_for(next_tokens, log_probs, static_cast<int64_t>(tokens.size())));
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

}  // namespace

NB_MODULE(_cuda, m) {
  nb::exception<Error>(m, "CudaError");
  bind_kernels(m);
  bind_program(m);
  bind_engine(m);
#ifdef LLMC_TENSORRT
  tensorrt::bind(m.def_submodule("tensorrt"));
#endif
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
}
