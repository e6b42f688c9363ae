"""Request bodies, with the field names of OpenAI and vLLM.

`REFUSED` has fields that would change the answer but are not supported; they get an error. Fields
without an effect (`user`, `metadata`, …) and unknown fields are ignored, as in vLLM, and named in
the request's log line.
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
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue

from llmc.errors import LlmcError, shortened
from llmc.runtime.core.scheduler import MOST_PRIORITY
from llmc.runtime.sampling.params import STRUCTURED_OUTPUT_FIELDS, SamplingParams, with_defaults
from llmc.server.errors import ApiError
from llmc.server.tool_schema import calls_schema

MAX_LOGPROBS = 20  # per token, OpenAI's limit
MAX_CHOICES = 128  # per request, over all prompts
_MAX_CALLS = 16  # of an answer with forced tool calls
_MAX_IGNORED = 20  # ignored fields that the log line of a request names

# Unsupported fields: the values without an effect, and the advice for other values.
Refused = dict[str, tuple[tuple[Any, ...], str]]
_REFUSED: Refused = {
    "include_stop_str_in_output": ((False, None), "stop strings are never part of the text"),
    "prompt_logprobs": ((None,), "use /v1/completions or /v1/chat/completions"),
    "truncate_prompt_tokens": ((None,), "shorten the prompt"),
    "return_token_ids": ((None, False), "give the text to /tokenize"),
    "return_tokens_as_token_ids": ((None, False), "give the text to /tokenize"),
    "logits_processors": ((None, []), "use logit_bias"),
    "prompt_embeds": ((None,), "give a text or token ids"),
}

_Model = TypeVar("_Model", bound="Body")
# Of lists, only the first error is reported: finding all takes 10 us each, and holds the GIL.
Ints = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class Fields(BaseModel):
    """Fields of a request; null means absent unless the field is required."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
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
        for name, field in schema.get("properties", {}).items():
            if name not in schema.get("required", ()) and {"type": "null"} not in field.get(
                    "anyOf", ()):
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        return schema


class Body(Fields):
    """A request's body."""

    model_config = ConfigDict(extra="allow", frozen=True)
    REFUSED: ClassVar[Refused] = {}
    TAKES_MEDIA: ClassVar[bool] = False  # whether it may have images or audio

    model: str | None = None

    @classmethod
    def read(cls: type[_Model], raw: bytes) -> _Model:
        """Parse and validate a body. pydantic's parser rejects more than 200 levels of nesting.

        Raises:
            ApiError: the body is not JSON or invalid, or a field is not supported.
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
                raise ApiError(f"{name} is not supported; {instead}", param=name,
                               code="unsupported_parameter")
        return body

    @property
    def ignored(self) -> list[str]:
        """Names of ignored fields for the log, limited in number and length."""
        names = sorted(name for name in self.model_extra or {} if name not in self.REFUSED)
        return [*map(shortened, names[:_MAX_IGNORED]), *(["…"] if names[_MAX_IGNORED:] else [])]


class StreamOptions(Fields):
    """Options of a stream; `continuous_usage_stats` is vLLM's."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Fields):
    """The schema of a response_format; `strict` is always on."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's structured_outputs; at most one field may be set."""

    model_config = ConfigDict(extra="forbid")

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class TextPart(Fields):
    """A part of a prediction's content."""

    type: Literal["text"]
    text: str


