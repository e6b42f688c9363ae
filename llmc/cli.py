"""The command line: each verb is a thin command over one public function."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import inspect
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from llmc import __version__
from llmc.errors import CheckFailed, LlmcError
from llmc.installation import CUDA_INSTALL_COMMAND, install_command
from llmc.interrupts import interruptible
from llmc.memory import memory_errors
from llmc.runtime.decoding.params import FIELDS, SamplingParams, with_defaults

if TYPE_CHECKING:
    from llmc.artifacts.manifest import Manifest
    from llmc.runtime.llm import LLM
    from llmc.runtime.request import Completion, Piece

# What a shell completes; the compiler's own lists take seconds to import.
TARGETS = ("cpu", "cuda", "tensorrt", "tensorrt_rtx")
DTYPES = ("float32", "float16", "bfloat16", "auto")
QUANTIZE = ("int8", "int4", "uint4", "fp8", "none")
_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Group(click.Group):
    """Turns a user's error into one line and an exit code: 2, or 1 for a failed check.

    With --json an error is a JSON object on stderr, and stdout has results alone.
    """

    def invoke(self, ctx: click.Context) -> Any:
        as_json = "--json" in ctx.args
        try:
            with memory_errors("do this"):  # imports too
                return super().invoke(ctx)
        except CheckFailed as error:
            _print_error(str(error), 1, as_json)
            ctx.exit(1)
        except LlmcError as error:
            _print_error(str(error), 2, as_json)
            ctx.exit(2)
        except click.UsageError as error:
            if not as_json:
                raise
            _print_error(error.format_message(), error.exit_code, as_json)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(141)


def _print_error(message: str, exit_code: int, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"error": message, "exit_code": exit_code}), err=True)
        return
    label = "error:"
    if not os.environ.get("NO_COLOR"):  # and click leaves it out where stderr is no terminal
        label = click.style(label, fg="red", bold=True)
    click.echo(f"{label} {message}", err=True)


_SETTINGS = {"token_normalize_func": lambda token: token.replace("-", "_"),
             "help_option_names": ["-h", "--help"], "show_default": True}

def _complete(*values: str) -> Callable[..., list[CompletionItem]]:
    """Values that a shell offers for an option; what is not known is refused by the command."""
    return lambda ctx, param, incomplete: [CompletionItem(value) for value in values
                                           if value.startswith(incomplete)]


def case_options(command: _Command) -> _Command:
    """The case directory: the argument DIR, or --case_dir."""
    path = click.Path(path_type=Path, file_okay=False)
    command = click.option("--case_dir", type=path, default=None,
                           help="DIR, as an option.")(command)
    return click.argument("directory", type=path, required=False, metavar="[DIR]")(command)


def _case_dir(directory: Path | None, case_dir: Path | None) -> Path:
    """The case directory, by whichever of the two it was given."""
    found = _either(directory, case_dir)
    if found is None:
        raise LlmcError("there is no case directory; give DIR, which `llmc compile` made")
    return found


def _either(directory: Path | None, case_dir: Path | None) -> Path | None:
    if directory is not None and case_dir is not None and \
            directory.resolve() != case_dir.resolve():
        raise LlmcError(f"DIR is '{directory}' and --case_dir '{case_dir}'; give one of them")
    return directory if case_dir is None else case_dir


json_option = click.option("--json", "as_json", is_flag=True,
                           help="Print results as JSON on stdout, and errors as JSON on stderr.")


def _devices(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise LlmcError(f"--device '{value}' is not a list of numbers such as 0,1,2,3") from None


device_option = click.option("--device", callback=_devices, metavar="0,1,…",
                             help="Devices to run on; each tp_size of them are a replica.  "
                                  "[default: one replica on all cores]")


# How a model is loaded: `LLM`'s arguments of these names.
_LOADING: dict[str, dict[str, Any]] = {
    "max_batch_size": dict(type=int, help="Maximum number of sequences that a replica decodes at "
                                          "once.  [default: 16, or what it was compiled for]"),
    "max_num_batched_tokens": dict(default=2048, help="Maximum number of tokens of a step; longer "
                                                      "prompts are prefilled in chunks."),
    "block_size": dict(default=16, help="Positions of a block of the KV cache."),
    "kv_cache_tokens": dict(type=int, help="Positions of the whole KV cache.  [default: as many "
                                           "as there is memory for]"),
    "gpu_memory_utilization": dict(default=0.9, help="Fraction of a GPU's memory to use."),
    "attention_backend": dict(metavar="vanilla|llmc|cudnn|fastest",
                              shell_complete=_complete("vanilla", "llmc", "cudnn", "fastest"),
                              help="Attention kernels, for target cuda.  [default: fastest]"),
    "prefix_reuse": dict(default=True, is_flag=True,
                         help="Prefix caching: sequences share the blocks of a common prefix."),
    "check_step": dict(default=2, help="Maximum number of in-flight steps on a GPU."),
    "skip_step": dict(default=0, help="Tokens of each sequence that a GPU makes before the host "
                                      "reads the first."),
}


def _loading_options(command: _Command) -> _Command:
    """The names in _LOADING; a command gets them among its other options."""
    for name, given in reversed(_LOADING.items()):
        flag = f"--{name}/--no_{name}" if given.get("is_flag") else f"--{name}"
        command = click.option(flag, **{key: value for key, value in given.items()
                                        if key != "is_flag"})(command)
    return command


def _taken(options: dict[str, Any]) -> dict[str, Any]:
    """Those of _LOADING, which are taken away."""
    return {name: options.pop(name) for name in _LOADING}


class _SamplingOption(click.Option):
    """Help shows it in a section of its own."""


class _Sampling(click.Command):
    """A command with sampling options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Sampling": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record:
                sections["Sampling" if isinstance(param, _SamplingOption) else "Options"].append(
                    record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _biases(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> \
        dict[int, float]:
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise LlmcError(f"--logit_bias '{value}' is not a token id and a number such as "
                            f"42=-1.5") from None
    return biases


def _early_stopping(ctx: click.Context, param: click.Parameter, value: str) -> bool | str:
    return {"false": False, "true": True}.get(value, value)


# How a value of each type of field is given on a command line.
_GIVEN: dict[Any, dict[str, Any]] = {
    int: dict(type=int), float: dict(type=float), bool: dict(is_flag=True),
    int | None: dict(type=int), str | None: dict(type=str),
    str | Mapping[str, object] | None: dict(type=str, metavar="SCHEMA"),
    Sequence[str]: dict(multiple=True), Sequence[str | Sequence[int]]: dict(multiple=True),
    Sequence[int]: dict(type=int, multiple=True),
    Mapping[int, float]: dict(multiple=True, callback=_biases, metavar="ID=BIAS", default=()),
    bool | Literal["never"]: dict(type=click.Choice(["false", "true", "never"]), default="false",
                                  callback=_early_stopping)}


def _sampling_options(command: _Command) -> _Command:
    """The fields of SamplingParams."""
    for own in reversed(FIELDS):
        given = {"default": own.default, **_GIVEN[own.kind]}
        remark = " May be repeated." if given.get("multiple") else \
            " Printed with --json." if own.name == "logprobs" else ""
        command = click.option(f"--{own.name}", cls=_SamplingOption, help=own.text + remark,
                               **given)(command)
    return command


_generation_config_option = click.option(
    "--generation_config", default="auto", type=click.Choice(["auto", "none"]),
    help="Sampling defaults.  auto: the model's generation_config.json, then llmc's; none: llmc's "
         "alone.")


def _engines() -> str:
    extension = find_spec("llmc_cuda")
    if extension is None:
        return f"cpu; for NVIDIA GPUs, from a checkout: {CUDA_INSTALL_COMMAND}"
    plugins = Path(str(extension.origin)).with_name("libllmc_plugins.so")
    return "cpu, cuda, tensorrt" if plugins.is_file() else "cpu, cuda"


@click.group(cls=_Group, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="llmc",
                      message=f"%(prog)s %(version)s (engines: {_engines()})")
def main() -> None:
    """Compile a language model ahead of time, and run what came out."""


@main.command("compile")
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path),
              help="Case directory to make.")
