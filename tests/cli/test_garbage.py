"""Tests that the garbage collector is disabled while a program starts."""

import gc
import subprocess
import sys

import pytest

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
    if sys.argv[1:]:
        sys.modules["taichi"] = sys      # stands for the library, whose import takes a second
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


@pytest.mark.parametrize(("arguments", "lines"), [(["taichi"], ["running", "ended"]), ([], ["running"])])
def test_objects_of_the_block_are_deleted_at_the_end_for_taichi_alone(arguments: list[str], lines: list[str]) -> None:
    """When Taichi's program object is deleted, it writes its compiled kernels to the disk.

    Without Taichi, deleting the objects would take a second.
    """
    process = subprocess.run([sys.executable, "-c", ENDING, *arguments], capture_output=True, text=True, check=True)
    assert process.stdout.split() == lines
