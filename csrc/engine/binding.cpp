// The Python extension llmc_cuda._cuda.
#include "binding.h"

#include <cstring>

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

// Records, which NumPy passes as bytes.
template <typename T>
HostArray<T> records(const Array<uint8_t>& bytes) {
  if (bytes.size() % sizeof(T) != 0)
    throw Error("the size of an array is not a multiple of its record size");
  return {reinterpret_cast<const T*>(bytes.data()), static_cast<int64_t>(bytes.size() / sizeof(T))};
}

// Parameters of `Engine.submit` and `Program.check_step`, in order.
#define LLMC_STEP                                                                                 \
  Array<int64_t> token_ids, Array<int32_t> cu_seqlens, Array<int32_t> past_lens,                  \
      Array<int32_t> block_tables, Array<int32_t> slots, int num_decode, bool verifies,           \
      Array<int32_t> sample, Array<int32_t> num_drafts, Array<int32_t> copies, int candidates,    \
      int logits, Array<int32_t> memory_starts, Array<int32_t> memory_lens,                       \
      Array<int32_t> mask_rows, Array<uint32_t> masks, Array<int32_t> state_slots,                \
      Array<int32_t> commit_lens, Array<int32_t> state_copies, Array<int32_t> scored_rows,        \
      Array<int64_t> scored_targets, Array<int32_t> scored_counts, Array<int64_t> next_tokens,    \
      int propose, Array<int32_t> unread, Array<int32_t> lora_ids, Array<int64_t> token_type_ids, \
      Array<float> embeds, Array<int32_t> embed_ids, Array<float> deep_embeds,                    \
      Array<int32_t> rotary_positions, Array<int32_t> bidirectional_ranges,                       \
      Array<int32_t> admit_slots, Array<uint8_t> admit_states, Array<int32_t> admit_prompts,      \
      Array<int32_t> admit_lengths, Array<int32_t> admit_tokens, Array<int32_t> admit_lists
#define LLMC_STEP_INPUTS                                                                          \
  StepInputs {                                                                                    \
    host(token_ids), host(cu_seqlens), host(past_lens), host(block_tables), host(slots),          \
        num_decode, verifies, host(sample), host(num_drafts), host(copies), candidates,           \
        static_cast<Logits>(logits), host(memory_starts), host(memory_lens), host(mask_rows),     \
        host(masks), host(state_slots), host(commit_lens), host(state_copies), host(scored_rows), \
        host(scored_targets), host(scored_counts), host(next_tokens), propose, host(unread),      \
        host(lora_ids), host(token_type_ids), host(embeds), host(embed_ids), host(deep_embeds),   \
        host(rotary_positions), host(bidirectional_ranges), {                                     \
      host(admit_slots), records<kernels::SlotState>(admit_states), host(admit_prompts),          \
          host(admit_lengths), host(admit_tokens), host(admit_lists)                              \
    }                                                                                             \
  }

