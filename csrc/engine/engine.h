// Runs one rank's program on a device: allocates its tensors, enqueues its nodes, samples tokens.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "../kernels/sampling/params.h"
#include "draft_layers.h"
#include "drafter.h"
#include "graph.h"
#include "join_peers.h"
#include "memory.h"
#include "program.h"
#include "prompt_lookup.h"
#include "sampler.h"

namespace llmc {

// Everything from the host is checked before anything is enqueued. Error is thrown, and the engine
// is unchanged, if an array has a wrong size or an index is out of range. One thread submits steps;
// another may collect them.
class Engine {
 public:
  // Allocates the program's tensors, except for the KV cache, and scratch for its nodes. Throws
  // Error if a library of the attention backend is missing.
  Engine(Program program, int device, const std::string& attention_backend);
  ~Engine();

  const AttentionBackend& attention() const { return *attention_; }

  // Copies a weight, all `bytes` of it, from host memory through pinned memory.
  void load_weight(int tensor, const void* data, int64_t bytes);

  // Number of KV cache blocks that fit if the engine may use this fraction of the device's memory.
  int64_t measure(double utilization) const;
  // Allocates the KV cache. Call after loading weights and before the first step.
  void allocate(int num_blocks);
  // Batch sizes of captured decode steps, ascending. A decode step is padded to one of them.
  const std::vector<int>& graph_sizes() const { return graph_sizes_; }
  // Loads a LoRA adapter into a slot, for the steps that are submitted from now on. `ranks`: its
  // rank in each layer in the order of declaration, a multiple of 8; 0: it does not change the
  // layer. `data`: of each layer that it changes, lora_down [parts, rank, in] and lora_up [out,
  // rank].
  void load_adapter(int slot, const HostArray<int32_t>& ranks, const HostArray<uint8_t>& data);
  // Runs a step of padding sequences with these lengths, decoding or prompts, and synchronizes, so
  // that GEMMs are timed, plans made and graphs captured for such a step. Other steps use what
  // exists.
  // verifies: rows of a decode step may belong to one sequence; see StepInputs.
  void warm(const std::vector<int>& lengths, bool decode, bool verifies);
  // See Gemm.
  Gemm::Algorithms algorithms() const { return gemm_->algorithms(); }
  void know(const Gemm::Algorithms& algorithms) { gemm_->know(algorithms); }

  // Enqueues a step, and returns its number. Steps take effect in the order of submission.
  int64_t submit(const StepInputs& inputs);
  // Waits for the results of a step, which are valid until release(). At most kMaxInFlight steps
  // may be in flight.
  struct Results {
    int num_sampled, num_logits;
    const int64_t* tokens;  // [num_sampled]
    const kernels::Logprobs*
        logprobs;  // [num_sampled] or null, undefined for slots without log-probabilities
    int candidates;
    const int32_t* candidate_tokens;  // [num_sampled, candidates]
    const float* candidate_log_probs;
    const void* logits;  // [num_logits, logits_width] or null; or pooled rows
    int64_t logits_width;
    DType dtype;
    int num_scored;
    const kernels::Logprobs* scored;  // [num_scored] or null
    // With drafts: tokens of each sequence, and their indices among those sampled; else null.
    int num_sequences, positions;
    const int32_t* counts;  // [num_sequences]
    const int32_t* row_of;  // [num_sequences, positions]
    // With a draft model or prompt lookup: drafts of each of the step's `sample`, in rows of
    // kMaxProposals; else null.
    int num_drafting, proposed;
    const int64_t* drafts;   // [num_drafting, kMaxProposals]; the first `proposed` are defined
    const int32_t* matches;  // [num_drafting], see kernels::LookupDraftsParams; or null
  };
  const Results& wait(int64_t ticket);
  // Frees the step's results for reuse.
  void release(int64_t ticket);
  static constexpr int kMaxInFlight = 8;

  // Enqueues the encoder for prompts: see EncoderInputs.
  void encode(const EncoderInputs& inputs);
  // Runs an image encoder, and waits for it; read_watched() then returns its outputs.
  // `arrays` are in the order of Program::arrays().
  void encode_image(const std::vector<HostArray<uint8_t>>& arrays, int num_tokens, int num_rows,
                    int batch);

  // From now on, keeps the content of these values right after the node that produces them. The
  // host synchronizes at each of them. Empty: keeps nothing.
  void watch(const std::vector<int>& tensors);
  // Copies a watched value of the last step to the host as float32, with room for `count`.
  void read_watched(int tensor, float* out, int64_t count) const;
  // From now on, reports tensors inside nodes that contain many ops; null: stops.
  void watch_inside(Watcher watcher, void* user);

