"""What makes KV bytes interchangeable: the content of the weights, not their name."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

#: Of each weight file this many pieces of this size, evenly spread, are hashed besides the header:
#: fine-tunes and merges change weights everywhere, so a sample finds them; a full hash costs
#: minutes per 100 GB.
_SAMPLES = 32
_SAMPLE_BYTES = 64 << 10
#: A safetensors header is JSON of a few MB at the most; more is not one.
_MAX_HEADER_BYTES = 64 << 20
#: Files that are hashed in full at the same time.
_THREADS = 8
#: Digests that are remembered: of a few models of the most files that there are.
_MAX_REMEMBERED = 4096

#: The last two describe the quantisation of checkpoints that keep it apart.
_CONFIG_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
#: Where a model lies and who wrote its config says nothing about its KV.
_NOT_CONTENT = {"_name_or_path", "transformers_version"}


def local_model(name: str, revision: str | None) -> Path | None:
    """Where a model's files are: `name` itself, or the hub's local copy of it; None if there is none."""
    path = Path(name)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001  # whatever the hub client raises, there is no local copy
        return None


def config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a model's effective config, without where it lies and who wrote the file."""

    def content(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: content(v) for k, v in value.items() if k not in _NOT_CONTENT}
        return value

    text = json.dumps(content(dict(config)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class Memory:
    """Digests of files that were hashed in full, so that only the first start with a model waits for it.

    A file counts as the same while device, inode, size, and the times of its last change are (the second of
    them nobody can set back). What cannot be read or written is hashed again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError), path.open(encoding="ascii") as file:
            known = json.load(file)
            if os.fstat(file.fileno()).st_uid == os.geteuid() and isinstance(known, dict):
                self._known = {str(key): str(value) for key, value in known.items()}

    @classmethod
    def of_user(cls) -> "Memory":
        """At $XDG_CACHE_HOME/lmkv/weights.json, by default below ~/.cache."""
        return cls(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lmkv", "weights.json"))

    @staticmethod
    def _key(status: os.stat_result) -> str:
        fields = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return " ".join(map(str, fields))

    def digest(self, path: Path) -> str:
        """SHA-256 (hex) of a whole file. Raises OSError."""
        with path.open("rb") as file:
            key = self._key(os.fstat(file.fileno()))
            digest = self._known.get(key)
            if digest is None:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                if key == self._key(os.fstat(file.fileno())):  # nobody wrote to it meanwhile
                    self._known[key] = digest
        return digest

    def save(self) -> None:
        """Remember them beyond this process."""
        newest = dict(list(self._known.items())[-_MAX_REMEMBERED:])
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(fd, "w", encoding="ascii") as file:
                json.dump(newest, file)
            try:
                temporary.replace(self._path)
            finally:
                temporary.unlink(missing_ok=True)


def weights_digest(model: Path, *, whole: Memory | None = None) -> str | None:
    """SHA-256 (hex) over the config files and every weight file below `model`; None if there is none.

    Of each weight file: name, size, the safetensors header where it is one, and evenly spread
    samples of its content; with `whole` all of its content instead. `model` is a directory or a single
    weight file. The two kinds of digests are never equal.
    """
    if model.is_file():
        files = [model] if model.suffix in _WEIGHT_SUFFIXES else []
        root = model.parent
    else:
        root = model
        files = sorted(p for p in model.rglob("*") if p.suffix in _WEIGHT_SUFFIXES and p.is_file())
    if not files:
        return None
    hasher = hashlib.sha256()
    for name in _CONFIG_FILES:
        if (root / name).is_file():
            _update(hasher, name.encode(), (root / name).read_bytes())
    if whole is None:
        digests = [_sampled(path) for path in files]
    else:
        with ThreadPoolExecutor(_THREADS) as threads:
            digests = [digest.encode() for digest in threads.map(whole.digest, files)]
        whole.save()
    for path, digest in zip(files, digests, strict=True):
        _update(hasher, path.relative_to(root).as_posix().encode(), digest)
    return hasher.hexdigest()


def _update(hasher: "hashlib._Hash", name: bytes, content: bytes) -> None:
    for part in (name, content):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)


def _sampled(path: Path) -> bytes:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        hasher.update(size.to_bytes(8, "little"))
        if path.suffix == ".safetensors":
            file.seek(0)
            # Format: 8 bytes little-endian length, then that much JSON with names, dtypes and shapes.
            length = int.from_bytes(file.read(8), "little")
            hasher.update(file.read(min(length, _MAX_HEADER_BYTES)))
        last = max(0, size - _SAMPLE_BYTES)
        for i in range(_SAMPLES):
            file.seek(last * i // (_SAMPLES - 1))
            hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.digest()
