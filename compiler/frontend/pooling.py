"""The task of a checkpoint, and the layers that pool the outputs of its model.

A SentenceTransformers directory lists modules in modules.json: the transformer, its pooling, and
row-wise layers after it. Classifiers of transformers pool by themselves; passes recognize how.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import POOLED
from llmc.compiler.frontend.checkpoint import open_checkpoint, read_json
from llmc.compiler.frontend.paths import refuse_pointer
from llmc.compiler.frontend.raw import architecture_of
from llmc.compiler.graph.rewrite import graph_input, replace
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError, shown
from llmc.plugins.pool.op import KINDS
from llmc.plugins.pool.op import OP as POOL
from llmc.plugins.rms_norm.op import OP as RMS_NORM

MODULES = "modules.json"
Task = Literal["embed", "classify", "token_classify"]
Activation = Literal["none", "sigmoid", "softmax"]
# Tasks by the end of an architecture's name in transformers.
_ARCHITECTURES: dict[str, Task] = {"ForSequenceClassification": "classify",
                                   "ForTokenClassification": "token_classify"}
_MODES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}  # SentenceTransformers' to llmc's
_SETTINGS = "config_sentence_transformers.json"
_ACTIVATIONS = {"Identity": "", "Tanh": "Tanh", "ReLU": "Relu", "Sigmoid": "Sigmoid",
                "GELU": "Gelu"}
# Smallest sum of squares that is normalized to 1; SentenceTransformers' smallest norm is 1e-12.
_EPSILON = 1e-24


@dataclass(frozen=True)
class Dense:
    """A linear layer after pooling: weight [out, in], and an activation's ONNX op or ''."""

    weight: Weight
    bias: Weight | None
    activation: str


@dataclass(frozen=True)
class LogitScore:
    """The logit of a token of the model's LM head, less that of another one, if given."""

    true_token_id: int
    false_token_id: int | None

    def dense(self, head: Weight) -> Dense:
        """Return the layer of the same result, given the head [vocab_size, hidden_size].

        Raises:
            LlmcError: a token is not in the vocabulary.
        """
        tokens = [self.true_token_id,
                  *([] if self.false_token_id is None else [self.false_token_id])]
        if max(tokens) >= head.shape[0] or min(tokens) < 0:
            raise LlmcError(f"LogitScore names the tokens {tokens}, the vocabulary has "
                            f"{head.shape[0]}; give modules that belong to the model")
        rows = head.cast(np.float32).take_rows(tokens).load()
        row = rows[:1] if len(rows) == 1 else rows[:1] - rows[1:]
        return Dense(Weight.of(row, "logit_score.weight"), None, "")


@dataclass(frozen=True)
class Normalize:
    """Division of each row by its L2 norm."""


Layer = Dense | Normalize | LogitScore


@dataclass(frozen=True)
class PoolingPlan:
    """The task of a checkpoint that is pooled.

    Args:
        task: `embed` (a vector for each text), `classify` (logits of labels for each text or pair
            of texts) or `token_classify` (for each token).
        kind: pooling of the model's hidden states; "": the model pools by itself, or not at all.
        layers: what follows the pooling.
        labels: names of the columns of a classifier.
        activation: of a classifier's logits.
        max_tokens: maximum length of a text; None: the model's.
        prompts: texts to prepend by name, such as `query`.
        default_prompt: name of the prompt that is prepended by default, or None.
        pair_template: whether the chat template makes a pair of texts one text.
    """

    task: Task
    kind: str = ""
    layers: tuple[Layer, ...] = ()
    labels: tuple[str, ...] = ()
    activation: Activation = "none"
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pair_template: bool = False


def model_directory(directory: Path) -> Path:
    """Return the folder of the transformer in a SentenceTransformers directory."""
    if (directory / "config.json").is_file() or not (directory / MODULES).is_file():
        return directory
    path = next((path for kind, path in _modules(directory) if kind == "Transformer"), directory)
    return path if (path / "config.json").is_file() else directory


