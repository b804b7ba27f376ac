from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from tag2box.annotations import Photo
from tag2box.cli.inputs import find_photos
from tag2box.errors import UserError
from tag2box.images import View, load_image, load_view, read_photo, reduction, view_size

VIEWS = [View(None), View(None, True), View(480, False, 2000), View(48, True), View(1200, True, 2000), View(375)]


def saved(path: Path, width: int, height: int, **options: object) -> Photo:
    """Ramps, waves and fine noise on disk, as JPEG or what the name says."""
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(0).integers(0, 60, (height, width))
    waves = 60 + 50 * np.sin(y * 20 / height) + noise
    pixels = np.stack([x * 255 // width, waves.astype(int), y * 200 // height], 2)
    Image.fromarray(pixels.astype(np.uint8)).save(path, **options)  # type: ignore[arg-type]
    return find_photos([path])[0]


@pytest.mark.parametrize("view", VIEWS)
def test_photos_not_far_larger_than_their_view_equal_those_read_at_full_size_to_the_bit(
    tmp_path: Path, view: View
) -> None:
    photo = saved(tmp_path / "p.jpg", 500, 375) if view.short != 48 else saved(tmp_path / "p.jpg", 100, 75)
    height, width = view_size(view, (photo.height, photo.width))
    whole = read_photo(photo.path).float()
    if (height, width) != (photo.height, photo.width):
        whole = interpolate(whole[None], (height, width), mode="bilinear", align_corners=False, antialias=True)[0]
    assert torch.equal(load_view(photo, view), whole.flip(2) if view.flip else whole)


@pytest.mark.parametrize("name", ["p.jpg", "p.png"])
@pytest.mark.parametrize("view", [View(48), View(80, True), View(30, True, 60), View(16)])
@pytest.mark.parametrize("size", [(800, 600), (603, 405), (450, 801)])
def test_larger_photos_are_nearly_those_read_at_full_size(
    tmp_path: Path, name: str, view: View, size: tuple[int, int]
) -> None:
    photo = saved(tmp_path / name, *size)
    height, width = view_size(view, (photo.height, photo.width))
    assert reduction(size, (width, height)) > 1
    whole = interpolate(
        read_photo(photo.path).float()[None], (height, width), mode="bilinear", align_corners=False, antialias=True
    )[0]
    seen = load_view(photo, view)
    assert seen.shape == (3, height, width)
    assert (seen - (whole.flip(2) if view.flip else whole)).abs().mean() < 2.5


def test_a_photo_on_its_side_is_seen_upright_and_reduced(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = saved(tmp_path / "p.jpg", 1600, 800, exif=exif)
    assert (photo.width, photo.height) == (800, 1600)
    seen = load_view(photo, View(100))
    assert seen.shape == (3, 200, 100)
    assert seen[0, 20].mean() < 60 and seen[0, 180].mean() > 190  # red grew to the right, now downwards


@pytest.mark.parametrize("claimed", [(375, 500), (500, 374), (250, 188), (5000, 3750)])
def test_a_photo_of_another_size_than_the_dataset_says_is_refused(tmp_path: Path, claimed: tuple[int, int]) -> None:
    photo = saved(tmp_path / "p.jpg", 500, 375)
    with pytest.raises(UserError, match=rf"p\.jpg: 500x375 pixels, expected {claimed[0]}x{claimed[1]}"):
        load_view(Photo("p", photo.path, *claimed), View(480, long_max=2000))


def test_one_decoded_image_serves_views_of_all_sizes(tmp_path: Path) -> None:
    photo = saved(tmp_path / "p.jpg", 500, 375)
    views = [view for view in VIEWS if view.short != 48]
    read = load_image(photo, views)
    for view in views:
        assert torch.equal(read.render(view), load_view(photo, view))


@pytest.mark.parametrize(
    "views", [[View(48)], [View(48), View(80, True)], [View(80), View(48), View(16)], [View(None)]]
)
def test_a_decoded_image_is_as_large_as_its_largest_view_needs(tmp_path: Path, views: list[View]) -> None:
    photo = saved(tmp_path / "p.jpg", 800, 600)
    height, width = max(view_size(view, (600, 800)) for view in views)
    factor = reduction((800, 600), (width, height))
    read = load_image(photo, views)
    assert read.pixels.shape == (3, 600 // factor, 800 // factor)
    for view in views:
        assert (read.render(view) - load_view(photo, view)).abs().mean() < 2.5  # as if read for it alone
