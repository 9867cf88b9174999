"""Errors of the decoder: what is wrong, where, and what to do next."""


class DecoderError(Exception):
    """Base of every expected decoder error; message and hint are printed to the person."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class CheckpointError(DecoderError):
    """A checkpoint that is incomplete, misshapen, truncated or of another architecture."""


class RequestError(DecoderError):
    """A request the decoder cannot serve: bad ids, too long a prompt, an unsupported parameter."""
