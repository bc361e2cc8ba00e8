from drivetrain_tracking.view.answers import compare_values


def test_nested_values_are_compared_by_flat_names() -> None:
    compared = compare_values(
        {"lr": 0.1, "model": {"width": 64, "act": "relu"}}, {"model": {"width": 128}, "seed": 3}
    )
    assert [tuple(one.values()) for one in compared] == [
        ("lr", "0.1", None, True),
        ("model/width", "64", "128", True),
        ("model/act", '"relu"', None, True),
        ("seed", None, "3", True),
    ]


def test_null_is_told_from_what_is_not_there_and_text_from_a_number() -> None:
    compared = compare_values({"a": None, "b": "1", "c": True}, {"b": 1, "c": True})
    assert [(one["first"], one["second"], one["is_different"]) for one in compared] == [
        ("null", None, True),
        ('"1"', "1", True),
        ("true", "true", False),
    ]
