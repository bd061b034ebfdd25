"""The record: a chunk as it lies on a tier below the host tier.

A record is a fixed little-endian header and the payload. Header layout (256 bytes, version 1):

    offset size  field
         0    8  magic "LMKVREC" and a zero byte
         8    2  format version (1)
        10    2  codec id (0 = raw)
        12    4  flags (0; a reader refuses a record with a flag it does not know)
        16   68  key: namespace digest, block hash, group
        84    4  zero
        88    8  raw length of the chunk in bytes
        96    8  stored length of the payload in bytes
       104   16  XXH3-128 of the stored payload (canonical, big-endian)
       120    8  creation time, Unix nanoseconds
       128   16  fingerprint of the chunk's layout
       144   32  MAC over header and payload; zero when no key is configured
       176   72  zero, reserved
       248    8  XXH3-64 over bytes 0..247 (little-endian)

Nothing in a header is trusted before its checksum holds and its lengths are bounded by the
caller's buffer.
"""

import struct
from dataclasses import dataclass

import xxhash

from lmkv.keys import KEY_BYTES
from lmkv.tier import Buffer, buffer_bytes, pieces

MAGIC = b"LMKVREC\0"
VERSION = 1
HEADER_BYTES = 256
CODEC_RAW = 0

_BODY = struct.Struct("<8sHHI68s4xQQ16sQ16s32s72x")
_CHECKSUM = struct.Struct("<Q")
_NO_MAC = bytes(32)
_NO_LAYOUT = bytes(16)

assert _BODY.size + _CHECKSUM.size == HEADER_BYTES
assert KEY_BYTES == 68


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A header whose checksum held."""

    key: bytes
    codec: int
    raw_bytes: int
    stored_bytes: int
    payload_digest: bytes
    created_ns: int
    layout: bytes


#: xxhash gives up the GIL for inputs above 64 KiB. For a large piece that is what lets two threads
#: hash at once; for a small one, getting it back beside a busy thread takes longer than the hashing.
_GIL_PIECE_BYTES = 64 << 10
_SMALL_BYTES = 1 << 20


def payload_digest(payload: Buffer) -> bytes:
    """XXH3-128 of the payload, 16 bytes; the same however it is cut into pieces."""
    hasher = xxhash.xxh3_128()
    for piece in pieces(payload):
        step = _GIL_PIECE_BYTES if piece.nbytes <= _SMALL_BYTES else piece.nbytes
        for start in range(0, piece.nbytes, step):
            hasher.update(piece[start : start + step])
    return hasher.digest()


def encode_header(
    key: bytes,
    payload: Buffer,
    created_ns: int,
    *,
    raw_bytes: int | None = None,
    codec: int = CODEC_RAW,
    layout: bytes = _NO_LAYOUT,
) -> bytes:
    """Header for `payload` stored under `key`; `HEADER_BYTES` long."""
    stored = buffer_bytes(payload)
    body = _BODY.pack(
        MAGIC,
        VERSION,
        codec,
        0,
        key,
        stored if raw_bytes is None else raw_bytes,
        stored,
        payload_digest(payload),
        created_ns,
        layout,
        _NO_MAC,
    )
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def decode_header(block: bytes | bytearray | memoryview) -> RecordHeader | None:
    """The header at the start of `block`, or None if it is not a valid one of this version."""
    if len(block) < HEADER_BYTES or block[:8] != MAGIC:
        return None
    body = block[: HEADER_BYTES - _CHECKSUM.size]
    (checksum,) = _CHECKSUM.unpack_from(block, HEADER_BYTES - _CHECKSUM.size)
    if xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    _, version, codec, flags, key, raw, stored, digest, created, layout, _ = _BODY.unpack_from(block)
    if version != VERSION or flags:
        return None
    return RecordHeader(key, codec, raw, stored, digest, created, layout)


def verify(header: RecordHeader | None, key: bytes, payload: Buffer) -> bool:
    """Whether `header` and `payload` are the raw chunk stored under `key`, byte for byte."""
    return (
        header is not None
        and header.key == key
        and header.codec == CODEC_RAW
        and header.raw_bytes == header.stored_bytes == buffer_bytes(payload)
        and payload_digest(payload) == header.payload_digest
    )
