"""Write a manifest as YAML that readers of every YAML version read as the same text and numbers."""

import re
from typing import Any

import yaml

# Text that no version of YAML reads as anything but text. All other text is quoted: PyYAML alone would leave 1e3 and
# 0o17 bare, which Kubernetes' reader takes for numbers.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_]*([./-][A-Za-z0-9_]+)*", re.ASCII)
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes all text that could be read as something else."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent the items of lists too, as Kubernetes' own manifests do."""
        del indentless
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal parts out each time."""
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_Dumper.add_representer(str, _text)


def to_yaml(manifest: dict[str, Any]) -> str:
    """Return a manifest as YAML."""
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=110)
