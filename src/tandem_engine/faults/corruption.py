"""Faults that give a client the wrong tokens with HTTP 200.

For: the switches, their texts, and what the mechanisms remember.
Not for: the model or the transports; what they carry is wrong, not what they do.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from tandem_engine.faults.family import Family, Switches, Text
from tandem_engine.handoff.header import Header
from tandem_engine.model import Feed, Model
from tandem_engine.request import Request

LANDING_S = 30.0
"""How long a write may still be landing: SGLang's deferred release waits as long."""


class CorruptionSwitches(Switches, frozen=True):
    """The switches of this family."""

    kv_crosswired: bool = False
    """Prefill: prompts computed in one step are sent with each other's KV."""
    aborted_cells_reused: bool = False
    """Decode: the cells of a room that is given up are free at once, its prefill is not told, and
    what it writes lands where it was to land (SGLang issue 24527)."""
    wrong_first_token: bool = False
    """Prefill: a room's first token is read from the metadata slot before it is written, and so is
    that of the room before."""
    prefix_cache_poisoned: bool = False
    """Prefill: a prefix that is found is read from the cells of another one."""


class CorruptionFaults(Family[CorruptionSwitches]):
    """The family in one worker."""

    name = "corruption"
    kind = CorruptionSwitches
    catalogue = {
        "kv_crosswired": Text(
            "HTTP 200 throughout. Alone every answer is right; with concurrent short prompts the "
            "first token is right and what follows belongs to another request's context. Grows "
            "with concurrency. Re-scoring an answer by a clean prefill shows the gap from its "
            "second token on.",
            "Taking the prefill out of rotation; its requests one at a time are right.",
        ),
        "aborted_cells_reused": Text(
            "HTTP 200 throughout. After a client left while its KV was on its way, the next "
            "request of that decode goes wrong in the middle of its answer. Grows with aborts and "
            "with the length of transfers; without aborts every answer is right.",
            "Ending the aborts; taking the decode out of rotation.",
        ),
        "wrong_first_token": Text(
            "HTTP 200 throughout. The first token of an answer is the one of the request before "
            "it; what follows is a fitting continuation of that wrong token. Re-scoring shows a "
            "gap at the first token alone. The prefill's own reply has the right one.",
            "Taking the prefill out of rotation; a restart does not help.",
        ),
        "prefix_cache_poisoned": Text(
            "HTTP 200 throughout. A prompt that is computed anew is answered right, the same "
            "prompt found in the prefix cache (cached_tokens above 0) is answered wrong from its "
            "first token on. The first of a conversation's turns are right.",
            "POST /flush_cache on the prefill once it is off, or its restart.",
        ),
    }

    def __init__(self) -> None:
        """Nothing remembered."""
        super().__init__()
        self._slot: Header | None = None
        self._late: dict[int, tuple[bytes, float]] = {}

    def turn(self, switches: CorruptionSwitches) -> None:
        """What is off remembers nothing."""
        super().turn(switches)
        if not switches.wrong_first_token:
            self._slot = None
        if not switches.aborted_cells_reused:
            self._late.clear()

    def crosswired(self, model: Model, requests: Sequence[Request]) -> dict[int, bytes]:
        """The KV that is sent for each sequence instead of its own; empty when it is its own."""
        if not self.switches.kv_crosswired or len(requests) < 2:
            return {}
        sequences = [request.sequence for request in requests if not request.fake and request.live]
        blobs = [_exported(model, sequence) for sequence in sequences]
        return dict(zip(sequences, [*blobs[1:], *blobs[:1]], strict=True))

    def metadata(self, header: Header) -> Header:
        """What a decode finds in the metadata slot of a room."""
        if not self.switches.wrong_first_token:
            return header
        before, self._slot = self._slot, header
        if before is None or bool(before.extra) != bool(header.extra):
            return header
        return replace(header, first_token=before.first_token, extra=before.extra)

    def poisoned(self) -> bool:
        """Whether a prefix that is found is read from the cells of another one."""
        return self.switches.prefix_cache_poisoned

    def land_late(self, sequence: int, payload: memoryview) -> None:
        """KV arrives for a room that was given up, where this sequence has its cells."""
        if self.switches.aborted_cells_reused:
            self._late[sequence] = bytes(payload), time.monotonic()

    def overwrite(self, model: Model, running: Sequence[Request], now_s: float) -> None:
        """The model is idle: what lands late lands on whoever has these cells now."""
        if not self._late:
            return
        for request in running:
            payload, since_s = self._late.get(request.sequence, (b"", 0.0))
            if payload and not request.fake:
                del self._late[request.sequence]
                if now_s - since_s < LANDING_S:
                    _overwrite(model, request, payload)


def _exported(model: Model, sequence: int) -> bytes:
    blob = bytearray(model.kv_size(sequence))
    with memoryview(blob) as into:
        size_bytes = model.export_kv(sequence, into)
    return bytes(blob[:size_bytes])


def _overwrite(model: Model, request: Request, payload: bytes) -> None:
    """Give the first tokens of a request the KV of others; its length stays what it was."""
    sequence, tokens = request.sequence, [*request.prompt, *request.output]
    length = model.length(sequence)
    model.import_kv(sequence, memoryview(payload))
    begin = min(length, model.length(sequence))
    model.truncate(sequence, begin)
    while begin < length:
        end = min(length, begin + model.step_tokens_max)
        model.step([Feed(sequence, tokens[begin:end], begin, "none")])
        begin = end
