"""Prompts with images that layers attend to (cross-attention) generate as transformers does."""

import base64
import json
import shutil

import families
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from image_models import (
    GREEDY,
    MODELS,
    attended,
    expected,
    images,
    inputs_of,
    prompts_of,
    row_token,
    write_model,
)
from processor_checkpoints import FAMILIES, tokenizer_of
from safetensors.numpy import load_file, save_file
from server_process import serving
from transformers.models.mllama import processing_mllama

import llmc
from llmc.artifacts.manifest import ImageMemory, read_manifest
from llmc.cli import main
from llmc.compiler.check.diff import diff
from llmc.compiler.frontend import export
from llmc.runtime import replica
from llmc.runtime.core.image_memory import NO_IMAGES, prompt_memory
from llmc.runtime.engines import cpu, image_encoder
from llmc.runtime.multimodal.items import MediaItem, PlaceholderRange

ROWS = ImageMemory(tiles_per_image=4, rows_per_tile=3, width=1, max_seq_len=100)
IMAGE = 9


def item(tiles):
    return MediaItem("image", {"aspect_ratio_mask": np.arange(4)[None, None] < tiles}, "", 0)


def memory_of(ids, tiles, rows=ROWS):
    positions = [index for index, token in enumerate(ids) if token == IMAGE]
    return prompt_memory([PlaceholderRange(item(count), position, 1, np.empty(0, np.int64))
                          for position, count in zip(positions, tiles, strict=True)], rows)


@pytest.mark.parametrize(("ids", "tiles"), [
    ((1, 9, 3, 4), (2,)), ((9, 1, 3), (4,)), ((1, 9), (1,)), ((1, 9, 3, 9, 4, 9, 5), (1, 4, 2)),
    ((1, 2, 9, 9, 3), (2, 3)), ((1, 9, 9, 9), (4, 4, 1)), ((9, 9, 1, 2, 9, 9, 3), (1, 4, 4, 4)),
    ((9, 9, 9, 2), (4, 2, 3)), ((1, 9, 9, 2, 9, 3, 9, 9), (4, 1, 2, 3, 4))])
def test_each_token_attends_to_the_rows_of_transformers_mask(ids, tiles):
    mask = processing_mllama.convert_sparse_cross_attention_mask_to_dense(
        [processing_mllama.get_cross_attention_token_mask(list(ids), IMAGE)], [list(tiles)], 4,
        len(ids))[0]
    memory = memory_of(ids, tiles)
    order = {id(own): index for index, own in enumerate(dict.fromkeys(
        own for own, _ in memory.pieces))}
    rows = [(order[id(own)], row) for own, taken in memory.pieces for row in taken]
    assert len(memory) == len(rows)
    for position, visible in enumerate(mask):
        view = memory.view(position)
        tiles_seen = np.argwhere(visible if visible.any() else np.ones_like(visible))
        expected = [(image, tile * 3 + row) for image, tile in tiles_seen.tolist()
                    for row in range(3)]
        assert sorted(rows[view.first:view.first + view.length]) == expected
        assert view.seen == visible.any()
        stop = memory.stop(position)
        assert stop is None or memory.view(stop) is not view
        assert all(memory.view(own) is view for own in range(position, stop or len(ids)))


def test_padding_is_left_out_if_no_token_attends_to_it():
    assert len(memory_of((1, 9, 2), (2,))) == 12  # with padding, for the token before
    assert len(memory_of((9, 1, 2), (2,))) == 6
    assert len(memory_of((1, 9, 9), (1, 2))) == 24
    assert len(NO_IMAGES) == 1 and NO_IMAGES.key == b""
    with pytest.raises(llmc.LlmcError, match="2 images of a prompt take 24 rows, layers attend to "
                                             "at most 23; .* --mem_max_seq_len 24"):
        memory_of((1, 9, 9), (4, 4), ROWS.model_copy(update={"max_seq_len": 23}))


