"""Sealing: the window of evidence, copied once, hashed, and read-only from then on.

The rows are gathered in memory within a bound of bytes and time, the ledger and what changes slowly
first, then observations from the newest back; `VACUUM INTO` writes them as one plain file. Nothing
of the final name exists until it is whole.

For: making `evidence.sqlite` and reading it. Not for: what else is in the folder (`paper.py`).
"""

import contextlib
import errno
import hashlib
import os
import sqlite3
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import msgspec

from tandem.errors import RefusedError, WorldError
from tandem.facts import Facts
from tandem.records import Deployment, Incident, Seal
from tandem.store import paper, redact, state

FILE_NAME = "evidence.sqlite"
PAGE_BYTES = 4096
CHUNK_ROWS = 4096
"""Observations copied between two looks at the clock."""
COPY_SHARE = 0.6
"""The share of the deadline that may go into gathering; the rest is for writing and hashing."""
TRIES_MAX = 12
"""Halvings of the observations before a full disk is given up on."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_SQLITE = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC}


class _NoRoomError(Exception):
    """The disk took no more."""


class Evidence:
    """The copy of one window that is about to be sealed."""

    def __init__(self, source: Path, *, bytes_max: int) -> None:
        """Attach the rolling state read-only and begin an empty copy in memory."""
        self.left_out: list[str] = []
        self._dropped_rows = 0
        self._dropped = ""
        self._db = sqlite3.connect(":memory:", isolation_level=None, uri=True)
        self._db.create_function("redacted", 1, _again, deterministic=True)
        self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        self._db.execute(f"PRAGMA max_page_count = {max(16, bytes_max // PAGE_BYTES)}")
        self._db.execute("ATTACH ? AS live", (f"file:{quote(str(source))}?mode=ro",))
        for statement in filter(str.strip, state.EVIDENCE_TABLES.format(at="main.").split(";")):
            self._db.execute(statement)
        self._db.execute("CREATE TABLE main.about (name TEXT PRIMARY KEY, value TEXT NOT NULL)")

    def close(self) -> None:
        """Drop the copy."""
        self._db.close()

    def describe(self, incident: Incident, *, now: float, window_s: float) -> None:
        """Write what a stranger needs to read the rest."""
        about = {
            "format": incident.format,
            "incident": incident.id,
            "now": now,
            "window_s": window_s,
            "deployment": incident.deployment,
        }
        self._db.executemany(
            "INSERT INTO main.about VALUES (?, ?)",
            [(name, state.text_of(value)) for name, value in about.items()],
        )

    def gather(self, *, since: float, ends_at: float) -> None:
        """Copy the small tables, then observations newest first until a bound is reached.

        `ends_at` is on the monotonic clock.
        """
        copy = self._db.execute
        columns = state.OBSERVATION_COLUMNS.replace("value", "redacted(value)")
        for table in ("changes", "findings", "events", "traits"):
            if not self._fits(f"INSERT INTO main.{table} SELECT * FROM live.{table}"):
                self.left_out.append(f"all {table}: the bound on bytes")
        slow = f"INSERT INTO main.observations SELECT {columns}, slow FROM live.observations"
        if not self._fits(f"{slow} WHERE slow"):
            self.left_out.append("command lines and server arguments: the bound on bytes")
        (top,) = copy("SELECT coalesce(max(id), 0) + 1 FROM live.observations").fetchone()
        rows, reason = CHUNK_ROWS, ""
        while rows:
            if time.monotonic() >= ends_at:
                reason = "the deadline for collecting evidence"
                break
            (bottom,) = copy(
                "SELECT min(id) FROM (SELECT id FROM live.observations WHERE id < ? "
                "ORDER BY id DESC LIMIT ?)",
                (top, rows),
            ).fetchone()
            if bottom is None:
                return
            wanted = f"{slow} WHERE NOT slow AND id >= {bottom} AND id < {top} AND at >= ?"
            if self._fits(wanted, since):
                top = bottom
            else:
                rows, reason = rows // 2, "the bound on bytes"
        self._name_rest(top, since, reason)

    def _fits(self, statement: str, *values: float) -> bool:
        try:
            self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            return False
        return True

    def _name_rest(self, top: int, since: float, reason: str) -> None:
        count, until = self._db.execute(
            "SELECT count(*), max(at) FROM live.observations WHERE id < ? AND at >= ? AND NOT slow",
            (top, since),
        ).fetchone()
        if count:
            self.left_out.append(f"{count} observations up to {_clock(until)}: {reason}")

    def write(self, path: Path) -> None:
        """Write the copy as one file; a full disk costs the oldest half, and again."""
        self._db.execute("DETACH live")
        before = list(self.left_out)
        for _ in range(TRIES_MAX):
            try:
                self._write_once(path)
                return
            except _NoRoomError:
                path.unlink(missing_ok=True)
                if not self._halve():
                    break
                self.left_out = [*before, f"{self._dropped}: the disk is full"]
        raise WorldError(
            f"The disk is full: nothing of the evidence could be sealed in {path.parent}.",
            next_step=f"Free some space under {path.parent.parent}, "
            "then run `tandem investigate` again.",
        )

    def _write_once(self, path: Path) -> None:
        try:
            self._db.execute("VACUUM main INTO ?", (str(path),))
            with path.open("rb") as file:
                os.fsync(file.fileno())
        except sqlite3.Error as error:
            if error.sqlite_errorcode not in _FULL_SQLITE:
                raise
            raise _NoRoomError from error
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise _NoRoomError from error

    def _halve(self) -> bool:
        (count,) = self._db.execute("SELECT count(*) FROM observations WHERE NOT slow").fetchone()
        gone = (count + 1) // 2
        if not gone:
            return False
        (until,) = self._db.execute(
            "SELECT max(at) FROM (SELECT at FROM observations WHERE NOT slow ORDER BY id LIMIT ?)",
            (gone,),
        ).fetchone()
        self._db.execute(
            "DELETE FROM observations WHERE id IN "
            "(SELECT id FROM observations WHERE NOT slow ORDER BY id LIMIT ?)",
            (gone,),
        )
        self._dropped_rows += gone
        self._dropped = f"{self._dropped_rows} observations up to {_clock(until)}"
        return True

    def count(self) -> int:
        """The observations in the copy."""
        (count,) = self._db.execute("SELECT count(*) FROM main.observations").fetchone()
        return int(count)


def seal(
    source: Path,
    folder: Path,
    incident: Incident,
    *,
    now: float,
    window_s: float,
    bytes_max: int,
    deadline_s: float,
    again: bool = False,
) -> Seal:
    """Seal the window before `now` into `folder`; what does not fit is named in `left_out`.

    `again` seals into a further file beside the first, which stays as it is. Raises `WorldError`
    when not even the ledger could be written; then no evidence file is left.
    """
    if paper.read(folder).seal is not None and not again:
        raise RefusedError(
            f"{folder} is sealed already: evidence is never replaced.",
            next_step="Begin a new incident with `tandem investigate`.",
        )
    name = _free_name(folder)
    part, final = folder / f"{name}.part", folder / name
    ends_at = time.monotonic() + deadline_s * COPY_SHARE
    part.unlink(missing_ok=True)
    try:
        with (
            state.told(source, "sealing"),
            contextlib.closing(Evidence(source, bytes_max=bytes_max)) as evidence,
        ):
            evidence.describe(incident, now=now, window_s=window_s)
            evidence.gather(since=now - window_s, ends_at=ends_at)
            evidence.write(part)
            count, left_out = evidence.count(), tuple(evidence.left_out)
        part.chmod(0o400)
        digest, size = _hash(part), part.stat().st_size
        part.replace(final)
    except BaseException:  # an interruption too leaves no half file
        part.unlink(missing_ok=True)
        raise
    paper.sync_folder(folder)
    return Seal(
        path=name,
        sha256=digest,
        size_bytes=size,
        observations=count,
        left_out=left_out,
        sealed_at=now,
    )


def _free_name(folder: Path) -> str:
    """`evidence.sqlite`, or with a number when that is sealed already."""
    stem, _, suffix = FILE_NAME.partition(".")
    name, number = FILE_NAME, 1
    while (folder / name).exists():
        number += 1
        name = f"{stem}-{number}.{suffix}"
    return name


def facts_in(folder: Path, seal: Seal) -> Facts:
    """The facts as sealed; raises `RefusedError` when the file is not the one that was sealed."""
    path = folder / seal.path
    if not path.is_file():
        raise RefusedError(
            f"{path} is missing: the folder holds records and no evidence.",
            next_step="Take the folder again from where it was made.",
        )
    if _hash(path) != seal.sha256:
        raise RefusedError(
            f"{path} is not the evidence that was sealed: its SHA-256 differs from records.jsonl.",
            next_step="Take the folder again from where it was made; do not judge by this one.",
        )
    uri = f"file:{quote(str(path.resolve()))}?immutable=1"
    with state.told(path, "reading it"), contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
        about = dict(db.execute("SELECT name, value FROM about"))
        return Facts(
            msgspec.json.decode(about["deployment"], type=Deployment),
            state.observations_in(
                db.execute(f"SELECT {state.OBSERVATION_COLUMNS} FROM observations ORDER BY id")
            ),
            now=msgspec.json.decode(about["now"], type=float),
            changes=state.changes_in(db.execute("SELECT id, body FROM changes ORDER BY id")),
            traits=state.traits_in(
                db.execute(f"SELECT {state.TRAIT_COLUMNS} FROM traits ORDER BY id")
            ),
        )


def _again(value: str) -> str:
    """A stored value, scrubbed once more: rules may have grown since it was written."""
    if value[:1] not in ('"', "["):
        return value
    scrubbed = redact.texts(msgspec.json.decode(value))
    return msgspec.json.encode(scrubbed).decode()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S UTC")
