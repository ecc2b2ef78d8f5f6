"""A watch that ends at any moment: the next one neither loses nor repeats an incident."""

import contextlib
import shutil

import msgspec
import pytest

from fakes import Crash
from faults import after_restarts, flow, silence
from scenes import Scene
from sites import AUTO, Site
from tandem.errors import WorldError
from tandem.records import Aftermath, Incident, Milestone, Policy
from tandem.unfinished import begun

WRITES = ("append", "event", "keep", "save", "seal")
"""Every way in which a watch changes what is on the disk; each is one transaction or one line."""


def short_night():
    """The incident in fewer seconds: one decode-only restart, then silence."""
    return after_restarts(flow(Scene()).run(25), silent_s=8, restarts=1)


class Death:
    """Kill -9 before one write: from then on this process changes nothing any more."""

    def __init__(self, store, at):
        self.left, self.dead, self.writes = at, False, []
        for name in WRITES:
            store.before[name] = lambda *_, name=name: self._write(name)

    def _write(self, name):
        self.left -= 1
        if self.left < 0:
            self.dead = True
        if self.dead:
            raise Crash(name)
        self.writes.append(name)


@pytest.fixture
def found(site_of):
    """Give a function that makes a site where a stall has been found and not yet been judged."""
    first = site_of(short_night)
    made = []

    async def make(**how):
        if not made:
            await first.watch(until="finding")
        root = first.root.parent / f"copy-{len(made)}"
        shutil.copytree(first.root / ".tandem", root / ".tandem")
        site = Site(root, short_night, told=True, **how)
        site.clock.time = first.clock.time
        made.append(site)
        return site

    yield make
    for site in made:
        site.close()


async def killed(site, at, *, turns=9):
    """Watch until that write, and be dead; gives what was written before."""
    death = Death(site.store, at)
    with contextlib.suppress(Crash):
        await site.watch(turns=turns)
    written = death.writes, death.dead
    site.open()
    return written


def sections(site):
    """How many incidents the document tells of."""
    document = site.root / "INCIDENTS.md"
    return document.read_text().count("begin -->") if document.exists() else 0


class TestKilled:
    """Kill -9."""

    @pytest.mark.timeout(90)
    async def test_before_any_write_there_is_one_incident_in_the_end(self, found):
        """Whatever it was about to write, the next watch ends with one incident, told once."""
        at, runs, dead, seen = 0, 0, True, set()
        while dead:
            site = await found()
            written, dead = await killed(site, at)
            seen |= set(written)
            await site.watch(turns=9)
            (incident,) = site.store.incidents()

            assert (at, incident.state, bool(incident.report)) == (at, "advised", True)
            assert (at, sections(site)) == (at, 1)
            assert (at, len(site.store.open_findings())) == (at, 1)
            assert site.world.history == []
            # Turns that bring nothing new differ from one another in nothing.
            at += 1 if "save" in written else 3
            runs += 1
        assert runs > 15
        assert seen == set(WRITES)

    @pytest.mark.parametrize("at", [30, 45, 60])
    async def test_twice_is_as_once(self, found, at):
        """A watch that is killed while it goes on with the incident of one that was killed."""
        site = await found()
        await killed(site, at)
        await killed(site, 8)
        await site.watch(turns=16)

        assert [one.state for one in site.store.incidents()] == ["advised"]
        assert sections(site) == 1

    async def test_with_a_policy_that_repairs_it_repairs_once(self, found):
        """Killed between judging and acting, the next watch acts on the same incident."""
        site = await found(policy=AUTO)

        def dies(incident):
            if incident.state == "repairing":
                raise Crash

        site.store.before["save"] = dies
        with contextlib.suppress(Crash):
            await site.watch(turns=20)
        site.open()
        await site.watch(until="report")

        assert [one.state for one in site.store.incidents()] == ["closed"]
        assert site.acts().count("start prefill-0") == 1

    async def test_what_was_over_meanwhile_is_written_down(self, found):
        """Judged, killed, and gone before the next watch: the incident is told all the same."""
        site = await found()
        site.store.before["event"] = lambda kind, _: crash() if kind == "advice" else None
        with contextlib.suppress(Crash):
            await site.watch(turns=20)
        over(site)
        await site.watch(until="report")
        (incident,) = site.store.incidents()

        assert (incident.state, sections(site)) == ("advised", 1)
        assert site.store.open_findings() == []

    async def test_what_was_over_before_it_was_sealed_is_closed(self, found):
        """Without evidence there is nothing to tell: the folder does not stay open for ever."""
        site = await found()
        site.store.before["seal"] = lambda _: crash()
        site.store.before["save"] = lambda one: crash() if one.state == "failed" else None
        with contextlib.suppress(Crash):
            await site.watch(turns=20)
        left = site.store.incidents()[0].state
        over(site)
        await site.watch(until="failed")

        assert left == "open"
        assert [one.state for one in site.store.incidents()] == ["failed"]

    async def test_the_incident_of_a_person_is_left_to_the_person(self, found):
        """What somebody investigates right now is not taken over by a watch that starts."""
        site = await found()
        (finding,) = site.store.open_findings()
        by_hand = Incident(
            id=site.store.new_incident_id(site.clock.now(), "by hand"),
            opened_at=site.clock.now(),
            deployment=site.world.deployment,
            finding=finding,
        )
        site.store.save(by_hand)

        assert begun(site.parts) == []


