"""Mask secrets in configurations, command lines and texts before they are written anywhere."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

MASK = "***"

# fmt: off
# Words of a name that say what its value is.
_SECRET_WORDS = frozenset({
    "password", "passwords", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials",
    "apikey", "apikeys", "authorization",
})
# "key" is a word of configurations too (primary_key, image_key), and counts behind a word that says whose it is.
_KEY_OWNERS = frozenset({
    "access", "account", "anthropic", "api", "auth", "aws", "azure", "client", "clearml", "comet", "deploy",
    "encryption", "gcp", "github", "gitlab", "google", "hf", "license", "master", "openai", "private",
    "secret", "service", "signing", "ssh", "storage", "swanlab", "wandb", "webhook",
})
# "token" is a word of vocabularies too (pad_token, loss_per_token): behind these it is no secret.
_VOCABULARY = frozenset({
    "additional", "audio", "begin", "bos", "boi", "boundary", "cls", "decoder", "end", "eoi", "eos", "eot",
    "extra", "first", "forced", "image", "last", "mask", "next", "pad", "padding", "per", "prefix", "sep",
    "separator", "special", "start", "stop", "suffix", "target", "think", "unk", "unknown", "video", "vision",
    "word",
})
_TOKENS_OWNERS = frozenset({
    "access", "api", "auth", "bearer", "github", "gitlab", "hf", "hub", "refresh", "session",
})
# fmt: on
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

# Secrets that tell themselves by their form.
_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}"
    r"|\bglpat-[A-Za-z0-9_-]{20,}|\bAKIA[A-Z0-9]{16}\b|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\b[Bb]earer\s+[A-Za-z0-9._~+/-]{8,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
# A name begins where no name can go on: a long text without spaces, such as a file in base64, is passed over once.
_ASSIGNMENT = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]+)(?P<between>[\"']?\s*[:=]\s*)"
    r"(?P<value>\"[^\"\n]+\"|'[^'\n]+'|[^\s\"',;]{4,})"
)
_FLAG = re.compile(r"(?<![\w-])(?P<name>--[A-Za-z][\w-]*)(?P<between>\s+)(?P<value>[^\s-]\S*)")


def is_secret_name(name: str) -> bool:
    """Return whether a name says that its value is a secret: api_keys, hf-token, DB_PASSWORD; not pad_token."""
    words = [word.lower() for word in _WORDS.findall(name)]
    for index, word in enumerate(words):
        owner = words[index - 1] if index else ""
        is_last = index == len(words) - 1
        if word in _SECRET_WORDS or (word in ("key", "keys") and owner in _KEY_OWNERS):
            return True
        if is_last and word == "token" and owner not in _VOCABULARY:
            return True
        if is_last and word == "tokens" and owner in _TOKENS_OWNERS:
            return True
    return False


def mask_config(value: Any) -> Any:
    """Return plain nested values with secrets masked, which are recognized by their name or form."""
    if isinstance(value, Mapping):
        return {
            name: MASK
            if is_secret_name(str(name)) and item not in (None, True, False, "")
            else mask_config(item)
            for name, item in cast("Mapping[Any, Any]", value).items()
        }
    if isinstance(value, list):
        return [mask_config(item) for item in cast("list[Any]", value)]
    return mask_text(value) if isinstance(value, str) else value


def mask_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the values of secret flags masked: `--api-key X` and `--api-key=X`."""
    masked: list[str] = []
    hides_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = is_secret_name(name) and (name.startswith("-") or bool(equals))
        if hides_next and not argument.startswith("-"):
            masked.append(MASK)
        else:
            masked.append(f"{name}={MASK}" if is_secret and equals else _mask_forms(argument))
        hides_next = is_secret and not equals
    return masked


def mask_text(text: str) -> str:
    """Return a text, such as a commit's changes, with secrets masked: values of secret names, and known forms."""

    def masked(found: "re.Match[str]") -> str:
        if not is_secret_name(found["name"]):
            return found[0]
        quote = found["value"][0] if found["value"][0] in "\"'" else ""
        return found["name"] + found["between"] + quote + MASK + quote

    return _FLAG.sub(masked, _ASSIGNMENT.sub(masked, _mask_forms(text)))


def _mask_forms(text: str) -> str:
    return _URL_PASSWORD.sub(MASK, _FORMS.sub(MASK, text))
