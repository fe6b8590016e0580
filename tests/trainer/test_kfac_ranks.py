"""K-FAC over several ranks is K-FAC on one, whoever does what."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.kfac import KFAC
from trainer.kfac.assignment import Cost, grid, place, spread
from trainer.kfac.costs import costs
from trainer.kfac.exchange import Part, pack, unpack
from trainer.kfac.triangles import fold, folded_shape, unfold

CHILD = Path(__file__).with_name("kfac_child.py")
ODD_CHILD = Path(__file__).with_name("kfac_odd_child.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return {}


def trained(start, tmp_path, results, ranks):
    if ranks not in results:
        process = start(CHILD, tmp_path / "found", ranks=ranks)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        results[ranks] = torch.load(tmp_path / "found", weights_only=True)
    return results[ranks]


def child(monkeypatch, tmp_path):
    """What the child's file defines."""
    monkeypatch.setattr(sys, "argv", [str(CHILD), str(tmp_path / "again")])
    return runpy.run_path(str(CHILD))


def close(found, wanted, tolerance=1e-10):
    """Over all weights."""
    assert found.keys() == wanted.keys()
    found, wanted = (torch.cat([value.flatten() for value in weights.values()]) for weights in (found, wanted))
    assert (found - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_learns_the_same(start, tmp_path, results, ranks):
    alone, found = (trained(start, tmp_path, results, n) for n in (1, ranks))
    ways = [way for way in found if not {"local", "adaptive", "adaptive,", "bytes"} & set(way.split())]
    assert len(ways) == 11
    for way in ways:
        kind = way.split()[0]
        close(found[way]["weights"], alone[f"{kind} 1.00"]["weights"], 1e-6 if "float32" in kind else 1e-10)
        cosines = alone[f"{kind} 1.00"]["cosines"]
        assert found[way]["cosines"] == pytest.approx(cosines, abs=1e-4)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_uncorrelated_pixels_on_any_number_of_ranks(start, tmp_path, results, ranks):
    alone, found = (trained(start, tmp_path, results, n) for n in (1, ranks))
    wanted = alone["uncorrelated bytes 1.00"]["weights"]
    for way in (way for way in found if way.startswith("uncorrelated")):
        close(found[way]["weights"], wanted)
    correlated = alone["eigen bytes 1.00"]["weights"]
    assert max((wanted[name] - correlated[name]).norm() for name in wanted) > 1e-4


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_damping_adapts_the_same_on_any_number_of_ranks(start, tmp_path, results, ranks):
    alone, found = (trained(start, tmp_path, results, n) for n in (1, ranks))
    wanted = alone["eigen adaptive"]
    assert wanted["damping"] < 0.1  # that of the beginning
    for way in ("eigen adaptive", "eigen adaptive, owners"):
        close(found[way]["weights"], wanted["weights"])
        assert found[way]["damping"] == pytest.approx(wanted["damping"], rel=1e-12)
        assert found[way]["ratio"] == pytest.approx(wanted["ratio"], rel=1e-9)


def test_factors_of_the_owners_batch_are_others_but_learn(start, tmp_path, results):
    alone, found = (trained(start, tmp_path, results, n) for n in (1, 2))
    assert "local" in found and alone["local"]["weights"].keys() == found["local"]["weights"].keys()
    wanted = alone["eigen 1.00"]["weights"]
    close(alone["local"]["weights"], wanted)
    for way in ("local", "ekfac local"):
        different = [(found[way]["weights"][name] - wanted[name]).norm() for name in wanted]
        assert max(different) > 1e-4 and all(value.isfinite().all() for value in found[way]["weights"].values())
    sent = found["local"]["bytes"][0]
    assert sent["factors"] < found["eigen 0.50"]["bytes"][0]["factors"] / 10  # of norms alone


def test_memory_and_traffic_are_shared(start, tmp_path, results):
    """Each factor is kept once, each solution by as many ranks as the fraction says, and gradients are sent instead."""
    alone, found = (trained(start, tmp_path, results, n) for n in (1, 4))
    whole = alone["eigen 1.00"]["memory"]
    for way, copies in (("eigen 1.00", 4), ("eigen 0.50", 2), ("eigen 0.25", 1)):
        solutions = sum(of["solutions"] for of in found[way]["memory"])
        assert solutions == copies * whole["solutions"]
        assert sum(of["factors"] for of in found[way]["memory"]) < 1.1 * whole["factors"]  # norms' on every rank
    sent = {way: {k: sum(of[k] for of in found[way]["bytes"]) for k in ("solutions", "gradients")} for way in found}
    gradients = [sent[f"eigen {fraction}"]["gradients"] for fraction in ("1.00", "0.50", "0.25")]
    assert gradients[0] == 0 < gradients[2] <= gradients[1]  # a half: from two ranks of each column
    assert sent["eigen 0.25"]["solutions"] == 0 < sent["eigen 0.50"]["solutions"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_formula_counts_every_byte(start, tmp_path, results, monkeypatch, ranks):
    """In two steps that do everything."""
    found = trained(start, tmp_path, results, ranks)
    network = child(monkeypatch, tmp_path)["network"](torch.float32)
    for way in ("eigen", "cholesky", "uncorrelated", "eigen bfloat16", "cholesky bfloat16"):
        solver = "cholesky" if "cholesky" in way else "eigen"
        settings = {"inv_dtype": "bfloat16"} if "bfloat16" in way else {"spatially_uncorrelated": way == "uncorrelated"}
        size = 1 if "bfloat16" in way else 2  # the child's are float64, but for those
        for workers in (n for n in range(1, ranks + 1) if ranks % n == 0):
            of = found[f"{way} bytes {workers / ranks:.2f}"]
            memory, sent = ([of[what]] if ranks == 1 else of[what] for what in ("memory", "bytes"))
            wanted = costs(network, ranks, workers / ranks, 1, 1, solver, **settings)
            assert max(rank["factors"] for rank in memory) == size * wanted.factor_bytes
            assert max(rank["solutions"] for rank in memory) == size * wanted.solution_bytes
            mean = {kind: sum(rank[kind] for rank in sent) / ranks / size for kind in sent[0]}
            assert mean["factors"] == pytest.approx(wanted.factors_sent)
            assert mean["solutions"] == pytest.approx(wanted.solutions_sent)
            assert mean["gradients"] == pytest.approx(wanted.gradients_sent)


def test_a_state_fits_any_number_of_ranks(start, tmp_path, results, monkeypatch):
    """Of four ranks, each with its own layers, on one; all of them are needed."""
    found = trained(start, tmp_path, results, 4)
    network = child(monkeypatch, tmp_path)["network"]
    states = found["eigen 0.25"]["state"]
    assert not set.intersection(*({n for n in state["layers"] if n not in ("1", "8")} for state in states))
    preconditioner = KFAC(network())
    preconditioner.load_state_dict(*states)
    assert all(preconditioner.factors(name)[0].any() for name in preconditioner.layers())
    with pytest.raises(ValueError, match=r"the states \(of all ranks\?\) lack \['"):
        preconditioner.load_state_dict(*states[:2])


def test_ranks_that_use_different_layers(start, tmp_path):
    """A layer's factors are the mean over those that used it; gradients stay alike; settings must be."""
    process = start(ODD_CHILD, tmp_path / "found", ranks=2)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    found = torch.load(tmp_path / "found", weights_only=True)
    for way in ("1.0", "0.5", "0.5, owners"):
        of = found[way]
        assert of["alike"] and of["cosines"].keys() == {"both", "first", "second"}
        for name, (a, wanted) in of["factors"].items():
            torch.testing.assert_close(a, wanted, msg=f"{way}: {name}")
    backward_passes_a_step = 4 / 3
    assert found["0.5, owners"]["reduced"] == pytest.approx(backward_passes_a_step * found["bytes of gradients"])
    assert found["0.5"]["reduced"] == 0
    assert found["never seen"].keys() == {"0.5", "0.5, owners"}
    torch.testing.assert_close(found["never seen"]["0.5, owners"], found["never seen"]["0.5"])
    assert found["removed"]
    torch.testing.assert_close(*found["expert"])
    assert found["refused"] == [
        "damping: 0.1 on rank 0, and 0.2 on rank 1; ranks must have the same",
        "layer both: ('torch.float32', {'a': (1, 5, 5), 'g': (1, 4, 4)}) on rank 0, and None on rank 1; "
        "ranks must have the same",
        "grad_worker_fraction: 1.0 on rank 0, and 0.5 on rank 1; ranks must have the same",
        "grad_scaler: it looks for overflows before step(), in gradients that only their owner has",
    ]


# --- who does what ---


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), max_size=30), st.integers(1, 12))
def test_the_fullest_bin_is_near_the_best_possible(costs, num_bins):
    found = spread(costs, num_bins)
    assert found.keys() == costs.keys() and set(found.values()) <= set(range(num_bins))
    loads = [sum(costs[job] for job in costs if found[job] == number) for number in range(num_bins)]
    largest = max(costs.values(), default=0.0)  # the job that ends last began in what was then the emptiest bin
    assert max(loads) <= sum(costs.values()) / num_bins + (1 - 1 / num_bins) * largest + 1e-3
    assert spread(dict(reversed(costs.items())), num_bins) == found


