"""A store on S3-compatible storage: the contract against a real server, and what only a troubled network can show."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.plan import expand
from orchestrator.store import Store, StoreError, open_store, s3
from orchestrator.store.files import Files
from orchestrator.store.leases import Leases, sweeping
from orchestrator.store.s3 import S3Files
from protocols import load_protocol
from tests import factory
from tests.s3_server import BUCKET, ENVIRONMENT, Fault, Proxy, s3_server, troubled
from tests.store_contract import StoreContract
from tests.test_compaction import CompactionContract
from tests.test_storing import StoringContract

ROW = factory.record(factory.plan(sources=["init"], replicates=1)[0])
RECORD = f"records/{ROW['id']}.parquet"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def account(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is where boto3 looks for S3."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def url(account: None) -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/store"


@pytest.fixture
def proxy(account: None, server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that makes trouble is where boto3 looks for S3; requests are repeated at once."""
    monkeypatch.setattr(s3, "FIRST_PAUSE", 0.001)
    with troubled(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy


@pytest.fixture
def store(proxy: Proxy, url: str) -> Store:
    return open_store(url, create=True)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PATIENCE", 0.2)
    monkeypatch.setattr(s3, "READ_SECONDS", 1.0)


CLIENT = functools.cache(s3._client)


class OnS3:
    """Where the stores of a contract lie. They share a client: to make one takes longer than most requests."""

    @pytest.fixture
    def url(self, url: str, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(s3, "_client", CLIENT)
        return url

    @pytest.fixture
    def files(self, url: str) -> Files:
        return S3Files(url)

    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> str:
        return str(tmp_path / "elsewhere")


class TestS3Store(OnS3, StoreContract):
    share = 0.1
    folders = False


class TestS3Compaction(OnS3, CompactionContract):
    share = 0.2
    commits = 30
    kills = 1


class TestS3Storing(OnS3, StoringContract):
    every = 4


# Files


def test_a_folder_has_its_own_files_only(store: Store) -> None:
    for path in ("looks/b", "looks/a", "looks/ab", "looks/.hidden", "looks/_hidden", "looks/deep/c", "looks2/d"):
        store.files.put(path, b"12345")
    assert [(entry.name, entry.size) for entry in store.files.entries("looks")] == [("a", 5), ("ab", 5), ("b", 5)]
    assert [entry.name for entry in store.files.entries("looks", "a")] == ["a", "ab"]
    assert store.files.entries("look") == []
    assert store.files.names() == ["looks", "looks2", "store.json"]


def test_a_listing_has_any_number_of_pages(store: Store) -> None:
    names = [f"{number:02}" for number in range(10)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: store.files.put(f"looks/{name}", b""), names))

    def three(params: dict[str, Any], **others: Any) -> None:
        params["MaxKeys"] = 3

    store.files._client.meta.events.register("before-parameter-build.s3.ListObjectsV2", three)  # type: ignore[attr-defined]
    assert [entry.name for entry in store.files.entries("looks")] == names
    assert set(store.files.names()) == {"looks", "store.json"}


def test_equal_entries_mean_that_a_file_is_the_same(store: Store) -> None:
    """Though the clock of S3 has but seconds."""
    seen = set()
    for content in (b"one", b"two", b"six"):
        store.files.put("looks/a", content)
        (listed,) = store.files.entries("looks")
        assert listed == store.files.stat("looks/a")
        seen.add(listed)
    assert len(seen) == 3


def test_a_bucket_itself_can_be_a_store(account: None) -> None:
    files = S3Files(f"s3://{BUCKET}//")
    assert files.url == f"s3://{BUCKET}"
    files.put("looks/a", b"1")
    assert S3Files(f"s3://{BUCKET}/looks").get("a") == b"1"
    files.delete("looks/a")


def test_the_short_columns_of_a_large_record_are_read_without_its_logits(store: Store, proxy: Proxy) -> None:
    fake = factory.plan(sources=["init"], replicates=1)[0]
    store.commit(factory.record(fake, examples=60_000))
    entry = store.files.stat(f"records/{fake.run.id}.parquet")
    assert entry is not None and entry.size > 2_000_000
    reader = open_store(store.url)
    proxy.requests.clear()
    assert reader.table()["id"].to_pylist() == [fake.run.id]
    read = [request.answered for request in proxy.requests if request.method == "GET" and "/records/" in request.path]
    assert sum(read) < 600_000 and len(read) < 12
    proxy.requests.clear()
    assert len(dict(reader.logits([fake.run.id]))) == 1
    assert sum(request.answered for request in proxy.requests) > 2_000_000


def test_parts_of_a_file_are_those_of_one_file(store: Store) -> None:
    data = random.Random(0).randbytes(300_000)
    store.files.put("kept/a", data)
    source = store.files.open("kept/a")
    assert source is not None and source.size() == len(data)
    for start, length in ((299_990, 100), (0, 10), (10, 70_000), (70_000, 5), (200_000, 100_000), (5, 0)):
        source.seek(start)
        assert source.read(length) == data[start : start + length]
    source.seek(0)
    assert source.read() == data
    source = store.files.open("kept/a")
    assert source is not None
    store.files.put("kept/a", data[::-1])
    with pytest.raises(StoreError, match=r"^cannot read s3://.*/kept/a: it was replaced meanwhile$"):
        source.read(10)


def test_an_empty_file_is_read(store: Store) -> None:
    store.files.put("kept/a", b"")
    source = store.files.open("kept/a")
    assert source is not None and source.read() == b""
    assert store.files.get("kept/a") == b""


def test_what_one_put_does_not_admit_is_put_in_parts(
    store: Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    monkeypatch.setattr(s3, "PUT_LIMIT", 6 * 2**20)
    monkeypatch.setattr(s3, "_PART", 5 * 2**20)
    data = random.Random(0).randbytes(11 * 2**20)
    store.files.put("kept/a", data)
    assert hashlib.sha256(store.files.get("kept/a") or b"").digest() == hashlib.sha256(data).digest()
    proxy.faults = [Fault("answer", "PUT", "partNumber=2", status=403, code="AccessDenied")]
    with pytest.raises(StoreError, match="access is denied"):
        store.files.put("kept/b", data)
    assert store.files.get("kept/b") is None
    uploads = store.files._client.list_multipart_uploads(Bucket=BUCKET)  # type: ignore[attr-defined]
    assert "Uploads" not in uploads


# Trouble that passes

OPERATIONS: dict[str, tuple[str, Callable[[Files], Any], Any]] = {
    "put": ("PUT", lambda files: (files.put("kept/b", b"new" * 999), files.get("kept/b"))[1], b"new" * 999),
    "put over": ("PUT", lambda files: (files.put("kept/a", b"new" * 999), files.get("kept/a"))[1], b"new" * 999),
    "put new": ("PUT", lambda files: (files.put_if_absent("kept/b", b"new"), files.get("kept/b")), (True, b"new")),
    "get": ("GET", lambda files: files.get("kept/a"), b"old" * 999),
    "open": ("GET", lambda files: files.open("kept/a").read(), b"old" * 999),
    "stat": ("HEAD", lambda files: files.stat("kept/a").size, 2997),
    "entries": ("GET", lambda files: [entry.name for entry in files.entries("kept")], ["a"]),
    "delete": ("DELETE", lambda files: (files.delete("kept/a"), files.get("kept/a"))[1], None),
    "move": ("PUT", lambda files: (files.move("kept/a", "kept/b"), files.get("kept/a"), files.get("kept/b"))[::2],
             (True, b"old" * 999)),
    "move, deleting": ("DELETE", lambda files: (files.move("kept/a", "kept/b"), files.get("kept/a")), (True, None)),
}  # fmt: skip

TRANSIENT = [
    Fault("answer", status=500, code="InternalError", times=3),
    Fault("answer", status=503, code="SlowDown", times=3),
    Fault("answer", status=429, code="TooManyRequests", times=1),
    Fault("answer", status=400, code="RequestTimeout", times=1),
    Fault("answer", status=409, code="ConditionalRequestConflict", times=2),
    Fault("cut", times=2),
    Fault("lose", times=2),
    Fault("shorten", times=2),
]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_survives_trouble_that_passes(store: Store, proxy: Proxy, name: str) -> None:
    method, operation, expected = OPERATIONS[name]
    for fault in TRANSIENT:
        if fault.kind == "shorten" and method != "GET":
            continue
        if method == "HEAD" and fault.status < 429:  # without a text there is no telling that it passes
            continue
        for path in ("kept/a", "kept/b"):
            store.files.delete(path)
        store.files.put("kept/a", b"old" * 999)
        proxy.faults = [Fault(**{**vars(fault), "method": method, "path": "kept", "seen": 0})]
        assert operation(store.files) == expected, fault
        assert proxy.faults[0].seen == fault.times, fault
        proxy.faults = []


@pytest.mark.parametrize("name", ["put", "put new", "get"])
def test_an_operation_survives_an_endpoint_that_hangs(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(s3, "READ_SECONDS", 1.0)
    files = open_store(url, create=True).files
    files.put("kept/a", b"old" * 999)
    method, operation, expected = OPERATIONS[name]
    proxy.faults = [Fault("hang", method, "kept", times=1)]
    assert operation(files) == expected
    assert proxy.faults[0].seen == 1


def test_a_hurried_request_is_made_once(store: Store, proxy: Proxy) -> None:
    hurried = store.files.hurried(0.5)
    hurried.put("kept/a", b"old")
    for fault in (Fault("hang", "PUT", "kept"), Fault("answer", "PUT", "kept"), Fault("cut", "PUT", "kept")):
        proxy.faults = [fault]
        with pytest.raises(StoreError, match="^cannot write s3://.*/kept/a: "):
            hurried.put("kept/a", b"new")
        assert fault.seen == 1
    proxy.faults = [Fault("answer", "PUT", "kept", times=2)]
    store.files.put("kept/a", b"new")
    assert hurried.get("kept/a") == b"new"


def test_a_request_that_hangs_does_not_stop_the_heartbeat(
    store: Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "READ_SECONDS", 3600.0)
    store = open_store(store.url)
    with sweeping(store, seconds=2.0) as sweep:
        proxy.faults = [Fault("hang", "PUT", "sweeps/", times=1)]

        def beats() -> int:
            beats: int = json.loads(store.files.get(f"sweeps/{sweep.id}.json") or b"")["heartbeat"]
            return beats

        deadline = time.monotonic() + 60
        while not proxy.faults[0].seen or beats() < 3:
            assert time.monotonic() < deadline, "there is no heartbeat any more"
            time.sleep(0.05)


def test_a_sweep_goes_on_after_trouble(store: Store, proxy: Proxy) -> None:
    proxy.faults = [
        Fault("lose", "PUT", "records/", times=1),
        Fault("answer", "PUT", "live/", times=2),
        Fault("cut", "PUT", "checkpoints/", times=1),
        Fault("shorten", "GET", "records/", times=1),
    ]
    assert store.begin(ROW["id"]) == 1
    assert store.commit(ROW)
    assert not store.commit(ROW | {"accuracy": 0.1})
    assert open_store(store.url).table(["accuracy"])["accuracy"].to_pylist() == [ROW["accuracy"]]
    assert store.live().num_rows == 0


def test_trouble_uses_up_no_global_random_numbers(store: Store, proxy: Proxy) -> None:
    before = random.getstate()
    proxy.faults = [Fault("answer", times=3)]
    store.files.put("kept/a", b"")
    assert random.getstate() == before


@pytest.mark.parametrize("kind", ["cut", "hang", "answer"])
def test_nothing_half_written_is_ever_read(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch, impatient: None, kind: str
) -> None:
    store = open_store(url, create=True)
    store.begin(ROW["id"])
    proxy.faults = [Fault(kind, "PUT", "records/")]
    with pytest.raises(StoreError, match=f"^cannot write {url}/{RECORD}: ") as caught:
        store.commit(ROW)
    assert "\n" not in str(caught.value)
    assert proxy.faults[0].seen
    reader = open_store(url)
    assert reader.finished() == set() and reader.corrupt() == {}
    assert reader.live().num_rows == 1
    proxy.faults = []
    monkeypatch.undo()
    assert store.commit(ROW)
    assert reader.finished() == {ROW["id"]}


def test_a_reader_sees_the_old_or_the_new_bytes(store: Store, proxy: Proxy) -> None:
    contents = [bytes([number]) * 50_000 for number in range(12)]
    store.files.put("kept/a", contents[0])
    proxy.faults = [Fault("cut", "PUT", "kept/a", times=4), Fault("lose", "PUT", "kept/a", times=4)]
    seen: list[bytes | None] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(store.files.get("kept/a"))

    reader = threading.Thread(target=read)
    reader.start()
    for content in contents:
        store.files.put("kept/a", content)
    done.set()
    reader.join()
    assert set(seen) <= set(contents)
    assert len(seen) > 5


# One writer


@pytest.mark.parametrize(
    "fault",
    [
        Fault("lose", "PUT", times=2),
        Fault("answer", "PUT", times=4),
        Fault("answer", "PUT", status=409, code="ConditionalRequestConflict", times=4),
        Fault("cut", "PUT", times=4),
    ],
    ids=["lose", "503", "409", "cut"],
)
def test_of_many_writers_in_trouble_one_writes(store: Store, proxy: Proxy, fault: Fault) -> None:
    proxy.faults = [Fault(**{**vars(fault), "path": "kept/", "seen": 0})]
    contents = [bytes([number]) * 2000 for number in range(6)]
    barrier = threading.Barrier(len(contents))

    def write(content: bytes) -> bool:
        barrier.wait()
        return store.files.put_if_absent("kept/a", content)

    with ThreadPoolExecutor(len(contents)) as pool:
        written = list(pool.map(write, contents))
    assert written.count(True) == 1
    assert store.files.get("kept/a") == contents[written.index(True)]
    assert proxy.faults[0].seen == fault.times


def test_the_same_bytes_of_someone_else_are_not_ones_own(store: Store, proxy: Proxy) -> None:
    """Though the request had to be repeated: what did not arrive has not been written."""
    assert store.files.put_if_absent("kept/a", b"same")
    proxy.faults = [Fault("answer", "PUT", "kept/a", times=1)]
    assert not store.files._put_new("kept/a", b"same")  # type: ignore[attr-defined]
    assert proxy.faults[0].seen == 1


CARELESS = [
    Fault("strip", "PUT", header="If-None-Match"),
    Fault("answer", "PUT", header="If-None-Match", status=501, code="NotImplemented"),
]


@pytest.mark.parametrize("fault", CARELESS, ids=["ignores the condition", "refuses the condition"])
def test_an_endpoint_without_conditions_is_found_out(store: Store, proxy: Proxy, fault: Fault) -> None:
    proxy.faults = [Fault(**{**vars(fault), "seen": 0})]
    store.probe()
    assert not store.exclusive
    assert store.files.entries("tmp") == []
    worker = open_store(store.url)  # has not probed
    assert worker.commit(ROW)
    before = worker.files.get(RECORD)
    assert not worker.commit(ROW | {"accuracy": 0.1})
    assert not open_store(store.url).files.put_if_absent(RECORD, b"other")
    assert worker.files.get(RECORD) == before
    with sweeping(store) as one, sweeping(store) as other:
        assert Leases(store, one.id, 60.0).claim("a", "x")
        assert not Leases(store, other.id, 60.0).claim("a", "x")


def test_of_many_sweeps_one_gets_a_run(store: Store) -> None:
    dead = Leases(store, "ended", 60.0)
    assert dead.claim("b", "x")
    with sweeping(store) as one, sweeping(store) as two, sweeping(store) as three:
        sweeps = [Leases(store, sweep.id, 60.0) for sweep in (one, two, three)]
        with ThreadPoolExecutor(3) as pool:
            for id in ("a", "b"):
                won = list(pool.map(lambda leases, id=id: leases.claim(id, "x"), sweeps))
                assert won.count(True) == 1
                sweeps[won.index(True)].release(id)
                assert sweeps[won.index(False)].claim(id, "x")


def test_only_the_file_that_was_looked_at_is_moved(store: Store, proxy: Proxy) -> None:
    store.files.put("kept/a", b"old")
    entry = store.files.stat("kept/a")
    assert entry is not None
    proxy.faults = [Fault("answer", "PUT", header="x-amz-copy-source-if-match", status=412, code="PreconditionFailed")]
    assert not store.files.move("kept/a", "kept/b")
    assert (store.files.get("kept/a"), store.files.get("kept/b")) == (b"old", None)
    proxy.faults = [Fault("answer", "DELETE", header="If-Match", status=412, code="PreconditionFailed")]
    assert store.files.move("kept/a", "kept/b")
    assert (store.files.get("kept/a"), store.files.get("kept/b")) == (b"old", b"old")
    proxy.faults = [Fault("answer", "DELETE", header="If-Match", status=501, code="NotImplemented")]
    proxy.requests.clear()
    assert store.files.move("kept/a", "kept/b")
    assert (store.files.get("kept/a"), store.files.get("kept/b")) == (None, b"old")
    (copied,) = (request.headers for request in proxy.requests if request.method == "PUT")
    assert copied["x-amz-copy-source-if-match"].strip('"') == entry.tag


# Trouble that stays


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("answer", status=403, code="AccessDenied"), "access is denied; the credentials need s3:ListBucket"),
        (Fault("answer", status=403, code="InvalidAccessKeyId"), "does not know the access key; check AWS_ACCESS_KEY"),
        (
            Fault("answer", status=403, code="SignatureDoesNotMatch"),
            "the secret key does not fit the access key; check",
        ),
        (Fault("answer", status=400, code="ExpiredToken"), "the credentials have expired; get new ones"),
        (Fault("answer", status=404, code="NoSuchBucket"), f"has no bucket {BUCKET}; make it, or correct the URL"),
        (
            Fault("answer", status=301, code="PermanentRedirect", headers=(("x-amz-bucket-region", "eu-west-1"),)),
            "bucket noise lies in region eu-west-1; set AWS_DEFAULT_REGION=eu-west-1",
        ),
        (Fault("answer", status=400, code="AuthorizationHeaderMalformed"), "in another region; set AWS_DEFAULT_REGION"),
        (Fault("answer", status=400, code="Strange"), r"answered Strange It is a test$"),
        (Fault("answer", status=503, code="SlowDown"), r"answered SlowDown It is a test for 0.2 s$"),
        (Fault("cut"), "no whole answer came from http://127.* for 0.2 s"),
        (Fault("lose"), "no whole answer came from http://127.* for 0.2 s"),
        (Fault("hang"), r"no whole answer came from http://127.* for 0.2 s \(ReadTimeoutError\); check the network"),
    ],
    ids=lambda value: f"{value.kind} {value.code}" if isinstance(value, Fault) else "",
)
def test_trouble_that_stays_is_one_sentence(
    proxy: Proxy, url: str, impatient: None, fault: Fault, message: str
) -> None:
    files = open_store(url, create=True).files
    files.put("kept/a", b"old" * 999)
    proxy.faults = [Fault(**{**vars(fault), "seen": 0})]
    for verb, use in {
        "write": lambda: files.put("kept/a", b"new" * 999),
        "read": lambda: files.get("kept/a"),
        "list": lambda: files.entries("kept"),
    }.items():
        with pytest.raises(StoreError, match=message) as caught:
            use()
        assert str(caught.value).startswith(f"cannot {verb} {url}/kept")
        assert "\n" not in str(caught.value)
    proxy.faults = []
    assert files.get("kept/a") in (b"old" * 999, b"new" * 999)


