"""Stored values do not depend on the processor, by sum order or libraries' functions."""

import hashlib
import json
import math
import os
import subprocess
import sys
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

import llmc
from llmc.compiler.frontend.reproducible import Reproducible
from llmc.compiler.graph import elementary
from llmc.compiler.graph.weights import Weight

# Settings of torch, NumPy, oneDNN and glibc as on an older processor.
LESSER = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41",
          "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512_SKX",
          "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F"}


def exact(function, numbers):
    """Evaluate a function with 40 digits and round to float32."""
    with localcontext() as context:
        context.prec = 40
        return np.array([np.float32(float(function(Decimal(float(x))))) for x in numbers])


def decimal_sine(x):
    """Return the sine by its series, after reduction."""
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
    x = x % (2 * pi)
    term, total, n = x, x, 1
    while abs(term) > Decimal(10)**-45:
        term *= -x * x / ((n + 1) * (n + 2))
        total, n = total + term, n + 2
    return total


RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(("function", "truth", "numbers"), [
    (elementary.exp, Decimal.exp, RANDOM.uniform(-80, 80, 500)),
    (elementary.log, Decimal.ln, np.exp(RANDOM.uniform(-80, 80, 500))),
    (elementary.sin, decimal_sine, RANDOM.uniform(-1e4, 1e4, 300)),
    (elementary.sin, decimal_sine, RANDOM.uniform(-1e6, 1e6, 100)),
    (lambda x: elementary.power(np.full_like(x, 500000.0), x),
     lambda x: (x * Decimal(500000).ln()).exp(), RANDOM.uniform(0, 1, 500)),
], ids=["exp", "log", "sin", "sin of large angles", "power"])
def test_elementary_functions_are_right_to_the_last_bit_of_float32(function, truth, numbers):
    np.testing.assert_array_equal(function(numbers).astype(np.float32), exact(truth, numbers))


def test_sine_and_cosine_at_the_ends_of_each_quarter():
    angles = np.arange(-40, 41) * (math.pi / 4)
    for function, truth in ((elementary.sin, math.sin), (elementary.cos, math.cos)):
        np.testing.assert_allclose(function(angles), [truth(x) for x in angles], rtol=0, atol=4e-16)
    assert elementary.exp(np.zeros(1)) == 1 and elementary.log(np.ones(1)) == 0
    assert elementary.cos(np.zeros(1)) == 1 and elementary.sin(np.zeros(1)) == 0


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoidal_positions_are_marian_s(width):
    theirs = MarianSinusoidalPositionalEmbedding(50, width).create_weight().numpy()
    np.testing.assert_allclose(elementary.sinusoidal_positions(50, width), theirs, rtol=0,
                               atol=1e-7)


def test_a_matrix_times_a_vector_is_the_exact_sum_whatever_the_order():
    """Rows whose sum differs in float32 or in another order."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((7, 1001)).astype(np.float32)
    vector = rng.standard_normal(1001).astype(np.float32)
    truth = [float(sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(
        row, vector, strict=True))) for row in matrix]
    got = Weight.of(matrix).dot(vector)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.array(truth, np.float32))


def test_sums_are_pairwise():
    """In this order: ((a + c) + (b + d)) + e."""
    row = np.array([[1e20, 3.0, -1e20, 5.0, 7.0]], np.float32)
    assert Weight.of(row).dot(np.ones(5, np.float32)) == 15
    row = np.array([[1e20, 3.0, 5.0, -1e20, 7.0]], np.float32)
    assert Weight.of(row).dot(np.ones(5, np.float32)) == 7


def buffers(name, config, auto):
    """Return a hash of the buffers that a model computes at construction."""
    with Reproducible():
        model = auto.from_config(AutoConfig.for_model(name, **config))
    digest = hashlib.sha256()
    for _, buffer in sorted(model.named_buffers()):
        digest.update(buffer.numpy().tobytes())
    return digest.hexdigest()


def everything(hf, case):
    """Return hashes of a compiled model's files and of other models' buffers."""
    llmc.compile(hf, case, target="cuda")
    made = {path.relative_to(case).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(case.rglob("*")) if path.is_file()}
    for kind, (family, changes) in families.ROPES.items():
        made[kind] = buffers(family, {**families.FAMILIES[family], **changes}, AutoModelForCausalLM)
    made["m2m_100"] = buffers("m2m_100", families.UNPLANNED_ENCODER_DECODERS["m2m_100"][1],
                              AutoModelForSeq2SeqLM)
    return made


def torch_s_sines():
    return hashlib.sha256(torch.linspace(0, 4096, 100001).sin().numpy().tobytes()).hexdigest()


SCRIPT = """
import json, pathlib, sys
sys.path[:0] = sys.argv[3:]
import test_reproducible
print(json.dumps(test_reproducible.everything(*map(pathlib.Path, sys.argv[1:3]))))
print(json.dumps(test_reproducible.torch_s_sines()))
"""


def test_an_older_cpu_compiles_the_same_bytes(tmp_path):
    """For a model whose rotary frequencies torch computes differently there.

    It has LayerNorms, which the cuda target folds into the next op.
    """
    model = families.tiny_model("starcoder2", num_hidden_layers=1, num_attention_heads=2,
                                **families.rope("default", rope_theta=150000.0))
    hf = families.save(model, tmp_path / "hf")
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, hf, tmp_path / "lesser", Path(__file__).parent,
         Path(families.__file__).parent], env={**os.environ, **LESSER}, capture_output=True,
        text=True)
    assert not result.returncode, result.stderr[-2000:]
    theirs, sines = map(json.loads, result.stdout.splitlines()[-2:])
    assert theirs == everything(hf, tmp_path / "case")
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":  # the settings have an effect
        assert sines != torch_s_sines()
