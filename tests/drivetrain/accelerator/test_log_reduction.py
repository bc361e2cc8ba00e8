import json
import math
from pathlib import Path

import pytest
import torch

from drivetrain import Accelerator
from drivetrain_state import CollectiveMismatchError
from drivetrain_tracking import Image, ValueNotLoggableError


def lines(folder: Path) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    kept = [line for line in found if "event" not in line]
    for line in kept:
        del line["time"], line["crc"]
    return kept


@pytest.mark.ranks(2)
def test_values_of_all_ranks_are_logged_together(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, log_with="jsonl")
    accelerator.init_trackers("reduced")
    rank = accelerator.process_index
    values = {"loss": torch.tensor(1.0 + rank), "time": {"data": 0.5 * rank}, "hits": 2**40 + rank}
    values["times"] = values.pop("time")
    for reduce in ("mean", "sum", "max", "min", "per_rank"):
        accelerator.log(values, step=1, reduce=reduce)
    accelerator.log({"loss": float(rank)}, reduce="mean", count=1 + 2 * rank)
    accelerator.log({"loss": float("nan") if rank else 3.0}, reduce="mean", count=torch.tensor(1 - rank))
    accelerator.log({"loss": torch.tensor(float(rank), dtype=torch.bfloat16), "ok": bool(rank)}, reduce="sum")
    accelerator.log({"rank": rank})
    with pytest.raises(ValueNotLoggableError, match=r"values\['note'\] \(str\) with reduce"):
        accelerator.log({"note": "x"}, reduce="sum")
    with pytest.raises(ValueNotLoggableError, match=r"values\['sample'\] \(Image\)"):
        accelerator.log({"sample": Image("x.png")}, reduce="sum")
    with pytest.raises(ValueError, match="only a mean has weights"):
        accelerator.log({"loss": 1.0}, reduce="sum", count=3)
    with pytest.raises(ValueError, match="say reduce='mean'"):
        accelerator.log({"loss": 1.0}, count=3)
    with pytest.raises(ValueError, match="allowed are mean, sum, max, min, per_rank and None"):
        accelerator.log({"loss": 1.0}, reduce="average")  # pyright: ignore
    for reduce in ("mean", "max", "per_rank"):
        with pytest.raises(CollectiveMismatchError, match="another rank logged other names"):
            accelerator.log({"loss" if rank else "accuracy": 1.0}, reduce=reduce)
        with pytest.raises(CollectiveMismatchError, match="another rank logged other names"):
            accelerator.log({str(name): 1.0 for name in range(1 + rank)}, reduce=reduce)
        many = {str(name): float(name) for name in range(1500)}
        with pytest.raises(CollectiveMismatchError, match="another rank logged other names"):
            accelerator.log(many if rank else {"loss": 1.0}, reduce=reduce)
        with pytest.raises(CollectiveMismatchError, match="another rank logged other names"):
            accelerator.log(many if rank else dict(list(many.items())[:1023]), reduce=reduce)
    accelerator.log(many, reduce="mean")
    with pytest.raises(ValueNotLoggableError, match="two have the name 'a/b'"):
        accelerator.log({"a/b": 1.0, "a": {"b": 2.0}}, reduce="sum")
    num_collectives = []
    collect = torch.distributed.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.distributed, "all_reduce", lambda *a, **k: num_collectives.append(1) or collect(*a, **k)
        )
        accelerator.log({f"value_{index}": 1.0 for index in range(100)}, reduce="mean")
    assert len(num_collectives) == 1
    accelerator.end_training()
    if rank:
        return
    mean, total, most, least, each, weighed, without_samples, low, first, many, hundred = lines(tmp_path)
    assert mean == {"step": 1, "loss": 1.5, "times/data": 0.25, "hits": 2**40 + 0.5}
    assert total == {"step": 1, "loss": 3.0, "times/data": 0.5, "hits": 2.0**41 + 1}
    assert most == {"step": 1, "loss": 2.0, "times/data": 0.5, "hits": 2.0**40 + 1}
    assert least == {"step": 1, "loss": 1.0, "times/data": 0.0, "hits": 2.0**40}
    assert each == {
        "step": 1, "loss/rank_0": 1.0, "loss/rank_1": 2.0, "times/data/rank_0": 0.0, "times/data/rank_1": 0.5,
        "hits/rank_0": 2.0**40, "hits/rank_1": 2.0**40 + 1,
    }  # fmt: skip
    assert math.isclose(weighed["loss"], 0.75)
    assert without_samples == {"loss": 3.0}
    assert low == {"loss": 1.0, "ok": 1.0}
    assert first == {"rank": 0}
    assert many == {str(name): float(name) for name in range(1500)}
    assert len(hundred) == 100


@pytest.mark.slow
def test_one_process_logs_its_own_values(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, log_with="jsonl")
    accelerator.init_trackers("alone")
    for reduce in ("mean", "sum", "max", "min"):
        accelerator.log({"loss": torch.tensor(2.0)}, reduce=reduce)
    accelerator.log({"loss": 2.0}, reduce="per_rank")
    accelerator.end_training()
    assert lines(tmp_path) == [{"loss": 2.0}] * 4 + [{"loss/rank_0": 2.0}]


@pytest.mark.slow
def test_the_log_tells_what_surrounds_the_run(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, log_with="jsonl")
    accelerator.init_trackers("told")
    accelerator.end_training()
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (info,) = [event["info"] for event in events if event["event"] == "info"]
    assert torch.__version__.startswith(info["packages"]["torch"].partition("+")[0])
    assert {"command", "git", "hardware", "python"} < set(info)


@pytest.mark.slow
def test_steps_after_a_restored_one_are_an_attempt_of_their_own(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, log_with="jsonl")
    model = accelerator.prepare(model)
    accelerator.init_trackers("restored")
    accelerator.save_state()
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.log({"loss": 2.0}, step=2)
    accelerator.load_state()
    accelerator.log({"loss": 3.0}, step=1)
    accelerator.log({"loss": 4.0}, step=2)
    accelerator.end_training()
    assert [(line.get("attempt", 1), line["step"]) for line in lines(tmp_path)] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
