// One rank's schedule: tensors, and ops in order. It needs no device: what an Engine will trust is checked here.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "step.h"

namespace llmc {

// The inputs of a step that not every model has: which blocks and states sequences have, where their prompts are in the
// encoder's memory, and where an encoder's tokens go there.
inline constexpr const char *kBlockTable = "block_table", *kStateSlots = "state_slots", *kMemoryStarts = "memory_starts",
                            *kMemoryLens = "encoder_sequence_length", *kMemoryRows = "memory_rows";

enum class Kind { kInput, kWeight, kCache, kState, kMemory, kValue, kColumns };

// A tensor: dimensions below zero are Sizes. A value lies at `offset` bytes per token in the arena, or of the wanted
// logits' rows at `offset` bytes per logit in an arena of their own. Columns are those of the value `of` from `first` on,
// where they lie.
struct Declared {
  Kind kind;
  DType dtype;
  Shape shape;
  std::string name = {};  // of an input
  int64_t offset = 0;
  bool per_logit = false;
  int of = -1;
  int64_t first = 0;
};

struct Node {
  std::string op;
  std::unique_ptr<Plugin> plugin;
  std::vector<int> inputs, outputs;  // by number; -1: absent, or an output in an input's memory
};

class Program {
 public:
  // token_bytes, logit_bytes: the arenas' sizes per token and per logit. Here and below Error is thrown, with what is
  // wrong, where a kernel would read or write beyond a tensor.
  Program(DType dtype, Limits limits, int64_t token_bytes, int64_t logit_bytes);
  Program(const Program&) = delete;
  Program(Program&&) = default;

  // Each declares a tensor and returns the number that nodes know it by.
  int add_input(const std::string& name, DType dtype);
  int add_weight(DType dtype, const Shape& shape);
  int add_cache(DType dtype, int64_t num_kv_heads, int64_t head_dim);  // [num_blocks, .., block_size, head_dim]
  // What a sequence keeps in a layer whatever its length, float32: [num_states, ..]. There are as many as slots, and one
  // more, which is nobody's.
  int add_state(DType dtype, const Shape& shape);
  // What an encoder leaves of a prompt's tokens: [max_batch * mem_max_seq_len, width]; a prompt has a row of
  // mem_max_seq_len tokens.
  int add_memory(int64_t width);
  int add_value(DType dtype, const Shape& shape, int64_t offset, bool per_logit);
  // `width` columns of a value of tokens from `first` on, for inputs of ops that take them where they lie.
  int add_columns(int of, int64_t first, int64_t width);

  // A node of the model, or of the encoder before its decoder.
  void add_node(const std::string& op, const Fields& fields, const std::vector<int>& inputs,
                const std::vector<int>& outputs, bool of_encoder = false);
  // Likewise a host of its own, which holds its inputs and outputs against what it was made for in every step.
  void add_node(const std::string& op, std::unique_ptr<Plugin> plugin, const std::vector<int>& inputs,
                const std::vector<int>& outputs, bool of_encoder = false);
  void set_logits(int tensor, int vocab_size);
  // After the last of these: declares the inputs that every step has.
  void finish();
  // So many blocks of caches there are, and one more, which is nobody's.
  void set_num_blocks(int num_blocks);
  // Bytes of a block of all caches.
  int64_t block_bytes() const;

  DType dtype() const { return dtype_; }
  const Limits& limits() const { return limits_; }
  int64_t token_bytes() const { return token_bytes_; }
  int64_t logit_bytes() const { return logit_bytes_; }
  const std::vector<Declared>& tensors() const { return tensors_; }
  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<Node>& encoder_nodes() const { return encoder_nodes_; }
  int logits() const { return logits_; }
  int vocab_size() const { return vocab_size_; }

  const Declared& tensor(int number) const;
  // The number of an input; -1 where the model has it not.
  int input(const std::string& name) const;
  // A tensor as a step has it, without its place.
  Tensor resolve(int tensor, const Step& step) const;
  // Elements that a tensor has at most.
  int64_t capacity(int tensor) const;

 private:
  int declare(Declared tensor);
  void check_node(const PluginType& type, const Fields& fields, const Node& node, bool of_encoder) const;
  void check_input(const PluginType& type, const Fields& fields, size_t index, int tensor, bool of_encoder) const;
  void check_shapes(const Node& node) const;
  // Whether a node that is there already writes a cache or state.
  bool is_written(int tensor) const;

  DType dtype_;
  Limits limits_;
  int64_t token_bytes_, logit_bytes_;
  std::vector<Declared> tensors_;
  std::map<std::string, int> inputs_;
  std::vector<Node> nodes_, encoder_nodes_;
  int logits_ = -1, vocab_size_ = 0;
};

}  // namespace llmc
