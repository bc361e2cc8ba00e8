import pytest

from checks.private_names import ALLOWED_FILES, ALLOWED_NAMES, private_names
from checks.sources import parse

TABLE = "| torch | `_version`, `_dynamo`, `_parameters`, `_local_tensor` | `compat.py` of a | ... |\n"
ROOM = "packages/a/src/a/room.py"
COMPAT = "packages/a/src/a/folder/compat.py"


def found(text: str, path: str = ROOM, beside: str = "", table: str = TABLE) -> list[str]:
    sources = [parse(path, text), parse("packages/a/src/a/beside.py", beside)]
    return [finding.message.partition(" ")[0] for finding in private_names(sources, table)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from torch.optim.lr_scheduler import _LRScheduler", "_LRScheduler"),
        ("from torch.utils._pytree import tree_map", "_pytree"),
        ("import torch._dynamo.config", "_dynamo"),
        ("torch._foreach_mul_(tensors, 2)", "_foreach_mul_"),
        ("class A(Agent):\n    def stop(self): self._worker_group.stop()", "_worker_group"),
        ("class A(Agent):\n    def stop(self): super()._shutdown()", "_shutdown"),
        ("version = tensor._version", "_version"),
        ("hidden = getattr(module, '_hidden', None)", "_hidden"),
        ("NAME = '_local_tensor'", "_local_tensor"),
        ("loaded = 'torch._dynamo' in sys.modules", "_dynamo"),
        # The table's names are torch's, whatever a file calls its own.
        ("class A:\n    def __init__(self, m): self._parameters = m._parameters", "_parameters"),
    ],
)
def test_a_private_name_outside_compat_is_found(text: str, name: str) -> None:
    assert found(text) == [name]


@pytest.mark.parametrize(
    "text",
    [
        "from drivetrain_a._nested import leaves\nimport _socket",
        "class A:\n    def _own(self): ...\n    def same(self, other): return other._own() and self._own()",
        "class A(Base):\n    def same(self): return self._of_base",
        "wide = wide._replace(size=2)\nsuper().__init__()\nmodel.__torch_function__(_, __)",
        "kept = getattr(model, '_no_split_modules', ())",
        "state['_growth_tracker'] = '_unlisted'",
    ],
)
def test_what_is_a_files_own_or_documented_is_fine(text: str) -> None:
    assert found(text, beside="class Base:\n    def __init__(self): self._of_base = 1") == []


def test_a_class_uses_what_a_class_of_another_package_keeps_for_those_that_extend_it() -> None:
    text = "from drivetrain_b.base import Base\nclass A(Base):\n    def same(self, o): return self._of_base, o._of_it"
    base = parse(
        "packages/b/src/drivetrain_b/base.py", "class Base:\n    def __init__(self): self._of_base = 1"
    )
    (finding,) = private_names([parse(ROOM, text), base], TABLE)
    assert finding.message.startswith("_of_it is private")


def test_compat_may_use_private_names_that_the_table_lists() -> None:
    text = "import torch._dynamo\nversion = tensor._version\nNAMES = ('_parameters', '_A__local_tensor')"
    assert found(text, COMPAT, table=TABLE.replace("`_local", "`__local")) == []


def test_a_private_name_without_a_row_in_the_table_is_found() -> None:
    text = "version = tensor._version\ncount = tensor._use_count()\nNAME = '_start'"
    assert sorted(found(text, COMPAT)) == ["_start", "_use_count"]


def test_every_exception_has_its_reason() -> None:
    assert all(reason for reason in (*ALLOWED_NAMES.values(), *ALLOWED_FILES.values()))
    assert found("torch._dynamo", next(iter(ALLOWED_FILES))) == []
