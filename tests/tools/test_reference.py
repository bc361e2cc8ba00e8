from pathlib import Path
from types import ModuleType

from checks.workspace import Package
from reference import changelogs_page, index_page, package_page

TOY = Package(
    name="toy",
    distribution="drivetrain-toy",
    module="drivetrain_toy",
    version="1",
    description="A toy.",
    dependencies=(),
    alone_extras=(),
    backends={},
)


def toy_module() -> ModuleType:
    module = ModuleType("drivetrain_toy")

    class Thing:
        __module__ = "drivetrain_toy.thing"

    class Lent:
        __module__ = "drivetrain_other.room"

    def act() -> None: ...

    act.__module__ = "drivetrain_toy.thing"
    names = {"Alias": int | str, "LIMIT": 3, "Lent": Lent, "Thing": Thing, "act": act}
    module.__dict__.update(names, __all__=sorted(names))
    return module


def test_a_page_documents_own_names_and_links_lent_ones() -> None:
    page = package_page(TOY, toy_module(), {"drivetrain_toy", "drivetrain_other"})
    assert page.startswith("# drivetrain-toy\n")
    for line in (
        ".. autoclass:: drivetrain_toy.Thing",
        ".. autofunction:: drivetrain_toy.act",
        ".. py:data:: drivetrain_toy.Alias",
        ".. py:data:: drivetrain_toy.LIMIT",
        "| `Lent` | [drivetrain_other](drivetrain_other.md) |",
    ):
        assert line in page.splitlines()
    assert "autoclass:: drivetrain_toy.Lent" not in page


def test_changelogs_stand_one_heading_lower_under_their_package(tmp_path: Path) -> None:
    file = tmp_path / "packages" / "toy" / "CHANGELOG.md"
    file.parent.mkdir(parents=True)
    file.write_text("# Changelog of drivetrain-toy\n\n## 0.1.0\n\n- A thing.\n")
    assert (
        changelogs_page(tmp_path, [TOY]) == "# Changelogs\n\n## drivetrain-toy\n\n### 0.1.0\n\n- A thing.\n"
    )


def test_the_index_names_every_page() -> None:
    assert "\nsettings\ndrivetrain_toy\n" in index_page([TOY])
