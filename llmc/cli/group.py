"""The command group: prints a user's error as one message and sets the exit code."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from llmc.errors import CheckFailed, LlmcError
from llmc.memory import memory_errors

CONTEXT_SETTINGS = {"token_normalize_func": lambda token: token.replace("-", "_"),
                    "help_option_names": ["-h", "--help"], "show_default": True}


class Group(click.Group):
    """A group of commands that prints LlmcError and exits with 2, or 1 for a failed check.

    With --json the error is a JSON object on stderr; stdout has results only.
    """

    def invoke(self, ctx: click.Context) -> Any:
        as_json = "--json" in ctx.args
        try:
            with memory_errors("run this command"):  # covers the imports
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
    if not os.environ.get("NO_COLOR"):  # click drops colors if stderr is not a terminal
        label = click.style(label, fg="red", bold=True)
    click.echo(f"{label} {message}", err=True)
