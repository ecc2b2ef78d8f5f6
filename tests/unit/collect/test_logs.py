"""Log files are followed through growth, rotation and truncation, and known lines are counted."""

import os

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.collect.incarnations import Incarnations
from tandem.collect.log_lines import LINE_BYTES_MAX, Lines
from tandem.collect.log_signatures import SIGNATURES
from tandem.collect.logs import BEHIND_BYTES_MAX, READ_BYTES_MAX, LogSource
from tandem.records import Incarnation, Member, Role
from tandem.records import vocabulary as v

MEMBER = Member(name="prefill-0", role=Role.PREFILL, url="http://127.0.0.1:1", engine="sglang")
FAILED = (
    "[2026-01-01 00:00:00] Prefill transfer failed for request rank=0 req.rid='a' "
    "req.bootstrap_room=7 with exception KVTransferError(bootstrap_room=7): Aborted by AbortReq.\n"
)


class Bench:
    """A log source over one file."""

    def __init__(self, path):
        self.path = path
        self.at = 0.0
        self.lives = Incarnations()
        self.source = LogSource(MEMBER, lambda _: str(path), self.lives, now=lambda: self.at)

    async def look(self):
        """Lines, and the signatures that were told, by slug."""
        harvest = await self.source.collect()
        found = {(seen.name, seen.label): seen for seen in harvest.observations}
        counts = {
            label: one.value for (name, label), one in found.items() if name == v.LOG_SIGNATURE
        }
        return found[v.LOG_LINES_TOTAL, ""], counts, found


@pytest.fixture
async def bench(tmp_path):
    made = Bench(tmp_path / "prefill.log")
    yield made
    await made.source.close()


