"""Request bodies: null means unset for every optional field."""

import pytest

from llmc.server.openapi import OPERATIONS
from llmc.server.protocol import Body, ChatRequest

REQUIRED = {
    "ChatRequest": {"messages": [{"role": "user", "content": "a"}]},
    "CompletionRequest": {}, "ResponsesRequest": {"input": "a"},
    "MessagesRequest": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "CountTokensRequest": {"messages": [{"role": "user", "content": "a"}]},
    "TokenizeRequest": {}, "DetokenizeRequest": {"tokens": [1]},
    "ClassifyRequest": {"input": "a"}, "EmbeddingRequest": {"input": "a"},
    "PoolingRequest": {"input": "a"},
    "RerankRequest": {"query": "a", "documents": ["b"]},
    "ScoreRequest": {"text_1": "a", "text_2": "b"},
    "TranscriptionRequest": {}, "TranslationRequest": {}}
BODIES = {own.body for own in OPERATIONS if own.body is not None}


@pytest.mark.parametrize("kind", sorted(BODIES, key=lambda own: own.__name__))
def test_null_means_unset(kind: type[Body]):
    given = REQUIRED[kind.__name__]
    expected = kind.model_validate(given)
    optional = [name for name, field in kind.model_fields.items() if not field.is_required()]
    assert kind.model_validate(given | dict.fromkeys(optional)) == expected
    read = kind.model_validate(given | {"of_nobody": None} | dict.fromkeys(kind.REFUSED))
    assert read == expected and read.ignored == []


def test_null_means_unset_in_nested_fields():
    given = {"messages": [{"role": "user", "content": "a", "name": None, "tool_calls": None}],
             "stream_options": {"include_usage": None}, "tools": [
                 {"type": "function", "function": {"name": "f", "parameters": None}}]}
    body = ChatRequest.model_validate(given)
    assert not body.include_usage and body.tools[0].function.parameters is None


def test_null_is_allowed_by_the_described_schema():
    told = ChatRequest.model_json_schema()
    for name, own in told["properties"].items():
        assert ({"type": "null"} in own.get("anyOf", ())) == (name != "messages"), name


def test_null_is_refused_for_a_required_field():
    with pytest.raises(ValueError, match="messages"):
        ChatRequest.model_validate({"messages": None})
