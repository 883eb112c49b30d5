"""Hints name the command that installs beside cloudtrain: pip, pipx, uv or uv tool, as cloudtrain was installed."""

from __future__ import annotations

import pytest

from cloudtrain.errors import MissingExtra, install_command, reinstall_command, upgrade_command


@pytest.mark.parametrize(
    ("file", "text", "extra", "package"),
    [
        ("", "", "pip install 'cloudtrain[console]'", "pip install pandas"),
        ("pyvenv.cfg", "home = /usr/bin\nversion = 3.12\n", "pip install 'cloudtrain[console]'", "pip install pandas"),
        (
            "pyvenv.cfg",
            "home = /usr/bin\nuv = 0.9.5\n",
            "uv pip install 'cloudtrain[console]'",
            "uv pip install pandas",
        ),
        ("pipx_metadata.json", "{}", "pipx install --force 'cloudtrain[console]'", "pipx inject cloudtrain pandas"),
        (
            "uv-receipt.toml",
            "[tool]\n",
            "uv tool install --force 'cloudtrain[console]'",
            "uv tool install --force cloudtrain --with pandas",
        ),
    ],
)
def test_the_command_fits_the_environment(file, text, extra, package, tmp_path):
    if file:
        (tmp_path / file).write_text(text)
    assert install_command("cloudtrain[console]", str(tmp_path)) == extra
    assert install_command("pandas", str(tmp_path)) == package


def test_a_missing_extra_says_how_to_install_it():
    assert MissingExtra("the console", "console").hint == install_command("cloudtrain[console]")


@pytest.mark.parametrize(
    ("file", "text", "command"),
    [
        ("", "", "pip install -U cloudtrain"),
        ("pyvenv.cfg", "uv = 0.9.5\n", "uv pip install -U cloudtrain"),
        ("pipx_metadata.json", "{}", "pipx upgrade cloudtrain"),
        ("uv-receipt.toml", "[tool]\n", "uv tool upgrade cloudtrain"),
    ],
)
def test_the_upgrade_is_by_the_same_tool(file, text, command, tmp_path):
    if file:
        (tmp_path / file).write_text(text)
    assert upgrade_command(str(tmp_path)) == command


@pytest.mark.parametrize(
    ("file", "text", "command"),
    [
        ("", "", "pip install --force-reinstall cloudtrain"),
        ("pyvenv.cfg", "uv = 0.9.5\n", "uv pip install --reinstall cloudtrain"),
        ("pipx_metadata.json", "{}", "pipx reinstall cloudtrain"),
        ("uv-receipt.toml", "[tool]\n", "uv tool install --reinstall cloudtrain"),
    ],
)
def test_a_damaged_installation_is_replaced_by_the_same_tool(file, text, command, tmp_path):
    if file:
        (tmp_path / file).write_text(text)
    assert reinstall_command(str(tmp_path)) == command
