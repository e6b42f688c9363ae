"""Comparison of a compiled model with the original.

transformers, the raw export and the compiled graphs of all chips (in lockstep) run on the same
tokens. Hidden states and logits are compared by Polygraphy's comparator, then greedy tokens. A
compiled graph keeps the names of tensors, so `bisect` can compare each with the raw export and find
the first op over tolerance. Weights of each chip are compared with the reference's bit by bit, and
files with their hashes. A quantized weight must be within the rounding error of the reference's.
The verdict combines all of these.

For target cuda, the engine returns every intermediate tensor. For target tensorrt, the plan runs,
and its plugins return theirs: the outputs of llmc's ops, and the logits.

Tolerances (`llmc diff --help` has a table). The reference is float32, whatever the model's dtype.
For a quantized model it has the dequantized weights of the case directory, see `quantized`.

float32: `TOLERANCE` of the reference's range. The tiny models of all tested families differ by at
most 1e-6 on 1, 2 and 3 chips (bench/rounding.py prints it), SmolLM2-135M by 3.7e-6.

16 bits: twice the error of transformers in that dtype on the same tokens. For a hidden state, it is
the largest error, relative to the range, up to that layer. It is multiplied by the square root of
the number of chips, as each rounds its part of a sum.

float8 caches: the same, measured with keys and values rounded to float8, so that the format's
inherent error is allowed. Activation quantization is measured in the same way; ONNX Runtime's CPU
kernels quantize activations to 8 bits, with a scale per block of a row.

Tensors within layers, which transformers does not return, and all tensors if the reference is an
.onnx file: three times the error of the export with its matrices, the outputs of GEMMs and
attention, and all tensors that the compiled model stores rounded to the dtype. `bisect` then
examines only the layer that is over tolerance.

A greedy token that differs from the reference's is an error if the reference's logits of the two
differ by more than the tolerance of the logits. Otherwise they are equal within rounding, and the
comparison continues after the reference's token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from polygraphy.comparator import Comparator, IterationResult, RunResults, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

from llmc import __version__
from llmc.artifacts.manifest import (
    Chip,
    Manifest,
    WeightForm,
    check_files,
    hash_file,
    read_manifest,
    require_causal_lm,
)
from llmc.artifacts.program import read_program
from llmc.compiler.check.execute import (
    PromptRows,
    Rounding,
    Values,
    load_graph,
    read_onnx,
    run_chips,
    run_graph,
)
from llmc.compiler.check.media import (
    ROWS,
    Run,
    compiled_values,
    kinds_of,
    original_values,
    read_prompt,
)
from llmc.compiler.check.partition import lower_alike, weight_file
from llmc.compiler.check.quantized import (
    STORED,
    OwnWeights,
    own_weights,
    put_into_model,
    rounded_activations,
)
from llmc.compiler.check.reference import (
    Greedy,
    load_reference,
    reference_greedy,
    reference_values,
)
from llmc.compiler.check.report import BadWeight, Difference, DiffReport, GreedyToken
from llmc.compiler.check.speech import SpeechComparison
from llmc.compiler.frontend import RawModel, load
from llmc.compiler.frontend.raw import dequantize
from llmc.compiler.graph.names import HIDDEN_STATE, SCALED
from llmc.compiler.graph.rewrite import op_of, operands, values_of
from llmc.compiler.graph.weights import HeadMatrices, Weight
from llmc.compiler.options import CompileOptions
from llmc.compiler.passes.fold import numpy_dtype
from llmc.compiler.passes.norm_gemm import NORMED
from llmc.compiler.quant.nearest import quantize
from llmc.compiler.quant.scheme import Scheme
from llmc.errors import LlmcError
from llmc.plugins.code_types import CODE_TYPES, LINEAR_CODE_TYPES
from llmc.plugins.quantization import dequantized
from llmc.runtime.core.llm import LLM
from llmc.runtime.core.step import Step
from llmc.runtime.devices import place
from llmc.runtime.engines import BLOCK_SIZE, MAX_LOGITS
from llmc.runtime.engines.cuda import device_count
from llmc.runtime.gpus import GpuReplica
from llmc.runtime.prompts import MediaPrompt
from llmc.runtime.replica import EngineConfig
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.tokenizer import load_tokenizer

TOLERANCE = 1e-5
# Factors of the scales of quantized activations. The largest error of a tensor is that of one
# element, often an outlier, and small by chance with some scales.
_STRETCHES = (1.0, 1.005, 1.01, 1.015)
# Allowed multiples of the rounding error, as measured with transformers, and with the export, which
# rounds fewer tensors than an engine.
_TRANSFORMERS_LOSSES, _EXPORT_LOSSES = 2.0, 3.0
_FLOAT8_TOLERANCE = 0.1  # where the error of float8 caches cannot be measured
# By bits of quantized weights that cannot be put into the reference; relative to a tensor's range.
_UNTRACED_TOLERANCES = {8: 0.1, 4: 0.5}
# Allowed RMS error of a quantized weight, relative to the original's RMS. With random weights,
# 4-bit groups have 0.09 and FP8 0.03; calibration on a short text 0.5; an unrelated weight 1 or
# more.
_ROUNDED_WEIGHT = 0.9
_TOKENS, _GREEDY_TOKENS = 24, 16


def diff(case_dir: str | Path, reference: str | Path, *, hf_dir: str | Path | None = None,
         prompt: str | None = None, tolerance: float | None = None, tokens: int | None = None,
         bisect: bool = False, images: Sequence[Path] = (), audio: Sequence[Path] = (),
         progress: Callable[[str], object] = lambda text: None) -> DiffReport:
    """Compare a case directory with the model that it was compiled from.

    Args:
        case_dir: the case directory.
        reference: Hugging Face directory, .gguf or .onnx file.
        hf_dir: for an .onnx file, the directory with its config.json and tokenizer.
        prompt: text to run; random tokens by default. With images or audio, the text of their
            comparison, which has a placeholder for each; the placeholders alone by default.
        tolerance: largest difference relative to the reference tensor's range, for all tensors;
            by default see the module's docstring.
        tokens: greedy tokens to compare, limited by the KV cache. None: 16.
        bisect: compare every tensor that both graphs have, and name the first over tolerance.
        images, audio: files of pictures and audio clips: also compare the rows of their encoders,
            the layers and the logits of a prompt with them. Models that transcribe speech are
            compared on `audio` alone, with random tokens: cross-attention KV, layers and logits.
        progress: called with the name of each phase as it begins.

    Raises:
        LlmcError: either model cannot be read or run, its GPU is missing, or `bisect` is given for
            a model that attends to images.
    """
    G_LOGGER.module_severity = G_LOGGER.CRITICAL
    for name, value in (("tolerance", tolerance), ("tokens", tokens)):
        if value is not None and not value >= 0:
            raise LlmcError(f"{name} {value} is below 0; give 0 or more")
    manifest = read_manifest(case_dir)
    root = Path(case_dir)
    if manifest.features:
        _check_speech_options(manifest, audio, {
            "prompt": prompt is not None, "image": images, "bisect": bisect,
            "tokens": tokens is not None})
        return _diff_speech(manifest, root, reference, hf_dir, audio, tolerance, progress)
    require_causal_lm(manifest, "diff")
    if not manifest.target.spec.engine:
        raise LlmcError(f"diff does not support target {manifest.target.kind} of '{case_dir}'; "
                        f"compile for cpu or cuda to compare")
    if bisect and manifest.memory:
        raise LlmcError(f"--bisect is not supported for '{manifest.source.architecture}', as the "
                        f"export without images omits the layers that attend to them; compare "
                        f"without --bisect")
    progress("hash files")
    changed = _changed_files(manifest, root)
    with_media = read_prompt(manifest, root, prompt, images, audio) if images or audio else None
    ids = _token_ids(manifest, root, None if with_media else prompt)
    tokens = min(_GREEDY_TOKENS if tokens is None else tokens,
                 manifest.dims.max_seq_len - len(ids) + 1)
    progress("export the reference")
    raw = _export(reference, hf_dir, manifest)
    size = raw.graph.outputs[0].shape[-1]
    if isinstance(size, int) and size != manifest.dims.vocab_size:
        raise LlmcError(f"'{reference}' has vocabulary size {size}, '{case_dir}' has "
                        f"{manifest.dims.vocab_size}; give the model that it was compiled from")
    kinds = {t.name: numpy_dtype(t.dtype or np.float32) for node in raw.graph.nodes
             for t in node.outputs if not t.is_empty()}
    known = kinds.keys()
    trace = _trace if manifest.target.spec.gpu else run_chips
    progress("run the compiled model")
    states = _hidden_states(manifest, root)
    compiled = trace(manifest, root, ids, {*known, *states, "logits"})
    # Booleans are excluded: a comparison near zero may round to either; its result is compared.
    shared = [name for name, value in compiled[0].items()
              if name in known and bool not in (value.dtype, kinds[name])]
    compared = shared if bisect else [name for name in shared if name in (*states, "logits")]
    rounded = [name for name in shared if kinds[name] == np.float32]
    progress("run the reference")
    own = own_weights(raw, manifest, root) if manifest.quantization else None
    original = _run_reference(raw, reference, manifest, ids, tokens, rounded, compared,
                              own)
    # The export has no names of layers if it omits some, such as those that attend to images.
    layers = [name for name in states if name in compiled[0]
              and (name in original.export or name in original.transformers)]
    ours = {name: _joined([chip[name] for chip in compiled if name in chip], original.known(name))
            for name in compiled[0] if name in (*compared, *layers) and name != "logits"}
    ours["logits"] = compiled[0]["logits"][:, :manifest.dims.vocab_size]
    for name in (*layers, "logits"):
        if ours[name].shape != original.best(name).shape:
            raise LlmcError(f"'{case_dir}' has {name} of shape {list(ours[name].shape)}, "
                            f"'{reference}' of {list(original.best(name).shape)}; give the model "
                            f"that it was compiled from")
    allowed = _Allowed(tolerance, original, manifest)

    progress("compare activations")
    differences = tuple(_compare_layers(ours, original, [*layers, "logits"], allowed))
    if with_media is not None:
        progress(f"compare a prompt with {kinds_of(with_media)}")
        differences += tuple(_compare_media(with_media, manifest, root, reference, tolerance,
                                            trace))
    first = _first_of(differences)
    suspects = _suspects(list(ours), [*layers, "logits"], first) if allowed.measured else ours
    first_op = _bisect(suspects, ours, original.export, compiled, manifest, root, allowed) \
        if bisect else None
    error = allowed.absolute("logits", original.best("logits"))
    judged: tuple[GreedyToken, ...] = ()
    if tokens:
        progress("compare greedy tokens")
        with _greedy(root) as generate:
            judged = judge_tokens(generate, ids, original.greedy, error)
    progress("compare weights")
    if manifest.memory:  # the export for texts has no layers that attend to images
        raw = _export(reference, hf_dir, manifest, takes_media=True)
    report = replace(_report(manifest, root, reference, differences),
                     allowed=allowed.description, first_op=first_op,
                     weights=_compare_weights(raw, manifest, root), changed_files=changed,
                     tokens=_decoded(judged, manifest, root), token_error=error)
    return replace(report, verdict=_verdict(report, allowed.unknown))


def _changed_files(manifest: Manifest, root: Path) -> tuple[str, ...]:
    """Return the files of a case directory that differ from their hashes."""
    check_files(manifest, root)
    return tuple(entry.path for entry in manifest.files
                 if hash_file(root / entry.path) != entry.sha256)


def _report(manifest: Manifest, root: Path, reference: str | Path,
            differences: tuple[Difference, ...]) -> DiffReport:
    """Make a report of tensors, without tolerances, weights and tokens."""
    return DiffReport(
        case_dir=str(root), reference=str(reference), target=manifest.target.kind,
        dtype=manifest.dtype, kv_dtype=manifest.kv_dtype, tp_size=manifest.tp_size,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions={"llmc": __version__,
                  **{name: version(name) for name in ("transformers", "torch", "onnxruntime")}},
        allowed="", layers=differences, first_layer=_first_of(differences), first_op=None,
        weights=(), changed_files=(), tokens=(), token_error=0.0, verdict=None)


def _first_of(differences: Sequence[Difference]) -> str | None:
    """Return the first tensor of the compiled model over tolerance."""
    return next((own.name for own in differences
                 if not own.passed and own.pair.startswith("compiled")), None)


def _check_speech_options(manifest: Manifest, audio: Sequence[Path],
                          others: Mapping[str, object]) -> None:
    """Check the options of a model that transcribes speech: `others` must not be given."""
    model = f"'{manifest.source.architecture}', which transcribes speech"
    if not audio:
        raise LlmcError(f"--audio is absent, but the model is {model}; give audio files to compare "
                        f"the models on")
    for name, given in others.items():
        if given:
            raise LlmcError(f"--{name} is not supported for {model}; leave it out")


def _diff_speech(manifest: Manifest, root: Path, reference: str | Path, hf_dir: str | Path | None,
                 audio: Sequence[Path], tolerance: float | None,
                 progress: Callable[[str], object]) -> DiffReport:
    """Compare a model that transcribes speech: cross-attention KV, layers, logits and weights."""
    both = SpeechComparison(manifest, root)
    progress("hash files")
    changed = _changed_files(manifest, root)
    windows = list(map(both.features, audio))
    progress("run the compiled model")
    compiled = list(map(both.compiled, windows))
    progress("run the reference")
    original = both.original(reference, windows)
    bits = min((CODE_TYPES[dtype].precision for dtype in manifest.quantization or ()), default=0)
    allowed = tolerance if tolerance is not None else \
        _UNTRACED_TOLERANCES[bits] if bits else TOLERANCE
    progress("compare activations")
    differences = tuple(
        compare(f"{name} (audio {index})", "compiled vs transformers",
                _of_chips(name, chips, expected, manifest), expected, allowed)
        for index, (chips, tensors) in enumerate(zip(compiled, original, strict=True))
        for name, expected in tensors.items() if name in chips[0])
    progress("compare weights")
    raw = _export(reference, hf_dir, manifest)
    report = replace(_report(manifest, root, reference, differences),
                     allowed=f"{allowed:g} of a tensor's range", changed_files=changed,
                     weights=_compare_weights(raw, manifest, root))
    return replace(report, verdict=_verdict(report, ()))


def _of_chips(name: str, chips: Sequence[Values], expected: np.ndarray, manifest: Manifest) -> \
        np.ndarray:
    """Combine a tensor of all chips, without the padding of the vocabulary."""
    parts = [chip[name] for chip in chips if name in chip]
    return parts[0][:, :manifest.dims.vocab_size] if name == "logits" else _joined(parts, expected)


def _export(reference: str | Path, hf_dir: str | Path | None, manifest: Manifest,
            takes_media: bool = False) -> RawModel:
    """Export the original, as the case directory's model was exported."""
    raw = load(reference, hf_dir=hf_dir, takes_media=takes_media)
    if manifest.source.requantized:
        dequantize(raw)
    return raw


