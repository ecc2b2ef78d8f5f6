"""Up, down, restart and status over a deployment that exists only in memory."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
from types import SimpleNamespace

import msgspec
import pytest

from children import answers, member_of, until
from fakes import Listener, World, deployment
from tandem.errors import NotProvenError, RefusedError, WorldError
from tandem.parts import Parts
from tandem.ports import Harvest
from tandem.processes import life_of, state_of
from tandem.records import Finding, Incident, Observation, Plan, Seal, Settings, Step
from tandem.records import vocabulary as v
from tandem.standing import bring_up, restart, status, take_down
from tandem.store import Store

SEAL = Seal(
    path="evidence.sqlite", sha256="0", size_bytes=0, observations=0, left_out=(), sealed_at=0.0
)
ORDER = ["start prefill-0", "start decode-0", "start router"]


def unreaped():
    """A child of this process that ends at once and is left a zombie."""
    return subprocess.Popen(["true"])


class Room:
    """The parts over a world, with a count of looks."""

    def __init__(self, tmp_path, world=None):
        self.world = world or World(deployment())
        self.looks = 0
        self.settings = Settings(root=str(tmp_path), deployment=self.world.deployment)
        self.store = Store.open(tmp_path, self.settings)
        self.tell = Listener()
        self.parts = Parts(
            settings=self.settings,
            store=self.store,
            hands=self.world.hands(),
            clock=self.world.clock,
            collector=SimpleNamespace(tick=self.tick),
            modes=(),
            take_stacks=None,
        )

    def moves(self):
        """Give the starts and stops so far, without what the gates asked."""
        return [one for one in self.world.history if one.startswith(("start ", "stop "))]

    async def tick(self):
        """Look at nothing, and count it."""
        self.looks += 1
        return Harvest()


@pytest.fixture
def room(tmp_path):
    """Give a room over one prefill, one decode and a router, none of them running."""
    found = Room(tmp_path)
    yield found
    found.store.close()


def waiting_for(world, name, held):
    """Give a look at a world in which one member's inflight queue holds some requests."""

    def observed(member, *_):
        row = Observation(
            source="loads",
            subject=member.name,
            name=v.INFLIGHT_QUEUE_REQS,
            at=world.clock.now(),
            value=held if member.name == name else 0,
        )
        return Harvest(observations=(row,))

    return observed


def step(name):
    """Give a step of a plan; what it does is not looked at here."""
    return Step(
        id=name, verb="stop", target="decode-0", gate="none", timeout_s=1, on_failure="stop", why=""
    )


def advised(room, **lives):
    """Save an incident that waits for a person, speaking of these lives."""
    now = room.world.clock.now()
    finding = Finding(
        id="f",
        kind="silent-stall",
        subject="prefill-0>decode-0",
        onset_at=now - 60,
        found_at=now - 50,
        summary="8 hand-offs pinned",
        witnesses=(),
        incarnations=lives,
    )
    plan = Plan(scope="pair", steps=(step("s"),), refused=(), kept=(), costs=(), because="b")
    incident = Incident(
        id=room.store.new_incident_id(now, "silent-stall"),
        opened_at=now,
        deployment=room.world.deployment,
        finding=finding,
        plan=plan,
        state="advised",
    )
    room.store.save(incident)
    return incident


