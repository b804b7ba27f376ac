"""Write docs/settings.md from the settings classes: ``python docs/make_settings.py``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from tag2box import settings
from tag2box.paper_runs import PAPER_RUNS
from tag2box.recipes import RECIPES, Config
from tag2box.settings.schema import toml
from tag2box.student.student_training import StudentConfig

PAGE = Path(__file__).parent / "settings.md"
HEAD = """\
# Settings

This page is generated: `python docs/make_settings.py` writes it, and a test fails if it is out of date.

A run is defined by one nested value, `tag2box.Config`. It is put together from three sources; later ones win:

1. a recipe, `--recipe photos` (the default), `od-wscl`, `oicr-plus`, `scenes` or one of the paper's
   ([recipes.md](recipes.md)): a function in `src/tag2box/recipes.py` that returns a complete config;
2. TOML files, `--config mine.toml`, repeatable;
3. `--set key=value` on the command line, repeatable. Quotes around a string may be left out.

```toml
# mine.toml
[plan]
iterations = 2000

[criterion.labeler]
kind = "discovery"
nms_iou = 0.2
```

```
tag2box train tags.csv --photos photos --config mine.toml --set plan.seed=1 --out runs/mine
```

TOML has no null: in an optional field, `""` stands for none. In a table with a `kind`, changing the kind resets the
other keys to their defaults. A `kind` is one of those below or `package.module:Name` of your own
([adding-a-labeler.md](adding-a-labeler.md) and the other guides). A wrong key, type or bound is an error of one line,
which names the place and the nearest valid key. Numbers are finite, and between -1e9 and 1e9 unless other bounds are
named. Keys of version 0.1 are still read; a warning names the new ones. All settings of a run, with comments, are in
its `config.toml`, which is a valid `--config` file. A run is not resumed if they were edited there.
"""
STUDENT = """\
## Settings of a student

`tag2box student` ([student.md](student.md)) has settings of its own, `tag2box.StudentConfig`, from `--config` and
`--set`. Those of a `backbone` and of `inference` are the same as above; a student has no `inference.prior`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, *_tables(Config), "## What the recipes change\n", _recipes(), STUDENT, *_tables(StudentConfig, "#")]
    return "\n".join(parts)


def _tables(of: type, level: str = "") -> Iterator[str]:
    """A table for each group of keys; members of a choice have tables of their own."""
    groups: dict[tuple[str, str], list[settings.Setting]] = {}
    for setting in settings.describe(of):
        groups.setdefault((setting.key.rpartition(".")[0], setting.kind), []).append(setting)
    for (prefix, kind), group in groups.items():
        title = f"`{prefix}`" if prefix else "The run itself"
        yield f"{level}## {title}" + (f', `kind = "{kind}"`' if kind else "") + "\n"
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        for setting in group:
            cells = (f"`{setting.key}`", setting.type, _default(setting.default), setting.doc.replace("``", "`"))
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def _default(text: str | None) -> str:
    if text is None:
        return "required"
    return "none" if text == '""' else f"`{text}`"


def _recipes() -> str:
    """The settings in which each of our recipes differs from the defaults, which are those of ``od-wscl``."""
    plain = _leaves(Config())
    lines = ["| recipe | key | value |", "|---|---|---|"]
    for name, recipe in ((name, recipe) for name, recipe in RECIPES.items() if name not in PAPER_RUNS):
        own = _leaves(recipe())
        changed = [key for key in sorted(own) if own[key] != plain.get(key)]
        lines += [f"| `{name}` | `{key}` | `{toml(own[key])}` |" for key in changed]
        lines += [] if changed else [f"| `{name}` | nothing | |"]
    return "\n".join(lines) + "\n"


def _leaves(config: Config) -> dict[str, object]:
    """Dotted keys and values."""
    found: dict[str, object] = {}
    pending: list[tuple[str, object]] = [("", tomllib.loads(settings.dump(config)))]
    while pending:
        prefix, value = pending.pop(0)
        if isinstance(value, dict):
            pending += [(f"{prefix}.{name}".lstrip("."), item) for name, item in value.items()]
        else:
            found[prefix] = value
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