@click.option("--tp_size", default=1, help="Tensor parallel size: chips that share the model.")
@click.option("--expert_parallel", is_flag=True,
              help="Give each chip whole experts of an MoE, not some columns of each.")
@click.option("--dtype", default="float32", metavar="float32|float16|bfloat16|auto",
              shell_complete=_complete(*DTYPES),
              help="Dtype of weights and activations; auto: the checkpoint's, where the target has "
                   "it.")
@click.option("--kv_dtype", default="", metavar="float8_e4m3fn", show_default=False,
              shell_complete=_complete("float8_e4m3fn"),
              help="Dtype of the KV cache, for --target cuda or tensorrt.  [default: as --dtype]")
@click.option("--quantize", default="", metavar="|".join(QUANTIZE), show_default=False,
              shell_complete=_complete(*QUANTIZE),
              help="Quantize the weights of linear layers; uint4 is int4 with zero points; none: "
                   "dequantize a quantized checkpoint to --dtype.  [default: as in the checkpoint]")
@click.option("--group_size", default=0, show_default=False,
              help="Weights along a row that share a scale.  [default: the largest of 128, 64, 32 "
                   "and 16 that divides the row; with fp8 the row]")
@click.option("--quantize_lm_head", default="", metavar="|".join(QUANTIZE), show_default=False,
              shell_complete=_complete(*QUANTIZE),
              help="Quantize the LM head, and the embedding where they are tied.  [default: as "
                   "--quantize, but int8 in place of 4 bits]")
@click.option("--quantize_activations", is_flag=True,
              help="With --quantize fp8: also quantize activations to FP8, with a scale for each "
                   "token. With an FP8 checkpoint in blocks that asks for it: for each group of a "
                   "token.")
@click.option("--requantize", is_flag=True,
              help="Dequantize a quantized checkpoint, then quantize it as --quantize says.")
@click.option("--calibrate", type=click.Path(path_type=Path), default=None, metavar="TEXT",
              help="Text file to calibrate --quantize on.")
@click.option("--target", default="cpu", metavar="|".join(TARGETS),
              shell_complete=_complete(*TARGETS), help="Engine that runs the compiled model.")
@click.option("--compute_capability", default=None, metavar="9.0",
              help="Compute capability of the only GPUs that may run it.  [default: any]")
@click.option("--max_seq_len", type=int, default=None,
              help="Maximum number of positions of a sequence.  [default: the model's; for "
                   "--target tensorrt at most 4096]")
@click.option("--mem_max_seq_len", type=int, default=None,
              help="Maximum number of tokens that an encoder reads.  [default: the model's, at "
                   "most 4096]")
@click.option("--max_batch_size", default=64,
              help="Maximum number of sequences of a step, for --target tensorrt.")
@click.option("--hf_dir", type=click.Path(path_type=Path), default=None,
              help="For an .onnx MODEL: directory with its config.json and tokenizer.")
@click.option("--revision", default=None, metavar="COMMIT",
              help="Of a hub id MODEL: branch, tag or commit.  [default: main]")
