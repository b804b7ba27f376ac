"""The journal of reviews: nothing that was stored is lost, by a kill at any byte, or by another reviewer."""

from __future__ import annotations

import json
import os
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st

from review_world import CLASSES, scene_labels
from tag2box import storage
from tag2box.errors import UserError
from tag2box.formats.datasets import read_truth
from tag2box.formats.listing import DataSource
from tag2box.labels import journal as journals
from tag2box.labels.journal import JOURNAL_FILE, Journal, Outdated, read_history, read_reviews
from tag2box.labels.label_set import LabelSet
from tag2box.labels.reviews import (
    Action,
    BoxState,
    Impossible,
    PhotoReview,
    act,
    apply_reviews,
    count_reviews,
    finished,
    overlap,
    states_of,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LabelSet]:
    folder = tmp_path_factory.mktemp("reviewed")
    return folder / "labels", scene_labels(folder, 3)


@pytest.fixture
def world(made: tuple[Path, LabelSet]) -> tuple[Path, LabelSet]:
    (made[0] / JOURNAL_FILE).unlink(missing_ok=True)
    return made


def box(labels: LabelSet, photo: int = 0, number: int = 0) -> BoxState:
    own = labels.content.photos[photo].boxes[number]
    return BoxState(own.box, own.name)


def name(labels: LabelSet, photo: int = 0) -> str:
    return labels.content.photos[photo].id


# ---------------------------------------------------------------- actions


def test_no_review_changes_nothing(world: tuple[Path, LabelSet]) -> None:
    folder, labels = world
    assert len(read_reviews(folder)) == 0
    assert apply_reviews(labels, read_reviews(folder)) == labels.content
    assert len(apply_reviews(labels, read_reviews(folder), only_reviewed=True)) == 0


def test_undo_and_redo_return_to_the_states_between(world: tuple[Path, LabelSet]) -> None:
    first = PhotoReview()
    rejected = act(first, Action("reject", {0: replace(box(world[1]), decision="rejected")}))
    done = act(rejected, Action("done"), "Ada", is_sampled=True)
    assert done.now.is_done and done.is_sampled and done.reviewer == "Ada" and done.revision == 2
    undone = act(act(done, Action("undo")), Action("undo"))
    assert undone.now == first.now and undone.revision == 4
    again = act(act(undone, Action("redo")), Action("redo"))
    assert again.now == done.now
    forked = act(act(done, Action("undo")), Action("accept", {0: replace(box(world[1]), decision="accepted")}))
    assert not forked.future and forked.now.boxes[0].decision == "accepted"
    with pytest.raises(Impossible, match="nothing to undo"):
        act(first, Action("undo"))
    with pytest.raises(Impossible, match="nothing to repeat"):
        act(forked, Action("redo"))


def test_an_edit_keeps_a_photo_done_and_reopening_does_not(world: tuple[Path, LabelSet]) -> None:
    done = act(PhotoReview(), Action("done"))
    edited = act(done, Action("accept", {0: replace(box(world[1]), decision="accepted")}))
    assert edited.now.is_done and not act(edited, Action("reopen")).now.is_done


