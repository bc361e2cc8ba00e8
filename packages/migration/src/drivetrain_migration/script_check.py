"""Check for scripts that `drivetrain launch` would run on the real Accelerate."""

import ast

from drivetrain_launcher import detect_host
from drivetrain_launcher.plan.resolved_launch import ResolvedLaunch
from drivetrain_lint.reading.imports import read_imports, resolved


def check_script(tree: ast.Module, asked: ResolvedLaunch) -> str | None:
    """Return the line of the import of the real Accelerate, and why the run would differ from the request."""
    imports = read_imports(tree)
    is_ours = any(name.startswith("drivetrain") for name in imports.values())
    names = {name for node in ast.walk(tree) if (name := resolved(node, imports)).startswith("accelerate.")}
    if is_ours or not any(name.endswith((".Accelerator", ".PartialState")) for name in names):
        return None
    settings = [each for each in asked.given if each.spec.section not in ("launch", "state")]
    reasons = [f"{each.spec.section}.{each.spec.name} ({each.source}) has no effect" for each in settings]
    count = asked.launch.num_processes or asked.launch.processes_per_node or 1
    if count > 1 and "cpu=True" not in ast.unparse(tree) and detect_host(asked.device).accelerator is None:
        reasons.append(f"each of {count} processes trains alone on the CPU")
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    line = next(node.lineno for node in found if "accelerate" in ast.unparse(node))
    why = f"{line}: this imports Hugging Face's accelerate, not drivetrain: {', '.join(reasons)}"
    return f"{why}. Say --as-accelerate, or use accelerate launch" if reasons else None
