"""Generation: batches, streaming, stopping, sampling, replicas; against transformers."""

import asyncio
import inspect
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import families
import numpy as np
import pytest
import torch

import llmc
from llmc.runtime.core import llm as llm_module
from llmc.runtime.core import loop as loop_module
from llmc.runtime.core.pacing import StepPacer
from llmc.runtime.sampling.detokenizer import IncrementalDetokenizer

pytestmark = pytest.mark.usefixtures("decisive")
# Prompts whose tokens have large margins.
PROMPTS = [[42, 41, 239, 151, 178, 181, 214], [11, 147], [46, 122, 278, 165, 23]]


@pytest.fixture(scope="module", params=["case_tp1", "case_tp2"])
def llm(request):
    with llmc.LLM(request.getfixturevalue(request.param), max_batch_size=4) as loaded:
        yield loaded


def greedy(model, prompt, count, **options):
    with torch.no_grad():
        ids = torch.tensor([prompt])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=count, **{"eos_token_id": None, **options})
    return tuple(out[0, len(prompt):].tolist())


def tokens(count, **params):
    """Return parameters for a fixed number of tokens."""
    return llmc.SamplingParams(max_tokens=count, ignore_eos=True, **params)


@pytest.fixture
def ending(llm, tiny_model, monkeypatch):
    """The model with the fourth greedy token of the first prompt as EOS; that token."""
    end = greedy(tiny_model, PROMPTS[0], 4)[3]
    families.end_with(llm, monkeypatch, [end])
    return end


def test_a_batch_of_unequal_prompts_gives_transformers_tokens(llm, tiny_model):
    results = llm.generate(PROMPTS, tokens(20))
    assert [r.token_ids for r in results] == [greedy(tiny_model, p, 20) for p in PROMPTS]
    assert [r.finish_reason for r in results] == ["length"] * 3


def test_more_prompts_than_rows_wait_and_get_the_same_tokens(llm):
    many = PROMPTS * 3 + [[7]]
    alone = [llm.generate([prompt], tokens(6))[0].token_ids for prompt in many]
    assert [r.token_ids for r in llm.generate(many, tokens(6))] == alone


def test_a_finished_sequence_frees_its_row_without_affecting_others(llm, tiny_model, ending):
    """Sequences end at different steps and rows move, but tokens do not change."""
    results = llm.generate(PROMPTS, llmc.SamplingParams(max_tokens=12))
    assert [r.token_ids for r in results] == \
        [greedy(tiny_model, p, 12, eos_token_id=ending) for p in PROMPTS]
    assert results[0].finish_reason == "stop"


def test_logits_processors_give_transformers_tokens(llm, tiny_model, ending):
    """Penalties, bad words, biases and a minimum length together, greedy."""
    plain = [r.token_ids for r in llm.generate(PROMPTS, tokens(12))]
    words = [list(plain[0][:1]), list(plain[1][1:3]), list(plain[2][4:7])]
    bias = {7: 2.5, 40: -3.0, plain[1][0]: 1.5}
    results = llm.generate(PROMPTS, llmc.SamplingParams(
        max_tokens=12, min_tokens=6, repetition_penalty=1.3, bad_words=words, logit_bias=bias))
    for result, before, prompt in zip(results, plain, PROMPTS, strict=True):
        assert result.token_ids == greedy(
            tiny_model, prompt, 12, eos_token_id=ending, min_new_tokens=6, repetition_penalty=1.3,
            bad_words_ids=words, sequence_bias={(k,): v for k, v in bias.items()})
        assert result.token_ids != before


def test_min_tokens_suppresses_the_eos_token(llm, tiny_model, ending):
    for least in (0, 3, 4, 9):
        result, = llm.generate([PROMPTS[0]], llmc.SamplingParams(max_tokens=12, min_tokens=least))
        assert result.token_ids == greedy(tiny_model, PROMPTS[0], 12, eos_token_id=ending,
                                          min_new_tokens=least)
        assert ending not in result.token_ids[:least]


