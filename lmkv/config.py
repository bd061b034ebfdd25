"""Settings: one TOML file, `LMKV_*` environment variables, or the engine's own flag.

Later sources win, setting by setting: the defaults, the TOML file named by `LMKV_CONFIG`, the
environment (`LMKV_SECTION_NAME`), the table `"lmkv"` in the engine's extra config. A bad value
raises `ConfigError`, which names the setting, the source it came from and the fix.

`python -m lmkv.config` prints docs/configuration.md, made from the structs below.
"""

import contextlib
import difflib
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

#: `LMKV_*` variables that are no settings: the TOML file, and where the demo keeps its downloads.
NOT_SETTINGS = frozenset({"LMKV_CONFIG", "LMKV_CACHE"})
#: Far below one chunk of any real model, so a smaller capacity is a forgotten unit ("20" for "20GiB").
MIN_CAPACITY_BYTES = 64 * 2**10
#: One value of the Redis tier; far below the server's own bound of 512 MiB.
MAX_PART_BYTES = 64 * 2**20
#: The file tier's default stops here: an unasked-for cache should not take a whole data disk.
MAX_DEFAULT_FILE_BYTES = 100 * 2**30
#: The host tier's default stops here: memory others may need, prefaulted and never given back.
MAX_DEFAULT_HOST_BYTES = 64 * 2**30


class ConfigError(ValueError):
    """A setting is unusable. The message names the setting and the fix."""

    def __init__(self, setting: str, problem: str, fix: str) -> None:
        super().__init__(f"{setting}: {problem} Fix: {fix}")
        self.setting = setting


class Size(int):
    """A number of bytes; in a source an integer, or a string such as "20GiB" (`parse_size`)."""


class Duration(float):
    """A number of seconds; in a source a number, or a string such as "7d" (`parse_duration`)."""


class Secret(str):
    """A password: read from the environment alone, and shown by nothing."""

    def __repr__(self) -> str:
        return "'***'"


class Url(str):
    """A server's URL, shown without user and password."""

    def __repr__(self) -> str:
        return repr(redact_url(str(self)))


