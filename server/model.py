"""A served model: its name, tokenizer, chat template and generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import jinja2

from llmc.errors import LlmcError, shortened
from llmc.runtime.chat_template import DEFAULT, TOOL_USE
from llmc.runtime.core.llm import AsyncLLM
from llmc.runtime.core.request import CompletionChunk
from llmc.runtime.message_forms import ContentFormat
from llmc.runtime.multimodal.items import PLURALS, Modality
from llmc.runtime.multimodal.messages import WIRE_PARTS, MediaSource, split_media
from llmc.runtime.prompts import EmbedsPrompt, MediaPrompt
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.token_text import token_bytes, token_text
from llmc.runtime.tokenizer import read_config
from llmc.server.errors import ApiError, prompt_too_long
from llmc.server.media import MediaLimits, MediaReader
from llmc.server.offload import Offload
from llmc.server.prompt_embeds import read_prompt_embeds
from llmc.server.protocol import MAX_CHOICES, Message, Part, Prediction
from llmc.server.reasoning import REASONING_MARKS, recognized_reasoning
from llmc.server.tool_parsers import TOOL_PARSERS, recognized_parser

GenerationConfig = Literal["auto", "none"]
_NOUNS: Mapping[Modality, str] = {"image": "an image", "audio": "audio"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
# Fields of a tokenizer's configuration that are file names.
_PATHS = ("name_or_path", "vocab_file", "merges_file", "tokenizer_file", "special_tokens_map_file")


@dataclass(frozen=True)
class GenerationJob:
    """Prompts of a request, with `n` choices for each.

    Args:
        prompts: token ids; -1 for rows of embeddings, and tokens of images in their place.
        params: sampling parameters.
        priority: of its sequences.
        adapter: LoRA adapter to generate with.
        echo: text for each prompt that its choices begin with. None: no echo.
        with_rows: the first prompts, if these have embeddings, images or audio.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    priority: int = 0
    echo: Sequence[str] | None = None
    adapter: str | None = None
    with_rows: Sequence[EmbedsPrompt | MediaPrompt] = ()

    def __post_init__(self) -> None:
        check_choices(len(self.prompts), self.n)

    @property
    def n(self) -> int:
        return max(self.params.n, self.params.beam_width)

    @property
    def inputs(self) -> Sequence[Sequence[int] | EmbedsPrompt | MediaPrompt]:
        """What the model gets."""
        return [*self.with_rows, *self.prompts[len(self.with_rows):]] if self.with_rows \
            else self.prompts

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def stop_reason(self, piece: CompletionChunk) -> int | None:
        """Return the id of `stop_token_ids` that ended a completion, as in vLLM."""
        return piece.token_id if piece.finish_reason == "stop" and \
            piece.token_id in self.params.stop_token_ids else None

    def choice(self, piece: CompletionChunk) -> int:
        """Return the index of a chunk's choice."""
        return piece.index * self.n + piece.sample


def check_choices(prompts: int, n: int) -> None:
    """Raise ApiError if a request has more than `MAX_CHOICES` choices."""
    if prompts * n > MAX_CHOICES:
        raise ApiError(f"{prompts} prompts with {n} choices each exceed the maximum of "
                       f"{MAX_CHOICES} choices; send several requests")


