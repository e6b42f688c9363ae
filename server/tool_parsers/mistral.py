"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": …}]`.

Since tokenizer version 11: `[TOOL_CALLS]NAME[ARGS]{…}`, in some with `[CALL_ID]ID` before `[ARGS]`.
"""

from __future__ import annotations

import secrets
import string

from llmc.server.text_reader import BLANKS, Reading
from llmc.server.tool_parsers.base import ToolParser

_OPEN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ALPHABET = string.ascii_letters + string.digits


class Mistral(ToolParser):
    SIGNS = (_OPEN,)
    MARKS = (_OPEN, _ID, _ARGUMENTS)

    def _new_id(self) -> str:
        """Return an id of nine letters and digits, the only ids that Mistral's templates accept."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def _read(self) -> Reading[None]:
        while True:
            yield from self._content_until(_OPEN)
            first = yield from self._skip_blanks()
            if first == "[":
                self._take(1)
                yield from self._list()
            elif not (yield from self._json_call() if first == "{" else self._named()):
                yield from self._is_content()

    def _list(self) -> Reading[None]:
        while (yield from self._skip_blanks(BLANKS + ",")) == "{":
            if not (yield from self._json_call()):
                yield from self._is_content()
                return
        yield from self._skip_if("]")

    def _named(self) -> Reading[bool]:
        name, mark = yield from self._until(_ARGUMENTS, _ID, "{")
        id_ = None
        if mark == _ID:
            id_, mark = yield from self._until(_ARGUMENTS, "{")
        if name.strip() not in self._tools:
            return False
        if mark == "{":  # the text is decoded without [ARGS]
            self._at -= 1
        yield self._opened(name.strip(), id_)
        yield from self._json_arguments()
        yield from self._closed()
        return True
