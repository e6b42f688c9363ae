#include "engine.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

#include "../kernels/gemm/params.h"
#include "../kernels/rowwise/params.h"
#include "../plugins/common/lora_plan.h"
#include "../plugins/common/split_kv_plan.h"

namespace llmc {
namespace {

constexpr int64_t kPinned = 64 << 20;
// Bytes that the device's copy of a step's inputs grows beyond what the step needs, at most. Rows
// of images take many, and their memory is not reserved.
constexpr int64_t kMostSpare = 16 << 20;
// Positions after a sequence's last that cuDNN may read.
constexpr int kTailPositions = 256;
// Collectives over peer memory after which epochs, of 32 bits, begin again.
constexpr int64_t kMaxCollectives = int64_t{1} << 31;

// Sets the device before later members are constructed.
Program on(int device, Program program) {
  program.finish();
  check(cudaSetDevice(device), "choosing a device");
  return program;
}

// 1, 2, 4 and multiples of 8: few enough to capture at load, close enough to waste little on
// padding.
std::vector<int> sizes_up_to(int most) {
  std::vector<int> sizes;
  for (int size = 1; size < most; size = size < 8 ? 2 * size : size + 8) sizes.push_back(size);
  sizes.push_back(most);
  return sizes;
}

template <typename T>
const T* at(const char* received, int64_t offset) {
  return reinterpret_cast<const T*>(received + offset);
}

// Blocks of a sequence that a step uses: those of its positions, and of its next drafts as far as
// it has any.
int blocks_of(const StepInputs& inputs, int sequence, const Limits& limits) {
  const int size = limits.block_size;
  const int positions = inputs.past_lens[sequence] + inputs.fresh(sequence);
  const int most = std::min({(positions + inputs.proposed_positions(limits) + size - 1) / size,
                             inputs.width(), limits.max_blocks()});
  const int32_t* table = inputs.block_tables.data + static_cast<int64_t>(sequence) * inputs.width();
  int blocks = (positions + size - 1) / size;
  while (blocks < most && table[blocks] >= 0) ++blocks;
  return blocks;
}

// Position of each sequence's first token after the accepted ones of its slot, which rows of drafts
// follow; -1: past_lens is exact.
std::vector<int32_t> offsets_of(const StepInputs& inputs) {
  std::vector<int32_t> offsets;
  for (int b = 0; b < inputs.batch(); ++b) {
    const bool goes_on = inputs.verifies && b > 0 && inputs.slots[b] == inputs.slots[b - 1];
    offsets.push_back(inputs.unread[b] == 0 ? -1 : goes_on ? offsets.back() + 1 : 0);
  }
  return offsets;
}

}  // namespace

Engine::Engine(Program program, int device, const std::string& attention_backend)
    : program_(on(device, std::move(program))),
      device_(device),
      pinned_(kPinned),
      memory_(stream_.handle),
      graph_sizes_(sizes_up_to(program_.limits().decoding())) {
  place_tensors();
  find_adapters();
  reserve_scratch();
  gemm_ = std::make_unique<Gemm>();
  attention_ = make_attention_backend(attention_backend);
  sampler_ =
      std::make_unique<Sampler>(program_.limits(), program_.vocab_size(), memory_, stream_.handle);
  gemm_->time_algorithms(false);
  attention_->make_plans(false);
  const std::vector<Node>& nodes = program_.nodes(Part::kModel);
  selects_ =
      std::any_of(nodes.begin(), nodes.end(), [](const Node& node) { return node.op == "Gather"; });
  if (!program_.nodes(Part::kDraft).empty()) make_drafter();
  if (program_.limits().prompt_lookup)
    lookup_ = std::make_unique<PromptLookup>(program_.limits(), memory_, stream_.handle);
  if (!program_.outputs().empty()) watch(program_.outputs());
  synchronize();
}

Engine::~Engine() {
  cudaSetDevice(device_);
  cudaStreamSynchronize(stream_.handle);
  graphs_.clear();
  peers_.reset();
  if (communicator_ != nullptr) ncclCommDestroy(communicator_);
}

void Engine::place_tensors() {
  const Limits& limits = program_.limits();
  char *token_arenas[2], *logit_arenas[2];  // of the model, of the draft model
  for (bool of_draft : {false, true}) {
    token_arenas[of_draft] =
        memory_.allocate<char>(program_.token_bytes(of_draft) * limits.max_tokens, "activations");
    logit_arenas[of_draft] =
        memory_.allocate<char>(program_.logit_bytes(of_draft) * limits.max_logits, "logits");
  }
  static const std::map<Kind, const char*> names = {{Kind::kInput, "inputs"},
                                                    {Kind::kWeight, "weights"},
                                                    {Kind::kState, "the states of sequences"},
                                                    {Kind::kMemory, "the encoder output"},
                                                    {Kind::kAdapters, "adapters"}};
  std::vector<kernels::CacheBlocks> states;
  for (size_t i = 0; i < program_.tensors().size(); ++i) {
    const Declared& tensor = program_.tensors()[i];
    if (tensor.kind == Kind::kCache) places_.push_back(nullptr);  // see allocate()
    else if (tensor.kind == Kind::kColumns)
      places_.push_back(places_[tensor.of] + tensor.first * width(tensor.dtype));
    else if (tensor.kind == Kind::kValue)
      places_.push_back(tensor.per_logit
                            ? logit_arenas[tensor.of_draft] + tensor.offset * limits.max_logits
                            : token_arenas[tensor.of_draft] + tensor.offset * limits.max_tokens);
    else
      places_.push_back(memory_.allocate<char>(
          program_.capacity(static_cast<int>(i)) * width(tensor.dtype), names.at(tensor.kind)));
    if (tensor.kind == Kind::kState)
      states.push_back({places_.back(), bytes_of(static_cast<int>(i)) / (limits.num_states + 1)});
  }
  states_ = keep(states, "the states of sequences");
  auto input = [&](auto*& place, const char* name) {
    const int number = program_.input(name);
    if (number >= 0)
      place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(places_[number]);
  };
  input(inputs_.input_ids, "input_ids");
  input(inputs_.position_ids, "position_ids");
  input(inputs_.logits_indices, "logits_indices");
  input(inputs_.cu_seqlens, "cu_seqlens");
  input(inputs_.past_lens, "past_lens");
  input(inputs_.block_table, kBlockTable);
  input(inputs_.state_slots, kStateSlots);
  input(inputs_.commit_lens, kCommitLens);
  input(inputs_.memory_starts, kMemoryStarts);
  input(inputs_.memory_lens, kMemoryLens);
  input(inputs_.memory_rows, kMemoryRows);
  input(inputs_.lora_ids, kLoraIds);
  input(inputs_.lora_logits_ids, kLoraLogitsIds);
  input(inputs_.token_type_ids, kTokenTypeIds);
  input(inputs_.embeds, kEmbeds);
  input(inputs_.features, kFeatures);
  input(inputs_.embed_ids, kEmbedIds);
  input(inputs_.rotary_positions, kRotaryPositions);
  input(inputs_.ranges, kBidirectionalRanges);
  for (int i = 0; i < limits.num_deep_embeds; ++i)
    input(inputs_.deep_embeds.emplace_back(), (kDeepEmbeds + std::to_string(i)).c_str());
}

// Finds the tensors of each layer's adapters among the nodes' inputs.
void Engine::find_adapters() {
  std::set<int> known;
  for (const Node& node : program_.nodes(Part::kModel)) {
    std::vector<int> own;
    for (int number : node.inputs)
      if (number >= 0 && program_.tensors()[number].kind == Kind::kAdapters) own.push_back(number);
    for (size_t i = 0; i + 2 < own.size(); i += 3)
      if (known.insert(own[i]).second) adapter_layers_.push_back({own[i], own[i + 1], own[i + 2]});
  }
  if (adapter_layers_.empty()) return;
  std::sort(adapter_layers_.begin(), adapter_layers_.end(),
            [](const AdapterLayer& a, const AdapterLayer& b) { return a.down < b.down; });
  const Limits& limits = program_.limits();
  const int rows = std::max(limits.max_tokens, limits.max_logits);
  lora_plan_ = std::make_unique<LoraPlan>(
      memory_.allocate<int32_t>(int64_t{LoraPlan::kKinds} * rows, "rows of adapters"),
      memory_.allocate<kernels::LoraTile>(
          int64_t{LoraPlan::kKinds} * kernels::lora_tiles(rows, limits.max_loras),
          "rows of adapters"),
      rows, limits.max_loras);
}

void Engine::load_adapter(int slot, const HostArray<int32_t>& ranks,
                          const HostArray<uint8_t>& data) {
  const Limits& limits = program_.limits();
  if (slot < 0 || slot >= limits.max_loras)
    throw Error("there is no slot " + std::to_string(slot) + " for an adapter among " +
                std::to_string(limits.max_loras));
  check_size("the ranks of an adapter", ranks.size, static_cast<int64_t>(adapter_layers_.size()));
  int64_t bytes = 0;
  for (int64_t i = 0; i < ranks.size; ++i) {
    if (ranks[i] < 0 || ranks[i] > limits.max_lora_rank || ranks[i] % 8 != 0)
      throw Error("an adapter has rank " + std::to_string(ranks[i]) +
                  ", expected a multiple of 8 up to " + std::to_string(limits.max_lora_rank));
    const Shape &down = program_.tensor(adapter_layers_[i].down).shape,
                &up = program_.tensor(adapter_layers_[i].up).shape;
    bytes += ranks[i] * (down[0] * down[3] + up[1]) * width(program_.dtype());
  }
  check_size("the matrices of an adapter, in bytes,", data.size, bytes);
  use_device();
  const int64_t head = (ranks.bytes() + 255) / 256 * 256;
  check(cudaEventSynchronize(adapter_copied_.handle), "an adapter");  // the buffer is free again
  if (head + bytes > adapter_room_) {
    adapter_ = std::make_unique<PinnedBuffer>(head + bytes);
    adapter_room_ = head + bytes;
  }
  auto* from = static_cast<char*>(adapter_->data);
  std::memcpy(from, ranks.data, ranks.bytes());
  std::memcpy(from + head, data.data, bytes);
  // A step in flight may have rows of the slot's last adapter, whose results are dropped.
  check(cudaStreamWaitEvent(copies_.handle, adapters_used_.handle), "an adapter");
  auto copy = [&](int tensor, int64_t first, int64_t pitch, const char* source, int64_t row,
                  int64_t rows) {
    if (row > 0)
      check(cudaMemcpy2DAsync(places_[tensor] + first, pitch, source, row, row, rows,
                              cudaMemcpyHostToDevice, copies_.handle),
            "copying an adapter");
  };
  const char* matrices = from + head;
  for (int64_t i = 0; i < ranks.size; ++i) {
    const AdapterLayer& layer = adapter_layers_[i];
    const Tensor down = resolve(layer.down, {}), up = resolve(layer.up, {});
    const int64_t element = width(down.dtype), rank = ranks[i];
    const int64_t room = down.shape[2] * down.shape[3] * element;  // of a part of a slot
    copy(layer.down, slot * room, down.shape[1] * room, matrices, rank * down.shape[3] * element,
         down.shape[0]);
    matrices += down.shape[0] * rank * down.shape[3] * element;
    copy(layer.up, slot * up.shape[1] * up.shape[2] * element, up.shape[2] * element, matrices,
         rank * element, up.shape[1]);
    matrices += up.shape[1] * rank * element;
    copy(layer.ranks, 4ll * slot, 4, from + 4 * i, 4, 1);
  }
  check(cudaEventRecord(adapter_copied_.handle, copies_.handle), "an adapter");
  check(cudaStreamWaitEvent(stream_.handle, adapter_copied_.handle), "an adapter");
}

Engine::Kept Engine::keep(const std::vector<kernels::CacheBlocks>& kept, const char* what) {
  Kept made{memory_.allocate<kernels::CacheBlocks>(kept.size(), what),
            static_cast<int>(kept.size())};
  upload(made.all, kept.data(), kept.size() * static_cast<int64_t>(sizeof(kernels::CacheBlocks)),
         stream_.handle);
  synchronize();  // `kept` belongs to the caller
  return made;
}

void Engine::copy(const Kept& kept, const char* received, int64_t pairs,
                  const HostArray<int32_t>& copies) {
  if (copies.size == 0 || kept.count == 0) return;
  check(kernels::copy_blocks(kept.all, kept.count, at<int32_t>(received, pairs),
                             static_cast<int>(copies.size / 2), stream_.handle),
        "copying blocks");
}

// Scratch for the largest step, and counters.
void Engine::reserve_scratch() {
  const Limits& limits = program_.limits();
  int64_t most = 0;
  for (int tokens : {1, kernels::kGemvRows, limits.max_tokens}) {
    const Step step{std::min(tokens, limits.max_tokens), std::min(tokens, limits.max_logits),
                    std::min(tokens, limits.max_batch)};
    for (Part part : program_.parts())
      for (const Node& node : program_.nodes(part)) {
        std::vector<Tensor> inputs;
        for (int tensor : node.inputs) inputs.push_back(resolve(tensor, step));
        most = std::max(most, node.plugin->workspace(inputs));
      }
  }
  scratch_ = memory_.allocate<char>(most, "scratch");
  counters_ = memory_.allocate<int32_t>(kCounters, "counters");
  prefix_ = memory_.allocate<int32_t>(2ll + limits.max_batch, "a shared prefix");
  sequences_ = memory_.allocate<int32_t>(2ll * limits.max_batch + 1, "rows of sequences");
  const int64_t parts = SplitKvPlan::capacity(limits.max_batch);
  split_kv_plan_ = std::make_unique<SplitKvPlan>(
      memory_.allocate<kernels::KvSplit>(SplitKvPlan::kMaxKinds * parts, "parts of sequences"),
      parts);
}

Tensor Engine::resolve(int tensor, const Step& step) const {
  if (tensor < 0) return {};
  Tensor made = program_.resolve(tensor, step);
  made.data = places_[tensor];
  return made;
}

void Engine::use_device() const { check(cudaSetDevice(device_), "choosing a device"); }

void Engine::load_weight(int tensor, const void* data, int64_t bytes) {
  if (program_.tensor(tensor).kind != Kind::kWeight)
    throw Error("tensor " + std::to_string(tensor) + " is not a weight");
  check_size("a weight, in bytes,", bytes, bytes_of(tensor));
  use_device();
  for (int64_t done = 0; done < bytes; done += kPinned) {
    const int64_t part = std::min(kPinned, bytes - done);
    synchronize();  // the pinned memory is free again
    std::memcpy(pinned_.data, static_cast<const char*>(data) + done, part);
    upload(places_[tensor] + done, pinned_.data, part, stream_.handle);
  }
}

void Engine::enqueue(const Pass& pass, const Step& step) {
  Context context;
  context.stream = stream_.handle;
  context.gemm = gemm_.get();
  context.attention = attention_.get();
  context.counters = counters_;
  context.communicator = communicator_;
  context.peers = peers_.get();
  context.decode = step.decode;
  context.num_decode = step.num_decode;
  context.verifies = step.verifies;
  context.sequences = {sequences_, sequences_ + program_.limits().max_batch + 1};
  context.num_drafted = step.num_drafted;
  context.drafted_tokens = step.drafted_tokens;
  context.keys_only =
      program_.draft().block > 0 && pass.part == Part::kDraft && &pass != &draft_blocks_;
  context.longest = step.longest;
  context.reach = step.reach;
  if (step.prefix) context.prefix = {prefix_, prefix_ + 2, nullptr};
  split_kv_plan_->begin_step();
  context.split_kv_plan = split_kv_plan_.get();
  context.adapters = step.adapters;
  context.embeds = step.embeds;
  context.deep_embeds = step.deep_embeds;
  context.ranges = step.ranges;
  if (lora_plan_ != nullptr) lora_plan_->begin_step();
  context.lora_plan = lora_plan_.get();
  context.watcher = watcher_;
  context.user = user_;
  std::map<int, void*> moved = pass.places;  // and tensors that alias another one's memory
  auto of_logits = [&](const Node& node) {
    return !node.outputs.empty() && node.outputs[0] >= 0 &&
           program_.tensors()[node.outputs[0]].per_logit;
  };
  auto inputs_of = [&](const Node& node) {
    std::vector<Tensor> inputs;
    for (int tensor : node.inputs) {
      inputs.push_back(resolve(tensor, step));
      const auto found = moved.find(tensor);
      if (found != moved.end()) inputs.back().data = found->second;
    }
    return inputs;
  };
  auto outputs_of = [&](const Node& node) {
    std::vector<Tensor> outputs;
    for (int tensor : node.outputs) outputs.push_back(resolve(tensor, step));
    return outputs;
  };
  auto watch = [&](int tensor, const Tensor& value) {
    const auto found = watched_.find(tensor);
    if (found != watched_.end()) found->second = download(value, stream_.handle);
  };
  const std::vector<Node>& nodes = program_.nodes(pass.part);
  // The node that reads a tensor next, if it follows node n at once or after nodes that pass the
  // tensor on; `tensor` is then its number for that node.
  auto next_reader = [&](size_t n, int& tensor, void* data) {
    for (++n;
         n < nodes.size() && nodes[n].plugin->passes_on(context) && nodes[n].inputs[0] == tensor;
         ++n)
      tensor = nodes[n].outputs[0], moved[tensor] = data;
    return n < nodes.size() ? &nodes[n] : nullptr;
  };
  bool normed = false;  // whether the node before has computed the norm with which a node begins
  for (size_t n = 0; n < nodes.size(); ++n) {
    const Node& node = nodes[n];
    if (step.num_logits == 0 && of_logits(node)) continue;  // a step of unfinished prompts
    const std::vector<Tensor> inputs = inputs_of(node);
    if (node.plugin->passes_on(context)) {
      moved[node.outputs[0]] = inputs[0].data;
      watch(node.outputs[0], inputs[0]);
      continue;
    }
    const std::vector<Tensor> outputs = outputs_of(node);
    if (normed) {
      node.plugin->enqueue_normed(inputs, outputs, scratch_, context);
      normed = false;
    } else {
      if (peers_ != nullptr && node.op == "AllReduce") {
        int reduced = node.outputs[0];
        const Node* next = next_reader(n, reduced, outputs[0].data);
        normed = next != nullptr && of_logits(node) == of_logits(*next) &&
                 reduce_and_norm(reduced, inputs[0], outputs[0], *next, inputs_of(*next),
                                 outputs_of(*next), context);
      }
      if (!normed) node.plugin->enqueue(inputs, outputs, scratch_, context);
    }
    for (size_t i = 0; i < outputs.size() && !watched_.empty(); ++i)
      watch(node.outputs[i], outputs[i]);
  }
  if (pass.then) pass.then(step);
}

// Enqueues an all-reduce, whose result is tensor `reduced` of the next node, together with the norm
// with which that begins; false if they are separate kernels.
bool Engine::reduce_and_norm(int reduced, const Tensor& x, const Tensor& y, const Node& next,
                             const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs,
                             const Context& context) const {
  const auto reads = std::find(next.inputs.begin(), next.inputs.end(), reduced);
  if (reads == next.inputs.end()) return false;
  const std::optional<FirstNorm> norm =
      next.plugin->first_norm(reads - next.inputs.begin(), inputs, outputs, scratch_, context);
  if (!norm) return false;
  const int hidden = static_cast<int>(x.shape.back());
  return peers_->all_reduce_norm(
      x.dtype,
      {y.data, norm->sum, norm->normed, x.data, norm->residual, norm->weight,
       static_cast<int>(x.size() / hidden), hidden, norm->epsilon},
      stream_.handle);
}

int64_t Engine::measure(double utilization) const {
  use_device();
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "asking for free memory");
  const double room = static_cast<double>(free) - (1 - utilization) * static_cast<double>(total);
  const int64_t block = program_.block_bytes();
  if (block == 0) return int64_t{1} << 30;  // no layer has a KV cache
  return std::max<int64_t>(static_cast<int64_t>(room / static_cast<double>(block)) - 1, 0);
}

