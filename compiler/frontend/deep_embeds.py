"""Marks where the image encoder's deep rows are added to a language model's hidden states.

Qwen3-VL's encoder has further results, from its inner layers, that are added to the hidden states
of image tokens after the language model's first layers (DeepStack). The model's code between its
layers is run with rows that record where they are added; the graph of layers is then marked there.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import torch

from llmc import plugins
from llmc.artifacts.manifest import MEDIA_ROWS
from llmc.compiler.frontend.parts import text_config
from llmc.compiler.frontend.raw import RawImageEncoder
from llmc.compiler.frontend.trace import root_cause
from llmc.compiler.graph.embeds import DEEP_EMBEDS
from llmc.compiler.graph.names import HIDDEN_STATE
from llmc.compiler.graph.rewrite import tidy
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError

_ROWS, _PLACES = "deepstack_visual_embeds", "visual_pos_masks"  # transformers' arguments


def mark_deep_embeds(graph: gs.Graph, model: Any, image: RawImageEncoder) -> None:
    """Mark the hidden states to which deep rows are added with `DeepEmbeds`.

    Args:
        graph: the language model's.
        model: the language model, without values.
        image: the image encoder.

    Raises:
        LlmcError: it has deep rows, and where they are added is unknown.
    """
    count = sum(tensor.name.startswith(f"{MEDIA_ROWS}_") for tensor in image.graph.outputs)
    if not count:
        return
    tensors = graph.tensors()
    for index, layer in enumerate(_layers_before(model, count)):
        state = tensors.get(HIDDEN_STATE.format(layer))
        if state is None:
            raise _unknown(model, f"the output of layer {layer} is unknown")
        readers = list(state.outputs)
        marked = gs.Variable(f"deep_embeds.{index}", np.float32, state.shape)
        for reader in readers:
            reader.inputs = [marked if tensor is state else tensor for tensor in reader.inputs]
        graph.nodes.append(gs.Node(op=DEEP_EMBEDS.name, domain=plugins.DOMAIN, name=marked.name,
                                   attrs={"index": index}, inputs=[state], outputs=[marked]))
    tidy(graph)


def _unknown(model: Any, reason: str) -> LlmcError:
    return LlmcError(f"the image encoder of '{model.config.model_type}' has deep rows, and {reason}"
                     f"; {LANGUAGE_MODEL_ONLY}")


def _layers_before(model: Any, count: int) -> list[int]:
    """Return the index of the layer after which each of `count` deep rows is added."""
    owner = next((module for module in model.modules()
                  if _ROWS in inspect.signature(module.forward).parameters
                  and hasattr(module, "layers")), None)
    if owner is None:
        raise _unknown(model, "its language model takes no rows after its layers")
    owner = copy.deepcopy(owner)
    run, places = list[int](), dict[int, int]()
    for index, layer in enumerate(owner.layers):
        def passed(hidden: torch.Tensor, *args: Any, _index: int = index, **kwargs: Any) -> \
                torch.Tensor:
            run.append(_index)
            return hidden

        layer.forward = passed

    def added(index: int) -> None:
        if not run or index in places:
            raise LlmcError("rows are added before the first layer, or twice")
        places[index] = run[-1]

    width = text_config(owner.config).hidden_size
    rows = [_Rows(index, added) for index in range(count)]
    try:
        with torch.no_grad():
            owner(inputs_embeds=torch.zeros((1, 4, width), device="meta"), use_cache=False,
                  attention_mask=torch.zeros((1, 1, 4, 4), device="meta"),
                  **{_ROWS: rows, _PLACES: _EveryPosition()})
    except Exception as error:  # any error of the model's code
        raise _unknown(model, f"its language model does not run with them "
                              f"({root_cause(error)})") from error
    if len(places) < count:
        raise _unknown(model, f"its language model adds {len(places)} of {count}")
    return [places[index] for index in range(count)]


class _EveryPosition:
    """A mask that selects all positions as a view, in place of those of images."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return Ellipsis


class _Rows:
    """Rows that record where they are added.

    Args:
        index: their number.
        added: called with it.
    """

    def __init__(self, index: int, added: Any) -> None:
        self._index, self._added = index, added

    def to(self, *args: Any, **kwargs: Any) -> _Rows:
        return self

    def __radd__(self, hidden: torch.Tensor) -> torch.Tensor:
        self._added(self._index)
        return hidden
