"""The tables of the documentation that come from records, in Markdown, for `docs/generate.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.fault_runs import cell
from benchmarks.measure import RESULTS, shown

Record = Mapping[str, Any]


def write_tables() -> dict[str, list[str]]:
    """Return the lines of each table, by the name of its page."""
    tables = {"encoders": encoders, "faults": faults, "losses": losses, "sharedfs": sharedfs,
              "stage-nodes": stage_nodes, "stage-scale": stage_scale}  # fmt: skip
    records = {name: RESULTS / f"{name.partition('-')[0]}.json" for name in tables}
    return {name: table(json.loads(records[name].read_text())) for name, table in tables.items()}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> list[str]:
    """Return the lines of a table, and an empty one; all columns but the first `texts` are of numbers."""
    line = ["---"] * texts + ["---:"] * (len(header) - texts)
    return [*(f"| {' | '.join(cells)} |" for cells in (header, line, *rows)), ""]


def without(absent: Mapping[str, str]) -> list[str]:
    return [f"Without {name}: {reason}." for name, reason in absent.items()]


def spread(figures: Record, key: str) -> str:
    return shown(figures[key], 1) if key in figures else ""


def encoders(record: Record) -> list[str]:
    """Tell what each hand-written piece brings over a library."""
    settings = record["settings"]
    rows = [
        [case, who, shown(its["cpu_s"], 3), f"{its['times_cpu']:.2f}",
         f"{its['process_peak_bytes']['median'] / 1e6:,.0f}"]
        for case, by_who in record["results"].items()
        for who, its in by_who.items()
    ]  # fmt: skip
    sizes = ", ".join(
        f"*{name}* is {count:,} images of {size:,} bytes" for name, (count, size) in settings["sizes"].items()
    )
    rounds, cpu = settings["rounds"], record["environment"]["cpu"]
    return [
        *markdown(["what is done", "by", "CPU-seconds", "times ours", "peak MB"], rows, texts=2),
        f"Medians and ranges of {rounds} runs of one thread, which took turns, on {cpu};",
        f"{sizes} ([record](../../benchmarks/results/encoders.json)).",
    ]


def faults(record: Record) -> list[str]:
    """Tell what trainings do when a rank fails."""
    settings, cap_s = record["settings"], record["settings"]["cap_s"]
    systems = list(next(iter(record["found"].values())))
    torch = next(iter(record["environments"].values()))["versions"]["torch"]
    versions = ", ".join(f"{name} {version}" for name, version in record["peers"].items())
    rows = [[fault, *(cell(its, cap_s) for its in by_system.values())] for fault, by_system in record["found"].items()]
    return [
        *markdown(["fault", *systems], rows, texts=1 + len(systems)),
        "Seconds from the fault until no process of the run is left: medians and ranges of "
        f"{settings['rounds']} runs; one that takes more than {cap_s:g} s is the last of its kind. Then "
        "the exit code of what was started; whom the output blames; and the seconds of training before the fault that "
        f"no checkpoint holds. torch {torch}, {versions} "
        "([record](../../benchmarks/results/faults.json)).",
        *without(record["absent"]),
    ]


def losses(record: Record) -> list[str]:
    """Tell what an exchange costs when a node is lost in it."""
    settings, lost = record["settings"], record["lost"]
    undisturbed_s = lost["none"]["wall_s"]["median"]
    rows = []
    for fault, its in lost.items():
        rest_s = its.get("without_naming_s", its["wall_s"])["median"]
        read = its["read_bytes"]["median"] / settings["bytes"]
        rows.append(
            [fault, spread(its, "wall_s"), spread(its, "named_s"), f"{rest_s / undisturbed_s:.2f}", f"{read:.2f}"]
        )
    header = ["lost", "until the last copy, s", "until all name it, s", "the rest ÷ undisturbed", "read ÷ data set"]
    return [
        *markdown(header, rows),
        f"Medians and ranges of {record['rounds']} runs on {settings['nodes']} network hosts, "
        f"{settings['bytes'] / 1e6:,.0f} MB in shards of {settings['shard_mib']} MiB, from a filesystem that gives "
        f"{settings['mbps']:g} MB/s in all; `--timeout {settings['timeout_s']}`. *The rest* is the time without that "
        "until all have named the lost node ([record](../../benchmarks/results/losses.json)).",
    ]


def sharedfs(record: Record) -> list[str]:
    """Tell what each way from a slow shared filesystem to a training takes."""
    last = f"epoch_{record['settings']['epochs']}"
    ways = []
    for name, its in record["ways"].items():
        cells = [spread(its, "stage_s") if its["stage_s"]["median"] else ""]
        cells += [spread(its, key) for key in ("epoch_1_first_batch_s", "epoch_1_wall_s", "later_s")]
        for key, scale in (("metadata_calls", 1.0), ("read_bytes", 1e-6)):
            first = its[f"stage_{key}"]["median"] + its[f"epoch_1_{key}"]["median"]
            cells.append(f"{first * scale:,.0f}, then {its[f'{last}_{key}']['median'] * scale:,.0f}")
        ways.append([name, *cells])
    prepared = [
        [name, f"{its['process_wall_s']:.1f}", f"{its['metadata_calls']:,}", f"{its['read_bytes'] / 1e6:,.0f}",
         f"{its['process_cpu_s']:.1f}"]
        for name, its in record["prepared"].items()
    ]  # fmt: skip
    seconds = ("staging", "first batch", "first epoch", "later epochs")
    header = ["way", *(f"{what}, s" for what in seconds), "metadata calls", "MB read from the shared filesystem"]
    return [
        "![Seconds until the first batch, of the first epoch, and of later ones](../figures/sharedfs-light.svg)",
        "",
        *markdown(header, ways),
        *markdown(["packing, once", "wall s", "metadata calls", "MB read", "CPU s"], prepared),
        f"Medians and ranges of {record['rounds']} runs of ours, and {record['peer_rounds']} of the others. Calls "
        "and MB are those of staging and the first epoch, then of the last. The "
        f"bandwidth alone imposes {record['floors']['bandwidth_s']:.1f} s per epoch "
        "([record](../../benchmarks/results/sharedfs.json)).",
        *without(record["absent"]),
    ]


def stage_nodes(record: Record) -> list[str]:
    """Tell how fast data sets are staged, on one machine and on four."""
    nodes = record["nodes"]
    settings = nodes["settings"]
    rows = []
    for name, its in nodes["ways"].items():
        cells = [spread(its, key) for key in ("wall_s", "own_s", "first_batch_s")]
        cpu_s = f"{its['cpu_s']['median']:.1f}" if "cpu_s" in its else ""
        rows.append([name, *cells, f"{its['read_bytes']['median'] / settings['bytes']:.2f}", cpu_s])
    header = ["four nodes", "until the last copy, s", "imports left out, s", "until the last first batch, s",
              "read ÷ data set", "CPU s"]  # fmt: skip
    return [
        "![MB/s of staging beside programs that copy](../figures/stage-local-light.svg)",
        "![Seconds of staging to four nodes, and until their first batch](../figures/stage-nodes-light.svg)",
        "",
        *markdown(header, rows),
        f"Medians and ranges of {record['rounds']} runs, {settings['bytes'] / 1e6:,.0f} MB; the bandwidth alone "
        f"imposes {settings['floor_s']:.1f} s ([record](../../benchmarks/results/stage.json)).",
        *without(nodes["absent"]),
    ]


def stage_scale(record: Record) -> list[str]:
    """Tell what staging would cost 1,024 nodes."""
    settings = record["scale"]["settings"]
    rows = []
    for row in record["scale"]["rows"]:
        part = "" if row["planned_share"] == 1 else " *"
        time = f"{_rounded(row['seconds'])} ({row['slowest']})" if row["fits"] else "does not fit on its disk"
        into = (row["read_bytes"] + row["received_bytes"]) / 1e9
        planning = [_rounded(value) + part for value in (row["planning_s"], row["planning_bytes"] / 1e6)]
        moved = [_rounded(value) for value in (row["shared_bytes"] / 1e12, into, row["sent_bytes"] / 1e9)]
        rows.append([f"{row['samples']:,}", row["way"], *planning, *moved, time])
    header = ["samples", "way", "planning, s", "memory, MB", "from the shared filesystem, TB", "into a node, GB",
              "out of it, GB", "time at least, s"]  # fmt: skip
    return [
        *markdown(header, rows, texts=2),
        f"{settings['nodes']:,} nodes of {settings['ranks_per_node']} ranks, samples of 110 kB. The shared filesystem "
        f"gives {settings['shared_bps'] / 1e9:g} GB/s, and the network {settings['network_bps'] / 1e9:g} GB/s to each "
        f"node, whose disk takes {settings['disk_bps'] / 1e9:g} GB/s and holds {settings['disk_bytes'] / 1e12:g} TB. "
        "*unstaged* is one epoch. "
        "An asterisk: a part was planned, and the rest multiplied up ([record](../../benchmarks/results/stage.json)).",
    ]


def _rounded(value: float) -> str:
    """Return a number with three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