#: Roles of a tier, and when chunks go down to it.
Role = Literal["read_write", "read_only", "write_only"]
Policy = Literal["write_through", "demote"]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the configuration. `Meta.extra["default"]` words a default that is computed."""


class HostConfig(_Table, frozen=True):
    """Host memory: the slab that holds chunks next to the engine."""

    capacity: Annotated[
        Size | None,
        Meta(
            description="Memory for chunks, per engine core: its TP and PP ranks share it, and each "
            "data-parallel rank is an engine core that takes as much of its own (set it then: a rank cannot "
            "tell how many share the node). Taken at start and kept.",
            extra={"default": "25 % of the available memory or of the cgroup limit's rest, at most 64 GiB"},
        ),
    ] = None
    ttl: Annotated[
        Duration | None,
        Meta(
            description="How long a chunk is served from host memory after it came there.",
            extra={"default": "until it is evicted"},
        ),
    ] = None
    quota: Annotated[
        Size | None,
        Meta(
            description="Most bytes of host memory that the chunks of one tenant take. What it stores beyond "
            "that takes the place of its own oldest ones.",
            extra={"default": "none: a tenant may take all of it, while no other one needs it"},
        ),
    ] = None


class FileConfig(_Table, frozen=True):
    """Files on a local disk: chunks that outlive the process."""

    path: Annotated[
        str | None,
        Meta(
            description="Directory of the file tier, absolute or starting with `~`. A relative path is "
            "refused: a server started from elsewhere would silently begin with an empty cache.",
            extra={"default": "none: the file tier is off"},
        ),
    ] = None
    capacity: Annotated[
        Size | None,
        Meta(
            description="Upper bound on the disk space that the directory takes, bookkeeping included. Of "
            "engines that share it, the bound of whoever opened it last holds for all.",
            extra={
                "default": "50 % of the disk space that is free or already the directory's, at most 100 GiB"
            },
        ),
    ] = None
    ttl: Annotated[
        Duration | None,
        Meta(
            description="How long a chunk is served from the directory after it was stored there.",
            extra={"default": "until it is evicted"},
        ),
    ] = None
    quota: Annotated[
        Size | None,
        Meta(
            description="Most bytes of the directory that the chunks of one namespace, so of one tenant, "
            "take. What it stores beyond that takes the place of its own oldest ones.",
            extra={"default": "none: a tenant may take all of it"},
        ),
    ] = None
    role: Annotated[
        Role,
        Meta(
            description="What this engine does with the directory: `read_only` never stores there, "
            "`write_only` never looks there."
        ),
    ] = "read_write"
    policy: Annotated[
        Policy,
        Meta(
            description="`write_through`: every chunk is written as soon as it is in host memory. `demote`: "
            "only chunks that are about to be evicted from it, which spares the disk, and loses the others "
            "when the engine ends."
        ),
    ] = "write_through"


class RedisConfig(_Table, frozen=True):
    """A server of the Redis protocol (Redis, Valkey): chunks that engines on several machines share."""

    url: Annotated[
        Url | None,
        Meta(
            description="`redis://host:6379/0`; `rediss://` for TLS; for Sentinel "
            "`redis+sentinel://host:26379,host2:26379/service/0` or `rediss+sentinel://`; of a cluster any "
            "node's URL. A password in it is taken from the environment variable alone.",
            extra={"default": "none: the Redis tier is off"},
        ),
    ] = None
    username: Annotated[str | None, Meta(description="ACL user.", extra={"default": "none"})] = None
    password: Annotated[
        Secret | None,
        Meta(
            description="Password. Only the environment variable sets it: others see files and flags.",
            extra={"default": "none"},
        ),
    ] = None
    password_file: Annotated[
        str | None,
        Meta(description="File whose first line is the password.", extra={"default": "none"}),
    ] = None
    ca_file: Annotated[
        str | None,
        Meta(
            description="PEM file of the authorities that `rediss://` trusts.",
            extra={"default": "the system's"},
        ),
    ] = None
    cert_file: Annotated[
        str | None, Meta(description="PEM file of the client certificate.", extra={"default": "none"})
    ] = None
    key_file: Annotated[
        str | None, Meta(description="PEM file of its key.", extra={"default": "in `cert_file`"})
    ] = None
    check_hostname: Annotated[
        bool, Meta(description="Whether the server's certificate must name the host of the URL.")
    ] = True
    ttl: Annotated[
        Duration | None,
        Meta(
            description="How long the server keeps a chunk after it was stored.",
            extra={"default": "as long as the server has room"},
        ),
    ] = None
    part_size: Annotated[
        Size,
        Meta(
            description="Chunks above this are split into values of this size, 64 KiB to 64 MiB. Engines "
            "that share must agree on it; others miss each other's chunks.",
            extra={"default": "4 MiB"},
        ),
    ] = Size(4 * 2**20)
    role: Annotated[
        Role,
        Meta(description="`read_only` never stores on the server, `write_only` never asks it."),
    ] = "read_write"
    policy: Annotated[
        Policy,
        Meta(
            description="`write_through`: every chunk is sent as soon as it is in host memory. `demote`: "
            "only chunks that are about to be evicted from the tier above: the files if there are any, else "
            "host memory."
        ),
    ] = "write_through"


class IdentityConfig(_Table, frozen=True):
    """What must match, besides the model, for chunks to be shared."""

    tenant: Annotated[
        str,
        Meta(
            description="Instances with different tenants never share a chunk. 1 to 128 characters.",
            min_length=1,
            max_length=128,  # it is printed in one line of `lmkv explain`
        ),
    ] = "default"
    weights: Annotated[
        Literal["sampled", "whole"],
        Meta(
            description="How much of the weight files says which model it is: their headers, sizes and "
            "samples of 64 KiB, or `whole`, which takes minutes per 100 GB the first time and is kept in "
            "`~/.cache/lmkv/weights.json`. Instances that share must agree."
        ),
    ] = "sampled"
    salt_required: Annotated[
        bool,
        Meta(description="Requests without a `cache_salt` bypass lmkv: they neither find nor leave a chunk."),
    ] = False
    salt_is_tenant: Annotated[
        bool,
        Meta(
            description="The `cache_salt` of a request names its tenant: each has a namespace, and so quota "
            "and deletion, of its own. For up to some hundred tenants; chunks of different salts are never "
            "mixed up without it either."
        ),
    ] = False


class SecurityConfig(_Table, frozen=True):
    """Against others who can write to, or read, the directory or the server (docs/security.md)."""

    key_file: Annotated[
        str | None,
        Meta(
            description="File with a secret key, 32 bytes or their 64 hex digits, that only its owner may "
            "read. What was not stored with it is not served: a keyed MAC covers header and payload.",
            extra={"default": "none: chunks carry a checksum against accidents alone"},
        ),
    ] = None
    encrypt: Annotated[
        bool,
        Meta(
            description="Chunks are encrypted below host memory, with AES-256-GCM and a key made from "
            "`key_file`; it needs the package `cryptography`."
        ),
    ] = False
    audit_log: Annotated[
        str | None,
        Meta(
            description="File to which a line of JSON is appended for what is stored, loaded, evicted, "
            "deleted and rejected. It names chunks by digests, never by content.",
            extra={"default": "none"},
        ),
    ] = None


class VllmConfig(_Table, frozen=True):
    """vLLM only."""

    blocks_per_chunk: Annotated[
        int,
        Meta(
            description="Consecutive vLLM blocks stored as one chunk. Above 1 only for models with a single "
            "full-attention group.",
            ge=1,
        ),
    ] = 1
    prompt_only: Annotated[
        bool,
        Meta(
            description="Store the blocks of prompts only. By default generated tokens are stored too, "
            "because the next turn of a chat sends them back."
        ),
    ] = False
    gate: Annotated[
        bool,
        Meta(
            description="Leave a hit below the host tier alone when loading it would take longer than "
            "computing it again, by the speeds measured so far."
        ),
    ] = True


class SglangConfig(_Table, frozen=True):
    """SGLang only."""

    mode: Annotated[
        Literal["storage", "linker"],
        Meta(
            description="What lmkv turns on in SGLang when it is started without flags for it: `storage` "
            "below SGLang's own host pool (HiCache), or `linker`, lmkv's slab in the place of that pool "
            "(SGLang 0.5.23 or newer)."
        ),
    ] = "storage"
    single_tenant: Annotated[
        bool,
        Meta(
            description="No request carries a `cache_salt`, an `extra_key` or a LoRA adapter. Needed before "
            "SGLang 0.5.20, whose names of stored pages do not tell those apart."
        ),
    ] = False
    gate: Annotated[
        bool,
        Meta(
            description="Leave a hit below SGLang's host pool, or the linker's memory, alone when loading it "
            "would take longer than computing it again, by the speeds measured so far."
        ),
    ] = True


class Config(_Table, frozen=True):
    """All settings of one engine."""

    host: HostConfig = HostConfig()
    file: FileConfig = FileConfig()
    redis: RedisConfig = RedisConfig()
    identity: IdentityConfig = IdentityConfig()
    security: SecurityConfig = SecurityConfig()
    vllm: VllmConfig = VllmConfig()
    sglang: SglangConfig = SglangConfig()


_TABLES: dict[str, type[_Table]] = {field.name: field.type for field in msgspec.structs.fields(Config)}
_ENVIRONMENT = {
    f"LMKV_{table}_{field.name}".upper(): (table, field.name)
    for table, struct in _TABLES.items()
    for field in msgspec.structs.fields(struct)
}

#: What a setting of each type wants, in words.
_EXPECTED: dict[Any, str] = {
    Size | None: 'a size such as "20GiB"',
    bool: "true or false",
    int: "an integer of 1 or more",
    str: "a string",
    str | None: "a string",
    Secret | None: "a string",
    Url | None: "a URL",
    Size: 'a size such as "4MiB"',
    Duration | None: 'a time such as "7d"',
    Literal["storage", "linker"]: '"storage" or "linker"',
    Literal["sampled", "whole"]: '"sampled" or "whole"',
    Role: '"read_write", "read_only" or "write_only"',
    Policy: '"write_through" or "demote"',
}

_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for suffix, base in (("ib", 1024), ("i", 1024), ("b", 1000))
}


def parse_size(value: object) -> Size:
    """Bytes of a size: an integer, or a number with a unit, case ignored.

    KiB, MiB, GiB, TiB (also Ki, Mi, Gi, Ti) are powers of 1,024 and KB, MB, GB, TB of 1,000. A bare
    K, M, G or T is refused: Kubernetes and Redis read it as 1,000, Docker and systemd as 1,024.
    Raises ValueError.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = Size(value)
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        number, unit = match[1], match[2].lower()
        if unit in ("k", "m", "g", "t"):
            both = f"{number}{unit.upper()}iB (powers of 1,024) or {number}{unit.upper()}B (of 1,000)"
            raise ValueError(f"{value!r} has an ambiguous unit; write {both}")
        if unit not in _UNITS:
            raise ValueError(f"{value!r} has an unknown unit; use KiB, MiB, GiB, TiB, KB, MB, GB or TB")
        size = Size(float(number) * _UNITS[unit] if "." in number else int(number) * _UNITS[unit])
    else:
        raise ValueError(f"{value!r} is not a size")
    if size < MIN_CAPACITY_BYTES:
        raise ValueError(f"{value!r} is {size} bytes, less than the smallest capacity, 64 KiB")
    return size