  // Creates the communicator of the tensor-parallel ranks; `id` is one rank's unique_id(). Waits
  // for all ranks. `collectives`: "nccl", "peer" for kernels over peer memory, or "auto" for the
  // faster of both; equal on all ranks. Throws Error if "peer" is not possible; "auto" is "nccl"
  // then.
  void join(const std::string& id, int rank, int size, const std::string& collectives);
  static std::string unique_id();
  // Stops waiting for other ranks, from any thread. The engine is unusable afterwards.
  void abort();

  void synchronize();
  // Throws Error if enqueued work has failed.
  void check_device() const;
  // Bytes of a tensor at its maximum size; bytes of all memory.
  int64_t bytes_of(int tensor) const {
    return program_.capacity(tensor) * width(program_.tensor(tensor).dtype);
  }
  int64_t bytes_allocated() const { return memory_.bytes(); }
  const Program& program() const { return program_; }

 private:
  // Addresses of the inputs; null if the model lacks the input.
  struct Inputs {
    int64_t *input_ids, *position_ids, *logits_indices, *memory_rows, *token_type_ids;
    int32_t *cu_seqlens, *past_lens, *block_table, *state_slots, *commit_lens, *memory_starts,
        *memory_lens, *lora_ids, *lora_logits_ids, *embed_ids, *rotary_positions, *ranges;
    char *embeds, *features;
    std::vector<char*> deep_embeds;
  };
  // The tensors of a layer's adapters.
  struct AdapterLayer {
    int down, up, ranks;
  };
  // A step in flight.
  struct Ticket {
    Ticket() { check(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "an event"); }
    ~Ticket() { cudaEventDestroy(done); }
    Ticket(const Ticket&) = delete;

    cudaEvent_t done = nullptr;
    std::atomic<int64_t> number{-1};  // -1: free
    StagingBuffer sent;
    std::vector<std::unique_ptr<StagingBuffer>> encoded;  // staged for the encoder
    // Results on the host: tokens, log-probabilities, candidates, logits, log-probabilities of
    // scored rows, drafts.
    GrowingPinnedBuffer tokens, counts, logprobs, candidates, logits, scored, drafts;
    std::vector<int32_t> row_of;
    Results results{};
  };

  // A part of the program, run on the tensors of a step.
  struct Pass {
    Part part;
    std::map<int, void*> places = {};  // of inputs that are elsewhere than `places_`, by tensor
    std::function<void(const Step&)> then = {};  // enqueues what follows the nodes
  };

  struct Kept {                           // device arrays whose blocks, or states, are copied
    kernels::CacheBlocks* all = nullptr;  // on the device
    int count = 0;
  };

  void place_tensors();
  void make_drafter();
  Kept keep(const std::vector<kernels::CacheBlocks>& kept, const char* what);
  void copy(const Kept& kept, const char* received, int64_t pairs,
            const HostArray<int32_t>& copies);
  void reserve_scratch();
  Tensor resolve(int tensor, const Step& step) const;
  void enqueue(const Pass& pass, const Step& step);
  bool reduce_and_norm(int reduced, const Tensor& x, const Tensor& y, const Node& next,
                       const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs,
                       const Context& context) const;
  void use_device() const;
  void prepare_weights();
  void join_peers(int rank, int size, bool with_nccl);
  CollectiveSizes collective_sizes() const;
  void count_collectives(Part part);
  bool watches() const { return !watched_.empty() || watcher_ != nullptr; }

  // Parts of submit(). Offsets of the host's arrays in the staged buffer, and their sizes, for
  // prepare().
  struct Sent {
    int64_t ids, seqlens, past, slots, states, commits, sequence_starts, sequence_past, logits,
        starts, lens, runs, blocks, own_from, offsets, unread, lora_ids, rotary_positions;
    int num_tokens, batch, num_sequences, num_logits, rows, num_runs, prefix_owner, prefix_length;
    bool verifies, has_unread, adapters, has_axes;
  };
  Ticket& next_ticket();
  Sent pack(StagingBuffer& into, const StepInputs& inputs, const Prefix& prefix,
            const std::vector<int32_t>& logits_indices, int rows);
  const char* send(const StagingBuffer& sent);
  void take_embeds(const StepInputs& inputs, const int32_t* ids, const float* embeds,
                   const float* deep_embeds);
  void prepare(const char* received, const Sent& sent);
  void run(const Pass& pass, const Step& step);
  int padded(int batch) const;
  void sample(Ticket& ticket, const StepInputs& inputs, const Tensor& logits,
              const std::vector<int64_t>& rows, const std::vector<int32_t>& slots,
              const int32_t* device_slots, const int64_t* device_rows, const Masks& masks,
              const DraftedRows* drafted);
  void pool(Ticket& ticket, const Step& step);
  void score(Ticket& ticket, const Tensor& logits, const std::vector<int64_t>& rows,
             const int64_t* device_rows, const int64_t* targets, const int32_t* counts);
  void find_candidates(Ticket& ticket, const Tensor& rows, int count);
  void propose(Ticket& ticket, const StepInputs& inputs, Step step, const SentDrafts& sent,
               const SentLayers& layers, const char* received, const DraftedRows* drafted);
  void look_up(Ticket& ticket, const StepInputs& inputs, const int32_t* slots);
  DraftOutputs outputs_of_draft(const Step& step, int layer = 0) const;
  int run_layers(const DraftLayers::Given& given, const Step& step, int sequences, int wanted);
  void warm_drafts(Step step);
  void find_adapters();
  Step step_of_blocks(int rows) const;
  void propose_blocks(const Step& step, int sequences, int wanted);

