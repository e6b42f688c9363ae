"""prompt_embeds of /v1/completions: torch's and NumPy's files in base64, and bad ones."""

import base64
import io
import pickle
import zipfile

import numpy as np
import pytest
import torch
from server_process import serving

import llmc
from llmc.server.prompt_embeds import read_prompt_embeds

ROWS = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)


def torch_file(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def numpy_file(array, **options):
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def text(data):
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_torch_s_files_are_read_without_torch(dtype):
    tensor = torch.from_numpy(ROWS).to(dtype)
    assert np.array_equal(read_prompt_embeds(text(torch_file(tensor))).astype(np.float64),
                          tensor.double().numpy())


class Malicious:
    def __reduce__(self):
        return print, ("run",)


def compressed(data):
    source, target = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))
    return target.getvalue()


@pytest.mark.parametrize(("data", "match"), [
    (torch_file(Malicious()), r"it has __builtin__\.print; save one floating-point tensor"),
    (torch_file({"a": torch.zeros(2, 2)}), "it is not one tensor"),
    (torch_file(torch.zeros(2, 2, dtype=torch.int64)), r"it has torch\.LongStorage"),
    (torch_file(torch.from_numpy(ROWS).T), "a view of another; save a contiguous copy"),
    (torch_file(torch.from_numpy(ROWS)[1:]), "a view of another"),
    (compressed(torch_file(torch.zeros(2, 2))), "its zip file is compressed"),
    (torch_file(torch.zeros(2, 2))[:200], "cannot be read"),
    (numpy_file(np.array([Malicious()], object), allow_pickle=True), "cannot be read"),
    (numpy_file(ROWS)[:-8], "cannot be read"),
    (pickle.dumps(ROWS), "is neither a file of torch.save nor a .npy file"),
    (b"", "is neither a file")])
def test_other_files_are_refused_and_run_no_code(data, match, capsys):
    with pytest.raises(ValueError, match=match):
        read_prompt_embeds(text(data))
    assert "run" not in capsys.readouterr().out


def test_text_that_is_not_base64_is_refused():
    with pytest.raises(ValueError, match="is not base64; give base64 of torch.save's bytes"):
        read_prompt_embeds("é")


@pytest.fixture(scope="module")
def case(tiny_hf, tmp_path_factory):
    directory = tmp_path_factory.mktemp("embeds") / "case"
    llmc.compile(tiny_hf, directory, enable_prompt_embeds=True)
    return directory


@pytest.fixture(scope="module")
def embeds_server(case):
    with serving(case, "--enable_prompt_embeds") as own:
        yield own


def complete(server, **body):
    status, _, answer = server.post("/v1/completions", {"model": "tiny", **body})
    return status, answer


def test_embeddings_are_completed_before_the_prompts(embeds_server, case):
    params = llmc.SamplingParams(max_tokens=6, temperature=0)
    with llmc.LLM(case) as llm:
        expected = llm.generate([{"prompt_embeds": ROWS}, {"prompt_embeds": ROWS[:2]}, [5, 9]],
                                params)
    given = [text(torch_file(torch.from_numpy(ROWS))), text(numpy_file(ROWS[:2]))]
    status, answer = complete(embeds_server, max_tokens=6, temperature=0, prompt=[5, 9],
                              prompt_embeds=given)
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == [own.text for own in expected]
    assert answer["usage"]["prompt_tokens"] == 5 + 2 + 2
    status, answer = complete(embeds_server, max_tokens=6, temperature=0,
                              prompt_embeds=text(numpy_file(ROWS)))
    assert (status, answer["choices"][0]["text"]) == (200, expected[0].text)


@pytest.mark.parametrize(("body", "match"), [
    ({"prompt_embeds": "é"}, "prompt_embeds is not base64"),
    ({"prompt_embeds": text(numpy_file(ROWS[:, :3]))}, "rows of 3 values"),
    ({"prompt_embeds": text(numpy_file(ROWS * np.nan))}, "NaN or infinite"),
    ({"prompt_embeds": text(numpy_file(np.tile(ROWS, (20, 1))))}, "100 tokens"),
    ({"prompt_embeds": text(numpy_file(ROWS)), "echo": True}, "echo or prompt_logprobs"),
    ({"prompt_embeds": text(numpy_file(ROWS)), "prompt_logprobs": 1}, "echo or prompt_logprobs"),
    ({"prompt_embeds": 3}, "prompt_embeds"), ({}, "at least one prompt")])
def test_bad_embeddings_are_400(embeds_server, body, match):
    status, answer = complete(embeds_server, **body)
    assert status == 400 and match in answer["error"]["message"]


def test_a_server_started_without_refuses_embeddings(client):
    import openai
    with pytest.raises(openai.BadRequestError, match="started without --enable_prompt_embeds"):
        client.completions.create(model="tiny", prompt="", extra_body={
            "prompt_embeds": text(numpy_file(ROWS))})


def test_a_model_compiled_without_refuses_the_option(case_tp1):
    with pytest.raises(AssertionError, match="compile it again with --enable_prompt_embeds"), \
            serving(case_tp1, "--enable_prompt_embeds"):
        pass
