"""Names and records: injective names, and headers that reject every change."""

import dataclasses
import struct
from itertools import pairwise

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmkv.keys import KEY_BYTES, NAMESPACE_BYTES, Namespace, key_namespace, make_key
from lmkv.record import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    RecordHeader,
    decode_header,
    encode_header,
    payload_digest,
    verify,
)

FIELDS = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=6)
SPACE = Namespace.of({"model": "m"})
KEY = make_key(SPACE.digest, bytes(range(32)), 3)
PAYLOAD = memoryview(bytes(range(256)) * 17)
LAYOUT = bytes(range(100, 116))


# Namespaces.


@given(FIELDS, FIELDS)
@example({"ab": "c"}, {"a": "bc"})
@example({"a": "b", "c": "d"}, {"a": "bcd"})
@example({"a": ""}, {})
@example({"": "a"}, {"a": ""})
@example({"a": "b"}, {"b": "a"})
@example({"a": "1", "b": "2"}, {"a": "2", "b": "1"})
def test_a_namespace_digest_is_equal_only_for_equal_fields(
    ours: dict[str, str], theirs: dict[str, str]
) -> None:
    a, b = Namespace.of(ours), Namespace.of(theirs)
    assert (a.digest == b.digest) == (ours == theirs)
    assert len(a.digest) == NAMESPACE_BYTES


@given(FIELDS, st.data())
def test_moving_a_character_between_name_and_value_changes_the_digest(
    fields: dict[str, str], data: st.DataObject
) -> None:
    name, value = data.draw(st.tuples(st.text(min_size=1, max_size=5), st.text(max_size=5)))
    before = {**fields, name: value}
    after = {**fields, name[:-1]: name[-1] + value}
    if before != after:
        assert Namespace.of(before).digest != Namespace.of(after).digest


@given(FIELDS, st.randoms())
def test_the_order_of_the_fields_does_not_matter(fields: dict[str, str], random: object) -> None:
    names = list(fields)
    random.shuffle(names)  # type: ignore[attr-defined]  # Hypothesis gives a random.Random
    assert Namespace.of({name: fields[name] for name in names}).digest == Namespace.of(fields).digest


def test_the_digest_of_a_namespace_never_changes() -> None:
    # What lies on disks is found by it: this value may change only with the record version.
    digest = Namespace.of({"model": "m", "dtype": "bfloat16"}).digest
    assert digest.hex() == "a2952c3f15ad88aa6149c341c3e13b61726f25098c84b78bc8c3215aa80afa15"


@given(FIELDS, FIELDS)
def test_differences_are_exactly_the_fields_that_differ(ours: dict[str, str], theirs: dict[str, str]) -> None:
    differences = Namespace.of(ours).differences(Namespace.of(theirs))
    for name in ours.keys() | theirs.keys():
        pair = (ours.get(name), theirs.get(name))
        assert differences.get(name) == (pair if pair[0] != pair[1] else None)
    assert list(differences) == sorted(differences)
    assert set(differences) <= ours.keys() | theirs.keys()


def test_differences_show_absent_fields() -> None:
    ours, theirs = (
        Namespace.of({"a": "1", "b": "2", "same": "x"}),
        Namespace.of({"b": "3", "c": "4", "same": "x"}),
    )
    assert ours.differences(theirs) == {"a": ("1", None), "b": ("2", "3"), "c": (None, "4")}


def test_a_namespace_does_not_follow_later_changes_of_its_fields() -> None:
    fields = {"a": "1"}
    space = Namespace.of(fields)
    fields["a"] = "2"
    assert space.fields == {"a": "1"}


# Keys.


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=32), st.integers(0, 2**32 - 1))
def test_a_key_holds_its_parts(namespace: bytes, block_hash: bytes, group: int) -> None:
    key = make_key(namespace, block_hash, group)
    assert len(key) == KEY_BYTES
    assert key_namespace(key) == namespace
    assert key[32:64].startswith(block_hash) and not any(key[32 + len(block_hash) : 64])
    assert int.from_bytes(key[64:], "big") == group


