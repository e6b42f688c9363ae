"""Run a case directory: `LLM`."""

from __future__ import annotations

import os
import queue
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.attention.metadata import Memory, PackedBatch
from llmc.runtime.decoding.beam_search import Beams, BeamSearch
from llmc.runtime.decoding.params import SamplingParams, is_unicode, listed, shown, whole
from llmc.runtime.decoding.processing import MAX_LOGPROBS
from llmc.runtime.decoding.sampling import Draws, Logprobs, Sampler, nothing_allowed
from llmc.runtime.decoding.stopping import TextStream
from llmc.runtime.devices import place
from llmc.runtime.engines import MAX_LOGITS, MAX_TOKENS
from llmc.runtime.engines.cuda import device_count
from llmc.runtime.manifest import Manifest, read_manifest, verify_files
from llmc.runtime.prompts import Prompt, read_messages, read_prompts, read_token_ids
from llmc.runtime.replica import Replica, on_gpus
from llmc.runtime.searching import DeviceSteps, HostSteps, Steps
from llmc.runtime.tokenizer import load_tokenizer, render_chat

_MAX_BATCH_SIZE = 16
# What all prompts of one beam search have in common.
_SEARCH = ("beam_width", "length_penalty", "diversity_rate", "early_stopping")

_Chosen = tuple[int, Logprobs | None]


@dataclass(frozen=True)
class Completion:
    """What a prompt led to.

    Args:
        index: which prompt, counted from 0.
        sample: which of the prompt's n completions.
        finish_reason: `stop` (end token or stop string) or `length`.
        logprobs: of each token, where `SamplingParams.logprobs` asks for them.
        cumulative_logprob: the sum of the chosen tokens' log-probabilities, likewise.
    """

    index: int
    sample: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[Logprobs, ...] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class Piece:
    """One step of a streamed completion: a token and the text that it completes, perhaps none.

    `finish_reason` is set on a completion's last piece; `index`, `sample` and `logprobs` are as in
    `Completion`.
    """

    index: int
    sample: int
    token_id: int
    text: str
    finish_reason: str | None
    logprobs: Logprobs | None = None


@dataclass(frozen=True)
class _Decoding:
    """What parameters come to with this model: `bad_words` are token ids."""

    params: SamplingParams
    end_tokens: frozenset[int]
    bad_words: list[tuple[int, ...]]


@dataclass(frozen=True)
class _Request:
    """A prompt to complete, n times, that is known to be sound.

    `prompt` is what the decoder reads, `source` what the encoder of an encoder-decoder model does.
    """

    index: int
    prompt: Sequence[int]
    source: Sequence[int]
    decoding: _Decoding

    @property
    def params(self) -> SamplingParams:
        return self.decoding.params


@dataclass
class _Sequence:
    """One completion on its way through a replica; `prompt` and `source` are its request's."""

    index: int
    sample: int
    prompt: list[int]
    source: list[int]
    params: SamplingParams
    sampler: Sampler
    text: TextStream
    end_tokens: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def length(self) -> int:
        """Positions in the cache when all but the newest token are there."""
        return len(self.prompt) + len(self.tokens) - 1

    def choose(self, logits: np.ndarray) -> _Chosen:
        """The next token from logits [vocab_size]."""
        token = self.sampler(logits, self.tokens)
        count = self.params.logprobs
        return token, None if count is None else Logprobs.of(logits, token, count)


class _Waiting:
    """Sequences that wait for a cache row, of which only the first is made.

    Attributes:
        first: None where none is left.
    """

    def __init__(self, sequences: Iterator[_Sequence]) -> None:
        self._sequences = sequences
        self.first = next(sequences, None)

    def take(self) -> _Sequence:
        """The first, which the next one follows."""
        assert self.first is not None
        taken, self.first = self.first, next(self._sequences, None)
        return taken


