#include <algorithm>

#include "timing.h"

namespace llmc {
namespace {

constexpr size_t kWorkspace = 32 << 20;
constexpr size_t kSwept = 128 << 20;  // more than any cache
constexpr int kCandidates = 12, kRepeats = 5;
constexpr size_t kWayShape = 5;  // numbers that a choice between two ways depends on
// Of the time of a kernel for few rows, what cuBLASLt must at least save: that a kernel begins to read weights before the
// kernel ahead has ended does not show where it is timed alone.
constexpr float kSaved = 0.08f;

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return CUDA_R_16F;
    case DType::kBFloat16: return CUDA_R_16BF;
    default: return CUDA_R_32F;
  }
}

}  // namespace

// In cuBLAS's column-major terms: yᵀ [out, rows] = weight [in, out]ᵀ · xᵀ [in, rows].
struct Gemm::Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  ~Plan() {
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
    for (auto layout : {weight, x, y})
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
  }
};

namespace {

// cuBLASLt's proposals, what it thinks is the fastest first.
template <typename Plan>
std::vector<cublasLtMatmulHeuristicResult_t> propose(cublasLtHandle_t handle, const Plan& plan, int most) {
  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtMatmulPreferenceCreate(&preference), "a GEMM");
  const size_t limit = kWorkspace;
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit, sizeof limit);
  std::vector<cublasLtMatmulHeuristicResult_t> found(most);
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, plan.operation, plan.weight, plan.x, plan.y,
                                                               plan.y, preference, most, found.data(), &count);
  cublasLtMatmulPreferenceDestroy(preference);
  check(status, "choosing a GEMM");
  if (count == 0) throw Error("cuBLASLt has no GEMM for this shape");
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
    if (shape.size() != 6 || data.size() != std::size(algorithm.data)) throw Error("an algorithm is of another version");
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
  if (swept_ == nullptr) check(cudaMalloc(&swept_, kSwept), "allocating what the cache is swept with");
  return time_cold(stream, kRepeats, swept_, kSwept, work);
}

bool Gemm::takes_first(bool usual) {
  if (decided_.empty()) return usual;
  const bool is_first = decided_.front();
  decided_.pop_front();
  return is_first;
}

void Gemm::choose(const std::vector<int64_t>& shape, cudaStream_t stream, const Way& first, const Way& second) {
  if (shape.size() != kWayShape) throw Error("a choice depends on other numbers");
  if (!decided_.empty()) return takes_first(true) ? first() : second();
  auto known = first_.find(shape);
  if (known == first_.end() && times_ && !is_captured(stream)) {
    const float one = time(stream, first);
    known = first_.emplace(shape, (1 - kSaved) * one <= time(stream, second)).first;
  }
  if (known == first_.end()) {
    // That of the fewest rows that are as many.
    known = first_.lower_bound(shape);
    if (known != first_.end() && !std::equal(shape.begin(), shape.end() - 1, known->first.begin())) known = first_.end();
  }
  if (known == first_.end() || known->second) first();
  else second();
}

bool Gemm::run(DType dtype, void* y, const void* x, const void* weight, const void* bias,
               const void* residual, int rows, int in, int out, Activation activation,
               cudaStream_t stream) {
  // A residual is what the product is accumulated onto, which cuBLASLt does after the activation's epilogue
  // only in name: an activation with a residual is the caller's.
  const bool epilogue = residual == nullptr && (activation == Activation::kRelu ||
                                                activation == Activation::kGeluTanh);
  cublasLtEpilogue_t kind = bias != nullptr ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  if (epilogue && activation == Activation::kRelu)
    kind = bias != nullptr ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
  if (epilogue && activation == Activation::kGeluTanh)
    kind = bias != nullptr ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;

  auto& plan = plans_[{static_cast<int>(dtype), rows, in, out, static_cast<int>(kind),
                       residual != nullptr, residual == y}];
  const float one = 1, beta = residual != nullptr ? 1 : 0;
  if (plan == nullptr) {
    auto made = std::make_unique<Plan>();
    const cudaDataType_t type = type_of(dtype);
    check(cublasLtMatmulDescCreate(&made->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a GEMM");
    const cublasOperation_t transpose = CUBLAS_OP_T;
    check(cublasLtMatmulDescSetAttribute(made->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                         sizeof transpose), "a GEMM");
    check(cublasLtMatmulDescSetAttribute(made->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &kind,
                                         sizeof kind), "a GEMM");
    if (bias != nullptr)
      check(cublasLtMatmulDescSetAttribute(made->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                           sizeof bias), "a GEMM");
    check(cublasLtMatrixLayoutCreate(&made->weight, type, in, out, in), "a GEMM");
    check(cublasLtMatrixLayoutCreate(&made->x, type, in, rows, in), "a GEMM");
    check(cublasLtMatrixLayoutCreate(&made->y, type, out, rows, out), "a GEMM");
    std::vector<int64_t> shape = {static_cast<int>(dtype), in, out, static_cast<int>(kind), residual != nullptr, rows};
    auto best = best_.find(shape);
    std::vector<cublasLtMatmulHeuristicResult_t> found;
    if (best == best_.end() && times_ && !is_captured(stream)) {
      // Time what cuBLASLt proposes on the real operands.
      found = propose(handle_, *made, kCandidates);
      float shortest = 0;
      for (const auto& proposed : found) {
        auto run = [&] {
          return cublasLtMatmul(handle_, made->operation, &one, weight, made->weight, x, made->x, &beta,
                                residual != nullptr ? residual : y, made->y, y, made->y, &proposed.algo, workspace_,
                                kWorkspace, stream);
        };
        bool done = true;
        const float milliseconds = time(stream, [&] { done = done && run() == CUBLAS_STATUS_SUCCESS; });
        if (!done || (best != best_.end() && milliseconds >= shortest)) continue;
        shortest = milliseconds;
        best = best_.insert_or_assign(shape, proposed.algo).first;
      }
    }
    cublasLtMatmulHeuristicResult_t checked{};
    if (best != best_.end() &&
        cublasLtMatmulAlgoCheck(handle_, made->operation, made->weight, made->x, made->y, made->y, &best->second,
                                &checked) == CUBLAS_STATUS_SUCCESS &&
        checked.workspaceSize <= kWorkspace)
      made->algorithm = best->second;
    else
      made->algorithm = (found.empty() ? propose(handle_, *made, 1) : found)[0].algo;
    plan = std::move(made);
  }
  if (bias != nullptr)
    check(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                         sizeof bias), "a GEMM");
  check(cublasLtMatmul(handle_, plan->operation, &one, weight, plan->weight, x, plan->x, &beta,
                       residual != nullptr ? residual : y, plan->y, y, plan->y, &plan->algorithm,
                       workspace_, kWorkspace, stream), "a GEMM");
  return epilogue || activation == Activation::kNone;
}

}  // namespace llmc
