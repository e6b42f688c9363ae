#include "engine.h"

#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>

namespace llmc {
namespace {

constexpr int64_t kPinned = 64 << 20;
constexpr int64_t kMaxEndIds = 64;

int64_t count_of(const Shape& shape) { return Tensor{nullptr, DType::kFloat32, shape}.size(); }

// The rows of a tensor whose logits a step wants.
class Gather : public Plugin {
 public:
  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    return {{in[1][0], in[0][1]}};
  }
  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    check(kernels::gather_rows(in[0].dtype, out[0].data, in[0].data,
                               static_cast<const int64_t*>(in[1].data),
                               static_cast<int>(in[1].shape[0]), static_cast<int>(in[0].shape[1]),
                               context.stream), "Gather");
  }
};

// Write rows of a tensor to rows of the encoder's memory.
class Scatter : public Plugin {
 public:
  std::vector<Dims> shapes(const std::vector<Dims>&) const override { return {}; }
  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>&, void*,
               const Context& context) const override {
    check(kernels::scatter_rows(in[0].dtype, in[2].data, in[0].data, static_cast<const int64_t*>(in[1].data),
                                static_cast<int>(in[1].shape[0]), static_cast<int>(in[0].shape[1]),
                                context.stream), "Scatter");
  }
};

// An ONNX op on elements; a weight of one float32 number stands for all elements.
class ElementwiseOp : public Plugin {
 public:
  explicit ElementwiseOp(kernels::Elementwise op) : op_(op) {}

  static std::unique_ptr<Plugin> make(const std::string& name) {
    using kernels::Elementwise;
    static const std::map<std::string, Elementwise> ops = {
        {"Add", Elementwise::kAdd},   {"Sub", Elementwise::kSub},   {"Mul", Elementwise::kMul},
        {"Div", Elementwise::kDiv},   {"Min", Elementwise::kMin},   {"Max", Elementwise::kMax},
        {"Tanh", Elementwise::kTanh}, {"Exp", Elementwise::kExp},   {"Sigmoid", Elementwise::kSigmoid},
        {"Neg", Elementwise::kNeg}};
    const auto found = ops.find(name);
    return found == ops.end() ? nullptr : std::make_unique<ElementwiseOp>(found->second);
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    return {in[0].size() < 2 && in.size() > 1 ? in[1] : in[0]};
  }
  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void*,
               const Context& context) const override {
    auto is_number = [&](size_t i) { return i < in.size() && in[i].shape.size() < 2; };
    check(kernels::elementwise(out[0].dtype, op_, out[0].data, in[0].data,
                               in.size() > 1 ? in[1].data : nullptr, is_number(0), is_number(1),
                               out[0].size(), context.stream), "an elementwise op");
  }

 private:
  kernels::Elementwise op_;
};

}  // namespace

void to_float(float* target, const char* source, int64_t count, DType dtype) {
  if (dtype == DType::kFloat32) {
    std::memcpy(target, source, 4 * count);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, source + 2 * i, 2);
    if (dtype == DType::kBFloat16) {
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      std::memcpy(target + i, &wide, 4);
    } else {
      __half_raw half;
      half.x = bits;
      target[i] = __half2float(__half(half));
    }
  }
}

DeviceBuffer::DeviceBuffer(int64_t bytes, const char* what) {
  const cudaError_t status = cudaMalloc(&data, std::max<int64_t>(bytes, 1));
  if (status == cudaErrorMemoryAllocation) {
    size_t free = 0, total = 0;
    cudaGetLastError();
    cudaMemGetInfo(&free, &total);
    throw Error(std::string("there is no device memory for ") + what + ": " +
                std::to_string(bytes >> 20) + " MiB are needed, " + std::to_string(free >> 20) + " of " +
                std::to_string(total >> 20) + " MiB are free");
  }
  check(status, what);
}

DeviceBuffer::~DeviceBuffer() {
  if (data != nullptr) cudaFree(data);
}

