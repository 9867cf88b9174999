"""A run: created from a plan, measured launch by launch, interrupted by anything, resumed to the same end."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from ..config.checkpoints import Checkpoint, ensure_checkpoint
from ..config.git_builds import hold_again
from ..engines.endpoint import connect
from ..engines.registry import build_record
from ..environment import read_environment
from ..errors import ConfigError, KernarcError, RecordError
from ..gpu import Gpu
from .completeness import how_to_continue
from .launch import Launch
from .plan import RunPlan, read_plan, require_distinct_names, write_plan
from .progress import RunObserver
from .records import BuildRecord, Interruption, RunManifest
from .requests import RequestSet
from .resume import as_far_as_recorded, not_verified, require_unchanged
from .schedule import Slot, launch_order, launch_schedule
from .storage import Request, RunDirectory, StorageError, now_utc


class Run:
    """One run directory and what is still to be measured in it."""

    def __init__(
        self,
        plan: RunPlan,
        directory: RunDirectory,
        checkpoints: Mapping[str, Checkpoint],
        request_set: RequestSet,
        observer: RunObserver | None = None,
    ) -> None:
        self.plan = plan
        self.directory = directory
        self._checkpoints = checkpoints
        self._request_set = request_set
        self._observer = observer or RunObserver()
        self._gpu = Gpu.open()
        self._is_open = False

    @classmethod
    def create(cls, plan: RunPlan, out: Path | str | None = None, observer: RunObserver | None = None) -> "Run":
        """Makes the checkpoints and prompts ready and writes the manifest. No engine is started yet.

        out: the run directory, runs/RUN_ID unless given. ConfigError where it holds a run already or the plan cannot
        be carried out.
        """
        observer = observer or RunObserver()
        require_distinct_names(plan.builds)
        run_id = new_run_id(plan.kind)
        directory = RunDirectory(Path("runs") / run_id if out is None else out)
        if directory.manifest_path.exists():
            raise ConfigError(
                f"{directory.path} already holds a run",
                f"{how_to_continue(plan.kind, directory.path)}, or choose another --out",
            )
        for build in plan.builds:
            if build.engine == "endpoint":
                connect(build)  # a server that is not there should not leave a run behind
        checkpoints = _checkpoints(plan, observer)
        _require_windows(plan, checkpoints)
        request_set = plan.request_set(list(checkpoints.values()))
        run = cls(plan, directory, checkpoints, request_set, observer)
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"no run directory can be made at {directory.path}: {error}", "choose another --out"
            ) from error
        write_plan(directory, plan)
        directory.create(run._new_manifest(run_id))
        return run

    @classmethod
    def resume(cls, run_dir: Path | str, observer: RunObserver | None = None) -> "Run":
        """Opens a run that did not finish.

        ConfigError where the same requests cannot be made any more, or code, model or machine are not what they were.
        """
        observer = observer or RunObserver()
        directory = RunDirectory(run_dir)
        manifest = directory.manifest()
        plan = read_plan(directory)
        for build in plan.builds:
            if build.git_commit is not None:  # of `git:` builds alone
                hold_again(build)
        checkpoints = _checkpoints(plan, observer)
        request_set = plan.request_set(list(checkpoints.values()))
        if request_set.sha256 != manifest.requests_sha256:
            raise ConfigError(
                f"{run_dir} cannot be resumed: its prompts came from {manifest.prompt_source}, "
                f"which is now {request_set.prompt_source}",
                "resume it with the Python and the model it was started with, or measure again",
            )
        run = cls(plan, directory, checkpoints, request_set, observer)
        run._require_same_models(manifest)
        if not run.is_finished:
            run._require_unchanged(manifest)
        if directory.was_killed():
            with directory.lock():
                run._note_interruption(
                    "the measuring process ended without a word (killed, disk full, or the power failed)"
                )
        return run

    @property
    def is_finished(self) -> bool:
        """Whether every stream of every planned launch is recorded."""
        return not any(self.remaining(launch) for launch in range(self.plan.launches))

    def remaining(self, launch: int) -> list[Slot]:
        """The slots of a launch that no record answers yet, in their order."""
        recorded = {(s.build, s.request_id) for s in self.directory.streams() if not s.is_warmup}
        return [slot for slot in self.schedule(launch) if (slot.build, slot.request_id) not in recorded]

    def schedule(self, launch: int) -> list[Slot]:
        """Every slot of a launch, whether measured or not."""
        measurement = self.plan.measurement
        names = [build.name for build in self.plan.builds]
        return launch_schedule(names, measurement.depths, measurement.requests_per_depth, launch, measurement.seed)

    def measure(self) -> RunManifest:
        """Measures every launch that is not complete, and finishes the run."""
        with self._session():
            for launch in range(self.plan.launches):
                self.measure_launch(launch)
            return self.finish()

    def measure_launch(self, launch: int) -> None:
        """Measures what is missing of one launch: starts its engines, warms up, ABBA, stops them.

        Whatever raises, what was measured is kept, the interruption is recorded and no engine is left running.
        """
        with self._session():
            slots = self.remaining(launch)
            if not slots:
                return
            requests = self._requests_of(launch)
            self._observer.launch_begins(launch, slots)
            measured = Launch(self.plan, self.directory, self._checkpoints, self._gpu, self._observer)
            for group in self._resident_together(launch, slots):
                measured.measure(launch, group, requests)

    def finish(self, launches: int | None = None) -> RunManifest:
        """Marks the run finished; launches: how many were measured, where a gate stopped before its limit."""
        return self.directory.update_manifest(
            finished_utc=now_utc(), launches=self.plan.launches if launches is None else launches
        )

    def _resident_together(self, launch: int, slots: list[Slot]) -> list[list[Slot]]:
        if self.plan.measurement.residency == "both":
            return [slots]
        order = launch_order([build.name for build in self.plan.builds], launch)
        groups = [[slot for slot in slots if slot.build == name] for name in order]
        return [group for group in groups if group]

    def _requests_of(self, launch: int) -> dict[str, Request]:
        """The prompts of a launch by id, written down before any is sent."""
        wanted = self._request_set.launch(launch)
        kept = self.directory.requests()
        changed = [request.request_id for request in wanted if kept.get(request.request_id, request) != request]
        if changed:
            raise RecordError(f"{self.directory.requests_path} holds another prompt for {changed[0]}", "measure again")
        self.directory.append_requests(request for request in wanted if request.request_id not in kept)
        return {request.request_id: request for request in wanted}

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Holds the run's lock; records why measuring stopped where it stops early."""
        if self._is_open:
            yield
            return
        with self.directory.lock():
            self._is_open = True
            try:
                yield
            except BaseException as error:
                try:
                    self._note_interruption(_reason(error))
                except StorageError:  # a full disk must not hide what went wrong
                    self.directory.leave_trace()
                raise
            finally:
                self._is_open = False

    def _note_interruption(self, reason: str) -> None:
        done = sum(not stream.is_warmup for stream in self.directory.streams())
        entry = Interruption(wall_utc=now_utc(), reason=reason, streams_done=done)
        self.directory.update_manifest(interruptions=(*self.directory.manifest().interruptions, entry))

    def _require_same_models(self, manifest: RunManifest) -> None:
        for build in manifest.builds:
            checkpoint = self._checkpoints.get(build.name)
            if checkpoint is not None and checkpoint.sha256() != build.model_sha256:
                raise ConfigError(
                    f"{checkpoint.path} is no longer the model that {build.name} was measured with",
                    "put the same checkpoint back, or measure again",
                )

    def _require_unchanged(self, manifest: RunManifest) -> None:
        builds = as_far_as_recorded(manifest, self.plan.builds, self._build_records())
        require_unchanged(manifest, builds, read_environment(self._gpu))
        for remark in not_verified(manifest):
            self._observer.notify(remark)

    def _build_records(self) -> list[BuildRecord]:
        context = self.plan.max_context
        return [build_record(build, self._checkpoints.get(build.name), context) for build in self.plan.builds]

    def _new_manifest(self, run_id: str) -> RunManifest:
        measurement = self.plan.measurement
        return RunManifest(
            run_id=run_id,
            kind=self.plan.kind,
            created_utc=now_utc(),
            config_name=self.plan.config_name,
            config_yaml=self.plan.config_yaml,
            builds=tuple(self._build_records()),
            depths=measurement.depths,
            requests_per_depth=measurement.requests_per_depth,
            max_tokens=measurement.max_tokens,
            seed=measurement.seed,
            launches=self.plan.launches,
            max_void_streams_per_cell=measurement.void_rules.max_void_streams_per_cell,
            residency=measurement.residency,
            requests_sha256=self._request_set.sha256,
            prompt_source=self._request_set.prompt_source,
            environment=read_environment(self._gpu),
        )


def new_run_id(kind: str) -> str:
    """ "bench-20261130-134501-3fa2": sorts by time, unique."""
    return f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _checkpoints(plan: RunPlan, observer: RunObserver) -> dict[str, Checkpoint]:
    return {
        build.name: ensure_checkpoint(build.model_source, observer.notify)
        for build in plan.builds
        if build.model_source is not None
    }


def _require_windows(plan: RunPlan, checkpoints: Mapping[str, Checkpoint]) -> None:
    """ConfigError where a model holds fewer positions than the deepest request with its answer."""
    for name, checkpoint in checkpoints.items():
        if checkpoint.window is not None and plan.max_context > checkpoint.window:
            deepest = max(plan.measurement.depths)
            output = plan.max_context - deepest
            raise ConfigError(
                f"{name}: a depth of {deepest:,} and its answer need {plan.max_context:,} positions, its model "
                f"{checkpoint.path.name} holds {checkpoint.window:,}",
                f"measure down to {checkpoint.window - output:,} at most (--depths), or name another --model",
            )


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "Ctrl-C"  # SIGTERM comes with its name
    if isinstance(error, KernarcError):
        return error.message.splitlines()[0]
    return f"{type(error).__name__}: {error}"
