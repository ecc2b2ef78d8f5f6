"""Sealed evidence: whole, bounded, hashed, and the same for whoever reads it."""

import re
import shutil
import sqlite3

import msgspec
import pytest

from stores import DEPLOYMENT, T, files_of_at_most, fill, incident_of, sealed
from tandem.errors import RefusedError, WorldError
from tandem.records import (
    EvidenceSettings,
    Settings,
)
from tandem.records import vocabulary as v
from tandem.store import Store, load_incident
from tandem.store import seal as sealing


@pytest.fixture
def make_store(tmp_path):
    opened = []

    def make(**evidence):
        settings = Settings(
            root=str(tmp_path), deployment=DEPLOYMENT, evidence=EvidenceSettings(**evidence)
        )
        opened.append(Store.open(tmp_path, settings))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(make_store):
    return make_store()


def everything(facts):
    """Every row of facts, by what it speaks of."""
    keys = facts._columns.series
    return {key: rows for key in keys if (rows := facts.rows(*key))}


class TestSeal:
    def test_the_evidence_is_what_was_seen(self, store):
        """Sealed facts answer as the live ones did, and carry the ledger and the traits."""
        fill(store)
        live = store.facts(now=T + 100, window_s=3600.0)

        incident, seal = sealed(store)
        read, facts = load_incident(store.folder(incident.id))

        assert read == msgspec.structs.replace(incident, seal=seal)
        assert facts.now == T + 100
        assert facts.deployment == DEPLOYMENT
        assert everything(facts) == everything(live)
        assert facts.changes == live.changes
        assert facts.traits == live.traits

    def test_only_the_window_is_sealed(self, store):
        """Older observations stay out; what changes slowly does not."""
        fill(store)

        incident, seal = sealed(store, window_s=10.0)
        _, facts = load_incident(store.folder(incident.id))

        assert len(facts.rows("prefill-0", v.INFLIGHT_QUEUE_REQS, "rank-0")) == 10
        assert facts.latest("prefill-0", v.COMMAND_LINE) is not None
        assert seal.observations == 11
        assert seal.left_out == ()

    def test_the_same_folder_gives_the_same_facts(self, store, tmp_path):
        """Read twice, and read from a copy elsewhere, the facts are equal."""
        fill(store)
        incident, _ = sealed(store)
        copy = tmp_path / "mailed"
        shutil.copytree(store.folder(incident.id), copy)

        one, two = load_incident(store.folder(incident.id)), load_incident(copy)

        assert one[0] == two[0]
        assert (everything(one[1]), one[1].now, one[1].changes) == (
            *(everything(two[1]), two[1].now, two[1].changes),
        )

    def test_reading_changes_nothing(self, store):
        """A folder without the right to write is read, and no file appears beside the evidence."""
        fill(store)
        incident, _ = sealed(store)
        folder = store.folder(incident.id)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}

        load_incident(folder)

        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert (folder / "evidence.sqlite").stat().st_mode & 0o222 == 0

    def test_tampered_evidence_is_refused_by_name(self, store):
        """One changed byte is refused with the file's name."""
        fill(store)
        incident, _ = sealed(store)
        path = store.folder(incident.id) / "evidence.sqlite"
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.chmod(0o600)
        path.write_bytes(raw)

        with pytest.raises(RefusedError, match=r"evidence\.sqlite is not the evidence that was"):
            load_incident(path.parent)

    def test_missing_evidence_is_refused(self, store):
        """Records without their evidence are refused with the file's name."""
        fill(store)
        incident, _ = sealed(store)
        (store.folder(incident.id) / "evidence.sqlite").unlink()

        with pytest.raises(RefusedError, match=r"evidence\.sqlite is missing"):
            load_incident(store.folder(incident.id))

    def test_evidence_is_sealed_once(self, store):
        """A second seal of one incident is refused and the first stays."""
        fill(store)
        incident, seal = sealed(store)

        with pytest.raises(RefusedError, match="sealed already"):
            store.seal(incident, now=T + 200, deadline_s=30.0)

        assert load_incident(store.folder(incident.id))[0].seal == seal

    def test_what_exceeds_the_bytes_is_named(self, make_store):
        """The newest observations stay, the rest is counted, and the file keeps its bound."""
        store = make_store(megabytes=0.5)
        fill(store, seconds=1000, size=20)

        incident, seal = sealed(store, seconds=1000)
        _, facts = load_incident(store.folder(incident.id))

        rows = facts.rows("prefill-0", v.INFLIGHT_QUEUE_REQS, "rank-0")
        assert seal.size_bytes <= 500_000
        assert rows[-1].value == 999
        assert 0 < seal.observations < 20_001
        left = f"{20_001 - seal.observations} observations up to {said_at(rows[0].at)}"
        assert seal.left_out == (f"{left}: the bound on bytes",)

    def test_what_exceeds_the_deadline_is_named(self, store):
        """Without time the ledger and what changes slowly are sealed, and the rest is named."""
        fill(store)

        incident, seal = sealed(store, deadline_s=0.0)
        _, facts = load_incident(store.folder(incident.id))

        assert seal.left_out == (
            "100 observations up to 10:54:59 UTC: the deadline for collecting evidence",
        )
        assert len(facts.changes) == 1
        assert facts.latest("prefill-0", v.COMMAND_LINE) is not None

    def test_a_nearly_full_disk_costs_the_oldest(self, store):
        """What fits is sealed, what did not is named, and the newest is what stays."""
        fill(store, seconds=1000, size=20)
        incident = incident_of(store)
        store.save(incident)

        with files_of_at_most(600_000):
            seal = store.seal(incident, now=T + 1000, deadline_s=30.0)
        _, facts = load_incident(store.folder(incident.id))

        assert seal.size_bytes <= 600_000
        assert facts.latest("prefill-0", v.INFLIGHT_QUEUE_REQS, "rank-0").value == 999
        left = 20_001 - seal.observations
        assert len(seal.left_out) == 1
        assert re.fullmatch(rf"{left} observations up to .*: the disk is full", seal.left_out[0])

    def test_a_full_disk_leaves_no_half_file(self, store):
        """When nothing fits: one clear sentence, no evidence file, and the incident unsealed."""
        fill(store)
        incident = incident_of(store)
        store.save(incident)

        with (
            files_of_at_most(8_000),
            pytest.raises(WorldError, match=r"The disk is full: nothing.*`tandem investigate`"),
        ):
            store.seal(incident, now=T + 100, deadline_s=30.0)

        assert [path.name for path in store.folder(incident.id).iterdir()] == ["records.jsonl"]
        assert store.incidents()[0].seal is None
        with pytest.raises(RefusedError, match="was never sealed"):
            load_incident(store.folder(incident.id))

    def test_it_is_scrubbed_again(self, store):
        """A text that an older rule let through is scrubbed when it is sealed."""
        fill(store)
        with store._state.transaction():
            store._state._db.execute(
                "INSERT INTO observations VALUES (9999, ?, 'log', 'd', 'log_last', '', ?, NULL, "
                "NULL, 0)",
                (T + 50, '"password: hunter2-correct-horse"'),
            )

        incident, _ = sealed(store)
        _, facts = load_incident(store.folder(incident.id))

        assert facts.last("d", "log_last").value == "password: <redacted>"

    def test_it_is_a_plain_file(self, store):
        """Any SQLite opens it; no write-ahead log belongs to it."""
        fill(store)
        incident, _ = sealed(store)
        path = store.folder(incident.id) / "evidence.sqlite"

        with sqlite3.connect(f"file:{path}?immutable=1", uri=True) as db:
            (mode,) = db.execute("PRAGMA journal_mode").fetchone()
        db.close()

        assert mode != "wal"
        assert {each.name for each in path.parent.iterdir()} == {"evidence.sqlite", "records.jsonl"}


