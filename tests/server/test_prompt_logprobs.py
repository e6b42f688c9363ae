"""Prompt log-probabilities by `echo` and `prompt_logprobs` equal LLM's.

The formats are those of OpenAI's completions and of vLLM.
"""

import json

import pytest
from server_process import serving

import llmc
from llmc.runtime.sampling.token_text import token_bytes
from llmc.server import prompt_logprobs
from llmc.server.token_names import token_names

pytestmark = pytest.mark.usefixtures("decisive")
GREEDY = dict(model="tiny", temperature=0)
TEXT = "the quick fox"


@pytest.fixture(scope="module")
def llm(case_tp1):
    with llmc.LLM(case_tp1) as own:
        yield own


def scored(llm, prompt, count, max_tokens=1):
    return llm.generate([prompt], llmc.SamplingParams(
        max_tokens=max_tokens, logprobs=count, prompt_logprobs=count))[0]


@pytest.mark.parametrize("prompt", [TEXT, [5, 6, 40, 99]])
def test_echo_begins_with_the_prompt(client, llm, prompt):
    text = prompt if isinstance(prompt, str) else llm.detokenize(prompt, skip_special_tokens=True)
    expected = llm.generate([prompt], llmc.SamplingParams(max_tokens=4))[0]
    answer = client.completions.create(prompt=prompt, max_tokens=4, echo=True, **GREEDY)
    assert answer.choices[0].text == text + expected.text
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == len(expected.token_ids)
    streamed = client.completions.create(prompt=prompt, max_tokens=4, echo=True, stream=True,
                                         **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text + expected.text


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_tokens_have_log_probabilities(client, llm, stream):
    expected = scored(llm, TEXT, 2, 3)
    ids = [*expected.prompt_token_ids, *expected.token_ids]
    answer = client.completions.create(prompt=TEXT, max_tokens=3, echo=True, logprobs=2,
                                       stream=stream, **GREEDY)
    told = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for part in answer if stream else [answer]:
        text += part.choices[0].text
        for name, values in told.items():
            values += getattr(part.choices[0].logprobs, name)
    assert told["tokens"] == [token_names([token], lambda own: token_bytes(llm.tokenizer, own))[
        token] for token in ids]
    assert told["token_logprobs"] == [None, *(
        own.chosen for own in (*expected.prompt_logprobs[1:], *expected.logprobs))]
    assert told["top_logprobs"][0] is None
    for top, own in zip(told["top_logprobs"][1:], expected.prompt_logprobs[1:], strict=False):
        assert {value for _, value in own.top} | {own.chosen} == {*top.values()}
    assert told["text_offset"] == sorted(told["text_offset"])
    for name, start in zip(told["tokens"], told["text_offset"], strict=True):
        assert name.startswith("bytes:") or text[start:].startswith(name)


def test_a_prompt_alone_is_echoed_without_new_tokens(client, llm):
    expected = scored(llm, TEXT, 1)
    answer = client.completions.create(prompt=[TEXT, "fox"], max_tokens=0, echo=True, logprobs=1,
                                       **GREEDY)
    first, second = answer.choices
    assert (first.text, first.finish_reason, second.text) == (TEXT, "length", "fox")
    assert first.logprobs.token_logprobs == [None, *(own.chosen for own in
                                                     expected.prompt_logprobs[1:])]
    assert answer.usage.completion_tokens == 0
    chunk, = client.completions.create(prompt=TEXT, max_tokens=0, echo=True, stream=True, **GREEDY)
    assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == (TEXT, "length")
    plain = client.completions.create(prompt=TEXT, max_tokens=0, **GREEDY)
    assert (plain.choices[0].text, plain.choices[0].finish_reason) == ("", "length")


def test_every_choice_echoes_its_prompt(client, llm):
    answer = client.completions.create(model="tiny", prompt=[TEXT, "fox"], n=2, max_tokens=2,
                                       seed=1, echo=True, logprobs=0, temperature=1)
    assert [choice.text.startswith(text) for choice, text in zip(
        answer.choices, (TEXT, TEXT, "fox", "fox"), strict=True)] == [True] * 4
    first, second = (choice.logprobs.token_logprobs[:-2] for choice in answer.choices[:2])
    assert first == second and len(first) == len(llm.tokenize(TEXT))


def check_vllms_form(llm, told, expected):
    assert told[0] is None
    for token, own, row in zip(expected.prompt_token_ids[1:], expected.prompt_logprobs[1:],
                               told[1:], strict=True):
        assert row[str(token)] == {"logprob": own.chosen, "rank": own.rank,
                                   "decoded_token": llm.detokenize([token])}
        assert {other: row[str(other)]["logprob"] for other, _ in own.top} == dict(own.top)
        assert [row[str(other)]["rank"] for other, _ in own.top] == [*range(1, len(own.top) + 1)]
        assert len(row) == len({token, *(other for other, _ in own.top)})


def test_prompt_logprobs_in_vllms_form(client, llm):
    extra = {"prompt_logprobs": 3}
    answer = client.completions.create(prompt=[TEXT, "fox"], max_tokens=2, extra_body=extra,
                                       **GREEDY)
    for choice, prompt in zip(answer.choices, (TEXT, "fox"), strict=True):
        check_vllms_form(llm, choice.prompt_logprobs, scored(llm, prompt, 3))
        assert choice.logprobs is None
    messages = [{"role": "user", "content": "the fox"}]
    chat = client.chat.completions.create(messages=messages, max_tokens=1, extra_body=extra,
                                          **GREEDY)
    check_vllms_form(llm, chat.prompt_logprobs, scored(llm, llm.chat_prompt(messages), 3))


@pytest.mark.parametrize(("extra", "said"), [
    ({"prompt_logprobs": 21}, "prompt_logprobs is 21, expected at most 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs: Input should be greater"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs is not supported with stream"),
    ({"prompt_logprobs": 1, "use_beam_search": True, "n": 2}, "does not go with beam_width 2")])
def test_unscorable_prompts_get_400(server, extra, said):
    for path, body in (("/v1/completions", {"prompt": TEXT}),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})):
        status, _, told = server.post(path, {**body, "max_tokens": 2, **extra})
        assert status == 400 and said in told["error"]["message"]


def test_the_number_of_logprobs_per_request_is_limited(monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "MAX_VALUES", 12)
    prompt_logprobs.check_values([[1] * 4], 2)
    prompt_logprobs.check_values([[1] * 400], None)
    with pytest.raises(llmc.LlmcError, match="has 16 log-probabilities .* at most 12"):
        prompt_logprobs.check_values([[1] * 4, [1] * 4], 1)


def test_tokenizer_info_is_served_with_an_option(server, case_tp1):
    assert server.post("/tokenizer_info", {})[0] == 404
    assert "/tokenizer_info" not in json.loads(server.get("/openapi.json"))["paths"]
    with serving(case_tp1, "--enable_tokenizer_info_endpoint") as own:
        info = json.loads(own.get("/tokenizer_info"))
        assert "/tokenizer_info" in json.loads(own.get("/openapi.json"))["paths"]
    assert (info["eos_token"], info["bos_token"]) == ("</s>", "<s>")
    assert info["tokenizer_class"] and "<assistant>" in info["chat_template"]
