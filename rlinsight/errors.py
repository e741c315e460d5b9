"""Errors a user can act on. The CLI prints each as one line and exits with its ``exit_code``.

A message says what is wrong, which value, and what fixes it. Anything that is not an
``RlinsightError`` is a bug in rlinsight and keeps its traceback.
"""


class RlinsightError(Exception):
    """Base of every error with a message for the user."""

    exit_code = 1


class ConfigError(RlinsightError):
    """The YAML, an override or a command-line value cannot be used as given."""

    exit_code = 2


class DataError(RlinsightError):
    """A dataset is missing, empty, malformed, or holds a row that cannot be trained on."""


class ModelError(RlinsightError):
    """A model directory, file or id cannot be loaded."""


class RewardError(RlinsightError):
    """A reward function raised, timed out, or returned something that is not a finite number."""


class TrainingError(RlinsightError):
    """Training cannot go on: the numbers are no longer finite."""


class CheckpointError(RlinsightError):
    """A checkpoint is missing, torn, or belongs to another model or configuration."""


class StoreError(RlinsightError):
    """The DuckDB store cannot be opened, is of a newer schema version, or refused a statement."""


class SpoolError(RlinsightError):
    """A spool directory cannot be read, or not freed of what was delivered."""


class CollectorError(RlinsightError):
    """The collector cannot start, or stopped answering."""


class WorkerError(RlinsightError):
    """A worker process died or lost its peers."""


class EngineError(RlinsightError):
    """A rollout engine cannot take a request, failed while sampling it, or did not take new weights."""

    replica: str | None = None  # that failed, set by an engine that has several


class NonFiniteLogProbs(EngineError):
    """A rollout engine computed or reported log-probs that are not all finite numbers."""


class RequestRefused(EngineError):
    """An engine refused a request for what it asks: another replica or another try would refuse it too."""