_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(ms|s|m|h|d|w)", re.IGNORECASE)
_SECONDS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
#: Redis counts milliseconds; beyond a century a time is a typing error.
MIN_DURATION_S, MAX_DURATION_S = 1e-3, 100 * 365 * 86400.0


def parse_duration(value: object) -> Duration:
    """Seconds of a time: a number, or a string with a unit, ms, s, m, h, d or w. Raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        duration = Duration(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        duration = Duration(float(match[1]) * _SECONDS[match[2].lower()])
    else:
        raise ValueError(f"{value!r} is not a time; write a number and ms, s, m, h, d or w")
    if not MIN_DURATION_S <= duration <= MAX_DURATION_S:
        raise ValueError(f"{value!r} is not between 1 ms and 100 years")
    return duration


def redact_url(url: str) -> str:
    """The URL without user and password, for logs and errors."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    # The last @ ends the user part: a password may hold one that should have been escaped.
    hosts = authority.rpartition("@")[2]
    return f"{scheme}{separator}{hosts}{slash}{path.partition('?')[0]}"


def _decode(kind: type, value: object) -> object:
    """msgspec hook for the types that it does not know."""
    if kind is Size:
        return parse_size(value)
    if kind is Duration:
        return parse_duration(value)
    if kind in (Secret, Url):
        if isinstance(value, str):
            return kind(value)
        raise ValueError(f"expected a string, not {type(value).__name__}")
    raise NotImplementedError(f"no setting has the type {kind}")