def test_verdicts_and_final_boxes(made: tuple[Path, LabelSet]) -> None:
    photo = max(made[1].content.photos, key=lambda own: len(own.boxes))
    assert len(photo.labels) >= 3 and photo.doubtful
    numbers = [number for number, own in enumerate(photo.boxes) if not own.is_doubtful]
    doubt = next(number for number, own in enumerate(photo.boxes) if own.is_doubtful)
    states = {number: BoxState(own.box, own.name) for number, own in enumerate(photo.boxes)}
    x1, y1, x2, y2 = states[numbers[1]].box
    near, far = (x1, y1, x2, y1 + 0.75 * (y2 - y1)), (x1, y1, x1 + 0.4 * (x2 - x1), y2)
    other = next(own for own in CLASSES if own not in photo.tags)
    drawn = BoxState((0.0, 0.0, 9.0, 9.0), photo.tags[0], "accepted")

    def ended(changes: dict[int, BoxState]) -> tuple[list[tuple[str, bool]], list[tuple[object, str]]]:
        state = act(act(PhotoReview(), Action("move", changes)), Action("done"), "Ada")
        found = finished(photo, state)
        assert all(own.source == "review" and own.why == "reviewed" and own.score is None for own in found.boxes)
        assert [own.box for own in found.verdicts] == list(photo.labels) and found.reviewer == "Ada"
        return [(own.decision, own.is_right) for own in found.verdicts], [(own.box, own.name) for own in found.boxes]

    plain = [("accepted", True)] * len(photo.labels)
    kept = [(own.box, own.name) for own in photo.labels]
    assert ended({}) == (plain, kept)
    verdicts, boxes = ended({numbers[0]: replace(states[numbers[0]], decision="rejected")})
    assert verdicts == [("rejected", False), *plain[1:]] and boxes == kept[1:]
    verdicts, boxes = ended({numbers[1]: replace(states[numbers[1]], box=near)})
    assert verdicts[1] == ("corrected", True) and boxes[1][0] == near
    assert ended({numbers[1]: replace(states[numbers[1]], box=far)})[0][1] == ("corrected", False)
    assert ended({numbers[1]: replace(states[numbers[1]], name=other)})[0][1] == ("corrected", False)
    assert ended({doubt: replace(states[doubt], decision="accepted")})[0] == plain
    assert (states[doubt].box, states[doubt].name) in ended({doubt: replace(states[doubt], decision="accepted")})[1]
    assert ended({len(photo.boxes): drawn})[1] == [*kept, (drawn.box, drawn.name)]
    assert ended({len(photo.boxes): replace(drawn, decision="rejected")})[1] == kept


corners = st.integers(0, 20)
rectangles = st.builds(
    lambda x, y, w, h: (float(x), float(y), float(x + w), float(y + h)), corners, corners, corners, corners
)


@given(rectangles, rectangles)
def test_the_overlap_is_that_of_counted_pixels(a: tuple[float, ...], b: tuple[float, ...]) -> None:
    def pixels(own: tuple[float, ...]) -> set[tuple[int, int]]:
        return {(x, y) for x in range(int(own[0]), int(own[2])) for y in range(int(own[1]), int(own[3]))}

    either = pixels(a) | pixels(b)
    assert overlap(a, b) == pytest.approx(len(pixels(a) & pixels(b)) / len(either) if either else 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({99: BoxState((0, 0, 5, 5), "car")}, "box 99: this photo has"),
        ({-1: BoxState((0, 0, 5, 5), "car")}, "box -1: this photo has"),
        ({0: BoxState((0, 0, 5, 5), "dragon")}, "'dragon' is not one of the classes"),
        ({0: BoxState((0, 0, 500, 5), "car")}, r"corners inside the photo \(160x120\)"),
        ({0: BoxState((5, 5, 5, 9), "car")}, "corners inside the photo"),
    ],
)
def test_impossible_actions_are_refused_and_not_stored(
    world: tuple[Path, LabelSet], changes: dict[int, BoxState], message: str
) -> None:
    folder, labels = world
    with Journal(folder, labels) as journal:
        before = (folder / JOURNAL_FILE).read_bytes()
        with pytest.raises(Impossible, match=message):
            journal.append(name(labels), Action("move", changes), based_on=0, key="1")
        assert (folder / JOURNAL_FILE).read_bytes() == before


@pytest.mark.parametrize(
    "sent",
    [
        {}, {"action": "explode"}, {"action": []}, {"action": "move", "boxes": {"0": [1, 2, 3]}},
        {"action": "move", "boxes": {"x": [1, 2, 3, 4, "car", "open"]}},
        {"action": "move", "boxes": {"0": [1, 2, 3, "4", "car", "open"]}},
        {"action": "move", "boxes": {"0": [1, 2, 3, float("nan"), "car", "open"]}},
        {"action": "move", "boxes": {"0": [1, 2, 3, True, "car", "open"]}},
        {"action": "move", "boxes": {"0": [1, 2, 3, 4, 5, "open"]}},
        {"action": "move", "boxes": {"0": [1, 2, 3, 4, "car", "maybe"]}}, {"action": "move", "boxes": [1]},
    ],
)  # fmt: skip
def test_what_is_no_action_is_no_action(sent: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError, TypeError, AttributeError)):
        Action.from_json(sent)


