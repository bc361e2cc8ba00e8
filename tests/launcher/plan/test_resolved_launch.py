from drivetrain_config import Layers
from drivetrain_config.source import Source
from drivetrain_launcher.plan.resolved_launch import resolve_launch


def test_settings_that_nobody_gives_are_resolved_and_not_counted_as_given() -> None:
    resolved = resolve_launch(
        Layers.read(command_line={"launch": {"num_nodes": "2"}, "state": {"device": "cpu"}})
    )
    assert [(each.spec.section, each.spec.name, each.value, each.source) for each in resolved.given] == [
        ("launch", "num_nodes", 2, Source("command line", "--num-nodes")),
        ("state", "device", "cpu", Source("command line", "--state-device")),
    ]
    assert (resolved.launch.num_nodes, resolved.launch.max_restarts, resolved.device) == (2, 0, "cpu")
    assert (resolved.placement, resolved.file_notes) == (None, ())
    assert resolve_launch(Layers({})).given == ()