def test_each_request_of_a_batch_has_separate_parameters(llm):
    prompts = [*PROMPTS, PROMPTS[0], PROMPTS[1]]
    each = [tokens(9), tokens(4, temperature=0.9, seed=3, typical_p=0.8),
            tokens(12, repetition_penalty=1.5, frequency_penalty=1.0, logprobs=2),
            tokens(7, temperature=1.2, min_p=0.05, seed=3, presence_penalty=-0.5, n=2),
            tokens(10, temperature=0.7, top_k=9, top_p=0.8, seed=11, bad_words=[[9], [4, 6]])]
    together = llm.generate(prompts, each)
    alone = [completion for prompt, params in zip(prompts, each, strict=True)
             for completion in llm.generate([prompt], params)]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [(r.index, r.sample) for r in together] == \
        [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (4, 0)]
    assert [r.logprobs is not None for r in together] == [False, False, True, False, False, False]


@pytest.mark.parametrize("count", [3, 6])  # the cache has 4 rows
def test_n_samples_have_consecutive_seeds(llm, count):
    params = tokens(8, temperature=1.0, top_k=20, seed=2**64 - 2)
    results = llm.generate(PROMPTS, replace(params, n=count))
    expected = [llm.generate([prompt], replace(params, seed=(2**64 - 2 + i) % 2**64))[0].token_ids
                for prompt in PROMPTS for i in range(count)]
    assert [r.token_ids for r in results] == expected
    assert [(r.index, r.sample) for r in results] == \
        [(i, j) for i in range(3) for j in range(count)]
    assert len(set(expected)) > 3


def test_n_samples_compute_their_prompt_once(llm, monkeypatch):
    """Except for its last token, whose logits each sample uses."""
    read = families.steps_read(llm, monkeypatch)
    llm.generate([PROMPTS[0]], tokens(2, temperature=1.0, top_k=20, n=4, seed=1))
    assert read == [len(PROMPTS[0]), 4, 3]


def test_logprobs_are_those_of_transformers(llm, tiny_model):
    params = tokens(6, temperature=1.5, seed=1, logprobs=5, presence_penalty=1.0, bad_words=[[8]])
    for result in llm.generate(PROMPTS, params):
        whole = [*result.prompt_token_ids, *result.token_ids]
        logits = torch.from_numpy(families.reference_logits(tiny_model, whole)).double()
        expected = logits.log_softmax(-1)[len(result.prompt_token_ids) - 1:-1]
        top = expected.topk(6)
        assert (top.values.diff() < -1e-4).all()  # another order would exceed rounding
        top = expected.topk(5)
        assert [[t for t, _ in p.top] for p in result.logprobs] == top.indices.tolist()
        np.testing.assert_allclose([[x for _, x in p.top] for p in result.logprobs], top.values,
                                   atol=1e-4)
        chosen = expected[range(6), list(result.token_ids)]
        np.testing.assert_allclose([p.chosen for p in result.logprobs], chosen, atol=1e-4)
        assert abs(result.cumulative_logprob - float(chosen.sum())) < 1e-3
    result, = llm.generate([PROMPTS[0]], tokens(2, logprobs=0))
    assert [p.top for p in result.logprobs] == [(), ()]


def test_a_stop_string_ends_its_own_request(llm):
    """Not before min_tokens; it and the following text are not returned."""
    whole = llm.generate(PROMPTS, tokens(30))
    stop = whole[0].text[4:7]
    results = llm.generate(PROMPTS, [tokens(30, stop=[stop]), tokens(30), tokens(30)])
    assert results[0].text == whole[0].text[:whole[0].text.index(stop)]
    assert results[0].finish_reason == "stop" and len(results[0].token_ids) < 30
    assert results[1:] == whole[1:]
    assert llm.generate(PROMPTS[:1], tokens(30, stop=stop, min_tokens=30)) == whole[:1]


