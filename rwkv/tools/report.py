"""Writes the report of a sweep, of several runs or of one run: `python -m rwkv.tools.report DIR`.

Training writes the report when it ends. This program writes the report again from the files in DIR; --reference KERNEL chooses
the kernel to compare with. DIR/report.html includes its figures; DIR/report.csv contains the same numbers
(rwkv/report/numbers.py describes the columns).
"""

from kernels.arguments import Parser, path_of
from rwkv import report
from rwkv.cli import exit_on_user_error


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("rwkv.tools.report", "Report of a sweep or of one run.")
    parser.add_argument("folder", type=path_of, metavar="DIR", help="the directory of a sweep, of runs, or of one run")
    parser.add_argument("--reference", metavar="KERNEL", help="the kernel to compare the others with; default: "
                        "reference or formula if trained, otherwise the first trained kernel")
    options = parser.parse_args(arguments)
    with exit_on_user_error():
        print(report.write(options.folder, options.reference).page, flush=True)


if __name__ == "__main__":
    main()
