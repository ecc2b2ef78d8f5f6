"""Ranks: processes that compute every step in lock step, and what happens when one does not."""

import asyncio
import itertools
import re
import signal
import socket
import sys
import threading
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from engine.pairs import DEADLINE_S, greedy, pair, until
from engine.processes import end, free_port, ready, spawn, terminated
from tandem_engine.collective import CollectiveError, Hub, Joined, Spoke
from tandem_engine.follower import event_loop
from tandem_engine.info import load_of
from tandem_engine.lockstep import LockstepModel
from tandem_engine.model import Feed, KvExhaustedError
from tandem_engine.scheduler import watchdog
from tandem_engine.toy import ToyModel

SIZES = {"context_length": 64, "sequences_max": 3, "cells": 64}


def group():
    """Both ends of a group of two; the second one as a bare socket."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Hub([near]), far


def nobody(ranks):
    """Every rank joins."""
    return (0, "")


async def frames(pid):
    """The stacks of every thread of a process, as py-spy shows them."""
    tool = Path(sys.executable).with_name("py-spy")
    process = await asyncio.create_subprocess_exec(
        tool, "dump", "--nonblocking", "--pid", str(pid), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.decode()


async def tops(pid):
    """Of every thread of a process: whether it is idle, and its innermost frame."""
    pairs = itertools.pairwise((await frames(pid)).splitlines())
    return [
        (re.search(r"\((idle|active)", thread)[1], frame.strip().split(" ")[0])
        for thread, frame in pairs
        if thread.startswith("Thread")
    ]


async def until_stuck(worker):
    """Wait until a step of a worker takes longer than three looks at the stacks."""
    scheduler = worker.core.scheduler
    async with asyncio.timeout(DEADLINE_S):
        looks, before = 0, -1
        while looks < 3:
            looks = looks + 1 if scheduler.stepping and scheduler.outputs == before else 0
            before = scheduler.outputs
            await frames(psutil.Process().pid)


class TestCollective:
    @pytest.mark.parametrize(
        ("batch", "outcome"), [("2:b", ""), ("1:a", "KvExhaustedError")], ids=["batch", "outcome"]
    )
    def test_ranks_that_differ_end_loudly(self, batch, outcome):
        """Another batch, or another outcome of the same one, is an error that names the rank."""
        hub, far = group()
        far.send(msgspec.msgpack.encode(Joined(1, batch, outcome)))
        with far, pytest.raises(CollectiveError, match="rank 1 computed batch"):
            hub.all_gather(Joined(0, "1:a", ""))
        hub.close()

    def test_a_rank_that_is_gone_is_named(self):
        """A closed socket ends the gather at once, not at its timeout."""
        hub, far = group()
        far.close()
        with pytest.raises(CollectiveError, match="rank 1 is gone"):
            hub.all_gather(Joined(0, "1:a", ""))
        hub.close()

    def test_followers_hold_what_rank_0_holds(self):
        """After steps, imports, shared prefixes, cuts and refusals every length is the same."""
        hub, far = group()
        shard, spoke = ToyModel(**SIZES), Spoke(far)
        far.send(msgspec.msgpack.encode(Joined(1, "start", "")))
        model = LockstepModel(ToyModel(**SIZES), hub, nobody)
        far.recv(1 << 16)  # what the gather of the start gave
        thread = threading.Thread(target=event_loop, args=(1, spoke, shard))
        thread.start()
        model.step([Feed(0, list(range(30)), 0), Feed(1, [7], 0)])
        model.copy_prefix(0, 2, 20)
        model.step([Feed(2, [256, 258], 20, "none")])
        blob = bytearray(model.kv_size(2))
        model.export_kv(2, memoryview(blob))
        model.import_kv(1, memoryview(blob))
        with pytest.raises(KvExhaustedError):
            model.step([Feed(1, list(range(20)), 22)])
        model.truncate(0, 25)
        model.drop(2)
        logits = model.step([Feed(1, [1], 22)])
        hub.close()
        thread.join(DEADLINE_S)

        assert logits[0].shape == (1, model.vocabulary)
        assert [shard.length(s) for s in range(3)] == [model.length(s) for s in range(3)]
        assert shard.cells_used() == model.cells_used()
        far.close()


class TestRanks:
    async def test_one_rank_is_no_process(self):
        """`--ranks 1`, the default, starts nothing and wraps nothing."""
        async with pair() as two:
            assert (two.decode._ranks, type(two.decode.model)) == (None, ToyModel)

    async def test_tokens_are_those_of_one_rank(self):
        """A prefill of 2 and a decode of 3 ranks say what one model says, each rank in `ps`."""
        prompt = "you are a helpful assistant. " * 4
        async with pair(prefill={"ranks": 2}, decode={"ranks": 3}) as two:
            ranks = [psutil.Process(pid) for pid in two.decode._ranks.pids]
            names = [process.name() for process in ranks]
            info = (await two.get(two.decode, "/server_info")).json
            answers = [await two.generate(prompt + "?" * n, tokens=6) for n in range(3)]
            await two.idle()

        assert names == ["scheduler_TP1", "scheduler_TP2"]
        assert info["tp_size"] == 3
        for n, answer in enumerate(answers):
            assert answer.json["output_ids"] == greedy(prompt + "?" * n, 6)
        assert [process.is_running() for process in ranks] == [False, False]

    async def test_a_rank_that_dies_ends_the_server(self, caplog):
        """SGLang's subprocess watchdog: one line, and the worker is not left half alive."""
        async with pair(decode={"ranks": 2}) as two:
            psutil.Process(two.decode._ranks.pids[0]).kill()
            async with asyncio.timeout(DEADLINE_S):
                await two.decode.fatal.wait()

            assert (await two.get(two.decode, "/health")).status == 503
        said = [r.getMessage() for r in caplog.records]
        assert any("scheduler_TP1" in s and "crashed with exit code -9" in s for s in said)

    async def test_ranks_die_with_their_server(self):
        """A killed server leaves no rank behind, a rank that dies ends it with status 1."""
        codes = []
        for kill in ("server", "rank"):
            port = free_port()
            process = await spawn(
                *("decode", "--model", "toy", "--port", str(port), "--ranks", "2"),
            )
            async with terminated(process), aiohttp.ClientSession() as http:
                await ready(http, f"http://127.0.0.1:{port}/health")
                (rank,) = psutil.Process(process.pid).children()
                victim = process.pid if kill == "server" else rank.pid
                psutil.Process(victim).send_signal(signal.SIGKILL)
                codes.append((await end(process))[0])
                psutil.wait_procs([rank], timeout=DEADLINE_S)
                assert not rank.is_running()

        assert codes == [-signal.SIGKILL, 1]


