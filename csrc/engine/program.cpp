#include "program.h"

#include <algorithm>

#include "../kernels/attention/params.h"
#include "../kernels/sampling/drafts.h"
#include "builtin.h"

namespace llmc {
namespace {

struct InputType {
  DType dtype;
  Size size;
  bool of_model, of_encoder;  // whether these nodes may read it
};

const std::map<std::string, InputType>& input_types() {
  static const std::map<std::string, InputType> types = {
      {"input_ids", {DType::kInt64, kNumTokens, true, true}},
      {"position_ids", {DType::kInt64, kNumTokens, true, true}},
      {kTokenTypeIds, {DType::kInt64, kNumTokens, true, false}},
      {"cu_seqlens", {DType::kInt32, kBatchPlus1, true, true}},
      {"past_lens", {DType::kInt32, kBatch, true, false}},
      {"logits_indices", {DType::kInt64, kNumLogits, true, false}},
      {kBlockTable, {DType::kInt32, kBatch, true, false}},
      {kStateSlots, {DType::kInt32, kBatch, true, false}},
      {kCommitLens, {DType::kInt32, kBatch, true, false}},
      {kMemoryStarts, {DType::kInt32, kBatch, true, false}},
      {kMemoryLens, {DType::kInt32, kBatch, true, false}},
      {kMemoryRows, {DType::kInt64, kNumTokens, false, true}},
      {kLoraIds, {DType::kInt32, kNumTokens, true, false}},
      {kEmbedIds, {DType::kInt32, kNumTokens, true, false}},
      {kRotaryPositions, {DType::kInt32, kNumTokens, true, false}},
      {kBidirectionalRanges, {DType::kInt32, kNumTokens, true, false}},
      {kLoraLogitsIds, {DType::kInt32, kNumLogits, true, false}}};
  return types;
}

// The step input that an op's port takes. Kernels rely on the checks of step inputs, so no other
// tensor may be bound; an Embedding may also look up position_ids and token_type_ids, and a layer
// of rows of logits takes their adapters.
std::string step_input(const std::string& port) {
  return port == "key_starts" ? kMemoryStarts : port == "key_lens" ? kMemoryLens : port;
}
bool is_embeds(const std::string& input) {
  return input == kEmbeds || input.rfind(kDeepEmbeds, 0) == 0;
}
bool serves(const std::string& port, const std::string& input) {
  return (port == kEmbeds && is_embeds(input)) || input == step_input(port) ||
         (port == kLoraIds && input == kLoraLogitsIds) ||
         (port == "input_ids" && (input == "position_ids" || input == kTokenTypeIds));
}

// Whether the port takes a step input.
bool is_of_step(const Port& port) {
  return port.name == kEmbeds || input_types().count(step_input(port.name)) > 0;
}

// Whether a draft model may read the input: it has no recurrent states, encoder, adapters,
// embeddings as prompts or positions by axis.
bool is_of_draft(const std::string& input) {
  return input != kStateSlots && input != kMemoryStarts && input != kMemoryLens &&
         input != kLoraIds && input != kLoraLogitsIds && input != kTokenTypeIds &&
         input != kEmbedIds && input != kRotaryPositions && input != kBidirectionalRanges &&
         !is_embeds(input);
}

// The name of an image encoder's input without its number.
std::string role_of(const std::string& array) { return array.substr(0, array.find('.')); }

// Whether the port takes what Program::add_adapters() declares. Names of an op with several
// layers' begin with the layer's.
bool takes_adapters(const std::string& port) {
  const size_t at = port.rfind("lora_");
  if (at == std::string::npos) return false;
  const std::string name = port.substr(at);
  return name == "lora_down" || name == "lora_up" || name == "lora_ranks";
}

bool is_among(DType dtype, const std::vector<DType>& allowed) {
  return std::find(allowed.begin(), allowed.end(), dtype) != allowed.end();
}

// Sizes that no tensor of a model has: a dimension that equals such a size in both steps is
// symbolic.
constexpr Step kProbes[] = {{1000003, 1000033, 1000037}, {2000003, 2000029, 2000039}};

// Number of elements of a shape. Throws Error unless all dimensions are positive and the size is
// possible.
int64_t count_of(const Shape& shape) {
  constexpr int64_t kMost = int64_t{1} << 48;
  int64_t count = 1;
  for (int64_t dim : shape)
    if (dim < 1 || __builtin_mul_overflow(count, dim, &count) || count > kMost)
      throw Error("a tensor's dimension " + std::to_string(dim) + " is out of range");
  return count;
}

Dims dims_of(const Tensor& tensor) {
  Dims dims;
  for (int64_t dim : tensor.shape) dims.push_back(dim);
  return dims;
}

void check_arena_bytes(int64_t token_bytes, int64_t logit_bytes) {
  for (int64_t bytes : {token_bytes, logit_bytes})
    if (bytes < 0 || bytes > int64_t{1} << 32)
      throw Error(std::to_string(bytes) +
                  " bytes are not a valid token_bytes or logit_bytes of the arena");
}

}  // namespace

Part part_of(const std::string& name) {
  static const std::map<std::string, Part> parts = {
      {"model", Part::kModel}, {"encoder", Part::kEncoder}, {"draft", Part::kDraft}};
  const auto found = parts.find(name);
  if (found != parts.end()) return found->second;
  for (int layer = 1; layer < kMaxDraftLayers; ++layer)
    if (name == "draft_" + std::to_string(layer)) return draft_part(layer);
  throw Error("there is no part '" + name + "' of a program; expected model, encoder, draft, or " +
              "draft_1 to draft_" + std::to_string(kMaxDraftLayers - 1));
}

std::vector<Part> Program::parts() const {
  std::vector<Part> found;
  for (size_t i = 0; i < nodes_.size(); ++i)
    if (!nodes_[i].empty()) found.push_back(static_cast<Part>(i));
  return found;
}

Program::Program(DType dtype, Limits limits, int64_t token_bytes, int64_t logit_bytes)
    : dtype_(dtype), limits_(limits), token_bytes_{token_bytes, 0}, logit_bytes_{logit_bytes, 0} {
  limits.check();
  if (limits.prompt_lookup) limits_.max_proposals = kernels::kMaxProposals;
  if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBFloat16)
    throw Error(std::string("the engine does not compute in ") + name_of(dtype));
  check_arena_bytes(token_bytes, logit_bytes);
}

