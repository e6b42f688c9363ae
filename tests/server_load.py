"""Load test: clients that connect and disconnect, and malformed requests.

    pip install '.[test,test-serve]'
    python tests/server_load.py CASE_DIR --minutes 10        prints the table

14 clients of the `openai` package request completions, chats and structured output, and may
disconnect early. 2 clients send valid and invalid requests that schemathesis derives from
/openapi.json. Each minute has a row. The exit code is 1 if a response is undocumented, if memory
grew by more than 5 % in the second half, or if resources are leaked at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import re
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import openai
from server_process import serving, until

SOUND = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
         "/v1/completions": {"prompt": [5, 6], "max_tokens": 4},
         "/v1/responses": {"input": "a", "max_output_tokens": 4}}


def resident(process):
    """Return the resident memory of a process in bytes."""
    with open(f"/proc/{process.pid}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) * 1024


def is_empty(server):
    found = dict(re.findall(r"^([\w:]+)\{[^}]*\} (\S+)$", server.get("/metrics"), re.M))
    return all(float(found[name]) == 0 for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "llmc:requests_inside"))


async def come_and_go(server, seconds, seed, clients=16):
    """Run clients that may disconnect early or send invalid requests.

    Returns the outcomes of their requests, by client and kind.
    """
    end = time.monotonic() + seconds
    became = Counter()

    async def client(number):
        luck = random.Random(seed * 100 + number)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0,
                                      timeout=30) as own:
            while time.monotonic() < end or not became[number, "answered"]:
                became[number, await _ask(own, luck)] += 1

    await asyncio.gather(*map(client, range(clients)))
    return became


async def _ask(client, luck):
    kind = luck.random()
    given = dict(model="tiny", prompt=[luck.randrange(3, 250) for _ in range(9)],
                 max_tokens=luck.randrange(1, 50), n=luck.choice([1, 1, 3]))
    try:
        if kind < 0.3:
            await asyncio.wait_for(client.completions.create(**given), luck.choice([0.01, 0.05]))
        elif kind < 0.7:
            stream = await client.completions.create(stream=True, **given)
            leaves = luck.randrange(60)
            async for _ in stream:
                leaves -= 1
                if not leaves:
                    await stream.close()
                    return "left"
        elif kind < 0.8:
            await client.completions.create(**given | {"prompt": [9999999]})
        else:
            await client.completions.create(**given, extra_body={"guided_regex": "[a-z]{1,9}"})
    except TimeoutError:
        return "left"
    except openai.BadRequestError:
        return "refused"
    except openai.APIError as error:
        if "the request took longer than" not in str(error):  # allowed by the schema
            raise
        return "late"
    return "answered"


def malformed(url, seed, examples, end=float("inf")):
    """Request every path repeatedly with schemathesis, with valid and invalid requests.

    Returns:
        The number of responses by status.

    Raises:
        FailureGroup: of schemathesis: a response's status, type or schema is undocumented.
    """
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    became = Counter()
    for own in schema.get_all_operations():
        operation = own.ok()
        for mode in [*schemathesis.GenerationMode][:2 if operation.body else 1]:
            became += _ask_often(operation, mode, seed, examples, end)
    return became


def _ask_often(operation, mode, seed, examples, end):
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st
    from schemathesis import checks
    from schemathesis.specs.openapi import checks as described

    named = [checks.not_a_server_error, described.status_code_conformance,
             described.content_type_conformance, described.response_schema_conformance]
    sound = SOUND.get(operation.path) if mode.is_positive else None
    became = Counter()

    @seeded(seed)
    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    # A seed drawn at once: hypothesis must not depend on when the time is over.
    @given(operation.as_strategy(generation_mode=mode), st.randoms(use_true_random=True))
    def ask(case, luck):
        if time.monotonic() > end:
            return
        if sound and luck.random() < 0.7:  # few random requests have all fields
            others = sorted({*case.body} - {"model", *sound})
            case.body = sound | {name: case.body[name] for name in
                                 luck.sample(others, min(len(others), 2))}
        answer = case.call(timeout=60)
        became[answer.status_code] += 1
        case.validate_response(answer, checks=named)

    ask()
    return became


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case_dir")
    parser.add_argument("--minutes", type=int, default=10)
    arguments = parser.parse_args()
    # Hypothesis needs a process each, as Python 3.11 parses in one thread at a time.
    # A small cache is filled soon; a large one would grow for long.
    options = "--request_timeout", 20, "--kv_cache_tokens", 4096
    with serving(arguments.case_dir, *options) as server, \
            ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as senders:
        print("| minute | answered | refused | left | late | schemathesis, by status | RSS (MB) |"
              "\n| --- | --- | --- | --- | --- | --- | --- |", flush=True)
        sizes = [_minute(server, senders, number) for number in range(arguments.minutes)]
        code, log = server.end()
    late = sizes[len(sizes) // 2:]
    problems = [text for text, true in {
        f"the server ended with {code}": code != 0,
        "the log tells of a server's error": '"status": 5' in log or '"exception"' in log,
        f"memory grew from {late[0]} to {late[-1]} bytes": late[-1] > 1.05 * late[0]}.items()
        if true]
    print("\n" + ("; ".join(problems) or "nothing remains: no sequence, no block, no request"))
    return bool(problems)


def _send(url, seed, end):
    found = Counter()
    while time.monotonic() < end:
        try:
            found += malformed(url, seed, 20, end)
        except BaseException:  # some cannot be pickled
            raise AssertionError(traceback.format_exc()) from None
        seed += 2
    return found


def _minute(server, senders, number):
    """Print a row of the table; return the memory at its end."""
    end = time.monotonic() + 60
    sent = [senders.submit(_send, server.url, 1000 * number + first, end) for first in (0, 1)]
    became = asyncio.run(come_and_go(server, 60, number, clients=14))
    found = sum((own.result() for own in sent), Counter())
    until(lambda: is_empty(server))
    kinds = [sum(count for (_, kind), count in became.items() if kind == own)
             for own in ("answered", "refused", "left", "late")]
    size = resident(server.process)
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(found.items()))
    print(f"| {number + 1} | {' | '.join(map(str, kinds))} | {statuses} | {size / 2**20:.1f} |",
          flush=True)
    return size


if __name__ == "__main__":
    sys.exit(main())
