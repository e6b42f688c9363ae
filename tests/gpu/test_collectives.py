"""Collectives over peer memory, of ranks on several GPUs or on one, against float64 sums."""

import threading
import time

import numpy as np
import pytest
import torch
from on_device import DTYPES, TOLERANCE, describe

SIZES = [2] if torch.cuda.device_count() < 3 else range(2, min(torch.cuda.device_count(), 8) + 1)
SHAPES = [(1, 4096), (3, 576), (1, 1), (7, 33), (64, 4096), (5, 16384)]


class Ranks:
    """Ranks on a GPU each, or two on one GPU, whose blocks fit it together."""

    def __init__(self, extension, size):
        self.devices = [rank % torch.cuda.device_count() for rank in range(size)]
        self._ranks = extension.LocalRanks(self.devices)
        self.abort, self.resume = self._ranks.abort, self._ranks.resume

    def run(self, op, way, tensors, **options):
        """Run a collective; `tensors` of each rank, None for an absent one."""
        for device in {*self.devices}:
            torch.cuda.synchronize(device)
        self._ranks.run(op, way, [[(0, "float32", []) if tensor is None else describe(tensor)
                                   for tensor in own] for own in tensors], **options)


@pytest.fixture(scope="module", params=SIZES)
def ranks(extension, request):
    return Ranks(extension, request.param)


def parts(ranks, rows, width, dtype, seed=0):
    """A matrix per rank, on its device."""
    random = np.random.default_rng(seed)
    return [torch.from_numpy(random.standard_normal((rows, width))).to(DTYPES[dtype])
            .to(f"cuda:{device}") for device in ranks.devices]


