// Runs one rank's program on a device: its tensors get places, its nodes are enqueued, decoding goes on by itself.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "beams.h"
#include "graph.h"
#include "memory.h"
#include "program.h"
#include "sampler.h"

namespace llmc {

// Everything that the host gives is checked before anything of it is enqueued: Error is thrown, and the engine is as
// it was, where an array has a wrong size or a number points out of what there is.
class Engine {
 public:
  // Places the program's tensors, and scratch for its nodes.
  Engine(Program program, int device);
  ~Engine();

  // Copy a weight, all `bytes` of it, from host memory through pinned memory.
  void load_weight(int tensor, const void* data, int64_t bytes);

  // One step, asynchronous; its logits stay on the device.
  void run(const StepInputs& inputs);
  // Run the encoder on prompts, asynchronous: see EncoderInputs.
  void encode(const EncoderInputs& inputs);
  // From now on, sequence b has its prompt in lens[b] rows of the memory from starts[b] on; [batch] each.
  void set_memory(const HostArray<int32_t>& starts, const HostArray<int32_t>& lens);
  // The last step's logits as float32 [num_logits, vocab_size] on the host, of which there are `count`.
  void read_logits(float* logits, int64_t count);

  // From now on, keep what each of these values holds right after the node that makes it, before its memory
  // is used again. The host waits at every one, so this is for run, not for decode. None: keep nothing.
  void watch(const std::vector<int>& tensors);
  // What a watched value held in the last step, as float32 on the host, with room for `count`.
  void read_watched(int tensor, float* out, int64_t count) const;
  // From now on, let nodes that hold many ops tell of what these make; null: no more.
  void watch_inside(Watcher watcher, void* user);

  // Decoding without the host. begin_decode: each sequence's newest token and the positions in its cache row
  // before it; without tokens, those that the last step's logits lead to, of the cache rows from `first_row` on.
  // decode: that many steps, asynchronous.
  void begin_decode(const HostArray<int64_t>& tokens, const HostArray<int32_t>& past_lens, const Sampling& sampling,
                    const Requests& requests, const std::vector<int64_t>& end_ids, int first_row);
  void decode(int steps);
  // See Sampler.
  std::vector<int64_t> tokens(int steps) const { return sampler_->tokens(steps); }
  void read_logprobs(int steps, kernels::Logprobs* out, int64_t count) const {
    sampler_->read_logprobs(steps, out, count);
  }
  // See Sampler; before the first begin_decode with processing that needs it.
  void set_history(int first_row, const HostArray<int32_t>& tokens, const std::vector<int32_t>& lengths);

  // Beam search. candidates: the likeliest tokens of each row of the last step's logits, and their
  // log-probabilities, [rows, count] each on the host; see kernels::CandidatesParams. follow: the next step of
  // batch * beam rows and its candidates. The past of its rows is this engine's: it must be prompts, each in
  // its first beam's row, or what the step before it left. Both wait.
  void candidates(int rows, int count, int32_t* tokens, float* log_probs);
  void follow(const BeamStep& beams, int32_t* tokens, float* log_probs);

  // Join the ranks that share the model; `id` is one rank's unique_id(). Waits for all of them.
  void join(const std::string& id, int rank, int size);
  static std::string unique_id();
  // Give up waiting for other ranks, from any thread; the engine is of no use afterwards.
  void abort();

  void copy_row(int source, int target, int length);
  void synchronize();
  // Of a tensor, where it is largest; and of all memory.
  int64_t bytes_of(int tensor) const { return program_.capacity(tensor) * width(program_.tensor(tensor).dtype); }
  int64_t bytes_allocated() const { return memory_.bytes(); }
  const Program& program() const { return program_; }

 private:
  // The inputs' places; null where the model has not the input.
  struct Inputs {
    int64_t *input_ids, *position_ids, *logits_indices, *memory_rows;
    int32_t *cu_seqlens, *past_lens, *indirection, *memory_starts, *memory_lens;
  };

  void place_tensors();
  void reserve_scratch();
  Tensor resolve(int tensor, const Step& step) const;
  Tensor logits() const { return resolve(program_.logits(), last_); }
  void enqueue(const std::vector<Node>& nodes, const Step& step);
  void use_device() const;
  template <typename T>
  void send(T* target, const HostArray<T>& values) { upload(target, values.data, values.bytes(), stream_.handle); }

  const Program program_;
  const int device_;
  Stream stream_;
  PinnedBuffer pinned_;  // for weights
  DeviceMemory memory_;
  std::vector<char*> places_;  // by tensor
  Inputs inputs_{};
  int32_t* counters_ = nullptr;
  void* scratch_ = nullptr;
  std::unique_ptr<Gemm> gemm_;
  std::unique_ptr<Sdpa> sdpa_;
  ncclComm_t communicator_ = nullptr;

  Step last_;              // whose logits there are
  bool decodes_ = false;   // the inputs are as decode() left them, or begin_decode()
  std::unique_ptr<Sampler> sampler_;
  std::unique_ptr<Beams> beams_;
  Graphs<Sampler::Key> graphs_;
  std::map<int, std::vector<char>> watched_;
  Watcher watcher_ = nullptr;
  void* user_ = nullptr;
};

}  // namespace llmc
