"""`run/<member>.json`: how a member was last started, and as which life.

Written whole or not at all. It holds argv and environment as they are, secrets included, because a
restart needs them: only its owner may read it, and nothing of it goes into evidence.

For: the local supervisor, across the processes that use it. Not for: what runs now; ask the host.
"""

import os
from pathlib import Path

import msgspec

from tandem.errors import WorldError
from tandem.records import Launch, Record

FORMAT = 1


class RunRecord(Record, frozen=True, kw_only=True):
    """How a member was last started.

    `launched` differs from `configured` when flags were changed since `tandem.toml` was read: a
    restart repeats what was launched, and so never reverts such a change.
    """

    format: int
    member: str
    run: str
    """Random, in the member's environment as `TANDEM_RUN`: finds it when we died while starting."""
    configured: Launch
    launched: Launch
    inherited: dict[str, str]
    """Engine variables of the shell it was first started from, given again at a restart."""
    started_by: str
    boot: str
    pid: int = 0
    """0 until it is known."""
    incarnation: str = ""
    started_at: float = 0.0


def read(path: Path) -> RunRecord | None:
    """The record, or None when there is none; raises `WorldError` for one that cannot be used."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise WorldError(
            f"{path} cannot be read: {error}.",
            next_step="Stop that member by hand, then delete the file.",
        ) from None
    if record.format != FORMAT:
        raise WorldError(
            f"{path} has format {record.format}, and this Tandem knows {FORMAT}.",
            next_step="Stop that member with the Tandem that started it.",
        )
    return record


def write(path: Path, record: RunRecord) -> None:
    """Replace the record durably."""
    part = path.with_suffix(".part")
    # Buffered: a bare write on a disk that is nearly full writes a part and says nothing.
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
