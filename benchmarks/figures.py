"""Draw the plots of the documentation from the committed records: `python -m benchmarks.figures`.

Each figure is written twice, for light and for dark pages, as SVG with a transparent background. A figure says in its
last line on which machine the record was made, and what its bars and whiskers are. The comment `data:` in a file is a
checksum of what is drawn, by which a test finds figures that are older than their records.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.drawing import THEMES, Bar, Bars, Line, Lines, Plot, draw
from benchmarks.measure import RESULTS, ROOT

OUT = ROOT / "docs" / "figures"


def record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def machine(environment: Mapping[str, Any]) -> str:
    cpu = environment["cpu"].replace("(R)", "").replace(" Processor @ ", ", ").replace("GHz", " GHz")
    return f"{environment['cores']} cores of {cpu}, {environment['date'][:10]}"


def bar(name: str, spread: Mapping[str, float], is_ours: bool, scale: float = 1.0) -> Bar:
    return Bar(name, *(scale * spread[key] for key in ("median", "min", "max")), is_ours=is_ours)


def is_datapipe(name: str) -> bool:
    return "datapipe" in name


def loader() -> Plot:
    result = record("loader")
    panels = []
    titles = {
        "photographs": "Photographs of 500×375, crops scaled to 224 pixels",
        "pixels": "The same, stored as pixels of 256×256",
    }
    for section, title in titles.items():
        loaders = result["sections"][section]["loaders"]
        bars = [bar(name, its["images_per_cpu_s"], is_datapipe(name)) for name, its in loaders.items()]
        panels.append(Bars(title, "images per CPU-second", by_value(bars), "more"))
    rounds = result["sections"]["photographs"]["rounds"]
    return Plot(panels, f"Median and range of {rounds} epochs, no GPU; {machine(result['environment'])}")


def pack() -> Plot:
    result = record("pack")
    sections = result["sections"]
    copied = [bar(name, its["mb_per_s"], is_datapipe(name)) for name, its in sections["copy"]["packers"].items()]
    scaled = sections["resize"]["packers"].items()
    scaled = [bar(name, its["images_per_cpu_s"], is_datapipe(name)) for name, its in scaled]
    panels = [
        Bars("Photographs as they are", "MB/s of source files", by_value(copied), "more"),
        Bars("Made 256 pixels high, restart markers", "images per CPU-second", by_value(scaled), "more"),
    ]
    rounds = sections["copy"]["rounds"]
    return Plot(panels, f"Median and range of {rounds} runs, {result['settings']['filesystem']}; "
                        f"{machine(result['environment'])}")  # fmt: skip


def imagenet() -> Plot:
    result = record("imagenet")
    packers = {"datapipe": result["ours"]["datapipe pack"], **result["packers"]}
    loaders = result["loaders"].items()
    panels = [
        Bars("Packing them", "seconds", seconds_of(packers.items(), "process_wall_s"), "less"),
        Bars("From opening to the first batch", "seconds", seconds_of(loaders, "begin_s"), "less", ",.1f"),
        Bars("Going through an epoch", "seconds", seconds_of(loaders, "wall_s"), "less"),
    ]
    count = sum(result["images"].values())
    return Plot(panels, f"{count:,} images of 32×32 pixels, each step once;\n{machine(result['environment'])}")


def seconds_of(results: Iterable[tuple[str, Mapping[str, float]]], key: str) -> list[Bar]:
    return by_value((Bar(name, its[key], is_ours=is_datapipe(name)) for name, its in results), rising=True)


def stored() -> Plot:
    result = record("stored")
    ways = result["ways"].items()
    panels = [
        Bars(title, unit, [bar(name, its[key], True, scale) for name, its in ways], "less", form)
        for title, unit, key, scale, form in (
            ("Size", "kB per image", "stored_bytes", 1e-3, ",.0f"),
            ("Packing", "CPU-ms per image", "pack_us", 1e-3, ".1f"),
            ("Reading and decoding the whole image", "CPU-ms per image", "read_us", 1e-3, ".1f"),
        )
    ]
    return Plot(panels, f"Photographs of 500×375; median and range of {result['rounds']} runs;\n"
                        f"{machine(result['environment'])}")  # fmt: skip


def reading() -> Plot:
    result = record("reading")
    bars = [bar(name, its["mb_per_s"], "plain loop" not in name) for name, its in result["reading"].items()]
    panels = [Bars("Reading samples for a decoder on another device", "MB/s", bars, "more")]
    return Plot(panels, f"Median and range of {result['rounds']} runs; {machine(result['environment'])}")


def order() -> Plot:
    result = record("order")
    panels = []
    for title, unit, key, scale in (
        ("Opening a data set", "seconds", "open_s", 1.0),
        ("Computing the order of an epoch", "seconds", "epoch_s", 1.0),
        ("Memory of the order in a rank", "GB", "peak_bytes", 1e-9),
    ):
        bars = [
            bar(f"{int(size) / 1e6:.3g} million, {name}", its[key], True, scale)
            for size, orders in result["samples"].items()
            for name, its in orders.items()
        ]
        panels.append(Bars(title, unit, bars, "less", ".2f"))
    return Plot(panels, f"Median and range of the runs; {machine(result['environment'])}")


def kfac_step() -> Plot:
    panels = []
    for model, title in (("resnet32", "ResNet-32, 32 pixels"), ("resnet50", "ResNet-50, 96 pixels")):
        result = record(f"kfac-{model}")
        every = result["settings"]["inv_update_steps"]
        plain = [step["s"] for step in result["steps"]["SGD"]]
        bars = []
        for name, its in result["found"].items():
            if name != "SGD":
                spent = [step["s"] for step in result["steps"][name]]
                added = [
                    100 * (sum(spent[start : start + every]) / sum(plain[start : start + every]) - 1)
                    for start in range(0, len(plain), every)
                ]
                bars.append(Bar(name, 100 * its["added"], min(added), max(added), "published" not in name))
        panels.append(Bars(f"{title}, batch of {result['settings']['batch_size']}", "% added to a step of SGD",
                           by_value(bars, rising=True), "less", ".1f"))  # fmt: skip
    return Plot(panels, f"200 steps; whiskers: each period of 100 steps; {machine(result['environment'])}")


def kfac_solvers() -> Plot:
    result = record("kfac-solvers")
    lines = []
    for solver in ("eigen", "cholesky"):
        rows = [row for row in result["solvers"] if row["damping"] == 0.01]
        spread = ([1e3 * row[solver][what] for row in rows] for what in ("median", "min", "max"))
        lines.append(Line(f'solver="{solver}"', [float(row["size"]) for row in rows], *spread))
    panels = [Lines("Solving one factor", "rows of the factor", "milliseconds", lines)]
    return Plot(panels, f"Median and range of {result['settings']['rounds']} runs; {machine(result['environment'])}")


def kfac_damping() -> Plot:
    result = record("kfac-damping")
    best = {}
    for row in result["found"]:
        loss = min(step["loss_of_others"] for step in row["steps"])
        best.setdefault(row["kind"], []).append((row["damping"], loss))
    names = {"kfac": "KFAC", "ekfac": "EKFAC"}
    lines = [Line(names[kind], *map(list, zip(*sorted(best[kind]), strict=True))) for kind in names]
    panel = Lines("One step from a loss of 1.60, with the best step length", "damping", "loss on other images", lines,
                  is_log=False, level=("plain gradient", best["gradient"][0][1]))  # fmt: skip
    return Plot([panel], f"ResNet-8, Fashion-MNIST, one run; {machine(result['environment'])}")


def optimizers(layers: int, batch: int, target: str = "0.91") -> Plot:
    result = record(f"optimizers-resnet{layers}-{batch}")
    title = f"ResNet-{layers}, batch of {batch:,}: to {100 * float(target):.0f} % of the test images"
    panels = []
    for unit, key in (("optimizer steps", "step"), ("seconds on one core", "wall_s")):
        bars = []
        for optimizer, its in result["found"].items():
            reached = its["targets"][target]
            count = f"{reached['reached']} of {reached['runs']}"
            if not reached["reached"]:
                bars.append(Bar(optimizer, None, note=f"{count} in {result['settings']['epochs']} epochs"))
                continue
            mean, half = reached[key]["mean"], reached[key]["half_width"]
            spread = (None, None) if half is None else (mean - half, mean + half)
            note = f" ({count})" if reached["reached"] < reached["runs"] else ""
            bars.append(Bar(optimizer, mean, *spread, "FAC" in optimizer, note))
        panels.append(Bars(title, unit, bars, "less"))
    return Plot(panels, f"Mean and 95 % interval of {result['settings']['seeds']} seeds; "
                        f"{machine(result['environments'][-1])}")  # fmt: skip


def training() -> Plot:
    result = record("training")
    loaders = result["compared"]["loaders"].items()
    speed = [bar(name, its["images_per_s"], is_datapipe(name)) for name, its in loaders]
    waiting = [bar(name, its["wait_share"], is_datapipe(name), 100) for name, its in loaders]
    panels = [
        Bars("ResNet-8 on Fashion-MNIST", "images/s", speed, "more"),
        Bars("Waiting for batches", "% of the steps' time", waiting, "less", ".1f"),
    ]
    return Plot(panels, f"Median and range of {result['compared']['rounds']} runs; {machine(result['environment'])}")


def spinning() -> Plot:
    result = record("spinning")
    panels = [
        Bars(title, unit, [bar(way, its[key], False) for way, its in result["ways"].items()], better)
        for title, unit, key, better in (
            ("ResNet-8 on Fashion-MNIST, two threads", "images/s", "images_per_s", "more"),
            ("Processor time of the training", "CPU-seconds", "process_cpu_s", "less"),
        )
    ]
    return Plot(panels, f"Median and range of {result['rounds']} runs; {machine(result['environment'])}")


def pack_slow() -> Plot:
    result = record("pack_slow")
    bars = [bar(name, its["wall_s"], is_datapipe(name)) for name, its in result["compared"].items()]
    bars.append(Bar("what the server must take", result["floor_s"]))
    title = f"6,000 files, {result['settings']['meta_ms']} ms per metadata operation"
    return Plot([Bars(title, "seconds", bars, "less", ".1f")],
                f"Median and range of {result['rounds']} runs; {machine(result['environment'])}")  # fmt: skip


def sharedfs() -> Plot:
    result = record("sharedfs")
    settings, ways = result["settings"], result["ways"].items()
    panels = []
    for title, keys in (
        ("Photographs on a slow shared filesystem: until the first batch", ("stage_s", "epoch_1_first_batch_s")),
        ("The first epoch, staging included", ("stage_s", "epoch_1_wall_s")),
        ("Each later epoch", ("later_s",)),
    ):
        bars = []
        for name, its in ways:
            runs = sorted(sum(run[key] for key in keys) for run in its["runs"])
            ends = (runs[0], runs[-1]) if len(runs) > 1 else (None, None)
            bars.append(Bar(name, median(runs), *ends, is_datapipe(name)))
        if "later_s" in keys:
            bars.append(Bar("what the bandwidth alone takes", result["floors"]["bandwidth_s"]))
        panels.append(Bars(title, "seconds", by_value(bars, rising=True), "less", ",.1f"))
    return Plot(panels, f"{result['corpus']['images']:,} photographs; metadata calls of {settings['meta_ms']:g} ms, "
                        f"{settings['mds_slots']} at a time; {settings['read_mbps']:g} MB/s;\n"
                        f"median and range of {result['rounds']} runs (others than ours: {result['peer_rounds']}); "
                        f"{machine(result['environment'])}")  # fmt: skip


def stage_local() -> Plot:
    result = record("stage")
    megabytes = result["local"]["bytes"] / 1e6
    panels = []
    for filesystem, copiers in result["local"]["places"].items():
        bars = []
        for name, its in copiers.items():
            speeds = (megabytes / its["wall_s"][key] for key in ("median", "max", "min"))
            bars.append(Bar(name, *speeds, is_ours=is_datapipe(name)))
        panels.append(Bars(f"Copying {megabytes:,.0f} MB on one machine, {filesystem}", "MB/s", by_value(bars), "more"))
    return Plot(panels, f"Median and range of {result['rounds']} runs; {machine(result['environment'])}")


def stage_nodes() -> Plot:
    result = record("stage")
    settings, ways = result["nodes"]["settings"], result["nodes"]["ways"].items()
    copied = [bar(name, its["own_s"], is_datapipe(name)) for name, its in ways if "own_s" in its]
    copied.append(Bar("what the bandwidth alone takes", settings["floor_s"]))
    loaded = [bar(name, its["first_batch_s"], is_datapipe(name)) for name, its in ways]
    panels = [
        Bars(f"To four nodes: until {until}", "seconds", by_value(bars, rising=True), "less", ",.1f")
        for until, bars in (("the last copy", copied), ("the last node's first batch", loaded))
    ]
    size = f"{settings['bytes'] / 1e6:,.0f} MB from a filesystem of {settings['mbps']:g} MB/s"
    return Plot(panels, f"{size};\nmedian and range of {result['rounds']} runs; {machine(result['environment'])}")


def slice_of_blocks() -> Plot:
    result = record("slice")
    panels: list[Bars | Lines] = []
    for nodes, title in (("1", "One node"), ("4", "One of four nodes")):
        shares = result["simulated"][nodes]
        rooms = [100 * float(room) for room in shares]
        lines = [
            Line(name, rooms, [100 * by_policy[name] for by_policy in shares.values()])
            for name in next(iter(shares.values()))
        ]
        panels.append(
            Lines(f"{title}: blocks read from the source", "room, % of the data set", "% of those needed", lines, False)
        )
    return Plot(panels, "1.28 million samples of 110 kB, simulated, by what is evicted when the disk is full")


FIGURES: dict[str, Callable[[], Plot]] = {
    "loader": loader,
    "reading": reading,
    "order": order,
    "slice": slice_of_blocks,
    "pack": pack,
    "pack-slow": pack_slow,
    "imagenet": imagenet,
    "sharedfs": sharedfs,
    "stage-local": stage_local,
    "stage-nodes": stage_nodes,
    "stored": stored,
    "training": training,
    "spinning": spinning,
    "kfac-step": kfac_step,
    "kfac-solvers": kfac_solvers,
    "kfac-damping": kfac_damping,
    **{f"optimizers-resnet{layers}-{batch}": partial(optimizers, layers, batch) for layers in (8, 20)
       for batch in (4096, 512)},
}  # fmt: skip


def by_value(bars: Iterable[Bar], rising: bool = False) -> list[Bar]:
    """Sort bars: the best first."""
    return sorted(bars, key=lambda bar: bar.value or 0.0, reverse=not rising)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the figures (default: docs/figures)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, plan in FIGURES.items():
        plot = plan()
        for theme in THEMES:
            (arguments.out / f"{name}-{theme}.svg").write_text(draw(plot, theme), encoding="utf-8")
    print(f"{len(FIGURES)} figures, each for {' and '.join(THEMES)} pages, in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
