// Causal attention to a KV cache: the layer's own, or that of another layer.
#pragma once

#include <algorithm>
#include <utility>

#include "../../kernels/attention/params.h"
#include "heads.h"
#include "norm.h"
#include "split_kv_plan.h"

namespace llmc {

// Indices of the optional inputs after sin and q_norm; kNone: the op lacks the input.
struct AttentionPorts {
  static constexpr size_t kNone = SIZE_MAX;
  size_t k_norm = kNone, block_table = kNone, distance_bias = kNone, sinks = kNone, v_norm = kNone,
         key_bias = kNone, query_scale = kNone, rotary_positions = kNone, rotary_axes = kNone,
         bidirectional_ranges = kNone;
};

class CachedKeysAttention : public Plugin {
 public:
  // reads: the cache belongs to another layer, which has run earlier in the same step; rows have
  // queries only.
  CachedKeysAttention(const char* op, bool reads, const AttentionPorts& ports, const Fields& fields)
      : op_(op), ports_(ports) {
    read_heads(p_, op_, fields, 512);
    p_.reads = reads;
    read_cached(p_, op_, fields);
    p_.softcap = real(fields, "softcap");
    p_.chunk = integer(fields, "chunk");
    p_.windowed_ranges =
        ports_.bidirectional_ranges != ports_.kNone && integer(fields, "windowed_ranges") != 0;
    p_.out_scale_inverse = inverse_of(fields);
    out_scale_ = real(fields, "out_scale");
    if (p_.out_scale_inverse > 0 &&
        (p_.head_dim % 8 != 0 || p_.num_heads * p_.head_dim > kernels::kMaxNormHidden))
      throw Error(op_ + " supports out_scale for multiples of 8 columns only, at most " +
                  std::to_string(kernels::kMaxNormHidden) + ", not of heads of " +
                  std::to_string(p_.head_dim));
  }

  std::vector<Dims> shapes(const std::vector<Dims>& in) const override {
    const std::string& op = op_;
    const Dims* table = optional(in, ports_.block_table);
    const int64_t heads = p_.reads ? p_.num_heads : p_.num_heads + 2ll * p_.num_kv_heads;
    std::vector<Dim> positions =  // of the tables
        expect_cached(p_, op, in, p_.reads ? "query" : "qkv", heads, table);
    const Dims &qkv = in[0], &cache = in[1];
    for (size_t norm : {size_t{7}, ports_.k_norm, ports_.v_norm})
      if (const Dims* weight = optional(in, norm))
        expect(op + "'s q_norm, k_norm or v_norm", *weight, {p_.head_dim});
    if (const Dims* bias = optional(in, ports_.distance_bias))
      expect(op + "'s distance_bias", *bias, {p_.num_heads, (*bias)[1]});
    if (const Dims* sinks = optional(in, ports_.sinks))
      expect(op + "'s sinks", *sinks, {p_.num_heads});
    const Dims *bias = optional(in, ports_.key_bias), *factors = optional(in, ports_.query_scale);
    if (bias != nullptr) expect(op + "'s key_bias", *bias, {p_.num_heads, (*bias)[1]});
    if ((bias != nullptr || optional(in, ports_.distance_bias) != nullptr) && p_.head_dim > 256)
      throw Error(op + " with a bias has no kernel for head_dim " + std::to_string(p_.head_dim) +
                  "; at most 256 is supported");
    if (p_.out_scale_inverse > 0 &&
        (bias != nullptr || optional(in, ports_.distance_bias) != nullptr))
      throw Error(op_ + " with a bias does not support out_scale");
    if (factors != nullptr) expect(op + "'s query_scale", *factors, {(*factors)[0]});
    if (const Dims* ranges = optional(in, ports_.bidirectional_ranges)) {
      expect(op + "'s bidirectional_ranges", *ranges, {qkv[0], 2});
      if (p_.chunk > 0 || bias != nullptr || optional(in, ports_.distance_bias) != nullptr)
        throw Error(op + " does not support bidirectional_ranges with chunks or biases");
    }
    if (bias != nullptr) positions.push_back((*bias)[1]);
    if (factors != nullptr) positions.push_back((*factors)[0]);
    expect_positions(op, positions, cache, table);
    const Dims *by_axis = optional(in, ports_.rotary_positions),
               *axes = optional(in, ports_.rotary_axes);
    if ((by_axis == nullptr) != (axes == nullptr) || (axes != nullptr && p_.rotary_dim == 0))
      throw Error(op + " takes rotary_positions, rotary_axes and a rotary_dim above 0 together");
    if (by_axis != nullptr) {
      expect(op + "'s rotary_positions", *by_axis, {qkv[0], kernels::kRotaryAxes});
      expect(op + "'s rotary_axes", *axes, {p_.rotary_dim / 2});
    }
    const Dims out{qkv[0], static_cast<int64_t>(p_.num_heads) * p_.head_dim};
    return p_.reads ? std::vector<Dims>{out} : std::vector<Dims>{out, cache, in[2]};
  }

