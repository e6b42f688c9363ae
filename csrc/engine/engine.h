// Runs one rank's program on a device: its tensors get places, its nodes are enqueued, slots sample tokens.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/sampling/params.h"
#include "graph.h"
#include "memory.h"
#include "program.h"
#include "sampler.h"

namespace llmc {

// Everything that the host gives is checked before anything of it is enqueued: Error is thrown, and the engine is as
// it was, where an array has a wrong size or a number points out of what there is. One thread gives steps; another may
// collect them.
class Engine {
 public:
  // Places the program's tensors but for its KV cache, and scratch for its nodes. Throws Error where a library that
  // attention is to be computed by is not there.
  Engine(Program program, int device, const std::string& attention_backend);
  ~Engine();

  const AttentionBackend& attention() const { return *attention_; }

  // Copy a weight, all `bytes` of it, from host memory through pinned memory.
  void load_weight(int tensor, const void* data, int64_t bytes);

  // Blocks of the KV cache that there is room for, where the engine may have this part of the device's memory.
  int64_t measure(double utilization) const;
  // Places the KV cache: after the weights, before the first step.
  void allocate(int num_blocks);
  // Where decode steps are captured: what batch sizes there are, the smallest first; a step is padded to one of them.
  const std::vector<int>& graph_sizes() const { return graph_sizes_; }
  // Run a step of sequences with so many tokens each, all of them padding, which decode or are prompts, and wait: what
  // is timed, planned or captured for such a step is then done. Other steps do with what there is.
  void warm(const std::vector<int>& lengths, bool decode);
  // See Gemm.
  Gemm::Algorithms algorithms() const { return gemm_->algorithms(); }
  void know(const Gemm::Algorithms& algorithms) { gemm_->know(algorithms); }

  // Start a step; its number. Steps take effect in the order in which they are submitted.
  int64_t submit(const StepInputs& inputs);
  // Wait for what a step leads to, which is there until it is released; at most kMaxInFlight steps may be under way.
  struct Results {
    int num_sampled, num_logits;
    const int64_t* tokens;             // [num_sampled]
    const kernels::Logprobs* logprobs;  // [num_sampled] or null, undefined for slots that ask for none
    int candidates;
    const int32_t* candidate_tokens;   // [num_sampled, candidates]
    const float* candidate_log_probs;
    const void* logits;                // [num_logits, logits_width] or null
    int64_t logits_width;
    DType dtype;
    int num_scored;
    const kernels::Logprobs* scored;   // [num_scored] or null
  };
  const Results& wait(int64_t ticket);
  // What it led to has been read.
  void release(int64_t ticket);
  static constexpr int kMaxInFlight = 8;

  // Run the encoder on prompts, asynchronous: see EncoderInputs.
  void encode(const EncoderInputs& inputs);

  // From now on, keep what each of these values holds right after the node that makes it, before its memory
  // is used again. The host waits at every one. None: keep nothing.
  void watch(const std::vector<int>& tensors);
  // What a watched value held in the last step, as float32 on the host, with room for `count`.
  void read_watched(int tensor, float* out, int64_t count) const;
  // From now on, let nodes that hold many ops tell of what these make; null: no more.
  void watch_inside(Watcher watcher, void* user);

  // Join the ranks that share the model; `id` is one rank's unique_id(). Waits for all of them.
  void join(const std::string& id, int rank, int size);
  static std::string unique_id();
  // Give up waiting for other ranks, from any thread; the engine is of no use afterwards.
  void abort();

  void synchronize();
  // Throws Error where something that was enqueued has failed.
  void check_device() const;
  // Of a tensor, where it is largest; and of all memory.
  int64_t bytes_of(int tensor) const { return program_.capacity(tensor) * width(program_.tensor(tensor).dtype); }
  int64_t bytes_allocated() const { return memory_.bytes(); }
  const Program& program() const { return program_; }

 private:
  // The inputs' places; null where the model has not the input.
  struct Inputs {
    int64_t *input_ids, *position_ids, *logits_indices, *memory_rows;
    int32_t *cu_seqlens, *past_lens, *block_table, *state_slots, *memory_starts, *memory_lens;
  };
  // A step that is under way.
  struct Ticket {
    Ticket() { check(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "an event"); }
    ~Ticket() { cudaEventDestroy(done); }
    Ticket(const Ticket&) = delete;

