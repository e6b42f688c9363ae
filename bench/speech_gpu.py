"""Windows of speech on one GPU: Whisper large-v3's shape in bfloat16, random weights, greedy.

    python bench/speech_gpu.py llmc WORK_DIR            writes the model and compiles it
    python bench/speech_gpu.py transformers WORK_DIR    generate() with SDPA
    python bench/speech_gpu.py vllm WORK_DIR            where vLLM can be imported

All print the same tables, to be run one after the other on one machine. 64 windows of 30 s at once,
tones with noise, other ones in each run, with 64 and with 128 output tokens each; medians of
--runs, after one. From audio, the time includes that of features: of llmc, a call of
`LLM.transcribe` in a thread for each window; of transformers, its feature extractor on the GPU. The
decode step is from the runs with 64 and with 128 tokens. The encoder's time is that of all windows
with one token, without a step, and includes cross-attention's keys and values. vLLM takes only
audio.
At the end: how many first tokens are equal to those of the sides before.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bench_model
import numpy as np
import torch

RATE = 16_000
END, START, NO_TIMESTAMPS = 50257, 50258, 50364
SHAPE: dict[str, Any] = dict(
    d_model=1280, encoder_layers=32, decoder_layers=32, encoder_attention_heads=20,
    decoder_attention_heads=20, encoder_ffn_dim=5120, decoder_ffn_dim=5120, num_mel_bins=128,
    max_source_positions=1500)
TINY: dict[str, Any] = dict(
    d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=16,
    max_source_positions=50)
AT_ONCE, COUNTS = 64, (64, 128)
Waveforms = list[np.ndarray]  # float32 [samples] each
Tokens = list[list[int]]


@dataclass(frozen=True)
class Side:
    """What transcribes windows, each to a number of tokens.

    Args:
        transcribe: takes waveforms.
        preprocess: makes features of waveforms; None: not to be had.
        generate: takes features.
    """

    transcribe: Callable[[Waveforms, int], Tokens]
    preprocess: Callable[[Waveforms], Any] | None = None
    generate: Callable[[Any, int], Tokens] | None = None


def waveforms_of(run: int, seconds: int, number: int = AT_ONCE) -> Waveforms:
    """Waveforms of a run: a tone each, and noise."""
    rng = np.random.default_rng(run)
    at = np.arange(seconds * RATE, dtype=np.float32) / RATE
    return [(np.sin(2 * np.pi * rng.uniform(100, 6000) * at) / 2
             + rng.standard_normal(len(at), np.float32) / 100).astype(np.float32)
            for _ in range(number)]


def special_tokens() -> list[str]:
    """The tokens of Whisper large-v3 from END on."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{own}|>" for own in LANGUAGES),
            "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>",
            "<|nospeech|>", "<|notimestamps|>", *(f"<|{index / 50:.2f}|>" for index in range(1501))]


