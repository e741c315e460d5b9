"""The index of promises names tests that exist."""

from __future__ import annotations

import ast
import re

import tests.promises
from tests.promises.support import ROOT


def test_every_test_of_the_index_exists() -> None:
    """A renamed or removed test must not leave a promise that nothing holds."""
    named = re.findall(r"^ +(tests/\S+\.py)::(\w+)$", tests.promises.__doc__ or "", re.MULTILINE)
    assert len(named) > 20
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"
