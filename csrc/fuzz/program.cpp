// libFuzzer target for programs and steps: the engine accepts any input or throws Error.
#include <fuzzer/FuzzedDataProvider.h>

#include <functional>

#include "../engine/builtin.h"
#include "../engine/program.h"

using namespace llmc;

namespace {

constexpr int kMaxCalls = 64;
constexpr const char* kDTypes[] = {"float32", "float16",       "bfloat16", "int32",
                                   "int64",   "float8_e4m3fn", "uint8"};
// Values at the bounds of checks.
constexpr int64_t kEdges[] = {INT64_MIN, INT32_MIN, -1, 0,   1,         2,         4,        8,
                              16,        32,        64, 128, INT32_MAX, 1ll << 48, INT64_MAX};

int64_t number(FuzzedDataProvider& data) {
  if (data.ConsumeBool()) return data.ConsumeIntegralInRange<int64_t>(-6, 64);
  return data.ConsumeBool() ? data.PickValueInArray(kEdges) : data.ConsumeIntegral<int64_t>();
}

DType dtype(FuzzedDataProvider& data) { return dtype_of(data.PickValueInArray(kDTypes)); }

Shape shape(FuzzedDataProvider& data) {
  Shape made(data.ConsumeIntegralInRange<size_t>(0, 4));
  for (int64_t& dim : made) dim = number(data);
  return made;
}

// A tensor number, -1, or an invalid one.
int reference(FuzzedDataProvider& data, const Program& program) {
  return data.ConsumeIntegralInRange<int>(-2, static_cast<int>(program.tensors().size()));
}

std::vector<int> references(FuzzedDataProvider& data, const Program& program, size_t count) {
  if (data.ConsumeIntegralInRange(0, 15) == 0) count = data.ConsumeIntegralInRange<size_t>(0, 16);
  std::vector<int> made(count);
  for (int& number : made) number = reference(data, program);
  return made;
}

// The default value, another one of its type, or one of any type.
Value value(FuzzedDataProvider& data, const Value& usual) {
  switch (data.ConsumeIntegralInRange(0, 7)) {
    case 0: return number(data);
    case 1: return data.ConsumeFloatingPoint<double>();
    case 2: return data.ConsumeRandomLengthString(8);
    case 3:
    case 4:
      if (std::holds_alternative<int64_t>(usual)) return number(data);
      if (std::holds_alternative<std::string>(usual))
        return std::string(data.PickValueInArray(kDTypes));
      return data.ConsumeFloatingPointInRange<double>(-1, 2);
    default: return usual;
  }
}

void add_node(FuzzedDataProvider& data, Program& program) {
  const auto& types = data.ConsumeIntegralInRange(0, 3) == 0 ? builtin_types() : plugin_types();
  auto found = types.begin();
  std::advance(found, data.ConsumeIntegralInRange<size_t>(0, types.size() - 1));
  const PluginType& type = found->second;
  Fields fields;
  for (const auto& [name, usual] : type.fields)
    if (data.ConsumeBool()) fields[name] = value(data, usual);
  for (const std::string& name : type.required)
    if (data.ConsumeIntegralInRange(0, 15) != 0) fields[name] = value(data, type.fields.at(name));
  const auto inputs = references(data, program, type.inputs.size());
  program.add_node(found->first, fields, inputs, references(data, program, type.outputs.size()),
                   static_cast<Part>(data.ConsumeIntegralInRange(0, 2)));
}

void declare(FuzzedDataProvider& data, Program& program) {
  static constexpr const char* kInputs[] = {
      "input_ids",          "position_ids", "cu_seqlens",   "past_lens",   "logits_indices",
      kBlockTable,          kStateSlots,    kCommitLens,    kMemoryStarts, kMemoryLens,
      kMemoryRows,          kLoraIds,       kLoraLogitsIds, kEmbedIds,     kRotaryPositions,
      kBidirectionalRanges, "tokens"};
  switch (data.ConsumeIntegralInRange(0, 10)) {
    case 0:
      program.add_input(data.PickValueInArray(kInputs),
                        data.ConsumeBool() ? DType::kInt32 : DType::kInt64);
      break;
    case 1: program.add_weight(dtype(data), shape(data)); break;
    case 2: program.add_cache(dtype(data), number(data), number(data)); break;
    case 3: program.add_state(dtype(data), shape(data)); break;
    case 4:
      if (data.ConsumeBool()) program.add_memory(number(data));
      else program.add_embeds(data.ConsumeBool() ? kEmbeds : "deep_embeds_1", number(data));
      break;
    case 5:
    case 6: {
      const bool per_logit = data.ConsumeBool();
      Shape of_rows = shape(data);
      if (!of_rows.empty()) of_rows[0] = per_logit ? kNumLogits : kNumTokens;
      program.add_value(dtype(data), of_rows, data.ConsumeBool() ? 0 : number(data), per_logit,
                        data.ConsumeBool());
      break;
    }
    case 7: program.add_columns(reference(data, program), number(data), number(data)); break;
    case 8: {
      Shape slots = shape(data);
      if (!slots.empty()) slots[slots.size() == 4] = kMaxLoras;
      if (slots.size() > 2) slots[2] = kMaxLoraRank;
      program.add_adapters(dtype(data), slots);
      break;
    }
    default: add_node(data, program);
  }
}

template <typename T>
std::vector<T> array(FuzzedDataProvider& data) {
  std::vector<T> made(data.ConsumeIntegralInRange<size_t>(0, 12));
  for (T& element : made) {
    if (data.ConsumeIntegralInRange(0, 7) != 0)
      element = static_cast<T>(data.ConsumeIntegralInRange(-2, 12));
    else if constexpr (std::is_floating_point_v<T>) element = data.ConsumeFloatingPoint<T>();
    else element = data.ConsumeIntegral<T>();
  }
  return made;
}

template <typename T>
HostArray<T> host(const std::vector<T>& array) {
  return {array.data(), static_cast<int64_t>(array.size())};
}

void check_any_step(FuzzedDataProvider& data, const Program& program) {
  Limits limits = program.limits();
  limits.num_blocks = data.ConsumeIntegralInRange(1, 16);
  const auto token_ids = array<int64_t>(data);
  const auto scored_targets = array<int64_t>(data), next_tokens = array<int64_t>(data);
  const auto token_types = array<int64_t>(data);
  const auto embeds = array<float>(data), deep_embeds = array<float>(data);
  std::vector<int32_t> arrays[25];
  for (auto& each : arrays) each = array<int32_t>(data);
  const auto masks = array<uint32_t>(data);
  std::vector<kernels::SlotState> states(data.ConsumeIntegralInRange<size_t>(0, 3));
  for (auto& state : states) data.ConsumeData(&state, sizeof(state));
  const StepInputs inputs{host(token_ids),
                          host(arrays[0]),
                          host(arrays[1]),
                          host(arrays[2]),
                          host(arrays[3]),
                          data.ConsumeIntegralInRange(-2, 12),
                          data.ConsumeBool(),
                          host(arrays[4]),
                          host(arrays[19]),
                          host(arrays[5]),
                          static_cast<int>(number(data)),
                          static_cast<Logits>(data.ConsumeIntegralInRange(0, 2)),
                          host(arrays[6]),
                          host(arrays[7]),
                          host(arrays[8]),
                          host(masks),
                          host(arrays[9]),
                          host(arrays[20]),
                          host(arrays[10]),
                          host(arrays[16]),
                          host(scored_targets),
                          host(arrays[17]),
                          host(next_tokens),
                          data.ConsumeIntegralInRange(-2, 17),
                          host(arrays[18]),
                          host(arrays[21]),
                          host(token_types),
                          host(embeds),
                          host(arrays[22]),
                          host(deep_embeds),
                          host(arrays[23]),
                          host(arrays[24]),
                          {host(arrays[11]), host(states), host(arrays[12]), host(arrays[13]),
                           host(arrays[14]), host(arrays[15])}};
  check_step(inputs, limits, program.vocab_size(), std::vector<SlotRecord>(limits.max_batch));
  shared_prefix(inputs, limits.block_size);
  DraftRows::of(inputs);
}

void ignore_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  init_plugins();
  FuzzedDataProvider data(bytes, size);
  ignore_error([&] {
    Limits limits{4, 128, 8, 32, 8, data.ConsumeBool() ? 16 : 0};
    if (data.ConsumeIntegralInRange(0, 7) == 0)
      limits = {static_cast<int>(number(data)), static_cast<int>(number(data)),
                static_cast<int>(number(data)), static_cast<int>(number(data)),
                static_cast<int>(number(data)), static_cast<int>(number(data))};
    if (data.ConsumeBool()) limits.max_loras = 3, limits.max_lora_rank = 16;
    Program program(dtype(data), limits, data.ConsumeBool() ? 4096 : number(data), 256);
    if (data.ConsumeBool())
      ignore_error([&] { program.set_draft_arena(number(data), number(data)); });
    for (int call = 0; call < kMaxCalls && data.remaining_bytes() > 64; ++call)
      ignore_error([&] { declare(data, program); });
    ignore_error(
        [&] { program.set_logits(reference(data, program), static_cast<int>(number(data))); });
    ignore_error([&] {
      program.set_draft({reference(data, program), static_cast<int>(number(data)),
                         reference(data, program), reference(data, program),
                         reference(data, program), reference(data, program)});
    });
    program.block_bytes();
    for (size_t tensor = 0; tensor < program.tensors().size(); ++tensor)
      program.capacity(static_cast<int>(tensor));
    program.finish();
    // Larger limits would allocate too many slots per run.
    if (program.limits().max_batch <= 64) check_any_step(data, program);
  });
  return 0;
}
