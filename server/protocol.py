"""What comes in: the bodies of requests, as OpenAI and, beyond it, vLLM name their fields.

A field that would change the answer and is not served is refused, by `REFUSED`. What changes
nothing here (`user`, `metadata`, …) and what nobody knows is ignored, as vLLM does, and named in
the request's line of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmc.errors import LlmcError
from llmc.runtime.decoding.params import SamplingParams, with_defaults
from llmc.runtime.scheduler import MOST_PRIORITY
from llmc.server.errors import ApiError

MAX_LOGPROBS = 20  # of a token, as OpenAI has it
MAX_CHOICES = 128  # of a request, in all
_MAX_CALLS = 16  # of an answer that must call tools

# Fields that are not served: the values that ask for nothing, and what to do instead.
_Refused = dict[str, tuple[tuple[Any, ...], str]]
_REFUSED: _Refused = {
    "include_stop_str_in_output": ((False, None), "stop strings are not shown"),
    "prompt_logprobs": ((None,), "log-probabilities are those of generated tokens"),
    "truncate_prompt_tokens": ((None,), "shorten the prompt"),
    "return_token_ids": ((None, False), "give the text to /tokenize"),
    "return_tokens_as_token_ids": ((None, False), "give the text to /tokenize"),
    "logits_processors": ((None, []), "there is logit_bias"),
    "prompt_embeds": ((None,), "give a text, or token ids"),
}

_Model = TypeVar("_Model", bound="Body")


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="allow", frozen=True)
    REFUSED: ClassVar[_Refused] = {}

    model: str | None = None

    @classmethod
    def read(cls: type[_Model], raw: bytes) -> _Model:
        """A body from JSON. Nesting of more than 200 is refused by pydantic's parser.

        Raises:
            ApiError: it is not JSON, or not such a body; or asks for what is not served.
        """
        try:
            body = cls.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = [str(part) for part in first["loc"]]
            name = ".".join(place)
            raise ApiError(f"{name}: {first['msg']}" if name else first["msg"],
                           param=place[0] if place else None) from None
        for name, value in (body.model_extra or {}).items():
            neutral, instead = cls.REFUSED.get(name, ((value,), ""))
            if value not in neutral:
                raise ApiError(f"{name} is not served; {instead}", param=name,
                               code="unsupported_parameter")
        return body

    @property
    def ignored(self) -> list[str]:
        """Fields that were given and mean nothing here."""
        return sorted(name for name in self.model_extra or {} if name not in self.REFUSED)


class StreamOptions(BaseModel):
    """What else a stream tells; `continuous_usage_stats` is vLLM's."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(BaseModel):
    """Of a response_format; `strict` is always so."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What an answer is to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's: at most one of them."""

    model_config = ConfigDict(extra="forbid")

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generation(Body):
    """What requests that generate text have in common."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    # vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    bad_words: list[str | list[int]] | None = None
    priority: int = Field(0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    use_beam_search: bool = False
    length_penalty: float | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    # llmc's own, as SamplingParams has them.
    typical_p: float | None = None
    end_id: int | None = None
    early_stopping: bool | Literal["never"] | None = None
    diversity_rate: float | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and \
            self.stream_options.continuous_usage_stats

    def sampling(self, max_tokens: int, logprobs: int | None,
                 defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """As the runtime wants it.

        Args:
            defaults: the model's own, of fields that the request leaves out.

        Raises:
            ApiError: a value is out of range.
        """
        if logprobs is not None and logprobs > MAX_LOGPROBS:
            raise ApiError(f"log-probabilities of {logprobs} tokens are more than {MAX_LOGPROBS}",
                           param="logprobs")
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        given |= dict(max_tokens=max_tokens, logprobs=logprobs, ignore_eos=self.ignore_eos,
                      show_special_tokens=not self.skip_special_tokens)
        given |= self._guides()
        if self.seed is not None:
            given["seed"] = self.seed % 2**64
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)  # -1 is vLLM's for all
        if self.use_beam_search:
            given["beam_width"] = self.n or 1
        else:
            given["n"] = self.n or 1
            if self.temperature is not None:
                given["temperature"] = self.temperature
        fields = with_defaults(given, defaults)
        if "temperature" not in fields and not self.use_beam_search and any(
                given.get(name, neutral) != neutral for name, neutral in _OF_SAMPLING.items()):
            fields["temperature"] = _OPENAI_TEMPERATURE
        try:
            return SamplingParams(**fields)
        except LlmcError as error:
            name = str(error).split(" ", 1)[0]
            raise ApiError(str(error), param=name if name in type(self).model_fields else None) \
                from None


    def _guides(self) -> dict[str, Any]:
        """What the answer is to follow, as SamplingParams has it, from wherever it stands.

        Raises:
            ApiError: a schema is missing.
        """
        given: dict[str, Any] = {}
        if self.structured_outputs is not None:
            own = self.structured_outputs
            given = dict(guided_json=_ANY_OBJECT if own.json_object else own.json_,
                         guided_regex=own.regex, guided_choice=own.choice,
                         guided_grammar=own.grammar)
        if self.response_format is not None and self.response_format.type != "text":
            schema = self.response_format.json_schema
            if schema is None and self.response_format.type == "json_schema":
                raise ApiError("response_format has no json_schema", param="response_format")
            given["guided_json"] = _ANY_OBJECT if schema is None else schema.schema_
        return {name: value for name, value in given.items() if value is not None}


_ANY_OBJECT = {"type": "object"}
# Without a temperature, of the request or the model, an answer is greedy, as elsewhere in llmc;
# but these mean nothing then, so a request that gives one gets OpenAI's default.
_OF_SAMPLING = {name: getattr(SamplingParams, name)
                for name in ("n", "top_k", "top_p", "min_p", "typical_p")}
_OPENAI_TEMPERATURE = 1.0
# What SamplingParams has under the same name, with the same meaning.
_SAME = ("stop", "stop_token_ids", "top_p", "presence_penalty", "frequency_penalty", "logit_bias",
         "min_p", "repetition_penalty", "min_tokens", "bad_words", "length_penalty", "typical_p",
         "end_id", "early_stopping", "diversity_rate", "guided_json", "guided_regex",
         "guided_choice", "guided_grammar")


class CompletionRequest(Generation):
    """Of /v1/completions."""

    REFUSED: ClassVar[_Refused] = _REFUSED | {
        "echo": ((False, None), "put the prompt before the text yourself"),
        "suffix": ((None, ""), "put it into the prompt, as the model was trained"),
        "best_of": ((None, 1), "ask for n, and choose by logprobs"),
    }

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = None
    logprobs: int | None = Field(None, ge=0)
    add_special_tokens: bool = True  # vLLM's

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One or several."""
        several: list[Any] = [self.prompt] if isinstance(self.prompt, str) else [*self.prompt]
        return [several] if several and isinstance(several[0], int) else several