class TestRankFaults:
    @pytest.mark.shows("rank_at_abort={how}")
    @pytest.mark.heals("rank_at_abort={how}", by="restart")
    @pytest.mark.parametrize(
        ("how", "where"),
        [("leaves", ("idle", "Spoke.broadcast")), ("spins", ("active", "forward"))],
    )
    async def test_a_rank_is_elsewhere_after_an_abort(self, tmp_path, how, where):
        """The ranks hang in different frames, and a restart heals with the switch still on."""
        flags = {"ranks": 2, "enable_faults": str(tmp_path / "faults.json")}
        async with pair(decode=flags) as two:
            two.decode.switchboard.switch(rank_at_abort=how)
            assert (await two.generate(tokens=3)).status == 200
            two.decode.model._model._step_cost_s = 0.002
            long = asyncio.create_task(two.generate(tokens=400))
            await until(lambda: load_of(two.decode).num_running_reqs, two.decode)
            body = {"text": "x", "rid": "leaver"} | two.meeting()
            leaver = asyncio.create_task(two.post(two.decode, "/generate", body))
            await until(lambda: len(two.decode.rooms) == 2, two.decode)
            leaver.cancel()
            await until_stuck(two.decode)
            (pid,) = two.decode._ranks.pids
            seen = await tops(pid)
            stacks = await frames(psutil.Process().pid)

            assert seen == [where]
            assert "Hub.all_gather (" in stacks
            assert '"compute TP0"' in stacks
            assert load_of(two.decode).num_running_reqs == 1
            await two.restart_decode()
            assert (await two.generate("again")).json["output_ids"] == greedy("again", 4)
            assert (await two.get(two.decode, "/faults")).json == {"rank_at_abort": how}
            await asyncio.gather(long, leaver, return_exceptions=True)


