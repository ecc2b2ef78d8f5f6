"""The command `tandem`: runs a word and turns whatever happened into an exit status.

For: the last line of defence; a mistake ends in one sentence on stderr, never in a traceback.
Not for: any word's work (`tandem.cli`).
"""

import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence

from tandem.errors import Bug, InterruptedByUser, TandemError, WorldError
from tandem.visible import visible

WORLD_ERRNOS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
    }
)
"""Operating system errors that are the machine's state whoever meets them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one word; give its exit status (families in `tandem.errors`, usage errors 2)."""
    _settle_streams()
    try:
        # Inside, so that Ctrl-C during the imports ends as quietly as later.
        from tandem.cli.app import invoke  # noqa: PLC0415 - said above

        status = invoke(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has left (`tandem incidents | head`): nothing more to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail(InterruptedByUser("Interrupted.", next_step="Nothing was left running."))
    except TandemError as error:
        return _fail(error)
    except OSError as error:
        return _fail(_world(error) if error.errno in WORLD_ERRNOS else _bug(error), error)
    # Anything else is ours: it becomes a Bug with a status of its own.
    except Exception as error:  # noqa: BLE001
        return _fail(_bug(error), error)
    return status


def _settle_streams() -> None:
    """Let a word speak whatever it was given: closed streams, or an encoding too small for it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            # Else the next file we open gets this number, and what is printed goes into it.
            file = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(file, "r" if number == 0 else "w", encoding="utf-8"))
        elif number > 0 and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _world(error: OSError) -> WorldError:
    where = f" at {error.filename}" if error.filename else ""
    return WorldError(
        f"The machine refused{where}: {(error.strerror or 'unknown').lower()}.",
        next_step="Make room or grant the right, then run the command again.",
    )


def _bug(error: Exception) -> Bug:
    said = str(error).rstrip(".") or "no message"
    return Bug(f"Unexpected {type(error).__name__}: {said}.")


def _fail(error: TandemError, cause: Exception | None = None) -> int:
    """Say what happened and the next step; a traceback only where it was asked for."""
    if os.environ.get("TANDEM_TRACEBACK") == "1":
        traceback.print_exception(cause or error)
    hint = " TANDEM_TRACEBACK=1 shows where." if isinstance(error, Bug) else ""
    # Below every view: whatever is on stdout comes first when both go to one terminal.
    sys.stdout.flush()
    sys.stderr.write(f"tandem: {visible(str(error))}{hint}\n")
    return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
