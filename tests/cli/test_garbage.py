"""Tests that the garbage collector is disabled while a program starts."""

import gc
import subprocess
import sys

from rwkv.cli.garbage import without_garbage_collection

ENDING = """\
import gc, sys
from rwkv.cli.garbage import without_garbage_collection

class Ring:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("ended", flush=True)

with without_garbage_collection():
    ring = Ring()
gc.collect()
print("running", flush=True)
"""


def test_the_collector_is_off_in_the_block_and_on_afterwards() -> None:
    assert gc.isenabled()
    with without_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.unfreeze()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_objects_of_the_block_are_deleted_when_the_process_ends() -> None:
    """When Taichi's program object is deleted, it writes its compiled kernels to the disk."""
    process = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["running", "ended"]
