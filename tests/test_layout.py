"""The layout: who may import whom, no environment variables, no effects at import, a YAML per kernel (CONTRIBUTING.md)."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kernels.registry import names, operators
from kernels.select import AUTO, selectable

ROOT = Path(__file__).parent.parent
PRODUCT = sorted([*(ROOT / "kernels").rglob("*.py"), *(ROOT / "rwkv").rglob("*.py"), ROOT / "train.py", ROOT / "generate.py"])
MODEL = ("model", "time_mix", "channel_mix", "token_shift", "init", "state", "sampling", "fused", "first_derivative")
THREADS = ROOT / "kernels" / "threads.py"      # sets what torch reads at its import, where the user has not
ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "putenv")


class Rule(NamedTuple):
    """No module whose name matches `importer` imports one whose name, or whose package's name, matches `imported`."""

    importer: str
    imported: str
    why: str
    at_import_only: bool = False


BACK_ENDS = r"taichi|triton|cuda|cupy"
OPERATORS = "|".join(operators())
IMPLEMENTATIONS = "|".join(rf"kernels\.{op}\.({'|'.join(names(op))})" for op in operators())
RULES = (
    Rule(r".*", r"train|generate|tests|benchmarks", "an entry point is imported by nobody"),
    Rule(r"kernels\b.*", r"rwkv|lightning|hydra|omegaconf|wandb", "kernels know nothing of RWKV, Hydra, Lightning or W&B"),
    Rule(r"(?!kernels\._taichi$).*", r"taichi", "kernels/_taichi.py is the one place that imports Taichi"),
    Rule(r"(?!kernels\b).*", BACK_ENDS, "back ends belong to kernels/"),
    Rule(rf"kernels\.({OPERATORS})(\.cases)?", rf"kernels\._(?!direct\b)\w+|{BACK_ENDS}",
         "an operator's own file knows no back end"),
    Rule(r"(?!kernels\._subjects$).*", rf"kernels\.({OPERATORS})\.subject", "what is measured is found by folder"),
    Rule(r".*", IMPLEMENTATIONS, "an implementation is loaded by name, and imports no other"),
    *(Rule(rf"(?!kernels\.wkv\.timex$)kernels\.{op}\b(?!\.subject$).*",
           rf"kernels\.(?!(registry|_taichi|_lanes|_cuda|_compiled|_direct|{op})\b)\w+",
           "an operator stands on the registry alone") for op in operators()),
    Rule(r"kernels\.wkv\.timex", r"kernels\.(?!(registry|timex|wkv)\b)\w+", "it stands on TimeX and its own operator"),
    Rule(r"(?!kernels\b|rwkv\.(tools\.bench_generation|probe)$).*",
         rf"kernels\.(?!(registry|select|allocator|threads|{OPERATORS})\b)\w+", "what the model may use of kernels/"),
    Rule(r"(?!rwkv\.tracking$).*", r"wandb", "wandb belongs to rwkv/tracking.py"),
    Rule(r"rwkv\.tracking", r"wandb", "wandb is imported inside functions", at_import_only=True),
    Rule(r"rwkv\b(?!\.(cli|tools)\b).*", r"hydra|omegaconf", "Hydra belongs to rwkv/cli.py and rwkv/tools/"),
    Rule(rf"rwkv\.({'|'.join(MODEL)})", r"lightning|pytorch_lightning", "the model knows no trainer"),
    Rule(rf"rwkv\.(?!fused$)({'|'.join(MODEL)})", r"kernels\.select",
         "the model knows no kernel's name; fused.py asks for what a rule chooses and nobody names"),
    Rule(rf"rwkv\.({'|'.join(MODEL)})", rf"rwkv\.(?!({'|'.join(MODEL)}|config|checkpoint)\b)\w+",
         "the model's files import each other, its configuration and its checkpoint"),
    Rule(r"rwkv\.formats\b.*", r"kernels|rwkv\.(?!(formats|config)\b)\w+", "formats know files, tensors and sizes alone"),
)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(text: str, module: str) -> Iterator[tuple[str, bool]]:
    """Every module that `text` imports, as a full name, and whether that waits until a function runs.

    `from a import b` counts as a.b too, because b may be a module.
    """
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[:-node.level] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            yield from ((name, id(node) in inside) for name in (base, *(f"{base}.{alias.name}" for alias in node.names)))


