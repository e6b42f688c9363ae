"""LoRA adapters as models of a server."""

import json
import re

import lora
import openai
import pytest
from server_process import serving

import llmc

PROMPT = [5, 9, 33, 7, 20]
FIELDS = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def directories(tiny_model, lora_case, tmp_path_factory):
    """Compiled adapters by name, and the tokens that each generates."""
    root = tmp_path_factory.mktemp("served")
    for seed, name in enumerate(("sql", "chat")):
        factors = lora.make(tiny_model, lora.linear_layers(tiny_model), seed=seed)
        llmc.compile_adapter(lora.save(root / f"{name}_peft", factors), lora_case(1), root / name)
    return root


@pytest.fixture(scope="module")
def texts(directories, lora_case):
    params = llmc.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    names = ["sql", "chat", None]
    with llmc.LLM(lora_case(1), adapters={name: directories / name
                                          for name in names if name}) as llm:
        made = llm.generate([PROMPT] * 3, params, adapter=names)
    found = {name or "tiny": own.text for name, own in zip(names, made, strict=True)}
    assert len({*found.values()}) == 3
    return found


@pytest.fixture(scope="module")
def served(directories, lora_case):
    with serving(lora_case(1), "--lora_modules", f"sql={directories / 'sql'}",
                 "--allow_runtime_lora_updating", "--max_lora_rank", 8) as own:
        yield own


def test_adapters_are_models_with_their_base_as_parent(served, texts):
    listed = {model.id: model.model_dump() for model in served.client.models.list()}
    assert [*listed] == ["tiny", "sql"]
    assert (listed["tiny"]["parent"], listed["sql"]["parent"]) == (None, "tiny")
    assert served.client.models.retrieve("sql").id == "sql"
    for name in ("sql", "tiny"):
        answer = served.client.completions.create(model=name, prompt=PROMPT, **FIELDS)
        assert (answer.model, answer.choices[0].text) == (name, texts[name])
    with pytest.raises(openai.NotFoundError, match="unknown model 'no'; .* 'tiny' and 1 adapters"):
        served.client.completions.create(model="no", prompt=PROMPT)


def test_every_endpoint_generates_with_the_named_adapter(served):
    message = [{"role": "user", "content": "the quick"}]
    bodies = {"/v1/chat/completions": {"messages": message, "max_tokens": 30},
              "/v1/responses": {"input": "the quick", "max_output_tokens": 30},
              "/v1/messages": {"messages": message, "max_tokens": 30}}
    for path, body in bodies.items():
        given = [served.post(path, {"temperature": 0, "model": name,
                                    "guided_regex": "[a-z]{24}", **body})
                 for name in ("sql", "tiny")]
        assert [status for status, _, _ in given] == [200, 200]
        assert [answer["model"] for _, _, answer in given] == ["sql", "tiny"]
        one, other = (json.dumps(answer.get("choices") or answer.get("output")
                                 or answer["content"]) for _, _, answer in given)
        drop = re.compile(r'"id": "[^"]*"')
        assert drop.sub("", one) != drop.sub("", other)


def test_adapters_are_loaded_and_unloaded_over_http(served, directories, texts):
    def update(kind, **body):
        return served.post_text(f"/v1/{kind}_lora_adapter", body)

    assert update("load", lora_name="chat", lora_path=str(directories / "chat")) == \
        (200, "Success: LoRA adapter 'chat' added successfully.")
    answer = served.client.completions.create(model="chat", prompt=PROMPT, **FIELDS)
    assert answer.choices[0].text == texts["chat"]
    status, text = update("load", lora_name="chat", lora_path=str(directories / "sql"))
    assert status == 400 and "named 'chat' is loaded already" in text
    status, text = update("load", lora_name="tiny", lora_path=str(directories / "sql"))
    assert status == 400 and "is the name of the model" in text
    status, text = update("load", lora_name="x", lora_path=str(directories / "sql_peft"))
    assert status == 400 and "is a PEFT adapter; compile it first" in text
    assert update("unload", lora_name="chat")[0] == 200
    assert update("unload", lora_name="chat")[0] == 404
    assert [model.id for model in served.client.models.list()] == ["tiny", "sql"]


