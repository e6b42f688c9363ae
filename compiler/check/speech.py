"""Comparison of a model that transcribes speech with the original.

llmc makes the features of the audio for both models. The encoder's rows are compared as the
compiled model has them: the cross-attention KV of each layer of the decoder.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmc.artifacts.manifest import Manifest, require_speech
from llmc.compiler.check.execute import Values, run_chips, run_encoders
from llmc.compiler.check.reference import load_reference, reference_speech
from llmc.compiler.graph.names import HIDDEN_STATE
from llmc.errors import LlmcError
from llmc.runtime.core.request import InputProcessor
from llmc.runtime.core.transcription import Transcriber
from llmc.runtime.multimodal.feature_rows import make_rows

_TOKENS = 24


class SpeechComparison:
    """A window of audio and tokens of the decoder, for both models.

    Args:
        manifest: of a model that transcribes speech.
        root: its case directory.

    Raises:
        LlmcError: the target is not cpu.
    """

    def __init__(self, manifest: Manifest, root: Path) -> None:
        if manifest.target.spec.gpu:
            raise LlmcError(f"diff does not support target {manifest.target.kind} for "
                            f"'{manifest.source.architecture}', which reads audio; compare target "
                            f"cpu")
        self._manifest, self._root, self._encoder = manifest, root, require_speech(manifest)
        self._transcriber = Transcriber(manifest, root, InputProcessor(manifest, root, 1))
        count = min(_TOKENS, manifest.dims.max_seq_len) - 1
        self._ids = [self._encoder.decoder_start_token_id, *np.random.default_rng(0).integers(
            0, manifest.dims.vocab_size, count).tolist()]

    def features(self, path: Path) -> np.ndarray:
        """Read the first window of an audio file, float32 [num_frames, num_channels].

        Raises:
            LlmcError: it cannot be read.
        """
        return self._transcriber.first_window(path)

    def compiled(self, features: np.ndarray) -> list[Values]:
        """Run the compiled model; return the tensors of each chip."""
        assert self._encoder.features is not None
        memory = run_encoders(self._manifest, self._root, make_rows(
            features, self._encoder.features))
        layers = [HIDDEN_STATE.format(index) for index in range(self._manifest.dims.num_layers)]
        chips = run_chips(self._manifest, self._root, self._ids, {*layers, "logits"},
                          memory=memory)
        return [own | chip for own, chip in zip(memory, chips, strict=True)]

    def original(self, reference: str | Path, windows: list[np.ndarray]) -> list[Values]:
        """Run transformers on each window.

        Raises:
            LlmcError: it cannot load the model.
        """
        model = load_reference(reference)
        return [reference_speech(model, np.ascontiguousarray(own.T), self._ids) for own in windows]
