"""Collectives of the training say which ranks they mean: the world's group only where a reason stands below.

Under tensor, context or pipeline parallelism, ranks that hold parts of one model are not data parallel. A collective
over the world would add their losses, gradients and samples up twice.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from checks.findings import Finding
from checks.sources import Source

PACKAGES = ("backends", "deepspeed", "drivetrain", "precision", "throughput")
LIST = "tools/checks/world_groups.py"
# Of drivetrain_state, which take `over`.
_OURS = frozenset(
    ("barrier", "broadcast", "broadcast_object", "gather", "gather_object", "gather_rows", "reduce")
)
_TORCHS = frozenset(
    (
        "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast",
        "broadcast_object_list", "get_world_size", "new_group", "reduce_scatter_tensor",
    )
)  # fmt: skip
_PROGRAM = "the program asks for all processes"
_WHOLE = "rank 0's full values are those of all ranks"
_TOGETHER = "all ranks step, or none: also the stages of a pipeline"
# The functions, folders or packages without folders that mean all ranks, with the reason.
WORLD: Mapping[str, str] = MappingProxyType(
    {
        "accelerator/log_reduction.py::LogReducer._gather.gather": "one value of each rank, under the rank's number",
        "accelerator/metrics.py::gather": _PROGRAM,
        "accelerator/ranks.py::Ranks.broadcast": _PROGRAM,
        "accelerator/ranks.py::Ranks.check_trigger": _TOGETHER,
        "accelerator/ranks.py::Ranks.reduce": _PROGRAM,
        "accelerator/ranks.py::Ranks.wait_for_everyone": _PROGRAM,
        "deepspeed/": "its engines divide all ranks; the backend refuses a mesh of other axes",
        "early_stopping.py::EarlyStopping.should_stop": _TOGETHER,
        "probes.py::_make_folder": "all ranks write one checkpoint",
        "probes.py::_state_restored": "all ranks write one checkpoint",
        "fsdp/gradients.py::ShardedGradients._unscale": _TOGETHER,
        "fsdp/shard.py::_agree": "all ranks build the same model",
        "gradients/nonfinite.py::holds_nonfinite": _TOGETHER,
        "gradients/nonfinite.py::nonfinite_error": "the message names ranks of the world",
        "prepare/loaders.py::_choose_seed": "all ranks shuffle alike",
        "prepare/loaders.py::shard": "rank 0 alone reads for all, where it is to",
        "flops/first_step_flops.py::FirstStepFlops.end_step": "operations of all devices, held against their peak",
        "flops/first_step_flops.py::FirstStepFlops.mark": "the peak of all devices",
        "rank_throughput.py::RankRows.begin": "each rank's times, to find the slow one",
        "rank_throughput.py::RankThroughput.begin": "each rank's times, to find the slow one",
        "saving/registered.py::Registered.compare": "a checkpoint holds the states of all ranks",
        "saving/registered.py::gathered_states": "a checkpoint holds the states of all ranks",
        "saving/resume.py::reseed_generators": "all ranks derive their seeds from one",
        "scaling/gradient_watch.py::_gather": "the message names ranks of the world",
        "composed/divided_layers.py::DivideLayers._seed": _WHOLE,
        "state_dict/full_tensors.py::load_full_state_dict": _WHOLE,
        "composed/backend.py::ComposedBackend.__init__": "only whether there is a group",
        "composed/prepared.py::ComposedPrepared._gather": _TOGETHER,
        "composed/stages.py::KeepStages._group_of": "some ranks of a pipeline, which no view of the mesh names",
    }
)


def world_groups(sources: Iterable[Source], allowed: Mapping[str, str] = WORLD) -> list[Finding]:
    """Collectives over the world, outside the functions that are allowed to; and allowed functions without one."""
    found: list[Finding] = []
    unused: set[str] = set()
    for source in sources:
        package, _, path = source.path.partition("packages/")[2].partition("/src/")
        if package not in PACKAGES:
            continue
        file = path.partition("/")[2]
        folder = f"{file.rpartition('/')[0] or package}/"
        used = {function: (node, what) for function, node, what in _uses(source.tree)}
        for function, (node, what) in used.items():
            if not {f"{file}::{function}", folder} & allowed.keys():
                message = f"{what}: name the ranks that are meant (over=, context.ranks(...)), or list "
                found.append(source.finding(node, f"{message}{file}::{function} in {LIST} with the reason"))
        unused |= {
            each for each in allowed if each.startswith(f"{file}::") and each.partition("::")[2] not in used
        }
    return [
        *found,
        *(Finding(where=LIST, message=f"{each} does not use the world's group") for each in sorted(unused)),
    ]


def _uses(tree: ast.Module) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield each use of the world's group, with the qualified name of the function around it."""
    ours, torchs = (
        {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(module)
            for alias in node.names
        }
        for module in ("drivetrain_state", "torch.distributed")
    )

    def walk(node: ast.AST, around: tuple[str, ...]) -> Iterator[tuple[str, ast.expr, str]]:
        for child in ast.iter_child_nodes(node):
            inside = (*around, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else around
            if isinstance(child, ast.expr) and (what := _world_in(child, ours, torchs)):
                yield ".".join(inside), child, what
            yield from walk(child, inside)

    return walk(tree, ())


def _world_in(node: ast.expr, ours: set[str], torchs: set[str]) -> str:
    """Return how an expression uses the world's group; empty if it does not."""
    if isinstance(node, ast.Attribute) and node.attr == "group":
        return "the group of all ranks" if _last_name(node.value).endswith("context") else ""
    if isinstance(node, ast.BinOp):
        sides = (node.left, node.right)
        return "arithmetic on the number of all ranks" if "world_size" in map(_last_name, sides) else ""
    if not isinstance(node, ast.Call):
        return ""
    name = _last_name(node.func)
    keywords = {each.arg for each in node.keywords if ast.unparse(each.value) != "None"}
    owner = _last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    is_torchs = owner in ("dist", "distributed") or (not owner and name in torchs)
    if is_torchs and name in _TORCHS and "group" not in keywords:
        return "" if name in ("get_world_size", "barrier") and node.args else f"{name} over all ranks"
    is_ours = name in _OURS and (owner == "collectives" or (not owner and name in ours))
    return f"{name} over all ranks" if is_ours and "over" not in keywords else ""


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
