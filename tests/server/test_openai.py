"""The `openai` client against a real server process gives LLM's results."""

import asyncio
import json

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import serving

import llmc
from llmc.server.token_names import token_names

pytestmark = pytest.mark.usefixtures("decisive")
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}]
GREEDY = dict(model="tiny", temperature=0)


@pytest.fixture(scope="module")
def llm(case_tp1):
    with llmc.LLM(case_tp1) as own:
        yield own


def greedy(llm, prompt, count, **params):
    return llm.generate([prompt], llmc.SamplingParams(max_tokens=count, **params))[0]


def test_chat(client, llm):
    prompt = llm.chat_prompt(MESSAGES)
    expected = greedy(llm, prompt, 12)
    answer = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=12, **GREEDY)
    choice, = answer.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason and answer.model == "tiny"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == len(prompt) + len(expected.token_ids)


def test_chat_in_a_stream(client, llm):
    expected = greedy(llm, llm.chat_prompt(MESSAGES), 12)
    chunks = list(client.chat.completions.create(
        messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True},
        **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == expected.text
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_max_tokens_an_answer_may_fill_the_cache(client, llm):
    answer = client.chat.completions.create(messages=MESSAGES, extra_body={"ignore_eos": True},
                                            **GREEDY)
    assert answer.usage.total_tokens == llm.manifest.dims.max_seq_len
    assert answer.choices[0].finish_reason == "length"


def test_completions_of_texts_and_token_ids(client, llm):
    for prompts in ("the quick", ["the quick", "fox"], [5, 6, 7], [[5, 6, 7], [8, 9]]):
        several = not isinstance(prompts, str) and not isinstance(prompts[0], int)
        expected = llm.generate(prompts if several else [prompts],
                                llmc.SamplingParams(max_tokens=16))
        answer = client.completions.create(prompt=prompts, **GREEDY)
        assert [c.text for c in answer.choices] == [own.text for own in expected]
        assert [c.index for c in answer.choices] == [*range(len(expected))]
        assert answer.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in expected)
        texts = dict.fromkeys(range(len(expected)), "")
        for chunk in client.completions.create(prompt=prompts, stream=True, **GREEDY):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert [*texts.values()] == [own.text for own in expected]


def test_n_completions_with_a_seed(client, llm):
    params = dict(temperature=0.9, seed=3, n=3)
    expected = llm.generate([[5, 6]], llmc.SamplingParams(max_tokens=8, **params))
    answer = client.completions.create(model="tiny", prompt=[5, 6], max_tokens=8, **params)
    assert [c.text for c in answer.choices] == [own.text for own in expected]


@pytest.mark.parametrize("params", [
    dict(stop=["e"]), dict(stop="o"), dict(logit_bias={"40": 100}), dict(presence_penalty=1.5),
    dict(frequency_penalty=2.0), dict(seed=5, temperature=0.8, top_p=0.9), dict(seed=-1, top_k=4),
    dict(seed=2, temperature=1.2, min_p=0.2), dict(repetition_penalty=1.8), dict(min_tokens=4),
    dict(ignore_eos=True), dict(stop_token_ids=[40, 41]), dict(priority=3),
    dict(bad_words=["fox"]), dict(top_k=-1),
    dict(seed=9, typical_p=0.5), dict(user="someone", unknown=3)])
def test_parameters_match_the_runtime_s(client, llm, params):
    given = dict(params)
    for name in ("priority", "user", "unknown"):
        given.pop(name, None)
    if "logit_bias" in given:
        given["logit_bias"] = {40: 100}
    if "seed" in given:
        given = {"temperature": 1.0, **given, "seed": given["seed"] % 2**64}
    given["top_k"] = max(given.get("top_k", 0), 0)
    expected = greedy(llm, [5, 6, 7], 12, **given)
    answer = client.completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=12,
        extra_body={} | ({} if "seed" in params else {"temperature": 0}) | params)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason


