"""Images preprocessed as transformers' default processors do, to the bit."""

import json

import numpy as np
import pytest
from PIL import Image
from processor_checkpoints import FAMILIES, image_of
from transformers_processors import REFERENCES, digest_of, references_of, text_of

STORED = json.loads(REFERENCES.read_text())
WITH_IMAGES = [name for name, family in FAMILIES.items() if family.image]
# transformers pads the images of these to one size, or to one number of tiles.
PADDED = {"pixtral", "lighton_ocr", "llava_next"}
ONES = {"idefics3", "smolvlm"}  # of these, the mask of padding is 1 everywhere


def prompt(name, processor, tokenizer, sizes):
    """Our token ids and encoder inputs of a prompt with images of these sizes."""
    items = processor.process_images([Image.fromarray(image_of(size)) for size in sizes])
    text = processor.expand_text(text_of(processor.placeholders["image"], len(items)), items)
    return items, tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_inputs_and_tokens_are_those_of_transformers(name, processors, checkpoints):
    assert STORED.keys() == set(WITH_IMAGES)
    axis = 1 if name in ("idefics3", "smolvlm", "mllama") else 0  # that of a prompt's images
    for stored in STORED[name]:
        items, ids = prompt(name, processors[name], checkpoints[name][1], stored["sizes"])
        assert len(ids) == stored["num_tokens"]
        assert digest_of(np.array(ids)) == stored["ids"]
        if name in ONES:
            del stored["inputs"]["pixel_attention_mask"]
        for item in items:
            assert item.arrays.keys() == stored["inputs"].keys()
        if len(items) > 1 and name in PADDED:
            continue
        for key, expected in stored["inputs"].items():
            own = np.concatenate([item.arrays[key] for item in items], axis)
            assert list(own.shape) == expected["shape"]
            assert digest_of(own) == expected["sha256"], (key, stored["sizes"])


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_every_row_has_a_position(name, processors, checkpoints):
    processor, tokenizer = processors[name], checkpoints[name][1]
    items, ids = prompt(name, processor, tokenizer, [(301, 97), (61, 47)])
    first, second = processor.locate(ids, items)
    assert [len(own.positions) for own in (first, second)] == [item.num_rows for item in items]
    assert first.offset + first.length <= second.offset
    row = tokenizer.token_to_id(FAMILIES[name].row or FAMILIES[name].tokens["image_token"])
    taken = [*first.positions, *second.positions]
    assert all(ids[own] == row for own in taken)
    assert ids.count(row) == len(taken) or name == "mllama"


@pytest.mark.thorough
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_stored_references_are_what_transformers_gives(name, checkpoints):
    pytest.importorskip("torchvision")
    folder, _ = checkpoints[name]
    assert references_of(FAMILIES[name], folder) == STORED[name]


def test_pan_and_scan_adds_crops_and_says_so(checkpoints, processors):
    description = processors["gemma3"].description.image
    settings = {**description.processor.model_dump(), "do_pan_and_scan": True,
                "pan_and_scan_min_crop_size": 64}
    crops = type(description.processor).model_validate(settings)
    arrays = crops.process(np.ascontiguousarray(image_of((301, 97)).transpose(2, 0, 1)), 1)
    assert arrays["pixel_values"].shape == (4, 3, 224, 224)
    text = description.prompt.text(arrays, crops)
    assert text.startswith("Here is the original image \n\n<start_of_image>")
    assert text.count("<image_soft_token>") == 4 * 16


def test_an_image_alone_has_the_inputs_it_has_in_company(processors):
    image = Image.fromarray(image_of((61, 47)))
    other = Image.fromarray(image_of((301, 97)))
    for name in WITH_IMAGES:
        alone, = processors[name].process_images([image])
        _, beside = processors[name].process_images([other, image])
        # LLaVA-OneVision cuts an image into tiles only where it is the only one.
        assert (alone.digest == beside.digest) == (name != "llava_onevision")


