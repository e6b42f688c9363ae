"""The Python API: `LLM`, and `AsyncLLM` for asyncio, run a case directory."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import math
import os
import threading
import time
import types
import weakref
from collections import defaultdict, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from llmc.artifacts.adapter import MAX_RANK
from llmc.artifacts.manifest import DraftInfo, Manifest, read_manifest, verify_files
from llmc.errors import LlmcError, shown
from llmc.limits import MAX_SEQUENCES
from llmc.memory import memory_errors
from llmc.runtime.core.adapters import AdapterRegistry
from llmc.runtime.core.encoder_cache import EncoderCache
from llmc.runtime.core.image_memory import NO_IMAGES
from llmc.runtime.core.loop import (
    ClientCall,
    Loop,
    Output,
    OutputQueue,
    RequestHandle,
    Scheduling,
)
from llmc.runtime.core.pooling import (
    Classification,
    Input,
    Pooled,
    PoolingProcessor,
    Text,
    classifications,
    read_texts,
    relevance,
    vectors,
)
from llmc.runtime.core.request import (
    Completion,
    CompletionChunk,
    InputProcessor,
    Request,
    RunningBeamSearch,
    Token,
)
from llmc.runtime.core.scheduler import MOST_PRIORITY, Scheduler
from llmc.runtime.core.session import Session
from llmc.runtime.core.step import EncoderInput
from llmc.runtime.core.transcription import (
    Audio,
    Transcriber,
    Transcription,
    TranscriptionChunk,
    TranscriptionStream,
)
from llmc.runtime.engines import BLOCK_SIZE
from llmc.runtime.message_forms import ContentFormat
from llmc.runtime.metrics import together
from llmc.runtime.prompts import (
    MediaPrompt,
    Messages,
    Prompt,
    read_conversations,
    read_token_ids,
)
from llmc.runtime.replica import EngineConfig, find_devices, load_replica
from llmc.runtime.sampling.beam_search import Beams
from llmc.runtime.sampling.params import (
    STRUCTURED_OUTPUT_FIELDS,
    SamplingParams,
    is_unicode,
    listed,
    whole,
)
from llmc.runtime.sampling.speech_fallback import SpeechOptions
from llmc.runtime.sandbox import Sandbox
from llmc.runtime.speculation.config import Method, SpeculationConfig
from llmc.runtime.speculation.costs import plan_drafts

if TYPE_CHECKING:
    from llmc.runtime.multimodal.processor import Processor

_MAX_BATCH_SIZE = 16
_MAX_TEXTS = 256  # default of max_batch_size without a KV cache
_MAX_TOKENS, _MAX_TOKENS_CUDA = 2048, 8192  # defaults of max_num_batched_tokens
# Grammars compile in separate threads, so that other requests do not wait for them.
_GRAMMARS = ThreadPoolExecutor(2, "llmc-grammars")
# Parameters that all prompts of one `beam_search` share.
_SEARCH = ("beam_width", "length_penalty", "diversity_rate", "early_stopping")


# A name of a LoRA adapter for all prompts, or one for each; None: the model without an adapter.
AdapterNames = str | Sequence[str | None] | None


class _Loaded:
    """A compiled model on its devices; see `LLM`.

    Args:
        case_dir: output of `llmc compile`.
        device: devices to run on, a multiple of tp_size: one replica for each tp_size of them.
            None: one replica on all cores.
        max_batch_size: maximum number of concurrent sequences of a replica, up to 65,536; others
            wait. None: 16, or 256 without a KV cache, or the limit for which the model was
            compiled, if lower.
        verify: check the SHA-256 of every file first.
        check_step: maximum number of in-flight steps on a GPU.
        skip_step: tokens of each sequence that a GPU generates before the host reads the first.
        max_num_batched_tokens: maximum number of tokens of a step, at least max_batch_size; longer
            prompts are prefilled in chunks. None: 8192 on target cuda, 2048 on others.
        max_itl_ms: goal in milliseconds for the time between tokens (inter-token latency). A step
            that also prefills prompts gets as many of their tokens as fit, by the times of earlier
            steps. None: at most 512 in most steps.
        block_size: positions of a block of the KV cache, a power of two.
        kv_cache_tokens: positions of all blocks. None: as many as fit in memory.
        gpu_memory_utilization: fraction of a GPU's memory to use, above 0 and at most 1.
        prefix_reuse: prefix caching: sequences share the blocks of a common prefix.
        attention_backend: attention kernels of target cuda: `vanilla` (a plain reference kernel),
            `llmc`, or `cudnn` (cuDNN for prefill, llmc for decode). None or `fastest`: whichever is
            fastest.
        speculate: drafts that a step verifies: `ngram` drafts what followed the latest tokens
            earlier in the sequence; `draft` by the draft model that was compiled with the model.
            `off`: only predicted outputs (`SamplingParams.prediction`).
        num_speculative_tokens: drafts of a sequence in a step, from 1 to 16. `auto`: as many as
            pay off, by times of steps measured while loading.
        adapters: LoRA adapters by name, each a directory that `llmc adapter` wrote. The model must
            be compiled with `enable_lora`.
        max_loras: adapters that a step may mix; others wait for a slot, and the least recently used
            one makes room.
        max_lora_rank: highest rank of an adapter, up to 256. None: that of `adapters`, at least 16.
        encoder_cache_gb: gigabytes of encoded images and audio of each replica, which equal items
            of later prompts share.

    Raises:
        LlmcError: the case directory is missing, broken or of a newer format; the devices do not
            fit; memory is insufficient; or an argument has a wrong type or is out of range.
    """

    def __init_subclass__(cls) -> None:
        """Give a subclass its own constructor and the documentation of its arguments."""
        constructor = types.FunctionType(_Loaded.__init__.__code__, globals(), "__init__")
        functools.update_wrapper(constructor, _Loaded.__init__)
        del constructor.__wrapped__  # type: ignore[attr-defined]
        constructor.__qualname__, constructor.__kwdefaults__ = f"{cls.__name__}.__init__", \
            _Loaded.__init__.__kwdefaults__
        setattr(cls, "__init__", constructor)  # noqa: B010
        if cls.__doc__ is not None and _Loaded.__doc__ is not None:  # None with python -OO
            own, shared = inspect.cleandoc(cls.__doc__), inspect.cleandoc(_Loaded.__doc__)
            cls.__doc__ = f"{own}\n\n{shared[shared.index('Args:'):]}\n"

    def __init__(self, case_dir: str | Path, *, device: Sequence[int] | None = None,
                 max_batch_size: int | None = None, verify: bool = True, check_step: int = 2,
                 skip_step: int = 0, max_num_batched_tokens: int | None = None,
                 max_itl_ms: float | None = None,
                 block_size: int = BLOCK_SIZE, kv_cache_tokens: int | None = None,
                 gpu_memory_utilization: float = 0.9, prefix_reuse: bool = True,
                 attention_backend: str | None = None, speculate: Method = "off",
                 num_speculative_tokens: int | Literal["auto"] = "auto",
                 adapters: Mapping[str, str | Path] | None = None, max_loras: int = 8,
                 max_lora_rank: int | None = None, encoder_cache_gb: float = 1.0) -> None:
        self._loops: list[Loop] = []
        weakref.finalize(self, _close, self._loops)  # also at the end of the process
        self._dealt = 0  # completions distributed to replicas, round-robin
        check_step = _integer("check_step", check_step, 1)
        skip_step = _integer("skip_step", skip_step, 0)
        if max_batch_size is not None:
            max_batch_size = _integer("max_batch_size", max_batch_size, 1)
            if max_batch_size > MAX_SEQUENCES:
                raise LlmcError(f"max_batch_size {max_batch_size} is above {MAX_SEQUENCES}; give "
                                f"at most that, further sequences wait")
        max_itl = None if max_itl_ms is None else _positive("max_itl_ms", max_itl_ms) / 1e3
        speculation = SpeculationConfig.of(speculate, num_speculative_tokens)
        devices = None if device is None else _devices(device)
        if not isinstance(case_dir, str | os.PathLike):
            raise LlmcError(f"case_dir is {shown(case_dir)}; give the output directory of `llmc "
                            f"compile`")
        self.case_dir = Path(case_dir)
        self.manifest: Manifest = read_manifest(self.case_dir)
        if speculation.method == "draft" and self.manifest.draft is None:
            raise LlmcError(f"speculate is 'draft', but '{self.case_dir}' has no draft model; "
                            f"compile with --draft, or give ngram or off")
        _check_drafts(speculation, self.manifest.draft)
        verify_files(self.manifest, self.case_dir, hashes=verify)
        max_loras = _integer("max_loras", max_loras, 1)
        self._encoder_cache_bytes = int(_positive("encoder_cache_gb", encoder_cache_gb) * 1e9)
        self._adapters = _read_adapters(self.manifest, self.case_dir, adapters, max_lora_rank,
                                        verify)
        image = self.manifest.image
        whole_prompts = max_num_batched_tokens is None and image is not None \
            and image.bidirectional == "prompt"
        if max_num_batched_tokens is None:
            max_num_batched_tokens = _MAX_TOKENS_CUDA if self.manifest.target.kind == "cuda" \
                else _MAX_TOKENS
        limit = self.manifest.target.max_batch_size
        if max_batch_size is None:
            default = _MAX_BATCH_SIZE if self.manifest.chips[0].kept else _MAX_TEXTS
            max_batch_size = min(default, limit or default)
        if whole_prompts:  # a prompt with images is in one step, beside others' tokens
            max_num_batched_tokens = max(max_num_batched_tokens,
                                         self.manifest.dims.max_seq_len + max_batch_size)
        if limit is not None and max_batch_size > limit:
            raise LlmcError(f"max_batch_size {max_batch_size} exceeds {limit}, for which the model "
                            f"was compiled; lower it, or compile with a larger --max_batch_size")
        config = EngineConfig(
            max_batch_size,
            max(_integer("max_num_batched_tokens", max_num_batched_tokens, 1), max_batch_size),
            _power_of_two("block_size", block_size),
            None if kv_cache_tokens is None else _integer("kv_cache_tokens", kv_cache_tokens, 1),
            _fraction("gpu_memory_utilization", gpu_memory_utilization), attention_backend,
            speculates=speculation.method != "off", draft=speculation.method == "draft",
            max_loras=max_loras if self.manifest.takes_adapters else 0,
            max_lora_rank=self._adapters.fix_rank(),
            prompt_lookup=speculation.method == "ngram")
        if self.manifest.is_whole:  # a text is in one step
            config = replace(config, max_num_batched_tokens=max(
                config.max_num_batched_tokens, self.manifest.dims.max_seq_len))
        if self.manifest.features:  # a window is in one step
            config = replace(config, max_num_batched_tokens=max(
                config.max_num_batched_tokens, self.manifest.features.num_rows))
        self._max_batch_size = max_batch_size
        with memory_errors("load the model"):
            self._load(devices, config, speculation, prefix_reuse, check_step, skip_step, max_itl)

    def _load(self, devices: list[int] | None, config: EngineConfig,
              speculation: SpeculationConfig, prefix_reuse: bool, check_step: int,
              skip_step: int, max_itl: float | None) -> None:
        reader = InputProcessor(self.manifest, self.case_dir, self._max_batch_size)
        self._reader = reader
        self.tokenizer = self._reader.tokenizer
        try:
            for placements in find_devices(self.manifest, devices):
                engine = load_replica(self.manifest, self.case_dir, placements, config)
                encodes = self.manifest.mem_max_seq_len > 0
                dims = self.manifest.dims
                planner = plan_drafts(engine, speculation, dims.max_seq_len, dims.vocab_size,
                                      source=_short_source(self.manifest))
                self._loops.append(Loop(
                    engine, Scheduler(engine.limits, config.max_num_batched_tokens,
                                      max_itl=max_itl, reuse=prefix_reuse, drafts=planner,
                                      images=self._encoder_cache()),
                    self._reader.completing, self._reader.searching, encodes=encodes,
                    check_step=check_step, skip_step=skip_step, method=speculation.method,
                    pools=self.manifest.pooling is not None,
                    direct=self.manifest.pooling is not None and not self.manifest.target.spec.gpu
                    and not self.manifest.chips[0].kept))
            self._reader.max_model_len = self.max_model_len
            self.transcriber = Transcriber(self.manifest, self.case_dir, self._reader)
            self.pooling = PoolingProcessor(
                self.manifest, self.tokenizer, self.max_model_len,
                lambda messages: reader.render_chat(messages, None, {}, "string"))
        except BaseException:
            _close(self._loops)
            raise

    def _encoder_cache(self) -> EncoderCache | None:
        """A replica's cache of encoded images and audio; None if prompts have none."""
        width = self.manifest.embeds_width
        if not self.manifest.media or width is None or self.manifest.memory:
            return None
        row_bytes = 4 * width * (1 + self.manifest.num_deep_embeds)
        return EncoderCache(self._encoder_cache_bytes, row_bytes)

    def chat_prompt(self, messages: Messages, *,
                    tools: Sequence[Mapping[str, object]] | None = None,
                    chat_template_kwargs: Mapping[str, object] | None = None,
                    chat_template_content_format: ContentFormat = "auto") -> \
            list[int] | MediaPrompt:
        """Render messages with the model's chat template and tokenize them.

        Args:
            messages: a list with `role` and `content` each, in any format of the OpenAI API, or a
                text of the user. A content is a text or parts `{"type": "text", "text": …}`,
                `{"type": "image", "image": …}`, `{"type": "audio", "audio": …}` and others of
                OpenAI and transformers with a path, a data: URL, bytes, a PIL image or samples;
                arguments of tool calls are JSON text or objects. They are converted to the format
                that the template reads. Other keys are passed to the template.
            tools: tools that the model may call, as the chat template expects them.
            chat_template_kwargs: further variables of the chat template.
            chat_template_content_format: `string` makes every content a text, `openai` a list of
                parts. `auto`: the format that the template reads.

        Returns:
            Token ids, or a prompt with images or audio if the messages have any.

        Raises:
            LlmcError: the messages are invalid; the model has no chat template, or it fails on
                them; it is an encoder-decoder model; or it does not take the images or audio.
        """
        return self._reader.chat_prompt(messages, tools, chat_template_kwargs or {},
                                        chat_template_content_format)

    def render_chat(self, messages: str | Sequence[Mapping[str, object]], *,
                    tools: Sequence[Mapping[str, object]] | None = None,
                    chat_template_kwargs: Mapping[str, object] | None = None,
                    chat_template_content_format: ContentFormat = "auto") -> str:
        """Render messages as text; see `chat_prompt`."""
        return self._reader.render_chat(messages, tools, chat_template_kwargs or {},
                                        chat_template_content_format)

    @property
    def processor(self) -> Processor | None:
        """Preprocessing of images and audio in prompts; None if the model takes none."""
        return self._reader.processor

    def media_prompt(self, prompt: str | Sequence[int], *, images: Sequence[Any] = (),
                     audio: Sequence[Any] = (), add_special_tokens: bool = True) -> MediaPrompt:
        """Preprocess images and audio, and put their tokens in place of their placeholders.

        Args:
            prompt: a text or token ids with a placeholder for each item, such as
                `llm.processor.placeholders["image"]`.
            images: paths, data: URLs, encoded bytes or PIL images.
            audio: paths, data: URLs, encoded bytes, mono samples at the model's rate, or pairs of
                mono samples and their rate in Hz.
            add_special_tokens: add the tokenizer's special tokens to a text.

        Raises:
            LlmcError: the model takes none of them, one is invalid, or the placeholders do not
                match.
        """
        return self._reader.media_prompt(prompt, images, audio, add_special_tokens)

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Parameters of prompts without any: generation_config.json over llmc's defaults."""
        return self._reader.default_params

    @property
    def sandbox(self) -> Sandbox:
        """Child processes for jobs on untrusted input."""
        return self._reader.sandbox

    @property
    def tokenizer_file(self) -> Path | None:
        """Path of tokenizer.json; None if the model was compiled without a tokenizer."""
        return self._reader.tokenizer_file if self.tokenizer is not None else None

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text.

        Raises:
            LlmcError: the model has no tokenizer, or the text is not valid Unicode.
        """
        return self._reader.tokenize(text, add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Convert token ids to text.

        Raises:
            LlmcError: the model has no tokenizer, or an id is outside the vocabulary.
        """
        return self._reader.detokenize(token_ids, skip_special_tokens)

    @property
    def max_model_len(self) -> int:
        """Maximum sequence length, prompt included, limited by the model and by the KV cache."""
        return min([self.manifest.dims.max_seq_len, *(loop.cache_tokens for loop in self._loops)])

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of concurrent sequences."""
        return self._max_batch_size * len(self._loops)

    def check_health(self) -> None:
        """Check that the model still runs.

        Raises:
            LlmcError: a step failed, or this is closed.
        """
        self._first()
        for loop in self._loops:
            loop.check_health()

    def stalled_seconds(self) -> float:
        """Seconds since a busy replica completed a step or read requests; 0 while all are idle."""
        return max((loop.stalled_seconds() for loop in self._loops), default=0.0)

    def metrics(self) -> dict[str, Any]:
        """Statistics of all replicas.

        Returns:
            `running` sequences and `waiting` callers; `generated_tokens`, `tokens_per_second` of
            the last ten seconds, `finished` completions, requests that failed on NaN or
            infinite logits (`nan_logits`), `preemptions`; prompt tokens looked up and found in
            the prefix cache on first admission (`cache_queries`, `cache_hits`); verifications of
            drafts, drafts and accepted drafts (`spec_decode_drafts`, `spec_decode_draft_tokens`,
            `spec_decode_accepted_tokens`, and the last by position in
            `spec_decode_accepted_tokens_per_pos`); `max_loras`, and names of the adapters of
            running and of waiting sequences (`running_adapters`, `waiting_adapters`); `cache_usage`
            from 0 to 1 of `num_blocks` of `block_size` positions; and p50, p90 and p99 over the
            newest few thousand values of `time_to_first_token` and `inter_token_latency` in
            seconds.

        Raises:
            LlmcError: this is closed.
        """
        self._first()
        return together([loop.metrics for loop in self._loops])

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters, sorted."""
        return tuple(sorted(self._adapters.all()))

    @property
    def adapter_base(self) -> str:
        """SHA-256 of model_info.json, which adapters are compiled for; "": it takes none."""
        return self._adapters.base_sha256

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter, while requests run.

        Args:
            name: what requests call it.
            path: output of `llmc adapter`.

        Raises:
            LlmcError: the name is taken; the adapter is of another base, damaged, or of a rank
                above max_lora_rank; or the model takes no adapters.
        """
        self._first()
        self._adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter, while other requests run.

        Raises:
            LlmcError: there is no such adapter, or unfinished requests use it.
        """
        self._first()
        adapter = self._adapters.remove(name)
        users = sum(loop.forget_adapter(adapter) for loop in self._loops)
        if users:
            self._adapters.restore(adapter)
            raise LlmcError(f"the adapter '{adapter.name}' is used by {users} unfinished "
                            f"{'request' if users == 1 else 'requests'}; unload it when they have "
                            f"finished")

    def _requests(self, prompts: Prompt | Sequence[Prompt],
                  params: SamplingParams | Sequence[SamplingParams] | None,
                  adapter: AdapterNames) -> list[Request]:
        """Validate prompts, parameters and the names of adapters."""
        requests = self._reader.requests(prompts, params)
        if adapter is None:
            return requests
        names = [adapter] * len(requests) if isinstance(adapter, str) else list(adapter)
        if len(names) != len(requests):
            raise LlmcError(f"there are {len(names)} adapters for {len(requests)} prompts; give "
                            f"one for all, or one for each")
        found = [self._adapters.find(name) for name in names]
        return [replace(request, adapter=own)
                for request, own in zip(requests, found, strict=True)]

    def enable_drafts(self, enabled: bool) -> None:
        """Turn drafts on or off for sequences that are admitted later.

        A benchmark compares plain and speculative decoding of one loaded model by this. Tokens do
        not depend on it.

        Args:
            enabled: whether sequences have drafts, as `speculate` and their predictions say.

        Raises:
            LlmcError: this is closed.
        """
        self._first()
        for loop in self._loops:
            loop.drafts_enabled = enabled

    def _first(self) -> Loop:
        if not self._loops:
            raise LlmcError("this LLM is closed")
        self._loops[0].check_process()
        return self._loops[0]

    def _pieces(self, output: Output, all_beams: bool = False) -> Iterator[CompletionChunk]:
        """Chunks of an output; of a beam search its best sequence, or all."""
        assert not isinstance(output, Pooled)
        if isinstance(output, Token):
            yield output.owner.piece(output)
            return
        for sample, tokens in enumerate(output.sequences()[:None if all_beams else 1]):
            completion = self._reader.completing(output.request, sample)
            completion.num_cached_tokens = output.num_cached_tokens
            for token in tokens:
                last = completion.take(token, None)
                yield completion.piece(last)
                if last.finish_reason:
                    break

    def _transcribed(self, stream: TranscriptionStream, output: Output) -> None:
        """Pass an output of a transcription's request to it."""
        search = output if isinstance(output, RunningBeamSearch) else None
        for piece in self._pieces(output):
            stream.take(piece, search)

    def _calls(self, requests: list[Request], outbox: OutputQueue, scheduling: Scheduling) -> \
            list[tuple[Loop, ClientCall]]:
        """Distribute the completions evenly to the replicas."""
        self._first()
        count = len(self._loops)
        starts = {}
        for request in requests:
            starts[request.index], self._dealt = self._dealt, self._dealt + request.params.n

        def share(of: int) -> Callable[[Request], range]:
            return lambda request: range((of - starts[request.index]) % count, request.params.n,
                                         count)

        return [(loop, ClientCall(requests, share(index), outbox, scheduling))
                for index, loop in enumerate(self._loops)]


