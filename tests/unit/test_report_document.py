"""The living document and its commit: what people wrote survives, and git is only ever asked."""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import deployment
from tandem.errors import Bug, WorldError
from tandem.records import Rendered, ReportSettings, Settings
from tandem.report.document import publish, with_section

BEGIN = "<!-- tandem:incident {} begin -->"
END = "<!-- tandem:incident {} end -->"


def rendered(incident="one", text="## One\n\nwords\n", subject="incident: one"):
    """A rendered incident."""
    return Rendered(incident=incident, subject=subject, markdown=text, html="<p>page</p>")


def settings(root, *, commit=True, document="INCIDENTS.md"):
    """Settings of a deployment in that folder."""
    return Settings(
        root=str(root),
        deployment=deployment(),
        report=ReportSettings(document=document, commit=commit),
    )


def put(document, incident="one", text="## One\n\nwords\n"):
    """The document with a section, its remark aside."""
    return with_section(document, incident, text)[0]


HUMAN = """\
# Known problems of the cluster

What we met, and what cured it. Ask Ada before you touch anything.

## Variant 1: deadlock under the overlap schedule

Cure: `--disable-overlap-schedule`.

## Variant 2: bf16 corruption

Cure: an environment variable.
"""


class TestSections:
    def test_a_new_document_gets_a_title_and_the_section(self, tmp_path):
        """The first incident makes the document."""
        publish(rendered(), settings(tmp_path, commit=False))

        text = (tmp_path / "INCIDENTS.md").read_text()
        assert text.startswith("# Incidents\n")
        assert text.endswith(f"{BEGIN.format('one')}\n## One\n\nwords\n{END.format('one')}\n")

    def test_the_newest_stands_first(self):
        """A second incident goes before the first and changes nothing of it."""
        first = put(b"# T\n\nintro\n")

        second = put(first, "two", "## Two\n")

        assert second.index(b"## Two") < second.index(b"## One")
        assert second.endswith(first[first.index(b"<!--") :])

    def test_an_existing_document_is_adopted(self):
        """Title and intro stay on top, our section follows, and every human byte is kept."""
        human = HUMAN.encode()

        document = put(human)

        at = human.index(b"## Variant 1")
        begin, end = BEGIN.format("one").encode(), END.format("one").encode()
        assert document == (
            human[:at] + begin + b"\n## One\n\nwords\n" + end + b"\n\n" + human[at:]
        )

    def test_a_regenerated_section_is_replaced_in_place(self):
        """Only what is between the anchors changes; text written around it stays where it is."""
        document = put(put(HUMAN.encode()), "two", "## Two\n")
        document = document.replace(
            END.format("two").encode(), END.format("two").encode() + b"\n\nAda: check the fans.\n"
        )

        again = put(document, "one", "## One\n\nbetter words\n")

        assert again == document.replace(b"words\n<!--", b"better words\n<!--")

    @pytest.mark.parametrize(
        ("document", "before"),
        [
            (b"", b""),
            (b"no heading at all", b"no heading at all\n\n"),
            (b"# T\n```sh\n# a comment\n```\n\n## H\n", b"# T\n```sh\n# a comment\n```\n\n"),
            (b"---\ntitle: x\n---\n# T\nintro\n# H\n", b"---\ntitle: x\n---\n# T\nintro\n\n"),
            (b"# T\r\n\r\nintro\r\n\r\n## H\r\n", b"# T\r\n\r\nintro\r\n\r\n"),
            (b"# T\n\xff\xfe not utf-8\n## H\n", b"# T\n\xff\xfe not utf-8\n\n"),
        ],
    )
    def test_the_place_is_after_title_and_intro(self, document, before):
        """Fences, front matter, other line ends and broken encodings are taken as they are."""
        after = put(document)

        assert after.startswith(before + b"<!-- tandem:incident one begin -->")
        assert len(after) > len(document)

    def test_line_ends_are_the_documents_own(self):
        """A section put into a CRLF document has CRLF."""
        assert b"\n" not in put(b"# T\r\n\r\n## H\r\n").replace(b"\r\n", b"")

    def test_an_unclosed_section_is_left_alone(self):
        """Without its end mark nobody knows where a section ends: a new one is put on top."""
        broken = b"# T\n\n" + BEGIN.format("one").encode() + b"\nold\n\nhuman words\n"

        document, remark = with_section(broken, "one", "## One\n")
        again, _ = with_section(document, "one", "## One, better\n")

        assert "never closed" in remark
        assert document.endswith(broken[len(b"# T\n\n") :])
        assert again == document.replace(b"## One\n", b"## One, better\n")

    def test_an_anchor_inside_a_line_is_text(self):
        """Only a line of its own begins or ends a section."""
        quoted = b"# T\n\nsee `<!-- tandem:incident one begin -->` for more\n"

        assert put(quoted).startswith(quoted)

    def test_an_id_that_cannot_be_an_anchor_is_a_bug(self):
        """Ids come from folder names, which have no blanks and no angles."""
        with pytest.raises(Bug):
            with_section(b"", "a --> b", "x")

    @given(
        st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=8),
        st.text(alphabet="#-`<>! \n\rabc", max_size=60),
        st.text(alphabet="#-`<>! \nabc", max_size=60),
    )
    def test_human_text_survives_any_order_of_reports(self, order, intro, outro):
        """After any sequence of reports each id has one section, and what else is there is kept."""
        human = f"# T\n{intro}\n## H\n{outro}\n".encode()
        document = human

        for number, incident in enumerate(order):
            document = put(document, incident, f"## {incident} {number}\n")

        for incident in set(order):
            assert document.count(BEGIN.format(incident).encode()) == 1
        sections = re.compile(rb"<!-- tandem:incident \w begin -->.*?end -->(\r?\n)*", re.DOTALL)
        kept = b"".join(sections.sub(b"", document).split())
        assert kept == b"".join(human.split())