class TestUp:
    """Bringing up."""

    async def test_members_come_up_in_order(self, room):
        """Prefill, decode, router; every step done."""
        outcomes = await bring_up(room.parts, tell=room.tell)

        assert room.moves() == ORDER
        assert {one.status for one in outcomes} == {"done"}

    async def test_a_second_up_starts_nothing(self, room):
        """What runs is left alone."""
        await bring_up(room.parts, tell=room.tell)
        outcomes = await bring_up(room.parts, tell=room.tell)

        assert room.moves() == ORDER
        assert {one.status for one in outcomes if one.step.startswith("start:")} == {"already"}

    async def test_what_was_started_is_put_away_again(self, room):
        """When a member does not come up, what this call started is stopped."""
        room.world.unstartable.add("router")

        with pytest.raises(WorldError, match="cannot be started"):
            await bring_up(room.parts, tell=room.tell)
        assert room.world.lives == {}

    @pytest.mark.parametrize("room_for", range(0, 40, 3))
    async def test_a_disk_that_fills_leaves_nothing_running(self, room, monkeypatch, room_for):
        """Wherever in `up` the disk fills, the error says so and what was started is stopped."""
        left = [room_for]

        def limited(write):
            def writing(*given, **named):
                if left[0] == 0:
                    raise WorldError("The disk is full.", next_step="Free some space.")
                left[0] -= 1
                return write(*given, **named)

            return writing

        for name in ("event", "append"):
            monkeypatch.setattr(room.store, name, limited(getattr(room.store, name)))
        journal_for = room.store.journal_for

        def journal(incident):
            found = journal_for(incident)
            return SimpleNamespace(append=limited(found.append), records=found.records)

        monkeypatch.setattr(room.store, "journal_for", journal)

        came_up = False
        with contextlib.suppress(WorldError):
            await bring_up(room.parts, tell=room.tell)
            came_up = True
        assert set(room.world.lives) == ({"prefill-0", "decode-0", "router"} if came_up else set())

    async def test_what_ran_before_is_not_put_away(self, room):
        """A member that ran before a failing `up` runs on."""
        room.world.run("prefill-0")
        room.world.run("decode-0")
        room.world.unstartable.add("router")

        with pytest.raises(WorldError):
            await bring_up(room.parts, tell=room.tell)
        assert set(room.world.lives) == {"prefill-0", "decode-0"}

    async def test_what_would_stop_the_last_is_told_before_the_first(self, room):
        """A taken port of the router keeps the prefill from being started for nothing."""
        room.world.obstacles["router"] = ["port 29000 of router is held by pid 7 (nginx)"]

        with pytest.raises(WorldError, match=r"held by pid 7 \(nginx\)\. Nothing was started"):
            await bring_up(room.parts, tell=room.tell)
        assert room.moves() == []

    async def test_a_decode_is_not_started_alone_against_an_old_prefill(self, room):
        """`up` is no way around the guard: it names both and the way, and starts nothing."""
        room.world.run("prefill-0")

        with pytest.raises(RefusedError, match=r"decode-0 is down while prefill-0 .*tandem down"):
            await bring_up(room.parts, tell=room.tell)
        assert room.moves() == []

    async def test_without_a_supervisor_nothing_is_started(self, tmp_path):
        """A deployment that others supervise is refused, with the key to add."""
        room = Room(tmp_path, World(deployment(supervisor="none")))

        with pytest.raises(RefusedError, match="supervisor"):
            await bring_up(room.parts, tell=room.tell)
        room.store.close()


class TestDown:
    """Taking down."""

    async def test_nothing_is_left(self, room):
        """Every member is stopped, the router first and the prefill last."""
        room.world.run()
        await take_down(room.parts, tell=room.tell)

        assert room.moves() == ["stop router", "stop decode-0", "stop prefill-0"]
        assert room.world.lives == {}

    async def test_what_stays_is_named(self, room):
        """A holder that does not go is named, and `down` has not succeeded."""
        room.world.run()
        room.world.held["prefill-0"].append("port 25000 is held by pid 7")

        with pytest.raises(NotProvenError, match="port 25000 is held by pid 7"):
            await take_down(room.parts, tell=room.tell)


class TestRestart:
    """Restarting one member."""

    async def test_a_decode_alone_is_refused(self, room):
        """Against a running prefill a decode is not restarted; the safe way is named."""
        room.world.run()

        with pytest.raises(RefusedError, match="tandem down"):
            await restart(room.parts, "decode-0", why="w", force=False, tell=room.tell)
        assert room.moves() == []

    async def test_force_does_it_and_keeps_who_and_why(self, room):
        """A forced restart happens, and the reason is an event."""
        room.world.run()
        before = room.world.lives["decode-0"].id
        life = await restart(
            room.parts, "decode-0", why="drained (ada)", force=True, tell=room.tell
        )

        assert life.id != before
        assert [one.data["why"] for one in room.store.events() if one.kind == "restart"] == [
            "drained (ada)"
        ]

    @pytest.mark.parametrize("name", ["router", "prefill-0"])
    async def test_others_may_be_restarted(self, room, name):
        """A router and a prefill are restarted without force."""
        room.world.run()
        await restart(room.parts, name, why="w", force=False, tell=room.tell)

        assert room.moves() == [f"stop {name}", f"start {name}"]

    async def test_an_unknown_member_is_refused(self, room):
        """A name that is no member says which are."""
        with pytest.raises(RefusedError, match="prefill-0, decode-0, router"):
            await restart(room.parts, "decode-7", why="w", force=False, tell=room.tell)

    async def test_a_member_that_does_not_answer_is_told(self, room):
        """A restarted member that never answers is an error with its log."""
        room.world.run()
        room.world.ready_after_s["router"] = 1e9

        with pytest.raises(WorldError, match="does not answer"):
            await restart(room.parts, "router", why="w", force=False, tell=room.tell)


