"""The table of code types, compared with ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from llmc.artifacts.manifest import WeightForm
from llmc.plugins.code_types import CODE_TYPES, E8M0_NUMBERS
from llmc.plugins.quantization import dequantized, pack


@pytest.mark.parametrize(("name", "numbers"), [
    ("float8_e4m3fn", np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)),
    ("mxfp4", np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn))])
def test_code_values_equal_ml_dtypes(name, numbers):
    wanted = np.nan_to_num(numbers.astype(np.float64))
    np.testing.assert_array_equal(CODE_TYPES[name].numbers, wanted)


def test_exponent_values_equal_ml_dtypes():
    bits = np.arange(255, dtype=np.uint8)
    np.testing.assert_array_equal(E8M0_NUMBERS, bits.view(ml_dtypes.float8_e8m0fnu).astype(float))


@pytest.mark.parametrize("name", CODE_TYPES)
def test_a_code_type_defines_its_values(name):
    own = CODE_TYPES[name]
    assert not own.numbers or len(own.numbers) == 2 ** own.bits
    integers = own.int8_factor * np.array(own.numbers or (0.0,))
    assert np.array_equal(integers, np.rint(integers)) and np.abs(integers).max() < 128
    size = own.group_size or 16
    codes = (np.arange(size) % 2 ** own.bits).astype(np.uint8)[None]
    scale = np.array([[127]], np.uint8) if own.scale_dtype != "float32" \
        else np.ones((1, 1), np.float32)
    zero = pack(np.array([[3]], np.uint8), own.bits) if own.zero_point is None else None
    found = dequantized({"weight_dtype": name, "group_size": size}, pack(codes, own.bits), scale,
                        zero)
    np.testing.assert_array_equal(found[0], np.array(own.numbers)[codes[0]] if own.numbers else
                                  codes[0].astype(float) - (own.zero_point or 3))


def test_the_manifest_accepts_only_code_types():
    for name in CODE_TYPES:
        assert WeightForm(dtype=name, group_size=32).dtype == name
    with pytest.raises(ValidationError, match="'int4', 'uint4', 'int8', 'uint8'"):
        WeightForm(dtype="int3", group_size=32)