void Engine::prepare_weights() {
  std::set<const void*> done;
  for (Part part : program_.parts())
    for (const Node& node : program_.nodes(part)) {
      std::vector<Tensor> inputs;
      for (int tensor : node.inputs) inputs.push_back(resolve(tensor, Step{1, 1, 1}));
      node.plugin->prepare(inputs, done, stream_.handle);
    }
}

void Engine::allocate(int num_blocks) {
  if (program_.limits().num_blocks > 0) throw Error("the KV cache is already allocated");
  if (num_blocks < 1)
    throw Error("a KV cache of " + std::to_string(num_blocks) + " blocks, expected 1 or more");
  use_device();
  prepare_weights();
  program_.set_num_blocks(num_blocks);
  std::vector<kernels::CacheBlocks> caches;
  for (size_t i = 0; i < places_.size(); ++i) {
    const Declared& tensor = program_.tensors()[i];
    if (tensor.kind != Kind::kCache) continue;
    const int64_t bytes = bytes_of(static_cast<int>(i));
    places_[i] = memory_.allocate<char>(bytes, "the KV cache");
    caches.push_back({places_[i], bytes / (num_blocks + 1)});
  }
  caches_ = keep(caches, "the KV cache");
  // Entries without a block refer to the padding block.
  if (inputs_.block_table != nullptr) {
    table_.assign(program_.capacity(program_.input(kBlockTable)), num_blocks);
    upload(inputs_.block_table, table_.data(), 4 * static_cast<int64_t>(table_.size()),
           stream_.handle);
  }
  if (drafter_ != nullptr) drafter_->allocate(table_);
  if (layers_ != nullptr) layers_->allocate(table_);
  synchronize();
}

