// Plugin cores: an op's attributes, shapes and kernels, independent of the host (llmc's engine or
// TensorRT).
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "../../kernels/attention/shared_prefix.h"
#include "../../kernels/common/counters.h"
#include "../../kernels/common/dtype.h"
#include "attention_backend.h"

namespace llmc {

// An error of a user or an artifact. The message names the thing, the value and what is allowed.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(cudaError_t status, const char* what);
void check(cublasStatus_t status, const char* what);
void check(ncclResult_t status, const char* what);

using Value = std::variant<int64_t, double, std::string>;
using Fields = std::map<std::string, Value>;
using Shape = std::vector<int64_t>;

// A device tensor. data is null for an absent optional input.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Shape shape;
  int64_t pitch = 0;  // distance between rows, in elements, for columns of wider rows; otherwise 0

  int64_t row_pitch() const { return pitch != 0 ? pitch : shape.back(); }
  int64_t size() const {
    int64_t total = 1;
    for (int64_t dim : shape) total *= dim;
    return total;
  }
};

// A dimension that may be symbolic: a dimension of an input, times a number, divided by a number,
// less a number; or a number.
class Dim {
 public:
  Dim(int64_t number) : times(number) {}
  Dim(int input, int axis) : input(input), axis(axis) {}
  Dim operator*(int64_t number) const { return scaled(times * number, over); }
  Dim operator/(int64_t number) const { return scaled(times, over * number); }  // rounds down
  // Not to be scaled afterwards.
  Dim operator-(int64_t number) const {
    Dim made = *this;
    made.less += number;
    return made;
  }
  // Whether it is a number, and its value.
  bool known() const { return input < 0; }
  int64_t number() const { return times / over - less; }

  int64_t times = 1, over = 1, less = 0;
  int input = -1, axis = -1;  // -1: a number

 private:
  Dim scaled(int64_t times, int64_t over) const {
    Dim made = *this;
    made.times = times;
    made.over = over;
    return made;
  }
};

// The dimensions of a tensor; empty for an absent input.
struct Dims : std::vector<Dim> {
  using vector::vector;
  const Dim& operator[](size_t axis) const {
    if (axis >= size()) throw Error("a tensor has only " + std::to_string(size()) + " dimensions");
    return vector::operator[](axis);
  }
};

// Throws Error unless `given` can equal `wanted`. Symbolic dimensions and absent inputs match
// everything. `what` names the tensor.
void expect(const std::string& what, const Dims& given, const Dims& wanted);
// Throws Error if `given` is known to be smaller than `wanted`.
void expect_at_least(const std::string& what, const Dim& given, const Dim& wanted);

// Scales of an FP8 GEMM, float32: per row of x and of the weight; or per group of kQuantBlock
// columns of x and block of the weight; or none.
struct Float8Scales {
  const float* x = nullptr;
  const float* weight = nullptr;
  bool of_blocks = false;
};

// y [rows, out] = act(x [rows, in] * weight [out, in]^T + bias) + residual. With `float8`, x and
// weight are FP8 (e4m3) codes and y is their scaled product: compute capability 9, `in` a multiple
// of 16, `out` of 8, and with block scales rows of 4.
struct GemmProblem {
  DType dtype;
  void* y;
  const void* x;
  const void* weight;
  const void* bias;
  const void* residual;
  int rows, in, out;
  Activation activation;
  const Float8Scales* float8 = nullptr;
};

// GEMMs by cuBLASLt, with algorithms timed once per shape; and timed choices between two
// implementations.
class Gemm {
 public:
  Gemm();
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  // Results of timing by shape: a cuBLASLt algorithm, or which of two implementations is used.
  using Algorithms = std::map<std::vector<int64_t>, std::vector<uint64_t>>;
  // Whether to time unknown shapes from now on. Otherwise cuBLASLt's heuristic is used: its first
  // proposal for the exact number of rows was faster than the best algorithm of a nearby one.
  void time_algorithms(bool times);
  // All results of timing, for the same device and version of cuBLASLt.
  Algorithms algorithms() const;
  void know(const Algorithms& algorithms);
  static size_t version();

  // Returns whether the activation was applied: cuBLASLt has ReLU and tanh GELU only.
  bool run(const GemmProblem& product, cudaStream_t stream);
  // Whether cuBLASLt has this GEMM. It lacks some FP8 ones: with scales those of long rows and few
  // outputs.
  bool has(const GemmProblem& product, cudaStream_t stream);

  // A device array with at least `count` copies of a number. Never freed.
  const float* repeated(float number, int count, cudaStream_t stream);

