"""One kept-alive TCP (or TLS) connection to an HTTP server, whose cost is measured apart from the request's."""

import socket as socket_module
import ssl
from socket import IPPROTO_TCP, TCP_NODELAY, create_connection
from socket import socket as Socket
from time import perf_counter_ns
from urllib.parse import urlsplit

from ..errors import ConfigError
from .socket_reader import Arrivals, KernelStamped, ProcessStamped
from .timestamps import ask_for_stamps, keep_stamping, send_stamped

NS_PER_S = 1_000_000_000
TCP_QUICKACK: int | None = getattr(socket_module, "TCP_QUICKACK", None)  # Linux only


class Connection:
    """Connects when needed, reconnects where the server closed while idle, sends a request as a whole.

    Raises OSError (TimeoutError among them) where the network does; never sends a byte twice.
    """

    def __init__(self, base_url: str, *, connect_s: float, idle_reuse_s: float, asks_for_stamps: bool = True) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"{base_url!r} is not an http or https URL", "write it as http://127.0.0.1:8000")
        self.host = url.hostname
        self.is_tls = url.scheme == "https"
        try:
            self.port = url.port or (443 if self.is_tls else 80)
        except ValueError as error:
            raise ConfigError(
                f"{base_url!r} has no usable port: {error}", "write it as http://127.0.0.1:8000"
            ) from None
        self.host_header = url.netloc.rpartition("@")[2]
        self.path = url.path.rstrip("/").removesuffix("/v1")  # what comes before /v1/completions
        self._asks_for_stamps = asks_for_stamps and keep_stamping() is not None
        self._connect_s = connect_s
        self._idle_reuse_s = idle_reuse_s
        self._socket: Socket | None = None
        self._idle_since_ns = 0
        self._is_stamped = False

    @property
    def socket(self) -> Socket:
        """The open socket. Raises OSError where there is none."""
        if self._socket is None:
            raise OSError("not connected")
        return self._socket

    def open_if_needed(self) -> int:
        """Returns how long connecting took in ns, 0 where the kept connection is still good."""
        if self._socket is not None and self._is_reusable():
            return 0
        self.close()
        start_ns = perf_counter_ns()
        self._socket = self._connect()
        return perf_counter_ns() - start_ns

    def send(self, request: bytes) -> tuple[int, int]:
        """Returns perf_counter_ns when the last byte was taken, and the ns it took to connect anew, mostly 0.

        A connection that does not even take the first byte is opened anew, once: the server has seen nothing.
        """
        reconnect_ns = 0
        try:
            taken = self._send(request)
        except OSError:
            if self.is_tls:  # what a broken TLS connection has sent is not known
                raise
            self.close()
            reconnect_ns = self.open_if_needed()
            taken = self._send(request)
        while taken < len(request):
            taken += self._send(memoryview(request)[taken:])
        return perf_counter_ns(), reconnect_ns

    def _send(self, data: bytes | memoryview) -> int:
        return send_stamped(self.socket, data, self._connect_s) if self._is_stamped else self.socket.send(data)

    def arrivals(self) -> Arrivals:
        """What comes back for the request just sent, stamped by the kernel where it does that."""
        if TCP_QUICKACK is not None:  # having sent, TCP would hold up a server that waits to be acknowledged
            self.socket.setsockopt(IPPROTO_TCP, TCP_QUICKACK, 1)
        return KernelStamped(self.socket) if self._is_stamped else ProcessStamped(self.socket)

    def rest(self) -> None:
        """Marks the connection idle, to be used again."""
        self._idle_since_ns = perf_counter_ns()

    def close(self) -> None:
        """Closes it; the next request opens a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> Socket:
        raw = create_connection((self.host, self.port), timeout=self._connect_s)
        try:
            raw.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            if not self.is_tls:
                self._is_stamped = self._asks_for_stamps and ask_for_stamps(raw)
                return raw
            return ssl.create_default_context().wrap_socket(raw, server_hostname=self.host)
        except BaseException:
            raw.close()
            raise

    def _is_reusable(self) -> bool:
        """Not idle so long that the server may be closing it just now, and nothing, not even an end, to be read."""
        if perf_counter_ns() - self._idle_since_ns > self._idle_reuse_s * NS_PER_S:
            return False
        kept = self.socket
        kept.settimeout(0)
        try:
            kept.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        finally:
            kept.settimeout(self._connect_s)
        return False  # the server closed it, or sent what nobody asked for
