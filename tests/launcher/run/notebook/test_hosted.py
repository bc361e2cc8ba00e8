import pytest

from drivetrain_launcher import LaunchError
from drivetrain_launcher.run.notebook.hosted import NotebookHost, check_supported, detect_notebook_host


@pytest.mark.parametrize(
    ("environment", "provider", "has_tpu"),
    [
        ({}, None, False),
        ({"COLAB_RELEASE_TAG": "release-colab-external_1"}, "Colab", False),
        ({"COLAB_RELEASE_TAG": "release-colab-external_1", "TPU_ACCELERATOR_TYPE": "v5e-1"}, "Colab", True),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "Kaggle", False),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch", "TPU_WORKER_ID": "0"}, "Kaggle", True),
        ({"PJRT_DEVICE": "CPU"}, None, False),
        ({"PJRT_DEVICE": "TPU"}, None, True),
    ],
)
def test_the_provider_and_its_tpu_are_told_by_the_environment(
    environment: dict[str, str], provider: str | None, has_tpu: bool
) -> None:
    assert detect_notebook_host(environment) == NotebookHost(provider=provider, has_tpu=has_tpu)


@pytest.mark.parametrize("num_processes", [None, 2, 8])
def test_a_tpu_is_refused_with_what_is_supported(num_processes: int | None) -> None:
    with pytest.raises(LaunchError, match=r"this Colab runtime has a TPU.*choose a GPU runtime"):
        check_supported(NotebookHost(provider="Colab", has_tpu=True), num_processes=num_processes)


def test_this_process_may_use_a_tpu_as_it_likes() -> None:
    check_supported(NotebookHost(provider="Kaggle", has_tpu=True), num_processes=1)
    check_supported(NotebookHost(provider="Kaggle"), num_processes=None)
