// What AllReduce and AllGather share.
#pragma once

#include "plugin.h"

namespace llmc {

inline ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return ncclFloat16;
    case DType::kBFloat16: return ncclBfloat16;
    default: return ncclFloat32;
  }
}

inline ncclComm_t communicator_of(const Context& context) {
  if (context.communicator == nullptr) throw Error("a collective needs a communicator; this engine has none");
  return context.communicator;
}

}  // namespace llmc
