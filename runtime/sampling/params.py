"""Sampling parameters of a request: `SamplingParams`.

Each field has its type, default, description and range here only. `help(SamplingParams)`, the
options of `llmc run` and the keys of a prompt file's requests are generated from it. Imports
nothing heavy, as `llmc --help` needs it.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter, Signature, cleandoc
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_type_hints

from llmc.errors import LlmcError, shown

MAX_N = 2**16  # completions of a prompt
MAX_STOP = 64  # the text is searched for each after every token
MAX_STOP_CHARACTERS = 4096  # of one stop string
# At these limits each costs a sequence at most 1 ms of a step, measured with 152,000 tokens.
MAX_BIASES = 16_384
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_SIZE = 16_384  # of all together
MAX_TOP_LOGPROBS = 1000
_MAX_BIAS = 3.4e38  # of float32
_MIN_TEMPERATURE = 1e-6  # logits that differ by 1e-4 are e^-100 apart: as good as greedy
# Parameters that beam search does not support.
_NOT_WITH_BEAMS = ("temperature", "n", "stop", "stop_token_ids", "logprobs", "prompt_logprobs")
STRUCTURED_OUTPUT_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
# Parameters that structured output does not support: the grammar determines the end.
_NOT_WITH_GRAMMARS = ("min_tokens", "ignore_eos", "end_id", "beam_width")


@dataclass(frozen=True)
class Within:
    """The range of a field.

    Args:
        least, most: bounds, inclusive.
        neutral: text about the value without effect.
        above: exclude `least`.
    """

    least: float
    most: float = math.inf
    neutral: str = ""
    above: bool = False

    def problem(self, value: float) -> str | None:
        """Why a value is out of range; None if it is not."""
        if self.least <= value <= self.most and not (self.above and value == self.least):
            return None
        range_ = f"below {self.least}" if self.most == math.inf and value < self.least else \
            f"not above {self.least} and at most {self.most}" if self.above else \
            f"not from {self.least} to {self.most}"
        return f"is {range_}" + (f"; {self.neutral}" if self.neutral else "")


@dataclass(frozen=True)
class Described:
    """A field of `SamplingParams` with its documentation.

    Args:
        kind: its type.
        text: its description.
    """

    name: str
    kind: Any
    default: Any
    text: str
    within: Within | None


def _document(cls: type, described: Sequence[Described]) -> None:
    """Add the fields' descriptions to a class's docstring, and their types to its signature."""
    lines = [textwrap.fill(f"{each_field.name}: {each_field.text}", 92, initial_indent=" " * 4,
                           subsequent_indent=" " * 8, break_on_hyphens=False)
             for each_field in described]
    if cls.__doc__ is not None:  # None with python -OO
        cls.__doc__ = cleandoc(cls.__doc__).replace("    …", "\n".join(lines))
    parameters = [Parameter(each_field.name, Parameter.KEYWORD_ONLY, default=each_field.default,
                            annotation=each_field.kind) for each_field in described]
    own_self = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    setattr(cls, "__signature__", Signature(parameters))  # noqa: B010  which mypy does not know
    constructor: Any = vars(cls)["__init__"]
    constructor.__signature__ = Signature([own_self, *parameters])
    constructor.__annotations__ = {each_field.name: each_field.kind for each_field in described}


def described(cls: type) -> list[Described]:
    """The documented fields of `SamplingParams`."""
    kinds, annotated = get_type_hints(cls), get_type_hints(cls, include_extras=True)
    result = []
    for own in fields(cls):
        text, *within = annotated[own.name].__metadata__
        default = own.default_factory() if own.default is MISSING and \
            own.default_factory is not MISSING else own.default
        result.append(Described(own.name, kinds[own.name], default, text, *(within or [None])))
    return result


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a prompt's completions.

    Logits are processed in the order of transformers: logit_bias, repetition_penalty, presence and
    frequency penalty, bad_words, min_tokens; then, if temperature is above 0, temperature, top_k,
    top_p, min_p, typical_p.

    Args:
        …

    Raises:
        LlmcError: an argument has a wrong type, is out of range, or is unsupported by beam search.
    """

    max_tokens: Annotated[
        int, "Maximum number of new tokens. A completion also ends, with finish_reason `length`, "
             "at the model's maximum length or the size of the KV cache. 0 computes only the "
             "prompt, as for prompt_logprobs.",
        Within(0)] = 64
    min_tokens: Annotated[
        int, "Minimum number of new tokens: until then EOS and stop tokens are masked, and stop "
             "strings ignored.",
        Within(0)] = 0
    temperature: Annotated[
        float, "Sampling temperature; 0 is greedy. Values above 0 and below 1e-6 are raised to "
               "1e-6.",
        Within(0, 10**6, "0 is greedy")] = 0.0
    top_k: Annotated[
        int, "Sample from the k most likely tokens and those that tie with the last; 0 for all.",
        Within(0, neutral="0 keeps all tokens")] = 0
    top_p: Annotated[
        float, "Sample from the most likely tokens whose probabilities add up to this.",
        Within(0, 1, "1 keeps all tokens", above=True)] = 1.0
    min_p: Annotated[
        float, "Sample from tokens with at least this fraction of the greatest probability.",
        Within(0, 1, "0 keeps all tokens")] = 0.0
    typical_p: Annotated[
        float, "Sample from the locally typical tokens whose probabilities add up to this.",
        Within(0, 1, "1 keeps all tokens", above=True)] = 1.0
    repetition_penalty: Annotated[
        float, "Divide positive and multiply negative logits of tokens of the prompt and the "
               "completion by this; above 1 discourages repetition.",
        Within(0.001, 1000, "1 is none")] = 1.0
    presence_penalty: Annotated[
        float, "Subtract this from the logits of tokens that were generated.",
        Within(-2, 2, "0 is none")] = 0.0
    frequency_penalty: Annotated[
        float, "Subtract this from a token's logit for each time that it was generated.",
        Within(-2, 2, "0 is none")] = 0.0
    bad_words: Annotated[
        Sequence[str | Sequence[int]],
        "Texts that are never generated, tokenized with and without a leading space; in Python and "
        "JSON also lists of token ids."] = ()
    logit_bias: Annotated[
        Mapping[int, float], "Values to add to logits, by token id; -inf forbids a token."] = \
        field(default_factory=dict, hash=False)
    seed: Annotated[
        int | None, "Seed of the random number generator: the result does not depend on other "
                    "requests in the batch. By default a random one.",
        Within(0, 2**64 - 1)] = None
    n: Annotated[
        int, "Number of completions of the prompt; completion i, counted from 0, has the seed "
             "`seed + i`, modulo 2^64. Without sampling all are equal.",
        Within(1, MAX_N)] = 1
    stop: Annotated[
        Sequence[str], "Strings that end a completion; the text ends before them."] = ()
    ignore_eos: Annotated[bool, "Continue after the EOS token."] = False
    end_id: Annotated[int | None, "EOS token, instead of the model's own."] = None
    stop_token_ids: Annotated[
        Sequence[int], "Token ids that end a completion, besides EOS and also with ignore_eos; the "
                       "text ends before them."] = ()
    show_special_tokens: Annotated[
        bool, "Include special tokens in the text, except those that end it."] = False
    logprobs: Annotated[
        int | None, "Return the log-probability of each token, and those of this many most likely "
                    "tokens (at most 20 on GPUs).",
        Within(0, neutral="0 is the sampled token's alone")] = None
    prompt_logprobs: Annotated[
        int | None, "Return the log-probability of each prompt token but the first, and those of "
                    "this many most likely tokens at its position (at most 20 on GPUs).",
        Within(0, neutral="0 is the prompt token's alone")] = None
    guided_json: Annotated[
        str | Mapping[str, object] | None,
        "JSON schema of the completion, which has a space after each comma and colon. Structured "
        "output needs llguidance."] = None
    guided_regex: Annotated[
        str | None, "Regular expression that the whole completion matches."] = None
    guided_choice: Annotated[
        Sequence[str], "Texts; the completion is one of them."] = ()
    guided_grammar: Annotated[
        str | None, "Context-free grammar of the completion, in Lark or GBNF syntax."] = None
    prediction: Annotated[
        str | Sequence[int] | None,
        "Expected output; in Python and JSON also a list of token ids. Where the completion agrees "
        "with it, a step generates several tokens. The completion does not depend on it."] = None
    beam_width: Annotated[
        int, "Number of beams; above 1, the completion is the best one of a beam search as in "
             "transformers. `LLM.beam_search` returns all.",
        Within(1, neutral="1 is no beam search")] = 1
    length_penalty: Annotated[
        float, "Beam search: a sequence's score is the sum of its tokens' log-probabilities "
               "divided by its length to this power; above 0 favors long ones.",
        Within(-10, 10, "0 is none")] = 1.0
    diversity_rate: Annotated[
        float, "Beam search: subtract i times this from the score of the i-th best continuation "
               "of a beam, counted from 0; above 0 makes beams differ.",
        Within(0, 10**6, "0 is none")] = 0.0
    early_stopping: Annotated[
        bool | Literal["never"],
        "Beam search: True ends it as soon as beam_width sequences are finished; False, when no "
        "beam's current score is better than the worst of these; never, when no beam can become "
        "better."] = False

    def __post_init__(self) -> None:
        for own in FIELDS:
            value = getattr(self, own.name)
            try:
                value = _READERS[own.kind](value)
            except (TypeError, ValueError) as error:
                raise LlmcError(f"{own.name} is {shown(value)}; give {error}") from None
            object.__setattr__(self, own.name, value)
            problem = own.within.problem(value) if own.within and value is not None else None
            if problem:
                raise LlmcError(f"{own.name} {value} {problem}")
        if 0 < self.temperature < _MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", _MIN_TEMPERATURE)
        problem = next(self._problems(), None)
        if problem:
            raise LlmcError(problem)

    def _problems(self) -> Iterator[str]:
        """Errors of combinations of fields, and of sizes."""
        if self.min_tokens > self.max_tokens:
            yield f"min_tokens {self.min_tokens} is not from 0 to max_tokens {self.max_tokens}"
        if not all(self.bad_words):
            yield "a bad word is empty"
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name) or 0) > MAX_TOP_LOGPROBS:
                yield f"{name} {count} exceeds {MAX_TOP_LOGPROBS}; ask for fewer"
        if self.beam_width > 1 and not self.max_tokens:
            yield (f"max_tokens 0 does not go with beam_width {self.beam_width}; give at least 1, "
                   f"or leave beam_width at 1")
        if len(self.bad_words) > MAX_BAD_WORDS:
            yield f"bad_words has {len(self.bad_words)} words; give at most {MAX_BAD_WORDS}"
        size = sum(len(word.encode() if isinstance(word, str) else word) for word in self.bad_words)
        if size > MAX_BAD_WORDS_SIZE:
            yield (f"bad_words has {size} bytes and token ids in all; give at most "
                   f"{MAX_BAD_WORDS_SIZE}")
        if len(self.logit_bias) > MAX_BIASES:
            yield (f"logit_bias has {len(self.logit_bias)} tokens; give at most {MAX_BIASES}, or a "
                   f"guided_grammar of what is allowed")
        for token, bias in self.logit_bias.items():
            if bias != -math.inf and not abs(bias) <= _MAX_BIAS:
                yield (f"the logit_bias {bias} of token {token} is neither a number of float32 nor "
                       f"-inf, which forbids it")
        if self.prediction is not None and self.beam_width > 1:
            yield (f"prediction does not go with beam_width {self.beam_width}, as beam search "
                   f"verifies no drafts; leave prediction out, or beam_width at 1")
        for name in _NOT_WITH_BEAMS if self.beam_width > 1 else ():
            if getattr(self, name) != getattr(type(self), name):
                yield (f"{name} {shown(getattr(self, name))} does not go with beam_width "
                       f"{self.beam_width}, as beam search returns one completion and does not "
                       f"sample; leave {name} out, or beam_width at 1")
        if not all(self.stop):
            yield "a stop string is empty"
        grammars = [name for name in STRUCTURED_OUTPUT_FIELDS if getattr(self, name)]
        if len(grammars) > 1:
            yield f"{grammars[0]} and {grammars[1]} are given; give only one of them"
        for name in _NOT_WITH_GRAMMARS if grammars else ():
            if getattr(self, name) != getattr(type(self), name):
                yield (f"{name} {getattr(self, name)!r} does not go with {grammars[0]}, which "
                       f"determines when a completion ends; leave {name} out")
        if not all(self.guided_choice):
            yield "a text of guided_choice is empty"
        if len(self.stop) > MAX_STOP:
            yield f"there are {len(self.stop)} stop strings; give at most {MAX_STOP}"
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARACTERS:
            yield (f"a stop string has {longest} characters; give at most {MAX_STOP_CHARACTERS}")
        if len(self.stop_token_ids) > MAX_STOP:
            yield f"there are {len(self.stop_token_ids)} stop_token_ids; give at most {MAX_STOP}"


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a request's fields over those that a model recommends.

    Biases of tokens are merged. With beam search, unsupported defaults are left out.
    """
    searches = given.get("beam_width", 1) > 1
    fields = {name: value for name, value in defaults.items()
              if not (searches and name in _NOT_WITH_BEAMS)} | dict(given)
    if "logit_bias" in given and "logit_bias" in defaults:
        fields["logit_bias"] = {**defaults["logit_bias"], **given["logit_bias"]}
    return fields


# Readers of each type of field. The text of a TypeError or ValueError is the expected value.


def whole(value: object) -> int:
    """Read an integer of Python or numpy; a bool is refused."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError("a whole number")
    if abs(int(value)) >= 2**64:
        raise ValueError("a whole number below 2^64")
    return int(value)


