"""The incident and its near miss, rehearsed with real processes on the toy model.

`make demo` and `tandem drill` run them whole, on a real model; here there are two restarts
instead of four and four sessions in the proof.
"""

import asyncio
import dataclasses

import psutil
import pytest

import tidy
from fakes import Listener
from tandem.drills import DRILLS, decode_restarts, rehearsal
from tandem.drills.workspace import Workspace, free_ports

BYTES_PER_WORD = 6
"""The toy model has a token for each byte, so its context is as many times longer."""


@pytest.fixture
def workspace_of(tmp_path, monkeypatch):
    """Give workspaces on the toy model; their processes find the package where the tests do."""
    monkeypatch.setenv("PYTHONPATH", str(tidy.ROOT / "src"))
    monkeypatch.setattr(rehearsal, "WARM_S", 1.0)
    monkeypatch.setattr(decode_restarts, "BETWEEN_S", 0.5)

    ports = free_ports(10)

    def make(name):
        return Workspace(
            root=tmp_path / name,
            ports=[ports.pop() for _ in range(5)],
            model="toy",
            sessions=4,
            max_inflight=4,
            context_length=1024 * BYTES_PER_WORD,
        )

    return make


def shortened(name, peer_memory):
    """The drill of that name with two restarts."""

    async def script(scene):
        await decode_restarts._campaign(scene, peer_memory, restarts=2)

    return dataclasses.replace(DRILLS[name], script=script, calm_s=12.0)


def left_running(folder):
    """What still runs and names a folder in its command line."""
    return [
        one.info["cmdline"]
        for one in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in one.info["cmdline"] or ())
    ]


@pytest.mark.needs("router", "git")
@pytest.mark.timeout(180)
async def test_the_incident_is_repaired_and_its_near_miss_left_alone(workspace_of, tmp_path):
    """Under the same restarts stale peers are found, repaired and proven; leases accuse nobody."""
    incident, near_miss = await asyncio.gather(
        rehearsal.rehearse(
            shortened("stale-peer-after-decode-restarts", "stale"),
            seed=1,
            tell=Listener(),
            workspace=workspace_of("incident"),
        ),
        rehearsal.rehearse(
            shortened("near-miss-decode-restarts-with-leases", "leases"),
            seed=1,
            tell=Listener(),
            workspace=workspace_of("near-miss"),
        ),
    )

    assert (incident.why, incident.ok) == ([], True)
    assert incident.diagnosis.hunch.answer == "ruled_out"
    assert (near_miss.why, near_miss.ok) == ([], True)
    assert (near_miss.finding, near_miss.repair) == (None, None)
    assert left_running(tmp_path) == []