void Engine::encode(const EncoderInputs& inputs) {
  if (program_.nodes(Part::kEncoder).empty()) throw Error("the model has no encoder");
  const Step step = check_step(inputs, program_.limits());
  use_device();
  Ticket& ticket = next_ticket();
  StagingBuffer& sent = *ticket.encoded.emplace_back(std::make_unique<StagingBuffer>());
  const int64_t ids = sent.add(inputs.input_ids.data, inputs.input_ids.size);
  const int64_t features = sent.add(inputs.features.data, inputs.features.size);
  const int64_t positions = sent.add(inputs.position_ids.data, inputs.position_ids.size);
  const int64_t starts = sent.add(inputs.cu_seqlens.data, inputs.cu_seqlens.size);
  const int64_t rows = sent.add(inputs.memory_rows.data, inputs.memory_rows.size);
  const auto* memory = static_cast<const char*>(sent.data());
  upload(inputs_.input_ids, memory + ids, inputs.input_ids.bytes(), stream_.handle);
  upload(inputs_.features, memory + features, inputs.features.bytes(), stream_.handle);
  upload(inputs_.position_ids, memory + positions, inputs.position_ids.bytes(), stream_.handle);
  upload(inputs_.cu_seqlens, memory + starts, inputs.cu_seqlens.bytes(), stream_.handle);
  upload(inputs_.memory_rows, memory + rows, inputs.memory_rows.bytes(), stream_.handle);
  count_collectives(Part::kEncoder);
  enqueue(encoder_, step);
}

void Engine::encode_image(const std::vector<HostArray<uint8_t>>& arrays, int num_tokens,
                          int num_rows, int batch) {
  if (program_.outputs().empty()) throw Error("the program is not that of an image encoder");
  check_size("the inputs of an image encoder", static_cast<int64_t>(arrays.size()),
             static_cast<int64_t>(program_.arrays().size()));
  const Limits& limits = program_.limits();
  if (num_tokens < 1 || num_tokens > limits.max_tokens || num_rows < 1 ||
      num_rows > limits.max_logits || batch < 1 || batch > limits.max_batch)
    throw Error("an image of " + std::to_string(num_tokens) + " patches, " +
                std::to_string(num_rows) + " rows and " + std::to_string(batch) +
                " segments exceeds the engine's limits of " + std::to_string(limits.max_tokens) +
                ", " + std::to_string(limits.max_logits) + " and " +
                std::to_string(limits.max_batch));
  Step step{num_tokens, num_rows, batch};
  step.longest = step.reach = num_tokens;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const int number = program_.arrays()[i];
    const Declared& array = program_.tensor(number);
    const Tensor resolved = resolve(number, step);
    check_size(array.name.c_str(), arrays[i].size, resolved.size() * width(resolved.dtype));
    if (array.dtype == DType::kInt32)
      check_segments({reinterpret_cast<const int32_t*>(arrays[i].data), batch + 1}, num_tokens);
    if (array.dtype == DType::kInt64)
      check_merged_rows({reinterpret_cast<const int64_t*>(arrays[i].data), num_rows}, num_tokens);
  }
  use_device();
  for (size_t i = 0; i < arrays.size(); ++i)
    upload(places_[program_.arrays()[i]], arrays[i].data, arrays[i].size, stream_.handle);
  enqueue(model_, step);
  synchronize();
}

Engine::Ticket& Engine::next_ticket() {
  Ticket& ticket = tickets_[submitted_ % kMaxInFlight];
  if (ticket.number.load() >= 0)
    throw Error("step " + std::to_string(submitted_) + " cannot be submitted while step " +
                std::to_string(ticket.number.load()) + " is not collected");
  return ticket;
}

