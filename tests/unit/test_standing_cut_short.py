"""Up, down, restart and status where something goes wrong or somebody else is at work."""

import asyncio
import contextlib

import msgspec
import pytest

import faults
from sites import DECODE, PREFILL, ROUTER
from tandem.errors import NotProvenError, RefusedError, WorldError
from tandem.parts import STANDING
from tandem.ports import Completion
from tandem.records import Outcome, Trait
from tandem.records import vocabulary as v
from tandem.standing import NEVER_DECODE_ALONE, bring_up, restart, status, take_down

EVERYONE = {PREFILL, DECODE, ROUTER}


@pytest.fixture
def down(site_of):
    """Give a site of which nothing runs."""
    site = site_of(faults.serving)
    site.world.lives.clear()
    return site


@pytest.fixture
def running(site_of):
    """Give a site that serves."""
    return site_of(faults.serving)


async def cut_short(act, sentence):
    """Cancel an act when a sentence is told, as Ctrl-C does; gives whether it was cancelled."""
    reached = asyncio.Event()

    class Hearing(list):
        def __call__(self, text):
            self.append(text)
            if sentence in text:
                reached.set()

    task = asyncio.ensure_future(act(Hearing()))
    await asyncio.wait_for(reached.wait(), 15)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return task.cancelled()


class TestUp:
    """What `up` leaves behind when it does not end well."""

    @pytest.mark.parametrize("member", [PREFILL, DECODE, ROUTER])
    async def test_whoever_does_not_come_up_nothing_is_left(self, down, member):
        """Wherever it stops, what was started is stopped, and the error says what to do."""
        down.world.unstartable.add(member)

        with pytest.raises(WorldError, match=f"{member} cannot be started.*is stopped again"):
            await bring_up(down.parts, tell=down.told.append)
        assert down.world.lives == {}

    async def test_they_are_stopped_in_stop_order(self, down):
        """The router first and the prefill last, whatever the configuration's order."""
        down.world.answers[ROUTER] = Completion(status="failed", detail="503")
        policy = msgspec.structs.replace(down.parts.settings.policy, start_timeout_s=2.0)
        settings = msgspec.structs.replace(down.parts.settings, policy=policy)
        parts = _with(down.parts, settings=settings)

        with pytest.raises(WorldError, match="through router failed"):
            await bring_up(parts, tell=down.told.append)
        assert down.acts()[3:] == ["stop router", "stop decode-0", "stop prefill-0"]

    async def test_a_pair_that_runs_and_does_not_serve_is_left_running(self, running):
        """A second `up` of a silent pair starts and stops nothing, and names the next word."""
        running.world.answers["prefill-0>decode-0"] = Completion(status="timed_out")

        with pytest.raises(WorldError, match=r"runs already but does not serve.*investigate"):
            await bring_up(running.parts, tell=running.told.append)
        assert running.acts() == []
        assert set(running.world.lives) == EVERYONE

    async def test_what_will_not_go_again_is_named(self, down):
        """A router that cannot be stopped keeps nobody else running, and is named."""
        down.world.undying.add(ROUTER)
        down.world.answers[ROUTER] = Completion(status="timed_out")

        with pytest.raises(WorldError, match=r"not wholly gone: router .* did not stop"):
            await bring_up(down.parts, tell=down.told.append)
        assert set(down.world.lives) == {ROUTER}

    async def test_ctrl_c_leaves_nothing_running(self, down):
        """Interrupted while the decode comes up, both it and the prefill are stopped."""
        down.world.ready_after_s[DECODE] = 1e9

        async def up(tell):
            await bring_up(down.parts, tell=tell)

        assert await cut_short(up, "Still waiting for decode-0")
        assert down.world.lives == {}
        assert down.store.holder("repair") is None

    async def test_a_decode_may_join_where_that_is_known_not_to_hurt(self, running):
        """An engine that forgets its dead decodes lets one be started alone."""
        running.scene.traits.append(_harmless())
        await running.watch(turns=2)
        del running.world.lives[DECODE]
        await bring_up(running.parts, tell=running.told.append)

        assert running.acts() == ["start decode-0"]

    async def test_it_waits_for_no_other(self, down):
        """While a repair or another `up` is under way it is refused with the holder's pid."""
        with down.store.lock("repair"), pytest.raises(RefusedError, match="under way in pid"):
            await bring_up(down.parts, tell=down.told.append)

        assert down.acts() == []


class TestDown:
    """Taking down, and again."""

    async def test_a_second_down_has_nothing_to_do(self, running):
        """Every step is `already` or seen gone, and nothing is stopped twice."""
        await take_down(running.parts, tell=running.told.append)
        outcomes = await take_down(running.parts, tell=running.told.append)
        stops = {one.status for one in outcomes if one.step.startswith("stop:")}

        assert stops == {"already"}
        assert running.acts() == ["stop router", "stop decode-0", "stop prefill-0"]

    async def test_a_stranger_on_the_port_of_who_does_not_run_is_told(self, down):
        """It is nobody we started: the outcome names it, and `down` is done."""
        down.world.held[DECODE].append("port 25200 is held by pid 7 (nginx)")
        outcomes = await take_down(down.parts, tell=down.told.append)
        told = {one.step: one.detail for one in outcomes if one.status == "failed"}

        assert told.keys() == {"gone:decode-0"}
        assert "pid 7 (nginx)" in told["gone:decode-0"]

    async def test_who_does_not_stop_is_named(self, running):
        """A member that survives keeps the word from success."""
        running.world.undying.add(DECODE)

        with pytest.raises(NotProvenError, match=r"decode-0 .* did not stop"):
            await take_down(running.parts, tell=running.told.append)

    async def test_it_is_in_the_journal(self, running):
        """What was stopped by hand is remembered, so that a watch does not undo it."""
        await take_down(running.parts, tell=running.told.append)
        kept = running.store.journal_for(STANDING).records()
        done = [one.step for one in kept if isinstance(one, Outcome) and one.status == "done"]

        assert done[:3] == ["stop:router", "stop:decode-0", "stop:prefill-0"]


