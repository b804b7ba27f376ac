"""Runs and students on the Hugging Face Hub: what is needed to detect, and a model card written from the run.

tag2box.push_to_hub("runs/mine", "owner/name", out="upload")     # writes the files; nothing leaves this machine
tag2box.push_to_hub("runs/mine", "owner/name", upload=True)      # uploads them
model = tag2box.load("owner/name")
"""

import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tag2box import errors, identity, io, runs, settings, storage
from tag2box.labels.trust import Trust
from tag2box.models.weights.zoo import ZOO
from tag2box.student.student_training import StudentConfig
from tag2box.training import checkpoint, events

CARD = "README.md"
_METRICS = "metrics.json"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PART = re.compile(r"[\w.]+:[A-Za-z_]\w*")  # a part of another package
_FILES = [runs.CONFIG_FILE, checkpoint.STATE, "checkpoint-*/*", _METRICS, CARD]
_MUST_NOT = """\
- Decisions about people, safety, health or access, or any other use in which a missed or a wrong box does harm, without
  a person who checks each result.
- Counting or measuring: a box may cover a part of an object, or several. Tags say what is in a photo, not where.
- Classes, cameras, places or seasons that the training photos do not show.
- Evidence of absence: a photo without boxes may well show the object.
"""


# ---------------------------------------------------------------- push


@dataclass(frozen=True)
class HubFiles:
    """The files of a model for the hub, and whether they were uploaded."""

    folder: Path
    names: tuple[str, ...]
    address: str | None = None
    """Where they are on the hub; None: nothing was uploaded."""


