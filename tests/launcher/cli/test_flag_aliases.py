import pytest

from drivetrain_launcher.cli.flag_aliases import MEANINGS, RENAMED, ours, refusal

KNOWN = {"--num-processes", "--num-nodes", "--cpu", "--module"}


@pytest.mark.parametrize(
    ("written", "known", "meant"),
    [
        ("--num_processes", KNOWN, ("--num-processes",)),
        ("--nnodes", KNOWN, ("--num-nodes",)),
        ("-m", KNOWN, ("--module",)),
        ("--use_fsdp", KNOWN, ("--backend", "fsdp")),
        ("--same_network", KNOWN, ()),
        ("--whatever", KNOWN, ("--whatever",)),
        ("--cpu", KNOWN, ("--cpu",)),
        pytest.param("--cpu", {"--num-processes"}, ("--state-device", "cpu"), id="cpu without the umbrella"),
        pytest.param("--multi_gpu", {"--multi-gpu"}, ("--multi-gpu",), id="an installed flag wins"),
    ],
)
def test_a_spelling_is_translated(written: str, known: set[str], meant: tuple[str, ...]) -> None:
    assert ours(written, known) == meant


def test_what_is_not_available_is_named_with_the_way_out() -> None:
    assert "there is no SageMaker launcher here" in (refusal("--aws_access_key_id") or "")
    assert refusal("--num-proceses") is None


def test_no_spelling_is_both_translated_and_refused() -> None:
    assert not [name for name in (*RENAMED, *MEANINGS) if refusal(name)]
