"""The corpus of the fuzzer: small intact files of every format, and the commands that read them.

The network is the tiny one of the tests, and architectures of weight files are narrow, so that a command takes a tenth
of a second; everything else is the real program.
"""

import contextlib
import json
import pickle
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tag2box import recipes, runs, settings, storage
from tag2box.labels.journal import Journal
from tag2box.labels.label_set import LabelSet
from tag2box.labels.reviews import Action, BoxState
from tag2box.models.weights import weight_cache
from tag2box.proposals.store import ProposalStore
from tag2box.training import checkpoint, events

sys.path.insert(0, f"{Path(__file__).resolve().parents[1] / 'tests'}")

CLASSES = ("disc", "box", "bar")
PHOTOS = ("photo0.jpg", "photo1.jpg", "photo2.png", "photo3.png")
BOXES = {
    0: [[4, 6, 20, 26], [26, 6, 42, 26]],
    1: [[4, 7, 20, 27]],
    2: [[4, 8, 20, 28]],
    3: [[4, 9, 20, 29], [26, 9, 42, 29]],
}
LABELS = {0: [0, 1], 1: [1], 2: [2], 3: [0, 1]}
SETTINGS = (
    "heads.embed_dim=6", "proposals.min_side=6", "proposals.max_boxes=12", "loader.batch_size=2",
    "loader.resize.scales=[48]", "loader.workers=0", "inference.scales=[48]", "plan.iterations=2", "plan.log_every=1",
    "plan.checkpoint_every=1", "plan.gallery=2", "plan.schedule.warmup=1",
)  # fmt: skip
SET = tuple(word for setting in SETTINGS for word in ("--set", setting))
STUDENT_SET = (
    "--set", "plan.iterations=2", "--set", "plan.batch_size=2", "--set", "augmentation.sides=[32]", "--set",
    "network.width=8", "--photos", "photos",
)  # fmt: skip
SLOW_SETTINGS = (
    "plan.iterations", "loader.batch_size", "loader.views_per_image", "loader.workers", "compute.", "data.", "name",
    "feature_cache",
)  # fmt: skip
"""Prefixes of settings that are not edited: large values are meant to take long, or are paths."""


@dataclass(frozen=True)
class Scenario:
    """A command on intact files: what it reads, what may be edited and what it writes."""

    command: str  # as the table names it
    argv: tuple[str, ...]  # relative to the working folder
    inputs: tuple[str, ...]  # of the corpus, copied into the working folder
    targets: tuple[str, ...]  # patterns of the files of which one is edited
    outputs: Mapping[str, str] = field(default_factory=dict)  # path -> how it is opened, see OPENERS
    share: int = 2  # how often it is drawn
    changes: tuple[str, ...] = ()  # inputs that the command may write to
    has_settings: bool = False  # whether --set is edited, too
    is_refused: bool = False  # even intact: the file is not that of the zoo


def scenarios() -> list[Scenario]:
    """All commands on all formats that they read."""
    lists = [Scenario(name, (name, of), (), (), share=1) for name, of in (("systems", "oicr"), ("recipes", "scenes"))]
    return [*_data(), *_proposals(), *_training(), *_results(), *_labels(), *_weights(), *_studies(), *lists]


def _data() -> list[Scenario]:
    every = {
        "csv": (("tags.csv", "--photos", "photos"), ("tags.csv", "photos"), ("tags.csv", "tags.csv", "photos/*")),
        "coco": (("coco.json", "--photos", "photos"), ("coco.json", "photos"), ("coco.json",)),
        "voc": (("voc", "--split", "train"), ("voc",), ("voc/Annotations/*", "voc/ImageSets/Main/*")),
        "yolo": (("yolo", "--split", "train"), ("yolo",), ("yolo/data.yaml", "yolo/labels/train/*")),
        "folders": (("folders",), ("folders",), ("folders/*/*",)),
    }
    found = []
    for argv, inputs, targets in every.values():
        found += [
            Scenario(
                "data check", ("data", "check", *argv, "--json", "out.json"), inputs, targets, {"out.json": "json"}
            ),
            Scenario(
                "data stats",
                ("data", "stats", *argv, "--out", "page.html", "--json", "out.json"),
                inputs,
                targets,
                {"out.json": "json", "page.html": "html"},
            ),
            Scenario(
                "train",
                ("train", *argv, "--recipe", "scenes", "--out", "run", *SET),
                inputs,
                targets,
                {"run": "run"},
                1,
                has_settings=True,
            ),
        ]
    return found


