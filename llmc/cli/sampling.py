"""The sampling options of `llmc run`, one for each attribute of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from llmc.cli.options import Command
from llmc.errors import LlmcError
from llmc.runtime.sampling.params import FIELDS, SamplingParams, with_defaults

if TYPE_CHECKING:
    from llmc.artifacts.manifest import Manifest


class _SamplingOption(click.Option):
    """An option in the help's section "Sampling"."""


class SamplingCommand(click.Command):
    """A command whose help has a separate section of sampling options."""

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
            raise LlmcError(f"--logit_bias is '{value}', expected a token id and a bias; write "
                            f"it as 42=-1.5") from None
    return biases


def _early_stopping(ctx: click.Context, param: click.Parameter, value: str) -> bool | str:
    return {"false": False, "true": True}.get(value, value)


# Arguments of click.option for each type of an attribute.
_CLICK_TYPES: dict[Any, dict[str, Any]] = {
    int: dict(type=int), float: dict(type=float), bool: dict(is_flag=True),
    int | None: dict(type=int), str | None: dict(type=str),
    str | Mapping[str, object] | None: dict(type=str, metavar="SCHEMA"),
    str | Sequence[int] | None: dict(type=str),
    Sequence[str]: dict(multiple=True), Sequence[str | Sequence[int]]: dict(multiple=True),
    Sequence[int]: dict(type=int, multiple=True),
    Mapping[int, float]: dict(multiple=True, callback=_biases, metavar="ID=BIAS", default=()),
    bool | Literal["never"]: dict(type=click.Choice(["false", "true", "never"]), default="false",
                                  callback=_early_stopping)}


def sampling_options(command: Command) -> Command:
    """Add an option for each attribute of SamplingParams."""
    for field in reversed(FIELDS):
        given = {"default": field.default, **_CLICK_TYPES[field.kind]}
        remark = " May be repeated." if given.get("multiple") else \
            " Printed with --json." if field.name == "logprobs" else ""
        command = click.option(f"--{field.name}", cls=_SamplingOption, help=field.text + remark,
                               **given)(command)
    return command


generation_config_option = click.option(
    "--generation_config", default="auto", type=click.Choice(["auto", "none"]),
    help="Source of sampling defaults: the model's generation_config.json before llmc's (auto), "
         "or only llmc's (none).")


def sampling_params(options: Mapping[str, Any], manifest: Manifest | None) -> SamplingParams:
    """Build sampling parameters from the command line, then from the model's defaults."""
    given = {name: value for name, value in options.items() if is_given(name)}
    sampling = manifest and manifest.sampling
    return SamplingParams(**with_defaults(given, sampling.fields() if sampling else {}))


def first_given(options: Iterable[str]) -> str | None:
    """The first of these options of the current command that is set explicitly; None: none is."""
    return next((option for option in options if is_given(option)), None)


def is_given(option: str) -> bool:
    """Whether an option of the current command is set explicitly."""
    source = click.get_current_context().get_parameter_source(option)
    return source is not ParameterSource.DEFAULT
