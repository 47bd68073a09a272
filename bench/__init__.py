"""Benchmarks: `python -m bench.NAME` from the repository; README.md lists them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # modelgen and oracle

import oracle

oracle.use_installed_package()