def write(folder):
    """Write a model whose logits have no row for the image's token, as published ones."""
    family = FAMILIES[MODELS["mllama"][0]]
    return write_model("mllama", folder, vocab_size=tokenizer_of(family).token_to_id(family.row))


TEMPLATE = """<s>{% for message in messages %}[{{ message.role }}] {% for part in message.content %}
{%- if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}
{%- endfor %}"""


class Reference:
    """transformers' model, which generates once for each prompt."""

    def __init__(self, model):
        self.model = model
        self._known = {}

    def assert_generates(self, llm, prompt, completion):
        read = llm.media_prompt(prompt["prompt"], images=prompt["images"])
        key = *read.token_ids, *(own.item.digest for own in read.ranges)
        if key not in self._known:
            token = row_token(llm)
            self._known[key] = expected(self.model, read, token)
        tokens, logprobs = self._known[key]
        assert list(completion.token_ids) == tokens
        assert [own.chosen for own in completion.logprobs] == pytest.approx(logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """transformers' model, and its case directory."""
    folder = tmp_path_factory.mktemp("mllama")
    made = write(folder / "hf")
    (folder / "hf" / "chat_template.jinja").write_text(TEMPLATE)
    llmc.compile(folder / "hf", folder / "case")
    return Reference(made), folder / "case"


def prompts(llm):
    """Of those of all models: one with images at the start, and one with adjacent images."""
    own = llm.processor.placeholders["image"]
    return [*prompts_of(llm), {"prompt": f"{own}what is it", "images": images(1)},
            {"prompt": f"compare {own}{own} with {own} now", "images": images(3)[::-1]}]


def assert_all_generate(reference, llm, given):
    for prompt, completion in zip(given, llm.generate(given, GREEDY), strict=True):
        reference.assert_generates(llm, prompt, completion)


def test_prompts_generate_alone_and_in_company(model):
    reference, case = model
    with llmc.LLM(case) as llm:
        given = prompts(llm)
        for prompt in given:
            assert_all_generate(reference, llm, [prompt])
        assert_all_generate(reference, llm, given)


def test_ranks_generate_the_same(model, tmp_path):
    reference, case = model
    llmc.compile(case.parent / "hf", tmp_path / "case", tp_size=2)
    with llmc.LLM(tmp_path / "case") as llm:
        assert_all_generate(reference, llm, prompts(llm))


@pytest.mark.parametrize("options", [
    {"max_num_batched_tokens": 6, "max_batch_size": 4}, {"kv_cache_tokens": 80, "block_size": 4},
    {"prefix_reuse": False, "max_batch_size": 2}, {"speculate": "ngram"}])
def test_chunks_preemption_and_drafts_change_nothing(model, options):
    reference, case = model
    with llmc.LLM(case, **options) as llm:
        assert_all_generate(reference, llm, prompts(llm) * 3)
        assert ("kv_cache_tokens" in options) == (llm.metrics()["preemptions"] > 0)


def cached(llm, prompt):
    return next(iter(llm.stream(prompt, GREEDY))).num_cached_tokens


def test_prefix_caching_distinguishes_images(model):
    one, other, _ = images(3)
    with llmc.LLM(model[1], block_size=16) as llm:
        text = f"look at {llm.processor.placeholders['image']} and tell me what it is, in words"
        assert cached(llm, {"prompt": text, "images": [one]}) == 0
        assert cached(llm, {"prompt": text, "images": [one.copy()]}) >= 16
        assert cached(llm, {"prompt": text, "images": [other]}) == 0
        assert cached(llm, text.replace(llm.processor.placeholders["image"], "it")) == 0


def test_an_image_is_encoded_once(model, monkeypatch):
    encoded = []
    real = image_encoder.MediaEncoder.encode
    monkeypatch.setattr(image_encoder.MediaEncoder, "encode",
                        lambda self, item: encoded.append(1) or real(self, item))
    with llmc.LLM(model[1]) as llm:
        prompt = prompts(llm)[1]
        llm.generate([prompt] * 3, GREEDY)
        llm.generate({**prompt, "prompt": prompt["prompt"] + " again"}, GREEDY)
        assert len(encoded) == 1


def test_samples_and_beams_of_a_prompt_share_its_images(model):
    reference, case = model
    with llmc.LLM(case) as llm:
        prompt = prompts(llm)[1]
        first, second = llm.generate(prompt, llmc.SamplingParams(
            max_tokens=10, temperature=0, ignore_eos=True, logprobs=0, n=2))
        reference.assert_generates(llm, prompt, first)
        assert first.token_ids == second.token_ids
        beam, = llm.generate([prompt], llmc.SamplingParams(
            max_tokens=6, beam_width=3, ignore_eos=True))
        read = llm.media_prompt(prompt["prompt"], images=prompt["images"])
        ids = torch.tensor([read.token_ids])
        with torch.no_grad():
            made = reference.model.generate(
                ids, **attended([own.item.arrays for own in read.ranges], read.token_ids,
                                row_token(llm)),
                max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert list(beam.token_ids) == made[0, ids.shape[1]:].tolist()


def test_what_is_not_supported_is_named(model, tmp_path, monkeypatch):
    _, case = model
    with llmc.LLM(case) as llm:
        own, pictures = llm.processor.placeholders["image"], images(3)
        with pytest.raises(llmc.LlmcError, match="5 images of a prompt take 340 rows"):
            llm.generate([{"prompt": f"see {own * 5}", "images": [pictures[2]] * 5}, "fine"],
                         GREEDY)
        with pytest.raises(llmc.LlmcError, match="attend to images, which prompt embeddings do"):
            llm.generate({"prompt_embeds": np.zeros((3, 64), np.float32)}, GREEDY)
        assert len(llm.generate("fine", GREEDY)[0].token_ids) == 10
    source = case.parent / "hf"
    with pytest.raises(llmc.LlmcError, match="mem_max_seq_len 67 is less than the 68 rows of an"):
        llmc.compile(source, tmp_path / "a", mem_max_seq_len=67)
    for name in ("enable_prompt_embeds", "enable_lora"):
        with pytest.raises(llmc.LlmcError, match=f"leave out --{name}, or compile"):
            llmc.compile(source, tmp_path / "a", **{name: True})
    monkeypatch.setattr(export, "attends_to_images", lambda model: False)
    with pytest.raises(llmc.LlmcError, match="language model has no cross-attention to images; "):
        llmc.compile(source, tmp_path / "a")


def test_the_language_model_alone_takes_text(model, tmp_path):
    _, case = model
    llmc.compile(case.parent / "hf", tmp_path / "case", language_model_only=True)
    with llmc.LLM(tmp_path / "case") as llm, llmc.LLM(case) as whole:
        alone, = llm.generate("hello there", GREEDY)
        assert alone.token_ids == whole.generate("hello there", GREEDY)[0].token_ids


def test_commands_and_requests_take_images(model, tmp_path):
    _, case = model
    for index, image in enumerate(images(2)):
        image.save(tmp_path / f"{index}.png")
    files = [tmp_path / "0.png", tmp_path / "1.png"]
    data = [base64.b64encode(own.read_bytes()).decode() for own in files]
    with llmc.LLM(case) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": [
            *({"type": "image", "image": own} for own in files),
            {"type": "text", "text": "which is it?"}]}])
        answer, = llm.generate([prompt], GREEDY)
    result = CliRunner().invoke(main, [
        "run", str(case), "--json", "--max_tokens", "10", "--temperature", "0", "--ignore_eos",
        "--chat", "--prompt", "which is it?", *(word for own in files
                                                for word in ("--image", str(own)))])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["completions"][0]["token_ids"] == list(answer.token_ids)
    with serving(case) as server:
        status, _, body = server.post("/v1/chat/completions", {
            "messages": [{"role": "user", "content": [
                *({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{own}"}}
                  for own in data), {"type": "text", "text": "which is it?"}]}],
            "max_tokens": 10, "temperature": 0, "ignore_eos": True})
    assert status == 200, body
    assert body["choices"][0]["message"]["content"] == answer.text
    assert body["usage"]["prompt_tokens"] == len(prompt)
    shown = CliRunner().invoke(main, ["inspect", str(case)])
    assert "to at most 272 rows of the images of a prompt; an image has 68" in " ".join(
        shown.output.split())


def test_a_prompt_has_log_probabilities_but_of_its_images(model):
    reference, case = model
    with llmc.LLM(case) as llm:
        for prompt in (prompts(llm)[2], prompts(llm)[4]):
            read = llm.media_prompt(prompt["prompt"], images=prompt["images"])
            completion, = llm.generate([prompt], llmc.SamplingParams(
                max_tokens=1, prompt_logprobs=0))
            with torch.no_grad():
                scores = reference.model(**inputs_of(
                    reference.model, read, row_token(llm))).logits[0].double().log_softmax(-1)
            for position, own in enumerate(completion.prompt_logprobs):
                token = read.token_ids[position]
                if not position or token == row_token(llm):
                    assert own is None
                else:
                    assert own.chosen == pytest.approx(
                        float(scores[position - 1, token]), abs=1e-4)


def test_chunks_are_shorter_where_layers_attend_to_many_rows(model, monkeypatch):
    """Scores of 6 tokens and an image of two tiles, of four, fit; so prompts run one by one."""
    reference, case = model
    manifest = read_manifest(case)
    rows = manifest.memory.tiles_per_image * manifest.memory.rows_per_tile
    monkeypatch.setattr(cpu, "MIN_CHUNK", 5)
    monkeypatch.setattr(cpu, "SCORE_BYTES", 4 * 3 * manifest.dims.num_heads * rows * 3)
    config = replica.EngineConfig(4, 2048)
    more = manifest.memory.model_copy(update={"max_seq_len": 2 * manifest.dims.max_seq_len})
    assert replica.step_bytes(manifest.model_copy(update={"memory": more}), config) \
        > replica.step_bytes(manifest, config)
    with llmc.LLM(case) as llm:
        parts, engine = [], families.ranks(llm)[0]
        decode = engine._decode
        monkeypatch.setattr(engine, "_decode", lambda part: parts.append((
            len(part.cu_seqlens) - 1, len(part.input_ids))) or decode(part))
        own = llm.processor.placeholders["image"]
        prompt = {"prompt": f"{own}" + "what is it and where " * 5, "images": images(1)}
        assert_all_generate(reference, llm, [prompt, {"prompt": f"see {own}", "images": images(1)},
                                             {"prompt": f"a {own}", "images": images(1)}])
    assert parts[:2] == [(1, 6), (1, 6)] and max(count for _, count in parts) == 6
    assert {sequences for sequences, count in parts if count > 3} == {1}


@pytest.mark.thorough
def test_diff_compares_each_layer_on_text(model):
    """Those that attend to images leave the hidden state as it is."""
    _, case = model
    report = diff(case, case.parent / "hf", tokens=4)
    assert report.verdict is None, report
    compared = [own.name for own in report.layers if own.pair == "compiled vs transformers"]
    assert compared == [f"hidden_states.{layer}" for layer in range(5)] + ["logits"]


@pytest.mark.thorough
@pytest.mark.parametrize("layer", ["k_proj", "o_proj"])  # of the encoder's graph, and the model's
def test_diff_compares_weights_of_layers_that_attend_to_images(layer, model, tmp_path):
    shutil.copytree(model[1].parent / "hf", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    name = next(name for name in tensors if name.endswith(f"cross_attn.{layer}.weight"))
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    report = diff(model[1], tmp_path / "hf", tokens=0)
    assert report.verdict and f"cross_attn.{layer}.weight" in report.verdict
    assert all(own.passed for own in report.layers)


def test_diff_refuses_bisect(model):
    with pytest.raises(llmc.LlmcError, match="--bisect is not supported for 'Mllama"):
        diff(model[1], model[1].parent / "hf", bisect=True)
