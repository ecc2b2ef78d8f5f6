"""What is done to a rehearsal deployment, by mechanism, and the only place that knows it.

For: switching a historical behaviour of the embedded prefill on, and the operator's own acts
(decode-only restarts with harmless changes). Not for: telling anyone; nothing here is logged.
"""

import aiohttp

from tandem.drills.workspace import Workspace
from tandem.errors import WorldError

SWITCH_TIMEOUT_S = 10.0

HARMLESS_CHANGES: tuple[tuple[str, str, str], ...] = (
    ("env", "SGLANG_SM120_MMA_TARGET_CTAS", "512"),
    ("flag", "--cuda-graph-max-bs", "96"),
    ("env", "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0"),
    ("flag", "--num-reserved-decode-tokens", "256"),
)
"""A day's tuning on the decode: each touches compute or admission, none the hand-off."""


async def remember_peers(workspace: Workspace, how: str) -> None:
    """Choose what the prefill remembers of its decodes: leases, stale or orphaned."""
    timeout = aiohttp.ClientTimeout(total=SWITCH_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.put(f"{workspace.prefill_url}/faults", json={"peer_memory": how}) as reply,
    ):
        if reply.status != 200:
            raise WorldError(
                f"The prefill refused the switch peer_memory={how}: HTTP {reply.status}.",
                next_step="Start it with --enable-faults.",
            )


def change_named(number: int) -> str:
    """The harmless change that restart `number` carries along, as `NAME=VALUE`."""
    _, what, value = HARMLESS_CHANGES[number % len(HARMLESS_CHANGES)]
    return f"{what}={value}"


async def restart_decode(workspace: Workspace, *, change: int | None) -> None:
    """Restart the decode alone, as an operator in the middle of a tuning campaign does.

    `change` picks a harmless change to carry along, None restarts as it is.
    """
    why = "planned restart"
    if change is not None:
        kind, what, value = HARMLESS_CHANGES[change % len(HARMLESS_CHANGES)]
        if kind == "env":
            workspace.decode_env[what] = value
        else:
            workspace.decode_flags[what] = value
        workspace.save()
        why = f"tuning: {change_named(change)}"
    await workspace.tandem("restart", "decode-0", "--force", "--why", why)
