"""`manage.py pgstreams relay` in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.following import PROJECT_ROOT, environment
from tests.waiting import DEADLINE_SECONDS


class RelayProcess:
    """The running command."""

    def __init__(self, *options: str, verbosity: int = 1, **more: str) -> None:
        command = ["manage.py", "pgstreams", f"--verbosity={verbosity}", "relay", *options]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", *command],
            cwd=PROJECT_ROOT,
            env=environment(**more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it with a signal; its exit code and what it has logged."""
        self._process.send_signal(number)
        output, log = self._process.communicate(timeout=DEADLINE_SECONDS)
        assert output == ""
        return self._process.returncode, log

    def close(self) -> None:
        """Make sure that it is gone, however the test went."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()
