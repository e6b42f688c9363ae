"""Pins a pytest-xdist worker to one core, so that its threads do not contend with others'.

Imported before torch and ONNX Runtime, which count the available cores.
"""

import os

ALL = os.sched_getaffinity(0)

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.sched_setaffinity(0, {sorted(ALL)[int(worker.removeprefix("gw")) % len(ALL)]})
