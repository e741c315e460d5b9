"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random Llama-like model with tokenizer; shared, so do not write to it."""
    from tests.tiny import make_tiny_model  # imports torch: only tests that ask for a model pay for it

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
