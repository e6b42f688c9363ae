"""The report of `diff`: as dataclasses, as text, and as an HTML file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from llmc.errors import LlmcError

_PAIRS = {"compiled vs export": "#0072b2", "compiled vs transformers": "#d55e00",
          "export vs transformers": "#009e73"}  # distinguishable with color blindness


@dataclass(frozen=True)
class Difference:
    """The difference of a tensor between two runs.

    `relative` and `allowed` are relative to the reference's range.
    """

    name: str
    pair: str
    max_abs: float
    relative: float
    allowed: float
    cosine: float
    passed: bool


@dataclass(frozen=True)
class BadWeight:
    """A weight of a chip that differs from the reference's.

    `max_abs` is infinite if the weight is missing or has another shape. `off` is the RMS error of a
    quantized weight, relative to the reference's RMS, if it exceeds rounding.
    """

    chip: int
    name: str
    layer: int | None
    elements: int
    max_abs: float
    off: float = 0.0

    def __str__(self) -> str:
        layer = f" of layer {self.layer}" if self.layer is not None else ""
        how = f"differs in {self.elements} element(s), by up to {self.max_abs:.3g}" \
            if math.isfinite(self.max_abs) else "is missing, not finite or of another shape"
        if self.off:
            how = f"has a relative RMS error of {self.off:.2g}, more than rounding causes"
        return f"chip {self.chip}'s weight '{self.name}'{layer} {how}"


@dataclass(frozen=True)
class GreedyToken:
    """A greedy token of the compiled model after the reference's tokens.

    `margin` is the reference's logit of its token minus that of the compiled model's token, or of
    the second most likely token if both are the same.
    """

    step: int
    token: int
    reference_token: int
    margin: float
    passed: bool
    text: str | None = None
    reference_text: str | None = None


@dataclass(frozen=True)
class DiffReport:
    """The result of `diff`.

    Attributes:
        allowed: description of the tolerance.
        first_op: with `bisect`, the first tensor over tolerance, with its op and chip.
        token_error: allowed absolute error of the logits.
        verdict: None if everything is within tolerance.
    """

    case_dir: str
    reference: str
    target: str
    dtype: str
    kv_dtype: str
    tp_size: int
    date: str
    versions: dict[str, str]
    allowed: str
    layers: tuple[Difference, ...]
    first_layer: str | None
    first_op: str | None
    weights: tuple[BadWeight, ...]
    changed_files: tuple[str, ...]
    tokens: tuple[GreedyToken, ...]
    token_error: float
    verdict: str | None

    @property
    def title(self) -> str:
        """The compared configuration, in one line."""
        caches = f", KV cache in {self.kv_dtype}" if self.kv_dtype != self.dtype else ""
        return (f"target {self.target}, {self.dtype}{caches}, tp_size {self.tp_size}; allowed: "
                f"{self.allowed}")

    @property
    def made_with(self) -> str:
        """Versions and date, in one line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{versions}; {self.date}"

    @property
    def equal_tokens(self) -> str:
        """Summary of the greedy tokens, in one line."""
        same = sum(token.token == token.reference_token for token in self.tokens)
        close = sum(token.token != token.reference_token and token.passed for token in self.tokens)
        rounding = f", {close} within rounding" if close else ""
        return f"greedy tokens: {same} of {len(self.tokens)} equal{rounding}"