def speculation(server):
    """Values of the metrics of drafts, by name and position."""
    return {(sample.name, sample.labels.get("position")): sample.value
            for own in text_string_to_metric_families(server.get("/metrics"))
            for sample in own.samples if sample.name.startswith("vllm:spec_decode")
            and sample.name.endswith("_total")}


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_prediction_is_counted_in_the_usage(server, in_parts):
    # Tokens of a word each, which do not repeat.
    given = dict(GREEDY, max_tokens=7, presence_penalty=2, n=2,
                 logit_bias=dict.fromkeys(map(str, range(284, 291)), 100))
    for create, prompt in ((server.client.chat.completions.create, {"messages": MESSAGES}),
                           (server.client.completions.create, {"prompt": "the"})):
        alone = create(**prompt, **given)
        text = alone.choices[0].message.content if "messages" in prompt else alone.choices[0].text
        parts = [{"type": "text", "text": part} for part in (text[:9], text[9:])]
        given_text = {"prediction": {"type": "content", "content": parts if in_parts else text}}
        before = speculation(server)
        whole = create(**prompt, **given, extra_body=given_text)
        after = speculation(server)
        *_, last = create(**prompt, **given, extra_body=given_text, stream=True,
                          stream_options={"include_usage": True})
        assert [(own.index, own.finish_reason, getattr(own, "text", getattr(own, "message", "")))
                for own in whole.choices] == [
            (own.index, own.finish_reason, getattr(own, "text", getattr(own, "message", "")))
            for own in alone.choices]
        for usage, accepted in ((alone.usage, 0), (whole.usage, 8), (last.usage, 8)):
            details = usage.completion_tokens_details
            assert details.accepted_prediction_tokens == accepted
            assert details.rejected_prediction_tokens == 0
        # Of each choice, drafts follow two tokens, and precede the last one.
        assert {(name.removeprefix("vllm:spec_decode_num_"), place): value - before[name, place]
                for (name, place), value in after.items() if value != before[name, place]} == {
            ("drafts_total", None): 2, ("draft_tokens_total", None): 8,
            ("accepted_tokens_total", None): 8,
            **{("accepted_tokens_per_pos_total", str(place)): 2 for place in range(4)}}


def test_an_absent_prediction_is_not_counted(client):
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=3, prediction=None,
                                            **GREEDY)
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


@pytest.mark.parametrize(("prediction", "more", "message"), [
    ("the fox", {}, "prediction: Input should be an object"),
    ({"content": "x"}, {}, "prediction.type: Field required"),
    ({"type": "text", "content": "x"}, {}, "prediction.type: Input should be 'content'"),
    ({"type": "content"}, {}, "prediction.content: Field required"),
    ({"type": "content", "content": None}, {},
     "prediction.content.string: Input should be a valid string"),
    ({"type": "content", "content": [5]}, {}, "prediction.content.array.0: Input should be an"),
    ({"type": "content", "content": [{"type": "image_url", "text": "x"}]}, {},
     "prediction.content.array.0.type: Input should be 'text'"),
    ({"type": "content", "content": "fox" * 200}, {}, "your prediction has 400 tokens"),
    ({"type": "content", "content": "x"}, {"use_beam_search": True, "n": 2},
     "prediction does not go with beam_width 2")])
def test_an_invalid_prediction_is_refused(server, prediction, more, message):
    for path, prompt in (("/v1/chat/completions", {"messages": MESSAGES}),
                         ("/v1/completions", {"prompt": "the"})):
        status, _, answer = server.post(path, {**prompt, "prediction": prediction, **more})
        assert status == 400 and message in answer["error"]["message"], answer
        assert answer["error"]["param"] == "prediction"


def test_usage_reports_cached_prompt_tokens(client):
    prompt = [7 + index for index in range(40)]
    for again in (False, True):
        whole = client.completions.create(prompt=prompt, max_tokens=2, **GREEDY)
        *_, last = client.completions.create(prompt=[prompt, prompt[::-1]], max_tokens=2,
                                             stream=True, stream_options={"include_usage": True},
                                             **GREEDY)
        assert (whole.usage.prompt_tokens_details.cached_tokens > 0) == again
        assert last.usage.prompt_tokens_details.cached_tokens >= 16 * (1 + again)
        assert last.usage.prompt_tokens == 80


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_is_returned(client, llm, ignore_eos):
    free = greedy(llm, [5, 6, 7], 12, ignore_eos=True)
    ends = free.token_ids[5]
    count = free.token_ids.index(ends) + 1
    extra = {"stop_token_ids": [ends], "ignore_eos": ignore_eos}
    answer = client.completions.create(prompt=[5, 6, 7], max_tokens=12, extra_body=extra, **GREEDY)
    choice, = answer.choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", ends)
    assert choice.text == llm.detokenize(free.token_ids[:count - 1], skip_special_tokens=True)
    assert answer.usage.completion_tokens == count
    later = client.completions.create(prompt=[5, 6, 7], max_tokens=12, **GREEDY, extra_body={
        **extra, "min_tokens": count})
    assert later.usage.completion_tokens > count
    *_, last = client.chat.completions.create(
        messages=MESSAGES, max_tokens=3, stream=True, **GREEDY,
        extra_body={"stop_token_ids": [*range(40, 100)]})
    assert hasattr(last.choices[0], "stop_reason")


