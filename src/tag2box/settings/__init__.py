"""Settings: nested frozen dataclasses, overridden by TOML files and ``--set a.b=c``; every mistake is a one-line error.

A settings class is a plain frozen dataclass: constraints are ``Annotated[float, Field(gt=0)]``, documentation is a
string below the field, and a choice between strategies is ``Annotated[Protocol, Plugin("group")]``, whose members are
listed in ``tag2box.extend`` and named by ``kind``; a class of another package is ``kind = "package.module:Name"``.

Layers are merged left to right: defaults (or ``base``), files, then all overrides together. A layer that changes the
``kind`` of a table replaces that table. TOML has no null: in an optional field the empty string stands for None.
"""

from tag2box.settings.parse import load
from tag2box.settings.schema import Setting, describe, dump

__all__ = ["Setting", "describe", "dump", "load"]
