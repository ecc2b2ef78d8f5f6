"""An incident is found by folder, by id, by the beginning of one, or as the latest."""

import pytest

from tandem.cli import complete
from tandem.cli.folders import deployment_root, find_folder, incident_folders, incidents_home
from tandem.errors import WorldError

FIRST = "2025-11-29T21-00-06Z-a"
SECOND = "2025-11-29T23-00-00Z-b"
THIRD = "2025-11-30T01-00-00Z-c"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Give a deployment's folder with three incidents, and stand below it."""
    incidents = tmp_path / ".tandem" / "incidents"
    for name in (SECOND, FIRST, THIRD):
        (incidents / name).mkdir(parents=True)
        (incidents / name / "records.jsonl").touch()
    (incidents / "half-made").mkdir()
    (tmp_path / "tandem.toml").write_text('[[member]]\nname = "decode-0"\n')
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    monkeypatch.delenv("TANDEM_CONFIG", raising=False)
    return incidents


class TestFind:
    """Which incident is meant."""

    @pytest.mark.parametrize(
        ("said", "meant"),
        [("latest", THIRD), (FIRST, FIRST), ("2025-11-30", THIRD), ("2025-11-29T23", SECOND)],
    )
    def test_a_name_means_one(self, home, said, meant):
        """An id, an unambiguous beginning and `latest` each mean one incident."""
        assert find_folder(said) == home / meant

    def test_a_folder_means_itself(self, home, tmp_path, monkeypatch):
        """A folder is taken as it is, wherever it lies."""
        monkeypatch.chdir(tmp_path.parent)

        assert find_folder(str(home / FIRST)) == home / FIRST

    @pytest.mark.parametrize(
        ("said", "reason"),
        [
            ("2025-11-29", "2 incidents"),
            ("x", "No incident"),
            ("../below", "below is no incident's"),
        ],
    )
    def test_what_is_not_clear_is_refused(self, home, said, reason):
        """No match and several matches are told apart."""
        with pytest.raises(WorldError, match=reason):
            find_folder(said)

    def test_no_incident_says_how_to_open_one(self, tmp_path, monkeypatch):
        """Without any incident the next step is named."""
        monkeypatch.chdir(tmp_path)

        with pytest.raises(WorldError, match="tandem investigate"):
            find_folder("latest")

    def test_a_folder_without_records_is_none(self, home):
        """Only a folder with records counts, newest first."""
        assert [folder.name for folder in incident_folders(home)] == [THIRD, SECOND, FIRST]


class TestRoot:
    """Which deployment is meant."""

    def test_the_nearest_upwards(self, home):
        """Without being told, the nearest folder upwards that has a configuration counts."""
        assert incidents_home() == home

    def test_a_named_configuration_wins(self, home, tmp_path, monkeypatch):
        """A named file wins over $TANDEM_CONFIG, and that over the nearest."""
        monkeypatch.setenv("TANDEM_CONFIG", "/one/tandem.toml")

        assert str(deployment_root()) == "/one"
        assert deployment_root(tmp_path / "two.toml") == tmp_path


class TestComplete:
    """TAB offers what is there."""

    def test_members(self, home):
        """Members come from the nearest tandem.toml."""
        assert (complete.members("d"), complete.members("p")) == (["decode-0"], [])

    @pytest.mark.parametrize("text", ["[[member", "member = 3", '[[member]]\nrole = "x"'])
    def test_a_wrong_file_completes_to_nothing(self, home, tmp_path, text):
        """A file that cannot be read offers nothing and breaks nothing."""
        (tmp_path / "tandem.toml").write_text(text)

        assert complete.members("") == []

    def test_incidents(self, home):
        """Incidents are offered newest first, after `latest`."""
        assert complete.incidents("") == ["latest", THIRD, SECOND, FIRST]
        assert complete.incidents("2025-11-30") == [THIRD]
