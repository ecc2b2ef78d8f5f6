"""A throw-away deployment: its configuration, its ports, and that nothing of it stays behind."""

import asyncio
import contextlib
import re
import socket
import tomllib

import psutil
import pytest

import tidy
from fakes import Listener
from tandem.config import load
from tandem.drills import DRILLS, injections, listing, rehearsal, run
from tandem.drills.workspace import PORTS, Workspace, free_ports
from tandem.errors import ConfigError, NotProvenError, WorldError
from tandem.records import Role
from tandem.report.committing import commit


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """Give a workspace on the toy model whose processes find the package where the tests do."""
    monkeypatch.setenv("PYTHONPATH", str(tidy.ROOT / "src"))
    return Workspace(root=tmp_path / "w", model="toy", context_length=4096)


class TestConfiguration:
    """The `tandem.toml` that the loop under test is given, and nothing else."""

    def test_it_is_one_that_tandem_accepts(self, workspace):
        """One prefill, one decode, the router, and a policy that may restart the pair."""
        workspace.root.mkdir()
        workspace.save()
        settings = load(workspace.config)

        assert [one.role for one in settings.deployment.members] == list(Role)
        assert (settings.policy.mode, settings.policy.auto_scopes) == ("auto", ("pair",))
        assert settings.verify.sessions == 30

    def test_its_members_have_the_ports_it_says(self, workspace):
        """Where clients send and where the switchboard is, are members' own addresses."""
        workspace.root.mkdir()
        workspace.save()
        urls = [one.url for one in load(workspace.config).deployment.members]

        assert urls[0] == workspace.prefill_url
        assert urls[2] == workspace.router_url

    @pytest.mark.parametrize("change", range(len(injections.HARMLESS_CHANGES)))
    async def test_every_harmless_change_is_accepted(self, workspace, change, monkeypatch):
        """A change of a flag or a variable gives a configuration that loads and shows it."""
        asked = []

        async def tandem(*words):
            asked.append(words)

        monkeypatch.setattr(workspace, "tandem", tandem)
        workspace.root.mkdir()
        await injections.restart_decode(workspace, change=change)
        decode = load(workspace.config).deployment.member("decode-0")
        kind, what, value = injections.HARMLESS_CHANGES[change]

        assert asked == [("restart", "decode-0", "--force", "--why", f"tuning: {what}={value}")]
        if kind == "env":
            assert decode.launch.env[what] == value
        else:
            assert decode.launch.argv[decode.launch.argv.index(what) + 1] == value

    def test_nothing_in_it_says_what_is_injected(self, workspace):
        """The switchboard exists in every drill; how it is switched stands nowhere."""
        workspace.root.mkdir()
        workspace.save()
        text = workspace.config.read_text()

        assert re.findall(r"stale|orphan|lease|peer", text) == []
        assert tomllib.loads(text)["deployment"] == {"name": "rehearsal"}


class TestPorts:
    """Ports that nobody else is given."""

    def test_they_differ(self):
        """Two workspaces' worth of ports has no port twice."""
        assert len(set(free_ports(10))) == 10

    def test_they_are_below_those_of_clients(self):
        """No connection that leaves this machine can be given one while a member restarts."""
        assert all(port in PORTS for port in free_ports(5))

    def test_a_taken_one_is_not_given(self, monkeypatch):
        """A port that somebody listens on is passed over."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            taken = server.getsockname()[1]
            monkeypatch.setattr("tandem.drills.workspace.PORTS", [taken])

            assert free_ports(1) == []


@pytest.mark.needs("git")
class TestRepository:
    """A history of its own."""

    def test_reports_can_be_committed_there(self, workspace):
        """The folder is a repository with the configuration in it; state is ignored."""
        workspace.create()
        (workspace.root / ".tandem").mkdir()
        (workspace.root / "INCIDENTS.md").write_text("one\n")
        done = commit(workspace.root / "INCIDENTS.md", "incident: one")

        assert done.commit is not None

    def test_an_earlier_one_is_used_again(self, workspace):
        """A demo may be played twice in one folder."""
        workspace.create()
        workspace.create()

        assert (workspace.root / ".git").is_dir()

    def test_without_git_it_says_what_to_install(self, workspace, monkeypatch):
        """A machine without git gets one sentence and the next thing to do."""
        monkeypatch.setenv("PATH", str(workspace.root))

        with pytest.raises(WorldError, match="apt-get install git"):
            workspace.create()


class TestCommands:
    """Tandem's own words, run as a person would."""

    async def test_what_fails_is_told_with_its_last_line(self, workspace):
        """The sentence of the command is in the error."""
        workspace.root.mkdir()
        workspace.save()

        with pytest.raises(WorldError, match=r"status 5: .*decode-7 is not a member"):
            await workspace.tandem("restart", "decode-7")

    async def test_what_hangs_is_ended(self, workspace):
        """Past its bound a command is killed, and the error says which."""
        workspace.root.mkdir()
        workspace.save()

        with pytest.raises(WorldError, match="`tandem watch` did not end within 1 s"):
            await workspace.tandem("watch", timeout_s=1.0)
        assert left_of(workspace) == []

    async def test_a_cancelled_one_is_ended_as_ctrl_c_does(self, workspace):
        """Nothing goes on behind the back of whoever gave up."""
        workspace.root.mkdir()
        workspace.save()
        task = asyncio.ensure_future(workspace.tandem("watch"))
        await until((workspace.root / ".tandem" / "locks" / "watch.lock").exists)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

        assert task.cancelled()
        assert left_of(workspace) == []

    async def test_the_watch_ends_when_it_is_asked_to(self, workspace):
        """It lives until then, and not after; asking twice is nothing."""
        workspace.root.mkdir()
        workspace.save()
        await workspace.start_watch("overlap schedule")
        lived = workspace.watch_alive()
        await workspace.stop_watch()
        await workspace.stop_watch()

        assert (lived, workspace.watch_alive()) == (True, False)


