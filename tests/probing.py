"""What tests of probes share: a clock, an answer, and who may be probed."""

import asyncio

from tandem.ports import Completion
from tandem.records import Trait
from tandem.records import vocabulary as v

DONE = Completion(
    status="completed", token_ids=(1, 2), latency_s=0.1, kv_moved=True, prompt_tokens=24
)


class Clock:
    """Time that moves by sleeping; a sleeper goes on at once unless `held`."""

    def __init__(self):
        self.at = 100.0

    def now(self):
        return self.at

    async def sleep(self, seconds):
        # Whatever is ready runs before the time is over.
        for _ in range(10):
            await asyncio.sleep(0)
        self.at += seconds


def safe(value=True, because=""):
    def safety(member):
        return Trait(
            subject=member, name=v.T_ACTIVE_PROBE_SAFE, at=0.0, value=value, because=because
        )

    return safety
