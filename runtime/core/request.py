"""Requests, validated against a model, and the state of their completions."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from llmc.artifacts.manifest import (
    MANIFEST_NAME,
    PROCESSOR,
    ImageEncoderProgram,
    ImageMemory,
    Manifest,
)
from llmc.artifacts.vision_input import UNREAD
from llmc.errors import LlmcError, shown
from llmc.runtime.chat_template import ChatTemplate
from llmc.runtime.core.adapters import Adapter
from llmc.runtime.core.image_memory import NO_IMAGES, PromptMemory, prompt_memory
from llmc.runtime.core.input_embeds import InputEmbeds
from llmc.runtime.core.prompt_scores import PromptScores
from llmc.runtime.core.scheduler import SequenceOutput
from llmc.runtime.core.step import EncoderInput, SamplingState
from llmc.runtime.message_forms import ContentFormat
from llmc.runtime.multimodal.items import PLURALS, MediaItem
from llmc.runtime.multimodal.messages import MediaSource, has_media, load_source, split_media
from llmc.runtime.multimodal.rotary_positions import RotaryPositions, positions_of_items
from llmc.runtime.prompts import (
    ROW,
    EmbedsPrompt,
    MediaPrompt,
    Prompt,
    UnprocessedPrompt,
    read_messages,
    read_prompts,
    read_token_ids,
)
from llmc.runtime.sampling.beam_search import Beams, BeamSearch, Candidates, log_softmax
from llmc.runtime.sampling.detokenizer import IncrementalDetokenizer
from llmc.runtime.sampling.params import STRUCTURED_OUTPUT_FIELDS, SamplingParams, is_unicode
from llmc.runtime.sampling.sampler import (
    NOT_FINITE,
    Logprobs,
    NonFiniteLogits,
    Sampler,
    nothing_allowed,
)
from llmc.runtime.sampling.slot_params import MAX_LOGPROBS
from llmc.runtime.sampling.speech_rules import SpeechRules
from llmc.runtime.sampling.structured_output import GrammarCompiler, GrammarState
from llmc.runtime.sandbox import Sandbox
from llmc.runtime.speculation.planner import SequenceDrafts
from llmc.runtime.tokenizer import encode, load_tokenizer

if TYPE_CHECKING:
    from llmc.runtime.multimodal.processor import Processor


@dataclass(frozen=True)
class Completion:
    """A generated text.

    Args:
        index: number of the prompt, from 0.
        sample: number of the completion among the prompt's n, from 0.
        finish_reason: `stop` (EOS token, stop token or stop string) or `length`.
        logprobs: log-probabilities of each token, with `SamplingParams.logprobs`.
        cumulative_logprob: sum of the sampled tokens' log-probabilities, with
            `SamplingParams.logprobs`.
        prompt_logprobs: log-probabilities of each prompt token, None for the first and for rows of
            images or audio, with `SamplingParams.prompt_logprobs`.
        accepted_prediction_tokens, rejected_prediction_tokens: tokens drafted from
            `SamplingParams.prediction` that are part of the completion, and that are not.
    """

    index: int
    sample: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[Logprobs, ...] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @staticmethod
    def of(prompt: Sequence[int], pieces: Sequence[CompletionChunk]) -> Completion:
        """Join all chunks of one completion."""
        last = pieces[-1]
        logprobs = tuple(piece.logprobs for piece in pieces if piece.logprobs)
        return Completion(last.index, last.sample, tuple(prompt),
                          tuple(piece.token_id for piece in pieces if piece.token_id is not None),
                          "".join(piece.text for piece in pieces), last.finish_reason or "length",
                          logprobs or None, sum(p.chosen for p in logprobs) if logprobs else None,
                          pieces[0].prompt_logprobs, last.accepted_prediction_tokens,
                          last.rejected_prediction_tokens)


@dataclass(frozen=True)
class CompletionChunk:
    """One step of a streamed completion: a token and the text that it completes, if any.

    Args:
        index, sample, logprobs: see `Completion`.
        token_id: None if `max_tokens` is 0.
        finish_reason: set on a completion's last chunk.
        num_cached_tokens: prompt tokens found in the prefix cache.
        prompt_logprobs: on a completion's first chunk.
        accepted_prediction_tokens, rejected_prediction_tokens: on a completion's last chunk; see
            `Completion`.
    """

    index: int
    sample: int
    token_id: int | None
    text: str
    finish_reason: str | None
    logprobs: Logprobs | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True)
class PreparedParams:
    """Sampling parameters resolved for a model.

    Args:
        params: the parameters as given.
        end_tokens: EOS and stop tokens.
        bad_words: as token ids.
        guide: initial grammar state, for structured output.
    """

    params: SamplingParams
    end_tokens: frozenset[int]
    bad_words: list[tuple[int, ...]]
    guide: GrammarState | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A validated prompt with its sampling parameters.

    Args:
        index: number of the prompt among its caller's.
        prompt: token ids that the decoder reads.
        source: token ids that the encoder reads; without an encoder of tokens those of `prompt`,
            without placeholders of rows that have no token.
        decoding: resolved sampling parameters.
        limit: maximum number of new tokens. With 0 one is sampled and dropped.
        forced: allowed tokens, by number of tokens generated before.
        prediction: token ids of the expected output.
        token_type_ids: token types of a pair of texts, for a model that reads them; empty: all 0.
        adapter: LoRA adapter to generate with.
        embeds: rows in place of the embeddings of some of `prompt`.
        features: float32 [num_rows, width], rows that the encoder reads in place of tokens.
        rules: rules of speech.
        memory: images that layers attend to, of a model with such layers.
    """

    index: int
    prompt: Sequence[int]
    source: Sequence[int]
    decoding: PreparedParams
    limit: int
    forced: Mapping[int, tuple[int, ...]]
    prediction: Sequence[int] = ()
    token_type_ids: Sequence[int] = ()
    adapter: Adapter | None = None
    embeds: InputEmbeds | None = None
    features: np.ndarray | None = None
    rules: SpeechRules | None = None
    memory: PromptMemory | None = None

    @property
    def encoder_input(self) -> EncoderInput:
        """What an encoder reads."""
        if self.memory is not None:
            return self.memory
        return self.source if self.features is None else self.features

    @property
    def params(self) -> SamplingParams:
        return self.decoding.params

    @property
    def needs_logits(self) -> bool:
        """Whether an engine without rules of speech returns logits in place of tokens."""
        return self.rules is not None and (self.rules.need_logits or self.params.min_tokens > 1)

    def sampler(self, sample: int) -> Sampler:
        """Create the sampler of one of its completions."""
        prompt = self.prompt if self.embeds is None and self.memory is None else self.source
        return Sampler(self.params, sample, prompt, sorted(self.decoding.end_tokens),
                       self.decoding.bad_words, self.forced, self.rules)

    def key(self, encoded: bool) -> bytes:
        """Bytes that determine the KV cache's contents, in addition to the decoder's tokens."""
        source = b"" if not encoded else self.memory.key if self.memory is not None else \
            np.asarray(self.source, np.int64).tobytes() if self.features is None else \
            np.asarray(self.features, np.float32).tobytes()
        adapter = b"" if self.adapter is None else self.adapter.key
        return hashlib.sha256(source + adapter).digest() if source or adapter else b""


