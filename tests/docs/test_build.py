"""The documentation builds without warnings, and its links resolve."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)#\s]+?)(?:#[^)]*)?\)")


def test_the_documentation_builds_without_warnings(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet",
         "-d", tmp_path / "doctrees", ROOT / "docs", tmp_path / "html"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    for page, text in (("reference/cli", "--tp_size"), ("reference/python", "kv_cache_tokens"),
                       ("reference/http", "/v1/chat/completions"),
                       ("reference/metrics", "vllm:time_to_first_token_seconds"),
                       ("artifact-format", "CausalAttention"), ("models", "deepseek_v3")):
        assert text in (tmp_path / "html" / f"{page}.html").read_text(encoding="utf-8"), page


def test_relative_markdown_links_resolve():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("bench/*.md"),
             *ROOT.glob("vllm_plugin/*.md"), *ROOT.glob("docker/*.md"),
             *ROOT.glob("artifacts/*.md"), *ROOT.glob("csrc/*.md")]
    broken = [f"{page.relative_to(ROOT)}: {target}" for page in pages
              for target in LINK.findall(page.read_text(encoding="utf-8"))
              if "://" not in target and not (page.parent / target).exists()]
    assert not broken


def test_the_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
