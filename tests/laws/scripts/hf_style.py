"""Reads its hyperparameters with the real HfArgumentParser."""

from dataclasses import field, make_dataclass

import seen
from transformers.hf_argparser import HfArgumentParser

TYPES = {"flag": bool, "list": list[str], "text": str}
fields = [(name, TYPES[kind], field(default=None)) for name, kind in seen.KEYS.items()]
(found,) = HfArgumentParser(make_dataclass("Arguments", fields)).parse_args_into_dataclasses(seen.MINE)
seen.tell(vars(found))