@dataclass(frozen=True)
class _Original:
    """Tensors of the original model, float32 [num_tokens, …] by name.

    Args:
        export: tensors of the raw export.
        transformers: tensors of transformers; empty if the reference is an .onnx file.
        allowed: allowed absolute errors by rounding; empty if all is float32.
        greedy: greedy tokens with their logits.
        substituted: whether the original has a quantized model's dequantized weights.
        quantizes_activations: whether `allowed` includes quantized activations.
    """

    export: Values
    transformers: Values
    allowed: dict[str, float]
    greedy: Greedy
    substituted: bool = False
    quantizes_activations: bool = False

    def best(self, name: str) -> np.ndarray:
        """Return a tensor of transformers, or else of the export."""
        return self.transformers[name] if name in self.transformers else self.export[name]

    def known(self, name: str) -> np.ndarray:
        """Return a tensor of the export, or else of transformers."""
        return self.export[name] if name in self.export else self.transformers[name]


def _run_reference(raw: RawModel, reference: str | Path, manifest: Manifest, ids: list[int],
                   tokens: int, stored: Sequence[str], names: Sequence[str],
                   weights: OwnWeights | None) -> _Original:
    """Run the export and transformers, and both again with the compiled model's rounding.

    A quantized model's dequantized weights are substituted if possible.
    """
    dtype, kv_dtype = manifest.dtype, _float8(manifest)
    narrow = dtype != "float32" or bool(kv_dtype)
    feeds = {"input_ids": np.array([ids]), "position_ids": np.arange(len(ids))[None]}
    model, forms = None, None
    if raw.kind != "onnx":
        model = load_reference(reference)
        forms = put_into_model(model, weights) if weights is not None else None
        weights = weights if forms is not None else None
    graph = raw.graph
    if weights is not None:
        graph = raw.graph.copy()
        weights.put_into(graph)
    export = run_graph(graph, feeds, names)
    transformers: Values = {}
    allowed: dict[str, float] = {}
    if model is None:
        greedy = _greedy_of(graph, ids, tokens)
    else:
        transformers = reference_values(model, ids)
        greedy = reference_greedy(model, ids, tokens) if tokens else Greedy((), np.zeros((0, 0)))
        if narrow or forms:
            if dtype != "float32":
                del model  # two models may not fit in memory
                model = load_reference(reference, dtype)
                forms = put_into_model(model, weights) if weights is not None else None
            for stretch in _STRETCHES if forms else (1.0,):
                with rounded_activations(forms or {}, stretch):
                    losses = _losses(reference_values(model, ids, kv_dtype), transformers,
                                     _times(_TRANSFORMERS_LOSSES, manifest))
                allowed = {name: float(np.maximum(loss, allowed.get(name, 0.0)))
                           for name, loss in losses.items()}
    missing = [name for name in names if name not in allowed]
    activations = weights.forms if weights is not None else {}
    if (narrow or activations) and missing and _can_round(graph, kv_dtype):
        rounded = run_graph(graph, feeds, missing, Rounding(dtype, kv_dtype, frozenset(stored),
                                                            activations))
        allowed |= _losses(rounded, export, _times(_EXPORT_LOSSES, manifest))
    return _Original({name: _flat(array) for name, array in export.items()}, transformers, allowed,
                     greedy, weights is not None, bool(activations))


