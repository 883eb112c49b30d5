"""Reads its overrides with hydra itself: its parser, its composition, OmegaConf's interpolation."""

import seen
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

written = {o.input_line.partition("=")[0]: o for o in OverridesParser.create().parse_overrides(seen.MINE)}
config = OmegaConf.create()
for name in seen.KEYS:
    if not name.startswith("+"):
        OmegaConf.update(config, name, None, force_add=True)
ConfigStore.instance().store(name="config", node=config)
with initialize(version_base=None, config_path=None):
    found = compose("config", overrides=seen.MINE)


def told(name):
    """Return a value as it was composed; for a number the text that hydra made it of."""
    value = OmegaConf.select(found, name.lstrip("+"))
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = written[name].get_value_string()
        if repr(type(value)(text)) != repr(value):
            raise SystemExit(f"hydra made {value!r} of {text!r}")
        return text
    return value


seen.tell({name: told(name) for name in seen.KEYS})
