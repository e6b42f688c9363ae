// Runs one rank's schedule: tensors with places in memory, and ops in order.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../plugins/common/plugin.h"
#include "graph.h"

namespace llmc {

// The input that says where beams' pasts lie; see CausalAttention.
inline constexpr const char* kIndirection = "cache_indirection";
// Those that say where sequences' prompts are in the encoder's memory, and where its tokens go there.
inline constexpr const char *kMemoryStarts = "memory_starts", *kMemoryLens = "encoder_sequence_length",
                            *kMemoryRows = "memory_rows";

// A dimension below zero is one of these sizes of a step.
enum Size : int64_t { kNumTokens = -1, kNumLogits = -2, kBatch = -3, kBatchPlus1 = -4 };

struct Limits {
  int max_batch, max_tokens, max_logits, max_seq_len;
  int mem_max_seq_len = 0;  // tokens of a prompt that an encoder takes; 0: there is none
};

struct Step {
  int num_tokens, num_logits, batch, first_row;
  bool decode;  // every sequence has exactly one new token, and all of their logits are wanted
  int longest = 0, reach = 0;  // see Context
  bool indirect = false;       // see Context
};

// A step of beam search, on the host: see kernels::FollowParams. [batch * beam] each.
struct BeamStep {
  const int64_t* tokens;
  const int32_t* parents;
  const int32_t* past;
  const int32_t* prompts;
  int batch, beam, count;  // count: candidates wanted of each row
};

// How each sequence of a batch chooses its tokens, on the host: see kernels::SampleParams. [batch] each.
struct Sampling {
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* typical_p;
  const uint64_t* seed;
  const int64_t* drawn;
};

// What else it asks for, on the host; null where no sequence of the batch does.
struct Requests {
  const kernels::Rule* rules = nullptr;  // [batch], and their lists
  const int32_t* lists = nullptr;
  int64_t list_size = 0;
  const int32_t* logprobs = nullptr;     // [batch]: see kernels::LogprobsParams::top
  int first_row = 0;                     // the cache row of sequence 0
};

// Host values of a dtype, as float32.
void to_float(float* target, const char* source, int64_t count, DType dtype);

struct DeviceBuffer {
  DeviceBuffer(int64_t bytes, const char* what);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept : data(std::exchange(other.data, nullptr)) {}
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;
  void* data = nullptr;
};

class Engine {
 public:
  Engine(int device, DType dtype, Limits limits, int64_t token_bytes, int64_t logit_bytes);
  ~Engine();

  // Each declares a tensor and returns the number that nodes know it by.
  int add_input(const std::string& name, DType dtype);
  int add_weight(DType dtype, const Shape& shape);
  int add_cache(DType dtype, const Shape& row_shape);  // [max_batch, *row_shape]
  // What an encoder leaves of a prompt's tokens: [max_batch * mem_max_seq_len, width]; a prompt has a row of
  // mem_max_seq_len tokens.
  int add_memory(int64_t width);
  // A value in the arena: at `offset` bytes per token, or for a value of the wanted logits' rows at `offset`
  // bytes per logit in the part behind the tokens'. The shape may have Size dimensions.
  int add_value(DType dtype, const Shape& shape, int64_t offset, bool per_logit);

  // A node of the model, or of the encoder before its decoder.
  void add_node(const std::string& op, const Fields& fields, const std::vector<int>& inputs,
                const std::vector<int>& outputs, bool of_encoder = false);
  void add_node(const std::string& op, std::unique_ptr<Plugin> plugin, const std::vector<int>& inputs,
                const std::vector<int>& outputs, bool of_encoder = false);
  void set_logits(int tensor, int vocab_size);

  // Copy `bytes` from host memory to `offset` of a weight, through pinned memory.
  void load_weight(int tensor, const void* data, int64_t bytes, int64_t offset);
  // After the last add_node: allocates scratch.
  void finish();

  // One step, asynchronous; its logits stay on the device. The arrays are on the host; indirection, [batch,
  // max_seq_len], may be null.
  void run(const int64_t* input_ids, const int64_t* position_ids, const int32_t* cu_seqlens,
           const int32_t* past_lens, const int64_t* logits_indices, const int32_t* indirection,
           const Step& step);
  // Run the encoder on prompts, asynchronous: token i leaves what decoders see of it in row memory_rows[i] of the
  // memory. The arrays are on the host.
  void encode(const int64_t* input_ids, const int64_t* position_ids, const int32_t* cu_seqlens,
              const int64_t* memory_rows, int num_tokens, int batch);
  // From now on, sequence b has its prompt in lens[b] rows of the memory from starts[b] on; [batch] each, on the
  // host.
  void set_memory(const int32_t* starts, const int32_t* lens, int batch);
  // The last step's logits as float32 [num_logits, vocab_size] on the host.
  void read_logits(float* logits);
  // From now on, keep what each of these values holds right after the node that makes it, before its memory
  // is used again. The host waits at every one, so this is for run, not for decode. None: keep nothing.
  void watch(const std::vector<int>& tensors);
  // What a watched value held in the last step, as float32 on the host.
  void read_watched(int tensor, float* out) const;

