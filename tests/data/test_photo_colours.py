"""Every way a file stores colours becomes RGB of eight bits."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from photo_files import png_of
from PIL import Image

from tag2box.images import photo_size, read_photo


def _saved(image: Image.Image, path: Path) -> torch.Tensor:
    image.save(path)
    seen = read_photo(path)
    assert seen.dtype == torch.uint8 and seen.shape[0] == 3
    assert (seen.shape[2], seen.shape[1]) == photo_size(path) == image.size
    return seen


def test_every_colour_mode_becomes_rgb(tmp_path: Path) -> None:
    red = Image.new("RGB", (6, 4), (255, 0, 0))
    cases = {"palette.png": red.convert("P"), "grey.png": red.convert("L"), "bits.png": red.convert("1")}
    for name, image in cases.items():
        assert torch.equal(
            _saved(image, tmp_path / name), torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        )
    cmyk = _saved(red.convert("CMYK"), tmp_path / "cmyk.tif")
    assert cmyk[:, 0, 0].tolist() == [255, 0, 0]


def test_transparent_pixels_show_white_and_half_transparent_ones_a_mixture(tmp_path: Path) -> None:
    image = Image.new("RGBA", (3, 1), (200, 0, 0, 255))
    image.putpixel((1, 0), (200, 0, 0, 0))
    image.putpixel((2, 0), (200, 0, 0, 128))
    seen = _saved(image, tmp_path / "alpha.png")
    assert seen[:, 0, 0].tolist() == [200, 0, 0] and seen[:, 0, 1].tolist() == [255] * 3
    assert abs(int(seen[1, 0, 2]) - 127) <= 1
    assert _saved(image.convert("LA"), tmp_path / "la.png")[:, 0, 1].tolist() == [255] * 3


def test_a_palette_with_a_transparent_entry_shows_white_there(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "p.png", transparency=0)
    assert read_photo(tmp_path / "p.png")[:, 0].T.tolist() == [[255, 255, 255], [10, 20, 30]]


def test_sixteen_bit_greys_are_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.array([[0, 257, 32896, 65535]], np.uint16)
    seen = _saved(Image.fromarray(values), tmp_path / "deep.png")
    assert seen[0, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize(("mode", "kind"), [("RGB", "png"), ("RGB", "tif"), ("RGBA", "png")])
def test_sixteen_bits_a_colour_become_eight(tmp_path: Path, mode: str, kind: str) -> None:
    path = tmp_path / f"deep.{kind}"
    deep = np.array([[[0, 32896, 65535, 65535][: len(mode)], [65535, 257, 514, 65535][: len(mode)]]], np.uint16)
    path.write_bytes(_deep_png(deep) if kind == "png" else _deep_tiff(deep))
    assert read_photo(path)[:, 0].T.tolist() == [[0, 128, 255], [255, 1, 2]]


def _deep_png(deep: np.ndarray) -> bytes:
    height, width, channels = deep.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep)
    header = struct.pack(">IIBBBBB", width, height, 16, 2 if channels == 3 else 6, 0, 0, 0)
    return png_of((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))


def _deep_tiff(deep: np.ndarray) -> bytes:
    height, width, channels = deep.shape
    pixels = deep.astype("<u2").tobytes()
    depths = struct.pack("<HHH", 16, 16, 16)
    data = 8 + len(depths)
    tags = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, 3, 8), (259, 3, 1, 1), (262, 3, 1, 2)]
    tags += [(273, 4, 1, data), (277, 3, 1, channels), (278, 3, 1, height), (279, 4, 1, len(pixels))]
    folder = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return b"II*\0" + struct.pack("<I", data + len(pixels)) + depths + pixels + folder


@pytest.mark.parametrize(("values", "seen"), [((0.0, 0.5, 1.0), [0, 128, 255]), ((0.0, 100.0, 300.0), [0, 100, 255])])
def test_greys_of_floats_are_shown_from_black_to_white(
    tmp_path: Path, values: tuple[float, ...], seen: list[int]
) -> None:
    Image.fromarray(np.array([[*values, float("nan")]], np.float32)).save(tmp_path / "f.tif")
    assert read_photo(tmp_path / "f.tif")[0, 0].tolist() == [*seen, 0]


def test_cmyk_jpegs_are_read_inverted_as_adobe_writes_them(tmp_path: Path) -> None:
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red.save(tmp_path / "cmyk.jpg", quality=100)
    assert b"Adobe" in (tmp_path / "cmyk.jpg").read_bytes()
    assert read_photo(tmp_path / "cmyk.jpg")[:, 8, 8].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ((0, 7, 255), [0, 7, 255]),  # eight bits in a file of sixteen: as they are
        ((0, 7, 256), [0, 7, 255]),  # of few bits: stretched; divided by 257, a scan of 12 bits would be black
        ((0, 2048, 4095), [0, 128, 255]),
        ((1000, 1500, 2000), [0, 128, 255]),
        ((300, 300, 300), [1, 1, 1]),  # no range
        ((0, 0, 16383), [0, 0, 255]),
        ((0, 257, 16384), [0, 1, 64]),  # from 15 bits on white is 65535
        ((128, 129, 65000), [0, 1, 253]),  # 65535 is white, not 65536: 65000 / 256 would be 254
        ((0, 385, 20000), [0, 1, 78]),
    ],
)
def test_sixteen_bit_greys_are_divided_by_257_or_stretched_if_their_range_is_far_smaller(
    tmp_path: Path, values: tuple[int, ...], seen: list[int]
) -> None:
    grey = _saved(Image.fromarray(np.array([values], np.uint16)), tmp_path / "deep.png")
    assert grey.permute(1, 2, 0).tolist() == [[[value] * 3 for value in seen]]
