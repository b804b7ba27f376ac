"""The one way from a photo on disk to the pixels a network, a page or a person sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, UInt8
from torch import Tensor

from tag2box.data.photos import photo_size, read_photo, reduction
from tag2box.data.transforms import View, seen_size, show
from tag2box.errors import UserError
from tag2box.types import Photo


@dataclass(frozen=True, slots=True)
class Look:
    """A photo that has been read, to be seen in several views."""

    photo: Photo
    pixels: UInt8[Tensor, "3 H W"]  # of the photo, or of a smaller copy that serves all its views

    def seen(self, view: View) -> Float[Tensor, "3 h w"]:
        """The photo in a view, RGB from 0 to 255."""
        return show(view, self.pixels.float(), (self.photo.height, self.photo.width))


def see(photo: Photo, view: View) -> Float[Tensor, "3 h w"]:
    """A photo in a view, RGB from 0 to 255. Its boxes come by ``place(view, boxes, (photo.height, photo.width))``."""
    return look(photo, [view]).seen(view)


def look(photo: Photo, views: Sequence[View]) -> Look:
    """Read a photo, once for all the views it will be seen in.

    A photo much larger than the largest view is reduced while it is read, so that memory follows the views. Where its
    sides do not divide evenly, that moves things by half a pixel of this view at most.
    """
    sizes = [seen_size(view, (photo.height, photo.width)) for view in views]
    wanted = (max(width for _, width in sizes), max(height for height, _ in sizes))
    pixels = read_photo(photo.path, at_least=wanted)
    factor = reduction((photo.width, photo.height), wanted)
    if tuple(pixels.shape[1:]) != (-(-photo.height // factor), -(-photo.width // factor)):
        found = "x".join(map(str, photo_size(photo.path)))
        raise UserError(
            f"{photo.path}: {found} pixels, expected {photo.width}x{photo.height}; "
            "correct the size its dataset gives, or read the dataset anew"
        )
    return Look(photo, pixels)
