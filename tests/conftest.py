"""Fixtures for every test, and what continuous integration demands of a run."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

pytest_plugins = ["tests.debian_postgres", "tests.fixtures", "tests.following", "tests.private_postgres"]

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

in_ci = bool(os.environ.get("CI"))

# A shell's background jobs ignore Ctrl-C, and so would every program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """The path of a Chromium to drive with Playwright."""
    for name in CHROMIUM_NAMES:
        path = shutil.which(name)
        if path:
            return path
    pytest.skip(f"no browser found: none of {', '.join(CHROMIUM_NAMES)} is on PATH")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    return fail_if_skipped(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    return fail_if_skipped(report)


def fail_if_skipped(report):
    """Make a skip a failure in CI, where everything that a test needs is installed."""
    if in_ci and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which counts as a failure in CI: {report.longrepr}"
    return report
