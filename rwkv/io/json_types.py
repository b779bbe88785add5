"""The types of parsed JSON and of state dicts, whose keys the code that reads them knows."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]              # of a JSON or YAML file, a manifest, or metadata
JsonMapping = Mapping[str, Any]          # the same, read only
StateDict = dict[str, Any]               # as torch's state_dict: of a loader, optimiser or callback, or all of a checkpoint