def test_a_refused_stat_is_no_missing_file(store: Store, proxy: Proxy) -> None:
    """The answer to a HEAD request has no text that could tell why."""
    proxy.faults = [Fault("answer", "HEAD", status=403)]
    for use in (lambda: store.files.stat(RECORD), lambda: store.commit(ROW)):
        with pytest.raises(StoreError, match="access is denied"):
            use()


def test_no_such_bucket(account: None, url: str) -> None:
    with pytest.raises(
        StoreError, match="^cannot read s3://other/store/store.json: http.* has no bucket other; make it"
    ):
        open_store("s3://other/store", create=True)


def test_an_endpoint_that_is_not_there(account: None, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "FIRST_PATIENCE", 0.2)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(StoreError, match=r"no whole answer came from http://127.* for 0.2 s \(EndpointConnection"):
            open_store(url)


def test_an_endpoint_without_a_certificate(account: None, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", os.environ["AWS_ENDPOINT_URL_S3"].replace("http:", "https:"))
    with pytest.raises(StoreError, match="the certificate of https://127.* is not accepted"):
        open_store(url)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "there are no credentials; set AWS_ACCESS_KEY_ID"),
        ({"AWS_SECRET_ACCESS_KEY": None}, "there are no credentials; set AWS_ACCESS_KEY_ID"),
        ({"AWS_PROFILE": "nobody"}, "nobody"),
        ({"AWS_ENDPOINT_URL_S3": "storage.example.org"}, "Invalid endpoint: storage.example.org"),
    ],
)
def test_an_environment_that_does_not_fit(
    account: None, url: str, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=message) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://", "s3:///folder"])
