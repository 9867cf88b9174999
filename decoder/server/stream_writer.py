"""Server-sent events written by the decoder's thread straight into the client's socket.

Handing every step to the event loop costs a wake-up and two changes of the interpreter lock, while the decoder is the
only one with anything to say. The loop writes the headers before the first event and the end after the last.
"""

from __future__ import annotations

import asyncio
import select
import threading
import time

STALL_LIMIT_S = 30.0  # a client that reads nothing for so long is taken for gone
_POLL_MS = 100


class StreamWriter:
    """One client's socket, for one answer."""

    def __init__(self, transport: asyncio.Transport, *, chunked: bool) -> None:
        """chunked: whether the answer is framed in HTTP/1.1 chunks."""
        self._transport, self._chunked = transport, chunked
        # a descriptor of our own: the loop may close its one at any time
        self._socket = transport.get_extra_info("socket").dup()
        self._opened = threading.Event()

    async def open(self) -> None:
        """Events may follow once the loop has sent the headers, and whatever it held back for a slow client."""
        while self._transport.get_write_buffer_size() and not self._transport.is_closing():
            await asyncio.sleep(0.001)
        self._opened.set()

    def abandon(self) -> None:
        """The answer will not go on; who waits to send may stop waiting."""
        self._opened.set()

    def send(self, data: bytes, cancelled: threading.Event) -> bool:
        """Sends all of it; False where the client is gone, reads nothing any more, or the job was cancelled."""
        self._opened.wait()
        if cancelled.is_set():
            return False
        view = memoryview(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        try:
            while view:
                try:
                    view = view[self._socket.send(view) :]
                except BlockingIOError:
                    if not self._wait_writable(cancelled):
                        return False
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Gives the descriptor back; the connection is the loop's."""
        self._socket.close()

    def _wait_writable(self, cancelled: threading.Event) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        give_up = time.monotonic() + STALL_LIMIT_S
        while not cancelled.is_set() and time.monotonic() < give_up:
            if poller.poll(_POLL_MS):
                return True
        return False
