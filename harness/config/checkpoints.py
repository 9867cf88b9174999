"""The checkpoint of a build: given as a directory, or made once as a process and kept in the cache."""

import hashlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ... import __version__
from ..caches import cache_folder
from ..errors import ConfigError
from .models import ModelSource
from .yaml_files import shipped_folder

WHOLE_FILE_BYTES = 64 * 2**20
SAMPLES = 16
SAMPLE_BYTES = 2**20
TELL_EVERY_S = 10.0
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file
_MAKING = ".making-"
RECIPE = "structured.json"  # beside structured weights, as decoder/checkpoint/synthetic.py writes it
FORMAT = 2  # of a structured checkpoint; raised when `model synth` writes other files, so that an old one is made anew

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """A model directory as far as the harness needs to know it."""

    path: Path

    @property
    def tokenizer_json(self) -> Path | None:
        """None for checkpoints without text."""
        path = self.path / "tokenizer.json"
        return path if path.is_file() else None

    @property
    def vocab_size(self) -> int:
        """Of config.json, or of its text part."""
        size = self._text_config().get("vocab_size")
        if not isinstance(size, int):
            raise ConfigError(
                f"{self.path / 'config.json'} states no vocab_size", "is it a language model's directory?"
            )
        return size

    @property
    def window(self) -> int | None:
        """Positions that the model was made for; None where config.json does not say."""
        window = self._text_config().get("max_position_embeddings")
        return window if isinstance(window, int) else None

    @property
    def structured_acceptance(self) -> float | None:
        """The acceptance that structured weights were made for; None where the weights are not structured."""
        if not (self.path / RECIPE).is_file():
            return None
        acceptance = self._json(RECIPE).get("acceptance")
        return float(acceptance) if isinstance(acceptance, int | float) else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text, by config.json and generation_config.json."""
        config = self._json("config.json")
        sources = [config, config.get("text_config")]
        if (self.path / "generation_config.json").is_file():
            sources.append(self._json("generation_config.json"))
        values = [source.get("eos_token_id") for source in sources if isinstance(source, dict)]
        ids = [item for value in values for item in (value if isinstance(value, list) else [value])]
        return tuple(sorted({item for item in ids if isinstance(item, int)}))

    def sha256(self) -> str:
        """Of every file's name, size and content; of files above 64 MiB the first megabyte and 15 spread samples."""
        digest = hashlib.sha256()
        for path in sorted(path for path in self.path.rglob("*") if path.is_file()):
            size = path.stat().st_size
            digest.update(f"{path.relative_to(self.path).as_posix()}\0{size}\0".encode())
            for piece in _pieces(path, size):
                digest.update(piece)
        return digest.hexdigest()

    def _text_config(self) -> dict[str, object]:
        """config.json, or its text part."""
        config = self._json("config.json")
        text = config.get("text_config")
        return text if isinstance(text, dict) else config

    def _json(self, name: str) -> dict[str, object]:
        path = self.path / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}", "name a checkpoint directory") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is not a JSON object")
        return content


def ensure_checkpoint(source: ModelSource, notify: Notify) -> Checkpoint:
    """The checkpoint, made now where it is a structured one that the cache does not hold yet."""
    if source.path is not None:
        path = shipped_model(source.path) or Path(source.path).expanduser().resolve()
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{path} is not a checkpoint directory: it has no config.json",
                "make one with `kernarc-gate model synth --shape tiny --out DIR`, correct the path, or name a shipped "
                f"one: {', '.join(shipped_models())}",
            )
        return Checkpoint(path)
    path = synthetic_folder(source)
    if not path.is_dir():
        _make(source, path, notify)
    return Checkpoint(path)


def shipped_models() -> list[str]:
    """The names of the checkpoints that come with the package."""
    return sorted(path.parent.name for path in shipped_folder("models").glob("*/config.json"))


def shipped_model(name: str) -> Path | None:
    """The folder of a shipped checkpoint; None for any other name, and where a folder here is called the same."""
    if name not in shipped_models() or (Path(name) / "config.json").is_file():
        return None
    return shipped_folder("models") / name


def synthetic_folder(source: ModelSource) -> Path:
    """Where the structured checkpoint of this shape is kept."""
    shape = source.synth or ""
    name = shape
    if "/" in shape or shape.endswith(".json"):
        try:
            name = "config-" + hashlib.sha256(Path(shape).read_bytes()).hexdigest()[:12]
        except OSError as error:
            raise ConfigError(f"cannot read the shape {shape}: {error}", "name tiny, 27b, or a config.json") from error
    fp8 = "-fp8" if source.fp8 else ""
    emitted = "" if source.emitted is None else f"-e{source.emitted}"
    return cache_folder("models", f"{name}-a{source.acceptance:g}{emitted}{fp8}-v{__version__}-{FORMAT}")


def _make(source: ModelSource, path: Path, notify: Notify) -> None:
    """Runs `model synth` into a folder beside, renamed when whole, so that a killed one is never taken for a model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    unfinished = path.with_name(f"{path.name}{_MAKING}{os.getpid()}")
    command = [sys.executable, "-P", "-m", "kernarc.cli", "model", "synth", "--shape", str(source.synth)]
    command += ["--acceptance", str(source.acceptance), "--out", str(unfinished)]
    command += ["--fp8"] if source.fp8 else []
    command += [] if source.emitted is None else ["--emitted", str(source.emitted)]
    notify(f"making the structured checkpoint {path} (once)")
    try:
        _run_and_tell(command, unfinished, notify)
        try:
            unfinished.rename(path)
        except OSError:
            if not path.is_dir():  # another run made it meanwhile
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _run_and_tell(command: list[str], folder: Path, notify: Notify) -> None:
    """Waits for the command, telling now and then how much it has written."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors) as process,
    ):
        while True:
            try:
                code = process.wait(TELL_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                notify(f"{written / 1e9:.1f} GB written")
            except BaseException:
                process.kill()
                raise
        if code != 0:
            errors.seek(0)
            said = errors.read().strip()[-2000:]
            raise ConfigError(f"`model synth` failed:\n{said}", f"the command was: {' '.join(command)}")


def _remove_abandoned(path: Path) -> None:
    """What a killed process left half made; one that still runs keeps its folder."""
    for folder in path.parent.glob(f"{path.name}{_MAKING}*"):
        pid = folder.name.rpartition("-")[2]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            shutil.rmtree(folder, ignore_errors=True)


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        if size <= WHOLE_FILE_BYTES:
            yield from iter(lambda: file.read(SAMPLE_BYTES), b"")
            return
        for number in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes as stored, and the number of weights."""

    stored_bytes: int
    weights: int


def checkpoint_size(folder: Path) -> CheckpointSize:
    """Adds up every tensor by the files' headers alone. ConfigError where there is no file, or one is not readable."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{folder} holds no safetensors file", "name a checkpoint directory")
    stored = weights = 0
    for path in paths:
        for tensor in _tensors(path):
            start, end = tensor["data_offsets"]
            stored += end - start
            weights += math.prod(tensor["shape"])
    return CheckpointSize(stored, weights)


def _tensors(path: Path) -> list[dict[str, list[int]]]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        return [tensor for name, tensor in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, AttributeError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}", "copy the checkpoint again") from error