class LLM(_Loaded):
    """A loaded model for any number of threads."""

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End running requests and free the KV caches."""
        _close(self._loops)

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 priority: int = 0, tenant: str | None = None, cache_salt: str | None = None,
                 adapter: AdapterNames = None) -> list[Completion]:
        """Complete each prompt; see `stream`. The n completions of a prompt are consecutive."""
        return sorted(self.complete(prompts, params, priority=priority, tenant=tenant,
                                    cache_salt=cache_salt, adapter=adapter),
                      key=lambda c: (c.index, c.sample))

    def chat(self, messages: Messages | Sequence[Messages],
             params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             tools: Sequence[Mapping[str, object]] | None = None,
             chat_template_kwargs: Mapping[str, object] | None = None,
             priority: int = 0, adapter: AdapterNames = None) -> list[Completion]:
        """Complete one or several conversations, rendered by the model's chat template.

        Args:
            messages: one conversation, a list of messages with `role` and `content`, or a text of
                the user; or a list of such lists.
            params: for all conversations, or one for each.
            tools: tools that the model may call, as the chat template expects them.
            chat_template_kwargs: further variables of the chat template.
            priority, adapter: see `stream`.

        Raises:
            LlmcError: see `chat_prompt` and `stream`.
        """
        return self.generate([self.chat_prompt(each, tools=tools,
                                               chat_template_kwargs=chat_template_kwargs)
                              for each in read_conversations(messages)], params, priority=priority,
                             adapter=adapter)

    def transcribe(self, audio: Audio, *, language: str | None = None, task: str = "transcribe",
                   timestamps: bool = False, prompt: str = "",
                   params: SamplingParams | None = None, options: SpeechOptions | None = None,
                   priority: int = 0, tenant: str | None = None) -> Transcription:
        """Transcribe speech of any length up to an hour.

        Audio longer than a window of the model (30 seconds of Whisper) is always decoded with
        timestamps, at which the next window begins.

        Args:
            audio: path of a file, its bytes, or a mono waveform, float [samples] at the model's
                rate (16,000 Hz).
            language: code of the spoken language, such as `en`; None: it is detected.
            task: `transcribe`, or `translate` to English.
            timestamps: split the text into segments with start and end.
            prompt: text before the audio, for names and style.
            params: sampling parameters, such as `SamplingParams(beam_width=5)`; None: greedy.
            options: when windows are decoded again or skipped; None: never.
            priority, tenant: see `stream`.

        Raises:
            LlmcError: the model does not transcribe, or not this language or task; the audio is
                none, is damaged or too long; or a step failed.
        """
        *_, last = self.stream_transcription(
            audio, language=language, task=task, timestamps=timestamps, prompt=prompt,
            params=params, options=options, priority=priority, tenant=tenant)
        assert last.result is not None
        return last.result

    def stream_transcription(self, audio: Audio, *, language: str | None = None,
                             task: str = "transcribe", timestamps: bool = False, prompt: str = "",
                             params: SamplingParams | None = None,
                             options: SpeechOptions | None = None, priority: int = 0,
                             tenant: str | None = None) -> Iterator[TranscriptionChunk]:
        """Yield parts of a transcription as soon as they are final, and the whole with the last.

        Without timestamps and options that drop results, parts are tokens; else the segments of a
        window.

        Args, Raises: see `transcribe`.
        """
        scheduling = _scheduling(priority, tenant, None)
        stream = TranscriptionStream(self.transcriber.run(
            audio, language, task, timestamps, prompt, params, options))
        while (request := stream.advance()) is not None:
            yield from stream.chunks()
            for output in self._outputs([request], scheduling):
                self._transcribed(stream, output)
                yield from stream.chunks()
        yield from stream.chunks()

    def complete(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 priority: int = 0, tenant: str | None = None, cache_salt: str | None = None,
                 adapter: AdapterNames = None,
                 progress: Callable[[CompletionChunk], object] = lambda piece: None) -> \
            Iterator[Completion]:
        """Yield each completion as soon as it is finished; see `stream`.

        Args:
            progress: called with each chunk.
        """
        requests = self._requests(prompts, params, adapter)
        scheduling = _scheduling(priority, tenant, cache_salt)
        return _completions(requests, self._stream(requests, scheduling), progress)

    def stream(self, prompts: Prompt | Sequence[Prompt],
               params: SamplingParams | Sequence[SamplingParams] | None = None, *,
               priority: int = 0, tenant: str | None = None, cache_salt: str | None = None,
               adapter: AdapterNames = None,
               arrivals: Sequence[float] | None = None) -> Iterator[CompletionChunk]:
        """Yield each token as it is generated, those of a beam search at its end.

        Closing the iterator cancels the requests. Generation pauses while the iterator is not read.

        Args:
            prompts: one or several, each text or token ids, of any lengths. With an encoder-decoder
                model they are the encoder's input.
            params: for all prompts, or one for each; None: `default_sampling_params`.
            priority: from -100 to 100, lower ones go first.
            tenant: name of the user or customer. While others wait, tenants have equal shares of
                the slots, and so have the calls of a tenant. None: the call is a separate tenant.
            cache_salt: a text; only calls with the same one share cached prefixes. None: shared
                with other calls without one.
            adapter: name of a loaded LoRA adapter, for all prompts, or one for each; None: the
                model without an adapter.
            arrivals: arrival time of each prompt, in seconds after the first chunk is requested;
                None: all at once.

        Raises:
            LlmcError: a prompt is neither text nor token ids of the vocabulary, or is empty or
                longer than the KV cache; params do not fit the model or the number of prompts; no
                token is allowed; there is no such adapter; or a step failed.
        """
        requests = self._requests(prompts, params, adapter)
        return self._stream(requests, _scheduling(priority, tenant, cache_salt),
                            _arrivals(arrivals, len(requests)))

    def embed(self, texts: Text | Sequence[Text], *, dimensions: int | None = None,
              prompt_name: str | None = None, truncate_prompt_tokens: int | None = None,
              priority: int = 0, tenant: str | None = None) -> np.ndarray:
        """Return a vector for each text, float32 [num_texts, width].

        Args:
            texts: one or several, each text or token ids with special tokens.
            dimensions: length of the vectors, for a model trained with Matryoshka representation
                learning; None: the model's width. A model that normalizes its vectors normalizes
                the shortened ones.
            prompt_name: name of the model's prompt to prepend to texts, such as `query`; None: the
                model's default, if it has one.
            truncate_prompt_tokens: maximum number of tokens of a text, from 1, or -1 for the
                model's. Longer texts lose their end. None: longer ones than the model's are
                refused.
            priority, tenant: see `stream`.

        Raises:
            LlmcError: the model was not compiled for task embed; a text is empty or too long; or
                an argument is out of range.
        """
        info = self.pooling.info("embed", "embed")
        vectors([], info, dimensions)
        inputs = self.pooling.inputs(read_texts(texts), truncate_prompt_tokens,
                                     self.pooling.prompt(info, prompt_name))
        return vectors(self.pool(inputs, priority=priority, tenant=tenant), info, dimensions)

    def classify(self, texts: Text | Sequence[Text], *, truncate_prompt_tokens: int | None = None,
                 priority: int = 0, tenant: str | None = None) -> \
            list[Classification | list[Classification]]:
        """Return scores of labels for each text; of a token classifier, for each of its tokens.

        Args: see `embed`.

        Raises:
            LlmcError: the model is not a classifier; see `embed`.
        """
        info = self.pooling.info("classify", "classify", "token_classify")
        inputs = self.pooling.inputs(read_texts(texts), truncate_prompt_tokens)
        return [classifications(row, info)
                for row in self.pool(inputs, priority=priority, tenant=tenant)]

    def score(self, query: str, documents: str | Sequence[str], *,
              truncate_prompt_tokens: int | None = None, priority: int = 0,
              tenant: str | None = None) -> list[float]:
        """Return the relevance of each document to a query.

        A reranker (a classifier with one label) reads query and document together. Of an embedding
        model it is the cosine similarity of their vectors.

        Args: see `embed`.

        Raises:
            LlmcError: the model has several labels; see `embed`.
        """
        inputs = self.pooling.scored(query, documents, truncate_prompt_tokens)
        info = self.pooling.info("score", "classify", "embed")
        return relevance(self.pool(inputs, priority=priority, tenant=tenant), info)

    def pool(self, inputs: Sequence[Input], *, priority: int = 0, tenant: str | None = None) -> \
            list[np.ndarray]:
        """Return the rows of inputs that `pooling` tokenized, before any activation."""
        requests, scheduling = self.pooling.requests(inputs), _scheduling(priority, tenant, None)
        self._first()
        for loop in self._loops:
            made = loop.pool_now(requests)
            if made is not None:
                by_index = {own.index: row for own, row in zip(requests, made, strict=True)}
                return [by_index[index] for index in range(len(inputs))]
        rows = {output.owner.request.index: output.row
                for output in self._outputs(requests, scheduling) if isinstance(output, Pooled)}
        return [rows[index] for index in range(len(inputs))]

    def logits(self, token_ids: Sequence[int], source: Sequence[int] | None = None) -> np.ndarray:
        """Logits of one sequence.

        Args:
            token_ids: the whole sequence; of an encoder-decoder model, the decoder's tokens.
            source: the encoder's input; encoder-decoder models only.

        Returns:
            float32 [num_tokens, vocab_size].
        """
        session = self.session(1, None if source is None else [source])
        try:
            return session.extend([read_token_ids(token_ids, "token_ids")], all_logits=True)
        finally:
            session.close()

    def session(self, batch_size: int, sources: Sequence[Sequence[int]] | None = None) -> Session:
        """Open step by step access to the first replica, for checks and experiments.

        Args:
            batch_size: number of sequences.
            sources: the encoder's input, token ids of each sequence; encoder-decoder models only.
        """
        self._reader.require_generation()
        if (sources is None) != (self.manifest.encoder is None):
            raise LlmcError(f"'{self.manifest.source.architecture}' has "
                            f"{'an' if sources is None else 'no'} encoder: "
                            f"{'give' if sources is None else 'leave out'} sources")
        batch_size = _integer("batch_size", batch_size, 1)
        if batch_size > self._max_batch_size:
            raise LlmcError(f"batch_size {batch_size} is not from 1 to max_batch_size "
                            f"{self._max_batch_size}")
        return Session(self._first(), self._reader, batch_size, sources)

    def beam_search(self, prompts: Prompt | Sequence[Prompt],
                    params: SamplingParams | Sequence[SamplingParams]) -> Beams:
        """Return all sequences of a beam search; `generate` returns the best of each prompt.

        Raises:
            LlmcError: see `stream`; or there is no prompt, beam_width is 1, or prompts differ in
                beam_width, length_penalty, diversity_rate or early_stopping.
        """
        requests = self._reader.requests(prompts, params)
        if not requests:
            raise LlmcError("there is no prompt; give at least one")
        for name in _SEARCH:
            values = list(dict.fromkeys(getattr(r.params, name) for r in requests))
            if len(values) > 1:
                raise LlmcError(f"one beam search has one {name} for all prompts, not {values[0]} "
                                f"and {values[1]}; use generate, or separate searches")
        if requests[0].params.beam_width == 1:
            raise LlmcError("beam_width 1 is not a beam search; give SamplingParams(beam_width=2) "
                            "or more, or use generate")
        found = {output.request.index: output.beams()
                 for output in self._outputs(requests, Scheduling())
                 if isinstance(output, RunningBeamSearch)}
        return Beams.join([found[request.index] for request in requests])

    def _outputs(self, requests: list[Request], scheduling: Scheduling,
                 arrivals: Sequence[float] | None = None) -> Iterator[Output]:
        """Yield the outputs of requests until all have finished."""
        ready = threading.Event()
        work = RequestHandle(ready.set)
        start, upcoming = time.monotonic(), deque(_by_arrival(requests, arrivals))
        try:
            while upcoming or work.left:
                wait = upcoming[0][0] + start - time.monotonic() if upcoming else None
                if wait is not None and wait <= 0:
                    work.begin(self._calls(upcoming.popleft()[1], work.outbox, scheduling))
                    continue
                outputs = work.take()
                if not outputs:
                    ready.wait(wait)
                    ready.clear()
                for output in outputs:
                    yield output
                    work.check_process()  # the generator may continue in a forked child
        finally:
            work.abort()

    def _stream(self, requests: list[Request], scheduling: Scheduling,
                arrivals: Sequence[float] | None = None) -> Iterator[CompletionChunk]:
        for output in self._outputs(requests, scheduling, arrivals):
            yield from self._pieces(output)


class AsyncLLM(_Loaded):
    """A loaded model for any number of asyncio tasks."""

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End running requests and free the KV caches."""
        await asyncio.to_thread(_close, self._loops)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, *,
                       priority: int = 0, tenant: str | None = None,
                       cache_salt: str | None = None,
                       adapter: str | None = None) -> AsyncIterator[CompletionChunk]:
        """Stream one prompt; see `LLM.stream`."""
        async with aclosing(self.stream([prompt], params, priority=priority, tenant=tenant,
                                        cache_salt=cache_salt, adapter=adapter)) as pieces:
            async for piece in pieces:
                yield piece

    async def chat(self, messages: Messages, params: SamplingParams | None = None, *,
                   tools: Sequence[Mapping[str, object]] | None = None,
                   chat_template_kwargs: Mapping[str, object] | None = None,
                   priority: int = 0, adapter: str | None = None) -> \
            AsyncIterator[CompletionChunk]:
        """Stream one conversation, rendered by the model's chat template; see `LLM.chat`."""
        prompt = await asyncio.to_thread(self.chat_prompt, messages, tools=tools,
                                         chat_template_kwargs=chat_template_kwargs)
        async with aclosing(self.stream([prompt], params, priority=priority,
                                        adapter=adapter)) as pieces:
            async for piece in pieces:
                yield piece

    async def stream(self, prompts: Prompt | Sequence[Prompt],
                     params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                     priority: int = 0, tenant: str | None = None, cache_salt: str | None = None,
                     adapter: AdapterNames = None, all_beams: bool = False) -> \
            AsyncGenerator[CompletionChunk, None]:
        """Yield each token of all completions as it is generated; see `LLM.stream`.

        Closing the iterator, or canceling its task, cancels the requests.

        Args:
            all_beams: of a beam search yield all sequences, best first, as samples 0, 1, …; else
                the best.
        """
        async with aclosing(self.stream_batches(
                prompts, params, priority=priority, tenant=tenant, cache_salt=cache_salt,
                adapter=adapter, all_beams=all_beams)) as batches:
            async for pieces in batches:
                for piece in pieces:
                    yield piece

    async def stream_batches(self, prompts: Prompt | Sequence[Prompt],
                             params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                             priority: int = 0, tenant: str | None = None,
                             cache_salt: str | None = None, adapter: AdapterNames = None,
                             all_beams: bool = False) -> \
            AsyncGenerator[list[CompletionChunk], None]:
        """Yield all available tokens at once; see `stream`. A slow reader has less overhead."""
        threads = _GRAMMARS if _has_grammar(params) else None  # None: asyncio's default
        requests = await asyncio.get_running_loop().run_in_executor(
            threads, self._requests, prompts, params, adapter)
        scheduling = _scheduling(priority, tenant, cache_salt)
        async with aclosing(self._outputs(requests, scheduling)) as batches:
            async for batch in batches:
                yield [piece for output in batch for piece in self._pieces(output, all_beams)]

    async def transcribe(self, audio: Audio, *, language: str | None = None,
                         task: str = "transcribe", timestamps: bool = False, prompt: str = "",
                         params: SamplingParams | None = None,
                         options: SpeechOptions | None = None, priority: int = 0,
                         tenant: str | None = None) -> Transcription:
        """Transcribe speech of any length up to an hour; see `LLM.transcribe`."""
        async with aclosing(self.stream_transcription(
                audio, language=language, task=task, timestamps=timestamps, prompt=prompt,
                params=params, options=options, priority=priority, tenant=tenant)) as chunks:
            async for chunk in chunks:
                last = chunk
        assert last.result is not None
        return last.result

    async def stream_transcription(
            self, audio: Audio, *, language: str | None = None, task: str = "transcribe",
            timestamps: bool = False, prompt: str = "", params: SamplingParams | None = None,
            options: SpeechOptions | None = None, priority: int = 0,
            tenant: str | None = None) -> AsyncGenerator[TranscriptionChunk, None]:
        """Yield parts of a transcription; see `LLM.stream_transcription`."""
        scheduling = _scheduling(priority, tenant, None)
        stream = TranscriptionStream(self.transcriber.run(
            audio, language, task, timestamps, prompt, params, options))
        while (request := await asyncio.to_thread(stream.advance)) is not None:
            for chunk in stream.chunks():
                yield chunk
            async with aclosing(self._outputs([request], scheduling)) as batches:
                async for batch in batches:
                    for output in batch:
                        self._transcribed(stream, output)
                    for chunk in stream.chunks():
                        yield chunk
        for chunk in stream.chunks():
            yield chunk

    async def embed(self, texts: Text | Sequence[Text], *, dimensions: int | None = None,
                    prompt_name: str | None = None, truncate_prompt_tokens: int | None = None,
                    priority: int = 0, tenant: str | None = None) -> np.ndarray:
        """Return a vector for each text; see `LLM.embed`."""
        info = self.pooling.info("embed", "embed")
        vectors([], info, dimensions)
        inputs = await asyncio.to_thread(
            self.pooling.inputs, read_texts(texts), truncate_prompt_tokens,
            self.pooling.prompt(info, prompt_name))
        return vectors(await self.pool(inputs, priority=priority, tenant=tenant), info, dimensions)

    async def classify(self, texts: Text | Sequence[Text], *,
                       truncate_prompt_tokens: int | None = None, priority: int = 0,
                       tenant: str | None = None) -> list[Classification | list[Classification]]:
        """Return scores of labels for each text; see `LLM.classify`."""
        info = self.pooling.info("classify", "classify", "token_classify")
        inputs = await asyncio.to_thread(self.pooling.inputs, read_texts(texts),
                                         truncate_prompt_tokens)
        return [classifications(row, info)
                for row in await self.pool(inputs, priority=priority, tenant=tenant)]

    async def score(self, query: str, documents: str | Sequence[str], *,
                    truncate_prompt_tokens: int | None = None, priority: int = 0,
                    tenant: str | None = None) -> list[float]:
        """Return the relevance of each document to a query; see `LLM.score`."""
        inputs = await asyncio.to_thread(self.pooling.scored, query, documents,
                                         truncate_prompt_tokens)
        info = self.pooling.info("score", "classify", "embed")
        return relevance(await self.pool(inputs, priority=priority, tenant=tenant), info)

    async def pool(self, inputs: Sequence[Input], *, priority: int = 0,
                   tenant: str | None = None) -> list[np.ndarray]:
        """Return the rows of inputs that `pooling` tokenized, before any activation."""
        requests = self.pooling.requests(inputs)
        rows: dict[int, np.ndarray] = {}
        scheduling = _scheduling(priority, tenant, None)
        async with aclosing(self._outputs(requests, scheduling)) as batches:
            async for batch in batches:
                rows.update((output.owner.request.index, output.row) for output in batch
                            if isinstance(output, Pooled))
        return [rows[index] for index in range(len(inputs))]

    async def _outputs(self, requests: list[Request], scheduling: Scheduling) -> \
            AsyncGenerator[list[Output], None]:
        """Yield all available outputs at once, until all requests have finished."""
        ready, alarm = asyncio.Event(), _Alarm.of_running_loop()
        work = RequestHandle(lambda: alarm.ring(ready))
        try:
            work.begin(self._calls(requests, work.outbox, scheduling))
            while work.left:
                outputs = work.take()
                if outputs:
                    yield outputs
                else:
                    await ready.wait()
                    ready.clear()
        finally:
            work.abort()


