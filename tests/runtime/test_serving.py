"""Concurrent requests from threads and tasks: correct tokens and isolation."""

import asyncio
import gc
import multiprocessing
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import families
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_interpreter import interpreted

import llmc
from llmc.runtime.core import loop as loop_module
from llmc.runtime.core.step import EngineLimits

pytestmark = pytest.mark.usefixtures("decisive")
RNG = np.random.default_rng(5)
SYSTEM = [7, 9, 12, 40, 41, 99, 120, 7, 7]
PROMPTS = [(SYSTEM if n % 3 else []) + RNG.integers(3, 250, int(length)).tolist()
           for n, length in enumerate(RNG.integers(1, 24, 12))]


def tokens(count, **params):
    return llmc.SamplingParams(max_tokens=count, ignore_eos=True, **params)


@pytest.fixture(scope="module", params=["case_tp1", "case_tp2"])
def case(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def alone(case):
    """Return 30 tokens of each prompt alone."""
    with llmc.LLM(case, max_batch_size=1, prefix_reuse=False) as llm:
        return [llm.generate([prompt], tokens(30))[0].token_ids for prompt in PROMPTS]


def in_threads(count, work):
    """Run work(i) in a thread each; raise their errors."""
    errors = []

    def guarded(index):
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


CROWD = dict(
    arrivals=st.lists(st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(1, 30),
                                st.integers(0, 3), st.sampled_from([None, None, None, 1, 4]),
                                st.integers(-1, 1)), min_size=1, max_size=12),
    block_size=st.sampled_from([1, 4, 16, 64]), room=st.integers(1, 6),
    budget=st.sampled_from([4, 7, 16, 2048]), slots=st.integers(1, 4))


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(**CROWD)
def test_tokens_do_not_depend_on_concurrent_requests(case, alone, arrivals, block_size, room,
                                                     budget, slots):
    """Any arrivals, lengths, chunks and block sizes, with preemption and cancellation."""
    with llmc.LLM(case, max_batch_size=slots, block_size=block_size, verify=False,
                  kv_cache_tokens=64 * room, max_num_batched_tokens=budget) as llm:
        come_and_go(llm, arrivals, alone)


def come_and_go(llm, arrivals, alone):
    """Run clients in threads that read their tokens and may cancel early."""
    def call(index):
        prompt, count, wait, leaves, priority = arrivals[index]
        time.sleep(wait / 1000)
        got = []
        stream = llm.stream([PROMPTS[prompt]], tokens(count), priority=priority)
        for piece in stream:
            got.append(piece.token_id)
            if leaves == len(got):
                stream.close()
                break
        assert tuple(got) == alone[prompt][:min(count, leaves or count)]

    in_threads(len(arrivals), call)
    assert_empty(llm)


def assert_empty(llm):
    """Assert that nothing runs and all blocks and slots are free after aborts."""
    for _ in range(200):
        metrics = llm.metrics()
        if metrics["running"] == metrics["waiting"] == 0 and metrics["cache_usage"] == 0:
            return
        time.sleep(0.01)
    raise AssertionError(metrics)


def test_two_threads_generate_at_once(case, alone):
    with llmc.LLM(case, max_batch_size=4) as llm:
        steps = families.steps_read(llm, pytest.MonkeyPatch())
        got = families.ask_at_once(llm, PROMPTS[:8], lambda index: tokens(30))
    assert [got[index][0].token_ids for index in range(8)] == alone[:8]
    assert len(steps) < 8 * 30 / 2  # they shared steps


def test_a_session_continues_while_others_generate(case, alone):
    with llmc.LLM(case, max_batch_size=4, kv_cache_tokens=64 * 4) as llm:
        session = llm.session(2)
        tokens_of = [list(PROMPTS[1]), list(PROMPTS[2])]
        rows = session.extend(tokens_of)
        for step in range(6):
            assert llm.generate([PROMPTS[4]], tokens(5))[0].token_ids == alone[4][:5]
            chosen = rows.argmax(1).tolist()
            assert chosen == [alone[1][step], alone[2][step]]
            rows = session.extend([[token] for token in chosen])
        llm.generate(PROMPTS, tokens(30))  # needs all slots
        with pytest.raises(llmc.LlmcError, match="KV cache of this session was freed"):
            session.extend([[5], [5]])
        session.close()
        assert_empty(llm)


