"""The switchboard: behaviours of the field that can be switched on, by mechanism.

It exists only with `--enable-faults FILE`: the file is read at start, `GET` and `PUT /faults` show
and change it, and what is changed is written to the file, so that a behaviour survives a restart as
code would. A flip leaves no trace in logs, metrics, `/server_info` or the environment.

For: which behaviours exist and what each looks like from outside.
Not for: the mechanisms (`peers.py`, `handoffs.py`).
"""

import contextlib
import os
from pathlib import Path
from typing import Any, get_args

import msgspec

from tandem_engine.config import ConfigError
from tandem_engine.peers import Memory


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every switch and its harmless default."""

    peer_memory: Memory = "leases"


CATALOGUE = {
    "peer_memory": {
        "leases": (
            "The default: an agent of a dead decode is gone, its rooms fail at once "
            "(num_transfer_failed_reqs_total grows, clients get an error), nothing stays held."
        ),
        "stale": (
            "Per decode address the prefill keeps every agent that ever announced itself and picks "
            "one by hash of the room. After k decode-only restarts k of k+1 rooms are written to "
            "the memory of a dead decode: their requests never end, "
            "num_prefill_inflight_queue_reqs rises by one for each and never falls, until no slot "
            "is left and the pair is silent. "
            "Nothing is logged; /health is 200 everywhere. Restarting prefill and decode heals."
        ),
        "orphaned": (
            "Rooms in flight when their decode dies stay in flight for ever and hold their slots; "
            "new rooms use the new decode and flow. Every decode-only restart under load pins more "
            "of num_prefill_inflight_queue_reqs, until the pair is silent. Nothing is logged; "
            "/health is 200 everywhere. Restarting prefill and decode heals."
        ),
    },
}


class Switchboard:
    """The switches of one worker. Read from any thread."""

    def __init__(self, path: str | None) -> None:
        """Read the file when there is one; raises `ConfigError` when it says something unknown."""
        self._path = Path(path) if path is not None else None
        self.faults = Faults()
        if self._path is None:
            return
        try:
            self.faults = msgspec.json.decode(self._path.read_bytes(), type=Faults)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as problem:
            raise ConfigError(
                f"--enable-faults {path} cannot be used: {problem}; "
                f"`python -m tandem_engine faults` lists what it may say"
            ) from problem

    @property
    def enabled(self) -> bool:
        """Whether the admin route exists."""
        return self._path is not None

    def peer_memory(self) -> Memory:
        """How this prefill remembers its decodes."""
        return self.faults.peer_memory

    def change(self, body: bytes) -> Faults:
        """Change what `body` names, keep the rest, and write the file.

        Raises `msgspec.MsgspecError` for unknown keys or values, `OSError` when the file cannot be
        written; nothing is changed then.
        """
        given = msgspec.json.decode(body, type=dict[str, Any])
        faults = msgspec.convert(msgspec.structs.asdict(self.faults) | given, type=Faults)
        if self._path is not None:
            scratch = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
            try:
                scratch.write_bytes(msgspec.json.encode(faults) + b"\n")
                scratch.replace(self._path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    scratch.unlink()
        self.faults = faults
        return faults


def listing() -> str:
    """What `python -m tandem_engine faults` prints."""
    lines: list[str] = []
    for key, values in CATALOGUE.items():
        lines.append(key)
        lines += [f"  {value}\n    {text}" for value, text in values.items()]
    return "\n".join(lines)


def catalogue_gaps() -> set[str]:
    """Values that exist and are not described, or the reverse; empty, says a test."""
    return set(get_args(Memory)) ^ set(CATALOGUE["peer_memory"])
