"""Structured output: generated texts match the grammar, and all matching texts are possible."""

import json
import re
from contextlib import suppress
from dataclasses import replace

import families
import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llmc
from llmc.runtime.core.step import EngineLimits, Step
from llmc.runtime.engines.cuda import mask_arrays
from llmc.runtime.sampling import logits_processors, structured_output

SHORT = [
    {"type": "integer", "minimum": 3, "maximum": 250}, {"type": "boolean"},
    {"enum": ["a b", 3, {}]}, {"type": "string", "maxLength": 8},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "object", "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9},
                                      "né": {"type": "null"}},
     "required": ["x"], "additionalProperties": False},
    {"anyOf": [{"const": 7}, {"type": "string", "enum": ["u", "\n\"é"]}]}]


@pytest.fixture(scope="module")
def llm(case_tp1):
    with llmc.LLM(case_tp1) as own:
        yield own


def guided(llm, count, **params):
    """Return the texts of `count` completions; none may end by length."""
    made = llm.generate([[5, 6]], llmc.SamplingParams(max_tokens=60, temperature=1.0, n=count,
                                                      seed=1, **params))
    assert all(own.finish_reason == "stop" for own in made)
    return [own.text for own in made]


@pytest.mark.parametrize("schema", SHORT)
def test_a_schema_is_followed(llm, schema):
    for text in guided(llm, 8, guided_json=schema):
        value = json.loads(text)
        jsonschema.validate(value, schema)
        if isinstance(value, list):
            assert text == json.dumps(value)  # with one space after each comma


@pytest.mark.parametrize("schema", [
    {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3},
    {"type": "integer", "exclusiveMinimum": -2**53 - 5, "exclusiveMaximum": -2**53 - 3},
    {"type": "integer", "minimum": -2**60, "exclusiveMinimum": 5, "exclusiveMaximum": 2**60,
     "maximum": 9},
    {"type": "integer", "minimum": 2**63 - 3000, "maximum": 2**64 - 1},
    {"type": "array", "items": {"enum": [2**60, 10**30]}, "minItems": 1, "maxItems": 1}])
def test_integers_beyond_float64_are_followed(llm, schema):
    for text in guided(llm, 4, guided_json=schema):
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(("schema", "said"), [
    ({"type": "integer", "minimum": 2**62 + 1, "maximum": 2**62 + 3}, "no integer within the"),
    ({"type": "integer", "minimum": 2**63}, "the bound 9223372036854775808 is beyond"),
    ({"type": "number", "minimum": 10**400}, "is beyond what structured output can represent"),
    ({"enum": ["a", {"b": [2**53 + 1]}]}, "the integer 9007199254740993 cannot be represented"),
    ({"const": 2**64}, "the integer 18446744073709551616 cannot be represented")])
def test_integers_that_cannot_be_represented_are_refused(llm, schema, said):
    with pytest.raises(llmc.LlmcError, match=said):
        llm.generate([[5]], llmc.SamplingParams(guided_json=schema))


def test_unknown_formats_are_annotations(llm):
    """A property and a constant named format are not keywords."""
    own = {"type": "string", "format": "password", "maxLength": 3}
    schema = {"type": "object", "properties": {"format": own, "x": {"const": {"format": "path"}}},
              "required": ["format", "x"], "additionalProperties": False}
    for text in guided(llm, 2, guided_json=schema):
        jsonschema.validate(json.loads(text), schema)
    for text in guided(llm, 2, guided_json={"type": "string", "format": "date"}):
        assert re.fullmatch(r'"\d{4}-\d\d-\d\d"', text)


def test_a_refused_schema_is_explained_in_whole_words(llm):
    either = {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 3},
                        {"type": "number", "minimum": 5, "maximum": 6}]}
    with pytest.raises(llmc.LlmcError, match=re.escape(
            'by "x-guidance": {"coerce_one_of": true} at the root of the schema')):
        llm.generate([[5]], llmc.SamplingParams(guided_json=either))
    own = {"x-guidance": {"coerce_one_of": True}, **either}
    for text in guided(llm, 2, guided_json=own, logit_bias={2: 9.0}):
        jsonschema.validate(json.loads(text), own)
    with pytest.raises(llmc.LlmcError, match="unsupported keywords of JSON Schema: not; leave"):
        llm.generate([[5]], llmc.SamplingParams(guided_json={"not": {"const": 3}}))
    long = {"$ref": "#/$defs/" + "x" * 500}
    with pytest.raises(llmc.LlmcError, match="x{500}' does not exist"):
        llm.generate([[5]], llmc.SamplingParams(guided_json=long))


