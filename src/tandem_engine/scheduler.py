"""The step loop of a worker: one thread decides, one computes.

While step n computes (ctypes releases the GIL), the results of step n-1 are processed (text, stop
strings, streams, metrics) and the next admissions are prepared. `--disable-overlap-schedule` does
it all in sequence on one thread. Both give the same tokens: what a step needs of the one before,
its sampled tokens, is taken before it starts.

For: the loop, its inbox, and the thread that computes.
Not for: what a step contains (`prefill.py`, `decode.py`).
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from tandem_engine.model import Feed, Logits, Model, ModelError
from tandem_engine.request import Outbox, Request

log = logging.getLogger(__name__)
WAIT_S_MAX = 1.0
STEP_S_MAX = 5.0
"""A step that takes longer will not end: the longest one, 256 tokens, takes two seconds."""
HELD_S = 0.02
BUSY = bytes(1 << 20)
BESIDE_S = 0.005
"""How often `prepare` looks around while a step computes; events wake it at once."""

Result = list[Logits] | BaseException
"""What a step gave: logits per feed, or why there are none."""


@dataclass(slots=True)
class Step:
    """One batch: a feed per request, in the same order."""

    feeds: list[Feed]
    requests: list[Request]
    begun_s: float
    ended_s: float = 0.0
    rows: "list[Any] | None" = None
    """What `sample` leaves for `process`, per request."""


class PhaseLoop(Protocol):
    """What the loop drives: the prefill or the decode phase.

    Handlers that other threads post, `prepare` and `process` never touch the model: it may be
    computing.
    """

    def tend(self, now_s: float) -> None:
        """The model is idle: release, import, export, settle, time out."""
        ...

    def plan(self, now_s: float) -> Step | None:
        """The model is idle: the next batch, or None when there is nothing to compute."""
        ...

    def prepare(self, now_s: float) -> None:
        """The model may be computing: get the next admissions ready."""
        ...

    def sample(self, step: Step, logits: list[Logits]) -> None:
        """Take what the next step needs from the results; nothing else."""
        ...

    def process(self, step: Step) -> None:
        """The model may be computing: everything else about the results."""
        ...

    def refused(self, step: Step, problem: ModelError) -> None:
        """The model refused a step; nothing of it was applied."""
        ...

    def idle(self, now_s: float) -> float:
        """Nothing to compute: how long to wait for the next event at most, seconds."""
        ...


class Compute:
    """The thread that runs `Model.step` beside the scheduler's."""

    def __init__(
        self,
        step: Callable[[list[Feed]], list[Logits]],
        finished: Callable[[Result], None],
        name: str,
    ) -> None:
        """Start the thread; `finished` is called on it with what each step gave."""
        self._step = step
        self._finished = finished
        self._work: queue.SimpleQueue[list[Feed] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, feeds: list[Feed]) -> None:
        """Begin a step; the model belongs to the compute thread until it has finished."""
        self._work.put(feeds)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after what it is doing; whether it did in time."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (feeds := self._work.get()) is not None:
            try:
                self._finished(self._step(feeds))
            except BaseException as problem:  # noqa: BLE001 - handed over and raised by the scheduler
                self._finished(problem)


