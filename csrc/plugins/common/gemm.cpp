#include "timing.h"

namespace llmc {
namespace {

constexpr size_t kWorkspace = 32 << 20;
constexpr int kCandidates = 12, kRepeats = 4, kExactRows = 256;

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

Gemm::Gemm() {
  check(cublasLtCreate(&handle_), "cublasLtCreate");
  check(cudaMalloc(&workspace_, kWorkspace), "allocating the GEMM workspace");
}

Gemm::~Gemm() {
  plans_.clear();
  cudaFree(workspace_);
  cublasLtDestroy(handle_);
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
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "a GEMM");
    const size_t limit = kWorkspace;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit,
                                         sizeof limit);
    cublasLtMatmulHeuristicResult_t found[kCandidates];
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_, made->operation, made->weight, made->x, made->y, made->y,
                                       preference, kCandidates, found, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    check(status, "choosing a GEMM");
    if (count == 0) throw Error("cuBLASLt has no GEMM for this shape");
    made->algorithm = found[0].algo;
    auto& best = best_[{static_cast<int>(dtype), rows <= kExactRows ? rows : (rows + 1023) / 1024 * 1024, in,
                        out, static_cast<int>(kind), residual != nullptr}];
    if (best == nullptr && !is_captured(stream)) {
      // Time what cuBLASLt proposes on the real operands; for many rows, once per 1024.
      float shortest = 0;
      for (int i = 0; i < count; ++i) {
        auto run = [&] {
          return cublasLtMatmul(handle_, made->operation, &one, weight, made->weight, x, made->x, &beta,
                                residual != nullptr ? residual : y, made->y, y, made->y, &found[i].algo,
                                workspace_, kWorkspace, stream);
        };
        bool done = true;
        const float milliseconds =
            time_on(stream, kRepeats, [&] { done = done && run() == CUBLAS_STATUS_SUCCESS; });
        if (!done) continue;
        if (best == nullptr || milliseconds < shortest) {
          shortest = milliseconds;
          best = std::make_unique<cublasLtMatmulAlgo_t>(found[i].algo);
        }
      }
    }
    cublasLtMatmulHeuristicResult_t checked{};
    if (best != nullptr &&
        cublasLtMatmulAlgoCheck(handle_, made->operation, made->weight, made->x, made->y, made->y,
                                best.get(), &checked) == CUBLAS_STATUS_SUCCESS &&
        checked.workspaceSize <= kWorkspace)
      made->algorithm = *best;
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
