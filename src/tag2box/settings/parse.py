"""Parsing of settings: TOML files and ``a.b=c`` overrides, merged with their origin, validated into dataclasses."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import pydantic

from tag2box import io
from tag2box.errors import LONGEST_LINE, UserError, printable
from tag2box.extend import settings_class
from tag2box.settings.schema import (
    Shape,
    by_kind,
    describe,
    field_default,
    field_hints,
    init_fields,
    only_table,
    outside_kind,
    shape_of,
    toml,
    type_name,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Tree: TypeAlias = "dict[str, Tree | Given]"
_DEFAULT_LAYER = -1
_FINITE = pydantic.ConfigDict(allow_inf_nan=False)
LARGEST = 10**9
"""Limit of numbers that have no upper bound of their own."""
_MAX_BYTES, _MAX_DEPTH = 1 << 20, 8  # of a file; of nested tables and lists
_NAME = r"""(?:(?<![\w-])[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_LONG_KEY = re.compile(rf"(?:{_NAME}\.[ \t]*+){{{_MAX_DEPTH},}}+")
_KEY_END = re.compile(rf"{_NAME}[=\]]")  # else it was a string


@dataclass(frozen=True, slots=True)
class Given:
    """A value as the user wrote it, and where."""

    value: object
    origin: str  # a file, or the whole "--set a.b=c"
    layer: int
    text: str | None = None  # the value as typed on the command line


def read_file(path: Path, layer: int) -> Tree:
    """The tables of one TOML file."""
    text = io.read_text(path, "a TOML settings file", _MAX_BYTES)
    try:
        return _wrap_table(_parse_toml(text), str(path), layer)
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).rstrip(")").partition(" (at ")
        problem = f"{where}: {what[:1].lower()}{what[1:]}"
    except ValueError as error:
        problem = str(error)
    raise UserError(f"{path}: not valid TOML ({printable(problem)})")


def _parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML document; raises ``ValueError`` if it is not valid, or too much for the parser.

    The parser's time grows with the square of the names in a dotted key, so that those are counted before.
    """
    for found in _LONG_KEY.finditer(text):
        if _KEY_END.match(text, found.end()):
            line = text.count("\n", 0, found.start()) + 1
            raise ValueError(f"line {line}: a key of more than {_MAX_DEPTH} names")
    try:
        table = tomllib.loads(text)
        _check_values(table)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return table


def _check_values(value: object, depth: int = 0) -> None:
    """Raise ``ValueError`` for tables and lists in too many levels, and for integers of more than 64 bits."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("an integer of more than 64 bits")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_values(inner, depth + 1)


def parse_override(override: str, layer: int) -> Tree:
    """One ``a.b=c``: c is TOML if it parses as TOML, else an unquoted string."""
    key, equals, text = (part.strip() for part in override.partition("="))
    names = key.split(".")
    if not equals or not all(names):
        raise UserError(f"--set {override}: expected key=value, such as --set plan.iterations=500")
    if len(names) > _MAX_DEPTH:
        raise UserError(f"--set {printable(override, 80)}: {len(names)} names in a row; expected a key of this program")
    try:
        parsed = _parse_toml(f"value = {text}")
    except ValueError:
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
    """Tables merge and values replace; a table of another kind replaces the whole table below it."""
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
    """The default kinds, so that a file which changes a kind can be recognised."""
    tree: Tree = {}
    for field in init_fields(cls):
        default = field_default(field, base)
        missing = default is MISSING
        owner = only_table(field_hints(cls)[field.name]) if missing else type(default)
        if field.name == "kind" and not missing:
            tree["kind"] = Given(default, "", _DEFAULT_LAYER)
        elif owner is not None and is_dataclass(owner):
            inner = default_kinds(owner, None if missing else default)
            outside = None if missing else outside_kind(shape_of(field_hints(cls)[field.name]), default)
            tree[field.name] = inner if outside is None else {**inner, "kind": Given(outside, "", _DEFAULT_LAYER)}
    return tree


def with_new_keys(tree: Tree, renamed: Mapping[str, str], values: Mapping[str, Mapping[object, str]]) -> Tree:
    """The tree with old keys moved to where they belong now, each with a warning that names both.

    Args:
        values: by old key, its values that are spelt otherwise under the new one.
    """
    for old, new in renamed.items():
        *path, name = old.split(".")
        owner: Tree | Given | None = tree
        for step in path:
            owner = owner.get(step) if isinstance(owner, dict) else None
        if not isinstance(owner, dict) or name not in owner:
            continue
        node = owner.pop(name)
        given = latest(node)
        if given is None:  # an empty table, as another key of it has been moved already
            continue
        if isinstance(node, Given) and isinstance(node.value, bool) and node.value in values.get(old, {}):
            node = replace(node, value=values[old][node.value], text=None)
        renaming = f"{old} is now called {new}; the old name works until version 0.3"
        warnings.warn(f"{given.origin}: {renaming}", FutureWarning, 3)
        for step in reversed(new.split(".")):
            node = {step: node}
        assert isinstance(node, dict)
        tree = merge(node, tree)
    return tree


def with_cleared(tree: Tree, clears: Mapping[str, str]) -> Tree:
    """The tree with None for each key that another one, given without it, makes void."""
    for key, other in clears.items():
        owner = tree
        *path, name = key.split(".")
        for step in path:
            child = owner.get(step)
            owner = child if isinstance(child, dict) else {}
        cause, cleared = owner.get(name), other.rpartition(".")[2]
        if isinstance(cause, Given) and cleared not in owner:
            node: Tree | Given = Given("", cause.origin, cause.layer)  # TOML's spelling of None here
            for step in reversed(other.split(".")):
                node = {step: node}
            tree = merge(tree, cast(Tree, node))
    return tree


def latest(node: Tree | Given) -> Given | None:
    """What the user wrote last in this part of the tree: the likeliest cause of an error in it."""
    if isinstance(node, Given):
        return node if node.layer > _DEFAULT_LAYER else None
    found = [given for given in map(latest, node.values()) if given is not None]
    return max(found, key=lambda given: given.layer, default=None)


T = TypeVar("T", bound="DataclassInstance")


def load(cls: type[T], files: Sequence[Path] = (), overrides: Sequence[str] = (), *, base: T | None = None) -> T:
    """The settings that defaults (those of ``base`` if given), TOML files and ``a.b=c`` overrides add up to.

    A class may have ``RENAMED``, a dict of old keys to new ones: old keys are accepted with a FutureWarning;
    ``RENAMED_VALUES``, by old key the values that are spelt otherwise now; and ``CLEARS``, a dict of keys, each with
    the one that becomes None if a file, or the overrides, have the first alone.
    """
    renamed: Mapping[str, str] = getattr(cls, "RENAMED", {})
    values: Mapping[str, Mapping[object, str]] = getattr(cls, "RENAMED_VALUES", {})
    clears: Mapping[str, str] = getattr(cls, "CLEARS", {})
    tree = default_kinds(cls, base)
    for layer, path in enumerate(files):
        tree = merge(tree, with_cleared(with_new_keys(read_file(path, layer), renamed, values), clears))
    # One layer for all overrides: "labeler.tau=1 labeler.kind=x" means the same in either order.
    flags: Tree = {}
    for override in overrides:
        flags = merge(flags, with_new_keys(parse_override(override, len(files)), renamed, values))
    reader = _Reader(cls, str(files[-1]) if files else "settings")
    return cast(T, reader.table(cls, merge(tree, with_cleared(flags, clears)), base, ""))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns a merged tree into dataclasses, and any mistake into a one-line error."""

    root: type[DataclassInstance]
    source: str  # named in errors that no single value caused

    def table(self, cls: type, node: Tree, base: object, key: str) -> object:
        """A dataclass from a table; missing keys come from ``base``, or from the defaults."""
        known = {field.name: field for field in init_fields(cls)}
        for name in node:
            if name not in known:
                raise self._unknown(cls, node, key, name)
        hints = field_hints(cls)
        values = {}
        for name, field in known.items():
            default, path = field_default(field, base), _join(key, name)
            if name in node:
                values[name] = self._value(hints[name], node[name], None if default is MISSING else default, path)
            else:
                values[name] = self._absent(hints[name], path) if default is MISSING else default
        try:
            return cls(**values)
        except (ValueError, UserError) as error:
            raise self._error(node, key, str(error)) from None

    def _absent(self, hint: Any, key: str) -> object:
        owner = only_table(hint)
        if owner is not None:
            return self.table(owner, {}, None, key)
        example = "" if shape_of(hint).tables else f"; set it in a file, or with --set {key}=..."
        raise UserError(f"{self.source}: missing key {key}: {type_name(hint)}{example}")

    def _value(self, hint: Any, node: Tree | Given, base: object, key: str) -> object:
        shape = shape_of(hint)
        if shape.optional and isinstance(node, Given) and node.value == "":
            return None
        is_table = bool(shape.tables or shape.plugin)
        if is_table and isinstance(node, Given):
            raise self._error(node, key, f"expected a table; set its keys one by one, such as {key}.{_first(shape)}")
        if is_table and isinstance(node, dict):
            member, kind = self._member(shape, node, base, key), node.get("kind")
            if isinstance(kind, Given) and ":" in str(kind.value):  # a class of another package needs no such field
                node = {name: child for name, child in node.items() if name != "kind"}
            return self.table(member, node, base if type(base) is member else None, key)
        if shape.item is not None and isinstance(node, Given) and isinstance(node.value, list):
            items = [wrap(item, node.origin, node.layer) for item in node.value]
            return tuple(self._value(shape.item, item, None, f"{key}.{i}") for i, item in enumerate(items))
        if shape.item is not None and shape_of(shape.item).plugin is not None:
            raise self._error(node, key, "expected a list of tables")
        return self._leaf(shape.bare, node, key)

    def _member(self, shape: Shape, node: Tree, base: object, key: str) -> type:
        """The dataclass of a table: the only candidate, the one of the given kind, or the type of ``base``."""
        kinds, given = by_kind(shape.tables), node.get("kind")
        choice = None if given is None else unwrap(given)
        if shape.plugin is not None and isinstance(choice, str) and ":" in choice:
            assert given is not None
            try:
                return settings_class(shape.plugin.group, choice)
            except UserError as error:
                raise self._error(given, f"{key}.kind", str(error)) from None
        if len(shape.tables) == 1 and shape.plugin is None:
            return shape.tables[0]
        if given is None and base is not None and (type(base) in shape.tables or shape.plugin):
            return type(base)
        if isinstance(choice, str) and choice in kinds:
            return kinds[choice]
        expected = " or ".join(map(toml, kinds)) + (', or "package.module:Name"' if shape.plugin else "")
        if given is None:
            raise self._error(node, key, f"missing key {key}.kind: {expected}")
        raise self._error(given, f"{key}.kind", f"must be {expected}{_guess(str(choice), kinds)}")

    def _leaf(self, hint: Any, node: Tree | Given, key: str) -> object:
        adapter: pydantic.TypeAdapter[object] = pydantic.TypeAdapter(hint, config=_FINITE)
        readings = [unwrap(node)]
        if isinstance(node, Given) and node.text is not None:
            readings.append(node.text)  # --set name=123 where a string is wanted: no shell quoting needed
        problems = []
        for reading in readings:
            try:
                # JSON mode: strict about types, yet lists become tuples and strings become paths.
                value = adapter.validate_json(json.dumps(reading, default=str), strict=True)
                if "<" in type_name(hint) or not _is_too_large(value):
                    return value
                problems.append(f"must be between -{LARGEST:,} and {LARGEST:,}")
            except pydantic.ValidationError as error:
                problems.append(_in_words(error))
        raise self._error(node, key, problems[0])

    def _error(self, node: Tree | Given, key: str, problem: str) -> UserError:
        given = latest(node)
        if given is None:
            parts = [self.source, key, problem]
        elif given.origin.startswith(f"--set {key}="):
            parts = [given.origin, problem]
        else:
            value = f" = {json.dumps(given.value, default=str, ensure_ascii=False)}" if given is node else ""
            parts = [given.origin, f"{key}{value}", problem]
        return _one_line(parts)

    def _unknown(self, cls: type, table: Tree, key: str, name: str) -> UserError:
        path, given = _join(key, name), latest(table[name])
        settings = describe(self.root)
        owners = [setting.kind for setting in settings if setting.key == path]
        if owners:
            kind = " or ".join(by_kind([cls]))
            problem = f"{path} is a setting of kind {' or '.join(owners)}, but {key}.kind is {kind}"
        else:
            problem = f"unknown key {path}; {_nearest(cls, [setting.key for setting in settings], path)}"
        return _one_line([given.origin if given else self.source, problem])


def _is_too_large(value: object) -> bool:
    if isinstance(value, tuple | list | dict):
        return any(map(_is_too_large, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float) and abs(value) > LARGEST


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _one_line(parts: Sequence[str]) -> UserError:
    return UserError(printable(" ".join(": ".join(part for part in parts if part).split()), LONGEST_LINE))


def _first(shape: Shape) -> str:
    names = [field.name for field in init_fields(shape.tables[0])]
    return next((name for name in names if name == "kind"), names[0] if names else "...")


def _guess(word: str, known: Sequence[str] | dict[str, type]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _nearest(cls: type, keys: Sequence[str], path: str) -> str:
    """The likeliest valid key: the same name elsewhere, a near name in the same table, a very near dotted name."""
    table, _, name = path.rpartition(".")
    siblings = [field.name for field in init_fields(cls)]
    near = [key for key in keys if key.rpartition(".")[2] == name]
    near += [_join(table, match) for match in difflib.get_close_matches(name, siblings, 1)]
    near += difflib.get_close_matches(path, keys, 1, cutoff=0.8)  # a shared table name alone already scores 0.6
    return f"did you mean {near[0]}?" if near else f"valid keys here: {', '.join(siblings) or 'none'}"


def _in_words(error: pydantic.ValidationError) -> str:
    messages = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        message = item["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
        places = [f"item {place + 1}: " for place in item["loc"] if isinstance(place, int)]
        messages.append("".join(places) + message)
    return " or ".join(dict.fromkeys(messages))
