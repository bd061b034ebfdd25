"""What makes KV bytes interchangeable: the content of the weights, not their name."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Of each weight file this many pieces of this size, evenly spread, are hashed besides the header:
#: fine-tunes and merges change weights everywhere, so a sample finds them; a full hash would cost
#: minutes per 100 GB at every start.
_SAMPLES = 32
_SAMPLE_BYTES = 64 << 10
#: A safetensors header is JSON of a few MB at the most; more is not one.
_MAX_HEADER_BYTES = 64 << 20

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


def weights_digest(model: Path) -> str | None:
    """SHA-256 (hex) over the config files and every weight file below `model`; None if there is none.

    Of each weight file: name, size, the safetensors header where it is one, and evenly spread
    samples of its content. `model` is a directory or a single weight file.
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
    for path in files:
        _update(hasher, path.relative_to(root).as_posix().encode(), _file_digest(path))
    return hasher.hexdigest()


def _update(hasher: "hashlib._Hash", name: bytes, content: bytes) -> None:
    for part in (name, content):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)


def _file_digest(path: Path) -> bytes:
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
