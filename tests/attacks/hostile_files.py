"""Hostile files, one builder each: what it tries, the command a victim types, and what must come of it.

README.md is the list.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tag2box import storage
from tiny_world import sign_again

CANARY = "canary"
"""Created in the working folder by any code that runs."""
GIGABYTES = 4


@dataclass(frozen=True)
class Attack:
    """A hostile file in a folder that has photos, tags.csv, and a trained run."""

    tries: str
    build: Callable[[Path], object]  # writes the file into the working folder
    command: str
    says: tuple[str, ...]  # in the one line of error, or in the output
    code: int = 2


class Runs:
    """Unpickling it would run code."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {CANARY}",)


def put(name: str, content: bytes | str) -> Callable[[Path], object]:
    """A builder of a file with this content."""
    return lambda desk: (desk / name).write_bytes(content.encode() if isinstance(content, str) else content)


# ---------------------------------------------------------------- parts of files


def zeros(count: int, window: int = zlib.MAX_WBITS) -> bytes:
    """A deflate stream of ``count`` megabytes of zeros, in a thousandth of the size."""
    packer = zlib.compressobj(9, zlib.DEFLATED, window)
    megabyte = bytes(1 << 20)
    first = packer.compress(megabyte) + packer.flush(zlib.Z_FULL_FLUSH)
    more = packer.compress(megabyte) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + more * (count - 1) + packer.flush()


def archive(path: Path, members: dict[str, tuple[bytes, int, int]]) -> None:
    """A zip file of (stored bytes, size as declared, compression), whatever the truth."""
    body, directory = b"", b""
    for name, (content, size, compression) in members.items():
        head = struct.pack(
            "<HHHHHIIIHH", 20, 0, compression, 0, 0, 0, len(content), min(size, 0xFFFFFFFF), len(name), 0
        )
        directory += b"PK\1\2\x14\0" + head + struct.pack("<HHHII", 0, 0, 0, 0, len(body)) + name.encode()
        body += b"PK\3\4" + head + name.encode() + content
    end = struct.pack("<HHHHIIH", 0, 0, len(members), len(members), len(directory), len(body), 0)
    path.write_bytes(body + directory + b"PK\5\6" + end)


def array_header(text: str) -> bytes:
    """The beginning of a .npy file with any text for a header."""
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode()


def npz(path: Path, content: bytes) -> None:
    """An archive of two arrays, both with this content."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("ids.npy", content)
        file.writestr("boxes.npy", content)


def safetensors(header: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if claimed is None else claimed) + header


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A picture of a claimed size, with hardly a pixel in it."""
    first = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    parts = [first, *chunks, (b"IDAT", zlib.compress(bytes(64))), (b"IEND", b"")]
    framed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def coco(desk: Path, name: str, classes: list[str]) -> None:
    """A dataset of the photos with these class names."""
    photos = sorted((desk / "photos").iterdir())
    sizes = [Image.open(photo).size for photo in photos]
    content = {
        "images": [{"id": i, "file_name": p.name, "width": s[0], "height": s[1]}
                   for i, (p, s) in enumerate(zip(photos, sizes, strict=True))],
        "categories": [{"id": i, "name": name} for i, name in enumerate(classes)],
        "annotations": [{"id": i, "image_id": i % len(photos), "category_id": i % len(classes), "bbox": [2, 2, 20, 20],
                         "area": 400, "iscrowd": 0} for i in range(max(len(photos), len(classes)))],
    }  # fmt: skip
    (desk / name).write_text(json.dumps(content))


# ---------------------------------------------------------------- builders


def torch_archive(desk: Path) -> None:
    torch.save({"features.0.weight": Runs()}, desk / "w.pth")


def torch_bomb(desk: Path) -> None:
    stream = zeros(GIGABYTES * 1024, -zlib.MAX_WBITS)
    archive(
        desk / "w.pth",
        {"w/data.pkl": (stream, (GIGABYTES << 30) - 1, zipfile.ZIP_DEFLATED), "w/version": (b"3\n", 2, 0)},
    )


def torch_claim(desk: Path) -> None:
    archive(desk / "w.pth", {"w/data.pkl": (b"\x80\x02}.", 0xFFFFFFF0, 0), "w/version": (b"3\n", 2, 0)})


def within_itself(desk: Path) -> None:
    content: dict[str, object] = {"features.0.weight": np.ones(1)}
    content["model"] = content
    (desk / "w.pkl").write_bytes(pickle.dumps(content))


def shared(desk: Path) -> None:
    content: dict[str, object] = {}
    for _ in range(12):
        content = dict.fromkeys("abcdefghijkl", content)
    (desk / "w.pkl").write_bytes(pickle.dumps(content))


