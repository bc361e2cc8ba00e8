"""Preference training: the loss of direct preference optimisation (DPO), written out, with a frozen reference model.

Rafailov et al. 2023, equation 7. Pairs are made: of two answers to a prompt, the one that counts up is chosen. The
models are small Llamas with random weights, so that nothing is downloaded.

python examples/dpo.py
drivetrain launch --num-processes 2 --backend fsdp examples/dpo.py
drivetrain launch --num-processes 2 --backend fsdp examples/dpo.py --resume
"""

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from drivetrain import Accelerator

VOCABULARY, PROMPT, ANSWER = 32, 4, 4  # tokens known, and in each prompt and answer
BETA = 0.1  # how strongly the reference holds the policy


def make_model() -> PreTrainedModel:
    """A Llama of two layers; with yours, the model after supervised fine-tuning."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config)


def made_pairs(num_pairs: int) -> Tensor:
    """Prompt with the chosen answer, and with the rejected one: shape (pairs, 2, prompt + answer)."""
    prompt = torch.randint(VOCABULARY, (num_pairs, 1)) + torch.arange(PROMPT)
    last = prompt[:, -1:]
    chosen = last + torch.arange(1, ANSWER + 1)
    rejected = last + torch.randint(2, VOCABULARY, (num_pairs, ANSWER))
    return (
        torch.stack([torch.cat([prompt, answer], dim=1) for answer in (chosen, rejected)], dim=1) % VOCABULARY
    )


def answer_log_probabilities(model: nn.Module, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the chosen and of the rejected answers, each of shape (pairs,)."""
    tokens = pairs.flatten(0, 1)
    logits = model(input_ids=tokens).logits[:, PROMPT - 1 : -1].float()
    of_tokens = logits.log_softmax(dim=-1).gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)
    chosen, rejected = of_tokens.sum(dim=1).view(-1, 2).unbind(dim=1)
    return chosen, rejected


def margins(policy: nn.Module, reference: nn.Module, pairs: Tensor) -> Tensor:
    """How much more than the reference the policy prefers the chosen answers, times beta: shape (pairs,)."""
    with torch.no_grad():
        reference_chosen, reference_rejected = answer_log_probabilities(reference, pairs)
    chosen, rejected = answer_log_probabilities(policy, pairs)
    return BETA * ((chosen - reference_chosen) - (rejected - reference_rejected))


def main() -> None:
    """Train on the pairs, then say for how many unseen ones the policy prefers the chosen answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3200, help="pairs to train on")
    parser.add_argument("--save-every", type=int, default=50, help="optimizer steps between checkpoints")
    parser.add_argument("--project-dir", type=Path, default=Path("runs/dpo"), help="where all is written")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    args = parser.parse_args()

    sections = {"checkpoint": {"save_every_steps": args.save_every}}
    with Accelerator(seed=0, project_dir=args.project_dir, sections=sections) as accelerator:
        policy = make_model()
        reference = copy.deepcopy(policy).eval().requires_grad_(False)  # before load_state changes the policy
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        loader = DataLoader(made_pairs(args.pairs), batch_size=16, shuffle=True)
        unseen = DataLoader(made_pairs(200), batch_size=16)
        policy, optimizer, loader, unseen = accelerator.prepare(policy, optimizer, loader, unseen)
        reference = accelerator.prepare_evaluation(reference)  # whole on each device, and in no checkpoint
        if args.resume:
            accelerator.load_state()

        for pairs in loader:  # after load_state: the rest of the epoch
            with accelerator.accumulate(policy):
                accelerator.backward(-F.logsigmoid(margins(policy, reference, pairs)).mean())
                accelerator.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_if_due()

        policy.eval()
        with torch.no_grad():
            found = [accelerator.gather_for_metrics(margins(policy, reference, pairs)) for pairs in unseen]
        preferred = (torch.cat(found) > 0).double().mean().item()
        accelerator.print(f"the policy prefers the chosen answer in {100 * preferred:.1f} % of unseen pairs")
        accelerator.save_model(policy, args.project_dir / "export")


if __name__ == "__main__":
    main()
