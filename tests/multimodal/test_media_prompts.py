"""Prompts with images: placeholders, conversations, and models without them."""

import base64
import io

import media_case
import pytest
from media_case import ROWS, data_url, picture
from PIL import Image

from llmc import LLM
from llmc.errors import LlmcError

RED, BLUE = picture("red"), picture("blue", (61, 47))


@pytest.fixture(scope="module")
def llm(tiny_media):
    with LLM(tiny_media) as own:
        yield own


def said(*parts):
    return [{"role": "user", "content": [*parts]}]


def test_items_take_the_places_of_their_placeholders(llm, tmp_path):
    (tmp_path / "blue.png").write_bytes(BLUE)
    prompt = llm.media_prompt("one <image> two <image>", images=[
        Image.open(io.BytesIO(RED)), tmp_path / "blue.png"])
    row = llm.tokenizer.token_to_id("<image>")
    first, second = prompt.ranges
    assert prompt.token_ids.count(row) == 2 * ROWS == first.length + second.length
    assert [prompt.token_ids[at] for own in prompt.ranges for at in own.positions] == \
        [row] * 2 * ROWS
    assert first.item.digest != second.item.digest
    ids = llm.tokenize("one <image> two <image>")
    of_ids = llm.media_prompt(ids, images=[data_url(RED), str(tmp_path / "blue.png")])
    assert of_ids.token_ids == prompt.token_ids
    assert [own.item.digest for own in of_ids.ranges] == [first.item.digest, second.item.digest]


def test_every_form_of_a_part_gives_one_prompt(llm, tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    url, text = data_url(RED), {"type": "text", "text": "what is it?"}
    image = Image.open(io.BytesIO(RED))
    prompts = [llm.chat_prompt(said(part, text)) for part in (
        {"type": "image", "image": RED}, {"type": "image", "image": image},
        {"type": "image", "path": str(tmp_path / "red.png")}, {"type": "image", "url": url},
        {"type": "image_url", "image_url": {"url": url}}, {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url})]
    assert {tuple(own.token_ids) for own in prompts} == {tuple(prompts[0].token_ids)}
    assert {own.ranges[0].item.digest for own in prompts} == {prompts[0].ranges[0].item.digest}
    assert llm.tokenizer.decode(prompts[0].token_ids, skip_special_tokens=False) == \
        "[user]" + "<image>" * ROWS + "what is it?[assistant]"
    assert isinstance(llm.chat_prompt(said(text)), list)


@pytest.mark.parametrize("template", [
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% endfor %}"])
def test_templates_without_images_get_placeholders(tmp_path, template):
    with LLM(media_case.write_case(tmp_path, template)) as llm:
        prompt = llm.chat_prompt(said({"type": "text", "text": "a"}, {
            "type": "image", "image": RED}, {"type": "text", "text": "b"}))
        text = llm.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        assert text.replace("\n", "") == "[user]a" + "<image>" * ROWS + "b"


def test_bad_media_are_refused(llm, tmp_path):
    for part, reason in (
            ({"type": "image"}, "has no image; give a path, bytes or a data: URL"),
            ({"type": "image", "path": str(tmp_path / "none")}, "cannot be read .No such"),
            ({"type": "image", "image": 5}, "image 1: the image is 5"),
            ({"type": "image_url", "image_url": "http://example.com/a"}, "as only data: URLs are"),
            ({"type": "audio", "audio": base64.b64decode("AAAA")}, "takes no audio clips"),
            ({"type": "video", "video": "a"}, "is a video, which llmc does not support")):
        with pytest.raises(LlmcError, match=reason):
            llm.chat_prompt(said({"type": "image", "image": RED}, part))
    with pytest.raises(LlmcError, match="2 placeholders '<image>' for 1 images"):
        llm.media_prompt("<image><image>", images=[RED])


def test_a_model_without_images_says_so(case_tp1):
    with LLM(case_tp1) as llm:
        assert llm.processor is None
        with pytest.raises(LlmcError, match="takes neither images nor audio; give text only"):
            llm.chat_prompt(said({"type": "image", "image": RED}))
        with pytest.raises(LlmcError, match="takes neither images nor audio"):
            llm.media_prompt("a", images=[RED])