def test_a_session_s_prompts_are_chunked(case_tp1):
    with llmc.LLM(case_tp1, max_num_batched_tokens=16) as llm, llmc.LLM(case_tp1) as whole:
        ids = list(range(3, 60))
        np.testing.assert_allclose(llm.logits(ids), whole.logits(ids), atol=1e-4)
        one, other = (each.session(3).extend([ids, ids[:2], ids[:30]]) for each in (llm, whole))
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_shared_prefixes_are_computed_once(case_tp1):
    with llmc.LLM(case_tp1, block_size=4) as llm:
        system = list(range(10, 34))
        llm.generate([[*system, 5, 6]], tokens(2))
        before = llm.metrics()
        read = families.steps_read(llm, pytest.MonkeyPatch())
        llm.generate([[*system, 7, 8]], tokens(2))
        after = llm.metrics()
        assert read == [2, 1]
        assert after["cache_hits"] - before["cache_hits"] == 24
        assert after["cache_queries"] - before["cache_queries"] == 26


def test_only_calls_with_the_same_salt_share_prefixes(case_tp1):
    prompt = list(range(10, 34))

    def cached(salt):
        return next(llm.stream([prompt], tokens(2), cache_salt=salt)).num_cached_tokens

    with llmc.LLM(case_tp1, block_size=4) as llm:
        salts = (None, "a", "b", None, "a", "b", "ab")
        assert [cached(salt) for salt in salts] == [0, 0, 0, 20, 20, 20, 0]
        # A salt equal to the text of tokens does not match their blocks.
        block = np.array(prompt[:4], np.int64).tobytes().decode()
        assert next(llm.stream([prompt[4:]], tokens(2), cache_salt=block)).num_cached_tokens == 0
        both = llm.stream([prompt], tokens(2, n=3, temperature=1.0, seed=1), cache_salt="n")
        assert sorted({(own.sample, own.num_cached_tokens > 0) for own in both}) == [
            (0, False), (1, True), (2, True)]


@pytest.mark.parametrize("calls", [1, 4])
def test_a_tenant_does_not_wait_for_all_completions_of_another(case_tp1, alone, calls):
    with llmc.LLM(case_tp1, max_batch_size=3) as llm:
        busy = [llm.stream(PROMPTS, tokens(30), tenant="a") for _ in range(calls)]
        for stream in busy:
            next(stream)
        late = llm.generate([PROMPTS[1]], tokens(2), tenant="b")
        assert late[0].token_ids == alone[1][:2]
        assert llm.metrics()["finished"] < calls * len(PROMPTS)
        for stream in busy:
            stream.close()
        assert_empty(llm)


def test_padding_of_a_short_prompt_does_not_corrupt_cached_rows(case_tp1, alone):
    """Two prompts run together, the shorter in the row of a repeated one."""
    again, longer = PROMPTS[4], max(PROMPTS, key=len)
    with llmc.LLM(case_tp1, max_batch_size=2, block_size=4) as llm:
        for _ in range(2):
            assert llm.generate([again], tokens(30))[0].token_ids == alone[4]
            families.ask_at_once(llm, [[3, 4], [5, *longer]], lambda index: tokens(2))


def test_a_client_that_never_reads_does_not_block_others(case_tp1, alone, monkeypatch):
    monkeypatch.setattr(loop_module, "_UNREAD", 5)
    with llmc.LLM(case_tp1, max_batch_size=2, kv_cache_tokens=128) as llm:
        lazy = [llm.stream([PROMPTS[index]], tokens(30)) for index in range(2)]
        first = [next(stream) for stream in lazy]  # hold both slots
        time.sleep(0.1)
        # Each took at most the unread limit plus one; then the limit was filled again.
        assert llm.metrics()["generated_tokens"] <= 2 * (6 + 6)
        assert llm.generate([PROMPTS[3]], tokens(30))[0].token_ids == alone[3]
        for index, stream in enumerate(lazy):
            got = (first[index].token_id, *(piece.token_id for piece in stream))
            assert got == alone[index]


def test_a_failed_step_ends_all_requests_and_later_ones_are_refused(case_tp1, monkeypatch):
    monkeypatch.setattr(loop_module, "_UNREAD", 2)  # so that they still run
    llm = llmc.LLM(case_tp1)
    started, broken = threading.Barrier(3, timeout=60), threading.Event()

    def fail(step):
        raise llmc.LlmcError("the device is on fire")

    def call(index):
        stream = llm.stream([PROMPTS[index]], tokens(60))
        next(stream)
        started.wait()
        broken.wait()
        with pytest.raises(llmc.LlmcError, match="^the device is on fire$"):
            list(stream)

    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(call, index) for index in range(2)]
        started.wait()
        monkeypatch.setattr(families.ranks(llm)[0], "compute", fail)
        broken.set()
        for each in calls:
            each.result()
    with pytest.raises(llmc.LlmcError, match="has to be loaded again, as a step failed: the dev"):
        llm.generate([PROMPTS[0]])
    llm.close()


