"""Top-k routing: the experts of each token and their weights, from the router's logits.

    logits   [num_tokens, num_experts]
    bias     [num_experts], added to scores for selection only
    expert_scale  [num_experts], multiplies the final score of a selected expert
    experts  int64 [num_tokens, top_k], distinct, in unspecified order
    scores   float32 [num_tokens, top_k], the weight of each

A score is the softmax of a token's logits, or the sigmoid or sqrt(softplus) of each; the `top_k`
highest are selected. With `groups` of adjacent experts, only the `top_groups` best groups are
considered; a group's rank is its highest score, or the sum of its two highest (`group_score`).
`normalize` divides a token's scores by their sum plus `epsilon`; `scale` multiplies them.

`sparsemixer` (https://arxiv.org/abs/2409.12136) selects one expert after the other. The score of
each is its softmax among the remaining ones whose logits are near its own: (own - other) /
max(|other|, own) is at most 2 * `jitter`.
"""

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape

_NEVER = "-1e30"  # of what cannot be selected

_SCORES = {
    "softmax": "score = Softmax<axis=-1>(rows)",
    "sigmoid": "score = Sigmoid(rows)",
    "sqrtsoftplus": "soft = Softplus(rows)\nscore = Sqrt(soft)",
}


def _body(fields: Fields, present: frozenset[str]) -> str:
    # Leading dimensions are flattened to rows, and restored at the end.
    return "\n".join([
        "minus_one = Constant<value_ints=[-1]>()",
        "width = Shape<start=-1>(logits)",
        "flat_shape = Concat<axis=0>(minus_one, width)",
        "rows = Reshape(logits, flat_shape)",
        f"never = Constant<value_float={_NEVER}>()",
        _mixed(fields) if fields["score"] == "sparsemixer" else _best(fields, present),
        *(["total = ReduceSum<keepdims=1>(weights, minus_one)",
           f"epsilon = Constant<value_float={fields['epsilon']!r}>()",
           "divisor = Add(total, epsilon)",
           "normalized = Div(weights, divisor)"] if fields["normalize"] else
          ["normalized = Identity(weights)"]),
        f"scale = Constant<value_float={fields['scale']!r}>()",
        "scaled_by_all = Mul(normalized, scale)",
        *(["own_scale = Gather(expert_scale, indices)", "scaled = Mul(scaled_by_all, own_scale)"]
          if "expert_scale" in present else ["scaled = Identity(scaled_by_all)"]),
        "leading = Shape<end=-1>(logits)",
        f"chosen = Constant<value_ints=[{fields['top_k']}]>()",
        "shape = Concat<axis=0>(leading, chosen)",
        "experts = Reshape(indices, shape)",
        "scores = Reshape(scaled, shape)",
    ])


def _best(fields: Fields, present: frozenset[str]) -> str:
    """Return `indices` and `weights` of the highest scores."""
    lines = [_SCORES[fields["score"]],
             "choice = Add(score, bias)" if "bias" in present else "choice = Identity(score)"]
    if fields["groups"] > 1:
        lines += [
            f"groups_shape = Constant<value_ints=[0, {fields['groups']}, -1]>()",
            "grouped = Reshape(choice, groups_shape)",
            *(["two = Constant<value_ints=[2]>()",
               "best_two, best_indices = TopK<axis=-1>(grouped, two)",
               "group_score = ReduceSum<keepdims=0>(best_two, minus_one)"]
              if fields["group_score"] == "top2" else
              ["group_score = ReduceMax<keepdims=0>(grouped, minus_one)"]),
            f"top_groups = Constant<value_ints=[{fields['top_groups']}]>()",
            "group_best, group_indices = TopK<axis=-1>(group_score, top_groups)",
            "closed = Sub(group_score, group_score)",
            "opened = Exp(closed)",  # ones; the sum is 1 in an open group
            "ones = GatherElements<axis=-1>(opened, group_indices)",
            "gates = ScatterElements<axis=-1>(closed, group_indices, ones)",
            "is_open = Cast<to=9>(gates)",
            "gate_column = Unsqueeze(is_open, minus_one)",
            "allowed = Where(gate_column, grouped, never)",
            "choice_shape = Shape(choice)",
            "limited = Reshape(allowed, choice_shape)"]
    else:
        lines.append("limited = Identity(choice)")
    return "\n".join([*lines, f"top_k = Constant<value_ints=[{fields['top_k']}]>()",
                      "best, indices = TopK<axis=-1>(limited, top_k)",
                      "weights = GatherElements<axis=-1>(score, indices)"])


