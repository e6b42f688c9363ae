#include <algorithm>

#include "timing.h"

namespace llmc {
namespace {

constexpr size_t kWorkspace = 32 << 20;
constexpr size_t kSwept = 128 << 20;  // larger than any L2
constexpr int kCandidates = 12, kRepeats = 5;
constexpr size_t kWayShape = 5;  // numbers in the key of a choice

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return CUDA_R_16F;
    case DType::kBFloat16: return CUDA_R_16BF;
    default: return CUDA_R_32F;
  }
}

}  // namespace

// In cuBLAS's column-major terms: y^T [out, rows] = weight [in, out]^T * x^T [in, rows].
struct Gemm::Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  bool there = true;

  ~Plan() {
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
    for (auto layout : {weight, x, y})
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
  }
};

namespace {

// Kind of a GEMM in the keys of algorithms: in the dtype, or FP8 unscaled, scaled per row, or per
// block.
enum Kind : int { kNumbers = 0, kSums = 16, kScaled = 32, kOfBlocks = 48 };
Kind kind_of(const Float8Scales* float8) {
  if (float8 == nullptr) return kNumbers;
  return float8->x == nullptr ? kSums : float8->of_blocks ? kOfBlocks : kScaled;
}

template <typename Attribute>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t name,
         const Attribute& value) {
  check(cublasLtMatmulDescSetAttribute(operation, name, &value, sizeof value), "a GEMM");
}

// FP8: accumulation in the tensor core (fast) with vector scales; or each sum of kQuantBlock
// columns is scaled in float32.
void describe_float8(cublasLtMatmulDesc_t operation, Kind kind, cudaDataType_t bias) {
  set(operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{kind != kOfBlocks});
  set(operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias);
  if (kind == kSums) return;
  const bool blocks = kind == kOfBlocks;
  set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
      blocks ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
             : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
  set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
      blocks ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
             : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
}

// Sets the pointers that may change between runs.
void point_to(cublasLtMatmulDesc_t operation, const void* bias, const Float8Scales* float8) {
  if (bias != nullptr) set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  if (float8 == nullptr || float8->x == nullptr) return;
  set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, float8->weight);
  set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, float8->x);
}

// cuBLASLt's heuristic results, fastest first; empty if it has no such GEMM.
template <typename Plan>
std::vector<cublasLtMatmulHeuristicResult_t> propose(cublasLtHandle_t handle, const Plan& plan,
                                                     int most) {
  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtMatmulPreferenceCreate(&preference), "a GEMM");
  const size_t limit = kWorkspace;
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit,
                                       sizeof limit);
  std::vector<cublasLtMatmulHeuristicResult_t> found(most);
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, plan.operation, plan.weight, plan.x, plan.y, plan.y,
                                     preference, most, found.data(), &count);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "choosing a GEMM");
  found.resize(count);
  return found;
}

}  // namespace

Gemm::Algorithms Gemm::algorithms() const {
  Algorithms known;
  for (const auto& [shape, algorithm] : best_)
    known[shape] = {std::begin(algorithm.data), std::end(algorithm.data)};
  for (const auto& [shape, first] : first_) known[shape] = {first};
  return known;
}

void Gemm::know(const Algorithms& algorithms) {
  for (const auto& [shape, data] : algorithms) {
    cublasLtMatmulAlgo_t algorithm{};
    if (shape.size() == kWayShape && data.size() == 1) {
      first_[shape] = data[0] != 0;
      continue;
    }
    if (shape.size() != 6 || data.size() != std::size(algorithm.data))
      throw Error("a stored GEMM algorithm is of another version");
    std::copy(data.begin(), data.end(), std::begin(algorithm.data));
    best_[shape] = algorithm;
  }
}

size_t Gemm::version() { return cublasLtGetVersion(); }

Gemm::Gemm() {
  check(cublasLtCreate(&handle_), "cublasLtCreate");
  check(cudaMalloc(&workspace_, kWorkspace), "allocating the GEMM workspace");
}

Gemm::~Gemm() {
  plans_.clear();
  for (const auto& [number, arrays] : repeated_)
    for (const auto& [count, data] : arrays) cudaFree(data);
  cudaFree(swept_);
  cudaFree(workspace_);
  cublasLtDestroy(handle_);
}

void Gemm::time_algorithms(bool times) {
  times_ = times;
  if (times) return;
  cudaFree(swept_);
  swept_ = nullptr;
}

template <typename Work>
float Gemm::time(cudaStream_t stream, Work&& work) {
  if (swept_ == nullptr)
    check(cudaMalloc(&swept_, kSwept), "allocating what the cache is swept with");
  return time_cold(stream, kRepeats, swept_, kSwept, work);
}

const float* Gemm::repeated(float number, int count, cudaStream_t stream) {
  auto& arrays = repeated_[number];
  if (!arrays.empty() && arrays.back().first >= count) return arrays.back().second;
  if (is_captured(stream))
    throw Error("a stream is captured before a step with as many rows ran on it");
  const std::vector<float> numbers(std::max(count, 1024), number);
  void* made = nullptr;
  check(cudaMalloc(&made, numbers.size() * sizeof(float)), "allocating scales");
  arrays.emplace_back(static_cast<int>(numbers.size()), static_cast<float*>(made));
  check(cudaMemcpyAsync(made, numbers.data(), numbers.size() * sizeof(float),
                        cudaMemcpyHostToDevice, stream),
        "scales");
  check(cudaStreamSynchronize(stream), "scales");
  return arrays.back().second;
}

