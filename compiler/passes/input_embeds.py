"""Let a prompt have rows in place of embeddings of its token ids.

Given:   x = token embedding → TokenEmbeds(x)
Result:  x = token embedding → InputEmbeds(x, embeds, embed_ids), the last two graph inputs

Given:   x = hidden state → DeepEmbeds(x) {index: i}
Result:  x = hidden state → AddEmbeds(x, deep_embeds_i, embed_ids), likewise

The first mark is at the output of the model's embedding module, where transformers takes
`inputs_embeds`. Only models that take such rows have it. Nothing else may read the token ids, as a
row has none.

Given:   x = hidden state → Mul(x, after_image), where layers attend to images
Result:  x = hidden state → InputEmbeds(x, embeds, embed_ids)

There `embeds` is one row of zeros, which tokens have that are not after an image.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import DEEP_EMBEDS_PREFIX, EMBED_IDS, EMBEDS
from llmc.compiler.graph.embeds import DEEP_EMBEDS, TOKEN_EMBEDS
from llmc.compiler.graph.names import AFTER_IMAGE
from llmc.compiler.graph.rewrite import (
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    describe,
    graph_input,
    operands,
    replace,
)
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError
from llmc.plugins import Op
from llmc.plugins.add_embeds.op import OP as ADD_EMBEDS
from llmc.plugins.input_embeds.op import OP as INPUT_EMBEDS


@dataclass(frozen=True)
class _Marked:
    x: gs.Tensor
    output: gs.Tensor
    name: str  # of the input with rows
    op: Op


def input_embeds(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    rules = [Rule("input-embeds", frozenset({TOKEN_EMBEDS.name}), _token_embeds, _rewrite),
             Rule("deep-embeds", frozenset({DEEP_EMBEDS.name}), _deep_embeds, _rewrite),
             Rule("after-image", frozenset({"Mul"}), _after_image, _rewrite)]
    apply_rules(graph, rules, settings, report)
    factor = next((tensor for tensor in graph.inputs if tensor.name == AFTER_IMAGE), None)
    reader = next(iter(consumers(graph, factor)), None) if factor is not None else None
    if reader is not None:
        raise LlmcError(f"{describe(reader)} of '{settings.model}' uses which tokens are after an "
                        f"image other than as a factor; {LANGUAGE_MODEL_ONLY}")


def _token_embeds(node: gs.Node, settings: Settings) -> _Marked:
    return _Marked(operands(node)["x"], node.outputs[0], EMBEDS, INPUT_EMBEDS)


def _deep_embeds(node: gs.Node, settings: Settings) -> _Marked:
    return _Marked(operands(node)["x"], node.outputs[0],
                   f"{DEEP_EMBEDS_PREFIX}{node.attrs['index']}", ADD_EMBEDS)


def _after_image(node: gs.Node, settings: Settings) -> _Marked | None:
    factors = [tensor for tensor in node.inputs if tensor.name == AFTER_IMAGE]
    others = [tensor for tensor in node.inputs if tensor.name != AFTER_IMAGE]
    return _Marked(others[0], node.outputs[0], EMBEDS, INPUT_EMBEDS) \
        if len(factors) == 1 and len(others) == 1 else None


def _rewrite(graph: gs.Graph, match: _Marked, settings: Settings) -> None:
    shape = tuple(match.x.shape)
    embeds = next((tensor for tensor in graph.inputs if tensor.name == match.name), None)
    if embeds is None:
        embeds = gs.Variable(match.name, np.float32, ("num_embeds", shape[-1]))
        graph.inputs.append(embeds)
    replace(graph, match.op, {"x": match.x, "embeds": embeds, "embed_ids": graph_input(
        graph, EMBED_IDS, shape[:-1])}, [match.output])


def require_one_reader(graph: gs.Graph, model: str, option: str) -> None:
    """Check that a model with `embeds` reads token ids in its embedding only.

    Args:
        option: what to do without, in errors.

    Raises:
        LlmcError: it reads them elsewhere, too, where a row has none; or it has no mark.
    """
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    if EMBEDS not in inputs:
        raise LlmcError(f"the code of '{model}' has no get_input_embeddings, so rows cannot "
                        f"replace its token embeddings; {option}")
    readers = [node for node in consumers(graph, inputs["input_ids"]) if node is not None]
    if len(readers) > 1:
        raise LlmcError(f"'{model}' reads token ids in {describe(readers[0])} and in "
                        f"{describe(readers[1])}, so rows cannot replace its token embeddings; "
                        f"{option}")
