"""The systemd unit of a watch, fitted to one deployment.

For: the text of `tandem-watch.service`. Not for: installing it, or talking to systemd.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tandem.records import STATE_FOLDER, Settings

WATCHDOG_S_MIN = 30.0
TURNS_PER_WATCHDOG = 5.0
"""A turn may be this many times as long as the interval before systemd restarts the watch."""
MEMORY_MB = 512
MEMORY_MB_PER_MEMBER = 4

TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - what PrivateTmp hides

Manager = Literal["system", "user"]


def watch_unit(
    settings: Settings,
    *,
    config: Path,
    python: str,
    manager: Manager = "system",
    user: str | None = None,
    writable: Sequence[Path] = (),
) -> str:
    """The unit as text; `python` has Tandem installed, `config` is the absolute `tandem.toml`.

    `user` runs it under the system manager. `writable` are folders beyond the deployment's own
    that the report is committed in. Where members have `supervisor = "local"` a repair starts them
    from here: then nothing is bounded or hidden that a member would inherit.
    """
    starts_members = any(one.supervisor == "local" for one in settings.deployment.members)
    name = settings.deployment.name
    unit = [
        "[Unit]",
        f"Description=Tandem watches {_plain(name)}",
        "After=network.target",
        "# Never given up: nobody else notices that nobody watches.",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=notify",
        f"ExecStart={_word(python)} -m tandem watch --config {_word(str(config))}",
        f"WorkingDirectory={_path(settings.root)}",
    ]
    if manager == "system":
        unit += _identity(user)
    unit += [
        "NotifyAccess=main",
        "# Fed by turns that ended, and by nothing else.",
        f"WatchdogSec={_watchdog_s(settings):.0f}",
        "Restart=on-failure",
        "RestartSec=5",
        "# SIGTERM is no failure; a wrong tandem.toml is not mended by a restart.",
        "SuccessExitStatus=143",
        "RestartPreventExitStatus=2 3",
        "# A repair under way may end its present step (60 s at most).",
        "TimeoutStartSec=120",
        "TimeoutStopSec=90",
        "TimeoutAbortSec=10",
        "NoNewPrivileges=yes",
    ]
    unit += _with_members() if starts_members else _alone(settings, manager, writable)
    target = "multi-user.target" if manager == "system" else "default.target"
    return "\n".join([*unit, "", "[Install]", f"WantedBy={target}", ""])


def _identity(user: str | None) -> list[str]:
    stacks = [
        "# Stacks are read with ptrace. Of the same user's processes that needs no right where",
        "# kernel.yama.ptrace_scope is 0; where it is 1, uncomment the next two lines.",
        "#AmbientCapabilities=CAP_SYS_PTRACE",
        "#CapabilityBoundingSet=CAP_SYS_PTRACE",
    ]
    if user is None:
        return ["# The user that runs the engines: it may see their processes and their stacks.",
                "#User=", *stacks]  # fmt: skip
    return [f"User={_plain(user)}", *stacks]


def _watchdog_s(settings: Settings) -> float:
    return max(WATCHDOG_S_MIN, TURNS_PER_WATCHDOG * settings.watch.interval_s)


def _with_members() -> list[str]:
    return [
        "# A repair starts members in here: they outlive the watch, none may take it along, and",
        "# whatever is bounded or hidden here would be so for them. So it is not.",
        "KillMode=process",
        "OOMPolicy=continue",
    ]


def _alone(settings: Settings, manager: Manager, writable: Sequence[Path]) -> list[str]:
    memory_mb = MEMORY_MB + MEMORY_MB_PER_MEMBER * len(settings.deployment.members)
    bounded = [f"MemoryMax={memory_mb}M", "TasksMax=256"]
    if manager == "user":
        return [*bounded, "# A user's own manager cannot hide file systems."]
    root = Path(settings.root)
    paths = [root / STATE_FOLDER, root, Path(settings.report.document).parent, *writable]
    # The deployment's own folder holds the state: one path covers both.
    kept = [one for one in dict.fromkeys(paths) if one.is_absolute()]
    kept = [one for one in kept if not any(other in one.parents for other in kept)]
    return [
        *bounded,
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        *(f"ReadWritePaths={_word(str(one), command=False)}" for one in kept),
        *_temporary(settings),
        "ProtectKernelTunables=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelLogs=yes",
        "ProtectControlGroups=yes",
        "ProtectHostname=yes",
        "RestrictNamespaces=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        "LockPersonality=yes",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "SystemCallArchitectures=native",
        "# With ptrace, for stacks. PrivateDevices and ProtectClock would hide the GPUs,",
        "# PrivateUsers and ProtectProc the processes that are watched.",
        "SystemCallFilter=@system-service ptrace",
        "SystemCallErrorNumber=EPERM",
    ]


def _temporary(settings: Settings) -> list[str]:
    """A /tmp of its own, unless somebody logs into the one that all see."""
    logs = [Path(one.log) for one in settings.deployment.members if one.log]
    shared = any(Path(top) in log.parents for log in logs for top in TEMPORARY)
    return [] if shared else ["PrivateTmp=yes"]


def _plain(text: str) -> str:
    """A text without specifiers."""
    return text.replace("%", "%%")


def _path(text: str) -> str:
    """A path that has a line to itself: only specifiers mean anything there."""
    return _plain(text)


def _word(text: str, *, command: bool = True) -> str:
    """One word of a list, whatever is in it; in a command a dollar means something too."""
    if not any(one in text for one in " \t'\"\\;$"):
        return _plain(text)
    escaped = _plain(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped.replace("$", "$$") if command else escaped}"'


__all__ = ["Manager", "watch_unit"]
