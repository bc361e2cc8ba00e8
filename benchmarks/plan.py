"""The memory and traffic that drivetrain_plan predicts of a training step, beside what a run allocates and sends.

    uv run --group bench python benchmarks/plan.py

A prediction runs one rank's program on tensors without data. The run is real, over gloo on the CPU: a model with
weights, drivetrain's Accelerator with the settings that the plan says, and as many processes as it has ranks. In rank
0 a dispatch mode counts the storages and the collectives of the fourth step: two steps come before it is entered, and
one before its counts begin.
"""

import argparse
import ctypes
import gc
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rounds import RESULTS, found_by_ranks, report
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain_dispatch.cli.huggingface import read_config
from drivetrain_dispatch.errors import CostError
from drivetrain_memory import record_peak
from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.model.huggingface import training_inputs
from drivetrain_plan.model.source import BuiltSource, ConfigSource
from drivetrain_plan.model.training_modes import MODES, OPTIMIZERS, TrainingMode
from drivetrain_plan.program.figures import StepFigures
from drivetrain_plan.program.rank_step import gathered_parameters, run_rank
from drivetrain_plan.program.tally import StepTally
from drivetrain_plan.search.memory import at_peak, lasting_gradients
from drivetrain_plan.search.model_figures import BatchFigures, ModelFigures
from drivetrain_plan.search.step_time import traffic_of

BATCH, TOKENS, LORA_RANK = 4, 64, 8
OPTIMIZER = "adamw-loop"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = {"hidden_size": 128, "num_hidden_layers": 5, "num_attention_heads": 8, "intermediate_size": 384}
TEXT = {**SIZES, "vocab_size": 1000, "max_position_embeddings": 128}
WITHOUT_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TEXT, "num_key_value_heads": 4}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "Llama": {**LLAMA, "use_cache": False},
    "GPT-2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 128, "n_layer": 5, "n_head": 8,
              "vocab_size": 1000, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.0,
              "resid_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False},
    "BERT": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **TEXT, **WITHOUT_DROPOUT},
    "T5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 128, "d_kv": 16,
           "d_ff": 384, "num_layers": 4, "num_heads": 8, "vocab_size": 1000, "decoder_start_token_id": 0,
           "dropout_rate": 0.0, "use_cache": False},
    "ViT": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 64, "patch_size": 8,
            **SIZES, **WITHOUT_DROPOUT},
    "Mixtral": {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 4,
                "num_local_experts": 4, "intermediate_size": 128, "use_cache": False},
}  # fmt: skip