void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program")
      .def(
          "__init__",
          [](Program* self, const std::string& dtype, int max_batch, int max_tokens, int max_logits,
             int max_seq_len, int block_size, int mem_max_seq_len, int max_states,
             bool prompt_lookup, int max_loras, int max_lora_rank, int64_t token_bytes,
             int64_t logit_bytes) {
            Limits limits{max_batch,   max_tokens, max_logits,
                          max_seq_len, block_size, mem_max_seq_len};
            limits.max_states = max_states;
            limits.prompt_lookup = prompt_lookup;
            limits.max_loras = max_loras;
            limits.max_lora_rank = max_lora_rank;
            new (self) Program(dtype_of(dtype), limits, token_bytes, logit_bytes);
          },
          nb::kw_only(), nb::arg("dtype"), nb::arg("max_batch"), nb::arg("max_tokens"),
          nb::arg("max_logits"), nb::arg("max_seq_len"), nb::arg("block_size"),
          nb::arg("mem_max_seq_len") = 0, nb::arg("max_states") = 0,
          nb::arg("prompt_lookup") = false, nb::arg("max_loras") = 0, nb::arg("max_lora_rank") = 0,
          nb::arg("token_bytes"), nb::arg("logit_bytes"))
      .def("add_input",
           [](Program& self, const std::string& name, const std::string& dtype) {
             return self.add_input(name, dtype_of(dtype));
           })
      .def("add_weight", [](Program& self, const std::string& dtype,
                            const Shape& shape) { return self.add_weight(dtype_of(dtype), shape); })
      .def("add_cache",
           [](Program& self, const std::string& dtype, int64_t num_kv_heads, int64_t head_dim) {
             return self.add_cache(dtype_of(dtype), num_kv_heads, head_dim);
           })
      .def("add_state", [](Program& self, const std::string& dtype,
                           const Shape& shape) { return self.add_state(dtype_of(dtype), shape); })
      .def("add_memory", &Program::add_memory)
      .def("add_embeds", &Program::add_embeds)
      .def("add_features", &Program::add_features)
      .def("add_array",
           [](Program& self, const std::string& name, const std::string& dtype,
              const Shape& shape) { return self.add_array(name, dtype_of(dtype), shape); })
      .def("set_outputs", &Program::set_outputs)
      .def("add_adapters",
           [](Program& self, const std::string& dtype, const Shape& shape) {
             return self.add_adapters(dtype_of(dtype), shape);
           })
      .def(
          "add_value",
          [](Program& self, const std::string& dtype, const Shape& shape, int64_t offset,
             bool per_logit, bool of_draft) {
            return self.add_value(dtype_of(dtype), shape, offset, per_logit, of_draft);
          },
          nb::arg("dtype"), nb::arg("shape"), nb::arg("offset"), nb::arg("per_logit"),
          nb::arg("of_draft") = false)
      .def("add_columns", &Program::add_columns)
      .def("set_draft_arena", &Program::set_draft_arena)
      .def(
          "add_node",
          [](Program& self, const std::string& op, const Fields& fields, const Numbers& inputs,
             const Numbers& outputs, const std::string& part) {
            self.add_node(op, fields, inputs, outputs, part_of(part));
          },
          nb::arg("op"), nb::arg("fields"), nb::arg("inputs"), nb::arg("outputs"),
          nb::arg("part") = "model")
      .def(
          "set_draft",
          [](Program& self, int logits, int vocab_size, int features, int hidden, int hidden_out,
             int token_ids, bool at_one_position, int block, int64_t mask) {
            self.set_draft({logits, vocab_size, features, hidden, hidden_out, token_ids,
                            at_one_position, block, mask});
          },
          nb::kw_only(), nb::arg("logits"), nb::arg("vocab_size"), nb::arg("features"),
          nb::arg("hidden"), nb::arg("hidden_out"), nb::arg("token_ids"),
          nb::arg("at_one_position") = false, nb::arg("block") = 0, nb::arg("mask") = 0)
      .def("set_logits", &Program::set_logits)
      .def("set_pooled", &Program::set_pooled)
      .def_prop_ro("block_bytes", &Program::block_bytes)
      // Raises unless an engine with these limits, this number of blocks and empty slots accepts
      // the step, with the checks of `Engine.submit` and `encode`. Returns the length of the shared
      // prefix, and the first position that each sequence attends to by itself.
      .def("check_step",
           [](const Program& self, int num_blocks, LLMC_STEP) {
             Limits limits = self.limits();
             limits.num_blocks = num_blocks;
             const StepInputs inputs = LLMC_STEP_INPUTS;
             check_step(inputs, limits, self.vocab_size(),
                        std::vector<SlotRecord>(limits.max_batch));
             const Prefix prefix = shared_prefix(inputs, limits.block_size);
             return std::pair(prefix.length, prefix.own_from);
           })
      .def("check_encode",
           [](const Program& self, Array<int64_t> input_ids, Array<uint8_t> features,
              Array<int64_t> position_ids, Array<int32_t> cu_seqlens, Array<int64_t> memory_rows) {
             check_step(EncoderInputs{host(input_ids), host(features), host(position_ids),
                                      host(cu_seqlens), host(memory_rows)},
                        self.limits());
           });
  // The rows of a draft model for a step that `Program.check_step` accepts: see DraftRows.
  m.def("draft_rows", [](LLMC_STEP) {
    const DraftRows rows = DraftRows::of(LLMC_STEP_INPUTS);
    return nb::make_tuple(rows.ids, rows.sampled, rows.firsts, rows.slots, rows.tables);
  });
}

