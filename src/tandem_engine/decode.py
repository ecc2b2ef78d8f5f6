"""The decode phase: KV and a first token in, tokens out.

A request waits in the prealloc queue until its prefill is known and a sequence, cells and a landing
slot are free; only then is the prefill told where the KV goes. It waits in the transfer queue for
the KV, is imported between two steps, acknowledged, and runs in a batch with the others until it
ends.

For: the queues, admission, the steps. Everything here runs on the scheduler's thread.
Not for: connections (`rendezvous.py`), how KV arrives (`handoff/`), what comes of tokens
(`streaming.py`).
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tandem_engine import scoring
from tandem_engine.config import Settings, Timeouts
from tandem_engine.handoff import Landing, Ticket
from tandem_engine.handoff.header import Header, open_blob
from tandem_engine.handoffs import timed_out
from tandem_engine.metrics import Metrics
from tandem_engine.model import (
    Feed,
    KvExhaustedError,
    KvMismatchError,
    Logits,
    Model,
    ModelError,
)
from tandem_engine.rendezvous import Links
from tandem_engine.request import Finish, Outbox, Output, Phase, Request
from tandem_engine.sampling import sample
from tandem_engine.scheduler import Step
from tandem_engine.sequences import Sequences
from tandem_engine.streaming import Streaming
from tandem_engine.wire import Abort, RoomMetadata

log = logging.getLogger(__name__)
POLL_S = 0.002
POLL_SLOW_S = 0.01
POLL_SLOW_AFTER_S = 1.0
DEFERRED_RELEASE_S = 30.0
"""How long an aborted room keeps its landing slot when nobody says whether it is still being
written (SGLang's `DEFERRED_DECODE_KV_RELEASE_TIMEOUT`)."""
ABORTED = "Aborted by AbortReq."


@dataclass(slots=True, eq=False)
class Awaited:
    """A room whose KV is on its way."""

    request: Request
    ticket: Ticket
    since_s: float


@dataclass(slots=True, eq=False)
class Landed:
    """A room whose KV arrived and was found good."""

    request: Request
    ticket: Ticket
    header: Header
    payload: memoryview


class Decode:
    """Drives the decode phase over one model."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        timeouts: Timeouts,
        *,
        metrics: Metrics,
        outbox: Outbox,
        landing: Landing,
        links: Links,
        ended: Callable[[Request], None],
    ) -> None:
        """`ended` hears of every request that holds nothing any more."""
        self._model = model
        self._settings = settings
        self._timeouts = timeouts
        self._metrics = metrics
        self._outbox = outbox
        self._landing = landing
        self._links = links
        self._ended = ended
        self.sequences = Sequences(model, keep=0)
        self.prealloc: deque[Request] = deque()
        self.transfer: dict[int, Awaited] = {}
        self._given_up: dict[int, tuple[Ticket, float]] = {}
        self._landed: deque[Landed] = deque()
        self.running: list[Request] = []
        self.retracted: deque[tuple[Request, bytes]] = deque()
        self._left: list[Request] = []
        self._moved_s = 0.0
        self.streaming = Streaming(self, model, settings, metrics, outbox)

    # --- Events: the model may be computing ---

    def submit(self, request: Request) -> None:
        """A client's request."""
        request.enter(Phase.PREALLOC, time.monotonic())
        if request.fake:
            self.prealloc.appendleft(request)
            return
        self.prealloc.append(request)
        self._links.want(request.bootstrap)

    def abort(self, rid: str, *, everything: bool = False) -> None:
        """A client left, or asked for an abort by (the beginning of) its request id."""
        for request in self.requests():
            if everything or request.rid.startswith(rid):
                self.left(request)

    def left(self, request: Request) -> None:
        """The client of this request is gone."""
        if not request.live:
            return
        self._metrics.aborted.add()
        if request.phase is Phase.TRANSFER:
            self._fail(request, ABORTED)
        else:
            self._outbox.put(request, Output(finish=Finish("abort", message=ABORTED)))
            self._end(request)

    def room_failed(self, room: int, reason: str) -> None:
        """The prefill says that no KV will come."""
        awaited = self.transfer.get(room)
        if awaited is not None:
            self._fail(awaited.request, reason, tell=False)
        self._let_go(room)

    def abort_acked(self, room: int) -> None:
        """The prefill says that it will not write for this room (any more)."""
        self._let_go(room)

    def link_up(self, bootstrap: str) -> None:
        """A prefill is reached: the next `tend` admits."""

    def link_lost(self, bootstrap: str, reason: str) -> None:
        """A prefill is gone: its rooms fail, and nothing of them will be written."""
        for request in self.requests():
            if request.bootstrap == bootstrap and request.phase is Phase.TRANSFER:
                self._fail(request, reason, tell=False)
                self._let_go(request.room)
        for request in list(self.prealloc):
            if request.bootstrap == bootstrap:
                self._links.want(bootstrap)
                break

    def link_failed(self, bootstrap: str, reason: str) -> None:
        """A prefill could not be found at all."""
        for request in list(self.prealloc):
            if request.bootstrap == bootstrap:
                self._fail(request, reason, tell=False)

    def flush_cache(self) -> None:
        """A decode keeps no prefixes."""

    @property
    def slots_held(self) -> int:
        """Landing slots in use."""
        return len(self.transfer) + len(self._given_up) + len(self._landed)

    def requests(self) -> list[Request]:
        """Every request that is in a queue or runs."""
        return [
            *self.prealloc,
            *(awaited.request for awaited in self.transfer.values()),
            *(landed.request for landed in self._landed),
            *self.running,
            *(request for request, _ in self.retracted),
        ]

    def _fail(self, request: Request, reason: str, *, tell: bool = True) -> None:
        if not request.live:
            return
        handshake = request.phase is Phase.PREALLOC
        what = "handshake" if handshake else "transfer"
        counter = self._metrics.bootstrap_failed if handshake else self._metrics.transfer_failed
        counter.add()
        message = (
            f"Decode {what} failed for request rank=0 decode_req.req.rid={request.rid!r} "
            f"decode_req.req.bootstrap_room={request.room} with exception "
            f"KVTransferError(bootstrap_room={request.room}): {reason}"
        )
        log.error(message)
        self._outbox.put(request, Output(finish=Finish("abort", message=message)))
        self._end(request, tell=tell)

    def _end(self, request: Request, *, tell: bool = True) -> None:
        """Forget a request; its sequence goes back when the model idles."""
        if not request.live:
            return
        phase = request.phase
        request.enter(Phase.ENDED, time.monotonic())
        if phase is Phase.PREALLOC:
            self.prealloc.remove(request)
        elif phase is Phase.TRANSFER:
            awaited = self.transfer.pop(request.room)
            # The prefill may be writing: the slot is free when it says it is not.
            self._given_up[request.room] = (awaited.ticket, time.monotonic())
            if tell:
                self._links.send(request.bootstrap, Abort(self._links.agent, request.room))
        self._left.append(request)

    def _let_go(self, room: int) -> None:
        given_up = self._given_up.pop(room, None)
        if given_up is not None:
            self._landing.release(given_up[0])

    # --- Between and beside steps ---

    def prepare(self, now_s: float) -> None:
        """Take what arrived, admit what fits, and tell the prefills."""
        for arrival in self._landing.poll():
            room = arrival.ticket.room
            self._moved_s = now_s
            awaited = self.transfer.get(room)
            if awaited is None or awaited.ticket != arrival.ticket:
                if room in self._given_up:
                    self._landing.acknowledge(arrival.ticket)
                    self._let_go(room)
            elif arrival.failed:
                self._fail(
                    awaited.request, "Failed to get kvcache from prefill instance", tell=False
                )
                self._let_go(room)
            else:
                self._check(awaited, now_s)
        for room, (_ticket, since_s) in list(self._given_up.items()):
            if now_s - since_s > DEFERRED_RELEASE_S:
                log.warning("Deferred KV release for room %d timed out", room)
                self._let_go(room)

    def _check(self, awaited: Awaited, now_s: float) -> None:
        """Verify an arrived blob: milliseconds, so beside the step if there is one."""
        request, ticket = awaited.request, awaited.ticket
        try:
            header, payload = open_blob(
                self._landing.view(ticket),
                identity=self._model.identity,
                room=request.room,
                tokens=len(request.prompt),
            )
            request.first_score = scoring.unpacked(header.extra)
        except (KvMismatchError, msgspec.MsgspecError) as problem:
            self._landing.acknowledge(ticket, consumed=False)
            self._fail(request, f"the KV that arrived was refused: {problem}", tell=False)
            self._let_go(request.room)
            return
        del self.transfer[request.room]
        self._metrics.stage.observe(now_s - awaited.since_s, stage="decode_transferred")
        request.enter(Phase.RUNNING, now_s)
        self._landed.append(Landed(request, ticket, header, payload))

    def tend(self, now_s: float) -> None:
        """Release, admit, import, time out."""
        for request in self._left:
            if request.sequence >= 0:
                self.sequences.release(request.sequence)
                request.sequence = -1
            self._ended(request)
        self._left.clear()
        self.running = [request for request in self.running if request.live]
        while self._landed:
            self._import(self._landed.popleft(), now_s)
        self._resume()
        self._admit(now_s)
        for awaited in list(self.transfer.values()):
            waited_s = now_s - awaited.since_s
            if waited_s > self._timeouts.waiting_s:
                reason = timed_out(awaited.request.room, waited_s, "WaitingForInput")
                self._fail(awaited.request, reason)

    def _admit(self, now_s: float) -> None:
        """Reserve all a request needs, then tell its prefill; first come, first served."""
        for request in list(self.prealloc):
            if request.fake:
                self._fake(request, now_s)
                continue
            if self.retracted or self._busy() >= self._settings.max_running_requests:
                return
            if not self._links.up(request.bootstrap):
                continue
            tokens = len(request.prompt) + min(
                request.max_new_tokens, self._settings.num_reserved_decode_tokens
            )
            held = self.sequences.acquire((), tokens)
            if held is None:
                return
            ticket = self._landing.reserve(request.room)
            if ticket is None:
                self.sequences.release(held.sequence)
                return
            request.sequence = held.sequence
            self.prealloc.remove(request)
            self._metrics.stage.observe(now_s - request.phase_since_s, stage="decode_bootstrap")
            request.enter(Phase.TRANSFER, now_s)
            self.transfer[request.room] = Awaited(request, ticket, now_s)
            self._moved_s = now_s
            self._links.send(
                request.bootstrap,
                RoomMetadata(self._links.agent, request.room, ticket.slot, ticket.generation),
            )

    def _busy(self) -> int:
        return len(self.transfer) + len(self._landed) + sum(not r.fake for r in self.running)

    def _fake(self, request: Request, now_s: float) -> None:
        """A fake transfer brings nothing: run the last prompt token alone, for one real step."""
        # Promised nothing: a probe must not queue behind rooms that only wait (SGLang's `/health`).
        held = self.sequences.acquire((), 0)
        if held is None:
            return
        self.prealloc.remove(request)
        request.sequence = held.sequence
        request.enter(Phase.RUNNING, now_s)
        self.running.append(request)

    def _import(self, landed: Landed, now_s: float) -> None:
        """Take the KV over, tell the prefill, and give out the first token."""
        request, ticket = landed.request, landed.ticket
        problem: ModelError | None = None
        if request.live:
            try:
                self._model.import_kv(request.sequence, landed.payload)
            except ModelError as refused:
                problem = refused
        self._landing.acknowledge(ticket, consumed=problem is None)
        landed.payload.release()
        self._landing.release(ticket)
        if problem is not None:
            self._fail(request, f"the KV that arrived was refused: {problem}", tell=False)
        if not request.live:
            return
        request.cached = landed.header.cached_tokens
        self.running.append(request)
        self._take(request, landed.header.first_token)
        self.streaming.emit(request, request.first_score, now_s)

    def _resume(self) -> None:
        """Bring back retracted requests, oldest first, when their cells are free again."""
        while self.retracted and len(self.running) < self._settings.max_running_requests:
            request, blob = self.retracted[0]
            if not request.live:
                self.retracted.popleft()
                continue
            length = len(request.prompt) + len(request.output)
            left = request.max_new_tokens - len(request.output)
            held = self.sequences.acquire(
                (), length + min(left, self._settings.num_reserved_decode_tokens)
            )
            if held is None:
                return
            self.retracted.popleft()
            self._model.import_kv(held.sequence, memoryview(blob))
            request.sequence = held.sequence
            request.enter(Phase.RUNNING, time.monotonic())
            self.running.append(request)

    def _retract(self, request: Request) -> None:
        """Take a running request's KV out into ordinary memory."""
        blob = bytearray(self._model.kv_size(request.sequence))
        size = self._model.export_kv(request.sequence, memoryview(blob))
        self.sequences.release(request.sequence)
        request.sequence = -1
        request.enter(Phase.RETRACTED, time.monotonic())
        self.running.remove(request)
        self.retracted.append((request, bytes(blob[:size])))
        self._metrics.retracted.add()
        log.warning("KV cache pool is full. Retract requests. #retracted_reqs: 1")

    def _secure(self) -> None:
        """Promise every running request its next token, retracting the newest while that fails."""
        for request in list(self.running):
            while (
                request.phase is Phase.RUNNING
                and not request.fake
                and not self.sequences.promise(
                    request.sequence, self._model.length(request.sequence) + 1
                )
            ):
                self._retract(next(r for r in reversed(self.running) if not r.fake))

    def plan(self, now_s: float) -> Step | None:
        """One token of every running request."""
        self._secure()
        step = Step([], [], now_s)
        for request in self.running:
            tokens = request.output[-1:] or request.prompt[-1:]
            position = self._model.length(request.sequence)
            step.feeds.append(Feed(request.sequence, tokens, position, "last"))
            step.requests.append(request)
        return step if step.feeds else None

    def sample(self, step: Step, logits: list[Logits]) -> None:
        """Sample every row whose request still lives; the next step feeds these tokens."""
        step.rows = []
        for request, rows in zip(step.requests, logits, strict=True):
            if not request.live:
                step.rows.append(None)
                continue
            position = len(request.output)
            token = sample(rows[-1], request.sampling, scoring.rng_of(request.sampling, position))
            self._take(request, token)
            step.rows.append((token, rows[-1] if request.scores is not None else None))

    def _take(self, request: Request, token: int) -> None:
        """Append a token; a request that ends by it leaves the batch at once."""
        request.output.append(token)
        request.finish = request.finish_at(token)
        if request.finish is not None:
            self.running.remove(request)

    def process(self, step: Step) -> None:
        """Text, stop strings, streams, counters, gauges, the log."""
        for request, row in zip(step.requests, step.rows or (), strict=True):
            if row is None or not request.live:
                continue
            token, logits = row
            scored = None
            if logits is not None and request.scores is not None:
                scored = scoring.score(logits, token, request.scores.top)
            self.streaming.emit(request, scored, step.ended_s)
        self.streaming.count(step)

    def finished(self, request: Request) -> None:
        """A request gave its last output."""
        self._end(request)

    def refused(self, step: Step, problem: ModelError) -> None:
        """The model refused a step: make room by retracting, or fail its requests."""
        if isinstance(problem, KvExhaustedError) and len(self.running) > 1:
            self._retract(self.running[-1])
            return
        for request in step.requests:
            message = f"the model refused the step: {problem}"
            self._outbox.put(request, Output(finish=Finish("abort", message=message)))
            self._end(request)

    def idle(self, now_s: float) -> float:
        """Poll fast while something moved lately, slowly for what hangs, not at all otherwise."""
        if self._left or self._landed:
            return 0.0
        self.streaming.idle(now_s, queued=bool(self.prealloc or self.transfer or self.retracted))
        if self.transfer or self._given_up:
            return POLL_S if now_s - self._moved_s < POLL_SLOW_AFTER_S else POLL_SLOW_S
        return 1.0
