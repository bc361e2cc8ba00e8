import re

import pytest

from drivetrain_clusters import ClusterError
from drivetrain_clusters.kubernetes.options import read_kubernetes_options
from requests_of_jobs import TRAPS, make_request


def test_the_image_must_be_said() -> None:
    with pytest.raises(ClusterError, match=r"kubernetes needs the image .* --option image=NAME"):
        read_kubernetes_options(make_request())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("imgae", "x", "did you mean image"),
        ("namespace", "My Team", "must be the name of a namespace"),
        ("accelerator", "gpu now", "must be the name of a resource"),
        ("port", "80", "must be a number from 1024 to 65535"),
        ("shm", "16", "say a number and a unit"),
        ("pull-policy", "Sometimes", "Always, IfNotPresent or Never"),
        ("volumes", "data", "CLAIM:/FOLDER"),
        ("volumes", "a:/data,b:/data/", "/data is mounted twice"),
        ("volumes", "a:/dev/shm", "/dev/shm is mounted twice"),
        ("node-selector", "gpu", "LABEL=VALUE"),
        ("secrets", "a,B", "'B' must be the name of a secret"),
        ("restart-failures", "2", "say true or false"),
    ],
)
def test_a_wrong_option_is_refused(option: str, value: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        read_kubernetes_options(make_request(options={"image": "x", option: value}))


@pytest.mark.parametrize(
    "option", ["image", "namespace", "service-account", "queue", "volumes", "tolerations"]
)
def test_no_option_takes_text_of_another_form(option: str) -> None:
    for trap in TRAPS:
        if re.fullmatch(r"[A-Za-z0-9_:-]*[A-Za-z0-9]", trap, re.ASCII):
            continue  # a name, or part of one
        with pytest.raises(ClusterError, match="must be"):
            read_kubernetes_options(make_request(options={"image": "x", option: trap}))
