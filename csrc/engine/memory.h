// Owners of device and host memory, and conversions to float32 on the host.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "../plugins/common/plugin.h"

namespace llmc {

struct Stream {
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  cudaStream_t handle = nullptr;
};

struct Event {
  Event();
  ~Event();
  Event(const Event&) = delete;
  cudaEvent_t handle = nullptr;
};

struct DeviceBuffer {
  // Throws Error, with the free memory, if there is no room for `what`.
  DeviceBuffer(int64_t bytes, const char* what);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept : data(std::exchange(other.data, nullptr)) {}
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;
  void* data = nullptr;
};

// Page-locked host memory.
struct PinnedBuffer {
  explicit PinnedBuffer(int64_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  void* data = nullptr;
};

// Page-locked memory that grows on demand.
class GrowingPinnedBuffer {
 public:
  void* at_least(int64_t bytes) {
    if (bytes > room_)
      memory_.reset(), memory_ = std::make_unique<PinnedBuffer>(bytes), room_ = bytes;
    return memory_->data;
  }

 private:
  std::unique_ptr<PinnedBuffer> memory_;
  int64_t room_ = 0;
};

// Packs arrays into page-locked memory, so that one copy sends all of them.
class StagingBuffer {
 public:
  void clear() { bytes_ = 0; }
  // Appends an array; returns its offset in bytes.
  template <typename T>
  int64_t add(const T* values, int64_t count) {
    T* place = reserve<T>(count);
    std::copy(values, values + count, place);
    return reinterpret_cast<char*>(place) - static_cast<char*>(memory_->data);
  }
  template <typename T>
  int64_t add(const std::vector<T>& values) {
    return add(values.data(), static_cast<int64_t>(values.size()));
  }
  int64_t bytes() const { return bytes_; }
  const void* data() const { return memory_ ? memory_->data : nullptr; }

 private:
  template <typename T>
  T* reserve(int64_t count) {
    return static_cast<T*>(reserve_bytes(count * static_cast<int64_t>(sizeof(T))));
  }
  void* reserve_bytes(int64_t bytes);

  std::unique_ptr<PinnedBuffer> memory_;
  int64_t room_ = 0, bytes_ = 0;
};

// Device memory with the lifetime of this object, initialized to zero.
class DeviceMemory {
 public:
  explicit DeviceMemory(cudaStream_t stream) : stream_(stream) {}

  template <typename T>
  T* allocate(int64_t count, const char* what) {
    return static_cast<T*>(allocate_bytes(count, sizeof(T), what));
  }
  int64_t bytes() const { return bytes_; }

 private:
  void* allocate_bytes(int64_t count, int64_t width, const char* what);

  cudaStream_t stream_;
  std::vector<DeviceBuffer> owned_;
  int64_t bytes_ = 0;
};

void upload(void* target, const void* source, int64_t bytes, cudaStream_t stream);

// Copies a tensor to the host, after all enqueued work.
std::vector<char> download(const Tensor& tensor, cudaStream_t stream);

// Converts host values of a floating-point dtype to float32.
void to_float(float* target, const char* source, int64_t count, DType dtype);

}  // namespace llmc