def test_jobs_are_spread_evenly():
    assert spread({"a": 4, "b": 3, "c": 3, "d": 0}, 10**12) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert spread({"a": 4, "b": 3, "c": 3, "d": 2}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}


@pytest.mark.parametrize(
    ("world_size", "fraction", "shape"),
    [(1, 1.0, (1, 1)), (4, 1.0, (4, 1)), (4, 0.5, (2, 2)), (4, 0.25, (1, 4)), (6, 1 / 3, (2, 3)),
     (96, 1 / 48, (2, 48))],
)  # fmt: skip
def test_grids(world_size, fraction, shape):
    found = grid(world_size, fraction)
    assert found == shape
    columns = [found.column(number) for number in range(found.num_columns)]
    assert sorted(rank for column in columns for rank in column) == list(range(world_size))
    for rank in range(world_size):
        assert rank in found.row(rank) and len(found.row(rank)) == found.num_columns
        assert all(len(set(found.row(rank)) & set(column)) == 1 for column in columns)


@pytest.mark.parametrize(("world_size", "fraction"), [(4, 0.3), (4, 0.75), (3, 0.5), (1, 0.5)])
def test_fractions_that_make_no_equal_groups_are_refused(world_size, fraction):
    with pytest.raises(ValueError, match=f"grad_worker_fraction: {fraction} .* of {world_size} ranks; allowed: 1/"):
        grid(world_size, fraction)


