"""Connections to a Redis server, or to the servers of a Sentinel group or a cluster.

redis-py opens each connection: address, TLS, authentication, database; its retries are off, since a caller's
total deadline holds. Which of the three it is, the URL and the first server tell.
"""

import contextlib
import ipaddress
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, parse_url
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    ResponseError,
)
from redis.retry import Retry

from lmkv.backends.resp import ProtocolError, Refused, Watchdog, Wire, command, number
from lmkv.config import ConfigError, RedisConfig, redact_url

logger = logging.getLogger(__name__)

#: To connect, with TLS and authentication.
CONNECT_S = 1.0
#: Idle connections kept for each server: one for each thread of `lmkv.below` that may talk at once.
MAX_IDLE = 12
#: After a server failed the cluster is asked at most this often who holds its slots now.
REFRESH_S = 1.0
#: The oldest server that has everything used here.
MIN_VERSION = (6, 0)
#: Of redis-py's keywords those that are for the servers, not for the Sentinels before them.
_LOGIN = ("username", "password", "db")


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


class ServerInfo(NamedTuple):
    """What a server says of itself."""

    #: Such as "Valkey 9.1.2".
    product: str
    #: Of Redis, or the one of Redis that it is compatible with.
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
        self._closed = False
        self._pid = os.getpid()
        self._is_cluster: bool | None = None  # None: not known yet
        #: Which server of the cluster holds each slot, and all that hold one.
        self._slots: list[Address | None] = []
        self._nodes: list[Address] = []
        #: Since a server failed its slots may have gone to another.
        self._stale = False
        self._next_refresh = 0.0
        self._master: Address | None = None
        self.connections = 0

    # -- where a key lies

    def only(self, deadline: float) -> Address | None:
        """The server that holds all keys, None if there are several. Raises OSError."""
        if self._is_cluster is None:
            self.info(deadline)
        return None if self._is_cluster else self._first(deadline)

    def address(self, name: bytes, deadline: float) -> Address:
        """The server of a cluster that holds the key `name`. Raises OSError."""
        if not self._slots or (self._stale and time.monotonic() > self._next_refresh):
            self.refresh(deadline)
        address = self._slots[key_slot(name)]
        if address is None:
            raise ConnectionError("no server of the cluster holds the key's slot")
        return address

    def refresh(self, deadline: float) -> None:
        """Learn anew which server holds what. Raises OSError.

        redis-py's own cluster and Sentinel clients bound every receive, not the whole: hence without them.
        """
        self._master = None
        if not self._is_cluster:
            return
        self._next_refresh = time.monotonic() + REFRESH_S
        problem: object = None
        for asked in dict.fromkeys((*self._nodes, *self._hosts)):
            try:
                with self.connection(asked, _half_way(deadline)) as wire:
                    wire.send([command(b"CLUSTER", b"SLOTS")])
                    reply = wire.reply()
                self._slots, self._nodes = _slots(reply, asked)
            except (OSError, ProtocolError) as error:
                problem = error
                continue
            self._stale = False
            return
        raise ConnectionError(f"no server of the cluster says which of them holds what: {problem}")

    def _first(self, deadline: float) -> Address:
        if self._service is None:
            return self._hosts[0]
        if self._master is None:
            self._master = self._discover(self._service, deadline)
        return self._master

    def _discover(self, service: str, deadline: float) -> Address:
        """Ask the Sentinels, see https://redis.io/docs/latest/develop/reference/sentinel-clients/."""
        options = {name: value for name, value in self._options.items() if name not in _LOGIN}
        problem: object = None
        unknown = 0
        for asked in self._hosts:
            until = _half_way(deadline)
            try:
                wire = self.connect(asked, until, options)
                try:
                    with self.watchdog.watch(wire, until):
                        wire.send([command(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service.encode())])
                        reply = wire.reply()
                finally:
                    wire.close()
            except (OSError, ProtocolError) as error:
                problem = error
                continue
            if isinstance(reply, list) and len(reply) == 2:
                return _node(reply, asked)
            problem = reply
            unknown += reply is None
        if unknown == len(self._hosts):
            fix = "name the service as `sentinel monitor` does."
            raise ConfigError("[redis] url", f"{self.shown}: Sentinel knows no service {service!r}.", fix)
        raise ConnectionError(f"no Sentinel names the master of {service!r}: {problem}")

    # -- connections

    @contextlib.contextmanager
    def connection(self, address: Address, deadline: float) -> Iterator[Wire]:
        """A connection to a server, given back at the end if nothing went wrong, else closed.

        It is shut down once it is later than `deadline`. Raises OSError.
        """
        wire = None
        try:
            wire = self._borrow(address) or self.connect(address, deadline, self._options)
            with self.watchdog.watch(wire, deadline):
                yield wire
        except BaseException as error:
            if wire is not None:
                wire.close()
            self._master = None  # a Sentinel, or the cluster, may have chosen another
            self._stale = True
            if wire is not None and wire.aborted and isinstance(error, OSError):
                raise TimeoutError("no answer before the deadline") from None
            raise
        self._give_back(address, wire)

    def connect(self, address: Address, deadline: float, options: dict[str, Any]) -> Wire:
        """A new connection, ready for commands. Raises OSError, ConfigError for what no waiting mends."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time left to connect")
        connection = self._connection(address, options, min(CONNECT_S, left))
        try:
            with self.watchdog.watch(_Handshake(connection), min(deadline, time.monotonic() + CONNECT_S)):
                connection.connect()
        except Exception as error:  # noqa: BLE001  # whatever redis-py raises: there is no connection
            connection.disconnect()
            if (problem := _fatal(error)) is not None:
                raise problem from None
            raise ConnectionError(_text(error)) from None
        with self._lock:
            self.connections += 1
        return Wire(connection)

    def _connection(
        self, address: Address, options: dict[str, Any], timeout_s: float, **more: Any
    ) -> Connection:
        kind = SSLConnection if self._tls else Connection
        times = {"socket_connect_timeout": timeout_s, "socket_timeout": timeout_s}
        return kind(**(options | address._asdict() | times | more))

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
            if wire.quiet and len(idle) < MAX_IDLE and not self._closed:
                idle.append(wire)
                return
        wire.close()

    def close(self) -> None:
        """Close what is idle; what is in use closes when it is given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for wires in idle.values():
            for wire in wires:
                wire.close()

    # -- what the server says

    def info(self, deadline: float) -> ServerInfo:
        """Facts about the first server. Raises OSError, ConfigError, Refused, ProtocolError."""
        address = self._first(deadline)
        fields: dict[str, str] = {}
        try:
            with self.connection(address, deadline) as wire:
                for section in (b"server", b"memory", b"cluster"):
                    wire.send([command(b"INFO", section)])
                    fields |= _fields(wire.reply())
        except Refused as error:
            if error.kind in ("NOAUTH", "NOPERM", "WRONGPASS"):
                raise _refused_login(error) from None
            raise
        except OSError:
            if self._tls and (problem := self._alert(address)):
                raise problem from None
            raise
        self._is_cluster = fields.get("cluster_enabled") == "1"
        version = fields.get("redis_version", "0")
        valkey = fields.get("valkey_version")
        return ServerInfo(
            f"Valkey {valkey}" if valkey else f"Redis {version}",
            version,
            self._is_cluster,
            number(fields.get("maxmemory", "0")),
            fields.get("maxmemory_policy", "unknown"),
            number(fields.get("total_system_memory", "0")),
        )

    def nodes(self, deadline: float) -> list[Address]:
        """All servers that hold keys. Raises OSError."""
        if (only := self.only(deadline)) is not None:
            return [only]
        if not self._nodes:
            self.refresh(deadline)
        return self._nodes

    def _alert(self, address: Address) -> ConfigError | None:
        """Why a server ends TLS right after the handshake, if it says so.

        TLS 1.3 lets it say that after the client has begun to send, which then fails without a reason.
        """
        listen = {"redis_connect_func": lambda connected: connected._sock.recv(1)}
        connection = self._connection(address, self._options, CONNECT_S, **listen)
        try:
            connection.connect()
        except Exception as error:  # noqa: BLE001  # as in `connect`
            return _fatal(error)
        finally:
            connection.disconnect()
        return None


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


