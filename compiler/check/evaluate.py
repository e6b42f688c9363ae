"""Quality of a compiled model and of transformers: perplexity, and ROUGE of summaries.

Both get the same token ids, and transformers runs in float32. The default data is `ARTICLES`: short
articles, each with a summary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from llmc.artifacts.manifest import Manifest, read_manifest, require_causal_lm
from llmc.errors import LlmcError
from llmc.installation import install_command
from llmc.plugins.code_types import CODE_TYPES
from llmc.runtime.core.llm import LLM
from llmc.runtime.sampling.params import SamplingParams

if TYPE_CHECKING:
    from llmc.compiler.check.reference import Model

ARTICLES = Path(__file__).with_name("articles.jsonl")
# Tolerances by dtype: of perplexity relative to transformers', of ROUGE in points of 100. In
# float16 and bfloat16, SmolLM2-135M in transformers differs by 8e-5 and 2e-3, and by up to 0.8 and
# 1.5 points.
PERPLEXITY_TOLERANCES = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 0.02}
# By bits of quantized weights: SmolLM2-135M differs by 0.01 and, in groups of 32, 0.27.
_QUANTIZED_TOLERANCES = {8: 0.05, 4: 0.5}
_CHOICES = 1000  # tokens whose top-1 prediction is compared
ROUGE_TOLERANCES = {"float32": 1.0, "float16": 5.0, "bfloat16": 5.0}
_MAX_LENGTH = 1024
_MAX_TOKENS = 64
_ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_FORM = '{"article": "…", "summary": "…"}'

Progress = Callable[[str, int, int], None]  # phase, steps done, total steps


@dataclass(frozen=True)
class Score:
    """A metric. Without a reference, `transformers` and `difference` are None.

    `difference` is llmc's minus transformers': relative for perplexity, in points for ROUGE,
    absolute for Spearman correlations, nDCG and recall.
    """

    name: str
    llmc: float
    transformers: float | None
    difference: float | None


@dataclass(frozen=True)
class Summary:
    """The generated summaries of an article; `transformers` is None without a reference."""

    article: str
    reference: str
    llmc: str
    transformers: str | None


@dataclass(frozen=True)
class Answer:
    """The answers to a line's prompt; `transformers` is None without a reference.

    Args:
        line: number of the line, from 1.
        expected: answers of the line.
    """

    line: int
    expected: tuple[str, ...]
    llmc: str
    transformers: str | None


@dataclass(frozen=True)
class EvalReport:
    """The result of an evaluation.

    Attributes:
        count: number of scored tokens, of articles, of answers, of pairs, or of queries.
        summaries: the summaries of articles.
        verdict: None if every difference is within tolerance.
        kept: number of tokens with the reference's top-1 prediction, and number compared.
        answers: the answers to prompts.
        failures: reasons of lines that were left out.
    """

    task: str
    case_dir: str
    data: str
    reference: str | None
    tolerance: float | None
    count: int
    scores: tuple[Score, ...]
    summaries: tuple[Summary, ...]
    verdict: str | None
    kept: tuple[int, int] | None = None
    answers: tuple[Answer, ...] = ()
    failures: tuple[str, ...] = ()


def quiet(phase: str, done: int, total: int) -> None:
    pass


def perplexity(case_dir: str | Path, *, data: str | Path | None = None,
               hf_dir: str | Path | None = None, tolerance: float | None = None,
               max_length: int | None = None, stride: int | None = None,
               device: Sequence[int] | None = None, progress: Progress = quiet) -> EvalReport:
    """Compute the perplexity of a text: exp of the mean negative log-likelihood of its tokens.

    The text is scored in windows of `max_length` tokens, at intervals of `stride` tokens. A window
    scores the tokens that no earlier window scored. So every token except the text's first is
    scored once, with a context of at least `max_length - stride` tokens (or all). The last window
    may be shorter. If `stride` is `max_length`, windows do not overlap, and the first token of each
    is not scored. The tokenizer's special tokens are added once, to the whole text.

    Args:
        case_dir: the case directory.
        data: a UTF-8 text file, or articles as JSON lines; default: `ARTICLES`.
        hf_dir: the original, to be scored by transformers.
        tolerance: largest relative difference from transformers; default: by the model's dtype,
            see `PERPLEXITY_TOLERANCES`.
        max_length: at most the model's max_seq_len; default: that, at most 1024.
        stride: default: half of `max_length`.
        device: see `LLM`.
        progress: called with a phase, the windows done, and their total.

    Raises:
        LlmcError: a file cannot be read, the text is too short, or an argument is out of range.
    """
    require_causal_lm(read_manifest(case_dir), "eval")
    text = _read_text(data)
    progress("load llmc", 0, 1)
    with LLM(case_dir, device=device, max_batch_size=1) as llm:
        dims = llm.manifest.dims
        allowed = reference_tolerance(tolerance, hf_dir, perplexity_tolerance(llm.manifest))
        if max_length is None:
            max_length = min(_MAX_LENGTH, dims.max_seq_len)
        if not 2 <= max_length <= dims.max_seq_len:
            raise LlmcError(f"max_length {max_length} is not in the range from 2 to max_seq_len "
                            f"{dims.max_seq_len}; give a value in it")
        if stride is None:
            stride = max_length // 2
        if not 1 <= stride <= max_length:
            raise LlmcError(f"stride {stride} is not in the range from 1 to max_length "
                            f"{max_length}; give a value in it")
        ids = _tokenizer(llm).encode(text).ids
        if len(ids) < 2:
            raise LlmcError(f"'{data}' has {len(ids)} token(s), expected at least 2; give a longer "
                            f"text")
        windows = list(_windows(len(ids), max_length, stride))
        ours, choices = _perplexity(llm.logits, ids, windows, lambda done: progress(
            "llmc", done, len(windows)))
    theirs, kept = None, None
    if hf_dir is not None:
        from llmc.compiler.check.reference import reference_logits

        progress("load transformers", 0, 1)
        model = load_matching_reference(hf_dir, dims.vocab_size, case_dir)
        theirs, expected = _perplexity(lambda tokens: reference_logits(model, tokens), ids, windows,
                                       lambda done: progress("transformers", done, len(windows)))
        total = min(_CHOICES, len(expected))
        kept = int((choices[:total] == expected[:total]).sum()), total
    score = Score("perplexity", ours, theirs, None if theirs is None else ours / theirs - 1)
    return EvalReport("perplexity", str(case_dir), str(data or ARTICLES), _text(hf_dir), allowed,
                      sum(end - first for _, first, end in windows), (score,), (),
                      verdict([score], allowed), kept)


def perplexity_tolerance(manifest: Manifest) -> float:
    """Return the largest relative difference from transformers' perplexity."""
    known = PERPLEXITY_TOLERANCES[manifest.dtype]
    bits = [CODE_TYPES[dtype].precision for dtype in manifest.quantization or ()]
    return max([known, *(_QUANTIZED_TOLERANCES[number] for number in bits)])


