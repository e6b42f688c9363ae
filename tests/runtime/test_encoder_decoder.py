"""Encoder-decoder models: tokens equal transformers' generate, and encoder runs are minimal."""

import json
from collections import Counter

import families
import numpy as np
import pytest
import torch
from beams import assert_equal
from click.testing import CliRunner

import llmc
from llmc import LlmcError, SamplingParams
from llmc.cli import main
from llmc.runtime.engines.cpu import CpuEngine

pytestmark = pytest.mark.usefixtures("decisive")
LENGTHS = (40, 7, 23)
SEEDS = (8, 1, 11)  # prompts whose tokens have large margins
TOLERANCE = 1e-4  # T5 does not scale its scores, which amplifies rounding
NAMES = ["t5", "bart", "marian"]


def prompts(seed, count=3):
    rng = np.random.default_rng(SEEDS[seed])
    return [rng.integers(3, 100, length).tolist() for length in LENGTHS[:count]]


def truth(model, batch, **options):
    """Return transformers' tokens up to and including the EOS token."""
    longest = max(map(len, batch))
    rows = [row + [0] * (longest - len(row)) for row in batch]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in batch]
    out = model.generate(torch.tensor(rows), attention_mask=torch.tensor(mask), do_sample=False,
                         **options)
    end = options.get("eos_token_id", model.generation_config.eos_token_id)
    found = []
    for row in out[:, 1:].tolist():
        found.append(row[:row.index(end) + 1] if end in row else row)
    return found


@pytest.fixture(scope="module")
def loaded(encoder_decoder):
    """Factory by family name: the model and its loaded case directory."""
    llms = {}

    def load(name):
        if name not in llms:
            model, _, cases = encoder_decoder(name)
            llms[name] = model, llmc.LLM(cases["tp1"])
        return llms[name]
    yield load
    for _, llm in llms.values():
        llm.close()


@pytest.fixture
def encoded(monkeypatch):
    """Record the tokens of each encoder run."""
    seen = []
    original = CpuEngine._encode

    def encode(self, prompts):
        if self._chip.rank == 0:
            seen.extend(tuple(prompt) for prompt in prompts.values())
        original(self, prompts)
    monkeypatch.setattr(CpuEngine, "_encode", encode)
    return seen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 3])
def test_greedy_tokens_are_those_of_transformers(name, count, loaded):
    model, llm = loaded(name)
    for seed in range(3):
        batch = prompts(seed, count)
        got = [list(c.token_ids) for c in llm.generate(batch, SamplingParams(max_tokens=16))]
        assert got == truth(model, batch, max_new_tokens=16)


def test_different_prompts_lead_to_different_tokens(loaded):
    for name in NAMES:
        _, llm = loaded(name)
        got = llm.generate([row for seed in range(3) for row in prompts(seed)],
                           SamplingParams(max_tokens=16))
        assert len({completion.token_ids for completion in got}) > 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("count", "beams"), [(1, 4), (3, 2), (3, 4)])
def test_beam_search_equals_transformers(name, count, beams, loaded):
    model, llm = loaded(name)
    for seed in range(2):
        batch = prompts(seed, count)
        end = truth(model, batch, max_new_tokens=8)[0][2]  # a token that beams reach
        for ends, options in (([end], {"end_id": end}),
                              (llm.manifest.tokenizer.eos_token_ids,
                               {"length_penalty": 2.0, "early_stopping": True})):
            params = SamplingParams(beam_width=beams, max_tokens=12, **options)
            found = assert_equal(llm, model, batch, params, ends, TOLERANCE)
            assert found.output_ids.shape == (12, count, beams)
            best = [found.output_ids[:length, b, 0].tolist()
                    for b, length in enumerate(found.sequence_length[:, 0])]
            assert [list(c.token_ids) for c in llm.generate(batch, params)] == best


def test_two_chips_give_the_tokens_of_one(encoder_decoder):
    model, _, cases = encoder_decoder("marian")
    with llmc.LLM(cases["tp2"]) as llm:
        got = [list(c.token_ids) for c in llm.generate(prompts(1), SamplingParams(max_tokens=16))]
    assert got == truth(model, prompts(1), max_new_tokens=16)