def _times(losses: float, manifest: Manifest) -> float:
    """Scale a multiple by the chips, as each rounds its part of a sum and variances add up."""
    return losses * math.sqrt(manifest.tp_size)


def _float8(manifest: Manifest) -> str:
    """Return the KV cache's dtype if it differs from the model's."""
    return manifest.kv_dtype if manifest.kv_dtype != manifest.dtype else ""


def _can_round(graph: gs.Graph, kv_dtype: str) -> bool:
    return not kv_dtype or any(node.op == "Sdpa" for node in graph.nodes)


def _losses(narrow: Values, exact: Values, times: float) -> dict[str, float]:
    """Return `times` the largest difference of each tensor.

    For a hidden state, the error relative to its range is at least that of earlier ones, as a
    single large element determines it and may be rounded accurately by chance.
    """
    losses = {name: times * float(np.abs(array.astype(np.float64) - exact[name]).max())
              for name, array in narrow.items() if name in exact}
    most = 0.0
    for name in map(HIDDEN_STATE.format, range(len(losses))):
        if name in losses:
            most = float(np.maximum(most, losses[name] / _span(exact[name])))  # propagates NaN
            losses[name] = most * _span(exact[name])
    return losses


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1]) if array.ndim >= 2 else array


def _greedy_of(graph: gs.Graph, ids: list[int], count: int) -> Greedy:
    """Generate greedy tokens with the raw export, without a KV cache."""
    run, known, rows = load_graph(graph, ["logits"]), list(ids), []
    for _ in range(count):
        logits = run({"input_ids": np.array([known]),
                      "position_ids": np.arange(len(known))[None]})["logits"][0]
        rows.append(logits[-1])
        known.append(int(logits[-1].argmax()))
    return Greedy(tuple(known[len(ids):]), np.array(rows))