def _proposals() -> list[Scenario]:
    imports = [
        Scenario(
            "proposals import",
            ("proposals", "import", name, "photos", "--out", "made"),
            (name, "photos"),
            (f"{name}/*",) if name == "mcg" else (name,),
            {"made": "store"},
            3,
        )
        for name in ("boxes.mat", "mcg", "boxes.npz", "boxes.pkl", "boxes-coco.json", "boxes-by-image.json")
    ]
    return [
        *imports,
        Scenario(
            "propose",
            ("propose", "photos", "--out", "made", "--short-side", "48", "--max-boxes", "12", "--min-side", "6"),
            ("photos",),
            ("photos/*",),
            {"made": "store"},
            4,
        ),
        Scenario(
            "propose",
            ("propose", "photos", "--out", "store", "--short-side", "144", "--max-boxes", "12", "--min-side", "6"),
            ("photos", "store"),
            ("store/*",),
            {},
            3,
            ("store",),
        ),
        Scenario(
            "proposals recall",
            (
                "proposals",
                "recall",
                "coco.json",
                "store",
                "--photos",
                "photos",
                "--out",
                "page.html",
                "--json",
                "out.json",
            ),
            ("coco.json", "photos", "store"),
            ("store/*", "store/*", "coco.json"),
            {"page.html": "html", "out.json": "json"},
            4,
        ),
    ]


def _training() -> list[Scenario]:
    limits = ("plan.iterations=2", "loader.batch_size=2", "loader.views_per_image=1")  # of an edited file, too
    config = ("train", "--config", "config.toml", "--out", "run", *(w for limit in limits for w in ("--set", limit)))
    return [
        Scenario(
            "train",
            config,
            ("config.toml", "tags.csv", "photos"),
            ("config.toml",),
            {"run": "run"},
            8,
            has_settings=True,
        ),
        Scenario(
            "train",
            (*config, "--proposals", "store"),
            ("config.toml", "tags.csv", "photos", "store"),
            ("store/*", "photos/*"),
            {"run": "run"},
            4,
            ("store",),
            has_settings=True,
        ),
        Scenario(
            "train --resume",
            ("train", "--out", "run", "--resume"),
            ("run", "tags.csv", "photos"),
            ("run/*", "run/*/*", "run/state.json", "run/events.jsonl", "tags.csv", "photos/*"),
            {},
            10,
            ("run",),
        ),
    ]


