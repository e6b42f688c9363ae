"""Targets: capabilities that the compiler, the artifact format and the runtime read.

A target is one `TargetSpec` and one module that writes its engines (`TargetSpec.compiler`).
`register` adds a target; no other file lists them. This module imports nothing heavy, because
`llmc --help` and the runtime import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from llmc.errors import LlmcError


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """Capabilities and limits of a target.

    Args:
        name: value of `--target`, and of `target.kind` in model_info.json.
        compiler: module with `describe` and `emit`; see llmc.compiler.targets.Backend.
        engine: `module:class` of a rank's engine; "": llmc does not run this target.
        engine_file: name of the engine's file in a chip's directory.
        encoder_file: name of the encoder's file in a chip's directory.
        draft_file: name of the draft model's file in a chip's directory.
        image_file: name of the image encoder's file in a chip's directory.
        audio_file: name of the file of the encoder of audio in a chip's directory.
        gpu: ranks run on GPUs; otherwise on CPU cores.
        kernels: llmc's CUDA kernels compute llmc's ops; otherwise their ONNX function bodies do.
        runs_any_op: the engine runs every llmc op, if necessary by its ONNX function body.
        runs_program: llmc's CUDA engine runs the program; ops may read column slices of a value.
        samples_on_device: the engine samples, and returns a limited number of log-probabilities.
        paged: KV caches are paged (blocks and block tables).
        collectives: the engine has collectives, so tp_size may exceed 1.
        encoders: the engine runs encoder-decoder models.
        key_steps: the rows of a sequence's encoder output may be apart from each other.
        reads_features: encoders may read rows of audio.
        recurrent_state: the engine supports recurrent state.
        latent_caches: the engine supports the latent caches of MLA.
        shared_caches: a layer may read the KV cache of another layer.
        drafts: the engine runs draft models.
        pools: the engine returns pooled rows of embedding models and classifiers.
        adapters: the form in which the engine takes LoRA adapters, rows or slots; see
            llmc.plugins.lora. Empty: it takes none.
        embeds: prompts may have rows in place of embeddings of token ids.
        media_encoders: prompts may have images or audio.
        dtypes: dtypes of weights and activations; the last is the fallback of `--dtype auto`.
        kv_dtypes: dtypes of KV caches, in addition to `dtypes`.
        weight_dtypes: dtypes of quantized weights that `--quantize` may produce.
        expert_dtypes: dtypes of quantized weights that the MoE kernels read.
        group_multiple: divisor of the group size of quantized weights; 0: quantized weights are
            not supported.
        row_multiple: divisor of the number of rows of quantized weights.
        permutes_columns: activations are permuted for weights with a column order (act-order).
        mla_projections: the MLA up-projections may be quantized.
        block_scales: kernels read scales of blocks (rows x columns).
        activation_group_sizes: group sizes of activation quantization; empty: any.
        int8_activations: kernels multiply int8 weights by activations quantized to int8 per token.
        quantizes_activations: kernels always quantize the activations of quantized weights.
        max_head_dim: maximum head_dim of attention kernels, which need a multiple of 8; None: any.
        default_max_seq_len: upper bound without `--max_seq_len`; None: the model's length.
        index_dtype: dtype of token ids, positions and indices.
        opset: ONNX opset of the graphs; None: llmc's default.
        required_fields: fields of `Target` that every case directory has in model_info.json.
        optional_fields: fields of `Target` that a case directory may have.
        versions: libraries whose versions a case directory records.
    """

    name: str
    compiler: str
    engine: str = ""
    engine_file: str = "graph.onnx"
    encoder_file: str = "encoder.onnx"
    draft_file: str = "draft.onnx"
    image_file: str = "image.onnx"
    audio_file: str = "audio.onnx"
    gpu: bool = False
    kernels: bool = False
    runs_any_op: bool = False
    runs_program: bool = False
    samples_on_device: bool = False
    paged: bool = False
    collectives: bool = True
    encoders: bool = True
    key_steps: bool = False
    reads_features: bool = False
    recurrent_state: bool = False
    latent_caches: bool = False
    shared_caches: bool = False
    drafts: bool = False
    pools: bool = False
    adapters: Literal["", "rows", "slots"] = ""
    embeds: bool = False
    media_encoders: bool = False
    dtypes: tuple[str, ...] = ("float32",)
    kv_dtypes: tuple[str, ...] = ()
    weight_dtypes: tuple[str, ...] = ()
    expert_dtypes: tuple[str, ...] = ()
    group_multiple: int = 0
    row_multiple: int = 1
    permutes_columns: bool = False
    mla_projections: bool = False
    block_scales: bool = False
    activation_group_sizes: tuple[int, ...] = ()
    int8_activations: bool = False
    quantizes_activations: bool = False
    max_head_dim: int | None = None
    default_max_seq_len: int | None = None
    index_dtype: Literal["int64", "int32"] = "int64"
    opset: int | None = None
    required_fields: frozenset[str] = frozenset()
    optional_fields: frozenset[str] = frozenset()
    versions: tuple[str, ...] = ()

    def require_engine(self) -> None:
        """Raise LlmcError if llmc does not run this target."""
        if not self.engine:
            raise LlmcError(f"llmc builds engines for target {self.name} and does not run them; "
                            f"compile with --target cpu or cuda to run the model here")

    def load_engine_class(self) -> Any:
        """Import the engine class of a rank.

        Raises:
            LlmcError: llmc does not run this target.
        """
        self.require_engine()
        module, _, name = self.engine.partition(":")
        return getattr(import_module(module), name)


TARGETS: dict[str, TargetSpec] = {}


def register(spec: TargetSpec) -> TargetSpec:
    """Add a target.

    Raises:
        ValueError: another target has this name.
    """
    if spec.name in TARGETS:
        raise ValueError(f"target '{spec.name}' is already registered; use another name")
    TARGETS[spec.name] = spec
    return spec


def target_spec(name: str) -> TargetSpec:
    """Return the target with this name.

    Raises:
        LlmcError: the target is unknown.
    """
    if name not in TARGETS:
        raise LlmcError(f"unknown target '{name}'; use one of: {', '.join(TARGETS)}")
    return TARGETS[name]


_FLOATS = ("float32", "float16", "bfloat16")
_WEIGHT_DTYPES = ("int8", "int4", "uint4", "float8_e4m3fn")
_CUDA_EXPERT_DTYPES = ("int4", "uint4", "int8", "uint8", "float8_e4m3fn", "mxfp4")
_BUILT = frozenset({"compute_capability", "gpu", "max_batch_size"})
_MAX_BUILT_SEQ_LEN = 4096  # the builder's memory grows with it

CPU = register(TargetSpec(
    name="cpu", compiler="llmc.compiler.targets.cpu", engine="llmc.runtime.engines.cpu:CpuEngine",
    runs_any_op=True, key_steps=True, reads_features=True, recurrent_state=True, latent_caches=True,
    shared_caches=True, drafts=True, pools=True, adapters="rows", embeds=True,
    media_encoders=True,
    weight_dtypes=_WEIGHT_DTYPES,
    expert_dtypes=("int4", "uint4", "int8", "uint8"),  # those of QMoE
    group_multiple=1, permutes_columns=True, mla_projections=True,
    int8_activations=True, quantizes_activations=True))  # MatMulNBits quantizes them to int8

CUDA = register(TargetSpec(
    name="cuda", compiler="llmc.compiler.targets.cuda",
    engine="llmc.runtime.engines.cuda:CudaEngine",
    engine_file="schedule.json", encoder_file="encoder.json", draft_file="draft.json",
    gpu=True, kernels=True, runs_program=True, samples_on_device=True, paged=True,
    reads_features=True,
    recurrent_state=True, latent_caches=True, shared_caches=True, drafts=True, adapters="slots",
    pools=True, embeds=True, media_encoders=True,
    dtypes=_FLOATS, kv_dtypes=("float8_e4m3fn",), weight_dtypes=_WEIGHT_DTYPES,
    expert_dtypes=_CUDA_EXPERT_DTYPES,
    group_multiple=32,  # columns per load of csrc/kernels/gemm/packed_gemv.cu
    block_scales=True, activation_group_sizes=(32, 64, 128), max_head_dim=512,
    optional_fields=frozenset({"compute_capability"})))

TENSORRT = register(TargetSpec(
    name="tensorrt", compiler="llmc.compiler.targets.tensorrt",
    engine="llmc.runtime.engines.tensorrt:TensorRTEngine",
    engine_file="engine.plan", encoder_file="encoder.plan",
    gpu=True, kernels=True, samples_on_device=True, paged=True, pools=True,
    dtypes=_FLOATS, kv_dtypes=CUDA.kv_dtypes, weight_dtypes=CUDA.weight_dtypes,
    expert_dtypes=CUDA.expert_dtypes,
    group_multiple=CUDA.group_multiple,
    row_multiple=4,  # rows per int32 word, see compiler/targets/kernel_order.py
    activation_group_sizes=CUDA.activation_group_sizes,
    max_head_dim=CUDA.max_head_dim, default_max_seq_len=_MAX_BUILT_SEQ_LEN,
    index_dtype="int32",  # TensorRT 8 has no int64
    opset=23,  # ONNX Runtime 1.23, the last for TensorRT 8.6's Python
    required_fields=_BUILT, optional_fields=_BUILT, versions=("tensorrt",)))

TENSORRT_RTX = register(TargetSpec(
    name="tensorrt_rtx", compiler="llmc.compiler.targets.tensorrt_rtx",
    engine_file="engine.plan", gpu=True, collectives=False, encoders=False,
    # float32 only: TensorRT cannot update a cache in place after a Cast.
    default_max_seq_len=_MAX_BUILT_SEQ_LEN, versions=("tensorrt_rtx",)))
