"""Draws a brick wall from one brick: python examples/brick_padding.py [FILE.png] [--kernel NAME]

Paints a brick of changing colours, 32 x 48 pixels, and pads it by 128 on each side, as the first example of the Taichi
documentation's page "Accelerate PyTorch with Taichi" does. Requires only what the kernels require.
"""

import argparse
import struct
import sys
import zlib
from pathlib import Path

import torch
from torch import Tensor

from kernels.pad import BrickPadding
from kernels.registry import KernelUnavailable, names

HEIGHT, WIDTH, OFFSET, PADDING = 48, 32, 10, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=Path("brick_padding.png"), metavar="FILE.png")
    parser.add_argument("--kernel", choices=names("pad"), default="torch_strips")
    args = parser.parse_args()
    try:
        wall = BrickPadding(args.kernel)(brick(), OFFSET, PADDING)
    except KernelUnavailable as error:
        sys.exit(str(error))
    args.file.write_bytes(png(wall))
    print(f"{args.file}: {wall.shape[-1]} x {wall.shape[-2]} pixels, by {args.kernel}")


def brick() -> Tensor:
    """Returns a brick (3, HEIGHT, WIDTH) in uint8.

    Red grows to the right, green grows downwards, and blue falls. The last row and column are mortar.
    """
    down, right = torch.linspace(0, 1, HEIGHT)[:, None], torch.linspace(0, 1, WIDTH)
    colours = torch.stack(torch.broadcast_tensors(0.5 + 0.5 * right, 0.2 + 0.6 * down, 0.8 - 0.6 * right * down))
    colours[:, -1], colours[:, :, -1] = 0.9, 0.9
    return (255 * colours).round().to(torch.uint8)


def png(image: Tensor) -> bytes:
    """Encodes an image (3,H,W) in uint8 as a PNG file: header, pixels, end (PNG specification, third edition)."""
    _, height, width = image.shape
    rows = torch.cat((torch.zeros(height, 1, dtype=torch.uint8), image.permute(1, 2, 0).reshape(height, -1)), dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)       # 8 bits per colour, RGB; no filter
    pixels = zlib.compress(rows.numpy().tobytes())
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


if __name__ == "__main__":
    main()
