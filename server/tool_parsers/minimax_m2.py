"""MiniMax M2.

    <minimax:tool_call>
    <invoke name="NAME">
    <parameter name="KEY">VALUE</parameter>
    </invoke>
    </minimax:tool_call>
"""

from __future__ import annotations

from llmc.server.tool_parsers.invoke import InvokeParser


class MiniMaxM2(InvokeParser):
    OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
    INVOKE, INVOKE_END = "<invoke", "</invoke>"
    PARAMETER, PARAMETER_END = "<parameter", "</parameter>"
    SIGNS = (OPEN, INVOKE)
    MARKS = (OPEN, CLOSE)
