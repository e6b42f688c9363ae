"""Tool call parsers, one for each family's format.

A parser reads an answer's text as it arrives and emits deltas of the OpenAI API. By default, the
chat template determines the parser.
"""

from __future__ import annotations

from llmc.server.tool_parsers.base import ToolParser, merged
from llmc.server.tool_parsers.deepseek import DeepSeekV3, DeepSeekV31
from llmc.server.tool_parsers.deepseek_dsml import DeepSeekV4, DeepSeekV32
from llmc.server.tool_parsers.forced import NamedCall, RequiredCalls
from llmc.server.tool_parsers.glm45 import Glm45
from llmc.server.tool_parsers.harmony import Harmony
from llmc.server.tool_parsers.hermes import Hermes
from llmc.server.tool_parsers.kimi_k2 import KimiK2
from llmc.server.tool_parsers.llama3_json import Llama3Json
from llmc.server.tool_parsers.llama4_pythonic import Llama4Pythonic
from llmc.server.tool_parsers.minimax_m2 import MiniMaxM2
from llmc.server.tool_parsers.mistral import Mistral
from llmc.server.tool_parsers.qwen3_coder import Qwen3Coder, SeedOss

__all__ = ["TOOL_PARSERS", "Harmony", "NamedCall", "RequiredCalls", "ToolParser", "merged",
           "recognized_parser"]

# By vLLM's names. The first parser that recognizes a chat template is used.
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "harmony": Harmony, "kimi_k2": KimiK2, "minimax_m2": MiniMaxM2,
    "deepseek_v3": DeepSeekV3,  # before V3.1, because its template has the marks of V3.1, too
    "deepseek_v31": DeepSeekV31, "deepseek_v32": DeepSeekV32, "deepseek_v4": DeepSeekV4,
    "glm45": Glm45, "seed_oss": SeedOss, "qwen3_coder": Qwen3Coder, "hermes": Hermes,
    "mistral": Mistral,
    "llama4_pythonic": Llama4Pythonic, "llama3_json": Llama3Json}


def recognized_parser(chat_template: str) -> str | None:
    """Return the name of a chat template's parser; None if its format is unknown."""
    return next((name for name, parser in TOOL_PARSERS.items()
                 if parser.recognizes(chat_template)), None)