def test_regexes_choices_and_grammars_are_followed(llm):
    assert all(re.fullmatch("(ab|c)+d{2}", text) for text in
               guided(llm, 8, guided_regex="(ab|c){1,5}d{2}"))
    choices = ["yes", "no, never", "\"maybe\"\n", "né"]
    assert {*guided(llm, 60, guided_choice=choices)} == {*choices}
    for grammar in ('start: "x" /[0-9]{1,3}/ ("," start)?', None):
        grammar = grammar or 'root ::= "x" [0-9] [0-9]? ("," "x" [0-9])?'
        assert all(re.fullmatch(r"(x\d{1,3},?)+", text) for text in
                   guided(llm, 4, guided_grammar=grammar, logit_bias={2: 3.0}))


def test_greedy_takes_the_most_likely_allowed_token(llm):
    text, = (own.text for own in llm.generate(
        [[5, 6]], llmc.SamplingParams(guided_choice=["a", "b", "z"])))
    first = llm.logits([5, 6])[-1]
    assert text == max("abz", key=lambda own: first[llm.tokenize(own)[0]])


def test_constrained_and_free_requests_share_steps_and_few_blocks(case_tp1):
    """Also if one is recomputed from its start."""
    free, schema = llmc.SamplingParams(max_tokens=60, ignore_eos=True), SHORT[6]
    own = llmc.SamplingParams(max_tokens=60, temperature=1.0, seed=4, guided_json=schema)
    with llmc.LLM(case_tp1) as llm:
        alone, = llm.generate([[5, 6]], own)
    with llmc.LLM(case_tp1, kv_cache_tokens=64, block_size=4, max_batch_size=4) as llm:
        got = families.ask_at_once(llm, [[5, 6]] * 4, [free, own, own, free].__getitem__)
        assert llm.metrics()["preemptions"] > 0
    assert got[1] == got[2] == [alone]


def test_masks_wait_for_the_last_sampled_token(tiny_hf, case_tp1, monkeypatch):
    """An engine with three in-flight steps has at most one of a constrained sequence."""
    with llmc.LLM(case_tp1, max_batch_size=2) as llm:
        engine = llm._loops[0]._engine
        limits = engine.limits
        monkeypatch.setattr(engine, "limits", EngineLimits(**{**vars(limits), "ahead": 3}))
        steps = []
        submit = engine.submit
        monkeypatch.setattr(engine, "submit", lambda step: steps.append(step) or submit(step))
        for text in guided(llm, 2, guided_json=SHORT[6]):
            jsonschema.validate(json.loads(text), SHORT[6])
        masked = [step for step in steps if step.masks]
        assert masked and all(-1 not in step.token_ids for step in masked)
        assert all(own.dtype == np.uint32 and own.shape == (10,)
                   for step in masked for own in step.masks.values())


def test_bits_of_a_mask_are_tokens():
    mask = np.zeros(2, np.uint32)
    mask[0], mask[1] = 1 << 31 | 1 << 3, 1
    allowed = logits_processors.allow(np.arange(40, dtype=np.float32), mask)
    assert np.flatnonzero(np.isfinite(allowed)).tolist() == [3, 31, 32]


@pytest.mark.parametrize(("params", "said"), [
    (dict(guided_json="{"), "guided_json is '{'; give a JSON schema"),
    (dict(guided_json=[3]), "give a JSON schema"), (dict(guided_choice=[""]), "is empty"),
    (dict(guided_regex="a", guided_choice=["b"]), "guided_regex and guided_choice are given"),
    (dict(guided_regex="a", ignore_eos=True), "ignore_eos True does not go with guided_regex"),
    (dict(guided_regex="a", beam_width=2), "beam_width 2 does not go with guided_regex")])
def test_contradictory_guided_options_are_refused(params, said):
    with pytest.raises(llmc.LlmcError, match=re.escape(said)):
        llmc.SamplingParams(**params)


@pytest.mark.parametrize("params", [
    dict(guided_json={"type": "nonsense"}), dict(guided_json={"not": {"const": 3}}),
    dict(guided_regex="("), dict(guided_grammar="start: ("), dict(guided_grammar="root ::= (")])
def test_invalid_grammars_are_refused(llm, params):
    with pytest.raises(llmc.LlmcError, match="the grammar cannot be compiled"):
        llm.generate([[5]], llmc.SamplingParams(**params))