void Program::set_draft_arena(int64_t token_bytes, int64_t logit_bytes) {
  check_arena_bytes(token_bytes, logit_bytes);
  if (std::any_of(tensors_.begin(), tensors_.end(),
                  [](const Declared& tensor) { return tensor.of_draft; }))
    throw Error("the draft model's values are already declared in its arena");
  token_bytes_[true] = token_bytes, logit_bytes_[true] = logit_bytes;
}

int Program::declare(Declared tensor) {
  tensors_.push_back(std::move(tensor));
  return static_cast<int>(tensors_.size()) - 1;
}

int Program::add_input(const std::string& name, DType dtype) {
  const auto found = input_types().find(name);
  if (found == input_types().end()) throw Error("unknown engine input '" + name + "'");
  if (found->second.dtype != dtype)
    throw Error("the engine's input " + name + " is of " + name_of(found->second.dtype) + ", not " +
                name_of(dtype));
  if (inputs_.count(name)) throw Error("the engine's input " + name + " is declared twice");
  Shape shape{found->second.size};
  if (name == kBlockTable) shape.push_back(limits_.max_blocks());
  if (name == kRotaryPositions) shape.push_back(kernels::kRotaryAxes), limits_.has_axes = true;
  if (name == kBidirectionalRanges) shape.push_back(2), limits_.has_ranges = true;
  return inputs_[name] = declare({Kind::kInput, dtype, shape, name});
}

int Program::add_embeds(const std::string& name, int64_t row_width) {
  if (inputs_.count(name)) throw Error("the engine's input " + name + " is declared twice");
  int number = -1;  // of deep rows
  for (int i = 0; i < kMaxDeepEmbeds && name != kEmbeds && number < 0; ++i)
    if (name == kDeepEmbeds + std::to_string(i)) number = i;
  if (name != kEmbeds && number < 0) throw Error("unknown input of embeddings '" + name + "'");
  count_of({limits_.max_tokens, row_width});
  if (limits_.embeds_width != 0 && limits_.embeds_width != row_width)
    throw Error("the engine's input " + name + " has rows of " + std::to_string(row_width) +
                " numbers, others of " + std::to_string(limits_.embeds_width));
  limits_.embeds_width = row_width;
  limits_.num_deep_embeds = std::max(limits_.num_deep_embeds, number + 1);
  return inputs_[name] = declare({Kind::kInput, dtype_, {kNumTokens, row_width}, name});
}

