"""All-reduce (sum) of x over the ranks, by the runtime's communicator."""

from llmc.plugins import Op

OP = Op(
    name="AllReduce",
    version=1,
    inputs=("x",),
    outputs=("y",),
    fields={"tp_size": 1},
    required=("tp_size",),
    shapes=lambda shapes, fields: [shapes["x"]],
    dims=lambda fields, present: {"x": ("rows", "width")},
    collective="all_reduce",
    body=None,
)