def _results() -> list[Scenario]:
    detect = ("detect", "run", "photos", "--min-score", "0", "--draw", "drawn")
    run = ("run", "tags.csv", "photos")
    targets = ("run/*", "run/checkpoint*/*", "photos/*", "photos/*")
    truth = ("evaluate", "--truth")
    return [
        Scenario("detect", (*detect, "--out", "out.json"), run, targets, {"out.json": "json", "drawn": "pictures"}, 6),
        Scenario(
            "detect",
            (*detect, "--out", "out", "--format", "voc", "--voc", "server"),
            run,
            targets,
            {"out": "folder", "server": "folder", "drawn": "pictures"},
            3,
        ),
        Scenario(
            "detect",
            (*detect, "--out", "out.json", "--proposals", "store"),
            (*run, "store"),
            ("store/*",),
            {"out.json": "json"},
            2,
            ("store",),
        ),
        Scenario(
            "evaluate",
            (*truth, "coco.json", "--detections", "found.json", "--json", "out.json"),
            ("coco.json", "found.json"),
            ("coco.json", "found.json"),
            {"out.json": "json"},
            6,
        ),
        Scenario(
            "evaluate",
            (*truth, "voc", "--split", "train", "--detections", "found-voc", "--json", "out.json"),
            ("voc", "found-voc"),
            ("found-voc/*", "voc/Annotations/*", "voc/ImageSets/Main/*"),
            {"out.json": "json"},
            4,
        ),
        Scenario(
            "evaluate",
            (*truth, "yolo", "--split", "train", "--detections", "found-voc"),
            ("yolo", "found-voc"),
            ("yolo/labels/train/*", "yolo/data.yaml"),
        ),
        Scenario(
            "report",
            ("report", "run", "--out", "page.html"),
            run,
            ("run/*", "run/events.jsonl", "tags.csv"),
            {"page.html": "html"},
            5,
            ("run",),
        ),
        Scenario(
            "report",
            ("report", "run", "--out", "page.html", "--test-truth", "coco.json", "--test-photos", "photos"),
            (*run, "coco.json"),
            ("coco.json", "run/*", "run/checkpoint*/*"),
            {"page.html": "html", "test-proposals": "store"},
            3,
            ("run",),
        ),
        Scenario(
            "push", ("push", "run", "owner/name", "--out", "out"), run, ("run/*", "run/*/*"), {"out": "folder"}, 3
        ),
        Scenario("doctor", ("doctor", "run"), run, ("run/*", "run/*/*"), {}, 3),
        Scenario("doctor", ("doctor", "store"), ("store",), ("store/*",), {}, 2),
    ]


def _labels() -> list[Scenario]:
    run = ("run", "tags.csv", "photos")
    sources = {
        "coco": ("coco.json",), "cvat": ("cvat/annotations.xml",), "labelstudio": ("labelstudio/*",),
        "fiftyone": ("fiftyone/classifications.json", "fiftyone/labels.json"), "xanylabeling": ("xanylabeling/*.json",),
        "csv": ("boxes.csv",), "voc": ("voc/Annotations/*",), "yolo": ("yolo/labels/train/*", "yolo/data.yaml"),
        "labels": ("labels/*",),
    }  # fmt: skip
    made = {"coco": "csv", "cvat": "yolo", "labelstudio": "voc", "fiftyone": "cvat", "xanylabeling": "labelstudio"}
    found = []
    for name, targets in sources.items():
        place = {"coco": "coco.json", "csv": "boxes.csv", "fiftyone": targets[0]}.get(name, name)
        photos = ("--photos", "photos") if name in {"coco", "csv", "labelstudio", "labels"} else ()
        inputs = tuple(dict.fromkeys((place.partition("/")[0], *(("photos",) if photos else ()))))
        argv = ("convert", place, "out", "--to", made.get(name, "xanylabeling"), *photos)
        found.append(Scenario("convert", argv, inputs, targets, {"out": "folder"}, 3))
    label = ("label", "run", "tags.csv", "--photos", "photos", "--out", "out", "--boxes-of-other-classes")
    targets = ("tags.csv", "photos/*", "run/*", "run/checkpoint*/*")
    found.append(Scenario("label", label, run, targets, {"out": "labels"}, 6))
    merge = ("merge", "labels", "reviewed", "--photos", "photos", "--out", "out")
    both = ("labels/*", "reviewed/*", "reviewed/reviews.jsonl")
    found.append(Scenario("merge", merge, ("labels", "reviewed", "photos"), both, {"out": "labels"}, 4))
    student = ("student", "labels", "--out", "run", *STUDENT_SET)
    found.append(Scenario("student", student, ("labels", "photos"), ("labels/*", "photos/*"), {"run": "run"}, 3))
    reviewed = ("reviewed/*", "reviewed/reviews.jsonl")
    trust = ("trust", "reviewed", "--photos", "photos", "--out", "page.html")
    found.append(Scenario("trust", trust, ("reviewed", "photos"), reviewed, {"page.html": "html"}, 6, ("reviewed",)))
    review = ("review", "reviewed", "--photos", "photos", "--no-browser", "--reviewer", "Ada")
    found.append(Scenario("review", review, ("reviewed", "photos"), (*reviewed, "photos/*"), {}, 6, ("reviewed",)))
    export = ("export", "labels", "--photos", "photos", "--format", "yolo", "--splits", "train=1,val=1", "--out", "out")
    found.append(Scenario("export", export, ("labels", "photos"), ("labels/*", "photos/*"), {"out": "folder"}, 6))
    return found