# ---------------------------------------------------------------- the file


def test_reviews_survive_and_are_exported(world: tuple[Path, LabelSet]) -> None:
    folder, labels = world
    drawn = BoxState((1.5, 2.0, 30.25, 40.0), CLASSES[3], "accepted")
    with Journal(folder, labels) as journal:
        first = name(labels)
        journal.append(first, Action("reject", {0: replace(box(labels), decision="rejected")}), based_on=0, key="1")
        journal.append(first, Action("draw", {len(labels.content.photos[0].boxes): drawn}), based_on=1, key="2")
        journal.append(first, Action("done"), based_on=2, key="3", reviewer="Ada", is_sampled=True)
        journal.append(name(labels, 1), Action("accept", {}), based_on=0, key="4", reviewer="Bob")
    reviews = read_reviews(folder)
    assert list(reviews.photos) == [first] and reviews.photos[first].is_sampled
    counts = count_reviews(reviews)
    assert (counts.photos, counts.rejected, counts.added) == (1, 1, 1)
    content = apply_reviews(LabelSet.open(folder), reviews)
    assert content.photos[0].boxes[-1].box == drawn.box and content.photos[0].boxes[-1].is_tag is False
    assert content.photos[1:] == labels.content.photos[1:]
    assert [own.id for own in apply_reviews(labels, reviews, only_reviewed=True).photos] == [first]
    LabelSet.open(folder).verify()
    assert [own.is_reviewed for own in content.photos] == [True, False, False]
    with pytest.warns(UserWarning, match="2 of 3 photos are not reviewed"):
        truth = read_truth(DataSource(path=folder))
    known = content.truth()
    assert truth.ids == known.ids and truth.classes == known.classes
    for own, other in zip(truth.objects, known.objects, strict=True):
        assert torch.allclose(own.boxes, other.boxes) and torch.equal(own.labels, other.labels)
        assert torch.equal(own.crowd, other.crowd)
    with pytest.warns(UserWarning):
        some = read_truth(DataSource(path=folder, classes=CLASSES[3:]))
    assert [len(own) for own in some.objects] == [1, 0, 0] and some.objects[0].boxes.tolist() == [list(drawn.box)]
    with pytest.raises(UserError, match="another label set"):
        apply_reviews(labels, replace(reviews, labels_digest="0" * 64))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int, str]]:
    """Actions of two writers on three photos."""
    kinds = st.sampled_from(["accept", "reject", "done", "reopen", "undo", "redo"])
    return draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), kinds), max_size=12))


def replayed(folder: Path, labels: LabelSet) -> dict[str, PhotoReview]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_history(folder, labels).photos


@hypothesis_settings(max_examples=40)
@given(steps=histories(), data=st.data())
def test_a_cut_at_any_byte_loses_at_most_the_last_line(
    made: tuple[Path, LabelSet], steps: list[tuple[int, int, str]], data: st.DataObject
) -> None:
    folder, labels = made
    place = folder / JOURNAL_FILE
    place.unlink(missing_ok=True)
    states: list[dict[str, PhotoReview]] = [{}]
    sizes = [0]
    with Journal(folder, labels) as one, Journal(folder, labels) as two:
        sizes.append(place.stat().st_size)
        states.append({})
        for count, (writer, photo, kind) in enumerate(steps):
            own = name(labels, photo)
            mine = (one, two)[writer]
            mine.refresh()
            changes = {0: replace(box(labels, photo), decision="rejected")} if kind == "reject" else {}
            try:
                mine.append(own, Action(kind, changes), based_on=mine.history.state(own).revision, key=f"{count}")  # type: ignore[arg-type]
            except Impossible:
                continue  # nothing to undo: nothing was written
            sizes.append(place.stat().st_size)
            states.append(dict(mine.history.photos))
    whole = place.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    place.write_bytes(whole[:cut])
    stored = max(number for number, size in enumerate(sizes) if size <= cut)
    assert replayed(folder, labels) == states[stored]
    with Journal(folder, labels) as journal:  # repairs it, and appends
        assert journal.history.photos == states[stored]
        assert bool(journal.notes) == (cut not in sizes)
        journal.append(name(labels), Action("accept"), based_on=journal.history.state(name(labels)).revision, key="new")
    assert (
        replayed(folder, labels)[name(labels)].revision == states[stored].get(name(labels), PhotoReview()).revision + 1
    )


