"""The server as a process of its own, for the selftest, for tests, and for whoever measures a client."""

import json
import subprocess
import sys
from contextlib import AbstractContextManager
from urllib.error import URLError
from urllib.request import urlopen

from ...errors import EngineError
from .truth import Truth, truth_from_json

STOP_LIMIT_S = 5.0


class ConformanceServer(AbstractContextManager["ConformanceServer"]):
    """Starts on entering, is gone on leaving, and ends with this process even when that is killed."""

    def __enter__(self) -> "ConformanceServer":
        command = [
            sys.executable,
            "-P",
            "-m",
            __package__ or "kernarc.harness.selftest.conformance",
            "--until-stdin-closes",
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            _, errors = self._process.communicate()
            raise EngineError("the conformance server did not start", errors.strip()[-500:])
        self.base_url = line.split()[1]
        self._taken = 0
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def url(self, case: str) -> str:
        """The base URL that plays this case."""
        return f"{self.base_url}/{case}"

    def new_truths(self) -> list[Truth]:
        """What was played since the last call, in order of arrival. Raises EngineError where the server is gone."""
        try:
            with urlopen(f"{self.base_url}/truth?after={self._taken}", timeout=30) as answer:
                truths = [truth_from_json(value) for value in json.load(answer)]
        except URLError as error:
            raise EngineError(f"the conformance server does not answer: {error}") from error
        self._taken += len(truths)
        return truths
