"""Photos over http, named on the command line or in a list: the rows of the same photos as files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tag2box.cli.row_jobs import detect_rows, propose_rows
from tag2box.cli.student import train_student
from tag2box.formats import rows
from tag2box.proposals.selective_search import SelectiveSearch
from tiny import tiny_photos
from tiny_student import SMALL, tiny_labels

pytest.importorskip("aiohttp")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402


class _Quiet(SimpleHTTPRequestHandler):
    """Files of a folder, without a line on standard error about each."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A server of what is in ``tmp_path``."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=f"{tmp_path}")) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def by_name(folder: Path) -> dict[str, dict]:
    """Rows by the name of their photo, without where and when it was read."""
    content = rows.RowFolder.open(f"{folder}").rows()
    left_out = {"address", "modified_ns"}
    return {Path(row["address"]).stem: {k: v for k, v in row.items() if k not in left_out} for row in content}


def test_proposals_of_photos_over_http_are_those_of_the_files(tmp_path: Path, address: str) -> None:
    tiny_photos(tmp_path, 3)
    (tmp_path / "photos" / "text.jpg").write_text("no photo")
    method = SelectiveSearch(short_side=64, min_side=4, max_boxes=20)
    names = [f"{address}/photos/photo{number}.jpg" for number in range(3)]
    bad = [f"{address}/photos/text.jpg", f"{address}/photos/absent.jpg"]
    done = propose_rows([*names, *bad], method, f"{tmp_path / 'there'}")
    propose_rows([f"{tmp_path / 'photos'}"], method, f"{tmp_path / 'here'}")
    there, here = by_name(tmp_path / "there"), by_name(tmp_path / "here")
    assert (done.rows, done.bad) == (5, 2) and len(here) == 4
    assert {name: there[name] for name in here if name != "text"} == {n: here[n] for n in here if n != "text"}
    assert here["photo0"]["boxes"] and here["photo0"]["sha256"]
    assert there["text"]["error"].startswith(f"{bad[0]}: not readable as a photo")
    assert there["absent"]["error"] == f"{bad[1]}: no such file, folder or bucket; check the address"
    assert propose_rows([*names, *bad], method, f"{tmp_path / 'there'}").rows == 0, "nothing is computed again"


def test_detections_of_a_list_over_http_are_those_of_the_files(tmp_path: Path, address: str) -> None:
    train_student(tiny_labels(tmp_path), tmp_path / "run", overrides=(*SMALL, "plan.iterations=1"))
    files = sorted((tmp_path / "photos").iterdir())
    pq.write_table(pa.table({"address": [f"photos/{file.name}" for file in files]}), tmp_path / "list.parquet")
    detect_rows(tmp_path / "run", [f"{address}/list.parquet"], f"{tmp_path / 'there'}", min_score=0)
    detect_rows(tmp_path / "run", [f"{tmp_path / 'photos'}"], f"{tmp_path / 'here'}", min_score=0)
    there = by_name(tmp_path / "there")
    assert len(there) == 4 and there == by_name(tmp_path / "here")
    assert all(row["boxes"] for row in there.values())
