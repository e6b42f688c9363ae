#include "memory.h"

#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>

namespace llmc {

Stream::Stream() {
  check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "creating a stream");
}
Stream::~Stream() { cudaStreamDestroy(handle); }

Event::Event() {
  check(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming), "creating an event");
}
Event::~Event() { cudaEventDestroy(handle); }

DeviceBuffer::DeviceBuffer(int64_t bytes, const char* what) {
  const cudaError_t status = cudaMalloc(&data, std::max<int64_t>(bytes, 1));
  if (status == cudaErrorMemoryAllocation) {
    size_t free = 0, total = 0;
    cudaGetLastError();
    cudaMemGetInfo(&free, &total);
    throw Error(std::string("not enough device memory for ") + what + ": " +
                std::to_string(bytes >> 20) + " MiB are needed, " + std::to_string(free >> 20) +
                " of " + std::to_string(total >> 20) + " MiB are free");
  }
  check(status, what);
}

DeviceBuffer::~DeviceBuffer() {
  if (data != nullptr) cudaFree(data);
}

PinnedBuffer::PinnedBuffer(int64_t bytes) {
  check(cudaMallocHost(&data, std::max<int64_t>(bytes, 1)), "allocating pinned memory");
}
PinnedBuffer::~PinnedBuffer() { cudaFreeHost(data); }

void* StagingBuffer::reserve_bytes(int64_t bytes) {
  const int64_t at = (bytes_ + 15) / 16 * 16;
  if (memory_ == nullptr || at + bytes > room_) {
    room_ = std::max<int64_t>(2 * (at + bytes), 1 << 16);
    auto made = std::make_unique<PinnedBuffer>(room_);
    if (memory_ != nullptr) std::memcpy(made->data, memory_->data, bytes_);
    memory_ = std::move(made);
  }
  bytes_ = at + bytes;
  return static_cast<char*>(memory_->data) + at;
}

void* DeviceMemory::allocate_bytes(int64_t count, int64_t width, const char* what) {
  int64_t bytes = 0;
  if (count < 0 || __builtin_mul_overflow(count, width, &bytes))
    throw Error(std::to_string(count) + " elements of " + std::to_string(width) +
                " bytes do not match the size of " + what);
  owned_.emplace_back(bytes, what);
  bytes_ += bytes;
  check(cudaMemsetAsync(owned_.back().data, 0, bytes, stream_), what);
  return owned_.back().data;
}

void upload(void* target, const void* source, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return;
  check(cudaMemcpyAsync(target, source, bytes, cudaMemcpyHostToDevice, stream),
        "copying to the device");
}

std::vector<char> download(const Tensor& tensor, cudaStream_t stream) {
  std::vector<char> host(tensor.size() * width(tensor.dtype));
  check(cudaMemcpyAsync(host.data(), tensor.data, host.size(), cudaMemcpyDeviceToHost, stream),
        "copying to the host");
  check(cudaStreamSynchronize(stream), "the engine");
  return host;
}

void to_float(float* target, const char* source, int64_t count, DType dtype) {
  if (dtype == DType::kFloat32) {
    std::memcpy(target, source, 4 * count);
    return;
  }
  if (dtype == DType::kInt64) {
    for (int64_t i = 0; i < count; ++i) {
      int64_t number;
      std::memcpy(&number, source + 8 * i, 8);
      target[i] = static_cast<float>(number);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, source + 2 * i, 2);
    if (dtype == DType::kBFloat16) {
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      std::memcpy(target + i, &wide, 4);
    } else {
      __half_raw half;
      half.x = bits;
      target[i] = __half2float(__half(half));
    }
  }
}

}  // namespace llmc
