// packed_gemv() by integer tensor cores. Codes are mma operands after a mask and a shift.
// Dequantizing to 16 bits takes about twice the instructions, and instructions are the limit.
//
// x is quantized to 16-bit integers with a scale per vector of columns: within 2^-16 of the
// vector's maximum, where T itself rounds by 2^-9 or 2^-12. The integer q = 256 high + low occupies
// two columns of the operand as two bytes, so 8 columns hold four rows of x, and integer sums are
// exact. Each block quantizes x itself, to shared memory, while its first weights are in flight.
//
// A warp takes 16 kM weight rows. A thread has rows g, g + 8, ... A vector is 64 bytes of a
// row, a quarter of them each thread's. The warps of a block take vectors in turn. Vectors and
// their scales are in flight stages() ahead.
//
// kClusterSplit: the blocks of a cluster split K. Each quantizes its own columns only, and there
// are more blocks than tiles. Sums are sent to one block, another for each tile, which adds them in
// rank order when all have arrived while the others take the next tile.
#include "integer_gemv.cuh"

namespace llmc::kernels {
namespace {

using namespace device;
using namespace integer;

constexpr int kMaxClusterSize = 4;  // blocks that split K

// kUneven: groups have zeros or minima.
template <typename T, CodeType kCodeType, int kWarps, int kM, bool kUneven, bool kClusterSplit>
__global__ void __launch_bounds__(kWarps * 32, (kM == 1 ? 24 : 16) / kWarps)
    integer_gemv_kernel(GemvParams p) {
  constexpr int kThreads = kWarps * 32, kRows = 2 * kM, kDeep = stages(kM);
  constexpr bool kSigned =
      kCodeType == CodeType::kInt4 && !kUneven;  // operands are then (code - 8) * 16
  __shared__ float moments[kWarps][kIntegerRows][2];
  __shared__ uint64_t received_barrier_storage;
  const int parts = kClusterSplit ? cluster_size() : 1, part = kClusterSplit ? cluster_rank() : 0;
  const int begin = blockIdx.x / parts, stride = gridDim.x / parts;  // over tiles
  const SharedLayout<kCodeType> layout(p.rows, p.in, kWarps, kM, parts);
  auto* const shared = reinterpret_cast<unsigned char*>(ring);
  const auto* operands = reinterpret_cast<const uint4*>(shared + layout.operands);
  auto* const factors = reinterpret_cast<float2*>(shared + layout.factors);
  auto* const partial = reinterpret_cast<float*>(shared + layout.partial);
  auto* const received = reinterpret_cast<float*>(shared + layout.received);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto* const scales = reinterpret_cast<float*>(ring + kDeep * kRows * kThreads) + warp * kRows * 8;
  const int height = p.gated ? 8 : 16, outputs = height * kM,
            tiles = (p.out + outputs - 1) / outputs;
  const int first_vector = part * layout.vectors, first_column = first_vector * kColumns<kCodeType>;
  const int end_column = min(p.in, first_column + layout.vectors * kColumns<kCodeType>);
  const int turns = (layout.vectors + kWarps - 1) / kWarps;
  const auto row_bytes = static_cast<uint32_t>(p.in) * kBits<kCodeType> / 8;
  const int end_byte = end_column * kBits<kCodeType> / 8;
  const Mbarrier received_barrier{smem_address(&received_barrier_storage)};
  const int sums = outputs * p.rows * (p.gated ? 2 : 1), message = sums + (p.norm ? 2 * p.rows : 0);
  if (kClusterSplit) {
    if (threadIdx.x == 0) {
      received_barrier.init(1);
      received_barrier.arrive_expect_tx(parts * message * 4);
      fence_mbarrier_init();
    }
    cluster_arrive_relaxed();  // peers may send from now on
  }
  // Weight row `row` of a thread with this g. Rows beyond the last repeat it; their sums are not
  // written.
  auto row_of = [&](int tile, int row, int of_g) {
    const int low = (tile * kM + row / 2) * height + of_g;
    return row % 2 == 0 ? min(low, p.out - 1)
           : p.gated    ? p.out + min(low, p.out - 1)
                        : min(low + 8, p.out - 1);
  };
  const QuantParams& quant = p.quant;
  const int all_rows = p.gated ? 2 * p.out : p.out, groups = p.in / quant.group_size;
  const int per_group = quant.group_size / kColumns<kCodeType>;  // in vectors
  const uint32_t share = ((1u << 20) + per_group - 1) / per_group;
  const bool has_minima = kUneven && quant.minimum != nullptr;
  auto group_of = [&](int vector) {
    return min(static_cast<int>(vector * share >> 20), groups - 1);
  };

  WeightCursor<kRows> ahead{begin, warp, 0, {}, nullptr};
  const Producer<kCodeType, kWarps, kM, decltype(row_of), decltype(group_of)> producer{
      ahead,        p,        t,      row_of,   g,        row_bytes, quant, lane,  tiles,
      first_vector, end_byte, scales, group_of, all_rows, turns,     warp,  stride};
  producer.find_rows();
  for (int i = 0; i < kDeep; ++i)
    producer.copy_vector();  // weights do not depend on the previous kernel

  quantize_x<T, kCodeType, kWarps, !kSigned>(p, layout, first_column, end_column,
                                             reinterpret_cast<uint32_t*>(shared + layout.operands),
                                             factors, moments);
  __syncthreads();
  if (kClusterSplit) cluster_wait();

  const Epilogue<T, kCodeType, kWarps, kM> tile_epilogue{
      p,     layout, partial,  height,  outputs, moments,
      parts, part,   received, message, sums,    received_barrier};

  int slot = 0, turn = 0, tile = begin;
  uint32_t x[kHalves<kCodeType>][4] = {};  // unused columns stay zero
  for (; tile < tiles; tile += stride, ++turn) {
    float total[kRows] = {};
    const uint4* own = operands + (warp * kHalves<kCodeType> * layout.used + g) * 4 + t;
    const float2* factor = factors + warp * p.rows + t;
    for (int step = 0; step < turns; ++step) {
      const int vector = warp + step * kWarps;
      cp_async_wait<kDeep - 1>();
      __syncwarp();
      const uint4* from = ring + slot * kRows * kThreads + threadIdx.x;
      uint32_t words[kRows][4];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const uint4 four = from[row * kThreads];
        words[row][0] = four.x, words[row][1] = four.y, words[row][2] = four.z,
        words[row][3] = four.w;
      }
      const auto scale = load<float, kRows>(scales + slot * kWarps * kRows * 8 + g * kRows);
      slot = slot + 1 == kDeep ? 0 : slot + 1;
      __syncwarp();  // the scales have been read
      producer.copy_vector();
      if (vector >= layout.vectors) continue;

#pragma unroll
      for (int half = 0; half < kHalves<kCodeType>; ++half)
        if (g < layout.used) {
          const uint4 four = own[half * layout.used * 4];
          x[half][0] = four.x, x[half][1] = four.y, x[half][2] = four.z, x[half][3] = four.w;
        }
      own += kWarps * kHalves<kCodeType> * layout.used * 4;
      int sum[kM][4] = {};
#pragma unroll
      for (int j = 0; j < kSteps<kCodeType>; ++j)
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          uint32_t a[4];
          if constexpr (kSigned) {
            const uint32_t low = words[2 * m][j], high = words[2 * m + 1][j];
            a[0] = low * 16 & 0xf0f0f0f0 ^ 0x80808080, a[1] = high * 16 & 0xf0f0f0f0 ^ 0x80808080;
            a[2] = low & 0xf0f0f0f0 ^ 0x80808080, a[3] = high & 0xf0f0f0f0 ^ 0x80808080;
          } else if constexpr (kCodeType == CodeType::kInt4) {
            const uint32_t low = words[2 * m][j], high = words[2 * m + 1][j];
            a[0] = low & 0x0f0f0f0f, a[1] = high & 0x0f0f0f0f;
            a[2] = low >> 4 & 0x0f0f0f0f, a[3] = high >> 4 & 0x0f0f0f0f;
          } else {
            a[0] = words[2 * m][2 * j], a[1] = words[2 * m + 1][2 * j];
            a[2] = words[2 * m][2 * j + 1], a[3] = words[2 * m + 1][2 * j + 1];
          }
          mma_m16n8k32<kSigned>(sum[m], a, x[j / 2][j % 2 * 2], x[j / 2][j % 2 * 2 + 1]);
        }
      const int group = group_of(first_vector + vector);
      const float2 of_x = t < p.rows ? *factor : make_float2(0.f, 0.f);
      const int sum_of_x = __float_as_int(of_x.y);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        int all = sum[row / 2][row % 2 * 2] * 256 + sum[row / 2][row % 2 * 2 + 1];
        if constexpr (!kSigned) {
          const int zero = kUneven
                               ? load_zero<kCodeType>(quant, row_of(tile, row, g), group, groups)
                               : kDefaultZero<kCodeType>;
          all -= zero * sum_of_x;
        }
        total[row] = fmaf(static_cast<float>(all), of_x.x * scale.data[row], total[row]);
        if constexpr (kUneven) {
          const int64_t at = static_cast<int64_t>(group) * all_rows + row_of(tile, row, g);
          const float minimum = has_minima ? __ldg(quant.minimum + at) : 0.f;
          total[row] = fmaf(static_cast<float>(sum_of_x), of_x.x * minimum, total[row]);
        }
      }
      factor += kWarps * p.rows;
    }
    if (kClusterSplit && turn > 0) tile_epilogue.finish_received(tile - stride, turn - 1);
    if (t < p.rows)
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        partial[((turn % 2 * kWarps + warp) * 16 * kM + row * 8 + g) * layout.pitch + t] =
            total[row];
    __syncthreads();
    if constexpr (kClusterSplit) tile_epilogue.send_sums(turn);
    else tile_epilogue.finish(tile, turn);
  }
  if (kClusterSplit && turn > 0) tile_epilogue.finish_received(tile - stride, turn - 1);
}

