"""K-FAC over several ranks is K-FAC on one, whoever does what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.kfac_costs import costs
from tests.ports import free_ports
from tests.processes import Ranks, clean_environment
from tests.trainer.kfac import kfac_child
from tests.trainer.kfac.kfac_child import QUICK, network, train, ways
from tests.waiting import limit_s
from trainer.kfac import KFAC
from trainer.kfac.settings import KFACSettings

BOUNDS = {
    "float64": (1e-10, 1e-10),
    "float32": (1e-6, 1e-4),
    "bfloat16": (3e-3, 0.1),
}  # of all weights; of each gradient
SOLVERS = "eigen", "cholesky"
RANKS = [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
ODD_CHILD = Path(__file__).with_name("kfac_odd_child.py")


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    """What one rank learns, by the name of the way."""
    needed = {way: options for way, options in ways(1, None).items() if way.endswith(("1.00", "local", "resumed"))}
    return {way: train(0, 1, **options) for way, options in needed.items()}


@pytest.fixture(scope="module")
def among(request):
    """among(ways) -> those that are trained: with --slow all, else few."""
    return lambda some: set(some) if request.config.getoption("--slow") else QUICK.intersection(some)


@pytest.fixture(scope="module")
def trained(server, alone, request, tmp_path_factory):
    """trained(ranks) -> what they learn, by the name of the way."""
    known = {}
    which = "all" if request.config.getoption("--slow") else "quick"

    def _trained(ranks: int) -> dict[str, dict]:
        if ranks not in known:
            folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
            torch.save(alone, folder / "alone")
            words = [kfac_child.__file__, which, folder / "found", folder / "alone"]
            world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
            world |= clean_environment(MASTER_PORT=str(free_ports()))
            own = [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
            processes = Ranks([server.start(*words, env=env) for env in own])
            _, errors = processes.communicate(timeout=limit_s(600))
            assert processes.returncode == 0, errors[-3000:]
            known[ranks] = torch.load(folder / "found", weights_only=True)
            every_way = ways(ranks, None).keys() - ({"eigen compiled"} if ranks > 2 else set())
            assert known[ranks].keys() == (every_way if which == "all" else QUICK)
        return known[ranks]

    return _trained


def whole(weights):
    return {"all": torch.cat([value.flatten() for value in weights.values()])}


def close(found, wanted, tolerance=1e-10):
    """Assert that each tensor is close, relative to its norm."""
    assert found.keys() == wanted.keys()
    for name in found:
        assert (found[name] - wanted[name]).norm() <= tolerance * wanted[name].norm(), name


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", RANKS)
def test_any_number_of_ranks_learns_the_same(trained, alone, among, ranks):
    """The gradients of the last step are the same, too. With other rounding, differences are larger than its unit: in
    float32 gradients are divided by a damped curvature, and eigenvectors in bfloat16 are other ones.
    """
    found = trained(ranks)
    fractions = {2: ("0.50", "1.00"), 3: ("0.33", "1.00"), 4: ("0.25", "0.50", "1.00")}[ranks]
    assert among(f"{solver} {fraction}" for solver in SOLVERS for fraction in fractions) < found.keys()
    assert among(f"{solver} owners" for solver in SOLVERS) < found.keys()
    for way in found.keys() - {"local", "ekfac-local"}:
        wanted = alone[f"{way.split()[0].rstrip(',')} 1.00"]
        kind = next((kind for kind in BOUNDS if kind in way), "float64")
        weights, gradients = BOUNDS[kind]
        close(whole(found[way]["weights"]), whole(wanted["weights"]), weights)
        close(found[way]["gradients"], wanted["gradients"], gradients)
        assert found[way]["cosines"] == pytest.approx(wanted["cosines"], abs=gradients)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", RANKS)
def test_uncorrelated_pixels_are_another_training(trained, ranks):
    fraction = {2: "0.50", 3: "0.33", 4: "0.50"}[ranks]
    wanted, correlated = (trained(ranks)[f"{kind}-bytes {fraction}"]["weights"] for kind in ("uncorrelated", "eigen"))
    assert max((wanted[name] - correlated[name]).norm() for name in wanted) > 1e-4


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", RANKS)
def test_damping_adapts_the_same_on_any_number_of_ranks(trained, alone, among, ranks):
    found = trained(ranks)
    wanted = alone["adaptive 1.00"]
    assert wanted["damping"] < 0.1  # that of the beginning
    for way in among({"adaptive 1.00", "adaptive", "adaptive, owners"}):
        assert found[way]["damping"] == pytest.approx(wanted["damping"], rel=1e-12)
        assert found[way]["ratio"] == pytest.approx(wanted["ratio"], rel=1e-9)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_not_finite_on_one_rank_enters_no_factor(trained, alone, among, ranks):
    found = trained(ranks)
    assert alone["broken 1.00"]["skipped"] > 0 == alone["eigen 1.00"]["skipped"]
    for way in among({"broken 1.00", "broken"}):
        assert sum(found[way]["skipped"]) == alone["broken 1.00"]["skipped"]
        assert all(value.isfinite().all() for value in found[way]["weights"].values())


@pytest.mark.ranks
def test_factors_of_the_owners_batch_are_others_but_learn(trained, alone):
    found = trained(4)
    assert "local" in found and alone["local"]["weights"].keys() == found["local"]["weights"].keys()
    wanted = alone["eigen 1.00"]["weights"]
    close(alone["local"]["weights"], wanted)
    for way in ("local", "ekfac-local"):
        different = [(found[way]["weights"][name] - wanted[name]).norm() for name in wanted]
        assert max(different) > 1e-4 and all(value.isfinite().all() for value in found[way]["weights"].values())
    sent = found["local"]["bytes"][0]
    assert sent["factors"] < found["eigen 0.25"]["bytes"][0]["factors"] / 10  # of norms alone


@pytest.mark.ranks
def test_memory_and_traffic_are_shared(trained, alone):
    """Each factor is kept once, each solution by as many ranks as the fraction says, and gradients are sent instead."""
    found = trained(4)
    whole = alone["eigen 1.00"]["memory"]
    for way, copies in (("eigen 1.00", 4), ("eigen 0.50", 2), ("eigen 0.25", 1)):
        solutions = sum(of["solutions"] for of in found[way]["memory"])
        assert solutions == copies * whole["solutions"]
        assert sum(of["factors"] for of in found[way]["memory"]) < 1.1 * whole["factors"]  # norms' on every rank
    sent = {way: {k: sum(of[k] for of in found[way]["bytes"]) for k in ("solutions", "gradients")} for way in found}
    gradients = [sent[f"eigen {fraction}"]["gradients"] for fraction in ("1.00", "0.50", "0.25")]
    assert gradients[0] == 0 < gradients[2] <= gradients[1]  # a half: from two ranks of each column
    assert sent["eigen 0.25"]["solutions"] == 0 < sent["eigen 0.50"]["solutions"]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, *RANKS])
def test_the_formula_counts_every_byte(trained, alone, among, ranks):
    """It does so in two steps, each of which updates all factors and solutions."""
    found = alone if ranks == 1 else trained(ranks)
    module = network(torch.float32)
    kinds = "eigen", "cholesky", "uncorrelated", "eigen-bfloat16", "cholesky-bfloat16"
    fractions = {f"{n / ranks:.2f}": n / ranks for n in range(1, ranks + 1) if ranks % n == 0}
    names = [f"{kind}-bytes {fraction}" for kind in kinds for fraction in fractions]
    for name in names if ranks == 1 else among(names):
        solver = "cholesky" if "cholesky" in name else "eigen"
        settings = {"inv_dtype": "bfloat16"} if "bfloat16" in name else {}
        settings |= {"spatially_uncorrelated": True} if "uncorrelated" in name else {}
        size = 1 if "bfloat16" in name else 2  # the child's are float64, except those
        memory, sent = ([found[name][what]] if ranks == 1 else found[name][what] for what in ("memory", "bytes"))
        settings |= {"factor_update_steps": 1, "inv_update_steps": 1}
        settings |= {"grad_worker_fraction": fractions[name.split()[-1]]}
        expected = costs(module, ranks, KFACSettings(solver=solver, **settings))
        assert max(rank["factors"] for rank in memory) == size * expected.factor_bytes
        assert max(rank["solutions"] for rank in memory) == size * expected.solution_bytes
        mean = {kind: sum(rank[kind] for rank in sent) / ranks / size for kind in sent[0]}
        assert mean["factors"] == pytest.approx(expected.factors_sent)
        assert mean["solutions"] == pytest.approx(expected.solutions_sent)
        assert mean["gradients"] == pytest.approx(expected.gradients_sent)
    if ranks > 1:
        reduced = costs(module, ranks, KFACSettings(grad_worker_fraction=1 / ranks), reduce_to_owners=True).reduced
        assert all(of["reduced"] == 2 * reduced for of in found["eigen owners"]["bytes"])


@pytest.mark.ranks
def test_a_state_fits_any_number_of_ranks(trained, alone):
    """Of four ranks, each with its own layers, on one (and of one on four: "resumed from one rank"); all are needed."""
    found = trained(4)
    states, wanted = found["eigen 0.25"]["state"], alone["eigen 1.00"]["state"]
    norms = {name for name, owner in found["eigen 0.25"]["owners"].items() if owner < 0}
    assert not set.intersection(*(state["layers"].keys() - norms for state in states))
    module = network()
    module.load_state_dict(alone["eigen 1.00"]["weights"])
    preconditioner = KFAC(module)
    preconditioner.load_state_dict(*states)
    loaded = preconditioner.state_dict()
    assert loaded["steps"] == wanted["steps"] and loaded["layers"].keys() == wanted["layers"].keys()
    for name, layer in loaded["layers"].items():
        for factor, average in layer["averages"].items():
            close(
                *(
                    {key: of[key] for key in ("value", "weight")}
                    for of in (average, wanted["layers"][name]["averages"][factor])
                )
            )
        assert layer["solution"].keys() == wanted["layers"][name]["solution"].keys()
    with pytest.raises(ValueError, match=r"the states \(of all ranks\?\) lack \['"):
        preconditioner.load_state_dict(*states[:2])


@pytest.mark.ranks
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
    assert found["removed"] and found["same calls"] == [True, True]
    assert "all but the last are under no_sync()" in found["without no_sync"]
    torch.testing.assert_close(*found["expert"])
    assert found["frozen in part"][0] == pytest.approx(found["frozen in part"][1], rel=1e-9)
    assert found["refused"] == [
        "damping: 0.1 on rank 0, and 0.2 on rank 1; ranks must have the same",
        "layer both: ('torch.float32', {'a': (1, 5, 5), 'g': (1, 4, 4)}) on rank 0, and None on rank 1; "
        "ranks must have the same",
        "grad_worker_fraction: 1.0 on rank 0, and 0.5 on rank 1; ranks must have the same",
        "rank 1: damping: -0.05 is out of range; allowed: above 0",
        "local_factors: EKFAC over 2 ranks needs it, and grad_worker_fraction = 1/2",
        "grad_scaler: it looks for overflows before step(), in gradients that only their owner has",
        "preconditioner: it is that of another model",
        "grad_worker_fraction: with 1.0 several ranks precondition a layer; allowed here: 1/2",
        "model: DistributedDataParallel has a process_group of its own",
    ]
