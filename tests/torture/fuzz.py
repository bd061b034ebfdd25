"""Malformed headers, journals and replies: a seeded fuzzer of our own, which knows the checksums.

Half of what it makes has a right checksum, so that what lies behind it is reached.
"""

import gc
import os
import random
import socket
import struct
from pathlib import Path
from typing import Any

import xxhash

from lmkv.backends.chunks import Index
from lmkv.backends.file import FileTier
from lmkv.backends.journal import ENTRY_BYTES, Image, Journal, read_journal, record_blocks, replay
from lmkv.backends.resp import ProtocolError, Refused, Wire
from lmkv.backends.values import Values, lengths, with_memory, without_memory
from lmkv.keys import KEY_BYTES
from lmkv.record import HEADER_BYTES, decode_header, encode_header, verify
from lmkv.tier import Status
from tests.redis_servers import garbled
from tests.test_file_tier import CAPACITY, counters, get, key, payload, put
from tests.torture.base import MAX_GROWTH_BYTES, Run, peak_bytes, reset_peak

SEGMENT_BYTES = 8 * 2**20
#: What other rounds are made of: numbers at which something may wrap around or end.
EDGES = (
    0,
    1,
    2,
    3,
    7,
    8,
    255,
    256,
    2**15,
    2**16 - 1,
    2**16,
    2**28 - 1,
    2**28,
    2**31,
    2**32 - 1,
    2**63,
    2**64 - 1,
)
#: Offset and length of each field of a header that `verify` must mind: magic, version, codec, flags, key, raw
#: and stored length, digest.
MINDED = ((0, 8), (8, 2), (10, 2), (12, 4), (16, 68), (88, 8), (96, 8), (104, 16))


def check_growth(before: int) -> str:
    """How much memory was needed beyond `before`, which is bounded."""
    grown = max(0, peak_bytes() - before)
    assert grown <= MAX_GROWTH_BYTES, f"{grown} bytes of memory"
    return f"memory +{grown / 2**20:.0f} MiB"


def mutated(data: bytes, chance: random.Random) -> bytes:
    """With some bytes changed, lost or added."""
    content = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(content) + 1)
        match chance.randrange(6):
            case 0:
                content[at:at] = chance.randbytes(chance.choice((1, 3, 64)))
            case 1:
                del content[at : at + chance.choice((1, 3, 64))]
            case 2:
                content[at : at + 4] = struct.pack("<Q", chance.choice(EDGES))[:4]
            case 3:
                content[at : at + 8] = struct.pack("<Q", chance.choice(EDGES))
            case _:
                if at < len(content):
                    content[at] ^= 1 << chance.randrange(8)
    return bytes(content)


def headers(run: Run) -> str:
    """Headers before a right payload: none of them is taken for it but the right one."""
    content = payload(1, 5000)
    right = encode_header(key(1), content, 1)
    before = reset_peak()
    decoded = accepted = 0
    for chance in run.rounds():
        block = mutated(right, chance)
        if chance.random() < 0.5:
            body = block[: HEADER_BYTES - 8].ljust(HEADER_BYTES - 8, b"\0")
            block = body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
        header = decode_header(block)
        decoded += header is not None
        if verify(header, key(1), content):
            accepted += 1
            for start, length in MINDED:
                assert block[start : start + length] == right[start : start + length], (
                    "a wrong header was taken"
                )
        assert not verify(header, key(123456, 9), content), "it was taken for another chunk"
    return f"0 crashes, 0 wrong ones taken; {decoded:,} were well-formed; {check_growth(before)}"


def _entry(chance: random.Random) -> bytes:
    """A journal entry: its fields are likely ones or edges."""

    def some(bits: int, likely: int) -> int:
        value = chance.randrange(likely) if chance.random() < 0.8 else chance.choice(EDGES)
        return value & (1 << bits) - 1

    kind = some(8, 9)
    number = chance.randrange(12)
    rest = key(number)[32:] if kind != 1 else key(number)[:32] + bytes(4)
    if kind in (5, 6):
        rest = struct.pack("<Q", chance.choice((CAPACITY, *EDGES))).ljust(36, b"\0")
    body = struct.pack(
        "<BBHHHIII36s",
        *(kind, chance.choice((0, 0, 0, 1, 255)), some(16, 3), some(16, 4), some(16, 100)),
        *(some(32, 4), some(32, 20_000), some(32, 2**32), rest),
    )
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def _journal(chance: random.Random) -> bytes:
    entries = b"".join(_entry(chance) for _ in range(chance.randrange(40)))
    return mutated(entries, chance) if chance.random() < 0.5 else entries