@given(
    *[
        st.tuples(
            st.sampled_from([bytes(32), b"\1" * 32]), st.binary(min_size=8, max_size=8), st.integers(0, 2)
        )
    ]
    * 2
)
def test_keys_of_one_hash_length_are_equal_only_for_equal_parts(
    ours: tuple[bytes, bytes, int], theirs: tuple[bytes, bytes, int]
) -> None:
    assert (make_key(*ours) == make_key(*theirs)) == (ours == theirs)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_namespace_of_the_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"32 bytes, not {length}"):
        make_key(bytes(length), bytes(32), 0)


def test_a_hash_too_long_to_keep_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 32 bytes, not 33"):
        make_key(bytes(32), bytes(33), 0)


@pytest.mark.parametrize("group", [-1, 2**32])
def test_a_group_out_of_range_is_refused(group: int) -> None:
    with pytest.raises(OverflowError):
        make_key(bytes(32), bytes(32), group)


# Headers.


def header_of(payload: memoryview = PAYLOAD) -> bytes:
    return encode_header(KEY, payload, 1_700_000_000_000_000_000, layout=LAYOUT)


@given(
    st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
    st.binary(max_size=200),
    st.integers(0, 2**64 - 1),
    st.none() | st.integers(0, 2**64 - 1),
    st.integers(0, 2**16 - 1),
    st.binary(min_size=16, max_size=16),
)
def test_header_round_trip(
    key: bytes, payload: bytes, created_ns: int, raw_bytes: int | None, codec: int, layout: bytes
) -> None:
    block = encode_header(
        key, memoryview(payload), created_ns, raw_bytes=raw_bytes, codec=codec, layout=layout
    )
    assert len(block) == HEADER_BYTES
    raw = len(payload) if raw_bytes is None else raw_bytes
    digest = xxhash.xxh3_128_digest(payload)
    expected = RecordHeader(key, codec, raw, len(payload), digest, created_ns, layout)
    for form in (block, bytearray(block), memoryview(block), block + payload):
        assert decode_header(form) == expected


def test_the_documented_offsets() -> None:
    block = header_of()
    assert block[:8] == MAGIC
    assert struct.unpack_from("<HHI", block, 8) == (VERSION, 0, 0)
    assert block[16:84] == KEY
    assert struct.unpack_from("<QQ", block, 88) == (len(PAYLOAD), len(PAYLOAD))
    assert block[104:120] == xxhash.xxh3_128_digest(PAYLOAD)
    assert struct.unpack_from("<Q", block, 120) == (1_700_000_000_000_000_000,)
    assert block[128:144] == LAYOUT
    assert block[84:88] == bytes(4) and block[144:248] == bytes(104)
    assert struct.unpack_from("<Q", block, 248) == (xxhash.xxh3_64_intdigest(block[:248]),)


