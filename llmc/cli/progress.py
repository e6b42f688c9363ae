"""Progress on stderr: phases, bars and the generation rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from llmc.runtime.core.request import CompletionChunk


class Phases:
    """Phases of a long command, on stderr.

    Prints each phase with its duration when it ends. On a terminal, a live line shows the current
    phase.
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

    def __enter__(self) -> Phases:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._end()
        self._live.stop()

    def begin(self, name: str) -> None:
        """End the current phase and begin another."""
        self._end()
        self._name, self._started = name, time.perf_counter()
        self._live.reset(self._task, description=name, total=None, visible=True)

    def show(self, name: str, done: int, total: int) -> None:
        """Set the progress of a phase; begin it if it is not the current one."""
        if name != self._name:
            self.begin(name)
        self._live.update(self._task, completed=done, total=total)

    def note(self, text: str) -> None:
        """Print a note."""
        self._print(text)

    def _end(self) -> None:
        if self._name:
            self._print(f"[{time.perf_counter() - self._started:7.2f} s] {self._name}")
        self._name = ""

    def _print(self, text: str) -> None:
        self._live.stop()  # it may share the terminal
        click.echo(text, err=True)
        self._live.start()


class Meter:
    """Counter of generated (or embedded) tokens and of the seconds that they took.

    Args:
        begun: called once before the first token, after all checks of the requests.
    """

    def __init__(self, begun: Callable[[], object] = lambda: None) -> None:
        self.tokens, self.seconds = 0, 0.0
        self._started = time.perf_counter()
        self._begun = begun

    def begin(self) -> None:
        """Call `begun` on the first call."""
        begun, self._begun = self._begun, lambda: None
        begun()

    def start(self) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def count(self, tokens: int = 1) -> None:
        """Count tokens."""
        now = time.perf_counter()
        self.begin()
        self.tokens, self.seconds, self._started = \
            self.tokens + tokens, self.seconds + now - self._started, now

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class ProgressBar:
    """A progress bar on stderr if it is a terminal, and results on stdout above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        console.quiet = not console.is_terminal
        self._bar = Progress(console=console, transient=True, redirect_stdout=False,
                             redirect_stderr=False, disable=console.quiet)
        self._task = self._bar.add_task("")

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def show(self, text: str, done: int, total: int) -> None:
        """Update the bar."""
        self._bar.update(self._task, description=text, completed=done, total=total)

    def tokens(self, meter: Meter, total: int) -> Callable[[CompletionChunk], None]:
        """Return a callback for chunks that shows the rate and the completions done."""
        done = 0

        def progress(piece: CompletionChunk) -> None:
            nonlocal done
            if not meter.tokens:  # begin() may print on the same terminal
                self._bar.stop()
                meter.begin()
                self._bar.start()
            meter.count()
            done += piece.finish_reason is not None
            self.show(f"{meter.rate:.1f} tokens/s", done, total)

        meter.start()
        return progress

    def print(self, result: str) -> None:
        """Print a result; the bar is hidden meanwhile, as stdout may share the terminal."""
        self._bar.stop()
        click.echo(result)
        self._bar.start()