int Program::add_features(int64_t row_width) {
  if (limits_.mem_max_seq_len == 0)
    throw Error("the model has no encoder, so it cannot have the input input_features");
  if (inputs_.count(kFeatures)) throw Error("the engine's input input_features is declared twice");
  limits_.features_bytes = count_of({limits_.max_tokens, row_width}) / limits_.max_tokens *
                           static_cast<int64_t>(width(dtype_));
  return inputs_[kFeatures] = declare({Kind::kInput, dtype_, {kNumTokens, row_width}, kFeatures});
}

int Program::add_array(const std::string& name, DType dtype, const Shape& shape) {
  struct Array {
    DType dtype;
    Size rows;
    size_t axes;
  };
  const std::map<std::string, Array> known = {{"patches", {dtype_, kNumTokens, 2}},
                                              {"position_rows", {dtype_, kNumTokens, 2}},
                                              {"cos", {DType::kFloat32, kNumTokens, 2}},
                                              {"sin", {DType::kFloat32, kNumTokens, 2}},
                                              {"cu_seqlens", {DType::kInt32, kBatchPlus1, 1}},
                                              {"merged_rows", {DType::kInt64, kNumLogits, 1}}};
  const auto found = known.find(role_of(name));
  if (found == known.end()) throw Error("unknown input of an image encoder '" + name + "'");
  if (inputs_.count(name)) throw Error("the engine's input " + name + " is declared twice");
  const Array& array = found->second;
  if (dtype != array.dtype || shape.size() != array.axes || shape[0] != array.rows)
    throw Error("the image encoder's input " + name + " is of " + name_of(dtype) + " and has " +
                std::to_string(shape.size()) + " axes, expected " + name_of(array.dtype) + " and " +
                std::to_string(array.axes));
  if (array.axes == 2) count_of({limits_.max_tokens, shape[1]});
  Declared declared{Kind::kInput, dtype, shape, name};
  declared.is_array = true;
  arrays_.push_back(declare(std::move(declared)));
  return inputs_[name] = arrays_.back();
}

int Program::add_weight(DType dtype, const Shape& shape) {
  count_of(shape);
  return declare({Kind::kWeight, dtype, shape});
}

int Program::add_cache(DType dtype, int64_t num_kv_heads, int64_t head_dim) {
  if (dtype != dtype_ && dtype != DType::kFloat8)
    throw Error(std::string("a cache of ") + name_of(dtype) + ", expected " + name_of(dtype_) +
                " or " + name_of(DType::kFloat8));
  const Shape block{num_kv_heads, limits_.block_size, head_dim};
  if (count_of(block) * width(dtype) % 16 != 0)
    throw Error("a block of " + std::to_string(count_of(block) * width(dtype)) +
                " bytes is not a multiple of 16 bytes");
  return declare({Kind::kCache, dtype, {kNumBlocks, num_kv_heads, limits_.block_size, head_dim}});
}

int Program::add_state(DType dtype, const Shape& shape) {
  if (dtype != DType::kFloat32)
    throw Error(std::string("a state of ") + name_of(dtype) + ", expected float32");
  count_of(shape);
  limits_.num_states = limits_.max_states > 0 ? limits_.max_states : limits_.max_batch;
  Shape all{kNumStates};
  all.insert(all.end(), shape.begin(), shape.end());
  return declare({Kind::kState, DType::kFloat32, all});
}

int Program::add_memory(int64_t row_width) {
  if (limits_.mem_max_seq_len == 0)
    throw Error("the model has no encoder, so it cannot have encoder output");
  const Shape shape{limits_.memory_rows(), row_width};
  count_of(shape);
  return declare({Kind::kMemory, dtype_, shape});
}

