"""What merging the labels of several seeds gains, and whether the mean score of a class says how good its boxes are.

    python benchmarks/merged_labels.py measure voc07-mini labels-0 labels-1 labels-2 --split train --out voc.json
    python benchmarks/merged_labels.py summary voc.json fruit.json tile.json --out docs/results/merged-labels.json

``measure`` has the CorLoc of each label set and of all of them merged (`tag2box merge`) against the true boxes of the
photos, and the mean score of the best boxes of each class (``LabelledPhotos.best_scores``). ``summary`` joins such
files and has the rank correlation (Spearman) of mean score and CorLoc over all pairs of label set and class, over all
datasets and within each: a sign of quality that needs no boxes should be high in both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import StatisticsError, correlation
from typing import Any

from tag2box import io
from tag2box.annotations import Truth
from tag2box.formats.datasets import read_truth
from tag2box.formats.listing import DataSource
from tag2box.labels.agreement import class_agreement, merge_sets
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelledPhotos
from tag2box.metrics.voc_ap import corloc


def measure(name: str, sets: Sequence[LabelSet], truth: Truth) -> dict[str, Any]:
    """CorLoc and mean scores of label sets and, if there are several, of all of them merged."""
    uses = sorted({str(own.run.get("uses", "")) for own in sets})
    return {
        "data": name,
        "photos": len(sets[0].content),
        "uses": ", ".join(["tags", *filter(None, uses)]),
        "sets": [figures(own.content, truth) for own in sets],
        "merged": figures(merge_sets(sets), truth) if len(sets) > 1 else None,
        "agreement": {name: own.same for name, own in class_agreement(sets).items()} if len(sets) > 1 else None,
    }


def figures(content: LabelledPhotos, truth: Truth) -> dict[str, Any]:
    """CorLoc and mean score, by class."""
    found = corloc(truth, content.detections())
    return {"corloc": found.mean, "corloc_by_class": found.per_class(), "score_by_class": content.best_scores()}


def summary(pages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All pages, and how mean score and CorLoc go together."""
    points = {f"{page['data']}, {page['uses']}": pairs_of(page) for page in pages}
    every = [pair for own in points.values() for pair in own]
    return {
        "pages": list(pages),
        "pairs": len(every),
        "rank_correlation": rank_correlation(every),
        "rank_correlation_within": {name: rank_correlation(own) for name, own in points.items()},
    }


def pairs_of(page: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Mean score and CorLoc of every label set and class that have both."""
    rows = [(own["score_by_class"], own["corloc_by_class"]) for own in page["sets"]]
    return [
        (scores[name], right[name])
        for scores, right in rows
        for name in scores
        if scores[name] is not None and right.get(name) is not None
    ]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation, ties having their mean rank; None if there is none.

    >>> rank_correlation([(0.1, 5.0), (0.2, 6.0), (0.4, 60.0)])
    1.0
    """
    try:
        return correlation(*(ranks(values) for values in zip(*pairs, strict=True))) if pairs else None
    except StatisticsError:  # a single pair, or equal values
        return None


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value from 1; equal ones have the mean of theirs."""
    return [sum(x < own for x in values) + (values.count(own) + 1) / 2 for own in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("data", type=Path)
    one.add_argument("labels", type=Path, nargs="+")
    one.add_argument("--split")
    all_of = commands.add_parser("summary")
    all_of.add_argument("pages", type=Path, nargs="+")
    for own in (one, all_of):
        own.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "summary":
        page = summary([json.loads(path.read_text()) for path in args.pages])
        print(f"{page['pairs']} pairs: {page['rank_correlation']}; within: {page['rank_correlation_within']}")
    else:
        sets = [LabelSet.open(folder) for folder in args.labels]
        truth = read_truth(DataSource(path=args.data, split=args.split, classes=sets[0].classes))
        page = measure(args.data.name, sets, truth)
        rows = [*page["sets"], *([page["merged"]] if page["merged"] else [])]
        print("CorLoc of each, then merged:", [round(100 * own["corloc"], 1) for own in rows])
    io.write_json(args.out, page)


if __name__ == "__main__":
    main()