def test_a_stop_string_needs_a_tokenizer(llm, monkeypatch):
    monkeypatch.setattr(llm._reader, "tokenizer", None)
    with pytest.raises(llmc.LlmcError, match="without a tokenizer"):
        llm.generate([[5]], tokens(3, stop=["x"]))


@pytest.mark.parametrize("text", ["t", " quick"])
def test_a_bad_word_is_not_generated_with_or_without_a_space_before_it(llm, text):
    token, = llm.tokenizer.encode(text).ids
    wanted = tokens(5, logit_bias={token: 1000.0})
    assert llm.generate([[5, 6]], wanted)[0].token_ids == (token,) * 5
    forbidden = replace(wanted, bad_words=[text.strip()])
    assert token not in llm.generate([[5, 6]], forbidden)[0].token_ids


def test_a_request_that_forbids_every_token_is_refused(llm):
    params = tokens(3, logit_bias=dict.fromkeys(range(300), float("-inf")))
    with pytest.raises(llmc.LlmcError, match="no token is allowed after 0 generated ones"):
        llm.generate([[5]], params)
    assert llm.generate([[5]], tokens(3))


def test_logits_of_every_token(llm, tiny_model):
    families.assert_close(llm.logits(PROMPTS[0]), families.reference_logits(tiny_model, PROMPTS[0]))


def test_chunked_prefill_of_one_sequence(llm, tiny_model):
    ids = list(range(5, 30))
    session = llm.session(1)
    session.extend([ids[:10]])
    session.extend([ids[10:17]])
    families.assert_close(session.extend([ids[17:]])[0],
                          families.reference_logits(tiny_model, ids)[-1])


def test_text_in_and_text_out(llm):
    result, = llm.generate("the quick", tokens(5))
    assert result.prompt_token_ids == tuple(llm.tokenizer.encode("the quick").ids)
    assert isinstance(result.text, str)


def test_streaming_yields_every_token_once_and_can_be_cancelled(llm):
    expected = llm.generate(PROMPTS, tokens(8))
    seen = {i: [] for i in range(3)}
    for piece in llm.stream(PROMPTS, tokens(8)):
        seen[piece.index].append(piece.token_id)
    assert [tuple(seen[i]) for i in range(3)] == [r.token_ids for r in expected]
    stream = llm.stream(PROMPTS, tokens(1000))
    next(stream)
    stream.close()
    assert [r.token_ids for r in llm.generate(PROMPTS, tokens(8))] == \
        [r.token_ids for r in expected]


def test_generation_ends_where_the_kv_cache_ends(llm):
    result, = llm.generate([[5] * 60], tokens(100))
    assert (len(result.token_ids), result.finish_reason) == (64 - 60 + 1, "length")


def test_sampling_is_seeded_and_does_not_depend_on_the_batch(llm):
    params = tokens(10, temperature=0.8, top_k=20, top_p=0.9, seed=7)
    first = llm.generate(PROMPTS, params)
    assert first == llm.generate(PROMPTS, params)
    assert llm.generate(PROMPTS[:1], params)[0] == first[0]
    assert llm.generate(PROMPTS, replace(params, seed=8)) != first


@pytest.mark.parametrize(("prompts", "params", "match"), [
    ([[1] * 65], None, "65 tokens, the KV cache has room for 64"),
    ([[]], None, "prompt is empty"),
    ("", None, "prompt is empty"),
    ([[99999]], None, "token id 99999 is not in the vocabulary"),
    ([[5]], 20, r"params is 20; give SamplingParams\("),
    ([[5]], [tokens(3)] * 2, "there are 2 SamplingParams for 1 prompts"),
    ([[5]], tokens(3, logprobs=301), "logprobs 301 exceeds the vocabulary of 300"),
    ([[5]], tokens(3, logit_bias={300: 1.0}), "token id 300 is not in the vocabulary"),
    ([[5]], tokens(3, bad_words=[[5, -1]]), "token id -1 is not in the vocabulary"),
    ([[5]], llmc.SamplingParams(bad_words=[[2]]), r"bad word \(2,\) is the EOS token"),
])
def test_bad_requests_are_refused(llm, prompts, params, match):
    with pytest.raises(llmc.LlmcError, match=match):
        llm.generate(prompts, params)