def test_replicas_share_the_prompts(encoder_decoder):
    model, _, cases = encoder_decoder("bart")
    batch = prompts(0) + prompts(1)
    with llmc.LLM(cases["tp1"], device=[0, 1], max_batch_size=2) as llm:
        got = [list(c.token_ids) for c in llm.generate(batch, SamplingParams(max_tokens=9))]
    assert got == [row for seed in range(2) for row in truth(model, prompts(seed),
                                                             max_new_tokens=9)]


def test_prompt_logprobs_of_encoder_inputs_are_refused(encoder_decoder):
    _, _, cases = encoder_decoder("bart")
    with llmc.LLM(cases["tp1"]) as llm, \
            pytest.raises(llmc.LlmcError, match="model, for which prompt_logprobs is unsupported"):
        llm.generate(prompts(0), SamplingParams(prompt_logprobs=1))


def test_the_encoder_runs_once_per_prompt(encoder_decoder, encoded):
    model, _, cases = encoder_decoder("t5")
    batch = [row for seed in range(3) for row in prompts(seed)]
    with llmc.LLM(cases["tp1"], max_batch_size=4) as llm:  # so that most prompts wait
        expected = [row for seed in range(3) for row in truth(model, prompts(seed),
                                                              max_new_tokens=10)]
        got = llm.generate(batch, [SamplingParams(max_tokens=10 - i) for i in range(9)])
        assert [list(c.token_ids) for c in got] == [row[:10 - i] for i, row in enumerate(expected)]
        assert encoded == list(map(tuple, batch))
        encoded.clear()
        llm.generate(batch, SamplingParams(max_tokens=3, temperature=1.0, n=3, seed=1))
        assert Counter(encoded) == Counter(map(tuple, batch))
        encoded.clear()
        llm.generate(batch, SamplingParams(max_tokens=3, beam_width=4))
        assert Counter(encoded) == Counter(map(tuple, batch))


def test_sampling_does_not_depend_on_the_batch(loaded):
    _, llm = loaded("bart")
    params = SamplingParams(max_tokens=8, temperature=1.5, top_p=0.9, n=3, seed=7)
    together = llm.generate(prompts(0), params)
    alone = [c for prompt in prompts(0) for c in llm.generate([prompt], params)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({c.token_ids for c in together}) > 3


def test_log_probabilities_are_those_of_transformers(loaded):
    model, llm = loaded("bart")
    prompt = prompts(2)[0]
    completion, = llm.generate([prompt], SamplingParams(max_tokens=6, logprobs=0))
    tokens = [model.generation_config.decoder_start_token_id, *completion.token_ids]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt]),
                       decoder_input_ids=torch.tensor([tokens[:-1]])).logits[0]
    chosen = torch.log_softmax(logits, -1)[range(6), list(completion.token_ids)]
    np.testing.assert_allclose([p.chosen for p in completion.logprobs], chosen, rtol=1e-3)
    assert completion.prompt_token_ids == tuple(prompt)


def test_the_generation_config_sets_start_and_eos_tokens(encoder_decoder, tmp_path):
    model, raw, _ = encoder_decoder("bart")
    settings = {"forced_bos_token_id": 17, "forced_eos_token_id": 2,
                "bad_words_ids": [[9], [17, 30]]}
    raw.generation.update(settings)
    try:
        case = families.compile_encoder_decoder(raw, tmp_path)["tp1"]
    finally:
        for key in settings:
            raw.generation.pop(key)
    free = truth(model, prompts(0), max_new_tokens=10, forced_bos_token_id=17)
    with llmc.LLM(case) as llm:
        assert llm.manifest.encoder.bad_words == ((9,), (17, 30))
        got = [list(c.token_ids) for c in llm.generate(prompts(0), SamplingParams(max_tokens=10))]
        assert got == truth(model, prompts(0), max_new_tokens=10, **settings)
        assert all(row[0] == 17 and row[-1] == 2 for row in got)
        beams = assert_equal(llm, model, prompts(0), SamplingParams(max_tokens=10, beam_width=3),
                             [2], TOLERANCE, **settings)
        assert (beams.output_ids[0] == 17).all()
        bad = [[17, row[1]] for row in free]
        got = llm.generate(prompts(0), SamplingParams(max_tokens=10, bad_words=bad))
        assert [list(c.token_ids) for c in got] == truth(
            model, prompts(0), max_new_tokens=10,
            **{**settings, "bad_words_ids": settings["bad_words_ids"] + bad})
        endless, = llm.generate([prompts(0)[0]], SamplingParams(max_tokens=10, ignore_eos=True))
        assert endless.token_ids[-1] != 2


