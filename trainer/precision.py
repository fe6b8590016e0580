"""Mixed precision: the arithmetic of the forward pass, and what the backward pass needs for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from datapipe.errors import SettingError


@dataclass(frozen=True)
class Precision:
    """The arithmetic of the forward pass: `dtype` where it is safe; None: float32 throughout."""

    name: str
    device_type: str
    dtype: torch.dtype | None

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context in which a forward pass uses this precision."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Return what keeps small fp16 gradients above zero; it does nothing in the other precisions."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype is torch.float16)


def choose_precision(name: str, device: torch.device) -> Precision:
    """Return what the recipe's `auto`, `bf16`, `fp16` or `off` means on `device`.

    Raises SettingError for fp16 on a CPU: without a CUDA device there are no fast fp16 kernels to gain from.
    """
    if name == "fp16" and device.type != "cuda":
        raise SettingError("train.precision = 'fp16': needs a CUDA device; allowed here: auto, bf16, off")
    if name == "auto":
        name = "bf16" if _has_native_bf16(device) else "off"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": None}[name]
    return Precision(name, device.type, dtype)


def _has_native_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Where the CPU has no bf16 instructions, they are emulated: measured with ResNet-8 on a Xeon with AVX-512
    # but without AVX512_BF16, the backward convolutions take four times as long as in float32.
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