def push_to_hub(
    run: Path | str,
    repository: str,
    *,
    upload: bool = False,
    out: Path | None = None,
    private: bool = True,
    licence: str | None = None,
    trust: Path | None = None,
    endpoint: str | None = None,
) -> HubFiles:
    """Write what the hub needs of a run or student, with a model card; upload it only if ``upload`` is set.

    Paths, names of photos, logs and the state of the optimizer stay here.

    Args:
        repository: ``owner/name``.
        out: new folder for the files; without it they are temporary, which is of use with ``upload`` only.
        private: whether a repository that does not exist yet is private.
        licence: licence of the model, as the hub names it, such as ``apache-2.0``; None: stated as open.
        trust: trust.json of `tag2box trust` on labels of this run, for precision with intervals on the card.
        endpoint: address of the hub; None: that of huggingface_hub.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise errors.UserError(f"{errors.printable(repository)}: no name of a repository; expected owner/name")
    if not upload and out is None:
        raise errors.UserError("nothing to do: name a folder to write (--out), or upload with --upload")
    api = _client(endpoint) if upload else None
    with ExitStack() as stack:
        folder = stack.enter_context(_staged(out))
        _write_files(Path(run), folder, repository, licence=licence, trust=trust)
        names = tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
        address = None
        if api is not None:
            with _network(repository):
                address = str(api.create_repo(repository, private=private, exist_ok=True))
                api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by tag2box")
    return HubFiles(out or folder, names, address)


@contextmanager
def _staged(out: Path | None) -> Iterator[Path]:
    """A folder that becomes ``out``, or is removed at the end without one."""
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    if out.exists():
        raise errors.UserError(f"{out}: exists already; name a new folder")
    with storage.writing(out), io.replacing_folder(out) as folder:
        yield folder


def _write_files(run: Path, folder: Path, repository: str, *, licence: str | None, trust: Path | None) -> None:
    config = runs.read_any_config(run)
    if not checkpoint.has_checkpoint(run):
        raise errors.UserError(f"{run}: no checkpoint yet; train it first")
    state = runs.check_run(run, config)
    public = replace(identity.pathless(config), name=config.name)
    io.write_text(folder / runs.CONFIG_FILE, settings.dump(public))
    shutil.copy(run / checkpoint.STATE, folder / checkpoint.STATE)
    if state.manifest is not None:
        storage.verify_file(run / state.folder / checkpoint.MODEL, "restore it, or train again")
    (folder / state.folder).mkdir()
    for name in (checkpoint.MODEL, checkpoint.STATE, storage.MANIFEST):
        shutil.copy(run / state.folder / name, folder / state.folder / name)
    if (run / _METRICS).exists():
        shutil.copy(run / _METRICS, folder / _METRICS)
    measured = None if trust is None else Trust.read(trust)
    try:
        card = model_card(run, config, state, repository, licence=licence, trust=measured)
    except (AttributeError, KeyError, TypeError, IndexError):
        raise errors.UserError(
            f"{run}: {_METRICS} or {events.EVENTS_FILE} is not one that tag2box wrote; write it again, or remove it"
        ) from None
    io.write_text(folder / CARD, card)


# ---------------------------------------------------------------- the model card


def model_card(
    run: Path,
    config: identity.AnyConfig,
    state: checkpoint.State,
    repository: str,
    *,
    licence: str | None = None,
    trust: Trust | None = None,
) -> str:
    """The text of the card: what it is, its data, its figures, the licence of its weights, and its limits."""
    start = next((e for e in events.read_events(run) if e["event"] == "start"), {}) if _has_events(run) else {}
    kind = "A student of tag2box" if isinstance(config, StudentConfig) else f"{config.name}, trained with tag2box"
    classes = ", ".join(state.classes)
    head = ["---", "library_name: tag2box", "pipeline_tag: object-detection", f"license: {licence or 'other'}",
            "tags:", "- object-detection", "- weakly-supervised", "---"]  # fmt: skip
    return "\n".join(
        [
            *head, "", f"# {repository}", "",
            f"{kind}: an object detector learned from image-level tags. {len(state.classes)} classes: {classes}.",
            "", "```python", "import tag2box  # pip install tag2box[hub]", "",
            f'model = tag2box.load("{repository}")', 'print(model("photo.jpg").names)', "```", "",
            "## Data", "", *_data_lines(start, config), "",
            "## Figures", "", *_figure_lines(run), *_trust_lines(trust), "",
            "## Training", "", *_training_lines(start, config, state), "",
            "## Licence", "", *_licence_lines(config, licence), "",
            "## What it must not be used for", "", _MUST_NOT,
        ]
    )  # fmt: skip


def _has_events(run: Path) -> bool:
    return (run / events.EVENTS_FILE).exists()


def _data_lines(start: Mapping[str, Any], config: identity.AnyConfig) -> list[str]:
    count = start.get("train_photos", "an unknown number of")
    uses = start.get("uses")
    if isinstance(config, StudentConfig):
        made = [f"These boxes come from a method that was itself trained on: {uses}."] if uses else []
        head = f"Trained on a label set of {count} photos, whose boxes were put there by another run or reviewed."
        return [head, *made]
    taught = "Tags say which classes a photo shows; no box was used."
    if start.get("boxed_photos"):
        taught = f"Beside the tags, {start['boxes']} reviewed boxes of {start['boxed_photos']} photos were used."
    more = [f"The proposals come from a method that was itself trained on: {uses}."] if uses else []
    return [
        f"Trained on {count} photos with image-level tags. {taught}",
        *more,
        "The photos are not part of this model.",
    ]


def _figure_lines(run: Path) -> list[str]:
    if not (run / _METRICS).exists():
        return ["None: the run was not evaluated. Do not assume any."]
    test = io.read_json(run / _METRICS, "the metrics of a run").get("test", {})
    voc, intervals = test.get("voc07", {}), test.get("intervals", {}).get("voc07", {})
    rows = {"mean": voc.get("mAP"), **voc.get("per_class", {})}
    lines = ["AP at IoU 0.5 (VOC 2007) on the test photos of the run, one seed:", "", "| class | AP |", "|---|---|"]
    lines += [f"| {name} | {_share(value)}{_interval(intervals.get(name))} |" for name, value in rows.items()]
    return [*lines, *([] if intervals else ["", "Without intervals: these figures would differ on other photos."])]


def _share(value: object) -> str:
    return f"{100 * value:.1f}" if isinstance(value, int | float) else "not measured"


def _interval(ends: object) -> str:
    return f" ({_share(ends[0])} to {_share(ends[1])})" if isinstance(ends, list | tuple) and len(ends) == 2 else ""


def _trust_lines(trust: Trust | None) -> list[str]:
    if trust is None:
        return []
    head = ["", f"Precision of its labels, from reviews of {trust.sampled} photos drawn at random:", "",
            "| class | precision (95 % interval) | verdict |", "|---|---|---|"]  # fmt: skip
    rows = [
        f"| {name} | {_share(own.precision.share)}{_interval(own.precision.interval)} | {own.verdict} |"
        for name, own in trust.classes.items()
    ]
    return [*head, *rows]


def _training_lines(start: Mapping[str, Any], config: identity.AnyConfig, state: checkpoint.State) -> list[str]:
    versions = ", ".join(f"{name} {value}" for name, value in start.get("versions", {}).items())
    seed = getattr(config.plan, "seed", None)
    return [
        f"{state.iteration} iterations, seed {seed}; {versions or 'versions unknown'}. `config.toml` has all settings."
    ]


def _licence_lines(config: identity.AnyConfig, licence: str | None) -> list[str]:
    weights = str(getattr(config.backbone, "weights", None) or getattr(config.backbone, "kind", "unknown"))
    known = ZOO.get(weights)
    begun = f"pretrained weights `{weights}`, licence {known.licence}" if known else "weights of a file: ask its source"
    own = licence or "not stated by the one who uploaded it: ask before use"
    return [f"- This model: {own}.", f"- The backbone began with {begun}.", "- The code, tag2box: Apache-2.0."]


# ---------------------------------------------------------------- download


def is_repository(name: str) -> bool:
    """Whether a name is that of a model on the hub: ``owner/name``, and nothing of this machine is there."""
    return bool(_REPOSITORY.fullmatch(name)) and not Path(name).exists() and not Path(name).parent.exists()


def download(repository: str, *, endpoint: str | None = None) -> Path:
    """Fetch a model into the cache of huggingface_hub; returns the folder, a run like any other.

    Weights are read without unpickling. A model whose settings name parts of other packages is refused, because their
    import would run code that its author chose.
    """
    hub = _package(f"{repository}: no such folder, and for models of the Hugging Face Hub")
    with _network(repository, "no such folder here, and "):
        folder = Path(hub.snapshot_download(repository, allow_patterns=_FILES, endpoint=endpoint))
    config = folder / runs.CONFIG_FILE
    if not config.exists():
        raise errors.UserError(f"{repository}: has no {runs.CONFIG_FILE}; expected a model of `tag2box push`")
    try:
        outside = sorted(_outside_parts(tomllib.loads(io.read_text(config, "the settings of a run"))))
    except tomllib.TOMLDecodeError as error:
        raise errors.UserError(f"{repository}: its {runs.CONFIG_FILE} is damaged ({error})") from None
    if outside:
        raise errors.UserError(
            f"{repository}: its settings name {errors.printable(outside[0])}, a part of another package; if you trust "
            f"it, load the folder itself: {folder}"
        )
    return folder


def _outside_parts(value: object) -> Iterator[str]:
    """Texts in settings of the form ``package.module:Name``, wherever they are."""
    if isinstance(value, str):
        if _PART.fullmatch(value):
            yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _outside_parts(item)


# ---------------------------------------------------------------- huggingface_hub


def _package(why: str) -> Any:
    try:
        return import_module("huggingface_hub")
    except ImportError:
        raise errors.UserError(
            f"{why} huggingface_hub is needed, which is missing: run `pip install tag2box[hub]`"
        ) from None


def _client(endpoint: str | None) -> Any:
    return _package("for uploads").HfApi(endpoint=endpoint)


@contextmanager
def _network(repository: str, what: str = "") -> Iterator[None]:
    """Turn failures of the hub into one line."""
    try:
        yield
    except errors.UserError:
        raise
    except Exception as error:  # of huggingface_hub and its HTTP client: access, network, a missing repository
        reason = errors.printable((str(error).splitlines() or [""])[0])
        raise errors.UserError(
            f"{repository}: {what}the Hugging Face Hub said: {type(error).__name__}: {reason}; "
            "check the name, the network, and `hf auth login`"
        ) from None