def read_plan(directory: Path, config: Mapping[str, Any], task: str, pooling: str,
              allow_pickle: bool, score: LogitScore | None = None) -> PoolingPlan | None:
    """Return what a checkpoint is compiled for; None for text generation.

    Args:
        directory: of SentenceTransformers or of transformers.
        config: contents of the model's config.json.
        task: `--task`; "": as the checkpoint says.
        pooling: `--pooling`; "": as the checkpoint says.
        allow_pickle: read .bin weights.
        score: the logits that `--classifier_from_token` names.

    Raises:
        LlmcError: the options contradict the checkpoint, modules.json is invalid, or a module is
            unsupported.
    """
    architecture = architecture_of(config)
    own = next((own for end, own in _ARCHITECTURES.items() if architecture.endswith(end)), "")
    if score is not None:
        if pooling:
            raise LlmcError(f"pooling '{pooling}' is given, but classifier_from_token compares "
                            f"logits of the last token; leave it out")
        if not architecture.endswith("ForCausalLM") or config.get("final_logit_softcapping"):
            raise LlmcError(f"classifier_from_token is given, but '{architecture}' has no linear "
                            f"LM head; give a causal LM, or leave it out")
        return _plan_score(score, config)
    modules = _modules(directory) if (directory / MODULES).is_file() else []
    scores = len(modules) > 1 and modules[1][0] == "LogitScore"
    if not task:
        task = own or ("classify" if scores else "embed" if modules or pooling else "generate")
    if task == "generate":
        if pooling:
            raise LlmcError(f"pooling '{pooling}' is given with task generate, which pools "
                            f"nothing; give --task embed, or leave it out")
        return None
    if scores and task == "classify" and not pooling:
        return _read_score(modules, config)
    if task in _ARCHITECTURES.values():
        if task != own:
            logits = ", or --classifier_from_token no,yes if it answers by logits of tokens " \
                     "(Qwen3-Reranker)" if architecture.endswith("ForCausalLM") else ""
            raise LlmcError(f"task is '{task}', but '{directory}' is '{architecture}', which has "
                            f"no head for it; give a checkpoint of a …{_named(task)} model{logits}")
        if pooling:
            raise LlmcError(f"pooling '{pooling}' is given, but '{architecture}' pools by itself; "
                            f"leave it out")
        labels = _labels(config)
        return PoolingPlan(cast(Task, task), labels=labels,
                           activation=_activation(config, len(labels)))
    found = _plan_modules(directory, modules, allow_pickle, bool(pooling)) if modules else None
    kind = pooling or (found.kind if found else "")
    if not kind:
        raise LlmcError(f"'{architecture}' in '{directory}' names no pooling (it has no "
                        f"{MODULES}); give --pooling {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    return PoolingPlan("embed", kind) if found is None else \
        PoolingPlan("embed", kind, found.layers, max_tokens=found.max_tokens,
                    prompts=found.prompts, default_prompt=found.default_prompt)


def _named(task: str) -> str:
    return next(end for end, own in _ARCHITECTURES.items() if own == task)


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a classifier's labels, in the order of its columns."""
    named = config.get("id2label")
    if not isinstance(named, Mapping):
        count = config.get("num_labels", 2)
        return tuple(f"LABEL_{index}" for index in range(count if isinstance(count, int) else 2))
    try:
        return tuple(str(named[key]) for key in sorted(named, key=int))
    except (TypeError, ValueError):
        raise LlmcError(f"id2label in config.json has keys {shown(list(named))}, expected numbers "
                        f"from 0; correct it") from None


def _activation(config: Mapping[str, Any], num_labels: int) -> Activation:
    """Activation of a classifier's logits, as transformers' pipelines and CrossEncoder have it."""
    settings = config.get("sentence_transformers")
    given = settings.get("activation_fn") if isinstance(settings, Mapping) else None
    given = given or config.get("sbert_ce_default_activation_function")
    known: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
    if given is not None:
        name = str(given).rpartition(".")[2]
        if name not in known:
            raise LlmcError(f"config.json has the activation {shown(given)} for scores, expected "
                            f"one of {', '.join(known)}; correct it")
        return known[name]
    problem = config.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or num_labels == 1 else "softmax"


def _modules(directory: Path) -> list[tuple[str, Path]]:
    """The modules of a SentenceTransformers directory: class and folder of each."""
    path = directory / MODULES
    refuse_pointer(path)
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        found = [(str(own["type"]).rpartition(".")[2], str(own["path"])) for own in listed]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise LlmcError(f"'{path}' is not a list of modules with type and path ({error!r}); "
                        f"download it again") from error
    for _, folder in found:
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise LlmcError(f"'{path}' names the folder {shown(folder)}, which is outside of the "
                            f"model's; download it again")
    return [(kind, directory / folder) for kind, folder in found]


