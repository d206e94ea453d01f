"""The Ray cluster a sweep runs on: the one that is there, or one started in place for as long as the sweep takes."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import ray

from protocols.errors import UserError

WORKER_VARIABLES = {
    # Tune would move every actor into its trial's folder, away from relative paths.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""What Ray's workers must see, wherever they are."""

DRIVER_VARIABLES = {
    **WORKER_VARIABLES,
    # Without its loggers and snapshots Tune takes a quarter of the time; nothing reads what they write.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",
    # Signals are the sweep's own to handle.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_THRESHOLD_S": "60",
    # How many blocks wait for a slot is the sweep's own affair; by itself Tune would ask for one after another.
    "TUNE_MAX_PENDING_TRIALS_PG": "10000",
    # The older of Tune's two ways of printing is the one that can be silenced.
    "RAY_AIR_NEW_OUTPUT": "0",
    # Workers would run at the lowest priority.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

LOCAL_VARIABLES = {
    # Seconds after which Ray's own processes give up on a cluster whose centre is gone; by default 60.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
"""For a cluster in place, whose parts live and die together."""

OBJECT_STORE_BYTES = 256 * 2**20
"""Of a cluster in place: only ids and specifications pass through it, never data or weights."""

_TOKEN = secrets.token_hex(32)


@contextlib.contextmanager
def cluster(address: str | None, max_concurrent: int | None) -> Iterator[bool]:
    """Be connected to a cluster inside the ``with`` block, and know whether it was there before.

    Args:
        address: of a running cluster; None: RAY_ADDRESS, else a cluster is started on this machine and stopped again.
            If this process is connected to one already, that one is used and stays.
        max_concurrent: CPUs to give a cluster that is started here; None: as many as the machine has.

    Raises:
        UserError: there is no cluster at that address, or none can be started here.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    connected = ray.is_initialized()
    local = not connected and not address
    variables = {**DRIVER_VARIABLES, **(LOCAL_VARIABLES if local else {}), **(_token() if local else {})}
    with _environment(variables), _quiet():
        if local:
            _start(max_concurrent)
        elif not connected:
            assert address is not None
            _connect(address)
        try:
            # This process needs no GPU; a cluster started here has seen them by now.
            with _environment({"CUDA_VISIBLE_DEVICES": ""}):
                yield not local
        finally:
            if not connected:
                ray.shutdown()


def _start(cpus: int | None) -> None:
    try:
        _init(cpus)
    except Exception:  # Ray raises a bare one where a busy machine is slow to start its processes
        ray.shutdown()
        try:
            _init(cpus)
        except Exception as error:
            raise UserError(f"Ray cannot start on this machine: {str(error).splitlines()[0]}") from error


def _init(cpus: int | None) -> None:
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
    )


def _connect(address: str) -> None:
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdecimal():
            # Ray itself would try for minutes.
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(
            address=address,
            runtime_env={"env_vars": WORKER_VARIABLES},
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
    except Exception as error:  # some of Ray's are bare ones
        raise UserError(f"no Ray cluster answers at {address!r}: {str(error).splitlines()[0]}") from error


def slots(gpus_per_run: float, memory_per_run: int = 0, *, grows: bool = False) -> int:
    """How many runs fit on the cluster's present nodes side by side: a CPU each, and what they are given beside it.

    Args:
        gpus_per_run: GPUs of a run.
        memory_per_run: bytes of a run; 0: it does not count.
        grows: whether nodes may come that have room.

    Raises:
        UserError: none fits.
    """
    total = room(gpus_per_run, memory_per_run)
    if not total and not (grows and most(gpus_per_run)):
        needs = "a free CPU" + (f" and {gpus_per_run:g} GPUs" if gpus_per_run else "")
        needs += f" and {memory_per_run / 2**30:.3g} GiB of memory" if memory_per_run else ""
        raise UserError(f"no node of the Ray cluster has {needs} for a run")
    return total


def room(gpus_per_run: float, memory_per_run: int = 0) -> int:
    """The number that :func:`slots` returns, which may be 0."""
    total = 0
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            has = node["Resources"]
            fits = min(int(has.get("CPU", 0)), _shares(has.get("GPU", 0), gpus_per_run))
            total += min(fits, int(has.get("memory", 0) // memory_per_run)) if memory_per_run else fits
    return total


def most(gpus_per_run: float) -> int | None:
    """How many runs would fit on the largest cluster that the autoscaler may make of this one; None: there is none."""
    resources = ray._private.state.state.get_max_resources_from_cluster_config()
    if not resources:
        return None
    return min(int(resources.get("CPU", 0)), _shares(resources.get("GPU", 0), gpus_per_run))


def at_a_time(fitting: int, largest: int | None, max_concurrent: int | None, *, joined: bool) -> int:
    """How many blocks Tune is to have at a time.

    More than fit make the autoscaler of a cluster act, which adds nodes for what waits: as many more again, so that a
    cluster doubles until it is as large as it may be.

    Args:
        fitting: runs that fit on the present nodes.
        largest: runs that fit on the largest cluster that the autoscaler may make; None: it is not known.
        max_concurrent: runs side by side that the user allows; None: any number.
        joined: whether the cluster was there before the sweep, and may grow.
    """
    if not joined:
        return fitting if max_concurrent is None else min(fitting, max_concurrent)
    if max_concurrent is not None:
        return max_concurrent
    more = fitting + max(4, fitting)
    return more if largest is None else max(fitting, min(more, largest))


def _shares(gpus: float, gpus_per_run: float) -> int:
    """Runs that ``gpus`` GPUs have room for; a GPU is shared by whole runs only."""
    if not gpus_per_run:
        return 10**9
    return int(gpus // gpus_per_run) if gpus_per_run >= 1 else int(gpus) * int(1 / gpus_per_run + 1e-9)


def _token() -> Mapping[str, str | None]:
    """A token for a cluster in place, so that nobody else on the machine can reach it.

    Ray would otherwise write one to a file that everyone can read.
    """
    chosen = any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    # Ray sets the mode itself, and would take it for the user's choice the next time.
    return {} if chosen else {"RAY_AUTH_TOKEN": _TOKEN, "RAY_AUTH_MODE": None}


@contextlib.contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables inside the ``with`` block, and afterwards restore them, also those that are not set (None)."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _WithoutRay:
    """A stream that drops what Ray's threads write: reports of dead workers, with which the sweep deals itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if threading.current_thread().name.startswith("ray_") else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray's talk from the terminal."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(_WithoutRay(sys.stdout)):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