  // Partial results of KV splits, the KV splits, rotated queries, partial results of a shared
  // prefix; and cuDNN's output, if that is quantized afterwards.
  int64_t workspace(const std::vector<Tensor>& in) const override {
    const bool shares = optional(in, ports_.block_table) != nullptr;
    return scratch() + kv_splits_bytes(in) + queries_bytes(in) + made_bytes(in) +
           (shares ? kernels::prefix_scratch(static_cast<int>(in[4].shape[0]), p_.num_heads,
                                             p_.num_kv_heads, p_.head_dim)
                   : 0);
  }

  void enqueue(const std::vector<Tensor>& in, const std::vector<Tensor>& out, void* workspace,
               const Context& context) const override {
    kernels::AttentionParams p = p_;
    p.out = out[0].data;
    p.qkv = in[0].data;
    p.qkv_stride = in[0].row_pitch();
    check_cache_dtypes(op_, in, p.float8);
    p.key_cache = in[1].data;
    p.value_cache = in[2].data;
    p.cu_seqlens = static_cast<const int32_t*>(in[3].data);
    p.past_lens = static_cast<const int32_t*>(in[4].data);
    auto table_of = [&](size_t port) {
      const Tensor* table = optional(in, port);
      return table != nullptr ? static_cast<const float*>(table->data) : nullptr;
    };
    p.cos = table_of(5);
    p.sin = table_of(6);
    p.q_norm = table_of(7);
    p.k_norm = table_of(ports_.k_norm);
    p.v_norm = table_of(ports_.v_norm);
    p.sinks = table_of(ports_.sinks);
    p.query_scale = table_of(ports_.query_scale);
    if (const Tensor* by_axis = optional(in, ports_.rotary_positions)) {
      p.rotary_positions = static_cast<const int32_t*>(by_axis->data);
      p.rotary_axes = static_cast<const int32_t*>(in[ports_.rotary_axes].data);
    }
    if (const Tensor* ranges = optional(in, ports_.bidirectional_ranges))
      if (context.ranges) p.ranges = static_cast<const int32_t*>(ranges->data);
    p.num_tokens = static_cast<int>(in[0].shape[0]);
    p.batch = static_cast<int>(in[4].shape[0]);
    p.max_seq_len = static_cast<int>(in[1].shape[2]);
    if (const Tensor* table = optional(in, ports_.block_table)) {
      if (context.building) return;  // blocks do not exist while TensorRT builds
      p.block_table = static_cast<const int32_t*>(table->data);
      p.block_size = p.max_seq_len;
      p.num_blocks = static_cast<int>(in[1].shape[0]);
      p.max_seq_len *= static_cast<int>(table->shape[1]);
      if ((p.block_size & (p.block_size - 1)) != 0)
        throw Error(op_ + "'s block size " + std::to_string(p.block_size) +
                    " is not a power of two");
    }
    p.scratch = workspace;
    p.counters = context.counters;
    p.kv_splits = reinterpret_cast<kernels::KvSplit*>(static_cast<char*>(workspace) + scratch());
    void* const made = static_cast<char*>(workspace) + scratch() + kv_splits_bytes(in);
    p.queries = static_cast<char*>(made) + made_bytes(in);
    kernels::ScoreBias bias{table_of(ports_.distance_bias), table_of(ports_.key_bias), 0, 0};
    if (bias.distance != nullptr)
      bias.distances = static_cast<int>(in[ports_.distance_bias].shape[1]);
    if (bias.key != nullptr) bias.positions = static_cast<int>(in[ports_.key_bias].shape[1]);
    if (bias.distance != nullptr || bias.key != nullptr) {
      check(kernels::append(in[0].dtype, p, context.stream), op_.c_str());
      check(kernels::biased_attention(in[0].dtype, p, bias, context.stream), op_.c_str());
      return;
    }
    if (context.attention != nullptr && context.attention->decodes()) {
      kernels::AttentionParams own = p;
      own.decode = context.verifies;  // see below
      check(kernels::append(in[0].dtype, own, context.stream), op_.c_str());
      if (!context.attention->run(in[0].dtype, p, context.longest, context.reach, context.stream))
        check(kernels::attention(in[0].dtype, p, context.stream), op_.c_str());
      return;
    }
    if (context.verifies && !kernels::decodes_rows(in[0].dtype, p)) {
      kernels::AttentionParams own = p;
      own.decode = true;  // a row must not clear what the next one of its sequence writes
      check(kernels::append(in[0].dtype, own, context.stream), op_.c_str());
      own.decode = false, own.vanilla = true;
      check(kernels::attention(in[0].dtype, own, context.stream), op_.c_str());
      return;
    }
    const int decodes =
        context.dense && p.num_tokens == p.batch ? p.batch : std::min(context.num_decode, p.batch);
    if (decodes > 0) {
      kernels::AttentionParams half = p;
      half.decode = true;
      half.ranges = nullptr;  // an engine computes a range's last token with the one before it
      half.several_rows = context.verifies;
      half.num_tokens = half.batch = decodes;
      half.appended = context.verifies && kernels::appends_rows(half);
      half.prefix = context.prefix;
      half.prefix.results =
          reinterpret_cast<float*>(static_cast<char*>(p.queries) + queries_bytes(in));
      if (half.appended) check(kernels::append(in[0].dtype, half, context.stream), op_.c_str());
      if (half.prefix.of != nullptr && kernels::can_share_prefix(in[0].dtype, half)) {
        if (!half.appended) check(kernels::append(in[0].dtype, half, context.stream), op_.c_str());
        check(kernels::prefix_attention(in[0].dtype, half, context.stream), op_.c_str());
      } else {
        half.prefix = {};
      }
      if (context.split_kv_plan != nullptr) context.split_kv_plan->assign(half);
      check(kernels::attention(in[0].dtype, half, context.stream), op_.c_str());
    }
    if (decodes == p.batch) return;
    if (decodes > 0) skip(p, decodes, in);
    if (context.reach > 0 && context.reach <= p.chunk)
      p.chunk = 0;  // a single chunk, which all kernels support
    check(kernels::append(in[0].dtype, p, context.stream), op_.c_str());
    kernels::AttentionParams library = p;
    if (p.out_scale_inverse > 0) library.out = made;
    if (context.attention != nullptr && p.ranges == nullptr &&
        context.attention->run(in[0].dtype, library, context.longest, context.reach,
                               context.stream)) {
      if (p.out_scale_inverse > 0) round_rows(in[0].dtype, made, p, context);
      return;
    }
    check(kernels::attention(in[0].dtype, p, context.stream), op_.c_str());
  }

