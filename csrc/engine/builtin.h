// Nodes of a program that are no ops of llmc's: rows that are picked and put, and ONNX's row-wise arithmetic.
#pragma once

#include "../plugins/common/plugin.h"

namespace llmc {

// By name, as plugin_types().
const std::map<std::string, PluginType>& builtin_types();

}  // namespace llmc
