"""Stacks of an embedded engine with three ranks: who waits where, and who left."""

import asyncio
import os

import pytest

from engine.pairs import pair, until
from engine.test_ranks import until_stuck
from tandem.collect.incarnations import Incarnations
from tandem.collect.stacks import StackTaker
from tandem.processes import life_of
from tandem.records import Member, Role
from tandem.records import vocabulary as v
from tandem_engine.info import load_of

MEMBER = Member(name="decode-0", role=Role.DECODE, url="http://127.0.0.1:9", engine="sglang")


async def taken():
    """What the stacks of this process and its ranks say, by name and label."""
    lives = Incarnations()
    lives.saw(MEMBER.name, life_of(os.getpid()))
    harvest = await StackTaker(lives).take([MEMBER])
    return {(one.name, one.label): one.value for one in harvest.observations}


@pytest.mark.needs("ptrace")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "where"), [("leaves", "Spoke.broadcast ("), ("spins", "in forward (")]
)
async def test_a_rank_that_left_its_fellows_is_named(tmp_path, how, where):
    """Two wait in one gather, the serving one among them; the third is told with its place."""
    flags = {"ranks": 3, "enable_faults": str(tmp_path / "faults.json")}
    async with pair(decode=flags) as two:
        two.decode.switchboard.switch(rank_at_abort=how)
        two.decode.model._model._step_cost_s = 0.002
        long = asyncio.create_task(two.generate(tokens=400))
        await until(lambda: load_of(two.decode).num_running_reqs, two.decode)
        body = {"text": "x", "rid": "leaver"} | two.meeting()
        leaver = asyncio.create_task(two.post(two.decode, "/generate", body))
        await until(lambda: len(two.decode.rooms) == 2, two.decode)
        leaver.cancel()
        await until_stuck(two.decode)
        seen = await taken()
        await two.restart_decode()
        await asyncio.gather(long, leaver, return_exceptions=True)
    said = seen[v.STACK_RANKS, ""]
    together, apart = seen[v.STACK_CLUSTER, "1"], seen[v.STACK_CLUSTER, "2"]

    assert said.startswith("2 of 3 ranks (TP0, TP")
    assert "Spoke.all_gather (" in together or "Hub.all_gather (" in together
    assert where in said.partition("elsewhere: ")[2]
    assert apart.split(":")[0] in ("TP1", "TP2")
    assert (v.STACK_CLUSTER, "3") not in seen