int Program::add_adapters(DType dtype, const Shape& shape) {
  if (limits_.max_loras == 0 || limits_.max_lora_rank == 0)
    throw Error("the engine has no slots for adapters");
  Shape sizes;
  for (int64_t dim : shape)
    sizes.push_back(dim == kMaxLoras      ? limits_.max_loras
                    : dim == kMaxLoraRank ? limits_.max_lora_rank
                                          : dim);
  count_of(sizes);
  const bool fits = shape.size() == 1   ? shape[0] == kMaxLoras && dtype == DType::kInt32
                    : shape.size() == 3 ? shape[0] == kMaxLoras && shape[2] == kMaxLoraRank
                    : shape.size() == 4 ? shape[1] == kMaxLoras && shape[2] == kMaxLoraRank
                                        : false;
  if (!fits)
    throw Error("adapters of " + std::to_string(shape.size()) +
                " dimensions, expected the slots and ranks of lora_down, lora_up or lora_ranks");
  if (shape.size() > 1 && dtype != dtype_)
    throw Error(std::string("adapters of ") + name_of(dtype) + ", expected " + name_of(dtype_));
  return declare({Kind::kAdapters, dtype, shape});
}

int Program::add_value(DType dtype, const Shape& shape, int64_t offset, bool per_logit,
                       bool of_draft) {
  if (dtype != dtype_ && dtype != DType::kFloat32 && dtype != DType::kInt64 &&
      dtype != DType::kFloat8)
    throw Error(std::string("a value of ") + name_of(dtype) + "; the engine computes in " +
                name_of(dtype_));
  const bool pooled = per_logit && !shape.empty() && shape[0] == kBatch;
  if (shape.size() < 2 || (!pooled && shape[0] != (per_logit ? kNumLogits : kNumTokens)))
    throw Error(std::string("a value's shape does not begin with ") +
                (per_logit ? "num_logits or batch" : "num_tokens"));
  if (pooled && limits_.max_batch > limits_.max_logits)
    throw Error("pooled rows of max_batch " + std::to_string(limits_.max_batch) +
                " sequences exceed max_logits " + std::to_string(limits_.max_logits));
  const int64_t bytes = count_of(Shape(shape.begin() + 1, shape.end())) * width(dtype);
  const int64_t room = per_logit ? logit_bytes(of_draft) : token_bytes(of_draft);
  if (offset < 0 || offset % 16 != 0 || offset > room || bytes > room - offset)
    throw Error("a value of " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                " is not at a multiple of 16 in the arena's " + std::to_string(room));
  return declare({Kind::kValue, dtype, shape, "", offset, per_logit, -1, 0, of_draft});
}

int Program::add_columns(int of, int64_t first, int64_t width) {
  const Declared& value = tensor(of);
  if (value.kind != Kind::kValue || value.per_logit || value.shape.size() != 2)
    throw Error("tensor " + std::to_string(of) + " is not a value with num_tokens rows");
  count_of({width});
  if (first < 0 || first > value.shape[1] - width)
    throw Error(std::to_string(width) + " columns from " + std::to_string(first) +
                " on exceed the value's " + std::to_string(value.shape[1]) + " columns");
  return declare(
      {Kind::kColumns, value.dtype, {kNumTokens, width}, "", 0, false, of, first, value.of_draft});
}

void Program::add_node(const std::string& op, const Fields& fields, const std::vector<int>& inputs,
                       const std::vector<int>& outputs, Part part) {
  const auto builtin = builtin_types().find(op);
  const auto found = builtin != builtin_types().end() ? builtin : plugin_types().find(op);
  if (builtin == builtin_types().end() && found == plugin_types().end())
    throw Error("unknown op '" + op + "' in namespace llmc");
  const PluginType& type = found->second;
  Node node{op, make_plugin(type, fields), inputs, outputs};
  Fields complete = fields;
  complete.insert(type.fields.begin(), type.fields.end());
  try {
    check_node(type, complete, node, part);
    check_shapes(node);
  } catch (const Error& error) {
    const size_t number = nodes(part).size();
    throw Error("node " + std::to_string(number) + " (" + op + ") is invalid: " + error.what());
  }
  nodes_[static_cast<size_t>(part)].push_back(std::move(node));
}

void Program::add_node(const std::string& op, std::unique_ptr<Plugin> plugin,
                       const std::vector<int>& inputs, const std::vector<int>& outputs, Part part) {
  for (int number : inputs) tensor(number);
  for (int number : outputs)
    if (tensor(number).kind != Kind::kValue && tensor(number).kind != Kind::kCache)
      throw Error(op + " would write to tensor " + std::to_string(number) +
                  ", which is not a value");
  nodes_[static_cast<size_t>(part)].push_back({op, std::move(plugin), inputs, outputs});
}

