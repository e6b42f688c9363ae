"""Run a case directory: `LLM`."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.attention.metadata import PackedBatch
from llmc.runtime.decoding.sampling import Draws, Sampler, SamplingParams
from llmc.runtime.decoding.stopping import TextStream
from llmc.runtime.devices import place
from llmc.runtime.engines import MAX_LOGITS
from llmc.runtime.engines.cuda import device_count
from llmc.runtime.manifest import Manifest, read_manifest, verify_files
from llmc.runtime.replica import Replica
from llmc.runtime.tokenizer import load_tokenizer, render_chat

_PREFILL_TOKENS = 4096  # at most this many padded tokens in one prefill step, or one prompt

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """What a prompt led to. `finish_reason` is `stop` (end token or stop string) or `length`."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Piece:
    """One step of a streamed completion: a token and the text that it completes, perhaps none.

    `finish_reason` is set on a prompt's last piece.
    """

    index: int
    token_id: int
    text: str
    finish_reason: str | None


@dataclass
class _Sequence:
    """One prompt on its way through a replica."""

    index: int
    prompt: list[int]
    sampler: Sampler
    text: TextStream
    max_tokens: int
    end_tokens: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def length(self) -> int:
        """Positions in the cache when all but the newest token are there."""
        return len(self.prompt) + len(self.tokens) - 1