def test_log_probabilities(client, llm):
    expected = greedy(llm, [5, 6], 5, logprobs=3)
    told = client.completions.create(prompt=[5, 6], max_tokens=5, logprobs=3,
                                     **GREEDY).choices[0].logprobs
    assert told.token_logprobs == [own.chosen for own in expected.logprobs]
    texts = [llm.detokenize([token]) for token in expected.token_ids]
    assert [name for name in told.tokens if not name.startswith("bytes:")] == \
        [text for text in texts if "\ufffd" not in text]
    assert told.text_offset[0] == 0
    assert [max(top.values()) for top in told.top_logprobs] == told.token_logprobs
    prompt = llm.chat_prompt(MESSAGES)
    expected = greedy(llm, prompt, 5, logprobs=2)
    arguments = dict(messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2, **GREEDY)
    whole = client.chat.completions.create(**arguments).choices[0].logprobs.content
    assert [own.logprob for own in whole] == [own.chosen for own in expected.logprobs]
    assert [[top.logprob for top in own.top_logprobs] for own in whole] == \
        [[value for _, value in own.top] for own in expected.logprobs]
    streamed = [own for chunk in client.chat.completions.create(stream=True, **arguments)
                if chunk.choices[0].logprobs for own in chunk.choices[0].logprobs.content]
    assert streamed == whole


def test_log_probabilities_of_parts_of_characters(client):
    text = "🦀 ok 龍"
    arguments = dict(max_tokens=20, extra_body={"guided_choice": [text]}, **GREEDY)
    whole = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=20,
                                           **arguments).choices[0]
    told = whole.logprobs.content[:-1]  # without the EOS token
    assert bytes(byte for token in told for byte in token.bytes) == text.encode()
    assert told[0].token == "\ufffd" and len(told[0].bytes) < 4
    choice = client.completions.create(prompt=[5, 6], logprobs=20, **arguments).choices[0]
    assert choice.text == text and max(choice.logprobs.text_offset) <= len(text)
    assert choice.logprobs.tokens[0].startswith("bytes:\\xf0")
    assert {len(top) for top in choice.logprobs.top_logprobs} <= {20, 21}  # with the sampled token
    assert [top[name] for name, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs,
                                           strict=True)] == choice.logprobs.token_logprobs
    parts = client.completions.create(prompt=[5, 6], logprobs=20, stream=True, **arguments)
    streamed = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs]
    for name in ("tokens", "text_offset", "top_logprobs"):
        assert [own for each in streamed for own in getattr(each, name)] == \
            getattr(choice.logprobs, name)


def test_names_of_tokens_with_the_same_text_are_distinct():
    own = {5: b"a", 6: b"a", 7: b"", 8: b" \xf0"}
    assert token_names([5, 6, 7, 8, 5], own.__getitem__) == {
        5: "a", 6: "token_id:6", 7: "token_id:7", 8: "bytes: \\xf0"}


def test_beam_search_gives_all_beams_best_first(client, llm):
    params = llmc.SamplingParams(max_tokens=8, beam_width=3, length_penalty=0.5)
    beams = llm.beam_search([[5, 6]], params)
    texts = [llm.detokenize(beams.output_ids[:length, 0, beam].tolist(), skip_special_tokens=True)
             for beam, length in enumerate(beams.sequence_length[0])]
    for stream in (False, True):
        answer = client.completions.create(
            model="tiny", prompt=[5, 6], max_tokens=8, n=3, stream=stream,
            extra_body={"use_beam_search": True, "length_penalty": 0.5})
        got = ["", "", ""]
        for part in answer if stream else [answer]:
            for choice in part.choices:
                got[choice.index] += choice.text
        assert got == texts


def test_unsupported_parameters_are_refused_by_name(client):
    for name, value in (("suffix", "x"), ("best_of", 4), ("truncate_prompt_tokens", 1)):
        with pytest.raises(openai.BadRequestError, match=f"{name} is not supported") as caught:
            client.completions.create(model="tiny", prompt="the", extra_body={name: value})
        assert caught.value.param == name
        assert caught.value.body["type"] == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="message 0 has an image"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:,"}}]}])


