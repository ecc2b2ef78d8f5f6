"""Incident folders: what is saved is read back, sealed evidence is proven, damage is refused."""

import os
import resource
import shutil
import sqlite3
import subprocess
import sys

import msgspec
import pytest

from tandem.errors import Bug, ConfigError, RefusedError, WorldError
from tandem.ports import Harvest, Journal
from tandem.records import (
    Change,
    Deployment,
    Diagnosis,
    EvidenceSettings,
    Finding,
    Incident,
    Intent,
    Launch,
    Member,
    Observation,
    Outcome,
    Plan,
    ReportRef,
    Role,
    Settings,
    Trait,
    Verification,
)
from tandem.records import vocabulary as v
from tandem.store import Store, incidents, load_incident, load_records
from tandem.store import seal as sealing

T = 1_764_500_000.0

DEPLOYMENT = Deployment(
    name="test",
    members=(
        Member(
            name="prefill-0", role=Role.PREFILL, url="http://127.0.0.1:1", engine="sglang",
            bootstrap_port=2, supervisor="local",
            launch=Launch(argv=("python", "-m", "tandem_engine", "prefill"), cwd="/srv"),
        ),
    ),
)  # fmt: skip

FINDING = Finding(
    id="silent-stall@p>d@1", kind="silent-stall", subject="p>d", onset_at=T, found_at=T + 5,
    summary="silent", witnesses=(),
)  # fmt: skip
DIAGNOSIS = Diagnosis(
    knowledge_version="1", verdict="undetermined", cause=None, incident_class=None, mechanism=None,
    confidence_note="", modes=(), ruled_out=(), changes=(), hunch=None, next_observation="stacks",
)  # fmt: skip
PLAN = Plan(scope="nothing", steps=(), refused=(), kept=(), costs=(), because="undetermined")
OUTCOME = Outcome(step="stop:decode-0", status="done", started_at=T, ended_at=T + 1, detail="gone")
VERIFICATION = Verification(
    passed=True, sequential_passed=8, sequential_total=8, sequential_latency_s=0.1,
    sessions_passed=30, sessions_total=30, corrupted=0, rescored_tokens=36, rescored_gap_max=0.1,
    transfer_failed_delta=0, inflight_after=0, requests=(), lost=(), not_proven=(), started_at=T,
    ended_at=T + 20,
)  # fmt: skip


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


def incident_of(store, at=T, slug="silent stall", **fields):
    return Incident(
        id=store.new_incident_id(at, slug), opened_at=at, deployment=DEPLOYMENT, **fields
    )


def fill(store, seconds=100, size=1, since=T):
    """Numbers once a second, and one of everything else."""
    store.append(
        Harvest(
            observations=(
                Observation(
                    source="process", subject="prefill-0", name=v.COMMAND_LINE, at=since - 5000,
                    value=("python", "-m", "tandem_engine"), incarnation="1:1",
                ),
                *(
                    Observation(
                        source="loads", subject="prefill-0", name=v.INFLIGHT_QUEUE_REQS,
                        at=since + at, value=at, label=f"rank-{rank}",
                    )
                    for at in range(seconds)
                    for rank in range(size)
                ),
            ),
            traits=(Trait(subject="*", name=v.T_ENGINE_FAMILY, at=since, value="sglang"),),
            changes=(Change(at=since - 9000, subject="decode-0", kind="restart"),),
        )
    )  # fmt: skip


def sealed(store, seconds=100, **how):
    incident = incident_of(store)
    store.save(incident)
    seal = store.seal(incident, now=T + seconds, **{"deadline_s": 30.0, **how})
    return incident, seal


class TestNames:
    def test_a_name_is_the_time_and_what_it_is(self, store):
        """Sortable by time, readable, and safe as a file's name."""
        assert store.new_incident_id(T, "Silent/Stall: p>d") == (
            "2025-11-30T10-53-20Z-silent-stall-p-d"
        )

    def test_two_in_one_second_have_two_names(self, store):
        """A name that is taken gets a number."""
        first = incident_of(store)
        store.save(first)

        assert store.new_incident_id(T, "silent stall") == f"{first.id}-2"

    @pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden"])
    def test_no_name_leads_elsewhere(self, store, name):
        """An id is one folder's name."""
        with pytest.raises(Bug, match="no name of an incident"):
            store.folder(name)


