"""The schema of settings classes (tables, leaves, kinds, defaults), and settings as TOML text."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from tag2box.extend import Plugin

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Shape:
    """How the type of a field is written in TOML: a table, a list of tables, or a leaf."""

    optional: bool
    tables: tuple[type, ...]  # the dataclasses a value may be; empty for a leaf
    item: Any  # the element type of a tuple of tables, else None
    bare: Any  # the type without None
    plugin: Plugin | None = None  # set for a field that also takes classes of other packages


def shape_of(hint: Any) -> Shape:
    """The shape of a type; a union must be all tables or all leaves."""
    core, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    plugin = next((note for note in notes if isinstance(note, Plugin)), None)
    if plugin is not None:
        return Shape(False, tuple(dict.fromkeys(plugin.built_in().values())), None, hint, plugin)
    if get_origin(core) in {Union, types.UnionType}:
        return _union_shape(core, notes)
    if is_dataclass(core):
        return Shape(False, (cast(type, core),), None, hint)
    elements = get_args(core) if get_origin(core) is tuple else ()
    repeats = len(elements) == 2 and elements[1] is Ellipsis
    is_tables = repeats and (shape_of(elements[0]).tables or shape_of(elements[0]).plugin)
    return Shape(False, (), elements[0] if is_tables else None, hint)


def _union_shape(union: Any, notes: Sequence[object]) -> Shape:
    members = [member for member in get_args(union) if member is not types.NoneType]
    optional = len(members) < len(get_args(union))
    bare: Any = Union[tuple(members)]  # noqa: UP007 - built at run time; of one member it is that member
    inner = [shape_of(member) for member in members]
    tables = tuple(table for shape in inner for table in shape.tables)
    if tables and not all(shape.tables for shape in inner):
        raise TypeError(f"{union}: a union of settings holds dataclasses or leaves, not both")
    item = inner[0].item if len(inner) == 1 else None
    return Shape(optional, tables, item, Annotated[(bare, *notes)] if notes else bare)


def only_table(hint: Any) -> type | None:
    """The one dataclass that a field must be, so that a file may leave it out and have its defaults."""
    shape = shape_of(hint)
    return shape.tables[0] if len(shape.tables) == 1 and not shape.optional else None


def init_fields(cls: Any) -> list[Field[Any]]:
    """The fields that can be set."""
    return [field for field in fields(cls) if field.init]


def field_hints(cls: type) -> dict[str, Any]:
    """The types of the fields, with their constraints."""
    return get_type_hints(cls, include_extras=True)


def field_default(field: Field[Any], base: object) -> object:
    """The default of a field: its value in ``base``, or its own default, or MISSING."""
    if base is not None:
        return getattr(base, field.name)
    return field.default_factory() if field.default_factory is not MISSING else field.default


def by_kind(tables: Sequence[type]) -> dict[str, type]:
    """The members of a union by the names in their ``kind: Literal[...]``; {} for tables that have none."""
    hints = [(table, field_hints(table).get("kind")) for table in tables]
    return {name: table for table, kind in hints if kind is not None for name in get_args(kind)}


_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="), ("multiple_of", "multiple of"))


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of a settings class as text, for documentation and ``--help``."""

    key: str
    kind: str  # the member of the nearest union it belongs to, or ""
    type: str
    default: str | None  # as TOML; None if a value is required
    doc: str


def dump(value: DataclassInstance) -> str:
    """The settings as TOML text that ``load`` reads back to an equal value, each field under its documentation."""
    return "\n".join(_table_lines(value, "")).strip() + "\n"


def _table_lines(value: DataclassInstance, path: str, kind: str | None = None) -> Iterator[str]:
    """The lines of a table. ``kind`` is given for classes of other packages, which need no field of that name."""
    docs, hints = field_docs(type(value)), field_hints(type(value))
    if kind is not None:
        yield f"kind = {toml(kind)}"
    items = [(field.name, getattr(value, field.name)) for field in init_fields(value)]
    for name, item in items:
        if not is_dataclass(item) and not (name == "kind" and kind is not None):
            yield from _comment(docs.get(name, ""))
            element = shape_of(hints[name]).item
            yield f"{name} = {toml(item if element is None else [_inline(part, shape_of(element)) for part in item])}"
    for name, item in items:  # sub-tables last: in TOML a key after them would be theirs
        if is_dataclass(item) and not isinstance(item, type):
            inner = f"{path}.{name}".lstrip(".")
            yield ""
            yield from _comment(docs.get(name, ""))
            yield f"[{inner}]"
            yield from _table_lines(item, inner, outside_kind(shape_of(hints[name]), item))