  // Runs the faster of two implementations. shape: 5 numbers that the choice depends on, the rows
  // last (run() has 6). Without a result for this or a larger number of rows, and without timing,
  // runs `first` if `usual`. `saved`: the fraction of the time of `first` that `second` must save.
  using Way = std::function<void()>;
  void choose(const std::vector<int64_t>& shape, cudaStream_t stream, const Way& first,
              const Way& second, float saved = kSaved, bool usual = true);
  // Whether choose() would time both, for callers that then provide other inputs.
  bool would_time(const std::vector<int64_t>& shape, cudaStream_t stream) const;
  // Forces the next choices to the first implementation, or the second: for tests.
  void decide(const std::vector<bool>& firsts) { decided_ = {firsts.begin(), firsts.end()}; }

 private:
  // Fraction of the time of a kernel for few rows that cuBLASLt must save: timed in isolation, the
  // benefit of PDL does not show.
  static constexpr float kSaved = 0.08f;

  struct Plan;
  Plan& plan_of(const GemmProblem& product, cudaStream_t stream);
  cublasStatus_t multiply(const GemmProblem& product, const Plan& plan,
                          const cublasLtMatmulAlgo_t& algorithm, cudaStream_t stream);
  template <typename Work>
  float time(cudaStream_t stream, Work&& work);

  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<std::vector<int64_t>, std::unique_ptr<Plan>> plans_;
  std::map<std::vector<int64_t>, cublasLtMatmulAlgo_t> best_;  // by shape, the rows last
  std::map<std::vector<int64_t>, bool>
      first_;  // whether the first implementation is used, by shape
  std::map<float, std::vector<std::pair<int, float*>>>
      repeated_;  // [(count, array)] by number, the largest count last
  std::deque<bool> decided_;
  bool times_ = true;
  void* swept_ = nullptr;
};

constexpr int kCounters = std::max(kernels::kAttentionCounters, kernels::kPackedGemmBlocks);

// Called for each tensor that an op inside a node produces, right after its kernels are enqueued:
// name, device address, dtype ("float16") and shape. Reads must be enqueued on `stream` before it
// returns.
using Watcher = void (*)(void* user, const char* name, const void* data, const char* dtype,
                         const int64_t* shape, int rank, cudaStream_t stream);

class SplitKvPlan;
class LoraPlan;
class Peers;

// What a host provides to enqueue().
struct Context {
  cudaStream_t stream = nullptr;
  Gemm* gemm = nullptr;
  int32_t* counters = nullptr;        // device, kCounters of them, zero between ops
  ncclComm_t communicator = nullptr;  // of the tensor-parallel ranks; null for one rank
  const Peers* peers = nullptr;       // of the same ranks; null: collectives are NCCL's
  bool decode =
      false;  // every sequence has one new token, and the logits of all are wanted in order
  int num_decode = 0;     // the first num_decode sequences have one new token each
  bool verifies = false;  // with `decode`: rows may belong to one sequence, whose later rows attend
                          // to the earlier ones
  // With `verifies`, the rows of each sequence: ops with recurrent state take these for cu_seqlens
  // and past_lens, and their state_slots and commit_lens are by sequence, too. Sequences of padding
  // rows follow, then empty ones, up to the number of rows.
  struct Sequences {
    const int32_t *cu_seqlens = nullptr, *past_lens = nullptr;  // [rows + 1], [rows]
  } sequences{};
  // Without `verifies`: sequences after the decoding ones, up to the last with drafts, and their
  // tokens.
  int num_drafted = 0, drafted_tokens = 0;
  AttentionBackend* attention = nullptr;  // null: llmc's kernels
  int longest = 0,
      reach = 0;  // maximum number of new tokens, and of all tokens, of a sequence; 0: unknown
  bool building = false;           // TensorRT is timing with arbitrary inputs
  bool keys_only = false;          // BlockAttention: of the context, outputs are 0
  kernels::SharedPrefix prefix{};  // of the decoding sequences; `results` is not set
  SplitKvPlan* split_kv_plan =
      nullptr;            // of the decoding sequences; null: each layer plans for itself
  bool adapters = false;  // whether the step has LoRA adapters; then with a plan of their rows
  LoraPlan* lora_plan = nullptr;
  bool embeds = true;       // whether the step may have rows in place of token embeddings
  bool deep_embeds = true;  // whether it may have rows that are added to hidden states
  bool ranges = true;       // whether tokens may have bidirectional ranges
  bool dense = false;       // every sequence has a new token, so num_tokens == batch means decoding
  Watcher watcher = nullptr;  // called with `user` by nodes that contain many ops; null: unused
  void* user = nullptr;
};

// An RMSNorm of rows, with which an op begins, and where it writes: sum = x + residual and normed =
// RMSNorm(sum) * weight.
struct FirstNorm {
  const float* weight;   // float32 [hidden], or null
  const void* residual;  // of x's dtype and shape, or null
  void *sum, *normed;    // sum: null without a residual
  float epsilon;
};

class Plugin {
 public:
  virtual ~Plugin() = default;