    cudaEvent_t done = nullptr;
    std::atomic<int64_t> number{-1};  // -1: it may be taken
    StagingBuffer sent;
    std::vector<std::unique_ptr<StagingBuffer>> encoded;  // sent for the encoder
    // What comes back: tokens, log-probabilities, candidates, logits, log-probabilities of scored rows.
    GrowingPinnedBuffer tokens, logprobs, candidates, logits, scored;
    Results results{};
  };

  struct Kept {  // what is copied from block to block, or from state to state
    kernels::CacheBlocks* all = nullptr;  // on the device
    int count = 0;
  };

  void place_tensors();
  Kept keep(const std::vector<kernels::CacheBlocks>& kept, const char* what);
  void copy(const Kept& kept, const char* received, int64_t pairs, const HostArray<int32_t>& copies);
  void reserve_scratch();
  Tensor resolve(int tensor, const Step& step) const;
  void enqueue(const std::vector<Node>& nodes, const Step& step);
  void use_device() const;
  void prepare_weights();
  bool watches() const { return !watched_.empty() || watcher_ != nullptr; }

  // Parts of submit. Where the host's arrays of a step are that prepare() takes, in what is sent.
  struct Sent {
    int64_t ids, seqlens, past, slots, states, logits, starts, lens, runs, blocks, own_from;
    int num_tokens, batch, num_logits, rows, num_runs, prefix_owner, prefix_length;
  };
  Ticket& next_ticket();
  Sent pack(StagingBuffer& into, const StepInputs& inputs, const Prefix& prefix, const std::vector<int32_t>& logits_indices,
            int rows);
  const char* send(const StagingBuffer& sent);
  void prepare(const char* received, const Sent& sent);
  void run_model(const Step& step);
  void sample(Ticket& ticket, const StepInputs& inputs, const Tensor& logits, const std::vector<int64_t>& rows,
              const int32_t* slots, const int64_t* device_rows, const Masks& masks);
  void score(Ticket& ticket, const Tensor& logits, const std::vector<int64_t>& rows, const int64_t* device_rows,
             const int64_t* targets, const int32_t* counts);
  void find_candidates(Ticket& ticket, const Tensor& rows, int count);

  Program program_;
  const int device_;
  Stream stream_;
  PinnedBuffer pinned_;  // for weights
  DeviceMemory memory_;
  std::vector<char*> places_;  // by tensor
  Inputs inputs_{};
  int32_t* counters_ = nullptr;
  int32_t* prefix_ = nullptr;  // what SharedPrefix has: [2], then [max_batch]
  std::unique_ptr<SplitKvPlan> split_kv_plan_;
  void* scratch_ = nullptr;
  std::unique_ptr<Gemm> gemm_;
  std::unique_ptr<AttentionBackend> attention_;
  std::atomic<ncclComm_t> communicator_{nullptr};
  std::atomic<bool> aborted_{false};
  std::mutex graphs_mutex_;
  bool selects_ = false;  // whether the model's nodes pick the rows whose logits are wanted, and may be left out

  std::vector<int> graph_sizes_;
  std::map<std::pair<int, bool>, Graph> graphs_;  // decode steps, by batch size and whether sequences share a prefix
  std::unique_ptr<Sampler> sampler_;
  std::array<Ticket, kMaxInFlight> tickets_;
  int64_t submitted_ = 0;
  bool broken_ = false;          // a step failed half way
  std::vector<int32_t> table_;   // what the device's block table holds
  std::unique_ptr<DeviceBuffer> received_;  // what was sent for a step
  int64_t received_room_ = 0;
  std::unique_ptr<DeviceBuffer> gathered_;  // rows of logits, where they are not one after the other
  std::unique_ptr<DeviceBuffer> scored_;    // log-probabilities of scored rows, [max_logits]
  std::unique_ptr<DeviceBuffer> candidates_, candidates_scratch_;
  int64_t candidates_room_ = 0, candidates_scratch_room_ = 0;
  Kept caches_, states_;
  std::map<int, std::vector<char>> watched_;
  Watcher watcher_ = nullptr;
  void* user_ = nullptr;
};

}  // namespace llmc
