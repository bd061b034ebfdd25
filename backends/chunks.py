"""Which chunk lies where: the index of the file tier, which every process keeps for itself.

A location is one int: segment << 45 | offset in blocks << 29 | payload bytes << 1 | read since written.
A place is segment << 16 | offset in blocks: adjacent records have places a record apart.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from lmkv.backends.journal import PUT, READ, RECYCLE, REMOVE, Image, Row, record_blocks, replay, segment_ids
from lmkv.backends.segments import BLOCK_BYTES
from lmkv.keys import NAMESPACE_BYTES

HOT = 1
_EMPTY: dict[bytes, int] = {}


def place_of(location: int) -> int:
    """Segment << 16 | offset in blocks."""
    return location >> 29


def length_of(location: int) -> int:
    """Bytes of the payload."""
    return location >> 1 & (1 << 28) - 1


class Segment:
    """What the index knows of one segment."""

    __slots__ = ("generation", "members", "tail")

    def __init__(self, generation: int, tail: int = 0) -> None:
        self.generation = generation
        #: End of the last record that was journaled, in blocks. What was removed keeps its place until the
        #: segment is recycled: a new record there would be taken for the removed one by the next replay.
        self.tail = tail
        #: By namespace, the keys written to it; some may be gone or have moved since.
        self.members: dict[bytes, list[bytes]] = {}


class Member(NamedTuple):
    """A chunk of a segment. `place` comes first: sorting puts neighbours side by side."""

    place: int
    length: int
    key: bytes
    hot: bool


class Index:
    """Key -> location, in two levels so that a chunk costs about 200 bytes. The caller locks."""

    def __init__(self) -> None:
        self.spaces: dict[bytes, dict[bytes, int]] = {}
        #: The one that was recycled first comes first.
        self.segments: dict[int, Segment] = {}
        self.chunks = 0
        self.used_blocks = 0

    @classmethod
    def build(cls, image: Image, existing: set[int], segment_bytes: int) -> "Index":
        """Index of what a whole journal says about existing segments."""
        index = cls()
        result = replay(image)
        for segment, (generation, tail) in result.segments.items():
            index.segments[segment] = Segment(generation, tail)
        entries = image.entries[result.live]
        columns = (entries["namespace"], segment_ids(entries), entries["offset"], entries["length"])
        rows = zip(
            entries["rest"].tolist(),
            result.read[result.live].tolist(),
            *(column.tolist() for column in columns),
            strict=True,
        )
        for rest, hot, number, segment, offset, length in rows:
            fits = (offset + record_blocks(length)) * BLOCK_BYTES <= segment_bytes
            if fits and segment in existing and number in image.namespaces:
                index.insert(image.namespaces[number], rest, segment, offset, length, hot=hot)
        return index

    def apply(self, image: Image, segment_bytes: int) -> list[bytes]:
        """Follow what was appended to the journal. Returns the keys that were removed."""
        removed = []
        for kind, high, name, number, offset, generation, length, _, rest, _ in image.entries.tolist():
            if kind not in (PUT, REMOVE, RECYCLE, READ):
                continue
            segment = high << 16 | number
            digest = image.namespaces.get(name)
            if kind == REMOVE and digest is not None:
                removed.append(digest + rest)
            if kind == REMOVE and not length:
                continue
            known = self.segments.get(segment)
            if kind != READ and (known is None or known.generation < generation):
                self.recycle(segment, generation)
            elif known is None or known.generation > generation:
                continue
            end = offset + record_blocks(length)
            if digest is None or end * BLOCK_BYTES > segment_bytes or kind == RECYCLE:
                continue
            if kind == READ:
                self.mark_hot(digest + rest, segment << 16 | offset)
                continue
            self.segments[segment].tail = max(self.segments[segment].tail, end)
            if kind == PUT:
                self.insert(digest, rest, segment, offset, length)
            elif self.lies_at(digest + rest, segment << 16 | offset):
                self.discard(digest + rest)
        return removed

    def has(self, key: bytes) -> bool:
        return key[NAMESPACE_BYTES:] in self.spaces.get(key[:NAMESPACE_BYTES], _EMPTY)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        space = self.spaces.get  # twice as fast as `has` for each
        return [key[NAMESPACE_BYTES:] in space(key[:NAMESPACE_BYTES], _EMPTY) for key in keys]

    def lies_at(self, key: bytes, place: int) -> bool:
        location = self.locate(key)
        return location is not None and place_of(location) == place

    def locate(self, key: bytes) -> int | None:
        return self.spaces.get(key[:NAMESPACE_BYTES], _EMPTY).get(key[NAMESPACE_BYTES:])

    def row(self, kind: int, key: bytes) -> Row:
        """The journal entry about an indexed chunk."""
        location = self.locate(key)
        assert location is not None
        segment, offset = location >> 45, place_of(location) & 0xFFFF
        generation = self.segments[segment].generation
        return Row(kind, segment, generation, key, offset, length_of(location), int(time.time()))

    def insert(
        self, digest: bytes, rest: bytes, segment: int, offset: int, length: int, *, hot: bool = False
    ) -> None:
        space = self.spaces.setdefault(digest, {})
        self._forget(space, rest)
        space[rest] = segment << 45 | offset << 29 | length << 1 | hot
        known = self.segments.get(segment)
        if known is None:
            known = self.segments[segment] = Segment(0)
        known.members.setdefault(digest, []).append(rest)
        blocks = record_blocks(length)
        known.tail = max(known.tail, offset + blocks)
        self.chunks += 1
        self.used_blocks += blocks

    def discard(self, key: bytes) -> None:
        self._forget(self.spaces.get(key[:NAMESPACE_BYTES], {}), key[NAMESPACE_BYTES:])

    def recycle(self, segment: int, generation: int) -> int:
        """Drop what lies in a segment, which is the newest from now on; returns how many chunks."""
        before = self.chunks
        known = self.segments.pop(segment, None)
        for digest, rests in known.members.items() if known else ():
            space = self.spaces.get(digest, {})
            for rest in rests:
                location = space.get(rest)
                if location is not None and location >> 45 == segment:
                    self._forget(space, rest)
            if not space:
                self.spaces.pop(digest, None)
        self.segments[segment] = Segment(generation)
        return before - self.chunks

    def members(self, segment: int) -> list[Member]:
        """What lies in a segment and is still offered, in order."""
        members = set()
        known = self.segments.get(segment)
        for digest, rests in known.members.items() if known else ():
            for rest in rests:
                location = self.spaces.get(digest, _EMPTY).get(rest, -1)
                if location >= 0 and location >> 45 == segment:
                    hot = bool(location & HOT)
                    members.add(Member(place_of(location), length_of(location), digest + rest, hot))
        return sorted(members)

    def mark_hot(self, key: bytes, place: int) -> bool:
        """Note that a chunk was read at this place; whether it is the first time."""
        space = self.spaces.get(key[:NAMESPACE_BYTES], _EMPTY)
        location = space.get(key[NAMESPACE_BYTES:], HOT)
        if location & HOT or place_of(location) != place:
            return False
        space[key[NAMESPACE_BYTES:]] = location | HOT
        return True

    def _forget(self, space: dict[bytes, int], rest: bytes) -> None:
        location = space.pop(rest, None)
        if location is not None:
            self.chunks -= 1
            self.used_blocks -= record_blocks(length_of(location))