class TestFollowing:
    """Which lines are read."""

    async def test_only_new_lines_are_counted_and_half_lines_wait(self, bench):
        """A line counts when it has its end."""
        bench.path.write_text("one\ntwo\nhal")
        first, _, _ = await bench.look()
        with bench.path.open("a") as log:
            log.write("f\nfour\n")
        second, _, _ = await bench.look()

        assert (first.value, second.value) == (2, 4)

    async def test_a_rotated_file_is_read_to_its_end_and_then_its_successor(self, bench):
        """Lines written before the rotation and after it are all counted."""
        bench.path.write_text("one\n")
        await bench.look()
        with bench.path.open("a") as log:
            log.write("two\n")
        bench.path.rename(bench.path.with_suffix(".1"))
        bench.path.write_text("three\nfour\n")
        lines, _, _ = await bench.look()

        assert lines.value == 4

    async def test_a_truncated_file_is_read_from_its_start(self, bench):
        """A file cut to nothing and written anew is not taken for unchanged."""
        bench.path.write_text("one\ntwo\nthree\n")
        await bench.look()
        bench.path.write_text("four\n")
        lines, _, _ = await bench.look()

        assert lines.value == 4

    async def test_a_long_file_is_entered_near_its_end(self, bench):
        """Only the tail is read at first, from a whole line on."""
        bench.path.write_text("x" * 99 + "\n" + ("y" * 99 + "\n") * (READ_BYTES_MAX // 50))
        lines, _, _ = await bench.look()

        assert 0 < lines.value <= READ_BYTES_MAX // 100

    async def test_one_look_is_bounded_and_the_next_goes_on(self, bench):
        """A file that grows by more than a look reads is followed late, without loss."""
        bench.path.write_text("")
        await bench.look()
        wanted = READ_BYTES_MAX // 100 * 2
        bench.path.write_text(("z" * 99 + "\n") * wanted)
        first, _, _ = await bench.look()
        await bench.look()
        last, _, _ = await bench.look()

        assert (first.value < wanted, last.value) == (True, wanted)

    async def test_whoever_writes_on_to_the_renamed_file_is_still_read(self, bench):
        """Engines never open their log again: a rotation without `copytruncate` changes nothing."""
        with bench.path.open("a", buffering=1) as log:
            log.write("one\n")
            await bench.look()
            bench.path.rename(bench.path.with_suffix(".1"))
            bench.path.write_text("")
            await bench.look()
            log.write("two\nthree\n")
            lines, _, _ = await bench.look()

        assert lines.value == 3

    async def test_a_renamed_file_that_is_deleted_is_let_go(self, bench):
        """Compressed and deleted, it shall give its space back; its last lines are counted."""
        renamed = bench.path.with_suffix(".1")
        bench.path.write_text("one\n")
        await bench.look()
        bench.path.rename(renamed)
        bench.path.write_text("")
        await bench.look()
        with renamed.open("a") as log:
            log.write("two\n")
        renamed.unlink()
        lines, _, _ = await bench.look()
        await bench.look()

        assert (lines.value, bench.source._former) == (2, None)

    async def test_a_second_rotation_lets_go_of_the_oldest(self, bench):
        """At most two files are open, however often the log is rotated."""
        for turn in range(5):
            bench.path.write_text(f"{turn}\n")
            lines, _, _ = await bench.look()
            bench.path.rename(bench.path.with_suffix(f".{turn}"))

        assert lines.value == 5
        folder = str(bench.path.parent)
        opened = [one.path for one in psutil.Process().open_files() if one.path.startswith(folder)]
        assert len(opened) <= 2

    async def test_a_file_cut_and_grown_beyond_where_it_was_read_is_read_anew(self, bench):
        """`copytruncate` and a busy engine: the size alone would not show it."""
        bench.path.write_text("one\ntwo\n")
        await bench.look()
        with bench.path.open("r+") as log:
            log.truncate(0)
            log.write("".join(f"line {number}\n" for number in range(20)))
        lines, _, _ = await bench.look()

        assert lines.value == 22

    async def test_a_file_that_vanishes_is_waited_for(self, bench):
        """Lines of its successor are counted when it comes."""
        bench.path.write_text("one\n")
        await bench.look()
        bench.path.unlink()
        gone, _, _ = await bench.look()
        bench.path.write_text("two\n")
        back, _, _ = await bench.look()

        assert (gone.value, back.value) == (1, 2)

    async def test_what_is_far_behind_is_passed_over_and_told(self, bench):
        """A file that grows too fast is entered again near its end."""
        bench.path.write_text("")
        await bench.look()
        with bench.path.open("wb") as log:
            log.truncate(BEHIND_BYTES_MAX + READ_BYTES_MAX)
            log.seek(0, os.SEEK_END)
            log.write(b"\nlast\n")
        lines, _, found = await bench.look()
        lines, _, _ = await bench.look()

        assert lines.value == 1
        assert found[v.LOG_SKIPPED_BYTES_TOTAL, ""].value == BEHIND_BYTES_MAX + len(b"\nlast\n")

    async def test_what_is_no_file_is_a_reason(self, bench):
        """A pipe that nobody writes to is not waited for, and a folder is none."""
        os.mkfifo(bench.path)
        lines, _, _ = await bench.look()
        folder = LogSource(MEMBER, lambda _: str(bench.path.parent), Incarnations())
        (other,) = (await folder.collect()).observations

        assert "no ordinary file" in lines.missing
        assert "cannot read" in other.missing

    async def test_a_missing_file_and_an_unknown_path_are_reasons(self, bench):
        """Nothing is raised; the row says what is missing."""
        lines, _, _ = await bench.look()
        unknown = LogSource(MEMBER, lambda _: None, Incarnations())
        (nobody,) = (await unknown.collect()).observations

        assert "cannot read" in lines.missing
        assert "nobody told" in nobody.missing


class TestHostile:
    """What nobody would write on purpose."""

    async def test_a_line_without_end_costs_a_bound(self, bench):
        """Of 100 MB without a newline a few kilobytes are kept, and the next line is counted."""
        with bench.path.open("wb") as log:
            log.truncate(100_000_000)
        looks = 0
        while bench.source._file is None or looks < 20:
            lines, _, _ = await bench.look()
            looks += 1
        kept = len(bench.source._file._rest)
        with bench.path.open("ab") as log:
            log.write(b"\n" + FAILED.encode())
        lines, counts, _ = await bench.look()

        assert kept <= LINE_BYTES_MAX
        assert (lines.value, counts["transfer-failed"]) == (1, 1)

    @given(
        st.lists(
            st.one_of(
                st.binary(max_size=200),
                st.sampled_from((b"\x00" * 50, b"\xff\xfe", b"\x1b[31m" * 20, b"\x1b[", b"\r")),
                st.sampled_from((b"[9999-99-99 99:99:99] Traceback (most recent call last):",)),
                st.sampled_from((b"0001-01-01T00:00:00+23:59 CUDA error",)),
            )
        )
    )
    def test_any_bytes_are_counted_by_their_ends(self, chunks):
        """Nothing in a line breaks the reading of it; what is shown can be shown."""
        lines = Lines()
        for chunk in chunks:
            lines.count(chunk, 1e9)
        rows = list(lines.told(1e9, lambda name, value, label="": (name, value, label)))
        shown = [value for name, value, _ in rows if name == v.LOG_LAST]

        assert rows[0] == (v.LOG_LINES_TOTAL, len(chunks), "")
        assert [text for text in shown if "\x1b" in text or "\x00" in text] == []

    async def test_colours_within_a_line_do_not_hide_it(self, bench):
        """Escapes are taken out before it is matched."""
        bench.path.write_bytes(b"\x1b[1mPrefill \x1b[31mtransfer\x1b[0m failed\n")
        _, counts, found = await bench.look()

        assert counts["transfer-failed"] == 1
        assert found[v.LOG_LAST, "transfer-failed"].value == "Prefill transfer failed"


class TestTimes:
    """When a signature was seen."""

    @pytest.mark.parametrize(
        ("line", "at"),
        [
            ("2026-01-01T00:00:00Z ERROR CUDA error", 1767225600.0),
            ("[2026-01-01 00:00:00+00:00] CUDA error", 1767225600.0),
            ("2026-01-01T00:00:00.250000Z CUDA error", 1767225600.25),
            ("  2026-01-01T01:00:00+01:00 CUDA error", 1767225600.0),
            ("CUDA error", 1767226000.0),
            ("2031-01-01T00:00:00Z from a wrong clock: CUDA error", 1767226000.0),
            ("1999-01-01T00:00:00Z from a wrong clock: CUDA error", 1767226000.0),
            ("2026-13-41T00:00:00Z CUDA error", 1767226000.0),
        ],
    )
    async def test_it_is_when_the_line_says_it_was_written(self, bench, line, at):
        """Else when it was read."""
        bench.at = 1767226000.0
        bench.path.write_text(line + "\n")
        _, _, found = await bench.look()

        assert found[v.LOG_FIRST_SEEN_AT, "cuda-error"].value == at

    async def test_the_first_and_the_last_are_told(self, bench):
        """The first stays, the last moves."""
        bench.at = 1767226000.0
        bench.path.write_text("2026-01-01T00:00:01Z CUDA error\n")
        await bench.look()
        with bench.path.open("a") as log:
            log.write("2026-01-01T00:00:09Z CUDA error\n")
        _, _, found = await bench.look()

        assert found[v.LOG_FIRST_SEEN_AT, "cuda-error"].value == 1767225601.0
        assert found[v.LOG_LAST_SEEN_AT, "cuda-error"].value == 1767225609.0


class TestSignatures:
    """What is recognised."""

    async def test_a_known_line_is_counted_and_kept(self, bench):
        """Each signature counts the lines it matches; the last one is shown."""
        bench.path.write_text("nothing\n" + FAILED + FAILED.replace("=7", "=8"))
        _, counts, found = await bench.look()

        assert (counts["transfer-failed"], counts["request-aborted"], counts["traceback"]) == (
            2,
            2,
            0,
        )
        assert "bootstrap_room=8" in found[v.LOG_LAST, "transfer-failed"].value

    async def test_counts_are_told_when_they_change_and_all_of_them_now_and_then(self, bench):
        """Zeros are told too, at first and every half minute: a silent log is evidence."""
        bench.path.write_text("")
        _, first, _ = await bench.look()
        bench.at = 2.0
        _, quiet, _ = await bench.look()
        with bench.path.open("a") as log:
            log.write(FAILED)
        bench.at = 4.0
        _, changed, _ = await bench.look()
        bench.at = 40.0
        _, later, _ = await bench.look()

        assert (set(first), quiet, set(later)) == (set(SIGNATURES), {}, set(SIGNATURES))
        assert set(changed) == {"transfer-failed", "request-aborted"}

    async def test_counts_are_of_one_life(self, bench):
        """A restart begins the counts anew."""
        bench.lives.saw("prefill-0", Incarnation(id="1", started_at=1.0))
        bench.path.write_text(FAILED)
        await bench.look()
        bench.lives.saw("prefill-0", Incarnation(id="2", started_at=2.0))
        lines, counts, _ = await bench.look()

        assert (lines.value, lines.incarnation, counts["transfer-failed"]) == (0, "2", 0)

    @pytest.mark.parametrize(
        ("line", "slug"),
        [
            ("Decode batch, #running-req: 1, #token: 20", "decode-batch"),
            ("Request 7 timed out after 300.0s in KVPoll.Bootstrapping", "bootstrapping-timeout"),
            ("First message should be b'NixlMsgGuard'. Foreign traffic?", "foreign-traffic"),
            ("Scheduler watchdog timeout (self.watchdog_timeout=300)", "watchdog-timeout"),
            ("Health check failed. Server couldn't get a response from", "health-failed"),
            ("Traceback (most recent call last):", "traceback"),
            ("torch.OutOfMemoryError: CUDA out of memory.", "out-of-memory"),
            ("[Errno 98] error while attempting to bind: address already in use", "address-in-use"),
            ("Lost connection with prefill instance (bootstrap_addr: h:1)", "peer-lost"),
            ("Failed to select PD pair error=no healthy", "router-no-pair"),
            ("d.service: Main process exited, code=killed, status=9/KILL", "main-process-exited"),
            ("d.service: Failed with result 'oom-kill'.", "oom-killed"),
        ],
    )
    def test_lines_of_engines_and_router_are_known(self, line, slug):
        """A line as it is really written matches its signature."""
        matching = {name for name, one in SIGNATURES.items() if one.search(line.encode())}

        assert slug in matching
