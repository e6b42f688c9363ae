"""Transcription of speech by an encoder-decoder model, in windows.

transformers' sequential algorithm for long audio: a window of 30 seconds is decoded with
timestamps, and the next one begins at the last timestamp, so that no word is cut.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from llmc.artifacts.case_files import read_bounded
from llmc.artifacts.manifest import PROCESSOR, EncoderInfo, FeatureRows, Manifest, SpeechInfo
from llmc.errors import LlmcError, reason_of, shown
from llmc.runtime.core.request import InputProcessor, Request
from llmc.runtime.multimodal.audio import Waveform, load_audio
from llmc.runtime.multimodal.feature_extractors import WhisperFeatureExtractor
from llmc.runtime.multimodal.feature_rows import make_rows
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.speech_rules import SpeechRules, TimestampRules

Audio = str | Path | bytes | np.ndarray
Task = Literal["transcribe", "translate"]
MAX_AUDIO_BYTES = 512 << 20


@dataclass(frozen=True)
class Segment:
    """A part of a transcription.

    Args:
        start: seconds from the beginning of the audio.
        end: likewise.
        text: the text.
        token_ids: its tokens, with timestamps if there are any.
    """

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Transcription:
    """The text of an audio file.

    Args:
        text: the whole text.
        segments: its parts in order.
        language: code of the language that was given or detected; None: the model has one.
        duration: seconds of the audio.
        prompt_tokens: tokens that the decoder read before the text, of all windows.
    """

    text: str
    segments: tuple[Segment, ...]
    language: str | None
    duration: float
    prompt_tokens: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of all segments."""
        return tuple(token for segment in self.segments for token in segment.token_ids)


