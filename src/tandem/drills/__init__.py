"""Rehearsals: faults injected by mechanism, the loop scored from outside.

Only this package knows what was injected. The loop it scores is a separate `tandem watch` process
that is given `tandem.toml` and nothing else.
"""

import contextlib
import sys
from pathlib import Path
from typing import TextIO

import msgspec

from tandem.drills import controls, decode_restarts
from tandem.drills.drill import Drill, Tell
from tandem.drills.incident_demo import demo
from tandem.drills.rehearsal import rehearse
from tandem.drills.score import Score
from tandem.errors import ConfigError, NotProvenError

__all__ = ["DRILLS", "demo", "listing", "run"]

DRILLS: dict[str, Drill] = {
    drill.name: drill for drill in (*decode_restarts.DRILLS, *controls.DRILLS)
}


def listing() -> list[Drill]:
    """Every drill, stall drills first."""
    return list(DRILLS.values())


async def run(name: str, *, seed: int, json_to: str | None, tell: Tell) -> Score:
    """Run one drill; writes its JSON to a file or `-`.

    Raises `ConfigError` for an unknown name and `NotProvenError` when the drill is not ok.
    """
    drill = DRILLS.get(name)
    if drill is None:
        raise ConfigError(
            f"There is no drill named {name!r}; there are {', '.join(DRILLS)}.",
            next_step="What each rehearses: `tandem drill --list`.",
        )
    with _score_file(json_to) as file:
        result = await rehearse(drill, seed=seed, tell=tell)
        if json_to is not None:
            text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode()
            file.write(text + "\n")
    if not result.ok:
        raise NotProvenError(
            f"Drill {name} (seed {seed}) is not ok: {'; '.join(result.why)}.",
            next_step=f"Look closer: tandem drill {name} --seed {seed} --json -.",
        )
    return result


def _score_file(json_to: str | None) -> contextlib.AbstractContextManager[TextIO]:
    """Open first: what cannot be written is better known before than after two minutes."""
    if json_to is None or json_to == "-":
        return contextlib.nullcontext(sys.stdout)
    return Path(json_to).open("w", encoding="utf-8")