class TestSaving:
    def test_every_stage_comes_back(self, store):
        """What the stages added one by one is read back as one incident."""
        incident = incident_of(store, finding=FINDING, hunch="overlap schedule")
        store.save(incident)
        for part in (
            {"diagnosis": DIAGNOSIS},
            {"plan": PLAN, "state": "advised"},
            {"state": "repairing"},
            {"outcomes": (OUTCOME,), "state": "repaired"},
            {"verification": VERIFICATION, "state": "closed"},
            {"report": ReportRef(path="INCIDENTS.md", commit="1a2b3c4", subject="s")},
        ):
            incident = msgspec.structs.replace(incident, **part)
            store.save(incident)

        assert store.incidents() == [incident]
        assert load_records(store.folder(incident.id)) == incident

    def test_saving_twice_writes_nothing(self, store):
        """An unchanged incident adds no line."""
        incident = incident_of(store, finding=FINDING, plan=PLAN)
        store.save(incident)
        path = store.folder(incident.id) / "records.jsonl"
        before = path.read_bytes()

        store.save(incident)

        assert path.read_bytes() == before

    def test_a_repair_under_way_can_be_read(self, store):
        """Outcomes that were journaled and not yet saved are part of the incident."""
        incident = incident_of(store, plan=PLAN, state="repairing")
        store.save(incident)
        journal = store.journal_for(incident.id)
        journal.append(Intent(step="stop:decode-0", at=T, incarnations={"decode-0": "1:1"}))
        journal.append(OUTCOME)

        assert store.incidents()[0].outcomes == (OUTCOME,)
        store.save(msgspec.structs.replace(incident, outcomes=(OUTCOME,), state="repaired"))
        assert store.incidents()[0].outcomes == (OUTCOME,)

    def test_newest_comes_first(self, store):
        """Incidents are listed from the newest back."""
        names = []
        for at in (0, 20, 10):
            incident = incident_of(store, at=T + at)
            store.save(incident)
            names.append(incident.id)

        assert [each.id for each in store.incidents()] == [names[1], names[2], names[0]]

    def test_a_crash_in_the_last_line_costs_that_line(self, store):
        """A line cut short is dropped when it is the last, and the next save goes on after it."""
        incident = incident_of(store, finding=FINDING)
        store.save(incident)
        with (store.folder(incident.id) / "records.jsonl").open("ab") as file:
            file.write(b'{"record":"plan","scope":"pa')

        read = store.incidents()[0]
        store.save(msgspec.structs.replace(incident, plan=PLAN))

        assert read == incident
        assert store.incidents()[0].plan == PLAN

    def test_damage_anywhere_else_is_refused_by_line(self, store):
        """A damaged line that is not the last makes the folder unreadable, and says which."""
        incident = incident_of(store, finding=FINDING)
        store.save(incident)
        path = store.folder(incident.id) / "records.jsonl"
        lines = path.read_bytes().splitlines()
        path.write_bytes(b"\n".join([lines[0], lines[1][:20], *lines[2:], b""]))

        with pytest.raises(RefusedError, match=r"Line 2 of .*records\.jsonl is damaged"):
            load_records(path.parent)
        assert store.incidents() == []

    def test_another_format_is_refused(self, store):
        """A folder of a later format is refused before anything of it is decoded."""
        incident = incident_of(store)
        store.save(incident)
        path = store.folder(incident.id) / "records.jsonl"
        first, rest = path.read_bytes().split(b"\n", 1)
        path.write_bytes(
            first.replace(b'"format":1', b'"format":2') + b'\n{"record":"new"}\n' + rest
        )

        with pytest.raises(RefusedError, match="has format 2, and this Tandem reads format 1"):
            load_records(path.parent)

    def test_a_disk_that_refuses_leaves_whole_lines(self, store):
        """A save that does not fit is one clear error, and the records stay readable."""
        incident = incident_of(store)
        store.save(incident)
        big = msgspec.structs.replace(
            incident, plan=msgspec.structs.replace(PLAN, because="word " * 100_000)
        )

        with (
            files_of_at_most(100_000),
            pytest.raises(WorldError, match=r"could not be written.*Free"),
        ):
            store.save(big)

        assert store.incidents() == [incident]
        assert (store.folder(incident.id) / "records.jsonl").read_bytes().endswith(b"\n")


