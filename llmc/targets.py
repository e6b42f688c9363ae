"""Targets: what the compiler, the artifact format and the runtime know of each.

A target is one `TargetSpec`, and a module that writes its engines (`TargetSpec.compiler`). A new
one is registered by `register`; nothing else lists targets. Imports nothing heavy, as `llmc --help`
and the runtime need it.
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
        name: as `--target` and model_info.json have it.
        compiler: the module with `describe` and `emit`; see llmc.compiler.targets.Backend.
        engine: `module:class` of a rank's engine; "": llmc does not run this target.
        engine_file: what the engine loads, in a chip's directory.
        encoder_file: the same of an encoder.
        gpu: ranks run on GPUs, else on cores of the CPU.
        kernels: llmc's CUDA kernels compute llmc's ops, else the ops' ONNX bodies do.
        runs_any_op: the engine runs every llmc op, be it by its body.
        runs_program: llmc's own engine runs the program, so ops may read columns of a value.
        samples_on_device: the engine samples, and reports a limited number of log-probabilities.
        paged: KV caches are paged: blocks, named by block tables.
        collectives: the engine has collectives, so tp_size may exceed 1.
        encoders: the engine runs encoder-decoder models.
        recurrent_state: the engine keeps recurrent state.
        latent_caches: the engine has the caches of latent attention (MLA).
        shared_caches: layers may read the KV caches of other layers.
        dtypes: of weights and activations; the last is what `--dtype auto` falls back to.
        kv_dtypes: of KV caches, beside dtypes.
        weight_dtypes: of quantized weights, which `--quantize` may produce.
        expert_dtypes: of quantized weights that the kernels of experts read.
        group_multiple: the group size of quantized weights is a multiple of this; 0: the target
            reads no quantized weights.
        row_multiple: the number of rows of quantized weights is a multiple of this.
        permutes_columns: activations are permuted for weights with a column order (act-order).
        mla_projections: the up-projections of latent attention may be quantized.
        block_scales: kernels read scales of blocks (rows x columns).
        activation_group_sizes: groups in which kernels quantize activations; empty: any.
        quantizes_activations: kernels quantize the activations of quantized weights by themselves.
        max_head_dim: of attention kernels, which need a multiple of 8; None: any.
        default_max_seq_len: the most that is chosen without `--max_seq_len`; None: the model's.
        index_dtype: of token ids, positions and indices.
        opset: ONNX opset of the graphs; None: llmc's default.
        required_fields: of `Target` in model_info.json, which every case directory states.
        optional_fields: of `Target`, which a case directory may state.
        versions: libraries whose version a case directory states.
    """

    name: str
    compiler: str
    engine: str = ""
    engine_file: str = "graph.onnx"
    encoder_file: str = "encoder.onnx"
    gpu: bool = False
    kernels: bool = False
    runs_any_op: bool = False
    runs_program: bool = False
    samples_on_device: bool = False
    paged: bool = False
    collectives: bool = True
    encoders: bool = True
    recurrent_state: bool = False
    latent_caches: bool = False
    shared_caches: bool = False
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
    quantizes_activations: bool = False
    max_head_dim: int | None = None
    default_max_seq_len: int | None = None
    index_dtype: Literal["int64", "int32"] = "int64"
    opset: int | None = None
    required_fields: frozenset[str] = frozenset()
    optional_fields: frozenset[str] = frozenset()
    versions: tuple[str, ...] = ()

    def require_engine(self) -> None:
        """Raises LlmcError where llmc does not run this target."""
        if not self.engine:
            raise LlmcError(f"this llmc builds engines for target {self.name} and does not run "
                            f"them; compile with --target cpu or cuda to run the model here")

    def load_engine_class(self) -> Any:
        """Import the class of a rank's engine.

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
        raise ValueError(f"target '{spec.name}' is registered already; choose another name")
    TARGETS[spec.name] = spec
    return spec


def target_spec(name: str) -> TargetSpec:
    """The target of this name.

    Raises:
        LlmcError: the target is unknown.
    """
    if name not in TARGETS:
        raise LlmcError(f"target '{name}' is not known; there are: {', '.join(TARGETS)}")
    return TARGETS[name]


_FLOATS = ("float32", "float16", "bfloat16")
_WEIGHT_DTYPES = ("int8", "int4", "uint4", "float8_e4m3fn")
_CUDA_EXPERT_DTYPES = ("int4", "uint4", "int8", "uint8", "float8_e4m3fn", "mxfp4")
_BUILT = frozenset({"compute_capability", "gpu", "max_batch_size"})
_MAX_BUILT_SEQ_LEN = 4096  # a builder's memory grows with it

CPU = register(TargetSpec(
    name="cpu", compiler="llmc.compiler.targets.cpu", engine="llmc.runtime.engines.cpu:CpuEngine",
    runs_any_op=True, recurrent_state=True, latent_caches=True, shared_caches=True,
    weight_dtypes=_WEIGHT_DTYPES,
    expert_dtypes=("int4", "uint4", "int8", "uint8"),  # of QMoE
    group_multiple=1, permutes_columns=True, mla_projections=True,
    quantizes_activations=True))  # MatMulNBits, to int8

CUDA = register(TargetSpec(
    name="cuda", compiler="llmc.compiler.targets.cuda",
    engine="llmc.runtime.engines.cuda:CudaEngine",
    engine_file="schedule.json", encoder_file="encoder.json",
    gpu=True, kernels=True, runs_program=True, samples_on_device=True, paged=True,
    recurrent_state=True, latent_caches=True, shared_caches=True,
    dtypes=_FLOATS, kv_dtypes=("float8_e4m3fn",), weight_dtypes=_WEIGHT_DTYPES,
    expert_dtypes=_CUDA_EXPERT_DTYPES,
    group_multiple=32,  # columns that csrc/kernels/gemm/packed_gemv.cu reads at once
    block_scales=True, activation_group_sizes=(32, 64, 128), max_head_dim=512,
    optional_fields=frozenset({"compute_capability"})))

TENSORRT = register(TargetSpec(
    name="tensorrt", compiler="llmc.compiler.targets.tensorrt",
    engine="llmc.runtime.engines.tensorrt:TensorRTEngine",
    engine_file="engine.plan", encoder_file="encoder.plan",
    gpu=True, kernels=True, samples_on_device=True, paged=True,
    dtypes=_FLOATS, kv_dtypes=CUDA.kv_dtypes, weight_dtypes=CUDA.weight_dtypes,
    expert_dtypes=CUDA.expert_dtypes,  # of rows in whole words: the other weight has groups of them
    group_multiple=CUDA.group_multiple,
    row_multiple=4,  # rows in one of int32, of compiler/targets/kernel_order.py
    activation_group_sizes=CUDA.activation_group_sizes,
    max_head_dim=CUDA.max_head_dim, default_max_seq_len=_MAX_BUILT_SEQ_LEN,
    index_dtype="int32",  # TensorRT 8 has no int64
    opset=23,  # of ONNX Runtime 1.23, the last for TensorRT 8.6's Python
    required_fields=_BUILT, optional_fields=_BUILT, versions=("tensorrt",)))

TENSORRT_RTX = register(TargetSpec(
    name="tensorrt_rtx", compiler="llmc.compiler.targets.tensorrt_rtx",
    engine_file="engine.plan", gpu=True, collectives=False, encoders=False,
    # float32 only: a cache behind a Cast is not one that TensorRT updates in place.
    default_max_seq_len=_MAX_BUILT_SEQ_LEN, versions=("tensorrt_rtx",)))
