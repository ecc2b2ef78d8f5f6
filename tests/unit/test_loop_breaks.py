"""What breaks under the watching: evidence, one incident, one look, and being told to stop."""

import asyncio
import contextlib
import itertools

import msgspec
import pytest

import faults
from fakes import Listener
from sites import AUTO, DECODE, PREFILL, ROUTER
from tandem import handling, loop
from tandem.errors import WorldError
from tandem.records import EvidenceSettings
from tandem.records import vocabulary as v
from tandem.store import load_incident


def refusing(error, times=1000):
    """Give a thing to call that raises so many times, and then lets everything through."""
    left = [error] * times

    def act(*_):
        if left:
            raise left.pop()

    return act


PAUSE_S = 6.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Let the loop try again after seconds instead of a minute: fewer turns to compute."""
    monkeypatch.setattr(loop, "PAUSE_S", PAUSE_S)


FULL = WorldError("The disk is full: nothing could be sealed.", next_step="Free some space.")


class TestEvidence:
    """Before anything is touched."""

    async def test_it_is_sealed_before_anything_is_touched(self, site_of):
        """At the moment of sealing no member was started, stopped or asked for work."""
        site = site_of(policy=AUTO)
        history = []
        site.store.before["seal"] = lambda _: history.append(list(site.world.history))
        await site.watch(until="report")

        assert history == [[]]
        assert site.world.history != []

    async def test_a_full_disk_keeps_everything_from_being_touched(self, site_of):
        """What cannot be sealed is not repaired; it is told, and the watch goes on."""
        site = site_of(policy=AUTO)
        site.store.before["seal"] = refusing(FULL)
        await site.watch(turns=5)
        (incident,) = site.store.incidents()

        assert site.texts("failed") == [str(FULL)]
        assert (incident.state, incident.seal) == ("failed", None)
        assert site.world.history == []
        assert len(site.store.open_findings()) == 1

    async def test_it_is_tried_again_when_there_is_room(self, site_of):
        """After a pause the same finding is sealed, judged and repaired."""
        site = site_of(policy=AUTO)
        site.store.before["seal"] = refusing(FULL, times=1)
        begun_at = site.clock.now()
        await site.watch(until="report")

        assert site.store.incidents()[0].state == "closed"
        assert site.clock.now() - begun_at > PAUSE_S

    async def test_the_pause_grows(self, site_of):
        """A disk that stays full is tried after one pause, then two, then four."""
        site = site_of()
        site.store.before["seal"] = refusing(FULL)
        await site.watch(turns=60)
        at = [one.opened_at for one in reversed(site.store.incidents())]
        pauses = [later - earlier for earlier, later in itertools.pairwise(at)]

        assert pauses == [pytest.approx(times * PAUSE_S, abs=3.0) for times in (1, 2, 4)]

    async def test_what_did_not_fit_is_told(self, site_of, monkeypatch):
        """Each thing that was left out of the seal is an event."""
        site = site_of()
        real = site.store.seal

        def seal(incident, **how):
            made = real(incident, **how)
            return msgspec.structs.replace(made, left_out=("12 observations: the bound",))

        monkeypatch.setattr(site.store, "seal", seal)
        await site.watch(until="report")

        assert site.texts("left-out") == ["left out of the evidence: 12 observations: the bound"]

    async def test_stacks_that_hang_are_given_up(self, site_of):
        """Past its share of the bound the evidence is sealed without them, and says so."""
        site = site_of(evidence=EvidenceSettings(seconds=1.0))

        async def hanging(_members):
            await asyncio.Event().wait()

        site.take_stacks_with(hanging)
        await site.watch(until="report", turns=20_000)  # real time passes meanwhile
        incident, facts = load_incident(site.store.folder(site.store.incidents()[0].id))

        assert incident.seal is not None
        assert facts.last(PREFILL, v.STACK).missing == "they were not taken within 0.5 s"

    async def test_stacks_that_break_are_evidence(self, site_of):
        """A tool that breaks is sealed as what could not be seen."""
        site = site_of()

        async def broken(_members):
            raise OSError("no such tool")

        site.take_stacks_with(broken)
        await site.watch(until="report")
        _, facts = load_incident(site.store.folder(site.store.incidents()[0].id))

        assert facts.last(DECODE, v.STACK).missing == "taking them broke: OSError: no such tool"

    async def test_judgement_reads_the_sealed_folder_alone(self, site_of, monkeypatch):
        """With the rolling observations gone after sealing, the verdict is the same."""
        calm, robbed = site_of(), site_of()
        real = robbed.store.seal

        def seal(incident, **how):
            made = real(incident, **how)
            with robbed.store._state.transaction():
                robbed.store._state._db.execute("DELETE FROM observations")
            robbed.store._window = None
            return made

        monkeypatch.setattr(robbed.store, "seal", seal)
        for site in (calm, robbed):
            await site.watch(until="report")
        first, second = (site.store.incidents()[0].diagnosis for site in (calm, robbed))

        assert first == second
        assert first.cause is not None

    async def test_the_sealed_folder_is_read_once(self, site_of, monkeypatch):
        """An incident that is repaired and written down is loaded once, not at every stage."""
        site = site_of(policy=AUTO)
        loaded = []
        monkeypatch.setattr(
            handling, "load_incident", lambda place: loaded.append(place) or load_incident(place)
        )
        await site.watch(until="report")

        assert len(loaded) == 1


class TestOneIncident:
    """The handling of one incident breaks."""

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero (test_loop_breaks.py:"),
            (KeyError(), "KeyError (test_loop_breaks.py:"),
            (asyncio.CancelledError(), "CancelledError"),
            (WorldError("The moon fell.", next_step="Look up."), "The moon fell. Look up."),
        ],
    )
    async def test_what_broke_is_named_and_the_watch_goes_on(self, site_of, error, said):
        """Our own errors speak for themselves; another says where, and that it is a bug."""
        site = site_of()
        site.store.before["seal"] = refusing(error, times=1)
        await site.watch(until="report")
        (told,) = site.texts("failed")

        assert told.startswith(said)
        assert ("bug in Tandem" in told) == (not isinstance(error, WorldError))
        assert site.store.incidents()[-1].state == "failed"

    async def test_a_document_that_cannot_be_written_undoes_nothing(self, site_of):
        """The repair stands, its failed report is told and written later."""
        site = site_of(policy=AUTO)
        (site.root / "INCIDENTS.md").mkdir()
        site.when("failed", (site.root / "INCIDENTS.md").rmdir)
        await site.watch(until="report")
        (incident,) = site.store.incidents()

        assert incident.state == "closed"
        assert "is not written" in site.texts("failed")[0]
        assert site.acts().count("start prefill-0") == 1

    async def test_a_plan_that_cannot_be_carried_out_here_is_over(self, site_of):
        """Without a supervisor the repair is refused, not tried for ever."""
        site = site_of(policy=AUTO)
        site.parts.hands.supervisors.clear()
        await site.watch(turns=4)

        assert "no such plug-in is here" in site.texts("failed")[0]
        assert [one.state for one in site.store.incidents()] == ["failed"]
        assert site.world.history == []


class TestOneLook:
    """A turn of the loop breaks."""

    async def test_it_is_told_once_and_the_next_look_follows(self, site_of):
        """A disk that takes nothing for a while blinds the watch and does not end it."""
        site = site_of()
        site.store.before["append"] = refusing(FULL, times=10)
        await site.watch(until="report")

        assert site.texts("failed") == [f"a look broke, and the watching goes on: {FULL}"]

    async def test_a_broken_detector_does_not_end_it(self, site_of, monkeypatch):
        """What is no error of ours is told with the place where it happened."""
        site = site_of(faults.serving)

        def broken(*_):
            raise ZeroDivisionError

        monkeypatch.setattr("tandem.loop.detect", broken)
        await site.watch(turns=5)
        (told,) = site.texts("failed")

        assert "ZeroDivisionError (test_loop_breaks.py:" in told

    async def test_an_event_that_cannot_be_stored_is_told_all_the_same(self, site_of):
        """Neither a person nor a repair waits for the disk to take an event."""
        site = site_of(policy=AUTO)
        site.store.before["event"] = lambda kind, _: refusing(FULL)() if kind == "step" else None
        await site.watch(until="report")

        assert site.store.incidents()[0].state == "closed"
        assert f"that was not recorded: {FULL.message}" in site.told
        assert any(text.startswith("Stopping router") for text in site.told)


class TestStopping:
    """SIGINT arrives as a cancellation."""

    async def stopped_at(self, site, kind, text=""):
        """Watch until an event is told, cancel there, and give what the watch raised."""
        reached = asyncio.Event()
        site.store.on_event = lambda told, said: (
            reached.set() if told == kind and said.startswith(text) else None
        )
        running = asyncio.ensure_future(loop.watch(site.parts, hunch=None, tell=Listener()))
        await asyncio.wait_for(reached.wait(), 15)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return running.cancelled()

    async def test_during_evidence_nothing_is_left_open(self, site_of):
        """The folder is closed as failed, and the next watch begins a new one."""
        site = site_of()

        async def hanging(_members):
            await asyncio.Event().wait()

        site.take_stacks_with(hanging)
        ended = await self.stopped_at(site, "evidence")
        first = site.store.incidents()[0].state
        site.take_stacks_with(None)
        site.open()
        await site.watch(until="report")

        assert (ended, first) == (True, "failed")
        assert site.store.incidents()[0].state == "advised"
        assert site.world.history == []

    @pytest.mark.parametrize(
        "step",
        ["Letting", "Stopping router", "Stopping prefill-0", "Starting decode-0", "Checking"],
    )
    async def test_during_a_repair_the_next_watch_resumes(self, site_of, step):
        """The present step ends, the lock is free, and a later watch finishes the repair."""
        site = site_of(policy=AUTO)
        ended = await self.stopped_at(site, "step", step)
        state, holder = site.store.incidents()[0].state, site.store.holder("repair")
        site.open()
        await site.watch(until="report")
        (incident,) = site.store.incidents()

        assert (ended, state, holder) == (True, "repairing", None)
        assert site.kinds()[1] == "resume"
        assert incident.state == "closed"
        assert set(site.world.lives) == {PREFILL, DECODE, ROUTER}

    async def test_during_the_proof_the_next_watch_proves_again(self, site_of):
        """Nothing is restarted twice; the proof is run from its beginning and written down."""
        site = site_of(policy=AUTO)
        await self.stopped_at(site, "proving")
        before = site.store.incidents()[0]
        site.open()
        await site.watch(until="report")
        (incident,) = site.store.incidents()

        assert (before.state, before.verification) == ("repaired", None)
        assert (incident.state, incident.verification.passed) == ("closed", True)
        assert site.acts().count("start prefill-0") == 1

    async def test_while_nothing_is_handled_it_just_ends(self, site_of):
        """The lock is free again."""
        site = site_of(faults.serving)
        ended = await self.stopped_at(site, "watching")

        assert (ended, site.store.holder("watch")) == (True, None)

    async def test_what_broke_meanwhile_is_told_at_the_end(self, site_of):
        """A handling that fails as the watch ends is not lost."""
        site = site_of()
        site.store.before["seal"] = refusing(ZeroDivisionError())
        await site.watch(turns=1)

        assert "ZeroDivisionError" in " ".join(site.texts("failed"))
