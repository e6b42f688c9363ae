"""ONNX Runtime sessions on CPU cores: loading, options, memory and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime as ort

from llmc.artifacts.manifest import FACTS, MANIFEST_NAME, GraphStep, Manifest
from llmc.artifacts.onnx_graph import check_graph
from llmc.errors import LlmcError
from llmc.memory import is_out_of_memory
from llmc.runtime.devices import Placement

DTYPES = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(int32)": "int32",
          "tensor(bool)": "bool"}
TensorType = tuple[str, tuple[int | str, ...]]  # dtype and shape


def load(case_dir: Path, step: GraphStep, options: ort.SessionOptions) -> ort.InferenceSession:
    path = case_dir / step.path
    check_graph(path)
    with translate_errors(f"ONNX Runtime cannot load '{path}'"):
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextmanager
def translate_errors(
        action: str, remedy: str = "free some, or raise the limit of this process") -> \
        Iterator[None]:
    """Convert ONNX Runtime's exceptions to LlmcError, with a remedy for insufficient memory."""
    try:
        yield
    except Exception as error:  # onnxruntime's exceptions share no base class
        text = (str(error).splitlines() or [""])[0] or type(error).__name__
        if is_out_of_memory(error):
            text += f"; there is too little memory: {remedy}"
        raise LlmcError(f"{action}: {text}") from error


def facts(path: str, session: ort.InferenceSession) -> dict[str, Any]:
    """Metadata of a graph: `ops`, `num_heads`, `held_scores` and `held_memory_scores`.

    Returns:
        Versions of its ops by name, heads of each self-attention, and the number of attention
        scores that it materializes at once: per query and key, and per query and row of encoder
        outputs.
    """
    try:
        facts = json.loads(session.get_modelmeta().custom_metadata_map[FACTS])
        heads = list(facts["num_heads"])
        # Graphs of earlier releases lack held_scores; they hold at least one tensor of scores.
        held = int(facts.get("held_scores", max(heads, default=0)))
        return {"ops": dict(facts["ops"]), "num_heads": heads, "held_scores": held,
                "held_memory_scores": int(facts.get("held_memory_scores", 0))}
    except (KeyError, TypeError, ValueError) as error:
        raise LlmcError(f"'{path}' has no valid metadata of its ops; compile the model again") \
            from error


def check_versions(manifest: Manifest, place: str, ops: Mapping[str, int]) -> None:
    """Compare the versions of a graph's ops with the manifest.

    Args:
        place: the graph or its chip in errors.

    Raises:
        LlmcError: a version differs.
    """
    for name, version in ops.items():
        if manifest.ops.get(name, version) != version:
            raise LlmcError(f"the graphs in '{place}' have version {version} of {name}, "
                            f"{MANIFEST_NAME} says {manifest.ops[name]}; compile the model again")


def tensor_types(tensors: Sequence[ort.NodeArg]) -> dict[str, TensorType]:
    """Dtype and shape of a session's inputs or outputs by name."""
    return {tensor.name: (DTYPES.get(tensor.type, tensor.type), tuple(tensor.shape))
            for tensor in tensors}


def one_thread() -> ort.SessionOptions:
    """Options of a session that several threads run at once, each in memory of malloc.

    The C library keeps freed memory for the thread that had it. An arena gives a thread memory
    that is in the cache of another core: with one, texts of 16 to 256 tokens through
    all-MiniLM-L6-v2 in int8 on two cores take up to 1.23 times as long.
    """
    options = _common_options()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    return options


def common_options() -> ort.SessionOptions:
    """Options of every other session: all allocate in the process's arena."""
    _make_shared_arena()
    options = _common_options()
    options.add_session_config_entry("session.use_env_allocators", "1")
    return options


def _common_options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    options.add_session_config_entry("session.load_model_format", "ONNX")  # as check_graph does
    if not _has_vnni():  # exact integer products, which saturate on these; slower on others
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


@cache
def _has_vnni() -> bool:
    """Whether Linux says that the processor multiplies and adds 8-bit integers in one step."""
    try:
        return "_vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def session_options(placement: Placement, steps: int, threads: int) -> ort.SessionOptions:
    """Thread options of one rank: a separate pool, or the process's pool for many graphs."""
    options = common_options()
    if steps > 1 and len(placement.cores) > 1 and not placement.pinned:
        _make_shared_pool(threads)
        options.use_per_session_threads = False
        return options
    options.inter_op_num_threads = 1
    options.intra_op_num_threads = len(placement.cores)
    if placement.pinned and len(placement.cores) > 1:  # the first core is the calling thread's
        options.add_session_config_entry(
            "session.intra_op_thread_affinities",
            ";".join(str(core + 1) for core in placement.cores[1:]))
    if steps > 1:  # waiting sessions must not occupy cores
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _make_shared_pool(threads: int) -> None:
    """Create the process's pool; ONNX Runtime keeps the size of the first model."""
    try:
        with translate_errors(f"ONNX Runtime cannot create {threads} threads"):
            ort.set_global_thread_pool_sizes(threads, 1)
    except LlmcError as error:
        if "already been created" not in str(error):
            raise


@cache
def _make_shared_arena() -> None:
    """Create the process's arena, in which all sessions allocate.

    A session's own arena keeps its largest run's memory, and a rank has a session for each graph
    between two collectives. SmolLM2-135M on 3 ranks took 8.5 GB for a prompt of 8,000 tokens; with
    one arena it takes 1.0 GB (bench/memory_cpu.py).
    """
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0,
                               ort.OrtMemType.DEFAULT)
    with translate_errors("ONNX Runtime cannot create an arena"):
        ort.create_and_register_allocator(memory, ort.OrtArenaCfg({
            "arena_extend_strategy": 1}))  # as requested: doubling reserves address space