def write_model(directory: Path, shape: dict[str, Any], dtype: torch.dtype) -> None:
    """Write the model's directory with its feature extractor and a tokenizer of as many tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import WhisperFeatureExtractor

    special = special_tokens()
    bench_model.write_as(directory, shape | dict(
        architectures=["WhisperForConditionalGeneration"], model_type="whisper",
        is_encoder_decoder=True, vocab_size=END + len(special), max_target_positions=448,
        activation_function="gelu", bos_token_id=END, eos_token_id=END, pad_token_id=END,
        decoder_start_token_id=START, begin_suppress_tokens=None, suppress_tokens=None), dtype,
        deviation=2 / shape["d_model"]**0.5)  # less makes all windows alike
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{index}" for index in range(len(words), END)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    ids = {token: tokenizer.token_to_id(token) for token in special}
    assert ids["<|notimestamps|>"] == NO_TIMESTAMPS
    tokenizer.save(str(directory / "tokenizer.json"))
    extractor = WhisperFeatureExtractor(
        feature_size=shape["num_mel_bins"], chunk_length=shape["max_source_positions"] // 50)
    files = {
        "tokenizer_config": dict(tokenizer_class="WhisperTokenizer", bos_token=special[0],
                                 eos_token=special[0], pad_token=special[0], unk_token=special[0]),
        "preprocessor_config": {
            name: value for name, value in extractor.to_dict().items() if name != "mel_filters"}
        | dict(processor_class="WhisperProcessor"),
        "generation_config": dict(
            bos_token_id=END, eos_token_id=END, pad_token_id=END, decoder_start_token_id=START,
            max_length=448, is_multilingual=True, no_timestamps_token_id=NO_TIMESTAMPS,
            prev_sot_token_id=ids["<|startofprev|>"], max_initial_timestamp_index=50,
            lang_to_id={own: ids[own] for own in special[2:102]},
            task_to_id={own: ids[f"<|{own}|>"] for own in ("transcribe", "translate")})}
    for name, fields in files.items():
        (directory / f"{name}.json").write_text(json.dumps(fields))


def seconds_of(run: Callable[[Any], object], prepared: Callable[[int], Any], runs: int) -> float:
    """Median time of some runs after one, each with what is prepared for it."""
    times = []
    for index in range(1 + runs):
        given = prepared(index)
        start = time.perf_counter()
        run(given)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measure(side: Side, window: int, runs: int) -> None:
    """Print the tables of a side, with windows of `window` seconds."""
    print("| from | output tokens each | seconds | output tokens/s | × real time |\n"
          "| --- | --- | --- | --- | --- |")
    taken: dict[int, float] = {}  # of the second kind, where there is one
    preprocess, generate = side.preprocess, side.generate
    kinds: dict[str, tuple[Callable[[Any, int], Tokens], Callable[[int], Any]]] = {
        "audio": (side.transcribe, lambda run: waveforms_of(run, window))}
    if preprocess is not None and generate is not None:
        kinds["features"] = (generate, lambda run: preprocess(waveforms_of(run, window)))
    for kind, (transcribe, prepared) in kinds.items():
        for count in (1, *COUNTS):
            def run(given: Any, count: int = count,
                    transcribe: Callable[[Any, int], Tokens] = transcribe) -> None:
                lengths = {len(own) for own in transcribe(given, count)}
                # A transcription leaves out special tokens, which random weights give, too.
                assert max(lengths) == count, f"{lengths} tokens in place of {count}"

            taken[count] = seconds_of(run, prepared, runs)
            print(f"| {kind} | {count} | {taken[count]:.3f} | "
                  f"{AT_ONCE * count / taken[count]:.0f} | "
                  f"{AT_ONCE * window / taken[count]:.0f} |", flush=True)
    step = (taken[COUNTS[1]] - taken[COUNTS[0]]) / (COUNTS[1] - COUNTS[0])
    cells = ["", "", ""]
    if preprocess is not None:
        features = [seconds_of(preprocess, functools.partial(
            waveforms_of, seconds=window, number=number), runs) for number in (1, AT_ONCE)]
        cells = [f"{own * 1e3:.1f}" for own in (taken[1] - step, *features)]
    print(f"\n| encoder (ms) | decode step (ms) | features of one (ms) | of {AT_ONCE} (ms) |\n"
          f"| --- | --- | --- | --- |\n| {cells[0]} | {step * 1e3:.3f} | {cells[1]} | {cells[2]} |",
          flush=True)


@contextmanager
def llmc_side(hf: Path, case: Path, target: str) -> Iterator[Side]:
    import llmc
    from llmc.runtime.core.loop import Scheduling
    from llmc.runtime.multimodal.feature_rows import make_rows
    from llmc.runtime.sampling.speech_rules import SpeechRules

    print(bench_model.environment("torch"), target, "\n", flush=True)
    with llmc.LLM(case, max_batch_size=AT_ONCE, verify=False, prefix_reuse=False) as llm, \
            ThreadPoolExecutor(AT_ONCE) as threads:
        encoder, extractor = llm.transcriber.require(), llm.transcriber.extractor
        assert encoder.features is not None and encoder.speech is not None
        layout = encoder.features
        start = [START, encoder.speech.languages["en"], encoder.speech.tasks["transcribe"],
                 NO_TIMESTAMPS]

        def params(count: int) -> llmc.SamplingParams:
            return llmc.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)

        def transcribe(waveforms: Waveforms, count: int) -> Tokens:
            made = threads.map(lambda own: llm.transcribe(
                own, language="en", params=params(count)).token_ids, waveforms)
            return [list(own) for own in made]

        def preprocess(waveforms: Waveforms) -> Waveforms:
            return list(threads.map(lambda own: make_rows(
                np.ascontiguousarray(extractor.features(own).T), layout), waveforms))

        def generate(windows: Waveforms, count: int) -> Tokens:
            requests = [replace(llm._reader.speech_request(start, own, params(count),
                                                           SpeechRules()), index=index)
                        for index, own in enumerate(windows)]
            tokens: Tokens = [[] for _ in requests]
            for chunk in llm._stream(requests, Scheduling()):
                assert chunk.token_id is not None
                tokens[chunk.index].append(chunk.token_id)
            return tokens

        yield Side(transcribe, preprocess, generate)


@contextmanager
def transformers_side(hf: Path, case: Path, target: str) -> Iterator[Side]:
    import transformers
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    transformers.logging.set_verbosity_error()  # it warns in every call
    device = "cuda" if target == "cuda" else "cpu"
    extractor = WhisperFeatureExtractor.from_pretrained(hf)
    model = WhisperForConditionalGeneration.from_pretrained(
        hf, dtype="auto", attn_implementation="sdpa").to(device).eval()
    print("transformers", transformers.__version__, "torch", torch.__version__, target, "\n",
          flush=True)

    def preprocess(waveforms: Waveforms) -> torch.Tensor:
        made = extractor(waveforms, sampling_rate=RATE, return_tensors="pt", device=device)
        features: torch.Tensor = made["input_features"].to(device, model.dtype)
        if device == "cuda":
            torch.cuda.synchronize()
        return features

    def generate(features: torch.Tensor, count: int) -> Tokens:
        made = model.generate(features, language="en", task="transcribe", max_new_tokens=count,
                              min_new_tokens=count, do_sample=False)
        return made[:, -count:].tolist()  # type: ignore[no-any-return]

    with torch.inference_mode():
        yield Side(lambda waveforms, count: generate(preprocess(waveforms), count), preprocess,
                   generate)


@contextmanager
def vllm_side(hf: Path, case: Path, target: str) -> Iterator[Side]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm
    from vllm import LLM, SamplingParams

    print("vllm", vllm.__version__, "torch", torch.__version__, "\n", flush=True)
    config = json.loads((hf / "generation_config.json").read_text())
    start = [START, config["lang_to_id"]["<|en|>"], config["task_to_id"]["transcribe"],
             NO_TIMESTAMPS]
    llm = LLM(model=str(hf), dtype="bfloat16", max_num_seqs=AT_ONCE, max_model_len=448, seed=0,
              disable_log_stats=True, enable_prefix_caching=False,
              limit_mm_per_prompt={"audio": 1}, enable_flashinfer_autotune=False)

    def transcribe(waveforms: Waveforms, count: int) -> Tokens:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True,
                                detokenize=False)
        made = llm.generate(
            [{"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (own, RATE)}},
              "decoder_prompt": {"prompt_token_ids": start}} for own in waveforms],
            params, use_tqdm=False)
        return [list(own.outputs[0].token_ids) for own in made]

    yield Side(transcribe)


SIDES = {"llmc": llmc_side, "transformers": transformers_side, "vllm": vllm_side}


def prepare(arguments: argparse.Namespace, shape: dict[str, Any]) -> tuple[Path, Path, str]:
    """Write the model and, for llmc, compile it, where that is not done yet."""
    target = "cpu" if arguments.tiny else "cuda"
    dtype = "float32" if arguments.tiny else "bfloat16"
    name = f"whisper-{shape['d_model']}-{shape['encoder_layers']}"
    hf, case = arguments.work / name, arguments.work / f"{name}-case"
    start = time.perf_counter()
    if not (hf / "generation_config.json").is_file():
        write_model(hf, shape, getattr(torch, dtype))
    written = time.perf_counter()
    if arguments.side == "llmc" and not case.is_dir():
        import llmc

        llmc.compile(hf, case, dtype=dtype, target=target)
    if arguments.compile_only:
        print(f"written in {written - start:.0f} s, compiled in "
              f"{time.perf_counter() - written:.0f} s", flush=True)
    return hf, case, target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=[*SIDES])
    parser.add_argument("work", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layers", type=int, help="Of encoder and decoder, for a dry run.")
    parser.add_argument("--compile_only", action="store_true")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # on the CPU
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    shape = TINY if arguments.tiny else SHAPE
    if arguments.layers is not None:
        shape = shape | dict.fromkeys(("encoder_layers", "decoder_layers"), arguments.layers)
    hf, case, target = prepare(arguments, shape)
    if arguments.compile_only:
        return
    window = shape["max_source_positions"] // 50
    with SIDES[arguments.side](hf, case, target) as side:
        gc.freeze()
        measure(side, window, arguments.runs)
        first = side.transcribe(waveforms_of(0, window), 1)
    bench_model.compare_tokens(hf, arguments.side, {
        f"{index}": own[0] for index, own in enumerate(first) if own})


if __name__ == "__main__":
    main()
