#include "attention_backend.h"

#include <map>

#include "plugin.h"

namespace llmc {

// llmc_attention_backends.inc has X(name) for every file of attention_backends/; the build writes it.
#define X(name) std::unique_ptr<AttentionBackend> make_##name();
#include "llmc_attention_backends.inc"
#undef X

namespace {

using Make = std::unique_ptr<AttentionBackend> (*)();

const std::map<std::string, Make>& all() {
  static const std::map<std::string, Make> made = {
#define X(name) {#name, make_##name},
#include "llmc_attention_backends.inc"
#undef X
  };
  return made;
}

}  // namespace

std::vector<std::string> attention_backends() {
  std::vector<std::string> names;
  for (const auto& [name, make] : all()) names.push_back(name);
  return names;
}

std::unique_ptr<AttentionBackend> make_attention_backend(const std::string& name) {
  const auto found = all().find(name);
  if (found == all().end()) throw Error("there is no attention backend '" + name + "'");
  return found->second();
}

}  // namespace llmc