// Stages the host's arrays, and the changed entries of the block table for `rows` sequences.
// Those after the batch are padding.
Engine::Sent Engine::pack(StagingBuffer& into, const StepInputs& inputs, const Prefix& prefix,
                          const std::vector<int32_t>& logits_indices, int rows) {
  const Limits& limits = program_.limits();
  const std::vector<int32_t> ids(inputs.token_ids.begin(), inputs.token_ids.end());
  Sent sent{};
  sent.num_tokens = static_cast<int>(ids.size());
  sent.batch = inputs.batch();
  sent.num_logits = static_cast<int>(logits_indices.size());
  sent.rows = rows;
  sent.ids = into.add(ids);
  sent.seqlens = into.add(inputs.cu_seqlens.data, inputs.cu_seqlens.size);
  sent.past = into.add(inputs.past_lens.data, inputs.past_lens.size);
  sent.slots = into.add(inputs.slots.data, inputs.slots.size);
  sent.states = into.add(inputs.state_slots.data, inputs.state_slots.size);
  sent.commits = into.add(inputs.commit_lens.data, inputs.commit_lens.size);
  sent.num_sequences = sent.batch;
  sent.verifies = inputs.verifies;
  if (sent.verifies) {
    const std::vector<int32_t> starts = inputs.sequence_starts();
    sent.num_sequences = static_cast<int>(starts.size()) - 1;
    std::vector<int32_t> past;
    for (int i = 0; i < sent.num_sequences; ++i) past.push_back(inputs.past_lens[starts[i]]);
    sent.sequence_starts = into.add(starts);
    sent.sequence_past = into.add(past);
  }
  sent.logits = into.add(logits_indices);
  sent.starts = into.add(inputs.memory_starts.data, inputs.memory_starts.size);
  sent.lens = into.add(inputs.memory_lens.data, inputs.memory_lens.size);
  sent.own_from = into.add(prefix.own_from);
  sent.has_unread = inputs.unread.size > 0;
  if (sent.has_unread) sent.offsets = into.add(offsets_of(inputs));
  sent.unread = into.add(inputs.unread.data, inputs.unread.size);
  sent.adapters = inputs.lora_ids.size > 0;
  sent.lora_ids = into.add(inputs.lora_ids.data, inputs.lora_ids.size);
  sent.has_axes = inputs.rotary_positions.size > 0;
  sent.rotary_positions = into.add(inputs.rotary_positions.data, inputs.rotary_positions.size);
  sent.prefix_owner = prefix.owner;
  sent.prefix_length = prefix.length;
  if (inputs_.block_table == nullptr) return sent;
  const int most = limits.max_blocks(),
            behind = (kTailPositions + limits.block_size - 1) / limits.block_size;
  std::vector<kernels::BlockTableUpdate> runs;
  std::vector<int32_t> blocks;
  for (int row = 0; row < rows; ++row) {
    const int needed = row < sent.batch ? blocks_of(inputs, row, limits) : 0;
    const int32_t* wanted = inputs.block_tables.data + static_cast<int64_t>(row) * inputs.width();
    int32_t* held = table_.data() + static_cast<int64_t>(row) * most;
    auto block = [&](int i) { return i < needed ? wanted[i] : limits.num_blocks; };
    int first = static_cast<int>(std::mismatch(held, held + needed, wanted).first - held);
    int last = std::min(most, needed + behind);
    while (first < last && held[first] == block(first)) ++first;
    while (last > first && held[last - 1] == block(last - 1)) --last;
    if (first == last) continue;
    runs.push_back({row, first, last - first, static_cast<int32_t>(blocks.size())});
    for (int i = first; i < last; ++i) blocks.push_back(held[i] = block(i));
  }
  sent.num_runs = static_cast<int>(runs.size());
  sent.runs = into.add(runs);
  sent.blocks = into.add(blocks);
  return sent;
}

// Copies the staged buffer to the device, and returns its address.
const char* Engine::send(const StagingBuffer& sent) {
  if (sent.bytes() > received_room_) {
    synchronize();
    received_room_ = sent.bytes() + std::min(sent.bytes(), kMostSpare);
    received_ = std::make_unique<DeviceBuffer>(received_room_, "inputs");
  }
  check(kernels::transfer(received_->data, sent.data(), sent.bytes(), stream_.handle),
        "copying step inputs");
  return static_cast<const char*>(received_->data);
}

// Copies the rows in place of token embeddings, and those of deep layers, to the model's inputs.
void Engine::take_embeds(const StepInputs& inputs, const int32_t* ids, const float* embeds,
                         const float* deep_embeds) {
  check(kernels::transfer(inputs_.embed_ids, ids, inputs.embed_ids.bytes(), stream_.handle),
        "copying rows of embeddings");
  const int64_t count = inputs.embeds.size;
  if (count == 0) return;
  check(kernels::round_to(program_.dtype(), inputs_.embeds, embeds, count, stream_.handle),
        "copying embeddings");
  for (size_t i = 0; i < inputs_.deep_embeds.size() && inputs.deep_embeds.size > 0; ++i)
    if (inputs_.deep_embeds[i] != nullptr)
      check(kernels::round_to(program_.dtype(), inputs_.deep_embeds[i],
                              deep_embeds + static_cast<int64_t>(i) * count, count, stream_.handle),
            "copying rows of deep layers");
}

void Engine::prepare(const char* received, const Sent& sent) {
  kernels::PrepareInputsParams p{};
  p.input_ids = inputs_.input_ids;
  p.position_ids = inputs_.position_ids;
  p.cu_seqlens = inputs_.cu_seqlens;
  p.past_lens = inputs_.past_lens;
  p.logits_indices = inputs_.logits_indices;
  p.memory_starts = inputs_.memory_starts;
  p.memory_lens = inputs_.memory_lens;
  p.block_table = inputs_.block_table;
  p.state_slots = inputs_.state_slots;
  p.commit_lens = inputs_.commit_lens;
  if (sent.verifies) {
    p.sequence_starts = sequences_;
    p.sequence_past = sequences_ + program_.limits().max_batch + 1;
    p.host_sequence_starts = at<int32_t>(received, sent.sequence_starts);
    p.host_sequence_past = at<int32_t>(received, sent.sequence_past);
  }
  p.host_ids = at<int32_t>(received, sent.ids);
  p.host_seqlens = at<int32_t>(received, sent.seqlens);
  p.host_past = at<int32_t>(received, sent.past);
  p.host_slots = at<int32_t>(received, sent.slots);
  p.host_states = at<int32_t>(received, sent.states);
  p.host_commits = at<int32_t>(received, sent.commits);
  p.host_logits = at<int32_t>(received, sent.logits);
  p.host_starts = at<int32_t>(received, sent.starts);
  p.host_lens = at<int32_t>(received, sent.lens);
  p.prefix = prefix_;
  p.own_from = prefix_ + 2;
  if (sent.prefix_length > 0) p.host_own_from = at<int32_t>(received, sent.own_from);
  p.prefix_owner = sent.prefix_owner;
  p.prefix_length = sent.prefix_length;
  p.runs = at<kernels::BlockTableUpdate>(received, sent.runs);
  p.blocks = at<int32_t>(received, sent.blocks);
  p.last = sampler_->last();
  if (drafter_ != nullptr) drafter_->refer(p);
  if (lookup_ != nullptr) lookup_->refer(p, sampler_->history());
  if (sent.has_unread) {
    p.host_offsets = at<int32_t>(received, sent.offsets);
    p.host_unread = at<int32_t>(received, sent.unread);
  }
  p.lora_ids = inputs_.lora_ids;
  p.lora_logits_ids = inputs_.lora_logits_ids;
  if (sent.adapters) p.host_lora_ids = at<int32_t>(received, sent.lora_ids);
  p.rotary_positions = inputs_.rotary_positions;
  if (sent.has_axes) p.host_rotary = at<int32_t>(received, sent.rotary_positions);
  p.num_tokens = sent.num_tokens;
  p.batch = sent.batch;
  p.num_sequences = sent.num_sequences;
  p.num_logits = sent.num_logits;
  p.rows = sent.rows;
  p.num_runs = sent.num_runs;
  p.max_blocks = program_.limits().max_blocks();
  p.num_states = program_.limits().num_states;
  check(kernels::prepare_inputs(p, stream_.handle), "preparing a step");
}