// Checks that the tensors match the op's ports, and that outputs are writable.
void Program::check_node(const PluginType& type, const Fields& fields, const Node& node,
                         Part part) const {
  if (node.inputs.size() > type.inputs.size() || node.outputs.size() != type.outputs.size())
    throw Error("it has " + std::to_string(node.inputs.size()) + " inputs and " +
                std::to_string(node.outputs.size()) + " outputs, the op " +
                std::to_string(type.inputs.size()) + " and " + std::to_string(type.outputs.size()));
  bool reads_step = false, picks = false;
  for (size_t i = 0; i < type.inputs.size(); ++i) {
    const int number = i < node.inputs.size() ? node.inputs[i] : -1;
    if (number == -1 && !type.inputs[i].optional)
      throw Error("it needs the input '" + type.inputs[i].name + "'");
    if (number != -1) check_input(type, fields, i, number, part);
    reads_step = reads_step ||
                 (number != -1 && is_of_step(type.inputs[i]) && type.inputs[i].name != kLoraIds);
    picks = picks || type.inputs[i].name == "logits_indices";
  }
  if (picks &&
      tensor(node.inputs[0]).kind != Kind::kValue)  // a decode step aliases it, with all rows
    throw Error("it gathers rows of tensor " + std::to_string(node.inputs[0]) +
                ", which is not a value");
  for (int number : node.inputs)  // step inputs describe its tokens
    if (reads_step && number != -1 && tensor(number).kind == Kind::kValue &&
        tensor(number).shape[0] != kNumTokens)
      throw Error("tensor " + std::to_string(number) +
                  " has num_logits rows, expected num_tokens as of its other inputs");
  for (size_t i = 0; i < type.outputs.size(); ++i) {
    const int number = node.outputs[i];
    if (!type.outputs[i].in_place.empty()) {
      if (number != -1)
        throw Error("its output '" + type.outputs[i].name + "' is in place, expected -1");
      continue;
    }
    if (number == -1) throw Error("it needs the output '" + type.outputs[i].name + "'");
    const std::string what =
        "tensor " + std::to_string(number) + ", its output '" + type.outputs[i].name + "', is ";
    if (tensor(number).kind != Kind::kValue) throw Error(what + "not a value");
    const std::vector<DType> own{type.outputs[i].is_rounded(fields) ? DType::kFloat8 : dtype_};
    const std::vector<DType>& made = type.outputs[i].dtypes.empty() ? own : type.outputs[i].dtypes;
    if (!is_among(tensor(number).dtype, made))
      throw Error(what + "of " + name_of(tensor(number).dtype) + ", expected " + name_of(made[0]));
  }
  check_arena(node, part);
}

// Checks that the values of a node are in the arenas of its part.
void Program::check_arena(const Node& node, Part part) const {
  for (const auto* numbers : {&node.inputs, &node.outputs})
    for (int number : *numbers) {
      if (number == -1) continue;
      const Declared& given = tensor(number);
      if (part == Part::kEncoder && given.per_logit) throw Error("an encoder has no logits");
      if (given.kind != Kind::kValue && given.kind != Kind::kColumns) continue;
      if (given.of_draft != is_of_draft_model(part))
        throw Error("tensor " + std::to_string(number) + " is a value of " +
                    (given.of_draft ? "the draft model" : "the model") +
                    ", which the other cannot use");
    }
}