class _Allowed:
    """Allowed errors of the compiled model's tensors.

    Attributes:
        description: the tolerance for the user.
        unknown: tensors for which the reference has no finite error.
    """

    def __init__(self, tolerance: float | None, original: _Original, manifest: Manifest) -> None:
        self._tolerance, self._allowed = tolerance, original.allowed
        self.unknown: tuple[str, ...] = ()
        kv_dtype = _float8(manifest)
        quantized = tolerance is None and bool(manifest.quantization)
        self._untraced = quantized and not original.substituted
        weights = ", with the compiled model's dequantized weights" if original.substituted else ""
        narrow = manifest.dtype != "float32" or bool(kv_dtype)
        if self._untraced:
            dtypes = manifest.quantization or ()
            bits = min(CODE_TYPES[dtype].precision for dtype in dtypes)
            self._tolerance = _UNTRACED_TOLERANCES[bits]
            self.description = (f"{self._tolerance:g} of a tensor's range, as weights in "
                                f"{', '.join(dtypes)} cannot be put into the reference")
        elif tolerance is None and (narrow or original.allowed):
            formats = manifest.dtype + "".join(f" with {text}" for text, applies in (
                (f"a KV cache in {kv_dtype}", kv_dtype),
                ("quantized activations", original.quantizes_activations)) if applies)
            source, losses = ("transformers", _TRANSFORMERS_LOSSES) if original.transformers \
                else ("the export", _EXPORT_LOSSES)
            self.description = (f"{_times(losses, manifest):.2g} times the error of {source} in "
                                f"{formats}{weights}")
            if not original.allowed:
                self._tolerance = _FLOAT8_TOLERANCE
                self.description = (f"{_FLOAT8_TOLERANCE:g} of a tensor's range, as the export "
                                    f"cannot run in {formats}")
            else:
                self.unknown = tuple(name for name, value in original.allowed.items()
                                     if not np.isfinite(value))
        else:
            self._tolerance = TOLERANCE if tolerance is None else tolerance
            self.description = f"{self._tolerance:g} of a tensor's range{weights}"

    def absolute(self, name: str, expected: np.ndarray) -> float:
        """Return a tensor's allowed absolute error; 0 if unknown."""
        if self._tolerance is not None:
            return self._tolerance * _span(expected)
        value = self._allowed.get(name, 0.0)
        return max(value, TOLERANCE * _span(expected)) if np.isfinite(value) else 0.0

    def relative(self, name: str, expected: np.ndarray) -> float:
        """Return a tensor's allowed error relative to the reference's range."""
        return self.absolute(name, expected) / _span(expected)

    @property
    def measured(self) -> bool:
        """Whether each tensor has a separate tolerance, from measured rounding errors."""
        return self._tolerance is None

    @property
    def between_references(self) -> float:
        """Tolerance between export and transformers, both float32, relative to the range."""
        return TOLERANCE if self._tolerance is None or self._untraced else self._tolerance