// Runs a decode step, or a pass on blocks, as a graph, other steps node by node.
void Engine::run(const Pass& pass, const Step& step) {
  auto work = [&] { enqueue(pass, step); };
  const std::lock_guard<std::mutex> lock(graphs_mutex_);  // see abort()
  if (aborted_) throw Error("another rank has exited");
  count_collectives(pass.part);
  if (step.decode || &pass == &draft_blocks_)
    graphs_[{&pass, step.batch, step.prefix, step.verifies, step.num_logits > 0, step.adapters}]
        .run(stream_.handle, work);
  else work();
}

// The batch size of the captured decode step that has this many rows.
int Engine::padded(int batch) const {
  return *std::lower_bound(graph_sizes_.begin(), graph_sizes_.end(), batch);
}

int64_t Engine::submit(const StepInputs& inputs) {
  const Limits& limits = program_.limits();
  if (broken_) throw Error("an earlier step failed");
  if (limits.num_blocks == 0) throw Error("the KV cache is not allocated yet");
  Step step = check_step(inputs, limits, program_.vocab_size(), sampler_->slots());
  if (inputs.num_drafts.size > 0 && limits.num_states > 0 && inputs_.commit_lens == nullptr)
    throw Error("the program cannot store recurrent states before drafts");
  if ((inputs.logits == Logits::kPooled) != program_.pools())
    throw Error(program_.pools() ? "a step of a program with pooled rows asks for logits"
                                 : "a step asks for pooled rows, which the program lacks");
  use_device();
  Ticket& ticket = next_ticket();
  // A step of decoding sequences only is padded to a captured batch size, and computes all logits.
  const bool captured = step.num_decode == step.batch && step.batch <= limits.decoding() &&
                        !watches() && !program_.pools() && !step.embeds;
  const bool all = captured || inputs.logits == Logits::kAll;
  std::vector<int32_t> logits_indices;
  std::vector<int64_t> rows;  // rows of logits from which tokens are sampled
  SampledRows sampled_rows = program_.pools() ? SampledRows{} : SampledRows::of(inputs);
  for (int32_t token : sampled_rows.tokens) {
    rows.push_back(all ? token : static_cast<int64_t>(rows.size()));
    if (!all) logits_indices.push_back(token);
  }
  std::vector<int64_t> scored;  // rows of logits at which a token is scored
  for (int32_t token : inputs.scored_rows) {
    scored.push_back(all ? token : static_cast<int64_t>(logits_indices.size()));
    if (!all) logits_indices.push_back(token);
  }
  if (inputs.logits == Logits::kAll && !captured)
    for (int token = 0; token < step.num_tokens; ++token) logits_indices.push_back(token);
  if (!captured && !selects_ && !program_.pools() && logits_indices.empty())
    logits_indices.push_back(0);
  const bool adapters = step.adapters;
  if (program_.pools()) step.num_logits = step.batch;
  else if (captured) step = Step::of_decoding(padded(step.batch));
  else step.num_logits = static_cast<int>(logits_indices.size());
  step.adapters = adapters;
  step.verifies = inputs.verifies;
  const Prefix prefix = shared_prefix(inputs, limits.block_size);
  step.prefix = prefix.length > 0;
  try {
    std::vector<kernels::SlotState> states;
    sampler_->make_room(inputs.admit, states);
    StagingBuffer& packed = ticket.sent;
    packed.clear();
    const Sent sent = pack(packed, inputs, prefix, logits_indices, step.batch);
    const int64_t sampled = packed.add(sampled_rows.slots), picked = packed.add(rows);
    const int64_t drafted[] = {packed.add(sampled_rows.row_of), packed.add(sampled_rows.drafts),
                               packed.add(sampled_rows.drafts_before)};
    const int64_t copies = packed.add(inputs.copies.data, inputs.copies.size);
    const int64_t state_copies = packed.add(inputs.state_copies.data, inputs.state_copies.size);
    const int64_t mask_rows = packed.add(sampled_rows.mask_rows);
    const int64_t masks = packed.add(inputs.masks.data, inputs.masks.size);
    std::vector<int64_t> token_types(inputs.token_type_ids.begin(), inputs.token_type_ids.end());
    if (inputs_.token_type_ids != nullptr) token_types.resize(step.num_tokens);
    const int64_t types = packed.add(token_types);
    const int64_t embeds = packed.add(inputs.embeds.data, inputs.embeds.size);
    const int64_t deep_embeds = packed.add(inputs.deep_embeds.data, inputs.deep_embeds.size);
    const int64_t embed_ids = packed.add(inputs.embed_ids.data, inputs.embed_ids.size);
    const int64_t ranges =
        packed.add(inputs.bidirectional_ranges.data, inputs.bidirectional_ranges.size);
    const int64_t scores[] = {packed.add(scored),
                              packed.add(inputs.scored_targets.data, inputs.scored_targets.size),
                              packed.add(inputs.scored_counts.data, inputs.scored_counts.size)};
    const SentDrafts sent_drafts =
        drafter_ != nullptr && inputs.propose >= 0 ? SentDrafts::of(packed, inputs) : SentDrafts{};
    SentLayers sent_layers{};
    if (layers_ != nullptr) sent_layers = layers_->send(packed, inputs);
    const Admissions& admit = inputs.admit;
    std::vector<int32_t> starts{0};
    for (int32_t length : admit.lengths) starts.push_back(starts.back() + length);
    const int64_t offsets[] = {packed.add(states),
                               packed.add(admit.slots.data, admit.slots.size),
                               packed.add(admit.prompts.data, admit.prompts.size),
                               packed.add(starts),
                               packed.add(admit.tokens.data, admit.tokens.size),
                               packed.add(admit.lists.data, admit.lists.size)};
    const char* received = send(packed);
    copy(caches_, received, copies, inputs.copies);
    copy(states_, received, state_copies, inputs.state_copies);
    sampler_->admit(
        admit,
        {at<kernels::SlotState>(received, offsets[0]), at<int32_t>(received, offsets[1]),
         at<int32_t>(received, offsets[2]), at<int32_t>(received, offsets[3]),
         at<int32_t>(received, offsets[4]), at<int32_t>(received, offsets[5])},
        states);
    prepare(received, sent);
    if (inputs_.token_type_ids != nullptr)
      check(kernels::transfer(inputs_.token_type_ids, received + types, 8ll * step.num_tokens,
                              stream_.handle),
            "copying token types");
    if (step.embeds)
      take_embeds(inputs, at<int32_t>(received, embed_ids), at<float>(received, embeds),
                  at<float>(received, deep_embeds));
    if (step.ranges)
      check(kernels::transfer(inputs_.ranges, received + ranges,
                              inputs.bidirectional_ranges.bytes(), stream_.handle),
            "copying bidirectional ranges");
    run(model_, step);
    if (adapters) check(cudaEventRecord(adapters_used_.handle, stream_.handle), "an event");
    step.adapters = step.embeds = step.deep_embeds = step.ranges =
        false;  // a draft model takes none
    ticket.results = {};
    if (program_.pools()) {
      if (inputs.sample.size > 0) pool(ticket, step);
      check(cudaEventRecord(ticket.done, stream_.handle), "an event");
      ticket.number.store(submitted_);
      return submitted_++;
    }
    Tensor logits = resolve(program_.logits(), step);
    if (captured) logits.shape[0] = inputs.batch();
    Masks masked{};
    if (inputs.mask_rows.size > 0)
      masked = {at<int32_t>(received, mask_rows), at<uint32_t>(received, masks)};
    DraftedRows verified{sampled_rows.begins,
                         static_cast<int>(inputs.sample.size),
                         at<int32_t>(received, drafted[0]),
                         at<int32_t>(received, drafted[1]),
                         at<int32_t>(received, drafted[2]),
                         inputs_.input_ids};
    const DraftedRows* given = inputs.num_drafts.size > 0 ? &verified : nullptr;
    sample(ticket, inputs, logits, rows, sampled_rows.slots, at<int32_t>(received, sampled),
           at<int64_t>(received, picked), masked, given);
    ticket.row_of = std::move(sampled_rows.row_of);
    if (!scored.empty())
      score(ticket, logits, scored, at<int64_t>(received, scores[0]),
            at<int64_t>(received, scores[1]), at<int32_t>(received, scores[2]));
    if (drafter_ != nullptr && inputs.propose >= 0)
      propose(ticket, inputs, step, sent_drafts, sent_layers, received, given);
    if (lookup_ != nullptr && inputs.propose > 0 && inputs.sample.size > 0)
      look_up(ticket, inputs, at<int32_t>(received, sampled));
    check(cudaEventRecord(ticket.done, stream_.handle), "an event");
  } catch (...) {
    broken_ = true;
    throw;
  }
  ticket.number.store(submitted_);
  return submitted_++;
}

