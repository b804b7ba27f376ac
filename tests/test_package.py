"""The installed package: quick to import, every command a function, typed, within the limits of style."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import tag2box

ROOT = Path(str(tag2box.__file__)).parent
FILES = sorted(ROOT.rglob("*.py"))
COMMANDS = (
    "apply_reviews", "convert", "data_check", "demo", "detect", "diagnose", "evaluate", "export", "export_model",
    "import_proposals", "label", "label_agreement", "merge_labels", "prepare_training", "propose", "push_to_hub",
    "read_reviews", "recall", "report", "resume", "resume_student", "review_labels", "stats", "track", "train",
    "train_seeds", "train_student", "trust",
)  # fmt: skip
CLASSES = (
    "Backbone", "BackboneSettings", "Batch", "BatchMeta", "ClassAgreement", "Config", "Criterion", "Data", "DataSource",
    "Detections", "Detector", "Interrupted", "Labeler", "LabelerInput", "Labeling", "LabelBox",
    "LabelRule", "LabelSet", "LabelledPhoto", "LabelledPhotos", "LossInputs", "LossOutput", "LossTerm",
    "MilStrategy", "Outputs", "Photo", "PredictedBox", "Prediction", "Predictor", "Progress",
    "ProposalMethod", "ProposalStore", "Proposals", "PseudoBoxes", "PseudoLabels", "Requirements", "ReviewedPhoto",
    "Reviews", "RunChoice", "Step", "StepRng", "StudentConfig", "StudentSettings", "TaggedPhotos", "TerminalProgress",
    "TrackedRun", "Tracker", "Trust",
    "TrustRule", "Truth", "UserError",
)  # fmt: skip


def test_importing_it_loads_nothing_heavy():
    script = "import json, sys, tag2box; dir(tag2box); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout))
    assert not modules & {"torch", "numpy", "typer", "pydantic"}
    assert {name for name in modules if name.startswith("tag2box")} == {"tag2box"}


def test_the_public_names_are_pinned():
    assert sorted(tag2box.__all__) == sorted([*COMMANDS, *CLASSES, "RECIPES", "load", "load_run", "silent", "tracking"])


def test_every_public_name_is_listed_and_imported_from_the_module_that_defines_it():
    assert set(tag2box.__all__) <= set(dir(tag2box))
    for name in (*COMMANDS, *CLASSES):
        assert getattr(tag2box, name).__module__ == tag2box._MODULES[name], name


def test_type_checkers_see_the_same_names():
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    found = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert found == tag2box._MODULES


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_call_that_explains_itself(name):
    call = getattr(tag2box, name)
    assert callable(call)
    assert call.__name__ == name
    assert call.__doc__


def test_no_subpackage_takes_the_place_of_a_command():
    assert not {path.stem for path in ROOT.iterdir()} & set(COMMANDS)


def test_recipes_are_at_hand():
    assert all(isinstance(recipe(), tag2box.Config) for recipe in tag2box.RECIPES.values())


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'boxes'"):
        tag2box.boxes  # noqa: B018 - the access is the test


def test_it_is_installed_typed_and_with_its_templates():
    assert metadata.version("tag2box")
    assert (ROOT / "py.typed").exists()
    assert list((ROOT / "reporting" / "templates").iterdir())
    assert (ROOT / "review" / "static" / "index.html").exists()
    scripts = {entry.name: entry.value for entry in metadata.entry_points(group="console_scripts")}
    assert scripts["tag2box"] == "tag2box.__main__:main"


# ---------------------------------------------------------------- rules that no tool of ours checks


def test_files_are_short():
    long = {file.name: n for file in FILES if (n := len(file.read_text().splitlines())) > 400}
    assert not long
    assert len(FILES) > 50


def test_functions_are_short():
    """40 lines of body; signature, docstring and decorators of the command line's functions do not count."""
    long = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                lines = (node.end_lineno or 0) - body[0].lineno + 1
                if lines > 40:
                    long[f"{file.name}:{node.name}"] = lines
    assert not long


def test_devices_follow_their_input():
    banned = re.compile(r"\.cuda\(|\.to\([\"']cuda")
    assert not [file.name for file in FILES if banned.search(file.read_text())]


def test_nothing_is_unpickled():
    for file in FILES:
        text = file.read_text()
        for node in ast.walk(ast.parse(text if "load" in text else "")):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "np.load", "pickle.load"}:
                safe = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert safe.get("weights_only") == "True" or safe.get("allow_pickle") == "False", file
