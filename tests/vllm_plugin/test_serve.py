"""`vllm serve CASE_DIR` through the `openai` client."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from server_process import until
from vllm_cases import case, own
from vllm_server import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(case(1), tmp_path_factory.mktemp("serve") / "log", "--max-model-len", "512")
    yield made
    made.process.terminate()
    try:
        assert made.process.wait(30) == 0, made.log.read_text()[-3000:]
    finally:
        made.kill()


def chat(server, **wishes):
    return server.client.chat.completions.create(
        model="smollm2", messages=QUESTION, **{"max_tokens": 16, "temperature": 0, **wishes})


def test_a_chat_is_llmc_s_own(server):
    (wanted,) = own(1, [{"messages": QUESTION, "max_tokens": 16}])
    assert chat(server).choices[0].message.content == wanted["text"]
    assert [model.id for model in server.client.models.list()] == ["smollm2"]


def test_a_stream_and_its_usage(server):
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat(server).choices[0].message.content
    assert chunks[-1].usage.completion_tokens == chat(server).usage.completion_tokens


def test_logprobs_and_penalties(server):
    (place, *_) = chat(server, logprobs=True, top_logprobs=3, presence_penalty=0.5,
                       seed=3).choices[0].logprobs.content
    assert len(place.top_logprobs) == 3
    assert place.logprob == pytest.approx(place.top_logprobs[0].logprob)


def test_a_schema_is_followed(server):
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
              "required": ["city"], "additionalProperties": False}
    made = chat(server, max_tokens=60, temperature=1, seed=1, response_format={
        "type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})
    assert set(json.loads(made.choices[0].message.content)) == {"city"}


def test_what_cannot_be_had_is_the_client_s_error(server):
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs is not supported for a "
                                                     "model compiled by llmc; leave it out"):
        chat(server, extra_body={"prompt_logprobs": 1})
    assert chat(server).choices


def test_a_client_that_leaves_frees_its_blocks(server):
    stream = chat(server, stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(iter(stream))
    until(lambda: server.metric("vllm:num_requests_running") == 1)
    stream.close()
    until(lambda: not server.metric("vllm:num_requests_running")
          and not server.metric("vllm:kv_cache_usage_perc"))


def test_replicas_share_the_work_and_verify_drafts(tmp_path):
    made = Server(case(1), tmp_path / "log", "--max-model-len", "512", "--data-parallel-size", "2",
                  "--speculative-config", json.dumps(
                      {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}))
    try:
        with ThreadPoolExecutor(4) as callers:
            texts = {answer.choices[0].message.content
                     for answer in callers.map(lambda _: chat(made), range(4))}
        counts = made.generated_tokens()
        assert len(texts) == 1 and len(counts) == 2 and min(counts) > 0
        made.client.completions.create(model="smollm2", prompt=[500, 600, 700, 800, 900] * 8,
                                       max_tokens=40, temperature=0)
        assert sum(made.metrics("vllm:spec_decode_num_accepted_tokens_total")) > 0
    finally:
        made.kill()