Engine::Engine(int device, DType dtype, Limits limits, int64_t token_bytes, int64_t logit_bytes)
    : device_(device), dtype_(dtype), limits_(limits) {
  check(cudaSetDevice(device), "choosing a device");
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  check(cudaMallocHost(&pinned_, kPinned), "allocating pinned memory");
  gemm_ = std::make_unique<Gemm>();
  sdpa_ = std::make_unique<Sdpa>();
  token_arena_ = allocate<char>(token_bytes * limits.max_tokens, "activations");
  logit_arena_ = allocate<char>(logit_bytes * limits.max_logits, "logits");
  chosen_ = allocate<int64_t>(limits.max_batch, "tokens");
  history_ = allocate<int64_t>(static_cast<int64_t>(limits.max_batch) * (limits.max_seq_len + 1), "tokens");
  end_ids_ = allocate<int64_t>(kMaxEndIds, "tokens");
  step_ = allocate<int32_t>(1, "counters");
  counters_ = allocate<int32_t>(kCounters, "counters");
  finished_ = allocate<uint8_t>(limits.max_batch, "counters");
  temperature_ = allocate<float>(limits.max_batch, "sampling");
  top_k_ = allocate<int32_t>(limits.max_batch, "sampling");
  top_p_ = allocate<float>(limits.max_batch, "sampling");
  min_p_ = allocate<float>(limits.max_batch, "sampling");
  typical_p_ = allocate<float>(limits.max_batch, "sampling");
  seed_ = allocate<uint64_t>(limits.max_batch, "sampling");
  drawn_ = allocate<int64_t>(limits.max_batch, "sampling");
}

Engine::~Engine() {
  cudaSetDevice(device_);
  cudaStreamSynchronize(stream_);
  graphs_.clear();
  beams_.reset();
  if (communicator_ != nullptr) ncclCommDestroy(communicator_);
  gemm_.reset();
  sdpa_.reset();
  cudaFreeHost(pinned_);
  cudaStreamDestroy(stream_);
}

template <typename T>
T* Engine::allocate(int64_t count, const char* what) {
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  owned_.emplace_back(bytes, what);
  allocated_ += bytes;
  check(cudaMemsetAsync(owned_.back().data, 0, bytes, stream_), what);
  return static_cast<T*>(owned_.back().data);
}

int Engine::place(bool is_cache, DType dtype, Shape shape, void* data) {
  places_.push_back({is_cache, dtype, std::move(shape), static_cast<char*>(data)});
  return static_cast<int>(places_.size()) - 1;
}

int Engine::add_input(const std::string& name, DType dtype) {
  static const std::map<std::string, Size> sizes = {{"input_ids", kNumTokens},
                                                    {"position_ids", kNumTokens},
                                                    {"cu_seqlens", kBatchPlus1},
                                                    {"past_lens", kBatch},
                                                    {"logits_indices", kNumLogits},
                                                    {kIndirection, kBatch},
                                                    {kMemoryStarts, kBatch},
                                                    {kMemoryLens, kBatch},
                                                    {kMemoryRows, kNumTokens}};
  const auto found = sizes.find(name);
  if (found == sizes.end()) throw Error("there is no engine input '" + name + "'");
  if (name == kIndirection) {
    const int64_t bytes = static_cast<int64_t>(limits_.max_batch) * limits_.max_seq_len * width(dtype);
    indirection_ = place(false, dtype, {kBatch, limits_.max_seq_len}, allocate<char>(bytes, "inputs"));
    return inputs_[name] = indirection_;
  }
  const int most = found->second == kNumTokens ? limits_.max_tokens
      : found->second == kNumLogits ? limits_.max_logits : limits_.max_batch + 1;
  return inputs_[name] =
             place(false, dtype, {found->second}, allocate<char>(most * width(dtype), "inputs"));
}

int Engine::add_weight(DType dtype, const Shape& shape) {
  return place(false, dtype, shape, allocate<char>(count_of(shape) * width(dtype), "weights"));
}

int Engine::add_cache(DType dtype, const Shape& row_shape) {
  Shape shape{kBatch};
  shape.insert(shape.end(), row_shape.begin(), row_shape.end());
  const int64_t bytes = limits_.max_batch * count_of(row_shape) * width(dtype);
  caches_.push_back(place(true, dtype, shape, allocate<char>(bytes, "the KV cache")));
  return caches_.back();
}

int Engine::add_memory(int64_t row_width) {
  const Shape shape{static_cast<int64_t>(limits_.max_batch) * limits_.mem_max_seq_len, row_width};
  return place(false, dtype_, shape, allocate<char>(count_of(shape) * width(dtype_), "the encoder's memory"));
}

