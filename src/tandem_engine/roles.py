"""What differs between the two kinds of worker: the phase and its connections.

For: `worker.py`.
Not for: the phases themselves.
"""

import socket
import uuid
from typing import Protocol

from tandem_engine.config import StartError
from tandem_engine.control import Post
from tandem_engine.decode import Decode
from tandem_engine.handoff import HandoffError
from tandem_engine.handoff.transports import open_landing, open_sender
from tandem_engine.handoffs import Handoffs
from tandem_engine.host import Host, Readings
from tandem_engine.links import Links
from tandem_engine.model import Model
from tandem_engine.prefill import Prefill
from tandem_engine.rank import Rank
from tandem_engine.request import Outbox
from tandem_engine.wire import Announce, Announced, KvLayout, ToDecode

SLOTS_MAX = 8
"""Landing slots of a decode: each holds the KV of a whole context, and is backed by memory."""


class Role(Readings, Protocol):
    """One kind of worker, as `worker.py` needs it."""

    @property
    def phase(self) -> Prefill | Decode:
        """What the scheduler drives."""
        ...

    def bind(self, post: Post) -> None:
        """Connect to the scheduler; from here on peers are heard."""
        ...

    def let_go(self) -> None:
        """The worker ends: whatever waits for the other side, without a bound, returns."""
        ...

    def close(self, *, clean: bool) -> None:
        """Close connections and hand-off memory; a killed process would not be `clean`."""
        ...

    def held(self) -> dict[str, int]:
        """What is held for requests: all zero when idle."""
        ...


class PrefillRole:
    """The prefill: a rank that listens, and the rooms of its decodes."""

    def __init__(self, worker: Host, model: Model, outbox: Outbox, listener: socket.socket) -> None:
        """`listener` is the rank's socket."""
        settings = worker.settings
        self._listener = listener
        self._announced = Announced(uuid.uuid4().hex, _layout(model))
        self._faults = worker.switchboard
        self._rank: Rank | None = None
        self._handoffs = Handoffs(
            slots=settings.disaggregation_max_inflight,
            faults=worker.switchboard,
            open_sender=open_sender,
            tell=self._tell,
            cut=self._cut,
            failed=self._failed,
        )
        self.phase = Prefill(
            model,
            settings,
            worker.timeouts,
            metrics=worker.metrics,
            outbox=outbox,
            handoffs=self._handoffs,
            ended=worker.room_ended,
            faults=worker.switchboard,
        )
        self.gauges = self.phase.accounting.gauges
        self.disaggregation = self.phase.accounting.disaggregation
        self.pending_tokens = self.phase.accounting.pending_tokens

    def bind(self, post: Post) -> None:
        """Listen for decodes."""
        self._rank = Rank(self._listener, self._announced, self._handoffs, post, self._faults)

    def let_go(self) -> None:
        """Nothing here waits for a decode."""

    def close(self, *, clean: bool) -> None:
        """Close the connections and let go of every landing."""
        if self._rank is not None:
            self._rank.close()
        self._handoffs.close()

    def held(self) -> dict[str, int]:
        """What is held for requests: all zero when idle."""
        return {
            "slots": self._handoffs.held,
            "metadata": self._handoffs.asked,
            "sequences": self.phase.sequences.held,
            "queued": len(self.phase.requests()),
        }

    def _failed(self, room: int, reason: str) -> None:
        self.phase.failed(room, reason)

    def _cut(self, agent: str) -> None:
        if self._rank is not None:
            self._rank.cut(agent)

    def _tell(self, agent: str, message: ToDecode) -> None:
        if self._rank is not None:
            self._rank.tell(agent, message)


class DecodeRole:
    """The decode: a landing for KV, and links to its prefills."""

    def __init__(self, worker: Host, model: Model, outbox: Outbox) -> None:
        """Create the landing; raises `StartError` when there is no room for it."""
        settings = worker.settings
        agent = uuid.uuid4().hex
        try:
            self._landing = open_landing(
                settings.disaggregation_transfer_backend,
                agent_id=agent,
                slots=min(settings.max_running_requests, SLOTS_MAX),
                kv_bytes_max=model.kv_bytes_max,
                host=settings.host,
            )
        except HandoffError as problem:
            raise StartError(str(problem)) from problem
        announce = Announce(
            agent=agent,
            address=f"{settings.host}:{settings.port}",
            started_s=worker.started_s,
            lease_s=worker.timeouts.lease_s,
            landing=self._landing.address,
            layout=_layout(model),
        )
        self._links = Links(announce, worker.timeouts, worker.switchboard)
        self.phase = Decode(
            model,
            settings,
            worker.timeouts,
            metrics=worker.metrics,
            outbox=outbox,
            landing=self._landing,
            links=self._links,
            ended=worker.room_ended,
            faults=worker.switchboard,
        )
        self.gauges = self.phase.streaming.gauges
        self.disaggregation = self.phase.streaming.disaggregation
        self.pending_tokens = self.phase.streaming.pending_tokens

    def bind(self, post: Post) -> None:
        """Links are made when requests name a prefill."""
        self._links.bind(self.phase, post)

    def let_go(self) -> None:
        """A send to a prefill that does not take it returns."""
        self._links.let_go()

    def close(self, *, clean: bool) -> None:
        """Close the links; the landing of a killed process stays behind, as a file does."""
        self._links.close()
        if clean:
            self._landing.close()

    def held(self) -> dict[str, int]:
        """What is held for requests: all zero when idle."""
        return {
            "slots": self.phase.arrivals.slots_held,
            "sequences": self.phase.sequences.held,
            "cells": self.phase.sequences.cells_held,
            "queued": len(self.phase.requests()),
        }


def _layout(model: Model) -> KvLayout:
    identity = model.identity
    return KvLayout(
        identity.model_hash,
        identity.library_build,
        identity.kv_dtype,
        identity.page_size,
        model.context_length,
    )
