"""What the local supervisor promises beyond the port: survival, groups, records, shared memory."""
# ruff: noqa: ASYNC220, ASYNC221, ASYNC230, ASYNC240 - nothing else waits for the loop of a test

import asyncio
import errno
import functools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from children import DEADLINE_S, WITH_PATH, answers, end_all, member_of, starting, until
from tandem.errors import ConfigError, RefusedError, WorldError
from tandem.processes import life_of
from tandem.supervisors import leftovers, run_record
from tandem.supervisors.local import LOG_BYTES_MAX, LocalSupervisor


@pytest.fixture
def make_member(tmp_path):
    return functools.partial(member_of, tmp_path)


@pytest.fixture
def supervise(tmp_path):
    """Make supervisors as separate commands would, and end what they started."""
    yield lambda: LocalSupervisor(tmp_path)
    end_all(tmp_path)


class TestLocalSupervisor:
    async def test_a_member_survives_the_command_that_started_it(
        self, supervise, make_member, tmp_path
    ):
        """When the starting process exits, the member serves on, and is reaped by no one."""
        member = make_member()
        subprocess.run(starting(member, tmp_path), check=True, timeout=DEADLINE_S, env=WITH_PATH)

        await until(lambda: answers(member))
        supervisor = supervise()
        life = await supervisor.inspect(member)
        await supervisor.stop(member, grace_s=5.0)

        assert life is not None
        assert await supervisor.residue(member) == ()

    async def test_how_a_member_ended_is_known_to_whoever_started_it(self, supervise, make_member):
        """Its exit code is told once it is gone; of other processes nothing is claimed."""
        supervisor, member = supervise(), make_member("crash")
        life = await supervisor.start(member)
        before = supervisor.exit_code(life.pid)
        await until(lambda: answers(member))
        while await supervisor.inspect(member) is not None:
            await asyncio.sleep(0)

        assert (before, supervisor.exit_code(life.pid)) == (None, 3)
        assert supervisor.exit_code(os.getpid()) is None

    async def test_a_zombie_of_another_parent_is_gone(self, supervise, make_member, tmp_path):
        """A member that ended under a parent that never reaps it is gone, and starts again."""
        member = make_member("crash")
        with subprocess.Popen(
            starting(member, tmp_path, "sys.stdin.read()"), env=WITH_PATH, stdin=subprocess.PIPE
        ) as parent:
            supervisor = supervise()
            await until(lambda: answers(member))
            (run,) = (tmp_path / ".tandem" / "run").glob("*.json")
            pid = json.loads(run.read_text())["pid"]
            await until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)

            ended = await supervisor.inspect(member), await supervisor.residue(member)
            await supervisor.stop(member, grace_s=1.0)
            again = await supervisor.start(member)
            parent.stdin.close()

        assert ended == (None, ())
        assert again.pid != pid

    async def test_a_reused_pid_is_not_the_member(self, supervise, make_member, tmp_path):
        """A process that got the member's old pid is neither inspected nor signalled."""
        supervisor, member = supervise(), make_member()
        await supervisor.start(member)
        await supervisor.stop(member, grace_s=5.0)
        path = tmp_path / ".tandem" / "run" / "decode-0.json"
        record = json.loads(path.read_text())
        record["pid"] = os.getpid()
        path.write_text(json.dumps(record))

        await supervisor.stop(member, grace_s=0.0)  # would end this very test

        assert await supervisor.inspect(member) is None

    async def test_a_record_of_another_boot_is_nobody(self, supervise, make_member, tmp_path):
        """After a reboot a pid in a run record means nothing."""
        supervisor, member = supervise(), make_member()
        life = await supervisor.start(member)
        path = tmp_path / ".tandem" / "run" / "decode-0.json"
        kept = path.read_text()
        path.write_text(json.dumps({**json.loads(kept), "boot": "another"}))

        inspected = await supervisor.inspect(member)
        await supervisor.stop(member, grace_s=0.0)
        alive = life_of(life.pid)
        path.write_text(kept)

        assert inspected is None
        assert alive == life

    async def test_a_stubborn_member_is_killed_with_its_helpers(self, supervise, make_member):
        """What ignores SIGTERM is gone after the grace, helper processes included."""
        supervisor, member = supervise(), make_member("stubborn", "helper")
        await supervisor.start(member)
        await until(lambda: answers(member))
        pids = supervisor.processes(member)

        await supervisor.stop(member, grace_s=0.05)

        assert len(pids) == 2
        assert [life_of(pid) for pid in pids] == [None, None]

    async def test_helpers_of_a_crashed_member_are_named_and_stopped(self, supervise, make_member):
        """A start over what a crash left is refused by pid; stop ends the rest of the group."""
        supervisor, member = supervise(), make_member("helper", "crash")
        life = await supervisor.start(member)
        await until(lambda: answers(member))
        await until(lambda: life_of(life.pid) is None)
        (helper,) = supervisor.processes(member)

        with pytest.raises(WorldError, match=f"left processes behind: pid {helper}"):
            await supervisor.start(member)
        await supervisor.stop(member, grace_s=0.05)

        assert supervisor.processes(member) == ()

    async def test_a_restart_keeps_changed_flags(self, supervise, make_member):
        """A plain start repeats the flags of `restart_with`, in any later process."""
        member = make_member("first")
        changed = msgspec.structs.replace(member.launch, argv=(*member.launch.argv, "better"))
        await supervise().start(member)
        await supervise().restart_with(member, changed, grace_s=5.0)
        await supervise().stop(member, grace_s=5.0)

        await supervise().start(member)
        await until(lambda: answers(member))

        log = Path(supervise().log_path(member)).read_text()
        assert log.splitlines()[-1] == "listening plain first better"
        assert supervise().launched(member) == changed

    async def test_a_changed_configuration_wins(self, supervise, make_member):
        """When tandem.toml itself changed since, the next start is as it says."""
        supervisor, member = supervise(), make_member("first")
        changed = msgspec.structs.replace(member.launch, argv=(*member.launch.argv, "better"))
        await supervisor.restart_with(member, changed, grace_s=5.0)
        await supervisor.stop(member, grace_s=5.0)
        edited = make_member("edited", port=int(member.url.rpartition(":")[2]))

        await supervisor.start(edited)

        assert supervisor.launched(edited) == edited.launch

    async def test_forgetting_returns_to_the_configuration(self, supervise, make_member):
        """After `forget` the next start is as configured; a running member is not forgotten."""
        supervisor, member = supervise(), make_member()
        changed = msgspec.structs.replace(member.launch, argv=(*member.launch.argv, "better"))
        await supervisor.restart_with(member, changed, grace_s=5.0)
        with pytest.raises(RefusedError, match="still runs"):
            supervisor.forget(member)
        await supervisor.stop(member, grace_s=5.0)

        supervisor.forget(member)
        await supervisor.start(member)

        assert supervisor.launched(member) == member.launch

    async def test_a_restart_keeps_the_engine_variables_of_its_first_shell(
        self, supervise, make_member, monkeypatch
    ):
        """A repair from another shell starts the engine with the switches it had."""
        supervisor, member = supervise(), make_member()
        monkeypatch.setenv("SGLANG_FLAVOUR", "tuned")
        await supervisor.start(member)
        await supervisor.stop(member, grace_s=5.0)
        monkeypatch.setenv("SGLANG_FLAVOUR", "other")

        await supervisor.start(member)
        await until(lambda: answers(member))

        assert "listening tuned" in Path(supervisor.log_path(member)).read_text().splitlines()[-1]

    async def test_what_was_started_while_we_died_is_found(self, supervise, make_member, tmp_path):
        """A run record without a pid, as a crash leaves it, finds its process and stops it."""
        supervisor, member = supervise(), make_member()
        life = await supervisor.start(member)
        path = tmp_path / ".tandem" / "run" / "decode-0.json"
        record = json.loads(path.read_text())
        for key in ("pid", "incarnation", "started_at"):
            del record[key]
        path.write_text(json.dumps(record))

        found = await supervisor.inspect(member)
        await supervisor.stop(member, grace_s=5.0)

        assert found == life
        assert life_of(life.pid) is None

    async def test_a_disk_that_fills_while_it_starts_keeps_nobody_running(
        self, supervise, make_member, monkeypatch
    ):
        """A member whose pid could not be written down is known and stopped all the same."""
        written = []

        def write(path, record):
            if written:
                raise OSError(errno.ENOSPC, "No space left on device")
            written.append(path)
            run_record_write(path, record)

        run_record_write = run_record.write
        monkeypatch.setattr(run_record, "write", write)
        supervisor, member = supervise(), make_member()

        life = await supervisor.start(member)
        found = await supervisor.inspect(member)
        await supervisor.stop(member, grace_s=5.0)

        assert found == life
        assert life_of(life.pid) is None

    async def test_its_own_shared_memory_goes_with_it(
        self, supervise, make_member, tmp_path, monkeypatch
    ):
        """Segments of its pid are unlinked at stop, those of others stay."""
        folder = tmp_path / "shm"
        folder.mkdir()
        monkeypatch.setattr(leftovers, "SHARED_MEMORY", folder)
        supervisor, member = supervise(), make_member("stubborn")
        life = await supervisor.start(member)
        for name, pid in (("tandem-kv-own", life.pid), ("tandem-kv-other", os.getpid())):
            (folder / name).write_bytes(struct.pack("<8sII", b"TANDEMSG", 1, pid) + b"x" * 16)
        before = await supervisor.residue(member)

        await supervisor.stop(member, grace_s=0.05)

        assert any("tandem-kv-own" in line for line in before)
        assert [path.name for path in folder.iterdir()] == ["tandem-kv-other"]

    async def test_a_missing_executable_is_named(self, supervise, make_member):
        """A start of what is not installed names it and leaves no record."""
        supervisor, member = supervise(), make_member(argv=("no-such-engine", "serve"))

        with pytest.raises(WorldError, match=r"no-such-engine \(No such file.*Install it"):
            await supervisor.start(member)

        assert supervisor.launched(member) is None

    async def test_a_missing_folder_is_named(self, supervise, make_member):
        """A start in a folder that is not there names the folder."""
        with pytest.raises(WorldError, match="working directory /nowhere/else does not exist"):
            await supervise().start(make_member(cwd="/nowhere/else"))

    async def test_a_member_without_argv_is_refused(self, supervise, make_member):
        """Nothing to start is the configuration's fault, and says which key."""
        member = msgspec.structs.replace(make_member(), launch=None)

        with pytest.raises(ConfigError, match="Add argv to the"):
            await supervise().start(member)

    async def test_a_large_log_is_set_aside_at_start(self, supervise, make_member, tmp_path):
        """A log beyond the bound becomes `.1`, and the new one begins empty."""
        supervisor, member = supervise(), make_member()
        log = Path(supervisor.log_path(member))
        log.parent.mkdir(parents=True)
        with log.open("wb") as file:
            file.truncate(LOG_BYTES_MAX + 1)

        await supervisor.start(member)

        assert log.with_name("decode-0.log.1").stat().st_size == LOG_BYTES_MAX + 1
        assert log.stat().st_size < LOG_BYTES_MAX

    async def test_only_its_owner_may_read_how_it_was_started(
        self, supervise, make_member, tmp_path
    ):
        """Run records and logs hold secrets as they are: mode 600, in folders of mode 700."""
        await supervise().start(make_member(env={"HF_TOKEN": "hf_secret"}))
        state = tmp_path / ".tandem"

        files = [path for path in state.rglob("*") if path.is_file()]
        folders = [path for path in state.rglob("*") if path.is_dir()]

        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
        assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}

    async def test_a_damaged_run_record_is_named(self, supervise, make_member, tmp_path):
        """A run record that cannot be read says so, and what to do."""
        path = tmp_path / ".tandem" / "run" / "decode-0.json"
        path.parent.mkdir(parents=True)
        path.write_text("{")

        with pytest.raises(WorldError, match=r"decode-0\.json cannot be read.*delete the file"):
            await supervise().inspect(make_member())
        path.unlink()


class TestLives:
    def test_a_zombie_has_no_life(self):
        """A child that ended and was not reaped is gone."""
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)

            assert psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE
            assert life_of(ended.pid) is None

    def test_a_life_is_its_pid_and_its_ticks(self):
        """The id is the pid and the start ticks of the kernel, and stays what it is."""
        stat = Path(f"/proc/{os.getpid()}/stat").read_text()

        life = life_of(os.getpid())

        assert f"{os.getpid()}:{stat.rpartition(')')[2].split()[19]}" == life.id
        assert life_of(os.getpid()) == life
