"""Tests of the layout: imports, no cycles in a folder, no environment variables, no effects at import, the museum."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from kernels import select
from kernels.registry import names, operators

ROOT = Path(__file__).parent.parent
PROGRAMS = [ROOT / "train.py", ROOT / "generate.py", ROOT / "chat.py", ROOT / "serve.py"]
PRODUCT = sorted([*(ROOT / "kernels").rglob("*.py"), *(ROOT / "rwkv").rglob("*.py"), *PROGRAMS])
ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "putenv")
SET_ENVIRONMENT = [ROOT / "rwkv" / "distributed.py", *(              # variables of libraries, and torchrun's for its processes
    ROOT / "kernels" / name
    for name in ("machine/threads.py", "machine/shares.py", "machine/allocator.py", "backends/_taichi_startup.py"))]

FLOORS = (                               # a part of rwkv/ imports only parts of lower floors; the top floor is first
    ("programs",),
    ("tools", "__init__"),
    ("training", "serving", "pretrained"),
    ("checkpoint", "data", "evaluation", "generation"),
    ("chat",),
    ("model", "tokenizer", "report", "cli"),
    ("config", "io", "distributed", "fair_lru", "gguf"),
    ("errors", "commands"),
)
HEIGHT = {part: len(FLOORS) - i for i, parts in enumerate(FLOORS) for part in parts}

OPERATORS = "|".join(operators())
IMPLEMENTATIONS = "|".join(rf"kernels\.{op}\.({'|'.join(names(op))})" for op in operators())
BACK_ENDS = r"taichi|triton|cuda|cupy"
MUSEUM = ("pad", "softmax", "timex")     # operators without a product column in docs/museum.md
MUSEUM_PAGE = ROOT / "docs" / "museum.md"


class Rule(NamedTuple):
    """A module whose full name matches `importer` must not import one whose name, or whose package's name, matches
    `imported`."""

    importer: str
    imported: str
    at_import_only: bool = False


RULES = (
    Rule(r".*", r"train|generate|chat|serve|tests|benchmarks"),
    Rule(r"kernels\b.*", r"rwkv|lightning|pytorch_lightning|hydra|omegaconf|wandb"),
    Rule(r"(?!kernels\b|rwkv\.model\.).*", BACK_ENDS),
    Rule(r"rwkv\.model\.(?!.*triton).*", BACK_ENDS),              # an architecture's Triton code is in its own folder
    Rule(r"(?!kernels\.backends\._taichi_startup$).*", r"taichi"),
    Rule(rf"kernels\.({OPERATORS})(\.cases)?", BACK_ENDS),
    Rule(r".*", IMPLEMENTATIONS),                                # kernels are loaded by name
    Rule(rf"(?!kernels\.(bench|{'|'.join(MUSEUM)})\b|kernels\.wkv4\.timex$).*", rf"kernels\.({'|'.join(MUSEUM)})"),
    Rule(rf"kernels\.({OPERATORS}|backends|machine)\b.*", r"kernels\.bench"),
    Rule(r"kernels\.machine\b.*", r"kernels\.backends"),
    Rule(r"kernels\.(backends|machine)\b.*", OPERATORS),
    *(Rule(rf"kernels\.{op}\b(?!\.timex$).*", rf"kernels\.({'|'.join(other for other in operators() if other != op)})")
      for op in operators()),                                    # kernels/wkv4/timex.py uses kernels/timex
    Rule(r"(?!rwkv\.(cli|programs|tools)\b).*", r"hydra|omegaconf"),
    Rule(r"(?!rwkv\.(training\b|data\.loaders$)).*", r"lightning|pytorch_lightning"),
    Rule(r"(?!rwkv\.training\.loggers$).*", r"wandb"),
    Rule(r".*", r"wandb", at_import_only=True),
    Rule(r"(?!rwkv\.serving\b).*", r"starlette|uvicorn|msgspec|prometheus_client"),
    Rule(r"rwkv\.serving\.(?!(engine\.worker|states\.store)$).*",
         r"torch|rwkv\.(generation(?!\.(grammar|request|stopping))|model|pretrained|checkpoint)"),
    Rule(r"rwkv\.model\b(?!\.(operators|quantized|decoding\.c_step)$).*", r"kernels\.select"),   # models receive operators
    Rule(r"rwkv\.(cli(\.\w+)?|config(\.\w+)?|errors|__main__|programs\.(train|generate|chat|serve)|tools\.(evaluate|convert|report|doctor|smoke|completion))",
         r"torch|lightning|hydra|numpy",
         at_import_only=True),
)


class Import(NamedTuple):
    module: str
    waits: bool                          # the import runs only when a function runs, or for a type checker


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def parse_source(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def imports(text: str, module: str) -> tuple[Import, ...]:
    """Returns every import by its full name. `from a import b` counts as a.b, too, because b may be a module."""
    return tuple(_imports(parse_source(text), module))


def _imports(tree: ast.Module, module: str) -> Iterator[Import]:
    for node, waits in _statements(tree, waits=False):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, waits) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[:-node.level] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            yield from (Import(name, waits) for name in (base, *(f"{base}.{alias.name}" for alias in node.names)))


def _statements(part: ast.AST, waits: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yields every statement inside `part`, and whether it waits (Import.waits)."""
    waits = waits or isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) \
        or (isinstance(part, ast.If) and "TYPE_CHECKING" in ast.unparse(part.test))
    for node in ast.iter_child_nodes(part):
        if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield node, waits
            yield from _statements(node, waits)


