"""The shipped suites hold our own adapters to their ports, and notice one that does not keep it."""

import asyncio
import functools

import msgspec
import pytest

from children import end_all, member_of
from engine.pairs import pair
from stub_engine import stub_pair
from tandem import fetch
from tandem.engines.sglang import SglangEngine
from tandem.ports import Harvest
from tandem.records import Member, Role
from tandem.records import vocabulary as v
from tandem.supervisors.local import LocalSupervisor
from tandem.testing import (
    Fleet,
    VirtualClock,
    check_engine,
    check_engine_unreachable,
    check_supervisor,
    run,
)
from tandem.testing.faces import SimulatedEngine, SimulatedSupervisor
from tandem.testing.showing import Sight


def members(two):
    """The member records of a pair of the embedded engine."""
    return [
        Member(
            name=role.value,
            role=role,
            url=worker.url,
            engine="sglang",
            bootstrap_port=two.prefill.settings.disaggregation_bootstrap_port,
        )
        for role, worker in ((Role.PREFILL, two.prefill), (Role.DECODE, two.decode))
    ]


class TestCheckEngine:
    """Engines held to the port."""

    async def test_sglang_before_the_embedded_engine_keeps_the_port(self):
        """The adapter conforms over a pair that really computes."""
        async with pair() as two, fetch.session() as session:
            assert await check_engine(SglangEngine(session), *members(two)) == ()

    async def test_sglang_keeps_it_with_members_that_never_answer(self):
        """What accepts and says nothing is a reason in time."""
        async with stub_pair() as (prefill, decode), fetch.session() as session:
            engine = SglangEngine(session)
            assert await check_engine_unreachable(engine, prefill.member, decode.member) == ()

    async def test_an_adapter_that_breaks_the_port_is_told_how(self):
        """One that claims zeros for what it cannot see, and calls members ready, is found out."""

        class Boastful(SglangEngine):
            async def observe(self, member, timeout_s):
                harvest = await super().observe(member, timeout_s)
                rows = [
                    msgspec.structs.replace(row, value=0, missing=None) if row.missing else row
                    for row in harvest.observations
                ]
                return Harvest(tuple(rows), harvest.traits)

            async def ready(self, member, timeout_s):
                return True

        async with pair() as two, fetch.session() as session:
            found = await check_engine(Boastful(session), *members(two))

        assert any("that does not answer claims" in one for one in found)
        assert any("ready() is true of a decode that is not there" in one for one in found)

    def test_what_is_no_engine_is_told_so(self):
        """An object without the methods is named, and nothing else is asked of it."""
        clock = VirtualClock()
        [prefill, decode, _] = Fleet(clock).deployment.members

        found = run(check_engine(object(), prefill, decode), clock)

        assert found == ("object lacks a method of ports.Engine",)


class TestCheckSupervisor:
    """Supervisors held to the port."""

    @pytest.fixture
    def make_member(self, tmp_path):
        yield functools.partial(member_of, tmp_path)
        end_all(tmp_path)

    async def test_local_keeps_the_port(self, tmp_path, make_member):
        """The supervisor of local processes conforms."""
        assert await check_supervisor(lambda: LocalSupervisor(tmp_path), make_member()) == ()

    def test_the_simulated_one_keeps_the_port(self):
        """So does that of a simulated fleet, in virtual time."""
        clock = VirtualClock()
        fleet = Fleet(clock)
        member = fleet.deployment.members[0]

        assert run(check_supervisor(lambda: SimulatedSupervisor(fleet), member), clock) == ()

    def test_one_that_forgets_is_told_how(self):
        """A supervisor that gives each start a life of its own is found out."""
        clock = VirtualClock()
        fleet = Fleet(clock)

        class Forgetful(SimulatedSupervisor):
            async def start(self, member):
                fleet.stop(member.name)
                return await super().start(member)

        found = run(check_supervisor(lambda: Forgetful(fleet), fleet.deployment.members[0]), clock)

        assert "starting what runs does not return what runs" in found


class TestSimulatedEngine:
    """The simulated fleet is shown as the real adapter shows the embedded engine."""

    async def test_it_shows_what_the_embedded_engine_shows(self):
        """After the same requests both sides give the same counters and empty queues."""
        names = {
            Role.PREFILL: (v.REQUESTS_TOTAL, v.TRANSFERS_TOTAL, v.TRANSFER_FAILED_TOTAL,
                           v.INFLIGHT_QUEUE_REQS, v.BOOTSTRAP_QUEUE_REQS, v.WAITING_REQS),
            Role.DECODE: (v.REQUESTS_TOTAL, v.GENERATION_TOKENS_TOTAL, v.TRANSFER_FAILED_TOTAL,
                          v.TRANSFER_QUEUE_REQS, v.PREALLOC_QUEUE_REQS, v.RUNNING_REQS),
        }  # fmt: skip

        async def shown(engine, prefill, decode):
            for _ in range(3):
                await engine.complete_direct(
                    prefill, decode, prompt="a b c d", output_tokens=5, timeout_s=10.0
                )
            found = {}
            for member in (prefill, decode):
                harvest = await engine.observe(member, 5.0)
                found[member.role] = {
                    (row.name, row.source): row.value
                    for row in harvest.observations
                    if row.name in names[member.role] and not row.label
                }
            return found

        async with pair() as two, fetch.session() as session:
            real = await shown(SglangEngine(session), *members(two))
        clock = VirtualClock()
        fleet = Fleet(clock)
        simulated = await asyncio.to_thread(
            run, shown(SimulatedEngine(Sight(fleet)), *fleet.deployment.members[:2]), clock
        )

        assert simulated == real
