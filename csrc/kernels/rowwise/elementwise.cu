// Activations, gates and elementwise arithmetic. Bound by memory: each kernel reads its inputs
// once.
#include "../common/output_writer.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

template <typename T, int kWidth>
__global__ void gate_kernel(GateParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t row = blockIdx.y;
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
  if (i >= p.width) return;
  const auto gates = load<T, kWidth>(static_cast<const T*>(p.gate) + row * p.gate_stride + i);
  const auto x = load<T, kWidth>(static_cast<const T*>(p.x) + row * p.x_stride + i);
  float out[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k)
    out[k] = device::activate(to_float(gates.data[k]), p.activation) * to_float(x.data[k]);
  OutputWriter<T>(p.y, p.y_scale_inverse).write(row * p.width + i, out);
}

// One thread per four columns, one grid row per row. Reads the sums and scales, writes y.
template <typename T>
__global__ void __launch_bounds__(128) rescale_kernel(RescaleParams p) {
  constexpr int kWidth = 4;
  pdl_wait();
  pdl_launch_dependents();
  const int i = (blockIdx.x * 128 + threadIdx.x) * kWidth;
  if (i >= p.out) return;
  const int64_t row = blockIdx.y;
  const int width = p.gated ? 2 * p.out : p.out;
  const float x_scale = p.x_scale[row];
  auto scaled = [&](int first) {
    auto numbers = load<float, kWidth>(p.sums + row * width + first);
    const auto weight_scale = load<float, kWidth>(p.weight_scale + first);
    Vec<T, kWidth> bias;
    if (p.bias != nullptr) bias = load<T, kWidth>(static_cast<const T*>(p.bias) + first);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      numbers.data[k] *= x_scale * weight_scale.data[k];
      if (p.bias != nullptr) numbers.data[k] += to_float(bias.data[k]);
    }
    return numbers;
  };
  const auto value = scaled(i);
  Vec<float, kWidth> up;
  if (p.gated) up = scaled(p.out + i);
  Vec<T, kWidth> residual;
  float out[kWidth];
  if (p.residual != nullptr)
    residual = load<T, kWidth>(static_cast<const T*>(p.residual) + row * p.out + i);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    out[k] = device::activate(value.data[k], p.activation);
    if (p.gated) out[k] *= up.data[k];
    if (p.residual != nullptr) out[k] += to_float(residual.data[k]);
  }
  OutputWriter<T>(p.y, p.y_scale_inverse).write(row * p.out + i, out);
}

template <typename T>
__global__ void activate_kernel(T* x, int64_t count, Activation activation) {
  pdl_wait();
  pdl_launch_dependents();
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    x[i] = from_float<T>(device::activate(to_float(x[i]), activation));
}