class _Alarm:
    """Sets events of an asyncio loop from other threads, those of a step at once.

    Waking the loop takes a system call, in which a thread loses the GIL.
    """

    _ALL: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Alarm]] = \
        weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._events: list[asyncio.Event] = []

    @staticmethod
    def of_running_loop() -> _Alarm:
        loop = asyncio.get_running_loop()
        return _Alarm._ALL.setdefault(loop, _Alarm(loop))

    def ring(self, event: asyncio.Event) -> None:
        with self._lock:
            self._events.append(event)
            first = len(self._events) == 1
        loop = self._loop()
        if first and loop is not None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            event.set()


def _short_source(manifest: Manifest) -> EncoderInput | None:
    """The shortest input of the encoder, to time decoding steps with; None without an encoder."""
    if manifest.memory:
        return NO_IMAGES
    if not manifest.mem_max_seq_len:
        return None
    features = manifest.features
    return np.zeros((1, features.width), np.float32) if features else [0]


def _read_adapters(manifest: Manifest, case_dir: Path, adapters: object, max_rank: object,
                   verify: bool) -> AdapterRegistry:
    """Load the adapters that are given to `LLM`."""
    if max_rank is not None:
        max_rank = _integer("max_lora_rank", max_rank, 1)
        if max_rank > MAX_RANK:
            raise LlmcError(f"max_lora_rank {max_rank} is above {MAX_RANK}")
    registry = AdapterRegistry(manifest, case_dir, max_rank, verify)
    if adapters is not None and not isinstance(adapters, Mapping):
        raise LlmcError(f"adapters is {shown(adapters)}; give directories by name, such as "
                        f"{{'name': 'DIR'}}")
    for name, path in (adapters or {}).items():
        registry.load(name, path)
    return registry


