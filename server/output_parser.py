"""Parsing of an answer's text into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmc.runtime.sampling.params import STRUCTURED_OUTPUT_FIELDS, SamplingParams
from llmc.server.model import GenerationJob, Model
from llmc.server.protocol import Conversation
from llmc.server.reasoning import REASONING_MARKS, ReasoningParser
from llmc.server.text_reader import Delta
from llmc.server.tool_parsers import TOOL_PARSERS, Harmony, NamedCall, RequiredCalls, ToolParser

_PROMPT_END = 16  # last tokens of the prompt, in which a template may open the reasoning


class OutputParser:
    """Parser of one answer's text as it arrives.

    Args:
        reasoning: None: the text has no reasoning.
        tools: None: the text has no tool calls.
        parallel: whether to emit calls after the first.

    Attributes:
        calls: number of tool calls so far.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None,
                 parallel: bool = True) -> None:
        self._reasoning, self._tools, self._parallel = reasoning, tools, parallel

    @property
    def calls(self) -> int:
        return 0 if self._tools is None else self._tools.calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the latest text is reasoning."""
        return any(parser is not None and parser.is_reasoning for parser in (
            self._reasoning, self._tools if isinstance(self._tools, Harmony) else None))

    def push(self, text: str, ended: bool = False) -> Iterator[Delta]:
        """Yield the deltas of a text, and of the pending rest if `ended`."""
        for delta in self._split(text, ended):
            content = delta.get("content")
            if self._tools is None or content is None:
                yield delta
            else:
                yield from self._shown(self._tools.push(content))
        if ended and self._tools is not None:
            yield from self._shown(self._tools.finish())

    def _split(self, text: str, ended: bool) -> Iterator[Delta]:
        """Split a text into reasoning and content."""
        if self._reasoning is None:
            yield from [{"content": text}] if text or self._tools is not None else []
            return
        yield from self._reasoning.push(text)
        if ended:
            yield from self._reasoning.finish()

    def _shown(self, deltas: Iterator[Delta]) -> Iterator[Delta]:
        """Drop the deltas of calls that are not allowed."""
        for delta in deltas:
            calls = delta.get("tool_calls")
            if calls is None or self._parallel or calls[0]["index"] == 0:
                yield delta


def output_parser(model: Model, body: Conversation, job: GenerationJob) -> OutputParser:
    """Build the parser of one answer."""
    use = body.tool_use
    tools = {tool.function.name: tool.function.parameters for tool in use.tools}
    if use.is_forced:
        forced = NamedCall if use.mode == "named" else RequiredCalls
        return OutputParser(None, forced(tools))
    guided = _is_guided(job.params)
    parser = None if model.tool_call_parser is None else TOOL_PARSERS[model.tool_call_parser]
    if parser is Harmony:
        return OutputParser(None, None if guided else Harmony(tools), use.parallel)
    reasoning = None
    if model.reasoning_parser is not None and not guided:
        reasoning = ReasoningParser(
            model.reasoning_parser, model.llm.detokenize(job.prompts[0][-_PROMPT_END:]))
    return OutputParser(reasoning, parser(tools) if parser is not None and tools else None,
                        use.parallel)


def with_marks(model: Model, body: Conversation, params: SamplingParams) -> SamplingParams:
    """Return parameters with special tokens shown if the parser needs them."""
    marks: list[str] = []
    if model.tool_call_parser == "harmony" and not _is_guided(params):
        return replace(params, show_special_tokens=True)
    if model.tool_call_parser is not None and body.tool_use.tools and not body.tool_use.is_forced:
        marks += TOOL_PARSERS[model.tool_call_parser].MARKS
    if model.reasoning_parser is not None and not _is_guided(params):
        marks += REASONING_MARKS[model.reasoning_parser]
    shown = params.show_special_tokens or any(mark in model.special_tokens for mark in marks)
    return replace(params, show_special_tokens=shown)


def _is_guided(params: SamplingParams) -> bool:
    """Whether structured output constrains the text, which excludes channels and reasoning."""
    return any(getattr(params, name) for name in STRUCTURED_OUTPUT_FIELDS)
