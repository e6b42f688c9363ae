"""`llmc run`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.cli.conversation import converse
from llmc.cli.effects import refuse_without_effect
from llmc.cli.options import (
    adapters_option,
    case_options,
    device_option,
    json_option,
    loading_options,
    pop_loading_options,
    select_case_dir,
)
from llmc.cli.progress import Meter, ProgressBar
from llmc.cli.sampling import (
    SamplingCommand,
    first_given,
    generation_config_option,
    is_given,
    sampling_options,
    sampling_params,
)
from llmc.cli.signals import sigterm_as_interrupt
from llmc.cli.speech import (
    audio_of_prompts,
    pop_speech_options,
    run_speech,
    speech_options,
    speech_params,
)
from llmc.errors import CheckFailed, LlmcError, reason_of_file

if TYPE_CHECKING:
    from llmc.runtime.core.llm import LLM
    from llmc.runtime.core.request import Completion
    from llmc.runtime.prompts import Prompt
    from llmc.runtime.sampling.params import SamplingParams


@click.command("run", cls=SamplingCommand)
@case_options
@click.option("--hf_dir", type=click.Path(path_type=Path), default=None,
              help="Hugging Face directory whose config.json has the case directory: param_dir.")
@click.option("--prompt", "prompts", multiple=True,
              help="Prompt; may be repeated.  [default: each line of standard input]")
@click.option("--prompt_file", type=click.Path(path_type=Path), default=None,
              help="JSON lines of requests with prompt, token_ids or messages and sampling "
                   "options, answered by JSON lines; -: standard input.")
@click.option("--image", "images", multiple=True, type=click.Path(path_type=Path),
              help="Picture for each prompt, or for the first message of a conversation; may be "
                   "repeated. Without --chat, a prompt has the model's placeholder for each.")
@click.option("--chat", is_flag=True,
              help="Apply the chat template to each prompt; without prompts, in a terminal: hold "
                   "a conversation.")
@speech_options
@sampling_options
@generation_config_option
@click.option("--tp_size", type=int, default=None,
              help="Expected tensor parallel size; an error if the model has another.")
@device_option
@loading_options
@adapters_option
@click.option("--adapter", default=None, metavar="NAME",
              help="Name of the adapter of --lora_modules to generate with.")
@click.option("--log_file", default="", show_default=False,
              help="File to append the settings and the generation rate to.  [default: none]")
@json_option
def run_command(directory: Path | None, case_dir: Path | None, hf_dir: Path | None,
                prompts: tuple[str, ...], prompt_file: Path | None, images: tuple[Path, ...],
                chat: bool, generation_config: str, tp_size: int | None,
                device: list[int] | None, log_file: str, as_json: bool, **options: Any) -> None:
    """Complete prompts with the model in the case directory DIR, streaming the text.

    An embedding model or classifier prints a JSON line with the result of each prompt. A speech
    model prints the text of --audio; a model that takes audio in prompts answers each prompt about
    it.
    """
    from llmc.artifacts.manifest import read_manifest, require_speech
    from llmc.runtime.core.llm import LLM
    from llmc.runtime.prompt_file import read_lines

    loading = pop_loading_options(options)
    loading["adapters"], adapter = options.pop("adapters"), options.pop("adapter")
    speech = pop_speech_options(options)
    if speech is not None and prompt_file is not None:
        raise LlmcError("--prompt_file is given with --audio; leave one out")
    printed = next((name for name in ("logprobs", "prompt_logprobs")
                    if options[name] is not None), None)
    if printed is not None and speech is None and not as_json and prompt_file is None:
        raise LlmcError(f"--{printed} needs --json, which prints them; add --json")
    if prompt_file is not None and prompts:
        raise LlmcError("both --prompt and --prompt_file are given; give only one")
    if prompt_file is not None and images:
        raise LlmcError("both --image and --prompt_file are given; name pictures in the file's "
                        "requests, as images or in messages")
    if not is_given("beam_width") and (unused := first_given(
            ("length_penalty", "diversity_rate", "early_stopping"))):
        raise LlmcError(f"--{unused} is given without --beam_width, which it needs; give both, or "
                        f"leave it out")
    if is_given("num_speculative_tokens") and loading["speculate"] == "off" \
            and prompt_file is None and not is_given("prediction"):
        raise LlmcError("--num_speculative_tokens is given without --speculate or --prediction; "
                        "give one of them, or leave it out")
    case_dir, configured = _resolve_case(directory, case_dir, hf_dir)
    if tp_size is not None and configured not in (None, tp_size):
        raise LlmcError(f"--tp_size is {tp_size}, but tensor_parallel in the config of '{hf_dir}' "
                        f"is {configured}; change one of them")
    manifest = read_manifest(case_dir)
    expected = tp_size if tp_size is not None else configured
    if expected not in (None, manifest.tp_size):
        raise LlmcError(f"tp_size is {expected}, but '{case_dir}' was compiled with tp_size "
                        f"{manifest.tp_size}; use that, or compile again")
    if loading["adapters"] == {} and (lonely := first_given(("max_loras", "max_lora_rank"))):
        raise LlmcError(f"--{lonely} is given without --lora_modules; give adapters, or leave it "
                        f"out")
    refuse_without_effect(manifest)
    if manifest.pooling is not None:
        unused = first_given(("chat", "images", "adapter", *options))
        if unused is not None:
            raise LlmcError(f"--{'image' if unused == 'images' else unused} is given, but "
                            f"'{case_dir}' was compiled for task {manifest.pooling.task}; leave it "
                            f"out")
    audio: Sequence[Path] = ()
    if speech is not None and manifest.audio is not None:
        audio, speech = audio_of_prompts(speech, manifest), None
    if speech is not None:
        require_speech(manifest, ", or one that takes audio in prompts, such as Qwen2-Audio")
        unused = next((name for name, given in (("chat", chat), ("image", images),
                                                ("adapter", adapter)) if given), printed)
        if unused is not None:
            raise LlmcError(f"--{unused} is given with --audio; leave one out")
        if len(prompts) > 1:
            raise LlmcError(f"{len(prompts)} prompts are given with --audio; give one, which "
                            f"precedes each file, or none")
    params = sampling_params(options, manifest if generation_config == "auto" else None)
    if str(prompt_file) == "-" and sys.stdin.isatty():
        click.echo("JSON requests, one per line; end them with Ctrl-D:", err=True)
    lines = read_lines(prompt_file) if prompt_file is not None else None
    if speech is not None:
        params = speech_params(params, manifest)
    talk = chat and lines is None and not prompts and not as_json and sys.stdin.isatty()
    if talk and not is_given("max_tokens"):  # an answer ends at EOS
        params = dataclasses.replace(params, max_tokens=manifest.dims.max_seq_len)
    info = _inference_info(hf_dir, case_dir, params.max_tokens, manifest.tp_size, device, log_file)
    _log(log_file, f"{time.strftime('%Y-%m-%dT%H:%M:%S')}\n{info}\n")
    if lines is None and not talk and speech is None:
        prompts = prompts or _read_prompts()
    failed = 0
    with sigterm_as_interrupt(), LLM(case_dir, device=device, **loading) as llm:
        writes_json = as_json or lines is not None or manifest.pooling is not None or \
            speech is not None
        meter = Meter(lambda: click.echo(info, err=writes_json))
        if speech is not None:
            rate = run_speech(llm, speech, prompts, params, as_json, meter)
        elif llm.manifest.pooling is not None:
            failed = _run_pooled(llm, lines, prompts, meter)
        elif talk:
            converse(llm, params, meter, adapter, images, audio)
        elif lines is not None:
            failed = _run_requests(llm, lines, params, chat, meter, adapter)
        else:
            inputs = [_input(llm, prompt, images, audio, chat) for prompt in prompts]
            _run_prompts(llm, prompts, inputs, params, as_json, meter, adapter)
    if speech is None:
        rate = f"{meter.tokens} tokens in {meter.seconds:.2f} s, {meter.rate:.1f} tokens/s"
    click.echo(rate, err=True)
    _log(log_file, f"{rate}\n")
    if failed:
        name = "standard input" if str(prompt_file) == "-" else f"'{prompt_file}'"
        raise CheckFailed(f"{failed} request(s) of {name} failed; see their results")


def _input(llm: LLM, prompt: str, images: Sequence[Path], audio: Sequence[Path],
           chat: bool) -> Prompt:
    """Return what the model gets for a prompt with pictures and audio clips."""
    from llmc.runtime.multimodal.messages import user_message

    if chat:
        return llm.chat_prompt([user_message(prompt, images, audio)])
    return llm.media_prompt(prompt, images=images, audio=audio) if images or audio else prompt


def _run_prompts(llm: LLM, prompts: Sequence[str], inputs: Sequence[Prompt],
                 params: SamplingParams, as_json: bool, meter: Meter,
                 adapter: str | None) -> None:
    """Stream a single completion; print several as blocks when they end, or as JSON."""
    total = len(prompts) * params.n
    meter.start()
    if total == 1 and not as_json:
        for piece in llm.stream(inputs, params, adapter=adapter):
            meter.count()
            click.echo(piece.text, nl=False)
        click.echo()
        return
    completions: list[Completion] = []
    with ProgressBar() as bar:
        for completion in llm.complete(inputs, params, adapter=adapter,
                                       progress=bar.tokens(meter, total)):
            completions.append(completion)
            if not as_json:
                number = f"{completion.index}" + f".{completion.sample}" * (params.n > 1)
                bar.print(f"[{number}] {prompts[completion.index]}\n{completion.text}\n")
    if as_json:
        completions.sort(key=lambda c: (c.index, c.sample))
        click.echo(json.dumps({"completions": [
            {"prompt": prompts[completion.index], **dataclasses.asdict(completion)}
            for completion in completions]}))


def _run_requests(llm: LLM, lines: list[bytes], params: SamplingParams, chat: bool,
                  meter: Meter, adapter: str | None) -> int:
    """Print a JSON result per line and return the number of failed requests."""
    from llmc.runtime.prompt_file import read_requests, run_requests

    requests = read_requests(llm, lines, params, chat=chat, adapter=adapter)
    total = sum(request.params.n for request in requests if "error" not in request.answer)
    with ProgressBar() as bar:
        for result in run_requests(llm, requests, bar.tokens(meter, total)):
            bar.print(json.dumps(result))
    return sum("error" in request.answer for request in requests)


def _run_pooled(llm: LLM, lines: list[bytes] | None, prompts: Sequence[str], meter: Meter) -> int:
    """Print a JSON result per line or prompt and return the number of invalid lines."""
    from llmc.runtime.pooling_file import read_lines, run_lines

    read = read_lines(llm, lines if lines is not None else
                      [json.dumps({"prompt": prompt}).encode() for prompt in prompts])
    meter.start()
    for result in run_lines(llm, read, meter.count):
        click.echo(json.dumps(result))
    return sum("error" in line.answer for line in read)


def _read_prompts() -> tuple[str, ...]:
    if sys.stdin.isatty():
        click.echo("Prompts, one per line; end them with Ctrl-D:", err=True)
    lines = sys.stdin.read().splitlines()
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise LlmcError("no prompt is given; give --prompt, or one prompt per line on standard "
                        "input")
    return prompts


def _resolve_case(directory: Path | None, case_dir: Path | None, hf_dir: Path | None) -> \
        tuple[Path, int | None]:
    """Return the case directory, and the tensor parallel size of a config, if any."""
    case_dir = select_case_dir(directory, case_dir)
    if (case_dir is None) == (hf_dir is None):
        raise LlmcError("expected either a case directory or --hf_dir; give one of them")
    if case_dir is not None:
        return case_dir, None
    assert hf_dir is not None
    path = hf_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LlmcError(f"'{path}' cannot be read as JSON ({error}); repair it, or give the case "
                        f"directory") from error
    named = config.get("param_dir") if isinstance(config, dict) else None
    if not isinstance(named, str):
        raise LlmcError(f"'{path}' has no string param_dir, the case directory; add it, or give "
                        f"the case directory instead of --hf_dir")
    parallel = config.get("tensor_parallel")
    if parallel is None:
        return hf_dir / named, None
    if not isinstance(parallel, dict) or not isinstance(parallel.get("parallel_size", 1), int):
        raise LlmcError(f"tensor_parallel in '{path}' is invalid; write it as "
                        f'{{"use_tp": true, "parallel_size": 2}}')
    return hf_dir / named, parallel.get("parallel_size", 1) if parallel.get("use_tp") else 1


def _log(path: str, text: str) -> None:
    """Append to the log file, if any."""
    if path:
        try:
            with open(path, "a", encoding="utf-8") as log:
                log.write(text)
        except OSError as error:
            raise LlmcError(f"--log_file '{path}' cannot be written "
                            f"({reason_of_file(error)}); give another file") from error


def _inference_info(hf_dir: Path | None, case_dir: Path, max_tokens: int, tp_size: int,
                    device: list[int] | None, log_file: str) -> str:
    visible = os.environ.get("LLMC_VISIBLE_DEVICES", "Not specified")
    return "\n".join([
        "Inference info:", f"| - hf_dir: {hf_dir or 'Not specified'}", f"| - case_dir: {case_dir}",
        f"| - max_tokens: {max_tokens}", f"| - tp_size: {tp_size}",
        f"| - ENV:LLMC_VISIBLE_DEVICES: {visible}",
        f"| - device: {device if device is not None else 'all cores'}",
        f"| - log_file: {log_file}"])