def said_at(at):
    """The moment of the newest that was left out: one before the oldest that was kept."""
    return sealing._clock(at - 1)


class TestAgain:
    """Evidence of a verdict that is judged again."""

    def test_the_first_stays_as_it_is(self, store):
        """A further file holds what is known by now; the incident is read by the newer one."""
        fill(store)
        incident, first = sealed(store)
        before = (store.folder(incident.id) / first.path).read_bytes()
        fill(store, since=T + 100)
        again = store.seal(store.incident(incident.id), now=T + 200, deadline_s=30.0, again=True)
        read, facts = load_incident(store.folder(incident.id))

        assert (first.path, again.path) == ("evidence.sqlite", "evidence-2.sqlite")
        assert (store.folder(incident.id) / first.path).read_bytes() == before
        assert read.seal == again
        assert facts.now == T + 200

    def test_it_has_a_share_of_the_bytes(self, make_store):
        """A further file is smaller: together they stay within what was configured, and a bit."""
        store = make_store(megabytes=1.0)
        fill(store, seconds=3000, size=8)
        incident, _ = sealed(store, seconds=3000)
        again = store.seal(store.incident(incident.id), now=T + 3000, deadline_s=30.0, again=True)

        assert again.size_bytes <= 0.25e6
        assert again.left_out