class Transcriber:
    """Transcribes with a model whose encoder reads features of audio.

    Args:
        manifest: of the model.
        case_dir: its case directory.
        reader: makes requests.
    """

    def __init__(self, manifest: Manifest, case_dir: Path, reader: InputProcessor) -> None:
        self._manifest, self._case_dir, self._reader = manifest, case_dir, reader
        self._extractor: WhisperFeatureExtractor | None = None

    def require(self) -> EncoderInfo:
        """Check that the model transcribes speech.

        Raises:
            LlmcError: its encoder reads no audio.
        """
        encoder = self._manifest.encoder
        if encoder is None or encoder.features is None:
            raise LlmcError(f"'{self._manifest.source.architecture}' does not transcribe speech; "
                            f"give an encoder-decoder model of audio, such as Whisper")
        return encoder

    @property
    def extractor(self) -> WhisperFeatureExtractor:
        """The feature extractor of the case directory."""
        if self._extractor is None:
            from llmc.runtime.multimodal.processor import read_processor  # only here: 50 ms
            audio = read_processor(self._case_dir / PROCESSOR).description.audio
            if audio is None or not isinstance(audio.extractor, WhisperFeatureExtractor):
                raise LlmcError(f"'{self._case_dir / PROCESSOR}' has no WhisperFeatureExtractor; "
                                f"compile the model again")
            self._extractor = audio.extractor
        return self._extractor

    def run(self, audio: Audio, language: str | None, task: str, timestamps: bool, prompt: str,
            params: SamplingParams | None) -> Generator[Request, Sequence[int], Transcription]:
        """Transcribe audio. Yields requests and is sent the tokens of each.

        Args: see `LLM.transcribe`.

        Raises:
            LlmcError: see `LLM.transcribe`.
        """
        encoder = self.require()
        assert encoder.features is not None
        speech = encoder.speech or SpeechInfo()
        known = self._language(speech, language)
        task_id = self._task(speech, task)
        waveform = self._waveform(audio)
        features, rows = self._features(waveform, encoder.features), encoder.features
        stamps = self._timestamp_rules(speech, timestamps, len(features) > rows.num_frames)
        if known is None and speech.languages:
            known = yield from self._detect(encoder, speech, features[:rows.num_frames])
        start = [encoder.decoder_start_token_id]
        start += [speech.languages[known]] if known is not None else []
        start += [task_id] if task_id is not None else []
        if stamps is None and speech.no_timestamps_token_id is not None:
            start.append(speech.no_timestamps_token_id)
        start = [*self._before(speech, prompt), *start]
        rules = SpeechRules(speech.begin_suppress_tokens, timestamps=stamps)
        segments: list[Segment] = []
        seek = windows = 0
        while seek < len(features):
            window = features[seek:seek + rows.num_frames]
            request = self._reader.speech_request(
                start, make_rows(window, rows), self._params(params), rules)
            tokens = self._without_end(list((yield request)))
            found, advance = self._segments(tokens, stamps, seek, len(window), rows)
            segments += found
            seek, windows = seek + advance, windows + 1
        return Transcription(
            "".join(segment.text for segment in segments).strip(), tuple(segments), known,
            len(waveform) / self.extractor.sampling_rate, windows * len(start))

    def _waveform(self, audio: Audio) -> Waveform:
        """Decode audio to a waveform at the model's rate."""
        rate = self.extractor.sampling_rate
        if isinstance(audio, np.ndarray):
            if audio.ndim != 1 or not len(audio) or not np.issubdtype(audio.dtype, np.floating) \
                    or not np.isfinite(audio).all():
                raise LlmcError(f"the waveform is {audio.dtype} {list(audio.shape)}; give finite "
                                f"floating-point samples [samples] at {rate} Hz")
            return audio.astype(np.float32)
        if isinstance(audio, bytes | bytearray):
            return load_audio(bytes(audio), rate)
        if not isinstance(audio, str | Path):
            raise LlmcError(f"audio is {shown(audio)}; give a path, the bytes of a file, or a "
                            f"waveform at {rate} Hz")
        try:
            return load_audio(read_bounded(Path(audio), MAX_AUDIO_BYTES), rate)
        except (OSError, ValueError) as error:
            raise LlmcError(f"'{audio}' cannot be read ({reason_of(error)}); give a path of an "
                            f"audio file") from error

    def _features(self, waveform: Waveform, rows: FeatureRows) -> np.ndarray:
        """Features [frames, num_channels]; those of short audio are padded to a window."""
        extractor = self.extractor
        if len(waveform) <= extractor.max_samples():
            waveform = extractor.window(waveform)
        return np.ascontiguousarray(extractor.features(waveform).T)

    def _language(self, speech: SpeechInfo, language: str | None) -> str | None:
        """The code of a given language; None: it is to be detected, or the model has one."""
        if language is None:
            return None
        code = language.strip().lower() if isinstance(language, str) else ""
        if code in speech.languages:
            return code
        if not speech.languages:
            raise LlmcError(f"language is {shown(language)}, but the model has one language only; "
                            f"leave it out")
        raise LlmcError(f"language {shown(language)} is not supported; supported: "
                        f"{', '.join(sorted(speech.languages))}")

    def _task(self, speech: SpeechInfo, task: str) -> int | None:
        if task not in ("transcribe", "translate"):
            raise LlmcError(f"task is {shown(task)}; give transcribe or translate")
        if task not in speech.tasks and (speech.tasks or task != "transcribe"):
            raise LlmcError(f"task {task} is not supported by this model; supported: "
                            f"{', '.join(sorted(speech.tasks)) or 'transcribe'}")
        return speech.tasks.get(task)

    def _timestamp_rules(self, speech: SpeechInfo, timestamps: bool, is_long: bool) -> \
            TimestampRules | None:
        """Rules of timestamps, if they are requested or needed to find the next window."""
        if not timestamps and not is_long:
            return None
        ends = self._manifest.tokenizer.eos_token_ids
        if speech.no_timestamps_token_id is None or not ends:
            raise LlmcError("this model has no timestamps, which are needed for audio longer than "
                            "a window; give shorter audio, and leave timestamps out")
        return TimestampRules(speech.no_timestamps_token_id + 1, ends[0],
                              speech.max_initial_timestamp_index)

    def _detect(self, encoder: EncoderInfo, speech: SpeechInfo, window: np.ndarray) -> \
            Generator[Request, Sequence[int], str]:
        """Detect the language: its most likely token after the start token."""
        assert encoder.features is not None
        rules = SpeechRules(first_allowed=tuple(speech.languages.values()))
        request = self._reader.speech_request(
            [encoder.decoder_start_token_id], make_rows(window, encoder.features),
            SamplingParams(max_tokens=1, temperature=0), rules)
        token, = yield request
        return next(code for code, known in speech.languages.items() if known == token)

    def _before(self, speech: SpeechInfo, prompt: str) -> list[int]:
        """Tokens of the text before the audio."""
        if not prompt:
            return []
        if speech.prev_sot_token_id is None:
            raise LlmcError("this model takes no prompt, as its generation_config has no "
                            "prev_sot_token_id; leave it out")
        most = self._reader.max_model_len // 2 - 1
        return [speech.prev_sot_token_id,
                *self._reader.tokenize(f" {prompt.strip()}", add_special_tokens=False)[-most:]]

    def _params(self, params: SamplingParams | None) -> SamplingParams:
        """Sampling parameters: by default greedy, with the model's suppressed tokens."""
        default = self._reader.default_params
        given = params or replace(default, temperature=0.0,
                                  max_tokens=self._reader.max_model_len)
        return replace(given, logit_bias={**default.logit_bias, **given.logit_bias})

    def _without_end(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] in self._manifest.tokenizer.eos_token_ids \
            else tokens

    def _segments(self, tokens: list[int], rules: TimestampRules | None, seek: int, frames: int,
                  rows: FeatureRows) -> tuple[list[Segment], int]:
        """Split the tokens of a window at its pairs of timestamps.

        Returns:
            The segments, and the number of frames to the next window.
        """
        extractor = self.extractor
        frame = extractor.hop_length / extractor.sampling_rate
        if rules is None:
            return [self._segment(tokens, seek * frame, (seek + frames) * frame, None)], frames
        precision, offset = frame * rows.stride, seek * frame
        is_stamp = [token >= rules.begin for token in tokens]
        ends = [i + 1 for i in range(len(tokens) - 1) if is_stamp[i] and is_stamp[i + 1]]
        ends_once = is_stamp[-2:] == [False, True]  # no speech after it
        if not ends:
            last = next((token - rules.begin for token, stamp in
                         zip(reversed(tokens), reversed(is_stamp), strict=True) if stamp), 0)
            rest = last or frames // rows.stride
            return [self._segment(tokens, offset, offset + rest * precision, rules)], frames
        if ends_once:
            ends.append(len(tokens))
        else:
            ends[-1] += 1  # with the second timestamp of the last pair
        segments, start = [], 0
        for end in ends:
            part = tokens[start:end]
            final = part[-1 if end != ends[-1] or ends_once else -2]
            segments.append(self._segment(part, offset + (part[0] - rules.begin) * precision,
                                          offset + (final - rules.begin) * precision, rules))
            start = end
        return segments, frames if ends_once else (tokens[start - 2] - rules.begin) * rows.stride

    def _segment(self, tokens: list[int], start: float, end: float,
                 rules: TimestampRules | None) -> Segment:
        words = [token for token in tokens if rules is None or token < rules.begin]
        text = self._reader.detokenize(words, True) if words else ""
        return Segment(round(start, 6), round(end, 6), text, tuple(tokens))