def broken_rules(module: str, text: str) -> set[str]:
    """Returns the imports of `module` that RULES or FLOORS forbid."""
    all_imports = imports(text, module)
    rules = [(re.compile(rf"({rule.imported})(\..*)?"), rule.at_import_only) for rule in RULES
             if re.fullmatch(rule.importer, module)]
    forbidden = {name for name, waits in all_imports for imported, at_import_only in rules
                 if imported.fullmatch(name) and not (at_import_only and waits)}
    if not module.startswith("rwkv"):
        return forbidden
    own = part_of(module)
    return forbidden | {name for name, _ in all_imports if name.startswith("rwkv.") and part_of(name) != own
                        and HEIGHT.get(part_of(name), 0) >= HEIGHT[own]}


def part_of(module: str) -> str:
    """Returns the part of a module in rwkv/: model for rwkv.model.state."""
    return [*module.split("."), "__init__"][1]


def test_imports_point_one_way() -> None:
    broken = {str(path): broken_rules(module_of(path), path.read_text(encoding="utf-8")) for path in PRODUCT}
    assert not {path: rules for path, rules in broken.items() if rules}


def test_a_wrong_import_is_noticed() -> None:
    wrong = (
        ("kernels.timex.mine", "import rwkv"), ("kernels.timex.mine", "import taichi as ti"), ("kernels.wkv4", "import triton"),
        ("kernels.timex.mine", "from kernels.timex import conv1d"), ("kernels.timex.mine", "from .conv1d import forward"),
        ("kernels.timex.mine", "from kernels.wkv4 import WKV4"), ("kernels.bench", "import hydra"),
        ("rwkv.model.base", "from kernels.softmax import Softmax"), ("kernels.wkv4", "import kernels.timex"),
        ("kernels.select", "from kernels import pad"),
        ("rwkv.model.base", "import lightning"), ("rwkv.model.base", "from kernels.select import select"),
        ("rwkv.model.base", "from rwkv.training.task import LanguageModel"), ("rwkv.training.task", "import wandb"),
        ("rwkv.training.loggers", "import wandb"), ("rwkv.training.task", "from omegaconf import DictConfig"),
        ("rwkv.model.rwkv4", "from kernels.wkv4.reference import forward"), ("rwkv.cli", "import train"),
        ("rwkv.cli", "import torch"), ("rwkv.serving.api", "import torch"), ("rwkv.programs.serve", "import uvicorn"),
        ("rwkv.serving.engine.remote", "import torch"),
        ("rwkv.serving.states.folder_lock", "import rwkv.generation.state_files"),
        ("rwkv.programs.train", "import lightning"), ("rwkv.data.shards", "import rwkv.pretrained"),
        ("rwkv.training.setup", "import rwkv.pretrained"), ("rwkv.io.cache", "from rwkv.config import ModelConfig"))
    right = (
        ("kernels.timex.mine", "from kernels.backends.taichi import launch\nfrom kernels.registry import Requires"),
        ("kernels.wkv4.timex", "from kernels.timex import TimeX\nfrom kernels.wkv4 import decay_exponent"),
        ("kernels.bench.softmax", "from kernels.softmax import Softmax"),
        ("rwkv.model.rwkv4", "from kernels.wkv4 import WKV4, WKVState"), ("rwkv.cli", "def run():\n    import hydra"),
        ("rwkv.training.loggers", "def log():\n    import wandb"), ("rwkv.training.task", "import lightning"))
    assert [each for each in wrong if not broken_rules(*each)] == [each for each in right if broken_rules(*each)] == []


