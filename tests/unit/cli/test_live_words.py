"""The words about a live deployment, over stages that answer at once."""

import asyncio
import contextlib
import json
import os
import signal
from types import SimpleNamespace

import msgspec
import pytest

import night
import tidy
from tandem.__main__ import main
from tandem.errors import RefusedError
from tandem.ports import Harvest
from tandem.records import Incarnation, MemberStatus, Settings, Status

EXAMPLE = tidy.ROOT / "examples" / "laptop" / "tandem.toml"
SETTINGS = Settings(root=".", deployment=night.DEPLOYMENT)
STATUS = Status(
    deployment="laptop",
    state="down",
    since=None,
    summary="laptop is down",
    next_command="tandem up",
    never="",
    members=(
        MemberStatus(name="router", role="router", state="down", since=None, incarnation=None),
    ),
)


class Stages:
    """What the stages were asked, and what they answer."""

    def __init__(self, monkeypatch):
        self.asked = []
        self.patch = monkeypatch
        self.parts = SimpleNamespace(settings=SETTINGS)

    def answer(self, where, what):
        """Let the stage at `where` answer `what`, telling one sentence first."""

        async def stage(parts, *args, tell=None, **asked):
            self.asked.append((where, args, asked))
            if tell is not None:
                tell("half way")
            return what(parts) if callable(what) else what

        self.patch.setattr(where, stage)


@pytest.fixture
def stages(monkeypatch):
    """Give stages over parts that open and close without a world."""
    found = Stages(monkeypatch)

    @contextlib.asynccontextmanager
    async def open_parts(settings):
        yield found.parts
        found.asked.append("closed")

    monkeypatch.setattr("tandem.wiring.find_settings", lambda _: SETTINGS)
    monkeypatch.setattr("tandem.wiring.open_parts", open_parts)
    return found


class TestUpAndDown:
    """Members come and go in order."""

    def test_up_tells_its_steps(self, stages, capsys):
        """`up` shows each step's end, and what to do next."""
        stages.answer("tandem.standing.bring_up", night.OUTCOMES[:1])

        assert main(["up"]) == 0
        out, err = capsys.readouterr()
        assert "stop:decode-0  done    1.5 s  ended on SIGTERM" in out
        assert "half way" in err
        assert stages.asked[-1] == "closed"

    def test_a_second_up_says_so(self, stages, capsys):
        """When everything ran already, that is said."""
        already = msgspec.structs.replace(
            night.OUTCOMES[0], step="start:decode-0", status="already"
        )
        stages.answer("tandem.standing.bring_up", (already,))

        assert main(["up"]) == 0
        assert "it was up already" in capsys.readouterr().err

    def test_down_gives_its_outcomes_as_json(self, stages, capsys):
        """`down --json` prints the outcomes and nothing else."""
        stages.answer("tandem.standing.take_down", night.OUTCOMES[:1])

        assert main(["down", "--json"]) == 0
        assert [one["status"] for one in json.loads(capsys.readouterr().out)] == ["done"]

    def test_status_says_what_to_do(self, stages, capsys):
        """The first line of `status` names the next command."""
        stages.answer("tandem.standing.status", STATUS)

        assert main(["status"]) == 0
        assert capsys.readouterr().out.splitlines()[0] == "down; next: tandem up"


class TestRestart:
    """A restart has a reason, and a forced one a name."""

    def test_force_keeps_who_and_why(self, stages, monkeypatch, capsys):
        """The reason and the person's name go into the record."""
        monkeypatch.setattr("getpass.getuser", lambda: "ada")
        stages.answer("tandem.standing.restart", Incarnation(id="7:9", started_at=1.0))

        assert main(["restart", "decode-0", "--force", "--why", "drained"]) == 0
        assert stages.asked[0][1:] == (("decode-0",), {"why": "drained (ada)", "force": True})
        assert "decode-0 runs as 7:9" in capsys.readouterr().out

    @pytest.mark.parametrize("why", [[], ["--why", "  "]])
    def test_force_without_a_reason_is_refused(self, stages, why, capsys):
        """`--force` without a reason is wrong usage; nothing is asked of the stage."""
        assert main(["restart", "decode-0", "--force", *why]) == 2
        assert stages.asked == []

    def test_a_refusal_keeps_its_status(self, stages):
        """A restart that would hurt ends with 5."""

        def refuse(parts):
            raise RefusedError("It hurts.", next_step="Restart the pair.")

        stages.answer("tandem.standing.restart", refuse)

        assert main(["restart", "decode-0"]) == 5


