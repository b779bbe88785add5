"""The report of a sweep, or of one run, from the files in its directory: `python -m rwkv.tools.report DIR`.

Training writes it by itself at its end; this makes it anew, with --reference KERNEL against another kernel. DIR/report.html is
one file with its figures inside; DIR/report.csv has the same numbers, a row for each run and three for each kernel
(rwkv/report/numbers.py says what its columns are).
"""

import argparse
import sys
from pathlib import Path

from rwkv import report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rwkv.tools.report", description="The report of a sweep, or of one run.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the directory of a sweep, of runs, or of one run")
    parser.add_argument("--reference", metavar="KERNEL", help="what losses are compared with; otherwise reference or "
                        "formula where one was trained, else the first kernel that was")
    given = parser.parse_args(arguments)
    try:
        print(report.write(given.folder, given.reference))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
