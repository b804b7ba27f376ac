"""Write docs/api.md: the names that ``import tag2box`` gives, with their signatures and docstrings.

python docs/make_api.py
"""

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from textwrap import dedent

import tag2box

PAGE = Path(__file__).parent / "api.md"
SECTIONS = {
    "Commands": (
        "data_check", "stats", "propose", "import_proposals", "recall", "train", "resume", "prepare_training", "detect",
        "label", "review_labels", "trust", "train_student", "resume_student", "export", "export_model", "convert",
        "evaluate", "report", "track", "tracking", "push_to_hub", "demo", "diagnose", "load_run",
    ),
    "A model in memory": ("load", "Predictor", "Prediction", "PredictedBox"),
    "Settings": ("Config", "Data", "RECIPES", "StudentConfig"),
    "Data": ("DataSource", "Photo", "TaggedPhotos", "Detections", "Truth", "ProposalStore"),
    "Label sets": (
        "LabelSet", "LabelledPhotos", "LabelledPhoto", "LabelBox", "LabelRule", "read_reviews", "apply_reviews",
        "Reviews", "ReviewedPhoto", "Trust", "TrustRule",
    ),
    "Parts to extend": ("Labeler", "MilStrategy", "LossTerm", "Backbone", "BackboneSettings", "ProposalMethod",
                        "StudentSettings", "Tracker", "TrackedRun"),
    "Training": (
        "Detector", "Criterion", "Step", "StepRng", "LossInputs", "LossOutput", "Batch", "BatchMeta", "Proposals",
        "Outputs", "LabelerInput", "Labeling", "PseudoBoxes", "PseudoLabels", "Requirements",
    ),
    "Progress and errors": ("Progress", "TerminalProgress", "silent", "UserError", "Interrupted"),
}  # fmt: skip
HEAD = """# API

Everything that `import tag2box` gives, written by `python docs/make_api.py`. Names are imported on first use. Functions
that are commands do what the command of the same name does. `docs/architecture.md` has the map of the package;
[settings.md](settings.md) lists every setting.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [entry(name) for name in names]
    return "\n".join(parts)


def entry(name: str) -> str:
    """One name: where it is defined, its signature, its docstring, its public methods."""
    part = getattr(tag2box, name)
    if not (inspect.isclass(part) or inspect.isfunction(part)):
        return f"### `{name}`\n\nNamed configurations: {', '.join(f'`{key}`' for key in list(part)[:4])}, ...\n"
    home = part.__module__.removeprefix("tag2box.").replace(".", "/")
    lines = [f"### `{name}`\n", f"`{home}.py`\n"]
    if inspect.isfunction(part):
        lines.append(f"```text\n{name}{_signature(part)}\n```\n")
    elif is_dataclass(part):
        lines.append("Fields: " + ", ".join(f"`{field.name}`" for field in fields(part)) + ".\n")
    lines.append(_text(part))
    if inspect.isclass(part):
        lines += _methods(part)
    return "\n".join(lines)


def _signature(function: object) -> str:
    text = str(inspect.signature(function))  # type: ignore[arg-type]
    text = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", text)
    return re.sub(r"\b(?:tag2box|pathlib|collections|torch)\.(?:\w+\.)*(?=[A-Z])", "", text).replace("'", "")


def _text(part: object) -> str:
    doc = dedent(inspect.getdoc(part) or "")
    doc, _, example = doc.partition("\nExample:")
    doc = re.sub(r"``([^`]+)``", r"`\1`", doc)
    return doc.strip() + "\n" + (f"\n```python\n{dedent(example).strip()}\n```\n" if example.strip() else "")


def _methods(part: type) -> list[str]:
    rows = []
    for name, member in vars(part).items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        doc = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
        if (name == "__call__" or not name.startswith("_")) and inspect.isfunction(function) and doc:
            rows.append(f"- `{name}`: {doc.replace('``', '`')}")
    return [*rows, ""] if rows else []


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
