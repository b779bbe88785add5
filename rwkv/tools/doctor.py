"""Shows what this machine can run and what it cannot, and why: packages, processor, GPUs, the C library, kernels.

  python -m rwkv.tools.doctor
  python -m rwkv.tools.doctor --json FILE               also writes the report to a file, to attach to an issue

Lines with ! are problems. The exit status is 1 if a package that all programs require is missing.
"""

import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

from kernels.arguments import Parser, path_of
from rwkv.cli import exit_on_user_error
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import count_of, wrap_hanging

# Each key is the optional extra that installs these packages; all programs require the packages under "". The extras in ALWAYS
# are installed by default, though they are optional, or unavailable for some versions of Python.
PACKAGES: dict[str, tuple[str, ...]] = {
    "": ("torch", "numpy", "tokenizers", "safetensors", "lightning", "torchdata", "pyyaml", "filelock", "tqdm", "hydra-core",
         "jinja2", "wandb"),
    "taichi": ("taichi",), "triton": ("triton",), "plot": ("matplotlib",),
    "hf": ("datasets",), "world": ("pyrwkv-tokenizer",), "chat": ("prompt_toolkit",), "lm-eval": ("lm-eval",),
    "gguf": ("gguf",), "hub": ("huggingface_hub",), "slurm": ("submitit",), "zst": ("zstandard",),
    "serve": ("starlette", "uvicorn", "httptools", "uvloop", "msgspec", "prometheus-client", "llguidance")}
FEATURES = {"taichi": "kernels taichi_*", "triton": "kernels triton_*", "plot": "plots of benchmarks",
            "hf": "data=hf", "world": "fast World tokenisation", "chat": "editing lines in chat", "lm-eval": "timemix lm_eval",
            "gguf": "llama.cpp's files", "hub": "names on the Hub", "slurm": "sweep.launcher=submitit",
            "zst": ".jsonl.zst files", "serve": "timemix serve"}
ALWAYS = ("taichi", "world", "chat", "hub")
PROBLEM = "!"
INDENT = 14                              # a line's text begins at this column


def main(arguments: list[str] | None = None) -> int:
    parser = Parser("rwkv.tools.doctor", __doc__)
    parser.add_argument("--json", metavar="FILE", type=path_of, help="also write the report to FILE")
    file: Path | None = parser.parse_args(arguments).json
    with exit_on_user_error():
        report = findings()
        for line in lines(report):
            print(wrap_hanging(line, INDENT, sys.stdout))
        sys.stdout.flush()
        if file is not None:
            write_json(file, report)
        return 1 if report["missing"][""] else 0


def write_json(file: Path, content: JsonObject) -> None:
    try:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def findings() -> JsonObject:
    """Returns the report as plain data.

    If PyTorch cannot be imported, "torch_error" states why, and PyTorch's entries are missing.
    """
    versions = {name: _version(name) for names in PACKAGES.values() for name in names}
    report: JsonObject = {
        "timemix": _version("timemix") or "a clone", "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: version for name, version in versions.items() if version},
        "missing": {extra: [name for name in names if versions[name] is None] for extra, names in PACKAGES.items()}}
    try:
        import torch
    except (ImportError, OSError) as error:
        return report | {"torch_error": str(error)}
    from kernels import native
    from kernels.machine.cpu import why_slow
    from kernels.machine.hardware import cpu_model, describe, free_bytes

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    report |= {"cpu": cpu_model(), "threads": torch.get_num_threads(), "free_bytes": free_bytes("cpu"),
              "c_library": native.level(), "c_library_missing": native.why_not(),
              "slow_dtypes": [reason for dtype in (torch.bfloat16,) if (reason := why_slow(dtype, torch.device("cpu")))],
              "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
              "no_gpu": None if "cuda" in devices else _why_no_gpu(torch), "commit": describe("cpu")["commit"]}
    return report | {"kernels": _kernels(devices)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _why_no_gpu(torch: ModuleType) -> str:
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is a CPU build: install a CUDA build"
    return f"PyTorch for CUDA {torch.version.cuda} finds no NVIDIA GPU or driver"


def _kernels(devices: list[str]) -> JsonObject:
    """Returns, for each operator and device, what kernel=auto chooses, which kernels run, and why others do not."""
    import torch

    from kernels.registry import names, operators, why_not
    from kernels.select import resolve

    report: JsonObject = {}
    for op in operators():
        for device in devices:
            reasons = {name: why_not(op, name, device) for name in names(op)}
            report.setdefault(op, {})[device] = {
                "auto": resolve(op, "auto", device, torch.float32) if op.startswith("wkv") else None,
                "run": [name for name, reason in reasons.items() if reason is None],
                "elsewhere": [name for name in reasons if not _is_for(op, name, device)],
                "not": {name: reason for name, reason in reasons.items() if reason and _is_for(op, name, device)}}
    return report


def _is_for(op: str, name: str, device: str) -> bool:
    """Returns True if the kernel declares support for the device, or if a package that the kernel requires is not installed."""
    from kernels.registry import KernelUnavailable, load

    try:
        return device in load(op, name).REQUIRES.devices
    except KernelUnavailable:
        return True


def lines(report: JsonObject) -> list[str]:
    def line(subject: str, text: str, problem: bool = False) -> str:
        return f"{PROBLEM if problem else ' '} {subject:12}{text}"

    missing = report["missing"]
    table = [line("timemix", f"{report['timemix']}, commit {report.get('commit')}"),
             line("python", f"{report['python']} on {report['system']}"),
             *(line("package", f"all programs require {name}: pip install {name}", True) for name in missing[""])]
    for extra, names in missing.items():
        if extra and names:
            remedy = f"pip install {' '.join(names)}" if extra in ALWAYS else f"in a clone, pip install -e '.[{extra}]'"
            table.append(line(extra, f"{FEATURES[extra]} requires {', '.join(names)}: {remedy}"))
    table.append(line("versions", ", ".join(f"{name} {version}" for name, version in report["packages"].items())))
    if "torch_error" in report:
        return [*table, line("torch", f"cannot be imported: {report['torch_error']}", True)]
    memory = f", {report['free_bytes'] / 2**30:.1f} GiB of memory free" if report["free_bytes"] else ""
    table += [line("cpu", f"{report['cpu']}, {count_of(report['threads'], 'thread')}{memory}"),
              *(line("cpu", reason) for reason in report["slow_dtypes"]),
              line("C library", report["c_library_missing"] or f"runs, with {report['c_library']}", not report["c_library"]),
              *(line("gpu", name) for name in report["gpus"]), *([line("gpu", report["no_gpu"])] if report["no_gpu"] else [])]
    for op, by_device in report["kernels"].items():
        for device, state in by_device.items():
            auto = f"; auto is {state['auto']}" if state["auto"] else ""
            table.append(line(op, f"on {device}: {', '.join(state['run']) or 'none'}{auto}", not state["run"]))
            if state["elsewhere"]:
                table.append(line("", f"  not for {device}: {', '.join(state['elsewhere'])}"))
            table += [line("", f"  not {name}: {reason}") for name, reason in state["not"].items()]
    return table


if __name__ == "__main__":
    sys.exit(main())
