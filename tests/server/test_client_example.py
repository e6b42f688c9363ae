"""examples/openai_client.py, run as users run it."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_of_openais_client_prints_an_answer(server):
    done = subprocess.run([sys.executable, EXAMPLES / "openai_client.py", f"{server.url}/v1"],
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_the_example_with_a_picture_prints_an_answer(media_server, media_dir):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "openai_image.py", media_dir / "red.png",
         f"{media_server.url}/v1"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