class Prediction(Fields):
    """The expected text of an answer. The answer does not depend on it."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, Tag("string")]
        | Annotated[list[TextPart], Tag("array"), Field(fail_fast=True)],
        Discriminator(lambda given: "array" if isinstance(given, list) else "string")]

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else \
            "".join(part.text for part in self.content)


class Generation(Body):
    """Common fields of requests that generate text."""

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
    # llmc's; see SamplingParams.
    typical_p: float | None = None
    end_id: int | None = None
    early_stopping: bool | Literal["never"] | None = None
    diversity_rate: float | None = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the request, including beams."""
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
        """Convert the fields to sampling parameters.

        Args:
            max_tokens: maximum number of new tokens.
            logprobs: number of most likely tokens to return.
            defaults: the model's defaults of absent fields.
            prompt_logprobs: number of most likely tokens to return for each prompt token.

        Raises:
            ApiError: a value is out of range.
        """
        for name, count in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            if count is not None and count > MAX_LOGPROBS:
                raise ApiError(f"{name} is {count}, expected at most {MAX_LOGPROBS}",
                               param=name)
        given = {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        given |= dict(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
                      ignore_eos=self.ignore_eos,
                      show_special_tokens=not self.skip_special_tokens)
        given |= self._structured_output()
        if self.seed is not None:
            given["seed"] = self.seed % 2**64
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)  # vLLM's -1 means all tokens
        if self.use_beam_search:
            given["beam_width"] = self.n or 1
        else:
            given["n"] = self.n or 1
            if self.temperature is not None:
                given["temperature"] = self.temperature
        fields = with_defaults(given, defaults)
        if "temperature" not in fields and not self.use_beam_search and any(
                given.get(name, neutral) != neutral for name, neutral in _SAMPLING_ONLY.items()):
            fields["temperature"] = _OPENAI_TEMPERATURE
        try:
            return SamplingParams(**fields)
        except LlmcError as error:
            name = str(error).split(" ", 1)[0]
            raise ApiError(str(error), param=name if name in type(self).model_fields else None) \
                from None


    def _structured_output(self) -> dict[str, Any]:
        """Return the structured output fields of SamplingParams.

        Raises:
            ApiError: a schema is missing.
        """
        given: dict[str, Any] = {}
        if self.structured_outputs is not None:
            options = self.structured_outputs
            given = dict(guided_json=_ANY_OBJECT if options.json_object else options.json_,
                         guided_regex=options.regex, guided_choice=options.choice,
                         guided_grammar=options.grammar)
        if self.response_format is not None and self.response_format.type != "text":
            schema = self.response_format.json_schema
            if schema is None and self.response_format.type == "json_schema":
                raise ApiError("response_format of type 'json_schema' has no json_schema; add it",
                               param="response_format")
            given["guided_json"] = _ANY_OBJECT if schema is None else schema.schema_
        return {name: value for name, value in given.items() if value is not None}


_ANY_OBJECT = {"type": "object"}
# Without a temperature, decoding is greedy, as elsewhere in llmc. These parameters have no effect
# then, so a request with one of them gets OpenAI's default temperature.
_SAMPLING_ONLY = {name: getattr(SamplingParams, name)
                for name in ("n", "top_k", "top_p", "min_p", "typical_p")}
_OPENAI_TEMPERATURE = 1.0
# Fields that SamplingParams has with the same name and meaning.
_SHARED = ("stop", "stop_token_ids", "top_p", "presence_penalty", "frequency_penalty", "logit_bias",
           "min_p", "repetition_penalty", "min_tokens", "bad_words", "length_penalty", "typical_p",
           "end_id", "early_stopping", "diversity_rate", "guided_json", "guided_regex",
           "guided_choice", "guided_grammar")


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    REFUSED: ClassVar[Refused] = {
        **{name: rule for name, rule in _REFUSED.items() if name != "prompt_embeds"},
        "suffix": ((None, ""), "put it into the prompt in the model's infilling format"),
        "best_of": ((None, 1), "give n, and select by logprobs"),
    }

    prompt: str | Ints | Texts | Annotated[list[Ints], Field(fail_fast=True)] = Field(
        default_factory=list)
    max_tokens: int | None = None
    logprobs: int | None = Field(None, ge=0)
    echo: bool = False
    prediction: Prediction | None = None  # as in /v1/chat/completions
    # vLLM's.
    add_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0)
    prompt_embeds: str | Texts = Field(default_factory=list)  # base64; before the prompts

    @property
    def embeds(self) -> Sequence[str]:
        """Prompts of embeddings as a list."""
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts as a list."""
        several: list[Any] = [self.prompt] if isinstance(self.prompt, str) else [*self.prompt]
        return [several] if several and isinstance(several[0], int) else several

    @property
    def scored(self) -> int | None:
        """Number of most likely tokens to return per prompt token; None: no log-probabilities."""
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def num_sequences(self) -> int:
        return (len(self.prompts) + len(self.embeds)) * super().num_sequences


class Part(Fields):
    """A part of a message's content."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refusal(cls, given: Any) -> Any:
        """Convert a refusal part to a text part."""
        if isinstance(given, dict) and given.get("type") == "refusal":
            return {"type": "text", "text": given.get("refusal")}
        return given


class FunctionCall(Fields):
    """The function of a tool call."""

    name: str
    arguments: str = "{}"


