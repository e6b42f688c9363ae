"""Prompt files: each line has separate parameters, and an invalid one affects no other."""

import io
import json

import pytest

import llmc
from llmc import SamplingParams
from llmc.runtime.prompt_file import read_lines, read_requests, run_requests

pytestmark = pytest.mark.usefixtures("decisive")


@pytest.fixture(scope="module")
def llm(case_tp2):
    with llmc.LLM(case_tp2, max_batch_size=2) as loaded:
        yield loaded


def run(llm, *lines, defaults=None, **options):
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    requests = read_requests(llm, lines, defaults or SamplingParams(max_tokens=4), **options)
    return list(run_requests(llm, requests))


def tokens(result):
    return [completion["token_ids"] for completion in result["completions"]]


def test_each_request_has_separate_parameters(llm):
    results = run(
        llm, {"prompt": "the", "max_tokens": 9, "ignore_eos": True}, {"token_ids": [5, 6, 7]},
        {"prompt": "fox", "temperature": 0.9, "seed": 7, "n": 2, "logit_bias": {"5": -1.5}},
        {"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"},
                      {"role": "user", "content": "dog"}]},
        {"prompt": "the", "stop": "e", "bad_words": "fox", "logprobs": 1})
    expected = llm.generate(
        ["the", [5, 6, 7], "fox", "<user>the<assistant>fox<user>dog<assistant>", "the"],
        [SamplingParams(max_tokens=9, ignore_eos=True), SamplingParams(max_tokens=4),
         SamplingParams(max_tokens=4, temperature=0.9, seed=7, n=2, logit_bias={5: -1.5}),
         SamplingParams(max_tokens=4),
         SamplingParams(max_tokens=4, stop="e", bad_words="fox", logprobs=1)])
    assert [result["index"] for result in results] == [0, 1, 2, 3, 4]
    assert [made for result in results for made in tokens(result)] == \
        [completion.token_ids for completion in expected]
    assert [c["sample"] for c in results[2]["completions"]] == [0, 1]
    assert all(c["index"] == result["index"] for result in results for c in result["completions"])
    assert results[4]["completions"][0]["logprobs"]


@pytest.mark.parametrize(("line", "message"), [
    (b"not json", "this is not JSON"),
    (b"\xff\xfe\x00", "this is not JSON"),
    (b"[" * 100_000, "this is not JSON"),
    (b'["prompt"]', "this is not a JSON object"),
    ({}, "a request has one of prompt, token_ids, messages, not none"),
    ({"prompt": "a", "token_ids": [1]}, "not prompt and token_ids"),
    ({"prompt": 3}, "prompt is not a text"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": "\ud800"}, "not valid Unicode"),
    ({"prompt": "x" * 99}, "the KV cache has room for 64"),
    ({"token_ids": "12"}, "token_ids is '12'; give a list of token ids"),
    ({"token_ids": [1.5]}, "token_ids has 1.5 in place of a token id"),
    ({"token_ids": [True]}, "token_ids has True in place of a token id"),
    ({"token_ids": []}, "the prompt is empty"),
    ({"token_ids": [999]}, "token id 999 is not in the vocabulary"),
    ({"messages": []}, "messages is []; give a list like"),
    ({"messages": "the"}, "messages is not a list like"),
    ({"messages": [{"role": "user"}]}, "the content of message 0 is missing; give a text"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]},
     "takes neither images nor audio; give text only"),
    ({"messages": [{"role": "user", "content": "a"}, "b"]}, "message 1 is 'b'; give one like"),
    ({"prompt": "a", "temprature": 1}, "'temprature' is not a key of a request; there are: prompt"),
    ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'; give a number"),
    ({"prompt": "a", "temperature": -1}, "temperature -1.0 is not from 0"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature nan is not from 0 to 1000000"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens -1 is below 0"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens is 1.5; give a whole number"),
    ({"prompt": "a", "max_tokens": None}, "max_tokens is None; give a whole number"),
    ({"prompt": "a", "ignore_eos": 1}, "ignore_eos is 1; give True or False"),
    ({"prompt": "a", "stop": [""]}, "a stop string is empty"),
    ({"prompt": "a", "stop": [3]}, "stop is [3]; give a text"),
    ({"prompt": "a", "logit_bias": {"999": 1}}, "token id 999 is not in the vocabulary"),
    ({"prompt": "a", "logit_bias": {"05": 1}}, "'05' is not a token id"),
    ({"prompt": "a", "n": 10**6}, "n 1000000 is not from 1 to 65536"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "'x' is not a token id; write logit_bias like"),
])
def test_a_broken_line_gets_an_error_and_the_others_run(llm, line, message):
    first, broken, last = run(llm, {"prompt": "the", "id": "a"}, line, {"prompt": "fox"})
    assert broken["index"] == 1 and "completions" not in broken
    assert broken["error"].startswith("line 2: ") and message in broken["error"]
    assert tokens(first) == [llm.generate("the", SamplingParams(max_tokens=4))[0].token_ids]
    assert (first["id"], last["index"], "id" in last) == ("a", 2, False) and tokens(last)


def test_the_id_of_a_refused_request_is_in_its_result(llm):
    result, = run(llm, {"id": {"row": 4}, "prompt": "the", "top_p": 0})
    assert result == {"index": 0, "id": {"row": 4},
                      "error": "line 1: top_p 0.0 is not above 0 and at most 1; 1 keeps all tokens"}


def test_blank_lines_are_skipped_but_numbered(llm):
    results = run(llm, b"", {"prompt": "the"}, b"  ", b"x")
    assert [result["index"] for result in results] == [0, 1]
    assert results[1]["error"].startswith("line 4: ")


def test_chat_puts_prompts_into_the_template(llm):
    result, = run(llm, {"prompt": "the"}, chat=True)
    assert tokens(result) == [llm.generate("<user>the<assistant>",
                                           SamplingParams(max_tokens=4))[0].token_ids]


def test_results_are_written_in_order_as_soon_as_possible(llm):
    lines = [json.dumps({"prompt": "the", "max_tokens": count, "ignore_eos": True}).encode()
             for count in (2, 30, 3)]
    seen = []
    results = run_requests(llm, read_requests(llm, lines, SamplingParams()), seen.append)
    assert next(results)["index"] == 0 and len(seen) < 10
    assert [result["index"] for result in results] == [1, 2] and len(seen) == 35


def test_a_prompt_file_may_be_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "the"}\n\xff\n')))
    assert read_lines("-") == [b'{"prompt": "the"}', b"\xff"]
    with pytest.raises(llmc.LlmcError, match="^standard input has no request; write one a line"):
        read_lines("-")


@pytest.mark.parametrize(("content", "message"), [(b"", "has no request; write one a line"),
                                                  (b"\n \n", "has no request"),
                                                  (None, "cannot be read (No such file")])
def test_a_file_without_requests_is_refused(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(llmc.LlmcError) as error:
        read_lines(path)
    assert message in str(error.value) and str(path) in str(error.value)