void Program::check_input(const PluginType& type, const Fields& fields, size_t index, int number,
                          Part part) const {
  const Port& port = type.inputs[index];
  const Declared& given = tensor(number);
  const std::string what = "tensor " + std::to_string(number) + ", its input '" + port.name + "',";
  if (given.is_array) return check_array(port, given, what);
  if (is_of_step(port)) {
    if (given.kind != Kind::kInput || !serves(port.name, given.name))
      throw Error(what + " is not the step's " + step_input(port.name));
    const InputType input = is_embeds(given.name) ? InputType{dtype_, kNumTokens, true, false}
                                                  : input_types().at(given.name);
    if (!(part == Part::kEncoder ? input.of_encoder : input.of_model))
      throw Error(what + " is not an input of " +
                  (part == Part::kEncoder ? "an encoder" : "a model"));
    if (is_of_draft_model(part) && !is_of_draft(given.name))
      throw Error(what + " is not an input of a draft model");
    return;
  }
  if (takes_adapters(port.name) != (given.kind == Kind::kAdapters))
    throw Error(what + (given.kind == Kind::kAdapters ? " is adapters, which it does not take"
                                                      : " is not adapters"));
  std::vector<DType> allowed = port.dtypes;
  if (allowed.empty()) allowed = {dtype_};
  if (port.number && given.shape.size() < 2) allowed = {DType::kFloat32};
  if (port.cached) {
    const auto& kv_dtype = std::get<std::string>(fields.at("kv_dtype"));
    if (!kv_dtype.empty()) allowed = {dtype_of(kv_dtype)};
  }
  if (port.is_bytes(fields)) allowed = {DType::kUint8};
  if (port.is_rounded(fields)) allowed = {DType::kFloat8};
  if (given.kind == Kind::kInput && given.name == kFeatures && part != Part::kEncoder)
    throw Error(what + " is not an input of a model");
  if (given.kind == Kind::kColumns && !port.columns)
    throw Error(what + " is a column slice, which the op does not support");
  if (!is_among(given.dtype, allowed))
    throw Error(what + " is of " + name_of(given.dtype) + ", expected " + name_of(allowed[0]));
  // Axis of positions in tables.
  static const std::map<std::string, size_t> by_position = {
      {"cos", 0}, {"sin", 0}, {"query_scale", 0}, {"key_bias", 1}};
  const auto axis = by_position.find(port.name);
  if (axis != by_position.end() && axis->second < given.shape.size() &&
      given.shape[axis->second] < limits_.max_seq_len)
    throw Error(what + " has " + std::to_string(given.shape[axis->second]) +
                " rows for max_seq_len " + std::to_string(limits_.max_seq_len));
  const bool written =
      std::any_of(type.outputs.begin(), type.outputs.end(),
                  [&](const Port& output) { return output.in_place == port.name; });
  const bool kept = given.kind == Kind::kCache || given.kind == Kind::kState;
  // A cache may be read after the node that writes it.
  const bool read = !written && port.cached && given.kind == Kind::kCache;
  const bool is_models = is_of_draft_model(part) && is_written(number, Part::kModel);
  if (read && !is_written(number, part) && !is_models)
    throw Error(what + " is a cache that no node has written yet");
  if (read) return;
  if (written != kept)
    throw Error(what + (written ? " is written, expected a cache or a state"
                                : " is a cache or a state, which the op does not write"));
  if (written && port.cached != (given.kind == Kind::kCache))
    throw Error(what + (port.cached ? " is not a cache" : " is not a state"));
  if (port.name == "memory" && given.kind != Kind::kMemory)
    throw Error(what + " is not an encoder output");
}

// Checks that a port takes an array of an image encoder. Its size is checked in each step.
void Program::check_array(const Port& port, const Declared& given, const std::string& what) const {
  const std::map<std::string, std::string> ports = {
      {"patches", "x"}, {"position_rows", "residual"}, {"cos", "cos"},
      {"sin", "sin"},   {"cu_seqlens", "cu_seqlens"},  {"merged_rows", "logits_indices"}};
  const std::string& wanted = ports.at(role_of(given.name));
  if (port.name != wanted)
    throw Error(what + " is " + given.name + ", which only an input '" + wanted + "' takes");
}

bool Program::is_written(int number, Part part) const {
  return std::any_of(nodes(part).begin(), nodes(part).end(), [&](const Node& node) {
    const auto found = plugin_types().find(node.op);
    if (found == plugin_types().end()) return false;
    const PluginType& type = found->second;
    for (size_t i = 0; i < node.inputs.size(); ++i)
      for (const Port& output : type.outputs)
        if (node.inputs[i] == number && output.in_place == type.inputs[i].name) return true;
    return false;
  });
}

// Checks that the op's output shapes match the declared ones, for all sizes of a step.
void Program::check_shapes(const Node& node) const {
  for (const Step& probe : kProbes) {
    std::vector<Dims> inputs;
    for (int number : node.inputs)
      inputs.push_back(number == -1 ? Dims{} : dims_of(resolve(number, probe)));
    const std::vector<Dims> made = node.plugin->shapes(inputs);
    for (size_t i = 0; i < made.size(); ++i)
      if (node.outputs[i] != -1)
        expect("its output", made[i], dims_of(resolve(node.outputs[i], probe)));
  }
}

