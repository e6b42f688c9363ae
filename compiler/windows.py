"""Check a graph's sliding windows against the model's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import attends_causally
from llmc.errors import LlmcError


def check_windows(graph: gs.Graph, config: Mapping[str, Any], architecture: str,
                  max_seq_len: int) -> None:
    """Check that each layer has its configured sliding window.

    The graph's windows come from the exported masks. Windows of at least max_seq_len count as
    full attention.

    Raises:
        LlmcError: a layer's window differs, so that neither source can be trusted.
    """
    text = config.get("text_config") or config
    if not isinstance(text.get("sliding_window"), int) or text.get("model_type") is None:
        return
    nodes = [node for node in graph.nodes if attends_causally(node)]
    for layer, (node, expected) in enumerate(zip(nodes, _configured(text, len(nodes)),
                                                 strict=True)):
        actual = node.attrs.get("window", 0)
        if expected is not None and \
                _effective(expected, max_seq_len) != _effective(actual, max_seq_len):
            raise LlmcError(
                f"layer {layer} of '{architecture}' has "
                f"{f'sliding window {actual}' if actual else 'full attention'}, but its config "
                f"expects {f'sliding_window {expected}' if expected else 'full attention'}; "
                f"correct the config, or export a model that follows it")


def _effective(window: int, max_seq_len: int) -> int:
    return window if window < max_seq_len else 0


def _configured(text: Mapping[str, Any], count: int) -> Sequence[int | None]:
    """Return each layer's window: 0 for full attention, None if unspecified."""
    from transformers import AutoConfig
    try:  # the class has the defaults, and shows whether it uses sliding_window
        config = AutoConfig.for_model(**text)
    except Exception:  # any error of a class that rejects a config of another version
        return [None] * count
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not isinstance(window, int) or "sliding_window" not in type(config).__dataclass_fields__:
        return [None] * count
    known = {"sliding_attention": window, "full_attention": 0}
    attending = [kind for kind in kinds or () if kind in known]  # not a hybrid's recurrent layers
    if len(attending) == count:
        kinds = attending
    elif not kinds or len(kinds) != count:
        return [window] * count
    return [known.get(kind) for kind in kinds]