def link(name: str, target: str) -> Callable[[Path], object]:
    def build(desk: Path) -> None:
        (desk / "secret.txt").write_text("password=hunter2\n")
        (desk / name).unlink(missing_ok=True)
        (desk / name).symlink_to(target)

    return build


def pipe(name: str) -> Callable[[Path], object]:
    def build(desk: Path) -> None:
        (desk / name).unlink(missing_ok=True)
        os.mkfifo(desk / name)

    return build


def sparse(desk: Path) -> None:
    with (desk / "w.pkl").open("wb") as file:
        file.truncate(1 << 40)


def objects_in_npz(desk: Path) -> None:
    np.savez(desk / "p.npz", ids=np.array(["photo0"]), boxes=np.array([Runs()], object))


def npz_bomb(desk: Path) -> None:
    header = array_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({(GIGABYTES << 28) - 40}, 1)}}\n")
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    start = packer.compress(header) + packer.flush(zlib.Z_FULL_FLUSH)
    stream = start + zeros(GIGABYTES * 1024, -zlib.MAX_WBITS)
    member = (stream, (GIGABYTES << 30) - 1, zipfile.ZIP_DEFLATED)
    archive(desk / "p.npz", {"ids.npy": member, "boxes.npy": member})


def mat_bomb(desk: Path) -> None:
    stream = zeros(GIGABYTES * 1024)
    head = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    (desk / "p.mat").write_bytes(head + struct.pack("<II", 15, len(stream)) + stream)


def laughs(desk: Path) -> None:
    voc = desk / "voc"
    for folder in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (voc / folder).mkdir(parents=True)
    Image.new("RGB", (40, 30)).save(voc / "JPEGImages" / "a.jpg")
    (voc / "ImageSets" / "Main" / "train.txt").write_text("a\n")
    entities = "".join(f"<!ENTITY l{i + 1} '{f'&l{i};' * 10}'>" for i in range(12))
    text = f"<!DOCTYPE a [<!ENTITY l0 'ha'>{entities}]><annotation><object><name>&l12;</name></object></annotation>"
    (voc / "Annotations" / "a.xml").write_text(text)


def escaping_class(desk: Path) -> None:
    photos = sorted(path.name for path in (desk / "photos").iterdir())
    (desk / "evil.csv").write_text("image,tags\n" + "".join(f"{name},red\x1b]0owned\x07\x1b[2J\n" for name in photos))


def script_class(desk: Path) -> None:
    coco(desk, "evil.json", ["<script>alert(1)</script>", "car"])


def climbing_class(desk: Path) -> None:
    coco(desk, "evil.json", ["../../climbed", "car"])


def many_classes(desk: Path) -> None:
    coco(desk, "evil.json", [f"class {i}" for i in range(20_000)])


def text_bomb(desk: Path) -> None:
    (desk / "photos" / "photo0.png").write_bytes(png(8, 8, (b"zTXt", b"Comment\0\0" + zeros(GIGABYTES * 256))))


def called_in_run(desk: Path) -> None:
    path = desk / "run" / "config.toml"
    text = path.read_text()
    start = text.index('kind = "', text.index("[backbone]"))
    path.write_text(f'{text[:start]}kind = "os:system"{text[text.index(chr(10), start) :]}')


def climbing_state(desk: Path) -> None:
    """With digests that match: who can write the file can compute them."""
    path = desk / "run" / "state.json"
    state = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    shutil.copytree(desk / "run" / state["folder"], desk.parent / "elsewhere")
    storage.write_checked_json(path, {**state, "folder": "../../elsewhere"})


def pickled_checkpoint(desk: Path) -> None:
    for path in (desk / "run").rglob("model.safetensors"):
        path.write_bytes(pickle.dumps(Runs()))
    sign_again(desk / "run")


def nested_events(desk: Path) -> None:
    with (desk / "run" / "events.jsonl").open("a") as file:
        file.write('{"a":' + "[" * DEEP + "\n")


def own_module(desk: Path) -> None:
    (desk / "evil.py").write_text(f"open('{CANARY}', 'w').close()\n")
    (desk / "c.toml").write_text('[backbone]\nkind = "evil:Name"\n')


CONVERT, IMPORT = "weights convert", "proposals import {} photos --out out"
TRAIN = "train tags.csv --photos photos --out out --config {}"
DEEP = 200_000
HUGE_TENSOR = b'{"a":{"dtype":"U8","shape":[4000000000000],"data_offsets":[0,4000000000000]}}'
HUGE_ARRAY = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}"