// Samples from these rows of the logits, and enqueues the copy of all requested results to the
// host.
void Engine::sample(Ticket& ticket, const StepInputs& inputs, const Tensor& logits,
                    const std::vector<int64_t>& rows, const std::vector<int32_t>& slots,
                    const int32_t* device_slots, const int64_t* device_rows, const Masks& masks,
                    const DraftedRows* drafted) {
  const cudaStream_t stream = stream_.handle;
  Results& results = ticket.results;
  auto read = [&](GrowingPinnedBuffer& room, const void* data, int64_t bytes) {
    void* target = room.at_least(bytes);
    check(kernels::transfer(target, data, bytes, stream), "reading what was chosen");
    return target;
  };
  Tensor chosen = logits;
  results.num_sampled = static_cast<int>(rows.size());
  chosen.shape[0] = results.num_sampled;
  bool in_line = true;
  for (size_t i = 0; i < rows.size(); ++i) in_line = in_line && rows[i] == static_cast<int64_t>(i);
  if (!in_line) {
    const int64_t bytes = logits.shape[1] * width(logits.dtype) * program_.limits().max_batch;
    if (gathered_ == nullptr) gathered_ = std::make_unique<DeviceBuffer>(bytes, "logits");
    chosen.data = gathered_->data;
    check(kernels::gather_rows(logits.dtype, chosen.data, logits.data, device_rows,
                               results.num_sampled, logits.shape[0],
                               static_cast<int>(logits.shape[1]), stream),
          "gathering rows of logits");
  }
  if (!rows.empty()) {
    sampler_->sample(chosen, device_slots, slots, masks, drafted);
    if (drafted != nullptr) {
      results.num_sequences = drafted->sequences;
      results.positions = drafted->positions();
      results.counts = static_cast<const int32_t*>(
          read(ticket.counts, sampler_->counts(), 4ll * drafted->sequences));
    }
    results.tokens =
        static_cast<const int64_t*>(read(ticket.tokens, sampler_->sampled(), 8 * chosen.shape[0]));
    if (sampler_->logprobs() != nullptr)
      results.logprobs = static_cast<const kernels::Logprobs*>(
          read(ticket.logprobs, sampler_->logprobs(),
               chosen.shape[0] * static_cast<int64_t>(sizeof(kernels::Logprobs))));
    if (inputs.candidates > 0) find_candidates(ticket, chosen, inputs.candidates);
  }
  results.dtype = logits.dtype;
  results.logits_width = logits.shape[1];
  const Tensor& wanted = inputs.logits == Logits::kAll ? logits : chosen;
  if (inputs.logits == Logits::kNone || wanted.shape[0] == 0) return;
  results.num_logits = static_cast<int>(wanted.shape[0]);
  results.logits = read(ticket.logits, wanted.data, wanted.size() * width(wanted.dtype));
}

// Enqueues the copy of a step's pooled rows to the host.
void Engine::pool(Ticket& ticket, const Step& step) {
  const Tensor rows = resolve(program_.logits(), step);
  const int64_t bytes = rows.size() * width(rows.dtype);
  void* host = ticket.logits.at_least(bytes);
  check(kernels::transfer(host, rows.data, bytes, stream_.handle), "reading pooled rows");
  ticket.results.dtype = rows.dtype;
  ticket.results.logits_width = rows.shape[1];
  ticket.results.num_logits = static_cast<int>(rows.shape[0]);
  ticket.results.logits = host;
}

// Computes log-probabilities of given tokens at these rows of the logits, and enqueues the copy to
// the host.
void Engine::score(Ticket& ticket, const Tensor& logits, const std::vector<int64_t>& rows,
                   const int64_t* device_rows, const int64_t* targets, const int32_t* counts) {
  const int num = static_cast<int>(rows.size()), stride = static_cast<int>(logits.shape[1]);
  const int64_t row_bytes = logits.shape[1] * width(logits.dtype);
  bool in_line = true;
  for (int i = 0; i < num; ++i) in_line = in_line && rows[i] == rows[0] + i;
  const void* data = static_cast<const char*>(logits.data) + rows[0] * row_bytes;
  if (!in_line) {  // a captured step, so there are no more rows than sequences
    if (gathered_ == nullptr)
      gathered_ = std::make_unique<DeviceBuffer>(row_bytes * program_.limits().max_batch, "logits");
    check(kernels::gather_rows(logits.dtype, gathered_->data, logits.data, device_rows, num,
                               logits.shape[0], stride, stream_.handle),
          "gathering scored logits");
    data = gathered_->data;
  }
  constexpr int64_t kBytes = sizeof(kernels::Logprobs);
  if (scored_ == nullptr)
    scored_ = std::make_unique<DeviceBuffer>(kBytes * program_.limits().max_logits,
                                             "log-probabilities of prompts");
  auto* made = static_cast<kernels::Logprobs*>(scored_->data);
  check(kernels::logprobs(
            logits.dtype,
            {made, data, targets, nullptr, nullptr, num, program_.vocab_size(), stride, counts},
            stream_.handle),
        "computing log-probabilities of a prompt");
  auto* host = static_cast<kernels::Logprobs*>(ticket.scored.at_least(kBytes * num));
  check(kernels::transfer(host, made, kBytes * num, stream_.handle),
        "copying log-probabilities of a prompt");
  ticket.results.num_scored = num;
  ticket.results.scored = host;
}

// All tokens, then all log-probabilities.
void Engine::find_candidates(Ticket& ticket, const Tensor& rows, int count) {
  auto grow = [&](std::unique_ptr<DeviceBuffer>& buffer, int64_t& room, int64_t bytes) {
    if (bytes <= room) return;
    synchronize();
    buffer = std::make_unique<DeviceBuffer>(bytes, "candidates");
    room = bytes;
  };
  const int64_t found = rows.shape[0] * count;
  const int vocab = program_.vocab_size(), num = static_cast<int>(rows.shape[0]);
  grow(candidates_, candidates_room_, 8 * found);
  grow(candidates_scratch_, candidates_scratch_room_,
       kernels::candidates_scratch(num, vocab, count));
  auto* tokens = static_cast<int32_t*>(candidates_->data);
  const kernels::CandidatesParams p{
      tokens, reinterpret_cast<float*>(tokens + found), rows.data, candidates_scratch_->data, num,
      vocab,  static_cast<int>(rows.shape[1]),          count};
  check(kernels::candidates(rows.dtype, p, stream_.handle), "choosing candidates");
  auto* host = static_cast<int32_t*>(ticket.candidates.at_least(8 * found));
  check(kernels::transfer(host, tokens, 8 * found, stream_.handle), "reading candidates");
  ticket.results.candidates = count;
  ticket.results.candidate_tokens = host;
  ticket.results.candidate_log_probs = reinterpret_cast<const float*>(host + found);
}

void Engine::make_drafter() {
  const DraftTensors& draft = program_.draft();
  drafter_ = std::make_unique<Drafter>(
      program_, draft.token_ids >= 0 ? places_[draft.token_ids] : nullptr, memory_, stream_.handle);
  draft_tokens_.places = drafter_->first_inputs();
  if (draft.features >= 0) draft_tokens_.places[draft.hidden] = places_[draft.features];
  if (drafter_->block() > 0) draft_blocks_.places = drafter_->block_inputs();
  const int last = program_.num_draft_layers() - 1;
  next_drafts_.part = draft_part(last);
  next_drafts_.places = drafter_->next_inputs();
  next_drafts_.then = [this, last](const Step& step) {
    drafter_->take(outputs_of_draft(step, last), step.batch, Drafter::Rows::kNext);
  };
  if (last == 0) return;
  layers_ = std::make_unique<DraftLayers>(program_, memory_, stream_.handle);
  for (int layer = 1; layer <= last; ++layer) {
    layer_tokens_.push_back(
        std::make_unique<Pass>(Pass{draft_part(layer), layers_->step_inputs(layer)}));
    layer_tails_.push_back(
        std::make_unique<Pass>(Pass{draft_part(layer), layers_->tail_inputs(layer)}));
  }
}

DraftOutputs Engine::outputs_of_draft(const Step& step, int layer) const {
  const DraftTensors& draft = program_.draft(layer);
  return {resolve(draft.logits, step), resolve(draft.hidden_out, step),
          resolve(draft.hidden, step)};
}

