// The core of a plugin: an op's fields, shapes and kernels, without any host (our engine, TensorRT) in it.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
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

// What a user or an artifact got wrong. The message names the thing, the value and what is allowed.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(cudaError_t status, const char* what);
void check(cublasStatus_t status, const char* what);
void check(ncclResult_t status, const char* what);

using Value = std::variant<int64_t, double, std::string>;
using Fields = std::map<std::string, Value>;
using Shape = std::vector<int64_t>;

// A device tensor; data is null for an absent optional input.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Shape shape;
  int64_t pitch = 0;  // from a row to the next, in elements, where these are columns of wider rows; else 0

  int64_t row_pitch() const { return pitch != 0 ? pitch : shape.back(); }
  int64_t size() const {
    int64_t total = 1;
    for (int64_t dim : shape) total *= dim;
    return total;
  }
};

// One dimension of a tensor as hosts know it that have no numbers yet: an input's dimension, times a number,
// over a number; or a number alone.
class Dim {
 public:
  Dim(int64_t number) : times(number) {}
  Dim(int input, int axis) : input(input), axis(axis) {}
  Dim operator*(int64_t number) const { return scaled(times * number, over); }
  Dim operator/(int64_t number) const { return scaled(times, over * number); }  // rounds down
  // Whether it is a number alone, and which.
  bool known() const { return input < 0; }
  int64_t number() const { return times / over; }

  int64_t times = 1, over = 1;
  int input = -1, axis = -1;  // -1: none

 private:
  Dim scaled(int64_t times, int64_t over) const {
    Dim made = *this;
    made.times = times;
    made.over = over;
    return made;
  }
};

// All dimensions of a tensor; none for an absent input.
struct Dims : std::vector<Dim> {
  using vector::vector;
  const Dim& operator[](size_t axis) const {
    if (axis >= size()) throw Error("a tensor has only " + std::to_string(size()) + " dimensions");
    return vector::operator[](axis);
  }
};

// Throws Error where a tensor, called `what`, cannot have the wanted shape: of dimensions that are not known yet
// nothing is said, and an absent input has every shape.
void expect(const std::string& what, const Dims& given, const Dims& wanted);
// Likewise where a dimension is known to be smaller than another.
void expect_at_least(const std::string& what, const Dim& given, const Dim& wanted);

// What a GEMM of FP8 codes multiplies its sums by, float32: a scale for each row of x, and of the weight; or for each group
// of kQuantBlock columns of x, and block of the weight; or nothing.
struct Float8Scales {
  const float* x = nullptr;
  const float* weight = nullptr;
  bool of_blocks = false;
};

// y [rows, out] = act(x [rows, in] · weight [out, in]ᵀ + bias) + residual. With `float8`, x and weight are codes of FP8
// (e4m3) and y is their scaled product: on GPUs of compute capability 9, `in` a multiple of 16, `out` of 8, and of blocks the
// rows of 4.
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

// Matrix products on one device: y = x · weightᵀ with cuBLASLt, algorithms timed once per shape; and whether they are
// to be preferred to the kernels for few rows, likewise.
class Gemm {
 public:
  Gemm();
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  // What was chosen by shape: what cuBLASLt's version calls an algorithm, or whether a kernel for few rows is taken.
  using Algorithms = std::map<std::vector<int64_t>, std::vector<uint64_t>>;
  // From now on time what there is to choose from for shapes for which nothing is known; else cuBLASLt is asked, whose
  // first proposal for just these rows was measured to be faster than what is the best for others nearby.
  void time_algorithms(bool times);
  // What is known, by shape; for the same device and version of cuBLASLt.
  Algorithms algorithms() const;
  void know(const Algorithms& algorithms);
  static size_t version();

  // Returns whether the activation was applied: cuBLASLt has ReLU and tanh GELU, others are the caller's.
  bool run(const GemmProblem& product, cudaStream_t stream);
  // Whether cuBLASLt has this product; of FP8 it lacks some, with scales those of long rows by few outputs.
  bool has(const GemmProblem& product, cudaStream_t stream);