class Memory(NamedTuple):
    """Bytes of memory that this process may use: in all, and not in use now."""

    total_bytes: int
    available_bytes: int


def read_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Memory of the machine, or of the tightest cgroup (v1 or v2) around this process.

    What a cgroup leaves is its limit less its usage, where reclaimable file cache (inactive_file)
    does not count as usage, as in Kubernetes' working set.
    """
    lines = (proc / "meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, available = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    for limit, left in _cgroup_limits(proc, cgroup):
        total, available = min(total, limit), min(available, max(left, 0))
    return Memory(total, available)


def _cgroup_limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """(limit, limit - usage) in bytes of every limited memory cgroup from this process's up to the root."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without cgroups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroup, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = Path(path.lstrip("/"))
        # Inside a container the path may name directories that only the host sees: those are skipped.
        for folder in (root / here, *(root / parent for parent in here.parents)):
            try:
                limit = int((folder / names[0]).read_text())
                usage = int((folder / names[1]).read_text())
                stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no such cgroup, or no limit: "max"
                continue
            yield limit, limit - usage + int(stat.get(names[2], 0))


def resolve_host_capacity(host: HostConfig) -> int:
    """Bytes of one engine core's slab: `[host] capacity` or its default."""
    if host.capacity is not None:
        return host.capacity
    return min(read_memory().available_bytes // 4, MAX_DEFAULT_HOST_BYTES)


def resolve_file_capacity(file: FileConfig) -> int:
    """Bytes of the file tier: `[file] capacity`, or its default for the directory `[file] path`.

    What the directory holds counts as free, so that the default stays the same over restarts.
    """
    if file.capacity is not None:
        return file.capacity
    if file.path is None:
        return 0
    directory = Path(file.path)
    existing = next(folder for folder in (directory, *directory.parents) if folder.is_dir())
    held = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process may recycle its files
                held += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return min((shutil.disk_usage(existing).free + held) // 2, MAX_DEFAULT_FILE_BYTES)


def _closest(name: str, known: list[str]) -> str:
    """Advice for an unknown name."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}."


def _setting(table: str, name: str, value: object, source: str, *, text: bool = False) -> object:
    """The validated value of `[table] name`. `text`: the source has only strings, so "4" is a number."""
    label = f"[{table}] {name}"
    fields = {field.name: field for field in msgspec.structs.fields(_TABLES[table])}
    if name not in fields:
        other = next((other for other in _TABLES if name in _TABLES[other].__struct_fields__), None)
        fix = f"did you mean [{other}] {name}?" if other else _closest(name, list(fields))
        raise ConfigError(label, f"unknown setting (from {source}).", fix)
    kind = fields[name].type
    try:
        converted: object = msgspec.convert(value, kind, strict=not text, dec_hook=_decode)
    except msgspec.ValidationError as error:
        fix = f"set it to {_EXPECTED[kind.__origin__]}, or leave it out."
        raise ConfigError(label, f"{error} (from {source}).", fix) from error
    if name.endswith("_file") and isinstance(converted, str) and not os.path.isfile(converted):
        fix = "name a readable file by its absolute path."
        raise ConfigError(label, f"{converted!r} is not a file (from {source}).", fix)
    if table == "redis":
        # What is a Secret or a Url already was checked when it was read.
        _check_redis(label, name, converted, source, private=text or isinstance(value, Secret | Url))
    if isinstance(converted, Size) and name == "capacity":
        total = read_memory().total_bytes
        if table == "host" and converted > total:
            problem = f"{value!r} is more than this machine's or cgroup's {total} bytes (from {source})."
            raise ConfigError(label, problem, "set a smaller capacity; it should leave room for the engine.")
    if (table, name) in (("file", "path"), ("security", "audit_log")) and isinstance(converted, str):
        path = os.path.expanduser(converted)
        if "\0" in path or not os.path.isabs(path):
            fix = f"write an absolute path, such as {os.path.abspath(path.replace(chr(0), ''))}."
            raise ConfigError(label, f"{converted!r} is not an absolute path (from {source}).", fix)
        return os.path.normpath(path)
    return converted


_REDIS_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")


def _check_redis(label: str, name: str, value: object, source: str, *, private: bool) -> None:
    """What the types of [redis] do not say. Messages never show a URL's password."""
    if name == "url" and isinstance(value, str):
        scheme, _, rest = value.partition("://")
        authority = rest.partition("/")[0]
        if scheme not in _REDIS_SCHEMES or not authority:
            fix = "write redis://host:6379/0, rediss:// for TLS, or redis+sentinel://host:26379/service/0."
            raise ConfigError(label, f"{redact_url(value)!r} is not a Redis URL (from {source}).", fix)
        if ":" in authority.rpartition("@")[0] and not private:
            fix = "set LMKV_REDIS_PASSWORD or [redis] password_file."
            raise ConfigError(label, f"it has a password, which others could read (from {source}).", fix)
    if name == "password" and value is not None and not private:
        fix = "set the environment variable LMKV_REDIS_PASSWORD, or [redis] password_file."
        raise ConfigError(label, f"set where others could read it (from {source}).", fix)
    if name == "part_size" and isinstance(value, int) and value > MAX_PART_BYTES:
        raise ConfigError(label, f"{value} bytes are more than 64 MiB (from {source}).", "set 4MiB.")


def _tables(data: object, source: str) -> Iterator[tuple[str, str, object]]:
    """(table, name, validated value) of each setting in a mapping of tables."""
    if not isinstance(data, Mapping):
        fix = 'write {"host": {"capacity": "20GiB"}}.'
        raise ConfigError("lmkv", f"{data!r} is not a mapping of tables (from {source}).", fix)
    for table, settings in data.items():
        if table not in _TABLES:
            fix = _closest(str(table), list(_TABLES))
            raise ConfigError(f"[{table}]", f"unknown table (from {source}).", fix)
        if not isinstance(settings, Mapping):
            problem = f"{settings!r} is not a table (from {source})."
            raise ConfigError(f"[{table}]", problem, f"write the settings of [{table}] below that heading.")
        for name, value in settings.items():
            yield table, name, _setting(table, str(name), value, source)


def _environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, object]]:
    for variable, value in environ.items():
        if not variable.startswith("LMKV_") or variable in NOT_SETTINGS:
            continue
        source = f"environment variable {variable}"
        if variable not in _ENVIRONMENT:
            fix = _closest(variable, list(_ENVIRONMENT))
            raise ConfigError(variable, "unknown environment variable.", fix)
        table, name = _ENVIRONMENT[variable]
        # Compose files and unit files pass a variable that nobody set as an empty one.
        if value != "":
            yield table, name, _setting(table, name, value, source, text=True)


