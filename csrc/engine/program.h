// One rank's program: tensors, and ops in order. It needs no device; everything that an Engine
// relies on is checked here.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "step.h"

namespace llmc {

// Optional inputs of a step: block tables, state indices, tokens after which states are stored, the
// rows of each prompt in the encoder output, the rows to which encoder tokens are written, the
// slots of the adapters of tokens and of rows of logits, token types, rows in place of token
// embeddings with the row of each token, the rows that an encoder reads in place of token ids, and
// positions of tokens by axis.
inline constexpr const char *kBlockTable = "block_table", *kStateSlots = "state_slots",
                            *kCommitLens = "commit_lens", *kMemoryStarts = "memory_starts",
                            *kMemoryLens = "encoder_sequence_length", *kMemoryRows = "memory_rows",
                            *kLoraIds = "lora_ids", *kLoraLogitsIds = "lora_logits_ids",
                            *kTokenTypeIds = "token_type_ids", *kEmbeds = "embeds",
                            *kEmbedIds = "embed_ids", *kFeatures = "input_features",
                            *kRotaryPositions = "rotary_positions",
                            *kBidirectionalRanges = "bidirectional_ranges";
// Rows that are added to hidden states: deep_embeds_0 and so on.
inline constexpr const char* kDeepEmbeds = "deep_embeds_";
constexpr int kMaxDeepEmbeds = 64;

// The programs of a rank. A draft model's values have a separate arena. It may have several
// programs, one for each of its layers, from kDraft on.
enum class Part { kModel, kEncoder, kDraft };
constexpr int kMaxDraftLayers = 8;
constexpr Part draft_part(int layer) {
  return static_cast<Part>(static_cast<int>(Part::kDraft) + layer);
}
constexpr bool is_of_draft_model(Part part) { return part >= Part::kDraft; }
// Throws Error for an unknown name: model, encoder, draft, or draft_1 and so on.
Part part_of(const std::string& name);

enum class Kind { kInput, kWeight, kCache, kState, kMemory, kValue, kColumns, kAdapters };

// A tensor; negative dimensions are Sizes. A value is at `offset` bytes per token in the arena, or
// with per_logit at `offset` bytes per row of logits in another arena; with of_draft, in those of
// the draft model. kColumns is a view of columns of value `of`, from `first` on.
struct Declared {
  Kind kind;
  DType dtype;
  Shape shape;
  std::string name = {};  // of an input
  int64_t offset = 0;
  bool per_logit = false;
  int of = -1;
  int64_t first = 0;
  bool of_draft = false;
  bool is_array = false;  // an input of an image encoder: see Program::add_array
};

struct Node {
  std::string op;
  std::unique_ptr<Plugin> plugin;
  std::vector<int> inputs,
      outputs;  // tensor numbers; -1: absent, or an output in place of an input
};

// The tensors of a draft model that the engine reads and writes itself; -1: absent.
struct DraftTensors {
  int logits = -1, vocab_size = 0;   // a value of the draft model; its first columns are tokens
  int features = -1;                 // the model's value that the draft model reads for its tokens
  int hidden = -1, hidden_out = -1;  // values of the draft model: `features` or, for its own
                                     // drafts, the hidden_out of the token before
  int token_ids = -1;  // weight, int64 [vocab_size]: the token id of each column of `logits`
  bool at_one_position = false;  // all passes have the position of the last accepted token, and
                                 // read the model's caches; none runs on the tokens of a step
  // Tokens of a block: the last accepted one, and `mask` tokens whose logits are the drafts, all in
  // one pass; 0: a pass for each draft. The pass on the tokens of a step only writes caches.
  int block = 0;
  int64_t mask = 0;
};

class Program {
 public:
  // token_bytes, logit_bytes: sizes of the arenas per token and per row of logits. All functions
  // throw Error if a kernel would read or write out of bounds.
  Program(DType dtype, Limits limits, int64_t token_bytes, int64_t logit_bytes);
  Program(const Program&) = delete;
  Program(Program&&) = default;