def _mixed(fields: Fields) -> str:
    """Return `indices` and `weights` of sparsemixer."""
    lines = ["one = Constant<value_ints=[1]>()", "sizes = Abs(rows)",
             f"reach = Constant<value_float={2 * fields['jitter']!r}>()", "left_0 = Identity(rows)"]
    rounds = range(fields["top_k"])
    for i in rounds:
        lines += [
            f"best_{i}, index_{i} = TopK<axis=-1>(left_{i}, one)",
            f"size_{i} = Max(sizes, best_{i})",
            f"below_{i} = Sub(best_{i}, rows)",
            f"distance_{i} = Div(below_{i}, size_{i})",
            f"far_{i} = Greater(distance_{i}, reach)",
            f"near_{i} = Where(far_{i}, never, left_{i})",
            f"soft_{i} = Softmax<axis=-1>(near_{i})",
            f"weight_{i} = GatherElements<axis=-1>(soft_{i}, index_{i})",
            f"never_{i} = Expand(never, never_shape_{i})",
            f"left_{i + 1} = ScatterElements<axis=-1>(left_{i}, index_{i}, never_{i})"]
        lines.insert(-2, f"never_shape_{i} = Shape(index_{i})")
    return "\n".join([
        *lines, f"indices = Concat<axis=-1>({', '.join(f'index_{i}' for i in rounds)})",
        f"weights = Concat<axis=-1>({', '.join(f'weight_{i}' for i in rounds)})"])


def _check(fields: Fields, present: frozenset[str]) -> None:
    """Raise ValueError if attributes and inputs are inconsistent."""
    if not 1 <= fields["top_groups"] <= fields["groups"]:
        raise ValueError(f"Route has top_groups {fields['top_groups']}, expected 1 to groups "
                         f"{fields['groups']}")
    if fields["score"] == "sparsemixer" and ("bias" in present or fields["groups"] > 1):
        raise ValueError("Route with sparsemixer takes neither a bias nor groups")


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    _check(fields, present)
    experts = f"{fields['groups']} * group" if fields["groups"] > 1 else "experts"
    return {"logits": ("num_tokens", experts), "bias": (experts,), "expert_scale": (experts,)}


def _shapes(shapes: Mapping[str, Shape], fields: Fields) -> list[Shape]:
    *leading, experts = shapes["logits"]
    open_ = int(experts) // fields["groups"] * fields["top_groups"]
    if not 1 <= fields["top_k"] <= open_:
        raise ValueError(f"Route's top_k is {fields['top_k']}, expected 1 to {open_}, the experts "
                         f"of top_groups in logits {list(shapes['logits'])}")
    if fields["group_score"] == "top2" and int(experts) < 2 * fields["groups"]:
        raise ValueError(f"Route's logits are {list(shapes['logits'])}, fewer than two experts in "
                         f"each of {fields['groups']} groups")
    return [(*leading, fields["top_k"])] * 2


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    logits = inputs["logits"].astype(np.float64)
    rows = logits.reshape(-1, logits.shape[-1])
    pick = _mixed_reference if fields["score"] == "sparsemixer" else _best_reference
    experts, weights = pick(fields, rows, inputs.get("bias"))
    if fields["normalize"]:
        weights = weights / (weights.sum(-1, keepdims=True) + fields["epsilon"])
    weights = weights * fields["scale"]
    if "expert_scale" in inputs:
        weights = weights * inputs["expert_scale"][experts]
    shape = (*logits.shape[:-1], fields["top_k"])
    return [experts.reshape(shape), weights.reshape(shape)]


