"""The living document and its commit: one section per incident, newest first, human text untouched.

For: putting a rendered section into `INCIDENTS.md` (or a document that was there before us) and
committing that one file. Not for: any wording of the section.

Sections stand between two lines of their own, `<!-- tandem:incident ID begin -->` and
`<!-- tandem:incident ID end -->`; everything outside them belongs to people and survives byte
for byte.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

from tandem.errors import Bug, WorldError
from tandem.records import Rendered, ReportRef, Settings
from tandem.report.committing import commit

ID = re.compile(r"[A-Za-z0-9._-]{1,200}")
BEGIN = re.compile(rb"(?m)^<!-- tandem:incident ([A-Za-z0-9._-]+) begin -->[ \t]*\r?$")
INTRO = (
    "# Incidents\n\n"
    "Every incident of this deployment, newest first. Text outside the marked sections is yours.\n"
)
FENCE = re.compile(rb"^ {0,3}(```|~~~)")
HEADING = re.compile(rb"^ {0,3}#{1,6}(\s|$)")


def publish(rendered: Rendered, settings: Settings, folder: Path | None = None) -> ReportRef:
    """Put the section into the document, commit it, and say where it is.

    With `folder`, `report.md` and `report.html` are written there first. What keeps git from
    committing becomes the reference's note; raises `WorldError` when a file cannot be written.
    """
    root = Path(settings.root)
    if folder is not None:
        _write(folder / "report.md", rendered.markdown.encode())
        _write(folder / "report.html", rendered.html.encode())
    path = (root / settings.report.document).resolve()
    if path.exists() and not path.is_file():
        # Replacing is not writing: a device would become a file, for the whole host.
        raise WorldError(
            f"The report is not written to {path}: it is no ordinary file.",
            next_step="Name another `document` under [report] in tandem.toml.",
        )
    try:
        before = path.read_bytes()
    except FileNotFoundError:
        before = INTRO.encode()
    except OSError as problem:
        raise _unwritable(path, problem) from problem
    after, remark = with_section(before, rendered.incident, rendered.markdown)
    _write(path, after)
    shown = settings.report.document
    if not settings.report.commit:
        return ReportRef(path=shown, commit=None, subject=rendered.subject, note=remark)
    done = commit(path, rendered.subject)
    notes = " ".join(part for part in (remark, done.note) if part)
    return ReportRef(path=shown, commit=done.commit, subject=rendered.subject, note=notes)


def with_section(document: bytes, incident: str, markdown: str) -> tuple[bytes, str]:
    """The document with this incident's section replaced in place, or put in as the newest.

    Returns the new bytes and a remark when something in the document was not as expected.
    """
    if not ID.fullmatch(incident):
        raise Bug(f"An incident is named {incident!r}, which cannot be an anchor.")
    newline = b"\r\n" if b"\r\n" in document else b"\n"
    begin, end = (
        f"<!-- tandem:incident {incident} {word} -->".encode() for word in ("begin", "end")
    )
    body = markdown.strip().encode().replace(b"\n", newline)
    section = begin + newline + body + newline + end
    place, broken = _find(document, incident, end)
    if place is not None:
        return document[: place[0]] + section + document[place[1] :], ""
    at = _newest_place(document)
    before, after = document[:at], document[at:]
    lead = b""
    if before and not before.endswith(newline * 2):
        lead = newline if before.endswith(newline) else newline * 2
    trail = newline * 2 if after else newline
    remark = (
        f"An opened but never closed section of {incident} was left as it is." if broken else ""
    )
    return before + lead + section + trail + after, remark


def _find(document: bytes, incident: str, end: bytes) -> tuple[tuple[int, int] | None, bool]:
    """Where the section of an incident stands, and whether one was begun and never ended."""
    ending = re.compile(rb"(?m)^" + re.escape(end) + rb"(?=[ \t]*\r?$)")
    begins = list(BEGIN.finditer(document))
    broken = False
    for number, found in enumerate(begins):
        if found.group(1).decode() != incident:
            continue
        stop = begins[number + 1].start() if number + 1 < len(begins) else len(document)
        closed = ending.search(document, found.end(), stop)
        if closed is not None:
            return (found.start(), closed.end()), broken
        broken = True
    return None, broken


def _newest_place(document: bytes) -> int:
    """Where the newest section goes: before our first one, else after the title and its intro."""
    first = BEGIN.search(document)
    if first is not None:
        return first.start()
    place, fenced, titled = 0, b"", False
    lines = document.splitlines(keepends=True)
    if lines and lines[0].rstrip() == b"---":  # front matter is the document's, not a heading's
        closing = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == b"---"), 0)
        place = sum(len(line) for line in lines[: closing + 1]) if closing else 0
        lines = lines[closing + 1 :] if closing else lines
    for line in lines:
        fence = FENCE.match(line)
        if fence is not None and (not fenced or fence.group(1) == fenced):
            fenced = b"" if fenced else fence.group(1)
        elif not fenced and HEADING.match(line):
            if titled:
                return place
            titled = True
        place += len(line)
    return len(document)


def _write(path: Path, content: bytes) -> None:
    """Replace a file at once and durably, keeping its permissions; never half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        fresh = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, fresh)
            else:
                fresh.chmod(0o644)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as problem:
        raise _unwritable(path, problem) from problem


def _unwritable(path: Path, problem: OSError) -> WorldError:
    return WorldError(
        f"The report could not be written to {path}: {problem.strerror or problem}.",
        next_step="Make room or give the right to write, then run `tandem report --publish`.",
    )
