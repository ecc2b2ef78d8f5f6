"""The header of a KV blob: read back as packed, refused by name when anything differs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posting import IDENTITY, header
from tandem_engine.handoff.header import (
    EXTRA_BYTES_MAX,
    HEADER_BYTES,
    Header,
    open_blob,
    pack,
    unpack,
)
from tandem_engine.model import Identity, KvMismatchError

identities = st.builds(
    Identity,
    name=st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=64),
    model_hash=st.text("0123456789abcdef", max_size=32),
    library_build=st.text("abc-0123456789.", max_size=32),
    kv_dtype=st.sampled_from(["f16", "u8", "q8_0"]),
    page_size=st.integers(1, 2**32 - 1),
)
headers = st.builds(
    Header,
    identity=identities,
    room=st.integers(0, 2**63 - 1),
    tokens=st.integers(0, 2**32 - 1),
    first_token=st.integers(-1, 2**31 - 1),
    cached_tokens=st.integers(0, 2**32 - 1),
    payload_bytes=st.integers(0, 2**63),
    checksum=st.integers(0, 2**32 - 1),
    extra=st.binary(max_size=EXTRA_BYTES_MAX),
)


class TestHeader:
    """One page says what a blob is."""

    @given(headers)
    def test_it_round_trips(self, facts):
        """Every header is read back as it was packed, from exactly one page."""
        page = pack(facts)

        assert len(page) == HEADER_BYTES
        assert facts == unpack(memoryview(page))

    @given(headers, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
    def test_any_damaged_byte_is_seen(self, facts, place, flip):
        """A header with one changed byte is refused."""
        page = bytearray(pack(facts))
        page[place] ^= flip
        with pytest.raises(KvMismatchError):
            unpack(memoryview(page))

    @given(st.binary(max_size=200))
    def test_noise_is_no_header(self, noise):
        """Bytes that are too few, or not a header, are refused."""
        with pytest.raises(KvMismatchError):
            unpack(memoryview(noise))
        with pytest.raises(KvMismatchError):
            unpack(memoryview(noise.ljust(HEADER_BYTES, b"\1")))

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"extra": bytes(EXTRA_BYTES_MAX + 1)}, "extra"),
            ({"identity": Identity("x" * 65, "", "", "", 1)}, "name"),
            ({"identity": Identity("", "f" * 33, "", "", 1)}, "model_hash"),
            ({"tokens": -1}, "out of range"),
            ({"room": 2**64}, "out of range"),
        ],
    )
    def test_what_does_not_fit_is_named(self, fields, says):
        """A field too long for the page is refused before anything is written."""
        facts = {"identity": IDENTITY, "room": 1, "tokens": 1, "first_token": 1} | fields
        with pytest.raises(ValueError, match=says):
            pack(Header(**facts))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("model_hash", "1111111111111111"),
            ("library_build", "toy-2"),
            ("kv_dtype", "f16"),
            ("page_size", 16),
        ],
    )
    def test_a_foreign_blob_is_refused_by_field(self, field, value):
        """Each part of the identity that differs is named with both values."""
        mine = {name: getattr(IDENTITY, name) for name in IDENTITY.__slots__} | {field: value}
        blob = memoryview(pack(header(5).sealed(memoryview(b"kv"))) + b"kv")
        with pytest.raises(KvMismatchError) as refused:
            open_blob(blob, identity=Identity(**mine), room=5)

        assert (
            str(refused.value)
            == f"{field} is {getattr(IDENTITY, field)!r} there and {value!r} here"
        )

    def test_another_room_length_or_payload_is_refused(self):
        """A blob of another room, token count, size or content is refused by that name."""
        page = pack(header(5, tokens=3).sealed(memoryview(b"kv")))
        good = memoryview(page + b"kv")

        found, payload = open_blob(good, identity=IDENTITY, room=5, tokens=3)
        assert (found.first_token, bytes(payload)) == (7, b"kv")
        with pytest.raises(KvMismatchError, match="room is 5 there and 6 here"):
            open_blob(good, identity=IDENTITY, room=6)
        with pytest.raises(KvMismatchError, match="tokens is 3 there and 4 here"):
            open_blob(good, identity=IDENTITY, room=5, tokens=4)
        with pytest.raises(KvMismatchError, match="payload_bytes is 2 there and 1 arrived"):
            open_blob(good[:-1], identity=IDENTITY, room=5)
        with pytest.raises(KvMismatchError, match="checksum"):
            open_blob(memoryview(page + b"kw"), identity=IDENTITY, room=5)