class TestComputeFaults:
    @pytest.mark.shows("forward={how}", "forward_from_tokens")
    @pytest.mark.heals("forward={how}", by="off")
    @pytest.mark.heals("forward_from_tokens", by="cure")
    @pytest.mark.parametrize("overlap", [True, False])
    @pytest.mark.parametrize("how", ["blocks", "spins"])
    async def test_compute_never_returns(self, how, overlap):
        """Short requests flow, a long one hangs its step and all later ones; off heals."""
        async with pair(decode={"disable_overlap_schedule": not overlap}) as two:
            two.decode.switchboard.switch(forward=how, forward_from_tokens=100)
            assert (await two.generate("short")).status == 200
            long = asyncio.create_task(two.generate("l" * 120))
            await until_stuck(two.decode)
            late = asyncio.create_task(two.generate("short"))
            await until_stuck(two.decode)

            assert load_of(two.decode).num_running_reqs == 1
            assert "Scheduler._forward (" in await frames(psutil.Process().pid)
            assert [long.done(), late.done()] == [False, False]
            two.decode.switchboard.switch(forward="returns")
            answers = await asyncio.gather(long, late)
            await two.idle()

        assert [answer.status for answer in answers] == [200, 200]
        assert answers[0].json["output_ids"] == greedy("l" * 120, 4)

    @pytest.mark.heals("forward={how}", by="restart")
    @pytest.mark.parametrize("how", ["blocks", "spins"])
    async def test_a_restart_heals_until_the_next_long_request(self, how):
        """Short requests flow again with the switch still on, and a long one hangs anew."""
        async with pair() as two:
            two.decode.switchboard.switch(forward=how, forward_from_tokens=100)
            hung = []
            for _ in range(2):
                hung.append(asyncio.create_task(two.generate("l" * 120)))
                await until_stuck(two.decode)
                await two.restart_decode()
                assert (await two.generate("short")).json["output_ids"] == greedy("short", 4)
            await asyncio.gather(*hung, return_exceptions=True)
            await two.idle()

    @pytest.mark.heals("forward=blocks", by="restart")
    async def test_the_watchdog_ends_a_step_that_never_returns(self, caplog):
        """SGLang's line, and the worker ends; an idle worker is never found stuck."""
        async with pair(decode={"watchdog_s": 0.2}) as two:
            assert (await two.generate()).status == 200
            two.decode.switchboard.switch(forward="blocks")
            asking = asyncio.create_task(two.generate())
            async with asyncio.timeout(DEADLINE_S):
                await two.decode.fatal.wait()
            assert two.decode.state == "dead"
            await two.restart_decode()
            await asyncio.gather(asking, return_exceptions=True)
            two.decode.switchboard.switch(forward_from_tokens=100)
            assert (await two.generate("short")).json["output_ids"] == greedy("short", 4)
        said = [r.getMessage() for r in caplog.records]
        assert "Scheduler watchdog timeout (self.watchdog_timeout=0.2, self.soft=False)" in said

    async def test_no_watchdog_looks_when_it_is_off(self):
        """0 means never."""
        async with pair() as two:
            fired = []
            await watchdog(two.decode.core.scheduler, 0.0, lambda: fired.append(1))

            assert fired == []
