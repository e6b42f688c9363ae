"""lm-eval's loglikelihood tasks on the server and on `LLM.generate` equal its `hf` model."""

import json
import os

import bench_model
import pytest
from server_process import serving

import llmc

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra test-serve")
from lm_eval.api.model import TemplateLM  # noqa: E402

TOLERANCE = 1e-3
QUESTIONS = [
    ("The capital of France is", [" Paris", " Berlin", " a river in Asia"], 0),
    ("Water freezes at a temperature of zero degrees", [" Fahrenheit", " Celsius"], 1),
    ("The opposite of hot is", [" cold", " warm", " a very long winter evening"], 0),
    ("A triangle has", [" four sides", " three sides", " no sides at all"], 1)]
PASSAGES = [
    "The quick brown fox jumps over the lazy dog. Then it sleeps in the sun until evening.",
    "Compilers translate programs. A good one keeps what the program means, and makes it faster.",
    "Café, naïve, 東京 and 🙂 are written in several bytes for each character."]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2 as a Hugging Face directory and as a case directory."""
    root = tmp_path_factory.mktemp("smollm2")
    hf = bench_model.smollm2(root / "hf")
    llmc.compile(hf, root / "case", max_seq_len=256, dtype="float32")
    return hf, root / "case"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A multiple-choice task and a rolling log-likelihood task."""
    root = tmp_path_factory.mktemp("tasks")
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    rows = {"choice": [{"text": text, "choices": choices, "label": label}
                       for text, choices, label in QUESTIONS],
            "passages": [{"text": text} for text in PASSAGES]}
    for name, own in rows.items():
        (root / f"{name}.json").write_text("\n".join(map(json.dumps, own)))

    def config(name, **fields):
        return {"task": name, "dataset_path": "json", "dataset_kwargs": {
            "data_files": {"test": str(root / f"{name}.json")}, "cache_dir": str(root / "cache")},
            "test_split": "test", **fields}

    return [config("choice", output_type="multiple_choice", doc_to_text="{{text}}",
                   doc_to_choice="{{choices}}", doc_to_target="{{label}}", target_delimiter="",
                   metric_list=[{"metric": "acc"}]),
            config("passages", output_type="loglikelihood_rolling", doc_to_text="",
                   doc_to_target="{{text}}", metric_list=[{"metric": "word_perplexity"}])]


def evaluate(model, tasks):
    """Return the metrics and responses: log-probabilities, and whether they are greedy."""
    result = lm_eval.simple_evaluate(model=model, tasks=tasks, log_samples=True, batch_size=4,
                                     bootstrap_iters=0)
    responses = [response[0] for name in ("choice", "passages")
                 for sample in sorted(result["samples"][name], key=lambda own: own["doc_id"])
                 for response in sample["resps"]]
    return result["results"], [(float(own[0]), own[1]) if isinstance(own, (list, tuple)) else
                               (float(own), None) for own in responses]


class OfLLM(TemplateLM):
    """lm-eval's model over `LLM.generate`."""

    def __init__(self, llm):
        super().__init__()
        self._llm = llm

    @property
    def eot_token_id(self):
        return self._llm.manifest.tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self):
        return self._llm.manifest.tokenizer.bos_token_id

    def tok_encode(self, string, **_):
        return self._llm.tokenize(string, add_special_tokens=False)

    def _loglikelihood_tokens(self, requests, **_):
        completions = self._llm.generate(
            [context + continuation for _, context, continuation in requests],
            llmc.SamplingParams(max_tokens=0, prompt_logprobs=1))
        return [(sum(row.chosen for row in own.prompt_logprobs[-len(continuation):]),
                 all(row.rank == 1 for row in own.prompt_logprobs[-len(continuation):]))
                for own, (_, _, continuation) in zip(completions, requests, strict=True)]

    def loglikelihood_rolling(self, requests, **_):
        pairs = [((), [self.prefix_token_id], self.tok_encode(request.args[0]))
                 for request in requests]
        return [value for value, _ in self._loglikelihood_tokens(pairs)]

    def generate_until(self, requests, **_):
        raise NotImplementedError


@pytest.fixture(scope="module")
def expected(smollm2, tasks):
    from lm_eval.models.huggingface import HFLM

    hf, _ = smollm2
    return evaluate(HFLM(pretrained=str(hf), dtype="float32", device="cpu", batch_size=4,
                         max_length=256), tasks)


def check(found, expected):
    results, responses = found
    assert len(responses) == sum(len(own[1]) for own in QUESTIONS) + len(PASSAGES)
    for (value, greedy), (other, other_greedy) in zip(responses, expected[1], strict=True):
        assert abs(value - other) < TOLERANCE
        assert greedy == other_greedy
    assert results["choice"]["acc,none"] == expected[0]["choice"]["acc,none"]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_the_server_gives_the_log_probabilities_of_lm_evals_hf_model(smollm2, tasks, expected,
                                                                     backend):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    _, case = smollm2
    with serving(case, "--enable_tokenizer_info_endpoint") as server:
        check(evaluate(LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions", model="tiny", tokenizer_backend=backend,
            tokenizer=str(case / "tokenizer"), max_length=256, batch_size=4), tasks), expected)


@pytest.mark.thorough
def test_generate_gives_the_log_probabilities_of_lm_evals_hf_model(smollm2, tasks, expected):
    _, case = smollm2
    with llmc.LLM(case) as llm:
        check(evaluate(OfLLM(llm), tasks), expected)