def outside_kind(shape: Shape, part: object) -> str | None:
    """``package.module:Name`` for a part of another package; None for a built-in one."""
    kind = None if shape.plugin is None else shape.plugin.kind_of(part)
    return kind if kind is not None and ":" in kind else None


def _inline(part: object, shape: Shape) -> object:
    """An element of a list of tables, with its kind if it comes from another package."""
    kind = outside_kind(shape, part)
    fields = {field.name: getattr(part, field.name) for field in init_fields(part)}
    return part if kind is None else {**fields, "kind": kind}


def _comment(doc: str) -> list[str]:
    return textwrap.wrap(doc, 110, initial_indent="# ", subsequent_indent="# ")


def toml(value: object) -> str:
    """One value as inline TOML; None is the empty string."""
    match value:
        case None:
            return '""'
        case bool():
            return str(value).lower()
        case Enum():
            return toml(value.value)
        case int() | float():
            return repr(value)
        case str() | Path():
            # The escapes of JSON are escapes of TOML; only DEL, which JSON lets through, TOML does not.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple() | list():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            return f"{{{', '.join(f'{_key(name)} = {toml(item)}' for name, item in value.items())}}}"
        case _ if is_dataclass(value):
            return toml({field.name: getattr(value, field.name) for field in init_fields(value)})
    raise TypeError(f"{type(value).__name__} has no form in TOML")


def _key(name: object) -> str:
    return str(name) if re.fullmatch(r"[A-Za-z0-9_-]+", str(name)) else toml(str(name))


def describe(cls: type[DataclassInstance]) -> list[Setting]:
    """Every setting of a class by dotted key, the members of its unions included."""
    return list(_describe(cls, None, prefix="", kind=""))


def _describe(cls: type, base: object, *, prefix: str, kind: str) -> Iterator[Setting]:
    hints, docs = field_hints(cls), field_docs(cls)
    for field in init_fields(cls):
        key, doc = f"{prefix}{field.name}", docs.get(field.name, "")
        default = field_default(field, base)
        shape = shape_of(hints[field.name])
        if not shape.tables:
            text = None if default is MISSING else toml(default)
            yield Setting(key, kind, type_name(hints[field.name]), text, doc)
            continue
        for table in shape.tables:
            member = "/".join(by_kind([table])) if len(shape.tables) > 1 else kind
            instance = default if type(default) is table else None
            yield from _describe(table, instance, prefix=f"{key}.", kind=member)


def type_name(hint: Any) -> str:
    """A type as users read it, with its bounds: ``float > 0, < 1``."""
    shape = shape_of(hint)
    if shape.optional:
        return f'{type_name(shape.bare)} or "" for none'
    if get_origin(hint) is Annotated:
        core, *notes = get_args(hint)
        found = [note for outer in notes for note in (outer, *getattr(outer, "metadata", ()))]
        bounds = [f"{sign} {getattr(note, name)}" for note in found for name, sign in _BOUNDS if _has(note, name)]
        return f"{type_name(core)} {', '.join(bounds)}".strip()
    arguments = get_args(hint)
    if get_origin(hint) in {Union, UnionType}:
        return " or ".join(map(type_name, arguments))
    if get_origin(hint) is Literal:
        return " or ".join(map(toml, arguments))
    if get_origin(hint) is tuple:
        every = [type_name(argument) for argument in arguments if argument is not Ellipsis]
        return f"list of {every[0]}" if Ellipsis in arguments else f"[{', '.join(every)}]"
    return {"str": "string", "bool": "true or false"}.get(name := getattr(hint, "__name__", str(hint)), name.lower())


def _has(note: object, name: str) -> bool:
    return getattr(note, name, None) is not None


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, on one line; {} if the source is not available."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not is_dataclass(owner):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        except (OSError, TypeError, SyntaxError):
            continue
        docs |= _docs_below(tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else [])
    return docs


def _docs_below(body: list[ast.stmt]) -> dict[str, str]:
    docs = {}
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = " ".join(doc.split())
    return docs
