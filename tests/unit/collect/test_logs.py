"""Log files are followed through growth, rotation and truncation, and known lines are counted."""

import pytest

from tandem.collect.incarnations import Incarnations
from tandem.collect.log_signatures import SIGNATURES
from tandem.collect.logs import READ_BYTES_MAX, LogSource
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

    async def test_a_missing_file_and_an_unknown_path_are_reasons(self, bench):
        """Nothing is raised; the row says what is missing."""
        lines, _, _ = await bench.look()
        unknown = LogSource(MEMBER, lambda _: None, Incarnations())
        (nobody,) = (await unknown.collect()).observations

        assert "cannot read" in lines.missing
        assert "nobody told" in nobody.missing


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
        ],
    )
    def test_lines_of_engines_and_router_are_known(self, line, slug):
        """A line as it is really written matches its signature."""
        matching = {name for name, one in SIGNATURES.items() if one.search(line.encode())}

        assert slug in matching