@pytest.mark.parametrize("kind", ["cuda", "tensorrt"])
def test_gpus_limit_the_number_of_logprobs(llm, kind, monkeypatch):
    target = llm.manifest.target.model_copy(update={"kind": kind})
    monkeypatch.setattr(llm._reader, "manifest",
                        llm.manifest.model_copy(update={"target": target}))
    with pytest.raises(llmc.LlmcError, match="^logprobs 21 exceeds 20, the maximum"):
        llm.generate([[5]], tokens(3, logprobs=21))


def test_replicas_give_the_results_of_one(case_tp2):
    with llmc.LLM(case_tp2) as one, llmc.LLM(case_tp2, device=[0, 1, 2, 3]) as two:
        assert len(two._loops) == 2
        for params in (tokens(8), tokens(8, n=3, temperature=1.0, top_k=20, seed=5)):
            assert two.generate(PROMPTS, params) == one.generate(PROMPTS, params)


def test_threads_end_with_the_model(case_tp2):
    before = threading.active_count()
    with llmc.LLM(case_tp2, device=[0, 1, 2, 3]) as model:
        list(model.stream(PROMPTS, tokens(3)))
        assert threading.active_count() > before
    assert threading.active_count() == before


def test_a_failing_rank_stops_the_others_and_is_the_error(case_tp2, monkeypatch):
    with llmc.LLM(case_tp2) as model:
        def fail(step):
            raise RuntimeError("rank 1 is on fire")

        monkeypatch.setattr(families.ranks(model)[1], "compute", fail)
        with pytest.raises(RuntimeError, match="rank 1 is on fire"):
            model.generate(PROMPTS, tokens(3))
        with pytest.raises(llmc.LlmcError, match="has to be loaded again, as a step failed: rank"):
            model.generate(PROMPTS, tokens(3))


def test_the_kv_cache_is_extended_in_place(case_tp1):
    with llmc.LLM(case_tp1, max_batch_size=2) as model:
        cache = families.ranks(model)[0]._caches["key_cache_0"]
        session = model.session(2)
        session.extend([[5, 6, 7], [8, 9, 10]])
        written = cache[:, :, :3].copy()
        assert written.any(axis=(1, 3)).all()
        session.extend([[11], [12]])
        np.testing.assert_array_equal(cache[:, :, :3], written)
        assert cache[:, :, 3].any() and not cache[:, :, 4:].any()


def test_a_running_model_imports_neither_torch_nor_transformers_nor_onnx(case_tp1):
    code = ("import sys, llmc\n"
            f"with llmc.LLM({str(case_tp1)!r}) as llm: print(llm.generate('the')[0].text)\n"
            "bad = {'torch', 'transformers', 'onnx', 'onnxscript', 'onnx_graphsurgeon'}\n"
            "sys.exit(str(bad & set(sys.modules)) if bad & set(sys.modules) else 0)")
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def stream_text(tokenizer, text, stop):
    stream = IncrementalDetokenizer(tokenizer, [], stop)
    pieces = []
    for token in tokenizer.encode(text).ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return "".join(pieces) + stream.finish(), pieces


def test_a_character_of_several_tokens_is_emitted_whole(llm):
    text, pieces = stream_text(llm.tokenizer, "naïve 東京 🙂", ())
    assert text == "naïve 東京 🙂"
    assert "�" not in "".join(pieces)


def test_a_stop_string_across_tokens_is_not_emitted(llm):
    text, pieces = stream_text(llm.tokenizer, "the quick brown fox END and more", ["END"])
    assert text == "the quick brown fox "
    assert not any("E" in piece for piece in pieces)