def test_a_url_without_a_bucket(url: str) -> None:
    with pytest.raises(StoreError, match=f"store '{url}' names no bucket; give s3://bucket"):
        open_store(url)


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "orchestrator.store.s3")
    with pytest.raises(StoreError, match=r"'s3://bucket/a' needs boto3: pip install 'noisegrid\[cloud\]'"):
        open_store("s3://bucket/a")


def test_amazon_is_addressed_by_the_buckets_name(account: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert S3Files("s3://noise/a")._client.meta.config.s3 == {"addressing_style": "path"}
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    client = S3Files("s3://noise/a")._client
    url = client.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": "a"})
    assert re.match(rf"https://{BUCKET}\.s3\.(eu-west-1\.)?amazonaws\.com/a\?", url)


# Verbs


def test_verbs_read_and_report_a_store_on_s3(
    account: None, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    factory.fill(open_store(url, create=True), expand(load_protocol("quickstart-tiny")))
    for verb in ("plan", "status"):
        assert main([verb, "quickstart-tiny", "--store", url]) == 0
        assert url in capsys.readouterr().out
    assert main(["report", "quickstart-tiny", "--store", url]) == 0
    assert "6 done" in capsys.readouterr().out
    assert {"table.csv", "table.tex", "report.html"} <= {path.name for path in Path("noisegrid-report").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["noisegrid-report"]
    assert main(["doctor", "--store", url]) in (0, 1)
    assert f"{url} can be written to" in " ".join(capsys.readouterr().out.split())


SWEEP = """
import sys
from orchestrator.launch import sweep
from orchestrator.store import open_store
from tests.fakes import planned
store = open_store(sys.argv[1], create=True)
result = sweep(planned(store, "init", replicates=2), store, max_concurrent=2)
assert result.complete, result
print(result.done)
"""


@pytest.mark.slow
def test_a_sweep_into_s3_and_the_same_again(account: None, url: str, tmp_path: Path) -> None:
    environment = {**os.environ, "NOISEGRID_DATA": "", "PYTHONPATH": str(Path(__file__).parents[1])}

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", SWEEP, url], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run().split()[-1] == "4"
    store = open_store(url)
    before = store.table(["id", "attempt", "finished", "final_digest"]).to_pylist()
    assert len(before) == 4 and {row["attempt"] for row in before} == {1}
    for folder in ("live", "checkpoints", "leases", "sweeps", "failures"):
        assert store.files.entries(folder) == [], folder
    run()
    assert open_store(url).table(["id", "attempt", "finished", "final_digest"]).to_pylist() == before
