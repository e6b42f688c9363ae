"""Reasoning is split from the answer at any chunking, in every API."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from llmc.runtime.core.request import CompletionChunk
from llmc.server.chat import ChatAnswer
from llmc.server.messages import MessageAnswer, MessagesRequest
from llmc.server.model import GenerationJob
from llmc.server.output_parser import with_marks
from llmc.server.protocol import ChatRequest, ResponsesRequest
from llmc.server.reasoning import ReasoningParser, recognized_reasoning
from llmc.server.response_store import ResponseStore
from llmc.server.responses import ResponseAnswer, ResponseJob
from llmc.server.tool_parsers import merged

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), [
    ("think", "<assistant>", "<think>\nHm, <b>.\n</think>\n\nYes.\n", "Hm, <b>.", "Yes.\n"),
    ("think", "<assistant><think>\n", "Hm.\n\n</think>\n\nYes.", "Hm.", "Yes."),
    ("think", "<assistant><think>", "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    ("think", "<think>\n\n</think>\n\n", "Yes. <think>", "", "Yes. <think>"),
    ("think", "", " Yes.", "", " Yes."), ("think", "", "<thin", "", "<thin"),
    ("think", "<think>", "Hm. \n</thin", "Hm. \n</thin", ""), ("think", "<think>", "", "", ""),
    ("think", "", "<think></think>Yes.", "", "Yes."),
    ("mistral", "[/INST]", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("seed_oss", "", "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes.")])
def test_reasoning_is_split_at_every_chunk_size(name, prompt, text, reasoning, content):
    for size in range(1, len(text) + 2):
        parser = ReasoningParser(name, prompt)
        deltas = [delta for at in range(0, len(text), size)
                  for delta in parser.push(text[at:at + size])]
        told, _, thought = merged([*deltas, *parser.finish()])
        assert (told, thought) == (content, reasoning), size


def test_a_template_selects_the_reasoning_parser():
    assert recognized_reasoning("{{ m.content.split('</think>')[-1] }}") == "think"
    assert recognized_reasoning("[THINK]") == "mistral" and recognized_reasoning("<a>") is None


def model(prompt_end="<think>\n", special=()):
    return SimpleNamespace(
        name="m", tool_call_parser="hermes", reasoning_parser="think", shows_tools=True,
        special_tokens=frozenset(special),
        llm=SimpleNamespace(detokenize=lambda tokens, skip_special_tokens=False: prompt_end))


async def batches(pieces):
    for piece in pieces:
        yield [piece]


def events(answer, pieces):
    async def all_():
        return b"".join([own async for own in answer.stream(batches(pieces))])
    lines = asyncio.run(all_()).decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def pieces_of(text):
    return [*(CompletionChunk(0, 0, 5, own, None) for own in text),
            CompletionChunk(0, 0, 6, "", "stop")]


PIECES = pieces_of(f"I add.\n</think>\n\nWait.\n{CALL}")
MESSAGES = [{"role": "user", "content": "a"}]


def test_a_chat_completion_has_reasoning_content_and_tool_calls():
    body = ChatRequest.model_validate({"messages": MESSAGES, "tools": [TOOL]})
    job = GenerationJob([[1]], body.sampling(99, None))
    whole = json.loads(asyncio.run(ChatAnswer(model(), body, job).json(batches(PIECES))))
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I add.", "Wait.")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 1}'}
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 15
    deltas = [own["choices"][0]["delta"] for own in events(ChatAnswer(model(), body, job), PIECES)]
    content, calls, reasoning = merged(deltas)
    assert (content, reasoning) == ("Wait.", "I add.")
    assert calls[0]["function"]["arguments"] == '{"x": 1}'


def test_a_response_has_reasoning_and_tool_calls_as_items():
    body = ResponsesRequest.model_validate({"input": "a", "tools": [
        {"type": "function", "name": "add"}]})
    job = ResponseJob([[1]], body.sampling(99, None))
    store = ResponseStore(10**6, 60)
    whole = json.loads(asyncio.run(ResponseAnswer(store, model(), body, job).json(batches(PIECES))))
    told = events(ResponseAnswer(store, model(), body, job), PIECES)
    for response in (whole, told[-1]["response"]):
        thought, said, called = response["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "I add."}]
        assert said["content"][0]["text"] == "Wait."
        assert (called["name"], called["arguments"]) == ("add", '{"x": 1}')
        assert {own["status"] for own in response["output"]} == {response["status"]} == \
            {"completed"}
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 15
    assert "".join(own["delta"] for own in told
                   if own["type"] == "response.reasoning_text.delta") == "I add."
    assert [own["sequence_number"] for own in told] == [*range(len(told))]


def test_a_message_has_thinking_and_tool_use_blocks():
    body = MessagesRequest.model_validate({
        "messages": MESSAGES, "max_tokens": 99, "tools": [{"name": "add", "input_schema": {}}]})
    job = GenerationJob([[1]], body.sampling(99, None))
    whole = json.loads(asyncio.run(MessageAnswer(model(), body, job).json(batches(PIECES))))
    assert [own["type"] for own in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][0]["thinking"] == "I add." and whole["stop_reason"] == "tool_use"
    assert whole["content"][2]["input"] == {"x": 1}
    kinds = [own["type"] for own in events(MessageAnswer(model(), body, job), PIECES)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_special_reasoning_tokens_are_decoded():
    body = ChatRequest.model_validate({"messages": MESSAGES})
    params = body.sampling(9, None)
    assert not with_marks(model(), body, params).show_special_tokens
    assert with_marks(model(special=["</think>"]), body, params).show_special_tokens
    assert not with_marks(model(special=["<tool_call>"]), body, params).show_special_tokens
    body = ChatRequest.model_validate({"messages": MESSAGES, "tools": [TOOL]})
    assert with_marks(model(special=["<tool_call>"]), body, params).show_special_tokens


def test_grammar_output_is_content():
    body = ChatRequest.model_validate({"messages": MESSAGES, "guided_regex": "a"})
    job = GenerationJob([[1]], body.sampling(9, None))
    whole = json.loads(asyncio.run(ChatAnswer(model(), body, job).json(batches(pieces_of("a")))))
    assert whole["choices"][0]["message"]["content"] == "a"
