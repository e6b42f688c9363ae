// Nodes of a program that are not ops of llmc: gathers, scatters, concatenation and ONNX's
// elementwise arithmetic.
#pragma once

#include "../plugins/common/plugin.h"

namespace llmc {

// By name, as plugin_types().
const std::map<std::string, PluginType>& builtin_types();

}  // namespace llmc
