// What AllReduce and AllGather share: kernels over peer memory where a rank has them, else NCCL.
#pragma once

#include "peers.h"

namespace llmc {

inline ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return ncclFloat16;
    case DType::kBFloat16: return ncclBfloat16;
    default: return ncclFloat32;
  }
}

// The communicator of tp_size ranks. Throws Error if it is absent or has another size.
inline ncclComm_t communicator_of(const Context& context, int tp_size) {
  if (context.communicator == nullptr)
    throw Error("a collective needs a communicator; this engine has none");
  int ranks = 0;
  check(ncclCommCount(context.communicator, &ranks), "querying a communicator");
  if (ranks != tp_size)
    throw Error("a collective with tp_size " + std::to_string(tp_size) + " has a communicator of " +
                std::to_string(ranks) + " ranks");
  return context.communicator;
}

}  // namespace llmc
