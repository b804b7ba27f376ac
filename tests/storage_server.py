"""An S3-compatible server in this process, for tests of object storage."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest


@contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start the server with an empty bucket, and set the environment for it; yields the bucket's address."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    values = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in values.items():
        patch.setenv(name, value)
    forget_connections()
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"  # what a server holds is kept as long as its process lives
    fsspec.filesystem("s3").mkdir(bucket)
    try:
        yield f"s3://{bucket}"
    finally:
        forget_connections()
        server.stop()


def forget_connections() -> None:
    """Let the next file system read the environment again."""
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