ATTACKS = {
    # weights
    "pickle-runs-code": Attack("runs a shell command when unpickled", put("w.pkl", pickle.dumps(Runs())),
        f"{CONVERT} w.pkl", ("w.pkl", "nothing was run")),
    "pth-runs-code": Attack("the same under the suffix of torch", put("w.pth", pickle.dumps(Runs())),
        f"{CONVERT} w.pth", ("w.pth", "not readable as weights")),
    "torch-archive-runs-code": Attack("the same as a value in a file of torch.save", torch_archive, f"{CONVERT} w.pth",
        ("w.pth", "not readable as weights")),
    "torch-archive-bomb": Attack(f"expands from {GIGABYTES} MB to {GIGABYTES} GB", torch_bomb, f"{CONVERT} w.pth",
        ("w.pth", "an archive that expands")),
    "torch-archive-claims": Attack("claims 4 GB in its directory, has 200 bytes", torch_claim, f"{CONVERT} w.pth",
        ("w.pth", "an archive that expands")),
    "dictionary-in-itself": Attack("endless recursion: a dictionary that contains itself", within_itself,
        f"{CONVERT} w.pkl", ("w.pkl", "contain themselves")),
    "dictionaries-shared": Attack("12^12 entries in 2 kB: dictionaries that share each other", shared,
        f"{CONVERT} w.pkl", ("w.pkl", "hold over 100000 entries")),
    "safetensors-header": Attack("claims a header of 4 exabytes", put("w.safetensors", safetensors(b"{}", 1 << 62)),
        f"{CONVERT} w.safetensors", ("w.safetensors", "not readable as weights")),
    "safetensors-tensor": Attack("claims a tensor of 4 TB",
        put("w.safetensors", safetensors(HUGE_TENSOR)),
        f"{CONVERT} w.safetensors", ("w.safetensors", "not readable as weights")),
    "safetensors-nested": Attack("overflows the stack of the JSON parser",
        put("w.safetensors", safetensors(b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}")), f"{CONVERT} w.safetensors",
        ("w.safetensors", "not readable as weights")),
    "tensor-name-escapes": Attack("clears the terminal by the name of a tensor",
        put("w.pkl", pickle.dumps({"conv\x1b[2J": np.ones(1)})), f"{CONVERT} w.pkl", ("w.pkl", r"conv\x1b[2J")),
    "weights-name-climbs": Attack("stores weights outside their folder",
        put("w.pkl", pickle.dumps({"conv1_1_w": np.ones(1)})), f"{CONVERT} w.pkl --name ../../x",
        ("../../x", "no name for weights")),
    "link-to-a-secret": Attack("has a private file printed in an error message", link("w.pkl", "secret.txt"),
        f"{CONVERT} w.pkl", ("w.pkl", "not readable")),
    "pipe-as-weights": Attack(
        "hangs: a named pipe that no process writes to", pipe("w.pth"), f"{CONVERT} w.pth", ("w.pth",)),
    "terabyte-of-nothing": Attack(
        "reads for hours: a sparse file of 1 TB", sparse, f"{CONVERT} w.pkl", ("w.pkl", "larger than 8 GB")),
    # proposals
    "proposals-run-code": Attack("runs a shell command when unpickled",
        put("p.pkl", pickle.dumps({"boxes": [Runs()], "ids": ["photo0"]})), IMPORT.format("p.pkl"),
        ("p.pkl", "nothing was run")),
    "npz-runs-code": Attack("the same as an array of objects", objects_in_npz, IMPORT.format("p.npz"), ("p.npz",)),
    "npz-bomb": Attack(
        f"expands from {2 * GIGABYTES} MB to {2 * GIGABYTES} GB", npz_bomb, IMPORT.format("p.npz"), ("p.npz",)),
    "npz-header-code": Attack("an expression in the header that numpy evaluates",
        lambda desk: npz(desk / "p.npz", array_header(f"__import__('os').system('touch {CANARY}')")),
        IMPORT.format("p.npz"), ("p.npz",)),
    "npz-header-tokens": Attack("a header that Python's tokenizer cannot end",
        lambda desk: npz(desk / "p.npz", array_header("{'descr': '<f4', 'shape': (((")), IMPORT.format("p.npz"),
        ("p.npz",)),
    "npz-claims": Attack("claims an array of 4 TB",
        lambda desk: npz(desk / "p.npz", array_header(HUGE_ARRAY)),
        IMPORT.format("p.npz"), ("p.npz",)),
    "mat-bomb": Attack(f"expands from {GIGABYTES} MB to {GIGABYTES} GB", mat_bomb, IMPORT.format("p.mat"), ("p.mat",)),
    "proposals-nested": Attack("overflows the stack of the JSON parser", put("p.json", "[" * DEEP + "]" * DEEP),
        IMPORT.format("p.json"), ("p.json", "nested too deeply")),
    "proposals-digits": Attack("a number of a million digits, slow to convert",
        put("p.json", '{"photo0": [[0, 0, 9, ' + "9" * 1_000_000 + "]]}"), IMPORT.format("p.json"), ("p.json",)),
    # datasets
    "xml-laughs": Attack(
        "billion laughs: entities of entities, 2 TB of text", laughs, "train voc --split train --out out", ("a.xml",)),
    "coco-nested": Attack("overflows the stack of the JSON parser", put("evil.json", '{"images":' + "[" * DEEP),
        "data check evil.json", ("evil.json", "nested too deep")),
    "class-escapes": Attack("clears the terminal by the name of a class", escaping_class,
        "data check evil.csv --photos photos", (r"owned\x07\x1b[2J",), 1),
    "class-script": Attack("a script as the name of a class, for the HTML page", script_class,
        "data stats evil.json --photos photos --out out", (), 0),
    "class-climbs": Attack("overwrites a file above the folder by the name of a class", climbing_class,
        "train evil.json --photos photos --out out --set plan.iterations=2 --set plan.checkpoint_every=2", (), 0),
    "many-classes": Attack("20,000 classes ask for gigabytes", many_classes,
        "train evil.json --photos photos --out out", ("20,000 classes",)),
    "picture-of-gigapixels": Attack("claims 60,000 x 60,000 pixels in 100 bytes",
        put("photos/photo0.png", png(60_000, 60_000)), "data check photos", ("photo0.png",)),
    "picture-text-bomb": Attack("a comment that expands to 1 GB", text_bomb, "data check photos", ("photo0.png",)),
    "endless-picture": Attack("reads for ever: a link to /dev/zero", link("photos/photo0.jpg", "/dev/zero"),
        "data check photos", ("photo0.jpg",)),
    "pipe-as-picture": Attack("hangs: a named pipe that no process writes to", pipe("photos/photo0.jpg"),
        "data check photos", ("photo0.jpg",)),
    # settings
    "settings-endless": Attack(
        "reads for ever: a device as a settings file", lambda desk: None, TRAIN.format("/dev/zero"), ("/dev/zero",)),
    "settings-pipe": Attack(
        "hangs: a named pipe that no process writes to", pipe("c.toml"), TRAIN.format("c.toml"), ("c.toml",)),
    "settings-nested": Attack("overflows the stack of the TOML parser", put("c.toml", "a = " + "[" * DEEP),
        TRAIN.format("c.toml"), ("c.toml",)),
    "settings-keys": Attack("tables nested by a key of 200,000 dots", put("c.toml", ".".join("a" * DEEP) + " = 1"),
        TRAIN.format("c.toml"), ("c.toml",)),
    "settings-digits": Attack("a number of a million digits, slow to convert",
        put("c.toml", "[plan]\nseed = " + "9" * 1_000_000), TRAIN.format("c.toml"), ("c.toml",)),
    "settings-call": Attack("kind = os:system, to have it called",
        put("c.toml", f'[backbone]\nkind = "os:system"\ncommand = "touch {CANARY}"\n'), TRAIN.format("c.toml"),
        ("os:system",)),
    "settings-module": Attack(
        "kind names a module in the working folder", own_module, TRAIN.format("c.toml"), ("evil",)),
    # runs
    "run-call": Attack("kind = os:system in the settings of a run", called_in_run, "detect run photos --out out",
        ("config.toml", "os:system")),
    "run-climbs": Attack("state.json names a folder outside the run", climbing_state, "detect run photos --out out",
        ("state.json",)),
    "run-pickle": Attack("a pickle in place of the weights of a checkpoint", pickled_checkpoint,
        "detect run photos --out out", ("model.safetensors",)),
    "run-events": Attack(
        "overflows the stack of the JSON parser", nested_events, "report run --out out", ("events.jsonl",)),
}  # fmt: skip


def readme() -> str:
    """README.md: one line per attack."""
    rows = "".join(f"| {name} | {attack.tries} | `tag2box {attack.command}` |\n" for name, attack in ATTACKS.items())
    return f"""# Hostile files

`test_attacks.py` builds each of these and runs the command in a process of its own. It must execute none of it, end
within 10 s of processor time and 1 GB of memory, print one line that names the file (exit code 2) unless the file is
harmless to the command, print no control characters, and write nothing but its output. `test_hostile_pickles.py` has
more than a hundred pickles besides.

| file | what it tries | command |
|---|---|---|
{rows}"""
