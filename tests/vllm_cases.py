"""SmolLM2 as compiled by `make test-vllm`, and llmc's completions for comparison."""

import json
import os
import subprocess
import sys
from pathlib import Path

CASES = Path(os.environ.get("LLMC_VLLM_CASES", Path(__file__).parents[1] / "build" / "vllm"))


def case(name):
    """A case directory by tp_size, or that with a draft model: `draft`."""
    path = CASES / (f"tp{name}" if isinstance(name, int) else name)
    assert path.is_dir(), "make test-vllm compiles it"
    return path


def own(tp_size, requests):
    """Return the first completions of `llmc run` for requests, each a line of a prompt file."""
    ran = subprocess.run([sys.executable, "-m", "llmc.cli", "run", str(case(tp_size)),
                          "--prompt_file", "-"], input="\n".join(map(json.dumps, requests)),
                         capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line)["completions"][0] for line in ran.stdout.splitlines()]


def assert_own(tp_size, prompts, made, max_tokens):
    """Assert that greedy tokens equal llmc's.

    Two tokens that are equally likely within rounding may be swapped, as batches round differently.
    """
    wanted = own(tp_size, [{"token_ids": prompt, "max_tokens": max_tokens, "ignore_eos": True}
                           for prompt in prompts])
    equal = 0
    for prompt, tokens, one in zip(prompts, made, wanted, strict=True):
        assert len(tokens) == max_tokens
        place = next((i for i, pair in enumerate(zip(tokens, one["token_ids"], strict=True))
                      if pair[0] != pair[1]), None)
        equal += place is None
        if place is not None:
            (known,) = own(tp_size, [{"token_ids": [*prompt, *tokens[:place]], "max_tokens": 1,
                                      "ignore_eos": True, "logprobs": 2}])
            (first, best), (second, next_best) = known["logprobs"][0]["top"]
            assert {tokens[place], one["token_ids"][place]} == {first, second}
            assert best - next_best < 1e-3
    assert equal > len(prompts) // 2
