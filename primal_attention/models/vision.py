"""The vision transformer of timm, with attention patched, on pictures as they are stored.

Letters: B pictures, S pixels of a side, K classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.attention.base.validation import check_choice
from primal_attention.extras import needing
from primal_attention.models.stacks import patch_host

_POOLINGS: dict[str, Any] = {"class_token": "token", "mean": "avg"}


class PictureClassifier(nn.Module):
    """Standardises the channels, then asks a model of timm.

    Args:
        host: The model.
        mean: The mean of each channel, of pixels from 0 to 1.
        std: Their standard deviations.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, host: nn.Module, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.host: Any = host
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, pictures: Tensor) -> Tensor:
        """Compute logits [B, K] of pictures [B, 3, S, S], numbers from 0 to 255, of any size S."""
        x = pictures.to(self.mean.dtype) / 255
        logits: Tensor = self.host((x - self.mean) / self.std)
        return logits

    def undecayed(self) -> list[nn.Parameter]:
        """Return the parameters without weight decay: vectors, positions and the class token."""
        named = self.host.no_weight_decay()
        return [p for name, p in self.host.named_parameters() if p.ndim <= 1 or name in named]


def build_pictures(
    model: str,
    *,
    num_classes: int,
    statistics: tuple[Sequence[float], Sequence[float]],
    sizes: Mapping[str, int],
    pooling: str,
    dropout: float,
    drop_path: float,
    options: Mapping[str, Any],
) -> PictureClassifier:
    """Build a vision transformer with the attentions of a model.

    Args:
        model: One of ``MODELS``.
        num_classes: K.
        statistics: Mean and standard deviation of each channel.
        sizes: ``image_size``, ``patch_size``, ``dim``, ``num_layers``, ``num_heads``, ``ffn_dim``.
        pooling: The input of the head, ``class_token`` or ``mean``.
        dropout: Of positions and outputs of layers.
        drop_path: Of the last block; that of the others rises to it.
        options: Of the mechanism.
    """
    image, size = sizes["image_size"], sizes["patch_size"]
    if image % size:
        raise ValueError(f"image_size must be a multiple of patch_size={size}, got {image}")
    check_choice("pooling", pooling, _POOLINGS)
    with needing("a vision transformer needs timm", "images"):
        from timm.models.vision_transformer import VisionTransformer
    host = VisionTransformer(
        img_size=image,
        patch_size=size,
        num_classes=num_classes,
        embed_dim=sizes["dim"],
        depth=sizes["num_layers"],
        num_heads=sizes["num_heads"],
        mlp_ratio=sizes["ffn_dim"] / sizes["dim"],
        global_pool=_POOLINGS[pooling],
        pos_drop_rate=dropout,
        proj_drop_rate=dropout,
        drop_path_rate=drop_path,
        dynamic_img_size=True,
    )
    patch_host(host, model, options, max_tokens=num_tokens(image, size))
    return PictureClassifier(host, *statistics)


def num_tokens(image_size: int, patch_size: int) -> int:
    """Count the patches of a picture and the class token."""
    return (image_size // patch_size) ** 2 + 1
