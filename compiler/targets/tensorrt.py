"""The TensorRT target: an engine per rank, with llmc's ops as plugins.

TensorRT's parser reads `graph.onnx`, and `encoder.onnx` of an encoder. An llmc node names its
plugin by attributes (`plugin_namespace`, `plugin_version`). It has all of its op's attributes, its
dtype, and in `present` the names of its inputs, as TensorRT does not support absent ones. The file
also contains the function bodies, so that ONNX Runtime can run it. `polygraphy_inputs.py` (for an
encoder `polygraphy_encoder_inputs.py`) lets Polygraphy compare TensorRT and ONNX Runtime. Quantized
weights are stored in `graph.onnx` as the function bodies read them, and passed to the parser as the
kernels read them.

The builder runs in a separate process, with this Python or with one that has TensorRT: the newest
TensorRT 8.6 on PyPI is for Python 3.10 only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from llmc import plugins
from llmc.artifacts.manifest import Chip, FileEntry, Target
from llmc.compiler.artifact import (
    WEIGHTS_NAME,
    describe_chip,
    describe_encoder,
    file_entry,
    graph_step,
    write_onnx,
    write_weights,
)
from llmc.compiler.options import CompileOptions
from llmc.compiler.scratch import temporary_files
from llmc.compiler.targets import kernel_order
from llmc.compiler.targets.typed_onnx import typed_onnx
from llmc.errors import LlmcError
from llmc.runtime.engines import BLOCK_SIZE, MAX_LOGITS, MAX_SCORED, MAX_TOKENS
from llmc.runtime.engines.cuda import library_directories
from llmc.runtime.engines.tensorrt import plugin_library
from llmc.targets import TENSORRT

# (graph, Polygraphy script, plan), of the decoder and of the encoder.
_FILES = (("graph.onnx", "polygraphy_inputs.py", TENSORRT.engine_file),
          ("encoder.onnx", "polygraphy_encoder_inputs.py", TENSORRT.encoder_file))
PYTHON = "LLMC_TENSORRT_PYTHON"
_MOST_ELEMENTS = 2**31 - 1  # TensorRT's limit per tensor
# An input that describes a step to plugins (csrc/tensorrt/library.h). Internal to the plan: no
# runtime binds it.
_STEP = gs.Variable("llmc_step", np.int32, (16,))


def describe(options: CompileOptions) -> Target:
    """Return the builder's version and GPU, to be matched by the runtime.

    Raises:
        LlmcError: TensorRT, a GPU or the plugin library is missing, or TensorRT does not support
            the dtype.
    """
    builder = _build({"plugins": str(plugin_library())}, options)
    if options.dtype == "bfloat16" and builder["version"].startswith("8."):
        raise LlmcError(f"TensorRT {builder['version']} has no bfloat16; compile with --dtype "
                        f"float16")
    if options.compute_capability not in (None, builder["compute_capability"]):
        raise LlmcError(f"compute_capability {options.compute_capability} is given, but TensorRT "
                        f"builds for this machine's GPU, which has "
                        f"{builder['compute_capability']}; leave it out, or compile on such a GPU")
    return Target(kind=TENSORRT.name, versions={"tensorrt": builder["version"]},
                  gpu=builder["gpu"], compute_capability=builder["compute_capability"],
                  max_batch_size=options.max_batch_size)


def emit(graph: gs.Graph, rank: int, case_dir: Path, options: CompileOptions,
         encoder: gs.Graph | None = None) -> tuple[Chip, list[FileEntry]]:
    """Write `chip<rank>/` and describe it.

    Raises:
        LlmcError: TensorRT does not support the graph, or the builder fails.
    """
    name = f"chip{rank}"
    directory = case_dir / name
    directory.mkdir()
    graphs = [graph] if encoder is None else [graph, encoder]
    places, weights = write_weights(graphs, directory / WEIGHTS_NAME)
    files, steps = [weights], []
    for program, (onnx_name, script, plan) in zip(graphs, _FILES, strict=False):
        model = with_plugins(typed_onnx(program, places, TENSORRT.name, options.dtype),
                             options.dtype)
        (directory / script).write_text(_script([*program.inputs, _STEP], options),
                                        encoding="utf-8")
        files.append(write_onnx(model, directory / onnx_name))
        with _as_parsed(model, program, directory) as parsed:
            _build({"plugins": str(plugin_library()), "onnx": str(parsed),
                    "script": str(directory / script), "plan": str(directory / plan),
                    "timing_cache": str(options.timing_cache or os.devnull)}, options)
        files += (file_entry(directory / file) for file in (script, plan))
        steps.append(graph_step(f"{name}/{plan}", program))
    chip = describe_chip(graph, rank, tuple(steps[:1]),
                         sum(place.length for place in places.values()),
                         None if encoder is None else describe_encoder(encoder, tuple(steps[1:])))
    return chip, files


@contextmanager
def _as_parsed(model: onnx.ModelProto, program: gs.Graph, directory: Path) -> Iterator[Path]:
    """Yield a temporary file for TensorRT's parser, with weights in the order of kernels.

    Function bodies are removed, as TensorRT 10 would inline them in place of plugins.
    """
    parsed, data = directory / "parsed.onnx", directory / "parsed.data"
    del model.functions[:]
    with open(data, "wb") as file:
        kernel_order.replace_initializers(model, kernel_order.in_kernel_order(program), data.name,
                                          lambda block: file.write(block.data))
    parsed.write_bytes(model.SerializeToString())
    yield parsed
    parsed.unlink()
    data.unlink()


def with_plugins(model: onnx.ModelProto, dtype: str) -> onnx.ModelProto:
    """Convert llmc nodes to plugin nodes for TensorRT's parser, in place.

    Each gets the input `llmc_step`, which its body does not read. Each function gets a separate
    domain instead of an overload, as ONNX Runtime 1.23, the last for TensorRT 8.6's Python, does
    not support overloads. TensorRT ignores both.
    """
    functions = {(function.name, function.overload): function for function in model.functions}
    for node in model.graph.node:
        if node.domain != plugins.DOMAIN:
            continue
        op = plugins.registry()[node.op_type]
        fields = op.complete({attribute.name: onnx.helper.get_attribute_value(attribute)
                              if attribute.type != onnx.AttributeProto.STRING
                              else attribute.s.decode() for attribute in node.attribute})
        present = [name for name, tensor in zip(op.input_names, node.input, strict=False) if tensor]
        present.append(_STEP.name)
        node.input[:] = [*filter(None, node.input), _STEP.name]
        attributes = {**fields, "present": " ".join(present), "dtype": dtype,
                      "makes": " ".join(name or "-" for name in node.output),
                      "plugin_namespace": plugins.DOMAIN, "plugin_version": str(op.version)}
        del node.attribute[:]
        node.attribute.extend(onnx.helper.make_attribute(key, value)
                              for key, value in attributes.items())
        function = functions.get((node.op_type, node.overload))
        if function is not None:
            function.input[:] = present
            node.domain, node.overload = f"{plugins.DOMAIN}.{node.overload}", ""
    model.graph.input.append(onnx.helper.make_tensor_value_info(
        _STEP.name, onnx.TensorProto.INT32, _STEP.shape))
    for value in (*model.graph.input, *model.graph.output):  # TensorRT 8 has no float8
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT8E4M3FN:
            value.type.tensor_type.elem_type = onnx.TensorProto.INT8
    for function in model.functions:
        function.domain, function.overload = f"{plugins.DOMAIN}.{function.overload}", ""
    model.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in
                              sorted({function.domain for function in model.functions}))
    return model


def _profiles(inputs: Sequence[gs.Tensor], options: CompileOptions) -> \
        list[dict[str, list[list[int]]]]:
    """Return min, opt and max shape of each input, for prefill and decode."""
    assert options.max_seq_len is not None
    length, table = options.max_seq_len, -(-options.max_seq_len // 128) * 128 // BLOCK_SIZE
    positions = max((tensor.shape[1] * tensor.shape[3] * BLOCK_SIZE for tensor in inputs
                     if "_cache_" in tensor.name), default=1)
    rows, memory = options.max_batch_size, options.mem_max_seq_len or 0
    some = min(8, rows)
    tokens = max(MAX_TOKENS, length, memory)
    sizes = [{"batch": (1, some, rows), "num_tokens": (1, min(1024, tokens), tokens),
              "num_logits": (1, some, max(MAX_LOGITS, rows + MAX_SCORED))},
             dict.fromkeys(("batch", "num_tokens", "num_logits"), (1, some, rows))]
    profiles = []
    for named in sizes:
        named["batch_plus_1"] = tuple(size + 1 for size in named["batch"])  # type: ignore[assignment]
        named["num_memory_tokens"] = (1, some * memory, rows * memory)
        named["block_size"], named["max_blocks"] = (BLOCK_SIZE,) * 3, (table,) * 3
        named["num_blocks"] = (1, rows * table + 1, _MOST_ELEMENTS // positions)
        profiles.append({tensor.name: [[dim if isinstance(dim, int) else named[dim][which]
                                        for dim in tensor.shape] for which in range(3)]
                         for tensor in inputs})
    return profiles


_SCRIPT = '''\
"""Inputs of a step and TensorRT's build configuration, for Polygraphy. With LLMC_LOAD_PLUGINS=1:

    polygraphy run graph.onnx --onnxrt --trt --plugins libllmc_plugins.so \\
        --data-loader-script polygraphy_inputs.py --trt-config-script polygraphy_inputs.py

