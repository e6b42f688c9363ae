#include "library.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

#include "shell.h"

namespace llmc::tensorrt {
namespace {

constexpr const char* kLoad = "LLMC_LOAD_PLUGINS";

nvinfer1::ILogger* given_logger = nullptr;
nvinfer1::ILoggerFinder* logger_finder = nullptr;
thread_local std::string last_problem;

std::string library_name(int major) { return "libnvinfer.so." + std::to_string(major); }

// A function of the TensorRT loaded in this process, however it was loaded and whatever its
// version.
template <typename Function>
Function* find(const char* name) {
  if (void* found = dlsym(RTLD_DEFAULT, name)) return reinterpret_cast<Function*>(found);
  for (int major : {NV_TENSORRT_MAJOR, 8, 9, 10, 11})
    if (void* handle = dlopen(library_name(major).c_str(), RTLD_LAZY | RTLD_NOLOAD))
      return reinterpret_cast<Function*>(dlsym(handle, name));
  return nullptr;
}

// Major version of this process's TensorRT, which determines the ABI; 0 without TensorRT.
int major_version() {
  auto* version = find<int32_t()>("getInferLibVersion");
  const int number = version == nullptr ? 0 : version();  // 8.6.1 is 8601, 10.3.0 is 100300
  return number / 100 / (number < 10000 ? 10 : 100);
}

nvinfer1::ILogger* logger() {
  if (given_logger != nullptr) return given_logger;
  if (major_version() != NV_TENSORRT_MAJOR) return nullptr;
  if (logger_finder != nullptr) return logger_finder->findLogger();
  auto* get = find<nvinfer1::ILogger*()>("getLogger");
  return get == nullptr ? nullptr : get();
}

nvinfer1::IPluginRegistry* registry() {
  const int major = major_version();
  if (major == 0)
    throw Error("TensorRT is not loaded: load " + library_name(NV_TENSORRT_MAJOR) +
                " before llmc's plugins, or have it on the library path");
  if (major != NV_TENSORRT_MAJOR)
    throw Error("llmc's plugins were compiled for TensorRT " + std::to_string(NV_TENSORRT_MAJOR) +
                "." + std::to_string(NV_TENSORRT_MINOR) + ", this is version " +
                std::to_string(major) + "; compile them with a TENSORRT_ROOT of that version");
  return find<nvinfer1::IPluginRegistry*()>("getPluginRegistry")();
}

void init(void* logger, const char* name, void* given) {
  static std::mutex mutex;
  static std::set<void*> done;
  const std::lock_guard<std::mutex> lock(mutex);
  if (logger != nullptr) given_logger = static_cast<nvinfer1::ILogger*>(logger);
  auto* registry =
      given != nullptr ? static_cast<nvinfer1::IPluginRegistry*>(given) : tensorrt::registry();
  if (done.count(registry)) return;
  if (name != nullptr) plugin_namespace() = name;
  for (Creator* creator : creators()) {
#if LLMC_PLUGIN_V2
    creator->setPluginNamespace(plugin_namespace().c_str());  // otherwise a plan does not find it
#endif
    if (!registry->registerCreator(*creator, plugin_namespace().c_str()))
      throw Error("TensorRT does not register llmc's plugins in namespace '" + plugin_namespace() +
                  "': plugins of these names are already registered");
  }
  done.insert(registry);
}

__attribute__((constructor)) void init_on_load() {
  const char* wish = std::getenv(kLoad);
  if (wish == nullptr || wish[0] != '1') return;
  // Polygraphy loads plugins before TensorRT, and then uses this one.
  if (major_version() == 0)
    dlopen(library_name(NV_TENSORRT_MAJOR).c_str(), RTLD_LAZY | RTLD_GLOBAL);
  if (!initLlmcPlugins(nullptr, nullptr, nullptr) && logger() == nullptr)
    std::fprintf(stderr, "%s is 1, but %s\n", kLoad, last_problem.c_str());
}

}  // namespace

std::string& plugin_namespace() {
  static auto* name = new std::string("llmc");
  return *name;
}

void report(const std::string& problem) noexcept {
  try {
    last_problem = problem;
    if (nvinfer1::ILogger* log = logger())
      log->log(nvinfer1::ILogger::Severity::kERROR, ("llmc: " + problem).c_str());
  } catch (...) {  // no memory for the message
  }
}

}  // namespace llmc::tensorrt

using namespace llmc::tensorrt;

bool initLlmcPlugins(void* logger, const char* libNamespace, void* registry) {
  return guarded(false, [&] {
    init(logger, libNamespace, registry);
    return true;
  });
}

const char* llmcPluginError() { return last_problem.c_str(); }

void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { logger_finder = finder; }

#if NV_TENSORRT_MAJOR < 11
nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count) {
#if LLMC_PLUGIN_V2
  count = static_cast<int32_t>(creators().size());
  return creators().data();
#else
  count = 0;
  return nullptr;
#endif
}
#endif

#if NV_TENSORRT_MAJOR >= 10
nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
#if LLMC_PLUGIN_V2
  count = 0;
  return nullptr;
#else
  count = static_cast<int32_t>(creators().size());
  return creators().data();
#endif
}
#endif