def test_owners_are_in_their_column_and_share_the_work():
    costs = {f"layer{i}": Cost(float(i**3), float(i**2)) for i in range(1, 20)}
    for fraction in (1.0, 0.5, 0.25):
        of = grid(4, fraction)
        places = place(costs, of, 10)
        assert all(owner in of.column(column) for owner, column in places.values())
        assert {owner for owner, _ in places.values()} == {0, 1, 2, 3}


@given(st.integers(1, 12), st.sampled_from([(), (1,), (3,), (2, 3)]))
def test_triangles_hold_every_element_above_the_diagonal_once(n, batch):
    matrix = torch.randn(*batch, n, n)
    symmetric = matrix.triu() + matrix.triu(1).mT
    folded = fold(matrix)  # what is below the diagonal does not count
    assert folded.shape == folded_shape(matrix.shape) == (*batch, n * (n + 1) // 2)
    assert torch.equal(unfold(folded, n), symmetric)
    above = matrix[(..., *torch.triu_indices(n, n))]
    assert torch.equal(folded.sort().values, above.sort().values)
    matrix[..., 0, -1] = float("nan")
    assert unfold(fold(matrix), n).isnan().sum(dim=(-2, -1)).unique().item() == (2 if n > 1 else 1)


@given(st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_what_is_packed_comes_out_again(n, groups, symmetric):
    matrix = torch.randn(groups, n, n)
    matrix = matrix + matrix.mT if symmetric else matrix
    parts = [Part(matrix, symmetric), Part(torch.randn(3))]
    flat = pack(parts)
    assert len(flat) == groups * (n * (n + 1) // 2 if symmetric else n * n) + 3
    into = [Part(torch.empty_like(part.tensor), part.symmetric) for part in parts]
    unpack(flat, into)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(into, parts, strict=True))