class Part(BaseModel):
    """Of a message's content."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class FunctionCall(BaseModel):
    """What an assistant called."""

    name: str
    arguments: str = "{}"


class ToolCall(BaseModel):
    """A call in a message of an assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """Of a conversation; templates get other keys as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(BaseModel):
    """What a tool is."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """That a model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    """Of a choice."""

    name: str


class NamedTool(BaseModel):
    """The one that is to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(Generation):
    """Of /v1/chat/completions."""

    REFUSED: ClassVar[_Refused] = _REFUSED | {
        "echo": ((False, None), "the messages are known to you"),
        "modalities": ((None, ["text"]), "models here read and write text"),
        "audio": ((None,), "models here read and write text"),
        "functions": ((None, []), "give tools"),
        "function_call": ((None, "none"), "give tool_choice"),
        "web_search_options": ((None,), "there is no search"),
        "add_generation_prompt": ((True, None), "give a prompt to /v1/completions"),
        "continue_final_message": ((False, None), "give a prompt to /v1/completions"),
        "chat_template": ((None,), "the model's own is used"),
        "documents": ((None, []), "put them into a message"),
    }

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    @property
    def offered(self) -> list[Tool]:
        """Tools that the model is told of: all, the one that is named, or none.

        Raises:
            ApiError: none has that name, or there is none.
        """
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            found = [tool for tool in self.tools if tool.function.name == name]
            if not found:
                raise ApiError(f"tool_choice names '{name}', which is none of tools",
                               param="tool_choice")
            return found[:1]
        if self.tool_choice == "required" and not self.tools:
            raise ApiError("tool_choice is required, but there are no tools", param="tool_choice")
        return [] if self.tool_choice == "none" else self.tools

    @property
    def forces_a_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def _guides(self) -> dict[str, Any]:
        given = super()._guides()
        if not self.forces_a_call:
            return given
        if given:
            raise ApiError("response_format and the like do not go with a tool_choice that forces "
                           "a call", param="tool_choice")
        schemas = {tool.function.name: tool.function.parameters or _ANY_OBJECT
                   for tool in self.offered}
        if isinstance(self.tool_choice, NamedTool):
            return {"guided_json": schemas[self.tool_choice.function.name]}
        calls = [{"type": "object", "properties": {"name": {"const": name}, "parameters": schema},
                  "required": ["name", "parameters"], "additionalProperties": False}
                 for name, schema in schemas.items()]
        return {"guided_json": {"type": "array", "items": {"anyOf": calls}, "minItems": 1,
                                "maxItems": _MAX_CALLS if self.parallel_tool_calls else 1}}


class TextFormat(BaseModel):
    """What a response is to be: response_format, laid flat."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """Of a response's text."""

    format: TextFormat = TextFormat()


class Item(Message):
    """Of a response's input."""

    type: Literal["message"] = "message"


class ResponsesRequest(Generation):
    """Of /v1/responses: text in, text out."""

    REFUSED: ClassVar[_Refused] = _REFUSED | {
        "tools": ((None, []), "give them to /v1/chat/completions"),
        "tool_choice": ((None, "none", "auto"), "give tools to /v1/chat/completions"),
        "previous_response_id": ((None,), "nothing is stored; give the conversation as input"),
        "conversation": ((None,), "nothing is stored; give the conversation as input"),
        "prompt": ((None,), "nothing is stored; give instructions and input"),
        "background": ((None, False), "ask for a stream"),
        "truncation": ((None, "disabled"), "shorten the input"),
        "top_logprobs": ((None, 0), "ask /v1/chat/completions"),
    }

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions = Field(default_factory=TextOptions)

    @property
    def messages(self) -> list[Message]:
        """The conversation."""
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*first, Message(role="user", content=self.input)]
        return [*first, *(Message.model_validate(item.model_dump(exclude={"type"}))
                          for item in self.input)]

    def _guides(self) -> dict[str, Any]:
        own = self.text.format
        if own.type == "text":
            return super()._guides()
        if own.type == "json_schema" and own.schema_ is None:
            raise ApiError("text.format has no schema", param="text")
        return {"guided_json": own.schema_ if own.type == "json_schema" else _ANY_OBJECT}


class TokenizeRequest(Body):
    """Of /tokenize, as vLLM has it: a prompt, or messages."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """Of /detokenize, as vLLM has it."""

    tokens: list[int]