ONE = PlanChoice(micro_batch=BATCH)
DDP = replace(ONE, data=2)
FSDP = replace(ONE, shard=2, strategy="full_shard")
GRAD_OP = replace(FSDP, strategy="shard_grad_op")
HYBRID = replace(FSDP, data=2)
TENSOR = replace(ONE, tensor=2)
BETWEEN = replace(TENSOR, sequence=True)
CONTEXT = replace(ONE, context=2)
# By model: the plans, and the modes that each is run in.
PLANS: Mapping[str, list[tuple[PlanChoice, str]]] = {
    "Llama": [
        (ONE, "fp32"),
        (ONE, "mixed"),
        (ONE, "bf16"),
        (replace(ONE, accumulation=3), "fp32"),
        (DDP, "fp32"),
        (DDP, "mixed"),
        (replace(DDP, accumulation=3), "fp32"),
        (FSDP, "fp32"),
        (FSDP, "mixed"),
        (replace(FSDP, accumulation=3), "fp32"),
        (replace(FSDP, accumulation=3), "mixed"),
        (GRAD_OP, "fp32"),
        (GRAD_OP, "mixed"),
        (HYBRID, "fp32"),
        (TENSOR, "fp32"),
        (TENSOR, "mixed"),
        (BETWEEN, "fp32"),
        (CONTEXT, "fp32"),
        (replace(FSDP, tensor=2), "fp32"),
        (replace(FSDP, tensor=2, sequence=True), "mixed"),
        (replace(FSDP, context=2), "fp32"),
        (replace(ONE, checkpointing="full"), "fp32"),
        (replace(FSDP, checkpointing="full"), "fp32"),
        (replace(FSDP, checkpointing="full"), "mixed"),
        (replace(FSDP, checkpointing="selective"), "fp32"),
        (replace(FSDP, checkpointing="selective"), "mixed"),
        (ONE, "lora"),
        (DDP, "lora"),
        (FSDP, "lora"),
    ],
    "GPT-2": [(ONE, "fp32"), (DDP, "mixed"), (FSDP, "fp32"), (TENSOR, "fp32"), (CONTEXT, "fp32")],
    "BERT": [(ONE, "mixed"), (DDP, "fp32"), (FSDP, "mixed"), (TENSOR, "fp32")],
    "T5": [
        (ONE, "fp32"),
        (DDP, "mixed"),
        (FSDP, "fp32"),
        (TENSOR, "fp32"),
        (replace(FSDP, checkpointing="full"), "fp32"),
    ],
    "ViT": [(ONE, "mixed"), (DDP, "fp32"), (FSDP, "fp32"), (FSDP, "mixed"), (TENSOR, "fp32")],
    "Mixtral": [(ONE, "fp32"), (FSDP, "fp32")],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A model and how it is trained, which is predicted and run."""

    model: str
    choice: PlanChoice
    mode: TrainingMode

    @property
    def name(self) -> str:
        """The pair in few words."""
        choice = self.choice
        times = f", {choice.accumulation} micro-batches" if choice.accumulation > 1 else ""
        return f"{self.model}, {choice.name}{times}, {self.mode.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was predicted or counted of a step.

    Attributes:
        peak: The most bytes that it holds at once.
        kernel: The most resident memory of the process, beyond what it had before the model was built.
        sent: The bytes of collectives by kind.
    """

    peak: float
    kernel: float = 0
    sent: Mapping[str, float] = field(default_factory=dict[str, float])


PAIRS = [
    Pair(model=model, choice=choice, mode=MODES[mode])
    for model, plans in PLANS.items()
    for choice, mode in plans
]


def predict(folder: Path, pair: Pair) -> Found:
    """Predict a rank's step from its program.

    Raises:
        CostError: The program depends on the values of tensors.
    """
    choice = pair.choice
    built = BuiltSource(ConfigSource(folder, lora_rank=LORA_RANK), pair.mode)
    figures = run_rank(built, choice, pair.mode, num_tokens=TOKENS, optimizer=OPTIMIZER)
    sent: defaultdict[str, float] = defaultdict(float)
    for (_, kind), payload in traffic_of(_nothing_known(pair.model), choice, figures).payloads.items():
        sent[kind] += payload
    return Found(peak=at_peak(figures, lasting=lasting_gradients(choice, figures)).peak, sent=dict(sent))


def _nothing_known(name: str) -> ModelFigures:
    """Return empty figures of a model for `traffic_of`, which needs none where the program's own are given."""
    none = BatchFigures(first=StepFigures(), further=StepFigures())
    return ModelFigures(
        name=name,
        num_parameters=0,
        num_tokens=TOKENS,
        num_blocks=1,
        block_weights=0,
        outside_weights=0,
        plain=none,
        sharded={},
    )


def build(folder: Path, mode: TrainingMode) -> nn.Module:
    """Build a model with weights."""
    transformers, config = read_config(folder)
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(config).to(mode.dtype).train()
    if not mode.is_lora:
        return model
    import peft  # as the prediction adds them

    adapters = peft.LoraConfig(r=LORA_RANK, target_modules="all-linear")
    return peft.get_peft_model(model, adapters, autocast_adapter_dtype=True).train()


def run(folder: Path, pair: Pair) -> Found:
    """Train real steps in this process, one of the ranks; return what the last one allocates and sends.

    They are trained twice: with a count of storages, and then for the kernel alone, when libraries are loaded.
    """
    with trained(folder, pair) as ((model, held), step), StepTally() as tally:
        tally.add(_local(one) for one in held if isinstance(one, Tensor))
        tally.follow(gathered_parameters(model))
        held.clear()
        step()
        gc.collect()
        tally.restart()
        tally.clear_counts()
        step()
    sent: defaultdict[str, float] = defaultdict(float)
    for (_, kind), payload in tally.payloads.items():
        sent[kind] += payload
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the heap holds of before is not there for it
    with record_peak() as peak, trained(folder, pair) as (_, step):
        step()
    return Found(peak=tally.peak_bytes, kernel=peak.host_bytes - peak.host_before_bytes, sent=dict(sent))


@contextmanager
def trained(folder: Path, pair: Pair) -> Generator[tuple[tuple[nn.Module, list[Any]], Callable[[], None]]]:
    """Train two steps; give the model, what a rank holds between steps, and the function of another step."""
    from drivetrain import Accelerator

    choice = pair.choice
    sections = choice.sections("no" if pair.mode.autocast is None else "bf16")
    sections["run"]["show_plan"] = False
    accelerator = Accelerator(cpu=True, sections=sections)
    model: Any = build(folder, pair.mode)
    inputs = training_inputs(model, BATCH, TOKENS)
    optimizer: Any = OPTIMIZERS[OPTIMIZER]([each for each in model.parameters() if each.requires_grad])
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        for _ in range(choice.accumulation):
            with accelerator.accumulate(model):
                loss = model(**inputs).loss
                accelerator.backward(loss)
                del loss
                optimizer.step()
                optimizer.zero_grad()

    for _ in range(2):
        step()
    states = [leaf for state in optimizer.optimizer.state.values() for leaf in state.values()]
    yield (model, [*model.parameters(), *model.buffers(), *inputs.values(), *states]), step
    accelerator.end_training()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run_ranks(folder: Path, num_ranks: int, only: str) -> dict[str, Found]:
    """Run the pairs of so many ranks; return what rank 0 found, by name."""
    # glibc's heap keeps holes between large tensors, which would count as tensors.
    heap = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
    ran = found_by_ranks(num_ranks, "--folder", str(folder), "--only", only, **heap)
    return {name: Found(**found) for name, found in ran.items()}


def work(arguments: argparse.Namespace) -> None:
    """What each rank does: run the pairs of so many ranks; rank 0 writes down what it found."""
    num_ranks, is_first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    found: dict[str, dict[str, Any]] = {}
    for pair in chosen(arguments.only):
        if pair.choice.num_devices == num_ranks:
            found[pair.name] = asdict(run(arguments.folder / pair.model, pair))
            gc.collect()
            if is_first:
                print(f"{pair.name}: {found[pair.name]}", file=sys.stderr, flush=True)
    if is_first:
        arguments.out.write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # threads of several groups do not survive the interpreter's end


def chosen(only: str) -> list[Pair]:
    """Return the pairs that the command line asks for."""
    return [pair for pair in PAIRS if re.search(only, pair.name)]


def row(pair: Pair, predicted: Found | CostError, counted: Found) -> str:
    """Return the line of a pair in the table."""
    is_known = not isinstance(predicted, CostError)
    said, ratio = (
        (_megabytes(predicted.peak), f"{counted.peak / predicted.peak:.4f}") if is_known else ("none", "")
    )
    sent = [
        _both(predicted.sent.get(kind, 0) if is_known else None, counted.sent.get(kind, 0)) for kind in KINDS
    ]
    cells = [pair.name, said, _megabytes(counted.peak), ratio, _megabytes(counted.kernel), *sent]
    return f"| {' | '.join(cells)} |"


def _both(predicted: float | None, counted: float) -> str:
    """Return one number where both agree to a thousandth, else both."""
    if not predicted and not counted:
        return ""
    if predicted is not None and abs(predicted - counted) <= 1e-3 * max(predicted, counted):
        return _megabytes(counted)
    return f"{'none' if predicted is None else _megabytes(predicted)} / {_megabytes(counted)}"


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:,.2f}"


