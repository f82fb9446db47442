"""Models of transformers, whose generate collects garbage, as our cache for it does."""

from __future__ import annotations

import gc
import logging

import pytest


@pytest.fixture(autouse=True, scope="module")
def _what_is_imported_by_now_stays():
    """Else a collection looks at what the tests before have imported and compiled: a second each, several a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _quiet_transformers():
    """Hide what transformers logs of tiny models and small caches."""
    for name in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
