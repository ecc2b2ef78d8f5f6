"""A watch as a service: told to systemd turn by turn, with metrics of its own.

For: what stands around `loop.watch`. Not for: watching.
"""

import dataclasses

from tandem.loop import watch
from tandem.parts import Parts, Tell
from tandem.service.attendance import Attendance
from tandem.service.counts import Counted, Counts
from tandem.service.notify import Notifier
from tandem.service.serving import metrics_served

__all__ = ["Notifier", "serve"]


async def serve(
    parts: Parts,
    *,
    hunch: str | None,
    tell: Tell,
    notifier: Notifier,
    turns_max: int | None = None,
) -> None:
    """Watch as `loop.watch` does, and let systemd and `[watch] metrics_port` know how it goes.

    Raises `RefusedError` when another watch runs, `WorldError` when the port is taken.
    """
    if parts.store.holder("watch") is not None:
        with parts.store.lock("watch"):  # refuses, by the name of the other watch
            pass
    deployment = parts.settings.deployment.name
    counts = Counts(deployment, parts.clock.now())
    parts = dataclasses.replace(parts, collector=Counted(parts.collector, counts))
    async with metrics_served(parts, counts, parts.settings.watch.metrics_port):
        attendant = Attendance(deployment, notifier, counts)
        await watch(parts, hunch=hunch, tell=tell, turns_max=turns_max, attendant=attendant)
