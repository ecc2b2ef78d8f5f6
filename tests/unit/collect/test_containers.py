"""Containers: what an engine says of a member arrives as observations, its ends as changes.

A real Podman says what is true; a small server with Docker's answers what cannot be made here.
"""

import asyncio
import json
import os

import pytest
from aiohttp import web

from podmans import IMAGE, Podman
from tandem.cgroups import Place
from tandem.collect import containers as containers_module
from tandem.collect.containers import ContainerSource
from tandem.collect.incarnations import Incarnations
from tandem.containers import ContainerEngine, elsewhere, socket_paths
from tandem.records import Incarnation, Member, Role
from tandem.records import vocabulary as v

ID = "d280ef1b0efba040658c2447839e87e524674790cfc8938491dd4267ca3c6755"
UNTIL_S = 12.0
STARTED, FINISHED = "2026-11-30T13:50:36.098696565Z", "2026-11-30T13:50:35.986829857Z"
NEVER = "0001-01-01T00:00:00Z"


def member(container="decode", **more):
    url = "http://127.0.0.1:30001"
    return Member(name="d", role=Role.DECODE, url=url, engine="sglang", container=container, **more)


def inspected(**state):
    """What Docker answers of a container, as far as it is read."""
    running = {
        "Status": "running",
        "Running": True,
        "OOMKilled": False,
        "Pid": 41,
        "ExitCode": 0,
        "Error": "",
        "StartedAt": STARTED,
        "FinishedAt": NEVER,
    }
    return {
        "Id": ID,
        "Name": "/decode",
        "RestartCount": 0,
        "Image": "sha256:aa",
        "Config": {"Image": "lmsysorg/sglang:v0.5.6", "Env": ["SECRET=1"]},
        "State": running | state,
    }


class Docker:
    """A server on a socket with the answers that a test gives it."""

    def __init__(self, path):
        self.path = str(path)
        self.status = 200
        self.answer = inspected()
        self.events = []
        self.asked = []
        self.hangs = False
        self.released = asyncio.Event()

    async def start(self):
        app = web.Application()
        app.router.add_get("/{rest:.*}", self.reply)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.UnixSite(self.runner, self.path).start()

    async def reply(self, request):
        self.asked.append(request.path)
        if self.hangs:
            await self.released.wait()
        if request.path == "/events":
            return web.Response(text="\n".join(json.dumps(one) for one in self.events))
        body = self.answer if self.status == 200 else {"message": "no such thing"}
        return web.Response(text=json.dumps(body), status=self.status)


@pytest.fixture
async def docker(tmp_path):
    made = Docker(tmp_path / "docker.sock")
    await made.start()
    yield made
    made.released.set()
    await made.runner.cleanup()


@pytest.fixture
async def source_of():
    """Make sources; their connections are closed afterwards."""
    made = []

    def make(*engines, of=None, lives=None):
        asked = [ContainerEngine(one, timeout_s=0.5) for one in engines]
        made.append(
            ContainerSource((of or member(),), lives or Incarnations(), engines=asked, every_s=0.0)
        )
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def look(looked):
    harvest = await looked.collect()
    return {one.name: one for one in harvest.observations}, harvest.changes


