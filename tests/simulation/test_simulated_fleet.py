"""The simulated fleet: requests are neither lost nor made up, and what breaks is found."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.detect import detect
from tandem.facts import Facts
from tandem.records import Thresholds
from tandem.records import vocabulary as v
from tandem.testing.demand import CALM, IDLE, LIGHT, STEADY, Clients
from tandem.testing.fleet import Fleet
from tandem.testing.mechanisms import MECHANISMS, break_, heal
from tandem.testing.schedules import MACHINES
from tandem.testing.showing import Sight
from tandem.testing.soak import STALL_KINDS
from tandem.testing.virtual_time import VirtualClock, run
from tandem.testing.watching import Watch

NOTICED_S = 10.0
BUSY_S = 20.0
"""3x the p99 TTFT that these machines have when busy, and a turn."""
PARTIAL_S = 75.0
SEED = 20261130


def told_of(mechanism, demand, *, seconds=120.0, machine="laptop", shape=(1, 1)):
    """The findings of a watch over a fleet in which one thing breaks, with their delays."""
    clock = VirtualClock()
    prefills, decodes = shape
    fleet = Fleet(clock, seed=SEED, prefills=prefills, decodes=decodes, machine=MACHINES[machine])
    clients = Clients(fleet)

    async def main():
        watch = Watch(fleet)
        clients.ask(demand)
        await watch.watch(90.0)
        assert watch.told == []
        broke_at = clock.world
        break_(fleet, mechanism)
        await watch.watch(seconds)
        await watch.close()
        since = fleet.completed_at if demand is not IDLE else broke_at
        if MECHANISMS[mechanism].expected != "stall" or MECHANISMS[mechanism].partial:
            since = broke_at
        hung = [room.arrived_at for room in fleet.open_rooms() if room.arrived_at >= broke_at]
        since = max(since, min(hung, default=since))
        return [(one.at - since, one.finding) for one in watch.told if one.opened]

    return run(main(), clock)


BROKEN = [one.name for one in MECHANISMS.values() if one.expected != "nothing"]
NEAR = [one.name for one in MECHANISMS.values() if one.expected == "nothing"]


class TestMechanisms:
    """Every mechanism is found by what it does."""

    @pytest.mark.parametrize("name", [one for one in BROKEN if not MECHANISMS[one].needs_load])
    @pytest.mark.parametrize("demand", [IDLE, LIGHT], ids=lambda one: one.name)
    def test_what_breaks_is_found_while_little_is_asked(self, name, demand):
        """Within ten seconds of the first request that hangs, a router's fault soon after."""
        kinds = MECHANISMS[name].kinds or STALL_KINDS
        delays = [at for at, one in told_of(name, demand) if one.kind in kinds]

        assert delays
        assert delays[0] <= (NOTICED_S + 6.0 if kinds != STALL_KINDS else NOTICED_S)

    @pytest.mark.parametrize("name", BROKEN)
    def test_what_breaks_is_found_under_load(self, name):
        """Within seconds of the last progress; what stalls in part within its longer look."""
        kinds = MECHANISMS[name].kinds or STALL_KINDS
        delays = [at for at, one in told_of(name, STEADY) if one.kind in kinds]

        assert delays
        assert delays[0] <= (PARTIAL_S if MECHANISMS[name].partial else BUSY_S)

    @pytest.mark.parametrize("name", NEAR)
    @pytest.mark.parametrize("demand", [IDLE, STEADY], ids=lambda one: one.name)
    def test_what_is_only_slow_is_not_called_broken(self, name, demand):
        """A slow link or decode gives nothing to act on."""
        assert [one.kind for _, one in told_of(name, demand) if one.actionable] == []


class TestMatrix:
    """Several prefills and decodes: what one holds up is not what stalls."""

    def test_a_cell_that_stands_behind_another_is_no_stall(self):
        """While one prefill computes long prompts that fill a decode, the other's only wait."""
        clock = VirtualClock()
        fleet = Fleet(clock, seed=SEED, prefills=2, decodes=2)

        async def main():
            watch = Watch(fleet)
            await watch.watch(60.0)
            for _ in range(fleet.machine.max_running):
                for decode in fleet.decodes.values():
                    room = fleet.room(
                        fleet.prefill("prefill-0"), decode, 3_000, 8, lambda _, __: None
                    )
                    fleet.send(room)
            await watch.watch(90.0)
            await watch.close()
            return [one.finding.kind for one in watch.told if one.finding.actionable]

        assert run(main(), clock) == []

    def test_a_cell_that_drops_in_a_matrix_is_found(self):
        """One cell of four drops its hand-offs: found while the others flow."""
        found = told_of("handoff-dropped", LIGHT, shape=(2, 2))

        assert [one.kind for _, one in found if one.kind in STALL_KINDS]
        assert found[0][0] <= PARTIAL_S


