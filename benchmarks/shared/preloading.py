"""A library that is built now, for the server's processes to preload."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.shared.errors import BenchmarkError
from example_project.embedded.cluster import Cluster


@contextlib.contextmanager
def built(source: Path) -> Iterator[Path]:
    """The library of a C source, in a directory of its own that the server's account can enter."""
    base = Cluster.of_this_checkout().base
    with tempfile.TemporaryDirectory(prefix="bench-", dir=base) as directory:
        library = Path(directory) / f"{source.stem}.so"
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise BenchmarkError(f"A C compiler builds {source.name}; none is here.")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
        if done.returncode:
            raise BenchmarkError(f"{source.name} cannot be built:\n{done.stderr}")
        # The server's account reads it.
        Path(directory).chmod(0o711)
        library.chmod(0o755)
        yield library
