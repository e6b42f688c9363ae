"""Sampling kernels, compared with runtime/sampling on the same logits."""

import dataclasses

import numpy as np
import pytest
import torch
from on_device import DTYPES, describe

from llmc.runtime.core.step import SamplingState
from llmc.runtime.engines.admission import SLOT_STATE, Admissions, slot_state
from llmc.runtime.sampling import logits_processors
from llmc.runtime.sampling.sampler import (
    NOT_FINITE,
    Logprobs,
    Sampler,
    SamplingParams,
    probabilities,
)
from llmc.runtime.sampling.slot_params import LOGPROBS, MAX_LOGPROBS
from llmc.runtime.speculation.ngram import NgramDrafter

# (vocabulary, stride of the logits in elements)
SIZES = [(1, 64), (37, 37), (101, 104), (1000, 1024), (32000, 32000), (50257, 50304),
         (128256, 128256)]


def random_logits(rows, stride, dtype, seed=0):
    """Return heavy-tailed logits with equal values."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.standard_normal((rows, stride)) * 3)
    return logits.to(DTYPES[dtype]).cuda()


def on_device(records):
    """Return records as 32-bit integers."""
    return torch.from_numpy(records.view(np.int32).reshape(len(records), -1).copy()).cuda()


def draw(extension, logits, vocab, params, drawn=0, repeats=1, draws=True):
    """Return the kernel's tokens for logits [rows, stride]; params for all rows or each."""
    rows = len(logits)
    listed = params if isinstance(params, list) else [params] * rows
    tokens = torch.full((rows,), -7, device="cuda")
    numbers = np.broadcast_to(drawn, rows)
    states = np.array([slot_state(Sampler(p), number)
                       for p, number in zip(listed, numbers, strict=True)], SLOT_STATE)
    slots = np.random.default_rng(0).permutation(rows).astype(np.int32)
    by_slot = np.empty_like(states)
    by_slot[slots] = states
    tensors = [tokens, logits, on_device(by_slot), torch.from_numpy(slots).cuda()]
    time = extension.sample([describe(tensor) for tensor in tensors], vocab, none=-1, draws=draws,
                            repeats=repeats)
    return (tokens.cpu().numpy(), time) if repeats > 1 else tokens.cpu().numpy()


def as_float32(params):
    """Round the parameters to the kernel's float32."""
    return dataclasses.replace(params, **{
        name: float(np.float32(getattr(params, name)))
        for name in ("temperature", "top_p", "min_p", "typical_p")})


def check_draw(token, scores, params, number, what):
    """Assert the host's token, or an adjacent one if the random number is on an edge."""
    chances = probabilities(scores, as_float32(params))
    below = chances[:token].sum()
    chance = chances[token]
    if chance == 0:  # at a cutoff: as likely, or as typical, as a kept token
        loose = dataclasses.replace(
            as_float32(params), top_p=min(1.0, params.top_p + 1e-5),
            typical_p=min(1.0, params.typical_p + 1e-5), min_p=params.min_p * (1 - 1e-6))
        assert probabilities(scores, loose)[token] > 0, \
            f"{what}: token {token} is cut off; kept are {np.flatnonzero(chances)[:20]}"
        chance = 1e-4
    assert below - 2e-4 <= number <= below + chance + 2e-4, \
        f"{what}: token {token} is for {below} to {below + chance}, the number was {number}"


CUTS = [dict(), dict(temperature=0.7, top_k=5), dict(temperature=1.5, top_p=0.9),
        dict(top_k=50, top_p=0.8), dict(temperature=2.0, top_k=3000, top_p=0.3), dict(top_p=1e-6),
        dict(temperature=0.5, top_p=0.99), dict(top_k=300), dict(top_k=700, top_p=0.95),
        dict(min_p=0.1), dict(min_p=1.0), dict(temperature=0.6, min_p=1e-4),
        dict(top_p=0.999, min_p=0.02), dict(top_k=2000, min_p=0.05), dict(top_k=3, min_p=1e-5),
        dict(typical_p=0.9), dict(typical_p=0.2), dict(temperature=0.8, typical_p=1e-4),
        dict(top_k=100, typical_p=0.5), dict(top_p=0.9, typical_p=0.9),
        dict(top_k=50, top_p=0.9, min_p=0.01, typical_p=0.7)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "stride"), SIZES)