// Warps of a block, tiles of 16 rows at once, blocks that split K, and the maximum number of blocks
// per SM.
struct KernelConfig {
  int warps, m, parts, blocks;
};

template <typename T, CodeType kCodeType, int kWarps, int kM, bool kUneven, bool kClusterSplit>
cudaError_t run(const GemvParams& p, const KernelConfig& config, cudaStream_t stream) {
  const size_t shared = SharedLayout<kCodeType>(p.rows, p.in, kWarps, kM, config.parts).all;
  const auto kernel = integer_gemv_kernel<T, kCodeType, kWarps, kM, kUneven, kClusterSplit>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  const int tiles = static_cast<int>(ceil_div(p.out, (p.gated ? 8 : 16) * kM));
  int clusters = 0;
  if constexpr (kClusterSplit) {
    const Launch all(config.parts, kWarps * 32, shared, stream, config.parts);
    cudaOccupancyMaxActiveClusters(&clusters, kernel, all.config());
  } else {
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, kernel, kWarps * 32, shared);
    clusters *= static_cast<int>(num_sms());
  }
  const int most = config.blocks * static_cast<int>(num_sms()) / config.parts;
  const int grid = std::max(std::min({tiles, clusters, most}), 1) * config.parts;
  return cudaLaunchKernelEx(Launch(grid, kWarps * 32, shared, stream, config.parts).config(),
                            kernel, p);
}