class TestJournal:
    def test_it_implements_the_port(self, store):
        """It appends and gives everything back in order, to another process too."""
        journal = store.journal_for("up-20251130")
        journal.append(PLAN)
        journal.append(OUTCOME)

        assert isinstance(journal, Journal) or hasattr(journal, "append")
        assert store.journal_for("up-20251130").records() == [PLAN, OUTCOME]
        assert store.journal_for("another").records() == []


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
        assert facts._index == live._index
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
        assert (one[1]._index, one[1].now, one[1].changes) == (
            *(two[1]._index, two[1].now, two[1].changes),
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
        assert seal.left_out == (
            f"{20_001 - seal.observations} observations up to "
            f"{said_at(rows[0].at)}: the bound on bytes",
        )

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
        assert seal.left_out[0].endswith("the disk is full")

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


class TestLoading:
    def test_a_stranger_needs_the_folder_alone(self, store, tmp_path):
        """Another process without configuration, store or adapter reads the same facts."""
        fill(store)
        incident, _ = sealed(store)
        code = (
            "import sys; from tandem.store import load_incident;"
            "incident, facts = load_incident(sys.argv[1]);"
            "print(incident.id, facts.now, facts.latest('prefill-0', 'inflight_queue_reqs',"
            "'rank-0').value);"
            "print(*[name for name in sys.modules if name.startswith(('tandem.eng', 'tandem.conf'))])"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code, str(store.folder(incident.id))],
            capture_output=True, text=True, timeout=15, check=True, cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip

        assert ran.stdout.splitlines() == [f"{incident.id} {T + 100} 99", ""]

    def test_an_id_or_its_beginning_is_enough(self, store, tmp_path):
        """Within a deployment an incident is named by as much of its id as is its own."""
        fill(store)
        incident, _ = sealed(store)

        assert load_incident(incident.id[:18], tmp_path)[0].id == incident.id
        assert load_incident(store.folder(incident.id) / "records.jsonl")[0].id == incident.id

    def test_an_ambiguous_beginning_is_refused(self, store, tmp_path):
        """Two that fit are both named."""
        for slug in ("one", "two"):
            store.save(incident_of(store, slug=slug))

        with pytest.raises(ConfigError, match="fits 2 incidents: .*-two, .*-one"):
            load_incident("2025-11", tmp_path)

    def test_what_is_not_there_is_refused(self, tmp_path):
        """A name that fits nothing says where it looked."""
        with pytest.raises(ConfigError, match="There is no incident 'nothing'"):
            load_incident("nothing", tmp_path)

    def test_a_folder_that_is_none_is_refused(self, tmp_path):
        """Any other folder is no incident."""
        with pytest.raises(WorldError, match="is no incident's folder"):
            load_incident(tmp_path)


class TestForgetting:
    def test_the_newest_are_kept_and_open_ones_always(self, make_store):
        """Beyond `keep_incidents` the oldest go, except those that are open."""
        store = make_store(keep_incidents=2)
        fill(store)
        names = []
        for number, state in enumerate(["open", "closed", "advised", "repairing", "closed"]):
            incident = incident_of(store, at=T + number, state=state)
            store.save(incident)
            names.append(incident.id)

        newest = incident_of(store, at=T + 9)
        store.seal(newest, now=T + 100, deadline_s=30.0)

        assert [each.id for each in store.incidents()] == [newest.id, names[4], names[3], names[0]]
        assert [event.text for event in store.events()] == [
            f"Forgot incident {name}: it was the oldest." for name in (names[2], names[1])
        ]

    def test_what_is_not_an_incident_is_left_alone(self, make_store):
        """Folders that a person put there are never deleted."""
        store = make_store(keep_incidents=1)
        folder = store.incidents_folder / "2020-notes"
        folder.mkdir(parents=True)
        damaged = store.incidents_folder / "2020-01-01T00-00-00Z-x"
        damaged.mkdir()

        incidents.forget(store.incidents_folder, 0)

        assert folder.is_dir()
        assert damaged.is_dir()


class TestLocks:
    def test_one_process_at_a_time(self, make_store):
        """A second holder is refused at once and told who holds it; afterwards it is free."""
        one, two = make_store(), make_store()

        with (
            one.lock("repair"),
            pytest.raises(
                RefusedError, match=rf"`repair` is already under way in pid {os.getpid()}"
            ),
            two.lock("repair"),
        ):
            pass
        with two.lock("repair"):
            holder = one.holder("repair")

        assert holder == os.getpid()
        assert one.holder("repair") is None
        assert one.holder("never-held") is None

    def test_locks_of_two_names_are_two_locks(self, store):
        """A watch does not keep a repair from running."""
        with store.lock("watch"), store.lock("repair"):
            assert store.holder("watch") == os.getpid()


class files_of_at_most:  # noqa: N801 - reads as a word of the test
    """Within it the kernel refuses any file of this process to grow beyond a size."""

    def __init__(self, size_bytes):
        self.size_bytes = size_bytes

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size_bytes, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def said_at(at):
    """The moment of the newest that was left out: one before the oldest that was kept."""
    return sealing._clock(at - 1)
