"""The live objects of a class, found safely while other threads run.

`gc.get_objects()` is unsafe: its list also holds unfinished objects of other threads. If another thread refers to a
tuple under construction from a generator, CPython raises a SystemError in the constructing thread, such as a thread
that writes a checkpoint.
"""

import gc
from itertools import chain, starmap
from typing import Any


def live_objects(kind: type[Any]) -> list[Any]:
    """Return the objects of a class and its subclasses, in no order; objects hidden by `gc.freeze` are left out.

    Walks through all objects of the process twice, which takes about 0.1 s for half a million objects.
    """
    # Iterators of C alone: no other thread runs while they hold the objects.
    types = set(map(type, chain.from_iterable(starmap(gc.get_objects, [()]))))
    kinds = [each for each in types if issubclass(each, kind)]
    # An object refers to its class. isinstance would read attributes of proxies.
    return [one for one in gc.get_referrers(*kinds) if issubclass(type(one), kind)]