  // Decoding without the host. begin_decode: each sequence's newest token and the positions in its cache row
  // before it; without tokens, those that the last step's logits lead to. decode: that many steps, asynchronous.
  void begin_decode(const int64_t* tokens, const int32_t* past_lens, int batch, const Sampling& sampling,
                    const Requests& requests, const std::vector<int64_t>& end_ids);
  void decode(int steps);
  // The tokens of the last `steps` steps, [steps, batch]; -1 where no token was allowed. Waits.
  std::vector<int64_t> history(int steps);
  // Log-probabilities of the last `steps` steps, at most kernels::kLogprobSteps, [steps, batch]. Waits.
  void read_logprobs(int steps, kernels::Logprobs* out);
  // The prompts of the sequences in the cache rows from `first_row` on, one behind the other, for rules that
  // depend on them; from now on their new tokens are kept as well. Before the first begin_decode with them.
  void remember(int first_row, const int32_t* tokens, const std::vector<int32_t>& lengths);

  // Beam search. candidates: the likeliest tokens of each row of the last step's logits, and their
  // log-probabilities, [rows, count] each on the host; see kernels::CandidatesParams. follow: the next step of
  // batch * beam rows and its candidates. The past of its rows is this engine's: it must be prompts, each in
  // its first beam's row, or what the step before it left. Both wait.
  void candidates(int count, int32_t* tokens, float* log_probs);
  void follow(const BeamStep& beams, int32_t* tokens, float* log_probs);

  // Join the ranks that share the model; `id` is one rank's unique_id(). Waits for all of them.
  void join(const std::string& id, int rank, int size);
  static std::string unique_id();
  // Give up waiting for other ranks, from any thread; the engine is of no use afterwards.
  void abort();

  void copy_row(int source, int target, int length);
  void synchronize();
  int64_t bytes_allocated() const { return allocated_; }

 private:
  struct Place {
    bool is_cache;
    DType dtype;
    Shape shape;
    char* data;
  };
  struct Node {
    std::string op;
    std::unique_ptr<Plugin> plugin;
    std::vector<int> inputs, outputs;
  };
  // Beam search's own memory, with room for so many candidates of each row, and the graphs that know it.
  struct Beams {
    Beams(int rows, int vocab, int count);
    ~Beams();

    int count;
    DeviceBuffer given, found, scratch;
    void *host_given = nullptr, *host_found = nullptr;  // pinned
    std::map<std::tuple<int, int, int>, Graph> graphs;  // by batch, beam and count
  };

  template <typename T>
  T* allocate(int64_t count, const char* what);
  int place(bool is_cache, DType dtype, Shape shape, void* data);
  void* input(const char* name) const { return places_[inputs_.at(name)].data; }
  Tensor resolve(int tensor, const Step& step) const;
  void enqueue(const Step& step) { enqueue(nodes_, step); }
  void enqueue(const std::vector<Node>& nodes, const Step& step);
  void choose(int rows, int first_row);
  void advance(int batch, int first_row);
  void prepare(const Requests& requests, int batch);
  int64_t scores_width() const { return (vocab_size_ + 3) / 4 * 4; }
  void check_beams() const;
  void reserve_beams(int count);
  void enqueue_candidates(int rows, int count);
  void read_candidates(int rows, int count, int32_t* tokens, float* log_probs) const;
  void upload(void* target, const void* source, int64_t bytes);
  std::vector<char> download(const Tensor& tensor);

  int device_;
  DType dtype_;
  Limits limits_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Gemm> gemm_;
  std::unique_ptr<Sdpa> sdpa_;
  ncclComm_t communicator_ = nullptr;
  std::vector<DeviceBuffer> owned_;
  int64_t allocated_ = 0;
  std::vector<Place> places_;
  std::vector<Node> nodes_, encoder_nodes_;
  std::map<std::string, int> inputs_;
  std::vector<int> caches_;
  char* token_arena_ = nullptr;
  char* logit_arena_ = nullptr;
  void* scratch_ = nullptr;
  void* pinned_ = nullptr;
  int logits_ = -1, vocab_size_ = 0, indirection_ = -1;
  Step last_{};
  std::map<int, std::vector<char>> watched_;
  // The state of decoding, on the device.
  int64_t *chosen_ = nullptr, *history_ = nullptr, *end_ids_ = nullptr, *drawn_ = nullptr;
  int32_t *step_ = nullptr, *counters_ = nullptr, *top_k_ = nullptr;
  float *temperature_ = nullptr, *top_p_ = nullptr, *min_p_ = nullptr, *typical_p_ = nullptr;
  uint64_t* seed_ = nullptr;
  uint8_t* finished_ = nullptr;
  int num_end_ids_ = 0, decode_batch_ = 0, decode_steps_ = 0;
  bool draws_ = false, has_rules_ = false, reports_ = false;  // what some sequence of the batch asks for
  // Allocated when it is first asked for.
  kernels::Rule* rules_ = nullptr;
  float* scores_ = nullptr;
  kernels::Memory memory_{};
  std::vector<bool> remembered_;  // by cache row
  kernels::Logprobs* logprobs_ = nullptr;
  int32_t* top_logprobs_ = nullptr;
  std::unique_ptr<DeviceBuffer> lists_;
  int64_t lists_room_ = 0;
  // By batch, number of end tokens and what is asked for.
  std::map<std::tuple<int, int, bool, bool, bool>, Graph> graphs_;
  std::unique_ptr<Beams> beams_;
};

}  // namespace llmc