bool Gemm::would_time(const std::vector<int64_t>& shape, cudaStream_t stream) const {
  return decided_.empty() && times_ && first_.count(shape) == 0 && !is_captured(stream);
}

void Gemm::choose(const std::vector<int64_t>& shape, cudaStream_t stream, const Way& first,
                  const Way& second, float saved, bool usual) {
  if (shape.size() != kWayShape)
    throw Error("a stored kernel choice has the wrong number of dimensions");
  bool is_first = usual;
  if (!decided_.empty()) {
    is_first = decided_.front();
    decided_.pop_front();
  } else if (would_time(shape, stream)) {
    const float one = time(stream, first);
    is_first = first_[shape] = (1 - saved) * one <= time(stream, second);
  } else {
    // The result for this number of rows, or for the next larger one.
    const auto known = first_.lower_bound(shape);
    if (known != first_.end() && std::equal(shape.begin(), shape.end() - 1, known->first.begin()))
      is_first = known->second;
  }
  if (is_first) first();
  else second();
}

namespace {

// A residual is the C operand. cuBLASLt applies the activation before adding it in name only, so
// with a residual the caller applies the activation.
bool takes_activation(const GemmProblem& p) {
  return p.residual == nullptr &&
         (p.activation == Activation::kRelu || p.activation == Activation::kGeluTanh);
}

cublasLtEpilogue_t epilogue_of(const GemmProblem& p) {
  const bool biased = p.bias != nullptr;
  if (!takes_activation(p)) return biased ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  if (p.activation == Activation::kRelu)
    return biased ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
  return biased ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
}

}  // namespace

cublasStatus_t Gemm::multiply(const GemmProblem& p, const Plan& plan,
                              const cublasLtMatmulAlgo_t& algorithm, cudaStream_t stream) {
  const float one = 1, beta = p.residual != nullptr ? 1 : 0;
  return cublasLtMatmul(handle_, plan.operation, &one, p.weight, plan.weight, p.x, plan.x, &beta,
                        p.residual != nullptr ? p.residual : p.y, plan.y, p.y, plan.y, &algorithm,
                        workspace_, kWorkspace, stream);
}

Gemm::Plan& Gemm::plan_of(const GemmProblem& p, cudaStream_t stream) {
  const int operands = static_cast<int>(p.dtype) + kind_of(p.float8),
            residual = p.residual != nullptr;
  const cublasLtEpilogue_t epilogue = epilogue_of(p);
  auto& plan = plans_[{operands, p.rows, p.in, p.out, static_cast<int>(epilogue), residual,
                       p.residual == p.y}];
  if (plan != nullptr) return *plan;
  auto made = std::make_unique<Plan>();
  const cudaDataType_t type = type_of(p.dtype),
                       multiplied = p.float8 != nullptr ? CUDA_R_8F_E4M3 : type;
  check(cublasLtMatmulDescCreate(&made->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a GEMM");
  set(made->operation, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(made->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
  if (p.float8 != nullptr) describe_float8(made->operation, kind_of(p.float8), type);
  point_to(made->operation, p.bias, p.float8);
  check(cublasLtMatrixLayoutCreate(&made->weight, multiplied, p.in, p.out, p.in), "a GEMM");
  check(cublasLtMatrixLayoutCreate(&made->x, multiplied, p.in, p.rows, p.in), "a GEMM");
  check(cublasLtMatrixLayoutCreate(&made->y, type, p.out, p.rows, p.out), "a GEMM");
  const std::vector<int64_t> shape = {operands, p.in,  p.out, static_cast<int>(epilogue),
                                      residual, p.rows};
  auto best = best_.find(shape);
  std::vector<cublasLtMatmulHeuristicResult_t> found;
  if (best == best_.end() && times_ && !is_captured(stream)) {
    // Times cuBLASLt's proposals on the real operands.
    found = propose(handle_, *made, kCandidates);
    float shortest = 0;
    for (const auto& proposed : found) {
      bool done = true;
      const float milliseconds = time(stream, [&] {
        done = done && multiply(p, *made, proposed.algo, stream) == CUBLAS_STATUS_SUCCESS;
      });
      if (!done || (best != best_.end() && milliseconds >= shortest)) continue;
      shortest = milliseconds;
      best = best_.insert_or_assign(shape, proposed.algo).first;
    }
  }
  cublasLtMatmulHeuristicResult_t checked{};
  if (best != best_.end() &&
      cublasLtMatmulAlgoCheck(handle_, made->operation, made->weight, made->x, made->y, made->y,
                              &best->second, &checked) == CUBLAS_STATUS_SUCCESS &&
      checked.workspaceSize <= kWorkspace) {
    made->algorithm = best->second;
  } else {
    if (found.empty()) found = propose(handle_, *made, 1);
    made->there = !found.empty();
    if (made->there) made->algorithm = found[0].algo;
  }
  plan = std::move(made);
  return *plan;
}

bool Gemm::has(const GemmProblem& product, cudaStream_t stream) {
  return plan_of(product, stream).there;
}

bool Gemm::run(const GemmProblem& p, cudaStream_t stream) {
  const Plan& plan = plan_of(p, stream);
  if (!plan.there) throw Error("cuBLASLt has no GEMM for this shape");
  point_to(plan.operation, p.bias, p.float8);
  check(multiply(p, plan, plan.algorithm, stream), "a GEMM");
  return takes_activation(p) || p.activation == Activation::kNone;
}

}  // namespace llmc
