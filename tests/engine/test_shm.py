"""Shared memory: fences, drains, sweeps, and the silence of a decode that died."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from posting import IDENTITY, SLOT_BYTES, Clock, header, post
from tandem_engine.handoff import HandoffError, StaleTicketError
from tandem_engine.handoff.header import open_blob
from tandem_engine.handoff.segment import sweep
from tandem_engine.handoff.shm import DRAIN_S, Attachment, Segment


class TestSharedMemory:
    """What only shared memory does."""

    def test_a_dead_decode_takes_kv_in_silence(self, tmp_path):
        """A mapped segment whose decode is gone takes writes, and never acknowledges."""
        dead = Segment.create("before", slots=2, slot_bytes=SLOT_BYTES, folder=tmp_path)
        sender = Attachment.open(Path(dead.address[4:]), folder=tmp_path)
        for room in range(5):
            ticket = dead.reserve(room)
            dead.release(ticket)
        dead.close()
        alive = Segment.create("after", slots=2, slot_bytes=SLOT_BYTES, folder=tmp_path)
        ticket = alive.reserve(9)
        post(sender, ticket)

        assert sender.acknowledged(ticket) is None
        assert alive.poll() == []
        alive.release(ticket)
        assert sender.acknowledged(ticket) is None
        sender.close()
        alive.close()

    def test_a_slot_is_not_given_out_while_it_is_written(self, tmp_path):
        """A room released in the middle of its write keeps the slot until the write ends."""
        clock = Clock()
        landing = Segment.create("a", slots=1, slot_bytes=SLOT_BYTES, folder=tmp_path, clock=clock)
        sender = Attachment.open(Path(landing.address[4:]), folder=tmp_path)
        ticket = landing.reserve(1)
        seen = []

        def export(into):
            landing.release(ticket)
            seen.append(landing.reserve(2))
            return 3

        sender.write(ticket, header(1), 3, export)

        assert seen == [None]
        assert landing.poll() == []
        assert landing.reserve(2) is not None
        assert sender.acknowledged(ticket) is False
        sender.close()
        landing.close()

    def test_a_writer_that_died_gives_the_slot_back(self, tmp_path):
        """A slot whose writer never ends is used again after the drain time."""
        clock = Clock()
        landing = Segment.create("a", slots=1, slot_bytes=SLOT_BYTES, folder=tmp_path, clock=clock)
        sender = Attachment.open(Path(landing.address[4:]), folder=tmp_path)
        ticket = landing.reserve(1)

        def export(into):
            landing.release(ticket)
            clock.now_s = DRAIN_S - 0.1
            assert landing.reserve(2) is None
            clock.now_s = DRAIN_S
            assert landing.reserve(2) is not None
            return 3

        sender.write(ticket, header(1), 3, export)
        assert landing.poll() == []
        sender.close()
        landing.close()

    def test_a_segment_is_private_and_goes_with_its_owner(self, tmp_path):
        """The file is for its user alone, cannot be created twice, and is unlinked at close."""
        landing = Segment.create("a", slots=1, slot_bytes=SLOT_BYTES, folder=tmp_path)
        path = Path(landing.address[4:])

        assert path == tmp_path / "tandem-kv-a"
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(HandoffError, match="File exists"):
            Segment.create("a", slots=1, slot_bytes=SLOT_BYTES, folder=tmp_path)
        landing.close()
        assert not path.exists()

    def test_a_killed_owner_is_swept_and_a_living_one_is_not(self, tmp_path):
        """The next decode that starts unlinks the segments of dead owners and no others."""
        code = (
            "import sys; from pathlib import Path\n"
            "from tandem_engine.handoff.shm import Segment\n"
            "s = Segment.create('dead', slots=1, slot_bytes=9999, folder=Path(sys.argv[1]))\n"
            "print(s.address, flush=True); sys.stdin.read()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        ) as owner:
            path = Path(owner.stdout.readline().strip()[4:])
            assert path.exists()
            assert sweep(tmp_path) == []
            owner.send_signal(signal.SIGKILL)
            owner.wait(10)
        (tmp_path / "tandem-kv-unfinished").write_bytes(b"")
        living = Segment.create("alive", slots=1, slot_bytes=SLOT_BYTES, folder=tmp_path)

        assert sorted(p.name for p in tmp_path.iterdir()) == [
            "tandem-kv-alive",
            "tandem-kv-unfinished",
        ]
        living.close()

    @pytest.mark.parametrize("name", ["tandem-kv-../x", "passwd", "tandem-kv-"])
    def test_only_segments_are_opened(self, tmp_path, name):
        """A path that is no segment's is refused without being opened."""
        with pytest.raises(HandoffError, match="no segment"):
            Attachment.open(tmp_path / name, folder=tmp_path)

    def test_a_path_elsewhere_or_a_link_is_refused(self, tmp_path):
        """Neither another folder, nor a symbolic link, nor foreign bytes pass for a segment."""
        (tmp_path / "tandem-kv-a").symlink_to("/etc/passwd")
        (tmp_path / "tandem-kv-b").write_bytes(bytes(8192))
        (tmp_path / "tandem-kv-c").write_bytes(b"")
        with pytest.raises(HandoffError, match="not opened"):
            Attachment.open(tmp_path / "tandem-kv-a")
        for name in "abcd":
            with pytest.raises(HandoffError, match=f"tandem-kv-{name}"):
                Attachment.open(tmp_path / f"tandem-kv-{name}", folder=tmp_path)

    def test_no_room_is_said_in_time(self, tmp_path):
        """A segment larger than the disk is refused at creation, and leaves no file."""
        with pytest.raises(HandoffError, match=r"no room for|cannot be set up"):
            Segment.create("big", slots=64, slot_bytes=2**44, folder=tmp_path)

        assert list(tmp_path.iterdir()) == []

    def test_an_agent_id_is_no_path(self, tmp_path):
        """An agent id that would leave the folder is refused."""
        with pytest.raises(HandoffError, match="agent id"):
            Segment.create("../evil", slots=1, slot_bytes=SLOT_BYTES, folder=tmp_path)