def _best_reference(fields: Fields, rows: np.ndarray, bias: np.ndarray | None) -> \
        tuple[np.ndarray, np.ndarray]:
    score = {"softmax": _softmax, "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
             "sqrtsoftplus": lambda x: np.sqrt(np.log1p(np.exp(x)))}[fields["score"]](rows)
    choice = score if bias is None else score + bias
    if fields["groups"] > 1:
        grouped = choice.reshape(len(rows), fields["groups"], choice.shape[1] // fields["groups"])
        ranked = np.sort(grouped, -1)
        best = ranked[..., -2:].sum(-1) if fields["group_score"] == "top2" else ranked[..., -1]
        is_open = np.zeros(best.shape, bool)
        np.put_along_axis(is_open, _highest(best, fields["top_groups"]), True, -1)
        choice = np.where(is_open[..., None], grouped, -np.inf).reshape(rows.shape)
    experts = _highest(choice, fields["top_k"])
    return experts, np.take_along_axis(score, experts, -1)


def _mixed_reference(fields: Fields, rows: np.ndarray, bias: np.ndarray | None) -> \
        tuple[np.ndarray, np.ndarray]:
    left, experts, weights = rows.copy(), [], []
    for _ in range(fields["top_k"]):
        best = left.max(-1, keepdims=True)
        index = _highest(left, 1)
        far = (best - rows) / np.maximum(np.abs(rows), best) > 2 * fields["jitter"]
        weights.append(np.take_along_axis(_softmax(np.where(far, -np.inf, left)), index, -1))
        experts.append(index)
        np.put_along_axis(left, index, -np.inf, -1)
    return np.concatenate(experts, -1), np.concatenate(weights, -1)


def _highest(x: np.ndarray, count: int) -> np.ndarray:
    """Columns of the `count` highest values of each row, in descending order."""
    return np.argsort(-x, -1, kind="stable")[..., :count]


def _samples(rng: np.random.Generator) -> list[Sample]:
    def sample(num_experts: int, biased: bool = False, scaled: bool = False,
               **fields: int | float | str) -> Sample:
        inputs = {"logits": rng.standard_normal((7, num_experts)).astype(np.float32) * 2}
        if biased:
            inputs["bias"] = rng.standard_normal(num_experts).astype(np.float32)
        if scaled:
            inputs["expert_scale"] = rng.standard_normal(num_experts).astype(np.float32)
        return Sample(fields, inputs)

    return [
        sample(5, top_k=2),
        sample(8, top_k=8, score="sigmoid", scale=1.5),
        sample(6, True, top_k=3, normalize=1, epsilon=0.01),
        sample(12, True, top_k=4, score="sigmoid", groups=4, top_groups=2, group_score="top2",
               normalize=1, scale=2.5),
        sample(12, top_k=3, groups=3, top_groups=2),
        sample(9, True, top_k=2, score="sqrtsoftplus", normalize=1),
        sample(8, top_k=2, score="sparsemixer", jitter=0.2),
        sample(3, top_k=1, score="sparsemixer", jitter=0.01),
        sample(6, scaled=True, top_k=3, normalize=1),
        sample(8, True, scaled=True, top_k=2, score="sigmoid", groups=4, top_groups=2),
    ]


OP = Op(
    name="Route",
    version=2,
    inputs=("logits", "bias?", "expert_scale?"),
    outputs=("experts", "scores"),
    fields={"top_k": 0, "score": "softmax", "groups": 1, "top_groups": 1, "group_score": "max",
            "normalize": 0, "epsilon": 0.0, "scale": 1.0, "jitter": 0.0},
    required=("top_k",),
    choices={"score": (*_SCORES, "sparsemixer"), "group_score": ("max", "top2"),
             "normalize": (0, 1)},
    shapes=_shapes,
    dims=_dims,
    body=_body,
    float32_inputs=frozenset({"bias", "expert_scale"}),
    output_dtypes={"experts": "int64", "scores": "float32"},
    core_most={"top_k": 32},
    reference=_reference,
    samples=_samples,
)
