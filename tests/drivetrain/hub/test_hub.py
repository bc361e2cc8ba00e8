"""Exports on a Hub of the loopback: one commit with a card, downloads by every rank, and what fails."""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.hub.publishing import run_beyond_timeouts
from drivetrain.hub.transfer import HubError
from drivetrain_checkpoint import NoCheckpointError
from drivetrain_state import StateSettings, connect
from plain_loop.accelerated import accelerator_of
from played_hub import TOKEN, PlayedHub, played_hub

# huggingface_hub 2.4 hands its LFS uploads to httpx2 under a deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def speak_lfs(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have huggingface_hub keep to a folder, and upload by LFS: no server of Xet's protocol can be installed."""
    patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    patch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(folder / "token"))
    patch.delenv("HF_TOKEN", raising=False)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedHub]:
    """A Hub, and a client with an empty cache that has stored no token."""
    speak_lfs(monkeypatch, tmp_path)
    with played_hub() as hub:
        yield hub


@pytest.fixture
def accelerator(tmp_path: Path) -> Iterator[Accelerator]:
    project = tmp_path / "project"
    quiet = {"run": {"show_plan": False}, "checkpoint": {"directory": str(tmp_path / "kept")}}
    with Accelerator(cpu=True, seed=3, project_dir=project, log_with="jsonl", sections=quiet) as accelerator:
        yield accelerator


def train(accelerator: Accelerator, **config: object) -> nn.Module:
    data = DataLoader(TensorDataset(torch.rand(16, 4)), batch_size=4, shuffle=True)
    model = nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(model, SGD(model.parameters()), data)
    accelerator.init_trackers("tiny", config)
    for step, (batch,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"train": {"loss": 1 / (step + 1)}, "top|1": step / 4}, step=step)
    return model


