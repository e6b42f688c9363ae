// Linear layers with LoRA adapters: the inputs of csrc/plugins/lora.py. A core takes those in
// slots.
#pragma once

#include "linear.h"
#include "lora_plan.h"

namespace llmc {

// Adds the ports of adapters. `norms`: the op normalizes x.
inline std::vector<Port> lora_ports(std::vector<Port> ports, bool norms = false) {
  for (const char* port : {"lora_a?", "lora_b?", "lora_owner?: int32", "lora_ids?: int32",
                           "lora_down?", "lora_up?", "lora_ranks?: int32", "lora_part?: int32"})
    ports.emplace_back(port);
  if (norms)
    for (const char* port : {"lora_gain?: float32", "lora_shift?: float32"})
      ports.emplace_back(port);
  return ports;
}

class Adapters {
 public:
  // `first`: index of lora_a among the op's inputs.
  explicit Adapters(size_t first) : first_(first) {}

  // Throws Error unless the inputs fit together. `matrix`: [out, in] of the weight.
  void expect_shapes(const std::vector<Dims>& in, const Dims& matrix) const {
    const Dims *ids = optional(in, first_ + 3), *down = optional(in, first_ + 4),
               *up = optional(in, first_ + 5), *ranks = optional(in, first_ + 6),
               *part = optional(in, first_ + 7);
    if (down == nullptr && up == nullptr && ranks == nullptr) return;
    if (down == nullptr || up == nullptr || ranks == nullptr || ids == nullptr)
      throw Error("an op takes lora_ids, lora_down, lora_up and lora_ranks together");
    const Dims &a = *down, &b = *up;
    expect("lora_down", a, {a[0], a[1], a[2], matrix[1]});
    expect("lora_up", b, {a[1], matrix[0], a[2]});
    expect("lora_ranks", *ranks, {a[1]});
    expect("lora_ids", *ids, {in[0][0]});
    if (part != nullptr) expect("lora_part", *part, {matrix[0]});
    else expect("lora_down without lora_part", a, {1, a[1], a[2], a[3]});
    if (a[2].known() && a[2].number() % 8 != 0)
      throw Error("slots of adapters have room for rank " + std::to_string(a[2].number()) +
                  ", expected a multiple of 8");
    if (a[1].known() && a[1].number() > kernels::kMaxLoraSlots)
      throw Error(std::to_string(a[1].number()) + " slots of adapters exceed " +
                  std::to_string(kernels::kMaxLoraSlots));
    for (size_t port : {first_ + 8, first_ + 9})
      if (const Dims* own = optional(in, port))
        expect("lora_gain and lora_shift", *own, {matrix[1]});
  }

  // Bytes for the hidden values of each row, a normalized x, and the sums of a gated layer, before
  // the workspace of its GEMM. 0 without adapters.
  int64_t workspace(const std::vector<Tensor>& in, int out, bool gated) const {
    if (optional(in, first_ + 4) == nullptr) return 0;
    return hidden_bytes(in) + rows_workspace(in[0]) +
           (gated ? aligned(in[0].shape[0] * out * width(in[0].dtype)) : 0);
  }

  // Runs `base`, the layer without adapters. If the step has adapters, and the op takes them, it is
  // for sums before the activation, and the product of each row's adapter is added. `rows`: the
  // transformation of x, whose quantization the adapters ignore.
  template <typename Base>
  void linear(const Linear& l, const InputTransform& rows, const std::vector<Tensor>& in,
              void* workspace, const Context& context, Base&& base) const {
    if (!context.adapters || optional(in, first_ + 4) == nullptr) return base(l, workspace);
    if (l.x.dtype == DType::kFloat8) throw Error("adapters do not take an FP8 x");
    const DType dtype = l.x.dtype;
    kernels::LoraParams p = params(l, in, workspace);
    if (p.gain == nullptr) p.gain = rows.weight;
    if (p.shift == nullptr) p.shift = rows.bias;
    void* made = static_cast<char*>(workspace) + hidden_bytes(in);
    char* rest = static_cast<char*>(made) + rows_workspace(l.x);
    Tensor sums = l.y;
    if (l.gated) {
      sums = {rest, dtype, {p.rows, p.out}};
      rest += aligned(sums.size() * width(dtype));
    }
    p.z = sums.data;
    const Linear plain{l.x,        l.weight, l.quant,           l.out, l.bias,
                       l.residual, sums,     Activation::kNone, false};
    if (p.rows <= kernels::kLoraFewRows || dtype == DType::kFloat32 || p.in % 8 != 0) {
      p.norm = rows.normed;
      p.centred = rows.centred;
      p.epsilon = rows.epsilon;
      base(plain, rest);
      check(kernels::lora_shrink_rows(dtype, p, context.stream), "adapters");
      check(kernels::lora_expand_rows(dtype, p, context.stream), "adapters");
      return;
    }
    const LoraPlan::Tiles planned =
        context.lora_plan->tiles(p.ids, p.rows, p.slots, context.stream);
    p.order = planned.order;
    p.tiles = planned.tiles;
    base(plain, rest);
    if (rows.normed) {
      InputTransform own{true, rows.centred, false, rows.epsilon, p.gain, p.shift};
      make_rows(l.x, own, made, nullptr, nullptr, context);
      p.x = made;
    }
    check(kernels::lora_shrink_tiles(dtype, p, context.stream), "adapters");
    check(kernels::lora_expand_tiles(dtype, p, context.stream), "adapters");
    if (l.gated) gate_halves(l, sums.data, context);
    else if (l.activation != Activation::kNone)
      check(kernels::activate(dtype, l.y.data, l.y.size(), l.activation, context.stream),
            "an activation");
  }

 private:
  int64_t hidden_bytes(const std::vector<Tensor>& in) const {
    const Shape& down = in[first_ + 4].shape;
    const auto rows = static_cast<int>(in[0].shape[0]);
    // Of as many rows as have splits at most, so that more rows never need less.
    const int split = std::min(rows, kernels::kLoraSplitRows);
    const int64_t values =
        std::max(rows, split * kernels::lora_splits(split, static_cast<int>(in[0].shape[1])));
    return aligned(values * down[0] * down[2] * static_cast<int64_t>(sizeof(float)));
  }

  kernels::LoraParams params(const Linear& l, const std::vector<Tensor>& in, void* hidden) const {
    const Shape& down = in[first_ + 4].shape;
    const auto floats = [&](size_t port) {
      const Tensor* tensor = optional(in, port);
      return tensor == nullptr ? nullptr : static_cast<const float*>(tensor->data);
    };
    kernels::LoraParams p{};
    p.x = l.x.data;
    p.down = in[first_ + 4].data;
    p.up = in[first_ + 5].data;
    p.ranks = static_cast<const int32_t*>(in[first_ + 6].data);
    p.ids = static_cast<const int32_t*>(in[first_ + 3].data);
    if (const Tensor* part = optional(in, first_ + 7))
      p.part = static_cast<const int32_t*>(part->data);
    p.gain = floats(first_ + 8);
    p.shift = floats(first_ + 9);
    p.hidden = static_cast<float*>(hidden);
    p.rows = static_cast<int>(l.x.shape[0]);
    p.in = static_cast<int>(l.x.shape[1]);
    p.out = l.out;
    p.parts = static_cast<int>(down[0]);
    p.slots = static_cast<int>(down[1]);
    p.rank = static_cast<int>(down[2]);
    p.y = l.y.data;
    p.activation = l.activation;
    p.gated = l.gated;
    p.y_scale_inverse = l.y_scale_inverse;
    return p;
  }

  size_t first_;
};

}  // namespace llmc
