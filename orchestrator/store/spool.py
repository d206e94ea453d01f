"""The epoch rows of the run that is training now, kept on its machine from the moment each epoch ends."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import pyarrow as pa

from orchestrator.store.schema import EPOCH
from protocols.contract import Epoch, epoch_values

_SCHEMA = pa.schema(list(EPOCH))


class Spool:
    """An Arrow IPC stream of epoch rows. A row that was appended is there after the process is killed.

    A stream is valid up to its last whole batch, unlike a Parquet file, which has to be finished. Every append reaches
    the operating system before it returns: it outlives the process, though not the machine.

    Args:
        folder: where the file goes; made if missing.
        id: the run's id, and the file's name. An earlier spool of that name is replaced.
    """

    def __init__(self, folder: Path, id: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{id}.arrows"
        self._file = self.path.open("wb", buffering=0)
        self._writer = pa.ipc.new_stream(self._file, _SCHEMA)

    def append(self, row: Epoch) -> None:
        """Add a row."""
        self._writer.write_batch(pa.RecordBatch.from_pylist([epoch_values(row)], _SCHEMA))

    def close(self) -> None:
        """Finish the stream; the file stays."""
        self._writer.close()
        self._file.close()

    def delete(self) -> None:
        """Finish the stream and delete the file."""
        self.close()
        self.path.unlink(missing_ok=True)

    @staticmethod
    def read(path: Path) -> list[Epoch]:
        """The rows of a spool, be it finished, still being written or cut off; none if there is no such file."""
        rows: list[Epoch] = []
        try:
            with pa.ipc.open_stream(path.read_bytes()) as stream:
                for batch in stream:
                    rows += [Epoch(**row) for row in batch.to_pylist()]
        except (FileNotFoundError, pa.ArrowInvalid):
            pass
        except OSError as error:
            if error.errno is not None:
                raise
        return rows

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