def _half_way(deadline: float) -> float:
    """Half of the time left is for one of several servers that may answer."""
    now = time.monotonic()
    return now + (deadline - now) / 2


def _fields(reply: Any) -> dict[str, str]:
    """What INFO says. Raises Refused, ProtocolError."""
    if isinstance(reply, Refused):
        raise reply
    if not isinstance(reply, bytes):
        raise ProtocolError("INFO is answered by something else")
    lines = reply.decode(errors="replace").splitlines()
    return {name: value for name, _, value in (line.partition(":") for line in lines)}


def _slots(reply: Any, asked: Address) -> tuple[list[Address | None], list[Address]]:
    """Of CLUSTER SLOTS: the server of each slot, and all of them. Raises ProtocolError."""
    if isinstance(reply, Refused):
        raise ProtocolError(str(reply))
    slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    nodes: dict[Address, None] = {}
    try:
        for first, last, node, *_ in reply:
            address = _node(node, asked)
            nodes[address] = None
            for slot in range(first, last + 1):
                slots[slot] = address
    except (TypeError, ValueError, IndexError):
        raise ProtocolError("CLUSTER SLOTS is answered by something else") from None
    return slots, list(nodes)


def _node(words: Sequence[Any], asked: Address) -> Address:
    """Of host and port; a server that does not know its own address leaves the host away.

    Raises ProtocolError.
    """
    host, port = words[:2]
    if not isinstance(host, bytes | None):
        raise ProtocolError(f"{host!r} instead of a host")
    return Address(host.decode(errors="replace") if host else asked.host, number(port))


def redirected(refused: Refused, asked: Address) -> Address:
    """Where "MOVED 3999 127.0.0.1:6381" or ASK sends to. Raises ProtocolError."""
    host, _, port = str(refused).split(" ")[-1].rpartition(":")
    return _node((host.encode(), port), asked)


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
