"""A program whose processes are spawned: they import its module, and accelerate with it, by themselves."""

import json
import multiprocessing
import sys

import accelerate


def where_from(_: int) -> str:
    spec = sys.modules[accelerate.__name__].__spec__
    return "" if spec is None else str(spec.origin)


def main() -> None:
    found = {"here": where_from(0)}
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found[method] = pool.map(where_from, [0])[0]
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
