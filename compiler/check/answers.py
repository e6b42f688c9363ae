"""Quality of a compiled model's answers and of transformers': exact match and perplexity.

Both get the same token ids and the same preprocessed images and audio clips, and transformers runs
in float32.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.artifacts.manifest import read_manifest, require_causal_lm
from llmc.compiler.check.evaluate import (
    ROUGE_TOLERANCES,
    Answer,
    EvalReport,
    Progress,
    Score,
    load_matching_reference,
    perplexity_tolerance,
    quiet,
    reference_tolerance,
    verdict,
)
from llmc.errors import LlmcError, reason_of, shown
from llmc.runtime.core.llm import LLM
from llmc.runtime.prompt_file import MEDIA_KEYS, PROMPT_KEYS, read_prompt
from llmc.runtime.prompts import MediaPrompt, Prompt
from llmc.runtime.sampling.params import SamplingParams

if TYPE_CHECKING:
    from llmc.compiler.check.reference import Model

_MAX_TOKENS = 64
_TOGETHER = 16  # lines whose images and audio are in memory at once
_KEYS = (*PROMPT_KEYS, *MEDIA_KEYS, "id", "answer", "stop")
_FORM = '{"prompt": "…", "images": ["a.png"], "answer": "…"}'
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class _Line:
    """A line of the data.

    Args:
        number: counted from 1, with blank lines.
        request: its prompt, as in a prompt file.
        answers: texts that match; the first is scored.
        stop: strings that end the model's answer.
    """

    number: int
    request: dict[str, Any]
    answers: tuple[str, ...]
    stop: tuple[str, ...]


@dataclass(frozen=True)
class _Question:
    """A line as the model reads it.

    Args:
        prompt: token ids, or a prompt with images or audio.
        answer: token ids of the first answer.
    """

    line: _Line
    prompt: list[int] | MediaPrompt
    answer: list[int]

    @property
    def token_ids(self) -> list[int]:
        return self.prompt.token_ids if isinstance(self.prompt, MediaPrompt) else self.prompt

    @property
    def with_answer(self) -> list[int] | MediaPrompt:
        """The prompt, followed by the answer."""
        ids = [*self.token_ids, *self.answer]
        return replace(self.prompt, token_ids=ids) if isinstance(self.prompt, MediaPrompt) else ids


@dataclass(frozen=True)
class _Result:
    """What a model makes of a line.

    Args:
        text: its greedy answer.
        logprobs: log-probabilities of the tokens of the line's first answer; empty: not scored.
    """

    text: str
    logprobs: tuple[float, ...] = ()


def answers(case_dir: str | Path, *, data: str | Path | None = None,
            hf_dir: str | Path | None = None, tolerance: float | None = None,
            max_tokens: int | None = None, chat: bool = False,
            device: Sequence[int] | None = None, progress: Progress = quiet) -> EvalReport:
    """Compute exact match and perplexity of answers to prompts, with images and audio or without.

    Exact match is the percentage of greedy completions that equal one of the line's answers but for
    case, punctuation and spaces. Perplexity is exp of the mean negative log-likelihood of the
    tokens of the first answers, each after its prompt; an EOS token is not scored. It is left out
    for a model whose attention to the prompt is bidirectional.

    A line that llmc or transformers cannot read, as for a damaged image, is left out of the scores;
    the report lists it, and the verdict is negative.

    Args:
        case_dir: the case directory.
        data: JSON lines with `answer`, a text or a list of texts, and a prompt as in a prompt file:
            one of `prompt`, `token_ids` and `messages`, with `images` and `audio`. `stop` has texts
            that end the model's answer.
        hf_dir: the original, to be run by transformers.
        tolerance: largest relative difference of the perplexity from transformers; without
            perplexity, of exact match in points. Default: by the model's dtype, see
            `PERPLEXITY_TOLERANCES` and `ROUGE_TOLERANCES`.
        max_tokens: maximum tokens of the model's answer; default: 64.
        chat: put each `prompt` into the model's chat template.
        device: see `LLM`.
        progress: called with a phase, the lines done, and their total.

    Raises:
        LlmcError: the file cannot be read, a line is invalid, or no line can be answered.
    """
    if data is None:
        raise LlmcError(f"task answers is given without data; give a file of JSON lines like "
                        f"{_FORM}")
    manifest = read_manifest(case_dir)
    require_causal_lm(manifest, "eval")
    lines = _read_lines(data)
    if max_tokens is None:
        max_tokens = _MAX_TOKENS
    if max_tokens < 1:
        raise LlmcError(f"max_tokens {max_tokens} is below 1; give 1 or more")
    scored = manifest.image is None or manifest.image.bidirectional != "prompt"
    allowed = reference_tolerance(tolerance, hf_dir, perplexity_tolerance(manifest) if scored
                                  else ROUGE_TOLERANCES[manifest.dtype])
    progress("load llmc", 0, 1)
    with LLM(case_dir, device=device) as llm:
        if llm.tokenizer is None:
            raise LlmcError(f"'{case_dir}' was compiled without a tokenizer, which eval needs; "
                            f"compile a model directory that has one")
        ours, failures = dict[int, _Result](), list[str]()
        for start in range(0, len(lines), _TOGETHER):
            together = lines[start:start + _TOGETHER]
            ours |= _run(llm, together, max_tokens, scored, chat, failures)
            progress("llmc", start + len(together), len(lines))
    if not ours:
        raise LlmcError(f"no line of '{data}' can be answered: {failures[0]}")
    lines = [line for line in lines if line.number in ours]
    theirs = dict[int, _Result]()
    if hf_dir is not None:
        progress("load transformers", 0, 1)
        model = load_matching_reference(hf_dir, manifest.dims.vocab_size, case_dir,
                                        takes_media=bool(manifest.media))
        for number, line in enumerate(lines, 1):
            try:
                question = _read(llm, line, chat)  # again, as few images fit in memory
                theirs[line.number] = _run_reference(model, llm, question, max_tokens, scored)
            except LlmcError as error:
                failures.append(f"line {line.number}: {error}")
            progress("transformers", number, len(lines))
        if not theirs:
            raise LlmcError(f"no line of '{data}' can be answered by transformers: {failures[-1]}")
        lines = [line for line in lines if line.number in theirs]
        ours = {number: ours[number] for number in theirs}
    scores = [_exact_match(lines, ours, theirs)]
    if scored:
        scores.append(_perplexity(ours, theirs))
    found = verdict(scores[-1:], allowed)
    if failures:
        found = f"{len(failures)} line(s) of '{data}' cannot be read: {failures[0]}"
    return EvalReport(
        "answers", str(case_dir), str(data), None if hf_dir is None else str(hf_dir), allowed,
        len(ours), tuple(scores), (), found, answers=tuple(
            Answer(line.number, line.answers, ours[line.number].text,
                   theirs[line.number].text if theirs else None) for line in lines),
        failures=tuple(failures))


def _read(llm: LLM, line: _Line, chat: bool) -> _Question:
    """Read a line's prompt and tokenize its answer.

    Raises:
        LlmcError: an image or audio clip is invalid, or the model does not take it.
    """
    prompt = read_prompt(llm, line.request, chat)
    if isinstance(prompt, str):
        prompt = llm.tokenize(prompt)
    assert isinstance(prompt, list | MediaPrompt)
    answer = llm.tokenize(line.answers[0], add_special_tokens=False)
    if not answer:
        raise LlmcError(f"the answer {shown(line.answers[0])} has no tokens; give another")
    return _Question(line, prompt, answer)


def _run(llm: LLM, lines: Sequence[_Line], max_tokens: int, scored: bool, chat: bool,
         failures: list[str]) -> dict[int, _Result]:
    """Answer lines together, and score their answers: results by number of the line.

    Args:
        failures: the reasons of lines that cannot be read are added.
    """
    questions = list[_Question]()
    prompts, params = list[Prompt](), list[SamplingParams]()
    for line in lines:
        greedy = SamplingParams(max_tokens=max_tokens, temperature=0, stop=line.stop)
        try:
            question = _read(llm, line, chat)
            asked: list[tuple[Prompt, SamplingParams]] = [(question.prompt, greedy)]
            if scored:
                asked.append((question.with_answer,
                              SamplingParams(max_tokens=0, prompt_logprobs=0)))
            for prompt, own in asked:
                llm.stream([prompt], own)  # validates the request without running it
        except LlmcError as error:
            failures.append(f"line {line.number}: {error}")
            continue
        questions.append(question)
        prompts += [prompt for prompt, _ in asked]
        params += [own for _, own in asked]
    if not questions:
        return {}
    completions = iter(llm.generate(prompts, params))
    results = dict[int, _Result]()
    for question in questions:
        text, logprobs = next(completions).text, list[float]()
        if scored:
            of_prompt = next(completions).prompt_logprobs or ()
            logprobs = [own.chosen for own in of_prompt[-len(question.answer):] if own is not None]
        results[question.line.number] = _Result(text, tuple(logprobs))
    return results


def _run_reference(model: Model, llm: LLM, question: _Question, max_tokens: int,
                   scored: bool) -> _Result:
    """The same by transformers."""
    from llmc.compiler.check.media import media_arrays
    from llmc.compiler.check.reference import reference_greedy, reference_logits

    image, ids = llm.manifest.image, question.token_ids
    asked, with_answer = ({} if not isinstance(prompt, MediaPrompt) else media_arrays(
        model, prompt, None if image is None else image.bidirectional)
        for prompt in (question.prompt, question.with_answer))
    try:
        greedy = reference_greedy(model, ids, max_tokens, llm.manifest.tokenizer.eos_token_ids,
                                  asked)
        logits = reference_logits(model, [*ids, *question.answer], with_answer) if scored else None
    except (RuntimeError, ValueError) as error:
        raise LlmcError(f"transformers cannot run it ({reason_of(error)}); leave out hf_dir, or "
                        f"the line") from error
    text = llm.detokenize(greedy.tokens, skip_special_tokens=True)
    ends = [place for own in question.line.stop if (place := text.find(own)) >= 0]
    text = text[:min(ends)] if ends else text
    if logits is None:
        return _Result(text)
    rows = logits[len(ids) - 1:-1].astype(np.float64)
    rows -= rows.max(1, keepdims=True)
    chosen = rows[np.arange(len(rows)), question.answer] - np.log(np.exp(rows).sum(1))
    return _Result(text, tuple(chosen.tolist()))


def _exact_match(lines: Sequence[_Line], ours: Mapping[int, _Result],
                 theirs: Mapping[int, _Result]) -> Score:
    """Percentage of lines whose answer matches."""
    left, right = (100 * float(np.mean([_matches(results[line.number].text, line.answers)
                                        for line in lines])) if results else None
                   for results in (ours, theirs))
    assert left is not None
    return Score("exact_match", left, right, None if right is None else left - right)


def _matches(text: str, answers: Sequence[str]) -> bool:
    return any(_normalized(text) == _normalized(own) for own in answers)


def _normalized(text: str) -> str:
    """A text without case, punctuation and repeated spaces; punctuation alone stays."""
    words = " ".join(text.casefold().translate(_PUNCTUATION).split())
    return words or " ".join(text.split())


def _perplexity(ours: Mapping[int, _Result], theirs: Mapping[int, _Result]) -> Score:
    left, right = (float(np.exp(-np.mean([own for result in results.values()
                                          for own in result.logprobs]))) if results else None
                   for results in (ours, theirs))
    assert left is not None
    return Score("perplexity", left, right, None if right is None else left / right - 1)


def _read_lines(path: str | Path) -> list[_Line]:
    """Read the data.

    Raises:
        LlmcError: the file cannot be read or has no lines, or a line is invalid; the message has
            its number.
    """
    try:
        content = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise LlmcError(f"'{path}' cannot be read ({error.strerror}); give a readable file") \
            from error
    lines = list[_Line]()
    for number, line in enumerate(content, 1):
        if line.strip():
            try:
                lines.append(_read_line(number, line))
            except LlmcError as error:
                raise LlmcError(f"'{path}', line {number}, {error}; write it like {_FORM}") \
                    from None
    if not lines:
        raise LlmcError(f"'{path}' has no lines; write one for each answer, like {_FORM}")
    return lines


def _read_line(number: int, line: bytes) -> _Line:
    """Read a line.

    Raises:
        LlmcError: it is invalid; the message is the predicate of a sentence.
    """
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LlmcError(f"is not JSON ({error})") from None
    if not isinstance(request, dict):
        raise LlmcError(f"is {shown(request)}")
    unknown = next((key for key in request if key not in _KEYS), None)
    if unknown is not None:
        raise LlmcError(f"has the key {shown(unknown)}, supported: {', '.join(_KEYS)}")
    kinds = [key for key in PROMPT_KEYS if key in request]
    if len(kinds) != 1:
        raise LlmcError(f"has {' and '.join(kinds) or 'none'} of {', '.join(PROMPT_KEYS)}, "
                        f"expected one")
    texts = {key: _texts(key, request.pop(key, [])) for key in ("answer", "stop")}
    if not texts["answer"]:
        raise LlmcError("has no answer")
    return _Line(number, request, texts["answer"], texts["stop"])


def _texts(key: str, value: object) -> tuple[str, ...]:
    """Read a text or a list of texts."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(own, str) and own.strip()
                                              for own in texts):
        raise LlmcError(f"has {shown(value)} as {key}, expected a text or a list of texts")
    return tuple(texts)
