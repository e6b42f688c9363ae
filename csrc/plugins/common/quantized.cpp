#include "quantized.h"

#include "../../kernels/gemm/params.h"
#include "../../kernels/rowwise/params.h"

namespace llmc {

void check_rounded(int group, std::initializer_list<int> widths) {
  if (group != 0 && group != 32 && group != 64 && group != kernels::kQuantBlock)
    throw Error("activations are quantized in groups of 32, 64 or 128, not " +
                std::to_string(group));
  for (int width : widths)
    if (width > kernels::kMaxNormHidden)
      throw Error("quantized rows of " + std::to_string(width) + " activations: at most " +
                  std::to_string(kernels::kMaxNormHidden) + " are supported");
}

Quantized::Quantized(const Fields& fields, size_t first)
    : zeros_(false),
      out_(integer(fields, "out_features")),
      in_(integer(fields, "in_features")),
      first_(first) {
  using kernels::CodeType;
  static const std::map<std::string, std::pair<CodeType, bool>> kinds = {
      {"", {CodeType::kNone, false}},     {"int4", {CodeType::kInt4, false}},
      {"uint4", {CodeType::kInt4, true}}, {"int8", {CodeType::kInt8, false}},
      {"uint8", {CodeType::kInt8, true}}, {"float8_e4m3fn", {CodeType::kFloat8, false}}};
  const auto& dtype = std::get<std::string>(fields.at("weight_dtype"));
  const auto found = kinds.find(dtype);
  if (found == kinds.end()) throw Error("unknown weight_dtype '" + dtype + "'");
  std::tie(quant_.code_type, zeros_) = found->second;
  quant_.group_size = integer(fields, "group_size");
  const auto rounding = fields.find("activation_dtype");
  const auto rounded =
      rounding == fields.end() ? std::string() : std::get<std::string>(rounding->second);
  if (!rounded.empty() && (rounded != "float8_e4m3fn" || quant_.code_type != CodeType::kFloat8))
    throw Error("activation_dtype '" + rounded + "' with weight_dtype '" + dtype +
                "'; float8_e4m3fn needs float8_e4m3fn weights");
  rounds_ = !rounded.empty();
  if (fields.count("activation_scale") != 0) activation_scale_ = real(fields, "activation_scale");
  if (activation_scale_ < 0 || (activation_scale_ > 0 && !rounds_))
    throw Error("activation_scale must be 0, or above 0 with an activation_dtype");
  if (fields.count("activation_group_size") != 0)
    activation_group_ = integer(fields, "activation_group_size");
  if (activation_group_ != 0 &&
      (activation_group_ != quant_.group_size || !rounds_ || activation_scale_ > 0))
    throw Error(
        "an activation_group_size is that of the weight, with an activation_dtype and without an "
        "activation_scale");
  if (rounds_) check_rounded(activation_group_, {in_});
  if (fields.count("x_dtype") != 0 && !std::get<std::string>(fields.at("x_dtype")).empty() &&
      activation_scale_ == 0)
    throw Error("an x_dtype needs an activation_scale above 0");
  if (quant_.code_type == CodeType::kNone) return;
  const int per_byte = quant_.code_type == CodeType::kInt4 ? 2 : 1;
  if (quant_.group_size < 1 || in_ < 1 || out_ < 1 || in_ % quant_.group_size != 0 ||
      in_ % per_byte != 0)
    throw Error("a weight of out_features " + std::to_string(out_) + " and in_features " +
                std::to_string(in_) + " is not divisible into groups of " +
                std::to_string(quant_.group_size));
}

Dims Quantized::matrix(const std::vector<Dims>& in, size_t weight) const {
  const Dims *scale = optional(in, first_), *zero = optional(in, first_ + 1),
             *minimum = optional(in, first_ + 2);
  if ((scale != nullptr) != static_cast<bool>(*this))
    throw Error("an op takes weight_scale and weight_dtype together");
  if ((zero != nullptr) + (minimum != nullptr) != zeros_)
    throw Error(
        "an op takes weight_zero or weight_min with weight_dtype uint4 and uint8, and with no "
        "other");
  if (!*this) return in[weight];
  const int per_byte = quant_.code_type == kernels::CodeType::kInt4 ? 2 : 1,
            groups = in_ / quant_.group_size;
  expect("a quantized weight", in[weight], {out_, in_ / per_byte});
  expect("weight_scale", *scale, {out_, groups});
  if (zero != nullptr) expect("weight_zero", *zero, {out_, (groups + per_byte - 1) / per_byte});
  if (minimum != nullptr) expect("weight_min", *minimum, {out_, groups});
  if (const Dims* blocks = optional(in, first_ + 3)) {
    if (quant_.code_type != kernels::CodeType::kFloat8 || quant_.group_size != kernels::kQuantBlock)
      throw Error(
          "an op takes weight_blocks with weight_dtype float8_e4m3fn in groups of 128 only");
    expect("weight_blocks", *blocks,
           {(out_ + kernels::kQuantBlock - 1) / kernels::kQuantBlock,
            kernels::block_scale_stride(in_)});
  }
  return {out_, in_};
}

kernels::QuantParams Quantized::quant_params(const std::vector<Tensor>& in) const {
  kernels::QuantParams made = quant_;
  if (!*this) return made;
  made.scale = static_cast<const float*>(in[first_].data);
  if (const Tensor* zero = optional(in, first_ + 1))
    made.zero = static_cast<const uint8_t*>(zero->data);
  if (const Tensor* minimum = optional(in, first_ + 2))
    made.minimum = static_cast<const float*>(minimum->data);
  if (const Tensor* blocks = optional(in, first_ + 3))
    made.blocks = static_cast<const float*>(blocks->data);
  return made;
}

void Quantized::prepare(const std::vector<Tensor>& in, size_t weight, std::set<const void*>& done,
                        cudaStream_t stream) const {
  if (!*this || !done.insert(in[weight].data).second) return;
  check(kernels::repack(in[weight].data, quant_.code_type, static_cast<int64_t>(out_) * in_, in_,
                        stream),
        "repacking");
  for (size_t port : {first_, first_ + 2}) {
    const Tensor* numbers = optional(in, port);
    if (numbers == nullptr) continue;
    const int64_t bytes = numbers->size() * width(numbers->dtype);
    void* before = nullptr;
    check(cudaMalloc(&before, bytes), "repacking");
    cudaError_t error =
        cudaMemcpyAsync(before, numbers->data, bytes, cudaMemcpyDeviceToDevice, stream);
    if (error == cudaSuccess)
      error =
          kernels::transpose(static_cast<float*>(numbers->data), static_cast<const float*>(before),
                             out_, in_ / quant_.group_size, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    cudaFree(before);
    check(error, "repacking");
  }
}

}  // namespace llmc