def _file(path: str) -> object:
    try:
        with open(path, "rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        fix = "name a readable TOML file, or unset the variable."
        raise ConfigError("LMKV_CONFIG", f"{path!r} cannot be read: {error.strerror}.", fix) from error
    except ValueError as error:  # tomllib.TOMLDecodeError and UnicodeDecodeError
        fix = 'correct the file; a table looks like [host] and a setting like capacity = "20GiB".'
        raise ConfigError("LMKV_CONFIG", f"{path!r} is not valid TOML: {error}.", fix) from error


#: Settings that make the others of their table mean something.
_NEEDED = (("file", "path", "file tier"), ("redis", "url", "Redis tier"))


def load(extra: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """The settings of this engine. `extra` is the table `"lmkv"` of the engine's extra config.

    Raises ConfigError.
    """
    values: dict[str, dict[str, object]] = {table: {} for table in _TABLES}
    sources: list[Iterator[tuple[str, str, object]]] = []
    if path := environ.get("LMKV_CONFIG"):
        sources.append(_tables(_file(path), f"file {path}"))
    sources.append(_environment(environ))
    if extra is not None:
        sources.append(_tables(extra, 'the table "lmkv" of the engine\'s extra config'))
    for source in sources:
        for table, name, value in source:
            values[table][name] = value
    for table, needed, lacking in _NEEDED:
        for name in values[table]:
            if needed not in values[table]:
                problem = f"set, but [{table}] {needed} is not, so there is no {lacking}."
                fix = f"set [{table}] {needed}, or leave [{table}] {name} away."
                raise ConfigError(f"[{table}] {name}", problem, fix)
    if values["security"].get("encrypt") and "key_file" not in values["security"]:
        fix = "set [security] key_file to a file with 32 random bytes."
        raise ConfigError("[security] encrypt", "set, but there is no key.", fix)
    return msgspec.convert(values, Config, dec_hook=_decode)


def load_table(table: str, settings: Mapping[str, Any]) -> Any:
    """One table given by a caller of `open_tier`, as its struct. Raises ConfigError."""
    source = f"the settings of open_tier({table!r})"
    values = {name: value for _, name, value in _tables({table: settings}, source)}
    return _TABLES[table](**values)


def reference() -> str:
    """docs/configuration.md: every setting with its environment variable, type, default and meaning."""
    lines = [_INTRODUCTION]
    for table, struct in _TABLES.items():
        lines += [f"## [{table}]", "", f"{struct.__doc__}", ""]
        lines += ["| setting | environment variable | type | default | meaning |", "|---|---|---|---|---|"]
        for field in msgspec.structs.fields(struct):
            kind = field.type
            (meta,) = (part for part in kind.__metadata__ if isinstance(part, Meta))
            computed: str | None = (meta.extra or {}).get("default")
            default = computed or f"`{msgspec.json.encode(field.default).decode()}`"
            variable = f"LMKV_{table}_{field.name}".upper()
            cells = [
                f"`{field.name}`",
                f"`{variable}`",
                _EXPECTED[kind.__origin__],
                default,
                meta.description or "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


_INTRODUCTION = """\
# Configuration

<!-- Made by `python -m lmkv.config > docs/configuration.md`; a test compares the two. -->

lmkv needs no setting. Those there are come from four sources; later ones win, setting by setting:

1. the defaults below;
2. the TOML file named by the environment variable `LMKV_CONFIG`;
3. environment variables, `LMKV_SECTION_NAME`; an empty one counts as unset;
4. the table `"lmkv"` in the engine's extra config, for example vLLM's
   `--kv-transfer-config '{"kv_connector": "LMKVConnector", "kv_role": "kv_both",
   "kv_connector_extra_config": {"lmkv": {"host": {"capacity": "20GiB"}}}}'`; under SGLang it stands in
   `--hicache-storage-backend-extra-config` or in the `linker_extra_config` of
   `--unified-cache-external-linker-config`.

Under SGLang any setting from the first three sources turns lmkv on, unless SGLang's own flags do (README.md).
`[host]` is then read in the mode `linker` alone: in the mode `storage` SGLang has its own host pool.

```toml
[host]
capacity = "20GiB"

[file]
path = "/var/cache/lmkv"
capacity = "200GiB"
```

Sizes are integers (bytes) or strings: `KiB`, `MiB`, `GiB`, `TiB` (also `Ki`, `Mi`, `Gi`, `Ti`) are powers of
1,024; `KB`, `MB`, `GB`, `TB` are powers of 1,000; case does not matter. A bare `K`, `M`, `G` or `T` is
refused, because programs disagree on what it means. The smallest capacity is 64 KiB, which catches a
forgotten unit.

All settings are checked before the engine serves. An unknown table, setting or `LMKV_*` variable is an error,
as is a value of the wrong type or out of range; the message names the setting, its source and the fix.
"""


if __name__ == "__main__":
    print(reference(), end="")
