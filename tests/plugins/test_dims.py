"""Consistency of input shapes: `Op.dims`."""

import subprocess
import sys

import numpy as np
import pytest

from llmc import plugins

CASES = [(op, sample, f"{op.name}-{index}") for op in plugins.registry().values() if op.samples
         for index, sample in enumerate(op.samples(np.random.default_rng(7)))]
IDS = [name for _, _, name in CASES]


def shapes_of(sample):
    return {name: array.shape for name, array in sample.inputs.items()}


@pytest.mark.parametrize("op", plugins.registry().values(), ids=lambda op: op.name)
def test_every_op_declares_its_input_dims(op):
    fields = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8} if "num_heads" in op.fields else {}
    assert {*op.dims(op.complete({**dict.fromkeys(op.required, 2), **fields}), frozenset())} \
        >= {*op.input_names}


@pytest.mark.parametrize(("op", "sample", "name"), CASES, ids=IDS)
def test_every_sample_fits_and_has_the_reference_s_output_shapes(op, sample, name):
    results = op.reference(op.complete(sample.fields), sample.inputs)
    assert [tuple(shape) for shape in op.fit(shapes_of(sample), sample.fields)] \
        == [result.shape for result in results]


def resized(array, axis, change):
    if change < 0:
        return np.delete(array, -1, axis)
    return np.concatenate([array, np.take(array, [-1], axis)], axis)


@pytest.mark.parametrize(("op", "sample", "name"), CASES, ids=IDS)
def test_the_reference_computes_every_accepted_shape(op, sample, name):
    """One axis of one input at a time, one longer and one shorter."""
    refused = 0
    for changed, array in sample.inputs.items():
        if changed in op.integer_inputs:  # made by the engine
            continue
        for axis in range(array.ndim):
            for change in (-1, 1):
                inputs = {**sample.inputs, changed: resized(array, axis, change)}
                try:
                    shapes = op.fit({name: a.shape for name, a in inputs.items()}, sample.fields)
                except ValueError as error:
                    assert str(error).startswith(f"{op.name}'")
                    refused += 1
                    continue
                # The engine checks rows that integer inputs count.
                if axis or not op.integer_inputs & {*sample.inputs}:
                    results = op.reference(op.complete(sample.fields), inputs)
                    assert [tuple(shape) for shape in shapes] == [r.shape for r in results]
    assert refused or len(sample.inputs) - len(op.integer_inputs & {*sample.inputs}) == 1


@pytest.mark.parametrize(("name", "fields", "match"), [
    ("GemmBiasAct", {"activation": "sine"}, "attribute 'activation' is 'sine', expected one of"),
    ("Embedding", {"vocab_sharded": 2}, r"'vocab_sharded' is 2, expected one of \[0, 1\]"),
    ("CausalAttention", {"num_heads": 3, "num_kv_heads": 2, "head_dim": 8}, "positive numbers"),
    ("CausalAttention", {"num_heads": 2, "num_kv_heads": 0, "head_dim": 8}, "positive numbers"),
    ("CausalAttention", {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "rotary_dim": 8},
     "rotary_dim 8 needs both cos and sin"),
    ("NormGemm", {"centred": 1}, "a centred NormGemm needs row_sums"),
])
def test_contradictory_attributes_are_refused(name, fields, match):
    with pytest.raises(ValueError, match=match):
        plugins.registry()[name].fit({}, fields)


def test_the_runtime_reads_the_registry_without_onnx():
    code = ("import sys; sys.modules['onnx'] = None; from llmc import plugins; "
            "plugins.registry()['CausalAttention']")
    subprocess.run([sys.executable, "-c", code], check=True)