def _span(expected: np.ndarray) -> float:
    return float(np.ptp(expected)) or 1.0


def _compare_layers(ours: Values, original: _Original, names: Sequence[str],
                    allowed: _Allowed) -> Iterator[Difference]:
    """Yield the differences of each pair of runs at each layer and at the logits."""
    runs: dict[str, Values] = {"compiled": ours, "export": original.export,
                               "transformers": original.transformers}
    for name in names:
        for left, right in (("compiled", "export"), ("export", "transformers"),
                            ("compiled", "transformers")):
            if name in runs[left] and name in runs[right]:
                expected = runs[right][name]
                limit = allowed.relative(name, expected) if left == "compiled" \
                    else allowed.between_references
                yield compare(name, f"{left} vs {right}", runs[left][name], expected, limit)


def _compare_media(prompt: MediaPrompt, manifest: Manifest, root: Path, reference: str | Path,
                   tolerance: float | None, run: Run) -> Iterator[Difference]:
    """Yield the differences from transformers for a prompt with images and audio."""
    chips = compiled_values(manifest, root, prompt, run)
    kind = manifest.image.bidirectional if manifest.image else None
    original = original_values(reference, prompt, kind)
    losses: dict[str, float] = {}
    if tolerance is None and (manifest.dtype != "float32" or _float8(manifest)):
        narrow = original_values(reference, prompt, kind, manifest.dtype, _float8(manifest))
        losses = _losses(narrow, original, _times(_TRANSFORMERS_LOSSES, manifest))
    for name, expected in original.items():
        if any(name in chip for chip in chips):  # a fused tensor is in none
            actual = _of_chips(name, chips, expected, manifest)
            least = _least_with_media(name, manifest) if tolerance is None else tolerance
            yield compare(f"{name} ({kinds_of(prompt)})", "compiled vs transformers", actual,
                          expected, max(least, losses.get(name, 0.0) / _span(expected)))


def _least_with_media(name: str, manifest: Manifest) -> float:
    """The least tolerance of a tensor of a prompt with images or audio, relative to its range.

    Quantized weights are not put into the reference; rows depend on those of the encoders alone.
    """
    forms = [form for own in manifest.media.values() for form in own.quantization.values()]
    if not name.startswith(ROWS):
        forms += [form for chip in manifest.chips for form in chip.quantization.values()]
    bits = min((CODE_TYPES[form.dtype].precision for form in forms), default=0)
    return _UNTRACED_TOLERANCES[bits] if bits else TOLERANCE


def compare(name: str, pair: str, actual: np.ndarray, expected: np.ndarray, allowed: float) -> \
        Difference:
    """Compare two arrays by Polygraphy's comparator, with `allowed` relative to the range."""
    span = _span(expected)
    runs = RunResults()
    runs.append(("actual", [IterationResult({name: actual.astype(np.float32)})]))
    runs.append(("expected", [IterationResult({name: expected.astype(np.float32)})]))
    result = Comparator.compare_accuracy(
        runs, compare_func=SimpleCompareFunc(atol=allowed * span, rtol=0.0))
    outcome = result[0]["actual", "expected"][0][name]
    a, b = actual.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return Difference(name, pair, float(outcome.max_absdiff), float(outcome.max_absdiff) / span,
                      allowed, float(a @ b) / norms if norms else 1.0, bool(outcome))