def test_an_export_becomes_one_commit_with_a_card_and_loads_again(
    hub: PlayedHub, accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model = train(accelerator, lr=0.001, data_path=str(tmp_path), host=socket.gethostname())
    export = tmp_path / "export"
    accelerator.save_model(model, export, max_shard_size=16)
    (export / ".env").write_text("SECRET=1")
    url = accelerator.push_to_hub(export, "tiny", card_data={"license": "mit"}, endpoint=hub.url)
    repository = hub.repositories["me/tiny"]
    assert url == f"{hub.url}/me/tiny/commit/{1:040x}"
    assert len(repository.commits) == 2
    assert sorted(repository.files) == [
        ".gitattributes",
        "README.md",
        "losses.svg",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    _, front, card = repository.files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(front) == {"library_name": "drivetrain", "tags": ["drivetrain"], "license": "mit"}
    for told in (
        'accelerator.from_hub("me/tiny")',
        "| weights | 5 values of float32 in 2 files |",
        "| optimizer steps | 4 |",
        "| data 0, samples | 16 |",
        "| data 0 | batches of 4; shuffled, seed 3 |",
        "| run.seed | 3 |",
        "| lr | 0.001 |",
        "| train/loss | 0.25 | 0.25 at step 3 | 1 at step 0 |",
        "| top\\|1 | 0.75 | 0 at step 0 | 0.75 at step 3 |",
        "(losses.svg)",
    ):
        assert told in card
    assert ">train/loss</text>" in repository.files["losses.svg"].decode()
    told = b"".join(repository.files[name] for name in ("README.md", "losses.svg")).decode()
    for secret in (str(tmp_path), socket.gethostname(), TOKEN, "HF_TOKEN", str(Path.home())):
        assert secret not in told

    trained = accelerator.get_state_dict(model)
    nn.init.zeros_(model.weight)
    folder = accelerator.from_hub("me/tiny", endpoint=hub.url)
    accelerator.load_model(model, folder)
    torch.testing.assert_close(accelerator.get_state_dict(model), trained)

    # Another export replaces the shards; a card of the user's own is kept; nothing else goes.
    accelerator.save_model(model, export)
    for shard in export.glob("model*-of-*"):
        shard.unlink()
    (export / "model.safetensors.index.json").unlink(missing_ok=True)
    (export / "README.md").write_text("---\nlicense: mit\n---\nMine.")
    accelerator.push_to_hub(export, "me/tiny", endpoint=hub.url)
    assert len(repository.commits) == 3
    assert sorted(repository.files) == [".gitattributes", "README.md", "losses.svg", "model.safetensors"]
    assert repository.files["README.md"].endswith(b"Mine.")
    assert accelerator.from_hub("me/tiny", endpoint=hub.url) != folder
    assert accelerator.from_hub("me/tiny", revision=folder.name, endpoint=hub.url) == folder


def test_what_fails_leaves_nothing_visible_and_says_what_to_do(
    hub: PlayedHub, accelerator: Accelerator, tmp_path: Path
) -> None:
    model = train(accelerator)
    export = tmp_path / "export"
    accelerator.save_model(model, export)

    def push(name: str = "me/tiny", folder: Path = export, **options: Any) -> str:
        return accelerator.push_to_hub(folder, name, **{"endpoint": hub.url, "token": TOKEN, **options})

    with pytest.raises(FileNotFoundError, match="there is no such folder; save_model writes one"):
        push(folder=tmp_path / "missing")
    with pytest.raises(ValueError, match=r"holds log\.jsonl of a run"):
        push(folder=tmp_path / "project")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoCheckpointError, match="empty"):
        push(folder=tmp_path / "empty")
    with pytest.raises(HubError, match="give a name such as 'owner/name'"):
        push("bad name!!")
    (export / "logs").mkdir()
    (export / "logs/plan.json").touch()
    with pytest.raises(
        ValueError, match=r"holds logs/plan.json of a run.*push a folder that holds the export alone"
    ):
        push()
    (export / "logs/plan.json").unlink()
    with pytest.raises(HubError, match=r"no token of the Hub was found: run `hf auth login`"):
        push(token=None)
    with pytest.raises(HubError, match=r"401.*the token may not do this"):
        push(token="hf_of_another")
    with pytest.raises(HubError, match=r"403.*the token may not do this"):
        push("others/tiny")
    with pytest.raises(HubError, match=r"Connect.*push again to resume"):
        push(endpoint="http://127.0.0.1:9")
    assert not hub.repositories
    for refused in ("PUT /objects/", "POST /api/models/me/tiny/commit"):
        hub.refused = [refused]
        with pytest.raises(
            HubError, match=r"refused by the test.*the Hub shows all of it or nothing; push again"
        ):
            push()
        assert len(hub.repositories["me/tiny"].commits) == 1
    hub.refused = ["PUT /objects/"]  # the weights are there from the last try
    assert push(token=f"{TOKEN}\n").endswith(f"{1:040x}")
    hub.refused = []
    with pytest.raises(HubError, match="exists and is public, so nothing was uploaded"):
        push(private=True)
    push("me/hidden", private=True)
    assert hub.repositories["me/hidden"].private
    with pytest.raises(HubError, match=r"Repository Not Found.*check the name"):
        accelerator.from_hub("me/hidden", endpoint=hub.url)


def test_adapters_name_their_base_model_as_the_hub_does(
    hub: PlayedHub, accelerator: Accelerator, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    (tmp_path / "base").mkdir()
    base: Any = nn.Sequential(nn.Linear(4, 1))
    base.name_or_path = str(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
    model, _ = accelerator.prepare(model, SGD(model.parameters()))
    export = tmp_path / "export"
    accelerator.save_model(model, export, trained_only=True)
    written = (export / "adapter_config.json").read_text()
    assert str(tmp_path) in written

    def push(**card_data: Any) -> str:
        return accelerator.push_to_hub(export, "me/tiny", card_data=card_data, endpoint=hub.url, token=TOKEN)

    for wrong in ({}, {"base_model": str(tmp_path)}, {"base_model": ["openai/tiny", "openai/small"]}):
        with pytest.raises(
            ValueError, match=r"names the base model by the path '.*/base', which nobody else"
        ):
            push(**wrong)
    assert not hub.repositories
    push(base_model="openai/tiny")
    files = hub.repositories["me/tiny"].files
    named = json.loads(files["adapter_config.json"])
    assert named == {**json.loads(written), "base_model_name_or_path": "openai/tiny"}
    assert 'from_pretrained("openai/tiny")' in files["README.md"].decode()
    assert str(tmp_path).encode() not in b"".join(files.values())
    assert (export / "adapter_config.json").read_text() == written


def test_a_missing_client_is_named_with_its_extra(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'drivetrain\[hub\]' brings it"):
        accelerator.from_hub("me/tiny")


@pytest.mark.slow
def test_a_download_is_taken_again_without_a_connection(
    hub: PlayedHub, accelerator: Accelerator, tmp_path: Path
) -> None:
    accelerator.save_model(train(accelerator), tmp_path / "export")
    accelerator.push_to_hub(tmp_path / "export", "me/tiny", endpoint=hub.url, token=TOKEN)
    folder = accelerator.from_hub("me/tiny", allow_patterns=["*.safetensors"], endpoint=hub.url)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    offline = {"endpoint": "http://127.0.0.1:9"}
    assert accelerator.from_hub("me/tiny", allow_patterns=["*.safetensors"], **offline) == folder
    with pytest.raises(HubError, match="me/other"):
        accelerator.from_hub("me/other", **offline)


def push_and_load(url: str, folder: Path) -> tuple[list[str], str, str]:
    """On two ranks: push where it is refused, push, and load; the errors, the commit and the folder of each."""
    errors: list[str] = []
    with pytest.MonkeyPatch.context() as patch, accelerator_of() as accelerator:
        speak_lfs(patch, folder)
        model = nn.Linear(4, 1)
        model, _ = accelerator.prepare(model, SGD(model.parameters()))
        accelerator.save_model(model, folder / "export")
        for name in ("others/tiny", "me/tiny"):
            try:
                commit = accelerator.push_to_hub(folder / "export", name, endpoint=url, token=TOKEN)
            except RuntimeError as error:
                errors.append(f"{type(error).__name__}: {error}")
        found = accelerator.from_hub("me/tiny", endpoint=url)
        accelerator.load_model(model, found)
    return errors, commit, str(found)


def test_one_rank_uploads_and_downloads_and_all_fail_together(run_ranks: Any, tmp_path: Path) -> None:
    with played_hub() as hub:
        told = run_ranks(push_and_load, hub.url, tmp_path)
    ([first], *found), ([second], *others) = told
    assert found == others
    assert first.startswith("HubError: push_to_hub('others/tiny')")
    assert second.startswith("OtherRankFailedError")
    assert "the token may not do this" in second
    downloads = [one for one in hub.requests if one.startswith("GET /me/tiny/resolve/")]
    assert len(downloads) == len(hub.repositories["me/tiny"].files)


@pytest.mark.ranks(2)
def test_ranks_meet_while_one_is_busy_so_that_no_collective_waits_for_it() -> None:
    settings = StateSettings(device="cpu", hang_timeout_seconds=0.3, watchdog=False)
    with connect(settings) as context:
        before = context.progress.count

        def take_seven_marks() -> str:
            while context.progress.count - before < 7:
                sleep(0.01)
            return "done"

        action = take_seven_marks if context.topology.is_main else None
        assert run_beyond_timeouts(context, action, doing="a test") == ["done", None]
        assert context.progress.count - before >= 7