def summarize(case_dir: str | Path, *, data: str | Path | None = None,
              hf_dir: str | Path | None = None, tolerance: float | None = None,
              max_tokens: int | None = None, device: Sequence[int] | None = None,
              progress: Progress = quiet) -> EvalReport:
    """Compute ROUGE-1, -2, -L and -Lsum of greedy summaries.

    Scores are mean F1 of stemmed words, from 0 to 100. A model with a chat template is prompted for
    two sentences; any other continues the article and "TL;DR:". For ROUGE-Lsum, sentences end in
    . ! or ?

    Args:
        case_dir: the case directory.
        data: JSON lines with strings `article` and `summary`; default: `ARTICLES`.
        hf_dir: the original, to complete the same prompts by transformers.
        tolerance: largest difference from transformers in points; default: by the model's dtype,
            see `ROUGE_TOLERANCES`.
        max_tokens: maximum tokens of a summary; default: 64.
        device: see `LLM`.
        progress: called with a phase, the summaries done, and their total.

    Raises:
        LlmcError: a file cannot be read, an article is too long, or rouge_score is not installed.
    """
    require_causal_lm(read_manifest(case_dir), "eval")
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as error:
        raise LlmcError(f"ROUGE needs the package rouge_score; install it with: "
                        f"{install_command('eval')}") from error
    articles = read_articles(data or ARTICLES)
    if max_tokens is None:
        max_tokens = _MAX_TOKENS
    if max_tokens < 1:
        raise LlmcError(f"max_tokens {max_tokens} is below 1; give 1 or more")
    progress("load llmc", 0, 1)
    with LLM(case_dir, device=device) as llm:
        manifest, tokenizer = llm.manifest, _tokenizer(llm)
        allowed = reference_tolerance(tolerance, hf_dir, ROUGE_TOLERANCES[manifest.dtype])
        prompts = [_summary_prompt(llm, article) for article, _ in articles]
        longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
        if len(prompts[longest]) + max_tokens > manifest.dims.max_seq_len:
            raise LlmcError(f"article {longest + 1} of '{data or ARTICLES}' has "
                            f"{len(prompts[longest])} tokens with its prompt, which with "
                            f"max_tokens {max_tokens} exceed max_seq_len "
                            f"{manifest.dims.max_seq_len}; shorten it, or compile with a larger "
                            f"--max_seq_len")
        ours, done = [""] * len(prompts), 0
        for piece in llm.stream(prompts, SamplingParams(max_tokens=max_tokens)):
            ours[piece.index] += piece.text
            if piece.finish_reason:
                done += 1
                progress("llmc", done, len(prompts))
    theirs: list[str] | None = None
    if hf_dir is not None:
        from llmc.compiler.check.reference import reference_greedy

        progress("load transformers", 0, 1)
        model = load_matching_reference(hf_dir, manifest.dims.vocab_size, case_dir)
        theirs = []
        for prompt in prompts:
            greedy = reference_greedy(model, prompt, max_tokens, manifest.tokenizer.eos_token_ids)
            theirs.append(tokenizer.decode(greedy.tokens))
            progress("transformers", len(theirs), len(prompts))
    scorer = RougeScorer(_ROUGE, use_stemmer=True)
    expected = [summary for _, summary in articles]
    scores = _rouge(scorer, expected, ours, theirs)
    others: Sequence[str | None] = [None] * len(ours) if theirs is None else theirs
    summaries = tuple(Summary(*articles[i], ours[i].strip(), other and other.strip())
                      for i, other in enumerate(others))
    return EvalReport("summarize", str(case_dir), str(data or ARTICLES), _text(hf_dir), allowed,
                      len(articles), scores, summaries, verdict(scores, allowed))


