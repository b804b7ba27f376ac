"""Mistakes, one function each: it spoils something on the desk and returns the command a user then types."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tag2box import storage
from tiny_world import TINY, World, sign_again

Argv = list[str]
ENTRY = {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5}


@dataclass(frozen=True)
class Desk:
    """Copies of the world's training data and of a trained run, to spoil."""

    at: Path
    world: World

    @property
    def out(self) -> Path:
        return self.at / "out"

    @property
    def photos(self) -> Path:
        return self.at / "photos"

    @property
    def tags(self) -> Path:
        return self.at / "tags.csv"

    @property
    def run(self) -> Path:
        return self.at / "run"

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoint-000004"

    def photo(self, number: int = 3) -> Path:
        return self.photos / f"train_{number:05d}.jpg"

    def spoil(self, path: Path, content: bytes | str) -> None:
        """New content for a file that is a link so far."""
        path.unlink(missing_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def edit(self, path: Path, old: str, new: str) -> None:
        text = path.read_text()
        assert text.count(old) == 1
        self.spoil(path, text.replace(old, new))

    def move_data(self) -> None:
        """Let the run refer to the copies."""
        path = self.run / "config.toml"
        self.spoil(path, path.read_text().replace(f"{self.world.tags.parent}/", f"{self.at}/"))

    def train(self, *more: str) -> Argv:
        flags = [word for o in TINY for word in ("--set", o)]
        return ["train", "--recipe", "scenes", "--photos", f"{self.photos}", "--tags", f"{self.tags}", "--out",
                f"{self.out}", *flags, *more]  # fmt: skip

    def detect(self, *photos: Path) -> Argv:
        return ["detect", f"{self.run}", *map(str, photos or [self.photo()]), "--out", f"{self.out}", "--draw",
                f"{self.at / 'drawn'}"]  # fmt: skip

    def evaluate(self, *more: str) -> Argv:
        files = ["--truth", f"{self.at / 'truth.json'}", "--detections", f"{self.at / 'found.json'}"]
        return ["evaluate", *files, "--json", f"{self.out}", *more]


# ---------------------------------------------------------------- photos and tags


def missing_photo(desk: Desk) -> Argv:
    desk.photo().unlink()
    return desk.train()


def corrupt_photo(desk: Desk) -> Argv:
    desk.spoil(desk.photo(), b"\xff\xd8 these are not the bytes of a photo")
    return desk.train()


def photo_cut_short(desk: Desk) -> Argv:
    desk.spoil(desk.photo(), desk.photo().read_bytes()[:1200])
    with Image.open(desk.photo()) as photo:
        assert photo.size == (96, 96)  # its header is whole: only reading it through shows
    return desk.train()


def empty_photo(desk: Desk) -> Argv:
    desk.spoil(desk.photo(), b"")
    return desk.train()


def detect_missing_photo(desk: Desk) -> Argv:
    desk.photo().unlink()
    return desk.detect()


def detect_corrupt_photo(desk: Desk) -> Argv:
    desk.spoil(desk.photo(), "not a photo")
    return desk.detect()


def detect_photo_cut_short(desk: Desk) -> Argv:
    photo_cut_short(desk)
    return desk.detect()


def detect_empty_folder(desk: Desk) -> Argv:
    (desk.at / "nothing").mkdir()
    return desk.detect(desk.at / "nothing")


def detect_with_a_setting_of_training(desk: Desk) -> Argv:
    return [*desk.detect(), "--set", "plan.iterations=3"]


def detect_with_no_such_setting(desk: Desk) -> Argv:
    return [*desk.detect(), "--set", "inference.miror=true"]


def detect_misspelt_photo(desk: Desk) -> Argv:
    return desk.detect(desk.photos / "TRAIN_00003.JPEG")


def detect_pattern_of_nothing(desk: Desk) -> Argv:
    return desk.detect(desk.photos / "*.png")


def detect_into_a_folder(desk: Desk) -> Argv:
    return ["detect", f"{desk.run}", f"{desk.photo()}", "--out", f"{desk.photos}"]


def detect_below_a_file(desk: Desk) -> Argv:
    return ["detect", f"{desk.run}", f"{desk.photo()}", "--out", f"{desk.tags / 'new' / 'boxes.json'}"]


def detect_onto_a_device(desk: Desk) -> Argv:
    return ["detect", f"{desk.run}", f"{desk.photo()}", "--out", "/dev/null"]


def draw_into_a_file(desk: Desk) -> Argv:
    return ["detect", f"{desk.run}", f"{desk.photo()}", "--out", f"{desk.out}", "--draw", f"{desk.tags}"]


def voc_into_a_file(desk: Desk) -> Argv:
    return ["detect", f"{desk.run}", f"{desk.photo()}", "--out", f"{desk.out}", "--voc", f"{desk.tags}"]


def detect_with_a_score_of_nothing(desk: Desk) -> Argv:
    return [*desk.detect(), "--min-score", "nan"]


def detect_with_a_score_in_per_cent(desk: Desk) -> Argv:
    return [*desk.detect(), "--min-score", "30"]


def evaluate_with_a_score_of_nothing(desk: Desk) -> Argv:
    return desk.evaluate("--min-score", "nan")


def evaluate_no_metric(desk: Desk) -> Argv:
    return desk.evaluate("--metrics", " , ")


def evaluate_into_a_folder(desk: Desk) -> Argv:
    return [*desk.evaluate(), "--json", f"{desk.photos}"]


def detections_of_a_photo_without_name(desk: Desk) -> Argv:
    desk.spoil(desk.at / "found.json", json.dumps([ENTRY | {"file_name": ""}]))
    return desk.evaluate()


def detections_of_an_image_without_id(desk: Desk) -> Argv:
    desk.spoil(desk.at / "found.json", json.dumps([ENTRY | {"image_id": ""}]))
    return desk.evaluate()


def report_into_a_folder(desk: Desk) -> Argv:
    return ["report", f"{desk.run}", "--out", f"{desk.photos}"]


def missing_tags(desk: Desk) -> Argv:
    desk.tags.unlink()
    return desk.train()


def tags_without_columns(desk: Desk) -> Argv:
    desk.edit(desk.tags, "image,tags", "file,labels")
    return desk.train()


def tags_of_excel(desk: Desk) -> Argv:
    desk.spoil(desk.tags, "image;tags\ntrain_00000.jpg;M\u00f6we\n".encode("cp1252"))
    return desk.train()


def tags_of_too_many_classes(desk: Desk) -> Argv:
    desk.spoil(desk.tags, "image,tag\n" + "".join(f"train_00000.jpg,c{number}\n" for number in range(20_000)))
    return desk.train()


def no_tag_at_all(desk: Desk) -> Argv:
    desk.spoil(desk.tags, "image,tags\ntrain_00000.jpg,\n")
    return desk.train()


def unknown_class(desk: Desk) -> Argv:
    return desk.train("--set", 'data.classes=["balloon", "car"]')


# ---------------------------------------------------------------- settings


def config_not_toml(desk: Desk) -> Argv:
    desk.spoil(desk.at / "mine.toml", "[plan\niterations = 3\n")
    return desk.train("--config", f"{desk.at / 'mine.toml'}")


def config_not_text(desk: Desk) -> Argv:
    desk.spoil(desk.at / "mine.toml", b"\xff\xfe\x00\x01")
    return desk.train("--config", f"{desk.at / 'mine.toml'}")


def config_without_end(desk: Desk) -> Argv:
    return desk.train("--config", "/dev/urandom")


def config_nested_too_deeply(desk: Desk) -> Argv:
    desk.spoil(desk.at / "mine.toml", "plan = " + "[" * 100_000)
    return desk.train("--config", f"{desk.at / 'mine.toml'}")


def config_of_a_huge_number(desk: Desk) -> Argv:
    desk.spoil(desk.at / "mine.toml", "plan.seed = " + "9" * 9000)
    return desk.train("--config", f"{desk.at / 'mine.toml'}")


def config_missing(desk: Desk) -> Argv:
    return desk.train("--config", f"{desk.at / 'none.toml'}")


def unknown_key(desk: Desk) -> Argv:
    return desk.train("--set", "plan.iteratons=3")


def unknown_key_in_file(desk: Desk) -> Argv:
    desk.spoil(desk.at / "mine.toml", "[criterion.contrast]\ntemprature = 0.1\n")
    return desk.train("--config", f"{desk.at / 'mine.toml'}")


def mistyped_value(desk: Desk) -> Argv:
    return desk.train("--set", "plan.iterations=many")


def value_out_of_bounds(desk: Desk) -> Argv:
    return desk.train("--set", "plan.seed=-1")


def unknown_recipe(desk: Desk) -> Argv:
    return [*desk.train(), "--recipe", "od-wslc"]


def no_data_given(desk: Desk) -> Argv:
    return ["train", "--out", f"{desk.out}"]


def settings_on_resume(desk: Desk) -> Argv:
    return ["train", "--out", f"{desk.run}", "--resume", "--set", "plan.iterations=9"]


# ---------------------------------------------------------------- runs


def folder_holds_a_run(desk: Desk) -> Argv:
    return [*desk.train(), "--out", f"{desk.run}"]


def folder_is_a_file(desk: Desk) -> Argv:
    return [*desk.train(), "--out", f"{desk.tags}"]


def detect_without_run(desk: Desk) -> Argv:
    return ["detect", f"{desk.at / 'nowhere'}", f"{desk.photo()}", "--out", f"{desk.out}"]


def resume_without_run(desk: Desk) -> Argv:
    return ["train", "--out", f"{desk.at / 'nowhere'}", "--resume"]


def report_without_run(desk: Desk) -> Argv:
    return ["report", f"{desk.at / 'nowhere'}", "--out", f"{desk.out}"]


def run_without_checkpoint(desk: Desk) -> Argv:
    (desk.run / "state.json").unlink()
    for folder in desk.run.glob("checkpoint-*"):
        shutil.rmtree(folder)
    return desk.detect()


def settings_of_run_edited(desk: Desk) -> Argv:
    desk.edit(desk.run / "config.toml", "embed_dim = 128", "embed_dim = 64")
    return desk.detect()


def weights_of_other_heads(desk: Desk) -> Argv:
    (desk.run / "run.json").unlink()  # as in runs of version 0.1
    return settings_of_run_edited(desk)


def state_edited(desk: Desk) -> Argv:
    desk.edit(desk.run / "state.json", '"car"', '"cat"')
    return desk.detect()


def state_of_other_classes(desk: Desk) -> Argv:
    state = json.loads((desk.run / "state.json").read_text())
    del state["sha256"]
    storage.write_checked_json(desk.run / "state.json", {**state, "classes": ["balloon", "cat", "clock"]})
    return desk.detect()


def weights_of_other_classes(desk: Desk) -> Argv:
    (desk.run / "run.json").unlink()
    state = json.loads((desk.run / "state.json").read_text())
    del state["sha256"]
    storage.write_checked_json(desk.run / "state.json", {**state, "classes": ["balloon", "car"]})
    return desk.detect()


def class_renamed(desk: Desk) -> Argv:
    desk.spoil(desk.tags, desk.tags.read_text().replace("car", "zebra"))
    desk.move_data()
    return ["train", "--out", f"{desk.run}", "--resume"]


def report_after_class_renamed(desk: Desk) -> Argv:
    class_renamed(desk)
    return ["report", f"{desk.run}", "--out", f"{desk.out}"]


def photo_replaced(desk: Desk) -> Argv:
    desk.spoil(desk.photo(), desk.photo(4).read_bytes())
    desk.move_data()
    return ["train", "--out", f"{desk.run}", "--resume"]


def weights_not_finite(desk: Desk) -> Argv:
    file = desk.checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors["mil.cls.weight"][0, 0] = float("nan")
    file.unlink()
    save_file(tensors, file)
    sign_again(desk.run)
    return desk.detect()


def swapped_weights(desk: Desk) -> Argv:
    file = desk.checkpoint / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    save_file({**tensors, "mil.cls.weight": torch.zeros(5, 1280)}, file)
    sign_again(desk.run)
    return desk.detect()


def model_cut_short(desk: Desk) -> Argv:
    file = desk.checkpoint / "model.safetensors"
    desk.spoil(file, file.read_bytes()[:-1000])
    return desk.detect()


def optimizer_cut_short(desk: Desk) -> Argv:
    file = desk.checkpoint / "optimiser.safetensors"
    desk.spoil(file, file.read_bytes()[:5])
    return ["train", "--out", f"{desk.run}", "--resume"]


def model_missing(desk: Desk) -> Argv:
    (desk.checkpoint / "model.safetensors").unlink()
    return ["train", "--out", f"{desk.run}", "--resume"]


def state_cut_short(desk: Desk) -> Argv:
    desk.spoil(desk.run / "state.json", (desk.run / "state.json").read_bytes()[:40])
    return desk.detect()


def state_of_something_else(desk: Desk) -> Argv:
    desk.spoil(desk.run / "state.json", '{"iteration": "four"}')
    return desk.detect()


def config_of_run_spoilt(desk: Desk) -> Argv:
    desk.edit(desk.run / "config.toml", 'kind = "lite0"', 'kind = "lite1"')
    return desk.detect()


# ---------------------------------------------------------------- truth and detections


def truth_missing(desk: Desk) -> Argv:
    (desk.at / "truth.json").unlink()
    return desk.evaluate()


def truth_not_json(desk: Desk) -> Argv:
    desk.spoil(desk.at / "truth.json", "{")
    return desk.evaluate()


def truth_without_images(desk: Desk) -> Argv:
    desk.spoil(desk.at / "truth.json", '{"annotations": []}')
    return desk.evaluate()


def truth_folder_without_split(desk: Desk) -> Argv:
    (desk.at / "VOC" / "Annotations").mkdir(parents=True)
    return [*desk.evaluate(), "--truth", f"{desk.at / 'VOC'}"]


def detections_not_json(desk: Desk) -> Argv:
    desk.spoil(desk.at / "found.json", "score 0.5")
    return desk.evaluate()


def detections_without_score(desk: Desk) -> Argv:
    desk.spoil(desk.at / "found.json", '[{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}]')
    return desk.evaluate()


def detections_of_other_photos(desk: Desk) -> Argv:
    desk.spoil(desk.at / "found.json", '[{"image_id": 99, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 1}]')
    return desk.evaluate()


def detections_of_other_classes(desk: Desk) -> Argv:
    desk.spoil(desk.at / "found.json", '[{"image_id": 1, "category_id": 9, "bbox": [1, 2, 3, 4], "score": 1}]')
    return desk.evaluate()


def unknown_metric(desk: Desk) -> Argv:
    return desk.evaluate("--metrics", "voc08")


def unknown_class_asked_for(desk: Desk) -> Argv:
    return desk.evaluate("--classes", "baloon")


def report_of_strange_truth(desk: Desk) -> Argv:
    return ["report", f"{desk.run}", "--out", f"{desk.out}", "--test-photos", f"{desk.world.test / 'photos'}",
            "--test-truth", f"{desk.at / 'truth.json'}"]  # fmt: skip
