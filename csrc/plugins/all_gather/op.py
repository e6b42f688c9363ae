"""All-gather of x along the last axis, in rank order, by the runtime's communicator."""

from llmc.plugins import Op

OP = Op(
    name="AllGather",
    version=1,
    inputs=("x",),
    outputs=("y",),
    fields={"tp_size": 1},
    required=("tp_size",),
    shapes=lambda shapes, fields: [(*shapes["x"][:-1], shapes["x"][-1] * fields["tp_size"])],
    dims=lambda fields, present: {"x": ("rows", "width")},
    collective="all_gather",
    body=None,
)
