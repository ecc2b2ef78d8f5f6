"""The rolling state: what is appended is numbered, shared between processes, and bounded."""

import multiprocessing
import sqlite3
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from stores import FINDING
from tandem.errors import RefusedError, WorldError
from tandem.ports import Harvest
from tandem.records import (
    Change,
    Deployment,
    EvidenceSettings,
    Finding,
    Observation,
    Settings,
    Trait,
    WatchSettings,
)
from tandem.records import vocabulary as v
from tandem.store import Store, state
from tandem.store.window import WINDOW_S

T = 1_764_500_000.0


def seen(at, value=1.0, *, name=v.INFLIGHT_QUEUE_REQS, subject="prefill-0", **fields):
    return Observation(source="loads", subject=subject, name=name, at=T + at, value=value, **fields)


def words(at, *command, incarnation="1:1"):
    return seen(at, command, name=v.COMMAND_LINE, incarnation=incarnation)


def values(facts, name=v.INFLIGHT_QUEUE_REQS):
    return [row.value for row in facts.rows("prefill-0", name)]


@pytest.fixture
def settings(tmp_path):
    return Settings(root=str(tmp_path), deployment=Deployment(name="test", members=()))


@pytest.fixture
def open_store(tmp_path, settings):
    """Open the store as a process of its own would."""
    opened = []

    def make(**sections):
        changed = msgspec.structs.replace(settings, **sections)
        opened.append(Store.open(tmp_path, changed))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store):
    return open_store()


def append(store, *observations, traits=(), changes=()):
    return store.append(
        Harvest(observations=observations, traits=tuple(traits), changes=tuple(changes))
    )


class TestAppend:
    def test_ids_grow_and_are_never_shared(self, store):
        """Observations, traits and changes are numbered from one sequence."""
        kept = append(
            store,
            seen(0),
            traits=[Trait(subject="*", name="t", at=T)],
            changes=[Change(at=T, subject="d", kind="restart")],
        )
        later = append(store, seen(1))

        ids = [row.id for row in (*kept.observations, *kept.traits, *kept.changes)]
        assert len(set(ids)) == 3
        assert later.observations[0].id > max(ids)

    def test_every_value_comes_back_as_it_was(self, store):
        """Numbers, switches, texts, lists and reasons survive the file, with their types."""
        rows = [
            seen(0, value, name=f"n{number}", label="l", incarnation="1:2")
            for number, value in enumerate([True, 3, 2.5, 4.0, "text", ("a", "b"), None])
        ]
        rows.append(seen(0, None, name="n9", missing="timed out after 2 s"))
        kept = append(store, *rows).observations

        facts = store.facts(now=T + 1, window_s=3600.0)

        read = [facts.last("prefill-0", row.name, row.label) for row in kept]
        assert read == list(kept)
        assert [type(row.value) for row in read] == [type(row.value) for row in rows]

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_no_number_is_missing(self, store, value):
        """A value that JSON cannot hold becomes a reason."""
        kept = append(store, seen(0, value)).observations[0]

        assert (kept.value, kept.missing) == (None, f"the value was {value}")

    def test_a_full_disk_keeps_nothing_of_the_harvest(self, store):
        """An append that the disk refuses is one clear error, and leaves no part of itself."""
        append(store, seen(0, 1.0))
        store._state._db.execute("PRAGMA max_page_count = 1")

        with pytest.raises(WorldError, match=r"The disk is full: .*Free some space"):
            append(store, *(seen(1, "x" * 5000, name=f"n{number}") for number in range(100)))
        store._state._db.execute("PRAGMA max_page_count = 1000000")
        append(store, seen(2, 3.0))

        facts = store.facts(now=T + 2, window_s=60.0)
        assert values(facts) == [1.0, 3.0]
        assert facts.subjects("n0") == ()