class TestPutAway:
    """Nothing is left running that a rehearsal started."""

    @pytest.mark.needs("git")
    @pytest.mark.timeout(60)
    async def test_not_even_when_up_fails_half_way(self, workspace):
        """With the decode's port taken the prefill that came up is stopped; the why is told."""
        workspace.create()
        drill = DRILLS["idle"]
        with socket.create_server(("127.0.0.1", workspace.ports[2])):
            with pytest.raises(WorldError, match=f"port {workspace.ports[2]} .* held by"):
                async with rehearsal.open_scene(workspace, drill, 1, Listener()):
                    pytest.fail("it came up")
            left = left_of(workspace)

        assert left == []
        assert (workspace.root / "client.jsonl").exists()

    async def test_what_went_wrong_first_is_what_is_told(self, workspace, monkeypatch):
        """A deployment that cannot be put away does not hide why the rehearsal ended."""
        said = Listener()

        async def tandem(*words, timeout_s=0.0):
            raise WorldError(f"`{words[0]}` failed.", next_step="Look.")

        monkeypatch.setattr(workspace, "tandem", tandem)
        workspace.root.mkdir()
        with pytest.raises(WorldError, match="`up` failed"):
            async with rehearsal.open_scene(workspace, DRILLS["idle"], 1, said):
                pytest.fail("it came up")

        assert said[-1] == "`down` failed. Look."

    async def test_a_watch_that_ends_by_itself_ends_the_drill(self, workspace):
        """Nobody waits for a loop that is gone."""
        with pytest.raises(NotProvenError, match="ended by itself"):
            await rehearsal.wait_for(workspace, lambda _: True, 5.0)


class TestNames:
    """The drills there are."""

    def test_the_listing_has_them_all(self):
        """Stall drills, the near miss and the controls, each with what it rehearses."""
        assert {one.name for one in listing()} == {
            "stale-peer-after-decode-restarts",
            "orphaned-transfer-after-decode-restarts",
            "near-miss-decode-restarts-with-leases",
            "long-prefill",
            "idle",
            "burst",
        }
        assert all(one.about for one in listing())

    async def test_an_unknown_one_is_refused_with_those_there_are(self):
        """The error lists every name."""
        with pytest.raises(ConfigError, match=r"'gremlins'; there are .*idle.*drill --list"):
            await run("gremlins", seed=1, json_to=None, tell=Listener())

    def test_they_alone_know_the_injections(self):
        """No module outside the drills names a switch or the switchboard's address."""
        product = tidy.ROOT / "src" / "tandem"
        knowing = [
            path.relative_to(product).as_posix()
            for path in sorted(product.rglob("*.py"))
            if re.search(r"peer_memory|/faults\b", path.read_text())
        ]

        assert "drills/injections.py" in knowing
        assert [path for path in knowing if not path.startswith("drills/")] == []


async def until(condition):
    """Wait until a condition holds, at most 15 s."""
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.02)


def left_of(workspace):
    """What still runs in a workspace or names it in its command line."""
    found = []
    for one in psutil.process_iter(["cmdline", "cwd"]):
        words = " ".join(one.info["cmdline"] or ())
        if str(workspace.root) in words or one.info["cwd"] == str(workspace.root):
            found.append(words)
    return found
