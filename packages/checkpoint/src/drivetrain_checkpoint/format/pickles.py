"""The one place where a checkpoint may run code: objects that a user has allowed to be pickled, and to be loaded."""

import base64
import pickle
from typing import Any


def to_text(value: Any) -> str:
    """An object as a pickle, in base64.

    Raises:
        Exception: Whatever pickling it raises.
    """
    return base64.b64encode(pickle.dumps(value)).decode()


def from_text(text: str) -> Any:
    """The object that was pickled. Runs what whoever saved it wants to be run."""
    return pickle.loads(base64.b64decode(text))
