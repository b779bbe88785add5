"""Computes brick padding, which surrounds an image with copies of a tile, arranged like the bricks of a wall.

    out[..., y, x] = tile[..., Y mod h, (X + offset * floor(Y / h)) mod w]          Y = y - top, X = x - left

tile (..., h, w), out (..., height, width). Each course (row of bricks) is shifted to the left by `offset` pixels relative to
the course above.
Source: Taichi documentation, "Accelerate PyTorch with Taichi", first example.

An implementation is a file in this folder with REQUIRES and forward(tile (N,h,w), offset, top, left, height, width) ->
(N,height,width).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.operator import Operator, require_tensor

Padding = int | Sequence[int]


class BrickPadding(Operator):
    """Computes brick padding by the named implementation: `BrickPadding("taichi_v0")(tile, offset, padding) -> out`.

    Raises ValueError for an unknown name, an unsupported dtype, negative padding, or a tile that has no pixels or requires a
    gradient, because the operator has no gradient. Raises KernelUnavailable if the implementation cannot run on the tile's
    device.

    Args:
        tile (..., h, w): float32 or uint8 pixels, such as (C,h,w) or (B,C,h,w).
        offset: any integer.
        padding: pixels as one number, as (horizontal, vertical), or as (left, top, right, bottom).

    The result has the shape (..., top + h + bottom, left + w + right).
    """

    folder = "pad"
    inputs = "Tensor tile, SymInt offset, SymInt top, SymInt left, SymInt height, SymInt width"
    outputs = (("out", "tile"),)         # out has the tile's dtype; for its shape see _empty_outputs
    parts = (("forward",),)

    def __call__(self, tile: Tensor, offset: int, padding: Padding) -> Tensor:
        self._check(tile)
        left, top, right, bottom = sides(padding)
        return self.wall(tile, offset, top, left, top + tile.shape[-2] + bottom, left + tile.shape[-1] + right)

    def wall(self, tile: Tensor, offset: int, top: int, left: int, height: int, width: int) -> Tensor:
        """Returns a part (..., height, width) of the endless wall, with a tile at row `top` and column `left`."""
        self._check(tile)
        if height and width and tile.shape[-2:].numel() == 0:
            raise ValueError(f"a tile of shape {tuple(tile.shape)} has no pixels: the height and the width must be at least 1")
        out, = self._function(tile, offset, top, left, height, width)
        return out

    def forward(self, tile: Tensor, offset: int, top: int, left: int, height: int, width: int) -> Tensor:
        """Returns the result of `wall`, without checks."""
        shape = (*tile.shape[:-2], height, width)
        if tile.shape[:-2].numel() * height * width == 0:
            return tile.new_empty(shape)
        tiles = tile.detach().reshape(-1, *tile.shape[-2:]).contiguous()
        out: Tensor = self._implementation.forward(tiles, offset, top, left, height, width)
        return out.view(shape)

    def _empty_outputs(self, tile: Tensor, offset: int, top: int, left: int, height: int, width: int) -> list[Tensor]:
        return [tile.new_empty(*tile.shape[:-2], height, width)]

    def _check(self, tile: Tensor) -> None:
        self._require_tensors(tile)
        if tile.dim() < 2:
            raise ValueError(f"BrickPadding: the tile must have the shape (..., height, width); got {tuple(tile.shape)}")
        if tile.dtype not in self.requires.dtypes:
            raise ValueError(f"BrickPadding: the dtype must be {' or '.join(map(str, self.requires.dtypes))}; got {tile.dtype}")
        if tile.requires_grad and torch.is_grad_enabled():
            raise ValueError("BrickPadding has no gradient: pass tile.detach(), or use BrickPadding under torch.no_grad()")
        self.check_device(tile.device)


class BrickPad:
    """A transform for data pipelines that surrounds each image with bricks: `BrickPad(tile, offset)(image)`.

    Raises ValueError and KernelUnavailable as BrickPadding does, and ValueError if the shapes, dtypes or devices of tile and
    image do not match.

    Args:
        tile (..., h, w): the brick. Each size before h must be 1, or equal to the image's size at the same distance from H. So
            a tile (C,h,w) fits images (C,H,W) and (B,C,H,W). With None, each image is the brick.
        padding: as in BrickPadding. None adds one brick on each side.
        image (..., H, W): an image with the tile's dtype and device. A brick of the wall starts at the image's first pixel.

    The default kernel requires only torch, and runs in the workers of any DataLoader. A Taichi kernel raises KernelUnavailable
    in a worker that was forked after the main process started Taichi. With Taichi, spawn the workers instead.
    """

    def __init__(self, tile: Tensor | None, offset: int, padding: Padding | None = None, kernel: str = "torch_strips") -> None:
        self.tile = tile
        self.offset = offset
        self.padding = None if padding is None else sides(padding)
        self._pad = BrickPadding(kernel)

    def __call__(self, image: Tensor) -> Tensor:
        require_tensor("BrickPad: the image", image)
        tile = image if self.tile is None else self._checked_tile(self.tile, image)
        left, top, right, bottom = sides((tile.shape[-1], tile.shape[-2])) if self.padding is None else self.padding
        if self.tile is None:
            return self._pad(image, self.offset, (left, top, right, bottom))
        height, width = image.shape[-2:]
        leading = image.shape[:-2]
        wall = self._pad.wall(tile, self.offset, top, left, top + height + bottom, left + width + right)
        if wall.shape[:-2] != leading:
            wall = wall.expand(*leading, -1, -1).clone()
        wall[..., top:top + height, left:left + width] = image
        return wall

    def __repr__(self) -> str:
        tile = None if self.tile is None else f"tile {tuple(self.tile.shape)}"
        return f"BrickPad({tile}, offset={self.offset}, padding={self.padding}, kernel={self._pad.name!r})"

    @staticmethod
    def _checked_tile(tile: Tensor, image: Tensor) -> Tensor:
        if (tile.dtype, tile.device) != (image.dtype, image.device):
            raise ValueError(f"BrickPad: an image must have the tile's dtype and device, {tile.dtype} on {tile.device}; "
                             f"got {image.dtype} on {image.device}")
        pairs = zip(reversed(tile.shape[:-2]), reversed(image.shape[:-2]), strict=False)
        if tile.dim() > image.dim() or any(of_tile not in (1, of_image) for of_tile, of_image in pairs):
            raise ValueError(f"a tile of shape {tuple(tile.shape)} does not fit an image of shape {tuple(image.shape)}: "
                             "each of the tile's sizes before the height must be 1 or the same as in the image")
        return tile


def sides(padding: Padding) -> tuple[int, int, int, int]:
    """Returns (left, top, right, bottom), in the order of torchvision.transforms.Pad, from one, two or four numbers."""
    numbers = tuple(padding) if isinstance(padding, Sequence) else (padding,)
    if len(numbers) not in (1, 2, 4) or any(not isinstance(number, int) or number < 0 for number in numbers):
        raise ValueError("padding must be one, two or four whole numbers of at least 0: n, (horizontal, vertical) or (left, "
                         f"top, right, bottom); got {padding}")
    left, top, right, bottom = numbers * (4 // len(numbers))
    return left, top, right, bottom


OPERATOR = BrickPadding
