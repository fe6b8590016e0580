"""Crop, resize and mirror pixels by torch."""

from __future__ import annotations

import numpy as np
import torch

from ..images.window import Box


def crop_resize_flip(
    pixels: np.ndarray, box: Box, flip: bool, out: np.ndarray, crop_memory: np.ndarray | None = None
) -> None:
    """Crop an image, resize the crop (antialiased bilinear), and mirror it if `flip`.

    Args:
        pixels: Pixels of the image, uint8[H, W, C].
        box: The crop's left, top, width and height in pixels. What lies beyond the image is black; only a crop that
            is as large as the output may reach there.
        flip: Whether to mirror it, left to right.
        out: Memory of the result, uint8[S, S, C], which is written.
        crop_memory: Memory for the crop's pixels meanwhile, uint8[bytes], if it is large enough.
    """
    if box[2] == box[3] == out.shape[0]:
        _copy_crop(pixels, box, out[:, ::-1] if flip else out)
    else:
        _resize_crop(pixels, box, flip, out, crop_memory)


def _copy_crop(pixels: np.ndarray, box: Box, out: np.ndarray) -> None:
    left, top, width, height = box
    inside = pixels[max(0, top) : max(0, top + height), max(0, left) : max(0, left + width)]
    if inside.shape != out.shape:
        out[:] = 0
        y, x = min(height, max(0, -top)), min(width, max(0, -left))
        out = out[y : y + inside.shape[0], x : x + inside.shape[1]]
    out[:] = inside


def _resize_crop(pixels: np.ndarray, box: Box, flip: bool, out: np.ndarray, crop_memory: np.ndarray | None) -> None:
    left, top, width, height = box
    view = pixels[top : top + height, left : left + width]
    # In one piece: torch 2.13 gives wrong pixels for a view one pixel wide, and would copy any other.
    if crop_memory is not None and view.size <= crop_memory.size:
        crop = crop_memory[: view.size].reshape(view.shape)
    else:
        crop = np.empty(view.shape, np.uint8)
    crop[:] = view
    planes, slot = (torch.from_numpy(array).permute(2, 0, 1)[None] for array in (crop, out))
    # What torch.nn.functional.interpolate calls, but straight into the slot: its own result has planes,
    # and to turn those into pixels takes longer than to scale them.
    torch.ops.aten._upsample_bilinear2d_aa.out(planes, list(out.shape[:2]), False, None, None, out=slot)
    if flip:
        slot.copy_(slot.flip(-1))