def test_closing_ends_waiting_requests(case_tp1, monkeypatch):
    monkeypatch.setattr(loop_module, "_UNREAD", 2)  # so that it still runs
    llm = llmc.LLM(case_tp1)
    stream = llm.stream([PROMPTS[0]], tokens(60))
    next(stream)
    llm.close()
    with pytest.raises(llmc.LlmcError, match="this LLM (was|is) closed"):
        for _ in range(100):
            next(stream)
            time.sleep(0)


def test_closing_ends_requests_that_arrived_during_a_step(case_tp1, monkeypatch):
    llm = llmc.LLM(case_tp1)
    engine, runs, may_end = families.ranks(llm)[0], threading.Event(), threading.Event()
    compute = engine.compute

    def slowly(step):
        runs.set()
        may_end.wait(60)
        return compute(step)

    monkeypatch.setattr(engine, "compute", slowly)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(llm.generate, [PROMPTS[0]], tokens(30))
        runs.wait(60)
        late = [pool.submit(llm.generate, [PROMPTS[1]], tokens(3)),
                pool.submit(llm.logits, PROMPTS[2])]
        while len(llm._loops[0]._inbox) < len(late):
            time.sleep(0.01)
        closing = pool.submit(llm.close)
        while not llm._loops[0]._closing:
            time.sleep(0.01)
        may_end.set()
        for call in (first, *late):
            with pytest.raises(llmc.LlmcError, match="this LLM was closed"):
                call.result(60)
        closing.result(60)


def test_admission_errors_reach_only_their_caller(case_tp1, alone, monkeypatch):
    with llmc.LLM(case_tp1) as llm:
        for priority, match in (("1", "priority is '1'; give a whole number"),
                                (None, "priority is None"), (101, "priority 101 is above 100"),
                                (-101, "priority -101 is below -100")):
            with pytest.raises(llmc.LlmcError, match=match):
                llm.generate([PROMPTS[0]], priority=priority)
        for name in ("tenant", "cache_salt"):
            for value in ("", 3, "\ud800"):
                with pytest.raises(llmc.LlmcError, match=f"{name} is .* give a text that is not"):
                    llm.generate([PROMPTS[0]], **{name: value})
        with monkeypatch.context() as patched:
            patched.setattr(llm._loops[0], "_completing", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate([PROMPTS[0]])
        assert llm.generate([PROMPTS[1]], tokens(30), priority=-100)[0].token_ids == alone[1]


def test_a_closed_event_loop_does_not_stop_others(case_tp1, alone):
    """Although it gets output."""
    llm = llmc.AsyncLLM(case_tp1)
    stream = llm.generate(PROMPTS[0], tokens(60))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(stream))
    loop.close()

    async def main():
        got = [piece.token_id async for piece in llm.generate(PROMPTS[1], tokens(20))]
        assert tuple(got) == alone[1][:20]
        await stream.aclose()
        await llm.close()

    asyncio.run(main())


def test_tasks_generate_at_once_and_may_be_cancelled(case, alone):
    async def read(llm, index, count):
        return [piece.token_id async for piece in llm.generate(PROMPTS[index], tokens(count))]

    async def main():
        async with llmc.AsyncLLM(case, max_batch_size=3) as llm:
            slow = asyncio.create_task(read(llm, 0, 50))
            await asyncio.sleep(0)  # waiting for the first token
            slow.cancel()
            got = await asyncio.gather(*(read(llm, index, 20) for index in range(10)))
            assert [tuple(own) for own in got] == [own[:20] for own in alone[:10]]
            with pytest.raises(asyncio.CancelledError):
                await slow
            stream = llm.generate(PROMPTS[0], tokens(50))
            await anext(stream)
            await stream.aclose()
            with pytest.raises(llmc.LlmcError, match="the prompt is empty"):
                await read(llm, 0, 3) and [piece async for piece in llm.generate([], tokens(3))]
            for _ in range(100):
                await asyncio.sleep(0.01)
                if llm.metrics()["cache_usage"] == 0:
                    return
            raise AssertionError(llm.metrics())

    asyncio.run(main())


def test_requests_that_do_not_fit_are_refused_with_the_sizes(case_tp1):
    with llmc.LLM(case_tp1, kv_cache_tokens=32) as llm:
        with pytest.raises(llmc.LlmcError, match="40 tokens and 1 to generate take 3 blocks of 16"
                                                 ", the KV cache has 2; ask for fewer, or load"):
            llm.generate([[5] * 40], tokens(1))
        for wanted in (14, 10**9):  # as many as fit
            made, = llm.generate([[5] * 20], tokens(wanted))
            assert (len(made.token_ids), made.finish_reason) == (13, "length")
    for options, match in (
            (dict(block_size=12), "block_size 12 is not a power of two"),
            (dict(kv_cache_tokens=10**12), r"1000000000000 tokens takes .* GB with .* machine has"),
            (dict(max_num_batched_tokens=0), "max_num_batched_tokens 0 is below 1"),
            (dict(max_itl_ms=0), "max_itl_ms is 0; give a number above 0"),
            (dict(max_itl_ms="5"), "max_itl_ms is '5'; give a number above 0"),
            (dict(gpu_memory_utilization=1.5), "1.5 is not above 0 and at most 1")):
        with pytest.raises(llmc.LlmcError, match=match):
            llmc.LLM(case_tp1, **options)


