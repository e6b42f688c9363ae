"""What comes in: the bodies of requests, as OpenAI and, beyond it, vLLM name their fields.

A field that would change the answer and is not served is refused, by `REFUSED`. What changes
nothing here (`user`, `metadata`, …) and what nobody knows is ignored, as vLLM does, and named in
the request's line of the log.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue

from llmc.errors import LlmcError, shortened
from llmc.runtime.core.scheduler import MOST_PRIORITY
from llmc.runtime.sampling.params import STRUCTURED_OUTPUT_FIELDS, SamplingParams, with_defaults
from llmc.server.errors import ApiError
from llmc.server.tool_schema import calls_schema

MAX_LOGPROBS = 20  # of a token, as OpenAI has it
MAX_CHOICES = 128  # of a request, in all
_MAX_CALLS = 16  # of an answer that must call tools
_MAX_IGNORED = 20  # names of a request that its line of the log has

# Fields that are not served: the values that ask for nothing, and what to do instead.
_Refused = dict[str, tuple[tuple[Any, ...], str]]
_REFUSED: _Refused = {
    "include_stop_str_in_output": ((False, None), "stop strings are not shown"),
    "prompt_logprobs": ((None,), "ask /v1/completions or /v1/chat/completions"),
    "truncate_prompt_tokens": ((None,), "shorten the prompt"),
    "return_token_ids": ((None, False), "give the text to /tokenize"),
    "return_tokens_as_token_ids": ((None, False), "give the text to /tokenize"),
    "logits_processors": ((None, []), "there is logit_bias"),
    "prompt_embeds": ((None,), "give a text, or token ids"),
}

_Model = TypeVar("_Model", bound="Body")
# Of lists, the first thing that is wrong is told. To find all takes 10 us each, and the GIL.
Ints = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class Fields(BaseModel):
    """Fields of a request. One that is null is not given, unless it is required: clients send
    unset options so.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        required = {field.alias or name for name, field in cls.model_fields.items()
                    if field.is_required()}
        return {name: value for name, value in given.items()
                if value is not None or name in required}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any,
                                     handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, own in schema.get("properties", {}).items():
            if name not in schema.get("required", ()) and {"type": "null"} not in own.get(
                    "anyOf", ()):
                schema["properties"][name] = {"anyOf": [own, {"type": "null"}]}
        return schema


class Body(Fields):
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
            name = shortened(".".join(place))
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
        """Fields that were given and mean nothing here, for the log: few, and short."""
        names = sorted(name for name in self.model_extra or {} if name not in self.REFUSED)
        return [*map(shortened, names[:_MAX_IGNORED]), *(["…"] if names[_MAX_IGNORED:] else [])]


class StreamOptions(Fields):
    """What else a stream tells; `continuous_usage_stats` is vLLM's."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Fields):
    """Of a response_format; `strict` is always so."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """What an answer is to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's: at most one of them."""

    model_config = ConfigDict(extra="forbid")

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generation(Body):
    """What requests that generate text have in common."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    stop: str | Texts | None = None
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
    stop_token_ids: Ints | None = None
    skip_special_tokens: bool = True
    bad_words: Annotated[list[str | Ints], Field(fail_fast=True)] | None = None
    priority: int = Field(0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    cache_salt: str | None = Field(None, min_length=1)
    use_beam_search: bool = False
    length_penalty: float | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    # llmc's own, as SamplingParams has them.
    typical_p: float | None = None
    end_id: int | None = None
    early_stopping: bool | Literal["never"] | None = None
    diversity_rate: float | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences that it asks for, beams among them."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and \
            self.stream_options.continuous_usage_stats

    def sampling(self, max_tokens: int, logprobs: int | None,
                 defaults: Mapping[str, Any] = MappingProxyType({}),
                 prompt_logprobs: int | None = None) -> SamplingParams:
        """As the runtime wants it.

        Args:
            defaults: the model's own, of fields that the request leaves out.

        Raises:
            ApiError: a value is out of range.
        """
        for name, count in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            if count is not None and count > MAX_LOGPROBS:
                raise ApiError(f"log-probabilities of {count} tokens are more than {MAX_LOGPROBS}",
                               param=name)
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        given |= dict(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
                      ignore_eos=self.ignore_eos,
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
        "suffix": ((None, ""), "put it into the prompt, as the model was trained"),
        "best_of": ((None, 1), "ask for n, and choose by logprobs"),
    }

    prompt: str | Ints | Texts | Annotated[list[Ints], Field(fail_fast=True)]
    max_tokens: int | None = None
    logprobs: int | None = Field(None, ge=0)
    echo: bool = False
    # vLLM's.
    add_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One or several."""
        several: list[Any] = [self.prompt] if isinstance(self.prompt, str) else [*self.prompt]
        return [several] if several and isinstance(several[0], int) else several

    @property
    def scored(self) -> int | None:
        """Most likely tokens to return in the place of each prompt token; None: no scores at all.
        """
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * super().num_sequences