class Exhibits(NamedTuple):
    """A row of the first table of docs/museum.md: the names of an operator's kernels by column."""

    product: set[str]
    reference: set[str]
    museum: set[str]


def exhibits() -> dict[str, Exhibits]:
    rows = re.findall(r"^\| (\w+) \|(.*)\|(.*)\|(.*)\|$", MUSEUM_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {operator: Exhibits(*(set(re.findall(r"`(\w+)`", cell)) for cell in cells)) for operator, *cells in rows
            if operator != "operator"}


def test_the_museum_page_lists_every_kernel_once() -> None:
    """The column product must have exactly the kernels that kernel=auto can select."""
    listed = exhibits()
    automatic = {op: {name for (of, *_), rule in select.RULES.items() if of == op for name in rule.order} for op in listed}
    for (op, *_), sizes in select.BY_SIZE.items():
        automatic[op] |= {name for order in sizes.values() for name in order}
    assert set(listed) == {*operators(), "draw"}
    for op, (product, reference, museum) in listed.items():
        assert product == automatic[op]
        assert sorted([*product, *reference, *museum]) == sorted(names(op))
    assert {op for op, row in listed.items() if not row.product} == set(MUSEUM)


def museum_loads(text: str) -> set[tuple[str, str]]:
    """Returns the museum kernels (operator, kernel) that a file names in a call, such as load("timex", "fft")."""
    calls = [[node.value for node in call.args if isinstance(node, ast.Constant) and isinstance(node.value, str)]
             for call in ast.walk(parse_source(text)) if isinstance(call, ast.Call)]
    rows = exhibits()
    return {(op, name) for words in calls for op, name in pairwise(words)
            if op in rows and name in rows[op].museum}


def test_no_other_code_loads_a_kernel_of_the_museum() -> None:
    assert museum_loads("x = select('wkv7', 'taichi_v0', device)\ny = load('wkv7', 'taichi_v3')") == {("wkv7", "taichi_v0")}
    own = [ROOT / "kernels" / name for name in ("bench", *MUSEUM)]
    used = {path: museum_loads(path.read_text(encoding="utf-8")) for path in PRODUCT if path.parent not in own}
    assert {str(path): pairs for path, pairs in used.items() if pairs} == {}


def test_no_import_cycle_inside_a_folder() -> None:
    """Checks for import cycles between the files and subfolders of a folder. Imports inside functions do not count."""
    for folder in {path.parent for path in PRODUCT} - {ROOT}:
        package, parts = module_of(folder), {}
        for path in folder.rglob("*.py"):
            module = module_of(path)
            if module != package:
                imported = {name for name, waits in imports(path.read_text(encoding="utf-8"), module) if not waits}
                own = {name.removeprefix(f"{package}.").split(".")[0] for name in imported if name.startswith(f"{package}.")}
                parts.setdefault(module.removeprefix(f"{package}.").split(".")[0], set()).update(own)
        try:
            TopologicalSorter({part: needs - {part} for part, needs in parts.items()}).prepare()
        except CycleError as circle:
            pytest.fail(" -> ".join(circle.args[1]))


def environment_reads(text: str) -> list[int]:
    """Returns the lines that use os.environ or os.getenv, or import them."""
    def uses(node: ast.AST) -> bool:
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else [getattr(node, "attr", None)]
        return not set(ENVIRONMENT).isdisjoint(names)

    return [node.lineno for node in ast.walk(parse_source(text)) if uses(node)]


def test_no_product_file_reads_an_environment_variable() -> None:
    reads = {str(path): environment_reads(path.read_text(encoding="utf-8")) for path in PRODUCT if path not in SET_ENVIRONMENT}
    assert not {path: lines for path, lines in reads.items() if lines}
    assert not [path.name for path in (ROOT / "configs").rglob("*.yaml") if "oc.env" in path.read_text(encoding="utf-8")]


def test_a_read_of_the_environment_is_noticed() -> None:
    assert all(map(environment_reads, ("import os\nx = os.environ['A']", "from os import getenv")))


IMPORT_ALL = """
import importlib, sys
import torch

def refused(*args, **kwargs):
    caller = sys._getframe(1).f_code.co_filename
    if any(caller.startswith(folder) for folder in {folders!r}):
        raise AssertionError(f"devices are queried at import: {{caller}}")
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


@pytest.mark.programs
@pytest.mark.parametrize("package", ["kernels", "rwkv"])
def test_importing_has_no_effects(package: str, tmp_path: Path) -> None:
    """Importing prints nothing, starts no Taichi, queries no device, writes no file, and raises only for missing back ends."""
    modules = [module_of(path) for path in PRODUCT if path.is_relative_to(ROOT / package)]
    folders = [str(ROOT / "kernels"), str(ROOT / "rwkv")]
    result = fresh_python(IMPORT_ALL.format(modules=modules, folders=folders, package=package), tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.programs
@pytest.mark.parametrize("steps", [
    [([module_of(path) for path in (ROOT / "rwkv" / "model").rglob("*.py") if "triton" not in path.stem],
      ("hydra", "omegaconf", "lightning", "wandb", "taichi", "triton")),
     (["rwkv.pretrained", "rwkv.programs.generate_results"], ("hydra", "lightning", "wandb"))],
    [(["rwkv.tools.evaluate", "rwkv.tools.convert", "rwkv.tools.doctor", "rwkv.tools.smoke", "rwkv.tools.completion",
       "rwkv.training.sweep.sweep", "rwkv.training.run.options", "rwkv.checkpoint.option_files",
       "rwkv.generation.options"], ("torch", "hydra", "lightning", "wandb", "taichi"))],
    [(["rwkv", "rwkv.cli", *(f"rwkv.programs.{name}" for name in ("train", "generate", "chat", "serve")), "kernels.registry"],
      ("torch", "numpy", "hydra", "omegaconf", "lightning", "wandb", "taichi"))],
], ids=["models", "tools", "programs"])
def test_modules_that_an_import_must_not_load(steps: list[tuple[list[str], tuple[str, ...]]], tmp_path: Path) -> None:
    """Each step imports modules into the same process, and names modules that must then be absent."""
    code = "\n".join(f"import sys, {', '.join(modules)}\nprint({set(absent)} & set(sys.modules))" for modules, absent in steps)
    result = fresh_python(code, tmp_path)
    assert (result.stdout, result.stderr) == ("set()\n" * len(steps), "")


def fresh_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder)


def hidden_calls(source: str) -> list[str]:
    """Returns "function: parameter" for each function that calls a parameter with the name of one of the file's functions."""
    calls = []
    tree = ast.parse(source)
    known = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    known |= {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            own = {argument.arg for argument in function.args.args} & known
            calls += [f"{function.name}: {node.func.id}" for node in ast.walk(function)
                      if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own]
    return calls


def test_no_parameter_of_a_kernel_hides_a_function_that_it_calls() -> None:
    """A hidden function in Taichi's CUDA code would not be noticed on a CPU, where that code is not compiled."""
    assert hidden_calls("def at(i):\n    return i\ndef read(x, at):\n    return x[at(at + 1)]") == ["read: at"]
    files = sorted((ROOT / "kernels").rglob("*.py"))
    assert [(file.name, name) for file in files for name in hidden_calls(file.read_text(encoding="utf-8"))] == []
