"""The Harmony channels of gpt-oss, for every chunking of the text."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.core.request import CompletionChunk
from llmc.server.chat import ChatAnswer
from llmc.server.model import GenerationJob
from llmc.server.output_parser import with_marks
from llmc.server.protocol import ChatRequest
from llmc.server.tool_parsers import Harmony, merged

START = "<|start|>assistant"
THINK = "<|channel|>analysis<|message|>User asks 2 < 3.<|end|>"
FINAL = "<|channel|>final<|message|>Yes: <b>2 < 3</b> <|maybe"
CALL = ('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": [1, "<|"]}'
        "<|call|>")
BEFORE = (' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}'
          "<|call|>")
OTHER = "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}<|call|>"
PREAMBLE = "<|channel|>commentary<|message|>I look it up.<|end|>"
ADD, WEATHER = ("add", {"x": [1, "<|"]}), ("get_weather", {"city": "Oslo"})
REASON, ANSWER = "User asks 2 < 3.", "Yes: <b>2 < 3</b> <|maybe"


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), [
    (THINK + START + FINAL, REASON, ANSWER, []),
    (THINK + START + FINAL + "<|return|>", REASON, ANSWER, []),
    (FINAL, "", ANSWER, []), ("", "", "", []), (THINK, REASON, "", []),
    (THINK + START + CALL, REASON, "", [ADD]),
    (THINK + START + CALL.removesuffix("<|call|>"), REASON, "", [ADD]),  # its end-of-message token
    (START + BEFORE, "", "", [WEATHER]),
    (THINK + START + PREAMBLE + START + CALL + START + BEFORE, REASON, "I look it up.",
     [ADD, WEATHER]),
    (THINK + START + OTHER, REASON, "{}", []), ("<|channel|>analysis<|mess", "", "", [])])
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 250), max_size=40))
def test_harmony_channels_are_separated(text, reasoning, content, calls, cuts):
    own = Harmony({"add": None, "get_weather": None})
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    deltas = [delta for start, end in zip([0, *ends], ends, strict=False)
              for delta in own.push(text[start:end])]
    told, found, thought = merged([*deltas, *own.finish()])
    assert (told, thought) == (content, reasoning)
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in found] == calls
    assert len({call["id"] for call in found}) == len(calls) == own.calls


def test_known_content_is_streamed_immediately():
    own = Harmony({"add": None})
    assert [*own.push("<|channel|>analysis<|message|>Hm")] == [{"reasoning_content": "Hm"}]
    assert [*own.push(", so<|en")] == [{"reasoning_content": ", so"}]
    assert [*own.push("d|><|start|>assistant<|channel|>final<|message|>A")] == [{"content": "A"}]


def test_answers_have_reasoning_and_tool_calls_whole_and_streamed():
    model = SimpleNamespace(name="m", tool_call_parser="harmony", reasoning_parser=None,
                            special_tokens=frozenset())
    body = ChatRequest.model_validate({
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "add"}}]})
    job = GenerationJob([[1]], with_marks(model, body, body.sampling(9, None)))
    assert job.params.show_special_tokens
    texts = [*(THINK + START + CALL).removesuffix("<|call|>"), ""]
    pieces = [*(CompletionChunk(0, 0, 5, text, None) for text in texts[:-1]),
              CompletionChunk(0, 0, 6, "", "stop")]
    choice = ChatAnswer(model, body, job).choice(0, pieces)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == REASON
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    answer = ChatAnswer(model, body, job)
    chunks = [chunk for piece in pieces for chunk in answer.deltas(0, piece)]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    deltas = [chunk["delta"] for chunk in chunks[1:]]
    assert "".join(own.get("reasoning_content", "") for own in deltas) == REASON
    assert json.loads(merged(deltas)[1][0]["function"]["arguments"]) == ADD[1]
    guided = body.model_copy(update={"tools": [], "guided_regex": "a"})
    assert not with_marks(model, guided, guided.sampling(9, None)).show_special_tokens

