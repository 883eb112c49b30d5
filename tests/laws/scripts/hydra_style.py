"""Reads its overrides by the rules of hydra's grammar (hydra itself is no dependency): quotes, lists, words, numbers."""

import re

import seen


def value(text):
    """Return the value that a text begins with, and the rest."""
    if text.startswith("["):
        items, text = [], text[1:]
        while not text.startswith("]"):
            item, text = value(text)
            items.append(item)
            text = text.removeprefix(",")
        return items, text[1:]
    if text.startswith("'"):
        closing = re.search(r"(?<!\\)(\\\\)*'", text[1:]) if text[1:2] != "'" else re.match("'", text[1:])
        inner, rest = text[1 : closing.end()], text[closing.end() + 1 :]
        inner = re.sub(r"(\\+)'", lambda m: "\\" * (len(m[1]) // 2) + "'", inner)
        inner = re.sub(r"(\\+)\Z", lambda m: "\\" * (len(m[1]) // 2), inner)
        # OmegaConf: an odd number of backslashes before ${ makes it text
        return re.sub(r"(\\+)\$\{", lambda m: "\\" * (len(m[1]) // 2) + "${", inner), rest
    plain = re.match(r"[^,\]]+", text)[0]
    if set(plain) & set("'\"\\{}()[]=: \t\n$"):
        raise SystemExit(f"hydra would not read {text!r}")
    return {"true": True, "false": False, "null": None}.get(plain, plain), text[len(plain) :]


found = dict.fromkeys(seen.KEYS)
for override in seen.MINE:
    name, _, text = override.partition("=")
    found[name], rest = value(text)
    if rest:
        raise SystemExit(f"hydra would not read {override!r}")
seen.tell(found)