// Tiles of 32 weight rows. Rows are long if there are fewer tiles than SMs and much of x to
// quantize.
unsigned tiles_of(const GemvParams& p) { return ceil_div(p.out, p.gated ? 16 : 32); }
bool has_long_rows(const GemvParams& p) { return tiles_of(p) <= num_sms() && p.in > 9000; }
bool has_many_tiles(const GemvParams& p) { return tiles_of(p) >= 4 * num_sms(); }

// The configuration that was fastest for Llama shapes, if shared memory suffices. No warps: x does
// not fit.
template <CodeType kCodeType>
KernelConfig choose_config(const GemvParams& p) {
  const int64_t most = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
  auto needs = [&](int warps, int m, int parts) {  // with static shared memory
    return SharedLayout<kCodeType>(p.rows, p.in, warps, m, parts).all + warps * 32 + 16;
  };
  const KernelConfig one{16, 1, 1, 1}, two{8, 2, 1, 2},
      cluster{8, 2, kMaxClusterSize, 2};  // the last field: blocks per SM
  const bool has_one = needs(16, 1, 1) <= most, has_two = 2 * (needs(8, 2, 1) + 1024) <= most;
  const bool has_cluster = device_attribute<cudaDevAttrComputeCapabilityMajor>() >= 9 &&
                           2 * (needs(8, 2, kMaxClusterSize) + 1024) <= most;
  if (has_one && kCodeType == CodeType::kInt8 && (p.rows > 2 || has_many_tiles(p))) return one;
  if (has_long_rows(p) && has_one && p.rows < 4) return one;
  if (has_long_rows(p) && has_cluster) return cluster;
  return has_two ? two : has_one ? one : KernelConfig{};
}