def judge_tokens(generate: Callable[[list[int], int], Sequence[int]], prompt: Sequence[int],
                 reference: Greedy, error: float) -> tuple[GreedyToken, ...]:
    """Compare greedy tokens with the reference's.

    After a difference, generation continues from the reference's tokens.

    Args:
        generate: returns greedy tokens of the compiled model, given a prompt and a count.
        prompt: token ids.
        reference: the reference's tokens and logits.
        error: tolerance of the logits. A differing token passes if its logit in the reference is
            at most this below the maximum.
    """
    judged: list[GreedyToken] = []
    while len(judged) < len(reference.tokens):
        known = [*prompt, *reference.tokens[:len(judged)]]
        for token in generate(known, len(reference.tokens) - len(judged)):
            step, expected = len(judged), reference.tokens[len(judged)]
            logits = reference.logits[step].astype(np.float64)
            other = int(np.argsort(logits)[-2]) if token == expected else token
            margin = float(logits[expected] - logits[other])
            judged.append(GreedyToken(step, int(token), expected, margin,
                                      token == expected or margin <= error))
            if token != expected:
                break
    return tuple(judged)


def _decoded(tokens: Sequence[GreedyToken], manifest: Manifest, root: Path) -> \
        tuple[GreedyToken, ...]:
    """Add the tokens' texts if the model has a tokenizer."""
    tokenizer = load_tokenizer(manifest, root)
    if tokenizer is None:
        return tuple(tokens)
    return tuple(replace(token, text=tokenizer.decode([token.token], False),
                         reference_text=tokenizer.decode([token.reference_token], False))
                 for token in tokens)


def _verdict(report: DiffReport, unknown: Sequence[str]) -> str | None:
    """Summarize everything over tolerance; None if all is within it."""
    parts = []
    if unknown:
        parts.append(f"the reference is not finite in {report.dtype} at {unknown[0]}, so no error "
                     f"can be measured there; give --tolerance")
    if report.first_layer:
        first = next(d for d in report.layers if d.name == report.first_layer and not d.passed)
        parts.append(f"first over tolerance: {first.name}, {first.relative:.2g} of the range "
                     f"(allowed: {first.allowed:.2g})")
    if report.first_op:
        parts.append(f"first op over tolerance: {report.first_op}")
    parts += map(str, report.weights[:3])
    if len(report.weights) > 3:
        parts.append(f"{len(report.weights) - 3} more weights differ")
    if report.changed_files:
        parts.append(f"{', '.join(report.changed_files)} changed since the compile")
    other = next((d for d in report.layers if not d.passed and not d.pair.startswith("compiled")),
                 None)
    if other is not None:
        parts.append(f"{other.pair} differ at {other.name}, by {other.relative:.2g} of the range")
    wrong = next((token for token in report.tokens if not token.passed), None)
    if wrong is not None:
        parts.append(f"greedy token {wrong.step} is {wrong.token}, expected "
                     f"{wrong.reference_token}, whose logit is {wrong.margin:.3g} higher (allowed: "
                     f"{report.token_error:.3g})")
    return "; ".join(parts) or None


def _token_ids(manifest: Manifest, root: Path, prompt: str | None) -> list[int]:
    if prompt is None:
        count = min(_TOKENS, manifest.dims.max_seq_len)
        return [int(i) for i in
                np.random.default_rng(0).integers(0, manifest.dims.vocab_size, count)]
    tokenizer = load_tokenizer(manifest, root)
    if tokenizer is None:
        raise LlmcError("--prompt is given, but the model was compiled without a tokenizer; leave "
                        "--prompt out")
    ids: list[int] = tokenizer.encode(prompt).ids
    if not ids:
        raise LlmcError("the prompt has no tokens, expected at least 1; give a longer one, or "
                        "leave it out")
    if len(ids) > manifest.dims.max_seq_len:
        raise LlmcError(f"the prompt has {len(ids)} tokens, expected at most max_seq_len "
                        f"{manifest.dims.max_seq_len}; shorten it")
    return ids


