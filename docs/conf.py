"""Sphinx configuration. `make docs` builds the pages into build/docs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent))

import generate

from llmc import __version__

project = "llmc"
author = "the llmc authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["README.md"]
html_theme = "furo"
html_title = f"llmc {release}"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
nitpicky = False


class Generated(SphinxDirective):
    """A part of a page that generate.py makes: `{generated} NAME`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(generate.PARTS[self.arguments[0]]())


def escape_asterisks(app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Escape the asterisks of options' help, which is not reStructuredText."""
    lines[:] = [line if "``" in line else re.sub(r"(?<!\*)\*(?!\*)", r"\*", line) for line in lines]


def setup(app: Sphinx) -> None:
    """Register the directive and the event."""
    app.add_directive("generated", Generated)
    app.connect("sphinx-click-process-options", escape_asterisks)