class TestFiles:
    def test_the_folder_gets_both_texts(self, tmp_path):
        """`report.md` and `report.html` lie beside the evidence."""
        folder = tmp_path / "incidents" / "one"

        publish(rendered(), settings(tmp_path, commit=False), folder)

        assert (folder / "report.md").read_text() == "## One\n\nwords\n"
        assert (folder / "report.html").read_text() == "<p>page</p>"

    def test_permissions_are_kept_and_nothing_is_left_behind(self, tmp_path):
        """A document keeps its mode, and no temporary file stays."""
        path = tmp_path / "INCIDENTS.md"
        path.write_text(HUMAN)
        path.chmod(0o640)

        publish(rendered(), settings(tmp_path, commit=False))

        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert list(tmp_path.iterdir()) == [path]

    def test_a_linked_document_is_written_through(self, tmp_path):
        """The link stays a link."""
        real = tmp_path / "docs" / "problems.md"
        real.parent.mkdir()
        real.write_text(HUMAN)
        (tmp_path / "INCIDENTS.md").symlink_to(real)

        publish(rendered(), settings(tmp_path, commit=False))

        assert (tmp_path / "INCIDENTS.md").is_symlink()
        assert "## One" in real.read_text()

    @pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
    def test_what_is_no_file_is_not_replaced(self, tmp_path, make):
        """A folder, a pipe or a device named as the document is refused and stays what it is."""
        make(tmp_path / "INCIDENTS.md")

        with pytest.raises(WorldError, match="no ordinary file"):
            publish(rendered(), settings(tmp_path, commit=False))
        assert not (tmp_path / "INCIDENTS.md").is_file()

    def test_what_cannot_be_written_is_one_sentence(self, tmp_path):
        """A document below a file is refused with the next step."""
        (tmp_path / "docs").touch()

        with pytest.raises(WorldError, match="could not be written"):
            publish(rendered(), settings(tmp_path, commit=False, document="docs/INCIDENTS.md"))

    def test_without_a_commit_there_is_no_hash(self, tmp_path):
        """`commit = false` writes and stops."""
        reference = publish(rendered(), settings(tmp_path, commit=False))

        assert (reference.path, reference.commit) == ("INCIDENTS.md", None)
        assert reference.note == ""


def git(folder, *words):
    """Run git in a test's own repository."""
    done = subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of its own, with an identity, blind to the machine's git configuration."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in [*os.environ]:
        if name.startswith(("GIT_AUTHOR", "GIT_COMMITTER", "GIT_DIR", "GIT_INDEX")):
            monkeypatch.delenv(name)
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q")
    git(folder, "config", "user.name", "Ada")
    git(folder, "config", "user.email", "ada@example.org")
    return folder


