from pathlib import Path

from checks.environments import requirements_of
from checks.workspace import Package, read_packages, siblings

ROOT = Path(__file__).resolve().parents[2]


def package(name: str, *dependencies: str, extras: tuple[str, ...] = ()) -> Package:
    return Package(
        name=name,
        distribution=f"drivetrain-{name}",
        module=f"drivetrain_{name}",
        version="1",
        description="A toy.",
        dependencies=dependencies,
        alone_extras=extras,
        backends={},
    )


def test_pyproject_files_tell_names_dependencies_and_backends(tmp_path: Path) -> None:
    folder = tmp_path / "packages" / "toy"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "drivetrain-toy"\nversion = "0.2"\ndescription = "A toy."\n'
        'dependencies = ["torch>=2.9", "drivetrain_config[yaml]", "Some.Thing ; python_version > \'3\'"]\n'
        '[project.entry-points."drivetrain.backends"]\ntoy = "drivetrain_toy.toy:Toy"\n'
        '[tool.drivetrain]\nalone-extras = ["yaml"]\n'
    )
    toy = read_packages(tmp_path)["toy"]
    assert (toy.distribution, toy.module, toy.version) == ("drivetrain-toy", "drivetrain_toy", "0.2")
    assert toy.dependencies == ("torch", "drivetrain-config", "some.thing")
    assert toy.alone_extras == ("yaml",)
    assert toy.backends == {"toy": "drivetrain_toy.toy:Toy"}


def test_siblings_are_followed_through_siblings() -> None:
    known = {
        p.name: p for p in (package("c"), package("b", "drivetrain-c", "torch"), package("a", "drivetrain-b"))
    }
    assert [other.name for other in siblings(known["a"], known)] == ["b", "c"]
    assert siblings(known["c"], known) == ()


def test_a_package_is_installed_from_wheels_with_the_siblings_it_declares(tmp_path: Path) -> None:
    wheels = {name: tmp_path / f"{name}.whl" for name in ("drivetrain-a", "drivetrain-b", "drivetrain-c")}
    requirements = requirements_of(package("a", extras=("yaml",)), [package("b")], wheels)
    assert [requirement.partition(" @ ")[0] for requirement in requirements] == [
        "drivetrain-a[yaml]",
        "drivetrain-b",
    ]


def test_the_lowest_floors_bring_at_most_the_wording_of_messages() -> None:
    known = read_packages(ROOT)
    for name in ("messages", "data"):
        assert siblings(known[name], known) == (), name
    for name in ("config", "precision", "weights", "tracking", "memory"):
        assert siblings(known[name], known) == (known["messages"],), name
