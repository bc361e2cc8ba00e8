"""Estimate a hub model's memory by dtype."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast, get_args

from torch import nn

from drivetrain_accelerate.commands.command_line import parser_of, program_of
from drivetrain_accelerate.plain_values import convert_bytes
from drivetrain_dispatch import init_empty_weights
from drivetrain_dispatch.cli.huggingface import whole_classes
from drivetrain_launcher.errors import LaunchError
from drivetrain_messages import argument
from drivetrain_plan.model.weight_sizes import sizes_of_model

# Bits of a weight.
_BITS = {"float32": 32, "float16": 16, "int8": 8, "int4": 4}
_Dtype = Literal["float32", "float16", "int8", "int4"]
_DTYPES: tuple[_Dtype, ...] = get_args(_Dtype)
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubEstimateArguments:
    """The arguments of `drivetrain accelerate estimate-memory`."""

    model_name: tuple[str, ...] = argument(
        ...,
        "Model on the Hugging Face Hub, or its folder; dtypes that follow it are added to --dtypes.",
        positional=True,
    )
    library_name: Literal["transformers", "timm"] | None = argument(
        None, "Library of the model: transformers."
    )
    dtypes: tuple[_Dtype, ...] = argument(_DTYPES, f"Dtypes to tell, of {', '.join(_DTYPES)}.")
    trust_remote_code: bool = argument(False, "Run code that comes with the model, to build it.")


def run(arguments: HubEstimateArguments) -> int:
    """Print the memory that a model of the hub takes, by dtype."""
    names = [word for word in arguments.model_name if word not in _DTYPES]
    more = [word for word in arguments.model_name if word in _DTYPES]
    if len(names) != 1:
        raise LaunchError(f"accelerate estimate-memory {' '.join(names)}: say one model")
    args = Namespace(
        model_name=names[0],
        library_name=arguments.library_name,
        dtypes=[*arguments.dtypes, *more],
        trust_remote_code=arguments.trust_remote_code,
    )
    try:
        estimate_command(args)
    except (ValueError, OSError, ImportError) as error:
        raise LaunchError(f"accelerate estimate-memory {names[0]}: {error}") from error
    sys.stdout.write(
        f"`drivetrain estimate {names[0]}`, on a folder, measures a step: activations, and ways to train\n"
    )
    return 0


def create_empty_model(
    model_name: str,
    library_name: str | None,
    trust_remote_code: bool = False,
    access_token: str | None = None,
) -> nn.Module:
    """Build a transformers model on the meta device, by its name on the hub or its folder.

    A ValueError refuses other libraries. An OSError says that there is no such model, or that the hub gives no
    answer.
    """
    if library_name not in (None, "transformers"):
        raise ValueError(
            f"library_name={library_name!r}: models of transformers are built; of another library, build the model "
            "under drivetrain.init_empty_weights() and call drivetrain_dispatch's estimate"
        )
    transformers: Any = import_module("transformers")
    is_cut_off = not Path(model_name).is_dir() and _is_hub_out_of_reach(model_name, access_token)
    try:
        config = transformers.AutoConfig.from_pretrained(
            model_name, trust_remote_code=trust_remote_code, token=access_token, local_files_only=is_cut_off
        )
    except OSError as error:
        if not is_cut_off:
            raise
        raise OSError(
            "the Hugging Face Hub cannot be reached, and the model is not in the cache here: name its folder, ask "
            "where there is a network, or set HF_ENDPOINT to a mirror"
        ) from error
    kind = getattr(transformers, next(iter(getattr(config, "architectures", None) or ()), ""), None)
    with init_empty_weights():
        if kind is not None:
            return kind(config)
        return transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)


def _is_hub_out_of_reach(model_name: str, token: str | None) -> bool:
    """Return whether the hub does not answer a single request; a download would retry for half a minute."""
    hub: Any = import_module("huggingface_hub")
    errors: Any = import_module("huggingface_hub.errors")
    try:
        hub.get_hf_file_metadata(
            hub.hf_hub_url(model_name, "config.json"), token=token, timeout=_TIMEOUT_SECONDS
        )
    except (errors.HfHubHTTPError, errors.FileMetadataError):
        return False  # an answer, whatever it says
    except (errors.HTTPError, OSError):  # of the library below it, or offline mode
        return True
    return False


def estimate_training_usage(
    bytes: int,
    mixed_precision: str,
    msamp_config: str | None = None,  # MS-AMP is not known here
) -> dict[str, int]:
    """Return the bytes of training with Adam, for a model whose float32 weights take `bytes`.

    `mixed_precision` is the dtype of the forward. For others than float32, float16 and bfloat16, all values are -1.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    if mixed_precision in ("float16", "bfloat16"):
        half = bytes // 2
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes + half, "step": bytes * 2}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)


def gather_data(args: Namespace) -> list[list[Any]]:
    """Return a row for each dtype: name, bytes of the largest block, of all weights, and of training."""
    model = create_empty_model(
        args.model_name, args.library_name, args.trust_remote_code, getattr(args, "access_token", None)
    )
    sizes = sizes_of_model(model, whole_classes(model))
    rows: list[list[Any]] = []
    for dtype in args.dtypes:
        total, block = (
            count * _BITS[dtype] // 8 for count in (sizes.num_parameters, sizes.largest_block_parameters)
        )
        rows.append([dtype, block, total, estimate_training_usage(sizes.num_parameters * 4, dtype)])
    return rows


def create_ascii_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> str:
    """Return a table with frames, each cell in the middle of its column."""
    columns = [list(column) for column in zip(headers, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    inner = sum(widths) + len(widths) - 1
    pattern = f"│{'│'.join('%s' for _ in widths)}│"

    def line(cells: Sequence[str]) -> str:
        return pattern % tuple(cell.center(width) for cell, width in zip(cells, widths, strict=True))

    def rule(left: str, between: str, right: str) -> str:
        return left + between.join("─" * width for width in widths) + right

    return "\n".join(
        [
            rule("┌", "─", "┐"),
            f"│{title.center(inner)}│",
            rule("├", "┬", "┤"),
            line(headers),
            rule("├", "┼", "┤"),
            *(line(row) for row in rows),
            rule("└", "┴", "┘"),
        ]
    )


def estimate_command(args: Namespace) -> None:
    """Print the memory that a model of the hub takes, by dtype."""
    shown: list[list[str]] = []
    for dtype, block, total, training in gather_data(args):
        largest = max(cast("dict[str, int]", training).values())
        in_training = "N/A" if largest < 0 else convert_bytes(largest)
        shown.append([dtype, convert_bytes(block), convert_bytes(total), in_training])
    headers = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
    table = create_ascii_table(headers, shown, f"Memory Usage for loading `{args.model_name}`")
    sys.stdout.write(f"{table}\n")


estimate_command_parser = partial(parser_of, "estimate-memory", HubEstimateArguments, estimate_command)
main = program_of("estimate-memory")