def test_repetition_penalty_applies_to_decoder_tokens_only(loaded):
    model, llm = loaded("t5")
    got = llm.generate(prompts(1), SamplingParams(max_tokens=16, repetition_penalty=1.7))
    assert [list(c.token_ids) for c in got] == truth(model, prompts(1), max_new_tokens=16,
                                                     repetition_penalty=1.7)


def test_prompts_are_encoded_and_completions_decoded(loaded):
    model, llm = loaded("t5")
    words = [f"w{token}" for token in prompts(0)[0]]
    ids = [*prompts(0)[0], model.config.eos_token_id]  # the tokenizer's template adds it
    expected, = truth(model, [ids], max_new_tokens=8)
    pieces = list(llm.stream(" ".join(words), SamplingParams(max_tokens=8)))
    assert [piece.token_id for piece in pieces] == expected
    assert "".join(piece.text for piece in pieces) == " ".join(f"w{token}" for token in expected)
    stopped, = llm.generate([" ".join(words)],
                            SamplingParams(max_tokens=8, stop=[f"w{expected[3]}"]))
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) <= 4


@pytest.mark.parametrize(("work", "match"), [
    (lambda llm: llm.generate([[]]), "the prompt is empty"),
    (lambda llm: llm.generate([[5] * 65]), "the prompt has 65 tokens, the encoder takes at most "
                                           "64; shorten it, or compile with a larger --mem_max"),
    (lambda llm: llm.generate([[101]]), "token id 101 is not in the vocabulary of 101"),
    (lambda llm: llm.chat_prompt("hello"), "'BartForConditionalGeneration' is an encoder-decoder "
                                           "model without chat"),
    (lambda llm: llm.logits([2]), "has an encoder: give sources"),
    (lambda llm: llm.session(2, [[5]]), "there are 1 sources for batch_size 2"),
    (lambda llm: llm.logits([2] * 65, [5]), "the prompt has 65 tokens, the KV cache has room"),
])
def test_invalid_input_is_refused(work, match, loaded):
    _, llm = loaded("bart")
    with pytest.raises(LlmcError, match=match) as caught:
        work(llm)
    assert "\n" not in str(caught.value)


def test_encoder_prompts_are_refused_for_a_causal_lm(case_tp1):
    with llmc.LLM(case_tp1) as llm, pytest.raises(LlmcError, match="has no encoder: leave out"):
        llm.logits([3], [5])


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_commands(encoder_decoder, tmp_path):
    model, _, cases = encoder_decoder("t5")
    case, hf_dir = cases["tp1"], cases["tp1"].parent / "hf"
    text = " ".join(f"w{token}" for token in prompts(0)[1])
    expected, = truth(model, [[*prompts(0)[1], model.config.eos_token_id]], max_new_tokens=6)
    result = run("run", "--case_dir", case, "--prompt", text, "--max_tokens", 6)
    assert result.exit_code == 0
    assert " ".join(f"w{token}" for token in expected) in result.stdout
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"token_ids": prompts(0)[1], "max_tokens": 4}) + "\n"
                        + json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    result = run("run", "--case_dir", case, "--prompt_file", requests)
    first, second = map(json.loads, result.stdout.splitlines())
    assert list(first["completions"][0]["token_ids"]) == truth(model, [prompts(0)[1]],
                                                               max_new_tokens=4)[0]
    assert "without chat" in second["error"]
    summary = json.loads(run("inspect", case, "--json").stdout)
    assert summary["encoder"]["num_layers"] == 4
    assert summary["chips"][0]["memory_bytes"] == 4 * 2 * 64 * 4 * summary["encoder"]["max_seq_len"]
    assert "encoder: 4 layers" in run("inspect", case).stdout
    rows = json.loads(run("bench", "--case_dir", case, "--batch_size", "2", "--input_output_len",
                          "8,3", "--runs", 1, "--json").stdout)
    assert rows[0]["tokens_per_sec"] > 0
    for arguments in (("diff", "--case_dir", case, "--reference", hf_dir),
                      ("eval", "--case_dir", case, "--task", "perplexity"),
                      ("eval", "--case_dir", case, "--task", "summarize")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert f"llmc {arguments[0]} does not support encoder-decoder models" in result.stderr
