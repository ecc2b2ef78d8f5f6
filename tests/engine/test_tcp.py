"""TCP: what breaks is told, by name, to the side that waits."""

import socket

import pytest

from posting import SLOT_BYTES, WAIT_S, post, settled, until
from tandem_engine.handoff import HandoffError, Ticket, tcp
from tandem_engine.handoff.listener import TcpLanding
from tandem_engine.handoff.tcp import TcpSender
from tandem_engine.handoff.transports import open_sender


class TestTcp:
    """What only TCP does."""

    def test_a_dead_decode_is_told(self):
        """A landing that is gone fails the room, and the sentence names it."""
        landing = TcpLanding.create(slots=1, slot_bytes=SLOT_BYTES)
        sender = open_sender(landing.address)
        ticket = landing.reserve(1)
        landing.close()
        landing.close()
        post(sender, ticket)

        assert settled(sender, ticket) is False
        assert landing.address[4:] in sender.reason(ticket)
        sender.close()

    def test_a_decode_that_dies_before_it_answers_is_told(self):
        """A blob that arrived and was never settled fails when the landing closes."""
        landing = TcpLanding.create(slots=1, slot_bytes=SLOT_BYTES)
        sender = open_sender(landing.address)
        ticket = landing.reserve(1)
        post(sender, ticket)
        until(landing.poll)
        landing.close()

        assert settled(sender, ticket) is False
        sender.close()

    def test_a_release_answers_a_blob_that_waits(self):
        """A slot released with a blob in it fails that room at once."""
        landing = TcpLanding.create(slots=1, slot_bytes=SLOT_BYTES)
        sender = open_sender(landing.address)
        ticket = landing.reserve(1)
        post(sender, ticket)
        until(landing.poll)
        landing.release(ticket)

        assert settled(sender, ticket) is False
        assert sender.reason(ticket) == "the decode released the slot"
        assert landing.reserve(2) is not None
        sender.close()
        landing.close()

    def connect(self, landing, ticket, size, blob):
        """A sender that sends only the beginning of a blob."""
        host, port = landing.address[4:].split(":")
        link = socket.create_connection((host, int(port)), WAIT_S)
        link.sendall(tcp.HEAD.pack(tcp.MAGIC, *ticket, size))
        assert link.recv(1) == tcp.GO
        link.sendall(blob)
        return link

    def test_half_a_blob_has_failed(self):
        """A connection that breaks in the middle of a blob fails the room, and frees the slot."""
        landing = TcpLanding.create(slots=1, slot_bytes=SLOT_BYTES)
        ticket = landing.reserve(1)
        link = self.connect(landing, ticket, SLOT_BYTES, b"half")
        assert landing.poll() == []
        link.close()

        assert until(landing.poll) == [(ticket, True)]
        landing.release(ticket)
        assert landing.reserve(2) is not None
        landing.close()

    def test_a_release_cuts_a_writer_off(self):
        """A slot released in the middle of a blob is given out once the writer is cut off."""
        landing = TcpLanding.create(slots=1, slot_bytes=SLOT_BYTES)
        ticket = landing.reserve(1)
        with self.connect(landing, ticket, SLOT_BYTES, b"half"):
            landing.release(ticket)

            assert until(lambda: landing.reserve(2)).generation > ticket.generation
        landing.close()

    def test_noise_and_crowds_are_cut(self):
        """What is no hand-off is told so, and connections beyond the bound are closed."""
        landing = TcpLanding.create(slots=1, slot_bytes=SLOT_BYTES)
        host, port = landing.address[4:].split(":")
        with socket.create_connection((host, int(port)), WAIT_S) as link:
            link.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(40))
            assert b"not a KV hand-off" in link.recv(600)
        links = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(5)]
        cut = until(lambda: [link for link in links if link.fileno() >= 0 and self.is_cut(link)])

        assert 1 <= len(cut) < 5
        for link in links:
            link.close()
        landing.close()

    def is_cut(self, link):
        """Whether the other side closed."""
        link.settimeout(0)
        try:
            return link.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def test_a_forgotten_room_is_cut_off(self):
        """Forgetting a ticket closes its connection, and it has failed."""
        landing = TcpLanding.create(slots=1, slot_bytes=SLOT_BYTES)
        sender = open_sender(landing.address)
        ticket = landing.reserve(1)
        post(sender, ticket)
        until(landing.poll)
        sender.forget(ticket)

        assert sender.acknowledged(ticket) is False
        assert sender.reason(ticket) == "it was never written"
        landing.acknowledge(ticket)
        landing.release(ticket)
        sender.close()
        landing.close()

    def test_a_port_in_use_is_said(self):
        """A landing that cannot listen says where, and what to do."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(HandoffError, match=f"127.0.0.1:{port}"):
                TcpLanding.create(slots=1, slot_bytes=SLOT_BYTES, port=port)

    def test_staging_is_bounded(self, monkeypatch):
        """With every staging buffer on its way a write is refused instead of waiting for ever."""
        monkeypatch.setattr(tcp, "STAGE_TIMEOUT_S", 0.01)
        monkeypatch.setattr(tcp, "STAGES", 2)
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            sender = TcpSender("127.0.0.1", deaf.getsockname()[1])
            tickets = [Ticket(0, room, 1) for room in range(3)]
            post(sender, tickets[0])
            post(sender, tickets[1])
            with pytest.raises(HandoffError, match="no staging buffer"):
                post(sender, tickets[2])
            sender.close()