class TestRestart:
    """One member alone."""

    async def test_a_decode_may_where_that_is_known_not_to_hurt(self, running):
        """Where a trait says so, no force is needed."""
        running.scene.traits.append(_harmless())
        await running.watch(turns=2)
        await restart(running.parts, DECODE, why="w", force=False, tell=running.told.append)

        assert running.acts() == ["stop decode-0", "start decode-0"]

    async def test_ctrl_c_leaves_the_member_running(self, running):
        """Interrupted while it stops, the member is started all the same before the word ends."""
        real = running.clock.sleep

        async def sleep(seconds):
            if running.acts() == ["stop router"]:
                task.cancel()
            await real(seconds)

        running.clock.sleep = sleep
        task = asyncio.ensure_future(
            restart(running.parts, ROUTER, why="w", force=False, tell=running.told.append)
        )
        await asyncio.wait({task})

        assert task.cancelled()
        assert running.acts() == ["stop router", "start router"]
        assert ROUTER in running.world.lives

    async def test_what_cannot_be_started_again_is_an_error(self, running):
        """The supervisor's own sentence is told."""
        running.world.unstartable.add(ROUTER)

        with pytest.raises(WorldError, match="router cannot be started"):
            await restart(running.parts, ROUTER, why="w", force=False, tell=running.told.append)

    async def test_that_it_was_forced_is_kept(self, running):
        """Who, why and whether by force are in the event."""
        await restart(running.parts, DECODE, why="x (ada)", force=True, tell=running.told.append)
        (event,) = [one for one in running.store.events() if one.kind == "restart"]

        assert event.text == "restarting decode-0: x (ada)"
        assert event.data == {"member": DECODE, "why": "x (ada)", "forced": True}


class TestStatus:
    """The state in one line, whoever is at work."""

    async def test_a_repair_comes_before_what_is_down(self, running):
        """Members that are away in the middle of a repair are no call to act."""
        del running.world.lives[DECODE]
        with running.store.lock("repair"):
            said = await status(running.parts)

        assert said.state == "repairing"
        assert said.never == "start and stop nothing by hand until it ends"

    async def test_what_a_watch_found_is_the_state(self, site_of):
        """Sick since its onset; the next word shows the plan that waits."""
        site = site_of()
        await site.watch(until="report")
        with site.store.lock("watch"):
            said = await status(site.parts)
        (incident,) = site.store.incidents()

        assert (said.state, said.since) == ("sick", incident.finding.onset_at)
        assert said.next_command == f"tandem repair {incident.id}"
        assert said.never == NEVER_DECODE_ALONE

    async def test_what_is_undetermined_is_to_be_read(self, site_of):
        """Where the plan does nothing, the next word is its diagnosis."""
        site = site_of(faults.stall_without_restart)
        await site.watch(until="report")
        with site.store.lock("watch"):
            said = await status(site.parts)

        assert (said.state, said.next_command) == (
            "sick",
            f"tandem diagnose {site.store.incidents()[0].id}",
        )

    async def test_a_finding_without_its_incident_is_sick_too(self, site_of):
        """Where no advice could be made one looks by hand."""
        site = site_of()

        def full(_):
            raise WorldError("The disk is full.", next_step="Free some space.")

        site.store.before["seal"] = full
        await site.watch(until="failed")
        with site.store.lock("watch"):
            said = await status(site.parts)

        assert (said.state, said.next_command) == ("sick", "tandem investigate")

    async def test_what_cleared_is_past(self, site_of):
        """An advice about what a watch no longer sees is no state."""
        site = site_of()
        site.when("report", lambda: faults.flow(site.scene))
        await site.watch(until="cleared")
        with site.store.lock("watch"):
            said = await status(site.parts)

        assert (said.state, said.incident) == ("serving", None)

    async def test_nothing_is_forbidden_where_nothing_hurts(self, running):
        """Where a decode may be restarted alone, no warning is given."""
        running.scene.traits.append(_harmless())
        await running.watch(turns=2)

        assert (await status(running.parts)).never == ""

    async def test_who_does_not_answer_is_unreachable(self, running):
        """A process that lives and does not answer is neither up nor down."""
        running.world.ready_after_s[DECODE] = 1e9
        said = await status(running.parts)
        states = {one.name: one.state for one in said.members}

        assert (said.state, states[DECODE]) == ("partly-down", "unreachable")


def _harmless():
    return Trait(subject="*", name=v.T_DECODE_ALONE_RESTART_HURTS, at=1.0, value=False)


def _with(parts, **fields):
    known = {name: getattr(parts, name) for name in parts.__slots__}
    return type(parts)(**{**known, **fields})