class LLM:
    """A compiled model, loaded.

    Args:
        case_dir: what `llmc compile` made.
        device: devices to run on, a multiple of tp_size: that many replicas. None: one replica on
            all cores.
        max_batch_size: sequences that a replica decodes at once; more wait. None: 16, or what the
            model was compiled for where that is less.
        verify: check every file's SHA-256 first.
        check_step: steps that a GPU makes before the host looks at their tokens.
        skip_step: tokens of each sequence that are made before the host looks for the first time.

    Raises:
        LlmcError: the case directory is missing, broken or newer; the devices do not fit; an
            argument is of another type.
    """

    def __init__(self, case_dir: str | Path, *, device: Sequence[int] | None = None,
                 max_batch_size: int | None = None, verify: bool = True, check_step: int = 8,
                 skip_step: int = 0) -> None:
        self._replicas: list[Replica] = []
        self._check_step = _whole("check_step", check_step, 1)
        self._skip_step = _whole("skip_step", skip_step, 0)
        if max_batch_size is not None:
            max_batch_size = _whole("max_batch_size", max_batch_size, 1)
        devices = None if device is None else _devices(device)
        if not isinstance(case_dir, str | os.PathLike):
            raise LlmcError(f"case_dir is {shown(case_dir)}; give the directory that `llmc "
                            f"compile` made")
        self.case_dir = Path(case_dir)
        self.manifest: Manifest = read_manifest(self.case_dir)
        verify_files(self.manifest, self.case_dir, hashes=verify)
        self.tokenizer = load_tokenizer(self.manifest, self.case_dir)
        limit = self.manifest.target.max_batch_size
        if max_batch_size is None:
            max_batch_size = min(_MAX_BATCH_SIZE, limit or _MAX_BATCH_SIZE)
        if limit is not None and max_batch_size > limit:
            raise LlmcError(f"max_batch_size {max_batch_size} exceeds {limit}, for which the model "
                            f"was compiled; lower it, or compile with a larger --max_batch_size")
        self._max_batch_size = max_batch_size
        encoder = self.manifest.encoder
        self._max_tokens = max(MAX_TOKENS, self.manifest.dims.max_seq_len,
                               encoder.max_seq_len if encoder else 0)
        self._user = threading.Lock()  # held by whoever runs steps
        self._session: Session | None = None  # whose tokens the first replica's caches hold
        try:
            if self.manifest.target.kind == "tensorrt_rtx":
                raise LlmcError("this llmc builds TensorRT-RTX engines and does not run them; "
                                "compile with --target cpu or cuda to run the model here")
            gpus = device_count() if on_gpus(self.manifest) else None
            for placements in place(self.manifest, devices, gpus):
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

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None) -> \
            list[Completion]:
        """Complete each prompt; see `stream`. Where a prompt has n completions, they follow one
        another.
        """
        return sorted(self.complete(prompts, params), key=lambda c: (c.index, c.sample))

    def complete(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 progress: Callable[[Piece], object] = lambda piece: None) -> Iterator[Completion]:
        """Yield each completion as soon as it is whole; `progress` is called with each piece. See
        `stream`.
        """
        return self._complete(self._requests(prompts, params), progress)

    def stream(self, prompts: Prompt | Sequence[Prompt],
               params: SamplingParams | Sequence[SamplingParams] | None = None) -> Iterator[Piece]:
        """Yield each token as it is made, those of a beam search when it is done. Closing the
        iterator stops the work.

        Args:
            prompts: one or several, each text or token ids; a batch may have unequal lengths. They
                are what an encoder reads, where the model has one.
            params: for all prompts, or one for each; None for `SamplingParams()`.

        Raises:
            LlmcError: a prompt is neither text nor token ids of the vocabulary, or is empty or
                longer than the KV cache; params do not fit the model or the number of prompts; no
                token is allowed; or another stream is still open: the KV caches serve one at a
                time.
        """
        return self._stream(self._requests(prompts, params))

    def logits(self, token_ids: Sequence[int], source: Sequence[int] | None = None) -> np.ndarray:
        """float32 [num_tokens, vocab_size] for one sequence from its start; of an encoder-decoder
        model, for the decoder's tokens where its encoder reads `source`.
        """
        return self.session(1, None if source is None else [source]).extend(
            [read_token_ids(token_ids, "token_ids")], all_logits=True)

    def session(self, batch_size: int, sources: Sequence[Sequence[int]] | None = None) -> Session:
        """Step by step access to the first replica, for checks and experiments. An encoder-decoder
        model's encoder reads `sources`, one of token ids for each sequence.
        """
        if (sources is None) != (self.manifest.encoder is None):
            raise LlmcError(f"'{self.manifest.source.architecture}' has "
                            f"{'an' if sources is None else 'no'} encoder: "
                            f"{'give' if sources is None else 'leave out'} what it is to read")
        batch_size = _whole("batch_size", batch_size, 1)
        read = None if sources is None else _rows(sources, "source", batch_size)
        for source in read or ():
            self._check_prompt(source)
        if batch_size > self._max_batch_size:
            raise LlmcError(f"batch_size {batch_size} is not from 1 to max_batch_size "
                            f"{self._max_batch_size}")
        return Session(self, batch_size, read)

    def beam_search(self, prompts: Prompt | Sequence[Prompt],
                    params: SamplingParams | Sequence[SamplingParams]) -> Beams:
        """All sequences that beam search finds, on the first replica; `generate` with a beam_width
        gives the best of each prompt.

        Raises:
            LlmcError: see `stream`; or there is no prompt, beam_width is 1, or prompts differ in
                beam_width, length_penalty, diversity_rate or early_stopping.
        """
        requests = self._requests(prompts, params)
        if not requests:
            raise LlmcError("there is no prompt; give at least one")
        for name in _SEARCH:
            values = list(dict.fromkeys(getattr(r.params, name) for r in requests))
            if len(values) > 1:
                raise LlmcError(f"one beam search has one {name} for all prompts, not {values[0]} "
                                f"and {values[1]}; use generate, or search one after the other")
        if requests[0].params.beam_width == 1:
            raise LlmcError("beam_width 1 is no beam search; give SamplingParams(beam_width=2) or "
                            "more, or use generate")
        with self._exclusive():
            self._session = None
            return Beams.join([beams for _, beams in self._search_all(self._replicas[0],
                                                                      requests)])

    def chat_prompt(self, messages: str | Sequence[Mapping[str, object]]) -> list[int]:
        """Messages, or one of the user, in the model's chat template, as a prompt of token ids.

        Args:
            messages: each with the texts `role` and `content`; other keys are the template's.

        Raises:
            LlmcError: the messages are no such list; the model has no chat template, or it cannot
                write them; or it is an encoder-decoder model.
        """
        read = read_messages(messages)
        if self.manifest.encoder is not None:
            raise LlmcError(f"'{self.manifest.source.architecture}' is an encoder-decoder model, "
                            f"which does not chat; give what its encoder is to read as the prompt, "
                            f"without --chat")
        text = render_chat(self.manifest, self.case_dir, read)
        return self._tokenize(text, add_special_tokens=False)  # the template has them

    def _tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise LlmcError("this model was compiled without a tokenizer; give token ids")
        if not is_unicode(text):
            raise LlmcError("a prompt is not valid Unicode; write it as UTF-8")
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _requests(self, prompts: Prompt | Sequence[Prompt],
                  params: SamplingParams | Sequence[SamplingParams] | None) -> list[_Request]:
        """What is to be completed, checked before anything runs. A request takes little memory;
        its sequences are made when there is a row for them.
        """
        read = read_prompts(prompts)
        decodings: dict[int, _Decoding] = {}  # by the identity of params, which many may share
        requests = []
        for index, (prompt, own) in enumerate(zip(read, _one_each(params, len(read)),
                                                  strict=True)):
            if id(own) not in decodings:
                decodings[id(own)] = self._decoding(own)
            ids = self._tokenize(prompt) if isinstance(prompt, str) else prompt
            self._check_prompt(ids)
            source = array("i", ids)
            decoded = source if self.manifest.encoder is None else \
                (self.manifest.encoder.decoder_start_token_id,)
            requests.append(_Request(index, decoded, source, decodings[id(own)]))
        return requests

    def _decoding(self, params: SamplingParams) -> _Decoding:
        self._check_params(params)
        ends = self._end_tokens(params)
        return _Decoding(params, ends, self._bad_words(params, ends))

    def _sequence(self, request: _Request, sample: int) -> _Sequence:
        params, decoding = request.params, request.decoding
        prompt, source = list(request.prompt), list(request.source)
        shown_before = () if self.manifest.encoder else source
        return _Sequence(
            request.index, sample, prompt, source, params,
            Sampler(params, sample, prompt, sorted(decoding.end_tokens), decoding.bad_words,
                    self._forced_tokens(params, self._limit(request))),
            TextStream(self.tokenizer, shown_before, params.stop), decoding.end_tokens)

    def _limit(self, request: _Request) -> int:
        """New tokens, at most: what is asked for, or the KV cache has room for."""
        return min(request.params.max_tokens,
                   self.manifest.dims.max_seq_len - len(request.prompt) + 1)

    def _forced_tokens(self, params: SamplingParams, limit: int) -> dict[int, tuple[int, ...]]:
        """Tokens that an encoder-decoder model must generate, by the number of those before."""
        encoder = self.manifest.encoder
        forced: dict[int, tuple[int, ...]] = {}
        if encoder is not None and encoder.forced_bos_token_ids:
            forced[0] = encoder.forced_bos_token_ids
        if encoder is not None and encoder.forced_eos_token_ids and not params.ignore_eos:
            forced[limit - 1] = encoder.forced_eos_token_ids
        return forced

    def _check_params(self, params: SamplingParams) -> None:
        """Refuse what this model, or what it runs on, cannot do."""
        if on_gpus(self.manifest) and (params.logprobs or 0) > MAX_LOGPROBS:
            raise LlmcError(f"logprobs {params.logprobs} exceeds {MAX_LOGPROBS}, the most where "
                            f"GPUs choose the tokens; ask for fewer, or compile with --target cpu")
        if params.stop and self.tokenizer is None:
            raise LlmcError("this model was compiled without a tokenizer, so it makes no text in "
                            "which to find a stop string")
        if params.beam_width > self.manifest.max_beam_width:
            raise LlmcError(f"beam_width {params.beam_width} exceeds the max_beam_width "
                            f"{self.manifest.max_beam_width} of this model; compile it with "
                            f"--max_beam_width {params.beam_width}")
        if params.beam_width > self._max_batch_size:
            raise LlmcError(f"beam_width {params.beam_width} exceeds max_batch_size "
                            f"{self._max_batch_size}; load the model with a larger one")
        self._check_tokens(params.logit_bias)
        self._check_tokens(() if params.end_id is None else (params.end_id,))
        vocab_size = self.manifest.dims.vocab_size
        if (params.logprobs or 0) > vocab_size:
            raise LlmcError(f"logprobs {params.logprobs} exceeds the vocabulary of {vocab_size}")

    def _end_tokens(self, params: SamplingParams) -> frozenset[int]:
        if params.ignore_eos:
            return frozenset()
        return frozenset(self.manifest.tokenizer.eos_token_ids if params.end_id is None
                         else (params.end_id,))

    def _bad_words(self, params: SamplingParams, ends: frozenset[int]) -> list[tuple[int, ...]]:
        """The bad words as token ids; a text with and without a space before it."""
        words: list[tuple[int, ...]] = []
        for word in params.bad_words:
            if isinstance(word, str):
                ways = [tuple(self._tokenize(text, add_special_tokens=False))
                        for text in (word, f" {word}")]
            else:
                ways = [tuple(word)]
            for ids in ways:
                self._check_tokens(ids)
                if not ids or (len(ids) == 1 and ids[0] in ends):
                    problem = "the end token; give min_tokens or ignore_eos" if ids else "no token"
                    raise LlmcError(f"bad word {word!r} is {problem}")
            words += ways
        if self.manifest.encoder is not None:
            words += [word for word in self.manifest.encoder.bad_words
                      if len(word) != 1 or word[0] not in ends]
        return words

    def _check_tokens(self, token_ids: Iterable[int], vocab_size: int | None = None) -> None:
        vocab_size = vocab_size or self.manifest.dims.vocab_size
        bad = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise LlmcError(f"token id {shown(bad)} is not in the vocabulary of {vocab_size}")

    def _check_prompt(self, ids: Sequence[int]) -> None:
        """Refuse a prompt that is empty, too long, or has tokens that there are not."""
        encoder = self.manifest.encoder
        if encoder is None:
            self._check_tokens_read(ids)
            return
        if not len(ids):
            raise LlmcError("the prompt is empty; give at least one token")
        if len(ids) > encoder.max_seq_len:
            raise LlmcError(f"the prompt has {len(ids)} tokens, the encoder takes "
                            f"{encoder.max_seq_len}; shorten it, or compile with a larger "
                            f"--mem_max_seq_len")
        self._check_tokens(ids, encoder.vocab_size)

    def _check_tokens_read(self, ids: Sequence[int]) -> None:
        """Refuse what a decoder cannot read."""
        dims = self.manifest.dims
        if not ids:
            raise LlmcError("the prompt is empty; give at least one token")
        if len(ids) > dims.max_seq_len:
            raise LlmcError(f"the prompt has {len(ids)} tokens, the KV cache has room for "
                            f"{dims.max_seq_len}; shorten it, or compile with a larger "
                            f"--max_seq_len")
        self._check_tokens(ids)

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

    def _stream(self, requests: list[_Request]) -> Iterator[Piece]:
        with self._exclusive():
            self._session = None
            if len(self._replicas) == 1:
                yield from self._decode(self._replicas[0], requests)
            else:
                yield from self._decode_on_all(requests)

    def _complete(self, requests: list[_Request],
                  progress: Callable[[Piece], object]) -> Iterator[Completion]:
        pieces: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        for piece in self._stream(requests):
            progress(piece)
            pieces[piece.index, piece.sample].append(piece)
            if piece.finish_reason:
                yield _completion(requests[piece.index].source,
                                  pieces.pop((piece.index, piece.sample)))

    # The loop: schedule, run, postprocess.

    def _decode(self, replica: Replica, requests: list[_Request], share: int = 0,
                shares: int = 1) -> Iterator[Piece]:
        """Decode one of so many equal shares of the sequences. Cache row i belongs to active[i]."""
        def mine() -> Iterator[tuple[_Request, int]]:
            return islice(((request, sample) for request in requests
                           for sample in range(request.params.n)), share, None, shares)

        searched = [request for request, _ in mine() if request.params.beam_width > 1]
        for sequence, tokens in self._best(replica, searched):
            for token in tokens:
                yield from self._postprocess([sequence], [(token, None)])
        waiting = _Waiting(self._sequence(request, sample) for request, sample in mine()
                           if request.params.beam_width == 1)
        active: list[_Sequence] = []
        rows: dict[int, int] = {}  # of the memory, by prompt
        while waiting.first or active:
            first, batch = self._schedule(waiting, active, share=not replica.on_gpus)
            if self.manifest.encoder is not None:
                needed = {sequence.index for sequence in (*active, waiting.first) if sequence}
                rows = {index: row for index, row in rows.items() if index in needed}
                batch = self._with_memory(replica, batch, active[first:], rows)
            for chosen in self._run(replica, batch, active[first:]):
                yield from self._postprocess(active[first:], chosen)
            self._retire(replica, active)

    def _with_memory(self, replica: Replica, batch: PackedBatch, sequences: Sequence[_Sequence],
                     rows: dict[int, int]) -> PackedBatch:
        """The batch, whose sequences come first, with where their prompts' memory is. Encodes the
        prompts that have no row yet; adds to `rows`, which is by prompt.
        """
        sequences = sequences[:batch.batch_size]
        new = {s.index: s.source for s in sequences if s.index not in rows}
        free = sorted(set(range(self._max_batch_size)) - set(rows.values()))
        rows.update(zip(new, free, strict=False))
        self._run_encoder(replica, list(new.values()), [rows[index] for index in new])
        return replace(batch, memory=Memory.of([rows[s.index] for s in sequences],
                                               [len(s.source) for s in sequences]))

    def _run_encoder(self, replica: Replica, sources: Sequence[Sequence[int]],
                     rows: Sequence[int]) -> None:
        """Fill rows of the memory, from as many prompts at once as padding leaves room for."""
        start = 0
        for end in range(1, len(sources) + 1):
            longest = max(map(len, sources[start:end + 1]))
            if end == len(sources) or longest * (end + 1 - start) > MAX_TOKENS:
                replica.encode(PackedBatch.prepare(sources[start:end], [0] * (end - start)),
                               rows[start:end])
                start = end

    def _run(self, replica: Replica, batch: PackedBatch, sequences: list[_Sequence]) -> \
            Iterator[list[_Chosen]]:
        """Each sequence's next token; those of several steps where GPUs choose them."""
        if replica.on_gpus:
            draws = Draws.of([s.sampler for s in sequences], [len(s.tokens) for s in sequences])
            ends = frozenset.intersection(*(s.end_tokens for s in sequences))
            made = replica.decode(batch, draws, sorted(ends), self._steps(sequences))
            yield from made.steps([s.params.logprobs for s in sequences])
            return
        logits = replica.run(batch)
        rows = self._share(replica, batch, sequences)
        yield [sequence.choose(logits[row]) for sequence, row in zip(sequences, rows, strict=True)]

    def _share(self, replica: Replica, batch: PackedBatch, sequences: list[_Sequence]) -> list[int]:
        """Each sequence's row of logits. Those behind the batch take the row, and the cache, of
        one with the same prompt.
        """
        rows = list(range(batch.batch_size))
        first = {sequences[row].index: row for row in rows}
        for sequence in sequences[batch.batch_size:]:
            row = first[sequence.index]
            replica.copy_row(batch.first_row + row, batch.first_row + len(rows),
                             len(sequence.prompt))
            rows.append(row)
        return rows

    def _steps(self, sequences: list[_Sequence]) -> int:
        """How many tokens of each to make before looking at them."""
        done = min(len(sequence.tokens) for sequence in sequences)
        if not done:
            return 1
        return min(max(self._check_step, self._skip_step - done),
                   max(s.params.max_tokens - len(s.tokens) for s in sequences),
                   self.manifest.dims.max_seq_len - max(s.length for s in sequences))

    def _schedule(self, waiting: _Waiting, active: list[_Sequence], share: bool) -> \
            tuple[int, PackedBatch]:
        """The next step: prefill what can enter, else one token for every active sequence.

        With `share`, a prompt that several sequences enter with is in the batch once; the others
        come behind those of the batch.
        """
        entering: list[_Sequence] = []
        sharing: list[_Sequence] = []
        longest = 0
        while waiting.first and \
                len(active) + len(entering) + len(sharing) < self._max_batch_size:
            if share and entering and entering[-1].index == waiting.first.index:
                sharing.append(waiting.take())
                continue
            longest = max(longest, len(waiting.first.prompt))
            if entering and longest * (len(entering) + 1) > MAX_TOKENS:
                break
            entering.append(waiting.take())
        if entering:
            first = len(active)
            active += entering + sharing
            prompts = [sequence.prompt for sequence in entering]
            return first, PackedBatch.prepare(prompts, [0] * len(prompts), first)
        return 0, PackedBatch.prepare([sequence.tokens[-1:] for sequence in active],
                                      [sequence.length for sequence in active])

    def _postprocess(self, sequences: list[_Sequence], chosen: Sequence[_Chosen]) -> \
            Iterator[Piece]:
        """Hand out a step's tokens, but for sequences that an earlier step of its block ended."""
        for sequence, (token, logprobs) in zip(sequences, chosen, strict=True):
            if sequence.finished:
                continue
            if token < 0:
                raise nothing_allowed(len(sequence.tokens))
            sequence.tokens.append(token)
            params, count = sequence.params, len(sequence.tokens)
            text = "" if token in sequence.end_tokens else \
                sequence.text.push(token, may_stop=count > params.min_tokens)
            reason = None
            if token in sequence.end_tokens or sequence.text.stopped:
                reason = "stop"
            elif count == params.max_tokens or sequence.length >= self.manifest.dims.max_seq_len:
                reason = "length"
            if reason:
                text += sequence.text.finish()
                sequence.finished = True
            yield Piece(sequence.index, sequence.sample, token, text, reason, logprobs)

    def _retire(self, replica: Replica, active: list[_Sequence]) -> None:
        """Free the cache rows of what is finished; the last sequences move into the gaps."""
        for row in reversed(range(len(active))):
            if active[row].finished:
                last = active.pop()
                if row < len(active):
                    replica.copy_row(len(active), row, last.length)
                    active[row] = last

    # Beam search. Beam k of prompt b has cache row b * beam_width + k.

    def _best(self, replica: Replica, requests: list[_Request]) -> \
            Iterator[tuple[_Sequence, list[int]]]:
        """Each request's sequence with the tokens that are best for it."""
        def settings(request: _Request) -> list[str]:
            return [str(getattr(request.params, name)) for name in _SEARCH]

        for _, group in groupby(sorted(requests, key=settings), settings):
            for batch, beams in self._search_all(replica, list(group)):
                for prompt, sequence in enumerate(batch):
                    count = beams.sequence_length[prompt, 0]
                    yield sequence, beams.output_ids[:count, prompt, 0].tolist()

    def _search_all(self, replica: Replica, requests: list[_Request]) -> \
            Iterator[tuple[list[_Sequence], Beams]]:
        """Search, with equal settings, for as many sequences at once as the cache has rows for."""
        limits = [self._limit(request) for request in requests]
        count = self._max_batch_size // requests[0].params.beam_width
        for first in range(0, len(requests), count):
            batch = [self._sequence(request, 0) for request in requests[first:first + count]]
            params = batch[0].params
            search = BeamSearch(
                params.beam_width, max(limits), limits[first:first + count],
                [sorted(s.end_tokens) for s in batch], length_penalty=params.length_penalty,
                diversity_rate=params.diversity_rate, early_stopping=params.early_stopping)
            yield batch, self._search(replica, batch, search)

    def _search(self, replica: Replica, sequences: list[_Sequence], search: BeamSearch) -> Beams:
        """Read the prompts; then a token for every beam, until no search goes on."""
        beam, dims = search.cum_log_probs.shape[1], self.manifest.dims
        prompts, samplers = [s.prompt for s in sequences], [s.sampler for s in sequences]
        memory = None
        if self.manifest.encoder is not None:  # prompt b's is row b of the memory
            sources = [s.source for s in sequences]
            self._run_encoder(replica, sources, range(len(sources)))
            memory = Memory.of(range(len(sources)), [len(source) for source in sources])
        sizes = beam, min(search.candidates, dims.vocab_size), dims.max_seq_len
        steps: Steps
        if replica.on_gpus and all(sampler.processing is None for sampler in samplers):
            steps = DeviceSteps(replica, prompts, *sizes, memory)
        else:
            steps = HostSteps(replica, prompts, samplers, *sizes, memory)
        candidates = steps.begin()
        while True:
            tokens, parents = search.step(candidates)
            if not search.running.any():
                return search.beams()
            candidates = steps.go_on(tokens, parents, search.running)

    def _decode_on_all(self, requests: list[_Request]) -> Iterator[Piece]:
        """Deal the sequences to the replicas, each in its own thread."""
        count = len(self._replicas)
        results: queue.Queue[Piece | BaseException | None] = queue.Queue()
        cancelled = threading.Event()

        def work(replica: Replica, share: int) -> None:
            try:
                for piece in self._decode(replica, requests, share, count):
                    if cancelled.is_set():
                        return
                    results.put(piece)
                results.put(None)
            except BaseException as error:  # handed to the caller's thread
                results.put(error)

        threads = [threading.Thread(target=work, args=(replica, share), daemon=True)
                   for share, replica in enumerate(self._replicas)]
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

    def __init__(self, llm: LLM, batch_size: int,
                 sources: Sequence[Sequence[int]] | None = None) -> None:
        self._llm = llm
        self._past = [0] * batch_size
        self._sources = sources
        self._memory = None if sources is None else Memory.of(range(batch_size),
                                                              list(map(len, sources)))

    def extend(self, tokens: Sequence[Sequence[int]], all_logits: bool = False) -> np.ndarray:
        """Append tokens to every sequence.

        Returns float32 logits: of each sequence's last token [batch, vocab_size], or with
        `all_logits` of every new token [num_tokens, vocab_size].

        Raises:
            LlmcError: there are not tokens for every sequence; one would outgrow the KV cache; or
                the LLM was used otherwise since. The cpu target continues several sequences at
                once by one token each only.
        """
        rows = _rows(tokens, "row", len(self._past))
        longest = max(map(len, rows))
        for new, past in zip(rows, self._past, strict=True):
            self._llm._check_tokens_read(new)
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
            replica = self._llm._replicas[0]
            if self._sources is not None and not any(self._past):
                self._llm._run_encoder(replica, self._sources, range(len(self._sources)))
            parts = [rows]
            if all_logits and len(rows) == 1:  # as many logits as an engine has room for
                parts = [[rows[0][start:start + MAX_LOGITS]]
                         for start in range(0, len(rows[0]), MAX_LOGITS)]
            logits = []
            for part in parts:
                logits.append(replica.run(PackedBatch.prepare(part, self._past, 0, all_logits,
                                                              memory=self._memory)))
                self._past = [past + len(new) for past, new in zip(self._past, part, strict=True)]
        return np.concatenate(logits)


