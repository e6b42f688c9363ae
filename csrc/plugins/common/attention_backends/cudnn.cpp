#include "cudnn.h"

#include <dlfcn.h>

#include <cudnn_frontend.h>

#include <algorithm>

#include "../../../kernels/attention/params.h"
#include "../timing.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace llmc {
namespace {

namespace fe = cudnn_frontend;

constexpr int kRepeats = 8;

enum Name : int64_t { kQueries, kKeys, kValues, kOut, kNew, kAll, kStarts, kKeyTable, kValueTable };

// Rounds up to a power of two: a plan per exact shape would be rebuilt over and over.
int rounded(int value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

void check(fe::error_t status, const char* what) {
  if (status.is_bad()) throw Error(std::string(what) + ": " + status.get_message());
}

struct State {
  struct Plan {
    std::unique_ptr<fe::graph::Graph> graph;  // null if cuDNN has none, or a slower one
    int64_t workspace = 0;
  };

  ~State() {
    plans.clear();
    cudaFree(workspace);
    cudaFree(lengths);
    if (handle != nullptr) fe::detail::destroy_handle(handle);
  }

  Plan make(DType dtype, const kernels::AttentionParams& p, int batch, int longest, int reach) {
    using Attributes = fe::graph::Tensor_attributes;
    const int64_t b = batch, heads = p.num_heads, kv_heads = p.num_kv_heads, dim = p.head_dim;
    const auto type = dtype == DType::kFloat16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16;
    Plan plan{std::make_unique<fe::graph::Graph>()};
    auto& graph = *plan.graph;
    graph.set_io_data_type(type)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    auto integers = [&](Name name, int64_t count) {
      return graph.tensor(Attributes()
                              .set_uid(name)
                              .set_dim({count, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(fe::DataType_t::INT32));
    };
    const auto starts = integers(kStarts, b + 1);
    const std::vector<int64_t> packed = {b, heads, longest, dim},
                               packed_stride = {longest * heads * dim, dim, heads * dim, 1};
    const bool paged = p.block_table != nullptr;
    const int64_t length = paged ? p.block_size : p.max_seq_len;  // of a cache row
    const std::vector<int64_t> cached = {paged ? p.num_blocks : b, kv_heads, paged ? length : reach,
                                         dim},
                               cached_stride = {kv_heads * length * dim, length * dim, dim, 1};
    auto queries =
        graph.tensor(Attributes().set_uid(kQueries).set_dim(packed).set_stride(packed_stride));
    queries->set_ragged_offset(starts);
    auto keys = graph.tensor(Attributes().set_uid(kKeys).set_dim(cached).set_stride(cached_stride));
    auto values =
        graph.tensor(Attributes().set_uid(kValues).set_dim(cached).set_stride(cached_stride));
    auto options = fe::graph::SDPA_attributes()
                       .set_generate_stats(false)
                       .set_attn_scale(p.scale)
                       .set_padding_mask(true)
                       .set_seq_len_q(integers(kNew, b))
                       .set_seq_len_kv(integers(kAll, b))
                       .set_diagonal_alignment(fe::DiagonalAlignment_t::BOTTOM_RIGHT)
                       .set_diagonal_band_right_bound(0);
    if (paged) {
      const int64_t blocks = p.max_seq_len / p.block_size;
      auto table = [&](Name name) {
        return graph.tensor(Attributes()
                                .set_uid(name)
                                .set_dim({b, 1, blocks, 1})
                                .set_stride({blocks, blocks, 1, 1})
                                .set_data_type(fe::DataType_t::INT32));
      };
      options.set_paged_attention_k_table(table(kKeyTable))
          .set_paged_attention_v_table(table(kValueTable))
          .set_paged_attention_max_seq_len_kv(reach);
    }
    if (p.window > 0) options.set_diagonal_band_left_bound(p.window);
    auto [out, stats] = graph.sdpa(queries, keys, values, options);
    out->set_output(true).set_uid(kOut).set_dim(packed).set_stride(packed_stride);
    out->set_ragged_offset(starts);
    if (graph.build(handle, {fe::HeurMode_t::A}).is_bad()) return {};
    check(graph.get_workspace_size(plan.workspace), "cuDNN's workspace");
    return plan;
  }

  template <typename T>
  static void grow(T*& memory, int64_t& room, int64_t wanted) {
    if (wanted <= room) return;
    cudaFree(memory);
    memory = nullptr, room = 0;
    llmc::check(cudaMalloc(reinterpret_cast<void**>(&memory), wanted * sizeof(T)),
                "allocating cuDNN's workspace");
    room = wanted;
  }

  cudnnHandle_t handle = nullptr;
  using Key = std::pair<std::vector<int64_t>, float>;  // shape and scale
  std::map<Key, Plan> plans;
  char* workspace = nullptr;
  int32_t* lengths = nullptr;
  int64_t workspace_room = 0, lengths_room = 0;
};

class Cudnn : public AttentionBackend {
 public:
  explicit Cudnn(bool always) : always_(always) {
    static void* library = fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr && fe::detail::create_handle(&state_.handle) != CUDNN_STATUS_SUCCESS)
      state_.handle = nullptr;
    if (always && state_.handle == nullptr)
      throw Error("cuDNN is not installed; install nvidia-cudnn-cu13");
  }
  std::string refusal(DType dtype, DType cache) const override {
    return dtype == DType::kFloat32 || cache != dtype
               ? "supports float16 and bfloat16 with a KV cache of the same dtype"
               : "";
  }
  void make_plans(bool makes) override { makes_ = makes; }
  bool run(DType dtype, const kernels::AttentionParams& p, int longest, int reach,
           cudaStream_t stream) override;

 private:
  State state_;
  const bool always_;
  bool makes_ = true;
};

// cuDNN 9.19 writes zeros to value_cache after a sequence's last position, up to `keys`. These
// positions must belong to no other sequence.
bool Cudnn::run(DType dtype, const kernels::AttentionParams& p, int longest, int reach,
                cudaStream_t stream) {
  State& s = state_;
  if (s.handle == nullptr || longest <= 0 || dtype == DType::kFloat32 || p.float8 ||
      p.softcap > 0 || p.chunk > 0 || p.sinks != nullptr ||
      static_cast<int64_t>(p.num_tokens) * p.num_heads * p.head_dim > INT32_MAX)
    return false;
  // With blocks one plan serves all lengths that the table has room for.
  const bool paged = p.block_table != nullptr;
  if (paged && p.max_seq_len % 128 != 0) return false;  // it reads whole tiles, beyond the table
  const int batch = rounded(p.batch),
            queries = std::min(std::max(rounded(longest), 128), p.max_seq_len);
  const int keys =
      paged ? p.max_seq_len : std::min(std::max({queries, rounded(reach), 128}), p.max_seq_len);
  const State::Key key = {
      {static_cast<int>(dtype), batch, queries, keys, p.num_heads, p.num_kv_heads, p.head_dim,
       p.max_seq_len, p.window, p.block_size, p.num_blocks},
      p.scale};
  auto found = s.plans.find(key);
  const bool fresh = found == s.plans.end();
  if (fresh) {
    if (!makes_) return false;
    found = s.plans.emplace(key, s.make(dtype, p, batch, queries, keys)).first;
  }
  State::Plan& plan = found->second;
  if (plan.graph == nullptr) return false;
  State::grow(s.workspace, s.workspace_room, plan.workspace);
  const int room = (batch + 4) / 4 * 4;
  State::grow(s.lengths, s.lengths_room, 3ll * room);
  const kernels::SequenceLengths lengths{s.lengths, s.lengths + room, s.lengths + 2 * room, batch};
  if (fe::detail::set_stream(s.handle, stream) != CUDNN_STATUS_SUCCESS)
    throw Error("cuDNN rejected the stream");
  std::unordered_map<int64_t, void*> memory = {
      {kQueries, p.queries}, {kKeys, p.key_cache}, {kValues, p.value_cache}, {kOut, p.out},
      {kNew, lengths.fresh}, {kAll, lengths.all},  {kStarts, lengths.starts}};
  if (paged) memory[kKeyTable] = memory[kValueTable] = const_cast<int32_t*>(p.block_table);
  auto enqueue = [&] {
    llmc::check(kernels::sequence_lengths(lengths, p, stream), "CausalAttention");
    check(plan.graph->execute(s.handle, memory, s.workspace), "cuDNN's attention");
  };
  if (fresh && !always_ && !is_captured(stream)) {
    const float ours = time_on(stream, kRepeats, [&] {
      llmc::check(kernels::attention(dtype, p, stream), "CausalAttention");
    });
    if (ours < time_on(stream, kRepeats, enqueue)) plan.graph.reset();
  }
  if (plan.graph == nullptr) return false;
  enqueue();
  return true;
}

}  // namespace

std::unique_ptr<AttentionBackend> make_cudnn(bool always) {
  return std::make_unique<Cudnn>(always);
}
std::unique_ptr<AttentionBackend> make_cudnn() { return make_cudnn(/*always=*/true); }

}  // namespace llmc