def _has_grammar(params: SamplingParams | Sequence[SamplingParams] | None) -> bool:
    each = [params] if isinstance(params, SamplingParams) else params or ()
    return any(getattr(own, name) for own in each for name in STRUCTURED_OUTPUT_FIELDS)


def _close(loops: list[Loop]) -> None:
    for loop in loops:
        loop.close()
    loops.clear()


def _by_arrival(requests: list[Request], arrivals: Sequence[float] | None) -> \
        list[tuple[float, list[Request]]]:
    """Groups of requests with equal arrival times, in order."""
    if arrivals is None:
        return [(0.0, requests)] if requests else []
    order = sorted(range(len(requests)), key=lambda index: arrivals[index])
    return [(arrivals[index], [requests[index]]) for index in order]


def _arrivals(value: object, count: int) -> list[float] | None:
    """Read the arrival times of `count` prompts."""
    if value is None:
        return None
    try:
        read = [float(seconds) for seconds in listed(value)]
    except (TypeError, ValueError):
        read = []
    if len(read) != count or not all(0 <= seconds < math.inf for seconds in read):
        raise LlmcError(f"arrivals is {shown(value)}; give seconds from 0 for each of {count} "
                        f"prompts")
    return read


def _completions(requests: Sequence[Request], pieces: Iterator[CompletionChunk],
                 progress: Callable[[CompletionChunk], object]) -> Iterator[Completion]:
    """Yield each completion as soon as it is finished."""
    chunks: dict[tuple[int, int], list[CompletionChunk]] = defaultdict(list)
    for piece in pieces:
        progress(piece)
        chunks[piece.index, piece.sample].append(piece)
        if piece.finish_reason:
            request = requests[piece.index]
            yield Completion.of(request.source, chunks.pop((piece.index, piece.sample)))