def _plan_modules(directory: Path, modules: Sequence[tuple[str, Path]], allow_pickle: bool,
                  overridden: bool) -> PoolingPlan:
    """Read the modules of a SentenceTransformers directory.

    Args:
        overridden: whether `--pooling` replaces the pooling.
    """
    kinds = [kind for kind, _ in modules]
    if kinds[:1] != ["Transformer"] or (kinds[1:2] != ["Pooling"] and not overridden):
        raise LlmcError(f"'{directory / MODULES}' lists {', '.join(kinds) or 'no modules'}; llmc "
                        f"supports Transformer, Pooling, and then Dense, Normalize and Dropout")
    kind, layers = "", list[Layer]()
    for name, folder in modules[1:]:
        if name == "Pooling":
            kind = kind or _read_pooling(folder, overridden)
        elif name == "Dense":
            layers.append(_read_dense(folder, allow_pickle))
        elif name == "Normalize":
            layers.append(Normalize())
        elif name != "Dropout":
            raise LlmcError(f"'{directory / MODULES}' has a module {shown(name)}, which llmc does "
                            f"not support; supported after Pooling: Dense, Normalize, Dropout")
    settings = _optional_json(directory / _SETTINGS)
    prompts = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(t, str) for t in prompts.values()) \
            or not (default is None or default in prompts):
        raise LlmcError(f"'{directory / _SETTINGS}' has prompts {shown(prompts)} and "
                        f"default_prompt_name {shown(default)}, expected texts by name and one of "
                        f"these names; correct it")
    return PoolingPlan("embed", kind, tuple(layers), max_tokens=_max_tokens(modules[0][1]),
                       prompts=prompts, default_prompt=default)


def _plan_score(score: LogitScore, config: Mapping[str, Any],
                max_tokens: int | None = None) -> PoolingPlan:
    """The plan of a causal LM that scores pairs by logits of the last token."""
    return PoolingPlan("classify", "last", (score,), ("LABEL_0",), _activation(config, 1),
                       max_tokens, pair_template=True)


def _read_score(modules: Sequence[tuple[str, Path]], config: Mapping[str, Any]) -> PoolingPlan:
    """Read a reranker that compares logits of the last token, such as "yes" and "no".

    Raises:
        LlmcError: the tokens are not numbers, other modules follow, or the head is not linear.
    """
    path = modules[1][1] / "config.json"
    settings = read_json(path)
    true, false = settings.get("true_token_id"), settings.get("false_token_id")
    if not isinstance(true, int) or not (false is None or isinstance(false, int)) \
            or modules[2:] or config.get("final_logit_softcapping"):
        raise LlmcError(f"'{path}' has true_token_id {shown(true)} and false_token_id "
                        f"{shown(false)}; llmc supports two tokens of a linear LM head, and no "
                        f"module after LogitScore")
    return _plan_score(LogitScore(true, false), config, _max_tokens(modules[0][1]))


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _max_tokens(folder: Path) -> int | None:
    """Maximum length of a text in tokens, by the transformer module's config."""
    for path in sorted(folder.glob("sentence_*_config.json")):
        config = read_json(path)
        if config.get("do_lower_case"):
            raise LlmcError(f"'{path}' has do_lower_case true, which llmc does not support; set "
                            f"it to false if the tokenizer lowercases, or use another model")
        length = config.get("max_seq_length")
        if isinstance(length, int) and length > 1:
            return length
    return None


def _read_pooling(folder: Path, overridden: bool) -> str:
    """Kind of a Pooling module."""
    path = folder / "config.json"
    config = read_json(path)
    modes: object = config.get("pooling_mode")
    if modes is None:
        modes = [key for key, on in config.items() if key.startswith("pooling_mode_") and on]
        modes = [mode.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
                 for mode in modes] or ["mean"]
    each = [modes] if isinstance(modes, str) else modes
    if overridden:
        return ""
    if not isinstance(each, list) or len(each) != 1 or each[0] not in _MODES:
        raise LlmcError(f"'{path}' has the pooling {shown(modes)}; llmc supports one of "
                        f"{', '.join(_MODES)}: give --pooling to choose one, or use another model")
    if config.get("include_prompt") is False:
        raise LlmcError(f"'{path}' excludes prompts from pooling (include_prompt false), which "
                        f"llmc does not support; use another model")
    return _MODES[each[0]]


