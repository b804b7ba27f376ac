from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tag2box.data.photos import photo_size, read_photo
from tag2box.errors import UserError


@pytest.mark.parametrize("content", [b"", b"hello, not a photo", b"\x89PNG\r\n\x1a\nbroken"])
def test_what_is_not_a_photo_is_one_line_for_the_user(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.jpg"
    path.write_bytes(content)
    for read in (read_photo, photo_size):
        with pytest.raises(UserError) as error:
            read(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_missing_photo_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jpg", tmp_path):
        with pytest.raises(UserError, match="no such photo"):
            read_photo(path)


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_a_truncated_photo_is_refused_rather_than_padded_with_grey(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cut.{suffix}"
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=r"cut\."):
        read_photo(path)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright_as_exif_says(tmp_path: Path, orientation: int) -> None:
    upright = np.zeros((20, 30, 3), np.uint8)
    upright[:10, :15] = 255  # white top left
    # The stored picture is the inverse of what a viewer does with the tag.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned.png"
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif)
    assert photo_size(path) == (30, 20)
    assert torch.equal(read_photo(path), torch.from_numpy(upright).permute(2, 0, 1))


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
