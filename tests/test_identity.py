"""The digest of a model's weights: whatever changes the KV changes it, and nothing else does."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmkv import identity
from lmkv.identity import Memory, weights_digest

SAMPLE = identity._SAMPLE_BYTES
BODY_BYTES = 4 << 20


def safetensors(path: Path, seed: int = 0, shape: int = 7) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [shape], "data_offsets": [0, BODY_BYTES]}}).encode()
    body = bytes([seed]) * BODY_BYTES
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"rope_theta": 10000.0}')
    (folder / "tokenizer.json").write_text("{}")
    safetensors(folder / "a.safetensors", 1)
    safetensors(folder / "b.safetensors", 2)
    return folder


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def swap(model: Path) -> None:
    (model / "a.safetensors").rename(model / "c")
    (model / "b.safetensors").rename(model / "a.safetensors")
    (model / "c").rename(model / "b.safetensors")


CHANGES: dict[str, Callable[[Path], object]] = {
    "config": lambda m: flip(m / "config.json", 17),
    "no config": lambda m: (m / "config.json").unlink(),
    "header": lambda m: flip(m / "a.safetensors", 12),
    "header's last byte": lambda m: flip(m / "b.safetensors", header_bytes(m / "b.safetensors") - 1),
    "first sample": lambda m: flip(m / "a.safetensors", header_bytes(m / "a.safetensors") + 1),
    "last byte": lambda m: flip(m / "b.safetensors", (m / "b.safetensors").stat().st_size - 1),
    "middle sample": lambda m: flip(
        m / "b.safetensors", ((m / "b.safetensors").stat().st_size - SAMPLE) * 15 // 31 + SAMPLE // 2
    ),
    "size": lambda m: grow(m / "a.safetensors"),
    "an added file": lambda m: safetensors(m / "c.safetensors", 3),
    "an added empty file": lambda m: (m / "c.bin").touch(),
    "an added file below": lambda m: ((m / "sub").mkdir(), safetensors(m / "sub" / "a.safetensors", 1)),
    "a removed file": lambda m: (m / "b.safetensors").unlink(),
    "a renamed file": lambda m: (m / "b.safetensors").rename(m / "z.safetensors"),
    "files swapped": swap,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_it(model: Path, change: str) -> None:
    before = weights_digest(model)
    CHANGES[change](model)
    after = weights_digest(model)
    assert before is not None and after is not None and before != after


def test_a_fine_tune_changes_it_wherever_a_tensor_is_sampled(model: Path) -> None:
    """Training moves whole tensors: any change of a run as long as the samples' distance is seen."""
    path = model / "a.safetensors"
    size = path.stat().st_size
    before = weights_digest(model)
    distance = (size - SAMPLE) // 31 + 1
    original = path.read_bytes()
    other = original.translate(bytes(byte ^ 1 for byte in range(256)))
    for start in range(0, size - distance, distance // 3):
        end = start + distance
        path.write_bytes(original[:start] + other[start:end] + original[end:])
        assert weights_digest(model) != before


def test_it_is_sha256_in_hex_and_stable(model: Path) -> None:
    digest = weights_digest(model)
    assert digest is not None and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    assert weights_digest(model) == digest


def test_name_and_place_of_the_directory_do_not_count(model: Path, tmp_path: Path) -> None:
    before = weights_digest(model)
    shutil.copytree(model, tmp_path / "elsewhere" / "renamed")
    assert weights_digest(tmp_path / "elsewhere" / "renamed") == before


def test_links_into_a_blob_store_count_like_files(model: Path, tmp_path: Path) -> None:
    """As a Hugging Face cache lays a model out."""
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    for i, path in enumerate(sorted(model.iterdir())):
        shutil.copy(path, blobs / f"{i:064x}")
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / f"{i:064x}")
    assert weights_digest(snapshot) == weights_digest(model)


def test_what_is_no_weight_does_not_count(model: Path) -> None:
    before = weights_digest(model)
    (model / "tokenizer.json").write_text('{"other": 1}')
    (model / "README.md").write_text("hello")
    (model / "folder.bin").mkdir()
    assert weights_digest(model) == before


def test_without_weights_there_is_none(model: Path, tmp_path: Path) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    assert weights_digest(model) is None
    assert weights_digest(tmp_path / "absent") is None
    assert weights_digest(model / "config.json") is None


def test_a_single_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 100)
    before = weights_digest(path)
    assert before is not None
    flip(path, 1000)
    changed = weights_digest(path)
    assert changed not in (None, before)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")  # a neighbour is another model
    assert weights_digest(path) == changed


@pytest.mark.parametrize("content", [b"", b"\1", b"\xff" * 8, b"\xff" * 100])
def test_a_file_that_is_no_safetensors_is_hashed_all_the_same(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    first = weights_digest(tmp_path)
    (tmp_path / "w.safetensors").write_bytes(content + b"\0")
    assert first is not None and weights_digest(tmp_path) not in (None, first)


# --- hashed in full


def unsampled(model: Path) -> int:
    """A place of a.safetensors in no sample."""
    return ((model / "a.safetensors").stat().st_size - SAMPLE) * 15 // 31 + SAMPLE + 100


def test_any_byte_changes_the_digest_of_whole_files(model: Path, tmp_path: Path) -> None:
    memory = Memory(tmp_path / "weights.json")
    sampled, before = weights_digest(model), weights_digest(model, whole=memory)
    assert sampled != before
    flip(model / "a.safetensors", unsampled(model))
    assert weights_digest(model) == sampled
    assert weights_digest(model, whole=memory) != before
    flip(model / "a.safetensors", unsampled(model))
    assert weights_digest(model, whole=memory) == before
    swap(model)
    assert weights_digest(model, whole=memory) != before


def test_whole_files_are_read_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache" / "lmkv" / "weights.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read: list[str] = []
    file_digest = hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        read.append(Path(file.name).name)
        return file_digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    before = weights_digest(model, whole=Memory.of_user())
    assert sorted(read) == ["a.safetensors", "b.safetensors"] and path.stat().st_mode & 0o777 == 0o600
    assert weights_digest(model, whole=Memory.of_user()) == before and len(read) == 2
    # The time of the last write can be set back, that of the last change cannot.
    changed = model / "b.safetensors"
    times = changed.stat()
    flip(changed, 5000)
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights_digest(model, whole=Memory.of_user()) != before and read[2:] == ["b.safetensors"]
    for damaged in ("", "{", "[1]", "\xff"):
        path.write_text(damaged, encoding="latin-1")
        flip(changed, 5000)
        flip(changed, 5000)
        weights_digest(model, whole=Memory.of_user())
    assert len(read) == 3 + 2 * 4
    path.unlink()
    path.mkdir()  # it cannot be written to
    assert weights_digest(model, whole=Memory.of_user()) is not None
    assert [entry.name for entry in path.parent.iterdir() if entry != path] == []


def test_no_more_files_are_remembered_than_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_MAX_REMEMBERED", 3)
    for number in range(5):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]))
    weights_digest(tmp_path, whole=Memory(tmp_path / "weights.json"))
    assert len(json.loads((tmp_path / "weights.json").read_text())) == 3