def poisoned(x, width=None):
    return torch.full((len(x), width or x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)


def total(x):
    """The sum in float32 and in the order of ranks, rounded once, on the host."""
    result = torch.zeros(x[0].shape)
    for part in x:
        result += part.cpu().float()
    return result.to(x[0].dtype)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("way", ["one_shot", "two_shot"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_have_equal_bits_on_all_ranks(ranks, dtype, way, captured):
    for seed, (rows, width) in enumerate(SHAPES):
        if dtype == "float32" and rows * width * 4 > 512 << 10 and way == "one_shot":
            rows //= 2
        x = parts(ranks, rows, width, dtype, seed)
        y = [poisoned(own) for own in x]
        ranks.run("all_reduce", way, [*zip(y, x, strict=True)], repeats=3, captured=captured)
        for own in y:
            assert torch.equal(own.cpu(), total(x))


def test_large_sums_take_two_shots(ranks):
    x = parts(ranks, 1000, 8000, "bfloat16")
    y = [poisoned(own) for own in x]
    ranks.run("all_reduce", "two_shot", [*zip(y, x, strict=True)])
    assert all(torch.equal(own.cpu(), total(x)) for own in y)
    with pytest.raises(Exception, match="an all-reduce over peer memory failed: invalid argument"):
        ranks.run("all_reduce", "one_shot", [*zip(y, x, strict=True)])


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("way", ["one_shot", "two_shot"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_columns_are_in_the_order_of_ranks(ranks, dtype, way, captured):
    for rows, width in ((1, 16384), (1, 8), (3, 64), (33, 1024)):
        x = parts(ranks, rows, width, dtype)
        y = [poisoned(own, width * len(x)) for own in x]
        ranks.run("all_gather", way, [*zip(y, x, [None] * len(x), strict=True)], repeats=2,
                  captured=captured)
        for own in y:
            assert torch.equal(own.cpu(), torch.cat([part.cpu() for part in x], 1))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_with_its_norm(ranks, dtype, weighted, residual):
    for rows, width in ((1, 4096), (3, 576), (70, 1024), (2, 8192)):
        x = parts(ranks, rows, width, dtype)
        more = [parts(ranks, rows, width, dtype, 9)[0].to(own.device) if residual else None
                for own in x]
        weight = [torch.linspace(0.5, 2, width, device=own.device) if weighted else None
                  for own in x]
        y, normed = [poisoned(own) for own in x], [poisoned(own) for own in x]
        added = [poisoned(own) if residual else None for own in x]
        ranks.run("all_reduce_norm", "one_shot",
                  [*zip(y, added, normed, x, more, weight, strict=True)], repeats=2, captured=True)
        wanted = total(x).double() + (more[0].cpu().double() if residual else 0)
        scaled = wanted / (wanted.square().mean(1, keepdim=True) + 1e-6).sqrt()
        if weighted:
            scaled *= weight[0].cpu().double()
        for rank in range(len(x)):
            assert torch.equal(y[rank].cpu(), total(x))
            assert (normed[rank].cpu().double() - scaled).abs().max() <= \
                TOLERANCE[dtype] * scaled.abs().max()
            assert torch.equal(normed[rank].cpu(), normed[0].cpu())
            if residual:
                assert (added[rank].cpu().double() - wanted).abs().max() <= \
                    TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("replaced", ["sum", "normed"])
def test_results_may_replace_the_input(ranks, replaced):
    """As in a program's arena, where the input ends at the all-reduce."""
    x, more = parts(ranks, 70, 2048, "bfloat16"), parts(ranks, 1, 2048, "bfloat16", 1)[0]
    results = []
    for inside in (False, True):
        given = [own.clone() for own in x]
        added, normed = ([own if inside and replaced == name else poisoned(own) for own in given]
                         for name in ("sum", "normed"))
        residual = [more.expand(70, -1).contiguous().to(own.device) for own in x]
        ranks.run("all_reduce_norm", "one_shot",
                  [[poisoned(own), *others, None] for own, *others in zip(
                      given, added, normed, given, residual, strict=True)])
        results.append([own.cpu() for own in [*added, *normed]])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_many_collectives_of_changing_kinds(ranks):
    """Halves of the regions are used again and again."""
    random = np.random.default_rng(1)
    for seed in range(200):
        rows, width = int(random.integers(1, 40)), 16 * int(random.integers(1, 100))
        way = ("one_shot", "two_shot")[random.integers(2)]
        x = parts(ranks, rows, width, "float32", seed)
        if random.integers(2):
            y = [poisoned(own) for own in x]
            ranks.run("all_reduce", way, [*zip(y, x, strict=True)], captured=seed % 2 == 0)
            assert all(torch.equal(own.cpu(), total(x)) for own in y)
        else:
            y = [poisoned(own, width * len(x)) for own in x]
            ranks.run("all_gather", way, [*zip(y, x, [None] * len(x), strict=True)])
            assert all(torch.equal(own.cpu(), torch.cat([part.cpu() for part in x], 1))
                       for own in y)


@pytest.mark.parametrize("way", ["one_shot", "two_shot"])
def test_a_rank_that_waits_alone_can_be_ended(ranks, way):
    x = parts(ranks, 4, 1024, "float32")
    y = [poisoned(own) for own in x]
    tensors = [*zip(y, x, strict=True)]
    waiting = threading.Thread(target=ranks.run, args=("all_reduce", way, tensors),
                               kwargs={"only": 0})
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive()
    ranks.abort()
    waiting.join(5)
    assert not waiting.is_alive()
    ranks.resume()
    ranks.run("all_reduce", way, tensors)
    assert all(torch.equal(own.cpu(), total(x)) for own in y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize("captured", [False, True])
def test_nccl_gives_the_same_gathers_and_nearly_the_same_sums(ranks, captured):
    x = parts(ranks, 5, 1024, "float32")
    y, gathered = [poisoned(own) for own in x], [poisoned(own, 1024 * len(x)) for own in x]
    ranks.run("all_reduce", "nccl", [*zip(y, x, strict=True)], captured=captured)
    ranks.run("all_gather", "nccl",
              [[own, part, torch.empty_like(own)] for own, part in zip(gathered, x, strict=True)],
              captured=captured)
    for own, columns in zip(y, gathered, strict=True):
        assert torch.allclose(own.cpu(), total(x), rtol=1e-5, atol=1e-5)
        assert torch.equal(columns.cpu(), torch.cat([part.cpu() for part in x], 1))