class TestWrittenLate:
    """A report that a killed watch still owed."""

    async def test_it_repeats_no_other_incident(self, site_of):
        """Writing down how an old repair held does not judge afresh what stands now."""
        site = site_of(policy=AUTO)
        await site.watch(until="report")
        site.fields["policy"] = Policy()
        site.open()
        silence(site.scene, 8)
        await site.watch(until="report")
        first = site.store.incidents()[-1]
        held = (Milestone(after_s=1800.0, watched_s=1800.0, requests=9),)
        owed = Aftermath(since=first.verification.ended_at, held=held)
        site.store.save(msgspec.structs.replace(first, aftermath=owed))
        site.open()
        await site.watch(turns=60)

        assert [one.state for one in site.store.incidents()] == ["advised", "closed"]
        assert site.store.incidents()[-1].report.followed == 2  # it recurred, too
        assert len(site.store.open_findings()) == 1


class TestStopped:
    """SIGTERM."""

    async def test_in_the_middle_of_evidence_the_same_incident_goes_on(self, found):
        """The next watch seals the folder that was begun, instead of beginning another."""
        site = await found()
        await site.watch(until="evidence")
        left = site.store.incidents()
        site.open()
        await site.watch(until="report")
        (incident,) = site.store.incidents()

        assert (incident.id, incident.state) == (left[0].id, "advised")
        assert incident.seal is not None

    async def test_a_full_disk_leaves_one_incident_too(self, found):
        """What could not be sealed before the restart is sealed after it, in its own folder."""
        site = await found()

        def full(_):
            raise WorldError("The disk is full.", next_step="Free some space.")

        site.store.before["seal"] = full
        await site.watch(until="failed")
        site.open()
        await site.watch(until="report")

        assert [one.state for one in site.store.incidents()] == ["advised"]

    async def test_what_was_seen_before_a_repair_opens_nothing_after_a_restart(self, found):
        """The end of the last repair is remembered: older observations are of lives gone by."""
        site = await found(policy=AUTO)
        await site.watch(until="report")
        site.open()
        await site.watch(turns=20)

        assert [one.state for one in site.store.incidents()] == ["closed"]
        assert site.store.open_findings() == []


def over(site):
    """Let the stall be over while nobody watches; a new watch is to come."""
    flow(site.scene)
    site.open()
    site.clock.time += 40.0


def crash():
    """Be killed."""
    raise Crash


def test_an_old_incident_was_opened_by_a_person():
    """A folder of before this was known is never gone on with by a watch."""
    fields = {field.name: field.default for field in msgspec.structs.fields(Incident)}

    assert fields["opened_by"] == "person"
