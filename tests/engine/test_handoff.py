"""The hand-off: blobs arrive whole or are refused by name, whichever way the bytes go."""

from pathlib import Path

import pytest

from posting import IDENTITY, SLOT_BYTES, header, post, settled, until
from tandem_engine.handoff import HandoffError, StaleTicketError, Ticket
from tandem_engine.handoff.header import HEADER_BYTES, open_blob
from tandem_engine.handoff.listener import TcpLanding
from tandem_engine.handoff.shm import Attachment, Segment
from tandem_engine.handoff.transports import open_landing, open_sender
from tandem_engine.model import ModelError


@pytest.fixture(params=["shm", "tcp"])
def pair(request, tmp_path):
    """A landing of two slots and a sender to it."""
    if request.param == "shm":
        landing = Segment.create("agent-1", slots=2, slot_bytes=SLOT_BYTES, folder=tmp_path)
        sender = Attachment.open(Path(landing.address[4:]), folder=tmp_path)
    else:
        landing = TcpLanding.create(slots=2, slot_bytes=SLOT_BYTES)
        sender = open_sender(landing.address)
    yield landing, sender
    sender.close()
    landing.close()


class TestBothTransports:
    """What holds whichever way the bytes go."""

    def test_a_blob_arrives_and_is_acknowledged(self, pair):
        """What was exported is what is viewed, and the sender hears that it was taken."""
        landing, sender = pair
        ticket = landing.reserve(2**63 - 1)
        assert landing.poll() == []
        post(sender, ticket, b"x" * 8192, extra=b"scores")
        (arrival,) = until(landing.poll)

        assert arrival == (ticket, False)
        assert sender.acknowledged(ticket) is None
        found, payload = open_blob(landing.view(ticket), identity=IDENTITY, room=2**63 - 1)
        assert (found.extra, bytes(payload)) == (b"scores", b"x" * 8192)
        landing.acknowledge(ticket)
        assert landing.poll() == []
        assert settled(sender, ticket) is True
        assert sender.reason(ticket) == ""
        landing.release(ticket)
        assert settled(sender, ticket) is True
        sender.forget(ticket)

    def test_a_refused_blob_is_told(self, pair):
        """A blob that the decode refuses has failed for the sender, with a reason."""
        landing, sender = pair
        ticket = landing.reserve(1)
        post(sender, ticket)
        until(landing.poll)
        landing.acknowledge(ticket, consumed=False)
        landing.acknowledge(ticket, consumed=True)
        landing.release(ticket)

        assert settled(sender, ticket) is False
        assert "refused" in sender.reason(ticket)

    def test_a_room_the_prefill_gives_up_is_told(self, pair):
        """`fail` shows as a failed arrival, and the slot can be used again."""
        landing, sender = pair
        ticket = landing.reserve(1)
        sender.fail(ticket)

        assert until(landing.poll) == [(ticket, True)]
        landing.release(ticket)
        assert landing.poll() == []

    def test_a_failing_export_is_told_to_both(self, pair):
        """An export that raises is raised to the prefill and seen by the decode as failed."""
        landing, sender = pair
        ticket = landing.reserve(1)

        def export(into):
            raise ModelError("the model is gone")

        with pytest.raises(ModelError, match="gone"):
            sender.write(ticket, header(1), 3, export)
        assert until(landing.poll) == [(ticket, True)]

    def test_slots_run_out_and_come_back(self, pair):
        """With every slot reserved there is no ticket; a release gives one, with a new fence."""
        landing, _sender = pair
        first, second = landing.reserve(1), landing.reserve(2)

        assert landing.reserve(3) is None
        landing.release(first)
        landing.release(first)
        third = landing.reserve(3)
        assert third.slot == first.slot
        assert third.generation > second.generation > first.generation
        assert landing.reserve(4) is None

    def test_a_released_ticket_is_stale(self, pair):
        """Nothing can be viewed or settled by a ticket that was given back."""
        landing, _sender = pair
        ticket = landing.reserve(1)
        with pytest.raises(HandoffError, match="not arrived"):
            landing.view(ticket)
        landing.release(ticket)
        with pytest.raises(StaleTicketError):
            landing.view(ticket)
        with pytest.raises(StaleTicketError):
            landing.acknowledge(ticket)

    def test_a_late_writer_harms_nobody(self, pair):
        """A write for a slot that another room got since fails, and that room's blob is whole."""
        landing, sender = pair
        late = landing.reserve(1)
        landing.release(late)
        tickets = [landing.reserve(2), landing.reserve(3)]
        (present,) = (ticket for ticket in tickets if ticket.slot == late.slot)
        try:
            post(sender, late, b"late" * 100)
        except StaleTicketError:
            assert sender.acknowledged(late) is False
        else:
            assert settled(sender, late) is False
        post(sender, present, b"good")

        assert until(landing.poll) == [(present, False)]
        _, payload = open_blob(landing.view(present), identity=IDENTITY, room=present.room)
        assert bytes(payload) == b"good"

    def test_a_blob_too_large_is_refused_by_its_size(self, pair):
        """A blob that exceeds the slot is refused with both numbers, and the slot lives on."""
        landing, sender = pair
        ticket = landing.reserve(1)
        size = landing.slot_bytes
        try:
            post(sender, ticket, bytes(size))
            assert settled(sender, ticket) is False
            said = sender.reason(ticket)
        except HandoffError as refused:
            said = str(refused)

        assert str(size) in said or str(size + HEADER_BYTES) in said
        landing.release(ticket)
        again = landing.reserve(2)
        post(sender, again)
        until(landing.poll)

    def test_a_slot_outside_is_refused(self, pair):
        """A ticket for a slot that the landing does not have is an error and writes nothing."""
        landing, sender = pair
        ticket = Ticket(9, 1, 2**62)
        try:
            post(sender, ticket)
            assert settled(sender, ticket) is False
            said = sender.reason(ticket)
        except HandoffError as refused:
            said = str(refused)

        assert "slot 9 is outside 0..1" in said
        assert landing.poll() == []

    def test_rooms_cross_in_any_order(self, pair):
        """Many rooms over two slots each get their own bytes."""
        landing, sender = pair
        waiting = list(range(20))
        inside = {}
        taken = []
        while waiting or inside:
            while waiting and (ticket := landing.reserve(waiting[-1])):
                inside[ticket] = waiting.pop()
                post(sender, ticket, b"room %d" % ticket.room)
            for ticket, failed in until(landing.poll):
                assert not failed
                _, payload = open_blob(landing.view(ticket), identity=IDENTITY, room=ticket.room)
                assert bytes(payload) == b"room %d" % ticket.room
                landing.acknowledge(ticket)
                landing.release(ticket)
                assert settled(sender, ticket)
                sender.forget(ticket)
                taken.append(inside.pop(ticket))

        assert sorted(taken) == list(range(20))


class TestTransports:
    """Landings and senders by name and address."""

    @pytest.mark.parametrize("transport", ["shm", "tcp"])
    def test_a_landing_is_reached_by_its_address(self, transport):
        """Whatever the transport, the address is all a prefill needs."""
        landing = open_landing(transport, agent_id="test-reach", slots=1, kv_bytes_max=100)
        try:
            sender = open_sender(landing.address)
            ticket = landing.reserve(1)
            post(sender, ticket, bytes(100))
            until(landing.poll)
            sender.close()
        finally:
            landing.close()

    @pytest.mark.parametrize(
        "address", ["", "shm:/etc/passwd", "tcp:host", "tcp::1", "tcp:h:0", "tcp:h:x", "rdma:x:1"]
    )
    def test_nonsense_is_refused(self, address):
        """An address that is none is refused before anything is opened."""
        with pytest.raises(HandoffError):
            open_sender(address)
