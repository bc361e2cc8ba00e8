import copy
import pickle

import pytest

from drivetrain_data.dataset_proxy import DatasetProxy


class Named:
    name = "train"


def test_a_proxys_attributes_are_those_of_the_dataset_but_for_its_own() -> None:
    dataset = Named()
    proxy = DatasetProxy(dataset, own=3)
    assert (proxy.name, vars(proxy)["_drivetrain_own"]) == ("train", 3)
    proxy.name = "test"
    assert dataset.name == "test"
    with pytest.raises(AttributeError, match="size"):
        _ = proxy.size


def test_a_proxy_without_a_dataset_yet_can_be_asked_for_attributes() -> None:
    dataset = Named()
    for again in (copy.copy(DatasetProxy(dataset)), pickle.loads(pickle.dumps(DatasetProxy(dataset)))):
        assert again.name == "train"