int Engine::add_value(DType dtype, const Shape& shape, int64_t offset, bool per_logit) {
  return place(false, dtype, shape, per_logit ? logit_arena_ + offset * limits_.max_logits
                                              : token_arena_ + offset * limits_.max_tokens);
}

void Engine::add_node(const std::string& op, const Fields& fields, const std::vector<int>& inputs,
                      const std::vector<int>& outputs, bool of_encoder) {
  std::unique_ptr<Plugin> plugin = ElementwiseOp::make(op);
  if (op == "Gather") plugin = std::make_unique<Gather>();
  if (op == "Scatter") plugin = std::make_unique<Scatter>();
  if (plugin == nullptr) plugin = make_plugin(op, fields);
  add_node(op, std::move(plugin), inputs, outputs, of_encoder);
}

void Engine::add_node(const std::string& op, std::unique_ptr<Plugin> plugin, const std::vector<int>& inputs,
                      const std::vector<int>& outputs, bool of_encoder) {
  (of_encoder ? encoder_nodes_ : nodes_).push_back({op, std::move(plugin), inputs, outputs});
}

void Engine::set_logits(int tensor, int vocab_size) {
  logits_ = tensor;
  vocab_size_ = vocab_size;
}

void Engine::load_weight(int tensor, const void* data, int64_t bytes, int64_t offset) {
  for (int64_t done = 0; done < bytes; done += kPinned) {
    const int64_t part = std::min(kPinned, bytes - done);
    synchronize();  // the pinned memory is free again
    std::memcpy(pinned_, static_cast<const char*>(data) + done, part);
    upload(places_[tensor].data + offset + done, pinned_, part);
  }
}

void Engine::finish() {
  for (const char* name : {"input_ids", "position_ids", "logits_indices"})
    if (!inputs_.count(name)) add_input(name, DType::kInt64);
  for (const char* name : {"cu_seqlens", "past_lens"})
    if (!inputs_.count(name)) add_input(name, DType::kInt32);
  int64_t most = 0;
  for (int tokens : {1, kernels::kGemvRows, limits_.max_tokens}) {
    const Step step{std::min(tokens, limits_.max_tokens), std::min(tokens, limits_.max_logits),
                    std::min(tokens, limits_.max_batch), 0, false};
    for (const auto* nodes : {&nodes_, &encoder_nodes_})
      for (const Node& node : *nodes) {
        std::vector<Tensor> inputs;
        for (int tensor : node.inputs) inputs.push_back(resolve(tensor, step));
        most = std::max(most, node.plugin->workspace(inputs));
      }
  }
  scratch_ = allocate<char>(most, "scratch");
  synchronize();
}

Tensor Engine::resolve(int tensor, const Step& step) const {
  if (tensor < 0) return {};
  const Place& place = places_[tensor];
  Tensor made{place.data, place.dtype, place.shape};
  for (int64_t& dim : made.shape) {
    if (dim == kNumTokens) dim = step.num_tokens;
    if (dim == kNumLogits) dim = step.num_logits;
    if (dim == kBatch) dim = step.batch;
    if (dim == kBatchPlus1) dim = step.batch + 1;
  }
  if (place.is_cache)
    made.data = place.data + made.size() / step.batch * width(place.dtype) * step.first_row;
  return made;
}

void Engine::enqueue(const std::vector<Node>& nodes, const Step& step) {
  Context context;
  context.stream = stream_;
  context.gemm = gemm_.get();
  context.sdpa = sdpa_.get();
  context.counters = counters_;
  context.communicator = communicator_;
  context.decode = step.decode;
  context.longest = step.longest;
  context.reach = step.reach;
  context.indirect = step.indirect;
  std::map<int, void*> moved;  // what lies in another tensor's memory in this step
  for (const Node& node : nodes) {
    std::vector<Tensor> inputs, outputs;
    for (int tensor : node.inputs) {
      inputs.push_back(resolve(tensor, step));
      const auto found = moved.find(tensor);
      if (found != moved.end()) inputs.back().data = found->second;
    }
    if (node.op == "Gather" && step.decode) {  // all rows, in order
      moved[node.outputs[0]] = inputs[0].data;
      continue;
    }
    for (int tensor : node.outputs) outputs.push_back(resolve(tensor, step));
    node.plugin->enqueue(inputs, outputs, scratch_, context);
    for (size_t i = 0; i < outputs.size() && !watched_.empty(); ++i) {
      const auto found = watched_.find(node.outputs[i]);
      if (found != watched_.end()) found->second = download(outputs[i]);
    }
  }
  last_ = step;
}