@click.option("--trust_remote_code", is_flag=True, help="Run code that comes with the model.")
@click.option("--allow_pickle", is_flag=True, help="Read .bin weights with torch.load.")
@click.option("--allow_nan", is_flag=True, help="Compile weights that have NaN or infinities.")
@click.option("--verbose", is_flag=True, help="Print what each pass matched and refused.")
@json_option
def compile_command(model: str, output: Path, verbose: bool, as_json: bool, **options: Any) -> None:
    """Compile MODEL: a Hugging Face directory, hub id, .gguf or .onnx file."""
    started = time.perf_counter()
    with _Phases() as phases, interruptible():  # imports too
        phases.begin("import")
        api = _import_compiler()

        def progress(text: str) -> None:
            (phases.note if isinstance(text, api.Note) else phases.begin)(text)

        manifest = api.compile(model, output, progress=progress, **options)
    seconds = time.perf_counter() - started
    if verbose:
        _print_passes(manifest)
    if as_json:
        click.echo(json.dumps({"case_dir": str(output), "seconds": seconds,
                               "tp_size": manifest.tp_size}))
    else:
        size = sum(entry.size for entry in manifest.files)
        click.echo(f"{manifest.source.architecture} → {output}: {manifest.tp_size} chip(s), "
                   f"{size / 1e6:.0f} MB in {seconds:.1f} s")


class _Phases:
    """Phases of long work on stderr: each with its duration once it has ended, and on a terminal a
    live line of the one that runs.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._live = Progress(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(),
                              TimeElapsedColumn(), console=console, transient=True,
                              redirect_stdout=False, redirect_stderr=False,
                              disable=not console.is_terminal)
        self._task = self._live.add_task("", total=None, visible=False)
        self._name = ""
        self._started = 0.0

    def __enter__(self) -> _Phases:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._end()
        self._live.stop()

    def begin(self, name: str) -> None:
        """The phase before ends, and another begins."""
        self._end()
        self._name, self._started = name, time.perf_counter()
        self._live.reset(self._task, description=name, total=None, visible=True)

    def show(self, name: str, done: int, total: int) -> None:
        """So much of a phase is done; it begins where it is another one."""
        if name != self._name:
            self.begin(name)
        self._live.update(self._task, completed=done, total=total)

    def note(self, text: str) -> None:
        """Print a remark."""
        self._print(text)

    def _end(self) -> None:
        if self._name:
            self._print(f"[{time.perf_counter() - self._started:7.2f} s] {self._name}")
        self._name = ""

    def _print(self, text: str) -> None:
        self._live.stop()  # which makes room, as it is on the same terminal
        click.echo(text, err=True)
        self._live.start()


def _import_compiler() -> ModuleType:
    _keep_what_is_imported()
    try:
        from llmc.compiler import api
    except ModuleNotFoundError as error:
        raise LlmcError(f"the compiler needs {error.name}; install it with: "
                        f"{install_command('export')}") from error
    return api


def _keep_what_is_imported() -> None:
    """torch's and transformers' modules stay: to look for garbage in them, again and again and at
    the end of the process once more, takes as long as a small model's export.
    """
    gc.set_threshold(100_000, 50, 50)
    atexit.register(gc.freeze)


@main.command("run", cls=_Sampling)
@case_options
@click.option("--hf_dir", type=click.Path(path_type=Path), default=None,
              help="Hugging Face directory whose config.json names the case directory: param_dir.")
@click.option("--prompt", "prompts", multiple=True,
              help="May be repeated.  [default: each line of standard input]")
@click.option("--prompt_file", type=click.Path(path_type=Path), default=None,
              help="One JSON request a line, with prompt, token_ids or messages, and sampling "
                   "options of its own; one JSON result a line comes out. - is standard input.")
@click.option("--chat", is_flag=True,
              help="Put each prompt into the model's chat template. Without a prompt, in a "
                   "terminal: a conversation.")
@_sampling_options
@_generation_config_option
@click.option("--tp_size", type=int, default=None, help="Must be what the model was compiled with.")
@device_option
@_loading_options
@click.option("--log_file", default="", help="Append what was run, and how fast, to this file.")
@json_option
def run_command(directory: Path | None, case_dir: Path | None, hf_dir: Path | None,
                prompts: tuple[str, ...], prompt_file: Path | None, chat: bool,
                generation_config: str, tp_size: int | None, device: list[int] | None,
                log_file: str, as_json: bool, **options: Any) -> None:
    """Complete prompts with the model in DIR, a case directory, streaming the text."""
    from llmc.artifacts.manifest import read_manifest
    from llmc.runtime.llm import LLM
    from llmc.runtime.prompt_file import read_lines

    loading = _taken(options)
    if options["logprobs"] is not None and not as_json and prompt_file is None:
        raise LlmcError("--logprobs are printed with --json only; add it")
    if prompt_file is not None and prompts:
        raise LlmcError("give either --prompt or --prompt_file")
    case_dir, configured = _resolve_case(directory, case_dir, hf_dir)
    if tp_size is not None and configured not in (None, tp_size):
        raise LlmcError(f"--tp_size is {tp_size}, tensor_parallel in the config of '{hf_dir}' "
                        f"says {configured}; change one of them")
    manifest = read_manifest(case_dir)
    wanted = tp_size if tp_size is not None else configured
    if wanted not in (None, manifest.tp_size):
        raise LlmcError(f"tp_size {wanted} is asked for, but '{case_dir}' was compiled with "
                        f"tp_size {manifest.tp_size}; change the one or compile again")
    params = _sampling_params(options, manifest if generation_config == "auto" else None)
    if str(prompt_file) == "-" and sys.stdin.isatty():
        click.echo("JSON requests, one per line; end them with Ctrl-D:", err=True)
    lines = read_lines(prompt_file) if prompt_file is not None else None
    talk = chat and lines is None and not prompts and not as_json and sys.stdin.isatty()
    if talk and not _is_given("max_tokens"):  # an answer ends by itself
        params = dataclasses.replace(params, max_tokens=manifest.dims.max_seq_len)
    info = _inference_info(hf_dir, case_dir, params.max_tokens, manifest.tp_size, device, log_file)
    _log(log_file, f"{time.strftime('%Y-%m-%dT%H:%M:%S')}\n{info}\n")
    if lines is None and not talk:
        prompts = prompts or _read_prompts()
    failed = 0
    with _ended_by_sigterm(), LLM(case_dir, device=device, **loading) as llm:
        meter = _Meter(lambda: click.echo(info, err=as_json or lines is not None))
        if talk:
            _talk(llm, params, meter)
        elif lines is not None:
            failed = _run_requests(llm, lines, params, chat, meter)
        else:
            _run_prompts(llm, prompts, params, chat, as_json, meter)
    rate = f"{meter.tokens} tokens in {meter.seconds:.2f} s, {meter.rate:.1f} tokens/s"
    click.echo(rate, err=True)
    _log(log_file, f"{rate}\n")
    if failed:
        name = "standard input" if str(prompt_file) == "-" else f"'{prompt_file}'"
        raise CheckFailed(f"{failed} request(s) of {name} could not be run; see their results")


def _sampling_params(options: Mapping[str, Any], manifest: Manifest | None) -> SamplingParams:
    """What the command line gives, over the sampling defaults of a model."""
    given = {name: value for name, value in options.items() if _is_given(name)}
    sampling = manifest and manifest.sampling
    return SamplingParams(**with_defaults(given, sampling.fields() if sampling else {}))


def _is_given(option: str) -> bool:
    """Whether the command line has an option of the current command."""
    source = click.get_current_context().get_parameter_source(option)
    return source is not ParameterSource.DEFAULT


class _Meter:
    """Counts tokens and the seconds in which they are made.

    Args:
        begun: called once, before the first token counts: what could be wrong is known then.
    """

    def __init__(self, begun: Callable[[], object] = lambda: None) -> None:
        self.tokens, self.seconds = 0, 0.0
        self._started = time.perf_counter()
        self._begun = begun

    def begin(self) -> None:
        """Call `begun`, if that was not done."""
        begun, self._begun = self._begun, lambda: None
        begun()

    def start(self) -> None:
        """Time from here on counts."""
        self._started = time.perf_counter()

    def count(self) -> None:
        """A token is there."""
        now = time.perf_counter()
        self.begin()
        self.tokens, self.seconds, self._started = \
            self.tokens + 1, self.seconds + now - self._started, now

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def _run_prompts(llm: LLM, prompts: Sequence[str], params: SamplingParams, chat: bool,
                 as_json: bool, meter: _Meter) -> None:
    """One completion's text as it comes; several as blocks, each when it is complete; or JSON."""
    inputs = [llm.chat_prompt(prompt) if chat else prompt for prompt in prompts]
    total = len(prompts) * params.n
    meter.start()
    if total == 1 and not as_json:
        for piece in llm.stream(inputs, params):
            meter.count()
            click.echo(piece.text, nl=False)
        click.echo()
        return
    completions: list[Completion] = []
    with _ProgressBar() as bar:
        for completion in llm.complete(inputs, params, progress=bar.tokens(meter, total)):
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
                  meter: _Meter) -> int:
    """Print a result a line; returns the number of errors."""
    from llmc.runtime.prompt_file import read_requests, run_requests

    requests = read_requests(llm, lines, params, chat=chat)
    total = sum(request.params.n for request in requests if "error" not in request.answer)
    with _ProgressBar() as bar:
        for result in run_requests(llm, requests, bar.tokens(meter, total)):
            bar.print(json.dumps(result))
    return sum("error" in request.answer for request in requests)


