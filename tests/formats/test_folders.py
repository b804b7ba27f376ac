from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from PIL import Image

from tag2box.errors import UserError
from tag2box.formats.folders import NO_TAGS, is_class_tree, list_class_folders, list_folder, photo_files
from tag2box.formats.listing import DataSource, path_below


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if Path(name).suffix in {".jpg", ".png", ".JPG"}:
            Image.new("RGB", (8, 6)).save(folder / name)
        else:
            (folder / name).write_text("text")
    return folder


def tags_of(folder: Path, classes: tuple[str, ...] | None = None) -> dict[str, tuple[str, ...]]:
    return {entry.id: entry.tags for entry in list_class_folders(DataSource(path=folder, classes=classes)).entries}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), False),
        (("a.jpg",), False),
        (("a.jpg", "dogs/1.jpg"), False),
        (("readme.txt", "dogs/1.jpg"), True),
        (("dogs/deep/1.jpg", "cats/2.jpg"), True),
        (("dogs/notes.txt",), False),
        ((".git/1.jpg",), False),
    ],
)
def test_a_tree_has_photos_in_folders_only(names, expected, tmp_path):
    assert is_class_tree(fill(tmp_path, *names)) == expected


def test_the_folder_is_the_tag(tmp_path):
    fill(tmp_path, "dogs/1.jpg", "dogs/far/2.JPG", "cats/3.png", f"{NO_TAGS}/4.jpg", "cats/.hidden.jpg", "cats/x.txt",
         "__MACOSX/5.jpg")  # fmt: skip
    assert tags_of(tmp_path) == {"3": ("cats",), "1": ("dogs",), "2": ("dogs",), "4": ()}
    assert list_class_folders(DataSource(path=tmp_path)).classes == ("cats", "dogs")


def test_the_same_name_in_two_folders_is_two_photos(tmp_path):
    fill(tmp_path, "dogs/1.jpg", "cats/1.jpg", "cats/1.png")
    assert tags_of(tmp_path) == {"cats/1.jpg": ("cats",), "cats/1.png": ("cats",), "dogs/1.jpg": ("dogs",)}


def test_chosen_classes_leave_photos_of_others_without_tags(tmp_path):
    fill(tmp_path, "dogs/1.jpg", "cats/2.jpg", "cows/3.jpg")
    assert tags_of(tmp_path, ("dogs", "cats")) == {"1": ("dogs",), "2": ("cats",), "3": ()}
    with pytest.raises(UserError, match="no class 'dog'; did you mean 'dogs'"):
        tags_of(tmp_path, ("dog",))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("photos/1.jpg", "tags.csv"), r"holds tags\.csv; name that file"),
        (("train2017/1.jpg", "annotations/instances_train2017.json"), r"holds annotations/instances_train2017\.json"),
        (("train/dogs/1.jpg", "Test/dogs/2.jpg"), "Test, train are parts of a dataset, not classes; name one of them"),
    ],
)
def test_other_layouts_are_not_taken_for_classes(names, says, tmp_path):
    with pytest.raises(UserError, match=says):
        tags_of(fill(tmp_path, *names))


def test_a_folder_lists_all_its_photos(tmp_path):
    with pytest.raises(UserError, match="no photos in this folder"):
        list_folder(DataSource(path=tmp_path))
    fill(tmp_path, "b.jpg", "a.png", "deep/c.jpg", "deep/notes.txt")
    listing = list_folder(DataSource(path=tmp_path))
    assert [(entry.id, entry.file) for entry in listing.entries] == [
        ("a", "a.png"),
        ("b", "b.jpg"),
        ("c", "deep/c.jpg"),
    ]
    with pytest.raises(UserError, match="leave out --photos"):
        list_folder(DataSource(path=tmp_path, photos=tmp_path / "deep"))


def test_photos_are_found_as_a_search_of_all_names_finds_them(tmp_path):
    fill(tmp_path, "b.jpg", "x/a.png", "x/y/c.jpg", "z/.d.jpg", ".z/e.jpg", "f.txt")
    slow = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.suffix in {".jpg", ".png"}}
    assert {p.as_posix() for p in photo_files(tmp_path)} == {p for p in slow if not p.startswith(".") and "/." not in p}


parts = st.lists(st.sampled_from(["a", "..", ".", "b.jpg", "", "..."]), min_size=1, max_size=6)


@given(parts, st.sampled_from(["/", "\\"]))
def test_no_name_leads_out_of_the_folder(names: list[str], slash: str) -> None:
    """The twin walks the name part by part and keeps the depth."""
    folder = Path("/data/photos")
    name = slash.join(names)
    at: list[str] = [] if name.startswith(slash) else ["data", "photos"]
    for part in names:
        if part == "..":
            at = at[:-1]
        elif part not in {"", "."}:
            at = [*at, part]
    inside = at[:2] == ["data", "photos"] and len(at) > 2
    assert path_below(folder, name) == ("/".join(at[2:]) if inside else None)
