"""Intermediate ops for the two GEMMs of MoE experts.

The frontend emits them; the experts pass replaces both, and the activation between them, with one
op. Neither reaches an artifact, so they are not in the registry. Their function bodies, which loop
over tokens, serve to run the exported graph.
"""

from __future__ import annotations

from llmc.plugins import Fields, Op


def _product(fields: Fields, present: frozenset[str]) -> list[str]:
    """Lines that compute `product` [top_k, out] for one token.

    `x_own` is [in] or [top_k, in], `own` the indices of its experts.
    """
    weights = "Gather<axis=0>(weight, own)" if not fields["transposed"] else \
        "Transpose<perm=[0, 2, 1]>(stored)"
    lines = ["stored = Gather<axis=0>(weight, own)"] if fields["transposed"] else []
    lines += [f"matrices = {weights}", "columns = Unsqueeze(x_own, last)",
              "products = MatMul(matrices, columns)", "plain = Squeeze(products, last)"]
    if "bias" not in present:
        return [*lines, "product = Identity(plain)"]
    return [*lines, "biases = Gather<axis=0>(bias, own)", "product = Add(plain, biases)"]


def _up(fields: Fields, present: frozenset[str]) -> str:
    return "\n".join([
        "last = Constant<value_ints=[-1]>()",
        "y = Scan(x, experts) <num_scan_inputs=2, body = each (float[i] x_own, int64[k] own) "
        "=> (float[k, o] product) {", *_product(fields, present), "}>"])


def _down(fields: Fields, present: frozenset[str]) -> str:
    return "\n".join([
        "last = Constant<value_ints=[-1]>()", "first = Constant<value_ints=[0]>()",
        "y = Scan(x, experts, scores) <num_scan_inputs=3, body = each (float[k, i] x_own, "
        "int64[k] own, float[k] score) => (float[o] sum) {", *_product(fields, present),
        "score_column = Unsqueeze(score, last)", "weighted = Mul(product, score_column)",
        "sum = ReduceSum<keepdims=0>(weighted, first)", "}>"])

# The first GEMM of each selected expert, for each token.
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
    body=_up,
)
# The second GEMM of each selected expert; their sum weighted by the scores.
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
    body=_down,
)