void Program::set_logits(int number, int vocab_size) {
  check_logits(number, vocab_size, false);
  logits_ = number;
  vocab_size_ = vocab_size;
}

void Program::set_pooled(int number) {
  const Declared& rows = tensor(number);
  if (rows.kind != Kind::kValue || rows.shape.size() != 2 || rows.shape[0] == kNumLogits ||
      rows.of_draft)
    throw Error("tensor " + std::to_string(number) +
                " is not a value with batch or num_tokens rows");
  if (rows.dtype != dtype_) throw Error(std::string("pooled rows are of ") + name_of(rows.dtype));
  logits_ = number;
  vocab_size_ = static_cast<int>(rows.shape[1]);
  pools_ = true;
}

void Program::set_outputs(const std::vector<int>& numbers) {
  for (int number : numbers) {
    const Declared& rows = tensor(number);
    if (rows.kind != Kind::kValue || rows.shape.size() != 2 || rows.shape[0] == kBatch ||
        rows.of_draft)
      throw Error("tensor " + std::to_string(number) +
                  " is not a value with num_tokens or num_logits rows");
  }
  if (numbers.empty() || arrays_.size() != inputs_.size())
    throw Error("an image encoder has " + std::to_string(numbers.size()) + " outputs and " +
                std::to_string(inputs_.size() - arrays_.size()) +
                " inputs of a step, expected outputs and no such input");
  outputs_ = numbers;
}

void Program::set_draft(const DraftTensors& draft) {
  check_logits(draft.logits, draft.vocab_size, true);
  if (draft.hidden != -1 || draft.hidden_out != -1 || draft.features != -1) check_features(draft);
  if (draft.token_ids != -1) {
    const Declared& ids = tensor(draft.token_ids);
    if (ids.kind != Kind::kWeight || ids.dtype != DType::kInt64 ||
        ids.shape != Shape{draft.vocab_size})
      throw Error("tensor " + std::to_string(draft.token_ids) + " is not an int64 weight of the " +
                  std::to_string(draft.vocab_size) + " token ids of the draft model");
  }
  if ((draft.at_one_position || draft.block != 0) && draft.features == -1)
    throw Error("a draft model at one position, or of blocks, reads no features");
  if (draft.block != 0 && (draft.block < 2 || draft.at_one_position || draft.hidden_out != -1))
    throw Error("a draft model of blocks of " + std::to_string(draft.block) +
                " tokens is invalid; expected 2 or more, and no hidden_out");
  if (num_draft_layers() > 0 &&
      (draft.hidden_out == -1 || draft.at_one_position || draft.block != 0))
    throw Error("a layer of a draft model is at one position or of blocks, or has no hidden_out");
  if (num_draft_layers() == kMaxDraftLayers)
    throw Error("a draft model has more than " + std::to_string(kMaxDraftLayers) + " layers");
  limits_.draft_block = draft.block;
  drafts_.push_back(draft);
  limits_.max_proposals =
      draft.block == 0 ? kernels::kMaxProposals : std::min(kernels::kMaxProposals, draft.block - 1);
}

// Checks that the features of a token and what replaces them have the same size.
void Program::check_features(const DraftTensors& draft) const {
  const Shape shape = tensor(draft.hidden).shape;
  for (int number : {draft.features, draft.hidden, draft.hidden_out}) {
    if (number == -1 && number == draft.hidden_out && draft.block != 0) continue;
    const Declared& given = tensor(number);
    if (given.kind != Kind::kValue || given.per_logit || given.shape.size() != 2 ||
        given.dtype != dtype_ || given.shape != shape ||
        given.of_draft != (number != draft.features))
      throw Error("tensor " + std::to_string(number) +
                  " is not a value with the shape of the draft model's features");
  }
  for (const Declared& columns : tensors_)
    if (columns.kind == Kind::kColumns && columns.of == draft.hidden)
      throw Error("columns of the draft model's features are views, expected a value");
}

