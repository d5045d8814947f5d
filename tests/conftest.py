"""One thread: the tests' models are too small for two, which wait for each other on a machine that
does other work."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts

pytest_plugins = ["helpers"]  # the fixtures that test modules share
