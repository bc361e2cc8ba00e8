"""Pickle and unpickle objects where a user allows it: the only place where a checkpoint may run code."""

import base64
import pickle
from typing import Any


def to_text(value: Any) -> str:
    """Pickle an object and encode it in base64."""
    return base64.b64encode(pickle.dumps(value)).decode()


def from_text(text: str) -> Any:
    """Unpickle an object. This runs any code that the author of the pickle put into it."""
    return pickle.loads(base64.b64decode(text))
