// TensorRT's headers, the plugin interface, and data types.
#pragma once

#include <NvInferRuntime.h>

#include "../plugins/common/plugin.h"

// IPluginV3 since TensorRT 10, IPluginV2DynamicExt before. 10 has both: -DLLMC_PLUGIN_V2=1 selects
// V2.
#ifndef LLMC_PLUGIN_V2
#define LLMC_PLUGIN_V2 (NV_TENSORRT_MAJOR < 10)
#endif

namespace llmc::tensorrt {

constexpr std::pair<DType, nvinfer1::DataType> kDataTypes[] = {
    {DType::kFloat32, nvinfer1::DataType::kFLOAT},
    {DType::kFloat16, nvinfer1::DataType::kHALF},
    {DType::kInt32, nvinfer1::DataType::kINT32},
    {DType::kFloat8,
     nvinfer1::DataType::kINT8},  // as bytes: 8.6 has no FP8, and only llmc reads them
#if NV_TENSORRT_MAJOR >= 9
    {DType::kBFloat16, nvinfer1::DataType::kBF16},
    {DType::kInt64, nvinfer1::DataType::kINT64},
#endif
};

inline bool known(nvinfer1::DataType type) {
  for (const auto& pair : kDataTypes)
    if (pair.second == type) return true;
  return false;
}

inline bool known(DType dtype) {
  for (const auto& pair : kDataTypes)
    if (pair.first == dtype) return true;
  return false;
}

inline DType from_tensorrt(nvinfer1::DataType type) {
  for (const auto& [ours, theirs] : kDataTypes)
    if (theirs == type) return ours;
  throw Error("llmc has no dtype for TensorRT's data type " +
              std::to_string(static_cast<int>(type)));
}

inline nvinfer1::DataType to_tensorrt(DType dtype) {
  for (const auto& [ours, theirs] : kDataTypes)
    if (ours == dtype) return theirs;
  throw Error("TensorRT " + std::to_string(NV_TENSORRT_MAJOR) + " has no " + name_of(dtype));
}

}  // namespace llmc::tensorrt
