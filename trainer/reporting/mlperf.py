"""An MLPerf-compliant training log, made of a run's metrics: in the form of ruleset 4.0.0, the last one with ResNet."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from datapipe.errors import SettingError
from datapipe.fsio import atomic_write

from .runlog import Line, Run, number

LOG_NAME = "mlperf.log"
_STATUSES = "cloud", "onprem", "preview", "research"
_DIVISIONS = "open", "closed"
_LABELS = {
    "MLPERF_DIVISION": "submission_division",
    "MLPERF_ORG": "submission_org",
    "MLPERF_PLATFORM": "submission_platform",
    "MLPERF_STATUS": "submission_status",
}
# What a recipe of the closed division has; the checker looks at the numbers.
_CLOSED: dict[str, dict[str, list[Any]]] = {
    "model": {"name": ["resnet50"], "blur_pool": [False]},
    "optimizer": {
        "name": ["sgd", "lars"],
        "preconditioner": ["none"],
        "max_grad_norm": [None],
        "vector_lr_factor": [1],
    },
    "schedule": {"name": ["polynomial"]},
    "data": {
        "size": [224],
        "start_size": [None],
        "eval_size": [None, 224],
        "crop": ["random_resized"],
        "flip": [True],
        "mixup": [0],
        "cutmix": [0],
    },
    "ema": {"half_life_steps": [None]},
    "train": {
        "loss": ["cross_entropy"],
        "label_smoothing": [0, 0.1],
        "precise_bn_batches": [0],
        "powersgd_rank": [None],
        "evaluate_mirrored": [False],
    },
}
_POINT, _START, _STOP = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"
_OWN_PREFIX = {"sgd": "sgd_opt", "lars": "lars_opt"}  # of the keys of an optimizer that MLPerf knows


def read_labels(environment: Mapping[str, str], recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return what the MLPERF_* variables say about who trains on what, by the log's keys.

    Raises SettingError for a status or a division that MLPerf does not know, and for a recipe, as plain values, that
    is not of the closed division.
    """
    labels = {key: value for name, key in _LABELS.items() if (value := environment.get(name))}
    for name, allowed in (("status", _STATUSES), ("division", _DIVISIONS)):
        if (value := labels.get(f"submission_{name}", allowed[0])) not in allowed:
            raise SettingError(f"MLPERF_{name.upper()}: {value!r} is not one of {', '.join(allowed)}")
    if labels.get("submission_division") == "closed":
        for section, settings in _CLOSED.items():
            for name, values in settings.items():
                if (value := recipe[section][name]) not in values:
                    allows = " or ".join(map(str, values))
                    raise SettingError(f"MLPERF_DIVISION: closed allows {section}.{name} = {allows}, not {value}")
    return labels


def write_log(run: Run, out: Path) -> Path | None:
    """Write a run's log to a folder; return its path, or None for metrics of earlier versions, which tell no times."""
    lines = [*_log(run)]
    if not lines:
        return None
    with atomic_write(out / LOG_NAME, alone=False) as file:
        file.write("".join(f":::MLLOG {json.dumps(line)}\n" for line in lines).encode())
    return out / LOG_NAME


def _log(run: Run) -> Iterator[Line]:
    """Yield the log's lines. The time between a stop and a resume counts, too."""
    at = number(run.header.get("written_at"))
    began_at = at - number(run.header.get("elapsed_s"))
    if math.isnan(began_at):
        return
    for key, value in _facts(run.header).items():
        yield _line(key, began_at, value)
    # No cache is cleared. All that prepares the run, and not only what touches the data, is in the time that counts.
    yield _line("cache_clear", began_at, False)
    yield _line("init_start", began_at, kind=_START)
    yield _line("init_stop", began_at, kind=_STOP)
    yield _line("run_start", began_at, kind=_START)
    for epoch in run.epochs:
        place: dict[str, Any] = {"epoch_num": epoch.get("epoch")}
        ended_at, accuracy = number(epoch.get("written_at"), at), number(epoch.get("val_accuracy"))
        evaluation_s = 0.0 if math.isnan(accuracy) else number((epoch.get("time_s") or {}).get("evaluation"), 0.0)
        trained_at = max(at, ended_at - evaluation_s)
        yield _line("epoch_start", at, kind=_START, **place)
        yield _line("epoch_stop", trained_at, kind=_STOP, **place)
        if not math.isnan(accuracy):
            yield _line("eval_start", trained_at, kind=_START, **place)
            yield _line("eval_stop", ended_at, kind=_STOP, **place)
            yield _line("eval_accuracy", ended_at, accuracy, **place)
        at = ended_at
    if math.isnan(run.figures()["time_to_target_s"]):
        yield _line("run_stop", max(at, run.written_at), kind=_STOP, status="aborted")
    else:  # it ended with the evaluation that reached the target
        yield _line("run_stop", at, kind=_STOP, status="success")


def _facts(header: Line) -> dict[str, object]:
    """Return what a log says before the run, by key."""
    recipe = header["recipe"]
    optimizer, train, schedule = recipe["optimizer"], recipe["train"], recipe["schedule"]
    name, warmup_epochs = optimizer["name"], schedule.get("warmup_epochs", 0.0)
    prefix = _OWN_PREFIX.get(name, "opt")
    parts = train.get("accumulation_steps", 1)
    kind = [optimizer["preconditioner"], name] if optimizer["preconditioner"] != "none" else [name]
    facts = {
        "submission_benchmark": "resnet",
        "submission_division": "open",
        "submission_org": "unknown",
        "submission_platform": header["device"],
        "submission_status": "research",
        **header["mlperf"],
        "seed": train["seed"],
        "global_batch_size": header["global_batch_size"],
        "gradient_accumulation_steps": parts,
        "model_bn_span": header["global_batch_size"] // header["world_size"] // parts,
        "train_samples": header["train_samples"],
        "eval_samples": header["val_samples"],
        "opt_name": "-".join(kind),
        f"{prefix}_base_learning_rate": header["peak_lr"],
        f"{prefix}_weight_decay": optimizer["weight_decay"],
    }
    if name in _OWN_PREFIX:
        facts[f"{prefix}_momentum"] = optimizer["momentum"]
        facts |= {f"{prefix}_{key}": value for key, value in _polynomial(header).items()}
    if name == "lars":
        return facts | {"lars_opt_learning_rate_warmup_epochs": warmup_epochs, "lars_epsilon": 0.0}
    return facts | {"opt_learning_rate_warmup_epochs": warmup_epochs}


def _polynomial(header: Line) -> dict[str, object]:
    """Return the form of a polynomial schedule, by key; of another, nothing."""
    schedule, epochs = header["recipe"]["schedule"], header["recipe"]["train"]["epochs"]
    if schedule["name"] != "polynomial":
        return {}
    steps_per_epoch = header["train_samples"] // header["global_batch_size"]
    return {
        "end_learning_rate": float(f"{header['peak_lr'] * schedule['final']:.9g}"),  # the rules compare with 0.0001
        "learning_rate_decay_poly_power": schedule["power"],
        "learning_rate_decay_steps": steps_per_epoch * epochs - math.ceil(schedule["warmup_epochs"] * steps_per_epoch),
    }


def _line(key: str, at: float, value: object = None, kind: str = _POINT, **metadata: Any) -> Line:
    """Return a line of the log. `at`: when it happened, in seconds since 1970."""
    return {
        "namespace": "",
        "time_ms": round(1000 * at),
        "event_type": kind,
        "key": key,
        "value": value,
        "metadata": metadata,
    }
