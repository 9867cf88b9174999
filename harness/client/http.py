"""One HTTP/1.1 response from bytes in any split: chunked, content-length and close-delimited bodies (RFC 9112)."""

import re

from ..errors import KernarcError

MAX_HEAD_BYTES = 65_536
_NO_BODY_STATUSES = (204, 304)
_USUAL_SIZE_LINE = 10
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,12}")


class HttpFramingError(KernarcError):
    """Bytes that are not an HTTP/1.1 response, or a response cut short."""

    exit_code = 4


class ResponseReader:
    """Feed bytes, take body bytes; `complete` once the body has ended by its own framing.

    status and headers (lower-case names) are None and empty until the head is in; `leftover` came after the end.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.complete = False
        self.leftover = b""
        self._head = b""
        self._version = ""
        self._chunked = False
        self._remaining: int | None = None  # body or chunk bytes to come; None: until the connection closes
        self._line = b""  # an unfinished size, chunk-end or trailer line
        self._expects = "size"  # of a chunked body, once _remaining is 0: size, end or trailer

    @property
    def keep_alive(self) -> bool:
        """Whether the connection can carry another request."""
        connection = self.headers.get("connection", "").lower()
        if not self.complete or self.leftover or self._remaining is None:
            return False
        return "close" not in connection and (self._version != "HTTP/1.0" or "keep-alive" in connection)

    @property
    def is_open_ended(self) -> bool:
        """Whether the body's length is not known beforehand: chunked, or until the connection closes."""
        return self._chunked or self._remaining is None

    def feed(self, piece: bytes) -> bytes:
        """Returns the body bytes in this piece. Raises HttpFramingError on bytes that cannot be a response."""
        if self.complete:
            self.leftover += piece
            return b""
        if self.status is None:
            piece = self._read_head(piece)
            if self.status is None:
                return b""
        if self._chunked:
            return self._read_chunks(piece)
        return self._read_plain(piece)

    def end_of_connection(self) -> None:
        """The server closed: the end of a close-delimited body, an error for any other. Raises HttpFramingError."""
        if self.complete:
            return
        if self.status is None:
            started = "in the middle of the response head" if self._head else "without an answer"
            raise HttpFramingError(f"the server closed the connection {started}")
        if self._chunked or self._remaining is not None:
            raise HttpFramingError("the server closed the connection in the middle of the body")
        self.complete = True

    @property
    def _is_between_chunks(self) -> bool:
        return self._expects == "size" and not self._remaining and not self._line

    def _read_head(self, piece: bytes) -> bytes:
        self._head += piece
        while self.status is None:
            head, end, rest = self._head.partition(b"\r\n\r\n")
            if not end:
                if len(self._head) > MAX_HEAD_BYTES:
                    raise HttpFramingError(f"the response head is longer than {MAX_HEAD_BYTES} bytes")
                return b""
            status = self._parse_head(head.decode("latin-1"))
            if 100 <= status < 200:  # an interim answer: the real head follows
                self.headers = {}
                self._head = rest
                continue
            self.status = status
            self._head = b""
            self._choose_framing(status)
            return rest
        return b""

    def _parse_head(self, head: str) -> int:
        lines = head.split("\r\n")
        version, _, rest = lines[0].partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not code.isdigit() or len(code) != 3:
            raise HttpFramingError(f"not an HTTP/1.1 response: it begins {lines[0][:60]!r}")
        self._version = version
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise HttpFramingError(f"a header line without a colon: {line[:60]!r}")
            key, value = name.strip().lower(), value.strip()
            self.headers[key] = f"{self.headers[key]}, {value}" if key in self.headers else value
        return int(code)

    def _choose_framing(self, status: int) -> None:
        self._chunked = self.headers.get("transfer-encoding", "").lower().endswith("chunked")
        length = self.headers.get("content-length")
        if self._chunked or status in _NO_BODY_STATUSES:
            self._remaining = 0
        elif length is not None:
            if not length.isdigit():
                raise HttpFramingError(f"content-length is {length[:40]!r}, not a number")
            self._remaining = int(length)
        if not self._chunked and self._remaining == 0:
            self.complete = True

    def _read_plain(self, piece: bytes) -> bytes:
        if self._remaining is None:
            return piece
        body = piece[: self._remaining]
        self._remaining -= len(body)
        if self._remaining == 0:
            self.complete = True
            self.leftover += piece[len(body) :]
        return body

    def _read_chunks(self, piece: bytes) -> bytes:
        size_end = piece.find(b"\r\n", 0, _USUAL_SIZE_LINE)
        if self._is_between_chunks and _CHUNK_SIZE.fullmatch(piece, 0, max(0, size_end)):
            data = piece[size_end + 2 : -2]  # what arrives is nearly always one whole chunk: most of the cost of a step
            if data and len(data) == int(piece[:size_end], 16) and piece.endswith(b"\r\n"):
                return data
        body: list[bytes] = []
        at = 0
        while at < len(piece) and not self.complete:
            if self._remaining:
                part = piece[at : at + self._remaining]
                body.append(part)
                at += len(part)
                self._remaining -= len(part)
                if self._remaining == 0:
                    self._expects = "end"
                continue
            newline = piece.find(b"\n", at)
            if newline < 0:
                self._line += piece[at:]
                if len(self._line) > MAX_HEAD_BYTES:
                    raise HttpFramingError("a chunk header without an end")
                break
            line = (self._line + piece[at:newline]).removesuffix(b"\r")
            self._line = b""
            at = newline + 1
            self._end_chunk_line(line)
        if self.complete:
            self.leftover += piece[at:]
        return body[0] if len(body) == 1 else b"".join(body)

    def _end_chunk_line(self, line: bytes) -> None:
        if self._expects == "end":
            if line:
                raise HttpFramingError(f"a chunk is longer than its size: {line[:40]!r} follows it")
            self._expects = "size"
        elif self._expects == "size":
            size = line.partition(b";")[0].strip()
            if not _CHUNK_SIZE.fullmatch(size):
                raise HttpFramingError(f"not a chunk size: {line[:40]!r}")
            self._remaining = int(size, 16)
            if self._remaining == 0:
                self._expects = "trailer"
        elif not line:  # the blank line after the trailers
            self.complete = True
