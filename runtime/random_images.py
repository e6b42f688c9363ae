"""Prompts of random images and tokens, for benchmarks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.core.llm import LLM
from llmc.runtime.multimodal.images import import_pillow
from llmc.runtime.prompts import MediaPrompt


@dataclass(frozen=True)
class RandomImages:
    """Random images of each prompt.

    Args:
        count: of a prompt.
        width, height: in pixels.
    """

    count: int
    width: int
    height: int

    @staticmethod
    def parse(text: str) -> RandomImages:
        """Parse count x width x height, such as `1x1024x1024`.

        Raises:
            LlmcError: it is written otherwise.
        """
        sizes = text.lower().split("x")
        if len(sizes) != 3 or not all(own.isdecimal() and 0 < int(own) < 1 << 16 for own in sizes):
            raise LlmcError(f"--images is '{text}', expected count x width x height; write it like "
                            f"1x1024x1024")
        return RandomImages(*map(int, sizes))

    def prompts(self, llm: LLM, texts: Sequence[Sequence[int]], rng: np.random.Generator) -> \
            tuple[list[MediaPrompt], float]:
        """Preprocess new images, which no cache has, before each text.

        Args:
            texts: token ids.

        Returns:
            The prompts, and the seconds that preprocessing took.

        Raises:
            LlmcError: the model takes no images, or none of this size.
        """
        processor = llm.processor
        if processor is None or processor.description.image is None:
            raise LlmcError(f"--images is given, but '{llm.manifest.source.architecture}' takes no "
                            f"images; leave it out")
        places = [processor.description.image.placeholder_id] * self.count
        images = [[self._image(rng) for _ in places] for _ in texts]
        start = time.perf_counter()
        prompts = [llm.media_prompt([*places, *(
            token for token in text if token not in processor.item_token_ids)], images=own)
            for text, own in zip(texts, images, strict=True)]
        return prompts, time.perf_counter() - start

    def _image(self, rng: np.random.Generator) -> object:
        pixels = rng.integers(0, 256, (self.height, self.width, 3), np.uint8)
        return import_pillow().Image.fromarray(pixels)
