"""Connections to a Redis server, or to the servers of a Sentinel group or a cluster, through redis-py.

redis-py knows addresses, TLS, authentication, Sentinel and clusters; its retries are off, since a caller's
total deadline holds. What is learnt from the first connection decides which of the three it is.
"""

import contextlib
import ipaddress
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.connection import Connection, SSLConnection, parse_url
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from lmkv.backends.resp import Refused, Watchdog, Wire, command
from lmkv.config import ConfigError, RedisConfig, redact_url

logger = logging.getLogger(__name__)

#: To connect, with TLS and authentication.
CONNECT_S = 1.0
#: Idle connections kept for each server: one for each thread of `lmkv.below` that may talk at once.
MAX_IDLE = 12
#: The oldest server that has everything used here.
MIN_VERSION = (6, 0)


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


class ServerInfo(NamedTuple):
    """What a server says of itself."""

    version: str
    cluster: bool
    maxmemory_bytes: int
    policy: str
    total_memory_bytes: int


class Servers:
    """The servers behind one URL. Thread-safe. Its errors show neither user nor password."""

    def __init__(self, config: RedisConfig) -> None:
        """Raises ConfigError for what no waiting would mend. Connects to nothing."""
        assert config.url is not None
        self.shown = redact_url(config.url)
        self.watchdog = Watchdog()
        self._tls = config.url.startswith("rediss")
        self._options, self._hosts, self._service = _options(config)
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Wire]] = {}
        self._pid = os.getpid()
        self._cluster: RedisCluster | None = None
        self._is_cluster: bool | None = None  # None: not known yet
        self._master: Address | None = None
        self.reconnects = 0

    # -- where a key lies

    def only(self, deadline: float) -> Address | None:
        """The server that holds all keys, None if there are several. Raises OSError."""
        if self._is_cluster is None:
            self.info(deadline)
        return None if self._is_cluster else self._first(deadline)

    def address(self, name: bytes, deadline: float) -> Address:
        """The server of a cluster that holds the key `name`. Raises OSError."""
        if self._cluster is None:
            self.refresh(deadline)
        assert self._cluster is not None
        node = self._cluster.get_node_from_key(name)
        if node is None:
            raise ConnectionError("no server of the cluster holds the key's slot")
        return Address(str(node.host), int(node.port))

    def refresh(self, deadline: float) -> None:
        """Learn anew which server holds what. Raises OSError."""
        self._master = None
        if not self._is_cluster:
            return
        # redis-py asks the nodes itself; each of its steps is bounded by the socket's time-out.
        host, port = self._hosts[0]
        known = self._cluster
        timeout_s = max(0.05, min(CONNECT_S, deadline - time.monotonic()))
        options = self._options | {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        for name in ("db", "retry"):  # a cluster has one database, and takes its retries by itself
            options.pop(name, None)
        with _as_oserror():
            if known is not None:
                known.nodes_manager.initialize()
                return
            cluster = RedisCluster(
                host=host,
                port=port,
                ssl=self._tls,
                cluster_error_retry_attempts=0,
                retry=Retry(NoBackoff(), 0),
                require_full_coverage=False,
                **options,
            )
        self._cluster = cluster

    def _first(self, deadline: float) -> Address:
        if self._service is None:
            return self._hosts[0]
        if self._master is None:
            timeout_s = max(0.05, min(CONNECT_S, deadline - time.monotonic()))
            options = {name: value for name, value in self._options.items() if name.startswith("ssl")}
            options |= {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "ssl": self._tls}
            with _as_oserror():
                sentinel = Sentinel(self._hosts, sentinel_kwargs=options)
                self._master = Address(*sentinel.discover_master(self._service))
        return self._master

    # -- connections

    @contextlib.contextmanager
    def connection(self, address: Address, deadline: float) -> Iterator[Wire]:
        """A connection to a server, given back at the end if nothing went wrong, else closed.

        It is shut down once it is later than `deadline`. Raises OSError.
        """
        wire = None
        try:
            wire = self._borrow(address) or self.connect(address, deadline)
            with self.watchdog.watch(wire, deadline):
                yield wire
        except BaseException:
            if wire is not None:
                wire.close()
            self._master = None  # a Sentinel may have chosen another
            raise
        self._give_back(address, wire)

    def connect(self, address: Address, deadline: float) -> Wire:
        """A new connection, ready for commands. Raises OSError, ConfigError for what no waiting mends."""
        options = self._options | {"host": address.host, "port": address.port}
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time left to connect")
        options["socket_connect_timeout"] = options["socket_timeout"] = min(CONNECT_S, left)
        connection = (SSLConnection if self._tls else Connection)(**options)
        try:
            with self.watchdog.watch(_Handshake(connection), min(deadline, time.monotonic() + CONNECT_S)):
                connection.connect()
        except Exception as error:  # noqa: BLE001  # whatever redis-py raises: there is no connection
            connection.disconnect()
            problem = _fatal(error)
            if problem is None and self._tls:
                problem = _alert(options)
            if problem is not None:
                raise problem from None
            raise ConnectionError(f"{self.shown}: {_text(error)}") from None
        self.reconnects += 1
        return Wire(connection)

    def _borrow(self, address: Address) -> Wire | None:
        with self._lock:
            if self._pid != os.getpid():  # the parent's connections are the parent's
                self._idle, self._pid = {}, os.getpid()
                self.watchdog = Watchdog()
            while idle := self._idle.get(address):
                wire = idle.pop()
                if wire.quiet:
                    return wire
                wire.close()
            return None

    def _give_back(self, address: Address, wire: Wire) -> None:
        with self._lock:
            idle = self._idle.setdefault(address, [])
            if wire.quiet and len(idle) < MAX_IDLE:
                idle.append(wire)
                return
        wire.close()

    def close(self) -> None:
        """Close what is idle; what is in use closes when it is given back."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for wires in idle.values():
            for wire in wires:
                wire.close()
        if self._cluster is not None:
            self._cluster.close()

    # -- what the server says

    def info(self, deadline: float) -> ServerInfo:
        """Facts about the first server. Raises OSError, ConfigError, Refused."""
        address = self._first(deadline)
        wire = self.connect(address, deadline)
        try:
            with self.watchdog.watch(wire, deadline):
                fields: dict[str, str] = {}
                for section in (b"server", b"memory", b"cluster"):
                    wire.send([command(b"INFO", section)])
                    text = wire.reply()
                    if isinstance(text, Refused):
                        raise text
                    for line in text.decode(errors="replace").splitlines():
                        name, _, value = line.partition(":")
                        fields[name] = value
        except Refused as error:
            wire.close()
            if error.kind in ("NOAUTH", "NOPERM", "WRONGPASS"):
                raise _refused_login(error) from None
            raise
        except OSError:
            wire.close()
            if self._tls and (problem := _alert(self._options | address._asdict())):
                raise problem from None
            raise
        except BaseException:
            wire.close()
            raise
        self._give_back(address, wire)
        self._is_cluster = fields.get("cluster_enabled") == "1"
        return ServerInfo(
            fields.get("redis_version", "0"),
            self._is_cluster,
            int(fields.get("maxmemory", 0)),
            fields.get("maxmemory_policy", "unknown"),
            int(fields.get("total_system_memory", 0)),
        )

    def nodes(self, deadline: float) -> list[Address]:
        """All servers that hold keys. Raises OSError."""
        if self._is_cluster and self._cluster is None:
            self.refresh(deadline)
        if self._cluster is None:
            return [self._first(deadline)]
        return [Address(str(node.host), int(node.port)) for node in self._cluster.get_primaries()]


class _Handshake:
    """A redis-py connection that is being opened, as the watchdog sees it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def abort(self) -> None:
        """Shut it down, if there is a socket yet; to get one has a time-out of its own."""
        sock = self._connection._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _options(config: RedisConfig) -> tuple[dict[str, Any], list[Address], str | None]:
    """redis-py's keywords, the servers or Sentinels, and the Sentinel service. Raises ConfigError."""
    url = str(config.url)
    scheme, _, rest = url.partition("://")
    service = None
    if scheme.endswith("+sentinel"):
        authority, _, path = rest.partition("/")
        user, _, hosts = authority.rpartition("@")
        service, _, database = path.partition("/")
        if not service:
            fix = "write redis+sentinel://host:26379/SERVICE/0."
            raise ConfigError("[redis] url", f"{redact_url(url)} names no Sentinel service.", fix)
        names = [_address(text, 26379) for text in hosts.split(",")]
        url = f"{scheme.partition('+')[0]}://{user + '@' if user else ''}sentinel/{database or 0}"
    try:
        options = parse_url(url)
    except ValueError as error:
        raise ConfigError(
            "[redis] url", f"{redact_url(url)}: {error}.", "write redis://host:6379/0."
        ) from None
    options.pop("connection_class", None)
    host, port = options.pop("host", "localhost"), options.pop("port", 6379)
    if service is None:
        names = [Address(host, port)]
    if config.username is not None:
        options["username"] = config.username
    if config.password is not None:
        options["password"] = str.__str__(config.password)
    elif config.password_file is not None:
        options["password"] = _first_line(config.password_file)
    options |= {"protocol": 2, "retry": Retry(NoBackoff(), 0)}
    if url.startswith("rediss"):
        _check_files(config)
        options |= {
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": config.check_hostname,
            "ssl_ca_certs": config.ca_file,
            "ssl_certfile": config.cert_file,
            "ssl_keyfile": config.key_file or config.cert_file,
        }
        return options, names, service
    for name in ("ca_file", "cert_file", "key_file"):
        if getattr(config, name) is not None:
            raise ConfigError(f"[redis] {name}", "set, but the URL does not ask for TLS.", "write rediss://.")
    if "password" in options and not all(_is_loopback(address.host) for address in names):
        shown = redact_url(str(config.url))
        logger.warning("lmkv: the password for %s crosses the network in plain text: use rediss://", shown)
    return options, names, service


def _check_files(config: RedisConfig) -> None:
    """Load the PEM files once, so that the setting at fault is named. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    setting = "ca_file"
    try:
        if config.ca_file is not None:
            context.load_verify_locations(config.ca_file)
        setting = "cert_file"
        if config.cert_file is not None:
            context.load_cert_chain(config.cert_file, config.key_file)
    except OSError as error:
        fix = "name a PEM file that this user can read; the key may be in [redis] key_file."
        raise ConfigError(f"[redis] {setting}", f"it cannot be loaded: {_text(error)}.", fix) from None
    if config.key_file is not None and config.cert_file is None:
        raise ConfigError("[redis] key_file", "set, but [redis] cert_file is not.", "set both.")


def _address(text: str, default_port: int) -> Address:
    parts = urlsplit(f"//{text}")
    try:
        return Address(parts.hostname or "localhost", parts.port or default_port)
    except ValueError as error:
        raise ConfigError("[redis] url", f"{text!r}: {error}.", "write host:port.") from None


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        fix = "make it a text file that this user can read."
        raise ConfigError("[redis] password_file", f"{path} cannot be read: {error}.", fix) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def _as_oserror() -> Iterator[None]:
    """redis-py's errors as the ConnectionError that callers expect."""
    try:
        yield
    except RedisError as error:
        raise ConnectionError(_text(error)) from None


def _text(error: BaseException) -> str:
    """What an error says, without a URL that redis-py may have put in."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _refused_login(error: BaseException) -> ConfigError:
    fix = "set LMKV_REDIS_PASSWORD, or [redis] password_file, and [redis] username; see the server's ACL."
    return ConfigError("[redis] password", f"the server refuses the login: {_text(error)}.", fix)


def _alert(options: dict[str, Any]) -> ConfigError | None:
    """Why a server ends TLS right after the handshake, if it says so.

    TLS 1.3 lets it say that after the client has begun to send, which then fails without a reason.
    """
    connection = SSLConnection(**options, redis_connect_func=lambda connected: connected._sock.recv(1))
    try:
        connection.connect()
    except Exception as error:  # noqa: BLE001  # as in `connect`
        return _fatal(error)
    finally:
        connection.disconnect()
    return None


def _fatal(error: BaseException) -> ConfigError | None:
    """The setting at fault, for what no waiting mends."""
    for cause in _causes(error):
        text = _text(cause)
        if isinstance(cause, AuthenticationError | AuthorizationError | NoPermissionError) or (
            isinstance(cause, ResponseError) and text.startswith(("NOAUTH", "WRONGPASS", "NOPERM", "invalid"))
        ):
            return _refused_login(cause)
        if isinstance(cause, ssl.SSLCertVerificationError):
            if cause.verify_code in (62, 64):  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
                problem = f"the server's certificate is for another host: {text}."
                fix = "use the name in the certificate, or set [redis] check_hostname = false."
                return ConfigError("[redis] url", problem, fix)
            problem = f"the server's certificate is not trusted: {text}."
            return ConfigError("[redis] ca_file", problem, "name the authority that signed it, or renew it.")
        if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or ""):
            problem = f"the server refuses the client: {text}."
            return ConfigError("[redis] cert_file", problem, "name a certificate that the server accepts.")
    return None
