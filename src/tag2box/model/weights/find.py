"""What a setting means by its weights: the name of something stored, or a file."""

from __future__ import annotations

import difflib
from pathlib import Path

from tag2box.errors import UserError
from tag2box.model.weights.architectures import Weights, pixels_name
from tag2box.model.weights.cache import FILE_ENDINGS, is_stored, open_stored, stored_names, stored_path
from tag2box.model.weights.convert import Wishes, convert
from tag2box.model.weights.files import read_weight_file

_OPTION = "backbone.preprocess"


def find_weights(given: str, preprocess: str | None) -> Weights:
    """Stored weights by name, or those of a file; ``preprocess`` may say what a file does not, and never disagree."""
    path = Path(given) if is_file(given) else _stored(given)
    if not is_file(given) or is_stored(path):
        weights = open_stored(path)
        own = pixels_name(weights.preprocess)
        if preprocess not in {None, own}:
            raise UserError(
                f"{_OPTION} = {preprocess}, but {given} was trained on {own} pixels; leave out {_OPTION}: "
                "the weights bring their own"
            )
        return weights
    wishes = Wishes(preprocess=preprocess, preprocess_option=_OPTION)
    return convert(read_weight_file(path), wishes).weights


def is_file(given: str) -> bool:
    """Whether a setting names a file: it has a folder in it, or a weight file's ending."""
    return "/" in given or "\\" in given or given.endswith(FILE_ENDINGS)


def _stored(name: str) -> Path:
    path = stored_path(name)
    if not path.exists():
        known = stored_names()
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"stored: {', '.join(known) or 'nothing'}"
        raise UserError(f"{name}: no weights of this name ({hint}); try `tag2box weights get {name}`, or name a file")
    return path
