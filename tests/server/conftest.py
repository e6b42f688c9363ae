"""Servers shared by tests."""

import json
import shutil

import media_case
import pytest
from server_process import serving

import llmc

# Renders the first tool's name, reasoning, arguments of calls, and a variable.
TOOL_TEMPLATE = (
    "T{{ tools[0].function.name if tools }}{% for m in messages %}{{ m.reasoning_content }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.x + 1 }}"
    "{% endfor %}{% endfor %}{{ enable_thinking }}")


@pytest.fixture(scope="session")
def server(case_tp1):
    # The number of drafts concerns predictions only.
    with serving(case_tp1, "--allow_priority", "--num_speculative_tokens", 7) as own:
        yield own


@pytest.fixture(scope="session")
def client(server):
    return server.client


@pytest.fixture(scope="session")
def tool_case(tiny_hf, tmp_path_factory):
    """The tiny model with a chat template that renders tools, and enough positions for them."""
    root = tmp_path_factory.mktemp("tools")
    shutil.copytree(tiny_hf, root / "hf")
    config = json.loads((root / "hf" / "config.json").read_text())
    (root / "hf" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    (root / "hf" / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    llmc.compile(root / "hf", root / "case")
    return root / "case"


@pytest.fixture(scope="session")
def tool_server(tool_case):
    with serving(tool_case, "--tool_call_parser", "llama3_json") as own:
        yield own


@pytest.fixture(scope="session")
def media_dir(tmp_path_factory):
    """The directory of file: URLs, with a picture."""
    directory = tmp_path_factory.mktemp("media")
    (directory / "red.png").write_bytes(media_case.picture("red"))
    return directory


@pytest.fixture(scope="session")
def media_server(media_dir, tiny_media):
    """A server that takes images and reads URLs of this machine."""
    with serving(tiny_media, "--allowed_media_domains", "localhost,127.0.0.1", "--media_timeout", 2,
                 "--allowed_media_networks", "127.0.0.1/32", "--allowed_local_media_path",
                 media_dir, "--limit_mm_per_prompt", '{"image": 3}', "--max_media_bytes",
                 500_000, "--media_memory_gb", 2e-5) as own:
        yield own
