"""Crop, resize and mirror pixels by torch: of one image on the processor, or of a batch on a device.

Shapes: B samples, H and W pixels of the images, S pixels of the output, C channels.
"""

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


def crop_resize_flip_batch(
    images_BHWC: torch.Tensor, boxes: torch.Tensor, flips: torch.Tensor, size: int
) -> torch.Tensor:
    """Crop each image, resize its crop (antialiased bilinear), and mirror it if its flip says so.

    Both passes are matrix products, in half precision on a GPU; the result is within 1 of exact arithmetic there.

    Args:
        images_BHWC: Images, uint8[B, H, W, C].
        boxes: Crops, int32[B, 4]: left, top, width and height of each crop in pixels. What lies beyond the image is
            black.
        flips: Whether to mirror each image, bool[B].
        size: Width and height of the results in pixels, S.

    Returns:
        The results, uint8[B, S, S, C].
    """
    B, H, W, C = images_BHWC.shape
    dtype = torch.float16 if images_BHWC.is_cuda else torch.float32
    vertical_BSH = _weights(boxes[:, 1], boxes[:, 3], H, size).to(dtype)
    horizontal_BSW = _weights(boxes[:, 0], boxes[:, 2], W, size)
    horizontal_BSW = torch.where(flips[:, None, None], horizontal_BSW.flip(1), horizontal_BSW).to(dtype)
    rows_BSWC = torch.bmm(vertical_BSH, images_BHWC.reshape(B, H, W * C).to(dtype)).view(B, size, W, C)
    scaled_BSSC = torch.matmul(horizontal_BSW[:, None], rows_BSWC)
    return scaled_BSSC.float().round_().clamp_(0, 255).to(torch.uint8)


def _weights(start_B: torch.Tensor, length_B: torch.Tensor, pixels: int, size: int) -> torch.Tensor:
    """Compute what each pixel of a line contributes to each output.

    A triangle as wide as two outputs, at least two pixels, as torch.nn.functional.interpolate(antialias=True) has it.

    Args:
        start_B: First pixel of each crop in the line, int32[B].
        length_B: Length of each crop in pixels, int32[B].
        pixels: Length of the line, in pixels.
        size: Number of outputs, S.

    Returns:
        The weights, float32[B, S, pixels]; each output's weights sum to 1, or are 0 if no pixel lies under it.
    """
    step = (length_B / size)[:, None, None]
    support = step.clamp(min=1)
    outputs = torch.arange(size, device=start_B.device)[None, :, None]
    places = torch.arange(pixels, device=start_B.device)[None, None, :]
    start, stop = start_B[:, None, None], (start_B + length_B)[:, None, None]
    centre = start + (outputs + 0.5) * step - 0.5
    weights = (1 - (places - centre).abs() / support).clamp(min=0)
    inside = (places >= start) & (places < stop)
    weights = weights * inside
    return weights / weights.sum(2, keepdim=True).clamp(min=1e-6)
