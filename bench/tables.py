"""Benchmark results as JSON files, and the tables of bench/README.md made from them.

    python bench/cpu.py WORK_DIR | python bench/tables.py record cpu --machine x86_64-2-cores
    python bench/tables.py render

A script prints a line of versions and Markdown tables. `record` writes them to
bench/results/DATE-MACHINE-NAME.json with the date, the machine, the versions and the commit.
`render` replaces what follows each `<!-- results: FILE -->` of bench/README.md, up to
`<!-- end -->`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
README = BENCH / "README.md"
_PLACE = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def parse(text: str) -> list[dict[str, Any]]:
    """Return the tables of a script's output; a line before a table is its title."""
    tables: list[dict[str, Any]] = []
    title, rows = "", list[list[str]]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])])
            continue
        if len(rows) > 2:
            tables.append({"title": title, "columns": rows[0], "rows": rows[2:]})
            title, rows = "", []
        if line.strip():
            title = line.strip()
    return tables


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |"
                     for cells in (columns, ["---"] * len(columns), *rows))


def rendered(result: dict[str, Any]) -> str:
    """Return the Markdown of a result: machine and versions, notes, tables."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [", ".join(filter(None, (result["date"] or "date unknown", result["machine"], versions,
                                     result["commit"] and f"commit {result['commit']}")))]
    parts += result.get("notes", [])
    for own in result["tables"]:
        parts += [*([own["title"]] if own["title"] else []), table(own["columns"], own["rows"])]
    return "\n\n".join(parts)


def render(readme: str, results: Path) -> str:
    """Return the README with each table made from its result file."""
    def replace(match: re.Match[str]) -> str:
        result = json.loads((results / match[2]).read_text(encoding="utf-8"))
        return f"{match[1]}\n{rendered(result)}\n\n{match[3]}"

    return _PLACE.sub(replace, readme)


def record(name: str, machine: str, output: str, date: str, commit: str) -> Path:
    """Write a script's output as a result file and return its path.

    Raises:
        SystemExit: the output has no table.
    """
    tables = parse(output)
    if not tables:
        sys.exit("the output has no table; pipe what the script prints into this command")
    versions = dict(re.findall(r"([A-Za-z][\w-]*) (\d[\w.+]*)", output.splitlines()[0]))
    path = BENCH / "results" / f"{date}-{machine}-{name}.json"
    path.write_text(json.dumps({"name": name, "date": date, "machine": machine,
                                "versions": versions, "commit": commit, "tables": tables},
                               indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("render")
    recording = commands.add_parser("record")
    recording.add_argument("name")
    recording.add_argument("--machine", required=True)
    arguments = parser.parse_args()
    if arguments.command == "record":
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=BENCH, check=True,
                                capture_output=True, text=True).stdout.strip()
        print(record(arguments.name, arguments.machine, sys.stdin.read(),
                     datetime.date.today().isoformat(), commit))
    else:
        README.write_text(render(README.read_text(encoding="utf-8"), BENCH / "results"),
                          encoding="utf-8")


if __name__ == "__main__":
    main()