def test_metrics_count_the_work(case_tp1):
    with llmc.LLM(case_tp1) as llm:
        llm.generate(PROMPTS[:3], tokens(4))
        metrics = llm.metrics()
        assert (metrics["finished"], metrics["generated_tokens"]) == (3, 12)
        assert metrics["tokens_per_second"] == 1.2  # of ten seconds
        assert metrics["running"] == metrics["waiting"] == metrics["preemptions"] == 0
        for name in ("time_to_first_token", "inter_token_latency"):
            times = metrics[name]
            assert 0 < times["p50"] <= times["p90"] <= times["p99"] < 60


def test_a_forked_child_is_refused_at_once(case_tp1):
    def use(llm, pieces, session, queue):
        for work in (lambda: llm.generate([[5]]), lambda: next(pieces), lambda: llm.metrics(),
                     lambda: llm.check_health(), lambda: session.extend([[5]])):
            try:
                queue.put(str(work()))
            except llmc.LlmcError as error:
                queue.put(str(error))
        llm.close()
        queue.put("closed")

    context = multiprocessing.get_context("fork")
    with llmc.LLM(case_tp1) as llm:
        pieces, session, queue = llm.stream([[5, 6]], tokens(20)), llm.session(1), context.Queue()
        next(pieces)
        time.sleep(0.2)  # so that several tokens exist
        next(pieces)
        child = context.Process(target=use, args=(llm, pieces, session, queue))
        child.start()
        told = [queue.get(timeout=60) for _ in range(6)]
        child.join()
        assert all("cannot be used in its forked child" in own for own in told[:-1]), told
        assert told[-1] == "closed" and len([*pieces]) == 18  # the parent's continues


def test_n_completions_and_beams_among_concurrent_requests(case, alone):
    """All request kinds together equal each alone, with few blocks."""
    params = [tokens(12), tokens(9, n=3, temperature=0.7, top_k=5, seed=6),
              llmc.SamplingParams(max_tokens=8, beam_width=3, ignore_eos=True), tokens(20)]
    with llmc.LLM(case, max_batch_size=4, kv_cache_tokens=256, block_size=4) as llm:
        single = [llm.generate([PROMPTS[index]], own) for index, own in enumerate(params)]

        def call(index):
            own = index % len(params)
            assert llm.generate([PROMPTS[own]], params[own]) == single[own]

        in_threads(12, call)
        assert_empty(llm)


@pytest.fixture(scope="module")
def scheduled(tiny_hf, tmp_path_factory):
    """Programs for GPUs, in float32."""
    case = tmp_path_factory.mktemp("scheduled") / "case"
    llmc.compile(tiny_hf, case, target="cuda")
    return case


@settings(deadline=None, max_examples=6, suppress_health_check=list(HealthCheck))
@given(**{**CROWD, "arrivals": st.lists(st.tuples(
    st.integers(0, 4), st.integers(1, 8), st.integers(0, 3), st.sampled_from([None, None, 2]),
    st.integers(-1, 1)), min_size=2, max_size=4)})
def test_program_tokens_do_not_depend_on_concurrent_requests(scheduled, alone, arrivals, block_size,
                                                             room, budget, slots):
    """NumPy interprets the program on the blocks of each step, which are NaN before writing."""
    limits = EngineLimits(-(-64 * room // block_size), block_size, max(budget, slots), slots, 512,
                          3)
    with interpreted(scheduled, limits) as llm:
        come_and_go(llm, arrivals, alone)


def test_an_unreferenced_model_is_released(case_tp1):
    before = threading.active_count()
    llm = llmc.LLM(case_tp1)
    assert llm.generate([PROMPTS[0]], tokens(2)) and threading.active_count() > before
    del llm
    gc.collect()
    assert threading.active_count() == before


def test_a_process_ends_while_a_model_runs(case_tp1):
    code = ("import llmc\n"
            f"llm = llmc.LLM({str(case_tp1)!r})\n"
            "stream = llm.stream([[5, 6]], llmc.SamplingParams(max_tokens=60, ignore_eos=True))\n"
            "print(next(stream).token_id)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr and done.stdout.strip().isdecimal()