  // Output shapes from input shapes. Throws Error if an input has the wrong rank, or a known
  // dimension that does not fit the others. With all dimensions known, what passes is what kernels
  // read and write.
  virtual std::vector<Dims> shapes(const std::vector<Dims>& inputs) const = 0;
  // Bytes of scratch for these inputs. Its content is undefined before and after.
  virtual int64_t workspace(const std::vector<Tensor>&) const { return 0; }
  virtual void enqueue(const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs,
                       void* workspace, const Context& context) const = 0;
  // Called once before the first run: permutes weights in place to the layout of the kernels,
  // except those whose data is in `done`. Synchronizes the stream.
  virtual void prepare(const std::vector<Tensor>&, std::set<const void*>& /* done */,
                       cudaStream_t) const {}
  // The norm of input `x` (its number) that the op before it may compute in its place, if the op
  // begins with one in such a step; enqueue_normed() then takes the place of enqueue().
  virtual std::optional<FirstNorm> first_norm(size_t /* x */,
                                              const std::vector<Tensor>& /* inputs */,
                                              const std::vector<Tensor>& /* outputs */,
                                              void* /* workspace */, const Context&) const {
    return {};
  }
  virtual void enqueue_normed(const std::vector<Tensor>&, const std::vector<Tensor>&, void*,
                              const Context&) const {}
  // Whether it needs a communicator.
  virtual bool collective() const { return false; }
  // Whether the output equals the first input in such a step, so that a host may alias it.
  virtual bool passes_on(const Context&) const { return false; }
};

// An input or output of an op, declared by a string:
//
//   "name", "name?"         required, optional
//   "name: int32 int64"     its dtypes, if not the op's own
//   "name: kv_dtype"        the dtype of attribute kv_dtype, if that is set
//   "name: x_dtype"         FP8 codes if attribute x_dtype is set; likewise "name: out_scale"
//   "name: weight_dtype"    bytes if attribute weight_dtype is set
//   "name: scale_dtype"     float32, or bytes if weight_dtype is mxfp4
//   "name: number"          may also be one float32 number
//   "name: columns"         may be columns of wider rows
//   "name = input"          an output that is written in place, in an input's memory
struct Port {
  Port(const char* declared);
  std::string text() const { return name + (optional ? "?" : ""); }
  // Whether it has bytes, given the attributes; and whether it has FP8 codes.
  bool is_bytes(const Fields& fields) const;
  bool is_rounded(const Fields& fields) const;

  std::string name;
  bool optional = false;
  std::vector<DType> dtypes;  // allowed dtypes; empty: the dtype that the op computes in
  bool cached = false, packed = false, scales = false, number = false, columns = false;
  std::string rounded;  // the attribute that decides it
  std::string in_place;
};

// An op in the registry: the contract of csrc/plugins/<op>/op.py.
struct PluginType {
  std::string name;
  int version;
  std::vector<Port> inputs, outputs;
  Fields fields;  // all attributes, with defaults
  std::vector<std::string> required;
  std::unique_ptr<Plugin> (*make)(const Fields& fields);
};

// Registers every op once, in namespace "llmc". Later calls do nothing.
void init_plugins();
void register_plugin(PluginType type);
const std::map<std::string, PluginType>& plugin_types();

// Makes a plugin, with defaults for missing attributes. Throws Error for an unknown op, or an
// attribute that is unknown, missing or of the wrong type.
std::unique_ptr<Plugin> make_plugin(const std::string& name, const Fields& fields);
std::unique_ptr<Plugin> make_plugin(const PluginType& type, const Fields& fields);

const char* name_of(DType dtype);
// Throws Error for an unknown name.
DType dtype_of(const std::string& name);
int64_t width(DType dtype);  // bytes

// Throws Error if the value does not fit an int.
int integer(const Fields& fields, const char* name);
inline float real(const Fields& fields, const char* name) {
  return static_cast<float>(std::get<double>(fields.at(name)));
}
// Reciprocal of attribute out_scale, or 0 if the output is not quantized. Throws Error for a
// negative scale.
inline float inverse_of(const Fields& fields) {
  const float scale = real(fields, "out_scale");
  if (!(scale >= 0)) throw Error("out_scale is " + std::to_string(scale) + ", expected 0 or more");
  return scale > 0 ? 1 / scale : 0;
}
Activation activation_of(const Fields& fields, const char* name = "activation");

// The optional input `index`, or null if it is absent.
inline const Tensor* optional(const std::vector<Tensor>& inputs, size_t index) {
  return index < inputs.size() && inputs[index].data != nullptr ? &inputs[index] : nullptr;
}
inline const Dims* optional(const std::vector<Dims>& inputs, size_t index) {
  return index < inputs.size() && !inputs[index].empty() ? &inputs[index] : nullptr;
}

}  // namespace llmc
