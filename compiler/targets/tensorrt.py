"""The TensorRT target: an engine per rank, with llmc's ops as plugins.

`graph.onnx` is what TensorRT's parser reads, and of an encoder `encoder.onnx`. A node of ours names
its plugin in its attributes (`plugin_namespace`, `plugin_version`), has every field, its dtype, and
in `present` the inputs that it has: TensorRT knows no absent ones, so they are left out. Its body
travels in the file as for every target, so ONNX Runtime runs the file too. `polygraphy_inputs.py`
(of an encoder `polygraphy_encoder_inputs.py`) beside it lets Polygraphy compare both. Weights in
fewer bits are in `graph.onnx` as its bodies read them; the parser is given them as kernels do.

The builder runs in a process of its own, with this Python or one that has TensorRT: the newest
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

# What the parser reads, what Polygraphy does, and what is built; of a model, and of an encoder.
_FILES = (("graph.onnx", "polygraphy_inputs.py", TENSORRT.engine_file),
          ("encoder.onnx", "polygraphy_encoder_inputs.py", TENSORRT.encoder_file))
PYTHON = "LLMC_TENSORRT_PYTHON"
_MOST_ELEMENTS = 2**31 - 1  # of a tensor of TensorRT's
# What plugins are told of a step; see csrc/tensorrt/library.h. It is the plan's own: no runtime
# binds it.
_STEP = gs.Variable("llmc_step", np.int32, (16,))


def describe(options: CompileOptions) -> Target:
    """The builder's version and GPU, which must be the runtime's.

    Raises:
        LlmcError: there is no TensorRT, no GPU or no plugin library, or TensorRT lacks the dtype.
    """
    found = _build({"plugins": str(plugin_library())}, options)
    if options.dtype == "bfloat16" and found["version"].startswith("8."):
        raise LlmcError(f"TensorRT {found['version']} has no bfloat16; compile with --dtype "
                        f"float16")
    if options.compute_capability not in (None, found["compute_capability"]):
        raise LlmcError(f"TensorRT builds for the GPU that is here, of compute capability "
                        f"{found['compute_capability']}, not {options.compute_capability}")
    return Target(kind=TENSORRT.name, versions={"tensorrt": found["version"]}, gpu=found["gpu"],
                  compute_capability=found["compute_capability"],
                  max_batch_size=options.max_batch_size)


def emit(graph: gs.Graph, rank: int, case_dir: Path, options: CompileOptions,
         encoder: gs.Graph | None = None) -> tuple[Chip, list[FileEntry]]:
    """Write `chip<rank>/` and describe it.

    Raises:
        LlmcError: TensorRT cannot do what the model asks, or the builder fails.
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
    """The file that TensorRT's parser reads, while it is needed: without the functions, which that
    of TensorRT 10 would take in place of plugins, and with weights in fewer bits as kernels read
    them.
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
    """The model with llmc nodes as TensorRT's parser needs them, in place.

    Every one takes the input `llmc_step` too, which no body reads.

    Each function gets a domain of its own instead of an overload: ONNX Runtime 1.23, the last for
    TensorRT 8.6's Python, knows none. TensorRT looks at neither.
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
    """Least, usual and most of each input's shape, for prompts and for decoding."""
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
"""For Polygraphy: the inputs of one step, and how TensorRT builds. With LLMC_LOAD_PLUGINS=1,

    polygraphy run graph.onnx --onnxrt --trt --plugins libllmc_plugins.so \\
        --data-loader-script polygraphy_inputs.py --trt-config-script polygraphy_inputs.py

and likewise encoder.onnx with polygraphy_encoder_inputs.py.
"""

import numpy as np

PROFILES = {profiles}
DTYPES = {dtypes}


def load_data():
    """A prompt of four tokens."""
    tokens = 4
    given = {{"input_ids": np.arange(1, tokens + 1), "position_ids": np.arange(tokens),
             "cu_seqlens": [0, tokens], "past_lens": [0], "logits_indices": [tokens - 1],
             "encoder_sequence_length": [1]}}
    yield {{name: np.asarray(given[name], dtype) if name in given
           else np.zeros(PROFILES[0][name][0], dtype) for name, dtype in DTYPES.items()}}


def load_config(builder, network):
    """A profile for prompts and one for decoding. No tactics but TensorRT's own."""
    from polygraphy.backend.trt import CreateConfig, Profile
    profiles = [Profile() for _ in PROFILES]
    for profile, shapes in zip(profiles, PROFILES):
        for name, (least, usual, most) in shapes.items():
            profile.add(name, least, usual, most)
    import tensorrt
    old = int(tensorrt.__version__.split(".")[0]) < 10  # newer ones read dtypes off the network
    caches = "int8" in DTYPES.values()  # of float8, which only plugins know
    if old and caches and network is not None:  # there is none yet when a parser wants to know
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
    """Have tensorrt_build.py do this work in a process of its own; what it answers.

    Raises:
        LlmcError: what it says went wrong, or that it ended.
    """
    python = os.environ.get(PYTHON) or sys.executable
    if python == sys.executable and find_spec("tensorrt") is None:
        raise LlmcError(f"target {TENSORRT.name} needs the package tensorrt; install it with: "
                        f"pip install tensorrt, or name a Python that has it and polygraphy in "
                        f"{PYTHON}")
    paths = [*library_directories(), *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
                   "CUDA_MODULE_LOADING": "LAZY"}
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)  # its packages are this Python's
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
            raise LlmcError(f"'{python}', named in {PYTHON}, cannot be run ({error})") from error
        finally:
            os.close(write)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(work))
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, and the log says why
        for line in answers:
            answer = json.loads(line)
            if "progress" in answer:
                options.progress(answer["progress"])
        code = process.wait()
        log.seek(0)
        said = [line for line in log.read().splitlines() if line.strip()]
    if "error" in answer:
        reasons = [line.removeprefix("[E]").strip() for line in said if line.startswith("[E]")]
        raise LlmcError(f"TensorRT cannot build the engine: {answer['error']}"
                        f"{f' ({reasons[-1]})' if reasons else ''}")
    if code or "version" not in answer:
        raise LlmcError(f"TensorRT's builder ended with exit code {code}"
                        f"{': ' + said[-1] if said else ''}")
    return answer
