"""What is known of a whole model: its sizes, and how its encoder is used."""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from llmc.compiler.frontend.raw import RawModel
from llmc.compiler.graph.rewrite import attends, caches, operands, row_weights, shard_of, values_of
from llmc.compiler.passes.packing import lm_head
from llmc.errors import LlmcError
from llmc.plugins.roles import ByVocabulary
from llmc.runtime.manifest import Dims, EncoderInfo


def describe_model(graph: gs.Graph, architecture: str, vocab_size: int) -> Dims:
    """The sizes of a fused graph that is not divided yet; `vocab_size` is that before padding.

    Raises:
        LlmcError: it does not attend causally.
    """
    attention = [node for node in graph.nodes if caches(node)]
    if not attention:
        raise LlmcError(f"the decoder of '{architecture}' has no causal self-attention")
    cache, _ = caches(attention[0])[0]
    fields = attention[0].attrs
    head = next(iter(row_weights(lm_head(graph)).values()))
    return Dims(num_layers=len(attention), hidden_size=_table(graph)[1],
                num_heads=fields["num_heads"], num_kv_heads=fields["num_kv_heads"],
                head_dim=fields["head_dim"], vocab_size=vocab_size,
                padded_vocab_size=values_of(head).shape[0], max_seq_len=cache.shape[2])


def describe_encoder(raw: RawModel, encoder: gs.Graph, max_seq_len: int) -> EncoderInfo:
    """What the runtime must know of an encoder-decoder model, of whose encoder this is the fused
    graph.

    Raises:
        LlmcError: nothing says which token the decoder begins with.
    """
    def ids(key: str) -> tuple[int, ...]:  # the config's own are not for generation
        return replace(raw, config={}).token_ids(key)

    start = raw.token_ids("decoder_start_token_id") or raw.token_ids("bos_token_id")
    if not start:
        raise LlmcError(f"'{raw.architecture}' does not say which token its decoder begins with; "
                        f"put decoder_start_token_id into generation_config.json")
    return EncoderInfo(
        num_layers=sum(attends(node) for node in encoder.nodes), max_seq_len=max_seq_len,
        vocab_size=_table(encoder)[0],
        decoder_start_token_id=start[0],
        forced_bos_token_ids=ids("forced_bos_token_id"),
        forced_eos_token_ids=ids("forced_eos_token_id"),
        bad_words=tuple(map(tuple, raw.generation.get("bad_words_ids") or ())))


def _table(graph: gs.Graph) -> tuple[int, ...]:
    """The shape of the table that tokens are looked up in, [vocabulary, hidden size]."""
    return next(values_of(operands(node)[way.table]).shape for node in graph.nodes
                if (way := shard_of(node, ByVocabulary)) is not None
                and operands(node)[way.ids].name == "input_ids")
