import pytest

from drivetrain_launcher.cli.flag_aliases import MEANINGS, RENAMED, ours, refusal

KNOWN = {"--num-processes", "--num-nodes", "--cpu", "--module"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--num_processes", ("--num-processes",)),
        ("--num-processes", ("--num-processes",)),
        ("--num_machines", ("--num-nodes",)),
        ("--nnodes", ("--num-nodes",)),
        ("--cpu", ("--cpu",)),
        ("-m", ("--module",)),
        ("--multi_gpu", ("--state-device", "cuda")),
        ("--use_fsdp", ("--backend", "fsdp")),
        ("--use_deepspeed", ("--backend", "deepspeed")),
        ("--same_network", ()),
        ("--whatever", ("--whatever",)),
    ],
)
def test_a_spelling_is_translated(written: str, meant: tuple[str, ...]) -> None:
    assert ours(written, KNOWN) == meant


def test_without_the_umbrella_cpu_is_the_states_device() -> None:
    assert ours("--cpu", {"--num-processes"}) == ("--state-device", "cpu")


def test_an_installed_flag_wins_over_a_translation() -> None:
    assert ours("--multi_gpu", {"--multi-gpu"}) == ("--multi-gpu",)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("--megatron_lm_tp_degree", "--backend fsdp and --backend deepspeed shard the model"),
        ("--dynamo_mode", "torch.compile"),
        ("--mpirun_hostfile", "mpirun --hostfile"),
    ],
)
def test_what_is_not_available_is_named_with_the_way_out(written: str, words: str) -> None:
    assert words in (refusal(written) or "")


def test_an_unknown_flag_is_nobodys() -> None:
    assert refusal("--num-proceses") is None


def test_no_spelling_is_both_translated_and_refused() -> None:
    assert not [name for name in (*RENAMED, *MEANINGS) if refusal(name)]
