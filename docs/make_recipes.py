"""Write docs/recipes.md from the recipes and from what benchmarks/paper_steps.py measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tag2box.cli.catalog import RecipeRow, list_recipes
from tag2box.paper_runs import PAPER_DATASETS, PAPER_RUNS
from tag2box.recipes import RECIPES

PAGE = Path(__file__).parent / "recipes.md"
STEPS = Path(__file__).parent / "results" / "paper-steps.json"
COCO = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
HEAD = """\
# Recipes

This page is generated: `python docs/make_recipes.py` writes it, and a test fails if it is out of date.

A recipe is a function that returns a complete config. `tag2box recipes` lists all; with a name it prints one, as a file
for `--config`. `--recipe` starts a run from it, and `--set` overrides single settings:

```
tag2box recipes
tag2box recipes voc07-ss-vgg16
tag2box train VOC2007 --recipe voc07-ss-vgg16 --out runs/voc07
```

## Recipes of tag2box
"""
PAPER = """\
## Recipes of the paper

Four datasets, three proposal methods, three backbones. All have batch 8, SGD with momentum 0.9 and weight decay 1e-4,
short sides of 480, 576, 688, 864, 1000 and 1200 pixels with horizontal flips, tau_IoU 0.5, tau_drop 0.3, tau_nms 0.1,
epsilon 0.2, K = 3, and NMS at 0.4 over the detections of all scales, 800 and horizontal flips. VOC recipes use the list
`trainval`; COCO's use the file of the training set.

**What you provide.** Weights: `tag2box weights get vgg16`, or your file of R50-WS or R101-WS through
`tag2box weights convert` ([weights.md](weights.md)). Proposals: selective search is built in; MCG and COB come from
their authors, and a recipe that needs them fails before training if they are missing:

```
tag2box proposals import MCG-VOC2007 VOC2007 --split trainval --format mcg --out mcg
tag2box train VOC2007 --recipe voc07-mcg-vgg16 --proposals mcg --out runs/voc07-mcg
```

**Not stated in the paper**, and taken from descriptions of its published code or from common practice: the warm-up
(200 iterations from a third), the steps of the learning rate, the background column of the MIL head
(`heads.mil_background = true`), weight 3 of stage 1, dropout (0.5), the mode of selective search (fast), test scale
800. Its table 3b does not name its proposals; they are MCG's by its section 5.2. Its ResNets on COCO are called R50
and R101 there, and R50-WS and R101-WS in its section 5.1; figures are listed with the latter. COB was trained with
annotated boundaries, so its rows are not supervised by tags alone.

Figures are the paper's, in per cent; a dash means not reported.
"""
COST = """\
## Cost of a run

Two real steps of every backbone at full size: generated photos, one step with short sides of 480 pixels and one of
1,200, 2,000 proposals each, random weights, exact memory, no GPU (`python benchmarks/paper_steps.py`; with
`--photos 1`, of one photo). Recipes that differ in proposals or length share a step. Days are for the whole run on this
machine: 8 photos per iteration, with a time linear in pixels through both steps, at the mean size of padded batches. If
a step had one photo, its fixed cost (such as the optimizer's) is counted for every photo, so the days are an upper
estimate. In any case these recipes need a GPU; on a CPU use `photos`.
"""


def page() -> str:
    """The whole page."""
    rows = {row.name: row for row in list_recipes()}
    parts = [HEAD, *_ours(rows), PAPER, *_voc(rows), *_coco(rows), COST, *_cost()]
    return "\n".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _ours(rows: dict[str, RecipeRow]) -> Iterator[str]:
    own = [row.cells()[:7] for name, row in rows.items() if name not in PAPER_RUNS]
    docs = [(RECIPES[name].__doc__ or "").split("\n")[0] for name in rows if name not in PAPER_RUNS]
    header = ("recipe", "backbone", "boxes", "batch", "lr", "iterations", "lambda", "what for")
    yield _table(header, [(f"`{cells[0]}`", *cells[1:], doc) for cells, doc in zip(own, docs, strict=True)])


def _settings(row: RecipeRow) -> list[str]:
    steps = PAPER_DATASETS[PAPER_RUNS[row.name].dataset].steps
    cuts = " and ".join(f"{round(share * row.iterations):,}" for share in steps)
    return [f"`{row.name}`", f"{row.lr:g}", f"{row.iterations:,}", cuts, f"{row.contrast_weight:g}"]


def _voc(rows: dict[str, RecipeRow]) -> Iterator[str]:
    header = ("recipe", "lr", "iterations", "lr / 10 at", "lambda", "mAP50", "CorLoc", "where")
    yield _table(header, [_line(row, ("mAP50", "CorLoc")) for name, row in rows.items() if name.startswith("voc")])


def _coco(rows: dict[str, RecipeRow]) -> Iterator[str]:
    header = ("recipe", "lr", "iterations", "lr / 10 at", "lambda", *COCO, "where")
    yield _table(header, [_line(row, COCO) for name, row in rows.items() if name.startswith("coco")])


def _line(row: RecipeRow, names: Sequence[str]) -> list[str]:
    reported = row.figures.reported()
    values = [f"{reported[name]:.1f}" if name in reported else "-" for name in names]
    return [*_settings(row), *values, row.figures.source if reported else "-"]


def _cost() -> Iterator[str]:
    if not STEPS.exists():
        yield "Not measured yet.\n"
        return
    found = json.loads(STEPS.read_text(encoding="utf-8"))
    machine = found["machine"]
    yield (
        f"Measured on {machine['cpu']}, {machine['threads']} threads, {machine['memory_gb']:.0f} GB, "
        f"{machine['gemm_gflops']:.0f} GFLOP/s.\n"
    )
    header = ("step", "photos", "padded to", "seconds", "peak memory")
    yield _table(header, [_step(row) for row in found["steps"]])
    runs = [(f"`{run['recipe']}`", f"{run['iterations']:,}", _days(run["days"])) for run in found["runs"]]
    yield _table(("recipe", "iterations", "whole run"), runs)


def _step(row: dict[str, Any]) -> list[str]:
    name, batch = row["family"], str(row["batch"])
    if not row["fits"]:
        return [name, batch, "-", "-", "more than there was"]
    padded = " and ".join(f"{height} x {width}" for height, width in row["padded"])
    seconds = " and ".join(f"{s:,.0f}" for s in row["seconds"])
    return [name, batch, padded, seconds, f"{row['peak_mb']:,.0f} MB"]


def _days(days: float | None) -> str:
    return "not measured" if days is None else f"{days:,.0f} days"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
