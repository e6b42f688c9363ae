"""The conversation of `llmc run --chat` in a terminal."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmc.cli.progress import Meter
from llmc.errors import LlmcError

if TYPE_CHECKING:
    from llmc.runtime.core.llm import LLM
    from llmc.runtime.core.request import CompletionChunk
    from llmc.runtime.sampling.params import SamplingParams


def converse(llm: LLM, params: SamplingParams, meter: Meter, adapter: str | None = None,
             images: Sequence[Path] = (), audio: Sequence[Path] = ()) -> None:
    """Run a conversation in the terminal until Ctrl-D.

    Args:
        images, audio: pictures and audio clips of its first message.
    """
    from llmc.runtime.chat import Chat

    with suppress(ImportError):
        import readline  # noqa: F401  enables arrow keys in input()
    meter.begin()
    click.echo("Ctrl-C ends an answer, Ctrl-D the conversation.", err=True)
    chat = Chat(llm, params, adapter)
    while True:
        try:
            message = input("> ")
            if message.strip():
                media = ((), ()) if chat.messages else (images, audio)
                print_answer(chat.say(message, *media), meter)
        except KeyboardInterrupt:
            click.echo(err=True)
        except EOFError:
            click.echo(err=True)
            return
        except LlmcError as error:
            if not chat.messages:
                raise
            click.echo(f"error: {error}", err=True)


def print_answer(pieces: Generator[CompletionChunk, None, None], meter: Meter) -> None:
    """Print an answer to its end; Ctrl-C ends it after the running step."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        meter.start()
        with _keep_typed_input(), closing(pieces):
            for piece in pieces:
                meter.count()
                click.echo(piece.text, nl=False)
                if interrupted.is_set():
                    break
        click.echo()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _keep_typed_input() -> Iterator[None]:
    """Keep input typed during an answer, including Ctrl-D, for the next prompt.

    In canonical mode the terminal discards it when readline takes over.
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
