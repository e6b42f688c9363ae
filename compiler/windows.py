"""The sliding windows that a compiled model has, held against those that its config speaks of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import attends_causally
from llmc.errors import LlmcError


def check_windows(graph: gs.Graph, config: Mapping[str, Any], architecture: str,
                  max_seq_len: int) -> None:
    """See that each layer has the window that the config gives it, as far as max_seq_len tokens
    would notice. The graph's come from the masks that the model makes.

    Raises:
        LlmcError: a layer has another one; neither may be trusted then.
    """
    text = config.get("text_config") or config
    if not isinstance(text.get("sliding_window"), int) or text.get("model_type") is None:
        return
    nodes = [node for node in graph.nodes if attends_causally(node)]
    for layer, (node, wanted) in enumerate(zip(nodes, _configured(text, len(nodes)), strict=True)):
        found = node.attrs.get("window", 0)
        if wanted is not None and _felt(wanted, max_seq_len) != _felt(found, max_seq_len):
            raise LlmcError(
                f"layer {layer} of '{architecture}' attends "
                f"{f'in a window of {found}' if found else 'without a window'}, but its config "
                f"says {f'sliding_window {wanted}' if wanted else 'that it has none'}; mend the "
                f"config, or export the model so that it does what the config says")


def _felt(window: int, max_seq_len: int) -> int:
    return window if window < max_seq_len else 0


def _configured(text: Mapping[str, Any], count: int) -> Sequence[int | None]:
    """The window of each layer, 0 for none; None where the config does not say."""
    from transformers import AutoConfig
    try:  # the class knows which layers, and whether the key means anything to it
        config = AutoConfig.for_model(**text)
    except Exception:  # whatever a class says to a config of another version
        return [None] * count
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not isinstance(window, int) or "sliding_window" not in type(config).__dataclass_fields__:
        return [None] * count
    known = {"sliding_attention": window, "full_attention": 0}
    attending = [kind for kind in kinds or () if kind in known]  # a hybrid's others do not
    if len(attending) == count:
        kinds = attending
    elif not kinds or len(kinds) != count:
        return [window] * count
    return [known.get(kind) for kind in kinds]