class Model:
    """A loaded case directory under a name.

    Args:
        llm: the model.
        name: in requests and answers.
        tool_call_parser: key of `TOOL_PARSERS`. None: that of the chat template.
        reasoning_parser: key of `REASONING_MARKS`, `auto` for that of the chat template, or `none`.
        content_format: format of messages' content; see `LLM.chat_prompt`.
        generation_config: `auto`: sampling defaults of the model; `none`: those of llmc.
        prompt_embeds: whether requests may have `prompt_embeds`.
        media: limits of images and audio.

    Attributes:
        requests: number of running requests.
        shows_tools: whether the chat template renders tools.
        special_tokens: texts of the tokenizer's special tokens.
        sampling_defaults: attributes of `SamplingParams` for requests without them.
        logged_defaults: the same, as logged.
        media: reader of images and audio; None if the model takes none.
    """

    def __init__(self, llm: AsyncLLM, name: str, tool_call_parser: str | None = None,
                 reasoning_parser: str = "auto", content_format: ContentFormat = "auto",
                 generation_config: GenerationConfig = "auto",
                 prompt_embeds: bool = False, media: MediaLimits | None = None) -> None:
        self.llm, self.name = llm, name
        self.media = None if llm.processor is None else \
            MediaReader(llm.processor, media or MediaLimits())
        self._prompt_embeds = prompt_embeds
        if prompt_embeds and llm.manifest.prompt_embeds_width is None:
            raise LlmcError("enable_prompt_embeds is given, but the model was compiled without "
                            "prompt embeddings; compile it again with --enable_prompt_embeds")
        self._content_format = content_format
        sampling = llm.manifest.sampling if generation_config == "auto" else None
        self.sampling_defaults: Mapping[str, Any] = {} if sampling is None else sampling.fields()
        self.logged_defaults: Mapping[str, Any] = {
            "temperature": SamplingParams.temperature,
            **({} if sampling is None else sampling.model_dump(exclude_defaults=True))}
        self.offload = Offload(llm)
        self.created, self.requests = int(time.time()), 0
        templates = llm.manifest.tokenizer.chat_templates
        path = templates.get(TOOL_USE, templates.get(DEFAULT))
        template = "" if path is None else (llm.case_dir / path).read_text("utf-8")
        self.tool_call_parser = tool_call_parser or recognized_parser(template)
        self.reasoning_parser = recognized_reasoning(template) if reasoning_parser == "auto" \
            else None if reasoning_parser == "none" else reasoning_parser
        self.shows_tools = _names_tools(template)
        tokens = () if llm.tokenizer is None else llm.tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = frozenset(token.content for token in tokens if token.special)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context of a running request."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a request names as its model; None for the model itself.

        Raises:
            ApiError: neither the model nor an adapter has this name.
        """
        if name is None or name == self.name:
            return None
        adapters = self.llm.adapters
        if name not in adapters:
            others = f" and {len(adapters)} adapters" if adapters else ""
            raise ApiError(f"unknown model '{shortened(name)}'; this server has '{self.name}'"
                           f"{others}", 404, param="model", code="model_not_found")
        return name

    def check_generates(self) -> None:
        """Raise ApiError if the model's task is not text generation."""
        pooling = self.llm.manifest.pooling
        if pooling is not None:
            instead = "/v1/embeddings" if pooling.task == "embed" else "/classify"
            raise ApiError(f"'{self.name}' was compiled for task {pooling.task} and generates "
                           f"no text; use {instead}, or another model", param="model")

    async def read_prompts(self, prompts: Sequence[str | list[int]],
                           add_special_tokens: bool = True) -> list[list[int]]:
        """Tokenize the prompts that are texts.

        Raises:
            ApiError: a text has more tokens than the maximum length.
            LlmcError: see `LLM.tokenize`.
        """
        return [prompt if not isinstance(prompt, str) else
                await self._tokenize(prompt, add_special_tokens, "prompt") for prompt in prompts]

    async def read_embeds(self, embeds: Sequence[str]) -> list[EmbedsPrompt]:
        """Read prompts of embeddings.

        Raises:
            ApiError: this server does not take them, or one is invalid.
        """
        if embeds and not self._prompt_embeds:
            raise ApiError("prompt_embeds is given, but this server was started without "
                           "--enable_prompt_embeds; give a prompt", param="prompt_embeds")
        try:
            return await asyncio.to_thread(lambda: [
                EmbedsPrompt.of(read_prompt_embeds(text), f"prompt_embeds {index}")
                for index, text in enumerate(embeds)])
        except (LlmcError, ValueError) as error:
            text = str(error) if isinstance(error, LlmcError) else f"prompt_embeds {error}"
            raise ApiError(text, param="prompt_embeds") from None

    async def read_messages(self, messages: Sequence[Message],
                            tools: Sequence[Mapping[str, object]] | None = None,
                            chat_template_kwargs: Mapping[str, object] | None = None,
                            param: str = "messages") -> list[int] | MediaPrompt:
        """Render and tokenize a conversation, which is the request's field `param`.

        Raises:
            ApiError: a message has content that the model does not take, an image or audio is
                invalid, or the prompt exceeds the maximum length.
            LlmcError: see `LLM.render_chat`.
        """
        modalities = [] if self.media is None else self.media.modalities
        sources = list[MediaSource]()

        def written() -> Sequence[Mapping[str, object]]:
            own = [_message(index, message, modalities, param)
                   for index, message in enumerate(messages)]
            if self.media is None:
                return own
            try:
                split, found = split_media(own)
            except LlmcError as error:
                raise ApiError(str(error), param=param) from None
            sources.extend(found)
            return split

        text = await self.offload.render_chat(written, tools, chat_template_kwargs,
                                              self._content_format)
        if not sources:
            return await self._tokenize(text, False, param)
        return await self._media_prompt(text, sources, param)

    async def _media_prompt(self, text: str, sources: Sequence[MediaSource], param: str) -> \
            MediaPrompt:
        """Read a conversation's images and audio, and put their tokens into its text."""
        assert self.media is not None and self.llm.processor is not None
        items, processor = await self.media.read(sources, param), self.llm.processor
        try:
            ids = await self._tokenize(processor.expand_text(text, items), False, param)
            return MediaPrompt(ids, processor.locate(ids, items))
        except ApiError:
            raise
        except LlmcError as error:
            raise ApiError(str(error), param=param) from None

    async def predicted(self, params: SamplingParams, prediction: Prediction | None) -> \
            SamplingParams:
        """Add a request's prediction to its parameters.

        Raises:
            ApiError: beam search is requested, or the prediction has more tokens than the maximum
                length.
            LlmcError: the model has no tokenizer.
        """
        if prediction is None:
            return params
        limit = self.llm.max_model_len
        ids = await self._tokenize(prediction.text, False, "prediction", limit)
        if len(ids) > limit:
            raise prompt_too_long(limit, len(ids), "prediction")
        try:
            return replace(params, prediction=ids)
        except LlmcError as error:
            raise ApiError(str(error), param="prediction") from None

    async def _tokenize(self, text: str, add_special_tokens: bool, param: str,
                        limit: int | None = None) -> list[int]:
        limit = limit or self.max_prompt_len
        count, ids = await self.offload.tokenize(text, add_special_tokens, limit)
        if count > len(ids):
            raise prompt_too_long(limit, count, param, at_least=True)
        return ids

    @property
    def max_prompt_len(self) -> int:
        """Maximum number of tokens of a prompt."""
        encoder = self.llm.manifest.encoder
        return self.llm.max_model_len if encoder is None else encoder.max_seq_len

    def tokenizer_info(self) -> dict[str, Any]:
        """Return the tokenizer's configuration and the chat template, as vLLM does.

        Raises:
            ApiError: the model has no tokenizer.
            LlmcError: the configuration cannot be read.
        """
        if self.llm.tokenizer_file is None or self.llm.tokenizer is None:
            raise ApiError("this model was compiled without a tokenizer; give token ids instead of "
                           "text, or compile it again with its tokenizer.json")
        config = read_config(self.llm.tokenizer_file.parent)
        tokenizer = self.llm.manifest.tokenizer
        for name, tokens in (("bos_token", [tokenizer.bos_token_id]),
                             ("eos_token", tokenizer.eos_token_ids)):
            if name not in config and tokens and tokens[0] is not None:
                config[name] = self.llm.tokenizer.id_to_token(tokens[0])
        info = {"tokenizer_class": "PreTrainedTokenizerFast", **{
            name: _plain(value) for name, value in config.items() if name not in _PATHS}}
        if tokenizer.chat_template is not None:
            info["chat_template"] = (self.llm.case_dir / tokenizer.chat_template).read_text("utf-8")
        return info

    def token_text(self, token_id: int) -> str:
        """Return a token's text, with U+FFFD for partial characters; "" without a tokenizer."""
        return "" if self.llm.tokenizer is None else token_text(self.llm.tokenizer, token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be partial characters; empty without a tokenizer."""
        return b"" if self.llm.tokenizer is None else token_bytes(self.llm.tokenizer, token_id)

    def pieces(self, job: GenerationJob, tenant: str | None, cache_salt: str | None) -> \
            AsyncGenerator[list[CompletionChunk], None]:
        """Yield batches of all available chunks; closing the generator stops the generation."""
        return self.llm.stream_batches(job.inputs, job.params, priority=job.priority,
                                       tenant=tenant, cache_salt=cache_salt,
                                       adapter=job.adapter, all_beams=True)


def _plain(value: Any) -> Any:
    """Replace added tokens in a tokenizer's configuration with their texts."""
    if isinstance(value, dict):
        return value["content"] if "content" in value else {
            name: _plain(part) for name, part in value.items()}
    return [*map(_plain, value)] if isinstance(value, list) else value


def check_parsers(tool_call_parser: str | None, reasoning_parser: str) -> None:
    """Raise LlmcError if a parser's name is unknown."""
    for option, name, known in (
            ("tool_call_parser", tool_call_parser, [*TOOL_PARSERS]),
            ("reasoning_parser", reasoning_parser, ["auto", "none", *REASONING_MARKS])):
        if name is not None and name not in known:
            raise LlmcError(f"--{option} is '{name}', which is unknown; give one of: "
                            f"{', '.join(known)}")


def _names_tools(template: str) -> bool:
    """Whether a chat template uses the variable `tools`."""
    try:
        return any(kind == "name" and value == "tools"
                   for _, kind, value in jinja2.Environment().lex(template))
    except jinja2.TemplateSyntaxError:  # reported at its first use
        return False


def _message(index: int, message: Message, modalities: Sequence[Modality], param: str) -> \
        dict[str, Any]:
    """Convert a message for `split_media` and `LLM.render_chat`.

    Its parts are texts and media; only an assistant's content may be absent.
    """
    written: dict[str, Any] = message.model_dump(exclude_none=True, exclude={"content"})
    content = message.content
    if isinstance(content, list):
        written["content"] = [_part(index, part, modalities, param) for part in content]
    elif content is not None or message.role != "assistant":
        written["content"] = content or ""
    return written


def _part(index: int, part: Part, modalities: Sequence[Modality], param: str) -> dict[str, Any]:
    if WIRE_PARTS.get(part.type) in modalities:
        return {"type": part.type, **(part.model_extra or {})}
    text = (part.model_extra or {}).get("refusal") if part.type == "refusal" else part.text
    if part.type not in _TEXT_PARTS or not isinstance(text, str):
        found = _NOUNS[WIRE_PARTS[part.type]] if part.type in WIRE_PARTS else \
            f"a part of type '{shortened(part.type)}'"
        taken = " and ".join(["text", *(PLURALS[own] for own in modalities)])
        raise ApiError(f"message {index} has {found}, and this model takes {taken} only; leave it "
                       f"out", param=param)
    return {"type": "text", "text": text}