  Program program_;
  const int device_;
  Stream stream_;
  PinnedBuffer pinned_;  // for weights
  DeviceMemory memory_;
  std::vector<char*> places_;  // by tensor
  Inputs inputs_{};
  int32_t* counters_ = nullptr;
  int32_t* prefix_ = nullptr;     // the arrays of SharedPrefix: [2], then [max_batch]
  int32_t* sequences_ = nullptr;  // those of Context::Sequences: [max_batch + 1], then [max_batch]
  std::unique_ptr<SplitKvPlan> split_kv_plan_;
  std::unique_ptr<LoraPlan> lora_plan_;       // null if the model takes no adapters
  std::vector<AdapterLayer> adapter_layers_;  // in the order of declaration
  std::unique_ptr<PinnedBuffer> adapter_;     // the last adapter that was loaded
  int64_t adapter_room_ = 0;
  Stream copies_;                         // of adapters
  Event adapter_copied_, adapters_used_;  // `used`: by the last step with adapters
  void* scratch_ = nullptr;
  std::unique_ptr<Gemm> gemm_;
  std::unique_ptr<AttentionBackend> attention_;
  std::atomic<ncclComm_t> communicator_{nullptr};
  std::atomic<bool> aborted_{false};
  std::unique_ptr<Peers> peers_;  // null: collectives are NCCL's
  std::mutex peers_mutex_;        // see abort()
  int64_t collectives_ = 0;       // over peer memory since the first epoch, or more
  std::mutex graphs_mutex_;
  bool selects_ =
      false;  // whether the model's nodes select the rows of logits; there may be 0 rows

  std::vector<int> graph_sizes_;
  // Decode steps, by pass, batch size, whether there is a shared prefix, StepInputs::verifies, and
  // whether there are logits, and adapters.
  std::map<std::tuple<const Pass*, int, bool, bool, bool, bool>, Graph> graphs_;
  const Pass model_{Part::kModel}, encoder_{Part::kEncoder};
  // The draft model on the tokens of a step, and on the last draft of each sequence or on blocks.
  Pass draft_tokens_{Part::kDraft}, next_drafts_{Part::kDraft}, draft_blocks_{Part::kDraft};
  std::unique_ptr<Drafter> drafter_;      // null without a draft model
  std::unique_ptr<PromptLookup> lookup_;  // null without prompt lookup
  // Of a draft model with several layers, those after the first: passes on the tokens of a step and
  // on the tails.
  std::unique_ptr<DraftLayers> layers_;
  std::vector<std::unique_ptr<Pass>> layer_tokens_, layer_tails_;
  std::unique_ptr<Sampler> sampler_;
  std::array<Ticket, kMaxInFlight> tickets_;
  int64_t submitted_ = 0;
  bool broken_ = false;                     // a step failed halfway
  std::vector<int32_t> table_;              // host copy of the device's block table
  std::unique_ptr<DeviceBuffer> received_;  // the staged inputs of a step
  int64_t received_room_ = 0;
  std::unique_ptr<DeviceBuffer> gathered_;  // selected rows of logits, if these are not contiguous
  std::unique_ptr<DeviceBuffer> scored_;    // log-probabilities of scored rows, [max_logits]
  std::unique_ptr<DeviceBuffer> candidates_, candidates_scratch_;
  int64_t candidates_room_ = 0, candidates_scratch_room_ = 0;
  Kept caches_, states_;
  std::map<int, std::vector<char>> watched_;
  Watcher watcher_ = nullptr;
  void* user_ = nullptr;
};

}  // namespace llmc
