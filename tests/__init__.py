"""Tests; a package so that shared makers are imported as ``tests.tiny`` and the like."""