@pytest.mark.needs("git")
class TestCommit:
    def test_the_document_is_committed_under_its_subject(self, repository):
        """One commit, one file, the subject as it was rendered, the short hash given back."""
        subject = 'incident: silent stall on a>b — c (best supported), `$(x)` "q" ruled out'

        reference = publish(rendered(subject=subject), settings(repository))

        assert git(repository, "log", "--format=%h %s") == f"{reference.commit} {subject}"
        assert git(repository, "show", "--name-only", "--format=") == "INCIDENTS.md"
        assert git(repository, "log", "--format=%an") == "Ada"
        assert reference.note == ""

    def test_nothing_else_is_committed(self, repository):
        """What a person has staged stays staged, what is dirty stays dirty."""
        (repository / "staged.txt").write_text("staged")
        (repository / "loose.txt").write_text("loose")
        git(repository, "add", "staged.txt")

        publish(rendered(), settings(repository))

        status = git(repository, "status", "--short").splitlines()
        assert status == ["A  staged.txt", "?? loose.txt"]

    def test_a_document_in_a_subfolder_is_committed(self, repository):
        """The repository may begin above the deployment's folder."""
        root = repository / "deploy"
        root.mkdir()

        reference = publish(rendered(), settings(root, document="docs/problems.md"))

        assert reference.commit == git(repository, "rev-parse", "--short", "HEAD")

    def test_a_second_report_commits_again_and_an_equal_one_does_not(self, repository):
        """An unchanged section refers to the commit that holds it."""
        first = publish(rendered(), settings(repository))
        same = publish(rendered(), settings(repository))
        second = publish(rendered(text="## One\n\nheld 24 h\n"), settings(repository))

        assert (same.commit, same.note) == (first.commit, "Nothing has changed since that commit.")
        assert second.commit != first.commit
        assert git(repository, "rev-list", "--count", "HEAD") == "2"

    def test_without_an_identity_this_commit_is_tandems(self, repository):
        """No configuration is written, and the note says whose name stands there."""
        git(repository, "config", "--unset", "user.name")
        git(repository, "config", "--unset", "user.email")

        reference = publish(rendered(), settings(repository))

        assert git(repository, "log", "--format=%an <%ae>") == "Tandem <tandem@localhost>"
        assert "git knows no user.name" in reference.note
        assert "user" not in git(repository, "config", "--local", "--list")

    def test_outside_a_repository_the_document_is_written_all_the_same(self, repository):
        """No repository: no commit, and a note that says what to do."""
        outside = repository.parent / "elsewhere"
        outside.mkdir()

        reference = publish(rendered(), settings(outside))

        assert reference.commit is None
        assert "is in no git repository; `git init`" in reference.note
        assert "## One" in (outside / "INCIDENTS.md").read_text()

    def test_a_hook_that_refuses_is_quoted(self, repository):
        """Hooks are not passed over."""
        hook = repository / ".git" / "hooks" / "pre-commit"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\necho 'no commits on Fridays' >&2\nexit 1\n")
        hook.chmod(0o755)

        reference = publish(rendered(), settings(repository))

        assert reference.commit is None
        assert "no commits on Fridays" in reference.note

    def test_an_ignored_document_is_not_forced(self, repository):
        """What the repository ignores is not added by us."""
        (repository / ".gitignore").write_text("INCIDENTS.md\n")

        reference = publish(rendered(), settings(repository))

        assert reference.commit is None
        assert "git add says" in reference.note

    def test_a_git_that_hangs_is_given_up(self, repository, monkeypatch):
        """A hook that never ends costs its bound and no more."""
        monkeypatch.setattr("tandem.report.committing.GIT_TIMEOUT_S", 0.5)
        hook = repository / ".git" / "hooks" / "pre-commit"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\nexec sleep 5\n")
        hook.chmod(0o755)

        reference = publish(rendered(), settings(repository))

        assert reference.commit is None
        assert "did not end within" in reference.note
        assert not (repository / ".git" / "index.lock").exists()

    def test_the_environment_of_a_hook_does_not_mislead(self, repository, monkeypatch):
        """`GIT_DIR` of somebody else's repository is not followed."""
        monkeypatch.setenv("GIT_DIR", str(repository / "nowhere"))

        reference = publish(rendered(), settings(repository))

        assert reference.commit is not None


def test_without_git_the_document_is_written(tmp_path, monkeypatch):
    """A machine without git has a document and a note."""
    monkeypatch.setenv("PATH", str(tmp_path))

    reference = publish(rendered(), settings(tmp_path))

    assert reference.commit is None
    assert "git is not installed" in reference.note
    assert "## One" in (tmp_path / "INCIDENTS.md").read_text()