def test_min_tokens_defers_stop_strings(llm):
    """It may start before min_tokens; one that ends before is returned."""
    ids = llm.tokenizer.encode("END and END").ids
    for least, shown in ((0, ""), (len(ids) - 1, "END and "), (len(ids), "END and END")):
        stream = IncrementalDetokenizer(llm.tokenizer, [], ["END"])
        text = "".join(stream.push(token, may_stop=count >= least)
                       for count, token in enumerate(ids))
        assert text + stream.finish() == shown


def test_a_partial_match_of_a_stop_string_is_emitted(llm):
    assert stream_text(llm.tokenizer, "an EN then nothing", ["END"])[0] == "an EN then nothing"


@pytest.mark.parametrize(("arguments", "match"), [
    (dict(check_step=0), "check_step 0 is below 1"), (dict(skip_step=-1), "skip_step -1"),
])
def test_bad_steps_are_refused(case_tp1, arguments, match):
    with pytest.raises(llmc.LlmcError, match=match):
        llmc.LLM(case_tp1, **arguments)


@pytest.fixture
def far_ahead(monkeypatch):
    """An engine that allows 1000 in-flight steps; records the submitted ones."""
    made = []

    def load(*arguments):
        engine = load_replica(*arguments)
        engine.limits = replace(engine.limits, ahead=1000)
        submit = engine.submit

        def count(step):
            made.append(step)
            return submit(step)

        engine.submit = count
        return engine

    load_replica = llm_module.load_replica
    monkeypatch.setattr(llm_module, "load_replica", load)
    return made


@pytest.fixture(scope="module")
def wholes(tiny_model):
    """Return transformers' completion of each prompt."""
    return [greedy(tiny_model, prompt, 30) for prompt in PROMPTS]


@pytest.mark.parametrize("skip_step", [0, 3, 9])
@pytest.mark.parametrize("check_step", [1, 2, 5, 8, 100])
def test_a_larger_check_step_changes_no_tokens_and_wastes_few_steps(case_tp1, wholes, far_ahead,
                                                                    check_step, skip_step):
    """At most check_step - 1 after the longest completion, or up to skip_step."""
    with llmc.LLM(case_tp1, max_batch_size=4, check_step=check_step, skip_step=skip_step,
                  prefix_reuse=False) as llm:
        for end in {whole[place] for whole in wholes for place in (0, 4, 9, 29)}:
            far_ahead.clear()
            results = llm.generate(PROMPTS, llmc.SamplingParams(max_tokens=30, end_id=end))
            wanted = [whole[:whole.index(end) + 1] if end in whole else whole for whole in wholes]
            assert [result.token_ids for result in results] == wanted
            needed = max(len(tokens) for tokens in wanted)
            assert len(far_ahead) <= min(30, max(needed + check_step - 1, 1 + skip_step)), needed


def test_a_request_that_arrives_during_a_step_joins_the_next(case_tp1, far_ahead, monkeypatch):
    """Pacing delays submission, so the second prompt does not wait for two steps."""
    at_work = threading.Event()
    came_at = []

    class Waits(StepPacer):
        """Pacing that delays the fourth step until a request arrives."""

        def came(self):
            came_at.append(len(far_ahead))

        def left(self):
            if len(far_ahead) != 3 or len(came_at) == 2:
                return 0.0
            at_work.set()
            return 60.0

    monkeypatch.setattr(loop_module, "StepPacer", Waits)
    with llmc.LLM(case_tp1, prefix_reuse=False) as llm:
        params = llmc.SamplingParams(max_tokens=9, ignore_eos=True)
        wanted = {}

        def call(name, prompt):
            wanted[name] = llm.generate([prompt], params)[0].token_ids

        first = threading.Thread(target=call, args=("first", [3, 5, 7]))
        first.start()
        assert at_work.wait(60)
        second = threading.Thread(target=call, args=("second", [11, 13]))
        second.start()
        first.join()
        second.join()
        alone = [llm.generate([prompt], params)[0].token_ids for prompt in ([3, 5, 7], [11, 13])]
    step = far_ahead[3]
    assert came_at[:2] == [0, 3] and (step.batch_size, step.num_prefill_tokens) == (2, 2)
    assert [wanted["first"], wanted["second"]] == alone


