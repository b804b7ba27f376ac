"""Photos larger than is wanted, or than may be."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from photo_files import flat_jpeg, png_of
from PIL import Image

from tag2box.errors import UserError
from tag2box.images import MAX_PIXELS, photo_size, read_photo, reduction


@pytest.mark.parametrize(
    ("size", "at_least", "factor"),
    [
        ((1, 1), (1, 1), 1),
        ((500, 375), (640, 480), 1),
        ((1000, 1000), (500, 500), 1),
        ((2000, 2000), (500, 500), 2),
        ((1999, 2000), (500, 500), 1),
        ((30_000, 20_000), (720, 480), 16),
        ((4000, 300), (100, 100), 1),
        ((64, 64), (0, 0), 32),
    ],
)
def test_reductions_leave_twice_what_is_wanted(size: tuple[int, int], at_least: tuple[int, int], factor: int) -> None:
    assert reduction(size, at_least) == factor


@given(st.integers(1, 40_000), st.integers(1, 40_000), st.integers(1, 3000), st.integers(1, 3000))
def test_a_reduction_is_the_largest_that_may_be(width: int, height: int, want_w: int, want_h: int) -> None:
    factor = reduction((width, height), (want_w, want_h))
    fits = [k for k in (1 << p for p in range(17)) if width // k >= 2 * want_w and height // k >= 2 * want_h]
    assert factor == max(fits, default=1)


@pytest.mark.parametrize("size", [(513, 259), (512, 256), (71, 2000)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "BMP"])
@pytest.mark.parametrize("at_least", [(2, 2), (5, 4), (16, 9), (60, 40), (600, 400)])
def test_a_photo_may_come_reduced_and_still_shows_the_same(
    tmp_path: Path, size: tuple[int, int], kind: str, at_least: tuple[int, int]
) -> None:
    x, y = np.meshgrid(np.linspace(0, 200, size[0]), np.linspace(0, 250, size[1]))
    path = tmp_path / "ramp"
    Image.fromarray(np.stack([x, y, 0 * x + 30], 2).astype(np.uint8)).save(path, kind)
    factor = reduction(size, at_least)
    seen, whole = read_photo(path, at_least), read_photo(path)
    assert tuple(seen.shape) == (3, -(-size[1] // factor), -(-size[0] // factor))
    cells = torch.nn.functional.avg_pool2d(whole.float(), factor, ceil_mode=True)
    assert (seen.float() - cells).abs().mean() < 2
    if factor == 1:
        assert torch.equal(seen, whole)


MEASURE = """
import json, resource, sys
from pathlib import Path
from tag2box.images import photo_size, read_photo
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
read_photo(Path(sys.argv[1]))
before = peak()
big = Path(sys.argv[2])
seen = read_photo(big, (1500, 1000))
print(json.dumps([photo_size(big), list(seen.shape), int(seen.min()), int(seen.max()), peak() - before]))
"""


def test_memory_follows_what_is_wanted_of_a_very_large_photo(tmp_path: Path) -> None:
    small, big = tmp_path / "small.jpg", tmp_path / "big.jpg"
    small.write_bytes(flat_jpeg(64, 64))
    big.write_bytes(flat_jpeg(30_000, 20_000))
    done = subprocess.run([sys.executable, "-c", MEASURE, small, big], capture_output=True, text=True, check=True)
    size, shape, darkest, brightest, megabytes = json.loads(done.stdout)
    assert size == [30_000, 20_000] and shape == [3, 2500, 3750]
    assert (darkest, brightest) == (128, 128)
    assert megabytes < 200  # decoded whole, it would take 2400
    with pytest.raises(UserError, match="30000x20000 pixels, more than 178 million"):
        read_photo(big)


@pytest.mark.parametrize(
    "content",
    [
        flat_jpeg(20_000, 20_000, frame=0xC2)[:2000],  # progressive
        flat_jpeg(20_000, 20_000, scans=3)[:2000],
        png_of((b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)), (b"IDAT", b"x"), (b"IEND", b"")),
        b"BM" + struct.pack("<IHHI", 0, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 20_000, 20_000, 1, 24, *[0] * 6),
    ],
    ids=["progressive", "three scans", "png", "bmp"],
)
def test_photos_that_cannot_be_reduced_while_decoded_have_a_limit(tmp_path: Path, content: bytes) -> None:
    assert MAX_PIXELS < 20_000**2
    path = tmp_path / "huge"
    path.write_bytes(content)
    reads: list[Callable[[Path], object]] = [photo_size, read_photo, lambda file: read_photo(file, (100, 100))]
    for read in reads:
        with pytest.raises(UserError) as error:
            read(path)
        assert str(error.value) == f"{path}: 20000x20000 pixels, more than 178 million; save a smaller copy of it"


def blank_png(side: int) -> bytes:
    """A white square of 1 bit per pixel."""
    packer = zlib.compressobj(9)
    row = b"\0" + b"\xff" * -(-side // 8)
    data = b"".join(packer.compress(row * 100) for _ in range(side // 100)) + packer.flush()
    return png_of((b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)), (b"IDAT", data), (b"IEND", b""))


def test_millions_of_pixels_from_a_few_bytes_are_refused(tmp_path: Path) -> None:
    """The refusal comes before decoding: 36 million pixels would take a gigabyte on the way to RGB."""
    path = tmp_path / "blank.png"
    path.write_bytes(blank_png(6000))
    for read in (photo_size, read_photo, lambda file: read_photo(file, (100, 100))):
        with pytest.raises(UserError, match=r"6000x6000 pixels from \d+ kB, no photo; save a smaller copy of it$"):
            read(path)
    path.write_bytes(path.read_bytes() + bytes(6000**2 // 32))  # as large as the worst photo
    assert photo_size(path) == (6000, 6000)


def many_scans(size: tuple[int, int], count: int) -> bytes:
    """A progressive JPEG with its last scan repeated."""
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, "JPEG", progressive=True)
    start = buffer.getvalue().rindex(b"\xff\xda")
    return buffer.getvalue()[:-2] + buffer.getvalue()[start:-2] * count + b"\xff\xd9"


def test_thousands_of_scans_are_refused(tmp_path: Path) -> None:
    """Each takes the time of a photo, and few bytes."""
    path = tmp_path / "scans.jpg"
    path.write_bytes(many_scans((64, 64), 100))
    assert read_photo(path).shape == (3, 64, 64)
    path.write_bytes(many_scans((2000, 1000), 2000))
    assert photo_size(path) == (2000, 1000)
    with pytest.raises(UserError, match=r"2\d{3} scans of 2000x1000 pixels, no photo"):
        read_photo(path)


def test_photos_of_one_scan_a_colour_are_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "p.jpg").write_bytes(flat_jpeg(100, 50, scans=3))
    assert read_photo(tmp_path / "p.jpg").unique().tolist() == [128]


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_metadata_that_unpacks_to_a_flood_is_one_line(tmp_path: Path, kind: bytes) -> None:
    flood = zlib.compress(bytes(5_000_000), 9)
    name = b"name\0" + (b"\1\0\0\0" if kind == b"iTXt" else b"\0")
    path = tmp_path / "flood.png"
    header = (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    path.write_bytes(png_of(header, (kind, name + flood), (b"IDAT", zlib.compress(bytes(4))), (b"IEND", b"")))
    with pytest.raises(UserError, match="too large") as error:
        read_photo(path)
    assert "\n" not in str(error.value)
