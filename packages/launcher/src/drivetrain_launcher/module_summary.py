"""Read what a module says of itself without running it: its imports may take seconds."""


def module_summary(module: str) -> str:
    """Return the first line of a module's docstring; empty if its source is not at hand."""
    from ast import get_docstring, parse  # imported here: most commands need none of it
    from importlib.util import find_spec

    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    with open(spec.origin, encoding="utf-8") as source:
        return (get_docstring(parse(source.read())) or "").partition("\n")[0]