// Runs the draft model on the tokens of a step, unless it reads the model's caches, and then on the
// last draft of each sequence that the step samples, as often as it lacks drafts; and enqueues the
// copy of the drafts to the host.
void Engine::propose(Ticket& ticket, const StepInputs& inputs, Step step, const SentDrafts& sent,
                     const SentLayers& layers, const char* received, const DraftedRows* drafted) {
  const int sequences = static_cast<int>(inputs.sample.size);
  const int wanted = sequences > 0 ? inputs.propose : 0;
  const bool first = wanted > 0 && drafter_->drafts_on_steps();  // whether the first pass drafts
  int later = drafter_->block() > 0 ? 0 : wanted - first;
  const bool blocks = drafter_->block() > 0 && wanted > 0;
  const int rows = later > 0 || blocks ? padded(sequences) : sequences;
  kernels::BeginDraftsParams begin{};
  begin.input_ids = inputs_.input_ids;
  begin.position_ids = inputs_.position_ids;
  begin.block_table = inputs_.block_table;
  begin.chosen = sampler_->sampled();
  begin.sequences = sequences;
  begin.rows = rows;
  if (drafted != nullptr && sequences > 0) {
    begin.counts = sampler_->counts();
    begin.row_of = drafted->row_of;
    begin.positions = drafted->positions();
  }
  if (!drafter_->runs_on_steps() && later > 0) {
    const Tensor features = resolve(program_.draft().features, step);
    begin.features = static_cast<const char*>(features.data);
    begin.hidden = places_[program_.draft().hidden];
    begin.feature_bytes = features.shape[1] * width(features.dtype);
  }
  if (layers_ != nullptr && wanted > 0) drafter_->take_none(sequences);
  drafter_->begin(begin, sent, received);
  step.prefix = false;
  step.num_logits = !first ? 0 : step.decode ? step.batch : sequences;
  if (drafter_->runs_on_steps()) run(draft_tokens_, step);
  if (first) {
    DraftOutputs outputs = outputs_of_draft(step);
    if (layers_ != nullptr) outputs.hidden.data = nullptr;  // the next layer's are others
    drafter_->take(outputs, sequences,
                   step.decode ? Drafter::Rows::kOfAll : Drafter::Rows::kOfSampled);
  }
  if (layers_ != nullptr) {
    const DraftLayers::Given given{layers,
                                   received,
                                   drafter_->shifted_ids(),
                                   inputs_.position_ids,
                                   inputs_.past_lens,
                                   begin.counts,
                                   at<int32_t>(received, sent.firsts),
                                   sent.num_tokens};
    later = run_layers(given, step, sequences, wanted);
  }
  for (int pass = 0; pass < later; ++pass) run(next_drafts_, Step::of_decoding(rows));
  if (blocks) propose_blocks(step_of_blocks(rows), sequences, wanted);
  if (wanted == 0) return;
  const int64_t bytes = 8ll * kernels::kMaxProposals * sequences;
  void* host = ticket.drafts.at_least(bytes);
  check(kernels::transfer(host, drafter_->drafts(), bytes, stream_.handle), "reading drafts");
  ticket.results.num_drafting = sequences;
  ticket.results.proposed = wanted;
  ticket.results.drafts = static_cast<const int64_t*>(host);
}

// Runs the layers of a draft model after the first, each on the tokens of a step and, if it drafts,
// on the tail of each sequence. Returns the number of drafts that are left for the last layer.
// There are no more drafts where the tails have more rows than a decode step.
int Engine::run_layers(const DraftLayers::Given& given, const Step& step, int sequences,
                       int wanted) {
  const int last = program_.num_draft_layers() - 1;
  auto drafts = [&](int layer) {
    return layer < wanted && int64_t{sequences} * layer <= program_.limits().decoding();
  };
  auto of_tail = [&](int layer) {
    Step tail = Step::of_decoding(padded(sequences * layer));
    tail.verifies = true;
    return tail;
  };
  Step tokens = step;
  tokens.num_logits = 0;
  auto run_tail = [&](int layer) {
    run(*layer_tails_[layer - 1], of_tail(layer));
    DraftOutputs outputs = outputs_of_draft(of_tail(layer), layer);
    if (layer < last) outputs.hidden.data = nullptr;
    drafter_->take_rows(outputs, sequences, layers_->last_rows(layer));
  };
  for (int layer = 1; layer <= last; ++layer) {
    layers_->lag(layer, given, step, outputs_of_draft(step, layer - 1).hidden_out);
    if (layer > 1 && drafts(layer - 1)) run_tail(layer - 1);
    if (drafts(layer))
      layers_->tail(layer, drafter_->next(), given, drafter_->drafts(), sequences,
                    of_tail(layer).batch, outputs_of_draft(step, layer - 1).hidden_out);
    run(*layer_tokens_[layer - 1], tokens);
  }
  if (drafts(last)) {
    run_tail(last);
    return std::max(wanted - last - 1, 0);
  }
  return 0;
}

Step Engine::step_of_blocks(int rows) const {
  Step step{rows * drafter_->block(), rows * (drafter_->block() - 1), rows};
  step.longest = drafter_->block();
  return step;
}

// Runs the draft model on blocks. There are no drafts for more sequences than it has room for.
void Engine::propose_blocks(const Step& step, int sequences, int wanted) {
  if (step.batch > drafter_->max_blocks()) {
    drafter_->take_none(sequences);
    return;
  }
  drafter_->fill(step.batch);
  run(draft_blocks_, step);
  drafter_->take_blocks(resolve(program_.draft().logits, step), sequences,
                        std::min(wanted, drafter_->block() - 1));
}

// Looks up drafts of each sequence that the step samples, and enqueues their copy to the host.
// slots: [num_sampled], on the device.
void Engine::look_up(Ticket& ticket, const StepInputs& inputs, const int32_t* slots) {
  kernels::LookupDraftsParams p{};
  p.history = sampler_->history();
  p.states = sampler_->states();
  p.slots = slots;
  p.sequences = static_cast<int>(inputs.sample.size);
  p.count = inputs.propose;
  for (int32_t sequence : inputs.sample)
    p.max_length = std::max(p.max_length, inputs.past_lens[sequence] + inputs.fresh(sequence) + 1);
  lookup_->find(p);
  const int64_t bytes = PromptLookup::bytes(p.sequences);
  void* host = ticket.drafts.at_least(bytes);
  check(kernels::transfer(host, lookup_->drafts(), bytes, stream_.handle), "reading drafts");
  Results& results = ticket.results;
  results.num_drafting = p.sequences;
  results.proposed = p.count;
  results.drafts = static_cast<const int64_t*>(host);
  results.matches = reinterpret_cast<const int32_t*>(results.drafts +
                                                     int64_t{kernels::kMaxProposals} * p.sequences);
}

const Engine::Results& Engine::wait(int64_t number) {
  Ticket& ticket = tickets_[std::max<int64_t>(number, 0) % kMaxInFlight];
  if (number < 0 || ticket.number.load() != number)
    throw Error("step " + std::to_string(number) + " is not in flight");
  ticket.results.row_of = ticket.row_of.data();
  check(cudaEventSynchronize(ticket.done), "a step");
  return ticket.results;
}

void Engine::release(int64_t number) {
  Ticket& ticket = tickets_[number % kMaxInFlight];
  ticket.encoded.clear();
  ticket.number.store(-1);
}

