"""Records with known contents, small disks, and a server of known token times."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from kernarc.harness.config.builds import Build
from kernarc.harness.config.models import BuildConfig, ModelSource
from kernarc.harness.run.records import (
    BuildRecord,
    Environment,
    RunManifest,
    StreamRecord,
    StreamStatus,
    TokenEvent,
    Usage,
)
from kernarc.harness.selftest.conformance.process import ConformanceServer

from ..fakes.records import made_up_environment


@pytest.fixture(scope="session")
def conformance_server() -> Iterator[ConformanceServer]:
    """One server that plays every case at server.url(CASE); server.new_truths() says what was played."""
    with ConformanceServer() as server:
        yield server


@pytest.fixture
def environment_record() -> Environment:
    return made_up_environment()


@pytest.fixture
def manifest(environment_record: Environment) -> RunManifest:
    build = BuildRecord(
        name="a",
        engine="endpoint",
        engine_version=None,
        command=(),
        model="m",
        model_sha256=None,
        num_speculative_tokens=None,
    )
    return RunManifest(
        run_id="r",
        kind="bench",
        created_utc="2026-01-01T00:00:00+00:00",
        config_name="default",
        config_yaml="",
        builds=(build,),
        depths=(128,),
        requests_per_depth=2,
        max_tokens=4,
        seed=1,
        launches=1,
        residency="both",
        requests_sha256="0",
        prompt_source="random ids",
        environment=environment_record,
    )


@pytest.fixture
def stream() -> Callable[..., StreamRecord]:
    def make(request_id: str = "d128-l0-r0", **changes: object) -> StreamRecord:
        record = StreamRecord(
            build="a",
            depth=128,
            launch=0,
            block=0,
            slot=0,
            request_id=request_id,
            request_sha256="0",
            prompt_ids_sha256="0",
            max_tokens=4,
            sent_ns=0,
            connect_ns=0,
            ended_ns=50_000_000,
            wall_utc="2026-01-01T00:00:00+00:00",
            events=tuple(TokenEvent(t_ns=10_000_000 * n, token_ids=(n,)) for n in range(1, 5)),
            events_are_steps=True,
            usage=Usage(prompt_tokens=128, completion_tokens=4, cached_tokens=0),
            finish_reason="length",
            status=StreamStatus.OK,
        )
        return record.model_copy(update=changes)

    return make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; where mounting is not allowed, a folder whose tests limit the file size instead."""
    mount = tmp_path / "small-disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    yield mount
    if mounted:
        subprocess.run(["umount", "-l", str(mount)], check=True)


FAKE_DECODER = Path(__file__).parents[1] / "fakes" / "fake_decoder"


@pytest.fixture
def fake_model(tmp_path: Path) -> Path:
    """A model directory as far as the harness looks into one."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"text_config": {"vocab_size": 90, "eos_token_id": 5}}')
    return folder


@pytest.fixture
def fake_build(fake_model: Path) -> Callable[..., Build]:
    """A build whose engine is fake_decoder: started like the bundled decoder, of known speed, with planted faults."""

    def make(name: str = "a", *extra_args: str, **config: object) -> Build:
        settings: dict[str, object] = {"engine": "kernarc", "num_speculative_tokens": 3, **config}
        return Build(
            name=name,
            config=BuildConfig.model_validate({**settings, "extra_args": extra_args}),
            model_source=ModelSource(path=str(fake_model)),
            pythonpath=(str(FAKE_DECODER),),
        )

    return make


def pids_with(marker: str) -> list[int]:
    """Every process that has the marker in its command line, however it was started."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and marker in " ".join(process.info["cmdline"] or []):
            found.append(process.pid)
    return found


@pytest.fixture
def processes_with() -> Callable[[str], list[int]]:
    return pids_with