template <typename T, CodeType kCodeType, bool kUneven>
cudaError_t dispatch_config(const GemvParams& p, const KernelConfig& config, cudaStream_t stream) {
  if (config.parts > 1) return run<T, kCodeType, 8, 2, kUneven, true>(p, config, stream);
  return config.warps == 16 ? run<T, kCodeType, 16, 1, kUneven, false>(p, config, stream)
                            : run<T, kCodeType, 8, 2, kUneven, false>(p, config, stream);
}

template <typename T, CodeType kCodeType>
cudaError_t run_codes(const GemvParams& p, cudaStream_t stream) {
  const KernelConfig config = choose_config<kCodeType>(p);
  if (p.quant.zero != nullptr || p.quant.minimum != nullptr)
    return dispatch_config<T, kCodeType, true>(p, config, stream);
  return dispatch_config<T, kCodeType, false>(p, config, stream);
}

template <typename T>
cudaError_t run_type(const GemvParams& p, cudaStream_t stream) {
  return p.quant.code_type == CodeType::kInt4 ? run_codes<T, CodeType::kInt4>(p, stream)
                                              : run_codes<T, CodeType::kInt8>(p, stream);
}

}  // namespace

bool has_integer_gemv(const GemvParams& p) {
  const bool four = p.quant.code_type == CodeType::kInt4;
  if ((!four && p.quant.code_type != CodeType::kInt8) || p.rows > kIntegerRows || p.in % 32 != 0 ||
      p.out % 4 != 0 || !is_aligned(p.quant.scale, 16) || !is_aligned(p.norm_weight, 16))
    return false;
  if (p.quant.group_size % (four ? kColumns<CodeType::kInt4> : kColumns<CodeType::kInt8>) != 0)
    return false;
  // Quantizing more rows takes longer than it saves if a block has few tiles, except for long rows.
  if (p.rows > 2 && four && !has_long_rows(p) && !has_many_tiles(p)) return false;
  return (four ? choose_config<CodeType::kInt4>(p) : choose_config<CodeType::kInt8>(p)).warps != 0;
}

cudaError_t integer_gemv(DType dtype, const GemvParams& p, cudaStream_t stream) {
  if (!has_integer_gemv(p)) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return run_type<__half>(p, stream);
  if (dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace llmc::kernels
