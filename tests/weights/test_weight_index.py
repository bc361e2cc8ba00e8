import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drivetrain_weights import SeveralWeightsError, WeightFilesError, open_weights, read_index
from drivetrain_weights.weight_index import WeightIndex, choose_weights, open_indexed


def files_of(checkpoint: Path | str) -> dict[str, Path]:
    return {name: file.path for name, file in open_weights(checkpoint).items()}


def write(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and their index."""
    write(tmp_path / "model-1.safetensors", a=torch.ones(3))
    write(tmp_path / "model-2.safetensors", b=torch.zeros(2, 2), c=torch.arange(4))
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_one_file_an_index_and_their_folders_will_do(sharded: Path, tmp_path_factory) -> None:
    single = write(tmp_path_factory.mktemp("single") / "model.safetensors", a=torch.ones(1))
    assert files_of(single) == files_of(str(single.parent)) == {"a": single}
    places = {
        name: sharded / f"model-{number}.safetensors" for name, number in (("a", 1), ("b", 2), ("c", 2))
    }
    assert files_of(sharded) == files_of(sharded / "model.safetensors.index.json") == places


@pytest.mark.parametrize("name", ["model", "diffusion_pytorch_model"])
def test_a_variant_is_taken_if_it_is_alone(sharded: Path, name: str) -> None:
    index = (sharded / "model.safetensors.index.json").rename(sharded / f"{name}.safetensors.index.fp16.json")
    wanted = files_of(index)
    assert files_of(sharded) == wanted
    assert wanted.keys() == {"a", "b", "c"}
    write(sharded / f"{name}.fp16.safetensors", a=torch.ones(1))
    with pytest.raises(
        SeveralWeightsError, match=rf"index.fp16.json, {name}.fp16.safetensors\): name one of"
    ):
        files_of(sharded)
    usual = write(sharded / f"{name}.safetensors", a=torch.ones(1))
    assert files_of(sharded) == {"a": usual}


def test_of_two_variants_one_is_to_be_named(sharded: Path) -> None:
    index = (sharded / "model.safetensors.index.json").read_text()
    for variant in ("fp16", "bf16"):
        (sharded / f"model.safetensors.index.{variant}.json").write_text(index)
    assert files_of(sharded)  # the one without
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(
        WeightFilesError, match=r"holds several weights \(model.*bf16.json, model.*fp16.json\)"
    ):
        files_of(sharded)


@pytest.mark.parametrize(
    ("hurt", "told"),
    [
        (lambda folder: (folder / "model-2.safetensors").unlink(), r"model-2.safetensors is missing"),
        (
            lambda folder: os.truncate(folder / "model-2.safetensors", 150),
            r"model-2.safetensors is no whole safetensors file \(.*\): it was cut or damaged",
        ),
        (
            lambda folder: (folder / "model-1.safetensors").write_bytes(b"\0" * 100),
            r"model-1.safetensors is no whole safetensors file",
        ),
        (
            lambda folder: write(folder / "model-2.safetensors", b=torch.ones(1)),
            r"index.json names tensors that their files do not hold: 'c' \(model-2.safetensors\)",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
            r"model.safetensors.index.json is no JSON",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
            r'has no "weight_map" from tensors to files, and is no such map',
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"a": "x", "metadata": {}}'),
            r'has no "weight_map" from tensors to files, and is no such map',
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'),
            r"names the file '../x': must be a file in the same folder",
        ),
    ],
)  # fmt: skip
def test_what_is_damaged_is_named(sharded: Path, hurt, told: str) -> None:
    hurt(sharded)
    with pytest.raises(WeightFilesError, match=told):
        files_of(sharded)


def test_what_is_no_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(WeightFilesError, match=r"holds no weights, none of \*.safetensors, \*.bin"):
        files_of(tmp_path)
    with pytest.raises(WeightFilesError, match=r"gone.safetensors is missing"):
        files_of(tmp_path / "gone.safetensors")
    with pytest.raises(WeightFilesError, match=r"model.onnx is no model's weights: name a .safetensors file"):
        files_of(tmp_path / "model.onnx")
    for name in ("x", "y"):
        write(tmp_path / f"{name}.safetensors", a=torch.ones(1))
    with pytest.raises(
        WeightFilesError, match=r"holds several weights \(x.safetensors, y.safetensors\): name one"
    ):
        files_of(tmp_path)


def test_an_index_of_another_librarys_files_is_passed_over(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00001.bin")
    for name, file in (
        ("pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"),
        ("flax_model.msgpack.index.json", "flax_model-00001-of-00002.msgpack"),
        ("tf_model.h5.index.json", "tf_model-00001-of-00002.h5"),
    ):
        (tmp_path / name).write_text(json.dumps({"weight_map": {"a": file}}))
    (tmp_path / "vectors.index.json").write_text("{}")
    assert choose_weights(tmp_path) == tmp_path / "pytorch_model.bin.index.json"


def test_what_an_index_leaves_out_is_read_only_if_asked_for(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = read_index(path)
    listed = WeightIndex(weight_map={name: index.weight_map[name] for name in ("a", "c")})
    assert set(open_indexed(path, listed)) == {"a", "c"}
    assert set(open_indexed(path, listed, unlisted=True)) == set(index.weight_map)


def test_an_index_that_is_the_map_alone_is_read(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = read_index(path)
    path.write_text(json.dumps(dict(index.weight_map)))
    assert read_index(path).weight_map == index.weight_map
    assert set(open_weights(sharded)) == set(index.weight_map)