  // On the device: a number `count` times, or more often. It stays there.
  const float* repeated(float number, int count, cudaStream_t stream);

  // Do something one of two ways, the faster one. shape: 5 numbers that the choice depends on, the rows last; fewer than
  // the shapes of run(). Where nothing is known of as many rows or more, and nothing may be timed, the first, or not the
  // `usual` one. `saved`: what the second must save at least, of the time of the first.
  using Way = std::function<void()>;
  void choose(const std::vector<int64_t>& shape, cudaStream_t stream, const Way& first, const Way& second,
              float saved = kSaved, bool usual = true);
  // Whether that would time both: for those who then have other inputs for them.
  bool would_time(const std::vector<int64_t>& shape, cudaStream_t stream) const;
  // Of the next choices, one after the other, whether they are the first way: for tests.
  void decide(const std::vector<bool>& firsts) { decided_ = {firsts.begin(), firsts.end()}; }

 private:
  // Of the time of a kernel for few rows, what cuBLASLt must at least save: that a kernel begins to read weights before the
  // kernel ahead has ended does not show where it is timed alone.
  static constexpr float kSaved = 0.08f;

  struct Plan;
  Plan& plan_of(const GemmProblem& product, cudaStream_t stream);
  cublasStatus_t multiply(const GemmProblem& product, const Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
                          cudaStream_t stream);
  template <typename Work>
  float time(cudaStream_t stream, Work&& work);

  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<std::vector<int64_t>, std::unique_ptr<Plan>> plans_;
  std::map<std::vector<int64_t>, cublasLtMatmulAlgo_t> best_;  // by shape, the rows last
  std::map<std::vector<int64_t>, bool> first_;                 // of two ways, by shape
  std::map<float, std::vector<std::pair<int, float*>>> repeated_;  // with how often, the last the longest
  std::deque<bool> decided_;
  bool times_ = true;
  void* swept_ = nullptr;
};

constexpr int kCounters = std::max(kernels::kAttentionCounters, kernels::kPackedGemmBlocks);

// Told of a tensor that an op inside a node made, right after its kernels are enqueued: its name, where it lies on
// the device, dtype ("float16") and shape. What is to be read of it is to be enqueued on `stream` before it returns.
using Watcher = void (*)(void* user, const char* name, const void* data, const char* dtype, const int64_t* shape,
                         int rank, cudaStream_t stream);

class SplitKvPlan;

// What a host provides to every enqueue.
struct Context {
  cudaStream_t stream = nullptr;
  Gemm* gemm = nullptr;
  int32_t* counters = nullptr;        // on the device: kCounters of them, zero between ops
  ncclComm_t communicator = nullptr;  // of the ranks that share the model; null where there is one
  bool decode = false;                // every sequence has one new token, and the logits of all are wanted in order
  int num_decode = 0;                 // the first so many sequences have one new token each
  AttentionBackend* attention = nullptr;  // null: llmc's kernels
  int longest = 0, reach = 0;         // new tokens, and tokens in all, of a sequence, at most; 0: not known
  bool building = false;              // TensorRT times with inputs that mean nothing
  kernels::SharedPrefix prefix{};     // of the sequences that decode, but for its results
  SplitKvPlan* split_kv_plan = nullptr;     // of these; null: each layer divides for itself
  bool dense = false;                 // every sequence has a new token, so as many tokens as sequences decode
  Watcher watcher = nullptr;          // called with `user` by nodes that hold many ops; null: nobody asks
  void* user = nullptr;
};

class Plugin {
 public:
  virtual ~Plugin() = default;