void Engine::upload(void* target, const void* source, int64_t bytes) {
  check(cudaMemcpyAsync(target, source, bytes, cudaMemcpyHostToDevice, stream_), "copying to the device");
}

std::vector<char> Engine::download(const Tensor& tensor) {
  std::vector<char> host(tensor.size() * width(tensor.dtype));
  check(cudaMemcpyAsync(host.data(), tensor.data, host.size(), cudaMemcpyDeviceToHost, stream_),
        "copying to the host");
  synchronize();
  return host;
}

void Engine::run(const int64_t* input_ids, const int64_t* position_ids, const int32_t* cu_seqlens,
                 const int32_t* past_lens, const int64_t* logits_indices, const int32_t* indirection,
                 const Step& step) {
  if (step.num_tokens > limits_.max_tokens || step.num_logits > limits_.max_logits ||
      step.first_row + step.batch > limits_.max_batch)
    throw Error("a step of " + std::to_string(step.num_tokens) + " tokens, " +
                std::to_string(step.num_logits) + " logits and cache rows up to " +
                std::to_string(step.first_row + step.batch) + " exceeds the engine's limits of " +
                std::to_string(limits_.max_tokens) + ", " + std::to_string(limits_.max_logits) + " and " +
                std::to_string(limits_.max_batch));
  check(cudaSetDevice(device_), "choosing a device");
  upload(input("input_ids"), input_ids, 8ll * step.num_tokens);
  upload(input("position_ids"), position_ids, 8ll * step.num_tokens);
  upload(input("cu_seqlens"), cu_seqlens, 4ll * (step.batch + 1));
  upload(input("past_lens"), past_lens, 4ll * step.batch);
  upload(input("logits_indices"), logits_indices, 8ll * step.num_logits);
  Step measured = step;
  measured.indirect = indirection != nullptr;
  if (measured.indirect) {
    check_beams();
    upload(input(kIndirection), indirection, 4ll * step.batch * limits_.max_seq_len);
  }
  for (int i = 0; i < step.batch; ++i) {
    const int fresh = cu_seqlens[i + 1] - cu_seqlens[i];
    measured.longest = std::max(measured.longest, fresh);
    measured.reach = std::max(measured.reach, past_lens[i] + fresh);
  }
  enqueue(measured);
}

void Engine::encode(const int64_t* input_ids, const int64_t* position_ids, const int32_t* cu_seqlens,
                    const int64_t* memory_rows, int num_tokens, int batch) {
  if (encoder_nodes_.empty()) throw Error("the model has no encoder");
  if (num_tokens > limits_.max_tokens || batch > limits_.max_batch)
    throw Error(std::to_string(batch) + " prompts of " + std::to_string(num_tokens) +
                " tokens exceed the engine's limits of " + std::to_string(limits_.max_batch) + " and " +
                std::to_string(limits_.max_tokens));
  const int64_t rows = static_cast<int64_t>(limits_.max_batch) * limits_.mem_max_seq_len;
  for (int i = 0; i < num_tokens; ++i)
    if (memory_rows[i] < 0 || memory_rows[i] >= rows) throw Error("there is no such row of the encoder's memory");
  check(cudaSetDevice(device_), "choosing a device");
  upload(input("input_ids"), input_ids, 8ll * num_tokens);
  upload(input("position_ids"), position_ids, 8ll * num_tokens);
  upload(input("cu_seqlens"), cu_seqlens, 4ll * (batch + 1));
  upload(input(kMemoryRows), memory_rows, 8ll * num_tokens);
  enqueue(encoder_nodes_, {num_tokens, 0, batch, 0, false});
}

void Engine::set_memory(const int32_t* starts, const int32_t* lens, int batch) {
  if (batch > limits_.max_batch)
    throw Error("a batch of " + std::to_string(batch) + " exceeds max_batch_size " +
                std::to_string(limits_.max_batch));
  check(cudaSetDevice(device_), "choosing a device");
  upload(input(kMemoryStarts), starts, 4ll * batch);
  upload(input(kMemoryLens), lens, 4ll * batch);
}