NOTE = f"""Each pair is a model and a plan. MB, of rank 0. Models have 5 blocks of width 128 (T5 4 and 4, Mixtral 4);
a micro-batch has {BATCH} samples, of {TOKENS} tokens or of a picture of 64 x 64, and AdamW steps parameter by
parameter. The ratio is what the run holds to what was predicted, in storages of tensors; the kernel's peak is that of
the same training in the same process, from before its model was built, with what allocator and libraries hold.

Gloo's reduce-scatter copies its input to a tensor that the run's mode sees, and no program has; mixed precision,
whose gradients are reduced in fp32, peaks there.
Whole gradients that micro-batches add up under FSDP are predicted to stand beside a micro-batch's own peak in full.

Traffic is the bytes of what is summed, gathered, scattered or exchanged, as a whole; one number where prediction and
run agree to a thousandth, else predicted / counted. Of DDP the run's mode sees the storages of buckets, as gradients
are copied to them, and the all-reduces that its reducer calls. It also sees the broadcasts of buffers, of 2 kB a step
at most, which no prediction has."""


def parse() -> argparse.Namespace:
    """The command line; --folder and --out are for the script's own processes."""
    parser = argparse.ArgumentParser(description="Predictions of training steps beside real ones.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--only", default="", help="pairs whose name has this pattern; by default all")
    for name in ("--folder", "--out"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(rounds=1)
    return parser.parse_args()


def main() -> None:
    """Hold predictions against real steps, pair by pair."""
    arguments = parse()
    if arguments.out:
        work(arguments)
        return
    headings = ["", "predicted", "counted", "ratio", "kernel's", *(kind.replace("_", "-") for kind in KINDS)]
    lines = [f"| {' | '.join(headings)} |", "|---|" + "---:|" * (len(headings) - 1)]
    reasons: list[str] = []
    with TemporaryDirectory() as scratch:
        for name, config in CONFIGS.items():
            (Path(scratch) / name).mkdir()
            (Path(scratch) / name / "config.json").write_text(json.dumps(config))
        pairs = chosen(arguments.only)
        counted: dict[str, Found] = {}
        for num_ranks in sorted({pair.choice.num_devices for pair in pairs}):
            counted |= run_ranks(Path(scratch), num_ranks, arguments.only)
        for pair in pairs:
            predicted: Found | CostError
            try:
                predicted = predict(Path(scratch) / pair.model, pair)
            except CostError as error:
                predicted = error
                reasons.append(f"- {pair.name}: {error}")
            lines.append(row(pair, predicted, counted[pair.name]))
            print(lines[-1], file=sys.stderr, flush=True)
    parts = [NOTE, "\n".join(lines), *(["\n".join(reasons)] if reasons else [])]
    report("plan", [], arguments, note="\n\n".join(parts))


if __name__ == "__main__":
    main()