void Engine::warm(const std::vector<int>& lengths, bool decode, bool verifies) {
  const Limits& limits = program_.limits();
  use_device();
  const int batch = static_cast<int>(lengths.size());
  std::vector<int32_t> starts{0}, zeros(batch), ones(batch, 1), index{0}, slots(batch);
  std::iota(slots.begin(), slots.end(), 0);
  const std::vector<int32_t> nobody(limits.num_states > 0 ? batch : 0, limits.num_states);
  int longest = 0;
  for (int length : lengths) {
    if (length < 1 || length > limits.max_seq_len || length > limits.max_tokens ||
        (decode && length != 1))
      throw Error("a sequence of " + std::to_string(length) +
                  " tokens exceeds the engine's limits");
    starts.push_back(std::min(starts.back() + length, limits.max_tokens + 1));
    longest = std::max(longest, length);
  }
  const int size = starts.back();
  if (batch < 1 || size > limits.max_tokens || batch > limits.max_batch ||
      (decode && batch > limits.decoding()))
    throw Error("a step of " + std::to_string(batch) + " sequences with " + std::to_string(size) +
                " tokens exceeds the engine's limits");
  const std::vector<int64_t> ids(size);
  StepInputs inputs{};
  inputs.token_ids = {ids.data(), size};
  inputs.cu_seqlens = {starts.data(), batch + 1};
  inputs.past_lens = inputs.memory_starts = {zeros.data(), batch};
  inputs.slots = {slots.data(), batch};
  inputs.verifies = verifies;
  inputs.memory_lens = {ones.data(), batch};
  inputs.state_slots = {nobody.data(), static_cast<int64_t>(nobody.size())};
  inputs.commit_lens = {lengths.data(), batch};
  Step step = Step::of_decoding(batch);
  if (decode && program_.pools()) throw Error("a program with pooled rows does not decode");
  if (!decode) step = {size, program_.pools() ? batch : 1, batch, false, 0, longest, longest};
  step.verifies = verifies;
  StagingBuffer packed;
  // All tokens are written to the padding block.
  const std::vector<int32_t> table(static_cast<int64_t>(batch) * limits.max_blocks(),
                                   limits.num_blocks);
  inputs.block_tables = {table.data(), static_cast<int64_t>(table.size())};
  const Sent sent =
      pack(packed, inputs, {}, decode || program_.pools() ? std::vector<int32_t>{} : index, batch);
  prepare(send(packed), sent);
  gemm_->time_algorithms(decode || size == limits.max_tokens);
  attention_->make_plans(true);
  run(model_, step);
  if (drafter_ != nullptr) warm_drafts(step);
  const bool shares = decode && batch > 1;
  for (bool adapters : {false, true}) {
    step.adapters = adapters;
    if (adapters && adapter_layers_.empty()) continue;
    step.prefix = false;
    if (adapters) run(model_, step);
    step.prefix = shares;
    if (shares) run(model_, step);  // with an empty prefix; the captured graph serves any
  }
  step.adapters = false;
  if (!decode && !program_.nodes(Part::kEncoder).empty() && longest <= limits.mem_max_seq_len) {
    step.num_logits = 0;
    enqueue(encoder_, step);  // to the first row of the encoder output
  }
  synchronize();
  gemm_->time_algorithms(false);
  attention_->make_plans(false);
}

// Runs the passes of the draft model that may follow a step, on the padding block.
void Engine::warm_drafts(Step step) {
  if (drafter_->drafts_on_steps()) run(draft_tokens_, step);
  if (step.decode && !step.verifies) {
    if (drafter_->block() == 0) run(next_drafts_, step);
    else if (step.batch <= drafter_->max_blocks()) run(draft_blocks_, step_of_blocks(step.batch));
  }
  Step tail = step;
  tail.verifies = true;
  for (const auto& pass : layer_tails_)
    if (step.decode && (step.verifies || step.batch == 1)) run(*pass, tail);
  if (!drafter_->runs_on_steps()) return;
  step.num_logits = 0;
  run(draft_tokens_, step);
  for (const auto& pass : layer_tokens_) run(*pass, step);
}

void Engine::watch(const std::vector<int>& tensors) {
  for (int tensor : tensors)
    if (program_.tensor(tensor).kind != Kind::kValue)
      throw Error("tensor " + std::to_string(tensor) + " is not a value and cannot be watched");
  watched_.clear();
  for (int tensor : tensors) watched_[tensor] = {};
}

void Engine::read_watched(int tensor, float* out, int64_t count) const {
  const auto found = watched_.find(tensor);
  if (found == watched_.end() || found->second.empty())
    throw Error("tensor " + std::to_string(tensor) + " was not watched in the last step");
  const DType dtype = program_.tensors()[tensor].dtype;
  const int64_t held = static_cast<int64_t>(found->second.size()) / width(dtype);
  check_size("the array for a watched value", count, held);
  to_float(out, found->second.data(), held, dtype);
}

void Engine::watch_inside(Watcher watcher, void* user) { watcher_ = watcher, user_ = user; }

std::string Engine::unique_id() {
  ncclUniqueId id;
  check(ncclGetUniqueId(&id), "making a communicator");
  return {id.internal, sizeof id.internal};
}

void Engine::join(const std::string& id, int rank, int size, const std::string& collectives) {
  ncclUniqueId unique;
  if (id.size() != sizeof unique.internal) throw Error("the communicator's id has the wrong size");
  if (rank < 0 || rank >= size)
    throw Error("rank " + std::to_string(rank) + " is not below the number of ranks, " +
                std::to_string(size));
  if (collectives != "nccl" && collectives != "peer" && collectives != "auto")
    throw Error("collectives are '" + collectives + "', expected nccl, peer or auto");
  if (communicator_ != nullptr) throw Error("the engine has already joined its ranks");
  std::memcpy(unique.internal, id.data(), id.size());
  use_device();
  ncclComm_t joined = nullptr;
  check(ncclCommInitRank(&joined, size, unique, rank), "making a communicator");
  communicator_ = joined;
  if (collectives != "nccl" && size > 1) join_peers(rank, size, collectives == "auto");
}

// Connects the ranks over peer memory. With NCCL as the other choice, a reason against it is none
// against joining.
void Engine::join_peers(int rank, int size, bool with_nccl) {
  const CollectiveSizes sizes = collective_sizes();
  if (sizes.reduced_bytes == 0 && sizes.gathered_rows == 0) return;
  std::string reason = size > kernels::kMaxPeers
                           ? "there are " + std::to_string(size) + " ranks, at most " +
                                 std::to_string(kernels::kMaxPeers) + " are supported"
                           : "";
  if (reason.empty()) {
    std::unique_ptr<Peers> made;
    try {
      made = std::make_unique<Peers>(rank, layout_of(sizes, size), stream_.handle);
    } catch (const Error&) {
      cudaGetLastError();  // connect() reports it to all ranks
    }
    {
      const std::lock_guard<std::mutex> lock(peers_mutex_);
      peers_ = std::move(made);
      if (peers_ != nullptr && aborted_) peers_->abort();
    }
    reason = connect(peers_.get(), rank, size, communicator_, stream_.handle);
  }
  if (reason.empty()) return choose_ways(*peers_, sizes, with_nccl, communicator_, stream_.handle);
  {
    const std::lock_guard<std::mutex> lock(peers_mutex_);
    peers_.reset();
  }
  if (!with_nccl)
    throw Error("collectives over peer memory are not possible: " + reason +
                "; set LLMC_COLLECTIVES to auto or nccl");
}

CollectiveSizes Engine::collective_sizes() const {
  const Limits& limits = program_.limits();
  CollectiveSizes sizes;
  sizes.dtype = program_.dtype();
  for (Part part : program_.parts())
    for (const Node& node : program_.nodes(part)) {
      if (!node.plugin->collective()) continue;
      const Tensor x = program_.resolve(node.inputs[0],
                                        {limits.max_tokens, limits.max_logits, limits.max_batch});
      if (node.op == "AllReduce") {
        sizes.reduced_bytes = std::max(sizes.reduced_bytes, x.size() * width(x.dtype));
      } else {
        sizes.gathered_rows = std::max(sizes.gathered_rows, static_cast<int>(x.shape[0]));
        sizes.gathered_width = std::max(sizes.gathered_width, x.shape[1]);
      }
    }
  return sizes;
}

// Counts the collectives of a pass that is about to run, and begins the epochs again before they
// overflow. A captured pass runs twice at first, so each one counts twice.
void Engine::count_collectives(Part part) {
  if (peers_ == nullptr) return;
  collectives_ += 2 * static_cast<int64_t>(program_.nodes(part).size());
  if (collectives_ < kMaxCollectives) return;
  reset(*peers_, communicator_, stream_.handle);
  collectives_ = 0;
}

// NCCL aborts device work at once, but waits on the host until no graph refers to the communicator.
void Engine::abort() {
  aborted_ = true;
  {
    const std::lock_guard<std::mutex> lock(peers_mutex_);
    if (peers_ != nullptr) peers_->abort();
  }
  ncclComm_t ended = communicator_.exchange(nullptr);
  if (ended == nullptr) return;
  std::thread ending([ended] { ncclCommAbort(ended); });
  {
    const std::lock_guard<std::mutex> lock(graphs_mutex_);
    graphs_.clear();
  }
  ending.join();
}

void Engine::check_device() const {
  const cudaError_t status = cudaStreamQuery(stream_.handle);
  if (status != cudaErrorNotReady) check(status, "a step");
}

void Engine::synchronize() { check(cudaStreamSynchronize(stream_.handle), "the engine"); }

}  // namespace llmc
