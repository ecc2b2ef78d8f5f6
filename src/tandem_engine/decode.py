"""The decode phase: KV and a first token in, tokens out.

A request waits in the prealloc queue until its prefill is known and a sequence, cells and a landing
slot are free; only then is the prefill told where the KV goes. It waits in the transfer queue for
the KV, is imported between two steps, acknowledged, and runs in a batch with the others to its end.

For: the queues, admission, the steps. Everything here runs on the scheduler's thread.
Not for: connections (`links.py`), landing slots (`arrivals.py`), what comes of tokens
(`streaming.py`).
"""

import logging
import time
from collections import deque
from collections.abc import Callable

from tandem_engine import scoring
from tandem_engine.arrivals import Arrivals, Landed
from tandem_engine.config import Settings, Timeouts
from tandem_engine.faults import Switchboard
from tandem_engine.handoff import Landing
from tandem_engine.handoffs import timed_out
from tandem_engine.links import Links
from tandem_engine.metrics import Metrics
from tandem_engine.model import Feed, KvExhaustedError, Logits, Model, ModelError
from tandem_engine.request import Finish, Outbox, Output, Phase, Request
from tandem_engine.retraction import Retraction
from tandem_engine.sampling import sample
from tandem_engine.scheduler import Step
from tandem_engine.sequences import Sequences
from tandem_engine.streaming import Streaming

log = logging.getLogger(__name__)
POLL_S = 0.002
POLL_SLOW_S = 0.01
POLL_SLOW_AFTER_S = 1.0
UNTOLD_MAX = 1024
"""Rooms that ended while their prefill was not reached, per prefill."""
ABORTED = "Aborted by AbortReq."