class Part(Fields):
    """A part of a message's content."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refusal(cls, given: Any) -> Any:
        """An assistant's refusal is its text."""
        if isinstance(given, dict) and given.get("type") == "refusal":
            return {"type": "text", "text": given.get("refusal")}
        return given


class FunctionCall(Fields):
    """The function that an assistant called."""

    name: str
    arguments: str = "{}"


class ToolCall(Fields):
    """A call in a message of an assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields):
    """A message of a conversation; templates get other keys as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refusal(cls, given: Any) -> Any:
        """A message that holds a refusal instead of content has it as content."""
        if isinstance(given, dict) and given.get("content") is None and \
                isinstance(given.get("refusal"), str):
            return {**given, "content": given["refusal"]}
        return given


class Function(Fields):
    """A tool's function."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool that a model may call."""

    type: Literal["function"]
    function: Function


@dataclass(frozen=True)
class ToolUse:
    """The tools that a model is shown, and the calls that it must make.

    Args:
        mode: `auto` leaves it to the model; `required` and `named` force a call, the latter of
            the one tool.
        parallel: whether an answer may have several calls.
    """

    tools: tuple[Tool, ...] = ()
    mode: Literal["auto", "required", "named"] = "auto"
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.mode != "auto"

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of an answer that is forced to call."""
        parameters = {tool.function.name: tool.function.parameters or _ANY_OBJECT
                      for tool in self.tools}
        if self.mode == "named":
            own, = parameters.values()
            return own
        return calls_schema(parameters, _MAX_CALLS if self.parallel else 1)


def chosen_tools(tools: Sequence[Tool], mode: str, names: Sequence[str] | None = None,
                 parallel: bool = True) -> ToolUse:
    """The tools that a request's tool_choice leaves.

    Args:
        mode: `none`, `auto`, `required` or `named`.
        names: of the tools that may be called; None: all of them.

    Raises:
        ApiError: a name is none of the tools', or a call is required and there is no tool.
    """
    if mode == "none":
        return ToolUse()
    if names is not None:
        known = {tool.function.name: tool for tool in tools}
        for name in names:
            if name not in known:
                raise ApiError(f"tool_choice names '{shortened(name)}', which is none of tools",
                               param="tool_choice")
        tools = [known[name] for name in dict.fromkeys(names)]
    if mode == "required" and not tools:
        raise ApiError("tool_choice is required, but there are no tools", param="tool_choice")
    forced: Literal["auto", "required", "named"] = "required" if mode == "required" else \
        "named" if mode == "named" else "auto"
    return ToolUse(tuple(tools), forced, parallel)


class NamedFunction(Fields):
    """The function that a tool_choice names."""

    name: str


class NamedTool(Fields):
    """A tool_choice of one tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedNames(Fields):
    """Which tools may be called, and whether one must be."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool]


class AllowedTools(Fields):
    """A tool_choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


class Conversation(Generation):
    """A request that continues a conversation."""

    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    @property
    @abstractmethod
    def tool_use(self) -> ToolUse:
        """The tools that may be called.

        Raises:
            ApiError: tool_choice does not fit them.
        """

    @property
    def template_variables(self) -> Mapping[str, Any] | None:
        """Variables of the chat template, beside those that it always has."""
        return self.chat_template_kwargs

    def _guides(self) -> dict[str, Any]:
        given = super()._guides()
        if not self.tool_use.is_forced:
            return given
        if given or any(getattr(self, own) is not None for own in STRUCTURED_OUTPUT_FIELDS):
            raise ApiError("response_format and the like do not go with a tool_choice that forces "
                           "a call", param="tool_choice")
        return {"guided_json": self.tool_use.schema}


class ChatRequest(Conversation):
    """The body of /v1/chat/completions."""

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

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0)  # vLLM's
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None  # a variable of the chat template

    @property
    def tool_use(self) -> ToolUse:
        choice, parallel = self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, str):
            return chosen_tools(self.tools, choice, parallel=parallel)
        if isinstance(choice, NamedTool):
            return chosen_tools(self.tools, "named", [choice.function.name])
        allowed = choice.allowed_tools
        return chosen_tools(self.tools, allowed.mode, [own.function.name for own in allowed.tools],
                            parallel)

    @property
    def template_variables(self) -> Mapping[str, Any] | None:
        return _with_effort(self.chat_template_kwargs, self.reasoning_effort)


def _with_effort(variables: Mapping[str, Any] | None, effort: str | None) -> \
        Mapping[str, Any] | None:
    return variables if effort is None else {"reasoning_effort": effort, **(variables or {})}


class TextFormat(Fields):
    """The form of a response's text: response_format, laid flat."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Fields):
    """Options of a response's text."""

    format: TextFormat = TextFormat()


class ReasoningOptions(Fields):
    """Options of a response's reasoning."""

    effort: str | None = None