@pytest.mark.parametrize("params", [
    dict(), dict(logprobs=1), dict(temperature=1, seed=1), dict(temperature=1, top_k=3, top_p=0.5),
    dict(guided_choice=["fox"]), dict(beam_width=2), dict(beam_width=2, bad_words=["fox"])])
def test_nan_logits_fail_only_their_request(nan_case, params):
    params = llmc.SamplingParams(max_tokens=20, **params)
    with llmc.LLM(nan_case) as llm:
        expected = llm.generate([[5, 6]], llmc.SamplingParams(max_tokens=20, ignore_eos=True))
        others = llm.stream([[5, 6]], llmc.SamplingParams(max_tokens=20, ignore_eos=True))
        pieces = [next(others)]
        with pytest.raises(llmc.LlmcError, match="the logits after 0 generated tokens are NaN"):
            llm.generate([[5, 7]], params)
        pieces += others
        assert tuple(piece.token_id for piece in pieces) == expected[0].token_ids
        assert llm.metrics()["nan_logits"] == 1


@pytest.mark.parametrize("loaded", [llmc.LLM, llmc.AsyncLLM])
def test_help_and_errors_name_the_class_and_its_arguments(loaded):
    signature = inspect.signature(loaded)
    for name in ("case_dir", "device", "max_batch_size", "prefix_reuse", "attention_backend"):
        assert f"\n    {name}: " in loaded.__doc__ and name in signature.parameters
    assert not loaded.__doc__.splitlines()[0].endswith(":")
    with pytest.raises(TypeError, match=rf"^{loaded.__name__}\.__init__\(\) got an unexpected "
                                        r"keyword argument 'tp_size'"):
        loaded("case", tp_size=2)


def test_chat_answers_one_conversation_or_several(case_tp1):
    one = [{"role": "user", "content": "the fox"}]
    two = [{"role": "system", "content": "be"}, {"role": "user", "content": "lazy"}]
    params = llmc.SamplingParams(max_tokens=4, ignore_eos=True)

    async def streamed(messages):
        async with llmc.AsyncLLM(case_tp1) as llm:
            return [piece.token_id async for piece in llm.chat(messages, params)]

    with llmc.LLM(case_tp1) as llm:
        expected = llm.generate([llm.chat_prompt(one), llm.chat_prompt(two)], params)
        assert llm.chat([one, two], params) == expected
        assert llm.chat(one, params) == llm.chat("the fox", params) == expected[:1]
        assert llm.chat(["the fox"], params) == expected[:1]
        assert [own.index for own in llm.chat([one, two], [params, params])] == [0, 1]
        assert asyncio.run(streamed(two)) == list(expected[1].token_ids)
        for wrong in ([], 5, [5], [[]], [{"role": "user"}]):
            with pytest.raises(llmc.LlmcError, match="message"):
                llm.chat(wrong, params)


def test_chat_gives_tools_and_variables_to_the_template(case_tp1, tmp_path):
    case = shutil.copytree(case_tp1, tmp_path / "case")
    template = json.loads((case / "model_info.json").read_text())["tokenizer"]["chat_template"]
    text = "{{ tools[0].name }}{{ thinking }}{{ messages[0].content }}{#"
    size = (case / template).stat().st_size
    (case / template).write_text(text + "#}".rjust(size - len(text)))
    with llmc.LLM(case, verify=False) as llm:
        made, = llm.chat("the", llmc.SamplingParams(max_tokens=1), tools=[{"name": "fox"}],
                         chat_template_kwargs={"thinking": "quick"})
        assert llm.detokenize(made.prompt_token_ids) == "foxquickthe"
