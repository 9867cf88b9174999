"""A run on disk: `manifest.json`, `requests.jsonl`, `streams.jsonl`, and what was set aside in `torn.jsonl`.

Every stream is appended, flushed and synced before the next one starts, so a killed run loses at most the stream in
flight. The manifest is replaced as a whole or not at all. Reading changes nothing; writing sets a torn tail aside.
Ctrl-C, SIGTERM and SIGHUP take effect after a write, never inside it: what can be read stays readable.
"""

import errno
import fcntl
import json
import lzma
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TypeVar

from pydantic import ValidationError

from ..errors import ConfigError, RecordError
from .interrupts import interrupts_after
from .records import SCHEMA_VERSION, Record, RunManifest, StreamRecord, StreamStatus

R = TypeVar("R", bound=Record)


class StorageError(RecordError):
    """The disk refused a write; what was written before is intact."""

    exit_code = 4


class Request(Record):
    """One prompt of a run, the same for every build. request_id: "d1024-l0-r3", warm-ups "d1024-l0-w0"."""

    request_id: str
    depth: int
    launch: int
    prompt_ids: tuple[int, ...]
    is_warmup: bool = False


def now_utc() -> str:
    """The time now, ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class RunDirectory:
    """The files of one run. The only door to them, for writers and readers alike."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest_path = self.path / "manifest.json"
        self.streams_path = self.path / "streams.jsonl"
        self.requests_path = self.path / "requests.jsonl"
        self.torn_path = self.path / "torn.jsonl"
        self.logs_path = self.path / "logs"
        self.lock_path = self.path / "run.lock"
        self._tails_are_whole = False
        self._leaves_trace = False

    def create(self, manifest: RunManifest) -> Self:
        """Starts a run in a folder that holds none yet."""
        if self.manifest_path.exists():
            raise ConfigError(
                f"{self.path} already holds a run",
                f"continue it with `--resume {self.path}`, or choose another --out",
            )
        with _clear_disk_errors(self.path):
            self.logs_path.mkdir(parents=True, exist_ok=True)
        self._write_manifest(manifest)
        return self

    def manifest(self) -> RunManifest:
        """The run's plan, machine and builds."""
        try:
            text = self.manifest_path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RecordError(
                f"{self.path} is not a run directory: it has no manifest.json",
                "name the folder that `bench` or `compare` printed as its run directory",
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"{self.manifest_path} cannot be read: {error}") from error
        _refuse_other_schema(text, self.manifest_path)
        try:
            return RunManifest.model_validate_json(text)
        except ValidationError as error:
            raise RecordError(f"{self.manifest_path}: {_first_problem(error)}", _WRITTEN_BY_BENCH) from error

    def update_manifest(self, **changes: object) -> RunManifest:
        """Replaces some fields of the manifest, checked and in one atomic step."""
        manifest = RunManifest.model_validate({**dict(self.manifest()), **changes})
        self._write_manifest(manifest)
        return manifest

    def append(self, stream: StreamRecord) -> None:
        """Adds one finished stream; on disk when this returns. After a failed write the file is as it was before."""
        self.set_aside_torn_lines()
        self._append_lines(self.streams_path, [stream.model_dump_json()])

    def streams(self) -> list[StreamRecord]:
        """Every recorded stream in the order it finished, without a torn last line.

        Streams of a launch that was voided as a whole come back void, with the launch's reason.
        """
        streams = [
            _parse(StreamRecord, line, self.streams_path, number) for number, line in _whole_lines(self.streams_path)
        ]
        if not self.manifest_path.exists():
            return streams
        void_launches = {
            (record.build, record.launch): record.void_reason
            for record in self.manifest().launch_records
            if record.void_reason is not None
        }
        return [_voided(stream, void_launches.get((stream.build, stream.launch))) for stream in streams]

    def append_requests(self, requests: Iterable[Request]) -> None:
        """Adds the prompts of one launch, before any of them is sent."""
        self.set_aside_torn_lines()
        self._append_lines(self.requests_path, [request.model_dump_json() for request in requests])

    def requests(self) -> dict[str, Request]:
        """Every prompt of the run by its request id, warm-ups included."""
        lines = _whole_lines(self.requests_path)
        requests = [_parse(Request, line, self.requests_path, number) for number, line in lines]
        return {request.request_id: request for request in requests}

    def set_aside(self, text: str, reason: str) -> None:
        """Keeps what cannot count as a stream, with the reason, in torn.jsonl."""
        entry = {"set_aside_utc": now_utc(), "reason": reason, "text": text}
        self._append_lines(self.torn_path, [json.dumps(entry)])

    def set_aside_torn_lines(self) -> None:
        """Moves an unfinished last line, the trace of a killed writer, to torn.jsonl."""
        if self._tails_are_whole:
            return
        for path in (self.streams_path, self.requests_path):
            torn = _torn_tail(path.read_bytes()) if path.exists() else b""
            if torn:
                with interrupts_after():  # set aside and cut off: both, or the tail is set aside again next time
                    self.set_aside(torn.decode(errors="replace"), f"torn last line of {path.name}")
                    with _clear_disk_errors(path), path.open("rb+") as file:
                        file.truncate(path.stat().st_size - len(torn))
                        os.fsync(file.fileno())
        self._tails_are_whole = True

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run for this process; a second writer is refused. Left behind only by a killed process."""
        with _clear_disk_errors(self.path):
            file = self.lock_path.open("a+", encoding="ascii")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise ConfigError(
                    f"{self.path} is being measured by process {file.read().strip() or 'unknown'}",
                    "wait for it, or stop it with Ctrl-C; what it measured is kept",
                ) from error
            with suppress(OSError):  # the pid is a courtesy; a full disk is reported by the first record
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            try:
                yield
            finally:
                if not self._leaves_trace:
                    self.lock_path.unlink(missing_ok=True)

    def leave_trace(self) -> None:
        """Makes was_killed() true after this process: it could not write down why it stopped."""
        self._leaves_trace = True

    def was_killed(self) -> bool:
        """True where the last process that measured this run ended without saying so."""
        return self.lock_path.exists()

    def write_document(self, name: str, text: str) -> None:
        """Writes a small file of the run, as a whole or not at all."""
        path = self.path / name
        temporary = path.with_name(f"{name}.new")
        with interrupts_after(), _clear_disk_errors(path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("w", encoding="utf-8") as file:
                    file.write(text + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def _write_manifest(self, manifest: RunManifest) -> None:
        self.write_document("manifest.json", manifest.model_dump_json(indent=2))

    def _append_lines(self, path: Path, lines: list[str]) -> None:
        if _packed(path).exists() and not path.exists():
            raise ConfigError(f"{path.name} of this run is packed", f"unpack it first: `xz -d {_packed(path)}`")
        payload = "".join(line + "\n" for line in lines).encode()
        with interrupts_after(), _clear_disk_errors(path), path.open("ab", buffering=0) as file:
            size_before = file.seek(0, os.SEEK_END)
            try:
                _write_all(file.fileno(), payload)
                os.fsync(file.fileno())
            except OSError:  # a full disk takes a part of a line first, then refuses
                self._tails_are_whole = False
                with suppress(OSError):
                    file.truncate(size_before)
                raise


_WRITTEN_BY_BENCH = "run directories are written by `kernarc-gate bench` and `compare`; this file was changed since"


def _write_all(descriptor: int, payload: bytes) -> None:
    written = 0
    while written < len(payload):  # a disk that fills up takes a part first, then refuses
        written += os.write(descriptor, payload[written:])


def _read(path: Path) -> bytes:
    """A file of records, or its `.xz`: a finished run may be kept compressed."""
    packed = _packed(path)
    if path.exists() or not packed.exists():
        return path.read_bytes() if path.exists() else b""
    try:
        return lzma.decompress(packed.read_bytes())
    except lzma.LZMAError as error:
        raise RecordError(f"{packed} cannot be unpacked: {error}", "unpack it by hand: `xz -d`") from error


def _packed(path: Path) -> Path:
    return path.with_name(f"{path.name}.xz")


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    content = _read(path)
    whole = content[: len(content) - len(_torn_tail(content))]
    yield from enumerate(whole.split(b"\n")[:-1], start=1)


def _torn_tail(content: bytes) -> bytes:
    """The bytes after the last newline, or a last line that is not JSON (zeros after a power cut)."""
    after_newline = content[content.rfind(b"\n") + 1 :]
    if after_newline:
        return after_newline
    last_line = content[content.rfind(b"\n", 0, -1) + 1 :]
    try:
        json.loads(last_line or b"{}")
    except ValueError:
        return last_line
    return b""


def _parse(record: type[R], line: bytes, path: Path, number: int) -> R:
    try:
        return record.model_validate_json(line)
    except ValidationError as error:
        raise RecordError(f"{path}, line {number}: {_first_problem(error)}", _WRITTEN_BY_BENCH) from error


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]


def _refuse_other_schema(text: str, path: Path) -> None:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}", _WRITTEN_BY_BENCH) from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise RecordError(
            f"{path} has schema_version {version}, this kernarc-gate reads {SCHEMA_VERSION}",
            "read it with the version that wrote it (its manifest names it), or measure again",
        )


def _voided(stream: StreamRecord, reason: str | None) -> StreamRecord:
    if reason is None or stream.status is StreamStatus.VOID:
        return stream
    return stream.model_copy(update={"status": StreamStatus.VOID, "void_reason": reason})


@contextmanager
def _clear_disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            message = f"no space left to write {path}"
            hint = "nothing recorded is lost: free some space, then continue with --resume"
        else:
            message = f"cannot write {path}: {error.strerror or error}"
            hint = "check that the folder exists and that you may write to it"
        raise StorageError(message, hint) from error