// Each thread handles kWidth elements of one row per iteration.
template <typename T, int kWidth>
__global__ void __launch_bounds__(256)
    elementwise_kernel(Elementwise op, T* y, Operands operands, int64_t count, int width) {
  pdl_wait();
  pdl_launch_dependents();
  for (int64_t i = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) * kWidth;
       i < count; i += static_cast<int64_t>(gridDim.x) * blockDim.x * kWidth) {
    float x[3][kWidth] = {};
#pragma unroll
    for (int which = 0; which < 3; ++which) {
      const void* from = operands.data[which];
      const Operand is = operands.is[which];
      if (from == nullptr) continue;
      if (is == Operand::kRow) {
        const auto own = load<float, kWidth>(static_cast<const float*>(from) + i % width);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[which][k] = own.data[k];
      } else if (is == Operand::kWhole) {
        const auto own = load<T, kWidth>(static_cast<const T*>(from) + i);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[which][k] = to_float(own.data[k]);
      } else {
        const float own = is == Operand::kNumber ? *static_cast<const float*>(from)
                                                 : to_float(static_cast<const T*>(from)[i / width]);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[which][k] = own;
      }
    }
    Vec<T, kWidth> out;
    auto each = [&](auto&& f) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) out.data[k] = from_float<T>(f(x[0][k], x[1][k], x[2][k]));
    };
    switch (op) {
      case Elementwise::kAdd: each([](float a, float b, float) { return a + b; }); break;
      case Elementwise::kSub: each([](float a, float b, float) { return a - b; }); break;
      case Elementwise::kMul: each([](float a, float b, float) { return a * b; }); break;
      case Elementwise::kDiv: each([](float a, float b, float) { return a / b; }); break;
      case Elementwise::kMin: each([](float a, float b, float) { return fminf(a, b); }); break;
      case Elementwise::kMax: each([](float a, float b, float) { return fmaxf(a, b); }); break;
      case Elementwise::kTanh: each([](float a, float, float) { return tanhf(a); }); break;
      case Elementwise::kExp: each([](float a, float, float) { return expf(a); }); break;
      case Elementwise::kSigmoid:
        each([](float a, float, float) { return 1.f / (1.f + expf(-a)); });
        break;
      case Elementwise::kNeg: each([](float a, float, float) { return -a; }); break;
      case Elementwise::kSoftplus:
        each([](float a, float, float) { return device::softplus(a); });
        break;
      case Elementwise::kElu:
        each([](float a, float, float) { return a > 0 ? a : expm1f(a); });
        break;
      case Elementwise::kGreater:
        each([](float a, float b, float) { return a > b ? 1.f : 0.f; });
        break;
      case Elementwise::kLess:
        each([](float a, float b, float) { return a < b ? 1.f : 0.f; });
        break;
      case Elementwise::kWhere:
        each([](float a, float b, float c) { return a != 0 ? b : c; });
        break;
      case Elementwise::kGelu:
        each([](float a, float, float) { return device::activate(a, Activation::kGelu); });
        break;
      case Elementwise::kGeluTanh:
        each([](float a, float, float) { return device::activate(a, Activation::kGeluTanh); });
        break;
    }
    store(y + i, out);
  }
}

}  // namespace

cudaError_t gate(DType dtype, const GateParams& p, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto run = [&](auto kernel, int per_thread) {
      return launch(kernel, dim3(ceil_div(p.width, 128 * per_thread), p.rows), 128, 0, stream, p);
    };
    const bool vectors = p.width % kVec<T> == 0 && has_aligned_rows<T>(p.x, p.x_stride) &&
                         has_aligned_rows<T>(p.gate, p.gate_stride);
    return vectors ? run(gate_kernel<T, kVec<T>>, kVec<T>) : run(gate_kernel<T, 1>, 1);
  });
}

cudaError_t rescale(DType dtype, const RescaleParams& p, cudaStream_t stream) {
  if (p.out % 4 != 0) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(rescale_kernel<T>, dim3(ceil_div(p.out, 512), p.rows), 128, 0, stream, p);
  });
}

cudaError_t activate(DType dtype, void* x, int64_t count, Activation activation,
                     cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(activate_kernel<T>, min(ceil_div(count, 256), 4096u), 256, 0, stream,
                  static_cast<T*>(x), count, activation);
  });
}

cudaError_t elementwise(DType dtype, Elementwise op, void* y, const Operands& operands,
                        int64_t count, int width, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    bool whole = width % kVec<T> == 0 && is_aligned(y, sizeof(Vec<T, kVec<T>>));
    for (int i = 0; i < 3; ++i) {
      const bool row = operands.is[i] == Operand::kRow;
      if (row || operands.is[i] == Operand::kWhole)
        whole = whole && is_aligned(operands.data[i], (row ? sizeof(float) : sizeof(T)) * kVec<T>);
    }
    const auto run = [&](auto kernel, int each) {
      return launch(kernel, min(ceil_div(count / each, 256), 4096u), 256, 0, stream, op,
                    static_cast<T*>(y), operands, count, width);
    };
    return whole ? run(elementwise_kernel<T, kVec<T>>, kVec<T>) : run(elementwise_kernel<T, 1>, 1);
  });
}

}  // namespace llmc::kernels
