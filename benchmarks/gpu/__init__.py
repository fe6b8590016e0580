"""Benchmarks that need a GPU, and run unattended."""

from __future__ import annotations

import torch


def hardware(device: torch.device) -> dict[str, str | int | None]:
    """Return what a record says of the GPU."""
    gpu = torch.cuda.get_device_properties(device)
    return {"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory, "cuda": torch.version.cuda}