  // Output shapes from input shapes. Throws Error where an input has the wrong number of dimensions, or one that is
  // known and does not fit the others: what passes with numbers alone is what kernels read and write.
  virtual std::vector<Dims> shapes(const std::vector<Dims>& inputs) const = 0;
  // Bytes of scratch for these inputs. Its content means nothing before and after.
  virtual int64_t workspace(const std::vector<Tensor>&) const { return 0; }
  virtual void enqueue(const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs,
                       void* workspace, const Context& context) const = 0;
  // Before the first run: brings weights into the order in which its kernels read them, in place, those whose data is not
  // `done` yet. Waits for the stream.
  virtual void prepare(const std::vector<Tensor>&, std::set<const void*>& /* done */, cudaStream_t) const {}
  // Whether it works with other ranks, and so not without a communicator.
  virtual bool collective() const { return false; }
  // Whether in such a step the output is the first input as it is, and a host may pass that on instead.
  virtual bool passes_on(const Context&) const { return false; }
};

// An input or output of an op, declared as "name", "name?" where it is optional, "name: int32" or
// "name: int32 int64" where its dtype is not the op's own, "name: kv_dtype" where it is what the field kv_dtype
// names, if that names one, "name: x_dtype" and "name: out_scale" where it is codes of FP8 if those fields say so,
// "name: weight_dtype" where it is of bytes if that field names one, "name: scale_dtype" where
// it is of float32, or of bytes if that field is mxfp4, "name: number" where it may also be one float32 number instead,
// "name: columns" where its rows may be columns of wider ones, "name = input" where an output is that input's memory, in
// which the op writes.
struct Port {
  Port(const char* declared);
  std::string text() const { return name + (optional ? "?" : ""); }
  // Whether it is of bytes, in an op with these fields; and whether of codes that another op has rounded, or it does.
  bool is_bytes(const Fields& fields) const;
  bool is_rounded(const Fields& fields) const;

  std::string name;
  bool optional = false;
  std::vector<DType> dtypes;  // what it may be; none: what the op computes in
  bool cached = false, packed = false, scales = false, number = false, columns = false;
  std::string rounded;  // the field that says whether it is
  std::string in_place;
};

// One op's entry in the registry: its contract as csrc/plugins/<op>/op.py declares it.
struct PluginType {
  std::string name;
  int version;
  std::vector<Port> inputs, outputs;
  Fields fields;  // every field with its default
  std::vector<std::string> required;
  std::unique_ptr<Plugin> (*make)(const Fields& fields);
};

// Registers every op once; later calls do nothing. Namespace "llmc".
void init_plugins();
void register_plugin(PluginType type);
const std::map<std::string, PluginType>& plugin_types();

// A plugin with these fields, defaults filled in. Throws Error for an unknown op, or a field that is unknown,
// missing or of another type.
std::unique_ptr<Plugin> make_plugin(const std::string& name, const Fields& fields);
std::unique_ptr<Plugin> make_plugin(const PluginType& type, const Fields& fields);

const char* name_of(DType dtype);
// Throws Error for a name that is no dtype's.
DType dtype_of(const std::string& name);
int64_t width(DType dtype);  // bytes

// Throws Error for one that an int does not hold.
int integer(const Fields& fields, const char* name);
inline float real(const Fields& fields, const char* name) {
  return static_cast<float>(std::get<double>(fields.at(name)));
}
// One over the field out_scale of an op that rounds what it makes, or 0 where it does not. Throws Error for one below 0.
inline float inverse_of(const Fields& fields) {
  const float scale = real(fields, "out_scale");
  if (!(scale >= 0)) throw Error("out_scale is " + std::to_string(scale) + ", which no scale is");
  return scale > 0 ? 1 / scale : 0;
}
Activation activation_of(const Fields& fields, const char* name = "activation");

// The optional input `index`, or null where it is absent.
inline const Tensor* optional(const std::vector<Tensor>& inputs, size_t index) {
  return index < inputs.size() && inputs[index].data != nullptr ? &inputs[index] : nullptr;
}
inline const Dims* optional(const std::vector<Dims>& inputs, size_t index) {
  return index < inputs.size() && !inputs[index].empty() ? &inputs[index] : nullptr;
}

}  // namespace llmc