def _talk(llm: LLM, params: SamplingParams, meter: _Meter) -> None:
    """A conversation in the terminal."""
    from llmc.runtime.chat import Chat

    with suppress(ImportError):
        import readline  # noqa: F401  input() has arrow keys then
    meter.begin()
    click.echo("Ctrl-C ends an answer, Ctrl-D the conversation.", err=True)
    chat = Chat(llm, params)
    while True:
        try:
            message = input("> ")
            if message.strip():
                _print_answer(chat.say(message), meter)
        except KeyboardInterrupt:
            click.echo(err=True)
        except EOFError:
            click.echo(err=True)
            return
        except LlmcError as error:
            if not chat.messages:
                raise
            click.echo(f"error: {error}", err=True)


def _print_answer(pieces: Generator[Piece, None, None], meter: _Meter) -> None:
    """Print an answer until its end or Ctrl-C, which waits for the step that runs."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        meter.start()
        with _kept_keys(), closing(pieces):
            for piece in pieces:
                meter.count()
                click.echo(piece.text, nl=False)
                if interrupted.is_set():
                    break
        click.echo()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _kept_keys() -> Iterator[None]:
    """Keep what is typed meanwhile for the next prompt, Ctrl-D too: a terminal that waits for whole
    lines forgets it once readline takes over.
    """
    if not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    mode = [*before]
    mode[3] &= ~termios.ICANON
    termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _read_prompts() -> tuple[str, ...]:
    if sys.stdin.isatty():
        click.echo("Prompts, one per line; end them with Ctrl-D:", err=True)
    lines = sys.stdin.read().splitlines()
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise LlmcError("there is no prompt; give --prompt, or a prompt per line on standard input")
    return prompts


def _resolve_case(directory: Path | None, case_dir: Path | None, hf_dir: Path | None) -> \
        tuple[Path, int | None]:
    """The case directory, named itself or by a Hugging Face directory's config, and the tensor
    parallel size that the config asks for.
    """
    case_dir = _either(directory, case_dir)
    if (case_dir is None) == (hf_dir is None):
        raise LlmcError("give either a case directory or --hf_dir")
    if case_dir is not None:
        return case_dir, None
    assert hf_dir is not None
    path = hf_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LlmcError(f"'{path}' cannot be read as JSON ({error})") from error
    named = config.get("param_dir") if isinstance(config, dict) else None
    if not isinstance(named, str):
        raise LlmcError(f"'{path}' names no param_dir, the case directory; add it, or give "
                        f"the directory itself")
    parallel = config.get("tensor_parallel")
    if parallel is None:
        return hf_dir / named, None
    if not isinstance(parallel, dict) or not isinstance(parallel.get("parallel_size", 1), int):
        raise LlmcError(f"tensor_parallel in '{path}' is not understood; write it like "
                        f'{{"use_tp": true, "parallel_size": 2}}')
    return hf_dir / named, parallel.get("parallel_size", 1) if parallel.get("use_tp") else 1


def _log(path: str, text: str) -> None:
    """Append to the log file, if there is to be one."""
    if path:
        try:
            with open(path, "a", encoding="utf-8") as log:
                log.write(text)
        except OSError as error:
            raise LlmcError(f"--log_file '{path}' cannot be written ({error})") from error


def _inference_info(hf_dir: Path | None, case_dir: Path, max_tokens: int, tp_size: int,
                    device: list[int] | None, log_file: str) -> str:
    visible = os.environ.get("LLMC_VISIBLE_DEVICES", "Not specified")
    return "\n".join([
        "Inference info:", f"| - hf_dir: {hf_dir or 'Not specified'}", f"| - case_dir: {case_dir}",
        f"| - max_tokens: {max_tokens}", f"| - tp_size: {tp_size}",
        f"| - ENV:LLMC_VISIBLE_DEVICES: {visible}",
        f"| - device: {device if device is not None else 'all cores'}",
        f"| - log_file: {log_file}"])


class _ProgressBar:
    """A bar on stderr while that is a terminal, and results on stdout above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        console.quiet = not console.is_terminal
        self._bar = Progress(console=console, transient=True, redirect_stdout=False,
                             redirect_stderr=False, disable=console.quiet)
        self._task = self._bar.add_task("")

    def __enter__(self) -> _ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def show(self, text: str, done: int, total: int) -> None:
        """Set the bar."""
        self._bar.update(self._task, description=text, completed=done, total=total)

    def tokens(self, meter: _Meter, total: int) -> Callable[[Piece], None]:
        """Has the bar show, for each piece, the rate and how many of `total` are complete."""
        done = 0

        def progress(piece: Piece) -> None:
            nonlocal done
            if not meter.tokens:  # it may print, perhaps on the same terminal
                self._bar.stop()
                meter.begin()
                self._bar.start()
            meter.count()
            done += piece.finish_reason is not None
            self.show(f"{meter.rate:.1f} tokens/s", done, total)

        meter.start()
        return progress

    def print(self, result: str) -> None:
        """Print a result. The bar makes room, as stdout may be the same terminal."""
        self._bar.stop()
        click.echo(result)
        self._bar.start()


