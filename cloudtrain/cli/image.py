"""cloudtrain image: build and push the image of the shared trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from cloudtrain.cli.view import options, terminal
from cloudtrain.errors import BadRequest


class _Place(NamedTuple):
    """The target that an image is for."""

    name: str
    backend: str
    options: Mapping[str, Any]


kind_option = click.option(
    "--kind",
    type=click.Choice(("cpu", "gpu")),
    help="Install torch for CPUs, or for NVIDIA GPUs. Default: cpu for targets whose results stay on this machine, else gpu.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.option("--debug", is_flag=True, hidden=True, expose_value=False)
def command() -> None:
    """Build and push the image of the shared trainer.

    It needs a checkout of cloudtrain and a running Docker engine.

    \b
    cloudtrain image build -t prod
    cloudtrain image push -t prod
    cloudtrain image push -t cluster --to ghcr.io/my-team/trainer:1
    """


@command.command("build", cls=options.Command)
@options.target_option_with("Build the image for this target of cloudtrain.toml, or this backend. Default: local.")
@kind_option
def build(target: str | None, kind: str | None) -> int:
    """Build the image for a target, and print its name."""
    terminal.print_lines(_build(_find_place(target), kind))
    return 0


@command.command("push", cls=options.Command)
@options.target_option_with("Target of cloudtrain.toml whose jobs use the image; required.")
@kind_option
@click.option("--image", metavar="NAME", help="Push this local image instead of building one.")
@click.option(
    "--to",
    metavar="REGISTRY/NAME:TAG",
    help="Where to push. Default for SageMaker: the repository cloudtrain-train in the account's ECR; else required.",
)
def push(target: str | None, kind: str | None, image: str | None, to: str | None) -> int:
    """Build the shared trainer's image, push it, and set it in the target.

    The shared trainer is cloudtrain's own training program. The command writes the image's name and digest into
    cloudtrain.toml, as the key image of the target. For a SageMaker target the repository in ECR is created if it
    does not exist, and docker is logged in to it for 12 hours. To push to any other registry, run `docker login`
    for it first."""
    from cloudtrain.backends import registry, trainer_image
    from cloudtrain.backends.images import parse_reference
    from cloudtrain.job import configedit, targets

    if target is None:
        raise BadRequest("image push needs a target", "add -t TARGET, a target of cloudtrain.toml")
    place = _find_place(target)
    file = configedit.find_file(target, Path.cwd())
    configedit.check_key(file, target, "image")
    if "image" not in registry.backend_class(place.backend).options().model_fields:
        raise BadRequest(
            f"target {target}: the backend {place.backend} has no option image", "use a target of another backend"
        )
    backend = registry.create(place.backend, place.options, targets.home())
    login = None if to else backend.image_registry(trainer_image.NAME)  # before a build that takes minutes
    image = image or _build(place, kind)
    name = f"{login.host}/{trainer_image.NAME}:{parse_reference(image).tag}" if login else str(to)
    pinned = trainer_image.push(image, name, login, terminal.note)
    configedit.set_key(file, target, "image", pinned)
    terminal.print_lines(f'image = "{pinned}" is written to [targets.{target}] in {file}')
    return 0


def _find_place(target: str | None) -> _Place:
    from cloudtrain.backends import registry
    from cloudtrain.job import targets

    name = target or registry.DEFAULT
    named = targets.named_targets().get(name)
    if named:
        options = targets.options_of(named)
        return _Place(name, named.backend, options)
    registry.backend_class(name)
    return _Place(name, name, {})


def _build(place: _Place, kind: str | None) -> str:
    from cloudtrain.backends import registry, trainer_image

    kind = kind or ("cpu" if registry.traits(place.backend).writes_here else "gpu")
    return trainer_image.build(kind, toolkit=place.options.get("entry") == "toolkit")