def test_an_adapter_in_use_is_not_unloaded(served):
    with served.client.completions.create(model="sql", prompt=PROMPT, max_tokens=59, n=64,
                                          stream=True, temperature=1, seed=1,
                                          extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        status, text = served.post_text("/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert status == 400 and "'sql' is used by 1 unfinished request" in text
    assert "sql" in [model.id for model in served.client.models.list()]


def test_metrics_have_the_adapter_s_name(served):
    for name in ("sql", "tiny"):
        served.client.completions.create(model=name, prompt=PROMPT, **FIELDS)
    text = served.get("/metrics")
    for name in ("sql", "tiny"):
        found = re.search(rf'vllm:generation_tokens_total{{engine="0",model_name="{name}"}} (\S+)',
                          text)
        assert float(found[1]) >= 8
    assert re.search(r'vllm:lora_requests_info{max_lora="8",running_lora_adapters="[^"]*"', text)


@pytest.fixture(scope="module")
def two_bases(tiny_model, tiny_hf, directories, lora_case, tmp_path_factory):
    """A server of two models with adapters, and the directory of an adapter of the second."""
    root = tmp_path_factory.mktemp("two")
    llmc.compile(tiny_hf, root / "other", enable_lora=True, max_seq_len=32)
    factors = lora.make(tiny_model, lora.linear_layers(tiny_model), seed=1)
    llmc.compile_adapter(lora.save(root / "peft", factors), root / "other", root / "late")
    with serving(lora_case(1), root / "other", "--served_model_name", "other", "--lora_modules",
                 f"sql={directories / 'sql'}", "--lora_modules", f"own={root / 'late'}",
                 "--allow_runtime_lora_updating") as own:
        yield own, root / "late"


def test_an_adapter_belongs_to_the_model_that_it_was_compiled_for(two_bases, directories, texts):
    served, late = two_bases
    parents = {model.id: model.parent for model in served.client.models.list()}
    assert parents == {"tiny": None, "sql": "tiny", "other": None, "own": "other"}
    for name, text in (("sql", "sql"), ("own", "chat"), ("other", "tiny"), ("tiny", "tiny")):
        answer = served.client.completions.create(model=name, prompt=PROMPT, **FIELDS)
        assert (answer.model, answer.choices[0].text) == (name, texts[text])

    def update(kind, **body):
        return served.post_text(f"/v1/{kind}_lora_adapter", body)

    assert update("load", lora_name="late", lora_path=str(late))[0] == 200
    assert served.client.models.retrieve("late").parent == "other"
    for body, message in (
            (dict(lora_name="sql", lora_path=str(late)), "the name of an adapter of 'tiny'"),
            (dict(lora_name="other", lora_path=str(late)), "is the name of the model"),
            (dict(lora_name="x", lora_path=str(late), model="tiny"), "another case directory"),
            (dict(lora_name="x", lora_path=str(directories / "no")), "has no adapter_info.json")):
        status, text = update("load", **body)
        assert status == 400 and message in text, text
    assert update("unload", lora_name="late", model="tiny")[0] == 404
    assert update("unload", lora_name="late")[0] == 200
    assert update("unload", lora_name="late")[0] == 404
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny', 'other' and 2 adapt"):
        served.client.completions.create(model="late", prompt=PROMPT)


def test_adapters_of_none_of_several_models_are_refused(directories, lora_case, case_tp1):
    from llmc.server.serve import serve
    for cases, message in (
            ([case_tp1, case_tp1], "no model takes adapters"),
            ([lora_case(1), lora_case(1)], "compiled for 'a' and 'b', which are equal"),
            ([lora_case(2), case_tp1], "another case directory than 'a'")):
        with pytest.raises(llmc.LlmcError, match=message):
            serve(cases, served_model_name=["a", "b"], adapters={"sql": directories / "sql"})


def test_updates_need_an_option(server):
    assert server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"})[0] == 404
    assert "lora" not in server.get("/openapi.json")


@pytest.mark.parametrize(("options", "message"), [
    (["--lora_modules", "sql"], "--lora_modules is 'sql', expected NAME=DIR"),
    (["--lora_modules", "a=x", "--lora_modules", "a=y"], "has two adapters named 'a'"),
    (["--lora_modules", "tiny=x"], "an adapter has the name of the model, 'tiny'")])
def test_wrong_options_are_refused(options, message, lora_case):
    from click.testing import CliRunner

    from llmc.cli import main
    result = CliRunner().invoke(main, ["serve", str(lora_case(1)), "--served_model_name", "tiny",
                                       "--port", "0", *options])
    assert result.exit_code == 2 and message in result.stderr
