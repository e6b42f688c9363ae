// The element types and activations that kernels, plugins and the engine share.
#pragma once

#include <cstdint>

namespace llmc {

enum class DType : int32_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat8 = 5,
  kUint8 = 6
};

enum class Activation : int32_t {
  kNone,
  kRelu,
  kRelu2,
  kGelu,
  kGeluTanh,
  kSilu,
  kQuickGelu,
  kTanh,
  kSigmoid,
  kSoftplus
};

}  // namespace llmc
