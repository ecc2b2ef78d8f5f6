"""Stage words on a sealed folder need nothing but the folder, and say the same thing twice."""

import json
import shutil

import msgspec
import pytest

import night
from tandem.__main__ import main
from tandem.ports import Harvest
from tandem.records import Settings
from tandem.store import Store

BARE = msgspec.structs.replace(
    night.INCIDENT,
    diagnosis=None,
    plan=None,
    outcomes=(),
    verification=None,
    report=None,
    seal=None,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Give a stranger's sealed folder, with no deployment, tandem.toml or store around it."""
    home = tmp_path / "home"
    home.mkdir()
    with Store.open(home, Settings(root=str(home), deployment=night.DEPLOYMENT)) as store:
        store.append(Harvest((night.INFLIGHT, night.STACKS), (), (night.RESTART,)))
        store.save(BARE)
        seal = store.seal(BARE, now=night.NOW, deadline_s=5.0)
        store.save(msgspec.structs.replace(BARE, seal=seal, plan=night.PLAN))
    bundle = tmp_path / "bundle"
    shutil.copytree(home / ".tandem" / "incidents" / BARE.id, bundle)
    shutil.rmtree(home)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.delenv("TANDEM_CONFIG", raising=False)
    return str(bundle)


class TestDiagnose:
    """`tandem diagnose FOLDER`."""

    def test_the_same_folder_gives_the_same_bytes(self, folder, capsysbinary):
        """Two runs print the same bytes, and only the diagnosis."""
        assert main(["diagnose", folder, "--json"]) == 0
        first = capsysbinary.readouterr()
        assert main(["diagnose", folder, "--json"]) == 0
        second = capsysbinary.readouterr()

        assert first == second
        assert first.err == b""
        assert json.loads(first.out)["record"] == "diagnosis"

    def test_the_sealed_hunch_is_asked(self, folder, capsys):
        """The hunch given that night is answered again."""
        assert main(["diagnose", folder, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["hunch"]["asked"] == "overlap schedule"

    def test_a_new_hunch_replaces_it(self, folder, capsys):
        """Another hunch may be asked of the same evidence; the verdict stays."""
        main(["diagnose", folder, "--json"])
        before = json.loads(capsys.readouterr().out)
        main(["diagnose", folder, "--json", "--hunch", "a dead worker"])
        after = json.loads(capsys.readouterr().out)

        assert after["hunch"]["asked"] == "a dead worker"
        assert {**before, "hunch": None} == {**after, "hunch": None}

    def test_it_reads_well(self, folder, capsys):
        """Without `--json` the differential names every known failure."""
        assert main(["diagnose", folder]) == 0
        shown = capsys.readouterr().out

        assert "Differential" in shown
        assert "degraded-pair-after-decode-restarts" in shown

    def test_why_shows_one_mode(self, folder, capsys):
        """`--why` shows one mode's tests."""
        assert main(["diagnose", folder, "--why", "degraded-pair-after-decode-restarts"]) == 0
        assert "handoffs-held" in capsys.readouterr().out

    def test_an_unknown_mode_is_named(self, folder, capsys):
        """`--why` of a mode that is not judged says which are."""
        assert main(["diagnose", folder, "--why", "gremlins"]) == 2
        assert "degraded-pair-after-decode-restarts" in capsys.readouterr().err


class TestOthers:
    """The other words that read a folder."""

    def test_plan(self, folder, capsys):
        """A plan is made offline, under the default policy, and nothing is done."""
        assert main(["plan", folder, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["record"] == "plan"

    def test_show(self, folder, capsys):
        """An incident is shown as it was recorded."""
        assert main(["incidents", "show", folder]) == 0
        assert "silent-stall on prefill-0>decode-0" in capsys.readouterr().out

    def test_repair_without_approval_does_nothing(self, folder, capsys):
        """Without approval the plan is shown, nothing is done, and the command is named."""
        assert main(["repair", folder]) == 5
        out, err = capsys.readouterr()

        assert "stop decode-0" in out
        assert f"tandem repair {BARE.id} --approve" in err

    def test_repair_needs_a_deployment(self, folder, capsys):
        """A stranger's folder cannot be repaired here: there is no deployment."""
        assert main(["repair", folder, "--approve"]) == 3
        assert "tandem.toml" in capsys.readouterr().err

    def test_no_incident_is_said(self, folder, capsys):
        """Where nothing happened the list is empty and `show` says how to begin."""
        assert main(["incidents"]) == 0
        assert capsys.readouterr().out == "no incident yet\n"
        assert main(["incidents", "show"]) == 4

    def test_a_damaged_folder_is_told(self, folder, capsys, tmp_path):
        """A damaged folder is refused by name, never half read."""
        (tmp_path / "bundle" / "records.jsonl").write_text("{}\n")

        assert main(["diagnose", folder]) == 5
        assert "records.jsonl" in capsys.readouterr().err