def _whole(name: str, value: object, least: int) -> int:
    """An argument that is a whole number."""
    try:
        read = whole(value)
    except (TypeError, ValueError) as error:
        raise LlmcError(f"{name} is {shown(value)}; give {error}") from None
    if read < least:
        raise LlmcError(f"{name} {read} is below {least}")
    return read


def _devices(value: object) -> list[int]:
    try:
        return [whole(number) for number in listed(value)]
    except (TypeError, ValueError):
        raise LlmcError(f"device is {shown(value)}; give a list of numbers such as [0, 1]") \
            from None


def _rows(value: object, name: str, count: int) -> list[list[int]]:
    """Token ids for each of so many sequences."""
    try:
        rows = listed(value)
    except TypeError:
        raise LlmcError(f"{name}s is {shown(value)}; give a list of token ids for each sequence") \
            from None
    if len(rows) != count:
        raise LlmcError(f"there are {len(rows)} {name}s for batch_size {count}; give one for each "
                        f"sequence")
    return [read_token_ids(row, f"{name} {index}") for index, row in enumerate(rows)]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> \
        list[SamplingParams]:
    """Parameters for each of so many prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise LlmcError(f"params is {shown(params)}; give SamplingParams(…), or one for each "
                        f"prompt")
    if len(params) != count:
        raise LlmcError(f"there are {len(params)} SamplingParams for {count} prompts; give one for "
                        f"all, or one for each")
    return list(params)


def _completion(prompt: Sequence[int], pieces: Sequence[Piece]) -> Completion:
    last = pieces[-1]
    logprobs = tuple(piece.logprobs for piece in pieces if piece.logprobs)
    return Completion(last.index, last.sample, tuple(prompt),
                      tuple(piece.token_id for piece in pieces),
                      "".join(piece.text for piece in pieces), last.finish_reason or "length",
                      logprobs or None, sum(p.chosen for p in logprobs) if logprobs else None)
