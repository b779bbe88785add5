"""python -m benchmarks.screenshot PAGE [FILE.png]: a picture of a page, such as docs/report.png, which is of the run

    python train.py out_dir=first logger=csv trainer.max_steps=300 trainer.val_every=100
    python -m benchmarks.screenshot first/report.html --height 1085

Needs the package playwright and a Chromium: Debian's, or that of `playwright install chromium`.
"""

import shutil
from pathlib import Path

from benchmarks._main import run_program
from kernels.arguments import Parser, at_least, existing_file
from kernels.machine.hardware import ROOT


def main() -> None:
    parser = Parser("benchmarks.screenshot", __doc__)
    parser.add_argument("page", type=existing_file, metavar="PAGE", help="a file such as first/report.html")
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "docs" / "report.png", metavar="FILE.png")
    parser.add_argument("--width", type=at_least(200), default=1100, help="of the window, 1100 pixels by default")
    parser.add_argument("--height", type=at_least(200), metavar="HEIGHT", help="by default the whole page's")
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    take(args.page.resolve().as_uri(), args.file, args.width, args.height, args.dark)
    print(args.file)


def take(address: str, file: Path, width: int, height: int | None, dark: bool) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height or 900}, color_scheme="dark" if dark else "light")
        page.goto(address)
        page.screenshot(path=file, full_page=height is None)
        browser.close()


if __name__ == "__main__":
    run_program(main)