  // Each declares a tensor and returns its number.
  int add_input(const std::string& name, DType dtype);
  // Declares the input `input_features`: the rows that an encoder reads in place of token ids.
  int add_features(int64_t width);
  // Declares the input `embeds` or `deep_embeds_<i>`: rows of this width, at most one for each
  // token of a step. All of them have the same width.
  int add_embeds(const std::string& name, int64_t width);
  // Declares an input of an image encoder, `name` or `name`.<number>: patches, position_rows, cos
  // or sin, [num_tokens, width]; cu_seqlens [batch + 1]; or merged_rows [num_logits], tokens that
  // are joined to rows of the prompt.
  int add_array(const std::string& name, DType dtype, const Shape& shape);
  int add_weight(DType dtype, const Shape& shape);
  int add_cache(DType dtype, int64_t num_kv_heads,
                int64_t head_dim);  // [num_blocks, .., block_size, head_dim]
  // Recurrent state of a layer, float32 [num_states, ..]: max_states of them, and one for padding.
  int add_state(DType dtype, const Shape& shape);
  // Encoder output: [max_batch * mem_max_seq_len, width], mem_max_seq_len rows per prompt.
  int add_memory(int64_t width);
  // Matrices or ranks of all slots of LoRA adapters, which a layer's inputs lora_down [parts,
  // slots, rank, in], lora_up [slots, out, rank] and lora_ranks [slots] take; slots and ranks are
  // Sizes.
  int add_adapters(DType dtype, const Shape& shape);
  int add_value(DType dtype, const Shape& shape, int64_t offset, bool per_logit,
                bool of_draft = false);
  // A view of `width` columns of a value from `first` on, for inputs that are declared "columns".
  int add_columns(int of, int64_t first, int64_t width);

  // Sizes of the draft model's arenas. Call before it is declared.
  void set_draft_arena(int64_t token_bytes, int64_t logit_bytes);

  // A node of the model, of its encoder or of its draft model.
  void add_node(const std::string& op, const Fields& fields, const std::vector<int>& inputs,
                const std::vector<int>& outputs, Part part = Part::kModel);
  // The same with a plugin that checks its inputs and outputs itself in every step.
  void add_node(const std::string& op, std::unique_ptr<Plugin> plugin,
                const std::vector<int>& inputs, const std::vector<int>& outputs,
                Part part = Part::kModel);
  // Declares the result: logits, or pooled rows of each sequence or token, of any width.
  void set_logits(int tensor, int vocab_size);
  void set_pooled(int tensor);
  // Declares the results of an image encoder, which has no other inputs than arrays.
  void set_outputs(const std::vector<int>& tensors);
  // Call after the nodes of each layer of the draft model.
  void set_draft(const DraftTensors& tensors);
  // Declares the inputs that every step has. Call last.
  void finish();
  // Number of KV cache blocks; one more is allocated for padding.
  void set_num_blocks(int num_blocks);
  // Bytes of one block over all caches.
  int64_t block_bytes() const;

  DType dtype() const { return dtype_; }
  const Limits& limits() const { return limits_; }
  // Of the model and its encoder, or of the draft model.
  int64_t token_bytes(bool of_draft = false) const { return token_bytes_[of_draft]; }
  int64_t logit_bytes(bool of_draft = false) const { return logit_bytes_[of_draft]; }
  const std::vector<Declared>& tensors() const { return tensors_; }
  const std::vector<Node>& nodes(Part part) const { return nodes_[static_cast<size_t>(part)]; }
  // All parts with nodes.
  std::vector<Part> parts() const;
  int num_draft_layers() const { return static_cast<int>(drafts_.size()); }
  const DraftTensors& draft(int layer = 0) const {
    return drafts_.empty() ? none_ : drafts_[layer];
  }
  int logits() const { return logits_; }
  bool pools() const { return pools_; }
  // Results and arrays of an image encoder, else empty.
  const std::vector<int>& outputs() const { return outputs_; }
  const std::vector<int>& arrays() const { return arrays_; }
  int vocab_size() const { return vocab_size_; }

  const Declared& tensor(int number) const;
  // Number of an input; -1 if the model lacks it.
  int input(const std::string& name) const;
  // A tensor with the shape of a step, without its address.
  Tensor resolve(int tensor, const Step& step) const;
  // Maximum number of elements of a tensor.
  int64_t capacity(int tensor) const;

 private:
  int declare(Declared tensor);
  void check_node(const PluginType& type, const Fields& fields, const Node& node, Part part) const;
  void check_input(const PluginType& type, const Fields& fields, size_t index, int tensor,
                   Part part) const;
  void check_array(const Port& port, const Declared& given, const std::string& what) const;
  void check_arena(const Node& node, Part part) const;
  void check_shapes(const Node& node) const;
  void check_logits(int tensor, int vocab_size, bool of_draft) const;
  void check_features(const DraftTensors& draft) const;
  // Whether an earlier node of the part writes this cache or state.
  bool is_written(int tensor, Part part) const;

  DType dtype_;
  Limits limits_;
  std::array<int64_t, 2> token_bytes_, logit_bytes_;  // the draft model's last
  std::vector<Declared> tensors_;
  std::map<std::string, int> inputs_;
  std::array<std::vector<Node>, 2 + kMaxDraftLayers> nodes_;  // by Part
  int logits_ = -1, vocab_size_ = 0;
  bool pools_ = false;  // `logits_` are pooled rows, and vocab_size_ their width
  std::vector<int> outputs_, arrays_;
  std::vector<DraftTensors> drafts_;  // by layer
  DraftTensors none_;
};

}  // namespace llmc
