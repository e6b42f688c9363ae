"""Transcription of speech by an encoder-decoder model, in windows.

transformers' sequential algorithm for long audio: a window of 30 seconds is decoded with
timestamps, and the next one begins at the last timestamp, so that no word is cut.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from llmc.artifacts.case_files import read_bounded
from llmc.artifacts.manifest import (
    PROCESSOR,
    EncoderInfo,
    FeatureRows,
    Manifest,
    SpeechInfo,
    require_speech,
)
from llmc.errors import LlmcError, reason_of_file, shown
from llmc.runtime.core.request import (
    Completion,
    CompletionChunk,
    InputProcessor,
    Request,
    RunningBeamSearch,
)
from llmc.runtime.multimodal.audio import MAX_SECONDS, Waveform, load_audio
from llmc.runtime.multimodal.feature_extractors import WhisperFeatureExtractor
from llmc.runtime.multimodal.feature_rows import make_rows
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.speech_fallback import SpeechOptions, compression_ratio
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
        temperature: at which its window was decoded.
        avg_logprob: mean log-probability of the window's tokens; None: not computed.
        compression_ratio: of the window's token ids.
        no_speech_prob: probability that the window has no speech; None: not computed.
    """

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    temperature: float = 0.0
    avg_logprob: float | None = None
    compression_ratio: float = 0.0
    no_speech_prob: float | None = None