class TestSlowThings:
    def test_what_has_not_changed_is_kept_once(self, store):
        """The same command line again comes back as the row already known."""
        first = append(store, words(0, "python", "x")).observations
        again = append(store, words(1, "python", "x")).observations

        assert first == again
        assert len(store.facts(now=T + 2, window_s=60.0).rows("prefill-0", v.COMMAND_LINE)) == 1

    def test_another_life_is_another_row(self, store):
        """The same words in another incarnation are kept as well."""
        append(store, words(0, "python", "x"), words(1, "python", "x", incarnation="2:2"))

        rows = store.facts(now=T + 2, window_s=60.0).rows("prefill-0", v.COMMAND_LINE)
        assert [row.incarnation for row in rows] == ["1:1", "2:2"]

    def test_what_changes_back_is_a_row_again(self, store, open_store):
        """Between two processes, too: the newest row is the present value."""
        append(store, words(0, "python", "--port", "1"))
        append(open_store(), words(1, "python", "--port", "2"))
        append(store, words(2, "python", "--port", "1"))

        facts = store.facts(now=T + 3, window_s=60.0)
        assert [row.value[-1] for row in facts.rows("prefill-0", v.COMMAND_LINE)] == ["1", "2", "1"]

    @pytest.mark.parametrize("window_s", [10.0, 600.0, 3600.0])
    def test_the_window_carries_what_is_older_than_itself(self, store, window_s):
        """The newest command line is in every window; older ones and old gauges are not."""
        append(store, words(0, "old"), words(1, "new"), seen(0, 1.0))
        append(store, seen(5000, 2.0))

        facts = store.facts(now=T + 5000, window_s=window_s)

        assert [row.value for row in facts.rows("prefill-0", v.COMMAND_LINE)] == [("new",)]
        assert values(facts) == [2.0]

    def test_traits_are_kept_once_and_always_there(self, store, open_store):
        """The newest of every trait is in any window."""
        old = Trait(subject="*", name=v.T_ENGINE_VERSION, at=T, value="1", because="told")
        new = msgspec.structs.replace(old, at=T + 1, value="2")
        append(store, traits=[old, old])
        append(open_store(), traits=[new])

        facts = store.facts(now=T + 90_000, window_s=10.0)

        assert [trait.value for trait in facts.traits] == ["2"]


class TestLedger:
    def test_it_reaches_further_than_the_window(self, store):
        """Changes of `keep_hours` are in every window, older ones in none."""
        append(store, changes=[Change(at=T, subject="d", kind="restart", incarnation="1:1")])
        append(store, changes=[Change(at=T + 50, subject="d", kind="config", what="x")])

        near = store.facts(now=T + 47 * 3600, window_s=10.0)
        far = store.facts(now=T + 48 * 3600 + 10, window_s=10.0)

        assert [change.kind for change in near.changes] == ["restart", "config"]
        assert [change.kind for change in far.changes] == ["config"]

    def test_two_witnesses_of_one_restart_make_one_row(self, store, open_store):
        """A second process that sees the same restart adds nothing and learns the row's id."""
        row = Change(at=T, subject="d", kind="restart", incarnation="2:2", how_known="process")
        first = append(store, changes=[row]).changes
        second = append(open_store(), changes=[msgspec.structs.replace(row, at=T + 1)]).changes

        assert first == second
        assert len(store.facts(now=T + 2, window_s=10.0).changes) == 1

    def test_what_can_happen_twice_in_a_life_is_kept_twice(self, store):
        """A configuration changed twice is two rows."""
        row = Change(at=T, subject="d", kind="config", what="level", incarnation="2:2")
        append(store, changes=[row, msgspec.structs.replace(row, at=T + 1)])

        assert len(store.facts(now=T + 2, window_s=10.0).changes) == 2