class RunningCompletion:
    """A completion being generated.

    On a GPU, the loop's thread only determines whether a token ends the completion, unless there
    are stop strings; the caller's thread detokenizes.

    Attributes:
        latest: time of arrival, then of the latest token, in seconds of `time.monotonic`.
        guide: grammar state, for structured output.
        num_cached_tokens: prompt tokens found in the prefix cache.
        scores: log-probabilities of the prompt, if requested.
        drafts: drafts of its tokens, for speculative decoding.
        on_host: whether `sample_on_host` samples its tokens.
    """

    def __init__(self, request: Request, sample: int, tokenizer: Tokenizer | None,
                 shown_before: Sequence[int]) -> None:
        self.request, self.sample = request, sample
        self.sampler = request.sampler(sample)
        self.latest = time.monotonic()
        self.guide = request.decoding.guide and request.decoding.guide.copy()
        self.masked: Callable[[LlmcError | None], object] | None = None  # see GrammarState.advance
        self.generated = self.num_cached_tokens = 0
        self.scores: PromptScores | None = None
        self.drafts: SequenceDrafts | None = None
        self.on_host = False
        self._text = IncrementalDetokenizer(tokenizer, shown_before, request.params.stop,
                                request.params.show_special_tokens)

    def state(self, tokens: Sequence[int]) -> SamplingState:
        """Sampling state for admission, after these generated tokens."""
        if self.on_host:
            return SamplingState(None)
        return SamplingState(self.sampler, tuple(tokens), prompt_lookup=self.drafts is not None
                             and self.drafts.prompt_lookup)

    def sample_on_host(self, output: SequenceOutput, tokens: Sequence[int]) -> SequenceOutput:
        """Sample the next token from a step's logits.

        Args:
            output: with logits, float32 [1, vocab_size].
            tokens: generated before.

        Raises:
            LlmcError: no token is allowed.
            NonFiniteLogits: a logit is NaN or infinite.
        """
        assert output.logits is not None
        logits = output.logits[0]
        token = self.sampler(logits, tokens)
        logprobs = None if self.request.params.logprobs is None \
            else self.sampler.logprobs(logits, token, tokens)
        return replace(output, tokens=[token], logprobs=[logprobs])

    def take(self, token: int, logprobs: Logprobs | None, read: bool = False,
             following: int = 0) -> Token:
        """Process the next sampled token.

        Args:
            read: detokenize now.
            following: number of tokens that the same step sampled after it. They are dropped if
                it ends the completion.

        Raises:
            LlmcError: no token was allowed, the grammar allows no further token, or a logit of the
                prompt is NaN or infinite.
            NonFiniteLogits: a logit is NaN or infinite.
        """
        prompt_logprobs = None
        if self.scores is not None and not self.generated:
            prompt_logprobs = self.scores.result()
        if not self.request.limit:
            return Token(self, None, False, 0, "length", None, "", prompt_logprobs)
        if token == NOT_FINITE or (logprobs is not None and math.isnan(logprobs.chosen)):
            raise NonFiniteLogits(self.generated)
        if token < 0:
            raise nothing_allowed(self.generated)
        self.generated += 1
        params, text = self.request.params, None
        ends = token in self.request.decoding.end_tokens
        if read or params.stop:
            text = self._read(token, ends, self.generated)
        reason = None
        if ends or self._text.stopped:
            reason = "stop"
        elif self.generated >= self.request.limit:
            reason = "length"
        if self.guide is not None and reason is None:
            self.guide.advance(token, None if following else self.masked)
        prediction = (0, 0) if reason is None or self.drafts is None \
            else self.drafts.prediction_tokens(following)
        return Token(self, token, ends, self.generated, reason, logprobs, text, prompt_logprobs,
                     prediction)

    def piece(self, token: Token) -> CompletionChunk:
        """Detokenize a token. Each token once, in order."""
        text = token.text
        if text is None and token.token_id is not None:
            text = self._read(token.token_id, token.ends, token.number)
        if token.finish_reason:
            text = (text or "") + self._text.finish()
        return CompletionChunk(self.request.index, self.sample, token.token_id, text or "",
                     token.finish_reason, token.logprobs, self.num_cached_tokens,
                     token.prompt_logprobs, *token.prediction_tokens)

    def _read(self, token: int, ends: bool, number: int) -> str:
        return "" if ends else self._text.push(
            token, may_stop=number > self.request.params.min_tokens)


