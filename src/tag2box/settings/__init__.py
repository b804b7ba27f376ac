"""Settings: nested frozen dataclasses in, TOML files and ``--set a.b=c`` on top, every mistake in one line.

An owner writes a plain frozen dataclass and nothing else: constraints are ``Annotated[float, Field(gt=0)]``, a choice
between strategies is a union whose members carry ``kind: Literal[...]``, documentation is a string below the field.

Layers are merged left to right: defaults (or ``base``), files, then all overrides together. A layer that changes the
``kind`` of a table replaces that table. TOML has no null: in an optional field the empty string stands for None.
"""

from __future__ import annotations

from tag2box.settings.parse import load
from tag2box.settings.schema import Setting, describe, dump

__all__ = ["Setting", "describe", "dump", "load"]
