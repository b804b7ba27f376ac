"""What users wrote: TOML files and command-line overrides, merged without forgetting where each value came from."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tag2box.errors import UserError
from tag2box.settings.shapes import field_default, field_hints, init_fields, only_table

Tree: TypeAlias = "dict[str, Tree | Given]"
_DEFAULT_LAYER = -1


@dataclass(frozen=True, slots=True)
class Given:
    """A value as a user wrote it, and where."""

    value: object
    origin: str  # a file, or the whole "--set a.b=c"
    layer: int
    text: str | None = None  # the value as typed on the command line


def read_file(path: Path, layer: int) -> Tree:
    """The tables of one TOML file."""
    try:
        return _wrap_table(tomllib.loads(path.read_text(encoding="utf-8")), str(path), layer)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a TOML settings file") from None
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).rstrip(")").partition(" (at ")
        raise UserError(f"{path}: not valid TOML ({where}: {what[:1].lower()}{what[1:]})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as a TOML settings file ({error})") from None


def parse_override(override: str, layer: int) -> Tree:
    """One ``a.b=c``: c is TOML where it parses as TOML, else a string without its quotes."""
    key, equals, text = (part.strip() for part in override.partition("="))
    names = key.split(".")
    if not equals or not all(names):
        raise UserError(f"--set {override}: expected key=value, such as --set plan.iterations=500")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {"value": text}
    # A line break inside the text could have started a second key.
    value = parsed["value"] if len(parsed) == 1 else text
    leaf = wrap(value, f"--set {key}={text}", layer, text)
    tree: Tree = {names[-1]: leaf}
    for name in reversed(names[:-1]):
        tree = {name: tree}
    return tree


def wrap(value: object, origin: str, layer: int, text: str | None = None) -> Tree | Given:
    """A parsed TOML value with its origin: a table becomes a tree, anything else a leaf."""
    return _wrap_table(value, origin, layer) if isinstance(value, dict) else Given(value, origin, layer, text)


def _wrap_table(table: dict[str, Any], origin: str, layer: int) -> Tree:
    return {name: wrap(value, origin, layer) for name, value in table.items()}


def unwrap(node: Tree | Given) -> object:
    """The parsed TOML value again."""
    return node.value if isinstance(node, Given) else {name: unwrap(child) for name, child in node.items()}


def merge(below: Tree, above: Tree) -> Tree:
    """Tables merge and values replace; so does a table of another kind, whose predecessor's fields must not leak in."""
    merged = dict(below)
    for name, node in above.items():
        old = merged.get(name)
        if isinstance(old, dict) and isinstance(node, dict) and not _changes_kind(old, node):
            merged[name] = merge(old, node)
        else:
            merged[name] = node
    return merged


def _changes_kind(old: Tree, new: Tree) -> bool:
    before, after = old.get("kind"), new.get("kind")
    return isinstance(before, Given) and isinstance(after, Given) and before.value != after.value


def default_kinds(cls: type, base: object) -> Tree:
    """The kinds that hold before any file is read, so that a file can be seen to change one."""
    tree: Tree = {}
    for field in init_fields(cls):
        default = field_default(field, base)
        missing = default is MISSING
        owner = only_table(field_hints(cls)[field.name]) if missing else type(default)
        if field.name == "kind" and not missing:
            tree["kind"] = Given(default, "", _DEFAULT_LAYER)
        elif owner is not None and is_dataclass(owner):
            tree[field.name] = default_kinds(owner, None if missing else default)
    return tree


def latest(node: Tree | Given) -> Given | None:
    """What a user wrote last in this part of the tree: the likeliest cause of a problem with the whole."""
    if isinstance(node, Given):
        return node if node.layer > _DEFAULT_LAYER else None
    found = [given for given in map(latest, node.values()) if given is not None]
    return max(found, key=lambda given: given.layer, default=None)
