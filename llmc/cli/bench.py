"""`llmc bench`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from llmc.cli.effects import refuse_without_effect
from llmc.cli.options import (
    case_options,
    device_option,
    json_option,
    loading_options,
    require_case_dir,
)
from llmc.cli.progress import Meter, ProgressBar
from llmc.cli.sampling import first_given, is_given
from llmc.cli.signals import sigterm_as_interrupt
from llmc.errors import LlmcError

if TYPE_CHECKING:
    from rich.table import Table

    from llmc.runtime.benchmark import Row, Speculation
    from llmc.runtime.random_images import RandomImages


@click.command("bench")
@case_options
@click.option("--batch_size", default="1;4", metavar="N;N;…",
              help="Batch sizes of the grid, in sequences.")
@click.option("--input_output_len", default="64,64;128,20", metavar="IN,OUT;…",
              help="Pairs of input and output lengths of the grid, in tokens.")
@click.option("--runs", default=3,
              help="Number of runs per cell; the table has their medians. With --speculate, each "
                   "run follows one without drafts, also of --requests.")
@device_option
@click.option("--requests", default=None, metavar="FILE|random:N",
              help="Run a serving workload instead of the grid: the requests of a prompt file, or "
                   "N random ones of 32 to 512 input and 16 to 256 output tokens.")
@click.option("--request_rate", default=math.inf, metavar="R|inf",
              help="Rate of a Poisson process at which --requests arrive, in requests/s; inf: all "
                   "at once.")
@click.option("--shared_prefix", default=0,
              help="Length of a prefix that all random requests share, in tokens.")
@click.option("--images", default=None, metavar="NxWxH",
              help="Random images of each prompt, such as 1x1024x1024: count x width x height. "
                   "They are preprocessed before the time is taken.")
@click.option("--audio", "audio_seconds", type=float, default=None, metavar="SECONDS",
              help="Measure the real-time factor of a speech model with audio of this length, for "
                   "each batch size.")
@loading_options
@json_option
def bench_command(directory: Path | None, case_dir: Path | None, batch_size: str,
                  input_output_len: str, runs: int, device: list[int] | None, requests: str | None,
                  request_rate: float, shared_prefix: int, images: str | None,
                  audio_seconds: float | None, as_json: bool, **loading: Any) -> None:
    """Measure throughput and latency of a grid of lengths or of a serving workload.

    With --speculate, plain decoding is measured in alternation. Random prompts repeat nothing, so
    their drafts say little: give --requests a prompt file.
    """
    from rich.console import Console
    from rich.table import Table

    from llmc.artifacts.manifest import read_manifest
    from llmc.runtime.benchmark import check_grid, measure, parse_grid
    from llmc.runtime.core.llm import LLM
    from llmc.runtime.random_images import RandomImages

    case_dir = require_case_dir(directory, case_dir)
    _check_options(requests, images, audio_seconds, loading)
    refuse_without_effect(read_manifest(case_dir))
    pictures = None if images is None else RandomImages.parse(images)
    if runs < 1:
        raise LlmcError(f"--runs is {runs}, expected at least 1; give a larger number")
    if audio_seconds is not None:
        _bench_speech(case_dir, device, loading, batch_size, audio_seconds, runs, as_json)
        return
    if requests is not None:
        _bench_traffic(case_dir, device, loading, requests, request_rate, shared_prefix,
                       pictures, runs, as_json)
        return
    grid = parse_grid(batch_size, input_output_len)
    if loading["max_batch_size"] is None:
        loading["max_batch_size"] = max(cell[0] for cell in grid)
    # Prefix caching would skip the prefill of every run after the first.
    with LLM(case_dir, device=device, **{**loading, "prefix_reuse": False}) as llm:
        check_grid(llm, grid, pictures)
        rows = [measure(llm, *cell, runs=runs, compare=loading["speculate"] != "off",
                        images=pictures)
                for cell in grid]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows]))
        return
    table = Table()
    for name in ("batch", "input", "output", "tokens/s", "latency(ms)", "TTFT(ms)", "TPOT(ms)"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row.batch), str(row.input_length), str(row.output_length),
                      *(f"{value:.2f}" for value in (
                          row.tokens_per_sec, row.latency_ms, row.tctx_ms, row.tgen_ms)))
    console = Console()
    console.print(table)
    if pictures is not None:
        console.print(f"preprocess: {median(row.preprocess_ms or 0 for row in rows):.2f} ms per "
                      f"prompt")
    if loading["speculate"] != "off":
        console.print(_speculation_table(rows))


def _check_options(requests: str | None, images: str | None, audio_seconds: float | None,
                   loading: dict[str, Any]) -> None:
    """Refuse options that have no effect on the selected benchmark."""
    unused: tuple[str, ...]
    if audio_seconds is not None:
        if requests is not None or images is not None:
            raise LlmcError(f"--{'images' if requests is None else 'requests'} is given with "
                            f"--audio; give only one")
        unused, selected = ("input_output_len", "request_rate", "shared_prefix"), "with --audio"
    elif requests is not None:
        unused, selected = ("batch_size", "input_output_len"), "with --requests"
        if loading["speculate"] == "off":
            unused, selected = (*unused, "runs"), "with --requests and without --speculate"
    else:
        unused, selected = ("request_rate", "shared_prefix"), "without --requests"
    if requests is None and loading["speculate"] == "off" and is_given("num_speculative_tokens"):
        raise LlmcError("--num_speculative_tokens is given without --speculate, which it needs; "
                        "give both, or leave it out")
    found = first_given(unused)
    if found is not None:
        raise LlmcError(f"--{found} has no effect {selected}; leave it out")
    if requests is None and is_given("prefix_reuse") and loading["prefix_reuse"]:
        raise LlmcError("--prefix_reuse has no effect without --requests, as prefix caching would "
                        "skip the prefill that is measured; leave it out")


def _speculation_table(rows: Sequence[Row]) -> Table:
    """Return a table of plain and speculative decoding by cell."""
    from rich.table import Table

    table = Table(caption="plain: tokens/s without drafts; ratio: tokens/s relative to it")
    for name in ("batch", "input", "output", "plain", "ratio", "drafts", "acceptance length"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        found = row.speculation
        assert found is not None
        table.add_row(str(row.batch), str(row.input_length), str(row.output_length),
                      f"{found.plain_tokens_per_sec:.2f}", f"{found.speedup:.2f}",
                      str(found.drafts), _acceptance_length(found))
    return table


def _acceptance_length(found: Speculation) -> str:
    return "–" if found.acceptance_length is None else f"{found.acceptance_length:.2f}"


def _bench_speech(case_dir: Path, device: list[int] | None, loading: dict[str, Any],
                  batch_size: str, seconds: float, runs: int, as_json: bool) -> None:
    """Print the real-time factor of transcriptions."""
    from rich.console import Console
    from rich.table import Table

    from llmc.runtime.core.llm import LLM
    from llmc.runtime.speech_benchmark import measure_speech, parse_batches, speech_columns

    batches = parse_batches(batch_size)
    if loading["max_batch_size"] is None:
        loading["max_batch_size"] = max(batches)
    with LLM(case_dir, device=device, **{**loading, "prefix_reuse": False}) as llm:
        rows = [measure_speech(llm, batch, seconds, runs=runs) for batch in batches]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows]))
        return
    table = Table()
    for name in ("batch", "audio(s)", "latency(ms)", "real-time factor", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*speech_columns(row))
    Console().print(table)


def _bench_traffic(case_dir: Path, device: list[int] | None, loading: dict[str, Any],
                   source: str, rate: float, shared_prefix: int, images: RandomImages | None,
                   runs: int, as_json: bool) -> None:
    """Run a serving workload and print its throughput and latency."""
    from rich.console import Console
    from rich.table import Table

    from llmc.runtime.core.llm import LLM
    from llmc.runtime.serving_workload import compare_workload, measure_workload, read_workload

    if not rate > 0:
        raise LlmcError(f"--request_rate is {rate}, expected more than 0; give a larger number")
    if shared_prefix < 0:
        raise LlmcError(f"--shared_prefix is {shared_prefix}, expected 0 or more tokens; give a "
                        f"larger number")
    with sigterm_as_interrupt(), LLM(case_dir, device=device, **loading) as llm:
        traffic = read_workload(llm, source, rate, shared_prefix, images)
        completions = sum(params.n for params in traffic.params)
        with ProgressBar() as bar:
            if loading["speculate"] == "off":
                report = measure_workload(llm, traffic, bar.tokens(Meter(), completions))
            else:
                report = compare_workload(llm, traffic, runs,
                                          bar.tokens(Meter(), 2 * runs * completions))
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
    for name, times in (("TTFT", report.time_to_first_token),
                        ("ITL", report.inter_token_latency)):
        table.add_row(name, *("–" if time is None else f"{time * 1e3:.1f}"
                              for time in (times.p50, times.p90, times.p99)))
    console.print(table)
    console.print(f"{report.cache_hits} of {report.cache_queries} prompt tokens were in the cache; "
                  f"{report.preemptions} preemptions")
    if (found := report.speculation) is not None:
        console.print(f"{found.speedup:.2f} × the tokens/s of plain decoding, "
                      f"{found.plain_tokens_per_sec:.1f}; {found.drafts} drafts, acceptance length "
                      f"{_acceptance_length(found)}")