class TestFacts:
    def test_only_the_window_is_there(self, store):
        """Observations before the window are left out, whether memory or the file answers."""
        for at in range(0, 400, 10):
            append(store, seen(at, float(at)))

        assert values(store.facts(now=T + 390, window_s=30.0)) == [360.0, 370.0, 380.0, 390.0]
        assert len(values(store.facts(now=T + 390, window_s=WINDOW_S + 1))) == 31
        assert values(store.facts(now=T + 100, window_s=10.0))[:2] == [90.0, 100.0]

    def test_a_second_process_sees_the_same(self, store, open_store):
        """What one appended the other reads, before and after it looked for the first time."""
        append(store, seen(0, 1.0))
        other = open_store()
        first = values(other.facts(now=T + 1, window_s=60.0))
        append(store, seen(1, 2.0))
        append(other, seen(2, 3.0))

        assert first == [1.0]
        assert values(other.facts(now=T + 3, window_s=60.0)) == [1.0, 2.0, 3.0]
        assert values(store.facts(now=T + 3, window_s=60.0)) == [1.0, 2.0, 3.0]

    def test_facts_do_not_move_when_more_is_appended(self, store):
        """Facts are a picture of one moment."""
        append(store, seen(0, 1.0))
        facts = store.facts(now=T + 1, window_s=60.0)

        append(store, seen(1, 2.0))

        assert values(facts) == [1.0]

    @example_settings(max_examples=25)
    @given(
        st.lists(
            st.tuples(st.integers(0, 900), st.integers(0, 2), st.booleans()),
            min_size=1,
            max_size=60,
        ),
        st.sampled_from([1.0, 60.0, 299.0, 300.0]),
    )
    def test_memory_and_file_agree(self, tmp_path_factory, looks, window_s):
        """For any order of arrival, memory answers as the file does, from either process."""
        root = tmp_path_factory.mktemp("store")
        settings = Settings(root=str(root), deployment=Deployment(name="test", members=()))
        with Store.open(root, settings) as one, Store.open(root, settings) as two:
            one.facts(now=T, window_s=1.0)  # its window is in memory from here on
            for at, thing, first in looks:
                row = words(at, str(thing)) if thing == 2 else seen(at, at, label=str(thing))
                append(one if first else two, row)
            now = T + max(at for at, _, _ in looks)

            answers = [one.facts(now=now, window_s=window_s)]
            with Store.open(root, settings) as fresh:
                answers.append(fresh.facts(now=now, window_s=window_s))

        indexes = [
            {
                key: [row.id for row in rows]
                for key in facts._columns.series
                if (rows := facts.rows(*key))
            }
            for facts in answers
        ]
        assert indexes[0] == indexes[1]


class TestRetention:
    def test_old_observations_are_pruned_and_slow_ones_stay(self, open_store):
        """Full resolution for `window_s`; starts and the ledger for `keep_hours`."""
        store = open_store(
            evidence=EvidenceSettings(window_s=100.0), watch=WatchSettings(keep_hours=1.0)
        )
        append(store, seen(0), words(0, "first"), changes=[Change(at=T, subject="d", kind="code")])
        append(store, words(2000, "second"), seen(2000))
        append(store, seen(3500), seen(3599))

        middle = store.facts(now=T + 3599, window_s=7200.0)
        append(store, seen(3700))
        late = store.facts(now=T + 3700, window_s=7200.0)

        assert [row.at - T for row in middle.rows("prefill-0", v.INFLIGHT_QUEUE_REQS)] == [
            *(3500.0, 3599.0),
        ]
        assert [row.value for row in middle.rows("prefill-0", v.COMMAND_LINE)] == [
            *(("first",), ("second",)),
        ]
        assert len(middle.changes) == 1
        assert [row.value for row in late.rows("prefill-0", v.COMMAND_LINE)] == [("second",)]
        assert late.changes == ()

    def test_the_newest_start_is_never_pruned(self, open_store):
        """A prefill that has run for a week still has its command line."""
        store = open_store(watch=WatchSettings(keep_hours=1.0))
        append(store, words(0, "python", "long-ago.py"))
        append(store, seen(7 * 86_400))

        facts = store.facts(now=T + 7 * 86_400, window_s=60.0)

        assert facts.latest("prefill-0", v.COMMAND_LINE).value == ("python", "long-ago.py")

    def test_ids_are_not_used_again_after_pruning(self, open_store):
        """An id once cited names nothing else, though its row is gone."""
        store = open_store(evidence=EvidenceSettings(window_s=1.0))
        first = append(store, seen(0)).observations[0]
        append(store, seen(1000))

        again = append(open_store(), seen(1001)).observations[0]

        assert again.id > first.id


class TestEvents:
    def test_a_reader_asks_for_what_came_after(self, store, open_store):
        """Events come oldest first, after the last id, at most as many as asked for."""
        told = [store.event("step", f"step {n}", at=T + n, data={"n": n}) for n in range(3)]

        assert open_store().events() == told
        assert store.events(after=told[0].id, limit=1) == [told[1]]
        assert store.events(after=told[2].id) == []


