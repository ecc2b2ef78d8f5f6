"""The rolling state in SQLite: tables, rows and the transactions that any process may make.

WAL, a busy timeout, and one short transaction for every append, so that a watcher, a person's
command and a page share one file. Ids come from one counter: an id cited as evidence names one row
for good, whichever table holds it, even after pruning.

For: SQL. Not for: deciding what is kept, or what may be remembered (`rolling.py`, `redact.py`).
"""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tandem.errors import Bug, RefusedError, WorldError
from tandem.records import Change, Event, Finding, Observation, Trait, Value
from tandem.records import vocabulary as v

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 5.0
EVENTS_MAX = 20_000
JOURNAL_MAX = 20_000

SLOW = frozenset(
    {
        *(v.COMMAND_LINE, v.ENVIRONMENT, v.SERVER_ARG, v.PID, v.STARTED_AT),
        *(v.UNIT, v.UNIT_STATE, v.UNIT_RESULT, v.UNIT_RESTARTS_TOTAL, v.UNIT_STARTED_AT),
        *(v.UNIT_INVOCATION, v.UNIT_FILE_WRITTEN_AT, v.UNIT_RELOAD_NEEDED),
        *(v.CONTAINER, v.CONTAINER_STATE, v.CONTAINER_OOM_KILLED),
        *(v.CONTAINER_RESTARTS_TOTAL, v.CONTAINER_STARTED_AT, v.CONTAINER_FINISHED_AT),
        *(v.CONTAINER_HEALTH, v.CONTAINER_IMAGE),
        *(v.GPU_COUNT, v.GPU_NAME, v.GPU_DRIVER, v.GPU_IDLE_W, v.GPU_BUSY_W, v.GPU_SLOWDOWN),
        *(v.GPU_MEMORY_TOTAL_BYTES, v.GPU_XIDS_TOTAL),
        *(v.LOG_FIRST_SEEN_AT, v.PROBE_ANSWERS),
    }
)
"""Observations that seldom change: kept once per change, and for longer."""

EVIDENCE_TABLES = """
CREATE TABLE {at}observations (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, source TEXT NOT NULL, subject TEXT NOT NULL,
    name TEXT NOT NULL, label TEXT NOT NULL, value TEXT NOT NULL, missing TEXT, incarnation TEXT,
    slow INTEGER NOT NULL
);
CREATE TABLE {at}traits (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, subject TEXT NOT NULL, name TEXT NOT NULL,
    label TEXT NOT NULL, value TEXT NOT NULL, because TEXT NOT NULL
);
CREATE TABLE {at}changes (id INTEGER PRIMARY KEY, at REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE {at}events (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
    data TEXT NOT NULL
);
CREATE TABLE {at}findings (
    id TEXT PRIMARY KEY, at REAL NOT NULL, closed_at REAL, body TEXT NOT NULL
);
"""
"""What the rolling state and a sealed folder have in common."""

_STATE_TABLES = """
CREATE TABLE journal (
    id INTEGER PRIMARY KEY, incident TEXT NOT NULL, at REAL NOT NULL, body TEXT NOT NULL
);
CREATE TABLE counter (last INTEGER NOT NULL);
INSERT INTO counter VALUES (0);
CREATE INDEX observations_at ON observations (at);
CREATE INDEX observations_slow ON observations (subject, name, label, id) WHERE slow;
CREATE INDEX journal_incident ON journal (incident);
"""

OBSERVATION_COLUMNS = "id, at, source, subject, name, label, value, missing, incarnation"
TRAIT_COLUMNS = "id, at, subject, name, label, value, because"

Row = tuple[Any, ...]
"""What SQLite gives: its columns are as the table says, and no type checker knows it."""

_value = msgspec.json.Decoder(Value)
_change = msgspec.json.Decoder(Change)
_finding = msgspec.json.Decoder(Finding)
_data = msgspec.json.Decoder(dict[str, Value])


def text_of(value: object) -> str:
    """A value or record as the JSON text that a column holds."""
    return msgspec.json.encode(value).decode()


def observations_in(rows: Iterable[Row]) -> list[Observation]:
    """Rows of `OBSERVATION_COLUMNS` as records."""
    return [
        Observation(
            id=number,
            at=at,
            source=source,
            subject=subject,
            name=name,
            label=label,
            value=_value.decode(value),
            missing=missing,
            incarnation=incarnation,
        )
        for number, at, source, subject, name, label, value, missing, incarnation in rows
    ]


