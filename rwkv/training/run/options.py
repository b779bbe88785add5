"""Checks a run's options, such as the path of resume=, without PyTorch, because importing PyTorch takes seconds."""

from collections.abc import Collection
from pathlib import Path

from rwkv.checkpoint.location import FOLDER, follow, is_checkpoint, locate
from rwkv.config import LATEST, TrainConfig, length_option, require_effect
from rwkv.data.options import check_data
from rwkv.errors import UserError
from rwkv.io.utf8 import require_file
from rwkv.training.run.directory import CONFIG_FILE, new_folder, require_unused
from rwkv.training.tuning import guard


def check_run(config: TrainConfig, user_keys: Collection[str]) -> None:
    """Raises UserError for the first mistake. `user_keys` are the keys that the user set on the command line.

    The options of a resumed run are checked when the run is opened, together with the saved options.
    """
    require_one_beginning(config)
    if config.resume is None or resumed_path(config) is None:
        require_unused(Path(config.out_dir) if config.out_dir else new_folder())
        check_new_run(config, user_keys)


def check_new_run(config: TrainConfig, user_keys: Collection[str]) -> None:
    """Raises UserError for options without effect, options that conflict, and missing files."""
    require_effect(config, user_keys)
    length_option(config, user_keys)
    config.require_separate_updates()
    check_data(config.data, config.init_from is None or "data.tokenizer" in user_keys,
               config.init_from is None or config.data.template is not None)
    if config.init_from is None:
        _reject_tuning_options(config, user_keys)
        return
    if "data.vocab_size" in user_keys:
        raise UserError("data.vocab_size conflicts with init_from=, because the run uses the tokenizer of the weights: omit "
                        "data.vocab_size")
    locate(config.init_from)
    general_text = guard.guard_path(config)
    if general_text is not None and guard.wants_guard(config, user_keys):
        require_file(general_text, "tune.guard")


def require_one_beginning(config: TrainConfig) -> None:
    if config.resume not in (None, "auto") and config.init_from is not None:
        raise UserError(f"resume={config.resume} and init_from= conflict. Use resume= to continue a run, init_from= to start a "
                        "new run, or resume=auto for a command that does either")


def resumed_path(config: TrainConfig) -> Path | None:
    """Returns the path that `resume` names, or None if resume=auto finds no run.

    The path is a run's directory, or a checkpoint in such a directory. Raises UserError if resume=PATH is neither.
    """
    auto = config.resume == "auto"
    path = Path(config.out_dir) if auto and config.out_dir else follow(LATEST if auto else Path(str(config.resume)))
    if (path / FOLDER).is_dir() or (path / CONFIG_FILE).is_file() or (is_checkpoint(path) and not auto):
        return path
    if auto:
        return None
    raise resume_error(config)


def resume_error(config: TrainConfig) -> UserError:
    return UserError(f"resume={config.resume} must be a run's directory, or a checkpoint in such a directory, but is neither")


def _reject_tuning_options(config: TrainConfig, user_keys: Collection[str]) -> None:
    if "tune.guard" in user_keys:
        raise UserError("tune.guard= requires a base model: set init_from=FILE")
    if config.tune.method != "full":
        raise UserError(f"tune={config.tune.method} requires a base model: set init_from=FILE")
    if config.tune.prefers:
        raise UserError(f"tune.objective={config.tune.objective} requires a base model: set init_from=FILE")
