"""Writes the report of a sweep, of several runs or of one run: `python -m rwkv.tools.report DIR`.

Training writes the report at its end; this program writes it again from the files in DIR, with --reference KERNEL compared with
another kernel. DIR/report.html is one file that contains its figures; DIR/report.csv has the same numbers
(rwkv/report/numbers.py describes its columns).
"""

from kernels.arguments import Parser, path_of
from rwkv import report
from rwkv.cli import exit_on_user_error


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("rwkv.tools.report", "Report of a sweep or of one run.")
    parser.add_argument("folder", type=path_of, metavar="DIR", help="the directory of a sweep, of runs, or of one run")
    parser.add_argument("--reference", metavar="KERNEL", help="the kernel whose losses the others are compared "
                        "with; by default reference or formula if one was trained, otherwise the first trained kernel")
    given = parser.parse_args(arguments)
    with exit_on_user_error():
        print(report.write(given.folder, given.reference).page, flush=True)


if __name__ == "__main__":
    main()
