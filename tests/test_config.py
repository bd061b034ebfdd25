"""Settings: sources and their order, and every bad input with its message."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.backends import open_tier
from lmkv.config import (
    Config,
    ConfigError,
    FileConfig,
    HostConfig,
    Memory,
    Size,
    load,
    load_table,
    parse_duration,
    parse_size,
    read_memory,
    redact_url,
    reference,
    resolve_file_capacity,
    resolve_host_capacity,
)

GIB = 2**30
URL = "redis://h"
EXTRA = 'the table "lmkv" of the engine\'s extra config'


def toml(tmp_path: Path, text: str) -> dict[str, str]:
    """An environment whose LMKV_CONFIG names a file with this text."""
    path = tmp_path / "lmkv.toml"
    path.write_text(text)
    return {"LMKV_CONFIG": str(path)}


def test_defaults_need_no_setting() -> None:
    config = load(None, {})
    assert config == Config()
    assert config.host.capacity is None
    assert config.file.path is None
    assert config.identity.tenant == "default"
    assert config.vllm.blocks_per_chunk == 1
    assert config.vllm.prompt_only is False


def test_every_source_sets_every_setting(tmp_path: Path) -> None:
    text = """
        [host]
        capacity = "1GiB"
        [file]
        path = "/data/kv"
        capacity = 2147483648
        [identity]
        tenant = "blue"
        [vllm]
        blocks_per_chunk = 4
        prompt_only = true
    """
    environ = {
        "LMKV_HOST_CAPACITY": "1GiB",
        "LMKV_FILE_PATH": "/data/kv",
        "LMKV_FILE_CAPACITY": "2147483648",
        "LMKV_IDENTITY_TENANT": "blue",
        "LMKV_VLLM_BLOCKS_PER_CHUNK": "4",
        "LMKV_VLLM_PROMPT_ONLY": "true",
        "PATH": "/usr/bin",
    }
    extra = {
        "host": {"capacity": GIB},
        "file": {"path": "/data/kv", "capacity": "2 GiB"},
        "identity": {"tenant": "blue"},
        "vllm": {"blocks_per_chunk": 4, "prompt_only": True},
    }
    config = load(None, toml(tmp_path, text))
    assert config == load(None, environ) == load(extra, {})
    assert config.host.capacity == GIB
    assert config.file == FileConfig(path="/data/kv", capacity=Size(2 * GIB))
    assert config.identity.tenant == "blue"
    assert config.vllm.blocks_per_chunk == 4
    assert config.vllm.prompt_only is True


def test_later_sources_win_setting_by_setting(tmp_path: Path) -> None:
    environ = toml(tmp_path, '[identity]\ntenant = "file"\n[vllm]\nblocks_per_chunk = 2\nprompt_only = true')
    environ["LMKV_IDENTITY_TENANT"] = "environment"
    environ["LMKV_VLLM_BLOCKS_PER_CHUNK"] = "3"
    config = load({"identity": {"tenant": "engine"}}, environ)
    assert config.identity.tenant == "engine"
    assert config.vllm.blocks_per_chunk == 3
    assert config.vllm.prompt_only is True


def test_null_in_the_engine_flag_turns_a_tier_off() -> None:
    assert load({"file": {"path": None}}, {"LMKV_FILE_PATH": "/data/kv"}).file.path is None


def test_an_empty_variable_counts_as_unset() -> None:
    environ = {"LMKV_FILE_PATH": "", "LMKV_CONFIG": "", "LMKV_CACHE": "/anything"}
    assert load(None, environ) == Config()


def test_text_that_looks_like_a_number_stays_text_in_a_string_setting() -> None:
    assert load(None, {"LMKV_IDENTITY_TENANT": "5"}).identity.tenant == "5"


def test_home_is_expanded_and_the_path_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load({"file": {"path": "~/kv//x/"}}, {}).file.path == "/home/someone/kv/x"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * GIB),
        ("20gib", 20 * GIB),
        ("20 Gi", 20 * GIB),
        ("512MiB", 512 * 2**20),
        ("64KiB", 65536),
        ("2GB", 2 * 10**9),
        ("2TB", 2 * 10**12),
        ("1.5GiB", 3 * GIB // 2),
        ("65536", 65536),
        ("65536B", 65536),
        (65536, 65536),
        ("9007199254740993B", 2**53 + 1),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@given(st.integers(min_value=65536, max_value=10**15))
def test_a_size_in_bytes_is_exact(size: int) -> None:
    assert parse_size(size) == parse_size(str(size)) == parse_size(f"{size}B") == size


@given(st.text() | st.floats() | st.booleans() | st.none() | st.integers())
def test_parsing_a_size_gives_a_size_or_a_value_error(value: object) -> None:
    try:
        assert parse_size(value) >= 65536
    except ValueError as error:
        assert str(error)


BAD: list[tuple[dict[str, Any] | None, dict[str, str], list[str]]] = [
    # Unknown names, with the closest known one.
    ({"hots": {}}, {}, ["[hots]", EXTRA, "did you mean host?"]),
    (
        {"nvme_drive": {"url": "x"}},
        {},
        ["[nvme_drive]", "use one of host, file, redis, identity, security, vllm"],
    ),
    ({"host": {"capcity": 1}}, {}, ["[host] capcity", EXTRA, "did you mean capacity?"]),
    ({"host": {"path": "/x"}}, {}, ["[host] path", "did you mean [file] path?"]),
    ({"vllm": {"x": 1}}, {}, ["[vllm] x", "use one of blocks_per_chunk, prompt_only"]),
    (None, {"LMKV_HOST_CAPCITY": "1GiB"}, ["LMKV_HOST_CAPCITY", "did you mean LMKV_HOST_CAPACITY?"]),
    (None, {"LMKV_TENANT": ""}, ["LMKV_TENANT", "unknown environment variable", "LMKV_IDENTITY_TENANT"]),
    ({3: {}}, {}, ["[3]", "unknown table"]),  # type: ignore[dict-item]  # a mapping may hold any key
    ({"host": {3: 4}}, {}, ["[host] 3", "unknown setting"]),
    # Wrong shapes and types.
    ({"host": 3}, {}, ["[host]", "3 is not a table", EXTRA]),
    ({"identity": {"tenant": 5}}, {}, ["[identity] tenant", "Expected `str`, got `int`", EXTRA, "a string"]),
    ({"identity": {"tenant": ""}}, {}, ["[identity] tenant", "length >= 1"]),
    ({"identity": {"tenant": "x" * 129}}, {}, ["[identity] tenant", "length <= 128"]),
    ({"vllm": {"prompt_only": 1}}, {}, ["[vllm] prompt_only", "`bool`", "true or false"]),
    ({"vllm": {"blocks_per_chunk": True}}, {}, ["[vllm] blocks_per_chunk", "`int`"]),
    ({"vllm": {"blocks_per_chunk": 0}}, {}, ["[vllm] blocks_per_chunk", ">= 1", "an integer of 1 or more"]),
    (None, {"LMKV_VLLM_BLOCKS_PER_CHUNK": "two"}, ["[vllm] blocks_per_chunk", "LMKV_VLLM_BLOCKS_PER_CHUNK"]),
    (None, {"LMKV_VLLM_PROMPT_ONLY": "maybe"}, ["[vllm] prompt_only", "LMKV_VLLM_PROMPT_ONLY"]),
    # Sizes.
    ({"host": {"capacity": "20G"}}, {}, ["[host] capacity", "ambiguous", "20GiB", "20GB", EXTRA]),
    ({"host": {"capacity": "20GiX"}}, {}, ["[host] capacity", "unknown unit"]),
    ({"host": {"capacity": "lots"}}, {}, ["[host] capacity", "'lots' is not a size", '"20GiB"']),
    ({"host": {"capacity": 1e9}}, {}, ["[host] capacity", "is not a size"]),
    ({"host": {"capacity": True}}, {}, ["[host] capacity", "is not a size"]),
    ({"host": {"capacity": 0}}, {}, ["[host] capacity", "less than the smallest capacity"]),
    ({"file": {"capacity": -1}}, {}, ["[file] capacity", "less than the smallest capacity"]),
    (None, {"LMKV_FILE_CAPACITY": "-5GiB"}, ["[file] capacity", "is not a size", "LMKV_FILE_CAPACITY"]),
    (None, {"LMKV_HOST_CAPACITY": "20"}, ["[host] capacity", "20 bytes", "LMKV_HOST_CAPACITY"]),
    (
        {"host": {"capacity": "9000TiB"}},
        {},
        ["[host] capacity", "more than this machine", "a smaller capacity"],
    ),
    # Paths.
    ({"file": {"path": "kv"}}, {}, ["[file] path", "'kv' is not an absolute path", os.path.abspath("kv")]),
    ({"file": {"path": ""}}, {}, ["[file] path", "not an absolute path"]),
    ({"file": {"path": "/x\0y"}}, {}, ["[file] path", "not an absolute path"]),
    # Redis: nothing is said that holds a password, and none is taken from where others read.
    (
        {"redis": {"url": "http://h"}},
        {},
        ["[redis] url", "'http://h' is not a Redis URL", "redis://host:6379"],
    ),
    ({"redis": {"url": "redis://"}}, {}, ["[redis] url", "is not a Redis URL"]),
    ({"redis": {"url": 3}}, {}, ["[redis] url", "expected a string, not int", "a URL"]),
    ({"redis": {"url": "redis://u:pw@h"}}, {}, ["[redis] url", "it has a password", "LMKV_REDIS_PASSWORD"]),
    (
        {"redis": {"url": URL, "password": "pw"}},
        {},
        ["[redis] password", "others could read", "password_file"],
    ),
    ({"redis": {"ttl": "7d"}}, {}, ["[redis] ttl", "[redis] url is not", "set [redis] url"]),
    ({"redis": {"url": URL, "ttl": "7"}}, {}, ["[redis] ttl", "'7' is not a time", '"7d"', EXTRA]),
    ({"redis": {"url": URL, "ttl": 0}}, {}, ["[redis] ttl", "not between 1 ms and 100 years"]),
    ({"redis": {"url": URL, "part_size": "1GiB"}}, {}, ["[redis] part_size", "more than 64 MiB"]),
    ({"redis": {"url": URL, "ca_file": "/nope"}}, {}, ["[redis] ca_file", "'/nope' is not a file"]),
    ({"redis": {"url": URL, "role": "r"}}, {}, ["[redis] role", '"read_write", "read_only" or "write_only"']),
    # The file itself.
    (None, {"LMKV_CONFIG": "/does/not/exist.toml"}, ["LMKV_CONFIG", "/does/not/exist.toml", "unset"]),
    (None, {"LMKV_CONFIG": "/"}, ["LMKV_CONFIG", "cannot be read: Is a directory"]),
]


@pytest.mark.parametrize(("extra", "environ", "words"), BAD)
def test_bad_input_names_the_setting_the_source_and_the_fix(
    extra: Mapping[str, Any] | None, environ: Mapping[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(extra, environ)
    message = str(caught.value)
    assert message.startswith(words[0])
    assert " Fix: " in message
    for word in words:
        assert word in message
    assert caught.value.setting == words[0]


def test_a_redis_password_is_taken_from_the_environment_and_shown_by_nothing() -> None:
    environ = {"LMKV_REDIS_URL": "redis://user:geheim@host:1/2?x=geheim", "LMKV_REDIS_PASSWORD": "geheim"}
    config = load({"redis": {"ttl": "1.5h"}}, environ)
    assert (config.redis.url, config.redis.password) == tuple(environ.values())
    assert config.redis.ttl == 5400
    assert "geheim" not in repr(config)
    assert "redis://host:1/2" in repr(config)
    # What was read once can be given to `open_tier`.
    assert load_table("redis", msgspec.structs.asdict(config.redis)) == config.redis
    bad = {"LMKV_REDIS_URL": "http://user:geheim@host"}
    with pytest.raises(ConfigError) as caught:
        load(None, bad)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://:p@h", "redis://h"),
        ("redis://u:p@ss@h/1?password=p", "redis://h/1"),
        ("redis+sentinel://u:p@h:1,h2:2/s", "redis+sentinel://h:1,h2:2/s"),
    ],
)
def test_a_redacted_url_names_the_host_alone(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7d", 604800), ("1.5h", 5400), ("10 ms", 0.01), (5, 5), ("2w", 1209600), ("3M", 180)],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_an_extra_config_that_is_no_mapping() -> None:
    with pytest.raises(ConfigError, match="not a mapping of tables"):
        load("host", {})  # type: ignore[arg-type]  # what a user may write in the engine's flag


@pytest.mark.parametrize(
    "content", [b"[host\n", b"\xff\xfe", b"host = {\n", b'[host]\ncapacity = "1GiB"\n[host]\n']
)
def test_a_file_that_is_not_toml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"LMKV_CONFIG: .*bad\.toml' is not valid TOML.*Fix: "):
        load(None, {"LMKV_CONFIG": str(path)})


def test_an_error_in_the_file_names_the_file(tmp_path: Path) -> None:
    environ = toml(tmp_path, "[file]\ncapacity = false")
    with pytest.raises(ConfigError, match=r"\[file\] capacity: .*from file .*lmkv\.toml"):
        load(None, environ)


def test_a_bad_value_is_an_error_also_where_a_later_source_wins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"from file"):
        load({"identity": {"tenant": "x"}}, toml(tmp_path, "[identity]\ntenant = 1"))


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().host.capacity = Size(GIB)  # type: ignore[misc]  # the point of the test


def test_the_structs_refuse_unknown_fields() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"host": {"nope": 1}}, Config)


def test_a_tier_opened_by_a_caller_uses_the_same_checks() -> None:
    assert load_table("host", {"capacity": "1MiB"}) == HostConfig(capacity=Size(2**20))
    with pytest.raises(ConfigError, match=r"\[host\] capacity: .*open_tier\('host'\)"):
        open_tier("host", {"capacity": "1G"})
    with pytest.raises(ConfigError, match=r"\[host\] size: unknown setting"):
        open_tier("host", {"size": "1GiB"})


# Defaults that are computed.


def fake_machine(root: Path, *, available_gib: int, cgroup_file: str, files: Mapping[str, str]) -> Memory:
    """`read_memory` over a made-up /proc and /sys/fs/cgroup of a machine with 256 GiB."""
    (root / "proc/self").mkdir(parents=True)
    meminfo = (
        f"MemTotal: {256 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib * 2**20} kB\nHugePages: 0\n"
    )
    (root / "proc/meminfo").write_text(meminfo)
    (root / "proc/self/cgroup").write_text(cgroup_file)
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_memory(root / "proc", root / "cgroup")


def test_memory_without_a_limit(tmp_path: Path) -> None:
    files = {"a/memory.max": "max\n", "a/memory.current": "5\n", "a/memory.stat": "inactive_file 1\n"}
    memory = fake_machine(tmp_path, available_gib=200, cgroup_file="0::/a\n", files=files)
    assert memory == Memory(256 * GIB, 200 * GIB)


def test_the_tightest_cgroup_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": f"{16 * GIB}\n",
        "pod/memory.current": f"{10 * GIB}\n",
        "pod/memory.stat": f"anon 0\ninactive_file {2 * GIB}\n",
        "pod/box/memory.max": f"{32 * GIB}\n",
        "pod/box/memory.current": f"{GIB}\n",
        "pod/box/memory.stat": "inactive_file 0\n",
    }
    memory = fake_machine(tmp_path, available_gib=200, cgroup_file="0::/pod/box\n", files=files)
    assert memory == Memory(16 * GIB, 8 * GIB)


def test_cgroup_v1_seen_from_inside_a_container(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": f"{8 * GIB}\n",
        "memory/memory.usage_in_bytes": f"{9 * GIB}\n",  # a limit lowered below the usage
        "memory/memory.stat": "total_inactive_file 0\n",
    }
    lines = "3:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/\n"
    memory = fake_machine(tmp_path, available_gib=200, cgroup_file=lines, files=files)
    assert memory == Memory(8 * GIB, 0)


def test_memory_of_this_machine() -> None:
    memory = read_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_host_capacity_defaults_to_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_host_capacity(HostConfig(capacity=Size(8 * GIB))) == 8 * GIB
    monkeypatch.setattr("lmkv.config.read_memory", lambda: Memory(64 * GIB, 40 * GIB))
    assert resolve_host_capacity(HostConfig()) == 10 * GIB
    monkeypatch.setattr("lmkv.config.read_memory", lambda: Memory(2048 * GIB, 2000 * GIB))
    assert resolve_host_capacity(HostConfig()) == 64 * GIB


def test_file_capacity_counts_what_the_directory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "not" / "yet"
    assert resolve_file_capacity(FileConfig()) == 0
    assert resolve_file_capacity(FileConfig(path=str(path), capacity=Size(GIB))) == GIB

    class Usage:
        free = 10 * GIB

    asked: list[Path] = []

    def disk_usage(where: Path) -> type[Usage]:
        asked.append(where)
        return Usage

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    assert resolve_file_capacity(FileConfig(path=str(path))) == 5 * GIB
    assert asked == [tmp_path]  # the nearest directory that exists
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "segment").write_bytes(bytes(2**20))
    held = (path / "sub" / "segment").stat().st_blocks * 512
    assert resolve_file_capacity(FileConfig(path=str(path))) == (10 * GIB + held) // 2
    Usage.free = 10_000 * GIB
    assert resolve_file_capacity(FileConfig(path=str(path))) == 100 * GIB


# The documentation.


def test_the_reference_is_made_from_the_code() -> None:
    documented = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    assert documented == reference(), "run: python -m lmkv.config > docs/configuration.md"
    printed = subprocess.run(
        [sys.executable, "-m", "lmkv.config"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == documented


def test_every_setting_has_one_row_and_they_stay_few() -> None:
    tables = {field.name: field.type for field in msgspec.structs.fields(Config)}
    names = [(table, name) for table, struct in tables.items() for name in struct.__struct_fields__]
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) == len(names) <= 40
    for (table, name), row in zip(names, rows, strict=True):
        assert row.startswith(f"| `{name}` | `LMKV_{table.upper()}_{name.upper()}` |")
        assert row.count("|") == 6


def test_a_file_capacity_without_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[file\] capacity: set, but \[file\] path is not"):
        load({"file": {"capacity": "1GiB"}}, environ={})
    assert load({"file": {"capacity": "1GiB", "path": None}}, environ={}).file.path is None