class ToolCall(Fields):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields):
    """A message of a conversation; other keys are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refusal(cls, given: Any) -> Any:
        """Use a refusal as content if the content is absent."""
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
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


@dataclass(frozen=True)
class ToolUse:
    """Tools that the prompt shows, and the calls that are forced.

    Args:
        tools: the tools.
        mode: `auto`: the model decides; `required`: one or more calls; `named`: a call of the
            only tool.
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
        """JSON schema of an answer with forced calls."""
        parameters = {tool.function.name: tool.function.parameters or _ANY_OBJECT
                      for tool in self.tools}
        if self.mode == "named":
            schema, = parameters.values()
            return schema
        return calls_schema(parameters, _MAX_CALLS if self.parallel else 1)


def chosen_tools(tools: Sequence[Tool], mode: str, names: Sequence[str] | None = None,
                 parallel: bool = True) -> ToolUse:
    """Select tools by a request's tool_choice.

    Args:
        tools: all tools of the request.
        mode: `none`, `auto`, `required` or `named`.
        names: of the allowed tools; None: all.
        parallel: whether an answer may have several calls.

    Raises:
        ApiError: a name is not in tools, or a call is required and tools is empty.
    """
    if mode == "none":
        return ToolUse()
    if names is not None:
        known = {tool.function.name: tool for tool in tools}
        for name in names:
            if name not in known:
                raise ApiError(f"tool_choice has '{shortened(name)}', which is not in tools",
                               param="tool_choice")
        tools = [known[name] for name in dict.fromkeys(names)]
    if mode == "required" and not tools:
        raise ApiError("tool_choice is 'required', but tools is empty; give tools",
                       param="tool_choice")
    forced: Literal["auto", "required", "named"] = "required" if mode == "required" else \
        "named" if mode == "named" else "auto"
    return ToolUse(tuple(tools), forced, parallel)


class NamedFunction(Fields):
    """The function of a tool_choice."""

    name: str


class NamedTool(Fields):
    """A tool_choice of a single tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedNames(Fields):
    """The allowed tools, and whether a call is required."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool]


class AllowedTools(Fields):
    """A tool_choice of several tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


class Conversation(Generation):
    """A request that continues a conversation.

    Attributes:
        PROMPT: the field that has it.
    """

    PROMPT: ClassVar[str] = "messages"
    TAKES_MEDIA: ClassVar[bool] = True

    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    @property
    @abstractmethod
    def tool_use(self) -> ToolUse:
        """The tools and the forced calls.

        Raises:
            ApiError: tool_choice does not match tools.
        """

    @property
    def template_variables(self) -> Mapping[str, Any] | None:
        """Further variables of the chat template."""
        return self.chat_template_kwargs

    def _structured_output(self) -> dict[str, Any]:
        given = super()._structured_output()
        if not self.tool_use.is_forced:
            return given
        if given or any(getattr(self, name) is not None for name in STRUCTURED_OUTPUT_FIELDS):
            raise ApiError("structured output cannot be combined with a tool_choice that forces a "
                           "call; leave out one of them", param="tool_choice")
        return {"guided_json": self.tool_use.schema}


class ChatRequest(Conversation):
    """The body of /v1/chat/completions."""

    REFUSED: ClassVar[Refused] = _REFUSED | {
        "echo": ((False, None), "prepend the messages in the client"),
        "modalities": ((None, ["text"]), "only text is supported"),
        "audio": ((None,), "only text is supported"),
        "functions": ((None, []), "give tools"),
        "function_call": ((None, "none"), "give tool_choice"),
        "web_search_options": ((None,), "put search results into a message"),
        "add_generation_prompt": ((True, None), "give a prompt to /v1/completions"),
        "continue_final_message": ((False, None), "give a prompt to /v1/completions"),
        "chat_template": ((None,), "the model's chat template is used"),
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
    reasoning_effort: str | None = None  # passed to the chat template
    prediction: Prediction | None = None

    @property
    def tool_use(self) -> ToolUse:
        choice, parallel = self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, str):
            return chosen_tools(self.tools, choice, parallel=parallel)
        if isinstance(choice, NamedTool):
            return chosen_tools(self.tools, "named", [choice.function.name])
        allowed = choice.allowed_tools
        return chosen_tools(self.tools, allowed.mode,
                            [tool.function.name for tool in allowed.tools], parallel)

    @property
    def template_variables(self) -> Mapping[str, Any] | None:
        return _with_effort(self.chat_template_kwargs, self.reasoning_effort)


def _with_effort(variables: Mapping[str, Any] | None, effort: str | None) -> \
        Mapping[str, Any] | None:
    return variables if effort is None else {"reasoning_effort": effort, **(variables or {})}


class TextFormat(Fields):
    """The format of a response's text, a flat response_format."""

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
    # Of a message and of reasoning.
    role: str | None = None
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    # Of a call and of its output.
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[Part], Field(fail_fast=True)] | None = None


