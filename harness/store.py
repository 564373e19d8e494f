"""A run's folder: lock, run.json, one file per row, and what is set aside.

run.json       what was run, when, with which command, in which environments
rows/          <cell hash>.r<replicate>.json, each written whole or not at all
logs/          output of cells that printed something
set-aside/     files in rows/ that are no rows of this schema: kept, named, not read
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import HarnessError
from harness.rows import Row, RowError, decode, encode

SCHEMA = 1


class RunFile(msgspec.Struct, kw_only=True):
    """run.json. Environments are added to as the run is resumed elsewhere or after an upgrade."""

    schema: int = SCHEMA
    suite: str
    title: str
    probe: str
    device: str
    command: list[str]
    started_at: str
    finished_at: str = ""
    interrupted: bool = False
    cells: int = 0
    suite_toml: str = ""
    baseline: dict[str, Any] = {}
    environments: dict[str, dict[str, Any]] = {}
    prepared: dict[str, float] = {}  # seconds of work done once per run, by part
    notes: list[str] = []


class Folder:
    """An owned run folder. Use as a context manager: the lock is held until the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = path / "rows"
        self.logs = path / "logs"
        self.set_aside: list[str] = []
        self._lock = -1

    def __enter__(self) -> Folder:
        try:
            self._refuse_foreign()
            for folder in (self.path, self.rows, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HarnessError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._lock = self._take_lock()
        return self

    def _refuse_foreign(self) -> None:
        """A folder of something else is not written into, and --fresh does not rename it."""
        found = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        if found and not found & {"run.json", "rows", "lock"}:
            raise HarnessError(
                f"{self.path}: holds {sorted(found)[0]!r} and no run; give --out a new or empty folder"
            )

    def _take_lock(self) -> int:
        path = self.path / "lock"
        while True:
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise HarnessError(f"{self.path}: cannot be written: {error.strerror}") from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = os.pread(lock, 64, 0).decode(errors="replace").strip()
                os.close(lock)
                raise HarnessError(
                    f"{self.path}: this run is in use by process {owner or '?'}; wait for it, or choose another --out"
                ) from error
            if path.exists() and path.stat().st_ino == os.fstat(lock).st_ino:
                with contextlib.suppress(OSError):  # a full disk: the name of the owner is a courtesy
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                return lock
            os.close(lock)  # its owner removed the file between our open and our lock

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            (self.path / "lock").unlink()
        os.close(self._lock)

    def read_run(self) -> RunFile | None:
        """run.json, or None for a new folder. Raises HarnessError for another schema or a foreign file."""
        path = self.path / "run.json"
        if not path.exists():
            return None
        try:
            head = msgspec.json.decode(path.read_bytes())
            schema = head.get("schema") if isinstance(head, dict) else None
            if schema != SCHEMA:
                raise HarnessError(
                    f"{path}: schema is {schema!r}; this program reads schema {SCHEMA}. Choose another --out"
                )
            return msgspec.convert(head, RunFile)
        except OSError as error:
            raise HarnessError(f"{path}: cannot be read: {error.strerror}. Choose another --out") from error
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise HarnessError(f"{path}: is no run of this program: {error}. Choose another --out") from error

    def write_run(self, run: RunFile) -> None:
        """Replace run.json."""
        self._write(self.path / "run.json", msgspec.json.format(msgspec.json.encode(run), indent=1))

    def write(self, row: Row) -> None:
        """Write one row: to a temporary name, flushed, renamed. Raises HarnessError when it cannot."""
        self._write(self.rows / f"{row.cell}.r{row.replicate}.json", encode(row) + b"\n")

    def read(self) -> Iterator[Row]:
        """The rows. A torn or foreign file is moved to set-aside/ and named in `set_aside`."""
        for path in sorted(self.rows.iterdir()):
            if path.suffix == ".part" and path.is_file():
                path.unlink()  # a row that was being written when the runner died
                continue
            try:
                row = decode(path.read_bytes())
                if path.name != f"{row.cell}.r{row.replicate}.json":
                    raise RowError(f"holds cell {row.cell}.r{row.replicate}")
            except (RowError, OSError) as error:
                self._put_aside(path, str(error))
            else:
                yield row

    def put_aside(self, row: Row, why: str) -> None:
        """Move a row out of the run, keeping its file."""
        self._put_aside(self.rows / f"{row.cell}.r{row.replicate}.json", why)

    def _put_aside(self, path: Path, why: str) -> None:
        aside = self.path / "set-aside"
        try:
            aside.mkdir(exist_ok=True)
            target = next(t for t in _names(aside / path.name) if not t.exists())
            path.rename(target)
        except OSError as error:
            raise HarnessError(f"{path}: {why}; it cannot be moved aside: {error.strerror}") from error
        self.set_aside.append(f"{path}: {why}; moved to {target}")

    def _write(self, path: Path, data: bytes) -> None:
        partial = path.with_suffix(".part")
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            raise HarnessError(f"{path}: cannot be written: {what}. Finished rows are kept") from error


def _names(path: Path) -> Iterator[Path]:
    yield path
    for i in itertools.count(1):
        yield path.with_name(f"{path.name}.{i}")