def _check_index(index: Index) -> None:
    """It offers nothing beyond the end of a segment."""
    found = [member for segment in index.segments for member in index.members(segment)]
    assert len(found) == index.chunks
    assert all((m.place & 0xFFFF) + record_blocks(m.length) <= SEGMENT_BYTES // 4096 for m in found)
    assert index.used_blocks == sum(record_blocks(m.length) for m in found)


def journals(run: Run) -> str:
    """Journals as a reader, a follower and a compaction find them; one in 50 below a tier."""
    fd = os.memfd_create("journal")
    path = run.path / "w0.journal"
    before = reset_peak()
    entries = opened = 0
    for chance in run.rounds():
        content = _journal(chance)
        os.ftruncate(fd, 0)
        os.pwrite(fd, content, 0)
        image = read_journal(fd)
        entries += len(image.entries)
        assert image.damaged + len(image.entries) <= len(content) // ENTRY_BYTES + 1
        assert len(image.entries[replay(image).kept]) <= len(image.entries)
        index = Index.build(image, set(range(4)), SEGMENT_BYTES)
        _check_index(index)
        cut = chance.randrange(len(image.entries) + 1)
        for part in (image.entries[:cut], image.entries[cut:]):  # what a follower reads
            index.apply(Image(part, image.namespaces, 0, 0), SEGMENT_BYTES)
            _check_index(index)
        if chance.random() < 0.2:
            _compact(path, content)
        if run.at % 50 == 0:
            opened += _open(run.path / "kv", content)
    os.close(fd)
    return f"0 crashes; {entries:,} well-formed entries, {opened:,} tiers opened; {check_growth(before)}"


def _compact(path: Path, content: bytes) -> None:
    """What a compacted journal says is what it said before."""
    path.write_bytes(content)
    journal = Journal(path)
    before = Index.build(journal.read(), set(range(4)), SEGMENT_BYTES)
    journal.compact()
    after = Index.build(journal.read(), set(range(4)), SEGMENT_BYTES)
    journal.close()
    assert {k: v for k, v in before.spaces.items() if v} == {k: v for k, v in after.spaces.items() if v}


def _open(path: Path, content: bytes) -> bool:
    """A tier above it serves nothing wrong, and stores."""
    tier = FileTier(path, CAPACITY)  # with what the rounds before left
    tier.close()
    (path / "w0.journal").write_bytes(content)
    tier = FileTier(path, CAPACITY)
    assert Status.OK not in get(tier, list(range(12)), 100) or counters(tier)["get_hits"]
    assert put(tier, [100, 101], 100) == [Status.OK] * 2
    assert get(tier, [100, 101], 100) == [Status.OK] * 2
    tier.close()
    del tier
    gc.collect()  # a tier's memory is part of a cycle
    return True


class _Connection:
    """What a `Wire` needs of redis-py's."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def disconnect(self) -> None:
        self._sock.close()


PART = 1000


def replies(run: Run) -> str:
    """Replies of a server that went mad, to each command that lmkv sends, before it hangs up."""
    before = reset_peak()
    values = Values(PART, None)
    seen = {"taken": 0, "refused": 0, "protocol errors": 0, "hung up": 0}
    for chance in run.rounds():
        size = chance.choice((1, PART, 3 * PART + 5))
        ours, theirs = socket.socketpair()
        with theirs:
            wire = Wire(_Connection(ours))
            buffer = memoryview(bytearray(size))
            kind = chance.randrange(5)
            right, ask = _exchange(kind, values, size, buffer)
            wrong = mutated(right, chance) if chance.random() < 0.7 else garbled(right, chance)
            theirs.sendall(wrong)
            theirs.shutdown(socket.SHUT_WR)
            try:
                result = ask(wire)[0]
                wrong_bytes = kind == 0 and result is Status.OK and buffer != payload(1, size)
                assert not wrong_bytes, "wrong bytes are served"
                seen["refused" if isinstance(result, Refused) else "taken"] += 1
            except ProtocolError:
                seen["protocol errors"] += 1
            except OSError:
                seen["hung up"] += 1
            finally:
                wire.close()
    text = ", ".join(f"{count:,} {what}" for what, count in seen.items())
    return f"0 crashes, 0 wrong bytes; {text}; {check_growth(before)}"


def _exchange(kind: int, values: Values, size: int, buffer: memoryview) -> tuple[bytes, Any]:
    """A right reply, and the call that takes it; of kind 0 one that reads a chunk."""
    chunk = with_memory([key(1)], [buffer])
    header = encode_header(key(1), payload(1, size), 1)
    match kind:
        case 0:
            content = payload(1, size)
            parts = [header + bytes(content[:PART])]
            parts += [bytes(content[at : at + PART]) for at in range(PART, size, PART)]
            bulks = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
            head = b"*%d\r\n" % len(parts) if len(parts) > 1 else b""
            return head + bulks, lambda wire: values.get(wire, chunk)
        case 1:
            parts_of = -(-size // PART)
            right = b"+OK\r\n"
            if parts_of > 1:
                right += b"+QUEUED\r\n" * parts_of + b"*%d\r\n" % parts_of + b"+OK\r\n" * parts_of
            return right, lambda wire: values.put(wire, chunk)
        case 2:
            return b":1\r\n", lambda wire: values.whole(wire, chunk)
        case 3:
            right = b"$%d\r\n%b\r\n:%d\r\n" % (HEADER_BYTES, header, HEADER_BYTES + min(size, PART))
            return right, lambda wire: lengths(wire, without_memory([bytes(KEY_BYTES)]))
        case _:
            right = b"*2\r\n$1\r\n0\r\n*2\r\n$3\r\nabc\r\n$2\r\nde\r\n"
            return right, lambda wire: [wire.reply()]