class Decode:
    """Drives the decode phase over one model."""

    def __init__(  # noqa: PLR0913 - one of each of what a phase runs on
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
        faults: Switchboard,
    ) -> None:
        """`ended` hears of every request that holds nothing any more."""
        self._model = model
        self._settings = settings
        self._timeouts = timeouts
        self._metrics = metrics
        self._outbox = outbox
        self._links = links
        self._ended = ended
        self._faults = faults
        self.sequences = Sequences(model, keep=0)
        self.prealloc: deque[Request] = deque()
        self.arrivals = Arrivals(landing, links, model.identity, self._fail, faults)
        self.running: list[Request] = []
        self.retraction = Retraction(
            model, self.sequences, metrics, settings.num_reserved_decode_tokens
        )
        self._left: list[Request] = []
        self._untold: dict[str, deque[int]] = {}
        self.streaming = Streaming(self, model, settings, metrics, outbox)

    # --- Events: the model may be computing ---

    def submit(self, request: Request) -> None:
        """A client's request."""
        request.enter(Phase.PREALLOC, time.monotonic())
        if request.fake:
            self.prealloc.appendleft(request)
            return
        self.prealloc.append(request)
        if not self._links.up(request.bootstrap):
            self._untold.setdefault(request.bootstrap, deque(maxlen=UNTOLD_MAX))
        self._links.want(request.bootstrap)

    def abort(self, rid: str, *, everything: bool = False) -> None:
        """A client left, or asked for an abort by (the beginning of) its request id."""
        for request in self.requests():
            if everything or request.rid.startswith(rid):
                self.left(request)

    def refuse(self, room: int, bootstrap: str, _reason: str = "") -> None:
        """This side of a room ended before its prefill heard of it: it hears of that.

        A prefill that is not reached now hears of it when it is, if it was ever reached.
        """
        if self._links.up(bootstrap):
            self.arrivals.refuse(room, bootstrap)
        elif self._links.known(bootstrap) or bootstrap in self._untold:
            self._untold.setdefault(bootstrap, deque(maxlen=UNTOLD_MAX)).append(room)

    def left(self, request: Request) -> None:
        """The client of this request is gone."""
        if not request.live:
            return
        self._faults.compute.aborted()
        self._metrics.aborted.add()
        if request.phase is Phase.TRANSFER:
            self._fail(request, ABORTED)
        else:
            self._outbox.put(request, Output(finish=Finish("abort", message=ABORTED)))
            self._end(request)

    def room_failed(self, room: int, reason: str) -> None:
        """The prefill says that no KV will come."""
        self.arrivals.fail(room, reason)
        for request in [one for one in self.prealloc if one.room == room and not one.fake]:
            self._fail(request, reason)

    def abort_acked(self, room: int) -> None:
        """The prefill says that it will not write for this room (any more)."""
        self.arrivals.let_go(room)

    def link_up(self, bootstrap: str) -> None:
        """A prefill is reached: it hears what ended meanwhile, and the next `tend` admits."""
        for room in self._untold.pop(bootstrap, ()):
            self.arrivals.refuse(room, bootstrap)

    def link_lost(self, bootstrap: str, reason: str) -> None:
        """A prefill is gone, and its halves of what waits here with it; it is looked for again."""
        self.arrivals.lost(bootstrap, reason)
        self.link_failed(bootstrap, reason)

    def link_failed(self, bootstrap: str, reason: str) -> None:
        """A prefill could not be found at all."""
        self._untold.pop(bootstrap, None)
        for request in list(self.prealloc):
            if request.bootstrap == bootstrap:
                self._fail(request, reason)

    def flush_cache(self) -> None:
        """A decode keeps no prefixes."""

    def requests(self) -> list[Request]:
        """Every request that is in a queue or runs."""
        return [
            *self.prealloc,
            *(awaited.request for awaited in self.arrivals.awaited.values()),
            *(landed.request for landed in self.arrivals.landed),
            *self.running,
            *self.retraction.requests(),
        ]

    def _fail(self, request: Request, reason: str) -> None:
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
        self._end(request)

    def _end(self, request: Request) -> None:
        """Forget a request; its sequence goes back when the model idles."""
        if not request.live:
            return
        phase, now_s = request.phase, time.monotonic()
        request.enter(Phase.ENDED, now_s)
        if phase is Phase.PREALLOC:
            self.prealloc.remove(request)
            if not request.fake:
                self.refuse(request.room, request.bootstrap)
        elif phase is Phase.TRANSFER:
            self.arrivals.give_up(request, now_s)
        self._left.append(request)

    # --- Between and beside steps ---

    def prepare(self, now_s: float) -> None:
        """Take note of what arrived."""
        self.arrivals.poll(now_s)

    def tend(self, now_s: float) -> None:
        """Release, admit, import, time out."""
        for request in self._left:
            if request.sequence >= 0:
                self.sequences.release(request.sequence)
                request.sequence = -1
            self._ended(request)
        self._left.clear()
        self.running = [request for request in self.running if request.live]
        while self.arrivals.landed and not self._blocked:
            self._import(self.arrivals.landed.popleft(), now_s)
        self._faults.corruption.overwrite(self._model, self.running, now_s)
        self.retraction.resume(self.running, self._settings.max_running_requests)
        self._admit(now_s)
        for awaited in list(self.arrivals.awaited.values()):
            waited_s = now_s - awaited.since_s
            if waited_s > self._timeouts.waiting_s:
                reason = timed_out(awaited.request.room, waited_s, "WaitingForInput")
                self._fail(awaited.request, reason)

    def _admit(self, now_s: float) -> None:
        """Reserve all a request needs, then tell its prefill; first come, first served."""
        orphans = self._faults.process.orphans
        for request in list(self.prealloc):
            if request.fake:
                if request not in orphans:
                    self._fake(request, now_s)
                continue
            if self.retraction or self._busy() >= self._settings.max_running_requests:
                return
            if not self._links.up(request.bootstrap):
                continue
            refusal = self._links.refused(request.bootstrap)
            if refusal:
                self._fail(request, refusal)
                continue
            tokens = len(request.prompt) + min(
                request.max_new_tokens, self._settings.num_reserved_decode_tokens
            )
            held = self.sequences.acquire((), tokens)
            if held is None:
                return
            since_s = request.phase_since_s
            if not self.arrivals.reserve(request, now_s):
                self.sequences.release(held.sequence)
                return
            request.sequence = held.sequence
            self.prealloc.remove(request)
            self._metrics.stage.observe(now_s - since_s, stage="decode_bootstrap")

    @property
    def _blocked(self) -> bool:
        """Whether KV that arrived has to wait for requests that were retracted."""
        return self._faults.resources.blocks_arrivals(len(self.retraction))

    def _busy(self) -> int:
        coming = len(self.arrivals.awaited) + len(self.arrivals.landed)
        return coming + sum(not request.fake for request in self.running)

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
        request = landed.request
        problem: ModelError | None = None
        if request.live:
            try:
                self._model.import_kv(request.sequence, landed.payload)
            except ModelError as refused:
                problem = refused
        self.arrivals.settle(landed, taken=problem is None)
        if problem is not None:
            self._fail(request, f"the KV that arrived was refused: {problem}")
        if not request.live:
            return
        self._metrics.stage.observe(now_s - request.phase_since_s, stage="decode_waiting")
        request.cached = landed.header.cached_tokens
        self.running.append(request)
        self._take(request, landed.header.first_token)
        self.streaming.emit(request, request.first_score, now_s)

    def plan(self, now_s: float) -> Step | None:
        """One token of every running request."""
        self.retraction.secure(self.running)
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
            self.retraction.retract(self.running)
            return
        for request in step.requests:
            message = f"the model refused the step: {problem}"
            self._outbox.put(request, Output(finish=Finish("abort", message=message)))
            self._end(request)

    def idle(self, now_s: float) -> float:
        """Poll fast while something moved lately, slowly for what hangs, not at all otherwise."""
        arrivals = self.arrivals
        if self._left or (arrivals.landed and not self._blocked):
            return 0.0
        queued = bool(self.prealloc or arrivals.awaited or self.retraction)
        self.streaming.idle(now_s, queued=queued)
        if arrivals.polled or arrivals.landed:
            return POLL_S if now_s - arrivals.moved_s < POLL_SLOW_AFTER_S else POLL_SLOW_S
        return 1.0