@dataclass(frozen=True)
class Token:
    """A sampled token of a completion, possibly not detokenized yet.

    `token_id` is None for the end of a completion with `max_tokens` 0. `prediction_tokens` are
    those accepted and rejected, on the last token of a completion.
    """

    owner: RunningCompletion
    token_id: int | None
    ends: bool
    number: int
    finish_reason: str | None
    logprobs: Logprobs | None
    text: str | None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    prediction_tokens: tuple[int, int] = (0, 0)


@dataclass(eq=False)
class RunningBeamSearch:
    """A beam search for one prompt, in progress.

    Args:
        most: rows of the result tables, [most, batch, beam].
        vocab_size: upper bound of the candidates per beam.
    """

    request: Request
    most: int
    vocab_size: int

    def __post_init__(self) -> None:
        self.sampler = self.request.sampler(0)
        self.num_cached_tokens = 0

    def state(self, tokens: Sequence[int]) -> SamplingState:
        """Start or restart the search at the prompt."""
        params = self.request.params
        self._histories: list[list[int]] = [[] for _ in range(params.beam_width)]
        self._search = BeamSearch(
            params.beam_width, self.most, [self.request.limit],
            [sorted(self.request.decoding.end_tokens)], length_penalty=params.length_penalty,
            diversity_rate=params.diversity_rate, early_stopping=params.early_stopping)
        return SamplingState(None)

    @property
    def candidates(self) -> int:
        """Candidates per beam to request.

        0 requests logits instead: the host computes candidates from logits that the sampler
        processed.
        """
        return 0 if self.sampler.processes else self._count

    @property
    def _count(self) -> int:
        """Candidates per beam, such that beam_width of them are not EOS tokens."""
        return min(self.request.params.beam_width + len(self.request.decoding.end_tokens),
                   self.vocab_size)

    def take(self, output: SequenceOutput) -> tuple[list[int], list[int]] | None:
        """Return the next token of each beam and its parent beam; None once the search has ended.

        Raises:
            LlmcError: no token is allowed.
            NonFiniteLogits: a log-probability is NaN.
        """
        width = self.request.params.beam_width
        candidates = output.candidates
        if not self.candidates:
            assert output.logits is not None
            scores = [self.sampler.process(row, history) for row, history in
                      zip(log_softmax(output.logits), self._histories, strict=False)]
            candidates = Candidates.of(np.stack(scores), self._count)
        assert candidates is not None
        if np.isnan(candidates.log_probs).any():
            raise NonFiniteLogits(len(self._histories[0]))
        candidates = Candidates(candidates.tokens[:, :self._count],
                                candidates.log_probs[:, :self._count])
        if len(candidates.tokens) < width:  # all beams continue the prompt
            candidates = Candidates(np.repeat(candidates.tokens, width, axis=0),
                                    np.repeat(candidates.log_probs, width, axis=0))
        tokens, parents = self._search.step(candidates.reshape(1, width))
        if not self._search.running.any():
            return None
        self._histories = [[*self._histories[parent], token] for token, parent in
                           zip(tokens[0].tolist(), parents[0].tolist(), strict=True)]
        return tokens[0].tolist(), parents[0].tolist()

    def beams(self) -> Beams:
        return self._search.beams()

    def sequences(self) -> list[list[int]]:
        """Token ids of the finished sequences, best first."""
        found = self.beams()
        return [found.output_ids[:length, 0, beam].tolist()
                for beam, length in enumerate(found.sequence_length[0].tolist()) if length]


