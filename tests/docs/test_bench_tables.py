"""bench/README.md equals the result files; `tables.py record` parses outputs."""

import json
import re

import pytest
import tables

README = tables.README.read_text(encoding="utf-8")
OUTPUT = """2026-11-25, x86_64, 2 cores, Python 3.11.7, llmc 0.1.0, onnxruntime-genai 0.18.0

batches of one
| batch | tokens/s |
| --- | --- |
| 1 | 86.5 |
"""


def test_the_tables_are_those_of_the_result_files():
    assert tables.render(README, tables.BENCH / "results") == README
    assert len(re.findall("<!-- results: ", README)) == len(re.findall("<!-- end -->", README)) > 30


def test_every_result_is_shown_with_its_source():
    files = {path.name for path in (tables.BENCH / "results").glob("*.json")}
    assert files == {*re.findall(r"<!-- results: (\S+) -->", README)}
    for name in files:
        result = json.loads((tables.BENCH / "results" / name).read_text(encoding="utf-8"))
        assert result.keys() >= {"name", "date", "machine", "versions", "commit", "tables"}, name
        assert name == f"{result['date']}-{result['machine']}-{result['name']}.json"
        for own in result["tables"]:
            assert {len(row) for row in own["rows"]} == {len(own["columns"])}, name


def test_every_script_has_a_section():
    scripts = {path.name for path in tables.BENCH.glob("*.py")}
    named = {*re.findall(r"bench/(\w+\.py)", README)}
    assert scripts - named == {"bench_model.py", "embedding_peer.py"}


def test_an_output_becomes_a_result_file(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(tables, "BENCH", tmp_path)
    path = tables.record("cpu", "here", OUTPUT, "2026-11-25", "abc1234")
    result = json.loads(path.read_text())
    assert path.name == "2026-11-25-here-cpu.json"
    assert result["versions"] == {"Python": "3.11.7", "llmc": "0.1.0",
                                  "onnxruntime-genai": "0.18.0"}
    assert result["tables"] == [{"title": "batches of one", "columns": ["batch", "tokens/s"],
                                 "rows": [["1", "86.5"]]}]
    with pytest.raises(SystemExit, match="has no table"):
        tables.record("cpu", "here", "nothing", "2026-11-25", "abc1234")