@dataclass(frozen=True)
class Transcription:
    """The text of an audio file.

    Args:
        text: the whole text.
        segments: its parts in order.
        language: code of the language that was given or detected; None: the model has one.
        duration: seconds of the audio.
        prompt_tokens: tokens that the decoder read before the text, of all windows.
        audio_tokens: rows that the encoder read, of all windows.
        completion_tokens: generated tokens, of all windows, also those of dropped results.
    """

    text: str
    segments: tuple[Segment, ...]
    language: str | None
    duration: float
    prompt_tokens: int
    audio_tokens: int
    completion_tokens: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of all segments."""
        return tuple(token for segment in self.segments for token in segment.token_ids)


@dataclass(frozen=True)
class TranscriptionChunk:
    """A part of a transcription, as soon as it is final.

    Args:
        text: new text; the texts of all chunks together are that of the result.
        segments: new segments.
        result: on the last chunk, the whole.
    """

    text: str
    segments: tuple[Segment, ...] = ()
    result: Transcription | None = None


@dataclass(frozen=True)
class _Decoding:
    """A request that a transcription needs.

    Args:
        request: of a window.
        is_final: its text is a part of the transcription as soon as it is generated.
    """

    request: Request
    is_final: bool = False


@dataclass(frozen=True)
class _Decoded:
    """Tokens of a request.

    Args:
        token_ids: with the EOS token.
        avg_logprob: their mean log-probability, if the request asks for it or searches by beams.
    """

    token_ids: tuple[int, ...]
    avg_logprob: float | None


_Work = Generator[_Decoding | tuple[Segment, ...], _Decoded | None, Transcription]


class TranscriptionStream:
    """A transcription in progress: requests to run, and chunks that are final.

    Args:
        work: `Transcriber.run`.
    """

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._chunks: list[TranscriptionChunk] = []
        self._decoding: _Decoding | None = None
        self._pieces: list[CompletionChunk] = []
        self._search: RunningBeamSearch | None = None
        self._begun, self._space = False, ""  # white space that may be the last

    def advance(self) -> Request | None:
        """Return the next request, after the one before has finished; None at the end."""
        decoded = None if self._decoding is None else self._decoded(self._decoding.request)
        streamed = self._decoding is not None and self._decoding.is_final
        self._decoding, self._pieces, self._search = None, [], None
        try:
            item = next(self._work) if decoded is None else self._work.send(decoded)
            while not isinstance(item, _Decoding):
                text = "" if streamed else "".join(segment.text for segment in item)
                self._chunks.append(TranscriptionChunk(self._final(text), item))
                item = next(self._work)
        except StopIteration as end:
            self._chunks.append(TranscriptionChunk("", (), end.value))
            return None
        self._decoding = item
        return item.request

    def take(self, piece: CompletionChunk, search: RunningBeamSearch | None) -> None:
        """Take a piece of the request's completion, and its beam search, if any."""
        self._pieces.append(piece)
        self._search = search
        if self._decoding is not None and self._decoding.is_final and \
                (text := self._final(piece.text)):
            self._chunks.append(TranscriptionChunk(text))

    def chunks(self) -> list[TranscriptionChunk]:
        """Take the chunks that are ready."""
        ready, self._chunks = self._chunks, []
        return ready

    def _decoded(self, request: Request) -> _Decoded:
        completion = Completion.of(request.prompt, self._pieces)
        total, count = completion.cumulative_logprob, len(completion.token_ids)
        if self._search is not None:
            total = float(self._search.beams().cum_log_probs[0, 0])
        return _Decoded(completion.token_ids, None if total is None else total / max(count, 1))

    def _final(self, text: str) -> str:
        """Drop the white space around the whole text."""
        text = self._space + text
        if not self._begun:
            text = text.lstrip()
        stripped = text.rstrip()
        self._begun, self._space = self._begun or bool(stripped), text[len(stripped):]
        return stripped


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
        return require_speech(self._manifest)

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
            params: SamplingParams | None, options: SpeechOptions | None) -> _Work:
        """Transcribe audio. Yields requests, whose results it is sent, and segments.

        Args: see `LLM.transcribe`.

        Raises:
            LlmcError: see `LLM.transcribe`.
        """
        encoder = self.require()
        assert encoder.features is not None
        if not isinstance(prompt, str):
            raise LlmcError(f"prompt is {shown(prompt)}; give a text")
        params, options = self._params(params), options or SpeechOptions()
        speech = encoder.speech or SpeechInfo()
        known = self._language(speech, language)
        task_id = self._task(speech, task)
        before = self._prompt_tokens(speech, prompt)
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
        windows = _Windows(self._reader, rows, start, params, options, speech,
                           stamps, self._manifest.tokenizer.eos_token_ids)
        segments: list[Segment] = []
        conditions, seek = options.condition_on_prev_tokens, 0
        while seek < len(features):
            window = features[seek:seek + rows.num_frames]
            earlier = [before, *(_without_double_end(own, stamps) for own in segments)] \
                if conditions else [before]
            result = yield from windows.decode(make_rows(window, rows),
                                               self._preceding(speech, earlier))
            conditions = options.condition_on_prev_tokens and result.temperature < 0.5
            if result.is_silence:
                seek += len(window)
                continue
            found, advance = self._segments(result, stamps, seek, len(window), rows)
            yield tuple(found)
            segments += found
            seek += advance
        return Transcription(
            "".join(segment.text for segment in segments).strip(), tuple(segments), known,
            len(waveform) / self.extractor.sampling_rate, windows.prompt_tokens,
            windows.count * rows.num_rows, windows.completion_tokens)

    def first_window(self, audio: Audio) -> np.ndarray:
        """Features of the first window of audio, float32 [num_frames, num_channels].

        Raises:
            LlmcError: the model does not transcribe, or the audio cannot be read.
        """
        rows = self.require().features
        assert rows is not None
        return self._features(self._waveform(audio), rows)[:rows.num_frames]

    def _waveform(self, audio: Audio) -> Waveform:
        """Decode audio to a waveform at the model's rate."""
        rate = self.extractor.sampling_rate
        if isinstance(audio, np.ndarray):
            if audio.ndim != 1 or not len(audio) or not np.issubdtype(audio.dtype, np.floating) \
                    or not np.isfinite(audio).all():
                raise LlmcError(f"the waveform is {audio.dtype} {list(audio.shape)}; give finite "
                                f"floating-point samples [samples] at {rate} Hz")
            if len(audio) > MAX_SECONDS * rate:
                raise LlmcError(f"the audio is {len(audio) / rate:g} s long, above "
                                f"{MAX_SECONDS:g} s, the limit; split it")
            return audio.astype(np.float32)
        if isinstance(audio, bytes | bytearray):
            return load_audio(bytes(audio), rate)
        if not isinstance(audio, str | Path):
            raise LlmcError(f"audio is {shown(audio)}; give a path, the bytes of a file, or a "
                            f"waveform at {rate} Hz")
        try:
            return load_audio(read_bounded(Path(audio), MAX_AUDIO_BYTES), rate)
        except (OSError, ValueError) as error:
            raise LlmcError(f"'{audio}' cannot be read ({reason_of_file(error)}); give a path of "
                            f"an audio file") from error

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
            Generator[_Decoding | tuple[Segment, ...], _Decoded | None, str]:
        """Detect the language: its most likely token after the start token."""
        assert encoder.features is not None
        rules = SpeechRules(first_allowed=tuple(speech.languages.values()))
        decoded = yield _Decoding(self._reader.speech_request(
            [encoder.decoder_start_token_id], make_rows(window, encoder.features),
            SamplingParams(max_tokens=1, temperature=0), rules))
        assert decoded is not None
        token, = decoded.token_ids
        return next(code for code, known in speech.languages.items() if known == token)

    def _prompt_tokens(self, speech: SpeechInfo, prompt: str) -> list[int]:
        """Tokens of the text before the audio."""
        if not prompt:
            return []
        if speech.prev_sot_token_id is None:
            raise LlmcError("this model takes no prompt, as its generation_config has no "
                            "prev_sot_token_id; leave it out")
        return self._reader.tokenize(f" {prompt.strip()}", add_special_tokens=False)

    def _preceding(self, speech: SpeechInfo, texts: Sequence[Sequence[int]]) -> list[int]:
        """The last tokens of texts, after the token that begins them; half of the positions."""
        tokens = [token for text in texts for token in text]
        if not tokens or speech.prev_sot_token_id is None:
            return []
        return [speech.prev_sot_token_id, *tokens[-(self._reader.max_model_len // 2 - 1):]]

    def _params(self, params: SamplingParams | None) -> SamplingParams:
        """Sampling parameters: by default greedy, with the model's suppressed tokens."""
        if params is not None and params.n > 1:
            raise LlmcError(f"n is {params.n}, but audio has one transcription; leave it out")
        default = self._reader.default_params
        given = params or replace(default, temperature=0.0,
                                  max_tokens=self._reader.max_model_len)
        return replace(given, logit_bias={**default.logit_bias, **given.logit_bias})

    def _segments(self, result: _Window, rules: TimestampRules | None, seek: int, frames: int,
                  rows: FeatureRows) -> tuple[list[Segment], int]:
        """Split the tokens of a window at its pairs of timestamps.

        Returns:
            The segments, and the number of frames to the next window.
        """
        extractor, tokens = self.extractor, result.token_ids
        frame = extractor.hop_length / extractor.sampling_rate
        if rules is None:
            return [self._segment(result, tokens, seek * frame, (seek + frames) * frame,
                                  None)], frames
        precision, offset = frame * rows.stride, seek * frame
        is_stamp = [token >= rules.begin for token in tokens]
        ends = [i + 1 for i in range(len(tokens) - 1) if is_stamp[i] and is_stamp[i + 1]]
        ends_once = is_stamp[-2:] == [False, True]  # no speech after it
        if not ends:
            last = next((token - rules.begin for token, stamp in
                         zip(reversed(tokens), reversed(is_stamp), strict=True) if stamp), 0)
            rest = last or frames // rows.stride
            return [self._segment(result, tokens, offset, offset + rest * precision, rules)], frames
        if ends_once:
            ends.append(len(tokens))
        else:
            ends[-1] += 1  # with the second timestamp of the last pair
        segments, start = [], 0
        for end in ends:
            part = tokens[start:end]
            final = part[-1 if end != ends[-1] or ends_once else -2]
            segments.append(self._segment(
                result, part, offset + (part[0] - rules.begin) * precision,
                offset + (final - rules.begin) * precision, rules))
            start = end
        return segments, frames if ends_once else (tokens[start - 2] - rules.begin) * rows.stride

    def _segment(self, result: _Window, tokens: list[int], start: float, end: float,
                 rules: TimestampRules | None) -> Segment:
        words = [token for token in tokens if rules is None or token < rules.begin]
        text = self._reader.detokenize(words, True) if words else ""
        return Segment(round(start, 6), round(end, 6), text, tuple(tokens), result.temperature,
                       result.avg_logprob, result.compression_ratio, result.no_speech_prob)


@dataclass(frozen=True)
class _Window:
    """The result of a window; see `Segment`."""

    token_ids: list[int]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None
    is_silence: bool


@dataclass
class _Windows:
    """Decodes windows, again and again at higher temperatures while results are bad.

    Args:
        reader: makes requests.
        rows: what the encoder reads.
        start: tokens that the decoder reads first, from the start token on.
        params: of the first result of a window.
        options: when it is decoded again.
        speech: special tokens of the model.
        stamps: rules of timestamps.
        ends: EOS tokens.
    """

    reader: InputProcessor
    rows: FeatureRows
    start: Sequence[int]
    params: SamplingParams
    options: SpeechOptions
    speech: SpeechInfo
    stamps: TimestampRules | None
    ends: Sequence[int]
    count: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __post_init__(self) -> None:
        self._needs_logprobs = self.options.logprob_threshold is not None
        self._rules = SpeechRules(self.speech.begin_suppress_tokens, timestamps=self.stamps,
                                  processed_logprobs=self._needs_logprobs)
        if self.options.no_speech_threshold is not None and \
                self.speech.no_timestamps_token_id is None:
            raise LlmcError("this model has no token of windows without speech; leave "
                            "no_speech_threshold out")

    def decode(self, rows: np.ndarray, before: Sequence[int]) -> \
            Generator[_Decoding | tuple[Segment, ...], _Decoded | None, _Window]:
        """Decode a window.

        Args:
            rows: float32 [num_rows, width], what the encoder reads.
            before: tokens before the start token.
        """
        no_speech_prob = None
        if self.options.no_speech_threshold is not None:
            no_speech_prob = yield from self._no_speech(rows, before)
        prompt = [*before, *self.start]
        self.count += 1
        self.prompt_tokens += len(prompt)
        for params in self._attempts():
            decoded = yield _Decoding(self.reader.speech_request(prompt, rows, params, self._rules),
                                      self.stamps is None and not self.options.may_reject)
            assert decoded is not None
            tokens, avg_logprob = decoded.token_ids, decoded.avg_logprob
            self.completion_tokens += len(tokens)
            ratio = compression_ratio(tokens, self.reader.manifest.dims.vocab_size)
            is_silence = self.options.is_silence(avg_logprob, no_speech_prob)
            if is_silence or not self.options.is_bad(ratio, avg_logprob):
                break
        return _Window([*(tokens[:-1] if tokens and tokens[-1] in self.ends else tokens)],
                       params.temperature, avg_logprob, ratio, no_speech_prob, is_silence)

    def _attempts(self) -> Iterator[SamplingParams]:
        """Sampling parameters of each result of a window."""
        logprobs = 0 if self._needs_logprobs else self.params.logprobs
        yield self.params if self.params.beam_width > 1 else replace(self.params, logprobs=logprobs)
        for temperature in self.options.fallback_temperatures:
            yield replace(self.params, beam_width=1, temperature=temperature, logprobs=logprobs)

    def _no_speech(self, rows: np.ndarray, before: Sequence[int]) -> \
            Generator[_Decoding | tuple[Segment, ...], _Decoded | None, float]:
        """Probability of the token of no speech after the start token."""
        assert self.speech.no_timestamps_token_id is not None
        rules = SpeechRules(first_allowed=(self.speech.no_timestamps_token_id - 1,))
        decoded = yield _Decoding(self.reader.speech_request(
            [*before, self.start[0]], rows,
            SamplingParams(max_tokens=1, temperature=0, logprobs=0), rules))
        assert decoded is not None and decoded.avg_logprob is not None
        return math.exp(decoded.avg_logprob)


def _without_double_end(segment: Segment, stamps: TimestampRules | None) -> Sequence[int]:
    """Tokens of a segment, with one of two timestamps at its end."""
    tokens = segment.token_ids
    return tokens[:-1] if stamps and len(tokens) > 2 and tokens[-2] >= stamps.begin else tokens