def _weights() -> list[Scenario]:
    found = [
        Scenario("weights convert", ("weights", "convert", name, *more), (name,), (name,), {"home": "weights"}, 3)
        for name, more in (
            ("weights.pth", ("--preprocess", "caffe")),
            ("weights.safetensors", ("--preprocess", "caffe")),
            ("weights.pkl", ()),
            ("legacy.pth", ("--preprocess", "caffe")),
        )
    ]
    found.append(Scenario("weights list", ("weights", "list"), ("home",), ("home/weights/*",), {}, 3))
    found.append(Scenario("weights get", ("weights", "get", "lite0"), (), (), {"home": "weights"}, 1))
    found.append(
        Scenario(
            "weights get",
            ("weights", "get", "vgg16", "--file", "weights.pth"),
            ("weights.pth",),
            ("weights.pth",),
            {"home": "weights"},
            1,
            is_refused=True,
        )
    )
    return found


def _studies() -> list[Scenario]:
    more = ("--seeds", "0", "--out", "study", "--recipe", "scenes", *SET)
    voc = ("--on", "voc", "--split", "first", "--test-split", "last", "--classes", ",".join(CLASSES))
    targets = ("voc/Annotations/*", "voc/ImageSets/Main/*", "voc/JPEGImages/*")
    return [
        Scenario(
            "compare",
            ("compare", "--systems", "oicr", *voc, *more),
            ("voc",),
            targets,
            {"study": "folder"},
            2,
            has_settings=True,
        ),
        Scenario(
            "reproduce",
            ("reproduce", "table3a", "--row", "OICR+", *voc, *more),
            ("voc",),
            targets,
            {"study": "folder"},
            1,
            has_settings=True,
        ),
    ]


# ---------------------------------------------------------------- outputs


def open_output(kind: str, path: Path) -> None:
    """Raise if an output that exists cannot be opened."""
    OPENERS[kind](path)


def _open_json(path: Path) -> None:
    json.loads(path.read_text(encoding="utf-8"))


def _open_html(path: Path) -> None:
    if not path.read_text(encoding="utf-8").rstrip().endswith("</html>"):
        raise ValueError("the page is cut short")


def _open_pictures(path: Path) -> None:
    for file in path.iterdir():
        with Image.open(file) as image:
            image.load()


def _open_store(path: Path) -> None:
    if (path / "parts").is_dir():  # unfinished: the same command resumes
        return
    store = ProposalStore.open(path)
    for photo in store.spans:
        store.boxes(photo)
        store.scores(photo)


def _open_run(path: Path) -> None:
    if (path / runs.CONFIG_FILE).exists():
        runs.read_any_config(path)
    if (path / events.EVENTS_FILE).exists():
        list(events.read_events(path))
    if checkpoint.has_checkpoint(path):
        runs.open_run(path)


def _open_weights(path: Path) -> None:
    weights = path / "weights"
    for file in weights.glob("*.safetensors") if weights.is_dir() else ():
        weight_cache.verify(file)


OPENERS: dict[str, Callable[[Path], None]] = {
    "json": _open_json, "html": _open_html, "pictures": _open_pictures, "store": _open_store, "run": _open_run,
    "weights": _open_weights, "labels": lambda path: None if not path.exists() else LabelSet.open(path).verify(),
    "folder": lambda path: None,
}  # fmt: skip


