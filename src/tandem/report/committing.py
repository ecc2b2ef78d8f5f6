"""One file, one commit, through the git command line, without touching anything else of yours.

For: committing the living document. Not for: pushing, configuring git, or passing over your hooks.
"""

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

GIT_TIMEOUT_S = 60.0
"""Hooks and signing may take a while; a prompt nobody answers must not hold the loop."""
END_TIMEOUT_S = 5.0
IDENTITY = ("-c", "user.name=Tandem", "-c", "user.email=tandem@localhost")
FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""Set by a hook we may run under; they would point at another repository."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The short hash of the commit, or None, and what a person should know about it."""

    commit: str | None
    note: str = ""


def commit(path: Path, subject: str) -> Committed:
    """Commit exactly this file; whatever keeps git from it becomes the note, never an exception.

    Other staged changes stay staged. When git knows no author, this commit alone is made in
    Tandem's name; no configuration is written.
    """
    try:
        top = _git(path, "rev-parse", "--show-toplevel")
        if top.returncode != 0:
            return Committed(None, _no_repository(path, top))
        added = _git(path, "add", "--", path.name)
        if added.returncode != 0:
            return Committed(None, f"Not committed: git add says: {_said(added)}")
        if _git(path, "diff", "--cached", "--quiet", "--", path.name).returncode == 0:
            return _unchanged(path)
        known = _identity_known(path)
        identity = () if known else IDENTITY
        made = _git(path, *identity, "commit", "--quiet", "-m", subject, "--", path.name)
        if made.returncode != 0:
            return Committed(
                None,
                f"Not committed: git refused ({_said(made)}); the document is written and staged.",
            )
        short = _git(path, "rev-parse", "--short", "HEAD").stdout.strip()
        note = "" if known else "Committed as Tandem <tandem@localhost>: git knows no user.name."
        return Committed(short or None, note)
    except FileNotFoundError:
        return Committed(None, "Not committed: git is not installed; the document is written.")
    except subprocess.TimeoutExpired:
        return Committed(
            None,
            f"Not committed: git did not end within {GIT_TIMEOUT_S:.0f} s (a hook, a signature or "
            "a lock?); the document is written.",
        )
    except OSError as problem:
        return Committed(None, f"Not committed: git could not be run: {problem.strerror}.")


def _identity_known(path: Path) -> bool:
    """Whether git has an author and a committer from its configuration or the environment."""
    return all(
        _git(path, "config", f"user.{part}").returncode == 0
        or all(os.environ.get(f"GIT_{who}_{part.upper()}") for who in ("AUTHOR", "COMMITTER"))
        for part in ("name", "email")
    )


def _no_repository(path: Path, asked: subprocess.CompletedProcess[str]) -> str:
    if "not a git repository" in asked.stderr:
        return f"Not committed: {path.parent} is in no git repository; `git init` makes one."
    return f"Not committed: git says: {_said(asked)}"


def _unchanged(path: Path) -> Committed:
    """The document is as it was committed: that commit is the reference."""
    last = _git(path, "log", "-1", "--format=%h", "--", path.name).stdout.strip()
    return Committed(last or None, "Nothing has changed since that commit." if last else "")


def _said(result: subprocess.CompletedProcess[str]) -> str:
    """The last line git (or a hook) said."""
    lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
    return lines[-1].strip()[:200] if lines else f"exit status {result.returncode}"


def _git(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git beside the document: no prompt, no terminal, a bound."""
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    environment |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}
    argv = ["git", "--literal-pathspecs", *words]
    with subprocess.Popen(
        argv,
        cwd=path.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    ) as process:
        try:
            out, said = process.communicate(timeout=GIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _end(process)
            raise
    return subprocess.CompletedProcess(argv, process.returncode, out, said)


def _end(process: subprocess.Popen[str]) -> None:
    """End git and its hooks: politely first, so that it takes its lock files away."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=END_TIMEOUT_S)
            return
