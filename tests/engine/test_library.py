"""The ctypes layer: a wheel that does not fit is refused before it is called."""

import ctypes
import sys

import pytest

from tandem_engine import library
from tandem_engine.model import SetupError
from tandem_engine.structs import CONTEXT_DEFAULTS, MODEL_DEFAULTS, ContextParams, ModelParams
from tandem_engine.weights import Weights


def filled(kind, defaults):
    """A struct holding the given defaults."""
    params = kind()
    for field, value in defaults.items():
        setattr(params, field, value)
    return params


@pytest.fixture
def known():
    """Structs as the pinned library fills them in."""
    return (
        filled(ModelParams, MODEL_DEFAULTS),
        filled(ContextParams, CONTEXT_DEFAULTS),
    )


class TestLayout:
    """The self-check of struct layouts."""

    def test_the_known_layout_passes(self, known):
        """The defaults of the pinned version are accepted."""
        library.check_layout(*known)

    @pytest.mark.parametrize("field", sorted(CONTEXT_DEFAULTS))
    def test_any_context_default_is_checked(self, known, field):
        """Another value in any checked context field is refused by its name and the pin."""
        other = 7 if getattr(known[1], field) != 7 else 8
        setattr(known[1], field, not other if isinstance(getattr(known[1], field), bool) else other)
        if isinstance(CONTEXT_DEFAULTS[field], bool):
            setattr(known[1], field, not CONTEXT_DEFAULTS[field])
        with pytest.raises(SetupError, match=rf"ContextParams\.{field} .*{library.VERSION}"):
            library.check_layout(*known)

    @pytest.mark.parametrize("shift", [4, 8])
    @pytest.mark.parametrize("kind", [ModelParams, ContextParams])
    def test_a_field_inserted_in_front_is_seen(self, known, kind, shift):
        """A struct that grew a field at its beginning does not pass for the known one."""
        which = 0 if kind is ModelParams else 1
        raw = bytes(shift) + bytes(known[which])
        shifted = list(known)
        shifted[which] = kind.from_buffer_copy(raw)
        with pytest.raises(SetupError, match=kind.__name__):
            library.check_layout(*shifted)


class TestRefusals:
    """What is missing or wrong is one sentence with the next thing to do."""

    def test_another_version_is_refused(self):
        """Only the pinned version is accepted, and the sentence names both."""
        library.check_version(library.VERSION)
        with pytest.raises(SetupError, match=rf"2027\.1\.1 .*pip install.*{library.VERSION}"):
            library.check_version("2027.1.1")

    def test_a_missing_package_is_named(self, monkeypatch):
        """Without the wheel the sentence says how to install it."""
        monkeypatch.setattr(library, "PACKAGE", "no_such_package_here")
        with pytest.raises(SetupError, match="pip install no_such_package_here=="):
            library.locate_library()

    def test_a_wheel_without_the_library_is_named(self, monkeypatch):
        """A package that has no extension module sends the user to the toy."""
        monkeypatch.setattr(library, "PACKAGE", "json")
        with pytest.raises(SetupError, match="toy"):
            library.locate_library()

    def test_a_missing_symbol_is_named(self):
        """A library that lacks a function is refused by that function's name."""
        with pytest.raises(SetupError, match="llama_log_set"):
            library.bind(ctypes.CDLL(None))

    def test_a_file_that_is_no_model_is_named(self, tmp_path):
        """Bytes that are no GGUF are refused with what llama.cpp said of them."""
        path = tmp_path / "noise.gguf"
        path.write_bytes(b"GGUF" + bytes(1000))
        with pytest.raises(SetupError, match=r"noise\.gguf is not a model"):
            Weights(library.open_library(), path)


class TestOpen:
    """The real wheel, as installed."""

    def test_it_loads_without_the_python_package(self):
        """The pinned wheel passes every check, and its Python module stays out."""
        assert library.open_library() is library.open_library()
        assert "xllamacpp" not in sys.modules

    def test_the_log_is_kept_and_not_printed(self, capfd, tmp_path):
        """The library's complaints go into error sentences and never to the terminal."""
        path = tmp_path / "empty.gguf"
        path.write_bytes(b"")
        with pytest.raises(SetupError, match=r"llama\.cpp: "):
            Weights(library.open_library(), path)

        assert capfd.readouterr() == ("", "")