class TestFindings:
    def test_a_finding_stays_open_until_it_is_closed(self, store, open_store):
        """The same id is one finding; closing it ends it for every process."""
        finding = Finding(
            id="silent-stall@p>d@1", kind="silent-stall", subject="p>d", onset_at=T, found_at=T + 5,
            summary="silent", witnesses=(),
        )  # fmt: skip
        store.keep([finding])
        store.keep([finding])
        before = open_store().open_findings()

        store.keep([msgspec.structs.replace(finding, closed_at=T + 9)])

        assert before == [finding]
        assert open_store().open_findings() == []


class TestFile:
    def test_only_its_owner_may_look(self, store, tmp_path):
        """The folder is of mode 700."""
        assert stat.S_IMODE((tmp_path / ".tandem").stat().st_mode) == 0o700

    def test_a_schema_of_the_future_is_refused(self, store, tmp_path, open_store):
        """A file of another schema is not touched."""
        with sqlite3.connect(tmp_path / ".tandem" / "state.sqlite") as db:
            db.execute("PRAGMA user_version = 9")
        db.close()

        with pytest.raises(RefusedError, match="has schema 9, and this Tandem knows 1"):
            open_store()

    def test_a_file_that_is_no_database_is_named(self, tmp_path, settings):
        """Garbage in place of the state is one sentence with the next thing to do."""
        (tmp_path / ".tandem").mkdir()
        (tmp_path / ".tandem" / "state.sqlite").write_bytes(b"x" * 8192)

        with pytest.raises(WorldError, match=r"state\.sqlite failed while opening it: .*move the"):
            Store.open(tmp_path, settings)

    def test_a_process_that_hangs_on_it_is_told_of(self, store, monkeypatch, open_store):
        """When another process never ends its write, the wait is bounded and says so."""
        monkeypatch.setattr(state, "BUSY_TIMEOUT_S", 0.05)
        waiting = open_store()

        with store._state.transaction(), pytest.raises(WorldError, match=r"kept .* from appending"):
            append(waiting, seen(0))

        assert append(waiting, seen(1)).observations[0].value == 1.0

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path, settings):
        """A file where the folder should be is one sentence."""
        (tmp_path / ".tandem").write_text("")

        with pytest.raises(WorldError, match=r"\.tandem cannot be made"):
            Store.open(tmp_path, settings)

    def test_processes_append_at_once(self, tmp_path, settings, store):
        """Several processes that append together lose nothing and share no id."""
        context = multiprocessing.get_context("spawn")
        raw = msgspec.json.encode(settings)
        workers = [context.Process(target=appender, args=(raw, n)) for n in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(15)

        rows = store.facts(now=T + 60, window_s=120.0).rows("prefill-0", v.RUNNING_REQS)

        assert [worker.exitcode for worker in workers] == [0, 0]
        assert len(rows) == 40
        assert len({row.id for row in rows}) == 40


def appender(raw, number):
    """Append 20 observations as another process."""
    settings = msgspec.json.decode(raw, type=Settings)
    with Store.open(Path(settings.root), settings) as store:
        for at in range(20):
            append(store, seen(at, number, name=v.RUNNING_REQS))


class TestClockSetBack:
    """Rows under a time that has not come yet."""

    def test_they_are_not_answered_with(self, store):
        """After it, only what was seen since is in the window, and what changes slowly."""
        append(store, words(590, "python"), *(seen(at) for at in range(600)))
        before = values(store.facts(now=T + 600, window_s=60))
        store.forget_later(T + 10)
        append(store, seen(11, 7.0))
        facts = store.facts(now=T + 11, window_s=180)

        assert len(before) > 50
        assert values(facts) == [7.0]
        assert facts.latest("prefill-0", v.COMMAND_LINE).value == ("python",)
        assert store.last_seen_at() == T + 11


def test_closed_findings_are_remembered(store):
    """Those that closed since a time, the others not."""
    for number, closed_at in enumerate((None, T + 5, T + 50)):
        store.keep([msgspec.structs.replace(FINDING, id=f"f{number}", closed_at=closed_at)])

    assert [one.id for one in store.closed_findings(T + 10)] == ["f2"]
    assert [one.id for one in store.open_findings()] == ["f0"]