@main.command("bench")
@case_options
@click.option("--batch_size", default="1;4", help="Batch sizes, separated by semicolons.")
@click.option("--input_output_len", default="64,64;128,20", help="Pairs of lengths.")
@click.option("--runs", default=3, help="Runs per cell; medians are printed.")
@device_option
@click.option("--requests", default=None, metavar="FILE|random:N",
              help="Instead of the grid, a crowd of requests: those of a prompt file, or N random "
                   "ones of 32 to 512 tokens in and 16 to 256 out.")
@click.option("--request_rate", default=math.inf, metavar="R|inf",
              help="Of --requests, a second, as a Poisson process; inf is all at once.")
@click.option("--shared_prefix", default=0, help="Tokens that random requests begin with alike.")
@_loading_options
@json_option
def bench_command(directory: Path | None, case_dir: Path | None, batch_size: str,
                  input_output_len: str, runs: int, device: list[int] | None, requests: str | None,
                  request_rate: float, shared_prefix: int, as_json: bool, **loading: Any) -> None:
    """Measure throughput and latency over a grid of batch sizes and lengths, or of a crowd."""
    from rich.console import Console
    from rich.table import Table

    from llmc.runtime.benchmark import check_grid, measure, parse_grid
    from llmc.runtime.llm import LLM

    case_dir = _case_dir(directory, case_dir)
    if runs < 1:
        raise LlmcError(f"--runs {runs} is below 1")
    if requests is not None:
        _bench_traffic(case_dir, device, loading, requests, request_rate, shared_prefix, as_json)
        return
    grid = parse_grid(batch_size, input_output_len)
    if loading["max_batch_size"] is None:
        loading["max_batch_size"] = max(cell[0] for cell in grid)
    # Each run is to compute its prompts.
    with LLM(case_dir, device=device, **{**loading, "prefix_reuse": False}) as llm:
        check_grid(llm, grid)
        rows = [measure(llm, *cell, runs=runs) for cell in grid]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows]))
        return
    table = Table()
    for name in ("batch", "input", "output", "tokens/s", "latency(ms)", "Tctx(ms)", "Tgen(ms)"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row.batch), str(row.input_length), str(row.output_length),
                      *(f"{value:.2f}" for value in (row.tokens_per_sec, row.latency_ms,
                                                     row.tctx_ms, row.tgen_ms)))
    Console().print(table)


