"""Host-side behavior of the CUDA extension; needs the built extension but no GPU."""

import pytest

from llmc import LlmcError, plugins
from llmc.runtime.engines import cuda


def test_a_missing_gpu_is_reported(extension):
    if extension.devices()[0]:
        pytest.skip("there is a GPU")
    with pytest.raises(LlmcError, match=r"there is no NVIDIA GPU here \(.+\); .* --target cpu"):
        cuda.device_count()


def test_the_extension_s_ops_match_the_registry(extension):
    declared = {name: op for name, op in plugins.registry().items() if op.has_core}
    found = {kind.name: kind for kind in extension.plugin_types()}
    assert set(found) == set(declared)
    for name, kind in found.items():
        op = declared[name]
        assert (kind.version, tuple(kind.inputs), tuple(kind.outputs)) \
            == (op.version, op.inputs, op.outputs)
        assert kind.fields == dict(op.fields)
        assert tuple(kind.required) == op.required


@pytest.mark.parametrize(("name", "fields", "match"), [
    ("CausalAttentoin", {}, "unknown op 'CausalAttentoin'"),
    ("RMSNorm", {"epsilom": 1.0}, "has no attribute 'epsilom'"),
    ("RMSNorm", {"epsilon": "small"}, "attribute 'epsilon' is a str, expected a float"),
    ("CausalAttention", {"num_heads": 4}, "needs the attribute"),
    ("GatedMLP", {"activation": "swoosh"}, "unknown activation 'swoosh'"),
])
def test_invalid_attributes_are_named(extension, name, fields, match):
    with pytest.raises(extension.CudaError, match=match):
        extension.make_plugin(name, fields)
