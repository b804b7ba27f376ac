"""Write a CSV of tags from a dataset with boxes: the classes of each photo, without their locations.

    python examples/tags_from_voc.py VOC2007 train tags.csv

Works for a COCO file or a YOLO folder too. The photos stay in place: name their folder with --photos afterwards.
"""

import sys
from pathlib import Path

from tag2box.formats.csv_tags import write_tags
from tag2box.formats.datasets import read_tagged
from tag2box.formats.listing import DataSource


def main(data: Path, split: str, out: Path) -> None:
    """Write the table."""
    tagged = read_tagged(DataSource(path=data, split=split))
    rows = [
        (photo.path.name, [name for name, is_there in zip(tagged.classes, tags, strict=True) if is_there])
        for photo, tags in zip(tagged.photos, tagged.tags.tolist(), strict=True)
    ]
    write_tags(out, rows)
    print(f"{len(rows)} photos, {len(tagged.classes)} classes: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