class LLM:
    """A compiled model, loaded.

    Args:
        case_dir: what `llmc compile` made.
        device: devices to run on, a multiple of tp_size: that many replicas. None: one replica on
            all cores.
        max_batch_size: sequences that a replica decodes at once; more wait.
        verify: check every file's SHA-256 first.
        check_step: steps that a GPU makes before the host looks at their tokens.
        skip_step: tokens of each sequence that are made before the host looks for the first time.

    Raises:
        LlmcError: the case directory is missing, broken or newer; the devices do not fit.
    """

    def __init__(self, case_dir: str | Path, *, device: Sequence[int] | None = None,
                 max_batch_size: int = 16, verify: bool = True, check_step: int = 8,
                 skip_step: int = 0) -> None:
        if check_step < 1:
            raise LlmcError(f"check_step {check_step} is below 1")
        if skip_step < 0:
            raise LlmcError(f"skip_step {skip_step} is negative")
        if max_batch_size < 1:
            raise LlmcError(f"max_batch_size {max_batch_size} is below 1")
        self.case_dir = Path(case_dir)
        self.manifest: Manifest = read_manifest(case_dir)
        verify_files(self.manifest, case_dir, hashes=verify)
        self.tokenizer = load_tokenizer(self.manifest, self.case_dir)
        self._max_batch_size = max_batch_size
        self._check_step, self._skip_step = check_step, skip_step
        self._max_tokens = max(_PREFILL_TOKENS, self.manifest.dims.max_seq_len)
        self._replicas: list[Replica] = []
        self._user = threading.Lock()  # held by whoever runs steps
        self._session: Session | None = None  # whose tokens the first replica's caches hold
        try:
            if self.manifest.target.kind == "tensorrt_rtx":
                raise LlmcError("this llmc builds TensorRT-RTX engines and does not run them; "
                                "compile with --target cpu or cuda to run the model here")
            gpus = device_count() if self.manifest.target.kind == "cuda" else None
            for placements in place(self.manifest, device, gpus):
                self._replicas.append(Replica(self.manifest, self.case_dir, placements,
                                              max_batch_size, self._max_tokens))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the rank threads and free the KV caches."""
        for replica in self._replicas:
            replica.close()
        self._replicas.clear()

    def generate(self, prompts: Prompt | Sequence[Prompt], max_tokens: int = 64, *,
                 temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
                 seed: int | None = None, stop: Sequence[str] = (),
                 ignore_eos: bool = False) -> list[Completion]:
        """Complete each prompt (text, or token ids); see `stream` for the arguments."""
        listed = _as_list(prompts)
        tokens: list[list[int]] = [[] for _ in listed]
        texts = [""] * len(listed)
        reasons = ["length"] * len(listed)
        ids = [self._encode(prompt) for prompt in listed]
        for piece in self.stream(ids, max_tokens, temperature=temperature, top_k=top_k,
                                 top_p=top_p, seed=seed, stop=stop, ignore_eos=ignore_eos):
            tokens[piece.index].append(piece.token_id)
            texts[piece.index] += piece.text
            reasons[piece.index] = piece.finish_reason or "length"
        return [Completion(tuple(ids[i]), tuple(tokens[i]), texts[i], reasons[i])
                for i in range(len(listed))]

    def stream(self, prompts: Prompt | Sequence[Prompt], max_tokens: int = 64, *,
               temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
               seed: int | None = None, stop: Sequence[str] = (),
               ignore_eos: bool = False) -> Iterator[Piece]:
        """Yield each token as it is made. Closing the iterator stops the work.

        Args:
            prompts: one or several; a batch may have unequal lengths.
            max_tokens: new tokens per prompt, at most; the KV cache's end also ends a completion.
            temperature, top_k, top_p, seed: see `SamplingParams`.
            stop: texts that end a completion; they and what follows are not shown.
            ignore_eos: go on after the end token.

        Raises:
            LlmcError: a prompt is empty or longer than the KV cache, an argument is out of range,
                or another stream is still open: the KV caches serve one at a time.
        """
        params = SamplingParams(temperature, top_k, top_p, seed)
        if max_tokens < 1:
            raise LlmcError(f"max_tokens {max_tokens} is below 1")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(stop):
            raise LlmcError("a stop string is empty")
        if stop and self.tokenizer is None:
            raise LlmcError("this model was compiled without a tokenizer, so it makes no text in "
                            "which to find a stop string")
        ends = frozenset(() if ignore_eos else self.manifest.tokenizer.eos_token_ids)
        sequences = []
        for index, prompt in enumerate(_as_list(prompts)):
            ids = self._encode(prompt)
            self._check_prompt(ids)
            sequences.append(_Sequence(index, ids, Sampler(params),
                                       TextStream(self.tokenizer, ids, stop), max_tokens, ends))
        return self._stream(sequences)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [num_tokens, vocab_size] for one sequence from its start."""
        return self.session(1).extend([list(token_ids)], all_logits=True)

    def session(self, batch_size: int) -> Session:
        """Step by step access to the first replica, for checks and experiments."""
        if not 1 <= batch_size <= self._max_batch_size:
            raise LlmcError(f"batch_size {batch_size} is not from 1 to max_batch_size "
                            f"{self._max_batch_size}")
        return Session(self, batch_size)

    def chat_prompt(self, message: str) -> list[int]:
        """A user's message in the model's chat template, as a prompt of token ids.

        Raises:
            LlmcError: the model has no chat template, or it refuses the message.
        """
        messages = [{"role": "user", "content": message}]
        text = render_chat(self.manifest, self.case_dir, messages)
        return self._encode(text, add_special_tokens=False)  # the template has them

    def _encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise LlmcError("this model was compiled without a tokenizer; give token ids")
        if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
            raise LlmcError("a prompt is not valid Unicode; write it as UTF-8")
        return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens).ids

    def _check_prompt(self, ids: Sequence[int]) -> None:
        dims = self.manifest.dims
        if not ids:
            raise LlmcError("the prompt is empty; give at least one token")
        if len(ids) > dims.max_seq_len:
            raise LlmcError(f"the prompt has {len(ids)} tokens, the KV cache has room for "
                            f"{dims.max_seq_len}; shorten it, or compile with a larger "
                            f"--max_seq_len")
        bad = next((token for token in ids if not 0 <= token < dims.vocab_size), None)
        if bad is not None:
            raise LlmcError(f"token id {bad} is not in the vocabulary of {dims.vocab_size}")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Guard the KV caches: steps of two callers must not mix."""
        if not self._replicas:
            raise LlmcError("this LLM is closed")
        if not self._user.acquire(blocking=False):
            raise LlmcError("another stream of this LLM is still open; finish or close it first, "
                            "or load the model twice")
        try:
            yield
        finally:
            self._user.release()

    def _stream(self, sequences: list[_Sequence]) -> Iterator[Piece]:
        with self._exclusive():
            self._session = None
            if len(self._replicas) == 1:
                yield from self._decode(self._replicas[0], sequences)
            else:
                yield from self._decode_on_all(sequences)

    # The loop: schedule, run, postprocess.

    def _decode(self, replica: Replica, sequences: list[_Sequence]) -> Iterator[Piece]:
        """Decode on one replica. Cache row i belongs to active[i]."""
        waiting = deque(sequences)
        active: list[_Sequence] = []
        while waiting or active:
            first, batch = self._schedule(waiting, active)
            for tokens in self._run(replica, batch, active[first:]):
                yield from self._postprocess(active[first:], tokens)
            self._retire(replica, active)

    def _run(self, replica: Replica, batch: PackedBatch, sequences: list[_Sequence]) -> \
            Iterator[Sequence[int]]:
        """Each sequence's next token; those of several steps where GPUs choose them."""
        if replica.on_gpus:
            draws = Draws.of([s.sampler for s in sequences], [len(s.tokens) for s in sequences])
            yield from replica.decode(batch, draws, sorted(sequences[0].end_tokens),
                                      self._steps(sequences)).tolist()
            return
        logits = replica.run(batch)
        yield [sequence.sampler(row, len(sequence.tokens))
               for sequence, row in zip(sequences, logits, strict=True)]

    def _steps(self, sequences: list[_Sequence]) -> int:
        """How many tokens of each to make before looking at them."""
        done = min(len(sequence.tokens) for sequence in sequences)
        if not done:
            return 1
        return min(max(self._check_step, self._skip_step - done),
                   max(sequence.max_tokens - len(sequence.tokens) for sequence in sequences),
                   self.manifest.dims.max_seq_len - max(s.length for s in sequences))

    def _schedule(self, waiting: deque[_Sequence], active: list[_Sequence]) -> \
            tuple[int, PackedBatch]:
        """The next step: prefill what can enter, else one token for every active sequence."""
        first, longest = len(active), 0
        while waiting and len(active) < self._max_batch_size:
            longest = max(longest, len(waiting[0].prompt))
            if len(active) > first and longest * (len(active) - first + 1) > _PREFILL_TOKENS:
                break
            active.append(waiting.popleft())
        if len(active) > first:
            prompts = [sequence.prompt for sequence in active[first:]]
            return first, PackedBatch.prepare(prompts, [0] * len(prompts), first)
        return 0, PackedBatch.prepare([sequence.tokens[-1:] for sequence in active],
                                      [sequence.length for sequence in active])

    def _postprocess(self, sequences: list[_Sequence], tokens: Sequence[int]) -> Iterator[Piece]:
        """Hand out a step's tokens, but for sequences that an earlier step of its block ended."""
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.finished:
                continue
            sequence.tokens.append(token)
            text = "" if token in sequence.end_tokens else sequence.text.push(token)
            reason = None
            if token in sequence.end_tokens or sequence.text.stopped:
                reason = "stop"
            elif len(sequence.tokens) == sequence.max_tokens \
                    or sequence.length >= self.manifest.dims.max_seq_len:
                reason = "length"
            if reason:
                text += sequence.text.finish()
                sequence.finished = True
            yield Piece(sequence.index, token, text, reason)

    def _retire(self, replica: Replica, active: list[_Sequence]) -> None:
        """Free the cache rows of what is finished; the last sequences move into the gaps."""
        for row in reversed(range(len(active))):
            if active[row].finished:
                last = active.pop()
                if row < len(active):
                    replica.copy_row(len(active), row, last.length)
                    active[row] = last

    def _decode_on_all(self, sequences: list[_Sequence]) -> Iterator[Piece]:
        """Deal the sequences to the replicas, each in its own thread."""
        count = len(self._replicas)
        results: queue.Queue[Piece | BaseException | None] = queue.Queue()
        cancelled = threading.Event()

        def work(replica: Replica, share: list[_Sequence]) -> None:
            try:
                for piece in self._decode(replica, share):
                    if cancelled.is_set():
                        return
                    results.put(piece)
                results.put(None)
            except BaseException as error:  # handed to the caller's thread
                results.put(error)

        threads = [threading.Thread(target=work, args=(replica, sequences[i::count]), daemon=True)
                   for i, replica in enumerate(self._replicas)]
        for thread in threads:
            thread.start()
        try:
            running = count
            while running:
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    running -= 1
                else:
                    yield result
        finally:
            cancelled.set()
            for thread in threads:
                thread.join()


