"""The header in front of every KV blob: what the blob is, and what must be equal to take it.

One page, so that the KV behind it is page aligned: a fixed part, then up to `EXTRA_BYTES_MAX` bytes
of the serving layer's own (the first token's log-probabilities, for example).

For: packing, unpacking, and refusing a blob that does not fit by the name of the field.
Not for: the prompt's tokens; both sides have these from the request.
"""

import struct
import zlib
from dataclasses import dataclass, replace

from tandem_engine.model import Identity, KvMismatchError

HEADER_BYTES = 4096
FORMAT_VERSION = 1

_MAGIC = b"TANDEMKV"
# magic, format, page size, tokens, cached tokens, first token, room, payload bytes,
# payload checksum, extra bytes, then the identity's strings
_FIXED = struct.Struct("<8sIIIIiQQII32s32s64s16s")
_HEADER_CHECKSUM = struct.Struct("<I")
EXTRA_BYTES_MAX = HEADER_BYTES - _FIXED.size - _HEADER_CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Header:
    """The facts of one blob; `payload_bytes` and `checksum` are filled in by the sender."""

    identity: Identity
    room: int
    tokens: int
    """Tokens whose KV the payload holds."""
    first_token: int
    """The token the prefill sampled; -1 for none."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefill did not compute anew."""
    payload_bytes: int = 0
    checksum: int = 0
    extra: bytes = b""

    def sealed(self, payload: memoryview) -> "Header":
        """This header for exactly this payload."""
        return replace(self, payload_bytes=payload.nbytes, checksum=checksum_of(payload))


def checksum_of(payload: memoryview) -> int:
    """CRC-32 of a payload; releases the GIL."""
    return zlib.crc32(payload)


def pack(header: Header) -> bytes:
    """The header's page; raises `ValueError` when a field does not fit."""
    if len(header.extra) > EXTRA_BYTES_MAX:
        raise ValueError(f"extra holds {len(header.extra)} bytes, more than {EXTRA_BYTES_MAX}")
    identity = header.identity
    try:
        fixed = _FIXED.pack(
            _MAGIC,
            FORMAT_VERSION,
            identity.page_size,
            header.tokens,
            header.cached_tokens,
            header.first_token,
            header.room,
            header.payload_bytes,
            header.checksum,
            len(header.extra),
            _text("model_hash", identity.model_hash, 32),
            _text("library_build", identity.library_build, 32),
            _text("name", identity.name, 64),
            _text("kv_dtype", identity.kv_dtype, 16),
        )
    except struct.error as error:
        raise ValueError(f"a field of the KV header is out of range: {error}") from None
    body = (fixed + header.extra).ljust(HEADER_BYTES - _HEADER_CHECKSUM.size, b"\0")
    return body + _HEADER_CHECKSUM.pack(zlib.crc32(body))


def unpack(page: memoryview) -> Header:
    """Read a header's page; raises `KvMismatchError` when it is not one, or is damaged."""
    if page.nbytes < HEADER_BYTES:
        raise KvMismatchError(f"a KV blob of {page.nbytes} bytes is shorter than its header")
    body = page[: HEADER_BYTES - _HEADER_CHECKSUM.size]
    fields = _FIXED.unpack_from(page)
    magic, version, page_size, tokens, cached, first, room, payload_bytes, checksum = fields[:9]
    if magic != _MAGIC:
        raise KvMismatchError(f"magic is {magic!r}, not {_MAGIC!r}: this is not a KV blob")
    if version != FORMAT_VERSION:
        raise KvMismatchError(f"format version is {version} there and {FORMAT_VERSION} here")
    (header_checksum,) = _HEADER_CHECKSUM.unpack_from(page, len(body))
    if header_checksum != zlib.crc32(body):
        raise KvMismatchError(f"the KV header of room {room} is damaged: its checksum differs")
    model_hash, library_build, name, kv_dtype = (raw.rstrip(b"\0").decode() for raw in fields[10:])
    return Header(
        identity=Identity(
            name=name,
            model_hash=model_hash,
            library_build=library_build,
            kv_dtype=kv_dtype,
            page_size=page_size,
        ),
        room=room,
        tokens=tokens,
        first_token=first,
        cached_tokens=cached,
        payload_bytes=payload_bytes,
        checksum=checksum,
        extra=bytes(page[_FIXED.size : _FIXED.size + fields[9]]),
    )


def open_blob(
    blob: memoryview, *, identity: Identity, room: int, tokens: int | None = None
) -> tuple[Header, memoryview]:
    """The verified header and the payload of an arrived blob.

    Raises `KvMismatchError` naming the first field that differs, and both values.
    """
    header = unpack(blob)
    verify(header, identity=identity, room=room, tokens=tokens)
    payload = blob[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    if payload.nbytes != header.payload_bytes:
        raise KvMismatchError(
            f"payload_bytes is {header.payload_bytes} there and {payload.nbytes} arrived"
        )
    checksum = checksum_of(payload)
    if checksum != header.checksum:
        raise KvMismatchError(
            f"checksum is {header.checksum:08x} there and {checksum:08x} here: the KV of room "
            f"{room} was damaged on its way"
        )
    return header, payload


def verify(header: Header, *, identity: Identity, room: int, tokens: int | None = None) -> None:
    """Refuse a header of another model, library, dtype, page size, room or prompt length."""
    pairs: list[tuple[str, object, object]] = [
        (field, getattr(header.identity, field), getattr(identity, field))
        for field in ("model_hash", "library_build", "kv_dtype", "page_size")
    ]
    pairs.append(("room", header.room, room))
    if tokens is not None:
        pairs.append(("tokens", header.tokens, tokens))
    for field, there, here in pairs:
        if there != here:
            raise KvMismatchError(f"{field} is {there!r} there and {here!r} here")


def _text(field: str, value: str, size_bytes: int) -> bytes:
    raw = value.encode()
    if len(raw) > size_bytes:
        raise ValueError(f"{field} {value!r} is longer than {size_bytes} bytes")
    return raw
