"""Draw `drivetrain --help`: the commands of the installed packages, under the topics that their modules name.

A command's topic is the `TOPIC` of its module, or of the nearest package around it that has one.
"""

from collections.abc import Mapping
from posixpath import commonpath

from drivetrain_config.plugins.installed import EntryPoint
from drivetrain_launcher.cli.help_page import Page
from drivetrain_launcher.module_summary import module_summary, module_topic

# The order of topics; others follow, by name.
_TOPICS = ("Run", "Plan", "Check", "Watch", "Checkpoints", "Set up")
# A group of more commands is a line, and lists them in a help of its own.
_MOST_MEMBERS = 6
_ABOUT = "Write a PyTorch training loop once; run it anywhere by changing the launch."


def first_words(found: Mapping[str, EntryPoint]) -> list[str]:
    """Return the names of commands and groups."""
    return list(dict.fromkeys(name.partition(".")[0] for name in found))


def members_of(found: Mapping[str, EntryPoint], group: str) -> dict[str, EntryPoint]:
    """Return the commands of a group, by name without the group's prefix."""
    prefix = f"{group}."
    return {full.removeprefix(prefix): point for full, point in found.items() if full.startswith(prefix)}


def overview(found: Mapping[str, EntryPoint], group: str, page: Page) -> str:
    """Return the help of all commands, or of a group's; `group` ends with a blank, or is empty."""
    topics: dict[str, list[tuple[str, str]]] = {}
    # Commands of one word stand before groups.
    for word in sorted(first_words(found), key=lambda name: (name not in found, name)):
        members = members_of(found, word)
        is_large = len(members) > _MOST_MEMBERS
        listed = {**({"": found[word]} if word in found else {}), **({} if is_large else members)}
        for member, point in sorted(listed.items()):
            row = (f"{word} {member.replace('.', ' ')}".rstrip(), module_summary(_module_of(point)))
            topics.setdefault("" if group else _topic_of({member: point}), []).append(row)
        if is_large:
            topics.setdefault(_topic_of(members), []).append(
                (f"{word} COMMAND", module_summary(_package_of(members)))
            )
    column = max(len(name) for rows in topics.values() for name, _ in rows) + 4
    order = sorted(topics, key=lambda topic: (topic not in _TOPICS, [*_TOPICS, topic].index(topic), topic))
    blocks = [
        f"usage: drivetrain {group}COMMAND [flags] ...",
        page.paragraph(module_summary(_package_of(found)) if group else _ABOUT),
        *(
            (f"{page.heading(topic)}\n" if topic else "") + page.rows(topics[topic], column=column)
            for topic in order
        ),
        f"drivetrain {group}COMMAND --help describes each.{'' if group else ' --version prints the version.'}",
    ]
    return "\n\n".join(blocks) + "\n"


def _module_of(point: EntryPoint) -> str:
    return point.value.partition(":")[0]


def _topic_of(points: Mapping[str, EntryPoint]) -> str:
    """Return the topic of a command, or of a group's commands together."""
    module = _package_of(points) if len(points) > 1 else _module_of(next(iter(points.values())))
    while module:
        if topic := module_topic(module):
            return topic
        module = module.rpartition(".")[0]
    return "More"


def _package_of(members: Mapping[str, EntryPoint]) -> str:
    """Return the package that contains the modules of all commands of a group."""
    folders = [_module_of(point).rpartition(".")[0].replace(".", "/") for point in members.values()]
    return commonpath(folders).replace("/", ".")
