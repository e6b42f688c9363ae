// What the parts of llmc_cuda._cuda's binding share.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <tuple>
#include <vector>

#include "../plugins/common/plugin.h"

namespace llmc {

// A device tensor that somebody else owns: address, dtype, shape. Address 0 is an absent input.
using Foreign = std::tuple<uintptr_t, std::string, Shape>;

std::vector<Tensor> tensors_of(const std::vector<Foreign>& foreign);

// Single ops and kernels: functions of llmc_cuda._cuda.
void bind_kernels(nanobind::module_& m);

namespace tensorrt {

// Where llmc-cuda is built with TensorRT: llmc_cuda._cuda.tensorrt.
void bind(nanobind::module_ m);

}  // namespace tensorrt
}  // namespace llmc