def read_articles(path: str | Path) -> list[tuple[str, str]]:
    """Read articles with their summaries from a file of JSON lines.

    Raises:
        LlmcError: the file cannot be read or has no articles, or a line lacks the strings
            `article` and `summary`; the message has the line's number.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise LlmcError(f"'{path}' cannot be read ({error.strerror}); give a readable file") \
            from error
    articles = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LlmcError(f"'{path}', line {number}, is not JSON ({error}); write it like "
                            f"{_FORM}") from error
        for key in ("article", "summary"):
            value = entry.get(key) if isinstance(entry, dict) else None
            if not isinstance(value, str) or not value.strip():
                raise LlmcError(f"'{path}', line {number}, has no string '{key}'; write it like "
                                f"{_FORM}")
        articles.append((entry["article"], entry["summary"]))
    if not articles:
        raise LlmcError(f"'{path}' has no articles; write one a line, like {_FORM}")
    return articles


def _read_text(path: str | Path | None) -> str:
    if path is None or Path(path).suffix == ".jsonl":
        return "\n\n".join(article for article, _ in read_articles(path or ARTICLES))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise LlmcError(f"'{path}' cannot be read ({error.strerror}); give a readable file") \
            from error
    except UnicodeDecodeError as error:
        raise LlmcError(f"'{path}' is not UTF-8 (byte {error.start}); convert it") from error
    if not text.strip():
        raise LlmcError(f"'{path}' is empty; give a text to score")
    return text


def _tokenizer(llm: LLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise LlmcError(f"'{llm.case_dir}' was compiled without a tokenizer, which eval needs; "
                        f"compile a model directory that has one")
    return llm.tokenizer


def reference_tolerance(given: float | None, hf_dir: str | Path | None, default: float) -> \
        float | None:
    """Return the tolerance; None without a reference."""
    if given is not None and (hf_dir is None or not given >= 0):
        raise LlmcError(f"tolerance {given} is negative; give 0 or more" if hf_dir else
                        f"tolerance {given} is given without hf_dir, the reference; give both")
    if hf_dir is None:
        return None
    return default if given is None else given


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)


def verdict(scores: Sequence[Score], tolerance: float | None) -> str | None:
    """Describe a score that is over tolerance or not finite; None if all are good."""
    for score in scores:
        if not np.isfinite(score.llmc):
            return f"llmc's {score.name} is {score.llmc}"
        if score.difference is not None and tolerance is not None \
                and not abs(score.difference) <= tolerance:
            return (f"{score.name} is {score.llmc:.6g}, transformers' {score.transformers:.6g}: "
                    f"the difference {score.difference:+.3g} is over tolerance {tolerance:g}")
    return None


def _windows(count: int, max_length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield begin, first scored token and end of each window over `count` tokens."""
    scored = 1
    for begin in range(0, count, stride):
        end = min(begin + max_length, count)
        first = max(scored, begin + 1)
        if first < end:
            yield begin, first, end
        if end == count:
            return
        scored = end