and likewise encoder.onnx with polygraphy_encoder_inputs.py.
"""

import numpy as np

PROFILES = {profiles}
DTYPES = {dtypes}


def load_data():
    """Yield a prompt of four tokens."""
    tokens = 4
    values = {{"input_ids": np.arange(1, tokens + 1), "position_ids": np.arange(tokens),
              "cu_seqlens": [0, tokens], "past_lens": [0], "logits_indices": [tokens - 1],
              "encoder_sequence_length": [1], "token_type_ids": np.zeros(tokens)}}
    yield {{name: np.asarray(values[name], dtype) if name in values
           else np.zeros(PROFILES[0][name][0], dtype) for name, dtype in DTYPES.items()}}


def load_config(builder, network):
    """Create the prefill and decode profiles. Without tactics of external libraries."""
    from polygraphy.backend.trt import CreateConfig, Profile
    profiles = [Profile() for _ in PROFILES]
    for profile, shapes in zip(profiles, PROFILES):
        for name, (least, usual, most) in shapes.items():
            profile.add(name, least, usual, most)
    import tensorrt
    old = int(tensorrt.__version__.split(".")[0]) < 10  # newer ones are strongly typed
    caches = "int8" in DTYPES.values()  # float8 caches, which only plugins interpret
    if old and caches and network is not None:  # None before the network is parsed
        for port in ([network.get_input(i) for i in range(network.num_inputs)] +
                     [network.get_output(i) for i in range(network.num_outputs)]):
            if port.dtype == tensorrt.int8:
                port.set_dynamic_range(-127, 127)
    return CreateConfig(profiles=profiles, fp16={half} if old else None,
                        int8=caches if old else None, tactic_sources=[],
                        max_aux_streams=0)(builder, network)
'''


def _script(inputs: Sequence[gs.Tensor], options: CompileOptions) -> str:
    profiles = ",\n".join(
        "    {" + ",\n     ".join(f"{name!r}: {shapes}" for name, shapes in profile.items()) + "}"
        for profile in _profiles(inputs, options))
    names = {tensor.name: np.dtype(tensor.dtype).name for tensor in inputs}
    known = {"bfloat16": "float32", "float8_e4m3fn": "int8"}
    dtypes = {name: known.get(dtype, dtype) for name, dtype in names.items()}
    return _SCRIPT.format(profiles=f"[\n{profiles},\n]", dtypes=dtypes,
                          half=options.dtype == "float16")


def _build(work: dict[str, str], options: CompileOptions) -> dict[str, Any]:
    """Run tensorrt_build.py on `work` in a separate process, and return its answer.

    Raises:
        LlmcError: the builder reported an error or crashed.
    """
    python = os.environ.get(PYTHON) or sys.executable
    if python == sys.executable and find_spec("tensorrt") is None:
        raise LlmcError(f"target {TENSORRT.name} needs the package tensorrt; install it with: "
                        f"pip install tensorrt, or set {PYTHON} to a Python that has it and "
                        f"polygraphy")
    paths = [*library_directories(), *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
                   "CUDA_MODULE_LOADING": "LAZY"}
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)  # it lists packages of this Python
    environment.pop("LLMC_LOAD_PLUGINS", None)
    read, write = os.pipe()
    answer: dict[str, Any] = {}
    with temporary_files(), tempfile.TemporaryFile("w+") as log, \
            open(read, encoding="utf-8") as answers:
        try:
            process = subprocess.Popen(
                [python, str(Path(__file__).with_name("tensorrt_build.py")), str(write)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=[write],
                env=environment)
        except OSError as error:
            raise LlmcError(f"'{python}', the value of {PYTHON}, cannot be run ({error}); set it "
                            f"to a Python interpreter") from error
        finally:
            os.close(write)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(work))
            process.stdin.close()
        except BrokenPipeError:
            pass  # the builder has exited; its log has the reason
        for line in answers:
            answer = json.loads(line)
            if "progress" in answer:
                options.progress(answer["progress"])
        code = process.wait()
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    if "error" in answer:
        reasons = [line.removeprefix("[E]").strip() for line in lines if line.startswith("[E]")]
        raise LlmcError(f"TensorRT cannot build the engine: {answer['error']}"
                        f"{f' ({reasons[-1]})' if reasons else ''}")
    if code or "version" not in answer:
        raise LlmcError(f"TensorRT's builder ended with exit code {code}"
                        f"{': ' + lines[-1] if lines else ''}")
    return answer
