"""Find phrases that docs/glossary.md replaces.

Reads prose only: Markdown outside code, docstrings, comments, and messages (string literals of at
least three words, in Python outside tests). `words: ok` in a comment on the same line excepts
that line.

    python docs/lint_words.py                 the paths that docs/words.toml lists as clean
    python docs/lint_words.py runtime csrc    any other files and folders
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_WORDS = ROOT / "docs" / "words.toml"
_EXCEPTION = "words: ok"
_CODE = re.compile(r"```.*?(```|\Z)|`[^`\n]*`|\]\([^)]*\)|https?://\S+", re.DOTALL)
_SPAN = re.compile(r"`[^`\n]*`")
_C_COMMENTS = re.compile(r"/\*.*?\*/|(?:^[ \t]*//[^\n]*\n)+|//[^\n]*", re.DOTALL | re.MULTILINE)
_SPACE = r"\s+(?:(?://|#|\*)\s*)?"  # also where a comment goes on
_C_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_HASH_COMMENTS = re.compile(r"(?:^[ \t]*#[^\n]*\n)+|\s#[^\n]*", re.MULTILINE)
_C_SUFFIXES = {".h", ".cuh", ".cu", ".cpp", ".cc"}
_HASH_SUFFIXES = {".toml", ".cmake", ".cpu", ".cuda"}  # also of Dockerfiles
_HASH_NAMES = {"Makefile", "CMakeLists.txt"}


@dataclass(frozen=True)
class Phrase:
    """A pattern to find and the words to use instead."""

    find: re.Pattern[str]
    use: str


@dataclass(frozen=True)
class Finding:
    """A phrase at a line of a file."""

    path: Path
    line: int
    text: str
    use: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: '{self.text}': {self.use}"


def read_words() -> dict[str, Any]:
    """Parse docs/words.toml."""
    return tomllib.loads(_WORDS.read_text(encoding="utf-8"))


def read_phrases() -> list[Phrase]:
    """Compile the patterns of docs/words.toml."""
    return [Phrase(re.compile(rf"\b(?:{own['find'].replace(' ', _SPACE)})\b", re.IGNORECASE),
                   own["use"]) for own in read_words()["phrase"]]


def find(paths: Sequence[Path], phrases: Sequence[Phrase]) -> list[Finding]:
    """Return the findings in these files and folders, in order."""
    return [finding for path in _files(paths) for finding in _find_in(path, phrases)]


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    excluded = {ROOT / path for path in read_words()["exclude"]}
    for top in paths:
        found = sorted(top.rglob("*")) if top.is_dir() else [top]
        for path in found:
            inside = {path, *path.parents} & excluded
            if path.is_file() and not inside and (
                    path.name in _HASH_NAMES
                    or path.suffix in {".md", ".py", *_C_SUFFIXES, *_HASH_SUFFIXES}):
                yield path


def _find_in(path: Path, phrases: Sequence[Phrase]) -> Iterator[Finding]:
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for first, text in _prose(path, source):
        prose = _SPAN.sub(" ", text)
        for phrase in phrases:
            for match in phrase.find.finditer(prose):
                line = first + prose.count("\n", 0, match.start())
                if line > len(lines) or _EXCEPTION not in lines[line - 1]:
                    yield Finding(shown, line, " ".join(match[0].split()), phrase.use)


def _prose(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """Yield pieces of prose, each with the number of its first line."""
    if path.suffix == ".md":
        yield 1, _CODE.sub(lambda match: "\n" * match[0].count("\n") or " ", source)
    elif path.suffix == ".py":
        yield from _python_comments(source)
        yield from _python_strings(source, messages="tests" not in path.parts)
    else:
        is_c = path.suffix in _C_SUFFIXES
        found = [*(_C_COMMENTS if is_c else _HASH_COMMENTS).finditer(source)]
        found += [match for match in _C_STRING.finditer(source if is_c else "")
                  if len(match[0].split()) > 2]
        for match in found:
            yield 1 + source.count("\n", 0, match.start()), match[0]


def _python_comments(source: str) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != start + len(block):
            yield start, "\n".join(block)
            block = []
        if not block:
            start = token.start[0]
        block.append(token.string)
    if block:
        yield start, "\n".join(block)


def _python_strings(source: str, messages: bool) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) \
                and ast.get_docstring(node) is not None:
            docstrings.add(node.body[0].value)  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (
                node in docstrings or (messages and len(node.value.split()) > 2)):
            yield node.lineno, node.value


def main(arguments: Sequence[str]) -> int:
    """Print the findings and return the exit code, 1 if there is one."""
    paths = [Path(argument).resolve() for argument in arguments] or \
        [ROOT / path for path in read_words()["clean"]]
    absent = [path for path in paths if not path.exists()]
    if absent:
        print(f"{absent[0]}: no such file or folder; give paths that exist", file=sys.stderr)
        return 2
    findings = find(paths, read_phrases())
    for finding in findings:
        print(finding)
    if findings:
        print(f"{len(findings)} phrases that docs/glossary.md replaces", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