def broken_rules(module: str, text: str) -> dict[str, str]:
    """What `module` must not import and does, with the reason."""
    return {imported: rule.why for imported, waits in imports(text, module) for rule in RULES
            if re.fullmatch(rule.importer, module) and re.fullmatch(rf"({rule.imported})(\..*)?", imported)
            and not (rule.at_import_only and waits)}


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_import_directions(path: Path) -> None:
    assert not broken_rules(module_of(path), path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("module", "text"), [
    ("kernels.timex.mine", "import rwkv"), ("kernels.timex.mine", "from rwkv.model import RWKV"),
    ("kernels.timex.mine", "import taichi as ti"), ("kernels.timex.mine", "from kernels.timex import conv1d"),
    ("kernels.timex.mine", "from .conv1d import forward"), ("kernels.timex.mine", "from kernels.wkv import WKV"),
    ("kernels.timex", "from kernels._taichi import launch"), ("kernels.wkv", "from kernels.timex import TimeX"),
    ("kernels.timex.mine", "from kernels.timex.subject import Subject"), ("kernels.bench", "import kernels.wkv.subject"),
    ("kernels.bench", "import hydra"), ("rwkv.model", "import lightning"), ("rwkv.model", "from kernels.select import select"),
    ("rwkv.model", "from rwkv.task import LanguageModel"), ("rwkv.task", "import wandb"), ("rwkv.tracking", "import wandb"),
    ("rwkv.task", "from omegaconf import DictConfig"), ("rwkv.time_mix", "from kernels.wkv.reference import forward"),
    ("rwkv.time_mix", "import taichi"), ("rwkv.cli", "import train"), ("train", "import wandb"),
])
def test_a_wrong_import_is_noticed(module: str, text: str) -> None:
    assert broken_rules(module, text)


@pytest.mark.parametrize(("module", "text"), [
    ("kernels.timex.mine", "import torch\nfrom kernels._taichi import launch, ti\nfrom kernels.registry import Requires"),
    ("kernels.wkv.timex", "from kernels.timex import TimeX\nfrom kernels.wkv import decay_exponent"),
    ("kernels.wkv.subject", "from kernels._subjects import Pass\nfrom kernels.select import select"),
    ("kernels.wkv.cases", "from kernels.wkv import WKVState"), ("rwkv.time_mix", "from kernels.wkv import WKV, WKVState"),
    ("rwkv.tracking", "def log():\n    import wandb"), ("train", "from kernels.select import AUTO, select, why_auto"),
])
def test_a_right_import_is_let_through(module: str, text: str) -> None:
    assert not broken_rules(module, text)


def environment_reads(text: str) -> list[int]:
    """The lines that touch os.environ or os.getenv, or import them."""
    def touches(node: ast.AST) -> bool:
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else [getattr(node, "attr", None)]
        return not set(ENVIRONMENT).isdisjoint(names)

    return [node.lineno for node in ast.walk(ast.parse(text)) if touches(node)]


@pytest.mark.parametrize("path", [path for path in PRODUCT if path != THREADS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_product_file_reads_an_environment_variable(path: Path) -> None:
    assert not environment_reads(path.read_text(encoding="utf-8"))


def test_no_configuration_reads_an_environment_variable() -> None:
    assert not [path.name for path in (ROOT / "configs").rglob("*.yaml") if "oc.env" in path.read_text(encoding="utf-8")]


def test_a_read_of_the_environment_is_noticed() -> None:
    assert environment_reads("import os\nx = os.environ['A']") == [2]
    assert environment_reads("from os import getenv") == [1]


@pytest.mark.parametrize("name", [AUTO, *selectable()])
def test_every_kernel_is_a_word_on_the_command_line(name: str) -> None:
    yaml = ROOT / "configs" / "kernel" / f"{name}.yaml"
    assert yaml.exists(), f"kernel={name} needs {yaml.relative_to(ROOT)} with the line `name: {name}`"
    lines = [line for line in yaml.read_text(encoding="utf-8").splitlines() if line.strip() and not line.startswith("#")]
    assert lines == [f"name: {name}"]


def test_every_yaml_is_a_kernel() -> None:
    assert {path.stem for path in (ROOT / "configs" / "kernel").glob("*.yaml")} == {AUTO, *selectable()}


IMPORT_ALL = """
import importlib, importlib.util, sys
import torch

def refused(*args, **kwargs):
    caller = sys._getframe(1).f_code.co_filename
    if any(caller.startswith(folder) for folder in {folders!r}):
        raise AssertionError(f"asked for devices at import: {{caller}}")
    return False

torch.cuda.is_available = torch.cuda.device_count = refused
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in ("kernels", "rwkv"):
            raise
if "taichi" in sys.modules:
    assert sys.modules["taichi"].lang.impl.get_runtime().prog is None, "Taichi was started at import"
assert not torch.cuda.is_initialized()
assert not {{"hydra", "lightning", "wandb"}} & set(sys.modules) or {package!r} != "kernels"
"""


@pytest.mark.parametrize("package", ["kernels", "rwkv"])
def test_importing_has_no_effects(package: str, tmp_path: Path) -> None:
    """Nothing printed, no Taichi started, no device asked for, no file written; missing back ends aside, nothing raised."""
    modules = [module_of(path) for path in PRODUCT if path.is_relative_to(ROOT / package)]
    folders = [str(ROOT / "kernels"), str(ROOT / "rwkv")]
    done = fresh_python(IMPORT_ALL.format(modules=modules, folders=folders, package=package), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_the_model_needs_torch_alone(tmp_path: Path) -> None:
    """Whatever the imports in between, the model brings no trainer, no Hydra and no W&B with it."""
    code = f"import sys, {', '.join(f'rwkv.{name}' for name in MODEL)}\n"
    code += "print({'hydra', 'omegaconf', 'lightning', 'wandb', 'taichi', 'triton'} & set(sys.modules))"
    assert fresh_python(code, tmp_path).stdout == "set()\n"


def fresh_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder)
