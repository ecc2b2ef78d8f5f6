"""A watch that was killed: whatever it was doing, the next one brings it to an end, or says no."""

import shutil

import msgspec
import pytest

from fakes import Crash
from faults import after_restarts, flow
from scenes import Scene
from sites import AUTO, DECODE, PREFILL, ROUTER, Site
from tandem import loop
from tandem.parts import Parts
from tandem.records import Incident
from tandem.unfinished import RESUME_WITHIN_S, unfinished

EVERYONE = {PREFILL, DECODE, ROUTER}


def short_night():
    """The incident in fewer seconds: one decode-only restart, then silence."""
    return after_restarts(flow(Scene()).run(25), silent_s=12, restarts=1)


@pytest.fixture
def advised(site_of):
    """Give a function that makes a site whose incident is judged and about to be repaired."""
    first = site_of(short_night)
    made = []

    async def make():
        if not made:
            await first.watch(until="advice")
        root = first.root.parent / f"copy-{len(made)}"
        shutil.copytree(first.root / ".tandem", root / ".tandem")
        site = Site(root, short_night, told=True, policy=AUTO)
        site.clock.time = first.clock.time
        made.append(site)
        return site

    yield make
    for site in made:
        site.close()


async def killed(site, at):
    """Repair until the kill, before that contact with world or disk; gives whether it came."""
    site.world.touches, site.world.crash_at = 0, at
    site.store.touched = site.world
    (incident,) = site.store.incidents()
    dead = False
    try:
        await loop.run_repair(site.parts, incident, tell=site.told.append)
    except* Crash:  # alone, or in the group of the sessions of the proof
        dead = True
    site.world.crash_at = site.store.touched = None
    site.open()
    return dead


async def killed_before(site, line):
    """Repair until the kill that comes right before the journal's line of that step's intent."""

    def dies(kind, text):
        if kind == "step" and text.startswith(line):
            raise Crash(line)

    site.store.before["event"] = dies
    (incident,) = site.store.incidents()
    with pytest.raises(Crash):
        await loop.run_repair(site.parts, incident, tell=site.told.append)
    site.open()


def newest(parts: Parts) -> Incident:
    """The newest incident as the disk has it."""
    return parts.store.incidents()[0]


class TestResumed:
    """What was cut short seconds or minutes ago."""

    @pytest.mark.timeout(90)
    async def test_killed_anywhere_it_ends_with_every_member_up(self, advised):
        """Kill -9 before every act, gate and line of the disk: order kept, nothing started twice.

        A kill after one contact leaves the same world and disk as a kill before the next.
        """
        at, dead = 0, True
        while dead:
            at += 1
            site = await advised()
            dead = await killed(site, at)
            if begun := unfinished(site.parts):
                await site.watch(until="report")
            starts = [line for line in site.acts() if line.startswith("start")]
            state = newest(site.parts).state

            assert (at, state) == (at, "closed" if begun or not dead else "advised")
            assert (at, set(site.world.lives)) == (at, EVERYONE)
            assert (at, len(starts)) == (at, len(set(starts)))
            assert not starts or site.world.in_order(PREFILL, DECODE)
        assert at > 30

    async def test_it_comes_before_anything_new(self, advised):
        """The first thing the next watch does is to resume; nothing is detected before."""
        site = await advised()
        await killed_before(site, "Starting decode-0")
        await site.watch(until="report")

        assert site.kinds()[:3] == ["watching", "resume", "repair"]
        assert "finding" not in site.kinds()

    async def test_the_requests_it_killed_are_those_before_the_first_stop(self, advised):
        """The proof of a resumed repair lists what was in flight when the first run stopped."""
        site = await advised()
        site.scene.active = 9.0
        await killed_before(site, "Starting prefill-0")
        # Long enough for the router to be seen again, with nothing in its hands.
        site.world.ready_after_s[ROUTER] = 4.0
        await site.watch(until="report")
        (lost,) = newest(site.parts).verification.lost

        assert (lost.subject, lost.count) == (ROUTER, 9)

    async def test_what_cannot_go_on_yet_is_tried_again(self, advised, monkeypatch):
        """A disk that is full while resuming is told; a pause later the repair goes on."""
        monkeypatch.setattr(loop, "PAUSE_S", 3.0)
        site = await advised()
        await killed_before(site, "Starting decode-0")
        full = [OSError("full")]
        site.store.before["save"] = lambda _: (_ for _ in ()).throw(full.pop()) if full else None
        await site.watch(until="report")

        assert "OSError: full" in site.texts("failed")[0]
        assert newest(site.parts).state == "closed"

    async def test_a_repair_under_way_elsewhere_is_not_unfinished(self, advised):
        """A watch that starts beside a person's repair waits for it, and is not ended by it."""
        site = await advised()
        await killed_before(site, "Starting decode-0")
        other = site.store
        site.open()
        with other.lock("repair"):
            await site.watch(turns=5)
        waited = list(site.kinds())
        await site.watch(until="report")

        assert waited == ["watching"]
        assert newest(site.parts).state == "closed"