// The results of a step, copied: tokens, log-probability records or None, candidates' tokens and
// log-probabilities, logits or pooled rows as float32 [num_logits, vocab_size], records of scored
// rows or None, with drafts the number of tokens of each sequence, else None, the proposals of the
// draft model or of prompt lookup, else None, and the tokens that match of the latter, else None.
nb::tuple to_python(const Engine::Results& results, int vocab_size) {
  // Rows of the accepted tokens, in the order of sequences; all without drafts.
  std::vector<int32_t> kept, all_rows;
  nb::object counts = nb::none();
  for (int i = 0; i < results.num_sequences; ++i)
    for (int k = 0; k < results.positions; ++k) {
      const int32_t row = results.row_of[i * results.positions + k];
      if (row >= 0) all_rows.push_back(row);
      if (k < results.counts[i]) kept.push_back(row);
    }
  auto copy = [](const auto* data, std::initializer_list<size_t> shape) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    size_t count = 1;
    for (size_t dim : shape) count *= dim;
    T* made = new T[std::max<size_t>(count, 1)];
    if (count > 0) std::memcpy(made, data, count * sizeof(T));
    nb::capsule owner(made, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T>(made, shape, owner);
  };
  auto pick = [&](const auto* data) {
    std::vector<std::remove_const_t<std::remove_pointer_t<decltype(data)>>> made;
    if (results.counts == nullptr) made.assign(data, data + results.num_sampled);
    else
      for (int32_t row : kept) made.push_back(data[row]);
    return made;
  };
  const auto rows = static_cast<size_t>(results.num_sampled),
             count = static_cast<size_t>(results.candidates);
  nb::object reported = nb::none(), tokens = nb::none(), log_probs = nb::none(),
             logits = nb::none(), scored = nb::none();
  if (results.logprobs != nullptr) {
    const auto records = pick(results.logprobs);
    reported = nb::cast(copy(reinterpret_cast<const uint8_t*>(records.data()),
                             {records.size() * sizeof(kernels::Logprobs)}));
  }
  if (results.counts != nullptr)
    counts = nb::cast(copy(results.counts, {static_cast<size_t>(results.num_sequences)}));
  if (results.scored != nullptr)
    scored = nb::cast(copy(reinterpret_cast<const uint8_t*>(results.scored),
                           {static_cast<size_t>(results.num_scored) * sizeof(kernels::Logprobs)}));
  if (count > 0) {
    tokens = nb::cast(copy(results.candidate_tokens, {rows, count}));
    log_probs = nb::cast(copy(results.candidate_log_probs, {rows, count}));
  }
  if (results.logits != nullptr) {
    const auto all = static_cast<size_t>(results.num_logits),
               vocab = static_cast<size_t>(vocab_size);
    float* made = new float[all * vocab];
    nb::capsule owner(made, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    const char* from = static_cast<const char*>(results.logits);
    for (size_t row = 0; row < all; ++row) {
      const size_t source = all_rows.empty() ? row : all_rows[row];
      to_float(made + row * vocab, from + source * results.logits_width * width(results.dtype),
               vocab_size, results.dtype);
    }
    logits = nb::cast(nb::ndarray<nb::numpy, float>(made, {all, vocab}, owner));
  }
  nb::object drafts = nb::none(), matches = nb::none();
  if (results.drafts != nullptr) {
    std::vector<int64_t> proposed;
    for (int i = 0; i < results.num_drafting; ++i) {
      const int64_t* own = results.drafts + i * kernels::kMaxProposals;
      proposed.insert(proposed.end(), own, own + results.proposed);
    }
    drafts = nb::cast(copy(proposed.data(), {static_cast<size_t>(results.num_drafting),
                                             static_cast<size_t>(results.proposed)}));
  }
  if (results.matches != nullptr)
    matches = nb::cast(copy(results.matches, {static_cast<size_t>(results.num_drafting)}));
  const auto sampled = pick(results.tokens);
  return nb::make_tuple(copy(sampled.data(), {sampled.size()}), reported, tokens, log_probs, logits,
                        scored, counts, drafts, matches);
}

void bind_engine(nb::module_& m) {
  nb::class_<Engine>(m, "Engine")
      // Takes the program, which is empty afterwards.
      .def(
          "__init__",
          [](Engine* self, Program& program, int device, const std::string& attention_backend) {
            new (self) Engine(std::move(program), device, attention_backend);
          },
          nb::arg("program"), nb::arg("device"), nb::arg("attention_backend"))
      // The reason why the attention backend does not support this dtype and cache dtype; "" if it
      // does.
      .def("attention_refusal",
           [](const Engine& self, const std::string& dtype, const std::string& cache) {
             return self.attention().refusal(dtype_of(dtype), dtype_of(cache));
           })
      .def("load_weight",
           [](Engine& self, int tensor, Array<uint8_t> data) {
             nb::gil_scoped_release release;
             self.load_weight(tensor, data.data(), static_cast<int64_t>(data.nbytes()));
           })
      .def("load_adapter",
           [](Engine& self, int slot, Array<int32_t> ranks, Array<uint8_t> data) {
             nb::gil_scoped_release release;
             self.load_adapter(slot, host(ranks), host(data));
           })
      .def("bytes_of", &Engine::bytes_of)
      .def_prop_ro("block_bytes", [](const Engine& self) { return self.program().block_bytes(); })
      .def("measure", &Engine::measure)
      .def("allocate", &Engine::allocate, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("graph_sizes", &Engine::graph_sizes)
      .def("warm", &Engine::warm, nb::call_guard<nb::gil_scoped_release>())
      // Pairs of shape and algorithm.
      .def("algorithms",
           [](const Engine& self) {
             std::vector<std::pair<std::vector<int64_t>, std::vector<uint64_t>>> all;
             for (const auto& [shape, data] : self.algorithms()) all.emplace_back(shape, data);
             return all;
           })
      .def("know",
           [](Engine& self,
              const std::vector<std::pair<std::vector<int64_t>, std::vector<uint64_t>>>& all) {
             self.know({all.begin(), all.end()});
           })
      .def("submit",
           [](Engine& self, LLMC_STEP) {
             const StepInputs inputs = LLMC_STEP_INPUTS;
             nb::gil_scoped_release release;
             return self.submit(inputs);
           })
      .def("collect",
           [](Engine& self, int64_t ticket) {
             {
               nb::gil_scoped_release release;
               self.wait(ticket);
             }
             nb::tuple made = to_python(self.wait(ticket), self.program().vocab_size());
             self.release(ticket);
             return made;
           })
      .def("encode",
           [](Engine& self, Array<int64_t> input_ids, Array<uint8_t> features,
              Array<int64_t> position_ids, Array<int32_t> cu_seqlens, Array<int64_t> memory_rows) {
             nb::gil_scoped_release release;
             self.encode({host(input_ids), host(features), host(position_ids), host(cu_seqlens),
                          host(memory_rows)});
           })
      .def("encode_image",
           [](Engine& self, const std::vector<Array<uint8_t>>& arrays, int num_tokens, int num_rows,
              int batch) {
             std::vector<HostArray<uint8_t>> given;
             for (const Array<uint8_t>& array : arrays) given.push_back(host(array));
             nb::gil_scoped_release release;
             self.encode_image(given, num_tokens, num_rows, batch);
           })
      .def("watch", &Engine::watch)
      .def("read_watched",
           [](const Engine& self, int tensor, Output<float> out) {
             self.read_watched(tensor, out.data(), static_cast<int64_t>(out.size()));
           })
      .def("join",
           [](Engine& self, nb::bytes id, int rank, int size, const std::string& collectives) {
             const std::string copy(id.c_str(), id.size());
             nb::gil_scoped_release release;
             self.join(copy, rank, size, collectives);
           })
      .def("abort", &Engine::abort, nb::call_guard<nb::gil_scoped_release>())
      .def_static("unique_id",
                  [] {
                    const std::string id = Engine::unique_id();
                    return nb::bytes(id.data(), id.size());
                  })
      .def("check", &Engine::check_device)
      .def("synchronize", &Engine::synchronize, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("bytes_allocated", &Engine::bytes_allocated);
}

}  // namespace

NB_MODULE(_cuda, m) {
  nb::exception<Error>(m, "CudaError");
  bind_kernels(m);
  bind_peers(m);
  bind_program(m);
  bind_engine(m);
#ifdef LLMC_TENSORRT
  tensorrt::bind(m.def_submodule("tensorrt"));
#endif
  m.def("attention_backends", &attention_backends);
  // Number of devices; without a driver 0 and the reason.
  m.def("devices", [] {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    return std::make_pair(status == cudaSuccess ? count : 0,
                          std::string(status == cudaSuccess ? "" : cudaGetErrorString(status)));
  });
  // (major, minor) of a device's compute capability.
  m.def("compute_capability", [](int device) {
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
          "querying a device");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
          "querying a device");
    return std::make_pair(major, minor);
  });
  // What timed choices depend on besides the model: the device's name, cuBLASLt's version and the
  // kernels.
  m.def("timed_on", [](int device) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "querying a device");
    return std::string(properties.name) + ", cuBLASLt " + std::to_string(Gemm::version()) +
           ", kernels " + LLMC_KERNELS;
  });
  m.attr("version") = LLMC_VERSION;              // of the distribution llmc-cuda
  m.attr("architectures") = LLMC_ARCHITECTURES;  // for which kernels were compiled, such as "80 90"
}
