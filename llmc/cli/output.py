"""Output that several commands share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from llmc.errors import CheckFailed

if TYPE_CHECKING:
    from llmc.artifacts.manifest import Manifest


def print_passes(manifest: Manifest) -> None:
    """Print a table of the passes with their matches and refusals."""
    from rich.console import Console
    from rich.table import Table

    table = Table("pass", "matches", "refused")
    for report in manifest.passes:
        matches = "; ".join(f"{name}: {count}" for name, count in report.matches.items() if count)
        table.add_row(report.name, matches or "none", "\n".join(report.refusals))
    Console().print(table)


def finish_check(report: Any, print_report: Callable[[Any], None], as_json: bool) -> None:
    """Print the report of a check; raise CheckFailed if it has a verdict."""
    if as_json:
        fields = dataclasses.asdict(report)
        verdict = fields.pop("verdict")
        failure = {} if verdict is None else {"verdict": verdict}
        click.echo(json.dumps({"passed": verdict is None, **failure, **fields}))
    else:
        print_report(report)
    if report.verdict is not None:
        raise CheckFailed(report.verdict)
