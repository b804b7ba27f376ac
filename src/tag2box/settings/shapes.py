"""What a settings class says about its fields: which are tables, which are leaves, and their defaults."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Shape:
    """How the type of a field is written in TOML: a table, a list of tables, or a leaf."""

    optional: bool
    tables: tuple[type, ...]  # the dataclasses a value may be; empty for a leaf
    item: Any  # the element type of a tuple of tables, else None
    bare: Any  # the type without None


def shape_of(hint: Any) -> Shape:
    """The shape of a type; a union must be all tables or all leaves."""
    core, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(core) in {Union, types.UnionType}:
        return _union_shape(core, notes)
    if is_dataclass(core):
        return Shape(False, (cast(type, core),), None, hint)
    elements = get_args(core) if get_origin(core) is tuple else ()
    repeats = len(elements) == 2 and elements[1] is Ellipsis
    return Shape(False, (), elements[0] if repeats and shape_of(elements[0]).tables else None, hint)


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
    """The fields that a user can set."""
    return [field for field in fields(cls) if field.init]


def field_hints(cls: type) -> dict[str, Any]:
    """The types of the fields, with their constraints."""
    return get_type_hints(cls, include_extras=True)


def field_default(field: Field[Any], base: object) -> object:
    """The value a field has where nobody sets it: that of ``base``, or its default, or MISSING."""
    if base is not None:
        return getattr(base, field.name)
    return field.default_factory() if field.default_factory is not MISSING else field.default


def by_kind(tables: Sequence[type]) -> dict[str, type]:
    """The members of a union by the names in their ``kind: Literal[...]``; {} for tables that have none."""
    hints = [(table, field_hints(table).get("kind")) for table in tables]
    return {name: table for table, kind in hints if kind is not None for name in get_args(kind)}
