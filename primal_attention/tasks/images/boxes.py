"""Boxes in pictures, drawn at random; nothing waits for the device.

Letters: B pictures, S pixels of a side.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Range = tuple[float, float]
CROPPED: tuple[Range, Range] = ((0.08, 1.0), (3 / 4, 4 / 3))
"""Areas, as parts of a picture, and ratios of width to height."""


def draw_crops(
    count: int, device: torch.device, areas: Range = CROPPED[0], ratios: Range = CROPPED[1]
) -> Tensor:
    """Area, ratio and place (along, down) of a box in each picture, [B, 4].

    Areas are uniform, ratios uniform in their logarithm, places uniform where the box fits.
    """
    area, ratio, along, down = torch.rand(4, count, device=device)
    low, high = (math.log(each) for each in ratios)
    area = areas[0] + (areas[1] - areas[0]) * area
    return torch.stack([area, (low + (high - low) * ratio).exp(), along, down], dim=-1)


def relative_boxes(crops: Tensor) -> Tensor:
    """Left, top, width and height of boxes [B, 4], as parts of a square picture.

    A side that would be longer than the picture is as long as it.
    """
    area, ratio, along, down = crops.unbind(-1)
    wide, high = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    return torch.stack([along * (1 - wide), down * (1 - high), wide, high], dim=-1)


def crop(x: Tensor, crops: Tensor) -> Tensor:
    """What lies in the boxes of pictures [B, 3, S, S], scaled to their size by cubic splines."""
    left, top, wide, high = relative_boxes(crops).unbind(-1)
    nothing = torch.zeros_like(left)
    rows = [wide, nothing, 2 * left + wide - 1, nothing, high, 2 * top + high - 1]
    return warp(x, torch.stack(rows, dim=-1), mode="bicubic", padding_mode="border")


def warp(x: Tensor, matrices: Tensor, *, mode: str, padding_mode: str = "zeros") -> Tensor:
    """Pictures [B, 3, S, S] read at an affine map [B, 6] of their places, -1 to 1 on both axes."""
    grid = F.affine_grid(matrices.view(-1, 2, 3), list(x.shape), align_corners=False)
    found = F.grid_sample(x, grid, mode=mode, padding_mode=padding_mode, align_corners=False)
    return found.clamp(0, 255) if mode == "bicubic" else found


def inside(boxes: Tensor, size: int) -> Tensor:
    """Which pixels lie in boxes [B, 4] (left, top, width, height), bool [B, 1, S, S]."""
    left, top, wide, high = boxes[..., None].unbind(-2)  # [B, 1] each
    places = (torch.arange(size, device=boxes.device) + 0.5) / size
    across = (places >= left) & (places < left + wide)
    downward = (places >= top) & (places < top + high)
    return (downward[:, :, None] & across[:, None, :])[:, None]
