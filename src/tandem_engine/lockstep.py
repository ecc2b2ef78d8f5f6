"""A model that N ranks run in lock step: rank 0's own model, and N-1 processes beside it.

Every step is broadcast, computed by all, and compared before its logits are given out. A follower
that dies ends the server, as SGLang's subprocess watchdog has it. With one rank none of this
exists.

For: `worker.py`, under `--ranks`.
Not for: the group itself (`collective.py`), or what the others compute (`follower.py`).
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

from tandem_engine.collective import (
    Apart,
    Cut,
    Filled,
    Hub,
    Joined,
    Shared,
    Sizes,
    batch_id,
    batch_of,
)
from tandem_engine.model import Feed, Logits, Model, ModelError

log = logging.getLogger(__name__)
PACKAGES = Path(__file__).resolve().parent.parent
END_S = 2.0
"""How long followers have to end by themselves once the group is closed."""


class Ranks:
    """The follower processes of one engine and the group that joins them to rank 0."""

    def __init__(self, hub: Hub, processes: Sequence[asyncio.subprocess.Process]) -> None:
        """Use `start_ranks`."""
        self.hub = hub
        self._processes = list(processes)
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1, 2, ..."""
        return [process.pid for process in self._processes]

    async def watch(self, died: Callable[[], None]) -> None:
        """Wait for the first follower to end, and tell; returns when they end as they should."""
        waits = {asyncio.ensure_future(p.wait()): p for p in self._processes}
        try:
            # A rank lives as long as its engine: there is no time after which it should have ended.
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._closed:
            return
        process = waits[done.pop()]
        rank = self._processes.index(process) + 1
        log.error(
            "Subprocess scheduler_TP%d (pid=%d) crashed with exit code %d. Triggering SIGQUIT for "
            "cleanup...",
            rank,
            process.pid,
            process.returncode,
        )
        died()

    def close(self) -> None:
        """Close the group, from any thread; a step that waits for a rank fails at once."""
        self._closed = True
        self.hub.close()

    async def end(self) -> None:
        """Close the group and wait for the followers; kill those that stay."""
        self.close()
        waits = [asyncio.ensure_future(process.wait()) for process in self._processes]
        _, late = await asyncio.wait(waits, timeout=END_S)
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if late:
            await asyncio.wait(late, timeout=END_S)


async def start_ranks(count: int, sizes: Sizes) -> Ranks:
    """Start `count` followers; they load while rank 0 does. Raises `OSError`."""
    hubs: list[socket.socket] = []
    processes: list[asyncio.subprocess.Process] = []
    paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    for rank in range(1, count + 1):
        hub, spoke = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hubs.append(hub)
        with spoke:
            processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "tandem_engine.follower",
                    str(rank),
                    str(spoke.fileno()),
                    pass_fds=[spoke.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env=environment,
                )
            )
    ranks = Ranks(Hub(hubs), processes)
    ranks.hub.broadcast(sizes)
    return ranks


class LockstepModel:
    """A `Model` whose every step all ranks take together; see `Model` for the contract."""

    def __init__(self, model: Model, hub: Hub, apart: Callable[[int], tuple[int, Apart]]) -> None:
        """Wait for the other ranks. `apart` says which rank leaves the collective, if any."""
        self._model = model
        self._hub = hub
        self._apart = apart
        self._number = 0
        self.identity = model.identity
        self.vocabulary = model.vocabulary
        self.context_length = model.context_length
        self.sequences_max = model.sequences_max
        self.cells = model.cells
        self.step_tokens_max = model.step_tokens_max
        self.kv_bytes_max = model.kv_bytes_max
        self.end_ids = model.end_ids
        self.chat_template = model.chat_template
        hub.all_gather(Joined(0, "start", ""))

    def step(self, feeds: Sequence[Feed]) -> list[Logits]:
        """Broadcast, compute, gather; raises `CollectiveError` when the ranks differ."""
        self._number += 1
        batch = batch_of(self._number, feeds, self._apart(self._hub.ranks))
        self._hub.broadcast(batch)
        refused: ModelError | None = None
        logits: list[Logits] = []
        try:
            logits = self._model.step(feeds)
        except ModelError as problem:
            refused = problem
        outcome = type(refused).__name__ if refused is not None else ""
        self._hub.all_gather(Joined(0, batch_id(batch), outcome))
        if refused is not None:
            raise refused
        return logits

    def import_kv(self, sequence: int, blob: memoryview) -> None:
        """Import here, then everywhere."""
        try:
            self._model.import_kv(sequence, blob)
        except ModelError:
            self._hub.broadcast(Cut(sequence, 0))
            raise
        digest = blake2b(blob, digest_size=16).digest()
        self._hub.broadcast(Filled(sequence, self._model.length(sequence), digest))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Share here, then everywhere."""
        self._model.copy_prefix(source, target, length)
        self._hub.broadcast(Shared(source, target, length))

    def truncate(self, sequence: int, length: int) -> None:
        """Cut here, then everywhere."""
        self._model.truncate(sequence, length)
        self._hub.broadcast(Cut(sequence, length))

    def drop(self, sequence: int) -> None:
        """Forget here, then everywhere."""
        self._model.drop(sequence)
        self._hub.broadcast(Cut(sequence, 0))

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Rank 0's."""
        return self._model.tokenize(text, special=special)

    def piece(self, token: int) -> bytes:
        """Rank 0's."""
        return self._model.piece(token)

    def length(self, sequence: int) -> int:
        """Rank 0's; the others hold as much."""
        return self._model.length(sequence)

    def cells_used(self) -> int:
        """Rank 0's; the others use as many."""
        return self._model.cells_used()

    def kv_size(self, sequence: int) -> int:
        """Rank 0's."""
        return self._model.kv_size(sequence)

    def export_kv(self, sequence: int, into: memoryview) -> int:
        """Rank 0's: what is handed off is its KV alone."""
        return self._model.export_kv(sequence, into)

    def close(self) -> None:
        """Free rank 0's; the group is closed by `Ranks`."""
        self._model.close()
