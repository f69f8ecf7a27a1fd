"""Errors with a meaning of their own. ValueError is the user's input, RuntimeError the world."""


class RunStoppedError(RuntimeError):
    """The run must not go on: trying again would end the same way."""


class TerminatedError(RuntimeError):
    """The process was asked to end (SIGTERM) and has done what it could."""