void Engine::read_logits(float* logits) {
  const Tensor tensor = resolve(logits_, last_);
  const int64_t stride = tensor.shape[1] * width(tensor.dtype);
  const std::vector<char> host = download(tensor);
  for (int64_t row = 0; row < tensor.shape[0]; ++row)
    to_float(logits + row * vocab_size_, host.data() + row * stride, vocab_size_, tensor.dtype);
}

void Engine::watch(const std::vector<int>& tensors) {
  watched_.clear();
  for (int tensor : tensors) watched_[tensor] = {};
}

void Engine::read_watched(int tensor, float* out) const {
  const auto found = watched_.find(tensor);
  if (found == watched_.end() || found->second.empty())
    throw Error("tensor " + std::to_string(tensor) + " was not watched in the last step");
  const DType dtype = places_[tensor].dtype;
  to_float(out, found->second.data(), static_cast<int64_t>(found->second.size()) / width(dtype), dtype);
}

void Engine::choose(int rows, int first_row) {
  const Tensor logits = resolve(logits_, last_);
  const int stride = static_cast<int>(logits.shape[1]);
  kernels::SampleParams p{chosen_, logits.data, temperature_, top_k_, top_p_, min_p_, typical_p_, seed_, drawn_,
                          rows, vocab_size_, stride, 0, draws_};
  DType dtype = logits.dtype;
  if (has_rules_) {
    const int scores_stride = static_cast<int>(scores_width());
    const kernels::ProcessParams process{scores_, logits.data, rules_, static_cast<const int32_t*>(lists_->data),
                                         drawn_, memory_, rows, vocab_size_, stride, scores_stride, first_row};
    check(kernels::process(dtype, process, stream_), "processing logits");
    dtype = DType::kFloat32;
    p.logits = scores_, p.stride = scores_stride, p.none = -1;
  }
  check(kernels::sample(dtype, p, stream_), "choosing tokens");
  if (!reports_) return;
  const kernels::LogprobsParams report{logprobs_, logits.data, chosen_, top_logprobs_, step_, rows, vocab_size_,
                                       stride, limits_.max_batch};
  check(kernels::logprobs(logits.dtype, report, stream_), "finding log-probabilities");
}

void Engine::advance(int batch, int first_row) {
  kernels::AdvanceParams p{};
  p.input_ids = static_cast<int64_t*>(input("input_ids"));
  p.position_ids = static_cast<int64_t*>(input("position_ids"));
  p.past_lens = static_cast<int32_t*>(input("past_lens"));
  p.drawn = drawn_;
  p.chosen = chosen_;
  p.history = history_;
  p.step = step_;
  p.finished = finished_;
  p.end_ids = end_ids_;
  p.batch = batch;
  p.max_batch = limits_.max_batch;
  p.num_end_ids = num_end_ids_;
  p.max_seq_len = limits_.max_seq_len;
  p.rules = has_rules_ && memory_.counts != nullptr ? rules_ : nullptr;
  p.memory = memory_;
  p.first_row = first_row;
  check(kernels::advance(p, stream_), "counting a step");
}

// Allocate and upload what requests need, and note what a step has to do for them.
void Engine::prepare(const Requests& requests, int batch) {
  const int64_t rows = limits_.max_batch;
  if (requests.rules != nullptr) {
    if (rules_ == nullptr) rules_ = allocate<kernels::Rule>(rows, "sampling");
    if (scores_ == nullptr)
      scores_ = allocate<float>(rows * scores_width(), "the logits that sampling parameters change");
    if (requests.list_size > lists_room_ || lists_ == nullptr) {
      synchronize();
      graphs_.clear();  // they know the old address
      lists_.reset();
      lists_room_ = 0;
      const int64_t room = std::max<int64_t>(2 * requests.list_size, 1 << 14);
      lists_ = std::make_unique<DeviceBuffer>(4 * room, "bad words and logit biases");
      lists_room_ = room;
    }
    upload(rules_, requests.rules, sizeof(kernels::Rule) * batch);
    upload(lists_->data, requests.lists, 4 * requests.list_size);
  }
  if (requests.logprobs != nullptr) {
    if (top_logprobs_ == nullptr) top_logprobs_ = allocate<int32_t>(rows, "sampling");
    if (logprobs_ == nullptr)
      logprobs_ = allocate<kernels::Logprobs>(kernels::kLogprobSteps * rows, "log-probabilities");
    upload(top_logprobs_, requests.logprobs, 4ll * batch);
  }
  has_rules_ = requests.rules != nullptr;
  reports_ = requests.logprobs != nullptr;
}

