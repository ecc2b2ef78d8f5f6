"""`python -m tandem_engine prefill|decode|faults|fetch-model`: the command line of the engine.

Exit status: 0 ended as asked, 1 the engine broke or something inside never ended, 3 the command
line is wrong, 4 the machine said no. What an end cut off is one line of the log.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence

from tandem_engine.config import (
    EXIT_CONFIG,
    EXIT_WORLD,
    ConfigError,
    Mode,
    Settings,
    StartError,
    settings_of,
    timeouts_of,
)

EXIT_BROKEN = 1
FILES_MAX = 65535
START_ENDS_S = 2.0
"""How long a start may take to hear that it is over."""
INSTALL = "pip install 'tandem-pd[engine]'"
USAGE = """usage: python -m tandem_engine WORD [options]

  prefill       serve the prefill side of a PD pair (prefill --help)
  decode        serve the decode side (decode --help)
  faults        list the behaviours that --enable-faults can switch on
  fetch-model   download the default model
"""
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = 0xFFFFFFFFFFFFFFFF
log = logging.getLogger("tandem_engine")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one word; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    word = given[0] if given else "--help"
    try:
        if word in ("prefill", "decode"):
            return _serve("prefill" if word == "prefill" else "decode", given[1:])
        if word == "faults":
            from tandem_engine.faults import listing  # noqa: PLC0415 - nothing heavy before parsing

            _say(listing())
            return 0
        if word == "fetch-model":
            from tandem_engine.fetch import main as fetch  # noqa: PLC0415

            return fetch(given[1:])
        if word in ("--help", "-h", "help"):
            _say(USAGE)
            return 0
        raise ConfigError(f"there is no word {word!r}; `python -m tandem_engine --help` lists them")
    except ConfigError as problem:
        sys.stderr.write(f"tandem_engine: {problem}\n")
        return EXIT_CONFIG
    except ModuleNotFoundError as problem:
        name = (problem.name or "").partition(".")[0]
        if name in ("", "tandem_engine"):
            raise
        sys.stderr.write(f"tandem_engine: the package {name} is not installed; run: {INSTALL}\n")
        return EXIT_WORLD
    except StartError as problem:
        sys.stderr.write(f"tandem_engine: {problem}\n")
        return EXIT_WORLD


def _say(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")


def _serve(mode: Mode, arguments: Sequence[str]) -> int:
    settings = settings_of(mode, arguments, f"python -m tandem_engine {mode}")
    timeouts = timeouts_of()
    _allow_stacks()
    _allow_connections()
    # The scheduler must not wait 5 ms for the GIL whenever a step returns.
    sys.setswitchinterval(0.0005)

    from tandem_engine import logs  # noqa: PLC0415 - heavy imports come after parsing
    from tandem_engine.faults import Switchboard  # noqa: PLC0415
    from tandem_engine.worker import Worker  # noqa: PLC0415

    logs.set_up(settings.log_level)
    switchboard = Switchboard(settings.enable_faults)

    async def serve() -> tuple[int, bool]:
        """The exit status, and whether a thread is left that nobody can wait for."""
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        worker = Worker(settings, timeouts, switchboard)
        log.info("server_args=%s", _shown(worker.settings))
        try:
            starting = asyncio.ensure_future(worker.start())
            ends = [asyncio.ensure_future(e.wait()) for e in (stopped, worker.fatal)]
            # A server waits for as long as it takes.
            await asyncio.wait([starting, *ends], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in (starting, *ends):
                task.cancel()
            await asyncio.wait([starting], timeout=START_ENDS_S)
        finally:
            starts = worker.state == "starting"
            cut = await worker.stop()
            if cut:
                log.warning("Ended: %s", cut)
        # A loop that broke by itself is no clean end.
        broken = worker.fatal.is_set() or (worker.torn and not starts)
        return EXIT_BROKEN if broken else 0, worker.torn

    status, torn = asyncio.run(serve())
    if torn:
        # The libraries' own clean-up must not run under a thread that still computes.
        logging.shutdown()
        os._exit(status)
    return status


def _shown(settings: Settings) -> str:
    inside = ", ".join(f"{name}={value!r}" for name, value in settings.described().items())
    return f"ServerArgs({inside})"


def _allow_stacks() -> None:
    """Let this user's other processes take stacks where ptrace is limited to parents (py-spy)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(PR_SET_PTRACER_ANY), 0, 0, 0)
    except (OSError, AttributeError):
        return


def _allow_connections() -> None:
    """Take all the open files this user may have, as SGLang does.

    At the soft limit accepting fails, and asyncio then writes a traceback for each try.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


if __name__ == "__main__":
    sys.exit(main())
