"""The benchmarks of K-FAC: they measure, and what it is compared with is what it says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench_kfac
from benchmarks.kfac_costs import costs
from benchmarks.peers.kfac_published import PublishedKFAC
from trainer import models
from trainer.kfac.settings import KFACSettings

LEFT_OUT = [word for name in ("eigen", "cholesky, ¼", "cholesky, SUA, ¼") for word in ("--without", f"K-FAC, {name}")]


@pytest.mark.slow
def test_kfac_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """On a network that takes no time."""
    records = {}
    peak_bytes = bench_kfac.memory
    monkeypatch.setattr(bench_kfac, "memory", lambda name, *rest: peak_bytes(name, *rest) if name == "SGD" else 1.0)
    small = ["--model", "resnet8", "--size", "8", "--batch-size", "2", "--periods", "1"]
    monkeypatch.setattr(bench_kfac, "write_record", lambda name, record: records.setdefault(name, record))
    monkeypatch.setitem(bench_kfac.SETTINGS, "inv_update_steps", 10)
    monkeypatch.setattr(sys, "argv", ["bench", *small, *LEFT_OUT])
    assert bench_kfac.main() == 0
    record = records["kfac-resnet8"]
    json.dumps(record)
    assert record["found"]["SGD"]["added"] == 0 and record["operations"]["training"] > 0
    assert record["found"].keys() == {
        "SGD", "K-FAC, cholesky", "K-FAC, cholesky, ⅛, bfloat16", "K-FAC as published"
    }  # fmt: skip
    assert capsys.readouterr().out.count("worst ÷ median") == 1


def test_the_published_algorithm_is_what_it_says() -> None:
    """Eigenvectors of averages that begin with the identity, the damping on the product, and the clip."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3, padding=1)), torch.randn(6, 2, 5, 5)
    peer = PublishedKFAC(model, 0.01, 1, 1, kl_clip=0.001, lr=0.1)
    out = model(x)
    out.retain_grad()
    out.square().flatten(1).sum(1).mean().backward()
    weight, bias = (parameter.grad.double() for parameter in model.parameters())
    raw = torch.cat([weight.flatten(1), bias[:, None]], 1)
    peer.step()
    rows = torch.nn.functional.unfold(x, 3, padding=1).mT.flatten(0, 1)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1).double()
    g = (6 * out.grad).movedim(1, -1).reshape(-1, 3).double()
    a, g = (0.95 * torch.eye(x.shape[1]) + 0.05 * x.T @ x / n for x, n in ((rows, 6), (g, len(g))))
    curvature = torch.kron(g, a) + 0.01 * torch.eye(3 * 19, dtype=torch.float64)
    expected = torch.linalg.solve(curvature, raw.flatten()).reshape(3, 19)
    expected *= min(1.0, (0.001 / (0.01 * (expected * raw).sum().item())) ** 0.5)
    weight, bias = (parameter.grad.double() for parameter in model.parameters())
    torch.testing.assert_close(torch.cat([weight.flatten(1), bias[:, None]], 1), expected, rtol=1e-3, atol=1e-6)


def test_the_costs_in_the_documentation() -> None:
    """The table of memory and traffic is what the formula says of ResNet-50."""
    with torch.device("meta"):
        network = models.build("resnet50", num_classes=1000, in_channels=3)
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "kfac-in-figures.md").read_text()
    table = page.partition("| ranks | workers per layer |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = 0
    for line in table:
        ranks, *cells = (cell.strip().replace(",", "") for cell in line.strip().strip("|").split("|"))
        ways = re.findall(r"\d+(?: `\w+`)?", cells[0])
        for i, way in enumerate(ways):
            workers, _, option = way.partition(" ")
            settings = KFACSettings(
                grad_worker_fraction=int(workers) / int(ranks),
                solver="cholesky",
                local_factors=option == "`local_factors`",
            )
            values = costs(network, int(ranks), settings, reduce_to_owners=option == "`reduce_to_owners`")
            said = [re.split("; *", cell)[min(i, cell.count(";"))] for cell in cells[1:]]
            said = [*said[:2], *re.findall(r"\d[\d.]*", said[2])]
            assert len(said) == 5 + ("reduce_to_owners" in option)
            for value, text in zip(values, said, strict=False):
                assert abs(value / 1e6 - float(text)) <= 0.51 * 10 ** -len(text.partition(".")[2]), line
            rows += 1
    assert rows >= 9