def _check_drafts(speculation: SpeculationConfig, draft: DraftInfo | None) -> None:
    """Reject more drafts than a pass of the draft model has."""
    if speculation.method != "draft" or draft is None or draft.max_drafts is None:
        return
    count, most = speculation.num_speculative_tokens, draft.max_drafts
    if count is not None and count > most:
        raise LlmcError(f"num_speculative_tokens is {count}, but the draft model of kind "
                        f"{draft.kind} drafts {most} tokens at once; give at most {most}, or auto")


def _integer(name: str, value: object, least: int) -> int:
    """Read an integer argument."""
    try:
        read = whole(value)
    except (TypeError, ValueError) as error:
        raise LlmcError(f"{name} is {shown(value)}; give {error}") from None
    if read < least:
        raise LlmcError(f"{name} {read} is below {least}; give {least} or more")
    return read


def _scheduling(priority: object, tenant: object, cache_salt: object) -> Scheduling:
    """Read the scheduling arguments of a call.

    The salt is hashed with BLAKE2b and blocks with SHA-256, so tokens cannot reproduce a salt's
    hash.
    """
    level = _integer("priority", priority, -MOST_PRIORITY)
    if level > MOST_PRIORITY:
        raise LlmcError(f"priority {level} is above {MOST_PRIORITY}")
    salt = _optional_text("cache_salt", cache_salt)
    hashed = b"" if salt is None else hashlib.blake2b(
        salt.encode(), digest_size=32, person=b"cache_salt").digest()
    return Scheduling(level, _optional_text("tenant", tenant), hashed)


