"""Fixtures of several modules, and one thread: the tests' models are too small for two, which wait
for each other on a machine that does other work."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts

import importlib

import pytest
from helpers import SCRIPTS, SIZE

import tinyagent


@pytest.fixture(params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """Checkpoint of tinyagent.py on the hidden number: it sometimes succeeds, so groups differ."""
    path = tmp_path_factory.mktemp("start") / "tinyagent.pt"
    flags = dict(warm_start_steps=60, warm_start_batch_size=16, warm_start_learning_rate=0.02)
    tinyagent.main(tinyagent.Args(env_id="number", output=path, **flags, **SIZE))
    return path