def _trace(manifest: Manifest, root: Path, ids: list[int], requested: set[str],
           rows: PromptRows | None = None) -> list[Values]:
    """Prefill on GPUs; return for each chip the requested tensors in the program's order."""
    most = min(len(ids), MAX_LOGITS)
    replica = GpuReplica(manifest, root, place(manifest, None, device_count())[0],
                         EngineConfig(1, most,
                                      kv_cache_tokens=-(-len(ids) // BLOCK_SIZE) * BLOCK_SIZE))
    table = range(replica.limits.num_blocks)

    def fields(start: int, stop: int) -> dict[str, Any]:
        return {} if rows is None else dict(rows.fields(start, stop))

    try:
        steps = [replica.trace(Step.of(
            [ids[start:start + most]], [start], [table], [0], logits="all",
            **fields(start, start + most)))
            for start in range(0, len(ids), most)]
    finally:
        replica.close()
    return [{name: np.concatenate([step[rank][name] for step in steps])
             for name in steps[0][rank] if name in requested} for rank in range(manifest.tp_size)]


def _joined(parts: Sequence[np.ndarray], expected: np.ndarray) -> np.ndarray:
    """Combine a tensor of all chips: slices of the last axis, equal copies, or partial sums.

    Copies and partial sums have the same shape; the result closer to the expected one is taken.
    Parallel hidden states, which are columns, are reshaped to the expected rows.
    """
    if parts[0].size == expected.size and parts[0].ndim == expected.ndim == 2:
        parts = [part.reshape(expected.shape) for part in parts]
    if len(parts) == 1:
        return parts[0]
    if parts[0].shape[-1] != expected.shape[-1]:
        return np.concatenate(parts, axis=-1)
    if parts[0].shape != expected.shape:
        return parts[0]
    distances = [float(np.abs(part - expected).max()) for part in parts]
    whole = sum(parts[1:], parts[0])
    return whole if np.abs(whole - expected).max() < max(distances) \
        else parts[int(np.argmax(distances))]


@contextmanager
def _greedy(root: Path) -> Iterator[Callable[[list[int], int], Sequence[int]]]:
    """Yield a function that returns greedy tokens, given a prompt and a count."""
    with LLM(root, verify=False, max_batch_size=1) as llm:
        yield lambda prompt, count: llm.generate(
            [prompt], SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids


def _suspects(names: list[str], layers: Sequence[str], first: str | None) -> list[str]:
    """Return the tensors after the last good layer, up to the first layer over tolerance.

    With rounding, a tensor within a layer may exceed its measured error by chance, such as where
    two attention scores are almost equal. It is an error only if a layer's output shows it.
    """
    if first is None:
        return []
    before = layers[:layers.index(first)]
    return names[names.index(before[-1]) + 1 if before else 0:names.index(first) + 1]


def _bisect(names: Iterable[str], ours: Values, export: Values, compiled: Sequence[Values],
            manifest: Manifest, root: Path, allowed: _Allowed) -> str | None:
    """Describe the first tensor over tolerance against the export, or return None.

    Integers are skipped with rounding, as a router may select other experts with similar scores.
    """
    ops = _ops(manifest, root)
    rounds = manifest.dtype != "float32" or manifest.quantization
    for name in names:
        actual, expected = ours[name], export.get(name)
        if expected is None or actual.shape != expected.shape \
                or (rounds and np.issubdtype(expected.dtype, np.integer)):
            continue
        difference = compare(name, "compiled vs export", actual, expected,
                             allowed.relative(name, expected))
        if difference.passed:
            continue
        chips = ""
        if len(compiled) > 1 and compiled[0][name].shape[-1] != expected.shape[-1]:
            ends = np.cumsum([chip[name].shape[-1] for chip in compiled])[:-1]
            worst = [float(np.abs(a - b).max()) for a, b in zip(
                np.split(actual, ends, axis=-1), np.split(expected, ends, axis=-1), strict=True)]
            chips = f" on chip {int(np.argmax(worst))}"
        return (f"{ops.get(name, '?')} '{name}'{chips}: max abs {difference.max_abs:.3g}, relative "
                f"{difference.relative:.3g}")
    return None


def _hidden_states(manifest: Manifest, root: Path) -> list[str]:
    """Return the names of the hidden states of a compiled model, in the layers' order."""
    pattern = re.compile(HIDDEN_STATE.format(r"(\d+)"))
    found = filter(None, map(pattern.fullmatch, _ops(manifest, root)))
    return [own[0] for own in sorted(found, key=lambda own: int(own[1]))]


def _ops(manifest: Manifest, root: Path) -> Mapping[str, str]:
    """Map each tensor to the op that computes it."""
    directory = root / manifest.chips[0].path
    if manifest.target.spec.runs_program:
        program = read_program(directory / manifest.target.spec.engine_file)
        return {program.tensors[number].name: node.op for node in program.nodes
                for number in node.outputs if number >= 0}
    model = read_onnx(directory / "graph.onnx")
    return {name: node.op_type for node in model.graph.node for name in node.output}


def _compare_weights(raw: RawModel, manifest: Manifest, root: Path) -> tuple[BadWeight, ...]:
    """Compare every weight of every chip with the reference's. Consumes `raw.graph`."""
    options = CompileOptions(dtype=manifest.dtype, quantize="" if manifest.quantization else "none")
    lowered = lower_alike(raw, manifest, root, options)
    bad: list[BadWeight] = []
    nearest: list[BadWeight] = []  # differences of quantized weights from round-to-nearest
    for rank, graph in enumerate(lowered.graphs):
        chip, graphs = manifest.chips[rank], [graph, *lowered.encoders[rank:rank + 1]]
        with weight_file(root, rank) as file:
            names = set(file.keys())
            rounded = {name for each in graphs for name in _rounded(each, chip)}
            # Reordered columns cannot be compared by position.
            in_order = not any(name.endswith(".columns.order") for name in names)
            constants = {tensor.name: tensor for each in graphs
                         for tensor in each.tensors().values() if isinstance(tensor, gs.Constant)}
            for tensor in constants.values():
                if not isinstance(tensor._values, Weight) or f"{tensor.name}{SCALED}" in names:
                    continue
                name, values = tensor.name, tensor._values
                difference = None
                if name not in rounded:
                    have = file.get_slice(name) if name in names else None
                    difference = _compare_weight(rank, name, have, values)
                elif name in chip.quantization and in_order:
                    have = {part: file.get_slice(name + part) for part in STORED
                            if name + part in names}
                    difference = _compare_rounded(rank, name, have, chip.quantization[name], values)
                    if difference is None:
                        nearest.append(_compare_nearest(rank, name, have, chip.quantization[name],
                                                        values))
                if difference is not None:
                    bad.append(difference)
    others = [weight for weight in nearest if weight.elements]
    # Otherwise they were quantized by calibration or another tool.
    return tuple(bad + others if 2 * len(others) < len(nearest) else bad)


def _rounded(graph: gs.Graph, chip: Chip) -> set[str]:
    """Return the constants that differ from the reference's because a weight is quantized.

    They are the weight, its row sums, and constants of a folded norm, which calibrated weights do
    not have.
    """
    names = set()
    for node in graph.nodes:
        op = op_of(node)
        if op is None:
            continue
        inputs = operands(node)
        names |= {tensor.name for tensor in inputs.values() if isinstance(tensor, gs.Constant)
                  and isinstance(tensor._values, HeadMatrices)
                  and tensor.name in chip.quantization}
        for role in op.quantized:
            weight = inputs[role.weight]
            unfolded = weight.name.endswith(NORMED) \
                and weight.name.removesuffix(NORMED) in chip.quantization
            if values_of(weight).dtype != np.uint8 \
                    and (weight.name in chip.quantization or unfolded):
                names |= {tensor.name for name, tensor in inputs.items()
                          if unfolded or name in (role.weight, role.row_sums)}
    return names


def _compare_rounded(rank: int, name: str, have: Mapping[str, Any], form: WeightForm,
                     expected: Weight) -> BadWeight | None:
    """Check that a quantized weight is within the rounding error of the reference's.

    `have` has slices of the file by suffixes of their names.
    """
    if not {"", "_scale"} <= have.keys() \
            or tuple(have[""].get_shape()[:-1]) != expected.shape[:-1]:
        return _bad_weight(rank, name, math.prod(expected.shape), math.inf)
    fields = {"weight_dtype": form.dtype, "group_size": form.group_size}
    start, count, worst, error, whole = 0, 0, 0.0, 0.0, 0.0
    for block in expected.blocks():
        stop = start + len(block)
        parts = {part: rows[start:stop].reshape(-1, rows.get_shape()[-1])
                 for part, rows in have.items()}
        start = stop
        exact = block.reshape(-1, block.shape[-1]).astype(np.float64)
        gap = np.abs(dequantized(fields, parts[""], parts["_scale"], parts.get("_zero"),
                                 parts.get("_min"))[:, :exact.shape[1]] - exact)
        worst, count = max(worst, float(gap.max())), count + gap.size
        error, whole = error + float((gap**2).sum()), whole + float((exact**2).sum())
    if error <= _ROUNDED_WEIGHT**2 * whole:
        return None
    return _bad_weight(rank, name, count, worst, math.sqrt(error / whole) if whole else math.inf)


def _compare_nearest(rank: int, name: str, have: Mapping[str, Any], form: WeightForm,
                     expected: Weight) -> BadWeight:
    """Compare a quantized weight with the reference's, rounded to nearest."""
    size = math.prod(expected.shape)
    matrix = expected.reshape((size // expected.shape[-1], expected.shape[-1]))
    if form.dtype not in LINEAR_CODE_TYPES or "_min" in have:
        return _bad_weight(rank, name, size, math.inf)
    try:
        rounded = quantize(matrix, Scheme(form.dtype, form.group_size), name).weight(name)
    except LlmcError:  # rows are not divisible into groups
        return _bad_weight(rank, name, size, math.inf)
    fields = {"weight_dtype": form.dtype, "group_size": form.group_size}
    flat = {part: rows[:].reshape(-1, rows.get_shape()[-1]) for part, rows in have.items()}
    start, count, worst = 0, 0, 0.0
    for block in rounded.blocks():
        stop = start + len(block)
        actual = dequantized(fields, flat[""][start:stop], flat["_scale"][start:stop],
                             flat["_zero"][start:stop] if "_zero" in flat else None)
        start, gap = stop, np.abs(actual[:, :block.shape[1]] - block)
        count += int((gap > 1e-5 * np.abs(block).max()).sum())
        worst = max(worst, float(gap.max()))
    return _bad_weight(rank, name, count, worst)


def _bad_weight(rank: int, name: str, count: int, worst: float, off: float = 0.0) -> BadWeight:
    layer = re.search(r"\.(\d+)\.", name)
    return BadWeight(rank, name, int(layer[1]) if layer else None, count, worst, off)


def _compare_weight(rank: int, name: str, have: Any, expected: Weight) -> BadWeight | None:
    """Compare a weight bit by bit; `have` is its slice of the file, None if absent."""
    if have is None or tuple(have.get_shape()) != expected.shape:
        return _bad_weight(rank, name, math.prod(expected.shape), math.inf)
    start, count, worst = 0, 0, 0.0
    for block in expected.blocks():
        actual = have[start:start + len(block)]
        start += len(block)
        wrong = ~((actual == block) | (np.isnan(actual) & np.isnan(block)))
        if wrong.any():
            count += int(wrong.sum())
            gap = actual[wrong].astype(np.float64) - block[wrong].astype(np.float64)
            worst = max(worst, float(np.abs(gap).max()))
    return _bad_weight(rank, name, count, worst) if count else None
