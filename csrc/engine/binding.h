// Declarations of the binding of llmc_cuda._cuda.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <tuple>
#include <vector>

#include "../plugins/common/plugin.h"

namespace llmc {

// A device tensor owned by the caller: address, dtype, shape. Address 0 is an absent input.
using Foreign = std::tuple<uintptr_t, std::string, Shape>;

std::vector<Tensor> tensors_of(const std::vector<Foreign>& foreign);

// Binds single ops and kernels as functions of llmc_cuda._cuda.
void bind_kernels(nanobind::module_& m);
// Binds ranks of one process, with their collectives, as a class of llmc_cuda._cuda.
void bind_peers(nanobind::module_& m);

namespace tensorrt {

// Binds llmc_cuda._cuda.tensorrt, if llmc-cuda is built with TensorRT.
void bind(nanobind::module_ m);

}  // namespace tensorrt
}  // namespace llmc