class InputProcessor:
    """Validates and tokenizes requests for one model.

    Args:
        max_slots: maximum number of concurrent sequences.

    Attributes:
        max_model_len: maximum sequence length, limited by the model and by the KV cache.
    """

    def __init__(self, manifest: Manifest, case_dir: Path, max_slots: int) -> None:
        self.manifest, self._case_dir, self._max_slots = manifest, case_dir, max_slots
        self.max_model_len = manifest.dims.max_seq_len
        self.tokenizer = load_tokenizer(manifest, case_dir)
        self.sandbox = Sandbox()
        self.default_params = _default_params(manifest)
        self._chat_template = _chat_template(manifest, case_dir, self.sandbox)
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()

    @property
    def tokenizer_file(self) -> Path:
        """Path of tokenizer.json in the case directory."""
        return self._case_dir / (self.manifest.tokenizer.path or "") / "tokenizer.json"

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `LLM.tokenize`."""
        if self.tokenizer is None:
            raise _no_tokenizer()
        if not is_unicode(text):
            raise LlmcError("a prompt is not valid Unicode; write it as UTF-8")
        return encode(self.tokenizer, [text], add_special_tokens)[0]

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """See `LLM.detokenize`."""
        if self.tokenizer is None:
            raise LlmcError("this model was compiled without a tokenizer, so it generates no text; "
                            "use the token ids")
        ids = read_token_ids(token_ids, "token_ids")
        self._check_tokens(ids)
        text, = self.tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def requests(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None) -> list[Request]:
        """Validate prompts and parameters.

        A request takes little memory; its completions are created on admission.

        Raises:
            LlmcError: a prompt or its parameters are invalid, or unsupported by this model.
        """
        self.require_generation()
        read = read_prompts(prompts)
        decodings: dict[int, PreparedParams] = {}  # by id of params, which prompts may share
        requests = []
        encoder = self.manifest.encoder
        each = _one_each(params, len(read), self.default_params)
        for index, (prompt, given) in enumerate(zip(read, each, strict=True)):
            if id(given) not in decodings:
                decodings[id(given)] = self._decoding(given)
            embeds, memory = None, NO_IMAGES if self.manifest.memory else None
            if isinstance(prompt, UnprocessedPrompt):
                prompt = self.media_prompt(prompt.prompt, prompt.images, prompt.audio, True)
            if isinstance(prompt, MediaPrompt) and self.manifest.memory:
                decoded, source, memory = self._read_attended(prompt, self.manifest.memory)
            elif isinstance(prompt, MediaPrompt):
                decoded, source, embeds = self._read_media(prompt, given)
            elif isinstance(prompt, EmbedsPrompt):
                decoded, source, embeds = self._read_embeds(prompt, given)
            else:
                ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
                self.check_prompt(ids)
                source = array("i", ids)
                decoded = source if encoder is None else (encoder.decoder_start_token_id,)
            # The last token needs no position. The loop refuses prompts longer than the cache.
            room = max(self.max_model_len - len(decoded) + 1, 1)
            limit = min(given.max_tokens, room)
            requests.append(Request(index, decoded, source, decodings[id(given)], limit,
                                    self._forced_tokens(given, limit),
                                    self._prediction(given), embeds=embeds, memory=memory))
        return requests

    def _read_embeds(self, prompt: EmbedsPrompt, params: SamplingParams) -> \
            tuple[Sequence[int], Sequence[int], InputEmbeds]:
        """Check a prompt with rows; return `prompt`, `source` and `embeds` of its request.

        Raises:
            LlmcError: the model does not take it, or its parameters ask for what rows do not have.
        """
        width = self.manifest.prompt_embeds_width
        if self.manifest.memory:
            raise LlmcError(f"layers of '{self.manifest.source.architecture}' attend to images, "
                            f"which prompt embeddings do not support; give text or token ids")
        if width is None:
            raise LlmcError(f"'{self.manifest.source.architecture}' was compiled without prompt "
                            f"embeddings; compile it again with --enable_prompt_embeds")
        if prompt.rows.shape[1] != width:
            raise LlmcError(f"prompt_embeds has rows of {prompt.rows.shape[1]} values, "
                            f"'{self.manifest.source.architecture}' has hidden_size {width}; give "
                            f"the output of its token embedding")
        if params.prompt_logprobs is not None:
            raise LlmcError("prompt_logprobs is given for a prompt with prompt_embeds, whose rows "
                            "are no tokens; leave it out")
        known = [token for token in prompt.token_ids if token != ROW]
        positions = np.flatnonzero(np.array(prompt.token_ids, np.int64) == ROW)
        ids = [0 if token == ROW else token for token in prompt.token_ids]
        self.check_tokens(ids)
        return array("i", ids), array("i", known), InputEmbeds.of(positions, prompt.rows)

    def _read_media(self, prompt: MediaPrompt, params: SamplingParams) -> \
            tuple[Sequence[int], Sequence[int], InputEmbeds]:
        """Check a prompt with items; return `prompt`, `source` and `embeds` of its request.

        Raises:
            LlmcError: the model does not take its items, or its parameters ask for what rows do
                not have.
        """
        for own in prompt.ranges:
            self._check_item(own.item)
        self.check_tokens(prompt.token_ids)
        image, ids = self.manifest.image, array("i", prompt.token_ids)
        embeds = InputEmbeds.of_items(prompt.ranges, self._rotary(prompt))
        if image is not None and any(own.item.modality == "image" for own in prompt.ranges):
            if image.bidirectional == "prompt" and params.prompt_logprobs is not None:
                raise LlmcError("prompt_logprobs is given for a prompt with bidirectional "
                                "attention, so that no token is predicted; leave it out")
            embeds = embeds.seen_together(image.bidirectional, ids)
        if image is None or image.token_id is None:
            return ids, ids, embeds
        read = ids[:]
        for position in embeds.positions.tolist():
            read[position] = image.token_id
        return read, ids, embeds

    def _read_attended(self, prompt: MediaPrompt, rows: ImageMemory) -> \
            tuple[Sequence[int], Sequence[int], PromptMemory]:
        """Check a prompt with images that layers attend to.

        Returns:
            `prompt`, `source` and `memory` of its request.

        Raises:
            LlmcError: the model does not take them.
        """
        for own in prompt.ranges:
            self._check_item(own.item)
        # The token embedding may have a row for images after those of the vocabulary.
        places = {own.offset for own in prompt.ranges}
        known = [token for position, token in enumerate(prompt.token_ids) if position not in places]
        self.check_length(prompt.token_ids)
        self._check_tokens(known)
        return array("i", prompt.token_ids), array("i", known), prompt_memory(prompt.ranges, rows)

    def _rotary(self, prompt: MediaPrompt) -> RotaryPositions | None:
        """Positions by axis of a prompt with images; None if the model has none."""
        grid = self.manifest.image.grid if self.manifest.image else None
        return None if grid is None else positions_of_items(
            len(prompt), [own for own in prompt.ranges if own.item.modality == "image"],
            grid.merge_size)

    def _check_item(self, item: MediaItem) -> None:
        """Check that the item's encoder takes what the processor gave.

        Raises:
            LlmcError: there is no such encoder, or an array has another shape.
        """
        kind, name = item.modality, self.manifest.source.architecture
        program = self.manifest.media.get(kind)
        if program is None:
            raise LlmcError(f"'{name}' was compiled without an encoder of "
                            f"{PLURALS[item.modality]}; give text only")
        computed = {key for own in program.computed for key in own.names} \
            if isinstance(program, ImageEncoderProgram) else set()
        expected = {tensor.name: tensor for tensor in program.inputs if tensor.name not in computed}
        if expected.keys() != item.arrays.keys() - (UNREAD - expected.keys()):
            raise LlmcError(f"the processor gives {', '.join(sorted(item.arrays))}, the {kind} "
                            f"encoder of '{name}' reads {', '.join(expected)}; compile the model "
                            f"again")
        for key, tensor in expected.items():
            shape = item.arrays[key].shape
            if len(shape) != len(tensor.shape) or any(
                    isinstance(size, int) and size != given
                    for size, given in zip(tensor.shape, shape, strict=True)):
                raise LlmcError(f"an item gives {key} {list(shape)}, the {kind} encoder of "
                                f"'{name}' reads {list(tensor.shape)}; give one of another size")

    def speech_request(self, prompt: Sequence[int], rows: np.ndarray, params: SamplingParams,
                       rules: SpeechRules) -> Request:
        """Make the request of a window of audio.

        Args:
            prompt: tokens that the decoder reads first.
            rows: float32 [num_rows, width], what the encoder reads.
            params: sampling parameters.
            rules: rules of the tokens.

        Raises:
            LlmcError: the parameters are invalid, or the prompt is too long.
        """
        self.check_tokens(prompt)
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise LlmcError(f"the prompt has {len(prompt)} tokens, which leaves no room in "
                            f"{self.max_model_len} positions; shorten it")
        limit = min(params.max_tokens, room)
        return Request(0, tuple(prompt), prompt, self._decoding(params), limit,
                       self._forced_tokens(params, limit), features=rows, rules=rules)

    def require_generation(self) -> None:
        """Check that the model generates text.

        Raises:
            LlmcError: it was compiled for another task.
        """
        info = self.manifest.pooling
        if info is not None:
            raise LlmcError(f"'{self.manifest.source.architecture}' was compiled for task "
                            f"{info.task} and generates no text; use "
                            f"{'embed' if info.task == 'embed' else 'classify'}")

    def render_chat(self, messages: str | Sequence[Mapping[str, object]],
                    tools: Sequence[Mapping[str, object]] | None,
                    chat_template_kwargs: Mapping[str, object],
                    content_format: ContentFormat) -> str:
        """See `LLM.render_chat`."""
        placeholders = {} if self.processor is None else self.processor.placeholders
        read = read_messages(messages, placeholders.keys())
        if self.manifest.encoder is not None:
            raise LlmcError(f"'{self.manifest.source.architecture}' is an encoder-decoder model "
                            f"without chat; give the encoder's input as the prompt")
        if not self._chat_template:
            raise LlmcError(f"'{self.manifest.source.architecture}' has no chat template; give the "
                            f"prompt as plain text, in the format that the model expects")
        return self._chat_template.render(read, tools, chat_template_kwargs, content_format,
                                          {str(own): text for own, text in placeholders.items()})

    def chat_prompt(self, messages: str | Sequence[Mapping[str, object]],
                    tools: Sequence[Mapping[str, object]] | None,
                    chat_template_kwargs: Mapping[str, object],
                    content_format: ContentFormat) -> list[int] | MediaPrompt:
        """See `LLM.chat_prompt`."""
        sources: list[MediaSource] = []
        if not isinstance(messages, str) and has_media(messages):
            processor = self.require_processor()
            messages, sources = split_media(messages)
            for source in sources:
                processor.require(source.modality)
        text = self.render_chat(messages, tools, chat_template_kwargs, content_format)
        # The template writes special tokens.
        return self._media_prompt(text, self._load_items(sources), add_special_tokens=False) \
            if sources else self.tokenize(text, add_special_tokens=False)

    @cached_property
    def processor(self) -> Processor | None:
        """See `LLM.processor`."""
        if not any(entry.path == PROCESSOR for entry in self.manifest.files):
            return None
        from llmc.runtime.multimodal.processor import read_processor  # only here: 50 ms
        processor = read_processor(self._case_dir / PROCESSOR)
        return processor if processor.placeholders else None

    def require_processor(self) -> Processor:
        """Return the processor.

        Raises:
            LlmcError: the model's prompts have neither images nor audio.
        """
        if self.processor is None:
            raise LlmcError(f"'{self.manifest.source.architecture}' takes neither images nor "
                            f"audio; give text only")
        return self.processor

    def media_prompt(self, prompt: str | Sequence[int], images: Sequence[Any],
                     audio: Sequence[Any], add_special_tokens: bool) -> MediaPrompt:
        """See `LLM.media_prompt`."""
        sources = [*(MediaSource("image", own) for own in images),
                   *(MediaSource("audio", own) for own in audio)]
        return self._media_prompt(prompt, self._load_items(sources), add_special_tokens)

    def _load_items(self, sources: Sequence[MediaSource]) -> list[MediaItem]:
        """Load and preprocess media: images, then audio."""
        return self.require_processor().process(
            [(source.modality, load_source(source)) for source in sources])

    def _media_prompt(self, prompt: str | Sequence[int], items: Sequence[MediaItem],
                      add_special_tokens: bool) -> MediaPrompt:
        """Put items in place of their placeholders in a prompt."""
        processor = self.require_processor()
        if isinstance(prompt, str):
            ids = self.tokenize(processor.expand_text(prompt, items),
                                add_special_tokens and processor.adds_special_tokens)
        else:
            ids = processor.expand_ids(read_token_ids(prompt, "the prompt"), items,
                                       lambda text: self.tokenize(text, add_special_tokens=False))
        return MediaPrompt(ids, processor.locate(ids, items))

    def completing(self, request: Request, sample: int) -> RunningCompletion:
        """Start one of a request's completions."""
        return RunningCompletion(request, sample, self.tokenizer,
                          () if self.manifest.encoder else request.prompt)

    def searching(self, request: Request, most: int) -> RunningBeamSearch:
        """Start a beam search with result tables of `most` rows."""
        return RunningBeamSearch(request, most, self.manifest.dims.vocab_size)

    def _decoding(self, params: SamplingParams) -> PreparedParams:
        self._check_params(params)
        ends = self._end_tokens(params)
        return PreparedParams(params, ends, self._bad_words(params, ends), self._grammar(params))

    def _grammar(self, params: SamplingParams) -> GrammarState | None:
        """Initial grammar state for structured output; None without."""
        if not any(getattr(params, name) for name in STRUCTURED_OUTPUT_FIELDS):
            return None
        if self.tokenizer is None or not self.manifest.tokenizer.eos_token_ids:
            raise LlmcError("structured output needs an EOS token, and this model was compiled "
                            "without a tokenizer that has one; compile it again with a tokenizer")
        with self._grammars_lock:  # creating the compiler takes a second
            if self._grammars is None:
                self._grammars = GrammarCompiler(self.tokenizer, self.tokenizer_file,
                                      self.manifest.dims.vocab_size,
                                      self.manifest.tokenizer.eos_token_ids, self.sandbox)
        return self._grammars.read(params)

    def _prediction(self, params: SamplingParams) -> list[int]:
        """Token ids of the expected output."""
        if not isinstance(params.prediction, str):
            self._check_tokens(params.prediction or ())
            return list(params.prediction or ())
        return self.tokenize(params.prediction, add_special_tokens=False)

    def _forced_tokens(self, params: SamplingParams, limit: int) -> dict[int, tuple[int, ...]]:
        """Tokens that an encoder-decoder model must generate, by number of tokens before."""
        encoder = self.manifest.encoder
        forced: dict[int, tuple[int, ...]] = {}
        if encoder is not None and encoder.forced_bos_token_ids:
            forced[0] = encoder.forced_bos_token_ids
        if encoder is not None and encoder.forced_eos_token_ids and not params.ignore_eos:
            forced[limit - 1] = encoder.forced_eos_token_ids
        return forced

    def _check_params(self, params: SamplingParams) -> None:
        """Check that the model and its target support the parameters."""
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name) or 0
            if self.manifest.target.spec.samples_on_device and count > MAX_LOGPROBS:
                raise LlmcError(f"{name} {count} exceeds {MAX_LOGPROBS}, the maximum for sampling "
                                f"on GPUs; ask for fewer, or compile with --target cpu")
        if self.manifest.encoder is not None and params.prompt_logprobs is not None:
            raise LlmcError(f"'{self.manifest.source.architecture}' is an encoder-decoder model, "
                            f"for which prompt_logprobs is unsupported; leave it out")
        if params.stop and self.tokenizer is None:
            raise LlmcError("stop strings need text, and this model was compiled without a "
                            "tokenizer; give stop_token_ids instead")
        if params.beam_width > self._max_slots:
            raise LlmcError(f"beam_width {params.beam_width} exceeds max_batch_size "
                            f"{self._max_slots}; load the model with a larger one")
        self._check_tokens(params.logit_bias)
        self._check_tokens(() if params.end_id is None else (params.end_id,))
        self._check_tokens(params.stop_token_ids)
        vocab_size = self.manifest.dims.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab_size:
                raise LlmcError(f"{name} {getattr(params, name)} exceeds the vocabulary of "
                                f"{vocab_size}")

    def _end_tokens(self, params: SamplingParams) -> frozenset[int]:
        ends = self.manifest.tokenizer.eos_token_ids if params.end_id is None else (params.end_id,)
        return frozenset(() if params.ignore_eos else ends) | {*params.stop_token_ids}

    def _bad_words(self, params: SamplingParams, ends: frozenset[int]) -> list[tuple[int, ...]]:
        """The bad words as token ids; each text with and without a leading space."""
        words: list[tuple[int, ...]] = []
        texts = [word for word in params.bad_words if isinstance(word, str)]
        if texts and self.tokenizer is None:
            raise _no_tokenizer()
        plain, spaced = (
            encode(self.tokenizer, each, add_special_tokens=False) if self.tokenizer else []
            for each in (texts, [f" {word}" for word in texts]))
        read = dict(zip(texts, zip(plain, spaced, strict=True), strict=True))
        for word in params.bad_words:
            variants = [*map(tuple, read[word])] if isinstance(word, str) else [tuple(word)]
            for ids in variants:
                self._check_tokens(ids)
                if not ids or (len(ids) == 1 and ids[0] in ends):
                    problem = "is the EOS token; use min_tokens or ignore_eos instead" if ids \
                        else "has no tokens; leave it out"
                    raise LlmcError(f"bad word {shown(word)} {problem}")
            words += variants
        if self.manifest.encoder is not None:
            words += [word for word in self.manifest.encoder.bad_words
                      if len(word) != 1 or word[0] not in ends]
        return words

    def _check_tokens(self, token_ids: Iterable[int], vocab_size: int | None = None) -> None:
        vocab_size = vocab_size or self.manifest.dims.vocab_size
        bad = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise LlmcError(f"token id {shown(bad)} is not in the vocabulary of {vocab_size}")

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Check a prompt's length and token ids.

        Raises:
            LlmcError: it is empty, too long, or has ids outside the vocabulary.
        """
        encoder = self.manifest.encoder
        if encoder is None:
            self.check_tokens(ids)
            return
        if encoder.vocab_size is None:
            raise LlmcError(f"'{self.manifest.source.architecture}' reads audio and no text; use "
                            f"transcribe")
        if not len(ids):
            raise LlmcError("the prompt is empty; give at least one token")
        if len(ids) > encoder.max_seq_len:
            raise LlmcError(f"the prompt has {len(ids)} tokens, the encoder takes at most "
                            f"{encoder.max_seq_len}; shorten it, or compile with a larger "
                            f"--mem_max_seq_len")
        self._check_tokens(ids, encoder.vocab_size)

    def check_tokens(self, ids: Sequence[int], past: int = 0) -> None:
        """Check new tokens of a decoder after `past` cached ones.

        Raises:
            LlmcError: there are no tokens, too many, or ids outside the vocabulary.
        """
        dims = self.manifest.dims
        if past and past + len(ids) > dims.max_seq_len:
            raise LlmcError(f"{past} cached and {len(ids)} new tokens exceed the KV cache of "
                            f"{dims.max_seq_len}")
        self.check_length(ids)
        self._check_tokens(ids)

    def check_length(self, ids: Sequence[int]) -> None:
        """Check the number of tokens of a prompt.

        Raises:
            LlmcError: it has no tokens, or too many.
        """
        if not ids:
            raise LlmcError("the prompt is empty; give at least one token")
        length = self.manifest.dims.max_seq_len
        if len(ids) > length:
            raise LlmcError(f"the prompt has {len(ids)} tokens, the KV cache has room for "
                            f"{length}; shorten it, or compile with a larger "
                            f"--max_seq_len, up to the model's maximum")


def _no_tokenizer() -> LlmcError:
    return LlmcError("this model was compiled without a tokenizer; give token ids instead of text, "
                     "or compile it again with its tokenizer.json")


def _default_params(manifest: Manifest) -> SamplingParams:
    """Sampling parameters of requests without any.

    Raises:
        LlmcError: a value of the manifest is out of range.
    """
    try:
        return SamplingParams(**(manifest.sampling.fields() if manifest.sampling else {}))
    except LlmcError as error:
        raise LlmcError(f"sampling in {MANIFEST_NAME} is not valid ({error}); compile the model "
                        f"again") from error


def _chat_template(manifest: Manifest, case_dir: Path, sandbox: Sandbox) -> ChatTemplate | None:
    config = manifest.tokenizer
    if not config.chat_templates:
        return None
    return ChatTemplate({name: case_dir / path for name, path in config.chat_templates.items()},
                        case_dir / (config.path or "") / "tokenizer_config.json", sandbox)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int,
              default: SamplingParams) -> list[SamplingParams]:
    """Sampling parameters of each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise LlmcError(f"params is {shown(params)}; give SamplingParams(…), or one for each "
                        f"prompt")
    if len(params) != count:
        raise LlmcError(f"there are {len(params)} SamplingParams for {count} prompts; give one for "
                        f"all, or one for each")
    return list(params)