def test_a_cut_is_said(world: tuple[Path, LabelSet]) -> None:
    folder, labels = world
    with Journal(folder, labels) as journal:
        journal.append(name(labels), Action("done"), based_on=0, key="1")
    place = folder / JOURNAL_FILE
    place.write_bytes(place.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="the last line was cut short"):
        assert len(read_reviews(folder)) == 0


@pytest.mark.parametrize("position", [0.0, 0.3, 0.6, 0.95])
def test_damage_inside_is_refused_in_one_line(world: tuple[Path, LabelSet], position: float) -> None:
    folder, labels = world
    with Journal(folder, labels) as journal:
        for number in range(3):
            journal.append(name(labels, number), Action("done"), based_on=0, key=f"{number}")
    place = folder / JOURNAL_FILE
    content = bytearray(place.read_bytes())
    at = int(position * len(content))
    content[at] = ord("x") if content[at] != ord("x") else ord("y")
    place.write_bytes(content)
    line = bytes(content[:at]).count(b"\n") + 1
    with pytest.raises(UserError, match=rf"reviews\.jsonl: line {line} is damaged.*restore the file") as caught:
        read_reviews(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="is damaged"):
        Journal(folder, labels)
    assert place.read_bytes() == content, "nothing is repaired that may be of use"


def test_a_missing_line_is_noticed(world: tuple[Path, LabelSet]) -> None:
    folder, labels = world
    with Journal(folder, labels) as journal:
        for number in range(3):
            journal.append(name(labels), Action("accept"), based_on=number, key=f"{number}")
    lines = (folder / JOURNAL_FILE).read_bytes().splitlines(keepends=True)
    (folder / JOURNAL_FILE).write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(UserError, match=r"line 3 .*revision 3 of photo .* follows 1"):
        read_reviews(folder)


def test_journals_of_other_sets_and_versions_are_refused(world: tuple[Path, LabelSet]) -> None:
    folder, labels = world
    place = folder / JOURNAL_FILE
    other = {"journal": 1, "labels": "0" * 64, "seed": 0}
    place.write_bytes(journals.journal_line(other))
    for call in (lambda: read_reviews(folder), lambda: Journal(folder, labels)):
        with pytest.raises(UserError, match=r"reviews of another label set.*move this file elsewhere"):
            call()
    place.write_bytes(journals.journal_line({**other, "journal": 2, "labels": labels.digest}))
    with pytest.raises(UserError, match="update tag2box"):
        read_reviews(folder)
    place.write_bytes(
        journals.journal_line({**other, "labels": labels.digest})
        + journals.journal_line({"photo": "gone", "revision": 1})
    )
    with pytest.raises(UserError, match="line 2 is not understood"):
        read_reviews(folder)


# ---------------------------------------------------------------- several reviewers


def test_the_second_of_two_reviewers_is_told(world: tuple[Path, LabelSet]) -> None:
    folder, labels = world
    with Journal(folder, labels) as one, Journal(folder, labels) as two:
        one.append(name(labels), Action("done"), based_on=0, key="a", reviewer="Ada")
        with pytest.raises(Outdated, match="Ada has changed this photo"):
            two.append(name(labels), Action("done"), based_on=0, key="b", reviewer="Bob")
        assert two.history.state(name(labels)).revision == 1
        two.append(name(labels), Action("reopen"), based_on=1, key="c", reviewer="Bob")
        one.refresh()
        assert one.history.state(name(labels)).revision == 2
        assert one.history.changed == [name(labels)] * 2