def traits_in(rows: Iterable[Row]) -> list[Trait]:
    """Rows of `TRAIT_COLUMNS` as records."""
    return [
        Trait(
            id=number,
            at=at,
            subject=subject,
            name=name,
            label=label,
            value=_value.decode(value),
            because=because,
        )
        for number, at, subject, name, label, value, because in rows
    ]


def changes_in(rows: Iterable[Row]) -> list[Change]:
    """Rows of (id, body) as records."""
    return [msgspec.structs.replace(_change.decode(body), id=number) for number, body in rows]


@contextlib.contextmanager
def told(path: Path, doing: str) -> Iterator[None]:
    """Turn what SQLite refuses into one sentence about this file."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise WorldError(
                f"The disk is full: {path} could not be written while {doing}.",
                next_step=f"Free some space under {path.parent} and run the command again.",
            ) from error
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            raise WorldError(
                f"Another process has kept {path} from {doing} for {BUSY_TIMEOUT_S:g} s.",
                next_step="Look for a Tandem that hangs, and run the command again.",
            ) from error
        raise WorldError(
            f"{path} failed while {doing}: {error}.",
            next_step=f"Check the disk and the rights of {path.parent}; move the file away to "
            "begin a new one.",
        ) from error


class State:
    """One connection to `state.sqlite`; every write is one short transaction."""

    def __init__(self, path: Path) -> None:
        """Open or create; raises `RefusedError` for a schema this Tandem does not know."""
        self.path = path
        with told(path, "opening it"):
            self._db = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._migrate()

    def _migrate(self) -> None:
        with self.transaction():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                script = EVIDENCE_TABLES.format(at="") + _STATE_TABLES
                for statement in filter(str.strip, script.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise RefusedError(
                    f"{self.path} has schema {version}, and this Tandem knows {SCHEMA_VERSION}.",
                    next_step="Use the Tandem that wrote it, or move the file away.",
                )

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside, or nothing; other writers wait at most `BUSY_TIMEOUT_S`."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:  # an interruption too takes everything back
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Several reads of one moment."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("COMMIT")

    @contextlib.contextmanager
    def durable(self) -> Iterator[None]:
        """A transaction that is on the disk when it ends, for what must survive a power cut."""
        self._db.execute("PRAGMA synchronous = FULL")
        try:
            with self.transaction():
                yield
        finally:
            self._db.execute("PRAGMA synchronous = NORMAL")

    def ids(self, count: int) -> range:
        """The next ids; call inside a transaction."""
        row = self._db.execute("UPDATE counter SET last = last + ? RETURNING last", (count,))
        (last,) = row.fetchone()
        return range(last - count + 1, last + 1)

    def last_id(self) -> int:
        """The newest id given to anything."""
        (last,) = self._db.execute("SELECT last FROM counter").fetchone()
        if not isinstance(last, int):
            raise Bug(f"the counter of {self.path} holds {last!r}")
        return last

    # Writing: inside a transaction, records complete with ids.

    def put_observations(self, rows: Iterable[Observation]) -> None:
        """Insert observations."""
        self._db.executemany(
            f"INSERT INTO observations ({OBSERVATION_COLUMNS}, slow) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    seen.id,
                    seen.at,
                    seen.source,
                    seen.subject,
                    seen.name,
                    seen.label,
                    text_of(seen.value),
                    seen.missing,
                    seen.incarnation,
                    seen.name in SLOW,
                )
                for seen in rows
            ),
        )

    def put_traits(self, rows: Iterable[Trait]) -> None:
        """Insert traits."""
        self._db.executemany(
            f"INSERT INTO traits ({TRAIT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                (row.id, row.at, row.subject, row.name, row.label, text_of(row.value), row.because)
                for row in rows
            ),
        )

    def put_changes(self, rows: Iterable[Change]) -> None:
        """Insert ledger rows."""
        self._db.executemany(
            "INSERT INTO changes VALUES (?, ?, ?)", ((row.id, row.at, text_of(row)) for row in rows)
        )

    def put_event(self, event: Event) -> None:
        """Insert an event."""
        self._db.execute(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)",
            (event.id, event.at, event.kind, event.text, text_of(event.data)),
        )

    def put_finding(self, finding: Finding) -> None:
        """Insert a finding, or what became of it."""
        self._db.execute(
            "INSERT OR REPLACE INTO findings VALUES (?, ?, ?, ?)",
            (finding.id, finding.found_at, finding.closed_at, text_of(finding)),
        )

    def put_journal(self, number: int, incident: str, at: float, body: str) -> None:
        """Insert one journal row."""
        self._db.execute("INSERT INTO journal VALUES (?, ?, ?, ?)", (number, incident, at, body))

    # Reading.

    def observations(self, *, since: float, after: int = 0) -> list[Observation]:
        """Observations at or after a moment with an id above `after`, by id."""
        return observations_in(
            self._db.execute(
                f"SELECT {OBSERVATION_COLUMNS} FROM observations WHERE at >= ? AND id > ? "
                "ORDER BY id",
                (since, after),
            )
        )

    def newer_observations(self, after: int) -> list[Observation]:
        """Observations with an id above `after`, by id."""
        return observations_in(
            self._db.execute(
                f"SELECT {OBSERVATION_COLUMNS} FROM observations WHERE id > ? ORDER BY id", (after,)
            )
        )

    def latest_slow(self) -> list[Observation]:
        """The newest row of every slowly changing thing, by id."""
        return observations_in(
            self._db.execute(
                f"SELECT {OBSERVATION_COLUMNS} FROM observations WHERE id IN (SELECT max(id) "
                "FROM observations WHERE slow GROUP BY subject, name, label) ORDER BY id"
            )
        )

    def latest_traits(self, after: int = 0) -> list[Trait]:
        """The newest row of every trait with an id above `after`, by id."""
        return traits_in(
            self._db.execute(
                f"SELECT {TRAIT_COLUMNS} FROM traits WHERE id IN (SELECT max(id) FROM traits "
                "WHERE id > ? GROUP BY subject, name, label) ORDER BY id",
                (after,),
            )
        )

    def changes(self, after: int = 0) -> list[Change]:
        """Ledger rows with an id above `after`, by id."""
        return changes_in(
            self._db.execute("SELECT id, body FROM changes WHERE id > ? ORDER BY id", (after,))
        )

    def events(self, *, after: int, limit: int) -> list[Event]:
        """Events with an id above `after`, oldest first."""
        rows = self._db.execute(
            "SELECT id, at, kind, text, data FROM events WHERE id > ? ORDER BY id LIMIT ?",
            (after, limit),
        )
        return [
            Event(id=number, at=at, kind=kind, text=text, data=_data.decode(data))
            for number, at, kind, text, data in rows
        ]

    def open_findings(self) -> list[Finding]:
        """Findings that have not closed, oldest first."""
        rows = self._db.execute("SELECT body FROM findings WHERE closed_at IS NULL ORDER BY at, id")
        return [_finding.decode(body) for (body,) in rows]

    def last_seen_at(self) -> float:
        """The time of the observation that came last; 0.0 when there is none."""
        row = self._db.execute("SELECT at FROM observations ORDER BY id DESC LIMIT 1").fetchone()
        return float(row[0]) if row else 0.0

    def closed_findings(self, since: float) -> list[Finding]:
        """Findings that closed at or after a time, oldest first."""
        rows = self._db.execute(
            "SELECT body FROM findings WHERE closed_at >= ? ORDER BY closed_at, id", (since,)
        )
        return [_finding.decode(body) for (body,) in rows]

    def closed(self, finding: str) -> bool:
        """Whether a finding is known and has closed."""
        row = self._db.execute("SELECT closed_at FROM findings WHERE id = ?", (finding,)).fetchone()
        return row is not None and row[0] is not None

    def journal(self, incident: str) -> list[str]:
        """The bodies of one journal, oldest first."""
        rows = self._db.execute(
            "SELECT body FROM journal WHERE incident = ? ORDER BY id", (incident,)
        )
        return [body for (body,) in rows]

    def prune(self, *, before: float, slow_before: float, limit: int) -> None:
        """Delete what is past its time, at most `limit` observations; inside a transaction.

        The newest row of a slowly changing thing stays however old it is.
        """
        self._db.execute(
            "DELETE FROM observations WHERE id IN "
            "(SELECT id FROM observations WHERE at < ? AND NOT slow ORDER BY at LIMIT ?)",
            (before, limit),
        )
        self._db.execute(
            "DELETE FROM observations WHERE slow AND at < ? AND id NOT IN (SELECT max(id) "
            "FROM observations WHERE slow GROUP BY subject, name, label)",
            (slow_before,),
        )
        self._db.execute(
            "DELETE FROM traits WHERE at < ? AND id NOT IN "
            "(SELECT max(id) FROM traits GROUP BY subject, name, label)",
            (slow_before,),
        )
        self._db.execute("DELETE FROM changes WHERE at < ?", (slow_before,))
        self._db.execute(
            "DELETE FROM findings WHERE closed_at IS NOT NULL AND closed_at < ?", (slow_before,)
        )
        for table, most in (("events", EVENTS_MAX), ("journal", JOURNAL_MAX)):
            self._db.execute(
                f"DELETE FROM {table} WHERE id <= "
                f"(SELECT id FROM {table} ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (most,),
            )
