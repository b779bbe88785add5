"""The types of parsed JSON and of state dicts; their keys and values are not typed further."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]              # the content of a JSON or YAML file, a manifest, or metadata
JsonMapping = Mapping[str, Any]          # the same, read-only
StateDict = dict[str, Any]               # what state_dict() returns: of a loader, optimiser, callback or whole checkpoint
