from dataclasses import dataclass

from transformers import HfArgumentParser


@dataclass
class Model:
    name: str = "tiny"
    layers: int = 2


print(HfArgumentParser(Model).parse_args_into_dataclasses())
