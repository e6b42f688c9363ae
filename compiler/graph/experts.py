"""Experts between the frontend, which makes their two products, and the experts pass, which joins
them with what lies between. Neither reaches an artifact, so they have no body and no place in the
registry.
"""

from __future__ import annotations

from llmc.plugins import Op

# Of each token, the first product of each of its experts.
EXPERTS_UP = Op(
    name="ExpertsUp",
    version=1,
    # x [num_tokens, hidden], experts int64 [num_tokens, top_k], weight [num_experts, width,
    # hidden], `transposed` [num_experts, hidden, width]; bias [num_experts, width]
    inputs=("x", "experts", "weight", "bias?"),
    outputs=("y",),  # [num_tokens, top_k, width]
    fields={"transposed": 0},
    shapes=lambda shapes, fields: [
        (*shapes["experts"], shapes["weight"][2 if fields["transposed"] else 1])],
    body=None,
)
# The second product of each, times its score; and their sum.
EXPERTS_DOWN = Op(
    name="ExpertsDown",
    version=1,
    # x [num_tokens, top_k, inner], experts and scores [num_tokens, top_k], weight [num_experts,
    # hidden, inner], `transposed` [num_experts, inner, hidden]; bias [num_experts, hidden]
    inputs=("x", "experts", "scores", "weight", "bias?"),
    outputs=("y",),  # [num_tokens, hidden]
    fields={"transposed": 0},
    shapes=lambda shapes, fields: [
        (*shapes["experts"][:-1], shapes["weight"][2 if fields["transposed"] else 1])],
    body=None,
)
