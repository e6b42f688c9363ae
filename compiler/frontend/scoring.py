"""Causal LMs that score pairs of texts by logits of tokens, and the template of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmc.compiler.frontend.pooling import LogitScore
from llmc.compiler.frontend.tokenizer_config import TEMPLATE
from llmc.errors import LlmcError, shown
from llmc.runtime.chat_template import DEFAULT, ChatTemplate
from llmc.runtime.sandbox import Sandbox
from llmc.runtime.tokenizer import read_tokenizer

# Words of a template's probe. No template has them.
_QUERY, _DOCUMENT = "llmcquery", "llmcdocument"


@dataclass(frozen=True)
class Scoring:
    """How pairs of texts are scored, by the options of a compilation.

    Args:
        tokens: `classifier_from_token`: the tokens whose logits are compared, of a wrong and of a
            right document, or of a right one only; empty: the model has a classifier.
        template: `score_template`: file of the template that makes a pair one text.
    """

    tokens: tuple[str, ...] = ()
    template: Path | None = None

    @staticmethod
    def of(tokens: str, template: str | Path | None) -> Scoring:
        """Read the options; tokens are separated by a comma."""
        return Scoring(tuple(tokens.split(",")) if tokens else (),
                       None if template is None else Path(template))

    def read_template(self) -> str | None:
        """Return the contents of the template's file.

        Raises:
            LlmcError: it cannot be read.
        """
        if self.template is None:
            return None
        try:
            return self.template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LlmcError(f"score_template '{self.template}' cannot be read ({error}); give a "
                            f"Jinja file in UTF-8") from error


BY_CHECKPOINT = Scoring()


def logit_score(tokens: Sequence[str], tokenizer: Path) -> LogitScore:
    """Return the layer that compares the logits of tokens.

    Args:
        tokens: one (of a right document) or two (of a wrong and of a right one).
        tokenizer: directory of tokenizer.json.

    Raises:
        LlmcError: the tokenizer is missing, or a text is not one of its tokens.
    """
    if not (tokenizer / "tokenizer.json").is_file():
        raise LlmcError("classifier_from_token is given, but the model has no tokenizer; copy "
                        "tokenizer.json from the model's repository")
    known = read_tokenizer(tokenizer)
    ids = []
    for text in tokens:
        token = known.token_to_id(text)
        if token is None:
            raise LlmcError(f"classifier_from_token names {shown(text)}, which is no token of the "
                            f"model's tokenizer; give tokens as tokenizer.json spells them")
        ids.append(token)
    return LogitScore(ids[-1], ids[0] if len(ids) == 2 else None)


def check_pair_template(tokenizer: Path) -> None:
    """Reject a template that loses the query or the document of a pair.

    Args:
        tokenizer: directory of the tokenizer's files, as a case directory has them.

    Raises:
        LlmcError: there is no template, or its text lacks one of them.
    """
    path = tokenizer / TEMPLATE
    advice = "give --score_template with a Jinja file that writes the contents of the roles " \
             "query and document"
    if not path.is_file():
        raise LlmcError(f"the model has no chat template, which makes one text of a query and a "
                        f"document; {advice}")
    template = ChatTemplate({DEFAULT: path}, tokenizer / "tokenizer_config.json", Sandbox())
    text = template.render([{"role": "query", "content": _QUERY},
                            {"role": "document", "content": _DOCUMENT}])
    lost = [role for role, word in (("query", _QUERY), ("document", _DOCUMENT)) if word not in text]
    if lost:
        raise LlmcError(f"the template of a pair does not write the {' and the '.join(lost)}; "
                        f"{advice}")
