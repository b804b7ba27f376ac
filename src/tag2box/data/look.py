"""The one way from a photo on disk to the pixels a network, a page or a person sees."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from tag2box.data.photos import photo_size, read_photo, reduction
from tag2box.data.transforms import View, seen_size, show
from tag2box.errors import UserError
from tag2box.types import Photo


def see(photo: Photo, view: View) -> Float[Tensor, "3 h w"]:
    """A photo in a view, RGB from 0 to 255. Its boxes come by ``place(view, boxes, (photo.height, photo.width))``.

    A photo much larger than the view is reduced while it is read, so that memory follows the view. Where its sides do
    not divide evenly, that moves things by half a pixel of the view at most.
    """
    size = (photo.height, photo.width)
    height, width = seen_size(view, size)
    pixels = read_photo(photo.path, at_least=(width, height))
    factor = reduction((photo.width, photo.height), (width, height))
    if tuple(pixels.shape[1:]) != (-(-photo.height // factor), -(-photo.width // factor)):
        found = "x".join(map(str, photo_size(photo.path)))
        raise UserError(
            f"{photo.path}: {found} pixels, expected {photo.width}x{photo.height}; "
            "correct the size its dataset gives, or read the dataset anew"
        )
    return show(view, pixels.float(), size)