def print_report(report: DiffReport) -> None:
    """Print the report as a table of 80 columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    pairs = [pair for pair in _PAIRS if any(d.pair == pair for d in report.layers)]
    heads = [pair.replace(" vs ", " vs\n") for pair in pairs]
    table = Table("tensor", *heads, "allowed", "", box=box.SIMPLE, pad_edge=False)
    for name in dict.fromkeys(d.name for d in report.layers):
        row = {d.pair: d for d in report.layers if d.name == name}
        over = [Text(f"{d.relative:.2e}", "" if d.passed else "bold red") if d else Text("")
                for d in map(row.get, pairs)]
        allowed = next(d.allowed for d in row.values() if d.pair.startswith("compiled"))
        table.add_row(name, *over, f"{allowed:.2e}",
                      "ok" if all(d.passed for d in row.values()) else "OVER")
    console.print(Text(report.title))
    console.print(table)
    lines = [*(f"{name} has changed since it was compiled" for name in report.changed_files),
             *map(str, report.weights)]
    if report.tokens:
        lines.append(report.equal_tokens)
    lines += [f"step {token.step}: {token.token}, expected {token.reference_token}, whose logit "
              f"is {token.margin:.3g} higher (allowed: {report.token_error:.3g})"
              for token in report.tokens if token.token != token.reference_token]
    if report.first_op:
        lines.append(f"first op over tolerance: {report.first_op}")
    lines.append("not within tolerance" if report.verdict else "within tolerance")
    for line in lines:
        console.print(Text(line))


_STYLE = """
body { font: 14px/1.4 sans-serif; margin: 2em; max-width: 60em }
table { border-collapse: collapse; margin: 1em 0 }
td, th { padding: 2px 12px; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child, td.text { text-align: left }
.over { color: #b00; font-weight: bold }
.verdict { padding: .5em 1em; background: #e8f5e9 }
.verdict.over { background: #fdecea }
.made { color: #555 }
pre { display: inline; white-space: pre-wrap }
"""


def write_html(report: DiffReport, path: str | Path) -> None:
    """Write the report as an HTML file with a plot of the relative error by layer.

    Raises:
        LlmcError: the file cannot be written.
    """
    verdict = report.verdict or "within tolerance"
    sections = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>llmc diff</title>"
        f"<style>{_STYLE}</style><h1>llmc diff</h1>",
        f"<p><b>{escape(report.case_dir)}</b> against <b>{escape(report.reference)}</b><br>"
        f"{escape(report.title)}</p>",
        f"<p class='verdict{' over' if report.verdict else ''}'>{escape(verdict)}</p>",
        _list([*(f"{name} has changed since it was compiled" for name in report.changed_files),
               *map(str, report.weights),
               *([f"first op over tolerance: {report.first_op}"] if report.first_op else [])]),
        "<h2>Largest difference, relative to the reference's range</h2>", _plot(report),
        _table(("tensor", "pair", "max abs", "relative", "allowed", "cosine"), [
            (d.passed, (d.name, d.pair, f"{d.max_abs:.3e}", f"{d.relative:.3e}",
                        f"{d.allowed:.3e}", f"{d.cosine:.8f}")) for d in report.layers])]
    if report.tokens:
        sections += [
            f"<h2>Greedy tokens</h2><p>{escape(report.equal_tokens)}. The margin is the "
            f"reference's logit of its token minus that of the compiled model's token, or of the "
            f"second most likely token if both are the same. A token may differ if the margin is "
            f"at most {report.token_error:.3g}.</p>",
            _table(("step", "compiled", "reference", "margin"), [
                (token.passed, (str(token.step), _token(token.token, token.text),
                                _token(token.reference_token, token.reference_text),
                                f"{token.margin:.3g}")) for token in report.tokens])]
    sections.append(f"<p class='made'>{escape(report.made_with)}</p></html>\n")
    try:
        Path(path).write_text("\n".join(sections), encoding="utf-8")
    except OSError as error:
        raise LlmcError(f"'{path}' cannot be written ({error.strerror}); give another path") \
            from error


def _token(number: int, text: str | None) -> str:
    return str(number) if text is None else f"{number} {text!r}"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _table(heads: Sequence[str], rows: Sequence[tuple[bool, Sequence[str]]]) -> str:
    """Format a table of texts; rows that did not pass are marked."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "\n".join(
        f"<tr{'' if passed else ' class=over'}>{''.join(f'<td>{escape(t)}</td>' for t in texts)}"
        f"</tr>" for passed, texts in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _plot(report: DiffReport) -> str:
    """Plot the relative error by layer as inline SVG, on a logarithmic scale.

    A line per pair, dashed lines for tolerances, and a legend.
    """
    names = list(dict.fromkeys(d.name for d in report.layers))
    width, height, left, top, low, high = 760, 300, 60, 10, -9.0, 1.0
    step = (width - left - 20) / max(1, len(names) - 1)

    def y(value: float) -> float:
        scaled = math.log10(value) if value > 0 else low
        scaled = high if math.isnan(scaled) else min(high, max(low, scaled))
        return top + (high - scaled) / (high - low) * (height - 60)

    def line(values: dict[str, float], color: str, dash: str = "", thick: float = 1.5) -> str:
        points = " ".join(f"{left + names.index(name) * step:.1f},{y(value):.1f}"
                          for name, value in values.items())
        dots = "".join(f"<circle cx='{point.split(',')[0]}' cy='{point.split(',')[1]}' r='2.5' "
                       f"fill='{color}'/>" for point in points.split()) if not dash else ""
        return (f"<polyline fill='none' stroke='{color}' stroke-width='{thick}' "
                f"stroke-dasharray='{dash}' points='{points}'/>{dots}")

    parts, legend = [], []
    for exponent in range(int(low), int(high) + 1, 2):
        at = y(10.0 ** exponent)
        parts.append(f"<line x1='{left}' x2='{width - 20}' y1='{at:.1f}' y2='{at:.1f}' "
                     f"stroke='#eee'/><text x='{left - 8}' y='{at + 4:.1f}' text-anchor='end'>"
                     f"1e{exponent}</text>")
    every = -(-len(names) // 8)
    for index, name in enumerate(names):
        if index % every == 0 or index == len(names) - 1:
            short = name.rpartition(".")[2]
            parts.append(f"<text x='{left + index * step:.1f}' y='{height - 32}' "
                         f"text-anchor='middle'>{escape(short)}</text>")
    parts.append(f"<text x='{(left + width) / 2:.0f}' y='{height - 12}' text-anchor='middle'>"
                 f"hidden state after layer, then the logits</text>")
    for pair, color in _PAIRS.items():
        differences = [d for d in report.layers if d.pair == pair]
        if differences:
            thick = 5 if pair == "compiled vs export" else 1.5  # visible under the next line
            parts.append(line({d.name: d.relative for d in differences}, color, thick=thick))
            legend.append((pair, color, ""))
    limits: dict[tuple[float, ...], list[str]] = {}
    for pair in _PAIRS:
        differences = [d for d in report.layers if d.pair == pair]
        if differences:
            limits.setdefault(tuple(round(d.allowed, 12) for d in differences), []).append(pair)
    for (limit, pairs), dash in zip(limits.items(), ("6 4", "2 3", "9 3 2 3"), strict=False):
        values = dict(zip((d.name for d in report.layers if d.pair == pairs[0]), limit,
                          strict=True))
        parts.append(line(values, "#b00", dash))
        legend.append((f"allowed: {', '.join(pairs)}" if len(limits) > 1 else "allowed", "#b00",
                       dash))
    for index, (text, color, dash) in enumerate(legend):
        at = height + 16 + 18 * index
        parts.append(f"<line x1='{left}' x2='{left + 40}' y1='{at - 4}' y2='{at - 4}' "
                     f"stroke='{color}' stroke-width='2' stroke-dasharray='{dash}'/>"
                     f"<text x='{left + 50}' y='{at}'>{escape(text)}</text>")
    return (f"<svg width='{width}' height='{height + 24 + 18 * len(legend)}' font-size='12' "
            f"role='img' aria-label='relative error by layer'>{''.join(parts)}</svg>")
