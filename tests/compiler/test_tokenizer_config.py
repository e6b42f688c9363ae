"""Chat templates and special tokens from all files of a Hugging Face directory."""

import json
import shutil
from functools import partial

import pytest
from transformers import AutoTokenizer

import llmc
from llmc.compiler.api import _write_tokenizer
from llmc.compiler.frontend.huggingface import save_tokenizer
from llmc.compiler.frontend.raw import RawModel
from llmc.compiler.frontend.tokenizer_config import read_chat_templates, write_chat_templates
from llmc.runtime.chat_template import ChatTemplate
from llmc.runtime.sandbox import Sandbox

TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}" \
           "{% endfor %}{{ unk_token }}"
TOOL_TEMPLATE = "TOOLS {{ tools | length }} " + TEMPLATE
NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOL_TEMPLATE}]
MESSAGES = [{"role": "user", "content": "the fox"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
SANDBOX = Sandbox()
CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}
MAP = json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<pad>"})


def compiled(tiny_hf, tmp_path, config, files):
    """Return the source's tokenizer and that of the compiled case directory."""
    source, case = shutil.copytree(tiny_hf, tmp_path / "hf"), tmp_path / "case"
    (source / "chat_template.jinja").unlink()
    case.mkdir()
    for name, text in {"tokenizer_config.json": json.dumps(config), **files}.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    raw = RawModel(graph=None, config={}, kind="huggingface", generation={},
                   save_tokenizer=partial(save_tokenizer, source))
    return source, case, _write_tokenizer(raw, case, 300)


def rendered(case, info, tools):
    paths = {name: case / path for name, path in info.chat_templates.items()}
    own = ChatTemplate(paths, case / "tokenizer" / "tokenizer_config.json", SANDBOX)
    return own.render(MESSAGES, tools)


@pytest.mark.parametrize(("config", "files"), [
    ({**CONFIG, "chat_template": TEMPLATE}, {}),
    ({**CONFIG, "chat_template": NAMED}, {}),
    ({**CONFIG, "chat_template": "not this"}, {"chat_template.jinja": TEMPLATE}),
    (CONFIG, {"chat_template.jinja": TEMPLATE,
              "additional_chat_templates/tool_use.jinja": TOOL_TEMPLATE}),
    ({}, {"chat_template.jinja": TEMPLATE, "special_tokens_map.json": MAP}),
    ({"tokenizer_class": "LlamaTokenizer"}, {"chat_template.jinja": TEMPLATE}),
    ({"tokenizer_class": "PreTrainedTokenizerFast",
      "bos_token": {"__type": "AddedToken", "content": "</s>"}, "added_tokens_decoder": {}},
     {"chat_template.jinja": TEMPLATE, "special_tokens_map.json": MAP}),
], ids=["a text", "named", "a file", "a folder", "a map", "a class", "a map that does not count"])
def test_prompts_equal_those_of_transformers(tiny_hf, tmp_path, config, files):
    source, case, info = compiled(tiny_hf, tmp_path, config, files)
    for directory in (source, case / "tokenizer"):  # transformers reads the compiled directory too
        tokenizer = AutoTokenizer.from_pretrained(directory)
        for tools in (None, TOOLS):
            assert rendered(case, info, tools) == tokenizer.apply_chat_template(
                MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
    assert "chat_template" not in json.loads(
        (case / "tokenizer" / "tokenizer_config.json").read_text())


def test_special_tokens_of_an_unknown_tokenizer_class_are_read_from_files(tiny_hf, tmp_path):
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    _, case, info = compiled(tiny_hf, tmp_path, config,
                             {"chat_template.jinja": TEMPLATE, "special_tokens_map.json": MAP})
    assert rendered(case, info, None) == "<s><user>the fox</s><pad>" and info.eos_token_ids == (2,)


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_a_processor_s_template_is_the_fallback(tiny_hf, tmp_path, file):
    _, case, info = compiled(tiny_hf, tmp_path, CONFIG,
                             {file: json.dumps({"chat_template": TEMPLATE})})
    assert rendered(case, info, None) == "<s><user>the fox</s>"


def test_an_eos_token_of_the_tokenizer_ends_a_chat_model_s_turn(tiny_hf, tmp_path):
    source = shutil.copytree(tiny_hf, tmp_path / "hf")
    raw = RawModel(graph=None, config={"eos_token_id": 0}, kind="huggingface", generation={},
                   save_tokenizer=partial(save_tokenizer, source))
    (tmp_path / "case").mkdir()
    assert _write_tokenizer(raw, tmp_path / "case", 300).eos_token_ids == (0, 2)


def test_a_tool_only_template_is_refused_without_tools(tiny_hf, tmp_path):
    _, case, info = compiled(tiny_hf, tmp_path, {**CONFIG, "chat_template": NAMED[1:]}, {})
    assert info.chat_template is None and rendered(case, info, TOOLS).startswith("TOOLS 1")
    with pytest.raises(llmc.LlmcError, match="has chat templates for tool_use only; give tools"):
        rendered(case, info, None)


def test_a_name_that_leaves_the_folder_is_refused(tmp_path):
    for name in ("../../x", "a/b", ""):
        with pytest.raises(llmc.LlmcError, match="rename it to letters, digits, - and _"):
            write_chat_templates({name: "text"}, tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("value", [3, ["a"], [{"name": "default"}], {"default": None}])
def test_an_invalid_template_is_refused(tmp_path, value):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(llmc.LlmcError, match="is neither a string nor named strings"):
        read_chat_templates(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(llmc.LlmcError, match="chat_template.jinja' cannot be read"):
        read_chat_templates(tmp_path)
