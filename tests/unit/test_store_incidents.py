"""Incident folders: what is saved is read back; damage and strangers are refused by name."""

import os
import subprocess
import sys

import msgspec
import pytest

from stores import (
    DEPLOYMENT,
    DIAGNOSIS,
    FINDING,
    OUTCOME,
    PLAN,
    VERIFICATION,
    T,
    files_of_at_most,
    fill,
    incident_of,
    sealed,
)
from tandem.errors import Bug, ConfigError, RefusedError, WorldError
from tandem.records import (
    EvidenceSettings,
    Intent,
    ReportRef,
    Settings,
)
from tandem.store import Store, incidents, load_incident, load_records


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
        later = first.replace(b'"format":1', b'"format":2')
        path.write_bytes(later + b'\n{"record":"new"}\n' + rest)

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
            files_of_at_most(20_000),
            pytest.raises(WorldError, match=r"could not be written.*Free"),
        ):
            store.save(big)

        assert store.incidents() == [incident]
        assert (store.folder(incident.id) / "records.jsonl").read_bytes().endswith(b"\n")

    def test_a_disk_that_refuses_the_first_line_leaves_no_file(self, store):
        """A new folder that could not be begun holds nothing that looks like an incident."""
        incident = incident_of(store, hunch="word " * 10_000)

        with files_of_at_most(10_000), pytest.raises(WorldError, match="could not be written"):
            store.save(incident)

        assert list(store.folder(incident.id).iterdir()) == []


class TestJournal:
    def test_it_never_forgets(self, store):
        """What was appended comes back in order, each journal apart."""
        journal = store.journal_for("up-20251130")
        journal.append(PLAN)
        journal.append(OUTCOME)

        assert store.journal_for("up-20251130").records() == [PLAN, OUTCOME]
        assert store.journal_for("another").records() == []


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
            "strange = ('tandem.engines', 'tandem.config');"
            "print(*[name for name in sys.modules if name.startswith(strange)])"
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

        with pytest.raises(ConfigError, match=r"fits 2 incidents: .*-two, .*-one"):
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

        said = rf"`repair` is already under way in pid {os.getpid()} \("
        with one.lock("repair"), pytest.raises(RefusedError, match=said), two.lock("repair"):
            pass
        with two.lock("repair"):
            holder = one.holder("repair")

        assert holder == os.getpid()
        assert one.holder("repair") is None
        assert one.holder("never-held") is None

    def test_a_holder_is_named_by_its_word(self, tmp_path, store):
        """Who is told to wait is told what for: `tandem up`, not `python`."""
        with store.lock("repair"):
            pass
        script = tmp_path / "tandem"
        script.write_text(
            "import fcntl, os, sys\n"
            "file = os.open(sys.argv[2], os.O_RDWR)\n"
            "fcntl.flock(file, fcntl.LOCK_EX)\n"
            "os.ftruncate(file, 0)\n"
            "os.pwrite(file, str(os.getpid()).encode(), 0)\n"
            "print('held', flush=True)\n"
            "sys.stdin.read()\n"
        )
        words = [sys.executable, script, "up", store.state_folder / "locks" / "repair.lock"]
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=pipe, stdout=pipe) as holder:
            holder.stdout.readline()
            with pytest.raises(RefusedError, match=r"\(tandem up\)"), store.lock("repair"):
                pass

    def test_locks_of_two_names_are_two_locks(self, store):
        """A watch does not keep a repair from running."""
        with store.lock("watch"), store.lock("repair"):
            assert store.holder("watch") == os.getpid()
