"""Crop, resize and mirror pixels by torch: of one image on the processor, or of a batch on a device.

Shapes: B samples, H and W pixels of the images, S pixels of the output, C channels.
"""

from __future__ import annotations

import numpy as np
import torch

from ..images.window import Box

_AT_ONCE = 128  # images of a batch, of which a device holds what lies between: 120 MB, for 256 pixels that become 224


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
    B, _, _, C = images_BHWC.shape
    result_BSSC = images_BHWC.new_empty(B, size, size, C)
    for parts in zip(*(tensor.split(_AT_ONCE) for tensor in (images_BHWC, boxes, flips, result_BSSC)), strict=True):
        _crop_resize_flip_some(*parts)
    return result_BSSC


def _crop_resize_flip_some(
    images_BHWC: torch.Tensor, boxes: torch.Tensor, flips: torch.Tensor, out_BSSC: torch.Tensor
) -> None:
    B, H, W, C = images_BHWC.shape
    size, dtype = out_BSSC.shape[1], torch.float32 if images_BHWC.device.type == "cpu" else torch.float16
    left_B, top_B, width_B, height_B = boxes.unbind(1)
    outputs_S = torch.arange(size, device=boxes.device)
    vertical_BSH = _weights(top_B, height_B, H, size, outputs_S[None]).to(dtype)
    mirrored_BS = torch.where(flips[:, None], outputs_S.flip(0), outputs_S)
    horizontal_BSW = _weights(left_B, width_B, W, size, mirrored_BS).to(dtype)
    rows_BSWC = torch.bmm(vertical_BSH, images_BHWC.reshape(B, H, W * C).to(dtype)).view(B, size, W, C)
    # One product for each image, not for each of its rows, for which all weights would be copied.
    turned_BWSC = rows_BSWC.transpose(1, 2).reshape(B, W, size * C)
    del rows_BSWC
    turned_BSSC = torch.bmm(horizontal_BSW, turned_BWSC).view(B, size, size, C)
    out_BSSC.copy_(turned_BSSC.round_().clamp_(0, 255).transpose(1, 2))


def _weights(
    start_B: torch.Tensor, length_B: torch.Tensor, pixels: int, size: int, outputs_BS: torch.Tensor
) -> torch.Tensor:
    """Compute what each pixel of a line contributes to each output.

    A triangle as wide as two outputs, at least two pixels, as torch.nn.functional.interpolate(antialias=True) has it.

    Args:
        start_B: First pixel of each crop in the line, int32[B].
        length_B: Length of each crop in pixels, int32[B].
        pixels: Length of the line, in pixels.
        size: Number of outputs, S.
        outputs_BS: Numbers of the outputs in their order, int64[B, S] or [1, S].

    Returns:
        The weights, float32[B, S, pixels]; each output's weights sum to 1, or are 0 if no pixel lies under it.
    """
    step_B1 = (length_B / size)[:, None]
    places = torch.arange(pixels, device=start_B.device)
    start_B1, stop_B1 = start_B[:, None], (start_B + length_B)[:, None]
    centre_BS = start_B1 + (outputs_BS + 0.5) * step_B1 - 0.5
    weights_BSP = (places - centre_BS[:, :, None]).abs_().div_(-step_B1.clamp(min=1)[:, :, None]).add_(1).clamp_(min=0)
    inside_BP = (places >= start_B1) & (places < stop_B1)
    weights_BSP *= inside_BP[:, None]
    return weights_BSP.div_(weights_BSP.sum(2, keepdim=True).clamp_(min=1e-6))