class TestTold:
    """What Docker answers."""

    async def test_its_state_is_told(self, docker, source_of):
        """Name, state, restarts, times, health and image; nothing of its environment."""
        docker.answer = inspected(Health={"Status": "unhealthy"})
        seen, changes = await look(source_of(docker.path))

        assert {name: one.value for name, one in seen.items()} == {
            v.CONTAINER: "decode (d280ef1b0efb)",
            v.CONTAINER_STATE: "running",
            v.CONTAINER_RESTARTS_TOTAL: 0,
            v.CONTAINER_OOM_KILLED: False,
            v.CONTAINER_STARTED_AT: pytest.approx(1796046636.098697),
            v.CONTAINER_FINISHED_AT: None,
            v.CONTAINER_HEALTH: "unhealthy",
            v.CONTAINER_IMAGE: "lmsysorg/sglang:v0.5.6 (sha256:aa)",
        }
        assert changes == ()

    async def test_an_end_by_lack_of_memory_is_a_stop(self, docker, source_of):
        """The life that ended is the one the process source knew."""
        lives = Incarnations()
        lives.saw("d", Incarnation(id="41:7", started_at=1.0, pid=41))
        looked = source_of(docker.path, lives=lives)
        await look(looked)
        docker.answer = inspected(
            Status="exited", Pid=0, ExitCode=137, OOMKilled=True, FinishedAt=FINISHED
        )
        seen, (stop,) = await look(looked)
        again, later = await look(looked)

        assert (stop.kind, stop.incarnation) == ("stop", "41:7")
        assert stop.how_known == "its container engine: exit code 137, out of memory"
        assert seen[v.CONTAINER_EXIT].value == "exit code 137, out of memory"
        assert (seen[v.CONTAINER_OOM_KILLED].value, seen[v.CONTAINER_STATE].value) == (
            True,
            "exited",
        )
        assert (later, v.CONTAINER_EXIT in again) == ((), False)

    async def test_the_exit_code_of_a_life_before_is_in_the_events(self, docker, source_of):
        """A container that runs again says nothing of how it ended; the engine's events do."""
        looked = source_of(docker.path)
        await look(looked)
        docker.answer = inspected(FinishedAt=FINISHED) | {"RestartCount": 1}
        docker.events = [
            {"Action": "exec_die", "Actor": {"Attributes": {"exitCode": "0"}}},
            {
                "Action": "die",
                "Actor": {"ID": ID, "Attributes": {"exitCode": "134"}},
                "timeNano": 1796046636500000000,
            },
        ]
        seen, (stop,) = await look(looked)

        assert (seen[v.CONTAINER_EXIT].value, seen[v.EXIT_CODE].value) == ("exit code 134", 134)
        assert stop.how_known == "its container engine: exit code 134"

    async def test_without_events_the_code_is_unknown_and_not_zero(self, docker, source_of):
        """What an engine has forgotten is not made up."""
        looked = source_of(docker.path)
        await look(looked)
        docker.answer = inspected(FinishedAt=FINISHED) | {"RestartCount": 1}
        _, (stop,) = await look(looked)

        assert stop.how_known == "its container engine: exit code unknown"

    async def test_another_image_is_a_change(self, docker, source_of):
        """A container made anew from another image runs other code."""
        looked = source_of(docker.path)
        await look(looked)
        docker.answer = inspected() | {"Image": "sha256:bb"}
        _, (change,) = await look(looked)

        assert (change.kind, change.what) == ("package", "container image")
        assert change.after == "lmsysorg/sglang:v0.5.6 (sha256:bb)"


class TestReasons:
    """Why nothing can be told."""

    async def test_no_engine_is_a_reason(self, tmp_path, source_of):
        """Every socket that was looked for is named."""
        seen, _ = await look(source_of(f"{tmp_path}/none"))

        assert f"there is no socket at {tmp_path}/none" in seen[v.CONTAINER].missing

    async def test_a_container_nobody_has_is_a_reason(self, docker, source_of):
        """A typing error in `container` is seen where its state would be."""
        docker.status = 404
        seen, _ = await look(source_of(docker.path))

        assert "has no container decode" in seen[v.CONTAINER].missing
        assert "has no container decode" in seen[v.CONTAINER_STATE].missing

    async def test_the_second_engine_is_asked_when_the_first_has_none(
        self, docker, source_of, tmp_path
    ):
        """Docker and Podman may be on one host; whoever has the container is asked from then."""
        other = Docker(tmp_path / "other.sock")
        other.status = 404
        await other.start()
        looked = source_of(other.path, docker.path)
        await look(looked)
        seen, _ = await look(looked)
        await other.runner.cleanup()

        assert seen[v.CONTAINER_STATE].value == "running"
        assert (len(other.asked), len(docker.asked)) == (1, 2)

    @pytest.mark.parametrize(
        ("status", "answer", "wanted"),
        [
            (500, None, "answered HTTP 500: no such thing"),
            (200, [], "in another way"),
            (200, {"Id": 3}, "in another way"),
        ],
    )
    async def test_an_engine_that_fails_is_a_reason(
        self, docker, source_of, status, answer, wanted
    ):
        """Errors and other shapes are told, not raised."""
        docker.status, docker.answer = status, answer
        seen, _ = await look(source_of(docker.path))

        assert wanted in seen[v.CONTAINER].missing

    async def test_an_engine_that_hangs_costs_a_bound(self, docker, source_of):
        """No answer within its time is the reason."""
        docker.hangs = True
        seen, _ = await look(source_of(docker.path))

        assert "no answer within 0.5 s" in seen[v.CONTAINER].missing

    async def test_a_socket_that_is_not_ours_names_the_group(self, docker, source_of, monkeypatch):
        """A plain user is told which group opens it."""
        monkeypatch.setattr(os, "access", lambda *_: False)
        docker.hangs = True
        seen, _ = await look(source_of(docker.path))

        assert "group `docker`" in seen[v.CONTAINER].missing

    async def test_a_member_in_no_container_is_nothing_to_tell(self, docker, source_of):
        """No row, and no engine is asked."""
        seen, _ = await look(source_of(docker.path, of=member(container=None)))

        assert (seen, docker.asked) == ({}, [])

    async def test_the_container_of_its_process_is_the_members(
        self, docker, source_of, monkeypatch
    ):
        """Its id is read from the control group and asked for."""
        monkeypatch.setattr(containers_module, "place_of", lambda _: Place(None, ID))
        lives = Incarnations()
        lives.saw("d", Incarnation(id="41:7", started_at=1.0, pid=41))
        one = member(container=None)
        looked = source_of(docker.path, of=one, lives=lives)
        seen, _ = await look(looked)

        assert docker.asked == [f"/containers/{ID}/json"]
        assert seen[v.CONTAINER_STATE].incarnation == "41:7"


