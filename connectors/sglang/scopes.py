"""Which directory holds a rank's chunks.

Ranks that hold different bytes have directories of their own: each process keeps an index of all that its
directory holds. Data-parallel ranks, and the same ranks of other engines, share one. KV that all tensor-
parallel ranks hold alike (MLA) is written once, by the rank that SGLang names, and read by all.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkv.config import Config, ConfigError, resolve_file_capacity
from lmkv.tier import Tier, open_tier


@dataclass(frozen=True)
class Scope:
    """The ranks that share a directory."""

    #: Name of the directory, such as "tp0of2".
    name: str
    #: All tensor-parallel ranks hold the same bytes.
    replicated: bool
    #: This process stores; else it only reads.
    writes: bool
    #: How many directories of this size `[file] capacity` has to hold.
    directories: int
    #: Whose bytes they are: fields of the namespace.
    ranks: tuple[tuple[str, str], ...]

    def directory(self, config: Config) -> Path:
        """Where it lies."""
        assert config.file.path is not None
        return Path(config.file.path) / "sglang" / self.name


def scope_of(ranks: Any, *, replicated: bool) -> Scope:
    """The scope of one pool of the rank that `ranks` (a `HiCacheStorageConfig`) describes.

    `replicated`: the pool's bytes do not depend on the tensor-parallel rank.
    """
    outer = [
        (kind, int(getattr(ranks, f"{field}_rank", 0) or 0), int(getattr(ranks, f"{field}_size", 1) or 1))
        for kind, field in (("pp", "pp"), ("cp", "attn_cp"))
    ]
    shares = 1
    for _, _, size in outer:
        shares *= size
    suffix = "".join(f"-{kind}{rank}of{size}" for kind, rank, size in outer if size > 1)
    fields = tuple((f"{kind}_rank", f"{rank} of {size}") for kind, rank, size in outer)
    if replicated:
        fields += (("tp_rank", "all"),)
        return Scope(f"replicated{suffix}", True, ranks.tp_rank == 0, shares, fields)
    tp_rank, tp_size = int(ranks.tp_rank), int(ranks.tp_size)
    fields += (("tp_rank", f"{tp_rank} of {tp_size}"),)
    return Scope(f"tp{tp_rank}of{tp_size}{suffix}", False, True, shares * tp_size, fields)


def open_scope(config: Config, scope: Scope, chunk_bytes: int, *, parts: int) -> Tier:
    """Open the directory of a scope for chunks of up to `chunk_bytes`. `parts`: kinds of scopes that
    divide the capacity between them. Raises ConfigError."""
    total = resolve_file_capacity(config.file)
    share = total // (scope.directories * parts)
    settings = {"path": str(scope.directory(config)), "capacity": share}
    try:
        tier = open_tier("file", settings, read_only=not scope.writes or config.file.role == "read_only")
    except ConfigError as error:
        if error.setting != "[file] capacity" or share == total:
            raise
        problem = f"{total} bytes leave {share} for the directory of each rank: {error}"
        raise ConfigError("[file] capacity", problem, "set a larger capacity.") from error
    if chunk_bytes > tier.info.max_chunk_bytes:
        tier.close()
        raise ConfigError(
            "[file] capacity",
            f"a page of this model has {chunk_bytes} bytes and a segment of {scope.directory(config)} holds "
            f"{tier.info.max_chunk_bytes}.",
            "set a larger capacity and use a new directory, or lower --page-size.",
        )
    return tier
