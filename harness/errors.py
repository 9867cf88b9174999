"""Errors a person can act on: each carries what went wrong and what to do next."""


class KernarcError(Exception):
    """Base of every expected error.

    message says what is wrong and where, hint what to do next; exit_code is what the command line returns
    (2 usage or configuration, 4 the measurement is void).
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class ConfigError(KernarcError):
    """A configuration file, flag or name that cannot be used."""


class RecordError(KernarcError):
    """A run directory whose files cannot be read as records."""


class EngineError(KernarcError):
    """An engine that did not install, start, answer or stay alive."""

    exit_code = 4


class VoidMeasurementError(KernarcError):
    """A measurement that finished without numbers anyone may use."""

    exit_code = 4