# ---------------------------------------------------------------- digests


def reseal(path: Path) -> None:
    """Update the digests of an edited file of ours, as a forger would: else only the check of digests is tested."""
    with contextlib.suppress(ValueError, TypeError, KeyError, OSError, RecursionError):
        if path.suffix == ".json":
            _write_sealed(path, json.loads(path.read_text(encoding="utf-8")))
        for beside in (path.parent / "index.json", path.with_suffix(".json")):
            if path.suffix in {".npy", ".safetensors"} and beside.exists():
                _update_digest_of(path, beside)
        manifest = path.parent / storage.MANIFEST
        if manifest.exists():
            if path != manifest:
                known = json.loads(manifest.read_text(encoding="utf-8"))
                storage.write_manifest(
                    path.parent, {name: value for name, value in known.items() if name not in {"files", "sha256"}}
                )
            state = json.loads((path.parent.parent / checkpoint.STATE).read_text(encoding="utf-8"))
            _write_sealed(path.parent.parent / checkpoint.STATE, {**state, "manifest": storage.file_digest(manifest)})


def _write_sealed(path: Path, value: Any) -> None:
    if isinstance(value, dict) and "sha256" in value and "original_sha256" not in value:
        del value["sha256"]
        value["sha256"] = storage._json_digest(value)
        path.write_text(json.dumps(value), encoding="utf-8", errors="surrogatepass")


def _update_digest_of(path: Path, beside: Path) -> None:
    value = json.loads(beside.read_text(encoding="utf-8"))
    if "original_sha256" in value:  # stored weights
        beside.write_text(json.dumps({**value, "sha256": storage.file_digest(path)}), encoding="utf-8")
        return
    what = path.stem.partition("-")[0]
    value["arrays"][what] = storage.BlockDigests.of_file(path, int(value["arrays"][what]["block"])).to_json()
    _write_sealed(beside, value)


# ---------------------------------------------------------------- intact files


def tiny_program() -> None:
    """Let this process build the tiny network, and narrow architectures; the review page is not served."""
    patch = pytest.MonkeyPatch()
    patch.setattr("tag2box.review.server.serve", lambda *_: None)  # it reads and checks everything, then ends
    import_module("tiny_world").small_network(patch)
    import_module("fake_weights").shrink(patch)


def write_corpus(folder: Path, run: Callable[[Path, tuple[str, ...]], int]) -> None:
    """Write every file; ``run`` is a command in a folder, and returns its exit code."""
    folder.mkdir(parents=True)
    _photos(folder)
    _tags(folder)
    _voc(folder)
    _yolo(folder)
    _boxes(folder)
    _weight_files(folder)
    data = ("data.tags=tags.csv", "data.photos=photos")
    config = settings.load(recipes.Config, [], [*SETTINGS, *data], base=recipes.scenes())
    (folder / "config.toml").write_text(settings.dump(config), encoding="utf-8")
    for argv in (
        ("propose", "photos", "--out", "store", "--short-side", "144", "--max-boxes", "12", "--min-side", "6"),
        ("train", "--config", "config.toml", "--out", "run"),
        ("weights", "convert", "weights.pkl"),
        ("label", "run", "tags.csv", "--photos", "photos", "--out", "labels"),
        ("convert", "coco.json", "boxes.csv", "--to", "csv", "--photos", "photos"),
        *(
            ("convert", "coco.json", name, "--to", name, "--photos", "photos", "--copy", "copy")
            for name in ("cvat", "labelstudio", "fiftyone", "xanylabeling")
        ),
    ):
        code = run(folder, argv)
        if code != 0:
            raise RuntimeError(f"the intact command {' '.join(argv)} ended with {code}")
    _reviewed(folder)


