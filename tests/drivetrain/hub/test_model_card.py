"""What a card tells of exports of each kind, and what it leaves out."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from drivetrain.hub.model_card import describe_export, model_card
from drivetrain.hub.run_curves import MetricCurve
from drivetrain.plan.effective_plan import EffectivePlan, PlanRow


def card_of(folder: Path, plan: EffectivePlan | None = None, **options: Any) -> str:
    usual: dict[str, Any] = {"facts": {}, "config": {}, "curves": [], "picture": None, "card_data": {}}
    plan = plan or EffectivePlan(rows=(), facts={})
    return model_card("me/tiny", export=describe_export(folder), plan=plan, **{**usual, **options})


def write(folder: Path, name: str, **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    weights = "adapter_model" if name == "adapter_config.json" else "model"
    save_file(
        {"a": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}, folder / f"{weights}.safetensors"
    )
    (folder / name).write_text(json.dumps(config))


def test_a_model_of_transformers_is_loaded_by_its_class(tmp_path: Path) -> None:
    write(tmp_path, "config.json", architectures=["GPT2LMHeadModel"])
    card = card_of(tmp_path)
    assert 'model = GPT2LMHeadModel.from_pretrained("me/tiny")' in card
    assert "| weights | 14 values of bfloat16, float32 in 1 file |" in card
    assert ModelCard(card).data.library_name == "transformers"


@pytest.mark.parametrize("place", ["", "second"])
def test_adapters_are_loaded_onto_their_base_model(tmp_path: Path, place: str) -> None:
    write(tmp_path / place, "adapter_config.json", base_model_name_or_path="openai/tiny")
    card = card_of(tmp_path)
    within = ', subfolder="second"' if place else ""
    assert f'PeftModel.from_pretrained(base, "me/tiny"{within})' in card
    assert 'from_pretrained("openai/tiny")' in card
    assert ModelCard(card).data.base_model == "openai/tiny"


@pytest.mark.parametrize("base", ["/home/ann/models/tiny", "models/tiny", None])
def test_a_base_model_of_the_disk_is_not_named(
    tmp_path: Path, base: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/tiny").mkdir(parents=True)
    write(tmp_path / "export", "adapter_config.json", base_model_name_or_path=base)
    card = card_of(tmp_path / "export")
    assert "tiny" not in card.replace("me/tiny", "").replace("# tiny", "")
    assert ModelCard(card).data.base_model is None


def test_settings_are_told_if_they_are_numbers_and_not_the_defaults(tmp_path: Path) -> None:
    write(tmp_path, "other.json")
    found = {
        "run.seed": (3, "code"),
        "run.project_dir": (PurePosixPath("/home/ann"), "code"),
        "ddp.reduce": ("node17", "code"),
        "state.timeout_seconds": (7.5, "environment"),
        "precision.min_scale": (1.0, "default"),
    }
    rows = tuple(
        PlanRow(setting=name, asked=value, applied=value, source=source)
        for name, (value, source) in found.items()
    )
    facts = {
        "device": "cuda:0",
        "data 0": "batches of 4",
        "trackers": "jsonl",
        "random generators": "restored",
    }
    card = card_of(tmp_path, EffectivePlan(rows=rows, facts=facts))
    assert "| run.seed | 3 |" in card
    assert "| device | cuda:0 |" in card
    assert "| data 0 | batches of 4 |" in card
    for untold in ("ann", "node17", "7.5", "min_scale", "trackers", "generators"):
        assert untold not in card


def test_metrics_are_cut_and_the_users_entries_replace_the_cards_own(tmp_path: Path) -> None:
    write(tmp_path, "other.json")
    curves = [MetricCurve(name=f"m{number}", last=1.0, points=[]) for number in range(30)]
    card = card_of(
        tmp_path, curves=curves, picture="losses.svg", card_data={"tags": ["a: b"], "language": "en"}
    )
    assert card.count("\n| m") == 25  # the head, and 24 metrics
    assert "6 more metrics were logged." in card
    assert "](losses.svg)" in card
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {"library_name": "drivetrain", "tags": ["a: b"], "language": "en"}