class SegmentMachine(RuleBasedStateMachine):
    """Any order of both sides' calls, stale tickets included, against a few plain fields."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        self.landing = Segment.create("m", slots=2, slot_bytes=SLOT_BYTES, folder=folder)
        self.sender = Attachment.open(Path(self.landing.address[4:]), folder=folder)
        self.tickets = []  # every ticket ever given out
        self.state = {}  # ticket -> reserved, ready, failed, taken, refused, released
        self.holder = {}  # slot -> the ticket that holds it

    def teardown(self):
        self.sender.close()
        self.landing.close()
        self.folder.cleanup()

    @rule(room=st.integers(0, 5))
    def reserve(self, room):
        """A slot is given out exactly while one is free, with a growing fence."""
        ticket = self.landing.reserve(room)
        assert (ticket is None) == (len(self.holder) == 2)
        if ticket is not None:
            assert ticket.slot not in self.holder
            assert all(ticket.generation > other.generation for other in self.tickets)
            self.tickets.append(ticket)
            self.holder[ticket.slot] = ticket
            self.state[ticket] = "reserved"

    @rule(data=st.data(), payload=st.binary(min_size=1, max_size=50))
    def write(self, data, payload):
        """A present ticket is written once; a stale one is refused."""
        if not self.tickets:
            return
        ticket = data.draw(st.sampled_from(self.tickets))
        if self.holder.get(ticket.slot) != ticket:
            with pytest.raises(StaleTicketError):
                post(self.sender, ticket, payload)
        elif self.state[ticket] == "reserved":
            post(self.sender, ticket, b"%d" % ticket.generation + payload)
            self.state[ticket] = "ready"

    @rule(data=st.data())
    def fail(self, data):
        """A present ticket can be given up; a stale one is nobody's business."""
        if self.tickets:
            ticket = data.draw(st.sampled_from(self.tickets))
            if self.state[ticket] in {"reserved", "released"}:
                self.sender.fail(ticket)
                if self.holder.get(ticket.slot) == ticket:
                    self.state[ticket] = "failed"

    @rule(data=st.data(), consumed=st.booleans())
    def settle(self, data, consumed):
        """What arrived is whole and is settled once."""
        ready = [ticket for ticket, state in self.state.items() if state == "ready"]
        if ready:
            ticket = data.draw(st.sampled_from(ready))
            _, payload = open_blob(self.landing.view(ticket), identity=IDENTITY, room=ticket.room)
            assert bytes(payload).startswith(b"%d" % ticket.generation)
            self.landing.acknowledge(ticket, consumed=consumed)
            self.state[ticket] = "taken" if consumed else "refused"

    @rule(data=st.data())
    def release(self, data):
        """Any ticket may be released at any time, twice as well."""
        if self.tickets:
            ticket = data.draw(st.sampled_from(self.tickets))
            self.landing.release(ticket)
            if self.holder.get(ticket.slot) == ticket:
                del self.holder[ticket.slot]
                if self.state[ticket] not in {"taken", "refused"}:
                    self.state[ticket] = "released"

    @invariant()
    def both_sides_agree(self):
        """The decode polls what is ready or failed; the prefill hears what was settled."""
        polled = {arrival.ticket: arrival.failed for arrival in self.landing.poll()}
        assert polled == {
            ticket: self.state[ticket] == "failed"
            for ticket in self.holder.values()
            if self.state[ticket] in {"ready", "failed"}
        }
        said = {"taken": True, "refused": False, "released": False}
        # Only the newest outcomes of a slot are kept; the machine asks about these.
        for ticket in self.tickets[-6:]:
            assert self.sender.acknowledged(ticket) is said.get(self.state[ticket])


TestSegmentMachine = SegmentMachine.TestCase
TestSegmentMachine.settings = settings(max_examples=40, stateful_step_count=40)