def test_an_action_that_is_sent_twice_is_stored_once(world: tuple[Path, LabelSet]) -> None:
    folder, labels = world
    with Journal(folder, labels) as one:
        first = one.append(name(labels), Action("done"), based_on=0, key="a")
    with Journal(folder, labels) as two:  # the server was killed before it could answer
        assert two.append(name(labels), Action("done"), based_on=0, key="a") == first
    assert len((folder / JOURNAL_FILE).read_bytes().splitlines()) == 2


def test_threads_and_handles_append_whole_lines(world: tuple[Path, LabelSet]) -> None:
    folder, labels = world
    kept: list[str] = []

    def work(writer: int) -> None:
        with Journal(folder, labels) as journal:
            for count in range(10):
                own, key = name(labels, count % 3), f"{writer}-{count}"
                while True:
                    try:
                        journal.append(own, Action("accept"), based_on=journal.history.state(own).revision, key=key)
                    except Outdated:
                        continue
                    kept.append(key)
                    break

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = read_history(folder, labels)
    assert history.keys == set(kept) and len(kept) == 40 and history.lines == 41


def test_every_action_is_synced_before_it_is_answered(
    world: tuple[Path, LabelSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, labels = world
    calls: list[str] = []
    real_write, real_sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda handle, line: calls.append("write") or real_write(handle, line))
    monkeypatch.setattr(os, "fsync", lambda handle: calls.append("sync") or real_sync(handle))
    with Journal(folder, labels) as journal:
        calls.clear()
        journal.append(name(labels), Action("done"), based_on=0, key="a")
    assert calls == ["write", "sync"]


def test_a_full_disk_leaves_the_journal_whole(world: tuple[Path, LabelSet], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, labels = world
    real = os.write
    with Journal(folder, labels) as journal:
        journal.append(name(labels), Action("done"), based_on=0, key="a")
        before = (folder / JOURNAL_FILE).read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda handle, line: real(handle, line[:10]))
            with pytest.raises(UserError, match=r"cannot be written \(No space left.*nothing was stored"):
                journal.append(name(labels, 1), Action("done"), based_on=0, key="b")
        assert (folder / JOURNAL_FILE).read_bytes() == before
        journal.append(name(labels, 1), Action("done"), based_on=0, key="b")
    assert len(read_reviews(folder)) == 2


@pytest.mark.parametrize("what", ["removed", "replaced", "cut"])
def test_a_journal_that_is_changed_by_hand_stops_the_review(world: tuple[Path, LabelSet], what: str) -> None:
    folder, labels = world
    place = folder / JOURNAL_FILE
    with Journal(folder, labels) as journal:
        journal.append(name(labels), Action("done"), based_on=0, key="a")
        if what == "cut":
            os.truncate(place, 5)
        else:
            content = place.read_bytes()
            place.rename(folder / "old")
            if what == "replaced":
                place.write_bytes(content)
        with pytest.raises(UserError, match="during the review; restart the review"):
            journal.append(name(labels, 1), Action("done"), based_on=0, key="b")
    (folder / "old").unlink(missing_ok=True)


def test_lines_are_plain_json(world: tuple[Path, LabelSet]) -> None:
    folder, labels = world
    with Journal(folder, labels, seed=7) as journal:
        change = {0: replace(box(labels), decision="rejected")}
        journal.append(name(labels), Action("reject", change), based_on=0, key="a", reviewer="Ä\n\u2028")
    head, line = map(json.loads, (folder / JOURNAL_FILE).read_text().split("\n")[:-1])
    assert head == {"sum": head["sum"], "journal": 1, "labels": labels.digest, "seed": 7}
    assert line["photo"] == name(labels) and line["revision"] == 1 and line["reviewer"] == "Ä\n\u2028"
    assert BoxState.from_json(line["boxes"]["0"]) == change[0]
    assert states_of(labels.content.photos[0], read_history(folder, labels).state(name(labels)))[0] == change[0]
    with Journal(folder, labels, seed=1) as journal:
        assert journal.history.seed == 7, "the sample stays the one of the first review"
    assert storage.MANIFEST in {path.name for path in folder.iterdir()}
