"""Draft models: what `--draft` names, read and attached to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import HIDDEN, DraftKind
from llmc.compiler.frontend.raw import RawDraft, RawModel
from llmc.compiler.graph.names import HIDDEN_STATE
from llmc.compiler.graph.recurrence import CONVOLUTION, RECURRENCE
from llmc.compiler.graph.rewrite import consumers, producer, scalar, tidy
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError, shown
from llmc.targets import TARGETS, TargetSpec

_SEPARATE: tuple[DraftKind, ...] = ("eagle3", "dflash", "assistant", "model")  # each in a directory
FORMS = f"mtp, {':DIR, '.join(_SEPARATE[:-1])}:DIR or {_SEPARATE[-1]}:DIR"
PREFIX = "draft."  # of names of weights that only the draft model has


@dataclass(frozen=True)
class DraftSource:
    """A parsed value of `--draft`.

    Args:
        kind: see `DraftInfo`.
        directory: checkpoint of the draft model, except for `mtp`.
    """

    kind: DraftKind
    directory: Path = Path()

    @staticmethod
    def of(text: str) -> DraftSource:
        """Parse a value of `--draft`.

        Raises:
            LlmcError: it is none of the forms.
        """
        if text == "mtp":
            return DraftSource("mtp")
        given, _, directory = text.partition(":")
        for kind in _SEPARATE:
            if kind == given and directory:
                return DraftSource(kind, Path(directory))
        raise LlmcError(f"draft is {shown(text)}, expected {FORMS}")


def refuse_target(target: TargetSpec) -> str | None:
    """Why a target cannot run a draft model; None if it can."""
    if target.drafts:
        return None
    names = " and ".join(name for name, spec in TARGETS.items() if spec.drafts)
    return (f"draft is given for target '{target.name}', but draft models run on targets {names}; "
            f"compile for one of them, or leave it out")


def attach_draft(raw: RawModel, source: DraftSource, load: Callable[[Path], RawModel], *,
                 allow_pickle: bool) -> RawModel:
    """Return a model with its draft model.

    Args:
        raw: the model. Its graph gets the output that the draft model reads.
        source: the draft model. That of `mtp` has been exported with the model.
        load: exports a separate model.
        allow_pickle: read .bin checkpoints with torch.load.

    Raises:
        LlmcError: the draft model is missing, broken or unsupported, or it is of another model.
    """
    if source.kind == "mtp":
        return raw
    if source.kind == "model":
        return _attach_model(raw, load(source.directory))
    if source.kind == "assistant":
        from llmc.compiler.frontend.assistant import attach_assistant
        return attach_assistant(raw, source.directory, allow_pickle)
    if source.kind == "dflash":
        from llmc.compiler.frontend.dflash import attach_dflash
        return attach_dflash(raw, source.directory, allow_pickle)
    from llmc.compiler.frontend.eagle3 import attach_eagle3
    return attach_eagle3(raw, source.directory, allow_pickle)


def _attach_model(raw: RawModel, other: RawModel) -> RawModel:
    """Return a model with a separate model as its draft model."""
    if other.encoder is not None:
        raise LlmcError(f"'{other.architecture}' is an encoder-decoder model, which cannot be a "
                        f"draft model; give a causal LM")
    _refuse_states(other)
    expected, given = (int(each.graph.outputs[0].shape[-1]) for each in (raw, other))
    if given != expected:
        raise LlmcError(f"'{other.architecture}' has vocab_size {given}, '{raw.architecture}' has "
                        f"{expected}; give a draft model with the same vocabulary")
    mark_weights(other.graph, frozenset())
    return replace(raw, draft=RawDraft((other.graph,), "model", other.config_sha256,
                                       notes=other.notes))


def _refuse_states(raw: RawModel) -> None:
    """Reject a draft model with recurrent layers, whose states drafts would advance."""
    if any(node.op in (CONVOLUTION.name, RECURRENCE.name) for node in raw.graph.nodes):
        raise LlmcError(f"'{raw.architecture}' has layers with a recurrent state, which a draft "
                        f"model cannot have; give one without, or leave out --draft")


def input_table(graph: gs.Graph) -> gs.Constant:
    """The token embedding table of an exported graph.

    Raises:
        LlmcError: the token ids are not looked up in a table.
    """
    return _lookup(graph).inputs[0]


def embedding_of(graph: gs.Graph) -> tuple[gs.Constant, float]:
    """The token embedding table of an exported graph, and the factor of its rows.

    Raises:
        LlmcError: the token ids are not looked up in a table.
    """
    node, factor = _lookup(graph), 1.0
    table, users = node.inputs[0], consumers(graph, node.outputs[0])
    while len(users) == 1 and users[0] is not None and users[0].op in ("Mul", "Cast", "Identity"):
        numbers = [number for tensor in users[0].inputs if (number := scalar(tensor)) is not None]
        if users[0].op == "Mul":
            if not numbers:
                break
            factor *= numbers[0]
        users = consumers(graph, users[0].outputs[0])
    return table, factor


def _lookup(graph: gs.Graph) -> gs.Node:
    """The lookup of the token embedding, by the width of the LM head if there are several."""
    waiting = [tensor for tensor in graph.inputs if tensor.name == "input_ids"]
    found = []
    while waiting:
        for node in waiting.pop().outputs:
            if node.op == "Gather" and isinstance(node.inputs[0], gs.Constant) \
                    and isinstance(node.inputs[0]._values, Weight):
                found.append(node)
            elif node.op in ("Reshape", "Cast", "Identity", "Where"):
                waiting += node.outputs
    if not found:
        raise LlmcError("the model's token embedding was not found, which its draft model shares; "
                        "leave out --draft")
    head = _head(graph)
    width = None if head is None else head.inputs[0].shape[-1]
    return next((node for node in found if node.inputs[0]._values.shape[-1] == width), found[0])


def head_of(graph: gs.Graph) -> gs.Constant:
    """The LM head's matrix of an exported graph, [vocab_size, hidden_size].

    Raises:
        LlmcError: the logits do not come from an LM head.
    """
    node = _head(graph)
    source = None if node is None else node.inputs[1]
    above = None if source is None else producer(source)
    if above is not None and above.op == "Transpose":
        source = above.inputs[0]
    if not isinstance(source, gs.Constant) or not isinstance(source._values, Weight):
        raise LlmcError("the model's LM head was not found, which its draft model shares; leave "
                        "out --draft")
    return source


def _head(graph: gs.Graph) -> gs.Node | None:
    """The LM head; None if the logits do not come from one."""
    node = producer(graph.outputs[0])
    while node is not None and node.op not in ("MatMul", "Gemm"):
        computed = [tensor for tensor in node.inputs if not isinstance(tensor, gs.Constant)]
        node = producer(computed[0]) if len(computed) == 1 else None
    return node


def hidden_states(raw: RawModel) -> list[gs.Tensor]:
    """Hidden state after each layer of the model.

    Raises:
        LlmcError: they are unknown.
    """
    tensors = raw.graph.tensors()
    states = list(takewhile(lambda tensor: tensor is not None, (
        tensors.get(HIDDEN_STATE.format(layer)) for layer in count())))
    if not states:
        reason = next((note for note in raw.notes if note.startswith("all layers were exported")),
                      f"it comes from an {raw.kind} file")
        raise LlmcError(f"the hidden states between the layers of '{raw.architecture}' are "
                        f"unknown ({reason}), which eagle3 and dflash read; give another kind of "
                        f"draft model, or leave out --draft")
    return states


def add_hidden(graph: gs.Graph, origin: str) -> None:
    """Make the input of the LM head the output `hidden`.

    Raises:
        LlmcError: the logits do not come from an LM head.
    """
    node = _head(graph)
    if node is None:
        raise LlmcError(f"the LM head of '{origin}' was not found, whose input the draft model "
                        f"reads; leave out --draft")
    node.inputs[0].name = HIDDEN
    graph.outputs.append(node.inputs[0])


def add_features(graph: gs.Graph, chosen: Sequence[gs.Tensor], weight: Weight | None, name: str,
                 origin: str, hidden_size: int) -> None:
    """Add the output `hidden`: a linear layer of the draft model on hidden states of the model.

    Args:
        graph: the model's graph.
        chosen: hidden states, concatenated in this order.
        weight: matrix of the layer, if the checkpoint has one.
        name: its name.
        origin: the checkpoint's directory.
        hidden_size: rows of the matrix.

    Raises:
        LlmcError: the matrix is absent, or of another shape or dtype.
    """
    expected = hidden_size, sum(int(tensor.shape[-1]) for tensor in chosen)
    if weight is None or weight.shape != expected or not weight.is_floating:
        found = "no tensor" if weight is None else f"{weight.dtype} {list(weight.shape)} as"
        raise LlmcError(f"'{origin}' has {found} '{name}', expected floating point "
                        f"{list(expected)}; give a complete draft model")
    axes = list(chosen[0].shape)[:-1]
    joined = gs.Variable(f"{HIDDEN}.layers", np.float32, [*axes, expected[1]])
    graph.nodes.append(gs.Node(op="Concat", name=joined.name, attrs={"axis": -1}, inputs=[*chosen],
                               outputs=[joined]))
    matrix = gs.Constant(f"{PREFIX}{name}", weight.cast(np.float32).transpose())
    result = gs.Variable(HIDDEN, np.float32, [*axes, hidden_size])
    graph.nodes.append(gs.Node(op="MatMul", name=HIDDEN, inputs=[joined, matrix],
                               outputs=[result]))
    graph.outputs.append(result)
    tidy(graph)


def refuse_unused(tensors: Mapping[str, Weight], known: Set[str], origin: Path, method: str,
                  layers: str) -> None:
    """Reject a draft model with tensors that are not among the known ones.

    Args:
        tensors: of its checkpoint.
        known: names.
        origin: its directory.
        method: it is for.
        layers: of draft models of this method, after `a draft model`.

    Raises:
        LlmcError: names the first one.
    """
    unused = next((name for name in tensors if name not in known), None)
    if unused is not None:
        raise LlmcError(f"'{origin}' has a tensor '{unused}' {list(tensors[unused].shape)}, which "
                        f"llmc does not use for {method}; give a draft model {layers}")


def mark_weights(graph: gs.Graph, shared: Set[int]) -> None:
    """Prefix the names of a draft model's weights, except those of the model, by identity."""
    own = {id(tensor): tensor for node in graph.nodes for tensor in node.inputs
           if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)
           and id(tensor._values) not in shared}
    for tensor in own.values():  # not by name: the model's embedding may have that of a head
        tensor.name = f"{PREFIX}{tensor.name}"