def _reviewed(folder: Path) -> None:
    """The label set with a journal: a photo with a rejected and a drawn box, one as it is, one that is not done."""
    shutil.copytree(folder / "labels", folder / "reviewed")
    labels = LabelSet.open(folder / "reviewed")
    first, second, third = labels.content.photos[:3]
    drawn = BoxState((2.0, 3.0, 12.0, 14.0), labels.classes[0], "accepted")
    with Journal(folder / "reviewed", labels) as journal:
        rejected = {0: BoxState(first.boxes[0].box, first.boxes[0].name, "rejected")}
        journal.append(first.id, Action("reject", rejected), based_on=0, key="1", reviewer="Ada")
        journal.append(first.id, Action("draw", {len(first.boxes): drawn}), based_on=1, key="2", reviewer="Ada")
        journal.append(first.id, Action("done"), based_on=2, key="3", reviewer="Ada", is_sampled=True)
        journal.append(second.id, Action("done"), based_on=0, key="4", reviewer="Bob", is_sampled=True)
        journal.append(third.id, Action("accept"), based_on=0, key="5")


def _photos(folder: Path) -> None:
    import_module("tiny").tiny_photos(folder, len(PHOTOS))
    for number in (2, 3):
        jpeg = folder / "photos" / f"photo{number}.jpg"
        with Image.open(jpeg) as image:
            if number == 2:
                image.save(jpeg.with_suffix(".png"))
            else:
                grey = np.asarray(image.convert("L")).astype(np.uint16) * 257
                Image.fromarray(grey).save(jpeg.with_suffix(".png"))
        jpeg.unlink()
    for number, name in enumerate(PHOTOS):
        place = folder / "folders" / CLASSES[LABELS[number][0]]
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "photos" / name, place / name)


def _size(number: int) -> tuple[int, int]:
    return 48 + 8 * (number % 3), 40 + 4 * (number % 2)


