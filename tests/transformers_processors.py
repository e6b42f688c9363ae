"""References: what transformers' processors give for the media of the tests.

`python tests/transformers_processors.py` writes references.json. It needs torchvision,
whose resampling the default processors use.
"""

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import transformers
from PIL import Image
from processor_checkpoints import FAMILIES, PROMPTS, image_of, write_checkpoint

REFERENCES = Path(__file__).parent / "multimodal/references.json"
PARTS = "Look:\n", "\n\nat it, and ", " too"  # around the placeholders


def load_processor(family, folder):
    """Make transformers' processor of a checkpoint."""
    parts = {"tokenizer": transformers.PreTrainedTokenizerFast.from_pretrained(folder)}
    if family.image:
        name = family.image["image_processor_type"].removesuffix("Fast")
        parts["image_processor"] = getattr(transformers, name).from_pretrained(folder)
    if family.audio:
        name = family.audio["feature_extractor_type"]
        parts["feature_extractor"] = getattr(transformers, name).from_pretrained(folder)
    kind = getattr(transformers, family.processor_class)
    arguments = kind.__init__.__code__.co_varnames
    if "video_processor" in arguments:
        parts["video_processor"] = None
    kind.check_argument_for_proper_class = lambda self, name, argument: type(argument)
    return kind(**parts, **{key: value for key, value in family.settings.items()
                            if key in arguments})


def text_of(placeholder, count):
    """A prompt with placeholders."""
    return "".join(own + placeholder * (index < count) for index, own in enumerate(PARTS))


def digest_of(array):
    array = np.ascontiguousarray(array)
    return hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).hexdigest()


def references_of(family, folder):
    """Token ids and encoder inputs of prompts with images, as digests."""
    processor = load_processor(family, folder)
    return [_reference(processor, sizes) for sizes in PROMPTS]


def _reference(processor, sizes):
    images = [Image.fromarray(image_of(size)) for size in sizes]
    placeholder = getattr(processor, "image_placeholder_token", processor.image_token)
    nested = images if hasattr(processor, "multi_page") else [images]
    output = processor(images=nested, text=[text_of(placeholder, len(images))],
                       return_tensors="pt", add_special_tokens=False)
    ids = output["input_ids"][0].numpy()
    inputs = {name: own.float().numpy() if own.is_floating_point() else own.numpy()
              for name, own in output.items()
              if name not in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids",
                              "cross_attention_mask", "batch_num_images", "labels")}
    return {"sizes": [list(size) for size in sizes], "num_tokens": len(ids),
            "ids": digest_of(ids), "inputs": {
                name: {"shape": list(own.shape), "sha256": digest_of(own)}
                for name, own in inputs.items()}}


def _main():
    references = {}
    for name, family in FAMILIES.items():
        if family.image:
            with tempfile.TemporaryDirectory() as folder:
                write_checkpoint(family, Path(folder))
                references[name] = references_of(family, folder)
    REFERENCES.write_text(json.dumps(references, indent=1) + "\n")


if __name__ == "__main__":
    _main()
