#include "engine.h"

#include <algorithm>
#include <cstring>

namespace llmc {
namespace {

constexpr int64_t kPinned = 64 << 20;

// So that members made after it are of this device.
Program on(int device, Program program) {
  program.finish();
  check(cudaSetDevice(device), "choosing a device");
  return program;
}

}  // namespace

Engine::Engine(Program program, int device)
    : program_(on(device, std::move(program))), device_(device), pinned_(kPinned), memory_(stream_.handle) {
  place_tensors();
  reserve_scratch();
  gemm_ = std::make_unique<Gemm>();
  sdpa_ = std::make_unique<Sdpa>();
  sampler_ = std::make_unique<Sampler>(program_.limits(), program_.vocab_size(), memory_, stream_.handle);
  beams_ = std::make_unique<Beams>(program_.limits(), program_.vocab_size(), stream_.handle);
  synchronize();
}

Engine::~Engine() {
  cudaSetDevice(device_);
  cudaStreamSynchronize(stream_.handle);
  graphs_.clear();
  beams_.reset();
  if (communicator_ != nullptr) ncclCommDestroy(communicator_);
}

void Engine::place_tensors() {
  const Limits& limits = program_.limits();
  char* token_arena = memory_.allocate<char>(program_.token_bytes() * limits.max_tokens, "activations");
  char* logit_arena = memory_.allocate<char>(program_.logit_bytes() * limits.max_logits, "logits");
  static const std::map<Kind, const char*> names = {{Kind::kInput, "inputs"},
                                                    {Kind::kWeight, "weights"},
                                                    {Kind::kCache, "the KV cache"},
                                                    {Kind::kMemory, "the encoder's memory"}};
  for (size_t i = 0; i < program_.tensors().size(); ++i) {
    const Declared& tensor = program_.tensors()[i];
    if (tensor.kind == Kind::kValue)
      places_.push_back(tensor.per_logit ? logit_arena + tensor.offset * limits.max_logits
                                         : token_arena + tensor.offset * limits.max_tokens);
    else
      places_.push_back(memory_.allocate<char>(program_.capacity(static_cast<int>(i)) * width(tensor.dtype),
                                               names.at(tensor.kind)));
  }
  auto input = [&](auto*& place, const char* name) {
    const int number = program_.input(name);
    if (number >= 0) place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(places_[number]);
  };
  input(inputs_.input_ids, "input_ids");
  input(inputs_.position_ids, "position_ids");
  input(inputs_.logits_indices, "logits_indices");
  input(inputs_.cu_seqlens, "cu_seqlens");
  input(inputs_.past_lens, "past_lens");
  input(inputs_.indirection, kIndirection);
  input(inputs_.memory_starts, kMemoryStarts);
  input(inputs_.memory_lens, kMemoryLens);
  input(inputs_.memory_rows, kMemoryRows);
}

// Scratch for the largest step, and counters.
void Engine::reserve_scratch() {
  const Limits& limits = program_.limits();
  int64_t most = 0;
  for (int tokens : {1, kernels::kGemvRows, limits.max_tokens}) {
    const Step step{std::min(tokens, limits.max_tokens), std::min(tokens, limits.max_logits),
                    std::min(tokens, limits.max_batch)};
    for (const auto* nodes : {&program_.nodes(), &program_.encoder_nodes()})
      for (const Node& node : *nodes) {
        std::vector<Tensor> inputs;
        for (int tensor : node.inputs) inputs.push_back(resolve(tensor, step));
        most = std::max(most, node.plugin->workspace(inputs));
      }
  }
  scratch_ = memory_.allocate<char>(most, "scratch");
  counters_ = memory_.allocate<int32_t>(kCounters, "counters");
}

Tensor Engine::resolve(int tensor, const Step& step) const {
  if (tensor < 0) return {};
  Tensor made = program_.resolve(tensor, step);
  made.data = places_[tensor];
  if (program_.tensors()[tensor].kind == Kind::kCache)
    made.data = places_[tensor] + made.size() / step.batch * width(made.dtype) * step.first_row;
  return made;
}

void Engine::use_device() const { check(cudaSetDevice(device_), "choosing a device"); }

void Engine::load_weight(int tensor, const void* data, int64_t bytes) {
  if (program_.tensor(tensor).kind != Kind::kWeight)
    throw Error("tensor " + std::to_string(tensor) + " is no weight");
  check_size("a weight, in bytes,", bytes, bytes_of(tensor));
  use_device();
  for (int64_t done = 0; done < bytes; done += kPinned) {
    const int64_t part = std::min(kPinned, bytes - done);
    synchronize();  // the pinned memory is free again
    std::memcpy(pinned_.data, static_cast<const char*>(data) + done, part);
    upload(places_[tensor] + done, pinned_.data, part, stream_.handle);
  }
}

void Engine::enqueue(const std::vector<Node>& nodes, const Step& step) {
  Context context;
  context.stream = stream_.handle;
  context.gemm = gemm_.get();
  context.sdpa = sdpa_.get();
  context.counters = counters_;
  context.communicator = communicator_;
  context.decode = step.decode;
  context.longest = step.longest;
  context.reach = step.reach;
  context.indirect = step.indirect;
  context.watcher = watcher_;
  context.user = user_;
  std::map<int, void*> moved;  // what lies in another tensor's memory in this step
  for (const Node& node : nodes) {
    std::vector<Tensor> inputs, outputs;
    for (int tensor : node.inputs) {
      inputs.push_back(resolve(tensor, step));
      const auto found = moved.find(tensor);
      if (found != moved.end()) inputs.back().data = found->second;
    }
    if (node.plugin->passes_on(context)) {
      moved[node.outputs[0]] = inputs[0].data;
      continue;
    }
    for (int tensor : node.outputs) outputs.push_back(resolve(tensor, step));
    node.plugin->enqueue(inputs, outputs, scratch_, context);
    for (size_t i = 0; i < outputs.size() && !watched_.empty(); ++i) {
      const auto found = watched_.find(node.outputs[i]);
      if (found != watched_.end()) found->second = download(outputs[i], stream_.handle);
    }
  }
  last_ = step;
}

void Engine::run(const StepInputs& inputs) {
  const Step step = check_step(inputs, program_.limits());
  if (step.indirect && inputs_.indirection == nullptr)
    throw Error("the model was not compiled for beam search; compile it with --max_beam_width");
  use_device();
  decodes_ = false;
  send(inputs_.input_ids, inputs.input_ids);
  send(inputs_.position_ids, inputs.position_ids);
  send(inputs_.cu_seqlens, inputs.cu_seqlens);
  send(inputs_.past_lens, inputs.past_lens);
  send(inputs_.logits_indices, inputs.logits_indices);
  if (step.indirect) send(inputs_.indirection, inputs.indirection);
  enqueue(program_.nodes(), step);
}

void Engine::encode(const EncoderInputs& inputs) {
  if (program_.encoder_nodes().empty()) throw Error("the model has no encoder");
  const Step step = check_step(inputs, program_.limits());
  use_device();
  decodes_ = false;
  send(inputs_.input_ids, inputs.input_ids);
  send(inputs_.position_ids, inputs.position_ids);
  send(inputs_.cu_seqlens, inputs.cu_seqlens);
  send(inputs_.memory_rows, inputs.memory_rows);
  enqueue(program_.encoder_nodes(), step);
}

void Engine::set_memory(const HostArray<int32_t>& starts, const HostArray<int32_t>& lens) {
  if (inputs_.memory_starts == nullptr || inputs_.memory_lens == nullptr) throw Error("the model has no encoder");
  check_memory(starts, lens, program_.limits());
  use_device();
  send(inputs_.memory_starts, starts);
  send(inputs_.memory_lens, lens);
}

void Engine::read_logits(float* out, int64_t count) {
  const Tensor tensor = logits();
  const int vocab_size = program_.vocab_size();
  check_size("the array for logits", count, tensor.shape[0] * vocab_size);
  const int64_t stride = tensor.shape[1] * width(tensor.dtype);
  const std::vector<char> host = download(tensor, stream_.handle);
  for (int64_t row = 0; row < tensor.shape[0]; ++row)
    to_float(out + row * vocab_size, host.data() + row * stride, vocab_size, tensor.dtype);
}

void Engine::watch(const std::vector<int>& tensors) {
  for (int tensor : tensors)
    if (program_.tensor(tensor).kind != Kind::kValue)
      throw Error("tensor " + std::to_string(tensor) + " is no value to watch");
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

void Engine::begin_decode(const HostArray<int64_t>& tokens, const HostArray<int32_t>& past_lens,
                          const Sampling& sampling, const Requests& requests, const std::vector<int64_t>& end_ids,
                          int first_row) {
  const Limits& limits = program_.limits();
  const int64_t batch = past_lens.size;
  const bool from_logits = tokens.size == 0;
  check_rows(first_row, batch, limits);
  if (batch > limits.decoding())
    throw Error("a batch of " + std::to_string(batch) + " exceeds the " + std::to_string(limits.decoding()) +
                " sequences of a decode step");
  if (from_logits && last_.num_logits != batch)
    throw Error("the last step made " + std::to_string(last_.num_logits) + " rows of logits for " +
                std::to_string(batch) + " sequences");
  if (!from_logits) check_size("tokens", tokens.size, batch);
  for (int32_t past : past_lens)  // with tokens the next one is written there; else it is in the cache already
    if (past < (from_logits ? 1 : 0) || past >= limits.max_seq_len + (from_logits ? 1 : 0))
      throw Error(std::to_string(past) + " positions of a sequence are no past of its next token; the cache has " +
                  std::to_string(limits.max_seq_len));
  use_device();
  decodes_ = false;
  if (sampler_->begin(static_cast<int>(batch), sampling, requests, end_ids)) graphs_.clear();
  std::vector<int32_t> starts(batch + 1), past(past_lens.begin(), past_lens.end());
  for (int i = 0; i <= batch; ++i) starts[i] = i;
  if (from_logits)  // advance() counts a position
    for (int32_t& length : past) --length;
  const std::vector<int64_t> positions(past.begin(), past.end()), rows(starts.begin(), starts.end() - 1);
  const cudaStream_t stream = stream_.handle;
  send(inputs_.input_ids, tokens);
  upload(inputs_.position_ids, positions.data(), 8 * batch, stream);
  upload(inputs_.cu_seqlens, starts.data(), 4 * (batch + 1), stream);
  upload(inputs_.past_lens, past.data(), 4 * batch, stream);
  upload(inputs_.logits_indices, rows.data(), 8 * batch, stream);  // a TensorRT plan gathers in every step
  if (from_logits) {
    sampler_->choose(logits(), first_row);
    sampler_->advance({inputs_.input_ids, inputs_.position_ids, inputs_.past_lens}, first_row);
    sampler_->count(1);
  }
  synchronize();  // the host's arrays end here
  decodes_ = true;
}

void Engine::decode(int steps) {
  if (steps < 1) return;
  if (!decodes_) throw Error("there is nothing to go on with: begin_decode comes after any other step");
  sampler_->count(steps);
  use_device();
  const Step step = Step::of_decoding(sampler_->batch());
  graphs_.run(sampler_->key(), stream_.handle, steps, [&] {
    enqueue(program_.nodes(), step);  // the logits of each sequence's newest token
    sampler_->choose(logits(), 0);    // lead to a token of each
    sampler_->advance({inputs_.input_ids, inputs_.position_ids, inputs_.past_lens}, 0);  // which is the next newest
  });
  last_ = step;
}

void Engine::set_history(int first_row, const HostArray<int32_t>& tokens, const std::vector<int32_t>& lengths) {
  use_device();
  if (sampler_->set_history(first_row, tokens, lengths)) graphs_.clear();
}

void Engine::candidates(int rows, int count, int32_t* tokens, float* log_probs) {
  if (rows != last_.num_logits || rows < 1 || rows > program_.limits().max_batch)
    throw Error("candidates of " + std::to_string(rows) + " rows; the last step made " +
                std::to_string(last_.num_logits) + " rows of logits, and max_batch_size is " +
                std::to_string(program_.limits().max_batch));
  use_device();
  beams_->reserve(count);
  beams_->find(logits(), count);
  synchronize();
  beams_->read(rows, count, tokens, log_probs);
}

void Engine::follow(const BeamStep& beams, int32_t* tokens, float* log_probs) {
  if (inputs_.indirection == nullptr)
    throw Error("the model was not compiled for beam search; compile it with --max_beam_width");
  check_step(beams, program_.limits());
  use_device();
  decodes_ = false;
  beams_->reserve(beams.count);
  const Step step = Step::of_decoding(beams.rows(), /*indirect=*/true);
  const BeamInputs inputs{inputs_.input_ids, inputs_.position_ids, inputs_.past_lens, inputs_.cu_seqlens,
                          inputs_.logits_indices, inputs_.indirection};
  beams_->run(beams, inputs, [&] {
    enqueue(program_.nodes(), step);
    return logits();
  });
  last_ = step;
  synchronize();
  beams_->read(beams.rows(), beams.count, tokens, log_probs);
}

std::string Engine::unique_id() {
  ncclUniqueId id;
  check(ncclGetUniqueId(&id), "making a communicator");
  return {id.internal, sizeof id.internal};
}

void Engine::join(const std::string& id, int rank, int size) {
  ncclUniqueId unique;
  if (id.size() != sizeof unique.internal) throw Error("the communicator's id is broken");
  if (rank < 0 || rank >= size) throw Error("there is no rank " + std::to_string(rank) + " of " + std::to_string(size));
  if (communicator_ != nullptr) throw Error("the engine has joined its ranks already");
  std::memcpy(unique.internal, id.data(), id.size());
  use_device();
  check(ncclCommInitRank(&communicator_, size, unique, rank), "making a communicator");
}

void Engine::abort() {
  if (communicator_ != nullptr) ncclCommAbort(std::exchange(communicator_, nullptr));
}

void Engine::copy_row(int source, int target, int length) {
  const Limits& limits = program_.limits();
  check_rows(source, 1, limits);
  check_rows(target, 1, limits);
  if (length < 0 || length > limits.max_seq_len)
    throw Error("a cache row has not " + std::to_string(length) + " positions");
  use_device();
  for (size_t i = 0; i < places_.size(); ++i) {
    if (program_.tensors()[i].kind != Kind::kCache) continue;
    const Shape& shape = program_.tensors()[i].shape;  // [batch, num_kv_heads, max_seq_len, head_dim]
    const int64_t position = shape[3] * width(program_.tensors()[i].dtype), head = position * shape[2];
    check(cudaMemcpy2DAsync(places_[i] + target * shape[1] * head, head, places_[i] + source * shape[1] * head, head,
                            length * position, shape[1], cudaMemcpyDeviceToDevice, stream_.handle),
          "copying a cache row");
  }
  sampler_->copy_row(source, target);
}

void Engine::synchronize() { check(cudaStreamSynchronize(stream_.handle), "the engine"); }

}  // namespace llmc
