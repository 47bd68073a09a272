"""pytest plugin of the process that runs llama-server's tests: local models, what is left out, and a record of the results."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peer import plan, rewrite

RESULTS: dict[str, dict[str, str]] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Point the presets at the local model."""
    import utils  # of llama-server's tests

    fetched = utils.ServerPreset.tinyllama2
    model = os.environ["PEER_MODEL"]

    def local() -> Any:
        server = fetched()
        server.offline, server.model_hf_repo, server.model_file = False, None, model
        server.temperature = 0.0
        server.server_port = int(os.environ["PORT"])
        server.n_threads = 1  # the model is tiny, and two servers run at a time
        return server

    utils.ServerPreset.tinyllama2 = staticmethod(local)
    utils.ServerPreset.router = staticmethod(local)  # the tests of CORS take a server without a model


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop what is left out, with its reason in the results."""
    kept = []
    for item in items:
        reason = plan.left_out(item.nodeid)
        if reason:
            RESULTS[plan.short(item.nodeid)] = {"outcome": "left out", "why": reason}
        else:
            kept.append(item)
    items[:] = kept


@pytest.fixture(autouse=True)
def _one_test() -> Iterator[None]:
    import utils

    random.seed(1)
    yield
    for server in set(utils.server_instances):
        server.stop()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the outcome."""
    name = plan.short(report.nodeid)
    if report.when == "call" or report.outcome != "passed":
        if RESULTS.get(name, {}).get("outcome") == "failed":
            return
        why = ""
        if report.outcome == "failed":
            why = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
        elif report.outcome == "skipped":
            why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        RESULTS[name] = {"outcome": report.outcome, "why": why[:2000]}


def pytest_sessionfinish() -> None:
    """Write notes and results."""
    rewrite.notes().save()
    Path(os.environ["PEER_RESULTS"]).write_text(json.dumps(RESULTS, indent=1), "utf8")