class TestSockets:
    """Where an engine is looked for."""

    def test_what_docker_host_names_comes_first(self):
        """Then Docker's own place, a user's engines, and Podman's."""
        named = {"DOCKER_HOST": "unix:///x.sock", "XDG_RUNTIME_DIR": "/run/user/7"}

        assert socket_paths(named) == (
            "/x.sock",
            "/var/run/docker.sock",
            "/run/user/7/docker.sock",
            "/run/user/7/podman/podman.sock",
            "/run/podman/podman.sock",
        )
        assert socket_paths({}) == ("/var/run/docker.sock", "/run/podman/podman.sock")

    def test_an_engine_elsewhere_is_named_without_its_secrets(self):
        """Only its scheme is told; a socket here is not elsewhere."""
        assert elsewhere({"DOCKER_HOST": "ssh://me:secret@host"}) == "ssh://..."
        assert elsewhere({"DOCKER_HOST": "unix:///x.sock"}) is None


@pytest.fixture(scope="module")
def podman(tmp_path_factory):
    """Start a real engine once for this file."""
    made = Podman(tmp_path_factory.mktemp("podman"))
    yield made
    made.close()


async def until(looked, wanted):
    """Look until the rows are as wanted; the newest rows and every change on the way."""
    rows, changes = {}, []
    async with asyncio.timeout(UNTIL_S):
        while not wanted(rows):
            seen, new = await look(looked)
            rows |= seen
            changes += new
            await asyncio.sleep(0.05)
    return rows, changes


@pytest.mark.needs("podman")
class TestReal:
    """A real Podman."""

    async def test_a_life_and_its_end(self, podman):
        """Running, then ended with its code; what is told is what Podman shows."""
        podman.start("plain", "while test ! -e /go; do sleep 0.05; done; exit 7")
        one = member("plain")
        looked = ContainerSource(
            (one,), Incarnations(), engines=[ContainerEngine(podman.socket)], every_s=0.0
        )
        seen, _ = await look(looked)
        pid = await looked.main_pid(one)
        podman.run("exec", "plain", "/bin/sh", "-c", "true > /go")
        rows, (stop,) = await until(
            looked, lambda rows: rows and rows[v.CONTAINER_STATE].value == "exited"
        )
        gone = await looked.main_pid(one)
        await looked.close()

        assert seen[v.CONTAINER_STATE].value == "running"
        assert (pid is None, gone) == (False, None)
        assert seen[v.CONTAINER_IMAGE].value.startswith(IMAGE)
        assert (rows[v.CONTAINER_EXIT].value, stop.kind) == ("exit code 7", "stop")

    @pytest.mark.timeout(40)
    async def test_a_restart_by_policy_keeps_its_exit_code(self, podman):
        """It runs again, and the events tell how it ended."""
        script = (
            "test -e /again && exec sleep 999; true > /again; "
            "while test ! -e /go; do sleep 0.05; done; exit 9"
        )
        podman.start("again", script, "--restart=always")
        looked = ContainerSource(
            (member("again"),),
            Incarnations(),
            engines=[ContainerEngine(podman.socket)],
            every_s=0.0,
        )
        first, _ = await look(looked)
        podman.run("exec", "again", "/bin/sh", "-c", "true > /go")
        rows, changes = await until(looked, lambda rows: v.CONTAINER_EXIT in rows)
        await looked.close()

        assert first[v.CONTAINER_FINISHED_AT].value is None
        assert rows[v.CONTAINER_EXIT].value == "exit code 9"
        assert [change.kind for change in changes] == ["stop"]

    async def test_its_process_leads_to_it(self, podman):
        """The control group of its main process holds the id that the engine knows."""
        podman.start("found", "exec sleep 999")
        pid = int(podman.run("inspect", "--format={{.State.Pid}}", "found"))
        lives = Incarnations()
        lives.saw("d", Incarnation(id=f"{pid}:7", started_at=1.0, pid=pid))
        looked = ContainerSource(
            (member(None),), lives, engines=[ContainerEngine(podman.socket)], every_s=0.0
        )
        seen, _ = await look(looked)
        await looked.close()

        assert seen[v.CONTAINER].value.startswith("found (")