class Scheduler:
    """Drives one phase over one model on a thread of its own."""

    def __init__(
        self,
        model: Model,
        phase: PhaseLoop,
        outbox: Outbox,
        *,
        overlap: bool,
        died: Callable[[BaseException], None],
        held: Callable[[Sequence[Feed]], str],
        rank: str,
    ) -> None:
        """`died` is called on the scheduler's thread when the loop breaks by a bug.

        `held` says whether a step must not return now: it `blocks` or `spins` until it may. `rank`
        names the thread that computes among other ranks.
        """
        self._model = model
        self._phase = phase
        self._outbox = outbox
        self._inbox: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]]
        self._inbox = queue.SimpleQueue()
        self._result: Result | None = None
        self._held = held
        self._ending = threading.Event()
        self._compute = (
            Compute(self._forward, self._computed, f"compute{rank}") if overlap else None
        )
        self._died = died
        self._stopping = False
        self.outputs = 0
        """Steps that gave a result: what `/health` waits for."""
        self.stepping = False
        """Whether a step is being computed."""
        self.idle_s = 0.0
        """Time spent waiting for something to do."""
        name = "scheduler" if overlap else f"scheduler{rank}"
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()

    def post(self, handler: Callable[..., None], *arguments: object) -> None:
        """Have `handler` called on the scheduler's thread; from any thread."""
        self._inbox.put((handler, arguments))

    def let_go(self) -> None:
        """The worker ends: a step that is held returns."""
        self._ending.set()

    def stop(self, timeout_s: float = STEP_S_MAX) -> bool:
        """End the loop after the current step; whether that ended in time and nothing runs."""
        self.let_go()
        self.post(self.end)
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        return (self._compute is None or self._compute.stop(timeout_s if ended else 0.0)) and ended

    def end(self) -> None:
        """On the scheduler's thread: let the loop return after the current step."""
        self._stopping = True

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as problem:  # noqa: BLE001 - reported; a dead loop must not be silent
            self._died(problem)

    def _run(self) -> None:
        previous: Step | None = None
        wait_s = 0.0
        while True:
            before_s = time.monotonic()
            self._drain(wait_s)
            if self._stopping:
                return
            now_s = time.monotonic()
            if wait_s > 0:
                self.idle_s += now_s - before_s
            self._phase.prepare(now_s)
            self._phase.tend(now_s)
            step = self._phase.plan(now_s)
            if step is None and previous is not None:
                self._phase.process(previous)
                previous, wait_s = None, 0.0
            elif step is None:
                wait_s = min(WAIT_S_MAX, max(0.0, self._phase.idle(now_s)))
            else:
                previous, wait_s = self._advance(step, previous), 0.0
            self._outbox.flush()

    def _advance(self, step: Step, previous: Step | None) -> Step | None:
        """Compute one step; the step that is still to be processed, if any."""
        self.stepping = True
        try:
            if self._compute is None:
                logits = self._forward(step.feeds)
            else:
                self._compute.start(step.feeds)
                logits = self._beside(previous)
        except ModelError as problem:
            self._phase.refused(step, problem)
            return None
        finally:
            self.stepping = False
        step.ended_s = time.monotonic()
        self._phase.sample(step, logits)
        self.outputs += 1
        if self._compute is None:
            self._phase.process(step)
            return None
        return step

    def _beside(self, previous: Step | None) -> list[Logits]:
        """Everything that can be done while a step computes; its logits."""
        if previous is not None:
            self._phase.process(previous)
        while self._result is None:
            self._phase.prepare(time.monotonic())
            self._outbox.flush()
            self._drain(BESIDE_S)
        result, self._result = self._result, None
        if isinstance(result, BaseException):
            raise result
        return result

    def _forward(self, feeds: list[Feed]) -> list[Logits]:
        """One forward pass, on the thread that computes."""
        while (how := self._held(feeds)) and not self._ending.is_set():
            if how == "spins":
                blake2b(BUSY)  # a core's work, without the interpreter's lock
            else:
                self._ending.wait(HELD_S)
        return self._model.step(feeds)

    def _computed(self, result: Result) -> None:
        """On the compute thread: hand the result over and wake the loop."""
        self.post(self._take, result)

    def _take(self, result: Result) -> None:
        self._result = result

    def _drain(self, wait_s: float) -> None:
        """Run everything posted; wait for the first up to `wait_s`."""
        try:
            handler, arguments = (
                self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            )
            while True:
                handler(*arguments)
                handler, arguments = self._inbox.get_nowait()
        except queue.Empty:
            return


async def watchdog(scheduler: Scheduler, timeout_s: float, fired: Callable[[], None]) -> None:
    """Tell when one step takes longer than `timeout_s`; 0 never does.

    SGLang's scheduler watchdog (protocol reference section 5): looks every half of the time, and
    only while a batch is current, so a worker that has nothing to compute is never found stuck.
    """
    if timeout_s <= 0:
        return
    seen, since_s = -1, time.monotonic()
    while (
        not scheduler.stepping
        or scheduler.outputs != seen
        or (time.monotonic() - since_s <= timeout_s)
    ):
        if not scheduler.stepping or scheduler.outputs != seen:
            seen, since_s = scheduler.outputs, time.monotonic()
        await asyncio.sleep(timeout_s / 2)
    log.error("Scheduler watchdog timeout (self.watchdog_timeout=%s, self.soft=False)", timeout_s)
    fired()