class TestRefused:
    """What must not go on."""

    async def test_not_when_somebody_else_started_a_member(self, advised):
        """A life that neither was there before nor is ours is not stopped: a person is told."""
        site = await advised()
        await killed_before(site, "Starting prefill-0")
        for name in (PREFILL, DECODE):
            site.world.spawn(name)
        before = site.acts()
        await site.watch(until="report")
        incident = newest(site.parts)

        assert site.acts() == before
        assert (incident.state, len(incident.outcomes)) == ("failed", 7)
        assert "not resumed: somebody else started" in site.texts("failed")[0]
        assert "`tandem status`" in site.texts("failed")[0]

    async def test_not_when_it_is_old(self, advised):
        """A repair that was cut short more than an hour ago speaks of another day."""
        site = await advised()
        await killed_before(site, "Stopping decode-0")
        site.scene.now = site.clock.time = site.clock.time + RESUME_WITHIN_S + 60.0
        await site.watch(until="report")

        assert "its last step was 61 min ago" in site.texts("failed")[0]
        assert newest(site.parts).state == "failed"
        assert site.acts() == ["stop router"]

    async def test_not_when_the_member_is_no_longer_ours(self, advised):
        """A member that lost its supervisor meanwhile is named."""
        site = await advised()
        await killed_before(site, "Stopping decode-0")
        members = tuple(
            msgspec.structs.replace(one, supervisor="none") if one.name == DECODE else one
            for one in site.world.deployment.members
        )
        site.world.deployment = msgspec.structs.replace(site.world.deployment, members=members)
        site.open()
        await site.watch(until="report")

        assert "decode-0 is no longer a member that Tandem may restart" in site.texts("failed")[0]
        assert site.acts() == ["stop router"]

    async def test_an_old_repair_is_not_proven_by_the_way(self, advised):
        """Nobody's deployment is put under load for what happened hours ago."""
        site = await advised()
        site.store.before["event"] = _dying("proving")
        with pytest.raises(Crash):
            await loop.run_repair(site.parts, newest(site.parts), tell=site.told.append)
        site.open()
        asked = list(site.world.history)
        site.scene.now = site.clock.time = site.clock.time + RESUME_WITHIN_S + 60.0
        await site.watch(until="report")

        assert "was never proven" in site.texts("failed")[0]
        assert (newest(site.parts).state, site.world.history) == ("failed", asked)

    async def test_what_is_refused_is_refused_once(self, advised):
        """The next watch has nothing to say about it."""
        site = await advised()
        await killed_before(site, "Stopping decode-0")
        site.scene.now = site.clock.time = site.clock.time + RESUME_WITHIN_S + 60.0
        await site.watch(until="report")
        site.open()

        assert unfinished(site.parts) == []


def _dying(kind):
    """Die where an event of that kind would be told."""

    def act(told, _):
        if told == kind:
            raise Crash(kind)

    return act