def _read_dense(folder: Path, allow_pickle: bool) -> Dense:
    path = folder / "config.json"
    config = read_json(path)
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    odd = [key for key in ("module_input_name", "module_output_name")
           if config.get(key) not in (None, "sentence_embedding")]
    if config.get("use_residual"):
        odd.append("use_residual")
    if name not in _ACTIVATIONS or odd:
        what = f"activation_function {shown(name)}" if not odd else \
            f"{odd[0]} {shown(config[odd[0]])}"
        raise LlmcError(f"'{path}' has {what}, which llmc does not support; supported: a linear "
                        f"layer with one of {', '.join(_ACTIVATIONS)}")
    tensors = open_checkpoint(folder, allow_pickle)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    sizes = config.get("out_features"), config.get("in_features")
    if weight is None or weight.shape != sizes or bool(config.get("bias", True)) != \
            (bias is not None) or (bias is not None and bias.shape != sizes[:1]):
        raise LlmcError(f"the weights in '{folder}' are not a linear layer of out_features "
                        f"{sizes[0]} and in_features {sizes[1]} as in its config.json; download "
                        f"them again")
    return Dense(weight, bias, _ACTIVATIONS[name])


def append_layers(graph: gs.Graph, plan: PoolingPlan, width: int) -> int:
    """Pool the output of a graph [batch, seq, width] and apply the layers after it, in place.

    Returns:
        The width of the new output.

    Raises:
        LlmcError: a layer has another width than its input.
    """
    hidden, = graph.outputs
    hidden.name = f"{POOLED}.hidden"
    tensor = gs.Variable(f"{POOLED}.rows", np.float32, ("batch", width))
    replace(graph, POOL, {"x": hidden, "cu_seqlens": graph_input(
        graph, "cu_seqlens", ("batch_plus_1",))}, [tensor], {"kind": plan.kind})
    for index, layer in enumerate(plan.layers):
        name = f"{POOLED}.{index}"
        if isinstance(layer, Normalize):
            tensor = _normalized(graph, tensor, width, name)
            continue
        assert isinstance(layer, Dense), layer  # the exporter has replaced others
        if layer.weight.shape[1] != width:
            raise LlmcError(f"the Dense module {index} has in_features {layer.weight.shape[1]}, "
                            f"its input has {width}; give modules that belong to the model")
        width = layer.weight.shape[0]
        tensor = _linear(graph, tensor, layer, name)
    tensor.name = POOLED
    graph.outputs = [tensor]
    return width


def _normalized(graph: gs.Graph, x: gs.Variable, width: int, name: str) -> gs.Variable:
    """x / ‖x‖, as an RMSNorm with weight 1 / √width."""
    y = gs.Variable(f"{name}.normalized", np.float32, ("batch", width))
    gain = gs.Constant(f"{name}.normalize.weight", Weight.of(
        np.full(width, width ** -0.5, np.float32), f"{name}.normalize.weight"))
    replace(graph, RMS_NORM, {"x": x, "weight": gain}, [y], {"epsilon": _EPSILON / width})
    return y


def _linear(graph: gs.Graph, x: gs.Variable, layer: Dense, name: str) -> gs.Variable:
    shape = ("batch", layer.weight.shape[0])
    y = gs.Variable(f"{name}.linear", np.float32, shape)
    weights = [gs.Constant(f"{name}.dense.{kind}", own.cast(np.float32)) for kind, own in
               (("weight", layer.weight), ("bias", layer.bias)) if own is not None]
    graph.nodes.append(gs.Node(op="Gemm", name=y.name, attrs={"transB": 1},
                               inputs=[x, *weights], outputs=[y]))
    if not layer.activation:
        return y
    z = gs.Variable(f"{name}.activation", np.float32, shape)
    graph.nodes.append(gs.Node(op=layer.activation, name=z.name, inputs=[y], outputs=[z]))
    return z