def _tags(folder: Path) -> None:
    rows = [f"{name},{';'.join(CLASSES[c] for c in LABELS[i])}" for i, name in enumerate(PHOTOS)]
    (folder / "tags.csv").write_text("\n".join(["image,tags", *rows]) + "\n", encoding="utf-8")
    images = [
        dict(zip(("id", "file_name", "width", "height"), (i + 1, name, *_size(i)), strict=True))
        for i, name in enumerate(PHOTOS)
    ]
    objects = [(i, label, box) for i in LABELS for label, box in zip(LABELS[i], BOXES[i], strict=True)]
    rows_of = [
        {"id": n + 1, "image_id": i + 1, "category_id": label + 1, "bbox": [x1, y1, x2 - x1, y2 - y1],
         "area": (x2 - x1) * (y2 - y1), "iscrowd": 0}
        for n, (i, label, (x1, y1, x2, y2)) in enumerate(objects)
    ]  # fmt: skip
    categories = [{"id": c + 1, "name": name} for c, name in enumerate(CLASSES)]
    coco = {"images": images, "annotations": rows_of, "categories": categories}
    (folder / "coco.json").write_text(json.dumps(coco), encoding="utf-8")
    found = [{k: row[k] for k in ("image_id", "category_id", "bbox")} | {"score": 0.5} for row in rows_of]
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    (folder / "found-voc").mkdir()
    for c, name in enumerate(CLASSES):
        lines = [f"photo{i} 0.5 {box[0] + 1} {box[1] + 1} {box[2]} {box[3]}" for i, label, box in objects if label == c]
        (folder / "found-voc" / f"comp4_det_train_{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _voc(folder: Path) -> None:
    for place in ("Annotations", "ImageSets/Main"):
        (folder / "voc" / place).mkdir(parents=True)
    shutil.copytree(folder / "photos", folder / "voc" / "JPEGImages")
    for i, name in enumerate(PHOTOS):
        width, height = _size(i)
        objects = "".join(
            f"<object><name>{CLASSES[label]}</name><difficult>0</difficult><bndbox><xmin>{x1 + 1}</xmin>"
            f"<ymin>{y1 + 1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>\n"
            for label, (x1, y1, x2, y2) in zip(LABELS[i], BOXES[i], strict=True)
        )
        size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        text = f"<annotation><filename>{name}</filename>{size}\n{objects}</annotation>\n"
        (folder / "voc" / "Annotations" / f"photo{i}.xml").write_text(text, encoding="utf-8")
    for name, numbers in {"train": range(4), "first": range(2), "last": range(2, 4)}.items():
        ids = "".join(f"photo{i}\n" for i in numbers)
        (folder / "voc" / "ImageSets" / "Main" / f"{name}.txt").write_text(ids, encoding="utf-8")


def _yolo(folder: Path) -> None:
    shutil.copytree(folder / "photos", folder / "yolo" / "images" / "train")
    (folder / "yolo" / "labels" / "train").mkdir(parents=True)
    for i in LABELS:
        width, height = _size(i)
        rows = [
            f"{label} {(x1 + x2) / 2 / width:.6f} {(y1 + y2) / 2 / height:.6f} "
            f"{(x2 - x1) / width:.6f} {(y2 - y1) / height:.6f}"
            for label, (x1, y1, x2, y2) in zip(LABELS[i], BOXES[i], strict=True)
        ]
        (folder / "yolo" / "labels" / "train" / f"photo{i}.txt").write_text("\n".join(rows) + "\n", encoding="utf-8")
    names = "".join(f"  {c}: {name}\n" for c, name in enumerate(CLASSES))
    (folder / "yolo" / "data.yaml").write_text(
        f"path: .\ntrain: images/train\nval: images/train\nnames:\n{names}", encoding="utf-8"
    )


def _boxes(folder: Path) -> None:
    arrays = [np.array(BOXES[i], np.float64) for i in BOXES]
    ids = [f"photo{i}" for i in BOXES]
    cells, names = np.empty((1, len(ids)), object), np.empty((1, len(ids)), object)
    matlab: Any = import_module("scipy.io")
    (folder / "mcg").mkdir()
    for i, boxes in enumerate(arrays):
        rows = np.stack([boxes[:, 1] + 1, boxes[:, 0] + 1, boxes[:, 3], boxes[:, 2]], axis=1)
        cells[0, i], names[0, i] = rows, ids[i]
        scores = np.arange(len(boxes), dtype=np.float64).reshape(-1, 1)
        matlab.savemat(folder / "mcg" / f"{ids[i]}.mat", {"boxes": rows, "scores": scores}, do_compression=True)
    matlab.savemat(folder / "boxes.mat", {"boxes": cells, "images": names}, do_compression=True)
    counts = np.array([len(boxes) for boxes in arrays])
    np.savez(folder / "boxes.npz", ids=np.array(ids), counts=counts, boxes=np.concatenate(arrays))
    content = {"boxes": [boxes - [0, 0, 1, 1] for boxes in arrays], "ids": ids}
    (folder / "boxes.pkl").write_bytes(pickle.dumps(content, 2))
    entries = [
        {"image_id": ids[i], "bbox": [x1, y1, x2 - x1, y2 - y1], "score": 0.5}
        for i in BOXES
        for x1, y1, x2, y2 in BOXES[i]
    ]
    (folder / "boxes-coco.json").write_text(json.dumps(entries), encoding="utf-8")
    (folder / "boxes-by-image.json").write_text(json.dumps({ids[i]: BOXES[i] for i in BOXES}), encoding="utf-8")


def _weight_files(folder: Path) -> None:
    fake: Any = import_module("fake_weights")
    ours = fake.random_weights("vgg16")
    fake.save(folder / "weights.pth", ours)
    fake.save(folder / "weights.safetensors", ours)
    fake.save(folder / "weights.pkl", {"blobs": fake.foreign("caffe2", ours)})
    torch.save(ours, folder / "legacy.pth", _use_new_zipfile_serialization=False)