def test_gpu_mask_rows_follow_the_sampled_rows():
    masks = {7: np.array([1, 2], np.uint32), 4: np.array([3, 4], np.uint32),
             9: np.array([5, 6], np.uint32)}
    step = Step.of([[5], [6], [7], [8]], [0] * 4, [[0], [1], [2], [3]], [4, 5, 7, 9],
                   sample=[0, 1, 2], masks=masks)
    rows, words = mask_arrays(step)
    assert rows.tolist() == [1, -1, 0] and rows.dtype == np.int32
    assert words.tolist() == [[1, 2], [3, 4], [5, 6]] and words.dtype == np.uint32
    assert not any(map(len, mask_arrays(replace(step, masks={}))))


def schemas():
    """50 schemas of many kinds."""
    leaves = [{"type": "integer", "minimum": 0, "maximum": 10**k} for k in range(1, 6)]
    leaves += [{"type": "string", "maxLength": 4 * k} for k in range(1, 6)]
    leaves += [{"type": "string", "pattern": pattern} for pattern in (
        r"^\d{3}-\d{4}$", "^[A-Z][a-z]{1,8}$", "^(red|green|blue)$", "^[0-9a-f]{8}$",
        r"^[a-z]{2,5}@[a-z]{2,5}\.com$")]
    leaves += [{"type": "string", "format": kind} for kind in ("date", "uuid", "ipv4", "ipv6")]
    leaves += [{"enum": ["a", "b", 3, None, True]}, {"const": {"k": [1, 2]}}, {"type": "boolean"},
               {"type": ["integer", "null"], "minimum": 0, "maximum": 99}, {"type": "null"},
               {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01}]

    def record(*own, **options):
        names = [f"field_{index}" for index in range(len(own))]
        return {"type": "object", "properties": dict(zip(names, own, strict=True)),
                "required": names, "additionalProperties": False, **options}

    made = list(leaves)
    made += [record(*leaves[index:index + 3]) for index in range(0, 15, 2)]
    made += [{"type": "array", "items": leaf, "minItems": 1, "maxItems": 3} for leaf in leaves[::4]]
    made += [record(leaf, record(other), required=["field_1"])
             for leaf, other in zip(leaves[:6], leaves[12:18], strict=True)]
    made += [{"anyOf": [record(leaf), {"type": "null"}]} for leaf in leaves[5:8]]
    made.append({"$defs": {"point": record(leaves[0], leaves[1])}, "type": "array",
                 "items": {"$ref": "#/$defs/point"}, "minItems": 2, "maxItems": 2})
    return made[:50]


@pytest.mark.thorough
def test_1000_completions_of_smollm2_follow_50_schemas(tmp_path):
    llmc.compile(families.smollm2(), tmp_path / "case")
    checker = jsonschema.FormatChecker()
    assert len(schemas()) == 50
    with llmc.LLM(tmp_path / "case", max_batch_size=64, kv_cache_tokens=32_768) as llm:
        prompts = [llm.chat_prompt(f"Answer with JSON of this schema: {json.dumps(schema)}")
                   for schema in schemas()]
        params = [llmc.SamplingParams(max_tokens=1000, temperature=1.0, n=20, seed=index,
                                      guided_json=schema) for index, schema in enumerate(schemas())]
        made = llm.generate(prompts, params)
    assert len(made) == 1000
    for own in made:
        assert own.finish_reason == "stop"
        jsonschema.validate(json.loads(own.text), schemas()[own.index], format_checker=checker)


