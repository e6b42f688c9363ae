// Copies of rows and columns. Bound by memory: each kernel reads its inputs once.
#include <algorithm>

#include "../common/device.cuh"
#include "params.h"

namespace llmc::kernels {
namespace {

using namespace device;

template <typename T>
__global__ void gather_rows_kernel(T* y, const T* x, const int64_t* rows, int64_t x_rows,
                                   int width) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t row = rows[blockIdx.x];
  const bool there = row >= 0 && row < x_rows;
  const T* source = x + (there ? row : 0) * width;
  T* target = y + static_cast<int64_t>(blockIdx.x) * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    target[i] = there ? source[i] : from_float<T>(0.f);
}

// One block per row and 128 columns.
template <typename T>
__global__ void gather_columns_kernel(T* y, const T* x, const int32_t* index, int x_width,
                                      int width) {
  pdl_wait();
  pdl_launch_dependents();
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= width) return;
  const int column = index[i];
  const bool there = column >= 0 && column < x_width;
  y[static_cast<int64_t>(blockIdx.x) * width + i] =
      there ? x[static_cast<int64_t>(blockIdx.x) * x_width + column] : from_float<T>(0.f);
}

template <typename T>
__global__ void interleave_kernel(T* y, const T* x, int width) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t parts = gridDim.y, rows = gridDim.x;
  const T* source = x + (blockIdx.y * rows + blockIdx.x) * width;
  T* target = y + (blockIdx.x * parts + blockIdx.y) * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) target[i] = source[i];
}

// One block per row. Widths are in vectors.
template <typename V>
__global__ void __launch_bounds__(256) concat_kernel(ConcatParams p) {
  pdl_wait();
  pdl_launch_dependents();
  int64_t width = 0, at = 0;
  for (int part : p.widths) width += part;
#pragma unroll
  for (int part = 0; part < kMaxConcat; ++part) {
    const V* from =
        static_cast<const V*>(p.x[part]) + static_cast<int64_t>(blockIdx.x) * p.widths[part];
    V* to = static_cast<V*>(p.y) + blockIdx.x * width + at;
    for (int i = threadIdx.x; i < p.widths[part]; i += blockDim.x) to[i] = from[i];
    at += p.widths[part];
  }
}

// One grid row per array.
__global__ void narrow_kernel(NarrowParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const int array = blockIdx.y;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count[array];
       i += gridDim.x * blockDim.x)
    p.y[array][i] = static_cast<int32_t>(p.x[array][i]);
}

// One block per row. V is 16 bytes, or one element for rows that are not whole vectors.
template <typename V>
__global__ void scatter_kernel(V* y, const V* x, const int64_t* rows, int64_t y_rows, int width) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t row = rows[blockIdx.x];
  if (row < 0 || row >= y_rows) return;
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    y[row * width + i] = x[static_cast<int64_t>(blockIdx.x) * width + i];
}

}  // namespace

cudaError_t gather_rows(DType dtype, void* y, const void* x, const int64_t* rows, int count,
                        int64_t x_rows, int width, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(gather_rows_kernel<T>, count, 128, 0, stream, static_cast<T*>(y),
                  static_cast<const T*>(x), rows, x_rows, width);
  });
}

cudaError_t gather_columns(DType dtype, void* y, const void* x, const int32_t* index, int rows,
                           int x_width, int width, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(gather_columns_kernel<T>, dim3(rows, ceil_div(width, 128)), 128, 0, stream,
                  static_cast<T*>(y), static_cast<const T*>(x), index, x_width, width);
  });
}

cudaError_t concat(DType dtype, const ConcatParams& given, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    ConcatParams p = given;
    if (std::any_of(p.widths, p.widths + kMaxConcat,
                    [](int width) { return width % kVec<T> != 0; }))
      return launch(concat_kernel<T>, p.rows, 256, 0, stream, p);
    for (int& width : p.widths) width /= kVec<T>;
    return launch(concat_kernel<uint4>, p.rows, 256, 0, stream, p);
  });
}

cudaError_t interleave(DType dtype, void* y, const void* x, int parts, int rows, int width,
                       cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(interleave_kernel<T>, dim3(rows, parts), 128, 0, stream, static_cast<T*>(y),
                  static_cast<const T*>(x), width);
  });
}

cudaError_t narrow(const NarrowParams& p, cudaStream_t stream) {
  int most = 1;
  for (int count : p.count) most = max(most, count);
  return launch(narrow_kernel, dim3(min(ceil_div(most, 256), 64u), kMaxNarrow), 256, 0, stream, p);
}

cudaError_t scatter_rows(DType dtype, void* y, const void* x, const int64_t* rows, int count,
                         int64_t y_rows, int width, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (width % kVec<T> == 0)
      return launch(scatter_kernel<uint4>, count, 128, 0, stream, static_cast<uint4*>(y),
                    static_cast<const uint4*>(x), rows, y_rows, width / kVec<T>);
    return launch(scatter_kernel<T>, count, 128, 0, stream, static_cast<T*>(y),
                  static_cast<const T*>(x), rows, y_rows, width);
  });
}

}  // namespace llmc::kernels