void Program::check_logits(int number, int vocab_size, bool of_draft) const {
  const Declared& logits = tensor(number);
  if (logits.kind != Kind::kValue || logits.shape.size() != 2 || logits.shape[0] != kNumLogits)
    throw Error("tensor " + std::to_string(number) + " is not a value with num_logits rows");
  if (logits.dtype != dtype_) throw Error(std::string("logits are of ") + name_of(logits.dtype));
  if (vocab_size < 1 || vocab_size > logits.shape[1])
    throw Error("vocab_size " + std::to_string(vocab_size) + " does not fit the logits' " +
                std::to_string(logits.shape[1]) + " columns");
  if (logits.of_draft != of_draft)
    throw Error("tensor " + std::to_string(number) + " is not a value of " +
                (of_draft ? "the draft model" : "the model"));
}

void Program::finish() {
  if (!outputs_.empty()) {
    if (logits_ >= 0 || parts() != std::vector<Part>{Part::kModel})
      throw Error("an image encoder has logits, an encoder or a draft model");
    return;
  }
  if (!arrays_.empty()) throw Error("the program has inputs of an image encoder, and no outputs");
  if (logits_ < 0) throw Error("the program has no logits");
  for (const char* name :
       {"input_ids", "position_ids", "cu_seqlens", "past_lens", "logits_indices"})
    if (!inputs_.count(name)) add_input(name, input_types().at(name).dtype);
  const bool encodes = !nodes(Part::kEncoder).empty();
  if (encodes && limits_.mem_max_seq_len == 0) throw Error("an encoder's mem_max_seq_len is 0");
  if (encodes && !inputs_.count(kMemoryRows)) add_input(kMemoryRows, DType::kInt64);
  if (nodes(Part::kDraft).empty()) return;
  if (limits_.prompt_lookup) throw Error("a draft model and prompt lookup cannot both draft");
  for (int layer = 0; layer < kMaxDraftLayers; ++layer)
    if (nodes(draft_part(layer)).empty() != (layer >= num_draft_layers()))
      throw Error("layer " + std::to_string(layer) +
                  " of the draft model has no logits or no nodes");
  if (draft().mask < 0 || draft().mask >= vocab_size_)
    throw Error("the draft model's mask token " + std::to_string(draft().mask) +
                " is not below vocab_size " + std::to_string(vocab_size_));
  if (!inputs_.count(kBlockTable)) throw Error("the draft model has no attention with a KV cache");
}

void Program::set_num_blocks(int num_blocks) {
  limits_.num_blocks = num_blocks;
  limits_.check();
}

int64_t Program::block_bytes() const {
  int64_t bytes = 0;
  for (const Declared& tensor : tensors_)
    if (tensor.kind == Kind::kCache)
      bytes += count_of(Shape(tensor.shape.begin() + 1, tensor.shape.end())) * width(tensor.dtype);
  return bytes;
}

const Declared& Program::tensor(int number) const {
  if (number < 0 || number >= static_cast<int>(tensors_.size()))
    throw Error("tensor " + std::to_string(number) + " does not exist among " +
                std::to_string(tensors_.size()));
  return tensors_[number];
}

int Program::input(const std::string& name) const {
  const auto found = inputs_.find(name);
  return found == inputs_.end() ? -1 : found->second;
}

Tensor Program::resolve(int number, const Step& step) const {
  if (number < 0) return {};
  Tensor made{nullptr, tensors_[number].dtype, tensors_[number].shape};
  if (tensors_[number].kind == Kind::kColumns) made.pitch = tensors_[tensors_[number].of].shape[1];
  for (int64_t& dim : made.shape) {
    if (dim == kNumTokens) dim = step.num_tokens;
    if (dim == kNumLogits) dim = step.num_logits;
    if (dim == kBatch) dim = step.batch;
    if (dim == kBatchPlus1) dim = step.batch + 1;
    if (dim == kNumBlocks) dim = limits_.num_blocks + 1;
    if (dim == kNumStates) dim = limits_.num_states + 1;
    if (dim == kMaxLoras) dim = limits_.max_loras;
    if (dim == kMaxLoraRank) dim = limits_.max_lora_rank;
  }
  return made;
}

int64_t Program::capacity(int number) const {
  const Declared& declared = tensor(number);
  // cuDNN rounds the batch up, starting after the decoding sequences.
  if (declared.name == kBlockTable) return 3ll * limits_.max_batch * limits_.max_blocks();
  return resolve(number, {limits_.max_tokens, limits_.max_logits, limits_.max_batch}).size();
}

}  // namespace llmc