void Engine::remember(int first_row, const int32_t* tokens, const std::vector<int32_t>& lengths) {
  const int rows = static_cast<int>(lengths.size()), most = limits_.max_batch;
  if (first_row + rows > most)
    throw Error("cache rows up to " + std::to_string(first_row + rows) + " exceed max_batch_size " +
                std::to_string(most));
  check(cudaSetDevice(device_), "choosing a device");
  constexpr const char* kWhat = "the tokens that penalties are for";
  memory_.vocab = vocab_size_;
  memory_.room = limits_.max_seq_len + 1;
  if (memory_.lengths == nullptr) memory_.lengths = allocate<int32_t>(most, kWhat);
  if (memory_.tokens == nullptr)
    memory_.tokens = allocate<int32_t>(static_cast<int64_t>(most) * memory_.room, kWhat);
  if (memory_.counts == nullptr) {
    memory_.counts = allocate<uint32_t>(static_cast<int64_t>(most) * memory_.vocab, kWhat);
    synchronize();
    graphs_.clear();  // they know of no memory
  }
  remembered_.resize(most);
  const int64_t counts = static_cast<int64_t>(memory_.vocab) * sizeof(uint32_t);
  check(cudaMemsetAsync(memory_.counts + static_cast<int64_t>(first_row) * memory_.vocab, 0, rows * counts, stream_),
        "forgetting tokens");
  upload(memory_.lengths + first_row, lengths.data(), 4ll * rows);
  for (int row = 0; row < rows; ++row) {
    if (lengths[row] > memory_.room) throw Error("a prompt is longer than the cache");
    upload(memory_.tokens + static_cast<int64_t>(first_row + row) * memory_.room, tokens, 4ll * lengths[row]);
    tokens += lengths[row];
    remembered_[first_row + row] = true;
  }
  check(kernels::remember(memory_, first_row, rows, stream_), "remembering prompts");
  synchronize();  // the host's arrays end here
}

void Engine::begin_decode(const int64_t* tokens, const int32_t* past_lens, int batch,
                          const Sampling& sampling, const Requests& requests,
                          const std::vector<int64_t>& end_ids) {
  if (batch > limits_.max_batch)
    throw Error("a batch of " + std::to_string(batch) + " exceeds max_batch_size " +
                std::to_string(limits_.max_batch));
  if (end_ids.size() > kMaxEndIds) throw Error("there are more than 64 end tokens");
  if (tokens == nullptr && last_.num_logits != batch)
    throw Error("the last step made " + std::to_string(last_.num_logits) + " rows of logits for " +
                std::to_string(batch) + " sequences");
  check(cudaSetDevice(device_), "choosing a device");
  prepare(requests, batch);
  draws_ = std::any_of(sampling.temperature, sampling.temperature + batch, [](float t) { return t > 0; });
  num_end_ids_ = static_cast<int>(end_ids.size());
  decode_batch_ = batch;
  decode_steps_ = 0;
  const int32_t zero = 0;
  std::vector<int32_t> starts(batch + 1), past(past_lens, past_lens + batch);
  for (int i = 0; i <= batch; ++i) starts[i] = i;
  if (tokens == nullptr)  // advance() counts a position
    for (int32_t& length : past) --length;
  const std::vector<int64_t> positions(past.begin(), past.end()), rows(starts.begin(), starts.end() - 1);
  if (tokens != nullptr) upload(input("input_ids"), tokens, 8ll * batch);
  upload(input("position_ids"), positions.data(), 8ll * batch);
  upload(input("cu_seqlens"), starts.data(), 4ll * (batch + 1));
  upload(input("past_lens"), past.data(), 4ll * batch);
  upload(input("logits_indices"), rows.data(), 8ll * batch);  // a TensorRT plan gathers in every step
  upload(temperature_, sampling.temperature, 4ll * batch);
  upload(top_k_, sampling.top_k, 4ll * batch);
  upload(top_p_, sampling.top_p, 4ll * batch);
  upload(min_p_, sampling.min_p, 4ll * batch);
  upload(typical_p_, sampling.typical_p, 4ll * batch);
  upload(seed_, sampling.seed, 8ll * batch);
  upload(drawn_, sampling.drawn, 8ll * batch);
  upload(step_, &zero, 4);
  upload(end_ids_, end_ids.data(), 8 * static_cast<int64_t>(end_ids.size()));
  check(cudaMemsetAsync(finished_, 0, limits_.max_batch, stream_), "starting to decode");
  if (tokens == nullptr) {
    choose(batch, requests.first_row);
    advance(batch, requests.first_row);
    decode_steps_ = 1;
  }
  synchronize();  // the host's arrays end here
}