def _perplexity(logits_of: Callable[[list[int]], np.ndarray], ids: list[int],
                windows: Sequence[tuple[int, int, int]], progress: Callable[[int], None]) -> \
        tuple[float, np.ndarray]:
    """Return the perplexity and the top-1 token at each position.

    `logits_of` returns logits float32 [num_tokens, vocab_size] of a window's tokens.
    """
    losses, choices = [], []
    for number, (begin, first, end) in enumerate(windows, 1):
        logits = logits_of(ids[begin:end - 1])
        for row, token in zip(logits[first - 1 - begin:], ids[first:end], strict=True):
            scores = row.astype(np.float64)
            scores -= scores.max()
            losses.append(np.log(np.exp(scores).sum()) - scores[token])
            choices.append(int(row.argmax()))
        progress(number)
    with np.errstate(over="ignore"):
        return float(np.exp(np.mean(losses))), np.array(choices)


def _summary_prompt(llm: LLM, article: str) -> list[int]:
    if llm.manifest.tokenizer.chat_template is not None:
        text = llm.render_chat(f"Summarize this article in two sentences.\n\n{article}")
        return llm.tokenize(text, add_special_tokens=False)
    ids: list[int] = _tokenizer(llm).encode(f"{article}\n\nTL;DR:").ids
    return ids


class _Scorer(Protocol):
    """The interface of rouge_score's scorer, without type hints there."""

    def score(self, target: str, prediction: str) -> Mapping[str, Any]: ...


def _rouge(scorer: _Scorer, expected: Sequence[str], ours: Sequence[str],
           theirs: Sequence[str] | None) -> tuple[Score, ...]:
    def means(texts: Sequence[str]) -> dict[str, float]:
        rows = [scorer.score(_sentences(summary), _sentences(text))
                for summary, text in zip(expected, texts, strict=True)]
        return {name: 100 * float(np.mean([row[name].fmeasure for row in rows]))
                for name in _ROUGE}

    left = means(ours)
    right = means(theirs) if theirs is not None else None
    return tuple(Score(name, left[name], None if right is None else right[name],
                       None if right is None else left[name] - right[name]) for name in _ROUGE)


def _sentences(text: str) -> str:
    """Put each sentence on a line, as ROUGE-Lsum expects."""
    return re.sub(r"(?<=[.!?])\s+", "\n", text.strip())


def load_matching_reference(hf_dir: str | Path, vocab_size: int, case_dir: str | Path,
                            takes_media: bool = False) -> Model:
    """Load the original of a case directory by transformers.

    Args:
        vocab_size: that of the case directory.
        takes_media: load its encoders of images and audio, too.

    Raises:
        LlmcError: transformers cannot load it, or it is another model.
    """
    from llmc.compiler.check.reference import load_reference

    model = load_reference(hf_dir, takes_media=takes_media)
    size = model.config.get_text_config().vocab_size
    if size != vocab_size:
        raise LlmcError(f"'{hf_dir}' has vocabulary size {size}, '{case_dir}' has {vocab_size}; "
                        f"give the model that it was compiled from")
    return model


def print_report(report: EvalReport) -> None:
    """Print the report as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    compared = report.reference is not None
    table = Table(report.task, "llmc", *(["transformers", "difference"] if compared else []))
    for score in report.scores:
        row = [score.name, f"{score.llmc:.4f}"]
        if score.transformers is not None and score.difference is not None:
            row += [f"{score.transformers:.4f}", f"{score.difference:+.2e}"]
        table.add_row(*row)
    console.print(table)
    unit = {"perplexity": "tokens", "summarize": "articles", "similarity": "pairs",
            "retrieval": "queries", "answers": "answers"}[report.task]
    console.print(f"{report.count} {unit} of {Path(report.data).name}")
    if report.kept is not None:
        console.print(f"{report.kept[0]} of the first {report.kept[1]} tokens have transformers' "
                      f"top-1 prediction")
    texts = report.summaries or report.answers
    if compared and texts:
        equal = sum(own.llmc == own.transformers for own in texts)
        console.print(f"{equal} of {report.count} {'summaries' if report.summaries else 'answers'} "
                      f"are equal")
    for failure in report.failures:
        console.print(failure, markup=False)
    if compared:
        console.print(report.verdict or f"within tolerance {report.tolerance:g}")