 private:
  // Skips the decoding sequences, which have one token each.
  static void skip(kernels::AttentionParams& p, int sequences, const std::vector<Tensor>& in) {
    const int64_t element = width(in[0].dtype),
                  row = static_cast<int64_t>(p.num_heads) * p.head_dim;
    p.out = static_cast<char*>(p.out) + sequences * row * (p.out_scale_inverse > 0 ? 1 : element);
    p.qkv = static_cast<const char*>(p.qkv) + sequences * p.qkv_stride * element;
    if (p.rotary_positions != nullptr) p.rotary_positions += sequences * kernels::kRotaryAxes;
    if (p.ranges != nullptr) p.ranges += 2ll * sequences;
    p.cu_seqlens += sequences;
    p.past_lens += sequences;
    p.first_token = sequences;
    p.num_tokens -= sequences;
    p.batch -= sequences;
    if (p.block_table != nullptr) {
      p.block_table += sequences * static_cast<int64_t>(p.max_seq_len / p.block_size);
    } else {
      const int64_t cached = in[1].size() / in[1].shape[0] * width(in[1].dtype);
      p.key_cache = static_cast<char*>(p.key_cache) + sequences * cached;
      p.value_cache = static_cast<char*>(p.value_cache) + sequences * cached;
    }
  }

  void round_rows(DType dtype, const void* made, const kernels::AttentionParams& of,
                  const Context& context) const {
    kernels::NormParams p{};
    p.x = made;
    p.rows = of.num_tokens;
    p.hidden = of.num_heads * of.head_dim;
    p.plain = p.rounded = true;
    p.codes = static_cast<uint8_t*>(of.out);
    p.static_scale = out_scale_;
    norm(dtype, p, op_.c_str(), context.stream);
  }

  static int64_t kv_splits_bytes(const std::vector<Tensor>& in) {
    return (SplitKvPlan::capacity(in[4].shape[0]) * static_cast<int64_t>(sizeof(kernels::KvSplit)) +
            255) /
           256 * 256;
  }
  int64_t made_bytes(const std::vector<Tensor>& in) const {
    return p_.out_scale_inverse > 0 ? queries_bytes(in) : 0;
  }
  int64_t queries_bytes(const std::vector<Tensor>& in) const {
    return (in[0].shape[0] * p_.num_heads * p_.head_dim * 4 + 255) / 256 * 256;
  }
  int64_t scratch() const {
    return (kernels::attention_scratch(p_.num_heads, p_.head_dim) + 255) / 256 * 256;
  }

  const std::string op_;
  const AttentionPorts ports_;
  kernels::AttentionParams p_{};
  float out_scale_ = 0;
};

}  // namespace llmc
