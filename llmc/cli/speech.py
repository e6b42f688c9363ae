"""Options and output of commands that transcribe speech."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.cli.options import Command, completes
from llmc.cli.progress import Meter
from llmc.cli.sampling import first_given, is_given
from llmc.errors import CheckFailed, LlmcError

if TYPE_CHECKING:
    from llmc.artifacts.manifest import Manifest
    from llmc.runtime.core.llm import LLM
    from llmc.runtime.core.transcription import Segment, Transcription
    from llmc.runtime.sampling.params import SamplingParams
    from llmc.runtime.sampling.speech_fallback import SpeechOptions


def _temperatures(ctx: click.Context, param: click.Parameter, value: str | None) -> \
        tuple[float, ...]:
    try:
        return tuple(float(part) for part in value.split(",")) if value else ()
    except ValueError:
        raise LlmcError(f"--fallback_temperatures is '{value}', expected numbers; give a list "
                        f"such as 0.2,0.4,0.6,0.8,1.0") from None


_OPTIONS: dict[str, dict[str, Any]] = {
    "language": dict(metavar="CODE", help="Language of --audio, such as en.  [default: detected]"),
    "task": dict(default="transcribe", metavar="transcribe|translate",
                 shell_complete=completes("transcribe", "translate"),
                 help="Whisper's task: transcribe --audio, or translate it to English."),
    "timestamps": dict(is_flag=True, help="Print a line with start and end for each segment of "
                                          "--audio."),
    "fallback_temperatures": dict(metavar="T,T,…", callback=_temperatures,
                                  help="Temperatures at which a window of --audio is decoded again "
                                       "while a threshold says that the result is bad."),
    "compression_ratio_threshold": dict(type=float, help="Ratio of compression of token ids above "
                                                         "which a result is bad; Whisper: 1.35."),
    "logprob_threshold": dict(type=float, help="Mean log-probability below which a result is bad; "
                                               "Whisper: -1.0."),
    "no_speech_threshold": dict(type=float, help="With --logprob_threshold: probability of no "
                                                 "speech above which a window is skipped if its "
                                                 "result is below that threshold; Whisper: "
                                                 "0.6."),
    "condition_on_prev_tokens": dict(is_flag=True, help="Decode each window after the text of "
                                                        "earlier ones."),
}


@dataclasses.dataclass(frozen=True)
class SpeechInput:
    """Audio files of a command and how they are transcribed; see `LLM.transcribe`."""

    files: Sequence[Path]
    language: str | None
    task: str
    timestamps: bool
    options: SpeechOptions


def speech_options(command: Command) -> Command:
    """Add --audio and its options to a command."""
    for name, given in reversed(_OPTIONS.items()):
        command = click.option(f"--{name}", **given)(command)
    return click.option("--audio", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
                        help="Audio file; may be repeated. Speech models transcribe it, with "
                             "--prompt as a text before it, for names and style. Others take it "
                             "in each prompt, as --image.")(command)


def pop_speech_options(options: dict[str, Any]) -> SpeechInput | None:
    """Remove the values of `speech_options` and return them; None without --audio.

    Raises:
        LlmcError: an option needs --audio or another option.
    """
    from llmc.runtime.sampling.speech_fallback import SpeechOptions

    files, given = options.pop("audio"), {name: options.pop(name) for name in _OPTIONS}
    if not files:
        lonely = first_given(given)
        if lonely is not None:
            raise LlmcError(f"--{lonely} is given without --audio; give an audio file, or leave it "
                            f"out")
        return None
    language, task, timestamps = (given.pop(name) for name in ("language", "task", "timestamps"))
    return SpeechInput(files, language, task, timestamps, SpeechOptions(**given))


def audio_of_prompts(speech: SpeechInput, manifest: Manifest) -> Sequence[Path]:
    """Return the files of --audio for a model that takes audio in prompts.

    Raises:
        LlmcError: an option of transcription is given.
    """
    given = first_given(_OPTIONS)
    if given is not None:
        raise LlmcError(f"--{given} is given, but '{manifest.source.architecture}' takes audio in "
                        f"prompts; leave it out")
    return speech.files


def speech_params(params: SamplingParams, manifest: Manifest) -> SamplingParams:
    """Sampling parameters of a command for speech: by default greedy, up to the end."""
    given = params if is_given("temperature") else dataclasses.replace(params, temperature=0.0)
    return given if is_given("max_tokens") else dataclasses.replace(
        given, max_tokens=manifest.dims.max_seq_len)


def run_speech(llm: LLM, speech: SpeechInput, prompts: Sequence[str], params: SamplingParams,
               as_json: bool, meter: Meter) -> str:
    """Print the text of each file; return a line with the time that it took.

    Args:
        meter: begins before the first output.

    Raises:
        LlmcError: see `LLM.transcribe`.
        CheckFailed: some of several files failed.
    """
    results: list[Transcription | LlmcError] = []
    started = time.perf_counter()
    for index, path in enumerate(speech.files):
        if len(speech.files) > 1:
            meter.begin()
            if not as_json:
                click.echo(f"[{index}] {path}")
        try:
            results.append(_transcribe(llm, path, speech, "".join(prompts), params, as_json,
                                       meter))
        except LlmcError as error:
            if len(speech.files) == 1:
                raise
            results.append(error)
            click.echo(f"Error: {error}", err=True)
    if as_json:
        click.echo(json.dumps({"transcriptions": [
            {"audio": str(path), **(dataclasses.asdict(result) if not isinstance(
                result, LlmcError) else {"error": str(result)})}
            for path, result in zip(speech.files, results, strict=True)]}))
    done = [own for own in results if not isinstance(own, LlmcError)]
    if len(done) < len(results):
        raise CheckFailed(f"{len(results) - len(done)} of {len(results)} audio files failed; see "
                          f"their errors")
    seconds, duration = time.perf_counter() - started, sum(own.duration for own in done)
    return (f"{duration:.2f} s of audio in {seconds:.2f} s, real-time factor "
            f"{seconds / duration:.3f}, {sum(own.completion_tokens for own in done)} tokens")


def _transcribe(llm: LLM, path: Path, speech: SpeechInput, prompt: str, params: SamplingParams,
                as_json: bool, meter: Meter) -> Transcription:
    """Transcribe a file, and print its text unless it is printed as JSON."""
    for chunk in llm.stream_transcription(
            path, language=speech.language, task=speech.task, timestamps=speech.timestamps,
            prompt=prompt, params=params, options=speech.options):
        meter.begin()
        if not as_json:
            _print_chunk(chunk.text, chunk.segments if speech.timestamps else None)
    if not as_json and not speech.timestamps:
        click.echo()
    assert chunk.result is not None
    return chunk.result


def _print_chunk(text: str, segments: Sequence[Segment] | None) -> None:
    """Print text, or lines of segments."""
    if segments is None:
        click.echo(text, nl=False)
        return
    for own in segments:
        click.echo(f"[{_clock(own.start)} --> {_clock(own.end)}] {own.text.strip()}")


def _clock(seconds: float) -> str:
    """Write a time as hours, minutes and seconds."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest / 1000:06.3f}"