def flag(value: object) -> bool:
    """Read a bool of Python or numpy."""
    if type(value).__name__ not in ("bool", "bool_"):  # numpy is not imported here
        raise TypeError("True or False")
    return bool(value)


def text(value: object) -> str:
    """Read a text that can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise TypeError("a text")
    if not is_unicode(value):
        raise ValueError("a text that is valid Unicode")
    return value


def is_unicode(value: str) -> bool:
    """Whether a text can be encoded as UTF-8."""
    return value.isascii() or not any("\ud800" <= own <= "\udfff" for own in value)


def listed(value: object) -> list[Any]:
    """Read the elements of a list, tuple, numpy array or similar; text and bytes are refused."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):
        value = value.tolist()  # of Python's types
    if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(value, Sequence):
        raise TypeError("a list")
    return list(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError("a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number of float64") from None


def _or_none(value: object) -> int | None:
    try:
        return None if value is None else whole(value)
    except TypeError as error:
        raise TypeError(f"{error}, or None") from None


def _text_or_none(value: object) -> str | None:
    try:
        return None if value is None else text(value)
    except TypeError as error:
        raise TypeError(f"{error}, or None") from None


def _schema(value: object) -> str | None:
    """Read a JSON schema as text."""
    try:
        if value is None or isinstance(value, str):
            return None if value is None else json.dumps(json.loads(text(value)))
        if isinstance(value, Mapping):
            return json.dumps(dict(value))
    except (TypeError, ValueError, RecursionError):
        pass
    raise TypeError("a JSON schema, such as {'type': 'object'}, or None")


def _texts(value: object) -> tuple[str, ...]:
    try:
        return tuple(text(own) for own in ([value] if isinstance(value, str) else listed(value)))
    except TypeError:
        raise TypeError("a text, or a list of texts") from None


def _tokens(value: object) -> tuple[int, ...]:
    try:
        return tuple(map(whole, listed(value)))
    except TypeError:
        raise TypeError("a list of token ids") from None


def _words(value: object) -> tuple[str | tuple[int, ...], ...]:
    try:
        return tuple(text(own) if isinstance(own, str) else tuple(map(whole, listed(own)))
                     for own in ([value] if isinstance(value, str) else listed(value)))
    except TypeError:
        raise TypeError("a text, or a list of texts and lists of token ids") from None


def _prediction(value: object) -> str | tuple[int, ...] | None:
    try:
        return None if value is None else text(value) if isinstance(value, str) else _tokens(value)
    except TypeError:
        raise TypeError("a text, a list of token ids, or None") from None


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError("numbers by token id, such as {42: -1.5}")
    try:
        return {whole(token): _number(bias) for token, bias in value.items()}
    except TypeError:
        raise TypeError("numbers by token id, such as {42: -1.5}") from None


def _early_stopping(value: object) -> bool | Literal["never"]:
    try:
        return "never" if isinstance(value, str) and value == "never" else flag(value)
    except TypeError:
        raise TypeError("False, True or 'never'") from None


FIELDS = described(SamplingParams)
_document(SamplingParams, FIELDS)
_READERS: dict[Any, Callable[[object], Any]] = {
    int: whole, float: _number, bool: flag, int | None: _or_none, Sequence[str]: _texts,
    Sequence[int]: _tokens,
    Sequence[str | Sequence[int]]: _words, Mapping[int, float]: _biases,
    bool | Literal["never"]: _early_stopping, str | None: _text_or_none,
    str | Mapping[str, object] | None: _schema, str | Sequence[int] | None: _prediction}