void Engine::decode(int steps) {
  if (steps < 1) return;
  if (decode_steps_ + steps > limits_.max_seq_len + 1) throw Error("there is no room for that many steps");
  check(cudaSetDevice(device_), "choosing a device");
  const Step step{decode_batch_, decode_batch_, decode_batch_, 0, true};
  auto work = [&] {
    enqueue(step);
    choose(decode_batch_, 0);
    advance(decode_batch_, 0);
  };
  const std::tuple key{decode_batch_, num_end_ids_, draws_, has_rules_, reports_};
  decode_steps_ += steps;
  graphs_[key].run(stream_, steps, work);
  last_ = step;
}

std::vector<int64_t> Engine::history(int steps) {
  if (steps < 0 || steps > decode_steps_) throw Error("there were not that many steps");
  std::vector<int64_t> tokens(static_cast<int64_t>(steps) * decode_batch_);
  const int64_t* first = history_ + static_cast<int64_t>(decode_steps_ - steps) * limits_.max_batch;
  check(cudaMemcpy2DAsync(tokens.data(), 8ll * decode_batch_, first, 8ll * limits_.max_batch,
                          8ll * decode_batch_, steps, cudaMemcpyDeviceToHost, stream_), "reading tokens");
  synchronize();
  return tokens;
}

void Engine::read_logprobs(int steps, kernels::Logprobs* out) {
  if (!reports_) throw Error("no log-probabilities were asked for");
  if (steps < 0 || steps > decode_steps_ || steps > kernels::kLogprobSteps)
    throw Error("log-probabilities of " + std::to_string(steps) + " steps are not kept");
  for (int step = decode_steps_ - steps; step < decode_steps_; ++step, out += decode_batch_)
    check(cudaMemcpyAsync(out, logprobs_ + static_cast<int64_t>(step % kernels::kLogprobSteps) * limits_.max_batch,
                          sizeof(kernels::Logprobs) * decode_batch_, cudaMemcpyDeviceToHost, stream_),
          "reading log-probabilities");
  synchronize();
}

std::string Engine::unique_id() {
  ncclUniqueId id;
  check(ncclGetUniqueId(&id), "making a communicator");
  return {id.internal, sizeof id.internal};
}

void Engine::join(const std::string& id, int rank, int size) {
  ncclUniqueId unique;
  if (id.size() != sizeof unique.internal) throw Error("the communicator's id is broken");
  std::memcpy(unique.internal, id.data(), id.size());
  check(cudaSetDevice(device_), "choosing a device");
  check(ncclCommInitRank(&communicator_, size, unique, rank), "making a communicator");
}

void Engine::abort() {
  if (communicator_ != nullptr) ncclCommAbort(std::exchange(communicator_, nullptr));
}

void Engine::copy_row(int source, int target, int length) {
  check(cudaSetDevice(device_), "choosing a device");
  for (int tensor : caches_) {
    const Place& place = places_[tensor];  // [batch, num_kv_heads, max_seq_len, head_dim]
    const int64_t position = place.shape[3] * width(place.dtype), head = position * place.shape[2];
    check(cudaMemcpy2DAsync(place.data + target * place.shape[1] * head, head,
                            place.data + source * place.shape[1] * head, head, length * position,
                            place.shape[1], cudaMemcpyDeviceToDevice, stream_), "copying a cache row");
  }
  if (memory_.counts == nullptr || !remembered_[source]) return;
  auto copy = [&](auto* rows, int64_t width) {
    check(cudaMemcpyAsync(rows + target * width, rows + source * width, width * sizeof(*rows),
                          cudaMemcpyDeviceToDevice, stream_), "copying what is remembered of a sequence");
  };
  copy(memory_.counts, memory_.vocab);
  copy(memory_.tokens, memory_.room);
  copy(memory_.lengths, 1);
  remembered_[target] = true;
}

void Engine::synchronize() { check(cudaStreamSynchronize(stream_), "the engine"); }

}  // namespace llmc
