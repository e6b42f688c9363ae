"""Reasoning between markers before an answer."""

from __future__ import annotations

from llmc.server.text_reader import BLANKS, Delta, Reading, TextReader, emitted

# Opening and closing markers by family.
REASONING_MARKS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>")}


def recognized_reasoning(chat_template: str) -> str | None:
    """Return the key of the markers in a chat template; None if it has none."""
    return next((name for name, marks in REASONING_MARKS.items()
                 if any(mark in chat_template for mark in marks)), None)


class ReasoningParser(TextReader):
    """Splits an answer's text into reasoning and content.

    Text after the reasoning is emitted as `content`, and may have tool calls. White space around
    the reasoning is dropped.

    Args:
        name: key of `REASONING_MARKS`.
        prompt_end: end of the prompt, in which a chat template may open the reasoning.
    """

    def __init__(self, name: str, prompt_end: str) -> None:
        super().__init__()
        self._open, self._close = REASONING_MARKS[name]
        self.is_reasoning = prompt_end.rstrip(BLANKS).endswith(self._open)

    def _read(self) -> Reading[None]:
        if not self.is_reasoning:
            self._raw = ""
            self.is_reasoning = (yield from self._skip_mark(self._open)) != ""
        if self.is_reasoning:
            yield from self._skip_blanks()
            # Models may repeat the opening marker of the prompt.
            if (yield from self._skip_mark(self._open)):
                yield from self._skip_blanks()
            yield from self._reasoning()
            self.is_reasoning = False
            yield from self._skip_blanks()
        yield from emitted(self._pieces_until(), lambda text: {"content": text})

    def _reasoning(self) -> Reading[None]:
        """Emit text up to the closing marker, without white space before it."""
        blanks = ""
        pieces = self._pieces_until(self._close)
        while True:
            try:
                piece = next(pieces)
            except StopIteration:
                return
            if piece is None:
                yield None
                continue
            text = (blanks + piece).rstrip(BLANKS)
            blanks = (blanks + piece)[len(text):]
            if text:
                yield _reasoning_delta(text)


def _reasoning_delta(text: str) -> Delta:
    return {"reasoning_content": text}