@pytest.mark.parametrize(("given", "said"), [
    (dict(temperature=-1), "temperature -1.0 is "), (dict(top_p=3), "top_p 3.0 is not"),
    (dict(max_tokens=-1), "max_tokens -1 is below 0"), (dict(logprobs=50), "at most 20"),
    (dict(prompt=[5000]), "5000 is not in the vocabulary of 300"), (dict(prompt=""), "is empty"),
    (dict(prompt=[]), "prompts is empty"), (dict(prompt=[5] * 100), "prompt has 100 tokens"),
    (dict(n=1000), "n: Input should be less than or equal to 128"),
    (dict(prompt=[[5]] * 100, n=2), "maximum of 128 choices"),
    (dict(logit_bias={"5000": 1}), "token id 5000 is not in the vocabulary"),
    (dict(logit_bias=dict.fromkeys(map(str, range(20_000)), 1)), "give at most 16384"),
    (dict(extra_body={"bad_words": ["a"] * 1025}), "give at most 1024")])
def test_invalid_requests_get_400(client, given, said):
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(**{"model": "tiny", "prompt": [5, 6], **given})


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'") as caught:
        client.completions.create(model="gpt-4", prompt="the")
    assert caught.value.code == "model_not_found"
    assert [own.id for own in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 64
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_paths_of_vllm_s_server(server, llm):
    assert server.get("/health") == "" and llmc.__version__ in server.get("/version")
    ids = llm.tokenize("the quick fox")
    status, _, told = server.post("/tokenize", {"prompt": "the quick fox",
                                                "return_token_strs": True})
    assert status == 200 and told["tokens"] == ids and told["count"] == len(ids)
    assert "".join(told["token_strs"]) == "the quick fox" and told["max_model_len"] == 64
    assert server.post("/detokenize", {"tokens": ids})[2] == {"prompt": "the quick fox"}
    assert server.post("/tokenize", {"messages": MESSAGES})[2]["tokens"] == \
        llm.chat_prompt(MESSAGES)
    assert server.post("/detokenize", {"tokens": [999]})[0] == 400
    status, _, told = server.post("/nowhere", {})
    assert status == 404 and told["error"]["message"] == "unknown path /nowhere"


def test_concurrent_requests_get_the_same_answers_as_alone(server, llm):
    prompts = [[5 + index, 9, 40] for index in range(16)]
    expected = [own.text for own in llm.generate(prompts, llmc.SamplingParams(max_tokens=20))]

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            async def one(prompt):
                chunks = await client.completions.create(prompt=prompt, max_tokens=20, stream=True,
                                                         **GREEDY)
                return "".join([chunk.choices[0].text async for chunk in chunks])
            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(main()) == expected


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99},
                                           "y": {"type": "boolean"}},
          "required": ["x", "y"], "additionalProperties": False}


@pytest.mark.parametrize("given", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}},
    {"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}}])
def test_an_answer_follows_a_schema(client, given):
    for stream in (False, True):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, seed=1, max_tokens=40, stream=stream, extra_body=given)
        text = "".join(part.choices[0].delta.content or "" for part in answer) if stream \
            else answer.choices[0].message.content
        assert {*json.loads(text)} == {"x", "y"}


def test_answers_follow_regexes_choices_and_grammars(client):
    def text(**given):
        return client.completions.create(model="tiny", prompt=[5, 6], seed=2, max_tokens=40,
                                         extra_body=given).choices[0].text

    assert text(guided_regex="[ab]{3}") in {a + b + c for a in "ab" for b in "ab" for c in "ab"}
    assert text(structured_outputs={"choice": ["one", "two"]}) in ("one", "two")
    assert text(guided_grammar='start: "q" "r"') == "qr"
    assert text(structured_outputs={"json_object": True}, logit_bias={"96": 50}).startswith("{")
    with pytest.raises(openai.BadRequestError, match="the grammar cannot be compiled"):
        text(guided_regex="(")
    with pytest.raises(openai.BadRequestError, match="has no json_schema"):
        text(response_format={"type": "json_schema"})


def test_an_encoder_decoder_model_serves_completions(encoder_decoder):
    _, _, cases = encoder_decoder("t5")
    case = cases["tp1"]
    with llmc.LLM(case) as llm:
        expected = llm.generate(["w5 w9 w7", "w3"], llmc.SamplingParams(max_tokens=8))
    with serving(case) as server:
        answer = server.client.completions.create(prompt=["w5 w9 w7", "w3"], max_tokens=8, **GREEDY)
        assert [own.text for own in answer.choices] == [own.text for own in expected]
        assert answer.usage.prompt_tokens == sum(len(own.prompt_token_ids) for own in expected)
        with pytest.raises(openai.BadRequestError, match="without chat"):
            server.client.chat.completions.create(messages=MESSAGES, **GREEDY)
