"""Mixed precision: the arithmetic of the forward pass, and what the backward pass needs for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from datapipe.errors import SettingError


@dataclass(frozen=True)
class Precision:
    """The arithmetic of the forward pass: `dtype` where it is safe; None: float32 throughout, or TF32 in products."""

    name: str
    device_type: str
    dtype: torch.dtype | None

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context in which a forward pass uses this precision."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def set_up(self) -> None:
        """Let a GPU multiply float32 in TF32 with "tf32" alone; with "bf16" and "fp16" torch's settings stay."""
        if self.device_type == "cuda" and self.dtype is None:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.name == "tf32"

    def scaler(self) -> torch.amp.GradScaler:
        """Return what keeps small fp16 gradients above zero; it does nothing in the other precisions."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype is torch.float16)


@contextmanager
def kernels_chosen(deterministic: bool) -> Iterator[None]:
    """Have torch choose the fastest kernels in the block, or only those that give the same bits each time.

    In the latter case an operation that has no such kernel raises RuntimeError, and names itself.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not deterministic  # every batch has the same shape
    if deterministic:
        torch.use_deterministic_algorithms(True)  # only here: it imports the compiler, which takes seconds
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS reads when it is first used
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
        if deterministic:
            torch.use_deterministic_algorithms(False)


def choose_precision(name: str, device: torch.device, can_scale: bool = True) -> Precision:
    """Return what a recipe's precision means on a device.

    Args:
        name: "auto", "bf16", "fp16", "tf32" or "off".
        device: The device.
        can_scale: Whether "auto" may be fp16, for which the loss is scaled.

    Raises:
        SettingError: It is fp16 or tf32, and the device a CPU, which has no fast kernels for them.
    """
    if name in ("fp16", "tf32") and device.type != "cuda":
        raise SettingError(f"train.precision = '{name}': needs a CUDA device; allowed here: auto, bf16, off")
    if name == "auto":
        name = "bf16" if _has_native_bf16(device) else "fp16" if can_scale and _has_only_fp16(device) else "off"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": None, "off": None}[name]
    return Precision(name, device.type, dtype)


def _has_only_fp16(device: torch.device) -> bool:
    """Return whether a GPU has tensor cores, and none for bf16: Volta and Turing (V100, T4)."""
    return device.type == "cuda" and (7, 0) <= torch.cuda.get_device_capability(device) < (8, 0)


def _has_native_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Where the CPU has no bf16 instructions, they are emulated: measured with ResNet-8 on a Xeon with AVX-512
    # but without AVX512_BF16, the backward convolutions take four times as long as in float32.
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
