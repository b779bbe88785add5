"""Types of JSON values, in the form in which json.loads returns them."""

from typing import Any

JsonObject = dict[str, Any]
