"""A worker of pytest-xdist keeps to a core of its own, or its threads would wait for the others'.

Imported before torch and ONNX Runtime, which count the cores that they may use.
"""

import os

ALL = os.sched_getaffinity(0)

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.sched_setaffinity(0, {sorted(ALL)[int(worker.removeprefix("gw")) % len(ALL)]})