class Item(Fields):
    """An item of a response's input or output: a message, a call, its output, or reasoning."""

    model_config = ConfigDict(extra="allow")

    type: str = "message"
    id: str | None = None
    # Of a message, and of reasoning.
    role: str | None = None
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    # Of a call, and of its output.
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[Part], Field(fail_fast=True)] | None = None


class ResponseTool(Fields):
    """A tool of a response, laid flat."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedResponseTool(Fields):
    """A tool_choice of one tool, laid flat."""

    type: Literal["function"]
    name: str


class AllowedResponseTools(Fields):
    """A tool_choice of some of the tools, laid flat."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedResponseTool]


class ResponsesRequest(Conversation):
    """The body of /v1/responses: text in, text and calls of functions out."""

    REFUSED: ClassVar[_Refused] = _REFUSED | {
        "conversation": ((None,), "give previous_response_id, or the conversation as input"),
        "prompt": ((None,), "give instructions and input"),
        "background": ((None, False), "ask for a stream"),
        "truncation": ((None, "disabled"), "shorten the input"),
        "top_logprobs": ((None, 0), "ask /v1/chat/completions"),
    }

    input: str | Annotated[list[Item], Field(fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    metadata: dict[str, Any] = Field(default_factory=dict)
    max_output_tokens: int | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | AllowedResponseTools \
        = "auto"
    parallel_tool_calls: bool = True

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [Item(type="message", role="user", content=self.input)]
        return self.input

    @property
    def tool_use(self) -> ToolUse:
        tools, choice = [*map(_function_tool, self.tools)], self.tool_choice
        parallel = self.parallel_tool_calls
        if isinstance(choice, str):
            return chosen_tools(tools, choice, parallel=parallel)
        if isinstance(choice, NamedResponseTool):
            return chosen_tools(tools, "named", [choice.name])
        return chosen_tools(tools, choice.mode, [own.name for own in choice.tools], parallel)

    @property
    def template_variables(self) -> Mapping[str, Any] | None:
        return _with_effort(self.chat_template_kwargs, self.reasoning.effort)

    def _guides(self) -> dict[str, Any]:
        given, own = super()._guides(), self.text.format
        if own.type == "text":
            return given
        if self.tool_use.is_forced:
            raise ApiError("text.format does not go with a tool_choice that forces a call",
                           param="tool_choice")
        if own.type == "json_schema" and own.schema_ is None:
            raise ApiError("text.format has no schema", param="text")
        return {"guided_json": own.schema_ if own.type == "json_schema" else _ANY_OBJECT}


def _function_tool(tool: ResponseTool) -> Tool:
    if tool.type != "function":
        raise ApiError(f"a tool of type '{tool.type}' is not served; give tools of type "
                       f"'function'", param="tools", code="unsupported_parameter")
    return Tool(type="function", function=Function.model_validate(
        tool.model_dump(include={"name", "description", "parameters", "strict"})))


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Items as messages: reasoning, text and calls that follow each other are one message.

    Raises:
        ApiError: an item is of a type that is not served, or lacks what its type needs.
    """
    messages: list[dict[str, Any]] = []
    own: dict[str, Any] | None = None  # the assistant's message under way
    for index, item in enumerate(items):
        if item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": _needed(index, item, "call_id"),
                             "content": item.output or ""})
            own = None
        elif item.type == "message" and item.role != "assistant":
            messages.append({"role": _needed(index, item, "role"), "content": item.content})
            own = None
        elif item.type in ("message", "function_call", "reasoning"):
            if own is None or (item.type == "reasoning" and len(own) > 1) or (
                    item.type == "message" and ("content" in own or "tool_calls" in own)):
                own = {"role": "assistant"}
                messages.append(own)
            _add_to(own, index, item)
        else:
            raise ApiError(f"input {index} is of type '{item.type}'; give messages, "
                           f"function_call, function_call_output or reasoning", param="input")
    return [Message.model_validate(message) for message in messages
            if len(message) > 1 or message["role"] != "assistant"]


def _add_to(message: dict[str, Any], index: int, item: Item) -> None:
    """Put an assistant's item into its message."""
    if item.type == "message":
        message["content"] = item.content
    elif item.type == "function_call":
        message.setdefault("tool_calls", []).append({
            "id": item.call_id or item.id, "function": {
                "name": _needed(index, item, "name"), "arguments": item.arguments or "{}"}})
    elif isinstance(item.content, list):
        message["reasoning_content"] = "\n".join(part.text or "" for part in item.content)


def _needed(index: int, item: Item, name: str) -> str:
    value = getattr(item, name)
    if not isinstance(value, str) or not value:
        raise ApiError(f"input {index} of type '{item.type}' has no {name}", param="input")
    return value


class TokenizeRequest(Body):
    """Of /tokenize, as vLLM has it: a prompt, or messages."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """Of /detokenize, as vLLM has it."""

    tokens: Ints
