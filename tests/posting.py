"""A prefill's hand for hand-off tests: post a blob, wait for what another thread does."""

import threading
import time

from tandem_engine.handoff.header import HEADER_BYTES, Header
from tandem_engine.model import Identity

IDENTITY = Identity("toy", "00ff00ff00ff00ff", "toy-1", "u8", 1)
SLOT_BYTES = HEADER_BYTES + 8192
WAIT_S = 10.0


def header(room, tokens=3, **fields):
    """A header as a prefill fills it in."""
    return Header(IDENTITY, room=room, tokens=tokens, first_token=7, **fields)


def exporting(payload):
    """An export of fixed bytes."""

    def export(into):
        into[: len(payload)] = payload
        return len(payload)

    return export


def post(sender, ticket, payload=b"kv!", **fields):
    """Write a payload for a ticket, as a prefill does."""
    sender.write(ticket, header(ticket.room, **fields), len(payload), exporting(payload))


def until(condition):
    """Wait for another thread to make a condition true; its value."""
    pause = threading.Event()
    deadline_s = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "it never happened"
        pause.wait(0.001)
    return value


def settled(sender, ticket):
    """The acknowledgement, once there is one."""
    return until(lambda: [said] if (said := sender.acknowledged(ticket)) is not None else [])[0]


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        """Read it."""
        return self.now_s
