"""A rank beside rank 0: a process that computes the same batches in lock step.

It holds a shard of its own: hash-model KV of the same sequences, cell for cell as long as rank 0's,
whatever model rank 0 runs (the weights are the toy's: a second copy of a real model would cost its
memory and half of the speed, and show nothing more). So its bookkeeping is real and can diverge;
its logits are nobody's.

For: `python -m tandem_engine.follower RANK FD`, started by `lockstep.py` and never by hand.
Not for: serving: only rank 0 speaks to anybody.
"""

import ctypes
import os
import signal
import socket
import sys
from hashlib import blake2b

from tandem_engine.collective import (
    Batch,
    CollectiveError,
    Cut,
    Filled,
    Joined,
    Shared,
    Sizes,
    Spoke,
    batch_id,
)
from tandem_engine.model import Feed, ModelError
from tandem_engine.toy import ROW_BYTES, ToyModel

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = 0xFFFFFFFFFFFFFFFF
TOKENS_FOLDED = 256
"""Tokens of any vocabulary are taken modulo this: the shard only has to be somebody's."""


def main(arguments: list[str]) -> int:
    """Follow rank 0 to its end; the exit status."""
    rank, descriptor = int(arguments[0]), int(arguments[1])
    _name(f"scheduler_TP{rank}")
    # The terminal's interrupt is for rank 0, which closes the group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as hub:
        spoke = Spoke(hub)
        sizes = spoke.broadcast()
        if not isinstance(sizes, Sizes):
            return 0
        model = ToyModel(
            context_length=sizes.context_length,
            sequences_max=sizes.sequences_max,
            cells=sizes.cells,
        )
        try:
            spoke.all_gather(Joined(rank, "start", ""))
            event_loop(rank, spoke, model)
        except CollectiveError as problem:
            if "is gone" in str(problem):
                return 0
            sys.stderr.write(f"tandem_engine: rank {rank} ends: {problem}\n")
            return 1
    return 0


def event_loop(rank: int, spoke: Spoke, model: ToyModel) -> None:
    """Do what rank 0 says, until it is gone."""
    while (order := spoke.broadcast()) is not None:
        match order:
            case Batch():
                forward(rank, spoke, model, order)
            case Filled():
                model.import_kv(order.sequence, memoryview(_rows(order)))
            case Shared():
                model.copy_prefix(order.source, order.target, order.tokens)
            case Cut():
                model.truncate(order.sequence, order.tokens)


def forward(rank: int, spoke: Spoke, model: ToyModel, batch: Batch) -> None:
    """Compute one batch and join the others."""
    apart = batch.apart[1] if batch.apart[0] == rank else ""
    if apart == "leaves":
        return  # back to waiting for a batch, while the others wait for this rank in the gather
    while apart == "spins":
        pass
    outcome = ""
    try:
        model.step(
            [
                Feed(sequence, [token % TOKENS_FOLDED for token in tokens], position, "none")
                for sequence, position, tokens in batch.feeds
            ]
        )
    except ModelError as problem:
        outcome = type(problem).__name__
    spoke.all_gather(Joined(rank, batch_id(batch), outcome))


def _rows(filled: Filled) -> bytes:
    """This shard's rows of KV that arrived."""
    seed = blake2b(filled.digest, digest_size=ROW_BYTES).digest()
    return seed * filled.tokens


def _name(name: str) -> None:
    """Show the rank's name in `ps`, end with rank 0, and let this user's other processes look."""
    try:
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(PR_SET_PTRACER, ctypes.c_ulong(PR_SET_PTRACER_ANY), 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() == 1:  # it died before this could be said
        sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
