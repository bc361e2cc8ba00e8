"""What a model takes in memory, against the real one where it needs no network."""

from argparse import Namespace

import pytest

from drivetrain_accelerate.commands import memory_estimate as ours
from drivetrain_launcher.errors import LaunchError

pytest.importorskip("accelerate", reason="the interface is held against the real one")
pytest.importorskip("transformers", reason="it builds the model")

from transformers import BertConfig

from accelerate.commands import estimate as real


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        architectures=["BertForMaskedLM"],
    ).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_training_takes_what_the_real_one_says(dtype: str) -> None:
    assert ours.estimate_training_usage(1000, dtype) == real.estimate_training_usage(1000, dtype)


def test_a_table_looks_like_the_real_one() -> None:
    table = (
        ["dtype", "Largest Layer", "Total"],
        [["float32", "1 MB", "2 GB"], ["int8", "100 KB", "2"]],
        "For x",
    )
    assert (
        ours.create_ascii_table(*table).splitlines()[2:] == real.create_ascii_table(*table).splitlines()[2:]
    )


def test_rows_tell_the_bytes_of_a_folders_model(model: str) -> None:
    args = Namespace(
        model_name=model, library_name=None, trust_remote_code=False, dtypes=["float32", "int8", "int4"]
    )
    built = ours.create_empty_model(model, "transformers")
    assert all(parameter.is_meta for parameter in built.parameters())
    count = sum(parameter.numel() for parameter in built.parameters())
    rows = ours.gather_data(args)
    assert [row[0] for row in rows] == ["float32", "int8", "int4"]
    assert [row[2] for row in rows] == [count * 4, count, count // 2]
    assert all(0 < row[1] < row[2] for row in rows)
    assert rows[0][3]["optimizer"] == count * 8


def test_the_command_takes_dtypes_with_spaces(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ours.HubEstimateArguments(model_name=(model, "int8"), dtypes=("float32",))
    assert ours.run(arguments) == 0
    out = capsys.readouterr().out
    assert "float32" in out
    assert "int8" in out
    assert "float16" not in out
    assert f"`drivetrain estimate {model}`" in out


def test_what_cannot_be_built_is_one_line() -> None:
    with pytest.raises(LaunchError, match="say one model"):
        ours.run(ours.HubEstimateArguments(model_name=("a", "b")))
    with pytest.raises(LaunchError, match="library_name='timm': models of transformers are built"):
        ours.run(ours.HubEstimateArguments(model_name=("a",), library_name="timm"))


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(
        LaunchError, match="some/name: the Hugging Face Hub cannot be reached, and the model is not"
    ):
        ours.run(ours.HubEstimateArguments(model_name=("some/name",)))
    assert not [record for record in caplog.records if "Retry" in record.getMessage()]


def test_the_parser_is_that_of_the_real_one() -> None:
    line = ["bert", "--dtypes", "float32", "int8", "--library-name", "transformers"]
    mine = vars(ours.estimate_command_parser().parse_args(line))
    assert mine == vars(real.estimate_command_parser().parse_args(line))