def _bench_traffic(case_dir: Path, device: list[int] | None, loading: dict[str, Any],
                   source: str, rate: float, shared_prefix: int, as_json: bool) -> None:
    """Let a crowd come, and print how it fared."""
    from rich.console import Console
    from rich.table import Table

    from llmc.runtime.llm import LLM
    from llmc.runtime.traffic import measure_traffic, read_traffic

    if not rate > 0:
        raise LlmcError(f"--request_rate {rate} is not above 0")
    if shared_prefix < 0:
        raise LlmcError(f"--shared_prefix {shared_prefix} is below 0")
    with _ended_by_sigterm(), LLM(case_dir, device=device, **loading) as llm:
        traffic = read_traffic(llm, source, rate, shared_prefix)
        with _ProgressBar() as bar:
            report = measure_traffic(llm, traffic, bar.tokens(
                _Meter(), sum(params.n for params in traffic.params)))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report)))
        return
    console = Console()
    console.print(f"{report.requests} requests, {report.output_tokens} tokens in "
                  f"{report.seconds:.2f} s: {report.output_tokens_per_sec:.1f} tokens/s, "
                  f"{report.requests_per_sec:.2f} requests/s")
    table = Table()
    for name in ("", "p50 (ms)", "p90 (ms)", "p99 (ms)"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, times in (("time to first token", report.time_to_first_token),
                        ("between tokens", report.inter_token_latency)):
        table.add_row(name, *("–" if time is None else f"{time * 1e3:.1f}"
                              for time in (times.p50, times.p90, times.p99)))
    console.print(table)
    console.print(f"{report.cache_hits} of {report.cache_queries} prompt tokens were in the cache; "
                  f"{report.preemptions} preemptions")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A SIGTERM ends what runs as Ctrl-C does."""
    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _list(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str] | None:
    """Texts, as a JSON list or with commas between them."""
    if value is None:
        return None
    try:
        read = json.loads(value) if value.lstrip().startswith("[") else \
            [part.strip() for part in value.split(",") if part.strip()]
    except ValueError:
        read = None
    if not isinstance(read, list) or not all(isinstance(part, str) for part in read):
        raise LlmcError(f"--{param.name} '{value}' is not a list; give one such as a,b or "
                        f"'[\"a\", \"b\"]'")
    return read


class _ApiKeys(click.types.StringParamType):
    """A text that may have spaces; of an environment variable, one a line."""

    envvar_list_splitter = "\n"


@main.command("serve")
@click.argument("case_dir", type=click.Path(path_type=Path))
@device_option
@click.option("--host", default="127.0.0.1", help="Address to listen at; 0.0.0.0 for all.")
@click.option("--port", default=8000, help="0 for any that is free.")
@click.option("--served_model_name", default=None,
              help="What clients call the model.  [default: the directory's name]")
@click.option("--tool_call_parser", default=None,
              help="How the model calls tools: hermes, llama3_json, llama4_pythonic, mistral, "
                   "qwen3_coder, glm45, deepseek_v3, deepseek_v31, kimi_k2, minimax_m2 or harmony. "
                   " [default: as its chat template does]")
@click.option("--reasoning_parser", default="auto",
              help="Marks around the model's reasoning: think, mistral, seed_oss, none, or auto "
                   "for those of its chat template.")
@click.option("--response_store_mb", default=64.0, help="Memory for stored responses of "
                                                        "/v1/responses; 0 stores none.")
@click.option("--response_store_ttl", default=3600.0, help="Seconds that a response is stored.")
@click.option("--chat_template_content_format", default="auto",
              type=click.Choice(["auto", "string", "openai"]),
              help="Form of messages' content: a text (string) or a list of parts (openai).  auto: "
                   "as in the request, unless the chat template cannot read that.")
@_generation_config_option
@click.option("--enable_tokenizer_info_endpoint", is_flag=True,
              help="Serve /tokenizer_info: the tokenizer's configuration and the chat template.")
@click.option("--watch", is_flag=True, help="Load what replaces CASE_DIR, and let it take over "
                                            "without losing a request.")
@click.option("--api_key", "api_keys", multiple=True, type=_ApiKeys(), envvar="LLMC_API_KEY",
              show_envvar=True,
              help="Key that clients must give. Repeat the option for several keys; the variable "
                   "has one a line. The list of processes shows it.  [default: none]")
@click.option("--api_key_file", default=None, type=click.Path(path_type=Path),
              help="File of further API keys, one a line: `name: key` or `key`. The log shows "
                   "names.")
@click.option("--max_waiting", default=256,
              help="Sequences that may wait beside those that are decoded. Further requests get "
                   "429 with Retry-After.")
@click.option("--max_seqs_per_key", default=None, type=int,
              help="Sequences of one API key that may run or wait.  [default: an equal part for "
                   "each key, at least as many as are decoded at once]")
@click.option("--allow_priority", is_flag=True,
              help="Allow the field priority in requests. Without it, values other than 0 are "
                   "refused.")
@click.option("--max_request_bytes", default=8 * 2**20, help="Of a request's body.")
@click.option("--request_timeout", default=1800.0, help="Seconds that a request may take.")
@click.option("--header_timeout", default=10.0, help="Seconds that the headers of a request may "
                                                     "take.")
@click.option("--write_timeout", default=60.0,
              help="Seconds after which a connection whose client reads nothing is closed.")
@click.option("--stall_timeout", default=60.0,
              help="Seconds without a completed step, while there is work, after which /health is "
                   "503.")
@click.option("--drain_timeout", default=30, help="Seconds that requests have to end after a "
                                                  "SIGTERM.")
@click.option("--allowed_hosts", callback=_list, metavar="HOST,…",
              help="Host names that requests may use beside localhost, 127.0.0.1 and [::1]; * for "
                   "any.  [default: none where --host is a loopback address, else *]")
@click.option("--allowed_origins", callback=_list, default="[]", metavar="ORIGIN,…",
              help="Origins whose web pages may use the server (CORS), as https://example.com; * "
                   "for any. Like the next two, a list with commas or in JSON.")
@click.option("--allowed_methods", callback=_list, default="*", metavar="METHOD,…",
              help="HTTP methods that those pages may use.")
@click.option("--allowed_headers", callback=_list, default="*", metavar="HEADER,…",
              help="Request headers that those pages may set.")
@click.option("--allow_credentials", is_flag=True, help="Those pages may send credentials.")
@click.option("--ssl_keyfile", type=click.Path(path_type=Path), help="Key of the certificate, PEM.")
@click.option("--ssl_certfile", type=click.Path(path_type=Path),
              help="Certificate, PEM; serves HTTPS.")
@click.option("--ssl_ca_certs", type=click.Path(path_type=Path),
              help="Authorities of clients' certificates, PEM.")
@click.option("--ssl_cert_reqs", type=click.IntRange(0, 2), default=0,
              help="Clients' certificates: 0 not asked for, 1 optional, 2 required.")
@_loading_options
def serve_command(case_dir: Path, api_keys: tuple[str, ...], api_key_file: Path | None,
                  max_waiting: int, max_seqs_per_key: int | None, allow_priority: bool,
                  max_request_bytes: int, request_timeout: float, header_timeout: float,
                  write_timeout: float, stall_timeout: float, drain_timeout: int,
                  ssl_keyfile: Path | None, ssl_certfile: Path | None, ssl_ca_certs: Path | None,
                  ssl_cert_reqs: int, allowed_hosts: list[str] | None, allowed_origins: list[str],
                  allowed_methods: list[str], allowed_headers: list[str], allow_credentials: bool,
                  **options: Any) -> None:
    """Serve the model in CASE_DIR by OpenAI's HTTP interface."""
    try:
        from llmc.server.access import Access
        from llmc.server.limits import Limits, read_api_keys
        from llmc.server.serve import serve
        from llmc.server.tls import tls_context
    except ModuleNotFoundError as error:
        raise LlmcError(f"the server needs {error.name}; install it with: "
                        f"{install_command('serve')}") from error

    serve(case_dir, limits=Limits(
        api_keys=read_api_keys(api_keys, api_key_file), max_waiting=max_waiting,
        max_seqs_per_key=max_seqs_per_key, allow_priority=allow_priority,
        max_request_bytes=max_request_bytes, request_timeout=request_timeout,
        header_timeout=header_timeout, write_timeout=write_timeout, stall_timeout=stall_timeout,
        drain_timeout=drain_timeout),
        access=Access(allowed_hosts, allowed_origins, allowed_methods, allowed_headers,
                      allow_credentials),
        tls=tls_context(ssl_keyfile, ssl_certfile, ssl_ca_certs, ssl_cert_reqs), **options)


@main.command("inspect")
@case_options
@click.option("--verify", is_flag=True, help="Check every file's SHA-256 too.")
@json_option
def inspect_command(directory: Path | None, case_dir: Path | None, verify: bool,
                    as_json: bool) -> None:
    """Show what is in a case directory: per chip, memory, and what each pass matched."""
    from rich.console import Console
    from rich.table import Table

    from llmc.artifacts.manifest import read_manifest, verify_files
    from llmc.runtime.inspection import summarize

    case_dir = _case_dir(directory, case_dir)
    manifest = read_manifest(case_dir)
    verify_files(manifest, case_dir, hashes=verify)
    summary = summarize(manifest)
    if as_json:
        click.echo(json.dumps(summary))
        return
    dims = manifest.dims
    console = Console()
    console.print(f"[bold]{manifest.source.architecture}[/bold] from {manifest.source.kind}, "
                  f"{manifest.dtype}, target {manifest.target.kind}, tp_size {manifest.tp_size}, "
                  f"llmc {manifest.llmc_version}")
    console.print(f"{dims.num_layers} layers, hidden {dims.hidden_size}, heads {dims.num_heads} / "
                  f"{dims.num_kv_heads} × {dims.head_dim}, vocabulary {dims.vocab_size} (padded "
                  f"{dims.padded_vocab_size}), {dims.max_seq_len} positions")
    if manifest.encoder is not None:
        console.print(f"encoder: {manifest.encoder.num_layers} layers, vocabulary "
                      f"{manifest.encoder.vocab_size}, prompts of at most "
                      f"{manifest.encoder.max_seq_len} tokens; decoding begins with token "
                      f"{manifest.encoder.decoder_start_token_id}")
    memory = ["memory per prompt (MB)"] if manifest.encoder is not None else []
    table = Table("chip", "weights (MB)", "KV cache per token (KB)", *memory, "heads",
                  "KV heads", "steps")
    for chip in summary["chips"]:
        table.add_row(str(chip["rank"]), f"{chip['weight_bytes'] / 1e6:.1f}",
                      f"{chip['token_bytes'] / 1e3:.1f}",
                      *(f"{chip['memory_bytes'] / 1e6:.1f}" for _ in memory),
                      str(chip["num_heads"]), str(chip["num_kv_heads"]), str(chip["steps"]))
    console.print(table)
    for chip in summary["chips"]:
        if chip["quantization"]:
            console.print(f"chip {chip['rank']}, weights in fewer bits: " + "; ".join(
                f"{count} in {form}" for form, count in chip["quantization"].items()))
    if summary["cache_tokens"]:
        console.print("tokens that the KV cache holds, about: " + "; ".join(
            f"{name} {count:,}" if count else f"{name} none, as the weights do not fit"
            for name, count in summary["cache_tokens"].items()))
    _print_passes(manifest)


def _print_passes(manifest: Manifest) -> None:
    """What each pass matched, and what it refused with which reason."""
    from rich.console import Console
    from rich.table import Table

    table = Table("pass", "matches", "refused")
    for report in manifest.passes:
        matches = ", ".join(f"{name} {count}" for name, count in report.matches.items() if count)
        table.add_row(report.name, matches or "none", "\n".join(report.refusals))
    Console().print(table)


@main.command("diff")
@case_options
@click.option("--reference", required=True, help="What it was compiled from.")
@click.option("--hf_dir", type=click.Path(path_type=Path), default=None,
              help="For an .onnx reference.")
@click.option("--prompt", default=None, help="Text to compare on.  [default: random tokens]")
@click.option("--tolerance", type=float, default=None,
              help="Largest difference of every tensor, relative to its range.  [default: see "
                   "above]")
@click.option("--tokens", default=16, help="Greedy tokens to compare.")
@click.option("--bisect", is_flag=True, help="Find the first op over tolerance.")
@click.option("--html", type=click.Path(path_type=Path), default=None, help="Report to write.")
@json_option
def diff_command(directory: Path | None, case_dir: Path | None, as_json: bool, html: Path | None,
                 **options: Any) -> None:
    """Show where, and by how much, a compiled model differs from the original.

    The original is run in float32 with the compiled model's own weights, dequantized. A tensor may
    differ by:

    \b
    model                                   of the tensor's range, or measured
    float32; weights dequantized in kernels 1e-5
    float16, bfloat16                       2 x what transformers loses in it
    float8 KV caches                        2 x what transformers loses with them
    quantized activations (cpu: int8, int4, 2 x what transformers loses with the
    uint4; --quantize_activations)          same rounding
    between layers, or an .onnx reference   3 x what the export loses so
    weights that cannot be put into the     0.1 in 8 bits, 0.5 in 4 bits
    reference

    Measured on the same tokens, times the square root of tp_size. Weights that are not quantized
    must be equal bit by bit, quantized ones what rounding to nearest makes of the reference's;
    calibrated ones, or another tool's, at most 0.9 of their root mean square away. A greedy token
    may differ where the reference's logits are no further apart than the difference allowed there.
    """
    found = _case_dir(directory, case_dir)
    with _Phases() as phases:
        phases.begin("import")
        _import_compiler()
        from llmc.compiler.check.diff import diff
        from llmc.compiler.check.report import print_report, write_html

        report = diff(found, progress=phases.begin, **options)
    if html is not None:
        write_html(report, html)
    _finish(report, print_report, as_json)


def _finish(report: Any, print_report: Callable[[Any], None], as_json: bool) -> None:
    """Print what was compared; its verdict is the error, if there is one."""
    if as_json:
        fields = dataclasses.asdict(report)
        verdict = fields.pop("verdict")
        said = {} if verdict is None else {"verdict": verdict}
        click.echo(json.dumps({"passed": verdict is None, **said, **fields}))
    else:
        print_report(report)
    if report.verdict is not None:
        raise CheckFailed(report.verdict)


@main.command("eval")
@case_options
@click.option("--task", required=True, type=click.Choice(["perplexity", "summarize"]),
              help="What to measure; summarize needs the eval extra.")
@click.option("--data", type=click.Path(path_type=Path), default=None,
              help="A text file; for summarize JSON lines with article and summary.  "
                   "[default: articles that come with llmc]")
@click.option("--hf_dir", default=None, help="The original, to measure transformers beside.")
@click.option("--tolerance", type=float, default=None,
              help="Largest difference between the two: relative for perplexity, points for ROUGE."
                   "  [default: 0.0001 and 1, in float16 0.002 and 5, in bfloat16 0.02 and 5]")
@click.option("--max_length", type=int, default=None,
              help="For perplexity: tokens of a window.  [default: the KV cache's, at most 1024]")
@click.option("--stride", type=int, default=None,
              help="For perplexity: tokens from window to window.  [default: half of max_length]")
@click.option("--max_tokens", type=int, default=None,
              help="For summarize: tokens of a summary.  [default: 64]")
@device_option
@json_option
def eval_command(directory: Path | None, case_dir: Path | None, task: str, as_json: bool,
                 **options: Any) -> None:
    """Measure a compiled model's quality: perplexity of a text, ROUGE of summaries."""
    found = _case_dir(directory, case_dir)
    with _Phases() as phases:
        if options["hf_dir"] is not None:
            phases.begin("import")
            _import_compiler()
        from llmc.compiler.check.evaluate import EvalReport, perplexity, print_report, summarize

        tasks: dict[str, Callable[..., EvalReport]] = {"perplexity": perplexity,
                                                       "summarize": summarize}
        measure = tasks[task]
        given = {name: value for name, value in options.items() if value is not None}
        for name in given.keys() - inspect.signature(measure).parameters.keys():
            raise LlmcError(f"--{name} is not for --task {task}; leave it out")
        report = measure(found, progress=phases.show, **given)
    _finish(report, print_report, as_json)


if __name__ == "__main__":
    main()
