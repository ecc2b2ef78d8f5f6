"""Whatever happens, a word ends in one sentence and the exit status of its family."""

import asyncio
import errno
import io
import os
import signal
import subprocess
import sys

import pytest

from tandem import errors
from tandem.__main__ import main
from tandem.cli import app
from tandem.cli.running import run

FAMILIES = [
    (errors.ConfigError, 3),
    (errors.WorldError, 4),
    (errors.DependencyError, 4),
    (errors.RefusedError, 5),
    (errors.NotProvenError, 6),
]


def failing(monkeypatch, error):
    """Make every word raise `error`."""

    def invoke(arguments):
        raise error

    monkeypatch.setattr(app, "invoke", invoke)


class TestExitStatus:
    """One status per family of errors."""

    @pytest.mark.parametrize(("family", "status"), FAMILIES)
    def test_a_family_has_its_status(self, monkeypatch, capsys, family, status):
        """An error ends in its sentence and next step on stderr, and its family's status."""
        failing(monkeypatch, family("The port is taken.", next_step="Stop its holder."))

        assert main([]) == status
        assert capsys.readouterr() == ("", "tandem: The port is taken. Stop its holder.\n")

    def test_what_nobody_expected_is_a_bug(self, monkeypatch, capsys):
        """An unexpected exception is told as our bug, with status 70 and no traceback."""
        failing(monkeypatch, KeyError("x"))

        assert main([]) == 70
        said = capsys.readouterr().err
        assert said == (
            "tandem: Unexpected KeyError: 'x'. This is a bug in Tandem: please report it. "
            "TANDEM_TRACEBACK=1 shows where.\n"
        )

    def test_a_traceback_is_there_for_who_asks(self, monkeypatch, capsys):
        """TANDEM_TRACEBACK=1 adds the traceback."""
        monkeypatch.setenv("TANDEM_TRACEBACK", "1")
        failing(monkeypatch, KeyError("x"))

        assert main([]) == 70
        assert "Traceback (most recent call last)" in capsys.readouterr().err

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
    def test_a_full_or_closed_disk_is_the_worlds(self, monkeypatch, capsys, number):
        """An operating system that refuses is no bug: it is named with the file."""
        failing(monkeypatch, OSError(number, os.strerror(number), "evidence.sqlite"))

        assert main([]) == 4
        assert "evidence.sqlite" in capsys.readouterr().err

    def test_a_place_that_is_not_there_is_the_worlds(self, monkeypatch, capsys):
        """A folder that somebody removed meanwhile is named, and no bug."""
        failing(monkeypatch, FileNotFoundError(errno.ENOENT, "No such file", "gone/x.json"))

        assert main([]) == 4
        assert "gone/x.json" in capsys.readouterr().err

    @pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
    def test_a_closed_stream_is_no_error(self, closed):
        """A word started without stdin, stdout or stderr runs as if nobody listened."""
        command = f"'{sys.executable}' -m tandem --version {closed}"
        ended = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=20, check=False
        )

        assert (ended.returncode, ended.stderr) == (0, "")

    def test_an_encoding_that_is_too_small_is_no_error(self, monkeypatch):
        """What a terminal's encoding does not have is escaped."""
        terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(app, "invoke", lambda _: sys.stdout.write("“x”") and 0)

        assert main([]) == 0
        assert terminal.buffer.getvalue() == rb"\u201cx\u201d"

    def test_another_os_error_is_a_bug(self, monkeypatch, capsys):
        """An operating system error that no user can mend is ours."""
        failing(monkeypatch, OSError(errno.EINVAL, "Invalid argument"))

        assert main([]) == 70
        assert "bug" in capsys.readouterr().err

    def test_ctrl_c_in_a_word_is_told(self, monkeypatch, capsys):
        """An interruption that the library of the command line swallows is told all the same."""

        def interrupted():
            raise KeyboardInterrupt

        monkeypatch.setattr("tandem.drills.listing", interrupted)

        assert main(["drill", "--list"]) == 130
        assert "Interrupted" in capsys.readouterr().err

    def test_ctrl_c_is_130(self, monkeypatch, capsys):
        """KeyboardInterrupt ends with 130 and no traceback."""
        failing(monkeypatch, KeyboardInterrupt())

        assert main([]) == 130
        assert "Traceback" not in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments", [["statsu"], ["status", "--colour"], ["restart"], ["watch", "x"]]
    )
    def test_wrong_usage_is_2(self, capsys, arguments):
        """Wrong usage ends with 2 and one line that says where to read."""
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "--help` shows how." in err

    def test_a_reader_that_left_is_no_error(self):
        """When whoever reads our output leaves early, nothing is said about it."""
        piped = subprocess.run(
            ["bash", "-c", f"'{sys.executable}' -m tandem --help | true"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

        assert (piped.returncode, piped.stderr) == (0, "")


class TestSignals:
    """A signal ends a word with everything it began put away."""

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_work_is_put_away(self, number, status):
        """The work's `finally` runs to its end before the status says which signal it was."""
        put_away = []

        async def work():
            try:
                os.kill(os.getpid(), number)
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                put_away.append(True)

        with pytest.raises(errors.InterruptedByUser) as ended:
            run(work())
        assert (put_away, ended.value.exit_status) == ([True], status)

    def test_work_that_takes_it_for_its_end_is_interrupted_all_the_same(self):
        """Work that ends normally when cancelled was still interrupted."""

        async def work():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "done"

        with pytest.raises(errors.InterruptedByUser):
            run(work())

    def test_a_second_signal_is_answered(self, capsys):
        """A second Ctrl-C leaves the putting away alone, and says that it goes on."""
        put_away = []

        async def work():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0)
                put_away.append(True)

        with pytest.raises(errors.InterruptedByUser):
            run(work())
        assert put_away == [True]
        assert "still putting away" in capsys.readouterr().err

    def test_a_third_signal_stops_waiting(self):
        """A third Ctrl-C ends the putting away as well, and says that something may be left."""

        async def work():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0)
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()

        with pytest.raises(errors.InterruptedByUser, match="may still run"):
            run(work())

    def test_a_result_is_given_back(self):
        """Without a signal the work's result is returned."""

        async def work():
            return 7

        assert run(work()) == 7

    def test_cancelling_from_inside_is_not_a_signal(self):
        """Work that is cancelled without a signal is a bug, not an interruption."""

        async def work():
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            run(work())