class Session:
    """A batch of sequences that the caller extends; any other use of the LLM ends it."""

    def __init__(self, llm: LLM, batch_size: int) -> None:
        self._llm = llm
        self._past = [0] * batch_size

    def extend(self, tokens: Sequence[Sequence[int]], all_logits: bool = False) -> np.ndarray:
        """Append tokens to every sequence.

        Returns float32 logits: of each sequence's last token [batch, vocab_size], or with
        `all_logits` of every new token [num_tokens, vocab_size].

        Raises:
            LlmcError: a sequence would outgrow the KV cache, or the LLM was used otherwise since.
                The cpu target continues several sequences at once by one token each only.
        """
        longest = max(len(new) for new in tokens)
        for new, past in zip(tokens, self._past, strict=True):
            self._llm._check_prompt(new)
            if past + longest > self._llm.manifest.dims.max_seq_len:
                raise LlmcError(f"{past} cached and {longest} new tokens exceed the KV cache of "
                                f"{self._llm.manifest.dims.max_seq_len}")
        if any(self._past) and len(self._past) > 1 and longest > 1:
            raise LlmcError("several sequences can be continued by one token each only")
        with self._llm._exclusive():
            if any(self._past) and self._llm._session is not self:
                raise LlmcError("the KV cache of this session is gone, as the LLM was used "
                                "otherwise since; begin another session")
            self._llm._session = self
            parts = [tokens]
            if all_logits and len(tokens) == 1:  # as many logits as an engine has room for
                parts = [[tokens[0][start:start + MAX_LOGITS]]
                         for start in range(0, len(tokens[0]), MAX_LOGITS)]
            logits = []
            for part in parts:
                logits.append(self._llm._replicas[0].run(
                    PackedBatch.prepare(part, self._past, 0, all_logits)))
                self._past = [past + len(new) for past, new in zip(self._past, part, strict=True)]
        return np.concatenate(logits)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], int | np.integer) else listed
