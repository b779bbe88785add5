"""Tests functions of the server benchmark."""

import os
import subprocess
import sys

from benchmarks.serving import children_of


def test_the_children_of_a_process() -> None:
    before = children_of(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert {*children_of(os.getpid())} - {*before} == {child.pid}
        assert child.stdin is not None
        child.stdin.close()
