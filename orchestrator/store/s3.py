"""A store below a prefix of a bucket, on Amazon S3 or on anything that speaks its protocol.

Endpoint, region and credentials are looked for where every program that uses boto3 looks. An object appears whole with
one PUT, whose bytes the endpoint checks against their MD5. A request that fails for a reason that passes is repeated
for minutes: by this module and not by botocore, whose pauses would use up Python's global random numbers in the middle
of a training run, and whose budget for all threads together lasts for about a minute.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import functools
import hashlib
import io
import random
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import boto3.session
import botocore.loaders
import botocore.session
import pyarrow as pa
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from orchestrator.store import s3_errors
from orchestrator.store.files import TEMPORARY, Entry, StoreError
from orchestrator.store.ranges import Ranges

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
"""Without a byte of an answer after which a request has failed."""

PATIENCE = 300.0
"""Seconds for which a request is repeated that fails for a reason that passes."""

FIRST_PATIENCE = 30.0
"""The same as long as the endpoint has not answered at all: as a rule, its address is wrong."""

PUT_LIMIT = 5 * 2**30
"""Bytes above which an object needs more than one request."""

FIRST_PAUSE = 0.5
"""Seconds between a request and its first repetition; each further pause is twice as long, up to 20 s."""

_PART = 512 * 2**20
_WRITER = "noisegrid-writer"
"""The metadata by which a writer knows its own object."""

Value = TypeVar("Value")


class S3Files:
    """Files below a prefix of a bucket, see :class:`orchestrator.store.files.Files`. Threads may share it.

    Args:
        url: ``s3://bucket/prefix``.

    Raises:
        StoreError: the URL names no bucket, or what boto3 is configured with is contradictory.
    """

    def __init__(self, url: str) -> None:
        self.bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not self.bucket:
            raise StoreError(f"store {url!r} names no bucket; give s3://bucket or s3://bucket/folder")
        folders = [folder for folder in prefix.split("/") if folder]
        self.url = "/".join(["s3:/", self.bucket, *folders])
        self.writable = True
        self.exclusive = True
        self._prefix = "".join(f"{folder}/" for folder in folders)
        self._answered = False
        self._hurried = False
        self._random = random.Random()
        try:
            self._client = _client(CONNECT_SECONDS, READ_SECONDS)
        except BotoCoreError as error:
            why = s3_errors.reason(error, bucket=self.bucket, endpoint="the endpoint", seconds=0)
            raise StoreError(f"cannot use {self.url}: {why}") from error
        except ValueError as error:  # an endpoint that is no URL
            raise StoreError(f"cannot use {self.url}: {error}") from error

    def create(self, folder: str) -> None:
        """Nothing: a folder is there as long as something lies in it."""

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Write an object, in place of any other of that path."""
        with self._writing("write", path):
            self._ask(lambda: self._upload(path, data))

    def put_if_absent(self, path: str, data: bytes, *, durable: bool = True) -> bool:
        """Write an object unless there is one of that path, by a PUT that the endpoint refuses then.

        It is looked for before, so that no more than this instant is open where an endpoint ignores the condition.
        """
        with self._writing("write", path):
            return self.stat(path) is None and self._put_new(path, data)

    def get(self, path: str) -> bytes | None:
        """The bytes of an object, or None if there is none."""

        def whole() -> bytes:
            data: bytes = self._client.get_object(**self._object(path))["Body"].read()
            return data

        with self._reporting("read", path):
            return self._unless_missing(whole)

    def open(self, path: str) -> pa.NativeFile | None:
        """An object opened for reading parts of it, or None if there is none."""

        def part(bytes_: str, tag: str | None) -> tuple[bytes, str, str]:
            match = {} if tag is None else {"IfMatch": tag}
            answer = self._client.get_object(**self._object(path), Range=f"bytes={bytes_}", **match)
            return answer["Body"].read(), answer["ETag"], answer.get("ContentRange", "")

        def fetch(start: int, end: int) -> bytes:
            with self._reporting("read", path):
                try:
                    return self._ask(lambda: part(f"{start}-{end - 1}", tag))[0]
                except ClientError as error:
                    if s3_errors.code(error) in s3_errors.REFUSED | s3_errors.MISSING:
                        raise StoreError(f"cannot read {self.url}/{path}: it was replaced meanwhile") from error
                    raise

        with self._reporting("read", path):
            try:
                found = self._unless_missing(lambda: part(f"-{Ranges.AHEAD}", None))
            except ClientError as error:
                if s3_errors.code(error) not in s3_errors.NO_RANGE:
                    raise
                return pa.PythonFile(io.BytesIO(), "r")  # an empty object has no last bytes
            if found is None:
                return None
            data, tag, content_range = found
            size = int(content_range.rpartition("/")[2]) if content_range else len(data)
            return pa.PythonFile(Ranges(fetch, size, data), "r")

    def stat(self, path: str) -> Entry | None:
        """What is known of an object without reading it, or None if there is none."""
        with self._reporting("read", path):
            head = self._unless_missing(lambda: self._client.head_object(**self._object(path)))
            return None if head is None else _entry(path.rpartition("/")[2], head["ContentLength"], head)

    def entries(self, folder: str, prefix: str = "") -> list[Entry]:
        """The objects of a folder whose names start with ``prefix``, sorted by name."""
        found = []
        with self._reporting("list", folder):
            for page in self._pages(f"{folder}/", prefix):
                for item in page.get("Contents", []):
                    name = item["Key"].removeprefix(f"{self._prefix}{folder}/")
                    if name and not name.startswith((".", "_")):
                        found.append(_entry(name, item["Size"], item))
        return sorted(found, key=lambda entry: entry.name)

    def names(self) -> list[str]:
        """What lies below the prefix itself, objects and folders, sorted; nothing if it is empty."""
        found = set()
        with self._reporting("list", ""):
            for page in self._pages("", ""):
                keys = [item["Key"] for item in page.get("Contents", [])]
                keys += [item["Prefix"] for item in page.get("CommonPrefixes", [])]
                found |= {key.removeprefix(self._prefix).rstrip("/") for key in keys}
        return sorted(found - {""})

    def delete(self, path: str) -> None:
        """Delete an object, if there is one."""
        with self._writing("delete", path):
            self._ask(lambda: self._client.delete_object(**self._object(path)))

    def move(self, path: str, to: str) -> bool:
        """Copy an object and delete it; returns whether there was one.

        An object that takes its place meanwhile is neither copied nor, where the endpoint can tell, deleted.
        """
        with self._writing("move", path):
            entry = self.stat(path)
            if entry is None:
                return False
            source, match = self._object(path), f'"{entry.tag}"'
            try:
                self._ask(
                    lambda: self._client.copy_object(**self._object(to), CopySource=source, CopySourceIfMatch=match)
                )
            except ClientError as error:
                if s3_errors.code(error) in s3_errors.MISSING | s3_errors.REFUSED:
                    return False
                raise
            try:
                self._ask(lambda: self._client.delete_object(**source, IfMatch=match))
            except ClientError as error:
                if s3_errors.code(error) in s3_errors.UNKNOWN:
                    self._ask(lambda: self._client.delete_object(**source))
                elif s3_errors.code(error) not in s3_errors.MISSING | s3_errors.REFUSED:
                    raise
            return True

    def probe(self) -> None:
        """Find out whether the endpoint refuses a PUT on the condition that there is no such object."""
        path = f"{TEMPORARY}/probe-{uuid.uuid4().hex}"
        with self._writing("write", path):
            self._put_new(path, b"1")
            if self._put_new(path, b"2"):
                self.exclusive = False
        self.delete(path)

    def hurried(self, seconds: float) -> S3Files:
        """The same files, of which every request is made once, and given up after ``seconds`` without an answer."""
        hurried = copy.copy(self)
        hurried._hurried = True
        # One half for the connection, the other for what is asked on it.
        hurried._client = _client(min(CONNECT_SECONDS, seconds / 2), min(READ_SECONDS, seconds / 2))
        return hurried

    def _put_new(self, path: str, data: bytes) -> bool:
        """One PUT with the condition; returns whether the object is this one.

        A PUT whose answer was lost is refused when it is repeated, by the object that it wrote itself.
        """
        writer = uuid.uuid4().hex
        try:
            self._ask(lambda: self._upload(path, data, IfNoneMatch="*", Metadata={_WRITER: writer}))
        except ClientError as error:
            if s3_errors.code(error) in s3_errors.REFUSED:
                head = self._unless_missing(lambda: self._client.head_object(**self._object(path)))
                return head is not None and head.get("Metadata", {}).get(_WRITER) == writer
            if s3_errors.code(error) not in s3_errors.UNKNOWN:
                raise
            self.exclusive = False
            self._ask(lambda: self._upload(path, data))
        return True

    def _upload(self, path: str, data: bytes, **options: Any) -> None:
        if len(data) > PUT_LIMIT and not options:
            # It deletes the parts where one of them fails.
            parts = TransferConfig(multipart_threshold=PUT_LIMIT, multipart_chunksize=_PART, use_threads=False)
            self._client.upload_fileobj(io.BytesIO(data), **self._object(path), Config=parts)
        else:
            digest = hashlib.md5(data, usedforsecurity=False).digest()
            self._client.put_object(
                **self._object(path), Body=data, ContentMD5=base64.b64encode(digest).decode(), **options
            )

    def _pages(self, folder: str, prefix: str) -> Iterator[dict[str, Any]]:
        """The listing of one folder, a thousand objects at a time."""
        where = {"Bucket": self.bucket, "Prefix": f"{self._prefix}{folder}{prefix}", "Delimiter": "/"}
        more: dict[str, str] = {}
        while True:
            page = self._ask(lambda: self._client.list_objects_v2(**where, **more))  # noqa: B023
            yield page
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _object(self, path: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": f"{self._prefix}{path}"}

    def _unless_missing(self, request: Callable[[], Value]) -> Value | None:
        try:
            return self._ask(request)
        except ClientError as error:
            if s3_errors.code(error) in s3_errors.MISSING:
                return None
            raise

    def _ask(self, request: Callable[[], Value]) -> Value:
        """Make a request, again and again while it fails for a reason that passes, but not for ever."""
        began, pause = time.monotonic(), FIRST_PAUSE
        while True:
            try:
                answer = request()
                self._answered = True
                return answer
            except (BotoCoreError, ClientError) as error:
                if not s3_errors.passes(error) or time.monotonic() + pause - began > self._patience:
                    raise
            time.sleep(pause * self._random.uniform(0.5, 1))
            pause = min(2 * pause, 20.0)

    @property
    def _patience(self) -> float:
        if self._hurried:
            return 0.0
        return PATIENCE if self._answered else min(FIRST_PATIENCE, PATIENCE)

    @contextlib.contextmanager
    def _writing(self, verb: str, path: str) -> Iterator[None]:
        if not self.writable:
            raise StoreError(f"cannot {verb} {self.url}/{path}: there is no store in {self.url} yet")
        with self._reporting(verb, path):
            yield

    @contextlib.contextmanager
    def _reporting(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError) as error:
            endpoint = self._client.meta.endpoint_url
            why = s3_errors.reason(error, bucket=self.bucket, endpoint=endpoint, seconds=self._patience)
            raise StoreError(f"cannot {verb} {self.url}/{path}: {why}") from error


def _entry(name: str, size: int, described: dict[str, Any]) -> Entry:
    """An object as a listing or a HEAD request describes it; some endpoints give fractions of a second in one only."""
    return Entry(name, size, int(described["LastModified"].timestamp()) * 10**9, described["ETag"].strip('"'))


def _client(connect_seconds: float, read_seconds: float) -> Any:
    """An S3 client from boto3's usual environment; where it is not Amazon's, with addresses like ENDPOINT/BUCKET."""
    core = botocore.session.Session()
    core.register_component("data_loader", _loader())
    session = boto3.session.Session(botocore_session=core)
    config = Config(
        connect_timeout=connect_seconds,
        read_timeout=read_seconds,
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=64,
        tcp_keepalive=True,
        # What goes beyond the MD5 is not understood by every endpoint.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    client = session.client("s3", config=config)
    amazon = ".amazonaws." in client.meta.endpoint_url
    if amazon or "addressing_style" in core.get_scoped_config().get("s3", {}):
        return client
    return session.client("s3", config=config.merge(Config(s3={"addressing_style": "path"})))


@functools.cache
def _loader() -> botocore.loaders.Loader:
    """Remembers the description of the protocol, which takes a second to read."""
    return botocore.loaders.create_loader()
