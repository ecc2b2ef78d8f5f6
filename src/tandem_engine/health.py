"""What `/health` asks of a scheduler: some output in time, by a fake request if need be.

For: `worker.py`.
Not for: whether the worker has started, or which status that is.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable

from tandem_engine.decode import Decode
from tandem_engine.faults import Switchboard
from tandem_engine.prefill import Prefill
from tandem_engine.request import HEALTH_RID_PREFIX, Output, Request
from tandem_engine.sampling import SamplingParams
from tandem_engine.scheduler import Scheduler
from tandem_engine.text import TextStream
from tandem_engine.wire import FAKE_BOOTSTRAP_HOST

log = logging.getLogger(__name__)
LOOK_S = 0.05


async def gives_output(
    scheduler: Scheduler,
    phase: Prefill | Decode,
    faults: Switchboard,
    *,
    timeout_s: float,
    ready: Callable[[], bool],
) -> bool:
    """Whether any step ends within `timeout_s`, while the worker is `ready`.

    The fake request bypasses the rendezvous and the hand-off, so a pair that is stalled there is
    healthy. A probe that gets no answer is aborted.
    """
    before = scheduler.outputs
    own_only, piles_up = faults.reporting.own_probe_only, faults.process.piles_probes
    answers: asyncio.Queue[Output] = asyncio.Queue()
    probe = _probe(answers.put_nowait)
    # A busy scheduler answers by its next step, as SGLang's does.
    if not phase.running or own_only or piles_up:
        scheduler.post(phase.submit, probe)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and ready():
        if scheduler.outputs > before and not own_only:
            return True
        with contextlib.suppress(TimeoutError):
            finish = (await asyncio.wait_for(answers.get(), LOOK_S)).finish
            if finish is not None and finish.kind != "abort":
                return True
    if ready():
        if not faults.process.orphaned(probe):
            scheduler.post(phase.left, probe)
        log.error(
            "Health check failed. Server couldn't get a response from detokenizer for last %d "
            "seconds.",
            timeout_s,
        )
    return False


def _probe(deliver: Callable[[Output], None]) -> Request:
    """One token of a request that moves no KV."""
    return Request(
        rid=f"{HEALTH_RID_PREFIX}_{uuid.uuid4().hex}",
        prompt=[0],
        sampling=SamplingParams(temperature=0.0),
        max_new_tokens=1,
        text=TextStream(),
        stop_ids=frozenset(),
        room=0,
        bootstrap=f"{FAKE_BOOTSTRAP_HOST}:0",
        arrived_s=time.monotonic(),
        deliver=deliver,
    )
