"""The bearer token of a collector: made anew at each start, or kept in a file of the user's."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from rlinsight.errors import CollectorError

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,}")  # RFC 6750's alphabet: fits an HTTP header and a quoted SQL string


def fresh() -> str:
    """A token nobody can guess: 256 random bits."""
    return secrets.token_urlsafe(32)


def from_file(path: Path) -> str:
    """The token in ``path``; a fresh one, written there with mode 0600, when there is no such file.

    Raises CollectorError for a file others can read, an empty one, or one that holds something else.
    """
    try:
        with path.open(encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            token = file.read(4096).strip()
    except FileNotFoundError:
        return _create(path)
    except (OSError, UnicodeDecodeError) as error:
        raise CollectorError(f"--token-file {path} cannot be read: {error}") from None
    if mode & 0o077:
        raise CollectorError(f"--token-file {path} has mode {mode:04o}, others can read it; run: chmod 600 {path}")
    if not token:
        raise CollectorError(f"--token-file {path} is empty; remove it to get a fresh token, or write one into it")
    if not _TOKEN.fullmatch(token):
        raise CollectorError(
            f"--token-file {path} holds no token: it is 16 or more letters, digits and . _ ~ + / = -; remove the file "
            "to get a fresh one"
        )
    return token


def _create(path: Path) -> str:
    token = fresh()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # whole or not at all, and never over one that another collector just made
        finally:
            draft.unlink()
    except FileExistsError:
        return from_file(path)
    except OSError as error:
        raise CollectorError(f"--token-file {path} cannot be written: {error}") from None
    return token