class ResponseTool(Fields):
    """A tool of a response, in the flat format."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedResponseTool(Fields):
    """A tool_choice of a single tool, in the flat format."""

    type: Literal["function"]
    name: str


class AllowedResponseTools(Fields):
    """A tool_choice of several tools, in the flat format."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedResponseTool]


class ResponsesRequest(Conversation):
    """The body of /v1/responses."""

    PROMPT: ClassVar[str] = "input"
    REFUSED: ClassVar[Refused] = _REFUSED | {
        "conversation": ((None,), "give previous_response_id, or the conversation as input"),
        "prompt": ((None,), "give instructions and input"),
        "background": ((None, False), "give stream"),
        "truncation": ((None, "disabled"), "shorten the input"),
        "top_logprobs": ((None, 0), "use /v1/chat/completions"),
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
        return chosen_tools(tools, choice.mode, [tool.name for tool in choice.tools], parallel)

    @property
    def template_variables(self) -> Mapping[str, Any] | None:
        return _with_effort(self.chat_template_kwargs, self.reasoning.effort)

    def _structured_output(self) -> dict[str, Any]:
        given, format_ = super()._structured_output(), self.text.format
        if format_.type == "text":
            return given
        if self.tool_use.is_forced:
            raise ApiError("text.format cannot be combined with a tool_choice that forces a call; "
                           "leave out one of them",
                           param="tool_choice")
        if format_.type == "json_schema" and format_.schema_ is None:
            raise ApiError("text.format of type 'json_schema' has no schema; add it", param="text")
        return {"guided_json": format_.schema_ if format_.type == "json_schema" else _ANY_OBJECT}


def _function_tool(tool: ResponseTool) -> Tool:
    if tool.type != "function":
        raise ApiError(f"tools of type '{tool.type}' are not supported; give tools of type "
                       f"'function'", param="tools", code="unsupported_parameter")
    return Tool(type="function", function=Function.model_validate(
        tool.model_dump(include={"name", "description", "parameters", "strict"})))


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Convert items to messages.

    Consecutive reasoning, text and calls become one assistant message.

    Raises:
        ApiError: an item's type is not supported, or a required field is missing.
    """
    messages: list[dict[str, Any]] = []
    current: dict[str, Any] | None = None  # the current assistant message
    for index, item in enumerate(items):
        if item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": _required(index, item, "call_id"),
                             "content": item.output or ""})
            current = None
        elif item.type == "message" and item.role != "assistant":
            messages.append({"role": _required(index, item, "role"), "content": item.content})
            current = None
        elif item.type in ("message", "function_call", "reasoning"):
            if current is None or (item.type == "reasoning" and len(current) > 1) or (
                    item.type == "message" and ("content" in current or "tool_calls" in current)):
                current = {"role": "assistant"}
                messages.append(current)
            _add_to(current, index, item)
        else:
            raise ApiError(f"input {index} has type '{item.type}'; give messages, function_call, "
                           f"function_call_output or reasoning", param="input")
    return [Message.model_validate(message) for message in messages
            if len(message) > 1 or message["role"] != "assistant"]


def _add_to(message: dict[str, Any], index: int, item: Item) -> None:
    """Add an assistant's item to its message."""
    if item.type == "message":
        message["content"] = item.content
    elif item.type == "function_call":
        message.setdefault("tool_calls", []).append({
            "id": item.call_id or item.id, "function": {
                "name": _required(index, item, "name"), "arguments": item.arguments or "{}"}})
    elif isinstance(item.content, list):
        message["reasoning_content"] = "\n".join(part.text or "" for part in item.content)


def _required(index: int, item: Item, name: str) -> str:
    value = getattr(item, name)
    if not isinstance(value, str) or not value:
        raise ApiError(f"input {index} of type '{item.type}' has no {name}; add it", param="input")
    return value


class TokenizeRequest(Body):
    """The body of vLLM's /tokenize: a prompt or messages."""

    TAKES_MEDIA: ClassVar[bool] = True

    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class LoadAdapterRequest(Body):
    """The body of vLLM's /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1)


class UnloadAdapterRequest(Body):
    """The body of vLLM's /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=256)


class DetokenizeRequest(Body):
    """The body of vLLM's /detokenize."""

    tokens: Ints