def chain(link, count=3000):
    """Return a schema of `count` definitions, each a reference to the next."""
    definitions = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(count)}
    return {"$defs": {**definitions, f"a{count}": {"type": "string"}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize("params", [
    dict(guided_json=chain(lambda ref: ref)),
    dict(guided_json=chain(lambda ref: {"type": "object", "properties": {"x": ref}})),
    dict(guided_json=chain(lambda ref: {"anyOf": [ref, {"type": "null"}]})),
    dict(guided_json=chain(lambda ref: {"allOf": [ref, {"minLength": 1}]})),
    dict(guided_grammar="start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(9000))
         + 'a9000: "x"\n'),
    dict(guided_grammar="start: A0\n" + "".join(f"A{i}: A{i + 1} \"x\"\n" for i in range(9000))
         + 'A9000: "x"\n')], ids=["ref", "properties", "anyOf", "allOf", "rules", "terminals"])
def test_a_grammar_that_overflows_the_native_stack_is_refused(llm, params):
    with pytest.raises(llmc.LlmcError, match="be compiled .it takes more than .*too deeply"):
        llm.generate("a", llmc.SamplingParams(**params))
    assert guided(llm, 1, guided_json={"type": "boolean"})


@pytest.mark.parametrize(("params", "said"), [
    (dict(guided_json={"properties": {f"p{i}": {"maxLength": i} for i in range(9000)}}),
     "too big|too large|takes more than"),
    (dict(guided_regex="x*" * 90_000), "takes more than|cannot be compiled"),
    (dict(guided_choice=["y" * 600_000]), "guided_choice has 600004 bytes, at most 524288")])
def test_a_grammar_that_is_too_large_is_refused(llm, params, said):
    with pytest.raises(llmc.LlmcError, match=said):
        llm.generate("a", llmc.SamplingParams(**params))


def test_compiled_grammars_are_cached(llm, monkeypatch):
    schema = {"type": "integer", "minimum": 17, "maximum": 99}
    before = guided(llm, 1, guided_json=schema)
    monkeypatch.setattr(structured_output, "_matcher", None)  # unreachable
    assert guided(llm, 1, guided_json=schema) == before


def test_slow_masks_are_computed_in_parallel_with_steps(llm, monkeypatch):
    """Completions have the same tokens, and an error affects only its request."""
    params = llmc.SamplingParams(max_tokens=60, temperature=1.0, seed=4, guided_json=SHORT[6])
    expected = llm.generate([[5, 6]] * 3, params)
    monkeypatch.setattr(structured_output, "_SLOW", 0.0)
    assert llm.generate([[5, 6]] * 3, params) == expected
    state = structured_output.GrammarState
    monkeypatch.setattr(state, "_consume", lambda self, token: self._refuse())
    monkeypatch.setattr(state, "_refuse", refuse, raising=False)
    free = llm.stream([5, 6], llmc.SamplingParams(max_tokens=20, ignore_eos=True))
    next(free)
    with pytest.raises(llmc.LlmcError, match="no way on"):
        llm.generate([[5, 6]], params)
    assert len([*free]) == 19


def refuse(self):
    raise llmc.LlmcError("there is no way on")


NAMES = st.sampled_from(["a", "b", "$ref", "é", "x-y", ""])
LEAVES = st.sampled_from([
    {"type": "string"}, {"type": "integer", "minimum": -3}, {"$ref": "#"}, {"$ref": "#/$defs/a"},
    {"enum": [1, "a", None]}, {"const": {}}, {"type": "string", "pattern": "(a|b)*c{2,9}"},
    {"type": "string", "format": "date-time"}, {"type": ["null", "number"]}, {}, True, False])
SCHEMAS = st.recursive(LEAVES, lambda inner: st.one_of(
    st.dictionaries(NAMES, inner, max_size=3).map(lambda own: {"type": "object",
                                                               "properties": own}),
    st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]),
              st.lists(inner, min_size=1, max_size=3)).map(lambda own: {own[0]: own[1]}),
    st.builds(lambda own, most: {"type": "array", "items": own, "maxItems": most}, inner,
              st.integers(0, 10**6)),
    st.builds(lambda own, times: {"$defs": {"a": own}, "allOf": [{"$ref": "#/$defs/a"}] * times},
              inner, st.integers(1, 40))), max_leaves=12)
RULES = st.lists(st.tuples(st.sampled_from("abc"), st.lists(
    st.sampled_from(["a", "b", "c", '"x"', "/y+z?/", "(", ")", "|", "*", "?", "~1..9999", "X"]),
    max_size=5)), max_size=5).map(
        lambda rules: "start: a\n" + "".join(f"{name}: {' '.join(own)}\n" for name, own in rules))
EXPRESSIONS = st.lists(st.sampled_from([
    "a", "(", ")", "|", "*", "+", "{1,99}", "{999}", "[^b]", ".", "\\d", "(?:", "\\b", "^", "&",
    "~", "é"]), max_size=14).map("".join)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(SCHEMAS.map(lambda own: dict(guided_json=own if isinstance(own, dict) else {})),
                 RULES.map(lambda own: dict(guided_grammar=own)),
                 EXPRESSIONS.map(lambda own: dict(guided_regex=own))))
def test_no_grammar_crashes_the_process(llm, params):
    """The process and the model must survive."""
    with suppress(llmc.LlmcError):
        llm.generate([[5, 6]], llmc.SamplingParams(max_tokens=3, temperature=1.0, seed=1, **params))
    llm.check_health()