class TestLedger:
    """What Tandem changes is in the ledger, whoever watches."""

    async def test_without_a_watch_it_looks_itself(self, room):
        """`up` looks once, a restart before and after: the ledger has both lives."""
        await bring_up(room.parts, tell=room.tell)
        after_up = room.looks
        await restart(room.parts, "router", why="w", force=False, tell=room.tell)

        assert (after_up, room.looks) == (1, 3)

    async def test_a_watch_does_the_looking(self, room):
        """Where a watch runs, nothing is looked at twice."""
        with room.store.lock("watch"):
            await bring_up(room.parts, tell=room.tell)

        assert room.looks == 0


class TestStatus:
    """One line to act on."""

    async def test_down(self, room):
        """Nothing runs: the next command brings it up."""
        said = await status(room.parts)

        assert (said.state, said.next_command) == ("down", "tandem up")

    async def test_partly_down(self, room):
        """A missing member is named."""
        room.world.run("prefill-0", "decode-0")
        said = await status(room.parts)

        assert (said.state, said.next_command) == ("partly-down", "tandem investigate")
        assert "router" in said.summary

    async def test_unwatched(self, room):
        """All up and nobody watching: watching is next."""
        room.world.run()
        said = await status(room.parts)

        assert (said.state, said.next_command) == ("unwatched", "tandem watch")
        assert "never restart decode alone" in said.never

    async def test_unwatched_with_requests_held(self, room, monkeypatch):
        """Hand-offs that wait while nobody watches: looking into them is next, not watching."""
        room.world.run()
        monkeypatch.setattr(room.world, "observed", waiting_for(room.world, "prefill-0", 8))
        said = await status(room.parts)

        assert (said.state, said.next_command) == ("unwatched", "tandem investigate")
        assert "8 requests wait for a hand-off on prefill-0: do they move?" in said.summary

    async def test_serving(self, room):
        """All up and watched."""
        room.world.run()
        with room.store.lock("watch"):
            said = await status(room.parts)

        assert said.state == "serving"

    async def test_what_somebody_else_started_is_told(self, room, monkeypatch):
        """A member that answers without a life of ours cannot be stopped by us: it says so."""
        room.world.run()

        async def nobody(_):
            return None

        monkeypatch.setattr(room.parts.hands.supervisors["fake"], "inspect", nobody)

        said = await status(room.parts)

        assert {(one.state, one.detail) for one in said.members} == {
            ("up", "somebody else started it")
        }

    async def test_a_process_that_nobody_reaped_is_told(self, room):
        """A member whose last process is a zombie is down, and its state says why."""
        child = unreaped()
        pid = child.pid
        try:
            await until(lambda: state_of(pid) == "Z")
            for name, value in ((v.STARTED_AT, 1.0), (v.PID, pid)):
                row = Observation(
                    source="process", subject="decode-0", name=name, value=value,
                    at=room.world.clock.now(), incarnation=f"{pid}:1",
                )  # fmt: skip
                room.store.append(Harvest((row,)))
            said = {one.name: one for one in (await status(room.parts)).members}
        finally:
            child.wait()

        assert (said["decode-0"].state, said["decode-0"].process) == ("down", "Z")
        assert said["prefill-0"].process is None

    async def test_what_was_started_by_hand_shows_its_life_and_its_state(self, room, tmp_path):
        """A process nobody supervises is found by its port, and that it is stopped is told."""
        member = member_of(tmp_path, port=None)
        process = await asyncio.create_subprocess_exec(
            *member.launch.argv, stdout=subprocess.DEVNULL
        )
        try:
            await until(lambda: answers(member))
            mine = msgspec.structs.replace(member, supervisor="none", launch=None, name="decode-0")
            others = [
                one for one in room.parts.settings.deployment.members if one.name != mine.name
            ]
            seen = msgspec.structs.replace(room.parts.settings.deployment, members=(mine, *others))
            settings = msgspec.structs.replace(room.settings, deployment=seen)
            parts = dataclasses.replace(room.parts, settings=settings)
            os.kill(process.pid, signal.SIGSTOP)
            await until(lambda: state_of(process.pid) == "T")
            life = life_of(process.pid)
            for at in (10.0, 5.0):
                row = Observation(
                    source="process", subject="decode-0", name=v.PROCESS_STATE, value="T",
                    at=room.world.clock.now() - at, incarnation=life.id,
                )  # fmt: skip
                room.store.append(Harvest((row,)))
            said = (await status(parts)).members[0]
        finally:
            process.kill()
            await process.wait()

        assert (said.since, said.incarnation) == (life.started_at, life.id)
        assert (said.process, said.process_since) == ("T", room.world.clock.now() - 10.0)

    @pytest.mark.parametrize("running", [[], ["prefill-0"], ["prefill-0", "decode-0", "router"]])
    async def test_a_repair_that_was_cut_short_comes_first(self, room, running):
        """Whatever runs, a repair that has no end is the state, and going on is the command."""
        room.world.run(*running) if running else None
        incident = msgspec.structs.replace(advised(room), seal=SEAL, state="repairing")
        room.store.save(incident)

        said = await status(room.parts)
        with room.store.lock("watch"):
            watched = await status(room.parts)

        assert said.state == "interrupted"
        assert said.next_command == f"tandem repair {incident.id} --approve"
        assert watched.state != "interrupted"

    async def test_advice_about_what_has_cleared_is_over(self, room):
        """A finding that was seen to close leaves no call to act, whoever mended it."""
        room.world.run()
        incident = advised(room)
        closed = msgspec.structs.replace(incident.finding, closed_at=room.world.clock.now())
        room.store.keep([closed])

        said = await status(room.parts)

        assert (said.state, said.incident) == ("unwatched", None)

    async def test_an_advised_repair_is_next(self, room):
        """An incident that waits for a person is the state, and its repair the next command."""
        room.world.run()
        incident = advised(room, **{"decode-0": room.world.lives["decode-0"].id})
        said = await status(room.parts)

        assert (said.state, said.next_command) == ("sick", f"tandem repair {incident.id}")
        assert said.since == incident.finding.onset_at

    async def test_an_advice_about_dead_lives_is_not(self, room):
        """After a restart the advice speaks of a life that is over: it is not offered."""
        room.world.run()
        advised(room, **{"decode-0": "an older life"})
        said = await status(room.parts)

        assert (said.state, said.incident) == ("unwatched", None)

    async def test_a_death_that_was_mended_by_hand_is_over(self, room):
        """Advice about a dead member, which has no life to compare, ends when it lives again."""
        incident = advised(room)
        await room.world.clock.sleep(1)
        await bring_up(room.parts, tell=room.tell)
        said = await status(room.parts)

        assert room.store.incidents()[0].id == incident.id
        assert (said.state, said.incident) == ("unwatched", None)

    async def test_a_closed_incident_is_over(self, room):
        """What was repaired is no state."""
        room.world.run()
        incident = advised(room)
        room.store.save(msgspec.structs.replace(incident, state="closed"))

        assert (await status(room.parts)).state == "unwatched"

    async def test_members_say_since_when(self, room):
        """Every member has its state, its life and its age."""
        room.world.run()
        said = await status(room.parts)

        assert [(one.name, one.state) for one in said.members] == [
            ("prefill-0", "up"),
            ("decode-0", "up"),
            ("router", "up"),
        ]
        assert all(one.since < room.world.clock.now() for one in said.members)