class TestFleet:
    """The model itself."""

    @settings(max_examples=25, deadline=None)
    @given(
        st.integers(0, 10_000),
        st.sampled_from(CALM),
        st.sampled_from(sorted(MACHINES)),
        st.sampled_from(sorted(MECHANISMS)),
        st.sampled_from(((1, 1), (2, 2), (2, 1))),
    )
    def test_no_request_is_lost(self, seed, demand, machine, mechanism, shape):
        """Whatever breaks and is healed, every request ends once, and nothing stays behind."""
        clock = VirtualClock()
        fleet = Fleet(
            clock, seed=seed, prefills=shape[0], decodes=shape[1], machine=MACHINES[machine]
        )
        clients = Clients(fleet)
        clients.ask(demand)
        clock.block(120.0)
        break_(fleet, mechanism)
        clock.block(60.0)
        heal(fleet)
        clients.ask(IDLE)
        clock.block(4000.0)
        fleet.advance()

        assert sum(clients.ended.values()) == clients.sent
        assert fleet.open_rooms() == []
        for side in fleet.engines.values():
            assert side.idle
        assert {side.slots for side in fleet.prefills.values()} == {0}
        assert {side.cells for side in fleet.decodes.values()} == {0}
        assert fleet.router.active == dict.fromkeys(fleet.engines, 0)

    @settings(max_examples=15, deadline=None)
    @given(st.integers(0, 10_000), st.sampled_from(CALM), st.sampled_from(sorted(MACHINES)))
    def test_counters_only_grow_within_a_life(self, seed, demand, machine):
        """No counter is ever seen to fall while its incarnation is the same."""
        clock = VirtualClock()
        fleet = Fleet(clock, seed=seed, machine=MACHINES[machine])
        Clients(fleet).ask(demand)
        sight, last = Sight(fleet), {}
        for _ in range(60):
            clock.block(1.0)
            fleet.advance()
            looks = [sight.engine(name) for name in fleet.engines]
            looks += [sight.router("router"), *(sight.process(one) for one in fleet.engines)]
            for row in (row for look in looks for row in look.rows):
                if row.name.endswith("_total") and row.value is not None:
                    key = (row.subject, row.name, row.label)
                    assert row.value >= last.get(key, 0)
                    last[key] = row.value

    def test_one_seed_is_one_history(self):
        """Two runs of one seed show the same rows at the same times."""

        def history():
            clock = VirtualClock()
            fleet = Fleet(clock, seed=SEED)
            Clients(fleet).ask(STEADY)
            watch, rows = Watch(fleet, together=False), []
            append = watch.memory.append
            watch.memory.append = lambda harvest: (rows.append(harvest), append(harvest))
            run(watch.watch(60.0), clock)
            return [msgspec.structs.replace(row, id=0) for one in rows for row in one.observations]

        assert history() == history()

    def test_one_source_shows_what_many_show(self):
        """All members in one source, or one source each: the counters told are the same."""

        def counted(*, together):
            clock = VirtualClock()
            fleet = Fleet(clock, seed=SEED)
            Clients(fleet).ask(STEADY)
            watch = Watch(fleet, together=together)
            run(watch.watch(60.0), clock)
            facts = watch.memory.facts(now=clock.now(), window_s=100.0)
            names = (v.REQUESTS_TOTAL, v.TRANSFERS_TOTAL, v.INFLIGHT_QUEUE_REQS, v.HEALTH_STATUS)
            return {
                (subject, name): len(facts.numbers(subject, name))
                for name in names
                for subject in facts.subjects(name)
            }

        assert counted(together=True) == counted(together=False)

    def test_gauges_freeze_where_there_are_no_live_loads(self):
        """In a total stall the page's queues stand still while requests pile up unseen."""
        clock = VirtualClock()
        fleet = Fleet(clock, seed=SEED, machine=MACHINES["no-live-loads"])
        clients = Clients(fleet)
        clients.ask(STEADY)
        clock.block(120.0)
        break_(fleet, "decode-blocks")
        sight, shown = Sight(fleet), set()
        for _ in range(20):
            clock.block(1.0)
            fleet.advance()
            rows = {row.name: row for row in sight.engine("decode-0").rows}
            shown.add((rows[v.PREALLOC_QUEUE_REQS].value, rows[v.PREALLOC_QUEUE_REQS].source))

        assert len(shown) == 1
        assert next(iter(shown))[1] == "metrics"
        assert len(fleet.decode("decode-0").prealloc) > 5


class TestDetect:
    """Judging a window that moves on."""

    @settings(max_examples=8, deadline=None)
    @given(
        st.integers(0, 1000),
        st.sampled_from(CALM),
        st.sampled_from((*BROKEN, *NEAR)),
        st.sampled_from(sorted(MACHINES)),
    )
    def test_the_moving_window_is_judged_as_its_rows_are(self, seed, demand, mechanism, machine):
        """At every turn the same findings come of the window and of its rows given one by one."""
        clock = VirtualClock()
        fleet = Fleet(clock, seed=seed, machine=MACHINES[machine])
        Clients(fleet).ask(demand)

        async def main():
            watch, kept = Watch(fleet), []
            append = watch.memory.append

            def keep(harvest):
                append(harvest)
                kept.append(harvest)

            watch.memory.append = keep
            for turn in range(60):
                if turn == 20:
                    break_(fleet, mechanism)
                before = watch.known
                await watch.turn()
                moving = watch.memory.facts(now=clock.now(), window_s=180.0)
                plain = Facts(
                    fleet.deployment,
                    [row for one in kept for row in one.observations],
                    now=clock.now(),
                    changes=moving.changes,
                    traits=moving.traits,
                )
                assert detect(moving, before, Thresholds()) == detect(plain, before, Thresholds())
                await clock.sleep(1.0)
            await watch.close()

        run(main(), clock)