@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: " ".join(f"{k}={v}" for k, v in
                                                                  cuts.items()) or "none")
def test_sampled_tokens_equal_the_host_s(extension, vocab, stride, cuts, dtype):
    rows = 4
    logits = random_logits(rows, stride, dtype)
    listed = [SamplingParams(**{"temperature": 1.0, **cuts}, seed=row) for row in range(rows)]
    tokens = draw(extension, logits, vocab, listed, np.arange(rows) * 3)
    seen = logits.float().cpu().numpy()[:, :vocab]
    for row, token in enumerate(tokens.tolist()):
        assert 0 <= token < vocab
        number = np.random.Philox(key=row, counter=row * 3).random_raw() * 2.0**-64
        check_draw(token, seen[row], listed[row], number, f"row {row}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: " ".join(f"{k}={v}" for k, v in
                                                                  cuts.items()) or "none")
@pytest.mark.parametrize("shape", ["flat", "two values", "sorted", "half forbidden"])
def test_sampled_tokens_of_unusual_logits_equal_the_host_s(extension, shape, cuts, dtype):
    """All logits are equal, or the likely tokens are adjacent or few."""
    vocab, rows = 20000, 2
    logits = {"flat": np.zeros(vocab), "two values": np.arange(vocab) % 2 * 2.0,
              "sorted": np.linspace(-8, 8, vocab),
              "half forbidden": np.where(np.arange(vocab) < vocab // 2, -np.inf,
                                         np.sin(np.arange(vocab)))}[shape]
    tensor = torch.from_numpy(np.tile(logits, (rows, 1))).to(DTYPES[dtype]).cuda()
    params = SamplingParams(**{"temperature": 1.0, **cuts}, seed=3)
    tokens = draw(extension, tensor, vocab, params, np.arange(rows))
    seen = tensor.float().cpu().numpy()
    for row, token in enumerate(tokens.tolist()):
        number = np.random.Philox(key=3, counter=row).random_raw() * 2.0**-64
        check_draw(token, seen[row], params, number, f"row {row}")


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "stride"), SIZES)
def test_greedy_takes_the_first_of_equal_maxima(extension, vocab, stride, dtype, draws):
    logits = random_logits(64, stride, dtype)
    logits[:, vocab:] = 100
    tokens = draw(extension, logits, vocab, SamplingParams(), draws=draws)
    np.testing.assert_array_equal(tokens, logits.float().cpu().numpy()[:, :vocab].argmax(1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_allowed_token_samples_nothing(extension, temperature):
    logits = torch.full((2, 1024), -torch.inf, device="cuda")
    logits[1, 77] = -5
    tokens = draw(extension, logits, 1000, SamplingParams(temperature=temperature))
    assert tokens.tolist() == [-1, 77]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("params", [dict(), dict(temperature=1.0), dict(temperature=1.0, top_k=5),
                                    dict(temperature=0.7, top_p=0.9)])
def test_a_row_with_a_nan_or_infinite_logit_is_reported(extension, dtype, params):
    logits = random_logits(6, 32064, dtype)
    expected = draw(extension, logits, 32000, SamplingParams(**params, seed=1))
    logits[:, 32000:] = torch.nan  # padding
    logits[1, 0] = torch.nan
    logits[2, 31999] = torch.inf
    logits[3] = torch.nan
    logits[4, 5] = -torch.inf
    tokens = draw(extension, logits, 32000, SamplingParams(**params, seed=1))
    assert tokens[1:4].tolist() == [NOT_FINITE] * 3
    assert tokens[[0, 5]].tolist() == expected[[0, 5]].tolist() and tokens[4] >= 0


def test_rows_of_a_batch_have_separate_parameters(extension):
    vocab = 5000
    listed = [SamplingParams(**{"temperature": 1.0, **cuts}, seed=row)
              for row, cuts in enumerate(CUTS)] + [SamplingParams()]
    logits = random_logits(len(listed), vocab, "float32")
    together = draw(extension, logits, vocab, listed, 5)
    alone = [draw(extension, logits[row:row + 1], vocab, [params], 5)[0]
             for row, params in enumerate(listed)]
    assert together.tolist() == alone
    assert together[-1] == logits[-1].argmax().item()


@pytest.mark.parametrize("cuts", [
    dict(temperature=0.9, top_k=40, top_p=0.95), dict(temperature=1.3), dict(min_p=0.05),
    dict(typical_p=0.8), dict(top_k=100, top_p=0.97, min_p=0.01, typical_p=0.9)],
    ids=lambda cuts: " ".join(f"{k}={v}" for k, v in cuts.items()))
def test_the_sampled_distribution_is_exact(extension, cuts):
    from scipy.stats import chisquare
    torch.manual_seed(1)
    rows, vocab = 100_000, 300
    logits = (torch.randn(vocab) * 2).to(torch.float16).cuda().expand(rows, vocab).contiguous()
    params = SamplingParams(**{"temperature": 1.0, **cuts}, seed=7)
    tokens = draw(extension, logits, vocab, params, np.arange(rows))
    chances = probabilities(logits[0].float().cpu().numpy(), as_float32(params))
    counts = np.bincount(tokens, minlength=vocab)
    assert (counts[chances == 0] == 0).all()
    assert chisquare(counts[chances > 0], chances[chances > 0] * rows).pvalue > 1e-3


def test_records_have_the_size_that_the_kernels_read(extension):
    assert extension.record_bytes == (SLOT_STATE.itemsize, LOGPROBS.itemsize)


class Device:
    """The slots of an engine in kernel layout, initially garbage."""

    def __init__(self, extension, vocab, room, slots):
        self.extension, self.vocab = extension, vocab
        self.states = on_device(np.zeros(slots, SLOT_STATE))
        self.lists = torch.zeros(0, dtype=torch.int32, device="cuda")
        self.counts = torch.full((slots, vocab), 77, dtype=torch.int32, device="cuda")
        self.tokens = torch.full((slots, room), 5, dtype=torch.int32, device="cuda")
        self.lengths = torch.full((slots,), 3, dtype=torch.int32, device="cuda")

    @property
    def history(self):
        return [describe(t) for t in (self.counts, self.tokens, self.lengths)]

    def admit(self, admit):
        """Admit sequences as an engine does; lists keep their layout."""
        made = Admissions.of(admit)
        starts = np.cumsum([0, *made.lengths]).astype(np.int32)
        given = [on_device(made.states), *(torch.from_numpy(array).cuda() for array in (
            made.slots, made.prompts, starts, made.tokens))]
        self.extension.admit([*map(describe, (self.states, *given)), *self.history], self.vocab,
                             len(admit))
        self.lists = torch.from_numpy(made.lists).cuda()

    def process(self, logits, slots, masks=None, repeats=1):
        """`masks`: by row, as in `Step.masks`."""
        scores = torch.full((len(slots), -(-self.vocab // 4) * 4), torch.nan, device="cuda")
        rows = torch.tensor(slots, dtype=torch.int32).cuda()
        chosen, words = (torch.from_numpy(array).cuda() for array in self._masks(masks, len(slots)))
        time = self.extension.process(
            [*map(describe, (scores, logits, self.states, rows, self.lists)), *self.history,
             describe(chosen), describe(words)], self.vocab, repeats=repeats)
        result = scores[:, :self.vocab].cpu().numpy()
        return (result, time) if repeats > 1 else result

    @staticmethod
    def _masks(masks, rows):
        if not masks:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        places = {row: place for place, row in enumerate(masks)}
        return np.array([places.get(row, -1) for row in range(rows)], np.int32), \
            np.stack([*masks.values()]).view(np.int32)


RULES = {
    "repetition_penalty": [1.3, 0.8], "presence_penalty": [0.7, -1.5],
    "frequency_penalty": [0.3, -0.2], "min_tokens": [9, 4],
    "logit_bias": [{3: 2.5, 5: -1.25, 0: -np.inf}, {7: 0.1}],
}
WORDS = [[[4]], [[5, 6], [7, 8, 9], [11, 3], [2, 1]]]


FORCED = [{0: (3,), 5: (2, 7)}, {1: (4, 9), 30: (1,), 700: (0,)}]


def random_mask(rng, vocab):
    return np.packbits(rng.random(-(-vocab // 32) * 32) < 0.3, bitorder="little").view(np.uint32)


def samplers(kinds, prompts, vocab, seed=0):
    """Return one sampler per prompt with some parameters; every third has none."""
    rng = np.random.default_rng(seed)
    made = []
    for row, prompt in enumerate(prompts):
        which = [] if row % 3 == 2 else kinds
        given = {name: RULES[name][row % 2] for name in which if name in RULES}
        words = [*WORDS[row % 2], prompt[-3:]] if "bad_words" in which else []
        if "logit_bias" in which:
            given["logit_bias"] = {int(token) % vocab: float(bias) for token, bias in zip(
                rng.integers(0, vocab, 40), rng.standard_normal(40), strict=True)} | {
                token % vocab: bias for token, bias in given["logit_bias"].items()}
        made.append(Sampler(SamplingParams(**given), 0, prompt, [1, 2], [
            [token % vocab for token in word] for word in words],
            FORCED[row % 2] if "forced" in which else {}))
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "stride"), [(101, 104), (101, 101), (32000, 32000),
                                               (128256, 128256)])
@pytest.mark.parametrize("kinds", [[], *([name] for name in RULES), ["bad_words"], ["forced"],
                                   [*RULES, "bad_words"], [*RULES, "bad_words", "forced"]],
                         ids="+".join)
@pytest.mark.parametrize("masked", [False, True])
def test_logits_are_processed_as_on_the_host(extension, kinds, vocab, stride, dtype, masked):
    """Bitwise, for prompts and generated tokens of several lengths.

    Slots differ from the rows of the logits."""
    rng = np.random.default_rng(4)
    rows, slots = 7, (4, 8, 2, 5, 0, 7, 3)
    prompts = [rng.integers(0, min(vocab, 300), size).tolist() for size in (1, 2, 3, 40, 900, 5, 7)]
    generated = [rng.integers(0, min(vocab, 60), size).tolist() for size in (0, 1, 5, 30, 700, 3,
                                                                            8)]
    generated[5][-1] = prompts[5][-1]
    generated[1] = [5 % vocab]  # then 6 ends a bad word
    device = Device(extension, vocab, 2000, rows + 2)
    logits = random_logits(rows, stride, dtype)
    made = samplers(kinds, prompts, vocab)
    device.admit({slot: SamplingState(sampler, tuple(tokens))
                  for slot, sampler, tokens in zip(slots, made, generated, strict=True)})
    masks = {row: random_mask(rng, vocab) for row in (6, 0, 3)} if masked else {}
    scores = device.process(logits, slots, masks)
    seen = logits.float().cpu().numpy()[:, :vocab]
    for row, sampler in enumerate(made):
        expected = sampler.process(seen[row], generated[row])
        if row in masks:
            expected = logits_processors.allow(expected, masks[row])
        wrong = np.flatnonzero(scores[row] != expected)
        assert len(wrong) == 0, \
            f"row {row}: token {wrong[0]}, logit {seen[row, wrong[0]]}, is " \
            f"{scores[row, wrong[0]]} and not {expected[wrong[0]]}, as are {len(wrong)} tokens; " \
            f"{(generated[row].count(wrong[0]), prompts[row].count(wrong[0]))} in generated, prompt"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "stride"), [(25, 32), (101, 104), (101, 101), (32000, 32000),
                                               (128256, 128256), (262144, 262144)])
@pytest.mark.parametrize("shape", ["random", "flat", "sorted"])
def test_log_probabilities_are_the_host_s(extension, shape, vocab, stride, dtype):
    rows, slots = 6, [5, 0, 3, 1, 4, 2]
    counts = [-1, 0, 1, 5, MAX_LOGPROBS, MAX_LOGPROBS]
    logits = random_logits(rows, stride, dtype)
    if shape == "flat":
        logits[:] = 0.5
    if shape == "sorted":
        logits = (torch.arange(stride).expand(rows, stride) / 1000).to(DTYPES[dtype]).cuda()
    chosen = np.random.default_rng(0).integers(0, vocab, rows)
    made = torch.full((rows, LOGPROBS.itemsize // 4), -1, dtype=torch.int32, device="cuda")
    states = np.zeros(rows, SLOT_STATE)
    states["logprobs"][slots] = counts
    tensors = [made, logits, torch.from_numpy(chosen).cuda(), on_device(states),
               torch.tensor(slots, dtype=torch.int32).cuda()]
    extension.logprobs([describe(tensor) for tensor in tensors], vocab)
    written = made.cpu().numpy()
    records = written.view(LOGPROBS)[:, 0]
    seen = logits.float().cpu().numpy()[:, :vocab]
    for row, count in enumerate(counts):
        if count < 0:
            assert (written[row] == -1).all()
            continue
        expected = Logprobs.of(seen[row], int(chosen[row]), count)
        assert abs(records[row]["chosen"] - expected.chosen) < 2e-5, f"row {row}: chosen"
        assert records[row]["tokens"][:count].tolist() == [token for token, _ in expected.top], \
            f"row {row}: the tokens of the {count} likeliest"
        np.testing.assert_allclose(records[row]["top"][:count], [p for _, p in expected.top],
                                   atol=2e-5, err_msg=f"row {row}")


def looked_up(extension, histories, count, slots, repeats=1, lookup=None):
    """Drafts and matches by the kernel, after these tokens of each sequence."""
    room, rows = max(map(len, histories)) + 3, len(histories)
    tokens = np.full((rows, room), 5, np.int32)
    states = np.zeros(rows, SLOT_STATE)
    for slot, history in zip(slots, histories, strict=True):
        tokens[slot, :len(history)] = history
    states["prompt_lookup"] = 1 if lookup is None else lookup
    lengths = np.empty(rows, np.int32)
    lengths[slots] = [len(history) for history in histories]
    tokens[:, ::3] |= 1 << 30  # kRepeated
    drafts, by_slot = (torch.full((rows, 16), -7, device="cuda") for _ in range(2))
    matches = torch.full((rows,), -7, dtype=torch.int32, device="cuda")
    given = np.array(slots, np.int32), np.zeros((rows, 1), np.int32), tokens, lengths
    tensors = [drafts, matches, by_slot, on_device(states),
               *(torch.from_numpy(array).cuda() for array in given)]
    time = extension.lookup_drafts([*map(describe, tensors)], 1, count, max(map(len, histories)),
                                   repeats=repeats)
    assert torch.equal(by_slot[slots], drafts)
    return drafts.tolist(), matches.tolist(), time


@pytest.mark.parametrize("longest", [1, 3, 20, 2047, 2049, 8192, 131072, 300000])
@pytest.mark.parametrize("distinct", [1, 2, 3, 40, 5000])
def test_drafts_of_prompt_lookup_equal_the_host_s(extension, longest, distinct):
    rng = np.random.default_rng(longest + distinct)
    rows, count = 5, int(rng.integers(1, 17))
    histories = [rng.integers(0, distinct, rng.integers(max(longest // 2, 1), longest + 1))
                 for _ in range(rows)]
    for history in histories[:2]:  # a match far away, and its repetition
        span = min(len(history) // 3, 30)
        if span:
            history[-span:] = history[:span]
    slots = rng.permutation(rows).tolist()
    for _ in range(2):  # the scratch memory is clear again
        drafts, matches, _ = looked_up(extension, histories, count, slots, repeats=2)
        for history, own, match in zip(histories, drafts, matches, strict=True):
            expected = NgramDrafter(history.tolist()).draft(count)
            tokens = expected.tokens if expected else []
            assert (own, match) == (tokens + [-1] * (16 - len(tokens)),
                                    expected.match if expected else 0)


def test_slots_without_prompt_lookup_have_no_drafts(extension):
    histories = [np.arange(5000) % 7] * 2
    drafts, matches, _ = looked_up(extension, histories, 4, [1, 0], lookup=[1, 0])
    assert matches == [0, 16] and drafts[0] == [-1] * 16 and min(drafts[1][:4]) >= 0


@pytest.mark.thorough
@pytest.mark.parametrize(("rows", "length"), [(1, 8192), (16, 8192), (64, 8192), (1, 131072)])
def test_prompt_lookup_takes_microseconds(extension, rows, length):
    """Prints the time of a launch; the bound is generous."""
    histories = [np.random.default_rng(row).integers(0, 1000, length) for row in range(rows)]
    *_, time = looked_up(extension, histories, 7, [*range(rows)], repeats=200)
    print(f"prompt lookup of {rows} sequences with {length} tokens: {1e3 * time:.1f} us")
    assert time < 1
