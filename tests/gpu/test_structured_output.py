"""Structured output on a GPU gives valid texts and the tokens of the cpu target."""

import json
import re
import threading

import jsonschema
import pytest

import llmc

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9},
                                           "y": {"type": "string", "maxLength": 8}},
          "required": ["x", "y"], "additionalProperties": False}


@pytest.fixture(scope="module")
def llm(extension, tiny_hf, tmp_path_factory):
    path = tmp_path_factory.mktemp("guides") / "case"
    llmc.compile(tiny_hf, path, target="cuda", dtype="float32")
    with llmc.LLM(path) as own:
        yield own


@pytest.mark.parametrize("guide", [
    dict(guided_json=SCHEMA), dict(guided_regex="(ab|c){1,5}d{2}"),
    dict(guided_choice=["yes", "no, never", "\"maybe\"\n"]),
    dict(guided_grammar='start: "x" /[0-9]{1,3}/ ("," start)?', logit_bias={2: 3.0})])
def test_the_text_is_the_cpu_target_s(llm, case_tp1, guide):
    """Greedy and random sampling."""
    params = [llmc.SamplingParams(max_tokens=60, seed=3, temperature=t, n=1 + 3 * bool(t), **guide)
              for t in (0.0, 1.0)]
    with llmc.LLM(case_tp1) as on_cpu:
        for own in params:
            wanted, got = ([made.text for made in side.generate([[5, 6]], own)]
                           for side in (on_cpu, llm))
            assert got == wanted


def test_constrained_and_free_requests_share_steps(llm):
    made = {}
    given = [llmc.SamplingParams(max_tokens=60, temperature=1.0, seed=seed, **guide)
             for seed in range(8)
             for guide in ({}, dict(guided_json=SCHEMA), dict(guided_regex="[ab]{30}"))]
    alone = [llm.generate([[5, 6]], own)[0].token_ids for own in given]
    threads = [threading.Thread(target=lambda i, own: made.__setitem__(
        i, llm.generate([[5, 6]], own)[0]), args=pair) for pair in enumerate(given)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [made[i].token_ids for i in range(len(given))] == alone
    for i in range(1, len(given), 3):
        jsonschema.validate(json.loads(made[i].text), SCHEMA)
        assert re.fullmatch("[ab]{30}", made[i + 1].text)