def _optional_text(name: str, value: object) -> str | None:
    """Read an argument that is a non-empty text or None."""
    if value is not None and not (isinstance(value, str) and value and is_unicode(value)):
        raise LlmcError(f"{name} is {shown(value)}; give a text that is not empty, or None")
    return value


def _power_of_two(name: str, value: object) -> int:
    """Read an argument that is a power of two."""
    read = _integer(name, value, 1)
    if read & (read - 1):
        raise LlmcError(f"{name} {read} is not a power of two; give one such as {BLOCK_SIZE}")
    return read


def _fraction(name: str, value: object) -> float:
    """Read an argument that is a fraction."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LlmcError(f"{name} is {shown(value)}; give a number above 0, at most 1")
    if not 0 < value <= 1:
        raise LlmcError(f"{name} {value} is not above 0 and at most 1")
    return float(value)


def _positive(name: str, value: object) -> float:
    """Read an argument that is a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) \
            or not 0 < value < float("inf"):
        raise LlmcError(f"{name} is {shown(value)}; give a number above 0")
    return float(value)


def _devices(value: object) -> list[int]:
    try:
        return [whole(number) for number in listed(value)]
    except (TypeError, ValueError):
        raise LlmcError(f"device is {shown(value)}; give a list of numbers such as [0, 1]") \
            from None
