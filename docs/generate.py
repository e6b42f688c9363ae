"""Parts of the pages that are made from the code: endpoints, metrics, ops, the causal LM sweep."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from llmc import plugins
from llmc.server.limits import OPEN, AdmissionGate
from llmc.server.metrics import Metrics
from llmc.server.openapi import LORA_UPDATES, OPERATIONS, TOKENIZER_INFO, Operation
from llmc.server.reasoning import REASONING_MARKS
from llmc.server.tool_parsers import TOOL_PARSERS

ROOT = Path(__file__).resolve().parent.parent


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
                     for line in lines)


def endpoints() -> str:
    """Return a table of the server's paths."""
    return table(("method", "path", "body", "API key", "statuses"),
                 (_endpoint(own) for own in (*OPERATIONS, TOKENIZER_INFO, *LORA_UPDATES)))


def _endpoint(own: Operation) -> tuple[str, ...]:
    statuses = [200, *(status for status, _ in own.wrong)]
    return (own.method, f"`{own.path}`", f"`{own.body.__name__}`" if own.body else "",
            "" if own.path in OPEN else "yes", ", ".join(map(str, statuses)))


def bodies() -> str:
    """Return the fields of each request body."""
    parts = []
    for own in (*OPERATIONS, *LORA_UPDATES):
        if own.body is None:
            continue
        fields = ", ".join(f"`{name}`" for name in own.body.model_fields)
        parts.append(f"`{own.path}` (`{own.body.__name__}`)\n: {fields}")
    return "\n\n".join(parts)


def metrics() -> str:
    """Return a table of the metrics that /metrics exposes."""
    unused = cast(AdmissionGate, SimpleNamespace(inside=0, sequences=0, refused=0))
    values: defaultdict[str, Any] = defaultdict(
        int, spec_decode_accepted_tokens_per_pos=[0], max_loras=1, running_adapters=[],
        waiting_adapters=[])
    text = Metrics({"model": (lambda: values, unused)}).text().decode()
    return table(("name", "type", "meaning"), (
        (f"`{family.name}`", family.type, family.documentation)
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")))


def parsers() -> str:
    """Return a table of the parsers of tool calls and reasoning."""
    return table(("option", "parsers"), (
        ("`--tool_call_parser`", _names(TOOL_PARSERS)),
        ("`--reasoning_parser`", _names([*REASONING_MARKS, "none"]))))


def ops() -> str:
    """Return a table of the ops of the `llmc` domain."""
    return table(("op", "version", "inputs", "outputs", "attributes"), (
        (f"`{op.name}`", str(op.version), _names(op.inputs), _names(op.outputs),
         _names(op.fields)) for op in plugins.registry().values()))


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def sweep() -> str:
    """Return the outcome of tests/sweep.py, by model type of transformers."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in (ROOT / "tests" / "sweep.md").read_text(encoding="utf-8").splitlines():
        match = re.match(r"\| ([\w-]+) \| (\w+) \|", line)
        if match and match[1] != "family" and match[2] in ("matches", "refused", "untried"):
            found[match[2]].append(match[1])
    return table(("outcome", "number", "model types"), (
        (outcome, str(len(names)), _names(names)) for outcome, names in sorted(found.items())))


PARTS: dict[str, Callable[[], str]] = {
    "endpoints": endpoints, "bodies": bodies, "metrics": metrics, "ops": ops,
    "parsers": parsers, "sweep": sweep}