def test_every_single_bit_flip_in_a_header_is_rejected() -> None:
    block = header_of()
    assert decode_header(block) is not None
    accepted = []
    for bit in range(HEADER_BYTES * 8):
        flipped = bytearray(block)
        flipped[bit // 8] ^= 1 << bit % 8
        if decode_header(flipped) is not None:
            accepted.append(bit)
    assert accepted == []


def test_every_single_bit_flip_in_a_payload_is_rejected() -> None:
    payload = bytearray(PAYLOAD[:512])
    header = decode_header(header_of(memoryview(payload)))
    assert verify(header, KEY, memoryview(payload))
    for bit in range(len(payload) * 8):
        payload[bit // 8] ^= 1 << bit % 8
        assert not verify(header, KEY, memoryview(payload))
        payload[bit // 8] ^= 1 << bit % 8
    assert verify(header, KEY, memoryview(payload))


@pytest.mark.parametrize("length", [0, 1, 8, HEADER_BYTES - 1])
def test_a_short_header_is_rejected(length: int) -> None:
    assert decode_header(header_of()[:length]) is None


@settings(max_examples=10_000, deadline=None)
@given(st.binary(max_size=HEADER_BYTES + 8))
def test_random_bytes_are_never_a_header_and_never_an_exception(block: bytes) -> None:
    assert decode_header(block) is None
    assert decode_header(MAGIC + block) is None


def resealed(block: bytearray) -> bytes:
    """`block` with a checksum that holds: what a hostile or future writer could leave."""
    struct.pack_into("<Q", block, 248, xxhash.xxh3_64_intdigest(bytes(block[:248])))
    return bytes(block)


@settings(max_examples=2_000, deadline=None)
@given(st.binary(min_size=240, max_size=240))
def test_a_sealed_header_of_random_fields_never_verifies(fields: bytes) -> None:
    header = decode_header(resealed(bytearray(MAGIC + fields + bytes(8))))
    assert not verify(header, KEY, PAYLOAD)


@pytest.mark.parametrize("version", [0, VERSION + 1, 0xFFFF])
def test_another_version_is_rejected(version: int) -> None:
    block = bytearray(header_of())
    struct.pack_into("<H", block, 8, version)
    assert decode_header(resealed(block)) is None


@pytest.mark.parametrize("offset", [88, 96])
@pytest.mark.parametrize("length", [0, len(PAYLOAD) - 1, len(PAYLOAD) + 1, 2**63, 2**64 - 1])
def test_lengths_are_not_trusted(offset: int, length: int) -> None:
    block = bytearray(header_of())
    struct.pack_into("<Q", block, offset, length)
    header = decode_header(resealed(block))
    assert header is not None
    assert not verify(header, KEY, PAYLOAD)


CHANGES: list[tuple[str, object]] = [
    ("key", make_key(SPACE.digest, bytes(range(32)), 4)),
    ("key", make_key(Namespace.of({"model": "n"}).digest, bytes(range(32)), 3)),
    ("codec", 1),
    ("raw_bytes", len(PAYLOAD) + 1),
    ("stored_bytes", len(PAYLOAD) - 1),
    ("payload_digest", bytes(16)),
]


@pytest.mark.parametrize(("field", "value"), CHANGES)
def test_verify_rejects_each_changed_field(field: str, value: object) -> None:
    header = decode_header(header_of())
    assert header is not None and verify(header, KEY, PAYLOAD)
    assert not verify(dataclasses.replace(header, **{field: value}), KEY, PAYLOAD)  # type: ignore[arg-type]  # by name


def test_verify_rejects_another_payload_key_or_nothing() -> None:
    header = decode_header(header_of())
    assert not verify(None, KEY, PAYLOAD)
    assert not verify(header, bytes(KEY_BYTES), PAYLOAD)
    assert not verify(header, KEY, PAYLOAD[:-1])
    assert not verify(header, KEY, memoryview(bytes(PAYLOAD) + b"\0"))
    assert not verify(header, KEY, memoryview(bytes(len(PAYLOAD))))


@given(st.binary(max_size=300))
def test_the_payload_digest_is_xxh3_128(payload: bytes) -> None:
    assert payload_digest(memoryview(payload)) == xxhash.xxh3_128(payload).digest()


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=8))
@example(bytes(range(256)) * 2**13, [0, 1, 70_000, 70_000, 200_000])  # small pieces and a large one
def test_pieces_have_the_digest_of_what_they_make_up(payload: bytes, cuts: list[int]) -> None:
    view = memoryview(payload)
    edges = [0, *sorted(min(cut, len(payload)) for cut in cuts), len(payload)]
    pieces = [view[start:end] for start, end in pairwise(edges)]
    assert payload_digest(pieces) == payload_digest(view)
    block = encode_header(KEY, pieces, 7)
    assert block == encode_header(KEY, view, 7)
    assert verify(decode_header(block), KEY, pieces) and verify(decode_header(block), KEY, view)
    assert not verify(decode_header(block), KEY, [*pieces, memoryview(b"x")])


def test_small_pieces_never_give_up_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    real = xxhash.xxh3_128

    class Recorder:
        def __init__(self) -> None:
            self.hasher = real()

        def update(self, data: memoryview) -> None:
            fed.append(data.nbytes)
            self.hasher.update(data)

        def digest(self) -> bytes:
            return self.hasher.digest()

    monkeypatch.setattr(xxhash, "xxh3_128", Recorder)
    payload_digest([memoryview(bytes(100_000))] * 200)
    assert max(fed) <= 64 << 10 and sum(fed) == 20_000_000
    fed.clear()
    payload_digest([memoryview(bytes(3 << 20)), memoryview(bytes(1000))])
    assert fed == [3 << 20, 1000]