class TestWatch:
    """The loop speaks line by line."""

    def test_every_event_is_a_line(self, stages, capsys):
        """Each sentence is one line with its UTC time."""
        stages.answer("tandem.service.serve", None)

        assert main(["watch", "--hunch", "overlap"]) == 0
        assert capsys.readouterr().out.endswith("Z  half way\n")
        assert stages.asked[0][2]["hunch"] == "overlap"

    def test_a_hunch_is_one_short_line(self, stages):
        """Whatever was pasted as a hunch, it is one line, it commands no terminal, and it ends."""
        stages.answer("tandem.service.serve", None)
        assert main(["watch", "--hunch", "\x1b[31mover\nlap \udcff" + "x" * 9000]) == 0
        hunch = stages.asked[0][2]["hunch"]

        assert hunch.startswith("over lap \ufffdx")
        assert len(hunch) == 500

    def test_events_are_json_lines(self, stages, capsys):
        """Under `--json` each event is one JSON object a line."""
        stages.answer("tandem.service.serve", None)

        assert main(["watch", "--json"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [json.loads(line)["text"] for line in lines] == ["half way"]

    def test_ctrl_c_ends_it_cleanly(self, stages, monkeypatch, capsys):
        """Ctrl-C closes the parts and ends with 130."""

        async def serve(parts, *, hunch, tell, notifier):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

        @contextlib.asynccontextmanager
        async def open_parts(settings):
            try:
                yield stages.parts
            finally:
                stages.asked.append("closed")

        monkeypatch.setattr("tandem.service.serve", serve)
        monkeypatch.setattr("tandem.wiring.open_parts", open_parts)

        assert main(["watch"]) == 130
        assert stages.asked == ["closed"]
        assert "Traceback" not in capsys.readouterr().err


class TestStages:
    """Single stages of the loop, by hand."""

    def test_verify_that_falls_short_is_6(self, stages, capsys):
        """A proof that falls short is shown whole, and ends with 6."""
        stages.answer("tandem.handling.run_verify", night.VERIFICATION)

        assert main(["verify"]) == 6
        assert "marker of s17 leaked" in capsys.readouterr().out

    def test_a_proof_that_holds_is_0(self, stages):
        """A proof that holds ends with 0."""
        stages.answer(
            "tandem.handling.run_verify", msgspec.structs.replace(night.VERIFICATION, passed=True)
        )

        assert main(["verify", "--json"]) == 0

    def test_collect_stores_what_it_sees(self, stages, capsys):
        """One sweep is stored and shown; what its second turn saw anew takes the first's place."""
        probed = msgspec.structs.replace(night.INFLIGHT, source="probe", name="probe", value="off")
        known = msgspec.structs.replace(probed, value="completed")
        turns = iter([Harvest((night.STACKS, probed)), Harvest((known,))])

        async def tick(patience_s):
            return next(turns)

        async def sleep(seconds):
            stages.asked.append(seconds)

        stages.parts.settings = SimpleNamespace(probe=SimpleNamespace(deadline_s=5.0))
        stages.parts.clock = SimpleNamespace(sleep=sleep)
        stages.parts.collector = SimpleNamespace(tick=tick)
        stages.parts.store = SimpleNamespace(append=lambda seen: seen)

        assert main(["collect"]) == 0
        drawn = capsys.readouterr().out
        assert "1 things seen, 1 could not be" in drawn
        assert "probe completed" in drawn

    def test_detect_reads_what_was_collected(self, tmp_path, capsys):
        """`detect` judges the rolling store, and says when nobody has looked lately."""
        (tmp_path / "tandem.toml").write_text(EXAMPLE.read_text())

        assert main(["detect", "--config", str(tmp_path / "tandem.toml")]) == 0
        out, err = capsys.readouterr()
        assert out == "nothing is found wrong\n"
        assert "no observation is younger than a minute" in err

    @pytest.mark.parametrize("since", ["yesterday", "0h"])
    def test_investigate_refuses_no_length(self, stages, since, capsys):
        """`--since` that is no length of time is wrong usage."""
        assert main(["investigate", "--since", since]) == 2
        assert "90m, 24h or 3d" in capsys.readouterr().err

    def test_investigate_gives_the_incident(self, stages, capsys):
        """`investigate --json` gives the incident, asked with the hunch and the time."""
        stages.answer("tandem.loop.investigate", night.INCIDENT)

        assert main(["investigate", "--json", "--hunch", "x", "--since", "3d"]) == 0
        assert json.loads(capsys.readouterr().out)["id"] == night.INCIDENT.id
        assert stages.asked[0][2] == {"hunch": "x", "since_s": 259200.0}


class TestRehearsal:
    """Drills and the demo speak for themselves."""

    def test_drills_are_listed(self, capsys):
        """`drill --list` names every drill and whether a stall is to be found."""
        assert main(["drill", "--list"]) == 0
        assert "stale-peer-after-decode-restarts" in capsys.readouterr().out

    def test_a_drill_is_run_as_asked(self, monkeypatch):
        """Name, seed and where the score goes reach the drill."""
        asked = []

        async def run(name, *, seed, json_to, tell):
            asked.append((name, seed, json_to))

        monkeypatch.setattr("tandem.drills.run", run)

        assert main(["drill", "idle", "--seed", "7", "--json", "-"]) == 0
        assert asked == [("idle", 7, "-")]

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_signal_ends_a_demo_cleanly(self, monkeypatch, capsys, number, status):
        """Ctrl-C and SIGTERM both reach the demo, which puts things away, even when repeated."""
        put_away = []

        async def play(workspace):
            try:
                os.kill(os.getpid(), number)
                await asyncio.Event().wait()
            finally:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0)
                put_away.append(True)

        monkeypatch.setattr("tandem.drills.demo", play)

        assert main(["demo"]) == status
        assert put_away == [True]
        said = capsys.readouterr().err
        assert "still putting away" in said
        assert "is put away" in said

    def test_a_score_that_cannot_be_written_is_known_before(self, tmp_path, capsys):
        """A file that cannot be made ends the word before anything is started, with 4."""
        assert main(["drill", "idle", "--json", str(tmp_path / "none" / "score.json")]) == 4
        assert "score.json" in capsys.readouterr().err

    def test_an_unknown_drill_is_refused(self, capsys):
        """A drill that is not known ends with 3 and says how to list them."""
        assert main(["drill", "gremlins"]) == 3
        assert "--list" in capsys.readouterr().err
