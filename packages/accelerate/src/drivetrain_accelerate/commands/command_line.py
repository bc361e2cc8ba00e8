"""Run drivetrain's counterparts of Accelerate's commands, in this process or a new one, and parse their flags.

The parsers serve programs that expect `argparse` parsers. They are made from dataclasses.
"""

import subprocess
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, get_args, get_origin, get_type_hints

from drivetrain_launcher.cli.main import main as run_drivetrain


def main() -> None:
    """Run the command that this process's command line names: `accelerate COMMAND ...`."""
    run_words(sys.argv[1:])


def run_words(words: Sequence[str]) -> None:
    """Run a command in this process; raise SystemExit with its exit code if it fails."""
    if code := run_drivetrain(["accelerate", *words]):
        raise SystemExit(code)


def program_of(command: str) -> Callable[[], None]:
    """Return the `main` of a command's module: a function that runs the command with this process's arguments."""
    return lambda: run_words([command, *sys.argv[1:]])


def words_of_process(words: Sequence[str]) -> list[str]:
    """Return the command line that runs a command in a new process."""
    return [sys.executable, "-m", "drivetrain_launcher", "accelerate", *words]


def run_apart(words: Sequence[str], *, is_quiet: bool = False) -> None:
    """Run a command in a new process, since the command may replace modules that this process has imported.

    If the command fails, raise CalledProcessError, or SystemExit if `is_quiet`.
    """
    command = words_of_process(words)
    done = subprocess.run(command, check=False)
    if done.returncode and is_quiet:
        raise SystemExit(done.returncode)
    done.check_returncode()


# argparse does not export the class of its groups.
_Group = type(ArgumentParser().add_argument_group())


def spellings(names: Sequence[str]) -> list[str]:
    """Return flags, and behind each flag with underscores the same flag with hyphens."""
    found: list[str] = []
    for name in names:
        found.append(name)
        if name.startswith("--") and "_" in name:
            found.append(name.replace("_", "-"))
    return list(dict.fromkeys(found))


class CustomArgumentGroup(_Group):
    """A group of flags that may be written with underscores or hyphens."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Action:
        """Add a flag; see `argparse.ArgumentParser.add_argument`."""
        return super().add_argument(*spellings(args), **kwargs)


class CustomArgumentParser(ArgumentParser):
    """A parser whose flags may be written with underscores or hyphens.

    The namespace's `nondefault` is the set of names that the command line sets. It leaves out flags that may be given
    several times.
    """

    def add_argument(self, *args: Any, **kwargs: Any) -> Action:
        """Add a flag; see `argparse.ArgumentParser.add_argument`. A switch without a default is None if not given."""
        if kwargs.get("action") == "store_true":
            kwargs.setdefault("default", None)
        return super().add_argument(*spellings(args), **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> Any:
        """Add a group of flags; see `argparse.ArgumentParser.add_argument_group`."""
        group: Any = super().add_argument_group(*args, **kwargs)
        group.__class__ = CustomArgumentGroup  # argparse has no way to say the class of its groups
        return group

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] argparse's overloads say the same
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse a command line; see `argparse.ArgumentParser.parse_known_args`."""
        found, rest = super().parse_known_args(args, namespace or Namespace())
        said, _ = super().parse_known_args(args, Namespace(**dict.fromkeys(vars(found), _UNSAID)))
        found.nondefault = {name for name, value in vars(said).items() if not isinstance(value, _Unsaid)}
        return found, rest


class _Unsaid(list[Any]):
    """The value of a flag that is not given; a flag that may be given several times appends to a copy."""


_UNSAID = _Unsaid()


def parser_of(
    command: str,
    arguments: type[Any],
    run: Callable[[Namespace], Any],
    subparsers: Any = None,
    not_in_accelerate: Sequence[str] = (),
) -> CustomArgumentParser:
    """Return a command's parser, made from the dataclass of its arguments; add it to `subparsers` if given.

    `drivetrain_launcher.cli.parser` describes the metadata of the fields.
    """
    about = (run.__doc__ or "").partition("\n")[0]
    if subparsers is None:
        parser = CustomArgumentParser(f"accelerate {command}", description=about)
    else:
        parser = subparsers.add_parser(command, description=about)
        parser.set_defaults(func=run)
    types = get_type_hints(arguments)
    for each in fields(arguments):
        if each.name not in not_in_accelerate:
            _add(parser, each.name, each.metadata, types[each.name], each.default)
    return parser


def _add(
    parser: CustomArgumentParser, name: str, metadata: Mapping[str, Any], kind: Any, default: Any
) -> None:
    text = str(metadata.get("help", "")).replace("%", "%%")
    flags = spellings([f"--{name}"])  # the parser of another program's subcommand may be any
    if metadata.get("positional"):
        optional = {} if default is MISSING else {"nargs": "?", "default": default}
        parser.add_argument(name, help=text, **optional)
    elif kind is bool:
        parser.add_argument(*flags, action="store_true", default=False, help=text)
    elif get_origin(kind) is tuple:
        choices = get_args(get_args(kind)[0]) or None
        parser.add_argument(*flags, nargs="+", choices=choices, default=list(default), help=text)
    else:
        parser.add_argument(
            *flags, default=None if default is MISSING else default, required=default is MISSING, help=text
        )


def arguments_of(kind: type[Any], args: Namespace) -> Any:
    """Return a command's dataclass with the parsed values."""
    given = {each.name: getattr(args, each.name, None) for each in fields(kind)}
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value is not None
        }
    )
